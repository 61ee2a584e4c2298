//! Flags of `banyan run` for virtio devices beside disks.

use api::config::{RngConfig, VmConfig, VsockConfig};
use clap::Args;

use super::keyed;

const HEADING: &str = "virtio devices";

#[derive(Debug, Args)]
pub(super) struct VirtioArguments {
    /// Sockets between guest and host; keys: cid, socket, id
    ///
    ///   cid=N                the guest's context id, 3 or more
    ///   socket=PATH          where programs of the host connect: they write
    ///                        `CONNECT PORT` and a newline, and read
    ///                        `OK PORT` when the guest has accepted; the
    ///                        guest's connections to port N go to PATH_N
    ///   id=NAME              name in trees [default: vsock0]
    #[arg(long, value_name = "KEY=VALUE...", value_parser = keyed::<VsockConfig>, help_heading = HEADING)]
    #[arg(verbatim_doc_comment)]
    vsock: Option<VsockConfig>,

    /// Random numbers, from /dev/urandom or --rng=DEVICE
    #[arg(long, value_name = "DEVICE", value_parser = keyed::<RngConfig>, help_heading = HEADING)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "/dev/urandom")]
    rng: Option<RngConfig>,
}

impl VirtioArguments {
    pub(super) fn apply(self, config: &mut VmConfig) {
        config.vsock = self.vsock;
        config.rng = self.rng;
    }
}
