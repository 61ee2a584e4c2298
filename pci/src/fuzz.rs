//! Turns bytes into a hierarchy and into what guests and users do to it, and checks what holds for every one of them: for the
//! fuzz target and for the bounded run among the tests.
//!
//! Checked after each step: no panic and no overflow; every mapped BAR lies in its root complex's apertures and over no other
//! one; effects, applied in order, give exactly what the hierarchy says is reachable, and reach no other segment than the
//! write did; mirrors in place show what reads give (part of each after a step, all of it at the end).

mod trees;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::access::Reg;
use crate::address::{Bdf, Devfn, Sbdf};
use crate::bar::{BarIndex, PORTS, ROM};
use crate::effect::Effect;
use crate::emulated::Attachment;
use crate::errors::PcieError;
use crate::function::FunctionId;
use crate::hierarchy::{Hierarchy, Newcomer};
use crate::link::Link;
use crate::mirror::Mirror;
use crate::state::{Reader, StateError, Writer};
use crate::sync::lock;
use crate::testing::{FakeEndpoint, FakeMirror, tree};
use crate::topology::{EndpointSpec, Name, Parent, Plan, PlannedRootComplex};
use trees::{IDS, Source, apertures, bars, emulated, sriov, topology};

/// Bytes of a function's configuration space.
const SPACE: u16 = 0x1000;
/// Bytes of each mirror that are compared after a step, beside the header.
const PART: u16 = 0x80;
/// Newcomers, at most: ids are never given twice.
const NEWCOMERS: usize = 64;

/// Where BARs are mapped, who may reach memory, and who shows a mirror; by name.
type Named = (BTreeMap<(String, BarIndex), u64>, BTreeSet<String>, BTreeSet<String>);

/// Builds the hierarchy that `bytes` begin with and does to it what the rest says. Panics where something does not hold.
pub fn cycles(bytes: &[u8]) {
    let mut source = Source(bytes);
    let topology = topology(&mut source);
    let Ok(plan) = topology.plan(&apertures()) else { return };
    let mut world = World::new(plan);
    let mut part = 0;
    while !source.is_empty() {
        world.step(&mut source);
        world.check();
        // The header, where most of it happens, and another part of the rest each time.
        world.check_mirrors((0..0x40).chain(part..part + PART));
        part = (part + PART) % SPACE;
    }
    world.check_mirrors(0..SPACE);
}

/// Builds the hierarchy that `bytes` begin with and does half of the rest to it. Another one of the same plan takes its state
/// and must not differ from it from then on. A third one takes the state with some bytes changed, and whatever it makes of it
/// keeps the promises. Panics where something does not hold.
pub fn kept(bytes: &[u8]) {
    let mut source = Source(bytes);
    let topology = topology(&mut source);
    let Ok(plan) = topology.plan(&apertures()) else { return };
    let (before, after) = source.0.split_at(source.0.len() / 2);
    let (mut world, mut source) = (World::new(plan.clone()), Source(before));
    while !source.is_empty() {
        world.step(&mut source);
        world.check();
    }
    let state = world.save();
    let mut taken = World::new(plan.clone());
    if world.nodes() == taken.nodes() {
        taken.restore(&state).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(taken.save(), state);
        taken.compare(&mut world);
        // Who comes later gets an id that depends on who came before.
        (world.came, taken.came) = (NEWCOMERS, NEWCOMERS);
        let after = if world.tree.next_id() == taken.tree.next_id() { after } else { &[] };
        let (mut source, mut same) = (Source(after), Source(after));
        while !source.is_empty() {
            world.step(&mut source);
            taken.step(&mut same);
            assert_eq!(world.consequences(), taken.consequences());
            world.check();
            taken.check();
        }
        taken.compare(&mut world);
        taken.check_mirrors(0..SPACE);
    } else {
        // Functions came or went. Virtual ones come with their physical ones, others make it an error.
        let _ = taken.restore(&state);
    }
    let (mut garbled, mut source) = (state, Source(after));
    for _ in 0..1 + source.below(4) {
        let at = usize::try_from(source.dword()).unwrap_or_default().checked_rem(garbled.len());
        if let Some(byte) = at.and_then(|at| garbled.get_mut(at)) {
            *byte = source.byte();
        }
    }
    if source.below(4) == 0 {
        garbled.truncate(garbled.len() / 2);
    }
    let mut wary = World::new(plan);
    if wary.restore(&garbled).is_ok() {
        wary.check_mirrors(0..SPACE);
    }
}

/// A hierarchy with a machine that only keeps account.
struct World {
    plan: Plan,
    tree: Hierarchy,
    effects: Vec<Effect>,
    mapped: BTreeMap<(FunctionId, BarIndex), u64>,
    masters: BTreeSet<FunctionId>,
    mirrors: BTreeMap<FunctionId, Arc<FakeMirror>>,
    shown: BTreeSet<FunctionId>,
    came: usize,
    /// The segment of the configuration write that this step was.
    wrote: Option<u16>,
}

impl World {
    fn new(plan: Plan) -> Self {
        let mut tree = tree(&plan, &Arc::default(), |_, spec| emulated(spec, Attachment::Link(Link::default())));
        let mut mirrors = BTreeMap::new();
        tree.mirror(|id| {
            let mirror = Arc::new(FakeMirror::default());
            mirrors.insert(id, Arc::clone(&mirror));
            Some(mirror as Arc<dyn Mirror>)
        });
        let mut world = Self {
            plan,
            tree,
            effects: Vec::new(),
            mapped: BTreeMap::new(),
            masters: BTreeSet::new(),
            mirrors,
            shown: BTreeSet::new(),
            came: 0,
            wrote: None,
        };
        world.tree.start(&mut world.effects);
        world.check();
        world
    }

    /// Who is in the tree.
    fn nodes(&self) -> Vec<FunctionId> {
        self.tree.functions().iter().map(|function| function.id).collect()
    }

    fn save(&mut self) -> Vec<u8> {
        let mut writer = Writer::new();
        self.tree.save(&mut writer).unwrap_or_else(|error| panic!("a fake endpoint keeps everything: {error}"));
        writer.into_bytes()
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), StateError> {
        let mut reader = Reader::new(state, "tree");
        self.tree.restore(&mut reader, &mut self.effects)?;
        reader.end()?;
        self.check();
        Ok(())
    }

    /// What the machine has to do. Messages to users are not kept: one of an old fault comes again.
    fn consequences(&self) -> Vec<Effect> {
        let mut effects = self.effects.clone();
        effects.retain(|effect| !matches!(effect, Effect::Refused { .. } | Effect::Stray { .. }));
        effects
    }

    /// What is mapped, who may reach memory, and who shows a mirror, by name: virtual functions have other ids in another tree.
    fn named(&self) -> Named {
        let name = |id: &FunctionId| self.tree.name_of(*id).0;
        (
            self.mapped.iter().map(|((id, bar), at)| ((name(id), *bar), *at)).collect(),
            self.masters.iter().map(name).collect(),
            self.shown.iter().map(name).collect(),
        )
    }

    /// What guests and machines see of two worlds is the same.
    fn compare(&mut self, other: &mut Self) {
        assert_eq!(self.named(), other.named());
        for id in self.nodes() {
            let at = self.tree.address(id);
            assert_eq!(at, other.tree.address(id), "{id:?}");
            let Some(at) = at else { continue };
            for offset in (0..0x1000).step_by(4) {
                let (mut here, mut there) = ([0; 4], [0; 4]);
                self.tree.read(at.segment, at.bdf, offset, &mut here);
                other.tree.read(at.segment, at.bdf, offset, &mut there);
                assert_eq!(here, there, "{at} at {offset:#x}");
            }
        }
    }

    fn step(&mut self, source: &mut Source<'_>) {
        self.wrote = None;
        match source.byte() % 32 {
            0 => self.plug(source),
            1 => {
                if let Some(port) = self.some_port(source) {
                    let _ = self.tree.unplug(port, &mut self.effects);
                    self.tree.unplug_from_bus(Parent::Port(port), source.below(8), &mut self.effects);
                }
            }
            2 => {
                if let Some(port) = self.some_port(source) {
                    let _ = self.tree.request_removal(port, &mut self.effects);
                }
            }
            3 => {
                if let Some(port) = self.some_port(source) {
                    self.tree.expire(port);
                }
            }
            4 => {
                let error = [
                    PcieError::Receiver,
                    PcieError::AdvisoryNonFatal,
                    PcieError::CompletionTimeout,
                    PcieError::MalformedTlp,
                    PcieError::UnsupportedRequest,
                    PcieError::AcsViolation,
                    PcieError::Internal,
                ];
                let id = FunctionId(u32::from(source.byte()));
                if let Some(error) = source.pick(&error) {
                    let _ = self.tree.inject(id, *error, [source.dword(); 4]);
                }
            }
            8 | 9 => self.enable_virtual_functions(source),
            5 if source.byte() == 0 => self.tree.reset(&mut self.effects),
            10 => self.use_a_capability(source),
            6 | 7 => {
                let (bdf, offset, len) = (self.place(source).bdf, Self::offset(source), Self::len(source));
                let mut data = [0; 8];
                let data = data.get_mut(..len).unwrap_or_default();
                self.tree.read_conventional(bdf, offset, data);
                data.fill(source.byte());
                self.tree.write_conventional(bdf, offset, data, &mut self.effects);
                self.wrote = Some(0);
            }
            _ => {
                let (at, offset, len) = (self.place(source), Self::offset(source), Self::len(source));
                let value = Self::value(source);
                let data = value.get(..len).unwrap_or_default();
                self.tree.write(at.segment, at.bdf, offset, data, &mut self.effects);
                self.wrote = Some(at.segment);
                let mut read = [0; 8];
                let read = read.get_mut(..len).unwrap_or_default();
                self.tree.read(at.segment, at.bdf, offset, read);
                assert!(self.root_of(at).is_some() || read.iter().all(|byte| *byte == 0xFF), "{at} is in no root complex");
            }
        }
    }

    /// Writes the SR-IOV registers of a function that has them: the number, then control.
    fn enable_virtual_functions(&mut self, source: &mut Source<'_>) {
        let at = self.place(source);
        let mut capability = 0x100u16;
        for _ in 0..8 {
            let mut header = [0; 4];
            self.tree.read(at.segment, at.bdf, capability, &mut header);
            let header = u32::from_le_bytes(header);
            if header == u32::MAX || header == 0 {
                return;
            }
            if header & 0xFFFF == 0x10 {
                let (number, control) = (source.below(10), source.byte() & 0x19);
                self.tree.write(at.segment, at.bdf, capability + 0x10, &[number, 0], &mut self.effects);
                self.tree.write(at.segment, at.bdf, capability + 0x08, &[control, 0], &mut self.effects);
                return;
            }
            capability = u16::try_from(header >> 20).unwrap_or(0);
            if !(0x100..=0xFE0).contains(&capability) {
                return;
            }
        }
    }

    /// Puts a function into another power state, resets it, or writes a control register of its PCI Express capability: link
    /// disable, slot control and ARI forwarding are there.
    fn use_a_capability(&mut self, source: &mut Source<'_>) {
        let at = self.place(source);
        let mut pointer = [0];
        self.tree.read(at.segment, at.bdf, 0x34, &mut pointer);
        for _ in 0..8 {
            let [offset] = pointer.map(|byte| u16::from(byte & !3));
            let mut head = [0; 2];
            self.tree.read(at.segment, at.bdf, offset, &mut head);
            let [id, next] = head;
            let register = match id {
                0x01 => Some((4, u16::from(source.below(4)))),
                0x10 => {
                    let bits =
                        [(0x08, 1 << 15), (0x10, 1 << 4), (0x10, 0), (0x18, 1 << 8), (0x18, 3 << 8), (0x28, 1 << 5), (0x28, 0)];
                    source.pick(&bits).copied()
                }
                0xFF => return,
                _ => None,
            };
            if let Some((register, value)) = register.filter(|_| source.byte() & 1 == 0) {
                self.tree.write(at.segment, at.bdf, offset + register, &value.to_le_bytes(), &mut self.effects);
                self.wrote = Some(at.segment);
                return;
            }
            if next == 0 {
                return;
            }
            pointer = [next];
        }
    }

    /// Mostly a place where something is.
    fn place(&self, source: &mut Source<'_>) -> Sbdf {
        let planned = source.pick(&self.plan.functions).map(|function| function.at).unwrap_or_default();
        match source.byte() % 8 {
            0 => {
                let bdf = Bdf::new(source.byte(), Devfn::from_byte(source.byte()));
                Sbdf { segment: source.below(3).into(), bdf }
            }
            1 => Sbdf { bdf: Bdf::new(source.below(8), planned.bdf.devfn()), ..planned },
            _ => planned,
        }
    }

    /// Mostly a register of the header, where decoding is.
    fn offset(source: &mut Source<'_>) -> u16 {
        match source.byte() {
            byte @ 0..=0x7F => u16::from(byte) & 0x3C,
            byte @ 0x80..=0xBF => 0x40 + u16::from(byte & 0x3F) * 2,
            _ => u16::from_le_bytes([source.byte(), source.byte() & 0xF]),
        }
    }

    fn len(source: &mut Source<'_>) -> usize {
        match source.byte() % 16 {
            0 => 1,
            1 => 2,
            2 => 8,
            byte @ 3..6 => usize::from(byte),
            _ => 4,
        }
    }

    /// Mostly values that mean something: enables, addresses in and outside of apertures, bus numbers.
    fn value(source: &mut Source<'_>) -> [u8; 8] {
        let (kind, dword) = (source.byte(), source.dword());
        let low = match kind % 8 {
            0 => u32::MAX,
            1 => 0,
            2 => dword & 0x0107,
            3 => 0x8000_0000 | dword & 0x7FF0_0000,
            4 => u32::from_le_bytes([0, (dword & 7).to_le_bytes()[0], (dword >> 8 & 7).to_le_bytes()[0], 0]),
            5 => dword & 0xFF,
            // Ports, and the upper half of what memory must not take for them.
            6 if dword & 1 == 0 => 0xC000 | dword & 0x3FFC,
            6 => 1 << 31 | dword & 2,
            _ => dword,
        };
        (u64::from(source.byte()) << 32 | u64::from(low)).to_le_bytes()
    }

    /// The root complex whose buses lead to a place.
    fn root_of(&self, at: Sbdf) -> Option<&PlannedRootComplex> {
        let roots = &self.plan.root_complexes;
        roots.iter().find(|root| root.segment == at.segment && root.buses.contains(at.bdf.bus()))
    }

    fn some_port(&self, source: &mut Source<'_>) -> Option<FunctionId> {
        let ports: Vec<FunctionId> = self.tree.ports().map(|port| port.id).collect();
        source.pick(&ports).copied()
    }

    fn plug(&mut self, source: &mut Source<'_>) {
        let Some(port) = self.some_port(source).filter(|_| self.came < NEWCOMERS) else { return };
        self.came += 1;
        let is_bus = self.tree.bus(Parent::Port(port)).is_some();
        let (function_count, bars, pin) = (1 + source.below(3), bars(source), source.below(5));
        let spec = EndpointSpec {
            ids: IDS,
            bars,
            interrupt_pin: pin,
            rom: None,
            sriov: sriov(source).filter(|_| !is_bus).map(Box::new),
        };
        let device = if is_bus { source.below(8) } else { 0 };
        let newcomers = (0..function_count).map(|number| {
            let (id, mirror) = (self.tree.next_id(), Arc::new(FakeMirror::default()));
            let function = FakeEndpoint::shared(&emulated(&spec, Attachment::Link(Link::default())));
            let mirrored = self.tree.show(Parent::Port(port), &function, Arc::clone(&mirror) as Arc<dyn Mirror>);
            self.mirrors.insert(id, mirror);
            let name = Name(format!("came{}.{number}", self.came));
            Newcomer { id, name, at: Devfn::new(device, number), function, spec: spec.clone(), mirrored }
        });
        let newcomers = newcomers.collect();
        let _ = if is_bus {
            self.tree.plug_on_bus(Parent::Port(port), newcomers, &mut self.effects)
        } else {
            self.tree.plug(port, newcomers, &mut self.effects)
        };
    }

    /// Carries effects out and compares the outcome with what the hierarchy says.
    fn check(&mut self) {
        self.tree.take_appeared();
        self.tree.take_vanished();
        for effect in self.effects.drain(..) {
            let of = match effect {
                Effect::Map { function: of, .. }
                | Effect::Hide { function: of, .. }
                | Effect::BusMaster { function: of, .. }
                | Effect::Mirror { function: of, .. }
                | Effect::Slot { port: of, .. } => Some(of),
                // Told when the guest has gone on to something else.
                Effect::Refused { .. } | Effect::Stray { .. } => None,
            };
            if let Some((wrote, at)) = self.wrote.zip(of.and_then(|of| self.tree.address(of))) {
                assert_eq!(wrote, at.segment, "{effect:?}");
            }
            match effect {
                Effect::Map { function, bar, at } => {
                    assert!(self.mapped.insert((function, bar), at).is_none(), "{effect:?}: it was mapped elsewhere");
                    assert!(bar <= ROM, "{effect:?}");
                }
                Effect::Hide { function, bar } => {
                    assert!(self.mapped.remove(&(function, bar)).is_some(), "{effect:?}: it was not mapped");
                }
                Effect::BusMaster { function, on } => {
                    let changed = if on { self.masters.insert(function) } else { self.masters.remove(&function) };
                    assert!(changed, "{effect:?}: it was so before");
                }
                Effect::Mirror { function, on } => {
                    let changed = if on { self.shown.insert(function) } else { self.shown.remove(&function) };
                    assert!(changed, "{effect:?}: it was so before");
                }
                Effect::Refused { .. } | Effect::Stray { .. } | Effect::Slot { .. } => {}
            }
        }
        let (mut end, mut count) = (0, 0);
        for (function, bar, at, size) in self.tree.reachable() {
            assert!(at >= end, "BAR {bar} of {function:?} at {at:#x} covers another one");
            end = at + size;
            let root = self.tree.address(function).and_then(|place| self.root_of(place));
            let mut windows = root.iter().flat_map(|root| root.mem32.iter().chain(&root.mem64));
            let ports = |root: &&PlannedRootComplex| {
                let (first, last) = root.io.map_or((1, 0), |(first, last)| (u64::from(first), u64::from(last)));
                at.checked_sub(PORTS).is_some_and(|port| first <= port && port + size - 1 <= last)
            };
            let endpoint = self.tree.endpoint(function).map(|shared| lock(shared).bars().spec(bar));
            let inside = match endpoint.flatten() {
                Some(spec) if !spec.is_memory() => root.as_ref().is_some_and(ports),
                _ => windows.any(|window| window.contains(at, size)),
            };
            assert!(inside, "BAR {bar} of {function:?} at {at:#x} is outside");
            assert_eq!(self.mapped.get(&(function, bar)), Some(&at), "BAR {bar} of {function:?}");
            count += 1;
        }
        assert_eq!(count, self.mapped.len());
    }

    /// What a mirror in place shows at these `offsets` is what a read gives.
    fn check_mirrors(&mut self, offsets: impl Iterator<Item = u16> + Clone) {
        for id in &self.shown {
            let (Some(mirror), Some(at)) = (self.mirrors.get(id), self.tree.address(*id)) else { continue };
            for offset in offsets.clone().step_by(4) {
                let mut data = [0; 4];
                self.tree.read(at.segment, at.bdf, offset, &mut data);
                assert_eq!(mirror.read(Reg::containing(offset)), u32::from_le_bytes(data), "{at} at {offset:#x}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::cases;

    proptest! {
        #![proptest_config(ProptestConfig { cases: cases(400), ..ProptestConfig::default() })]

        #[test]
        fn random_cycles_over_random_trees_keep_every_promise(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
            cycles(&bytes);
        }

        #[test]
        fn a_tree_that_takes_the_state_of_another_one_does_as_that_one(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
            kept(&bytes);
        }
    }
}
