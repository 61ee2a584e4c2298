//! The planner's numbers in real port and endpoint registers, looked at from outside.

use std::cell::Cell;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::*;
use crate::bar::PORTS;
use crate::emulated::{Attachment, EmulatedSpec};
use crate::function::FunctionId;
use crate::hierarchy::Hierarchy;
use crate::ids::own;
use crate::link::Link;
use crate::testing::{cases, tree};
use crate::topology::tests::properties::any_topology;
use crate::topology::tests::{MIB, bars, endpoint_of, mem32, mem64, placed_bars, roomy, topology};
use crate::topology::tests::{downstream, endpoint, function, io, root_port, upstream};
use crate::topology::{Parent, Plan, PlannedFunction, PlannedKind, PlannedRootComplex, PortKind};

fn attachment(plan: &Plan, on: Parent) -> Attachment {
    let Parent::Port(port) = on else { return Attachment::RootBus };
    let PlannedKind::Port(port) = &plan.functions[port.0 as usize].kind else { panic!("no port") };
    if port.spec.kind.has_link_below() { Attachment::Link(Link::default()) } else { Attachment::Conventional }
}

/// Whether the device that a function belongs to has functions beyond 7.
fn siblings_beyond_7(plan: &Plan, planned: &PlannedFunction) -> bool {
    plan.functions.iter().any(|other| other.on == planned.on && other.at.bdf.devfn().byte() > 7)
}

/// A machine's hierarchy, started as planned, without the machine.
struct Bench(Hierarchy);

/// Reachable BARs by address: whose, which, where, bytes.
type Reachable = Vec<(FunctionId, BarIndex, u64, u64)>;

impl Bench {
    fn programmed(plan: &Plan) -> Self {
        let mut tree = tree(plan, &Arc::default(), |planned, spec| EmulatedSpec {
            ids: spec.ids,
            bars: spec.bars,
            rom: spec.rom,
            sriov: spec.sriov.as_deref().copied(),
            ari: spec.sriov.is_some() || siblings_beyond_7(plan, planned),
            on: attachment(plan, planned.on),
            ..EmulatedSpec::default()
        });
        tree.start(&mut Vec::new());
        Self(tree)
    }

    fn reachable(&self) -> Reachable {
        self.0.reachable().collect()
    }
}

impl Cycles for Bench {
    fn read(&mut self, at: Sbdf, offset: u16, data: &mut [u8]) {
        self.0.read(at.segment, at.bdf, offset, data);
    }

    fn write(&mut self, at: Sbdf, offset: u16, data: &[u8]) {
        self.0.write(at.segment, at.bdf, offset, data, &mut Vec::new());
    }
}

/// What a walk must find of `planned`.
fn expected(planned: &PlannedFunction) -> Found {
    let mut found = Found {
        at: planned.at,
        vendor: own::VENDOR,
        device: 0,
        class: 0x06_0400,
        multifunction: planned.multifunction,
        memory_enabled: true,
        bars: Vec::new(),
        rom: None,
        virtual_functions: None,
        bridge: None,
    };
    match &planned.kind {
        PlannedKind::Port(port) => {
            let kind = port.spec.kind;
            found.device = match kind {
                PortKind::Root => own::ROOT_PORT,
                PortKind::Upstream => own::UPSTREAM_PORT,
                PortKind::Downstream => own::DOWNSTREAM_PORT,
                PortKind::PciBridge => own::PCI_BRIDGE,
            };
            // Memory has nowhere to go where nothing is below.
            found.memory_enabled = port.occupied;
            found.bridge = Some(FoundBridge {
                primary: planned.at.bdf.bus(),
                buses: port.buses,
                windows: port.windows,
                io_window: false,
                link: kind.has_link_below(),
            });
        }
        PlannedKind::Endpoint(endpoint) => {
            let ids = endpoint.spec.ids;
            (found.vendor, found.device, found.class) = (ids.vendor, ids.device, ids.class.value());
            for (bar, (spec, at)) in (0..).zip(endpoint.spec.bars.iter().zip(endpoint.bars)) {
                found.bars.extend(spec.map(|spec| FoundBar { bar, spec, at: at.unwrap_or(0) }));
            }
            let rom = |size| FoundBar { bar: 6, spec: BarSpec::rom(size), at: endpoint.rom.unwrap() };
            found.rom = endpoint.spec.rom.map(rom);
            found.virtual_functions = endpoint.spec.sriov.as_ref().map(|sriov| {
                let bars = (0..).zip(sriov.bars.iter().zip(endpoint.vf_bars));
                FoundVfs {
                    offset: 0,
                    total: sriov.total_vfs,
                    more_buses: u8::try_from(sriov.more_buses(planned.at.bdf.devfn())).unwrap(),
                    bars: bars.filter_map(|(bar, (spec, at))| Some(FoundBar { bar, spec: (*spec)?, at: at.unwrap() })).collect(),
                }
            });
            // Without memory there is nothing to enable.
            found.memory_enabled = found.rom.is_some() || found.bars.iter().any(|bar| bar.spec.is_memory());
        }
    }
    found
}

fn walk_all(plan: &Plan, cycles: &mut dyn Cycles) -> Vec<Found> {
    let roots = plan.root_complexes.iter();
    let mut found: Vec<Found> = roots.flat_map(|root| walk(cycles, root.segment, root.buses.secondary)).collect();
    found.sort_by_key(|function| function.at);
    found.iter_mut().filter_map(|function| function.virtual_functions.as_mut()).for_each(|vfs| vfs.offset = 0);
    found
}

fn assert_finds_the_plan(plan: &Plan, bench: &mut Bench) {
    let mut wanted: Vec<Found> = plan.functions.iter().map(expected).collect();
    wanted.sort_by_key(|function| function.at);
    let found = walk_all(plan, bench);
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_eq!(found, wanted);
    }
    let place = |spec: &BarSpec, at: u64| if spec.is_memory() { at } else { PORTS | at };
    let placed = placed_bars(plan).into_iter();
    let mut wanted: Reachable =
        placed.map(|(id, bar, spec, at)| (id, BarIndex::try_from(bar).unwrap(), place(&spec, at), spec.size)).collect();
    wanted.sort_by_key(|(_, _, at, _)| *at);
    assert_eq!(bench.reachable(), wanted);
}

fn assert_assigns_everything(plan: &Plan, bench: &mut Bench) {
    for root in &plan.root_complexes {
        assign::clear(bench, root);
    }
    let on_root = |planned: &&PlannedFunction| matches!(planned.on, Parent::RootComplex(_));
    assert_eq!(walk_all(plan, bench).len(), plan.functions.iter().filter(on_root).count(), "nothing is behind a cleared port");
    assert_eq!(bench.reachable(), []);
    for root in &plan.root_complexes {
        assign::assign(bench, root).unwrap();
    }
    let mut wanted = Reachable::new();
    let found = walk_all(plan, bench);
    assert_eq!(found.len(), plan.functions.len());
    // Depth-first numbering has one order, whatever buses the plan keeps free in between.
    let mut in_order: Vec<&PlannedFunction> = plan.functions.iter().collect();
    in_order.sort_by_key(|planned| planned.at);
    for (found, planned) in found.into_iter().zip(in_order) {
        let specs = |found: &Found| -> Vec<(BarIndex, BarSpec)> { found.bars.iter().map(|bar| (bar.bar, bar.spec)).collect() };
        assert_eq!(specs(&found), specs(&expected(planned)));
        for bar in found.bars.iter().filter(|bar| !bar.spec.is_memory() && matches!(planned.on, Parent::RootComplex(_))) {
            wanted.push((planned.id, bar.bar, PORTS | bar.at, bar.spec.size));
        }
        for bar in found.bars.iter().filter(|bar| bar.spec.is_memory()) {
            assert!(bar.at != 0 && bar.at % bar.spec.size == 0, "{}: {bar:x?}", planned.name);
            let windows = plan.root_complexes.iter().filter(|root| root.segment == found.at.segment);
            let mut windows = windows.flat_map(|root| root.mem32.iter().chain(&root.mem64));
            assert!(windows.any(|window| window.contains(bar.at, bar.spec.size)), "{}: {bar:x?}", planned.name);
            wanted.push((planned.id, bar.bar, bar.at, bar.spec.size));
        }
        let mut more: Vec<(FoundBar, u64)> = found.rom.iter().map(|rom| (*rom, rom.spec.size)).collect();
        if let Some(vfs) = &found.virtual_functions {
            more.extend(vfs.bars.iter().map(|bar| (*bar, bar.spec.size * u64::from(vfs.total))));
        }
        for (bar, size) in more {
            assert!(bar.at != 0 && bar.at % bar.spec.size == 0, "{}: {bar:x?}", planned.name);
            assert!(bench.reachable().iter().all(|(_, _, at, len)| at + len <= bar.at || bar.at + size <= *at));
        }
    }
    wanted.sort_by_key(|(_, _, at, _)| *at);
    assert_eq!(bench.reachable(), wanted, "every BAR is reachable where it was put");
}

fn switch() -> Plan {
    let nodes = vec![
        endpoint("console", "rc0", &[io(32), mem32(4096)]),
        root_port("rp0", "rc0"),
        upstream("up", "rp0"),
        downstream("dp0", "up"),
        downstream("dp1", "up"),
        endpoint("gpu", "dp0", &[mem32(16 * MIB), mem64(128 << 30), mem64(32 * MIB)]),
        endpoint("nic0", "dp1", &[mem64(32 * MIB), io(32)]),
        function(endpoint("nic1", "dp1", &[mem64(32 * MIB)]), 1),
        root_port("rp1", "rc0"),
    ];
    topology(nodes).plan(&roomy()).unwrap()
}

#[test]
fn case_a13_a_guest_finds_the_switch_as_it_was_planned() {
    let plan = switch();
    let mut bench = Bench::programmed(&plan);
    assert_finds_the_plan(&plan, &mut bench);
    // Looking changed nothing.
    assert_finds_the_plan(&plan, &mut bench);
}

#[test]
fn firmware_that_starts_from_cleared_registers_reaches_everything() {
    let plan = switch();
    assert_assigns_everything(&plan, &mut Bench::programmed(&plan));
}

#[test]
fn the_walk_reports_what_is_there_and_not_what_was_planned() {
    let plan = switch();
    let mut bench = Bench::programmed(&plan);
    let at = plan.by_name("gpu").unwrap().at;
    bench.write(at, 0x10, &0x9000_0000u32.to_le_bytes());
    let found = walk_all(&plan, &mut bench);
    let gpu = found.iter().find(|found| found.at == at).unwrap();
    assert_eq!(gpu.bars[0], FoundBar { bar: 0, spec: bars(&[mem32(16 * MIB)])[0].unwrap(), at: 0x9000_0000 });
    assert_ne!(endpoint_of(&plan, "gpu").bars[0], Some(0x9000_0000));
}

#[test]
fn too_few_buses_and_too_little_memory_are_told() {
    let plan = switch();
    let root = &plan.root_complexes[0];
    let with = |change: fn(&mut PlannedRootComplex)| {
        let mut less = root.clone();
        change(&mut less);
        let mut bench = Bench::programmed(&plan);
        assign::clear(&mut bench, root);
        assign::assign(&mut bench, &less).unwrap_err().to_string()
    };
    assert!(with(|root| root.buses.subordinate = 3).starts_with("no bus number is left for the bridge 0000:02:01.0"));
    assert!(with(|root| root.mem64.clear()).contains("bytes of prefetchable memory"));
}

/// Trees that do not plan show nothing; a generator that makes too many of them is no test.
#[test]
fn a_guest_finds_exactly_the_plan_and_can_make_its_own() {
    let cases = cases(64);
    let planned = Cell::new(0);
    let mut runner = TestRunner::new(ProptestConfig { cases, source_file: Some(file!()), ..ProptestConfig::default() });
    let result = runner.run(&any_topology(), |topology| {
        if let Ok(plan) = topology.plan(&roomy()) {
            planned.set(planned.get() + 1);
            let mut bench = Bench::programmed(&plan);
            assert_finds_the_plan(&plan, &mut bench);
            assert_assigns_everything(&plan, &mut bench);
        }
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}\n{runner}"));
    assert!(planned.get() >= cases * 3 / 4, "{} of {cases} trees plan", planned.get());
}
