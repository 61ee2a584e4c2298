//! Decides whether the GPUs of a guest can set up NVLink: on a host with NVSwitches, CUDA fails with error 802 until somebody
//! has configured the fabric, and who that is depends on what the guest was given. Pure.

use std::fmt;

use api::config::NvlinkMode as Mode;
use pci::address::HostBdf;

use super::report::Severity;
use crate::cliques::{NVIDIA, takes_part};
use crate::host::tree::{HostNode, HostTree};

/// What comes of the fabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fabric {
    /// It can be set up.
    Good(Mode),
    /// Nobody said who sets it up.
    Undeclared {
        /// NVSwitches that the host keeps.
        switches: Vec<HostBdf>,
    },
    /// Some of what has to be in one guest is missing.
    Incomplete {
        /// GPUs and NVSwitches that the guest lacks.
        missing: Vec<HostBdf>,
    },
    /// The guest has NVSwitches that must stay where Fabric Manager runs.
    Surplus {
        /// Which.
        switches: Vec<HostBdf>,
    },
}

/// An NVSwitch: a bridge of NVIDIA that is none to other buses.
#[must_use]
pub fn is_nvswitch(node: &HostNode) -> bool {
    node.ids.vendor == NVIDIA && node.ids.class.base_and_sub() == 0x0680
}

/// Judges the devices of a guest; `None` where there is no fabric to speak of.
#[must_use]
pub fn judge(tree: &HostTree, given: &[HostBdf], declared: Option<Mode>) -> Option<Fabric> {
    let all = |wanted: fn(&HostNode) -> bool| tree.functions.values().filter(move |node| wanted(node)).map(|node| node.at);
    let missing = |wanted| all(wanted).filter(|at| !given.contains(at)).collect::<Vec<_>>();
    let have = |wanted| all(wanted).filter(|at| given.contains(at)).collect::<Vec<_>>();
    let (gpus, switches) = (have(takes_part), have(is_nvswitch));
    let kept = missing(is_nvswitch);
    if switches.is_empty() && (kept.is_empty() || gpus.is_empty()) {
        return None;
    }
    let lacking: Vec<HostBdf> = missing(takes_part).into_iter().chain(kept.iter().copied()).collect();
    Some(match declared {
        Some(Mode::Off) => Fabric::Good(Mode::Off),
        Some(Mode::Shared) if switches.is_empty() => Fabric::Good(Mode::Shared),
        // All NVSwitches alone make the service VM in which Fabric Manager runs.
        Some(Mode::Shared) | None if gpus.is_empty() && kept.is_empty() => Fabric::Good(Mode::Shared),
        Some(Mode::Shared) => Fabric::Surplus { switches },
        Some(Mode::Full) | None if lacking.is_empty() => Fabric::Good(Mode::Full),
        None if switches.is_empty() => Fabric::Undeclared { switches: kept },
        Some(Mode::Full) | None => Fabric::Incomplete { missing: lacking },
    })
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |addresses: &[HostBdf]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Good(Mode::Full) => write!(f, "the guest has all GPUs and NVSwitches; Fabric Manager runs in the guest"),
            Self::Good(Mode::Shared) => write!(
                f,
                "the NVSwitches are where Fabric Manager runs (FABRIC_MODE=1); a partition of exactly these GPUs must be active before \
                 the guest starts"
            ),
            Self::Good(Mode::Off) => {
                write!(f, "NVLink is not used; the guest's driver must be told so (NVreg_NvLinkDisable=1)")
            }
            Self::Undeclared { switches } => write!(
                f,
                "the host keeps the NVSwitches {}, and nobody says who sets up the fabric: CUDA fails with error 802 until \
                 somebody does",
                list(switches)
            ),
            Self::Incomplete { missing } => {
                write!(f, "a guest with NVSwitches needs all GPUs and all NVSwitches; missing are {}", list(missing))
            }
            Self::Surplus { switches } => {
                write!(f, "in shared mode the NVSwitches stay where Fabric Manager runs; the guest has {}", list(switches))
            }
        }
    }
}

impl Fabric {
    /// How much it matters.
    #[must_use]
    pub const fn severity(&self) -> Severity {
        match self {
            Self::Good(_) => Severity::Note,
            Self::Undeclared { .. } => Severity::Warning,
            Self::Incomplete { .. } | Self::Surplus { .. } => Severity::Problem,
        }
    }

    /// What to do about it.
    #[must_use]
    pub const fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Good(_) => None,
            Self::Undeclared { .. } => Some(
                "add the NVSwitches and all GPUs, or declare --nvlink shared (Fabric Manager of the host or a service VM) or \
                 --nvlink off",
            ),
            Self::Incomplete { .. } => {
                Some("add what is missing, or leave the NVSwitches out and declare --nvlink shared or off")
            }
            Self::Surplus { .. } => Some("leave them out, or declare --nvlink full with all GPUs and NVSwitches"),
        }
    }
}
