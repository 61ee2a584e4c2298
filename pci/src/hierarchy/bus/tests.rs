//! Devices that come to root buses and conventional buses and leave again.

use std::sync::Arc;

use super::*;
use crate::access::Reg;
use crate::bar::BarSpec;
use crate::emulated::{Attachment, EmulatedSpec, InterruptSpec};
use crate::ids::{ClassCode, Ids};
use crate::testing::{FakeEndpoint, FakeMirror, dword, tree};
use crate::topology::tests::{endpoint, hot, kept, mem32, mem64, pci_bridge, roomy, root_port, topology};
use crate::topology::{Plan, Removal};

const MIB: u64 = 1 << 20;

/// A conventional bus that keeps 4 MiB and 64 MiB and takes devices at 0 to 3; `cold` is there. The bus of `plain` takes none.
fn plan() -> Plan {
    let nodes = vec![
        root_port("rp", "rc0"),
        hot(pci_bridge("bridge", "rp"), kept(4 * MIB, 64 * MIB, 1), Removal::Surprise),
        endpoint("cold", "bridge", &[mem32(MIB)]),
        root_port("rp1", "rc0"),
        pci_bridge("plain", "rp1"),
        endpoint("stays", "plain", &[mem32(MIB)]),
    ];
    topology(nodes).plan(&roomy()).unwrap()
}

fn spec(bars: [Option<BarSpec>; 6]) -> EndpointSpec {
    let ids = Ids { vendor: 0x1234, device: 1, class: ClassCode::new(0x08_8000), ..Ids::default() };
    EndpointSpec { ids, bars, interrupt_pin: 1, rom: None, sriov: None }
}

fn emulated(spec: &EndpointSpec) -> EmulatedSpec {
    EmulatedSpec {
        ids: spec.ids,
        bars: spec.bars,
        rom: spec.rom,
        on: Attachment::Conventional,
        interrupt: InterruptSpec::Intx(spec.interrupt_pin),
        ..EmulatedSpec::default()
    }
}

struct Rig {
    tree: Hierarchy,
    plan: Plan,
    effects: Vec<Effect>,
}

impl Rig {
    fn new() -> Self {
        let plan = plan();
        let tree = tree(&plan, &Arc::default(), |_, planned| emulated(&spec(planned.bars)));
        let mut rig = Self { tree, plan, effects: Vec::new() };
        rig.tree.start(&mut rig.effects);
        rig.effects.clear();
        rig
    }

    fn on(&self, name: &str) -> Parent {
        Parent::Port(self.plan.by_name(name).unwrap().id)
    }

    fn newcomer(&mut self, at: Devfn, bars: [Option<BarSpec>; 6]) -> Newcomer {
        let (id, spec) = (self.tree.next_id(), spec(bars));
        let function = FakeEndpoint::shared(&emulated(&spec));
        Newcomer { id, name: Name(format!("n{}", id.0)), at, function, spec, mirrored: false }
    }

    fn add(&mut self, on: Parent, at: Devfn, bars: [Option<BarSpec>; 6]) -> Result<FunctionId, PlugError> {
        let newcomer = self.newcomer(at, bars);
        let id = newcomer.id;
        self.tree.plug_on_bus(on, vec![newcomer], &mut self.effects).map(|()| id)
    }

    fn free(&self, on: Parent) -> Vec<u8> {
        self.tree.bus(on).unwrap().free().collect()
    }

    fn read(&mut self, bus: u8, at: Devfn, offset: u16) -> u32 {
        dword(&mut self.tree, Bdf::new(bus, at), offset)
    }

    /// Assigns BAR 0 and switches decoding on.
    fn assign(&mut self, bus: u8, at: Devfn, base: u64) {
        let base = u32::try_from(base).unwrap();
        self.tree.write(0, Bdf::new(bus, at), 0x10, &base.to_le_bytes(), &mut self.effects);
        self.tree.write(0, Bdf::new(bus, at), 0x04, &[2, 0], &mut self.effects);
    }
}

fn one(spec: BarSpec) -> [Option<BarSpec>; 6] {
    [Some(spec), None, None, None, None, None]
}

const fn at(device: u8) -> Devfn {
    Devfn::new(device, 0)
}

#[test]
fn a_device_on_the_root_bus_answers_as_long_as_it_is_there() {
    let (mut rig, root) = (Rig::new(), Parent::RootComplex(0));
    assert_eq!(rig.free(root), (2..32).collect::<Vec<u8>>());
    assert_eq!(rig.tree.bus(Parent::RootComplex(1)), None);
    let id = rig.add(root, at(5), one(mem32(MIB))).unwrap();
    assert_eq!(rig.free(root).len(), 29);
    assert!(matches!(rig.add(root, at(5), one(mem32(MIB))), Err(PlugError::Number { .. })));
    assert_eq!(rig.add(Parent::RootComplex(1), at(5), one(mem32(MIB))), Err(PlugError::NoBus));
    let stale = Newcomer { id, ..rig.newcomer(at(6), one(mem32(MIB))) };
    assert!(matches!(rig.tree.plug_on_bus(root, vec![stale], &mut Vec::new()), Err(PlugError::Id { .. })));
    assert_eq!(rig.read(0, at(5), 0), 0x0001_1234);
    let info = rig.tree.endpoints().find(|info| info.id == id).unwrap();
    assert_eq!((info.at.bdf, info.path, info.on), (Bdf::new(0, at(5)), vec![at(5)], Name::from("rc0")));
    assert_eq!(rig.tree.unplug_from_bus(root, 5, &mut rig.effects).len(), 1);
    assert_eq!(rig.tree.unplug_from_bus(root, 5, &mut rig.effects).len(), 0);
    assert_eq!(rig.read(0, at(5), 0), u32::MAX);
    assert_eq!(rig.free(root).len(), 30);
    assert_eq!(rig.tree.unplug_from_bus(root, 0, &mut rig.effects).len(), 0, "a port is no device");
}

#[test]
fn the_mirror_of_a_newcomer_is_in_place_while_the_newcomer_is_there() {
    let mut rig = Rig::new();
    for (on, bus) in [(Parent::RootComplex(0), 0), (rig.on("bridge"), 2)] {
        let page = Arc::new(FakeMirror::default());
        let newcomer = rig.newcomer(at(3), one(mem32(MIB)));
        let mirrored = rig.tree.show(on, &newcomer.function, page.clone());
        let function = newcomer.id;
        assert!(mirrored);
        rig.tree.plug_on_bus(on, vec![Newcomer { mirrored, ..newcomer }], &mut rig.effects).unwrap();
        assert_eq!(rig.effects.pop(), Some(Effect::Mirror { function, on: true }));
        for reg in Reg::all() {
            assert_eq!(page.read(reg), rig.read(bus, at(3), reg.offset()), "{:#x}", reg.offset());
        }
        rig.tree.unplug_from_bus(on, 3, &mut rig.effects);
        assert_eq!(rig.effects.pop(), Some(Effect::Mirror { function, on: false }));
        assert!(Reg::all().all(|reg| page.read(reg) == u32::MAX));
    }
}

#[test]
fn case_b2_a_device_for_which_the_root_complex_has_no_addresses_left_is_refused_with_what_is_missing() {
    let (mut rig, root) = (Rig::new(), Parent::RootComplex(0));
    rig.tree.open_root_bus(0);
    // 1.5 GiB are below 4 GiB, of which ports keep 5 MiB.
    let whole = 2 << 30;
    let error = rig.add(root, at(5), one(mem32(whole))).unwrap_err().to_string();
    for part in [
        "does not fit on the root bus of `rc0`: its memory below 4 GiB lacks",
        "needed, 1531M there); remove a device there",
        "root bus of `rc0` has 30 of 31 device numbers free",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    // What ports keep is not the root bus's, what is free of a window is, and what neighbours will take counts.
    let mut size = whole;
    while rig.tree.check_bus_fit(root, &[spec(one(mem32(size)))]).is_err() {
        size /= 2;
    }
    rig.add(root, at(5), one(mem32(size))).unwrap();
    let mut more = 0;
    while rig.add(root, at(6 + more), one(mem32(size))).is_ok() {
        more += 1;
    }
    assert!(u64::from(more) < whole / size, "{more} of {size:#x}");
    rig.tree.unplug_from_bus(root, 5, &mut Vec::new());
    rig.add(root, at(5), one(mem32(size))).unwrap();
    let error = rig.tree.check_bus_fit(root, &[spec(one(mem64(1 << 62)))]).unwrap_err().to_string();
    assert!(error.contains("its memory above 4 GiB lacks"), "{error}");
    // Guests put 64-bit BARs above 4 GiB, prefetchable or not.
    rig.add(root, at(30), one(BarSpec { prefetchable: false, ..mem64(whole) })).unwrap();
}

#[test]
fn a_conventional_bus_takes_devices_at_the_numbers_that_it_has() {
    let mut rig = Rig::new();
    let bridge = rig.on("bridge");
    assert_eq!(rig.free(bridge), [1, 2, 3]);
    assert_eq!(rig.tree.bus(rig.on("plain")), None);
    assert_eq!(rig.tree.conventional_buses().map(|bus| bus.name).collect::<Vec<_>>(), [Name::from("bridge")]);
    for (number, why) in [(0, "a device is there"), (4, "no device can come to that number")] {
        let error = rig.add(bridge, at(number), one(mem32(MIB))).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert_eq!(rig.add(rig.on("plain"), at(1), one(mem32(MIB))), Err(PlugError::NoBus));
    let id = rig.add(bridge, at(2), one(mem32(MIB))).unwrap();
    assert_eq!((rig.read(2, at(2), 0), rig.read(2, at(2), 0x100)), (0x0001_1234, u32::MAX), "256 bytes and no more");
    assert_eq!(rig.tree.intx(bridge, at(2), 1), rig.tree.intx(bridge, at(2), 1), "a wire");
    assert_eq!(rig.free(bridge), [1, 3]);
    let shown = rig.tree.hot_plug_ports().to_string();
    assert_eq!(shown, "hot-plug ports: PCIe-to-PCI bridge `bridge` has 2 of 4 device numbers free");
    let gone = rig.tree.unplug_from_bus(bridge, 2, &mut rig.effects);
    assert_eq!(gone.iter().map(|(gone, _)| *gone).collect::<Vec<_>>(), [id]);
    assert_eq!(rig.read(2, at(2), 0), u32::MAX);
    let cold = rig.plan.by_name("cold").unwrap().id;
    let gone = rig.tree.unplug_from_bus(bridge, 0, &mut rig.effects);
    assert_eq!(gone.iter().map(|(gone, _)| *gone).collect::<Vec<_>>(), [cold], "one that was planned leaves as well");
    assert!(rig.effects.contains(&Effect::Hide { function: cold, bar: 0 }));
}

#[test]
fn functions_of_one_device_come_and_leave_together() {
    let mut rig = Rig::new();
    let bridge = rig.on("bridge");
    let functions: Vec<Newcomer> = [0, 3].map(|function| rig.newcomer(Devfn::new(1, function), one(mem32(MIB)))).into();
    rig.tree.plug_on_bus(bridge, functions, &mut rig.effects).unwrap();
    assert_eq!(rig.read(2, Devfn::new(1, 3), 0), 0x0001_1234);
    assert_eq!(rig.read(2, at(1), 0x0C) >> 16 & 0x80, 0x80, "multi-function");
    assert_eq!(rig.tree.unplug_from_bus(bridge, 1, &mut rig.effects).len(), 2);
    let apart: Vec<Newcomer> = [at(1), at(2)].map(|at| rig.newcomer(at, one(mem32(MIB)))).into();
    assert!(matches!(rig.tree.plug_on_bus(bridge, apart, &mut Vec::new()), Err(PlugError::Place { .. })));
    let without: Vec<Newcomer> = vec![rig.newcomer(Devfn::new(1, 1), one(mem32(MIB)))];
    assert!(matches!(rig.tree.plug_on_bus(bridge, without, &mut Vec::new()), Err(PlugError::FunctionZero { .. })));
}

#[test]
fn case_b1_what_the_neighbours_have_does_not_count_as_room() {
    let mut rig = Rig::new();
    let bridge = rig.on("bridge");
    let windows = rig.tree.ports().find(|port| port.name.0 == "bridge").unwrap().windows;
    let base = windows.memory.unwrap().base;
    // `cold` has 1 of 4 MiB.
    rig.add(bridge, at(1), one(mem32(2 * MIB))).unwrap();
    let error = rig.add(bridge, at(2), one(mem32(2 * MIB))).unwrap_err().to_string();
    assert!(error.contains("`bridge`: its memory window lacks"), "{error}");
    rig.assign(2, at(1), base + 2 * MIB);
    assert!(rig.add(bridge, at(2), one(mem32(2 * MIB))).is_err());
    rig.add(bridge, at(2), one(mem32(MIB))).unwrap();
    rig.add(bridge, at(3), one(mem64(64 * MIB))).unwrap();
    assert_eq!(rig.free(bridge), []);
}

#[test]
fn a_reset_gives_what_was_added_addresses_beside_its_neighbours() {
    let mut rig = Rig::new();
    let bridge = rig.on("bridge");
    for number in 1..=3 {
        rig.add(bridge, at(number), one(mem32(MIB))).unwrap();
    }
    assert_eq!(rig.tree.reachable().count(), 2, "the guest has given them none");
    rig.tree.reset(&mut rig.effects);
    let places: Vec<u64> = rig.tree.reachable().map(|(_, _, at, _)| at).collect();
    assert_eq!(places.len(), 5);
    assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= MIB), "{places:x?}");
}

#[test]
fn a_bridge_whose_bus_lost_one_device_of_several_is_programmed_for_the_others() {
    let mut rig = Rig::new();
    let bridge = rig.on("bridge");
    rig.add(bridge, at(2), one(mem32(MIB))).unwrap();
    assert_eq!(rig.tree.unplug_from_bus(bridge, 2, &mut rig.effects).len(), 1);
    rig.tree.program();
    let at = rig.plan.by_name("bridge").unwrap().at.bdf;
    assert_eq!(dword(&mut rig.tree, at, 4) & 2, 2, "memory of `cold` passes");
}
