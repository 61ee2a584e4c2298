//! `banyan config`: what a person can ask about the file that holds for machines of API clients.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

/// `banyan config`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct ConfigOptions {
    /// What to do.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum ConfigCommand {
    /// Say what is wrong with the file, or that nothing is: exit code 1, or 0
    Check {
        /// The file [default: that of BANYAN_CONFIG, else /etc/banyan/config.toml]
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
    /// Print what holds, with built-in values where the file says nothing
    Show {
        /// The file [default: that of BANYAN_CONFIG, else /etc/banyan/config.toml]
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
}

/// Text at the end of the long help.
pub(super) const NOTES: &str = "\
The file holds for machines that clients of the HTTP API create (banyan --api-socket), not for `banyan run`. It is
/etc/banyan/config.toml, or what BANYAN_CONFIG names; without one the defaults hold. A table may have:

  [pcie]      the keys of `banyan run --pcie`, such as topology = \"host\" or
              virtio = \"ports\", with their defaults; bus0-free is 16 with
              place = \"bus0\"
  [hot-plug]  place = \"bus0\" | \"ports\": where devices go that come while
              the guest runs and name no port [default: bus0]
  [cdi]       dirs = [\"/etc/cdi\", \"/var/run/cdi\"]
  [memory]    hugepage-size = \"2M\" | \"1G\" for clients that ask for huge pages
              and name no size; prefault-threads = N; premap = true: memory is
              touched in the background from the start on [default: false]
  [numa]      host-nodes = [0, 1]: machines that say no `numa` get a memory
              node for each of these nodes of the host, with equal parts of
              memory and vCPUs [default: none]; policy = \"bind\" |
              \"preferred\" and pin = true | false as for `banyan run --numa`
  [guest]     reset = \"reboot\" | \"exit\": what follows a guest's reset
              [default: exit]
  [boot]      answer-after = SECONDS: vm.boot is answered by then, counted from
              vm.create, even if memory is still being prepared [default: 6]
  [[device]]  host = \"0000:41:00.0\"; on = \"PORT\", clique = 0 to 15,
              clique-any-vendor = true: holds where a request says nothing

A file that is wrong does not keep the process from starting: vm.create is answered with the reason.

Exit codes:
  0  the file can be used
  1  it cannot; standard error says why
  2  the command line is wrong";
