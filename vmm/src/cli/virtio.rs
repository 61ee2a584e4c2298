//! Flags of `banyan run` for virtio devices beside disks.

use api::config::{FsConfig, NetConfig, RngConfig, VmConfig, VsockConfig};
use clap::Args;

use super::keyed;

const HEADING: &str = "virtio devices";

#[derive(Debug, Args)]
pub(super) struct VirtioArguments {
    /// Network interface (repeatable) on a tap, such as tap0; keys: tap, mac, ...
    ///
    ///   tap=NAME             made if it is not there and this user may; a
    ///                        bare NAME is enough
    ///   mac=ADDRESS          the guest's [default: a random one]
    ///   queues=N             receive and transmit counted each [default: 2]
    ///   queue-size=N         entries of each, a power of two [default: 256]
    ///   mtu=N                largest packet, told to the guest
    ///   offload=on|off       checksums and large packets may be left to the
    ///                        other side [default: on]
    ///   id=NAME              name in trees [default: net0, net1, ...]
    #[arg(long = "net", value_name = "TAP[,KEY=VALUE...]", value_parser = keyed::<NetConfig>, help_heading = HEADING)]
    #[arg(verbatim_doc_comment)]
    nets: Vec<NetConfig>,

    /// Shared folder (repeatable), served by virtiofsd or the like; keys: socket, tag, ...
    ///
    ///   socket=PATH          where the server listens; a bare PATH is enough
    ///   tag=TEXT             what the guest mounts: mount -t virtiofs TEXT
    ///   queues=N             request queues [default: 1]
    ///   queue-size=N         entries of each [default: 1024]
    ///   id=NAME              name in trees [default: fs0, fs1, ...]
    ///
    /// The server maps the guest's memory: it needs --memory shared=on.
    #[arg(long = "fs", value_name = "SOCKET,tag=TEXT[,KEY=VALUE...]", value_parser = keyed::<FsConfig>, help_heading = HEADING)]
    #[arg(verbatim_doc_comment)]
    filesystems: Vec<FsConfig>,

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
        config.nets = self.nets;
        config.filesystems = self.filesystems;
        config.vsock = self.vsock;
        config.rng = self.rng;
    }
}
