//! What a hierarchy consists of, by name: root complexes, ports, endpoints, and what each hangs on. No numbers but those
//! that a user insists on.

use std::fmt;

use crate::bar::{BarIndex, BarSpec};
use crate::ids::Ids;
use crate::link::Link;
use crate::sriov::SriovSpec;

/// Name of a root complex, port or endpoint: unique in a topology, 1 to 64 characters of `A-Z a-z 0-9 . _ -`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub String);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// A hierarchy as somebody asked for it; [`Topology::plan`] checks it and gives it numbers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    /// Host bridges, in the order in which they get bus numbers and ACPI devices.
    pub root_complexes: Vec<RootComplexSpec>,
    /// Ports and endpoints in any order; siblings without a device number get numbers in this order.
    pub nodes: Vec<NodeSpec>,
    /// Device numbers of the first root bus that stay free, as far as ports can share theirs.
    pub spare_numbers: u8,
}

impl Topology {
    /// Hangs a port on `on`. Returns its name, for what hangs on the port.
    pub fn add_port(&mut self, name: impl Into<String>, on: &Name, place: Place, port: PortSpec) -> Name {
        let name = Name(name.into());
        self.nodes.push(NodeSpec { name: name.clone(), on: on.clone(), place, kind: NodeKind::Port(port) });
        name
    }
}

/// A root complex: one ACPI host bridge with a root bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootComplexSpec {
    /// Its name.
    pub name: Name,
    /// PCI segment group.
    pub segment: u16,
    /// Guest NUMA node, `_PXM`.
    pub node: Option<u32>,
    /// Number of the root bus; by default the next free one of the segment.
    pub first_bus: Option<u8>,
}

/// A port or an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSpec {
    /// Its name.
    pub name: Name,
    /// The root complex or port that it hangs on.
    pub on: Name,
    /// Device and function number.
    pub place: Place,
    /// What it is.
    pub kind: NodeKind,
}

/// Device and function number on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// Device number, 0 to 31; by default the next free one. Below root and downstream ports it is 0.
    pub device: Option<u8>,
    /// Function number, 0 to 7, below a root or downstream port 0 to 255 (alternative routing ids). Function 0 must exist where
    /// another does. A function above 0 without a device number belongs to the device of the sibling before it.
    pub function: u8,
}

/// What a node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeKind {
    /// A bridge.
    Port(PortSpec),
    /// A device function.
    Endpoint(EndpointSpec),
}

/// Kind of port, as the PCI Express capability's type field tells it (PCIe 6.0 7.5.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PortKind {
    /// On a root bus; one link below.
    Root,
    /// Head of a switch, below a root or downstream port; downstream ports hang on it.
    Upstream,
    /// Of a switch, on its upstream port; one link below.
    Downstream,
    /// A PCIe-to-PCI bridge, below a root or downstream port: a conventional bus with up to 32 devices below, whose functions
    /// have 256 bytes of configuration space.
    PciBridge,
}

impl PortKind {
    /// Whether a link leads down from it: device 0 only.
    #[must_use]
    pub const fn has_link_below(self) -> bool {
        matches!(self, Self::Root | Self::Downstream)
    }
}

/// A port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortSpec {
    /// Which kind.
    pub kind: PortKind,
    /// Ids of the host's port; `None` for Banyan's own. Never set on root ports.
    pub ids: Option<Ids>,
    /// What its link registers show.
    pub link: Link,
    /// AtomicOp completer widths of a root port: DEVCAP2 bits 9:7 (bit 0 here is 32-bit, 1 is 64-bit, 2 is 128-bit CAS).
    pub atomic_completers: u8,
    /// Whether devices come and go while the guest runs, and how: all kinds but upstream ports.
    pub hotplug: Option<HotPlug>,
}

impl PortSpec {
    /// A port with Banyan's own ids and the usual link, whose devices stay.
    #[must_use]
    pub fn new(kind: PortKind) -> Self {
        Self { kind, ids: None, link: Link::default(), atomic_completers: 0, hotplug: None }
    }

    /// How devices come and go by slot registers: below a link alone.
    #[must_use]
    pub const fn slot(&self) -> Option<HotPlug> {
        if self.kind.has_link_below() { self.hotplug } else { None }
    }

    /// How many device numbers of the conventional bus below it, from 0 on, take devices while the guest runs; 0 for none, as
    /// for all ports but bridges. How guests learn of them is ACPI's business.
    #[must_use]
    pub const fn bus_slots(&self) -> u8 {
        match (self.kind, self.hotplug) {
            (PortKind::PciBridge, Some(HotPlug { numbers: 0, .. })) => 1,
            (PortKind::PciBridge, Some(HotPlug { numbers: 32.., .. })) => 32,
            (PortKind::PciBridge, Some(HotPlug { numbers, .. })) => numbers,
            _ => 0,
        }
    }

    /// Interrupt pin register: 1 (INTA) on ports that have something to tell, 0 on others.
    #[must_use]
    pub const fn interrupt_pin(&self) -> u8 {
        if matches!(self.kind, PortKind::Root) || self.slot().is_some() { 1 } else { 0 }
    }
}

/// A bus whose devices can be changed while the guest runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct HotPlug {
    /// What is kept free for devices to come.
    pub reserve: Reserve,
    /// Where the place of a certain device is: what that one needs, which `reserve` has in any case and nobody is asked to lower.
    pub own: Option<Reserve>,
    /// How a device leaves. Of no meaning on a conventional bus, where ACPI asks the guest first.
    pub removal: Removal,
    /// On a conventional bus: how many device numbers, from 0 on, take devices. 0 is taken as 1, 32 is the most.
    pub numbers: u8,
}

/// What lies below a hot-plug port at least, whatever hangs there at the start: guests never enlarge a window that they
/// found programmed (linux: drivers/pci/setup-bus.c, `pbus_size_mem`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Reserve {
    /// Bytes of the memory window, below 4 GiB; rounded up to 1 MiB. `None` for the largest of 32, 16, 4, 2 and 1 MiB with
    /// which everything fits.
    pub memory: Option<u64>,
    /// Bytes of the 64-bit prefetchable window; rounded up to 1 MiB. `None` for the largest of 1 TiB, 512 GiB, 256 GiB
    /// (as long as everything ends below 2^46), 64 GiB, 8 GiB, 512 MiB, 64 MiB, 2 MiB and nothing with which everything fits.
    pub prefetchable: Option<u64>,
    /// Bus numbers, the one directly below the port included; 0 is taken as 1. More than 1 is for virtual functions whose
    /// routing ids pass the end of a bus.
    pub buses: u8,
}

/// How a device leaves a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Removal {
    /// At once: the guest learns of it afterwards.
    #[default]
    Surprise,
    /// Software in the guest gives the slot up; the power indicator tells when it is done.
    Orderly,
    /// As orderly, and an attention button asks the guest to begin.
    Button,
}

impl Removal {
    /// What users call it.
    #[must_use]
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Surprise => "surprise",
            Self::Orderly => "orderly",
            Self::Button => "button",
        }
    }
}

/// A device function, as far as numbers go. What it does is its owner's business.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndpointSpec {
    /// Ids that the guest sees; for tables and pictures.
    pub ids: Ids,
    /// BARs.
    pub bars: [Option<BarSpec>; 6],
    /// Interrupt pin register: 0 none, 1 INTA to 4 INTD.
    pub interrupt_pin: u8,
    /// Bytes of its expansion ROM, a power of two from 2 KiB to 16 MiB.
    pub rom: Option<u64>,
    /// Its virtual functions. A conventional bus cannot show them, and nothing is kept for them there.
    pub sriov: Option<Box<SriovSpec>>,
}

/// Something of an endpoint that takes addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Resource {
    /// A BAR.
    Bar(BarIndex),
    /// The expansion ROM.
    Rom,
    /// A BAR of all virtual functions.
    VfBar(BarIndex),
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bar(bar) => write!(f, "BAR {bar}"),
            Self::Rom => f.write_str("ROM"),
            Self::VfBar(bar) => write!(f, "VF BAR {bar}"),
        }
    }
}

/// How much a resource takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// What each asks for.
    pub each: BarSpec,
    /// How many follow each other: the number of virtual functions for their BARs, else 1.
    pub count: u16,
}

impl Need {
    /// Bytes of all; `None` if 64 bits cannot say it.
    #[must_use]
    pub fn size(self) -> Option<u64> {
        self.each.size.checked_mul(self.count.into())
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.each)?;
        if self.count == 1 { Ok(()) } else { write!(f, " for each of {} virtual functions", self.count) }
    }
}

impl EndpointSpec {
    /// Everything that takes addresses.
    pub fn needs(&self) -> impl Iterator<Item = (Resource, Need)> + '_ {
        let bars = (0..).zip(self.bars).map(|(bar, spec)| (Resource::Bar(bar), spec, 1));
        let rom = self.rom.map(|size| (Resource::Rom, Some(BarSpec::rom(size)), 1));
        let virtual_functions = self.sriov.as_deref().into_iter().flat_map(|sriov| {
            let bars = (0..).zip(sriov.bars);
            bars.map(|(bar, spec)| (Resource::VfBar(bar), spec, sriov.total_vfs))
        });
        bars.chain(rom).chain(virtual_functions).filter_map(|(what, spec, count)| Some((what, Need { each: spec?, count })))
    }
}
