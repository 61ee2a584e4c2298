//! Why a device cannot come or go, and how the API tells it.

use api::config::{HostPorts, PcieConfig, TopologyPolicy};
use api::error::{ApiError, ErrorKind};
use pci::bar::Size;
use pci::hierarchy::{Missing, PlugError, PortList, Shortfall, Space};
use pci::topology::{Name, TopologyError};
use thiserror::Error;

use super::choice::Refusals;
use crate::backends::BackendError;
use crate::cdi::CdiError;
use crate::endpoints::FunctionError;
use crate::host::HostError;
use crate::spec::{BesideError, SpecError};

/// A device that cannot come or go.
#[derive(Debug, Error)]
pub enum HotPlugError {
    /// The name is taken.
    #[error("there is a device {name} already: give another id, or remove it first")]
    Taken {
        /// The name.
        name: Name,
    },
    /// The name is still taken.
    #[error("device {name} is being removed: add it when the guest has let go of it, or give another id")]
    StillLeaves {
        /// The name.
        name: Name,
    },
    /// The MAC address is still taken.
    #[error(
        "the network interface {name}, which has this MAC address, is being removed: add the new one when the guest has let go of \
         it, or give another address"
    )]
    InterfaceLeaves {
        /// The one that leaves.
        name: Name,
    },
    /// A port has the name.
    #[error("{name} is the name of a port: give another id")]
    NamedAsPort {
        /// The name.
        name: Name,
    },
    /// The first devices of the host come, and memory cannot be made ready for them.
    #[error("devices of the host cannot reach the guest's memory: {why}")]
    Unreached {
        /// Why, with its causes.
        why: String,
    },
    /// A place that is promised to another device.
    #[error("port {port} is promised to device {by}, which waits until it can reach memory: name another port")]
    Promised {
        /// The port.
        port: Name,
        /// Whose it will be.
        by: Name,
    },
    /// The machine ended first.
    #[error("the machine ended before the device came")]
    Ended,
    /// No device number is free.
    #[error("no device number is free on the bus of {on}: remove a device first, or name another place (`on`); {ports}")]
    BusFull {
        /// The root complex or bridge.
        on: Name,
        /// What there is.
        ports: PortList,
    },
    /// A device number that cannot be had.
    #[error(
        "device number {device} of the bus of {on} is taken, or none of {least} to {last}: leave it out, or take another; {ports}",
        last = numbers.saturating_sub(1)
    )]
    Number {
        /// Asked for.
        device: u8,
        /// The root complex or bridge.
        on: Name,
        /// Lowest number that takes devices.
        least: u8,
        /// One more than the highest.
        numbers: u8,
        /// What there is.
        ports: PortList,
    },
    /// Virtual functions that no guest could enable.
    #[error(
        "virtual functions could not be enabled on the bus of {on}: name a hot-plug port (`on=`), or leave out `vfs`; {ports}"
    )]
    VirtualFunctions {
        /// The root complex or bridge.
        on: Name,
        /// What there is.
        ports: PortList,
    },
    /// No conventional bus takes devices.
    #[error("no conventional bus takes devices: start the machine with --pcie hot-plug=bridge-port; {ports}")]
    NoBridge {
        /// What there is.
        ports: PortList,
    },
    /// What a virtio device uses of the host.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// No function at all.
    #[error("a device without functions cannot be added")]
    Nothing,
    /// Another device than the first.
    #[error(
        "a device that is added becomes device 0 below its port, not device {device}: leave out `device`, which is for conventional buses"
    )]
    Place {
        /// Device number asked for.
        device: u8,
    },
    /// Functions that form no device.
    #[error(
        "functions {numbers} are no device: software looks for function 0 first, and each number can be there once; leave out `function` for a device with one"
    )]
    Numbers {
        /// Numbers asked for, in this order.
        numbers: String,
    },
    /// A function number that only a device with alternative routing IDs has.
    #[error(
        "function {number} cannot be added: functions of a device that comes are 0 to 7; give it at the start, or another number"
    )]
    Function {
        /// Asked for.
        number: u8,
    },
    /// Functions at several ports.
    #[error("the functions of one device cannot be on both {one} and {other}: leave out `on` but for the first")]
    Ports {
        /// One port.
        one: String,
        /// Another one.
        other: String,
    },
    /// The host function is in this machine already.
    #[error("device {name} is the host function that this machine has as {there}")]
    Twice {
        /// The new one.
        name: Name,
        /// The one that is there.
        there: Name,
    },
    /// The host function is in this machine still.
    #[error("device {name} is the host function that is being removed as {there}: add it when the guest has let go of it")]
    StillHas {
        /// The new one.
        name: Name,
        /// The one that leaves.
        there: Name,
    },
    /// More than one function.
    #[error(
        "{device} stands for {functions} host functions that are not one device with a function 0: add them one by one, by their addresses"
    )]
    Several {
        /// As given.
        device: String,
        /// How many.
        functions: usize,
    },
    /// CDI files.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// No device of that name.
    #[error("there is no device {name}; `banyan ctl list` shows those that there are")]
    Unknown {
        /// The name.
        name: Name,
    },
    /// A second request.
    #[error("device {name} is being removed already")]
    LeavesAlready {
        /// The name.
        name: Name,
    },
    /// Something that the machine works with.
    #[error("device {name} is a part of the machine: disks, interfaces, folders, sockets and devices given one by one can leave")]
    Kept {
        /// The name.
        name: Name,
    },
    /// No slot that it could leave.
    #[error(
        "device {name} hangs on no hot-plug port and stays until the machine ends: {advice}",
        advice = match cold_removal {
            false => "start the machine with --pcie cold-removal=on",
            true => "cold removal cannot take it, for a port is of the same device or too many others can leave; give it a hot-plug port (`on=`)",
        }
    )]
    Fixed {
        /// The name.
        name: Name,
        /// The machine was started with cold removal.
        cold_removal: bool,
    },
    /// No port of that name.
    #[error("there is no port {wanted}; {ports}")]
    NoPort {
        /// Asked for.
        wanted: String,
        /// What there is.
        ports: PortList,
    },
    /// All ports are taken.
    #[error("no hot-plug port is free: remove a device, or start the machine with more ({more}); {ports}")]
    NoneFree {
        /// Options that make more, as [`more_ports`] has them.
        more: &'static str,
        /// What there is.
        ports: PortList,
    },
    /// Ports are free and none does.
    #[error("no free port does for the device: {refusals}; {}", keep_more(&refusals.missing()))]
    NoneFits {
        /// Why.
        refusals: Refusals,
    },
    /// The port keeps less than the device needs.
    #[error("{refusal}; {advice}", advice = keep_more(missing))]
    NoRoom {
        /// What is missing, and what there is.
        refusal: Box<PlugError>,
        /// In which windows.
        missing: Shortfall,
    },
    /// The port refuses.
    #[error(transparent)]
    Plug(PlugError),
    /// The host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The device's configuration.
    #[error(transparent)]
    Spec(SpecError),
    /// A name of the wrong form.
    #[error(transparent)]
    Name(TopologyError),
    /// A device that is there already in its way.
    #[error(transparent)]
    Beside(#[from] BesideError),
    /// The function.
    #[error(transparent)]
    Make(#[from] FunctionError),
}

impl From<PlugError> for HotPlugError {
    fn from(refusal: PlugError) -> Self {
        match &refusal {
            PlugError::NoRoom { missing, .. } => Self::NoRoom { missing: missing.clone(), refusal: Box::new(refusal) },
            _ => Self::Plug(refusal),
        }
    }
}

/// Options that give a machine with `pcie` more ports that take devices, without those that it has.
pub(super) const fn more_ports(pcie: PcieConfig) -> &'static str {
    match (pcie.topology, pcie.host_ports) {
        (TopologyPolicy::Host, HostPorts::Used) => {
            "--pcie host-ports=switches or host-ports=all, or root-ports=N without hot-plug=bridge-port"
        }
        (TopologyPolicy::Host, HostPorts::Switches) => "--pcie host-ports=all, or root-ports=N without hot-plug=bridge-port",
        _ => "--pcie root-ports=N without hot-plug=bridge-port",
    }
}

/// Options with which a port keeps what is `missing`.
fn keep_more(missing: &Shortfall) -> String {
    let key = |space| match space {
        Space::Memory => Some("mem32"),
        Space::Prefetchable => Some("mem"),
        Space::Numbers => Some("buses"),
        Space::Low | Space::High => None,
    };
    let value = |missing: &Missing| match missing.of {
        Space::Numbers => missing.enough.to_string(),
        // Windows come in steps of 1 MiB.
        _ => Size(missing.enough.checked_next_multiple_of(1 << 20).unwrap_or(missing.enough)).to_string(),
    };
    let options = missing.0.iter().filter_map(|missing| Some(format!("hotplug-{}={}", key(missing.of)?, value(missing))));
    let options: Vec<String> = options.collect();
    if options.is_empty() {
        return "a machine that is started with more ports (--pcie root-ports=N) has some for more devices".to_owned();
    }
    format!("a machine that is started with --pcie {} keeps enough on each port", options.join(","))
}

impl HotPlugError {
    /// As the API tells it.
    #[must_use]
    pub fn for_client(&self) -> ApiError {
        let kind = match self {
            Self::Unknown { .. } | Self::NoPort { .. } => ErrorKind::NotFound,
            Self::Taken { .. }
            | Self::StillLeaves { .. }
            | Self::InterfaceLeaves { .. }
            | Self::NamedAsPort { .. }
            | Self::Twice { .. }
            | Self::StillHas { .. }
            | Self::LeavesAlready { .. }
            | Self::NoneFree { .. }
            | Self::NoneFits { .. }
            | Self::BusFull { .. }
            | Self::Promised { .. }
            | Self::Ended
            | Self::Number { .. }
            | Self::NoBridge { .. }
            | Self::NoRoom { .. }
            | Self::Plug(_) => ErrorKind::Conflict,
            Self::Beside(error) => error.kind(),
            Self::Nothing
            | Self::VirtualFunctions { .. }
            | Self::Place { .. }
            | Self::Numbers { .. }
            | Self::Function { .. }
            | Self::Ports { .. }
            | Self::Fixed { .. }
            | Self::Kept { .. }
            | Self::Several { .. }
            | Self::Cdi(_)
            | Self::Host(_)
            | Self::Backend(_)
            | Self::Name(_)
            | Self::Spec(_) => ErrorKind::BadRequest,
            Self::Make(error) => error.kind(),
            Self::Unreached { .. } => ErrorKind::Internal,
        };
        ApiError::from_error(kind, self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_stays_gets_no_advice_that_was_followed_already() {
        let told = |cold_removal| HotPlugError::Fixed { name: Name::from("a"), cold_removal }.to_string();
        assert!(told(false).contains("start the machine with --pcie cold-removal=on"), "{}", told(false));
        assert!(!told(true).contains("cold-removal=on") && told(true).contains("hot-plug port (`on=`)"), "{}", told(true));
    }

    #[test]
    fn ports_are_advised_that_the_machine_does_not_have() {
        let told = |pcie: &str| more_ports(pcie.parse().unwrap());
        for (pcie, there, missing) in [
            ("root-ports", "root-ports=N", "host-ports"),
            ("host", "host-ports=switches or host-ports=all", "topology"),
            ("host,host-ports=switches", "host-ports=all", "host-ports=switches"),
            ("host,host-ports=all", "root-ports=N", "host-ports"),
        ] {
            let told = told(pcie);
            assert!(told.contains(there) && !told.contains(missing), "{pcie}: {told}");
        }
    }

    #[test]
    fn a_name_of_the_wrong_form_is_the_clients_mistake_and_a_place_that_is_taken_a_conflict() {
        let name = Name::from("../x").check().map_err(HotPlugError::Name).unwrap_err();
        assert_eq!(name.for_client().kind, ErrorKind::BadRequest);
        let taken = HotPlugError::from(BesideError::Vsock { there: Name::from("vsock0") });
        assert_eq!(taken.for_client().kind, ErrorKind::Conflict);
        let path = "/nonexistent".into();
        let source = std::io::Error::from(std::io::ErrorKind::NotFound);
        let missing = HotPlugError::Make(BackendError::Disk { path, readonly: false, source }.into());
        assert_eq!(missing.for_client().kind, ErrorKind::BadRequest);
    }
}
