//! Flags of `banyan run` for virtio devices beside disks.

use api::config::flags::FlagProblem;
use api::config::{BalloonConfig, FsConfig, NetConfig, OutputConfig, RngConfig, VmConfig, VsockConfig};
use clap::Args;

use super::keyed;

const HEADING: &str = "Further devices";

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
    ///   vhost-user=SOCKET    in place of tap: a process that serves the
    ///                        interface listens there. It maps the guest's
    ///                        memory: --memory shared=on
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

    /// Console hvc0, which takes the places of --serial [default: none]
    ///
    /// It costs one exit for a line where the serial port costs one for a byte; the kernel prints there with `console=hvc0`.
    /// Of two devices at stdio the serial port gets the input.
    #[arg(long, value_name = "WHERE", value_parser = console, help_heading = HEADING)]
    console: Option<OutputConfig>,

    /// Memory that the guest gives back; keys: size, deflate-on-oom, free-page-reporting
    ///
    ///   size=SIZE            what it is asked to give back at first; `banyan
    ///                        ctl resize --balloon` changes it
    ///   deflate-on-oom=on    it may take memory back before it kills a
    ///                        process [default: off]
    ///   free-page-reporting=on
    ///                        it tells which pages it does not use, and the
    ///                        host takes them [default: off]
    ///
    /// With a device of the host nothing is given back: the device may write to any page.
    #[arg(long, value_name = "SIZE[,KEY=VALUE...]", value_parser = keyed::<BalloonConfig>, help_heading = HEADING)]
    #[arg(verbatim_doc_comment)]
    balloon: Option<BalloonConfig>,

    /// Watchdog (Intel 6300ESB, driver i6300esb) that resets a guest which stands still
    #[arg(long, help_heading = HEADING)]
    watchdog: bool,
}

fn console(text: &str) -> Result<OutputConfig, FlagProblem> {
    OutputConfig::parse("--console", text).map_err(|error| error.problem)
}

impl VirtioArguments {
    pub(super) fn apply(self, config: &mut VmConfig) {
        config.nets = self.nets;
        config.filesystems = self.filesystems;
        config.vsock = self.vsock;
        config.rng = self.rng;
        config.balloon = self.balloon;
        config.watchdog = self.watchdog;
        if let Some(console) = self.console {
            config.console = console;
        }
    }
}
