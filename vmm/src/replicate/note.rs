//! What is worth saying about a replica.

use std::fmt;

use pci::address::HostBdf;
use pci::link::Link;
use pci::topology::Name;

/// A difference between the copy and the host, or a guess.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The host tells nothing of a port's link, and nothing of those below.
    NoLink {
        /// The port.
        port: Name,
    },
    /// The lowest function given of a device is not function 0.
    Renumbered {
        /// The device.
        device: Name,
        /// Its function number on the host.
        from: u8,
    },
    /// A bridge to conventional PCI is not copied.
    BridgeLeftOut {
        /// The device below it.
        device: Name,
        /// The bridge.
        bridge: HostBdf,
    },
    /// A port that hangs where a guest cannot have one is not copied.
    PortLeftOut {
        /// The device below it.
        device: Name,
        /// The port.
        port: HostBdf,
    },
    /// The device shares a port on the host and has its own in the guest.
    OwnPort {
        /// The device.
        device: Name,
        /// The host port.
        beside: HostBdf,
    },
    /// Devices share a root port on the host; in the guest a switch stands for what they share.
    OwnSwitch {
        /// The switch.
        switch: Name,
    },
    /// The device is integrated into the root complex.
    Integrated {
        /// The device.
        device: Name,
        /// Where.
        at: HostBdf,
    },
    /// The guest meets the devices in another order than the one given.
    Order {
        /// The guest's order.
        met: Vec<Name>,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLink { port } => write!(f, "port {port} shows {}: the host does not tell its link", Link::default().max),
            Self::Renumbered { device, from } => {
                write!(
                    f,
                    "device {device} is function 0 in the guest and function {from} on the host, whose function 0 is not passed through"
                )
            }
            Self::BridgeLeftOut { device, bridge } => {
                write!(f, "device {device} stands below bridge {bridge} on the host, which is not copied")
            }
            Self::PortLeftOut { device, port } => {
                write!(f, "port {port} above device {device} is not copied: it hangs where PCI Express has no such port")
            }
            Self::OwnPort { device, beside } => {
                write!(f, "device {device} gets a port of its own beside the copy of host port {beside}")
            }
            Self::OwnSwitch { switch } => {
                write!(f, "switch {switch} is Banyan's own: it joins devices that share one root port on the host")
            }
            Self::Integrated { device, at } => {
                write!(f, "device {device} ({at}) is integrated into the host's root complex and gets a root port of its own")
            }
            Self::Order { met } => {
                write!(f, "the host's tree makes the guest meet the devices in another order than given: {}", super::names(met))
            }
        }
    }
}
