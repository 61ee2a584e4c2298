//! `banyan cdi`: files of the Container Device Interface.

use std::path::PathBuf;
use std::str::FromStr;

use api::config::{CdiName, CdiNameError, DeviceConfig};
use clap::{Args, Subcommand, ValueEnum, ValueHint};

use super::keyed;
use crate::cliques::Policy;

/// `banyan cdi`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct CdiOptions {
    /// What to do.
    #[command(subcommand)]
    pub command: CdiCommand,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum CdiCommand {
    /// Write CDI files for the host's VFIO devices
    #[command(after_long_help = NOTES)]
    Generate(GenerateOptions),
}

/// `banyan cdi generate`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct GenerateOptions {
    /// Host functions, such as 0000:41:00.0,id=gpu0; keys: id, clique, attach [default: all that are bound to vfio-pci]
    #[arg(value_name = "DEVICE", value_parser = keyed::<DeviceConfig>)]
    pub devices: Vec<DeviceConfig>,
    /// A device, too; before those without the flag
    #[arg(long = "device", value_name = "DEVICE", value_parser = keyed::<DeviceConfig>)]
    pub given: Vec<DeviceConfig>,
    /// Directory for the files, such as /etc/cdi, or - for standard output
    #[arg(long, value_name = "DIR|-", default_value = "-", value_hint = ValueHint::DirPath)]
    pub output: PathBuf,
    /// yaml or json
    #[arg(long, value_name = "FORMAT", default_value = "yaml", hide_possible_values = true)]
    pub format: FileFormat,
    /// Kind of the devices (repeatable): one for all, or gpu=, nic=, nvswitch=, pair=, other= one of these
    ///
    /// Defaults by vendor: nvidia.com/pgpu, nvidia.com/nvswitch, mellanox.com/nic, nvidia.com/pgpu-nic for pairs, ...
    #[arg(long = "kind", value_name = "[WHAT=]VENDOR/CLASS")]
    pub kinds: Vec<KindFlag>,
    /// Names of devices without id: index (gpu0), address (0000:41:00.0) or group (71)
    #[arg(long, value_name = "HOW", default_value = "index", hide_possible_values = true)]
    pub names: Naming,
    /// GPUs of one clique: below one switch (auto), below one root complex, or off
    #[arg(long, value_name = "auto|root-complex|off", default_value = "auto", hide_possible_values = true)]
    pub cliques: CliquesFlag,
    /// A file of `banyan topology record` in place of this host
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub host: Option<PathBuf>,
}

/// How files are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FileFormat {
    /// YAML.
    Yaml,
    /// JSON.
    Json,
}

/// How devices are called that have no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Naming {
    /// What they are and a number.
    Index,
    /// By their address.
    Address,
    /// By their IOMMU group.
    Group,
}

/// `--cliques`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CliquesFlag {
    /// Below one switch.
    Auto,
    /// Below one root complex.
    RootComplex,
    /// None but those that are given.
    Off,
}

impl CliquesFlag {
    /// The rule.
    #[must_use]
    pub const fn policy(self) -> Policy {
        match self {
            Self::Auto => Policy::Switch,
            Self::RootComplex => Policy::RootComplex,
            Self::Off => Policy::Off,
        }
    }
}

/// What a device of a CDI file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum What {
    /// Display controllers and accelerators.
    Gpu,
    /// Network cards.
    Nic,
    /// NVIDIA's NVSwitches.
    Nvswitch,
    /// A GPU with a network card near it.
    Pair,
    /// Everything else.
    Other,
}

/// `--kind`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KindFlag {
    /// For which devices; `None` for all.
    pub what: Option<What>,
    /// Vendor and class.
    pub kind: String,
}

impl FromStr for KindFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (what, kind) = match text.split_once('=') {
            Some((what, kind)) => (
                Some(What::from_str(what, false).map_err(|_| format!("`{what}` is none of gpu, nic, nvswitch, pair, other"))?),
                kind,
            ),
            None => (None, text),
        };
        CdiName::new(kind, "x").map_err(|_: CdiNameError| format!("`{kind}` is no vendor and class, such as nvidia.com/pgpu"))?;
        Ok(Self { what, kind: kind.to_owned() })
    }
}

/// Text at the end of the long help.
const NOTES: &str = "\
One entry for each function, with the annotations bdf, clique-id (GPUs) and
attach-pci: true for what needs no PCI Express port of its own, as the audio and
USB functions of a graphics card and conventional PCI devices. GPUs and network
cards below one switch have a combined entry, too, for GPUDirect RDMA.

In DIR each kind has a file, banyan-VENDOR-CLASS.yaml; files that Banyan wrote
before are replaced, those of others are left alone, and a name that one of them
has already is refused. On standard output several kinds are several documents,
which readers take one by one: give --output DIR, or --kind for all.

Exit codes:
  0  the files are written
  1  an error; standard error says which
  2  the command line is wrong

Examples:
  banyan cdi generate --output /etc/cdi
  banyan cdi generate --kind nvidia.com/pgpu 0000:41:00.0 0000:3d:00.0
  banyan run --device nvidia.com/pgpu-nic=gpu0-nic0 ...";
