//! Adds devices to a live tree and takes them out: what may go where, in which order a guest learns of it.
//!
//! A device comes: [`Hierarchy::check_fit`] before anything is opened, [`Hierarchy::next_id`] for each function, then
//! [`Hierarchy::plug`]. A device leaves at once by [`Hierarchy::unplug`], or, where the port has a way to ask, after
//! [`Hierarchy::request_removal`] and [`SlotEvent::Released`](crate::slot::SlotEvent). What it held in the machine goes when
//! the guest has cleared the events, or after a deadline of the caller's ([`Hierarchy::expire`]).

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use super::bus::BusInfo;
use super::fit::{self, Places, Shortfall};
use super::{Hierarchy, Node, What, reach};
use crate::access::{CONVENTIONAL_SPACE, Reg};
use crate::address::{Bdf, Devfn, Sbdf};
use crate::caps;
use crate::effect::Effect;
use crate::function::{FunctionId, Programming, Shared};
use crate::intx::{self, IntxRoute};
use crate::link::{Link, LinkRate};
use crate::mirror::{Conventional, Mirror};
use crate::port::Port;
use crate::regs::header;
use crate::seams::IntxLine;
use crate::slot::{Slot, SlotError};
use crate::sync::lock;
use crate::topology::{EndpointSpec, Name, Parent, PortKind, Removal, Windows};

/// A function that comes.
pub struct Newcomer {
    /// From [`Hierarchy::next_id`].
    pub id: FunctionId,
    /// What users call it.
    pub name: Name,
    /// Its place: device 0 below a link, any function number. Function 0 must be among those that come together.
    pub at: Devfn,
    /// What it needs.
    pub spec: EndpointSpec,
    /// The function, in its reset state.
    pub function: Shared,
    /// It is shown in a mirror, which lies at its place on the bus by its planned number ([`Hierarchy::show`]).
    pub mirrored: bool,
}

/// A port as a user sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortInfo {
    /// Which function it is.
    pub id: FunctionId,
    /// Its name.
    pub name: Name,
    /// Its kind.
    pub kind: PortKind,
    /// Physical slot number; 0 for upstream ports.
    pub slot: u16,
    /// How a device leaves; `None` when the port is not hot-pluggable.
    pub removal: Option<Removal>,
    /// What hangs on it directly.
    pub occupants: Vec<(FunctionId, Name)>,
    /// The guest has yet to take note of the last removal.
    pub leaving: bool,
    /// The guest has yet to clear the events of the last removal.
    pub has_news: bool,
    /// A removal was asked for and has not happened.
    pub requested: bool,
    /// It was, and the guest has let go of the device or could not bring it up.
    pub released: bool,
    /// Windows that a device has below it.
    pub windows: Windows,
    /// Its ACS control register; `None` for ports without one.
    pub access_control: Option<u16>,
    /// What its link registers show when a device is there.
    pub link: Link,
    /// Device 0 on the bus that the plan gives it: where a mirror of a newcomer lies.
    pub below: Sbdf,
}

impl PortInfo {
    /// Whether a device can be added at this moment.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.removal.is_some() && self.occupants.is_empty() && !self.leaving
    }
}

/// Hot-plug ports and buses, for messages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PortList(pub Vec<PortInfo>, pub Vec<BusInfo>);

impl fmt::Display for PortList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() && self.1.is_empty() {
            return f.write_str("no port is hot-pluggable");
        }
        f.write_str("hot-plug ports: ")?;
        for (index, port) in self.0.iter().enumerate() {
            write!(f, "{}{} `{}` ", if index == 0 { "" } else { ", " }, port.kind.noun(), port.name)?;
            match (port.occupants.as_slice(), port.leaving) {
                ([], false) => f.write_str("is free")?,
                ([], true) => f.write_str("waits for the guest")?,
                ([(_, only)], _) => write!(f, "has `{only}`")?,
                ([(_, first), more @ ..], _) => write!(f, "has `{first}` and {} more", more.len())?,
            }
        }
        for (index, bus) in self.1.iter().enumerate() {
            let comma = if index == 0 && self.0.is_empty() { "" } else { ", " };
            // Software takes number 0 of a root bus for the host bridge.
            let (noun, least) = match bus.on {
                Parent::RootComplex(_) => ("root bus of", 1),
                Parent::Port(_) => (PortKind::PciBridge.noun(), 0),
            };
            let (free, of) = (bus.free().filter(|number| *number >= least).count(), bus.numbers.saturating_sub(least));
            write!(f, "{comma}{noun} `{}` has {free} of {of} device numbers free", bus.name)?;
        }
        Ok(())
    }
}

impl Hierarchy {
    /// An id for a function that comes. No id is given twice.
    pub const fn next_id(&mut self) -> FunctionId {
        let id = FunctionId(self.next);
        self.next = self.next.saturating_add(1);
        id
    }

    /// All ports, in the order of the plan.
    pub fn ports(&self) -> impl Iterator<Item = PortInfo> + '_ {
        self.nodes.iter().filter_map(|(id, node)| match &node.what {
            What::Port(port) => Some(self.info(*id, node, port)),
            What::Endpoint(_) => None,
        })
    }

    /// One port; `None` if `id` is none.
    #[must_use]
    pub fn port(&self, id: FunctionId) -> Option<PortInfo> {
        let (node, port) = self.hot_port(id).ok()?;
        Some(self.info(id, node, port))
    }

    /// Whether a device with these `functions` fits on `port` and can be added at this moment. Each is taken for function 0,
    /// whose virtual functions need the fewest bus numbers; [`Hierarchy::plug`] knows which is which.
    pub fn check_fit(&self, port: FunctionId, functions: &[EndpointSpec]) -> Result<(), PlugError> {
        self.check_fit_at(port, &functions.iter().map(|spec| (Devfn::ZERO, spec)).collect::<Vec<_>>())
    }

    fn check_fit_at(&self, port: FunctionId, functions: &[(Devfn, &EndpointSpec)]) -> Result<(), PlugError> {
        let (node, registers) = self.hot_port(port)?;
        let name = || node.name.clone();
        let slot = registers.slot().ok_or_else(|| PlugError::NotHotPluggable { port: name(), ports: self.hot_plug_ports() })?;
        if !node.children.is_empty() {
            let by = node.children.first().and_then(|id| self.nodes.get(id)).map(|child| child.name.clone());
            return Err(PlugError::Occupied { port: name(), by: by.unwrap_or_else(name), ports: self.hot_plug_ports() });
        }
        if slot.leaving() {
            return Err(PlugError::Leaving { port: name() });
        }
        let needs: Vec<_> = functions.iter().map(|(_, spec)| fit::needs(spec)).collect();
        let placed = fit::place(usable(registers), &[], &needs);
        let numbered = fit::numbers(registers.buses().unwrap_or(registers.planned().buses), functions.iter().copied());
        if placed.is_ok() && numbered.is_ok() {
            return Ok(());
        }
        let windows = placed.err().into_iter().flat_map(|Shortfall(missing)| missing);
        let missing = Shortfall(windows.chain(numbered.err()).collect());
        Err(PlugError::NoRoom { port: name(), missing, ports: self.hot_plug_ports() })
    }

    /// Adds the functions of one device to an empty port and tells the guest. Their BARs are left to the guest.
    ///
    /// The machine must know of them before, since the guest may use them at once. No cycle comes in between, so that a guest
    /// that sees function 0 sees all.
    pub fn plug(&mut self, port: FunctionId, functions: Vec<Newcomer>, effects: &mut Vec<Effect>) -> Result<(), PlugError> {
        self.check_fit_at(port, &functions.iter().map(|newcomer| (newcomer.at, &newcomer.spec)).collect::<Vec<_>>())?;
        let (node, registers) = self.hot_port(port)?;
        self.check_places(&node.name, 0, &functions)?;
        let needs: Vec<_> = functions.iter().map(|newcomer| fit::needs(&newcomer.spec)).collect();
        let places = fit::place(registers.planned().windows, &[], &needs).ok();
        let (on, bus) = (Parent::Port(port), self.planned_bus(port)?);
        let programmed = self.programming(on, &functions, places.as_deref());
        let ids = self.insert(on, bus, functions, programmed);
        self.settle(&ids, effects);
        self.settle_mirrors(effects);
        let partner = self.partner(port);
        let inserted = self.with_port(port, |port| {
            port.meet(partner);
            port.insert()
        });
        self.tell(port, effects);
        inserted
    }

    /// Shows a function that comes to the bus on `on` in `mirror`, as far as that bus carries configuration space. Returns
    /// whether it can be shown.
    pub fn show(&self, on: Parent, function: &Shared, mirror: Arc<dyn Mirror>) -> bool {
        let mirror = if self.is_conventional_bus(on) { Conventional::begin(mirror) } else { mirror };
        lock(function).mirror(&mirror)
    }

    /// Asks the guest to let go of the device on `port`. [`crate::slot::SlotEvent::Released`] follows when it has, at once if it
    /// did so before.
    pub fn request_removal(&mut self, port: FunctionId, effects: &mut Vec<Effect>) -> Result<(), PlugError> {
        let requested = self.with_port(port, Port::request_removal);
        self.tell(port, effects);
        requested
    }

    /// Takes out everything below `port`, whether or not the guest has let go of it, and tells the guest. From here on the
    /// functions read all ones, decode nothing and send nothing; they never come back. Keep what stands behind them (memory,
    /// DMA maps) until the guest has cleared the events.
    pub fn unplug(&mut self, port: FunctionId, effects: &mut Vec<Effect>) -> Result<Vec<(FunctionId, Shared)>, PlugError> {
        let (node, registers) = self.hot_port(port)?;
        if registers.slot().is_none() {
            return Err(PlugError::NotHotPluggable { port: node.name.clone(), ports: self.hot_plug_ports() });
        }
        if node.children.is_empty() {
            return Err(PlugError::Slot { port: node.name.clone(), source: SlotError::Empty });
        }
        let below: Vec<FunctionId> = self.below(port).into_iter().skip(1).collect();
        let gone = self.take_out(Parent::Port(port), &below, effects);
        self.with_port(port, Port::remove)?;
        self.tell(port, effects);
        Ok(gone)
    }

    /// The guest has had its time on `port`: a new device or a new request waits for it no longer.
    pub fn expire(&mut self, port: FunctionId) {
        if let Some(What::Port(port)) = self.nodes.get_mut(&port).map(|node| &mut node.what) {
            port.expire();
        }
    }

    /// Where interrupt pin `pin` (1 INTA to 4 INTD) of a function at `at` on the bus on `on` arrives.
    #[must_use]
    pub fn intx(&self, on: Parent, at: Devfn, pin: u8) -> Option<IntxRoute> {
        let (mut device, mut pin, mut on) = (at.device(), pin.checked_sub(1).filter(|pin| *pin < 4)?, on);
        loop {
            match on {
                Parent::RootComplex(root_complex) => return Some(IntxRoute { root_complex, device, pin }),
                Parent::Port(port) => {
                    let node = self.nodes.get(&port)?;
                    pin = intx::swizzle(device, pin);
                    (device, on) = (node.devfn.device(), node.on);
                }
            }
        }
    }

    /// Gives `port` its wire, for guests that use no messages; the plan tells which. Ports without a pin take none.
    pub fn connect(&self, port: FunctionId, line: Box<dyn IntxLine>) {
        if let Some(What::Port(port)) = self.nodes.get(&port).map(|node| &node.what) {
            port.connect(line);
        }
    }

    fn info(&self, id: FunctionId, node: &Node, port: &Port) -> PortInfo {
        let slot = port.slot();
        let occupants = self.physical_children(Parent::Port(id)).map(|(id, node)| (id, node.name.clone()));
        PortInfo {
            id,
            name: node.name.clone(),
            kind: port.kind(),
            slot: port.planned().slot,
            removal: slot.map(Slot::removal),
            occupants: occupants.collect(),
            leaving: slot.is_some_and(Slot::leaving),
            has_news: slot.is_some_and(Slot::has_news),
            requested: slot.is_some_and(Slot::requested),
            released: slot.is_some_and(Slot::released),
            windows: usable(port),
            access_control: port.access_control(),
            link: port.link(),
            below: Sbdf { bdf: Bdf::new(port.planned().buses.secondary, Devfn::ZERO), ..node.planned_at },
        }
    }

    /// What the device below `port` can do at its end of the link, as function 0 shows it.
    fn partner(&mut self, port: FunctionId) -> Option<LinkRate> {
        let (id, _) = self.physical_children(Parent::Port(port)).find(|(_, node)| node.devfn == Devfn::ZERO)?;
        let bytes = self.config_bytes(id, CONVENTIONAL_SPACE);
        let dword = |at: u8| {
            let bytes = bytes.get(usize::from(at)..).and_then(|bytes| bytes.first_chunk());
            bytes.map_or(u32::MAX, |bytes| u32::from_le_bytes(*bytes))
        };
        let extents = caps::walk(dword);
        let express = extents.iter().find(|extent| extent.id == caps::id::EXPRESS)?;
        caps::express::rate(dword(express.offset.checked_add(caps::express::reg::LINK_CAPABILITIES)?))
    }

    pub(super) fn hot_port(&self, id: FunctionId) -> Result<(&Node, &Port), PlugError> {
        let node = self.nodes.get(&id);
        match node.map(|node| (node, &node.what)) {
            Some((node, What::Port(port))) => Ok((node, port.as_ref())),
            _ => Err(PlugError::NoPort { id: id.0, ports: self.hot_plug_ports() }),
        }
    }

    /// Where the plan has function 0 of what hangs on a port.
    pub(super) fn planned_bus(&self, id: FunctionId) -> Result<Sbdf, PlugError> {
        let (node, port) = self.hot_port(id)?;
        let bdf = Bdf::new(port.planned().buses.secondary, Devfn::ZERO);
        Ok(Sbdf { segment: node.planned_at.segment, bdf })
    }

    fn with_port(&mut self, id: FunctionId, act: impl FnOnce(&mut Port) -> Result<(), SlotError>) -> Result<(), PlugError> {
        let done = match self.nodes.get_mut(&id).map(|node| (&node.name, &mut node.what)) {
            Some((name, What::Port(port))) => act(port).map_err(|source| (name.clone(), source)),
            _ => return Err(PlugError::NoPort { id: id.0, ports: self.hot_plug_ports() }),
        };
        done.map_err(|(port, source)| match source {
            SlotError::Absent => PlugError::NotHotPluggable { port, ports: self.hot_plug_ports() },
            source => PlugError::Slot { port, source },
        })
    }

    /// Whether the newcomers form device `device` on the bus on `on`.
    pub(super) fn check_places(&self, on: &Name, device: u8, functions: &[Newcomer]) -> Result<(), PlugError> {
        let mut taken = 0u8;
        for newcomer in functions {
            let bit = 1 << newcomer.at.function();
            if newcomer.at.device() != device || taken & bit != 0 {
                return Err(PlugError::Place { function: newcomer.name.clone(), at: newcomer.at, port: on.clone(), device });
            }
            taken |= bit;
            if newcomer.id.0 >= self.next || self.nodes.contains_key(&newcomer.id) {
                return Err(PlugError::Id { function: newcomer.name.clone(), id: newcomer.id.0 });
            }
        }
        if taken & 1 == 0 { Err(PlugError::FunctionZero { port: on.clone() }) } else { Ok(()) }
    }

    /// What the newcomers are given at a reset of the machine, since nobody else would give it to them: `places` in the windows
    /// that the plan gave to the port, if they fit there.
    pub(super) fn programming(&self, on: Parent, functions: &[Newcomer], places: Option<&[Places]>) -> Vec<Programming> {
        let programming = functions.iter().enumerate().map(|(index, newcomer)| {
            let [_, pin, ..] = lock(&newcomer.function).config_read(Reg::containing(header::INTERRUPT)).to_le_bytes();
            let line = self.intx(on, newcomer.at, pin).and_then(|route| u8::try_from(intx::gsi(route)).ok());
            let places = places.and_then(|places| places.get(index)).copied();
            let Places { bars, rom, vf_bars } = places.unwrap_or_default();
            Programming {
                bars,
                rom,
                vf_bars,
                memory: places.is_some(),
                interrupt_line: line.unwrap_or(0xFF),
                multifunction: newcomer.at.function() == 0 && functions.len() > 1,
                number: newcomer.at,
                ..Programming::default()
            }
        });
        programming.collect()
    }

    /// Makes the newcomers functions of the bus on `on`, which the plan calls `bus`, with nothing assigned.
    pub(super) fn insert(
        &mut self,
        on: Parent,
        bus: Sbdf,
        functions: Vec<Newcomer>,
        programmed: Vec<Programming>,
    ) -> Vec<FunctionId> {
        let ids: Vec<FunctionId> = functions.iter().map(|newcomer| newcomer.id).collect();
        for (newcomer, programming) in functions.into_iter().zip(programmed) {
            let unassigned = Programming { bars: [None; 6], rom: None, vf_bars: [None; 6], memory: false, ..programming };
            lock(&newcomer.function).program(&unassigned);
            let node = Node {
                name: newcomer.name,
                on,
                devfn: newcomer.at,
                further: 0,
                is_virtual: false,
                planned_at: Sbdf { bdf: Bdf::new(bus.bdf.bus(), newcomer.at), ..bus },
                mirrored: newcomer.mirrored,
                programming,
                what: What::Endpoint(newcomer.function),
                children: Vec::new(),
            };
            self.nodes.insert(newcomer.id, node);
        }
        if let Some(children) = self.children_mut(on) {
            children.extend(&ids);
        }
        ids
    }

    /// Ends the life of everything in `ids`, all that is below `on` or a part of it. Returns the endpoints.
    pub(super) fn take_out(&mut self, on: Parent, ids: &[FunctionId], effects: &mut Vec<Effect>) -> Vec<(FunctionId, Shared)> {
        let mut gone = Vec::new();
        for id in ids {
            gone.extend(self.end_life(*id).map(|function| (*id, function)));
        }
        let nothing =
            |(function, _): &(FunctionId, Shared)| reach::Wanted { function: *function, bars: Vec::new(), bus_master: false };
        self.reach.settle(&gone.iter().map(nothing).collect::<Vec<_>>(), effects);
        let mirrors: Vec<(FunctionId, bool)> = ids.iter().map(|id| (*id, false)).collect();
        self.reach.settle_mirrors(&mirrors, effects);
        ids.iter().for_each(|id| self.reach.forget(*id));
        for id in ids {
            self.nodes.remove(id);
            self.virtual_functions.remove(id);
        }
        let ids: BTreeSet<&FunctionId> = ids.iter().collect();
        if let Some(children) = self.children_mut(on) {
            children.retain(|id| !ids.contains(id));
        }
        gone
    }
}

/// The windows that a guest would use: those that it has programmed, or, where one is closed, the plan's. A guest that is
/// about to program a window has it closed for a moment, and address 0 is no address.
pub(super) fn usable(port: &Port) -> Windows {
    let (now, planned) = (port.windows(), port.planned().windows);
    Windows {
        memory: now.memory.filter(|window| window.base != 0).or(planned.memory),
        prefetchable: now.prefetchable.filter(|window| window.base != 0).or(planned.prefetchable),
    }
}

/// A device that cannot come or go.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum PlugError {
    /// No such port.
    #[error("function {id} is no port; {ports}")]
    NoPort {
        /// Asked for.
        id: u32,
        /// What there is.
        ports: PortList,
    },
    /// A port whose device stays.
    #[error("port `{port}` is not hot-pluggable; {ports}")]
    NotHotPluggable {
        /// Which.
        port: Name,
        /// What there is instead.
        ports: PortList,
    },
    /// A port that has its device.
    #[error("port `{port}` has `{by}`: take another port or remove that first; {ports}")]
    Occupied {
        /// Which.
        port: Name,
        /// What is there.
        by: Name,
        /// What there is instead.
        ports: PortList,
    },
    /// A port whose last device the guest still works on.
    #[error("the guest has not taken note of the last removal from port `{port}`: try again when it has")]
    Leaving {
        /// Which.
        port: Name,
    },
    /// BARs or virtual functions that do not fit.
    #[error(
        "the device does not fit on port `{port}`: {missing}; take a port that keeps more, or let this one keep more when the machine is configured; {ports}"
    )]
    NoRoom {
        /// Which.
        port: Name,
        /// What is missing.
        missing: Shortfall,
        /// What there is.
        ports: PortList,
    },
    /// BARs for which the root complex has no addresses left.
    #[error(
        "the device does not fit on the root bus of `{root}`: {missing}; remove a device there, or take a hot-plug port that keeps enough; {ports}"
    )]
    NoRoomOnRoot {
        /// Whose bus.
        root: Name,
        /// What is missing.
        missing: Shortfall,
        /// What there is.
        ports: PortList,
    },
    /// Functions that are no device.
    #[error("`{function}` cannot be {at} on port `{port}`: the device that comes is {device}, with one function for each number")]
    Place {
        /// Which.
        function: Name,
        /// Where it wants to be.
        at: Devfn,
        /// The port.
        port: Name,
        /// Its device number.
        device: u8,
    },
    /// No function 0, which guests look for first.
    #[error("none of the functions for port `{port}` is function 0, which software looks for first: give one of them number 0")]
    FunctionZero {
        /// The port.
        port: Name,
    },
    /// No bus that takes devices at several numbers.
    #[error("devices can come to root buses, and to conventional buses that are configured so: this is neither")]
    NoBus,
    /// A device number that cannot be had.
    #[error("`{function}` cannot be {at} on the bus of `{on}`: {why}; leave the number out, or take another")]
    Number {
        /// Which.
        function: Name,
        /// Where it wants to be.
        at: Devfn,
        /// The bridge or root complex.
        on: Name,
        /// Why not.
        why: &'static str,
    },
    /// An id that is in use or was never given.
    #[error("`{function}` has id {id}, which is not a fresh one: ask for the next id")]
    Id {
        /// Which.
        function: Name,
        /// Its id.
        id: u32,
    },
    /// The slot is in no state for it.
    #[error("port `{port}` cannot do that now")]
    Slot {
        /// Which.
        port: Name,
        /// Why.
        #[source]
        source: SlotError,
    },
}

#[cfg(test)]
mod tests;
