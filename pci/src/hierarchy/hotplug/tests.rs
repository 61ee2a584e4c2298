//! Devices that come and go: what is refused, what a guest sees, and every order of both sides' steps.

mod races;

use std::sync::Arc;

use super::*;
use crate::address::Bdf;
use crate::bar::{BarKind, BarSpec};
use crate::emulated::{Attachment, EmulatedSpec, InterruptSpec};
use crate::ids::{ClassCode, Ids};
use crate::link::Link;
use crate::slot::SlotEvent;
use crate::sriov::SriovSpec;
use crate::sync::lock;
use crate::testing::{FakeEndpoint, FakeIntx, FakeMsi, dword, tree};
use crate::topology::tests::{downstream, endpoint, hot, kept, mem32, mem64, roomy, root_port, topology, upstream};
use crate::topology::{Plan, PlannedKind};

const MIB: u64 = 1 << 20;

/// Below rc0: `rp0` (surprise), `rp1` (orderly), `rp2` with a switch whose `dp0` has a button and whose `dp1` has none, and
/// `fixed` with a device that stays. Hot-plug ports keep 4 MiB and 512 MiB. `dp1` starts with `cold`.
fn plan() -> Plan {
    let reserve = kept(4 * MIB, 512 * MIB, 1);
    let nodes = vec![
        hot(root_port("rp0", "rc0"), reserve, Removal::Surprise),
        hot(root_port("rp1", "rc0"), reserve, Removal::Orderly),
        root_port("rp2", "rc0"),
        upstream("up", "rp2"),
        hot(downstream("dp0", "up"), reserve, Removal::Button),
        hot(downstream("dp1", "up"), reserve, Removal::Surprise),
        endpoint("cold", "dp1", &[mem32(MIB), mem64(64 * MIB)]),
        root_port("fixed", "rc0"),
        endpoint("stays", "fixed", &[mem32(MIB)]),
    ];
    topology(nodes).plan(&roomy()).unwrap()
}

fn device(number: u16, bars: [Option<BarSpec>; 6]) -> EmulatedSpec {
    EmulatedSpec {
        ids: Ids { vendor: 0x1234, device: number, class: ClassCode::new(0x08_8000), ..Ids::default() },
        bars,
        on: Attachment::Link(Link::default()),
        interrupt: InterruptSpec::Intx(2),
        ..EmulatedSpec::default()
    }
}

fn needs(bars: [Option<BarSpec>; 6]) -> EndpointSpec {
    EndpointSpec { bars, ..EndpointSpec::default() }
}

fn small() -> [Option<BarSpec>; 6] {
    [Some(mem32(MIB)), Some(mem64(64 * MIB)), None, None, None, None]
}

struct Rig {
    tree: Hierarchy,
    plan: Plan,
    sent: Arc<FakeMsi>,
    effects: Vec<Effect>,
}

impl Rig {
    fn new() -> Self {
        let (plan, sent) = (plan(), Arc::new(FakeMsi::default()));
        let tree = tree(&plan, &sent, |_, spec| device(0xC01D, spec.bars));
        let mut rig = Self { tree, plan, sent, effects: Vec::new() };
        rig.tree.start(&mut rig.effects);
        rig.effects.clear();
        rig
    }

    fn id(&self, name: &str) -> FunctionId {
        self.plan.by_name(name).unwrap().id
    }

    fn info(&self, name: &str) -> PortInfo {
        self.tree.ports().find(|port| port.name.0 == name).unwrap()
    }

    /// Adds a device with one function for each of `functions`, in this order.
    fn add(&mut self, port: &str, number: u16, functions: &[u8]) -> Result<Vec<FunctionId>, PlugError> {
        let port = self.id(port);
        let newcomers: Vec<Newcomer> = functions.iter().map(|function| self.newcomer(number, *function)).collect();
        let ids = newcomers.iter().map(|newcomer| newcomer.id).collect();
        self.tree.plug(port, newcomers, &mut self.effects).map(|()| ids)
    }

    fn newcomer(&mut self, number: u16, function: u8) -> Newcomer {
        Newcomer {
            id: self.tree.next_id(),
            name: Name(format!("dev{number}.{function}")),
            at: Devfn::new(0, function),
            function: FakeEndpoint::shared(&device(number + u16::from(function), small())),
            spec: needs(small()),
            mirrored: false,
        }
    }

    fn remove(&mut self, port: &str) -> Result<Vec<FunctionId>, PlugError> {
        let port = self.id(port);
        let gone = self.tree.unplug(port, &mut self.effects)?;
        Ok(gone.iter().map(|(id, _)| *id).collect())
    }

    fn bus(&self, port: &str) -> u8 {
        let PlannedKind::Port(port) = &self.plan.by_name(port).unwrap().kind else { panic!("no port") };
        port.buses.secondary
    }

    fn read(&mut self, bus: u8, function: u8, offset: u16) -> u32 {
        dword(&mut self.tree, Bdf::new(bus, Devfn::new(0, function)), offset)
    }

    fn write(&mut self, bus: u8, offset: u16, value: u32) {
        self.tree.write(0, Bdf::new(bus, Devfn::ZERO), offset, &value.to_le_bytes(), &mut self.effects);
    }

    fn write_port(&mut self, port: &str, offset: u16, value: u32) {
        let at = self.plan.by_name(port).unwrap().at.bdf;
        self.tree.write(0, at, offset, &value.to_le_bytes(), &mut self.effects);
    }

    /// What a handler does that clears everything.
    fn acknowledge(&mut self, port: &str) {
        self.write_port(port, 0x58, 0x0109_1028);
    }
}

#[test]
fn an_added_device_answers_and_its_addresses_are_left_to_the_guest() {
    let mut rig = Rig::new();
    let ids = rig.add("rp0", 7, &[0]).unwrap();
    let bus = rig.bus("rp0");
    assert_eq!(rig.read(bus, 0, 0), 0x0007_1234);
    assert_eq!(([0x10, 0x14, 0x18].map(|at| rig.read(bus, 0, at)), rig.read(bus, 0, 4) & 7), ([0, 0xC, 0], 0));
    assert_eq!(rig.effects, [], "nothing is mapped before the guest says where");
    let windows = rig.info("rp0").windows;
    let (low, high) = (windows.memory.unwrap().base, windows.prefetchable.unwrap().base);
    let halves = [high.to_le_bytes()[..4].try_into().unwrap(), high.to_le_bytes()[4..].try_into().unwrap()];
    rig.write(bus, 0x10, u32::try_from(low).unwrap());
    rig.write(bus, 0x14, u32::from_le_bytes(halves[0]));
    rig.write(bus, 0x18, u32::from_le_bytes(halves[1]));
    rig.write(bus, 0x04, 6);
    let id = ids[0];
    assert_eq!(rig.effects, [Effect::BusMaster { function: id, on: true }], "the port that was empty forwards no memory yet");
    rig.write_port("rp0", 0x04, 6);
    let expected = [
        Effect::BusMaster { function: id, on: true },
        Effect::Map { function: id, bar: 0, at: low },
        Effect::Map { function: id, bar: 1, at: high },
    ];
    assert_eq!(rig.effects, expected);
}

#[test]
fn case_b7_the_functions_of_a_device_come_together_at_their_numbers() {
    let mut rig = Rig::new();
    rig.add("dp0", 0x40, &[2, 0, 1]).unwrap();
    let bus = rig.bus("dp0");
    assert_eq!([0, 1, 2, 3].map(|function| rig.read(bus, function, 0) >> 16), [0x40, 0x41, 0x42, 0xFFFF]);
    let multi = [0, 1, 2].map(|function| rig.read(bus, function, 0x0C) >> 23 & 1);
    assert_eq!(multi, [1, 0, 0], "function 0 alone tells of the others");
    let mut rig = Rig::new();
    rig.add("dp0", 0x40, &[0]).unwrap();
    assert_eq!(rig.read(bus, 0, 0x0C) >> 23 & 1, 0);
}

#[test]
fn a_device_that_is_taken_out_reads_ones_and_reaches_nothing() {
    let mut rig = Rig::new();
    let cold = rig.id("cold");
    let bus = rig.bus("dp1");
    rig.write(bus, 4, 6);
    rig.effects.clear();
    let held = Shared::clone(rig.tree.endpoint(cold).unwrap());
    assert_eq!(rig.remove("dp1").unwrap(), [cold]);
    assert_eq!(
        rig.effects,
        [
            Effect::Hide { function: cold, bar: 0 },
            Effect::Hide { function: cold, bar: 1 },
            Effect::BusMaster { function: cold, on: false }
        ]
    );
    assert_eq!((rig.read(bus, 0, 0), rig.tree.endpoint(cold).is_none()), (u32::MAX, true));
    assert_eq!(lock(&held).config_read(Reg::containing(0)), u32::MAX, "a late caller sees nothing either");
    let occupants = rig.info("dp1").occupants;
    assert_eq!(occupants, []);
}

#[test]
fn case_b6_a_second_removal_is_a_conflict() {
    let mut rig = Rig::new();
    rig.remove("dp1").unwrap();
    let error = rig.remove("dp1").unwrap_err();
    assert_eq!(error, PlugError::Slot { port: "dp1".into(), source: SlotError::Empty });
    rig.add("rp1", 1, &[0]).unwrap();
    let port = rig.id("rp1");
    rig.tree.request_removal(port, &mut rig.effects).unwrap();
    assert_eq!(
        rig.tree.request_removal(port, &mut rig.effects),
        Err(PlugError::Slot { port: "rp1".into(), source: SlotError::Requested })
    );
    assert!(rig.info("rp1").requested);
}

#[test]
fn case_b3_a_taken_port_is_refused_with_the_list_of_all() {
    let mut rig = Rig::new();
    rig.add("rp0", 1, &[0]).unwrap();
    rig.remove("dp1").unwrap();
    let list = "root port `rp0` has `dev1.0`, root port `rp1` is free, downstream port `dp0` is free, \
                downstream port `dp1` waits for the guest";
    let taken = rig.add("rp0", 2, &[0]).unwrap_err().to_string();
    assert!(taken.contains("port `rp0` has `dev1.0`") && taken.ends_with(list), "{taken}");
    for (port, said) in [("fixed", "port `fixed` is not hot-pluggable"), ("up", "port `up` is not hot-pluggable")] {
        let error = rig.add(port, 2, &[0]).unwrap_err().to_string();
        assert!(error.starts_with(said) && error.ends_with(list), "{error}");
        assert_eq!(rig.remove(port).unwrap_err().to_string(), error);
    }
    let stays = rig.id("stays");
    let error = rig.tree.request_removal(stays, &mut rig.effects).unwrap_err().to_string();
    assert!(error.contains("is no port") && error.ends_with(list), "{error}");
}

#[test]
fn case_b1_a_device_without_room_is_refused_before_it_is_attached() {
    let mut rig = Rig::new();
    let gpu = [Some(mem32(16 * MIB)), Some(mem64(512 * MIB)), None, Some(mem64(32 * MIB)), None, None];
    let error = rig.tree.check_fit(rig.id("rp0"), &[needs(gpu)]).unwrap_err();
    let text = error.to_string();
    for fact in
        ["`rp0`", "memory window lacks 20M (24M needed, 4M there)", "prefetchable window lacks 32M (544M needed, 512M there)"]
    {
        assert!(text.contains(fact), "{text} lacks {fact}");
    }
    let (port, id) = (rig.id("rp0"), rig.tree.next_id());
    let newcomer = Newcomer {
        id,
        name: "gpu".into(),
        at: Devfn::ZERO,
        function: FakeEndpoint::shared(&device(9, gpu)),
        spec: needs(gpu),
        mirrored: false,
    };
    assert_eq!(rig.tree.plug(port, vec![newcomer], &mut Vec::new()), Err(error));
    assert_eq!(rig.read(rig.bus("rp0"), 0, 0), u32::MAX);
    rig.add("rp0", 1, &[0]).unwrap();
}

/// A function whose virtual functions begin `first_offset` behind it, and reach the next bus from `total_vfs` on.
fn with_virtual_functions(total_vfs: u16, first_offset: u16) -> EndpointSpec {
    let bars = [Some(mem32(4096)), None, None, None, None, None];
    let sriov = SriovSpec { total_vfs, first_offset, stride: 1, vf_device: 1, bars };
    EndpointSpec { sriov: Some(Box::new(sriov)), ..EndpointSpec::default() }
}

#[test]
fn case_b1_virtual_functions_that_need_more_bus_numbers_than_a_port_has_are_refused_before_they_are_attached() {
    let nodes = vec![
        hot(root_port("one", "rc0"), kept(4 * MIB, 64 * MIB, 1), Removal::Surprise),
        hot(root_port("two", "rc0"), kept(4 * MIB, 64 * MIB, 2), Removal::Surprise),
    ];
    let plan = topology(nodes).plan(&roomy()).unwrap();
    let mut tree = tree(&plan, &Arc::default(), |_, _| device(1, small()));
    tree.start(&mut Vec::new());
    let [one, two] = ["one", "two"].map(|name| plan.by_name(name).unwrap().id);
    let (near, far, farther) = (with_virtual_functions(255, 1), with_virtual_functions(256, 300), with_virtual_functions(600, 1));
    for port in [one, two] {
        assert_eq!(tree.check_fit(port, &[needs(small()), near.clone()]).err().map(|error| error.to_string()), None);
    }
    tree.check_fit(two, std::slice::from_ref(&with_virtual_functions(200, 300))).unwrap();
    for (port, spec, lack) in [
        (one, &far, "it lacks 2 bus numbers (3 needed, 1 there)"),
        (two, &far, "it lacks 1 bus number (3 needed, 2 there)"),
        (two, &farther, "it lacks 1 bus number (3 needed, 2 there)"),
    ] {
        let refused = tree.check_fit(port, std::slice::from_ref(spec)).unwrap_err().to_string();
        assert!(refused.contains(lack), "{refused}");
    }
    // Function 7 is further behind than function 0 by seven.
    let last = with_virtual_functions(1, 250);
    tree.check_fit(one, std::slice::from_ref(&last)).unwrap();
    for (number, fits) in [(7, false), (5, true)] {
        let newcomer = |number, spec: EndpointSpec, tree: &mut Hierarchy| Newcomer {
            id: tree.next_id(),
            name: Name(format!("f{number}")),
            at: Devfn::new(0, number),
            function: FakeEndpoint::shared(&EmulatedSpec { sriov: spec.sriov.as_deref().cloned(), ..device(1, [None; 6]) }),
            spec,
            mirrored: false,
        };
        let both = vec![newcomer(0, needs([None; 6]), &mut tree), newcomer(number, last.clone(), &mut tree)];
        assert_eq!(tree.plug(one, both, &mut Vec::new()).is_ok(), fits, "function {number}");
    }
}

#[test]
fn the_room_of_a_port_is_what_the_guest_has_programmed() {
    let mut rig = Rig::new();
    let windows = rig.info("rp0").windows;
    let base = u32::try_from(windows.memory.unwrap().base >> 16).unwrap();
    rig.write_port("rp0", 0x20, base | base << 16);
    assert_eq!(rig.info("rp0").windows.memory.unwrap().len(), MIB, "made smaller");
    let two = [Some(mem32(2 * MIB)), None, None, None, None, None];
    assert!(rig.tree.check_fit(rig.id("rp0"), &[needs(two)]).is_err());
    rig.write_port("rp0", 0x20, 0x0000_FFF0);
    assert_eq!(rig.info("rp0").windows, windows, "a closed window is about to be opened");
    rig.write_port("rp0", 0x20, 0);
    assert_eq!(rig.info("rp0").windows, windows, "and 0 is no address");
}

#[test]
fn functions_that_form_no_device_are_refused() {
    let mut rig = Rig::new();
    assert_eq!(rig.add("rp0", 1, &[1]), Err(PlugError::FunctionZero { port: "rp0".into() }));
    assert_eq!(rig.add("rp0", 1, &[]), Err(PlugError::FunctionZero { port: "rp0".into() }));
    assert!(matches!(rig.add("rp0", 1, &[0, 0]), Err(PlugError::Place { .. })));
    let mut far = rig.newcomer(1, 0);
    far.at = Devfn::new(1, 0);
    let port = rig.id("rp0");
    assert!(matches!(rig.tree.plug(port, vec![far], &mut Vec::new()), Err(PlugError::Place { .. })));
    for id in [port, FunctionId(4000)] {
        let stale = Newcomer { id, ..rig.newcomer(1, 0) };
        assert!(matches!(rig.tree.plug(port, vec![stale], &mut Vec::new()), Err(PlugError::Id { .. })));
    }
    assert_eq!(rig.info("rp0").occupants, []);
}

#[test]
fn a_replacement_waits_for_the_guest_or_the_deadline() {
    let mut rig = Rig::new();
    rig.remove("dp1").unwrap();
    assert_eq!(rig.add("dp1", 1, &[0]), Err(PlugError::Leaving { port: "dp1".into() }));
    assert!(rig.info("dp1").leaving && !rig.info("dp1").is_free());
    rig.effects.clear();
    rig.acknowledge("dp1");
    assert_eq!(rig.effects, [Effect::Slot { port: rig.id("dp1"), event: SlotEvent::EventsCleared }]);
    rig.add("dp1", 1, &[0]).unwrap();
    rig.remove("dp1").unwrap();
    rig.tree.expire(rig.id("dp1"));
    rig.add("dp1", 2, &[0]).unwrap();
}

#[test]
fn a_bus_reset_above_a_switch_tells_that_nothing_is_pending_any_longer() {
    let mut rig = Rig::new();
    rig.remove("dp1").unwrap();
    rig.effects.clear();
    rig.write_port("rp2", 0x3C, 0x0040_0000);
    assert_eq!(rig.effects, [Effect::Slot { port: rig.id("dp1"), event: SlotEvent::EventsCleared }]);
    assert!(!rig.info("dp1").leaving);
}

#[test]
fn a_reset_of_the_machine_gives_added_devices_addresses_in_the_planned_windows() {
    let mut rig = Rig::new();
    let before: Vec<_> = rig.tree.reachable().collect();
    rig.add("rp1", 3, &[0, 1]).unwrap();
    let port = rig.id("rp1");
    rig.tree.request_removal(port, &mut rig.effects).unwrap();
    rig.write_port("dp1", 4, 0);
    rig.write_port("dp1", 0x18, 0);
    rig.effects.clear();
    rig.tree.reset(&mut rig.effects);
    let told: Vec<&Effect> = rig.effects.iter().filter(|effect| matches!(effect, Effect::Slot { .. })).collect();
    let slot = |event| Effect::Slot { port, event };
    assert_eq!(told, [&slot(SlotEvent::EventsCleared), &slot(SlotEvent::Released)], "the removal is finished");
    let after: Vec<_> = rig.tree.reachable().collect();
    let old = |reach: &(FunctionId, u8, u64, u64)| before.contains(reach);
    assert_eq!(after.iter().filter(|reach| old(reach)).count(), before.len(), "the ports are as planned");
    let windows = rig.info("rp1").windows;
    let new: Vec<_> = after.iter().filter(|reach| !old(reach)).collect();
    assert_eq!(new.len(), 4);
    for (_, _, at, size) in new {
        assert!(windows.memory.unwrap().contains(*at, *size) || windows.prefetchable.unwrap().contains(*at, *size));
    }
    assert_eq!(rig.read(rig.bus("rp1"), 0, 0x0C) >> 23 & 1, 1);
}

#[test]
fn a_reset_keeps_what_was_taken_out_away() {
    let mut rig = Rig::new();
    rig.remove("dp1").unwrap();
    rig.tree.reset(&mut rig.effects);
    assert_eq!(rig.read(rig.bus("dp1"), 0, 0), u32::MAX);
    rig.add("dp1", 1, &[0]).unwrap();
}

#[test]
fn the_pin_of_an_added_device_turns_like_that_of_a_planned_one() {
    let rig = Rig::new();
    for name in ["cold", "stays"] {
        let planned = rig.plan.by_name(name).unwrap();
        let (PlannedKind::Endpoint(endpoint), Parent::Port(port)) = (&planned.kind, planned.on) else { panic!() };
        assert_eq!(rig.tree.intx(Parent::Port(port), planned.at.bdf.devfn(), 1), endpoint.intx);
    }
    for (name, port) in rig.plan.functions.iter().filter_map(|planned| match (&planned.kind, planned.on) {
        (PlannedKind::Port(port), Parent::Port(on)) => Some((on, (planned.at.bdf.devfn(), port.intx))),
        _ => None,
    }) {
        let (devfn, intx) = port;
        assert_eq!(intx.and(rig.tree.intx(Parent::Port(name), devfn, 1)), intx);
    }
    assert_eq!(
        (rig.tree.intx(Parent::Port(rig.id("rp0")), Devfn::ZERO, 0), rig.tree.intx(Parent::Port(rig.id("rp0")), Devfn::ZERO, 5)),
        (None, None)
    );
}

#[test]
fn a_port_without_messages_uses_its_wire() {
    let mut rig = Rig::new();
    let wire = FakeIntx::default();
    rig.tree.connect(rig.id("rp0"), Box::new(wire.clone()));
    rig.write_port("rp0", 0x58, 0x1028);
    rig.add("rp0", 1, &[0]).unwrap();
    assert!(wire.level());
    rig.acknowledge("rp0");
    assert!(!wire.level());
}

#[test]
fn a_switch_that_is_taken_out_takes_everything_with_it() {
    let reserve = kept(MIB, 2 * MIB, 4);
    let nodes = vec![
        hot(root_port("rp", "rc0"), reserve, Removal::Surprise),
        upstream("up", "rp"),
        downstream("dp", "up"),
        endpoint("e", "dp", &[mem32(MIB)]),
    ];
    let plan = topology(nodes).plan(&roomy()).unwrap();
    let mut tree = tree(&plan, &Arc::default(), |_, _| device(1, small()));
    tree.start(&mut Vec::new());
    let port = plan.by_name("rp").unwrap().id;
    assert_eq!(tree.unplug(port, &mut Vec::new()).unwrap().len(), 1);
    assert_eq!((tree.ports().count(), tree.reachable().count()), (1, 0));
}

#[test]
fn a_mirror_comes_and_goes_with_its_function() {
    let mut rig = Rig::new();
    let port = rig.id("rp0");
    let newcomer = Newcomer { mirrored: true, ..rig.newcomer(1, 0) };
    let function = newcomer.id;
    rig.tree.plug(port, vec![newcomer], &mut rig.effects).unwrap();
    rig.write_port("rp0", 0x18, 0);
    rig.tree.reset(&mut rig.effects);
    rig.remove("rp0").unwrap();
    let mirrors: Vec<&Effect> = rig.effects.iter().filter(|effect| matches!(effect, Effect::Mirror { .. })).collect();
    let [on, off] = [true, false].map(|on| Effect::Mirror { function, on });
    assert_eq!(mirrors, [&on, &off, &on, &off]);
}

#[test]
fn ids_are_never_given_twice() {
    let mut rig = Rig::new();
    let mut seen: Vec<FunctionId> = rig.plan.functions.iter().map(|function| function.id).collect();
    for round in 0..20 {
        let ids = rig.add("rp0", round, &[0, 3]).unwrap();
        assert!(ids.iter().all(|id| !seen.contains(id)));
        seen.extend(ids);
        rig.remove("rp0").unwrap();
        rig.acknowledge("rp0");
    }
}

#[test]
fn a_thousand_rounds_leave_the_tree_as_it_was() {
    let mut rig = Rig::new();
    let size = |rig: &Rig| (rig.tree.nodes.len(), rig.tree.reachable().count(), rig.tree.reach.len());
    let before = size(&rig);
    for round in 0..1000 {
        rig.add("rp0", round, &[0]).unwrap();
        let (bus, windows) = (rig.bus("rp0"), rig.info("rp0").windows);
        rig.write_port("rp0", 0x04, 6);
        rig.write(bus, 0x10, u32::try_from(windows.memory.unwrap().base).unwrap());
        rig.write(bus, 0x04, 6);
        assert_eq!(rig.tree.reachable().count(), before.1 + 1);
        rig.remove("rp0").unwrap();
        rig.acknowledge("rp0");
    }
    assert_eq!(size(&rig), before);
    assert_eq!(rig.info("rp0").occupants, []);
    assert_eq!(BarKind::Memory32, small()[0].unwrap().kind);
    assert!(rig.sent.take().is_empty(), "nobody enabled messages");
}

#[test]
fn a_port_s_link_is_as_fast_and_wide_as_the_port_and_what_comes_can_be() {
    let mut rig = Rig::new();
    let at = rig.plan.by_name("rp0").unwrap().at.bdf;
    // Link capabilities and status: the latter's rate and width.
    let shown = |rig: &mut Rig| (dword(&mut rig.tree, at, 0x4C) & 0x3FF, dword(&mut rig.tree, at, 0x50) >> 16 & 0x3FF);
    let own = (0x105, 0x105);
    for (link, trained) in [("8GT/s x4", 0x43), ("64GT/s x16", 0x105), ("2.5GT/s x32", 0x101), ("32GT/s x1", 0x15)] {
        let mut newcomer = rig.newcomer(1, 0);
        let link = Attachment::Link(Link::at(link.parse().unwrap()));
        newcomer.function = FakeEndpoint::shared(&EmulatedSpec { on: link, ..device(1, small()) });
        rig.tree.plug(rig.id("rp0"), vec![newcomer], &mut rig.effects).unwrap();
        assert_eq!(shown(&mut rig), (own.0, trained), "{link:?}");
        assert_eq!(rig.info("rp0").link.current.speed.encoding(), u8::try_from(trained & 0xF).unwrap());
        rig.tree.reset(&mut rig.effects);
        assert_eq!(shown(&mut rig), (own.0, trained), "a reset trains it again: {link:?}");
        rig.remove("rp0").unwrap();
        rig.acknowledge("rp0");
        assert_eq!(rig.info("rp0").link, Link::default(), "what was there limits nobody else");
    }
    let mut newcomer = rig.newcomer(1, 0);
    newcomer.function = FakeEndpoint::shared(&EmulatedSpec { on: Attachment::RootBus, ..device(1, small()) });
    rig.tree.plug(rig.id("rp0"), vec![newcomer], &mut rig.effects).unwrap();
    assert_eq!(shown(&mut rig), own, "it shows no link");
}

#[test]
fn a_port_above_a_device_that_rests_at_the_start_is_for_the_next_one_as_fast_as_it_can_be() {
    let link = Link { current: "2.5GT/s x8".parse().unwrap(), ..Link::default() };
    let mut rig = Rig::new();
    for planned in &mut rig.plan.functions {
        if let PlannedKind::Port(port) = &mut planned.kind {
            port.spec.link = link;
        }
    }
    rig.tree = tree(&rig.plan, &rig.sent, |_, spec| device(0xC01D, spec.bars));
    rig.tree.start(&mut Vec::new());
    assert_eq!(rig.info("dp1").link, link, "as the host shows it");
    rig.remove("dp1").unwrap();
    rig.acknowledge("dp1");
    for (port, device, trained) in [("dp1", 1, "16GT/s x16"), ("rp0", 2, "32GT/s x4")] {
        assert_eq!(rig.info(port).link, Link::default(), "what comes may follow it");
        let trained = trained.parse().unwrap();
        let on = Attachment::Link(Link::at(trained));
        let newcomer = Newcomer {
            function: FakeEndpoint::shared(&EmulatedSpec { on, ..self::device(device, small()) }),
            ..rig.newcomer(device, 0)
        };
        rig.tree.plug(rig.id(port), vec![newcomer], &mut rig.effects).unwrap();
        assert_eq!(rig.info(port).link, Link { current: trained, ..link }, "{port}");
    }
}
