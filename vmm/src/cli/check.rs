//! `banyan check`: what a person asks before a guest is given devices.

use std::path::PathBuf;

use api::config::{DeviceConfig, MemoryConfig, NvlinkMode, PcieConfig};
use clap::{Args, ValueHint};

use super::keyed;

/// `banyan check`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct CheckOptions {
    /// Devices of the guest, as for `banyan run`: an address such as 0000:03:00.0, /dev/vfio/N or a CDI name
    #[arg(value_name = "DEVICE", value_parser = keyed::<DeviceConfig>, required_unless_present = "given")]
    pub devices: Vec<DeviceConfig>,
    /// A device, too (repeatable); before those without the flag
    #[arg(long = "device", value_name = "DEVICE[,KEY=VALUE...]", value_parser = keyed::<DeviceConfig>)]
    pub given: Vec<DeviceConfig>,
    /// Memory of the guest, as for `banyan run` [default: limits are printed, not judged]
    #[arg(long, value_name = "SIZE[,KEY=VALUE...]", value_parser = keyed::<MemoryConfig>)]
    pub memory: Option<MemoryConfig>,
    /// Shape of the hierarchy, as for `banyan run` [default: topology=root-ports]
    #[arg(long, value_name = "KEY=VALUE...", value_parser = keyed::<PcieConfig>)]
    pub pcie: Option<PcieConfig>,
    /// Who sets up NVLink on a host with NVSwitches: full, shared or off [default: judged by the devices]
    ///
    ///   full                 the guest, which has all GPUs and NVSwitches
    ///   shared               Fabric Manager on the host or in a service VM,
    ///                        where the NVSwitches stay
    ///   off                  nobody: the guest uses no NVLink
    #[arg(long, value_name = "MODE", value_parser = str::parse::<NvlinkMode>, verbatim_doc_comment)]
    pub nvlink: Option<NvlinkMode>,
    /// Directory with CDI files (repeatable), as for `banyan run`
    #[arg(long = "cdi-dir", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub cdi_dirs: Vec<PathBuf>,
    /// A file of `banyan topology record` in place of this host
    ///
    /// Kernel, memory and device nodes of that host are not in the file, and are not judged.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub host: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Text at the end of the long help.
pub(super) const NOTES: &str = "\
It reads and prints; it changes nothing on the host, and opens no device. Run it
as root: other users cannot read the registers that decide (ACS, ATS).

Ways between two devices:
  direct         through the switch above both, without the root complex
  root complex   up and down again: correct, and slower
  impossible     requests are errors
  not known      the registers could not be read

Exit codes:
  0  all devices can be passed through, all ways are direct, no warnings
  1  it works, with a warning or a way that is not direct
  2  a device cannot be passed through, a way is impossible, or the host
     cannot be read

Example:
  banyan check --memory 64G,hugepages=1G --device 0000:03:00.0,id=gpu0 \\
      --device 0000:04:00.0,id=nic0";
