//! The live tree: who answers a configuration cycle, and what the machine must change after a write.
//!
//! Decides routing by the bus numbers and windows that the guest has programmed at this moment. Knows nothing of memory
//! slots, DMA maps or threads: consequences leave as [`Effect`]s.

mod bus;
mod consequences;
mod fit;
mod hotplug;
mod inject;
mod listing;
mod reach;
mod resets;
mod state;
mod strays;
#[cfg(test)]
mod tests;
mod virtual_functions;

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

use crate::access::{self, CONVENTIONAL_SPACE};
use crate::address::{Bdf, BusRange, Devfn, Sbdf};
use crate::bar::PORTS;
use crate::effect::Effect;
use crate::function::{Changes, FunctionId, Programming, ResetKind, Shared};
use crate::intx;
use crate::mirror::{Conventional, Mirror};
use crate::port::{Port, PortError};
use crate::regs::{header, type0, type1};
use crate::seams::{MsiPort, Workers};
use crate::sync::lock;
use crate::topology::{Name, Parent, Plan, PlannedFunction, PlannedKind, PlannedRootComplex, PortKind, Window};

pub use bus::BusInfo;
pub use fit::{Missing, Shortfall, Space};
pub use hotplug::{Newcomer, PlugError, PortInfo, PortList};
pub use inject::{InjectError, Injected, Silence};
pub use listing::{EndpointInfo, FunctionInfo, RootComplexInfo};
use reach::Reach;
pub use resets::{UnfinishedReset, finish_resets};
use strays::Strays;
pub use virtual_functions::Appeared;

enum What {
    Port(Box<Port>),
    Endpoint(Shared),
}

struct Node {
    name: Name,
    on: Parent,
    devfn: Devfn,
    /// How many buses behind that of its parent it is: 0 but for virtual functions.
    further: u8,
    is_virtual: bool,
    /// Where the plan has it, and its mirror.
    planned_at: Sbdf,
    mirrored: bool,
    programming: Programming,
    what: What,
    children: Vec<FunctionId>,
}

struct Root {
    name: Name,
    segment: u16,
    node: Option<u32>,
    buses: BusRange,
    /// Where its BARs can be; ports from [`PORTS`] on.
    windows: Vec<Window>,
    /// Messages name it as a place for devices.
    takes_devices: bool,
    children: Vec<FunctionId>,
}

/// All functions of a machine and the routes between them.
pub struct Hierarchy {
    /// Planned functions first, parents before children; then those that were added.
    nodes: BTreeMap<FunctionId, Node>,
    roots: Vec<Root>,
    reach: Reach,
    strays: Strays,
    /// Those that are enabled, by physical function.
    virtual_functions: BTreeMap<FunctionId, Vec<FunctionId>>,
    appeared: Vec<Appeared>,
    vanished: Vec<FunctionId>,
    unfinished_resets: Vec<UnfinishedReset>,
    /// The next function that comes gets this number.
    next: u32,
}

/// Bytes of a function's configuration space.
const SPACE: u16 = 0x1000;

impl Hierarchy {
    /// Builds the tree of `plan` with everything programmed as planned and memory decode on where there is memory. Ports are
    /// made here, endpoints by `make`. Nothing is reachable before [`Hierarchy::start`].
    pub fn build<E: std::error::Error + 'static>(
        plan: &Plan,
        msi: &Arc<dyn MsiPort>,
        mut make: impl FnMut(&PlannedFunction) -> Result<Shared, E>,
    ) -> Result<Self, BuildError<E>> {
        let roots = plan.root_complexes.iter().map(|root| Root {
            name: root.name.clone(),
            segment: root.segment,
            node: root.node,
            buses: root.buses,
            windows: root.mem32.iter().chain(&root.mem64).copied().chain(ports(root)).collect(),
            takes_devices: false,
            children: Vec::new(),
        });
        let mut hierarchy = Self {
            nodes: BTreeMap::new(),
            roots: roots.collect(),
            reach: Reach::default(),
            strays: Strays::default(),
            virtual_functions: BTreeMap::new(),
            appeared: Vec::new(),
            vanished: Vec::new(),
            unfinished_resets: Vec::new(),
            next: 0,
        };
        for planned in &plan.functions {
            let what = match &planned.kind {
                PlannedKind::Port(port) => {
                    let made = Port::new(planned, port, Arc::clone(msi));
                    let made = made.map_err(|source| BuildError::Port { name: planned.name.to_string(), source })?;
                    What::Port(Box::new(made))
                }
                PlannedKind::Endpoint(_) => {
                    let made = make(planned);
                    let made = made.map_err(|source| BuildError::Endpoint { name: planned.name.to_string(), source })?;
                    What::Endpoint(made)
                }
            };
            let Some(siblings) = hierarchy.children_mut(planned.on) else {
                return Err(BuildError::Order { name: planned.name.to_string() });
            };
            siblings.push(planned.id);
            hierarchy.next = hierarchy.next.max(planned.id.0.saturating_add(1));
            let node = Node {
                name: planned.name.clone(),
                on: planned.on,
                devfn: planned.at.bdf.devfn(),
                further: 0,
                is_virtual: false,
                planned_at: planned.at,
                mirrored: false,
                programming: programming(planned),
                what,
                children: Vec::new(),
            };
            hierarchy.nodes.insert(planned.id, node);
        }
        hierarchy.program();
        Ok(hierarchy)
    }

    /// Messages name the bus of root complex `root` as a place for devices from here on. How a guest learns of them is the
    /// caller's business.
    pub fn open_root_bus(&mut self, root: usize) {
        if let Some(root) = self.roots.get_mut(root) {
            root.takes_devices = true;
        }
    }

    /// Makes everything reachable that the programmed state lets through. Call once before the guest runs.
    pub fn start(&mut self, effects: &mut Vec<Effect>) {
        let all = self.ids();
        self.settle(&all, effects);
        self.settle_mirrors(effects);
    }

    /// Shows every function that can be shown in the mirror that `mirror` gives for it, at the address that the plan gives it.
    /// Call before [`Hierarchy::start`]; later moves are effects.
    pub fn mirror(&mut self, mut mirror: impl FnMut(FunctionId) -> Option<Arc<dyn Mirror>>) {
        for id in self.ids() {
            let Some(mirror) = mirror(id) else { continue };
            let mirror = if self.is_conventional(id) { Conventional::begin(mirror) } else { mirror };
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            node.mirrored = match &mut node.what {
                What::Port(port) => {
                    port.mirror(mirror);
                    true
                }
                What::Endpoint(shared) => lock(shared).mirror(&mirror),
            };
        }
    }

    /// Reads 1 to 8 bytes at byte `offset` (0 to 0xFFF) of the function at `bdf`. All ones where nobody answers.
    pub fn read(&mut self, segment: u16, bdf: Bdf, offset: u16, data: &mut [u8]) {
        match self.find(segment, bdf) {
            Some(id) => self.read_function(id, offset, self.space(id), data),
            None => data.fill(0xFF),
        }
    }

    /// Writes 1 to 8 bytes at byte `offset` of the function at `bdf` and adds what follows to `effects`. Dropped where
    /// nobody answers.
    pub fn write(&mut self, segment: u16, bdf: Bdf, offset: u16, data: &[u8], effects: &mut Vec<Effect>) {
        if let Some(id) = self.find(segment, bdf) {
            self.write_function(id, offset, self.space(id), data, effects);
        }
    }

    /// As [`Hierarchy::read`] in segment 0, for the ports 0xCF8 and 0xCFC: the first 256 bytes only.
    pub fn read_conventional(&mut self, bdf: Bdf, offset: u16, data: &mut [u8]) {
        match self.find(0, bdf) {
            Some(id) => self.read_function(id, offset, CONVENTIONAL_SPACE, data),
            None => data.fill(0xFF),
        }
    }

    /// As [`Hierarchy::write`] in segment 0, for the ports 0xCF8 and 0xCFC: the first 256 bytes only.
    pub fn write_conventional(&mut self, bdf: Bdf, offset: u16, data: &[u8], effects: &mut Vec<Effect>) {
        if let Some(id) = self.find(0, bdf) {
            self.write_function(id, offset, CONVENTIONAL_SPACE, data, effects);
        }
    }

    /// The endpoint `id`; `None` for ports.
    #[must_use]
    pub fn endpoint(&self, id: FunctionId) -> Option<&Shared> {
        match &self.nodes.get(&id)?.what {
            What::Endpoint(shared) => Some(shared),
            What::Port(_) => None,
        }
    }

    /// The function called `name`.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<FunctionId> {
        self.nodes.iter().find(|(_, node)| node.name.0 == name).map(|(id, _)| *id)
    }

    /// Where each reachable BAR lies: function, BAR, address, bytes; by address.
    #[cfg(any(test, feature = "testing"))]
    pub fn reachable(&self) -> impl Iterator<Item = (FunctionId, u8, u64, u64)> + '_ {
        self.reach.iter()
    }

    /// The machine starts again: every register is as before the first guest instruction, with what hangs in the slots at this
    /// moment. What was added has its BARs in the windows of its port. Removals that waited for the guest are told as done.
    pub fn reset(&mut self, effects: &mut Vec<Effect>) {
        let all = self.ids();
        self.reset_functions(&all, ResetKind::Cold, effects);
        self.program();
        self.settle(&all, effects);
        self.settle_mirrors(effects);
    }

    /// The bus that a function is on, as the guest has numbered it, with its device and function number.
    fn requester_id(&self, id: FunctionId) -> Option<u16> {
        let node = self.nodes.get(&id)?;
        let bus = match node.on {
            Parent::RootComplex(root) => self.roots.get(root)?.buses.secondary,
            Parent::Port(port) => match &self.nodes.get(&port)?.what {
                What::Port(port) => port.buses()?.secondary,
                What::Endpoint(_) => return None,
            },
        };
        Some(Bdf::new(bus.wrapping_add(node.further), node.devfn).requester_id())
    }

    fn port_mut(&mut self, id: FunctionId) -> Option<&mut Port> {
        match &mut self.nodes.get_mut(&id)?.what {
            What::Port(port) => Some(port),
            What::Endpoint(_) => None,
        }
    }

    /// What endpoints have at work beside the vCPUs.
    #[must_use]
    pub fn workers(&self) -> Vec<Arc<dyn Workers>> {
        let endpoints = self.nodes.values().filter_map(|node| match &node.what {
            What::Endpoint(shared) => lock(shared).workers(),
            What::Port(_) => None,
        });
        endpoints.collect()
    }

    /// Ends every endpoint's life in the machine. What their hardware is to do is left to [`Hierarchy::take_unfinished_resets`].
    pub fn detach(&mut self) {
        for id in self.ids() {
            self.end_life(id);
        }
    }

    fn ids(&self) -> Vec<FunctionId> {
        self.nodes.keys().copied().collect()
    }

    fn program(&mut self) {
        for node in self.nodes.values_mut() {
            match &mut node.what {
                What::Port(port) => port.program(),
                What::Endpoint(shared) => lock(shared).program(&node.programming),
            }
        }
    }

    /// Follows bus numbers from the root bus down (PCIe 6.0 7.3.3): a Type 1 cycle becomes Type 0 on the secondary bus.
    fn find(&self, segment: u16, bdf: Bdf) -> Option<FunctionId> {
        let (on, further) = self.leads_to(segment, bdf.bus())?;
        let is_there = |node: &Node| node.devfn == bdf.devfn() && node.further == further;
        let found = self.children(on).iter().copied().find(|id| self.nodes.get(id).is_some_and(is_there));
        found.filter(|_| further > 0 || self.forwards_to(on, bdf.devfn()))
    }

    /// Whether configuration requests for `devfn` get to the first bus on `on`.
    fn forwards_to(&self, on: Parent, devfn: Devfn) -> bool {
        let Parent::Port(id) = on else { return true };
        match self.nodes.get(&id).map(|node| &node.what) {
            Some(What::Port(port)) => port.forwards_to(devfn),
            _ => true,
        }
    }

    /// What a bus hangs on by the numbers of this moment, or what the last bus before it hangs on to which a bridge leads, and
    /// how many buses further it is.
    fn leads_to(&self, segment: u16, bus: u8) -> Option<(Parent, u8)> {
        let mut roots = self.roots.iter().enumerate();
        let (index, root) = roots.find(|(_, root)| root.segment == segment && root.buses.contains(bus))?;
        let (mut here, mut parent) = (root.buses.secondary, Parent::RootComplex(index));
        // Each turn goes one level down, so the loop ends with the tree.
        while here != bus {
            let bridge = self.children(parent).iter().find_map(|id| {
                let What::Port(port) = &self.nodes.get(id)?.what else { return None };
                let buses = port.buses().filter(|buses| buses.contains(bus) && !port.in_reset())?;
                Some((buses.secondary, Parent::Port(*id)))
            });
            let Some(next) = bridge else { return Some((parent, bus.checked_sub(here)?)) };
            (here, parent) = next;
        }
        Some((parent, 0))
    }

    fn children(&self, of: Parent) -> &[FunctionId] {
        let children = match of {
            Parent::RootComplex(index) => self.roots.get(index).map(|root| &root.children),
            Parent::Port(id) => self.nodes.get(&id).map(|node| &node.children),
        };
        children.map_or(&[], Vec::as_slice)
    }

    fn children_mut(&mut self, of: Parent) -> Option<&mut Vec<FunctionId>> {
        match of {
            Parent::RootComplex(index) => self.roots.get_mut(index).map(|root| &mut root.children),
            Parent::Port(id) => self.nodes.get_mut(&id).map(|node| &mut node.children),
        }
    }

    /// Bytes of configuration space by which a function can be reached: a conventional bus carries no more (PCI Express to
    /// PCI/PCI-X Bridge 1.0, 2.5).
    fn space(&self, id: FunctionId) -> u16 {
        if self.is_conventional(id) { CONVENTIONAL_SPACE } else { SPACE }
    }

    fn is_conventional(&self, id: FunctionId) -> bool {
        self.nodes.get(&id).is_some_and(|node| self.is_conventional_bus(node.on))
    }

    fn is_conventional_bus(&self, on: Parent) -> bool {
        let Parent::Port(port) = on else { return false };
        matches!(self.nodes.get(&port).map(|node| &node.what), Some(What::Port(port)) if port.kind() == PortKind::PciBridge)
    }

    fn read_function(&mut self, id: FunctionId, offset: u16, end: u16, data: &mut [u8]) {
        match self.nodes.get(&id).map(|node| &node.what) {
            Some(What::Port(port)) => access::read(offset, end, data, |reg| port.config_read(reg)),
            Some(What::Endpoint(shared)) => {
                let mut function = lock(shared);
                access::read(offset, end, data, |reg| function.config_read(reg));
            }
            None => data.fill(0xFF),
        }
    }

    fn write_function(&mut self, id: FunctionId, offset: u16, end: u16, data: &[u8], effects: &mut Vec<Effect>) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let mut changes = Changes::empty();
        match &mut node.what {
            What::Port(port) => access::write(offset, end, data, |access, value| changes |= port.config_write(access, value)),
            What::Endpoint(shared) => {
                let mut function = lock(shared);
                access::write(offset, end, data, |access, value| changes |= function.config_write(access, value));
            }
        }
        if !changes.is_empty() {
            self.follow(id, changes, effects);
        }
        // An address is written in halves, so nothing is said before the guest is done with all of them.
        let is_bar = matches!(offset, header::BAR0..=type0::BAR_END);
        self.reach.tell(is_bar.then_some(id), effects);
        let is_window = matches!(offset, type1::MEMORY..=type1::WINDOWS_END);
        self.tell_strays(is_window.then_some(id), effects);
    }

    /// `id` and everything below it, parents first.
    fn below(&self, id: FunctionId) -> Vec<FunctionId> {
        let mut found = vec![id];
        let mut next = 0;
        while let Some(node) = found.get(next).and_then(|id| self.nodes.get(id)) {
            found.extend(&node.children);
            next += 1;
        }
        found
    }

    /// The ports between a function and its root complex, nearest first, and the root complex.
    fn above(&self, id: FunctionId) -> (Vec<&Port>, Option<&Root>) {
        let mut ports = Vec::new();
        let mut on = self.nodes.get(&id).map(|node| node.on);
        loop {
            match on {
                Some(Parent::Port(port)) => {
                    let node = self.nodes.get(&port);
                    if let Some(What::Port(port)) = node.map(|node| &node.what) {
                        ports.push(port.as_ref());
                    }
                    on = node.map(|node| node.on);
                }
                Some(Parent::RootComplex(root)) => return (ports, self.roots.get(root)),
                None => return (ports, None),
            }
        }
    }
}

/// I/O ports of a root complex, as addresses.
fn ports(root: &PlannedRootComplex) -> Option<Window> {
    root.io.map(|(first, last)| Window { base: PORTS | u64::from(first), limit: PORTS | u64::from(last) })
}

fn programming(planned: &PlannedFunction) -> Programming {
    match &planned.kind {
        PlannedKind::Port(_) => Programming { multifunction: planned.multifunction, ..Programming::default() },
        PlannedKind::Endpoint(endpoint) => Programming {
            bars: endpoint.bars,
            rom: endpoint.rom,
            vf_bars: endpoint.vf_bars,
            number: planned.at.bdf.devfn(),
            next_function: endpoint.next_function,
            memory: true,
            interrupt_line: endpoint.intx.and_then(|route| u8::try_from(intx::gsi(route)).ok()).unwrap_or(0xFF),
            multifunction: planned.multifunction,
        },
    }
}

/// A tree that cannot be built.
#[derive(Debug, Error)]
pub enum BuildError<E: std::error::Error + 'static> {
    /// A port's registers cannot be laid out.
    #[error("cannot make port {name}")]
    Port {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: PortError,
    },
    /// The owner of an endpoint refused.
    #[error("cannot make device {name}")]
    Endpoint {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: E,
    },
    /// The plan lists a function before its parent.
    #[error("the plan lists {name} before what it hangs on")]
    Order {
        /// Its name.
        name: String,
    },
}
