//! Every number of a hierarchy: what the guest finds programmed at its first instruction.

use std::fmt;

use super::spec::{EndpointSpec, Name, PortSpec, Resource};
use crate::address::{BusRange, Sbdf};
use crate::bar::BarIndex;
use crate::function::FunctionId;
use crate::intx::IntxRoute;

/// A span of addresses, `base` to `limit` inclusive (as bridge registers have it).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Window {
    /// First address.
    pub base: u64,
    /// Last address.
    pub limit: u64,
}

impl Window {
    /// Whether `len` bytes from `at` lie inside.
    #[must_use]
    pub fn contains(self, at: u64, len: u64) -> bool {
        len != 0 && at >= self.base && at.checked_add(len - 1).is_some_and(|last| last <= self.limit)
    }

    /// Bytes; saturates for the whole address space.
    #[must_use]
    pub const fn len(self) -> u64 {
        (self.limit - self.base).saturating_add(1)
    }

    /// Never: an absent window is `None`.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        false
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{:x}", self.base, self.limit)
    }
}

/// A bridge's memory windows; `None` is a closed one (base above limit).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Windows {
    /// Memory base and limit: below 4 GiB, 1 MiB steps.
    pub memory: Option<Window>,
    /// Prefetchable base and limit, 64-bit, 1 MiB steps.
    pub prefetchable: Option<Window>,
}

/// A checked topology with numbers. Parents come before children; the index in `functions` is the [`FunctionId`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Host bridges.
    pub root_complexes: Vec<PlannedRootComplex>,
    /// All functions.
    pub functions: Vec<PlannedFunction>,
    /// What a user should know and did not ask for.
    pub notes: Vec<Note>,
}

/// Something about a plan that is worth a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// An I/O BAR below a port, where no bridge has an I/O window.
    IoBarUnassigned {
        /// Whose.
        function: Name,
        /// Which.
        bar: BarIndex,
    },
    /// A 64-bit prefetchable BAR in a 32-bit memory window, since all would not fit otherwise.
    PrefetchableBelow4G {
        /// Whose.
        function: Name,
        /// Which.
        bar: Resource,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IoBarUnassigned { function, bar } => {
                write!(f, "BAR {bar} of `{function}` gets no I/O ports: ports have no I/O window")
            }
            Self::PrefetchableBelow4G { function, bar } => {
                write!(f, "{bar} of `{function}` lies below 4 GiB, so that the large prefetchable BARs fit")
            }
        }
    }
}

impl Plan {
    /// The function called `name`.
    #[must_use]
    pub fn by_name(&self, name: &str) -> Option<&PlannedFunction> {
        self.functions.iter().find(|function| function.name.0 == name)
    }
}

/// A host bridge with its share of the machine's apertures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedRootComplex {
    /// Its name.
    pub name: Name,
    /// PCI segment group.
    pub segment: u16,
    /// Guest NUMA node.
    pub node: Option<u32>,
    /// Root bus and highest bus below it.
    pub buses: BusRange,
    /// What `_CRS` lists below 4 GiB.
    pub mem32: Vec<Window>,
    /// What `_CRS` lists above 4 GiB.
    pub mem64: Vec<Window>,
    /// First and last I/O port of its devices on the root bus; `None` when they need none.
    pub io: Option<(u16, u16)>,
}

/// What a function hangs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Parent {
    /// Index in [`Plan::root_complexes`].
    RootComplex(usize),
    /// A port.
    Port(FunctionId),
}

/// One function with its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFunction {
    /// Its index in the plan.
    pub id: FunctionId,
    /// Its name.
    pub name: Name,
    /// What it hangs on.
    pub on: Parent,
    /// Its address.
    pub at: Sbdf,
    /// Header type bit 7: set on function 0 when its device number has further functions.
    pub multifunction: bool,
    /// What it is.
    pub kind: PlannedKind,
}

/// Port or endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlannedKind {
    /// A bridge.
    Port(PlannedPort),
    /// A device function.
    Endpoint(PlannedEndpoint),
}

/// A port with its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedPort {
    /// What was asked for.
    pub spec: PortSpec,
    /// Secondary and subordinate bus; the primary one is its own.
    pub buses: BusRange,
    /// Memory windows.
    pub windows: Windows,
    /// Physical slot number, unique in the machine, for root and downstream ports; also its port number.
    pub slot: u16,
    /// Whether something hangs below: link partner present.
    pub occupied: bool,
    /// For hot-plug ports: what lies below at least.
    pub reserved: Option<Reserved>,
    /// Where its own INTx arrives on the root bus; `None` for ports that never interrupt.
    pub intx: Option<IntxRoute>,
}

/// What a hot-plug port keeps, content included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reserved {
    /// Bytes of the memory window, a multiple of 1 MiB.
    pub memory: u64,
    /// Bytes of the prefetchable window, a multiple of 1 MiB.
    pub prefetchable: u64,
    /// Bus numbers, 1 or more.
    pub buses: u8,
}

/// A device function with its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedEndpoint {
    /// What was asked for.
    pub spec: EndpointSpec,
    /// Address of each BAR; `None` for empty registers and for I/O BARs below a port (no bridge has an I/O window).
    pub bars: [Option<u64>; 6],
    /// Address of its expansion ROM.
    pub rom: Option<u64>,
    /// Address of each VF BAR: that of the first virtual function, which the others follow.
    pub vf_bars: [Option<u64>; 6],
    /// With alternative routing ids, the function after it of the same device; 0 for the last one.
    pub next_function: u8,
    /// Where its INTx arrives on the root bus.
    pub intx: Option<IntxRoute>,
}
