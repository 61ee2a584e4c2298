//! One switch with two endpoints below a root port, and what a guest may do to it.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::*;
use crate::emulated::{Attachment, EmulatedSpec, InterruptSpec};
use crate::errors::PcieError;
use crate::ids::{ClassCode, Ids};
use crate::link::Link;
use crate::testing::{FakeEndpoint, FakeMirror, dword, tree};
use crate::topology::Name;
use crate::topology::tests::{downstream, endpoint, endpoint_of, function, mem64, roomy, root_port, topology, upstream};

const IDS: Ids =
    Ids { vendor: 0x1234, device: 1, class: ClassCode::new(0x08_8000), revision: 0, subsystem_vendor: 0, subsystem: 0 };

fn plan() -> Plan {
    let bars = [mem64(1 << 20)];
    let nodes = vec![
        root_port("rp0", "rc0"),
        upstream("up", "rp0"),
        downstream("down0", "up"),
        downstream("down1", "up"),
        endpoint("a", "down0", &bars),
        endpoint("b", "down1", &bars),
    ];
    topology(nodes).plan(&roomy()).unwrap()
}

pub(super) struct Rig {
    tree: Hierarchy,
    plan: Plan,
}

impl Rig {
    fn new() -> Self {
        Self::of(plan())
    }

    fn of(plan: Plan) -> Self {
        let tree = tree(&plan, &Arc::default(), |_, spec| EmulatedSpec {
            ids: IDS,
            bars: spec.bars,
            on: Attachment::Link(Link::default()),
            flr: true,
            ..EmulatedSpec::default()
        });
        Self { tree, plan }
    }

    pub(super) fn started() -> Self {
        let mut rig = Self::new();
        rig.tree.start(&mut Vec::new());
        rig
    }

    pub(super) fn id(&self, name: &str) -> FunctionId {
        self.plan.by_name(name).unwrap().id
    }

    pub(super) fn at(&self, name: &str) -> Bdf {
        self.plan.by_name(name).unwrap().at.bdf
    }

    fn bar(&self, name: &str) -> u64 {
        endpoint_of(&self.plan, name).bars[0].unwrap()
    }

    fn read(&mut self, at: Bdf, offset: u16) -> u32 {
        dword(&mut self.tree, at, offset)
    }

    pub(super) fn write(&mut self, at: Bdf, offset: u16, data: &[u8]) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.tree.write(0, at, offset, data, &mut effects);
        effects
    }

    /// Each of `names` with `on`, as effects list mirrors.
    fn all(&self, names: &[&str], on: bool) -> Vec<(FunctionId, bool)> {
        let ids: BTreeSet<FunctionId> = names.iter().map(|name| self.id(name)).collect();
        ids.into_iter().map(|id| (id, on)).collect()
    }

    fn reachable(&self) -> Vec<(FunctionId, u64)> {
        self.tree.reachable().map(|(function, _, at, _)| (function, at)).collect()
    }
}

#[test]
fn case_a13_everything_planned_is_there_before_the_first_instruction() {
    let mut rig = Rig::new();
    let mut effects = Vec::new();
    rig.tree.start(&mut effects);
    let (a, b) = (rig.id("a"), rig.id("b"));
    assert_eq!(
        effects,
        [Effect::Map { function: a, bar: 0, at: rig.bar("a") }, Effect::Map { function: b, bar: 0, at: rig.bar("b") }]
    );
    for function in rig.plan.functions.clone() {
        let ids = rig.read(function.at.bdf, 0);
        assert_ne!(ids, u32::MAX, "{} at {} answers", function.name, function.at);
    }
}

#[test]
fn nobody_answers_outside_the_tree() {
    let mut rig = Rig::started();
    for (bus, device) in [(0, 5), (1, 1), (4, 1), (9, 0), (255, 31)] {
        assert_eq!(rig.read(Bdf::new(bus, Devfn::new(device, 0)), 0), u32::MAX, "{bus:02x}:{device:02x}.0");
    }
    let mut data = [0; 4];
    rig.tree.read(1, rig.at("a"), 0, &mut data);
    assert_eq!(data, [0xFF; 4], "segment 1 does not exist");
}

#[test]
fn functions_above_7_answer_while_the_port_above_forwards_alternative_routing_ids() {
    let far = function(endpoint("far", "rp", &[]), 200);
    let nodes = vec![root_port("rp", "rc0"), endpoint("near", "rp", &[]), function(endpoint("beside", "rp", &[]), 7), far];
    let mut rig = Rig::of(topology(nodes).plan(&roomy()).unwrap());
    rig.tree.start(&mut Vec::new());
    let seen = |rig: &mut Rig| ["near", "beside", "far"].map(|name| rig.read(rig.at(name), 0) != u32::MAX);
    assert_eq!(seen(&mut rig), [true, true, false]);
    rig.write(rig.at("rp"), 0x68, &[1 << 5]);
    assert_eq!(seen(&mut rig), [true, true, true]);
    rig.write(rig.at("rp"), 0x68, &[0]);
    assert_eq!(seen(&mut rig), [true, true, false]);
}

#[test]
fn cycles_follow_the_bus_numbers_that_the_guest_programs() {
    let mut rig = Rig::started();
    let (a, b) = (rig.at("a"), rig.at("b"));
    let line = rig.read(b, 0x3C) & 0xFF;
    assert_ne!(line, 0xAA);
    rig.write(a, 0x3C, &[0xAA]);
    rig.write(rig.at("down0"), 0x19, &[b.bus(), b.bus()]);
    rig.write(rig.at("down1"), 0x19, &[a.bus(), a.bus()]);
    assert_eq!(rig.read(b, 0x3C) & 0xFF, 0xAA, "a answers at b's old address");
    assert_eq!(rig.read(a, 0x3C) & 0xFF, line, "and b at a's");
    rig.write(rig.at("down1"), 0x19, &[b.bus(), 0]);
    assert_eq!(rig.read(a, 0), u32::MAX, "a secondary bus above the subordinate one forwards nothing");
    assert_eq!(rig.reachable().len(), 2, "bus numbers do not move memory");
}

#[test]
fn a_closed_window_hides_what_is_below_and_an_open_one_brings_it_back() {
    let mut rig = Rig::started();
    let (a, at, port) = (rig.id("a"), rig.bar("a"), rig.at("down0"));
    let base = rig.read(port, 0x24);
    assert_eq!(rig.write(port, 0x24, &[0xF1, 0xFF, 0x01, 0x00]), [Effect::Hide { function: a, bar: 0 }]);
    assert_eq!(rig.write(port, 0x24, &base.to_le_bytes()), [Effect::Map { function: a, bar: 0, at }]);
}

#[test]
fn decode_of_a_port_above_hides_both_endpoints() {
    let mut rig = Rig::started();
    let port = rig.at("up");
    assert_eq!(rig.write(port, 4, &[0, 0]).iter().filter(|effect| matches!(effect, Effect::Hide { .. })).count(), 2);
    assert_eq!(rig.reachable(), []);
    rig.write(port, 4, &[6, 0]);
    assert_eq!(rig.reachable().len(), 2);
}

#[test]
fn requests_pass_only_if_every_port_above_forwards_them() {
    let mut rig = Rig::started();
    let a = rig.id("a");
    assert_eq!(rig.write(rig.at("a"), 4, &[6, 0]), [Effect::BusMaster { function: a, on: true }]);
    assert_eq!(rig.write(rig.at("rp0"), 4, &[2, 0]), [Effect::BusMaster { function: a, on: false }]);
    assert_eq!(rig.write(rig.at("rp0"), 4, &[6, 0]), [Effect::BusMaster { function: a, on: true }]);
}

#[test]
fn case_a1_half_written_addresses_map_nothing_and_the_old_place_comes_back() {
    let mut rig = Rig::started();
    let (device, a, at) = (rig.at("a"), rig.id("a"), rig.bar("a"));
    let [low, high] = [rig.read(device, 0x10), rig.read(device, 0x14)];
    let mut effects = Vec::new();
    for value in [u32::MAX, 0] {
        for offset in [0x10, 0x14] {
            effects.extend(rig.write(device, offset, &value.to_le_bytes()));
        }
    }
    assert!(effects.iter().all(|effect| *effect == Effect::Hide { function: a, bar: 0 }), "{effects:?}");
    rig.write(device, 0x10, &low.to_le_bytes());
    rig.write(device, 0x14, &high.to_le_bytes());
    assert!(rig.reachable().contains(&(a, at)));
}

#[test]
fn a_secondary_bus_reset_takes_everything_below_with_it() {
    let mut rig = Rig::started();
    let port = rig.at("down0");
    let effects = rig.write(port, 0x3E, &[0x40, 0]);
    assert_eq!(effects, [Effect::Hide { function: rig.id("a"), bar: 0 }]);
    assert_eq!(rig.read(rig.at("a"), 0), u32::MAX, "nobody answers while the reset is held");
    rig.write(port, 0x3E, &[0, 0]);
    assert_eq!(rig.read(rig.at("a"), 0x10) & !0xF, 0);
    assert_eq!(rig.reachable(), [(rig.id("b"), rig.bar("b"))]);
}

#[test]
fn the_ports_cf8_and_cfc_reach_256_bytes() {
    let mut rig = Rig::started();
    let mut data = [0; 4];
    rig.tree.read_conventional(rig.at("rp0"), 0xFC, &mut data);
    assert_ne!(data, [0xFF; 4]);
    rig.tree.read_conventional(rig.at("rp0"), 0x100, &mut data);
    assert_eq!(data, [0xFF; 4]);
}

#[test]
fn a_detached_endpoint_reads_ones() {
    let mut rig = Rig::started();
    rig.tree.detach();
    assert_eq!(rig.read(rig.at("a"), 0), u32::MAX);
}

#[test]
fn a_mirror_is_in_place_while_the_planned_address_leads_to_its_function() {
    let mut rig = Rig::new();
    rig.tree.mirror(|_| Some(Arc::new(FakeMirror::default())));
    let mut effects = Vec::new();
    rig.tree.start(&mut effects);
    assert_eq!(mirrors(&effects), rig.all(&["rp0", "up", "down0", "down1", "a", "b"], true));
    let buses = rig.read(rig.at("rp0"), 0x18);
    let below = ["up", "down0", "down1", "a", "b"];
    assert_eq!(mirrors(&rig.write(rig.at("rp0"), 0x19, &[9])), rig.all(&below, false));
    assert_eq!(mirrors(&rig.write(rig.at("rp0"), 0x18, &buses.to_le_bytes())), rig.all(&below, true));
    let below_up = rig.all(&["down0", "down1", "a", "b"], false);
    assert_eq!(mirrors(&rig.write(rig.at("up"), 0x3E, &[0x40])), below_up, "a held reset answers nobody");
}

#[test]
fn no_mirror_is_in_place_while_registers_are_live() {
    let mut rig = Rig::new();
    rig.tree.mirror(|_| Some(Arc::new(FakeMirror::default())));
    rig.tree.start(&mut Vec::new());
    let (a, down0) = (rig.at("a"), rig.at("down0"));
    let [on, off] = [true, false].map(|on| rig.all(&["a"], on));
    let live = [FakeEndpoint::LIVE];
    assert_eq!(mirrors(&rig.write(a, 0x0C, &live)), off);
    assert_eq!(mirrors(&rig.write(a, 0x0C, &live)), []);
    assert_eq!(mirrors(&rig.write(a, 0x0C, &[0])), on);
    rig.write(a, 0x0C, &live);
    assert_eq!(mirrors(&rig.write(a, 0x48, &(1u32 << 15).to_le_bytes())), on, "a function-level reset ends it");
    rig.write(a, 0x0C, &live);
    rig.write(down0, 0x3E, &[0x40]);
    assert_eq!(mirrors(&rig.write(down0, 0x3E, &[0])), on, "and so does one of the bus");
    rig.write(a, 0x0C, &live);
    let mut effects = Vec::new();
    rig.tree.reset(&mut effects);
    assert_eq!(mirrors(&effects), on, "and so does one of the machine");
}

fn mirrors(effects: &[Effect]) -> Vec<(FunctionId, bool)> {
    let one = |effect: &Effect| if let Effect::Mirror { function, on } = effect { Some((*function, *on)) } else { None };
    effects.iter().filter_map(one).collect()
}

#[test]
fn a_report_reaches_the_root_port_if_every_bridge_lets_it_up() {
    let mut rig = Rig::started();
    let (device, down0, rp0) = (rig.at("a"), rig.at("down0"), rig.at("rp0"));
    let inject = |rig: &mut Rig, name: &str| {
        let id = rig.id(name);
        rig.tree.inject(id, PcieError::CompletionTimeout, [0; 4]).unwrap()
    };
    let silent = inject(&mut rig, "a");
    assert_eq!(silent.told, Err(Silence::Unreported { at: Name::from("a") }), "nothing is enabled");
    rig.write(device, 0x48, &[0xF]);
    let port = rig.at("down0");
    for (name, at) in [("down0", port), ("up", rig.at("up")), ("rp0", rp0)] {
        rig.write(at, 0x3E, &[0, 0]);
        assert_eq!(inject(&mut rig, "a").told, Err(Silence::Stopped { by: Name::from(name) }));
        rig.write(at, 0x3E, &[2, 0]);
    }
    assert_eq!(inject(&mut rig, "a"), Injected { at: Name::from("a"), told: Ok(Name::from("rp0")) });
    assert_eq!((rig.read(rp0, 0x130), rig.read(rp0, 0x134) >> 16), (0x24, u32::from(device.requester_id())));
    let (power, cut) = (rig.read(rp0, 0x34).to_le_bytes()[0], Err(Silence::Cut { by: Name::from("rp0") }));
    assert_eq!((power, rig.read(rp0, 0xA8) & 0xFF), (0x40, 1));
    rig.write(rp0, 0xAC, &[3, 0]);
    assert_eq!(inject(&mut rig, "a").told, cut, "a port in D3hot passes nothing up");
    rig.write(rp0, 0xAC, &[0, 0]);
    assert_eq!((inject(&mut rig, "a").told, rig.read(rp0, 0x130)), (Ok(Name::from("rp0")), 0x2C));
    rig.write(rp0, 0x130, &0x2Cu32.to_le_bytes());
    inject(&mut rig, "a").told.unwrap();
    rig.write(down0, 0x48, &[0xF]);
    assert_eq!(inject(&mut rig, "down0").told, Ok(Name::from("rp0")));
    assert_eq!((rig.read(down0, 0x104), rig.read(rp0, 0x130)), (1 << 14, 0x2C));
    assert_eq!(rig.tree.inject(FunctionId(99), PcieError::Receiver, [0; 4]), Err(InjectError::Unknown { id: 99 }));
    rig.write(rp0, 0x3E, &[0, 0]);
    rig.write(rp0, 0x48, &[0xF]);
    assert_eq!(inject(&mut rig, "rp0").told, Ok(Name::from("rp0")), "a root port hears its own errors");
}

#[test]
fn an_error_that_a_device_has_no_register_for_is_its_port_s() {
    let mut rig = Rig::started();
    let (a, down0) = (rig.id("a"), rig.at("down0"));
    let kept = rig.tree.inject(a, PcieError::AcsViolation, [1, 2, 3, 4]).unwrap();
    assert_eq!((kept.at, rig.read(down0, 0x104), rig.read(down0, 0x11C)), (Name::from("down0"), 1 << 21, 1));
}

mod conventional {
    use super::*;
    use crate::access::Reg;
    use crate::topology::tests::{mem32, pci_bridge};

    /// Two devices on the conventional bus 2.
    fn rig() -> Rig {
        let nodes = vec![
            root_port("rp", "rc0"),
            pci_bridge("pb", "rp"),
            endpoint("a", "pb", &[mem32(0x1000)]),
            endpoint("b", "pb", &[mem32(0x1000)]),
        ];
        let plan = topology(nodes).plan(&roomy()).unwrap();
        let tree = tree(&plan, &Arc::default(), |_, spec| EmulatedSpec {
            ids: IDS,
            bars: spec.bars,
            on: Attachment::Conventional,
            interrupt: InterruptSpec::Intx(1),
            flr: true,
            serial_number: Some(1),
            ..EmulatedSpec::default()
        });
        Rig { tree, plan }
    }

    #[test]
    fn every_device_answers_with_256_bytes() {
        let mut rig = rig();
        rig.tree.start(&mut Vec::new());
        for (name, device) in [("a", 0), ("b", 1)] {
            let at = rig.at(name);
            assert_eq!(at, Bdf::new(2, Devfn::new(device, 0)));
            assert_eq!((rig.read(at, 0), rig.read(at, 0x34)), (0x0001_1234, 0), "no capability at all");
            assert_eq!((rig.read(at, 0x100), rig.read(at, 0xFFC)), (u32::MAX, u32::MAX), "the bus carries no more");
            let mut across = [0; 8];
            rig.tree.read(0, at, 0xFC, &mut across);
            assert_eq!(across, [0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]);
        }
        assert_eq!(rig.read(Bdf::new(2, Devfn::new(2, 0)), 0), u32::MAX);
        assert_ne!(rig.read(rig.at("pb"), 0), u32::MAX, "the bridge is a PCIe function");
        assert_eq!(rig.reachable().len(), 2);
        rig.write(rig.at("pb"), 0x3E, &[0x40, 0]);
        assert_eq!(rig.reachable(), [], "one reset for the whole bus");
    }

    #[test]
    fn mirrors_show_what_the_bus_carries() {
        let mut rig = rig();
        let mut pages = BTreeMap::new();
        rig.tree.mirror(|id| {
            let page = Arc::new(FakeMirror::default());
            pages.insert(id, Arc::clone(&page));
            Some(page)
        });
        let mut effects = Vec::new();
        rig.tree.start(&mut effects);
        assert_eq!(mirrors(&effects), rig.all(&["rp", "pb", "a", "b"], true));
        let at = rig.at("a");
        rig.write(at, 0x3C, &[7]);
        for reg in Reg::all() {
            assert_eq!(pages[&rig.id("a")].read(reg), rig.read(at, reg.offset()), "{:#x}", reg.offset());
        }
    }
}

mod ports {
    use super::*;
    use crate::bar::PORTS;
    use crate::topology::tests::{io, mem32};

    fn rig() -> Rig {
        let nodes = vec![
            endpoint("ports", "rc0", &[io(256)]),
            endpoint("memory", "rc0", &[mem64(256)]),
            root_port("rp", "rc0"),
            endpoint("below", "rp", &[mem32(4096), io(256)]),
        ];
        let mut rig = Rig::of(topology(nodes).plan(&roomy()).unwrap());
        rig.tree.start(&mut Vec::new());
        rig
    }

    #[test]
    fn memory_that_a_guest_moves_to_where_addresses_of_ports_are_stays_and_that_is_told() {
        let mut rig = rig();
        let (port, memory) = (rig.bar("ports"), rig.bar("memory"));
        assert!(rig.reachable().contains(&(rig.id("ports"), PORTS | port)), "{:x?}", rig.reachable());
        // Ports that nobody has: their device no longer decodes.
        rig.write(rig.at("ports"), 4, &[0, 0]);
        let at = rig.at("memory");
        let before = rig.reachable();
        rig.write(at, 0x14, &(1u32 << 31).to_le_bytes());
        rig.write(at, 0x10, &u32::try_from(port).unwrap().to_le_bytes());
        let told = rig.write(at, 4, &[6, 0]);
        let refused = Effect::Refused { function: rig.id("memory"), bar: 0, at: PORTS | port, kept: Some(memory), taken: None };
        assert!(told.contains(&refused), "{told:x?}");
        assert_eq!(rig.reachable(), before);
    }

    #[test]
    fn no_window_of_a_bridge_leads_to_ports() {
        let mut rig = rig();
        let (port, rp, below) = (rig.bar("ports"), rig.at("rp"), rig.at("below"));
        rig.write(rig.at("ports"), 4, &[0, 0]);
        // A prefetchable window over all addresses from 2^63 on.
        rig.write(rp, 0x24, &[0x01, 0x00, 0xF1, 0xFF]);
        rig.write(rp, 0x28, &(1u32 << 31).to_le_bytes());
        rig.write(rp, 0x2C, &u32::MAX.to_le_bytes());
        rig.write(below, 0x14, &u32::try_from(port).unwrap().to_le_bytes());
        rig.write(below, 4, &[7, 0]);
        assert!(rig.reachable().iter().all(|(_, at)| *at < PORTS), "{:x?}", rig.reachable());
    }
}

mod random {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Random writes all over configuration space: nothing panics, and the reachable set never overlaps.
        #[test]
        fn writes_never_break_the_tree(writes in prop::collection::vec((0u8..8, 0u8..3, 0u16..0x1000, any::<u64>(), 1usize..=8), 1..200)) {
            let mut rig = Rig::started();
            for (bus, device, offset, value, len) in writes {
                let at = Bdf::new(bus, Devfn::new(device, 0));
                let mut data = value.to_le_bytes();
                // Half of the writes hit the header, where the decoding is.
                let offset = if value & 1 == 0 { offset % 0x40 } else { offset };
                rig.write(at, offset, &data[..len]);
                rig.tree.read(0, at, offset, &mut data[..len]);
                let mut end = 0;
                for (_, _, start, size) in rig.tree.reachable() {
                    prop_assert!(start >= end);
                    end = start + size;
                }
            }
        }
    }
}
