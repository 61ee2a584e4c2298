//! Decides whether a topology can exist: names, nesting, places, ids. Knows nothing of numbers beyond device and function.

use thiserror::Error;

use super::outline::Outline;
use super::spec::{Name, NodeKind, NodeSpec, PortKind, PortSpec, Topology};
use crate::address::Devfn;
use crate::bar::{BarError, Bars};
use crate::sriov::SriovError;

impl Topology {
    /// Whether this hierarchy can exist. It may still need more buses or addresses than there are: [`Topology::plan`] tells.
    pub fn check(&self) -> Result<(), TopologyError> {
        Outline::new(self).map(drop)
    }
}

impl NodeKind {
    /// What users call it.
    #[must_use]
    pub const fn noun(&self) -> &'static str {
        match self {
            Self::Endpoint(_) => "endpoint",
            Self::Port(port) => port.kind.noun(),
        }
    }
}

impl PortKind {
    /// What users call it.
    #[must_use]
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Root => "root port",
            Self::Upstream => "upstream port",
            Self::Downstream => "downstream port",
            Self::PciBridge => "PCIe-to-PCI bridge",
        }
    }
}

/// What a node hangs on, as far as nesting goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Above<'a> {
    RootComplex,
    Node(&'a NodeKind),
}

impl Above<'_> {
    /// Whether the bus below is a link: device 0 only.
    pub(super) const fn is_link(self) -> bool {
        matches!(self, Self::Node(NodeKind::Port(port)) if port.kind.has_link_below())
    }

    const fn noun(self) -> &'static str {
        match self {
            Self::RootComplex => "root complex",
            Self::Node(kind) => kind.noun(),
        }
    }
}

/// What else has a name, beside a thing called `first`.
fn another(first: &str, second: &str) -> String {
    if first == second { format!("another {second}") } else { second.to_owned() }
}

/// Whether `node` may hang where it does (PCIe 6.0 1.3).
pub(super) fn nesting(node: &NodeSpec, above: Above<'_>) -> Result<(), TopologyError> {
    let on_root = above == Above::RootComplex;
    let on = |kind| matches!(above, Above::Node(NodeKind::Port(port)) if port.kind == kind);
    let (fits, allowed) = match &node.kind {
        NodeKind::Port(PortSpec { kind: PortKind::Root, .. }) => (on_root, "root ports go on a root complex"),
        NodeKind::Port(PortSpec { kind: PortKind::Upstream, .. }) => {
            (above.is_link(), "an upstream port goes on a root port or a downstream port")
        }
        NodeKind::Port(PortSpec { kind: PortKind::Downstream, .. }) => {
            (on(PortKind::Upstream), "downstream ports go on an upstream port")
        }
        NodeKind::Port(PortSpec { kind: PortKind::PciBridge, .. }) => {
            (above.is_link(), "a PCIe-to-PCI bridge goes on a root port or a downstream port")
        }
        NodeKind::Endpoint(_) => (
            on_root || above.is_link() || on(PortKind::PciBridge),
            "endpoints go on a root complex, a root port, a downstream port or a PCIe-to-PCI bridge",
        ),
    };
    if fits {
        return Ok(());
    }
    Err(TopologyError::Nesting {
        name: node.name.clone(),
        noun: node.kind.noun(),
        on: node.on.clone(),
        above: above.noun(),
        allowed,
    })
}

impl Name {
    /// Whether it has the form that names promise.
    pub fn check(&self) -> Result<(), TopologyError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if (1..=64).contains(&self.0.len()) && self.0.bytes().all(plain) {
            Ok(())
        } else {
            Err(TopologyError::Name { name: self.0.clone() })
        }
    }
}

/// Whether a node's own values are ones that it can show; `link` tells that it hangs on a link.
pub(super) fn values(node: &NodeSpec, link: bool) -> Result<(), TopologyError> {
    let name = || node.name.clone();
    let ids = match &node.kind {
        NodeKind::Endpoint(endpoint) => {
            let bars =
                Bars::new(&endpoint.bars).and_then(|bars| endpoint.rom.map_or(Ok(bars.clone()), |size| bars.with_rom(size)));
            bars.map_err(|source| TopologyError::Bars { name: name(), source })?;
            let sriov = endpoint.sriov.as_ref().map_or(Ok(()), |sriov| sriov.check());
            sriov.map_err(|source| TopologyError::Sriov { name: name(), source })?;
            if endpoint.interrupt_pin > 4 {
                return Err(TopologyError::Pin { name: name(), pin: endpoint.interrupt_pin });
            }
            Some(endpoint.ids)
        }
        NodeKind::Port(port) => {
            if port.kind == PortKind::Root && port.ids.is_some() {
                return Err(TopologyError::RootPortIds { name: name() });
            }
            if port.atomic_completers > 7 {
                return Err(TopologyError::Completers { name: name(), value: port.atomic_completers });
            }
            if port.kind == PortKind::Upstream && port.hotplug.is_some() {
                return Err(TopologyError::NoSlot { name: name(), noun: port.kind.noun() });
            }
            port.ids
        }
    };
    if ids.is_some_and(|ids| ids.vendor == 0xFFFF) {
        return Err(TopologyError::Vendor { name: name() });
    }
    if let Some(device) = node.place.device.filter(|device| *device > 31) {
        return Err(TopologyError::DeviceNumber { name: name(), device });
    }
    if node.place.function > 7 && (!link || matches!(node.kind, NodeKind::Port(_))) {
        return Err(TopologyError::FunctionNumber { name: name(), function: node.place.function });
    }
    Ok(())
}

/// A hierarchy that cannot exist.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TopologyError {
    /// A name of the wrong form.
    #[error("`{}` is no name: use 1 to 64 characters of A-Z a-z 0-9 . _ -", name.escape_debug())]
    Name {
        /// As given.
        name: String,
    },
    /// One name for two things.
    #[error("`{name}` names two things, {first} and {second}: give one of them another name", second = another(first, second))]
    Duplicate {
        /// The name.
        name: Name,
        /// What has it.
        first: &'static str,
        /// What else has it.
        second: &'static str,
    },
    /// Hangs on nothing.
    #[error("{noun} `{name}` hangs on `{on}`, which does not exist: name a root complex or a port of this topology")]
    Parent {
        /// Which.
        name: Name,
        /// What it is.
        noun: &'static str,
        /// Absent.
        on: Name,
    },
    /// Ports that hang on each other.
    #[error("{}: no root complex is above them; hang one of them on a root complex or on a port that leads to one", chain(names))]
    Loop {
        /// Each hangs on the next, the last on the first.
        names: Vec<Name>,
    },
    /// A kind that cannot hang there.
    #[error("{noun} `{name}` cannot hang on {above} `{on}`: {allowed}")]
    Nesting {
        /// Which.
        name: Name,
        /// What it is.
        noun: &'static str,
        /// On which.
        on: Name,
        /// What that is.
        above: &'static str,
        /// The rule.
        allowed: &'static str,
    },
    /// A device number that no bus has.
    #[error("`{name}` asks for device {device}: device numbers go from 0 to 31")]
    DeviceNumber {
        /// Which.
        name: Name,
        /// Asked for.
        device: u8,
    },
    /// A function number that no device has.
    #[error(
        "`{name}` asks for function {function}: function numbers go from 0 to 7, to 255 for endpoints below a root or downstream port"
    )]
    FunctionNumber {
        /// Which.
        name: Name,
        /// Asked for.
        function: u8,
    },
    /// A device number other than 0 below a link.
    #[error(
        "`{name}` asks for device {device} on `{on}`: below a root or downstream port there is device 0 only; leave the number out"
    )]
    BelowLink {
        /// Which.
        name: Name,
        /// Asked for.
        device: u8,
        /// The port.
        on: Name,
    },
    /// An upstream port elsewhere than at device 0 function 0.
    #[error("upstream port `{name}` asks for function {function} on `{on}`: it is device 0 function 0; leave the numbers out")]
    UpstreamPlace {
        /// Which.
        name: Name,
        /// Asked for.
        function: u8,
        /// The port.
        on: Name,
    },
    /// Two things at one place.
    #[error(
        "`{first}` and `{second}` are both {place} on `{on}`: give one of them another device or function number, or a port of its own"
    )]
    Occupied {
        /// Who was there.
        first: Name,
        /// Who came.
        second: Name,
        /// Where.
        place: Devfn,
        /// On which.
        on: Name,
    },
    /// A device without function 0, which nobody would find.
    #[error("`{name}` is {place} on `{on}`, but nothing is function 0 of device {}: software looks for that first; give one of its functions number 0", place.device())]
    FunctionZero {
        /// Which.
        name: Name,
        /// Where.
        place: Devfn,
        /// On which.
        on: Name,
    },
    /// A further function of a device that does not exist.
    #[error(
        "`{name}` is function {function} on `{on}`, but nothing on `{on}` is named before it: list function 0 first or give a device number"
    )]
    NoSibling {
        /// Which.
        name: Name,
        /// Its function number.
        function: u8,
        /// On which.
        on: Name,
    },
    /// All 32 device numbers are taken.
    #[error(
        "no device number is left on `{on}` for `{name}`: all 32 are taken; use function numbers 1 to 7 or another root complex or switch"
    )]
    Full {
        /// Which.
        name: Name,
        /// On which.
        on: Name,
    },
    /// A root port that pretends to be another.
    #[error("root port `{name}` has ids: drivers take some ids of root ports as a promise of chip registers; leave them out")]
    RootPortIds {
        /// Which.
        name: Name,
    },
    /// The vendor id that an absent function reads as.
    #[error("`{name}` has vendor id ffff, which tells that nobody is there: give the vendor's own id")]
    Vendor {
        /// Which.
        name: Name,
    },
    /// BARs that no function can have.
    #[error("`{name}` cannot have these BARs")]
    Bars {
        /// Which.
        name: Name,
        /// Why.
        #[source]
        source: BarError,
    },
    /// Virtual functions that no function can have.
    #[error("`{name}` cannot have these virtual functions")]
    Sriov {
        /// Which.
        name: Name,
        /// Why.
        #[source]
        source: SriovError,
    },
    /// A virtual function where somebody is.
    #[error(
        "a virtual function of `{name}` has routing id {id:#x} on its bus, as `{other}` or another of its virtual functions: choose another first offset or stride"
    )]
    VirtualFunction {
        /// Whose.
        name: Name,
        /// Who is there.
        other: Name,
        /// Relative to the bus.
        id: u64,
    },
    /// An interrupt pin that does not exist.
    #[error("`{name}` has interrupt pin {pin}: 0 is none, 1 to 4 are INTA to INTD")]
    Pin {
        /// Which.
        name: Name,
        /// Asked for.
        pin: u8,
    },
    /// A slot where there is none.
    #[error(
        "{noun} `{name}` cannot be hot-pluggable: the bus in a switch keeps its ports; make its downstream ports hot-pluggable"
    )]
    NoSlot {
        /// Which.
        name: Name,
        /// What it is.
        noun: &'static str,
    },
    /// AtomicOp completer bits beyond the three that there are.
    #[error("`{name}` has AtomicOp completers {value:#x}: bits 0 to 2 stand for 32, 64 and 128 bits, the largest value is 7")]
    Completers {
        /// Which.
        name: Name,
        /// Asked for.
        value: u8,
    },
}

fn chain(names: &[Name]) -> String {
    let next = names.iter().cycle().skip(1);
    let links: Vec<String> = names.iter().zip(next).map(|(name, on)| format!("`{name}` hangs on `{on}`")).collect();
    links.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_1_to_64_plain_characters() {
        for good in ["a", "gpu-0.1_B", "a".repeat(64).as_str()] {
            assert_eq!(Name::from(good).check(), Ok(()), "{good}");
        }
        for bad in ["", "../x", "a b", "a\n", "\u{1b}[2J", "\u{e9}", "a".repeat(65).as_str(), "a".repeat(200).as_str()] {
            let error = Name::from(bad).check().unwrap_err().to_string();
            assert!(error.contains("use 1 to 64 characters") && !error.contains(char::is_control), "{error}");
        }
    }
}
