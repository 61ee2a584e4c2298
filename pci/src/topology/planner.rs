//! Turns a topology and the free addresses into a plan.

use thiserror::Error;

use super::apertures::{Apertures, Shortage};
use super::buses::{self, Buses};
use super::check::TopologyError;
use super::outline::{Entry, On, Outline};
use super::plan::{Note, Parent, Plan, PlannedEndpoint, PlannedFunction, PlannedKind, PlannedPort, PlannedRootComplex, Window};
use super::spec::{EndpointSpec, Name, NodeKind, PortSpec, Resource, Topology};
use super::windows::{self, Addresses};
use crate::address::{Bdf, BusRange, Sbdf};
use crate::bar::BarKind;
use crate::function::FunctionId;
use crate::intx;

/// Largest physical slot number (PCIe 6.0 7.5.3.9): 13 bits.
const SLOTS: u16 = 0x1FFF;

impl Topology {
    /// Checks the topology and gives everything in it its numbers. The same input gives the same plan.
    pub fn plan(&self, space: &Apertures) -> Result<Plan, PlanError> {
        let outline = Outline::new(self)?;
        let numbers = Numbers {
            buses: buses::number(&outline)?,
            addresses: windows::assign(&outline, space)?,
            ids: ids(&outline)?,
            slots: slots(&outline)?,
        };
        let mut plan = Plan { root_complexes: numbers.root_complexes(&outline), ..Plan::default() };
        for node in &outline.depth_first {
            plan.functions.push(numbers.function(&outline, *node));
            plan.notes.extend(notes(&outline.entries[*node], &numbers.addresses));
        }
        Ok(plan)
    }
}

/// What the parts of the planner decided.
struct Numbers {
    buses: Buses,
    addresses: Addresses,
    /// By node.
    ids: Vec<FunctionId>,
    /// By node; 0 for what has no slot.
    slots: Vec<u16>,
}

impl Numbers {
    fn root_complexes(&self, outline: &Outline<'_>) -> Vec<PlannedRootComplex> {
        let specs = outline.topology.root_complexes.iter().zip(&self.buses.roots).enumerate();
        let planned = specs.map(|(index, (spec, buses))| PlannedRootComplex {
            name: spec.name.clone(),
            segment: spec.segment,
            node: spec.node,
            buses: *buses,
            mem32: self.addresses.mem32[index].clone(),
            mem64: self.addresses.mem64[index].clone(),
            io: self.addresses.io[index].first().and_then(ports_of),
        });
        planned.collect()
    }

    fn function(&self, outline: &Outline<'_>, node: usize) -> PlannedFunction {
        let entry = &outline.entries[node];
        let root = outline.root_of(node);
        let bus = match entry.on {
            On::RootComplex(root) => self.buses.roots[root].secondary,
            On::Node(parent) => self.below(parent).secondary,
        };
        PlannedFunction {
            id: self.ids[node],
            name: entry.spec.name.clone(),
            on: match entry.on {
                On::RootComplex(root) => Parent::RootComplex(root),
                On::Node(parent) => Parent::Port(self.ids[parent]),
            },
            at: Sbdf { segment: outline.topology.root_complexes[root].segment, bdf: Bdf::new(bus, entry.devfn) },
            multifunction: entry.multifunction,
            kind: match &entry.spec.kind {
                NodeKind::Port(port) => PlannedKind::Port(self.port(outline, node, port)),
                NodeKind::Endpoint(endpoint) => PlannedKind::Endpoint(PlannedEndpoint {
                    spec: EndpointSpec { sriov: entry.sriov().copied().map(Box::new), ..endpoint.clone() },
                    bars: self.addresses.bars[node].bars,
                    rom: self.addresses.bars[node].rom,
                    vf_bars: self.addresses.bars[node].vf_bars,
                    next_function: entry.next_function,
                    intx: wire(outline, node, endpoint.interrupt_pin),
                }),
            },
        }
    }

    fn port(&self, outline: &Outline<'_>, node: usize, spec: &PortSpec) -> PlannedPort {
        PlannedPort {
            spec: spec.clone(),
            buses: self.below(node),
            windows: self.addresses.windows[node],
            slot: self.slots[node],
            occupied: !outline.entries[node].below.is_empty(),
            reserved: self.addresses.classes.of(outline, node),
            intx: wire(outline, node, spec.interrupt_pin()),
        }
    }

    fn below(&self, port: usize) -> BusRange {
        self.buses.ports[port].unwrap_or(BusRange { secondary: 1, subordinate: 0 })
    }
}

fn ports_of(window: &Window) -> Option<(u16, u16)> {
    Some((u16::try_from(window.base).ok()?, u16::try_from(window.limit).ok()?))
}

/// A function's id is its place in depth-first order.
fn ids(outline: &Outline<'_>) -> Result<Vec<FunctionId>, PlanError> {
    let mut ids = vec![FunctionId(0); outline.entries.len()];
    for (index, node) in outline.depth_first.iter().enumerate() {
        ids[*node] = FunctionId(u32::try_from(index).map_err(|_| PlanError::Functions)?);
    }
    Ok(ids)
}

/// Slot numbers from 1 for root and downstream ports, in bus order.
fn slots(outline: &Outline<'_>) -> Result<Vec<u16>, PlanError> {
    let mut slots = vec![0; outline.entries.len()];
    let mut last = 0;
    for node in &outline.depth_first {
        let port = outline.entries[*node].port();
        if port.is_some_and(|port| port.kind.has_link_below()) {
            last += 1;
            if last > SLOTS {
                return Err(PlanError::Slots { limit: SLOTS });
            }
            slots[*node] = last;
        }
    }
    Ok(slots)
}

/// Follows a function's pin (0 none, 1 INTA to 4 INTD) up to its root bus.
fn wire(outline: &Outline<'_>, node: usize, interrupt_pin: u8) -> Option<intx::IntxRoute> {
    let mut pin = interrupt_pin.checked_sub(1)?;
    let mut entry = &outline.entries[node];
    loop {
        let device = entry.devfn.device();
        match entry.on {
            On::RootComplex(root_complex) => return Some(intx::IntxRoute { root_complex, device, pin }),
            On::Node(parent) => entry = &outline.entries[parent],
        }
        pin = intx::swizzle(device, pin);
    }
}

fn notes(entry: &Entry<'_>, addresses: &Addresses) -> Vec<Note> {
    let on_root = matches!(entry.on, On::RootComplex(_));
    let note = entry.needs().filter_map(|(bar, need)| {
        let function = entry.spec.name.clone();
        match bar {
            Resource::Bar(bar) if need.each.kind == BarKind::Io && !on_root => Some(Note::IoBarUnassigned { function, bar }),
            _ => addresses.rule.moves(need).then_some(Note::PrefetchableBelow4G { function, bar }),
        }
    });
    note.collect()
}

/// A topology that gets no plan.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PlanError {
    /// It cannot exist at all.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// More buses than a segment has.
    #[error(
        "segment {segment} needs {needed} bus numbers and has 256, {over} too many: each root complex and each port takes one, and virtual functions take those that their offset and stride lead to; move a root complex to another segment or leave out ports"
    )]
    Buses {
        /// Which segment.
        segment: u16,
        /// Buses that it needs.
        needed: usize,
        /// By how many that is too much.
        over: usize,
    },
    /// A root bus number with too few above it.
    #[error(
        "root complex `{name}` asks for root bus {first:#04x} and needs {needed} bus numbers: its highest possible root bus is {highest:#04x}"
    )]
    RootBusTooHigh {
        /// Which.
        name: Name,
        /// Asked for.
        first: u8,
        /// Buses that it needs.
        needed: usize,
        /// Where it would have to start at most.
        highest: usize,
    },
    /// Two root complexes with the same buses.
    #[error(
        "root complex `{name}` needs buses {range}, of which `{other}` has {taken}: give one of them another root bus, or none"
    )]
    RootBusTaken {
        /// Which.
        name: Name,
        /// What it needs.
        range: BusRange,
        /// Who was there.
        other: Name,
        /// What that has.
        taken: BusRange,
    },
    /// Bus numbers are left, but not in one piece.
    #[error(
        "root complex `{name}` needs {needed} bus numbers in a row and segment {segment} has no such gap between the root buses asked for: move those"
    )]
    NoRun {
        /// Which.
        name: Name,
        /// Where.
        segment: u16,
        /// Buses that it needs.
        needed: usize,
    },
    /// BARs that do not fit.
    #[error("{0}")]
    Space(Box<Shortage>),
    /// More ports than slot numbers.
    #[error("more than {limit} root and downstream ports: there are no more slot numbers; leave out ports")]
    Slots {
        /// Highest slot number.
        limit: u16,
    },
    /// More functions than ids.
    #[error("more functions than 32 bits can number; leave out functions")]
    Functions,
}
