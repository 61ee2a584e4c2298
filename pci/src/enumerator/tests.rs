//! The planner's numbers in real port and endpoint registers, looked at from outside.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::access::{self, Access};
use crate::emulated::{Emulated, EmulatedSpec, InterruptSpec};
use crate::function::Programming;
use crate::ids::own;
use crate::link::Link;
use crate::port::Port;
use crate::testing::FakeMsi;
use crate::topology::tests::properties::any_topology;
use crate::topology::tests::{MIB, bars, endpoint_of, mem32, mem64, roomy, topology};
use crate::topology::tests::{downstream, endpoint, function, io, root_port, upstream};
use crate::topology::{Parent, Plan, PlannedFunction, PlannedKind, PlannedRootComplex};

/// Ports and endpoints on wires: routes a cycle by comparing bus numbers from the root down.
struct Bench {
    plan: Plan,
    functions: Vec<Registers>,
}

enum Registers {
    Port(Box<Port>),
    Endpoint(Box<Emulated>),
}

impl Bench {
    fn programmed(plan: &Plan) -> Self {
        let functions = plan.functions.iter().map(|planned| match &planned.kind {
            PlannedKind::Port(port) => {
                let mut port = Port::new(planned, port, Arc::new(FakeMsi::default())).unwrap();
                port.program();
                Registers::Port(Box::new(port))
            }
            PlannedKind::Endpoint(endpoint) => {
                let spec = EmulatedSpec {
                    ids: endpoint.spec.ids,
                    bars: endpoint.spec.bars,
                    link: matches!(planned.on, Parent::Port(_)).then(Link::default),
                    interrupt: InterruptSpec::None,
                    flr: false,
                    clique: None,
                    vendor_capabilities: Vec::new(),
                    serial_number: None,
                };
                let mut emulated = Emulated::new(&spec, Arc::new(FakeMsi::default()), None).unwrap();
                emulated.program(&Programming {
                    bars: endpoint.bars,
                    memory: true,
                    interrupt_line: 0xFF,
                    multifunction: planned.multifunction,
                });
                Registers::Endpoint(Box::new(emulated))
            }
        });
        Self { plan: plan.clone(), functions: functions.collect() }
    }

    fn find(&self, at: Sbdf) -> Option<usize> {
        let bus = at.bdf.bus();
        let root = self.plan.root_complexes.iter().position(|root| root.segment == at.segment && root.buses.contains(bus))?;
        let (mut on, mut here) = (Parent::RootComplex(root), self.plan.root_complexes[root].buses.secondary);
        while here != bus {
            let (id, secondary) = self.below(on).find_map(|planned| {
                let Registers::Port(port) = self.of(planned) else { return None };
                port.buses().filter(|buses| buses.contains(bus)).map(|buses| (planned.id, buses.secondary))
            })?;
            (on, here) = (Parent::Port(id), secondary);
        }
        let planned = self.below(on).find(|planned| planned.at.bdf.devfn() == at.bdf.devfn())?;
        usize::try_from(planned.id.0).ok()
    }

    fn below(&self, on: Parent) -> impl Iterator<Item = &PlannedFunction> {
        self.plan.functions.iter().filter(move |planned| planned.on == on)
    }

    fn of(&self, planned: &PlannedFunction) -> &Registers {
        &self.functions[planned.id.0 as usize]
    }

    /// Whether every bridge above forwards to `len` bytes at `at`.
    fn reaches(&self, planned: &PlannedFunction, at: u64, len: u64) -> bool {
        let Parent::Port(above) = planned.on else { return true };
        let above = &self.plan.functions[above.0 as usize];
        let Registers::Port(port) = self.of(above) else { return false };
        port.forwards(at, len) && self.reaches(above, at, len)
    }
}

impl Cycles for Bench {
    fn read(&mut self, at: Sbdf, offset: u16, data: &mut [u8]) {
        let found = self.find(at);
        access::read(offset, 0x1000, data, |reg| match found.map(|index| &self.functions[index]) {
            Some(Registers::Port(port)) => port.config_read(reg),
            Some(Registers::Endpoint(endpoint)) => endpoint.config_read(reg),
            None => 0xFFFF_FFFF,
        });
    }

    fn write(&mut self, at: Sbdf, offset: u16, data: &[u8]) {
        let Some(index) = self.find(at) else { return };
        access::write(offset, 0x1000, data, |access: Access, value| match &mut self.functions[index] {
            Registers::Port(port) => drop(port.config_write(access, value)),
            Registers::Endpoint(endpoint) => drop(endpoint.config_write(access, value)),
        });
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
        bridge: None,
    };
    match &planned.kind {
        PlannedKind::Port(port) => {
            let kind = port.spec.kind;
            found.device = match kind {
                crate::topology::PortKind::Root => own::ROOT_PORT,
                crate::topology::PortKind::Upstream => own::UPSTREAM_PORT,
                crate::topology::PortKind::Downstream => own::DOWNSTREAM_PORT,
            };
            found.bridge = Some(FoundBridge {
                primary: planned.at.bdf.bus(),
                buses: port.buses,
                windows: port.windows,
                io_window: false,
                link: kind != crate::topology::PortKind::Upstream,
            });
        }
        PlannedKind::Endpoint(endpoint) => {
            let ids = endpoint.spec.ids;
            (found.vendor, found.device, found.class) = (ids.vendor, ids.device, ids.class.value());
            for (bar, (spec, at)) in (0..).zip(endpoint.spec.bars.iter().zip(endpoint.bars)) {
                found.bars.extend(spec.map(|spec| FoundBar { bar, spec, at: at.unwrap_or(0) }));
            }
            // Without a memory BAR there is nothing to enable.
            found.memory_enabled = found.bars.iter().any(|bar| bar.spec.is_memory());
        }
    }
    found
}

fn walk_root(cycles: &mut dyn Cycles, root: &PlannedRootComplex) -> Vec<Found> {
    let mut found = walk(cycles, root.segment, root.buses.secondary);
    found.sort_by_key(|function| function.at);
    found
}

fn assert_finds_the_plan(plan: &Plan, cycles: &mut dyn Cycles) {
    let mut found: Vec<Found> = plan.root_complexes.iter().flat_map(|root| walk_root(cycles, root)).collect();
    let mut wanted: Vec<Found> = plan.functions.iter().map(expected).collect();
    found.sort_by_key(|function| function.at);
    wanted.sort_by_key(|function| function.at);
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_eq!(found, wanted);
    }
}

fn assert_assigns_everything(plan: &Plan, bench: &mut Bench) {
    for root in &plan.root_complexes {
        assign::clear(bench, root);
        assert!(walk(bench, root.segment, root.buses.secondary).iter().all(|found| found.at.bdf.bus() == root.buses.secondary));
        assign::assign(bench, root).unwrap();
    }
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for root in &plan.root_complexes {
        for found in walk_root(bench, root) {
            let index = bench.find(found.at).unwrap();
            let planned = plan.functions[index].clone();
            // Depth-first numbering has one outcome.
            assert_eq!((found.at, found.multifunction), (planned.at, planned.multifunction));
            for bar in found.bars.iter().filter(|bar| bar.spec.is_memory()) {
                assert!(bar.at != 0 && bar.at % bar.spec.size == 0, "{}: {bar:x?}", planned.name);
                assert!(found.memory_enabled && bench.reaches(&planned, bar.at, bar.spec.size), "{}: {bar:x?}", planned.name);
                let windows = root.mem32.iter().chain(&root.mem64);
                assert!(windows.into_iter().any(|window| window.contains(bar.at, bar.spec.size)), "{}: {bar:x?}", planned.name);
                taken.push((bar.at, bar.at + (bar.spec.size - 1)));
            }
        }
    }
    let bars = plan.functions.iter().flat_map(|planned| expected(planned).bars).filter(|bar| bar.spec.is_memory()).count();
    assert_eq!(taken.len(), bars, "every BAR of the plan was found");
    taken.sort_unstable();
    assert!(taken.is_sorted_by(|a, b| a.1 < b.0), "BARs overlap: {taken:x?}");
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
    let found = walk_root(&mut bench, &plan.root_complexes[0]);
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_guest_finds_exactly_the_plan_and_can_make_its_own(topology in any_topology()) {
        if let Ok(plan) = topology.plan(&roomy()) {
            let mut bench = Bench::programmed(&plan);
            assert_finds_the_plan(&plan, &mut bench);
            assert_assigns_everything(&plan, &mut bench);
        }
    }
}
