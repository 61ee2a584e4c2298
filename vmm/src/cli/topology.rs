//! `banyan topology`: what a person can ask about a hierarchy that no guest has yet.

use std::path::PathBuf;

use api::config::{DeviceConfig, PcieConfig};
use clap::{Args, Subcommand, ValueEnum, ValueHint};

use super::keyed;

/// `banyan topology`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct TopologyOptions {
    /// What to do.
    #[command(subcommand)]
    pub command: TopologyCommand,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum TopologyCommand {
    /// Print this host as a file that --host takes in place of a host
    ///
    /// JSON with each PCI function: address, bridge above, ids, BARs, link, access control (ACS), address translation (ATS),
    /// atomic operations, virtual functions, NUMA node, IOMMU group, driver; and with the NUMA nodes. Serial numbers are left
    /// out. Run it as root: other users cannot read all registers, and links then come from sysfs attributes.
    #[command(after_long_help = CODES)]
    Record,
    /// Print a host's hierarchy with link speeds and NUMA nodes, or that of a guest that runs
    #[command(after_long_help = CODES)]
    Show {
        /// tree, json, dot (for Graphviz), svg (a picture) or nccl (for NCCL_TOPO_FILE)
        #[arg(long, value_name = "FORMAT", default_value = "tree", hide_possible_values = true)]
        format: Format,
        /// A file of `banyan topology record`, or a copy of /sys, in place of this host
        #[arg(long, value_name = "FILE", value_hint = ValueHint::AnyPath)]
        host: Option<PathBuf>,
        /// Socket of a process that runs a guest: its hierarchy as it is at this moment
        #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath, conflicts_with = "host")]
        api_socket: Option<PathBuf>,
    },
    /// Print what a guest with the given devices would see, without starting it
    ///
    /// The devices need no driver and no permission: nothing is opened. With --pcie there need be none: ports alone can be asked
    /// about.
    #[command(after_long_help = CODES)]
    Plan {
        /// tree, json, dot (for Graphviz), svg (a picture) or nccl (for NCCL_TOPO_FILE)
        #[arg(long, value_name = "FORMAT", default_value = "tree", hide_possible_values = true)]
        format: Format,
        /// The guest.
        #[command(flatten)]
        guest: GuestArguments,
        /// As for `banyan run --device`: an address such as 0000:03:00.0, and keys such as id and clique
        #[arg(value_name = "DEVICE", value_parser = keyed::<DeviceConfig>, required_unless_present_any = ["given", "pcie"])]
        devices: Vec<DeviceConfig>,
    },
    /// Print in what a guest with the given devices would differ from the host, register by register
    ///
    /// What differs without being meant to is marked with `!`. With --pcie there need be no devices, as with `plan`.
    #[command(after_long_help = COMPARISON_CODES)]
    Diff {
        /// text or json
        #[arg(long, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
        format: DiffFormat,
        /// The guest.
        #[command(flatten)]
        guest: GuestArguments,
        /// As for `banyan run --device`: an address such as 0000:03:00.0, and keys such as id and clique
        #[arg(value_name = "DEVICE", value_parser = keyed::<DeviceConfig>, required_unless_present_any = ["given", "pcie"])]
        devices: Vec<DeviceConfig>,
    },
    /// Print how close devices are, pair by pair, as `nvidia-smi topo -m` does
    ///
    /// Without devices: the GPUs, network cards and NVMe drives of the host. With devices: these on the host and, beside it,
    /// in a guest that has them, with the pairs that differ.
    #[command(after_long_help = COMPARISON_CODES)]
    Matrix {
        /// The guest.
        #[command(flatten)]
        guest: GuestArguments,
        /// As for `banyan run --device`: an address such as 0000:03:00.0, and keys such as id and clique
        #[arg(value_name = "DEVICE", value_parser = keyed::<DeviceConfig>)]
        devices: Vec<DeviceConfig>,
    },
}

/// Which guest, of which host.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct GuestArguments {
    /// Shape of the hierarchy, as for `banyan run --pcie` [default: topology=host]
    #[arg(long, value_name = "KEY=VALUE...", value_parser = keyed::<PcieConfig>)]
    pub pcie: Option<PcieConfig>,
    /// A device, too; before those without the flag
    #[arg(long = "device", value_name = "DEVICE", value_parser = keyed::<DeviceConfig>)]
    pub given: Vec<DeviceConfig>,
    /// A file of `banyan topology record`, or a copy of /sys, in place of this host
    #[arg(long, value_name = "FILE", value_hint = ValueHint::AnyPath)]
    pub host: Option<PathBuf>,
}

/// How a hierarchy is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// As `lspci -tv` draws it.
    Tree,
    /// JSON, nested as the hierarchy is.
    Json,
    /// For Graphviz.
    Dot,
    /// A picture.
    Svg,
    /// A topology file for NCCL.
    Nccl,
}

/// How a comparison is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DiffFormat {
    /// What differs.
    Text,
    /// All that was compared.
    Json,
}

/// Text at the end of the long help of `record`, `show` and `plan`.
const CODES: &str = "\
Exit codes:
  0  it was printed
  1  an error; standard error says which
  2  the command line is wrong";

/// Text at the end of the long help of `diff` and `matrix`.
const COMPARISON_CODES: &str = "\
Exit codes:
  0  it was printed, whether or not something differs
  1  an error; standard error says which
  2  the command line is wrong";

/// Text at the end of the long help.
pub(super) const NOTES: &str = "\
Exit codes:
  0  it was printed, whether or not `diff` or `matrix` found that
     something differs
  1  an error; standard error says which
  2  the command line is wrong

Examples:
  Take a host along, and plan for it elsewhere:
    banyan topology record > host.json
    banyan topology show --host host.json
    banyan topology plan --host host.json --format svg \\
        0000:03:00.0,id=gpu0,clique=0 0000:04:00.0,id=nic0 > guest.svg

  What such a guest would read from other registers than the host:
    banyan topology diff --host host.json 0000:03:00.0 0000:04:00.0

  Whether a guest would find its devices as close as the host does:
    banyan topology matrix 0000:03:00.0 0000:04:00.0";
