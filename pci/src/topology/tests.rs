//! Tests of the planner as a whole. Helpers build topologies by name.

mod cases;
mod hotplug;
mod places;
pub mod properties;
mod relief;
mod roots;
mod trees;

use super::*;
use crate::address::BusRange;
use crate::bar::{BarKind, BarSpec};
use crate::function::FunctionId;
use crate::ids::{ClassCode, Ids};
use crate::link::Link;
use crate::sriov::SriovSpec;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

pub fn mem32(size: u64) -> BarSpec {
    BarSpec { kind: BarKind::Memory32, prefetchable: false, size }
}

pub fn mem64(size: u64) -> BarSpec {
    BarSpec { kind: BarKind::Memory64, prefetchable: true, size }
}

pub fn mem64_plain(size: u64) -> BarSpec {
    BarSpec { kind: BarKind::Memory64, prefetchable: false, size }
}

pub fn io(size: u64) -> BarSpec {
    BarSpec { kind: BarKind::Io, prefetchable: false, size }
}

/// BARs at the lowest registers that they fit into.
pub fn bars(specs: &[BarSpec]) -> [Option<BarSpec>; 6] {
    let mut bars = [None; 6];
    let mut register = 0;
    for spec in specs {
        bars[register] = Some(*spec);
        register += if spec.kind == BarKind::Memory64 { 2 } else { 1 };
    }
    bars
}

pub fn root_complex(name: &str) -> RootComplexSpec {
    RootComplexSpec { name: name.into(), segment: 0, node: None, first_bus: None }
}

pub fn port(name: &str, kind: PortKind, on: &str) -> NodeSpec {
    let spec = PortSpec { kind, ids: None, link: Link::default(), atomic_completers: 0, hotplug: None };
    NodeSpec { name: name.into(), on: on.into(), place: Place::default(), kind: NodeKind::Port(spec) }
}

pub fn root_port(name: &str, on: &str) -> NodeSpec {
    port(name, PortKind::Root, on)
}

pub fn upstream(name: &str, on: &str) -> NodeSpec {
    port(name, PortKind::Upstream, on)
}

pub fn downstream(name: &str, on: &str) -> NodeSpec {
    port(name, PortKind::Downstream, on)
}

pub fn pci_bridge(name: &str, on: &str) -> NodeSpec {
    port(name, PortKind::PciBridge, on)
}

pub fn endpoint(name: &str, on: &str, specs: &[BarSpec]) -> NodeSpec {
    let ids = Ids { vendor: 0x10DE, device: 0x20B8, class: ClassCode::new(0x03_0200), ..Ids::default() };
    let spec = EndpointSpec { ids, bars: bars(specs), interrupt_pin: 1, rom: None, sriov: None };
    NodeSpec { name: name.into(), on: on.into(), place: Place::default(), kind: NodeKind::Endpoint(spec) }
}

/// An endpoint with an expansion ROM.
pub fn with_rom(mut node: NodeSpec, size: Option<u64>) -> NodeSpec {
    if let NodeKind::Endpoint(endpoint) = &mut node.kind {
        endpoint.rom = size;
    }
    node
}

/// A physical function.
pub fn with_vfs(mut node: NodeSpec, sriov: Option<SriovSpec>) -> NodeSpec {
    if let NodeKind::Endpoint(endpoint) = &mut node.kind {
        endpoint.sriov = sriov.map(Box::new);
    }
    node
}

pub fn vfs(total_vfs: u16, first_offset: u16, stride: u16, specs: &[BarSpec]) -> SriovSpec {
    SriovSpec { total_vfs, first_offset, stride, vf_device: 0x101A, bars: bars(specs) }
}

pub fn at(mut node: NodeSpec, device: u8, function: u8) -> NodeSpec {
    node.place = Place { device: Some(device), function };
    node
}

pub fn function(mut node: NodeSpec, function: u8) -> NodeSpec {
    node.place.function = function;
    node
}

pub fn topology(nodes: Vec<NodeSpec>) -> Topology {
    Topology { root_complexes: vec![root_complex("rc0")], nodes, spare_numbers: 0 }
}

/// `count` endpoints with the same BARs, each behind its own root port, eight ports to a device number.
pub fn ports_with(count: usize, specs: &[BarSpec]) -> Topology {
    let mut nodes = Vec::new();
    for index in 0..count {
        let function = u8::try_from(index % 8).unwrap();
        let device = u8::try_from(index / 8).unwrap();
        nodes.push(at(root_port(&format!("rp{index}"), "rc0"), device, function));
        nodes.push(endpoint(&format!("gpu{index}"), &format!("rp{index}"), specs));
    }
    topology(nodes)
}

/// 1.5 GiB below 4 GiB, and everything from 64 GiB up to 46 bits.
pub fn roomy() -> Apertures {
    Apertures {
        mem32: vec![Window { base: 0x8000_0000, limit: 0xDFFF_FFFF }],
        mem64: vec![Window { base: 64 * GIB, limit: (1 << 46) - 1 }],
        address_bits: 46,
    }
}

pub fn endpoint_of<'a>(plan: &'a Plan, name: &str) -> &'a PlannedEndpoint {
    match &plan.by_name(name).unwrap().kind {
        PlannedKind::Endpoint(endpoint) => endpoint,
        PlannedKind::Port(_) => panic!("{name} is a port"),
    }
}

pub fn port_of<'a>(plan: &'a Plan, name: &str) -> &'a PlannedPort {
    match &plan.by_name(name).unwrap().kind {
        PlannedKind::Port(port) => port,
        PlannedKind::Endpoint(_) => panic!("{name} is an endpoint"),
    }
}

/// A port whose device can be changed.
pub fn hot(mut node: NodeSpec, reserve: Reserve, removal: Removal) -> NodeSpec {
    if let NodeKind::Port(port) = &mut node.kind {
        port.hotplug = Some(HotPlug { reserve, own: None, removal, numbers: 4 });
    }
    node
}

pub const fn kept(memory: u64, prefetchable: u64, buses: u8) -> Reserve {
    Reserve { memory: Some(memory), prefetchable: Some(prefetchable), buses }
}

/// Every BAR that has an address: whose, which, what it asks for, where.
pub fn placed_bars(plan: &Plan) -> Vec<(FunctionId, usize, BarSpec, u64)> {
    let mut placed = Vec::new();
    for function in &plan.functions {
        if let PlannedKind::Endpoint(endpoint) = &function.kind {
            for (bar, (spec, at)) in endpoint.spec.bars.iter().zip(endpoint.bars).enumerate() {
                placed.extend(spec.zip(at).map(|(spec, at)| (function.id, bar, spec, at)));
            }
        }
    }
    placed
}

/// ROMs and VF BARs: whose, which, how much, where.
fn placed_more(plan: &Plan) -> Vec<(&PlannedFunction, Resource, Need, u64)> {
    let mut placed = Vec::new();
    for function in &plan.functions {
        if let PlannedKind::Endpoint(endpoint) = &function.kind {
            for (what, need) in endpoint.spec.needs() {
                let at = match what {
                    Resource::Bar(_) => continue,
                    Resource::Rom => endpoint.rom,
                    Resource::VfBar(bar) => endpoint.vf_bars[usize::from(bar)],
                };
                placed.push((function, what, need, at.unwrap()));
            }
        }
    }
    placed
}

/// Virtual functions lie on buses of their parent that no port has.
fn assert_virtual_buses(plan: &Plan, function: &PlannedFunction, parent: BusRange) {
    let PlannedKind::Endpoint(PlannedEndpoint { spec: EndpointSpec { sriov: Some(sriov), .. }, .. }) = &function.kind else {
        return;
    };
    let last = usize::from(function.at.bdf.bus()) + sriov.more_buses(function.at.bdf.devfn());
    assert!(last <= usize::from(parent.subordinate), "virtual functions of {} leave {parent}", function.name);
    for other in plan.functions.iter().filter(|other| other.on == function.on) {
        if let PlannedKind::Port(port) = &other.kind {
            assert!(last < usize::from(port.buses.secondary), "virtual functions of {} on the bus of a port", function.name);
        }
    }
}

/// What every plan must keep; panics at the first breach.
pub fn assert_sound(topology: &Topology, plan: &Plan, space: &Apertures) {
    assert_eq!(plan.functions.len(), topology.nodes.len());
    let placed = placed_bars(plan);
    for (id, bar, spec, at) in &placed {
        assert!(*at != 0 && at % spec.size == 0, "{id:?} BAR {bar} at {at:#x} is not aligned to {spec}");
    }
    for memory in [true, false] {
        let mut spans: Vec<(u64, u64)> = placed
            .iter()
            .filter(|(_, _, spec, _)| spec.is_memory() == memory)
            .map(|(_, _, spec, at)| (*at, at + (spec.size - 1)))
            .collect();
        let more = placed_more(plan).into_iter().filter(|_| memory);
        spans.extend(more.map(|(_, _, need, at)| (at, at + (need.size().unwrap() - 1))));
        spans.sort_unstable();
        assert!(spans.is_sorted_by(|a, b| a.1 < b.0), "BARs overlap: {spans:x?}");
    }
    for function in &plan.functions {
        let (bus, windows) = match function.on {
            Parent::Port(parent) => {
                assert!(parent < function.id, "{} comes before its port", function.name);
                let Some(PlannedFunction { kind: PlannedKind::Port(port), .. }) = plan.functions.get(parent.0 as usize) else {
                    panic!("{} hangs on no port", function.name)
                };
                (port.buses, port.windows)
            }
            Parent::RootComplex(root) => {
                let windows = Windows::default();
                (plan.root_complexes[root].buses, windows)
            }
        };
        assert_eq!(function.at.bdf.bus(), bus.secondary, "{} is not on the bus below its parent", function.name);
        let inside = |at: u64, len: u64, prefetchable: bool| match function.on {
            Parent::RootComplex(root) => {
                let root = &plan.root_complexes[root];
                root.mem32.iter().chain(&root.mem64).any(|window| window.contains(at, len))
            }
            Parent::Port(_) if prefetchable => windows.prefetchable.is_some_and(|window| window.contains(at, len)),
            Parent::Port(_) => windows.memory.is_some_and(|window| window.contains(at, len)),
        };
        match &function.kind {
            PlannedKind::Port(port) => {
                let own = port.buses;
                assert!(own.secondary > bus.secondary && own.subordinate <= bus.subordinate && own.secondary <= own.subordinate);
                assert_keeps(function, port);
                for (window, prefetchable) in [(port.windows.memory, false), (port.windows.prefetchable, true)] {
                    let Some(window) = window else { continue };
                    assert!(window.base % MIB == 0 && (window.limit + 1) % MIB == 0 && window.base != 0);
                    assert!(prefetchable || window.limit < 1 << 32, "memory window above 4 GiB");
                    assert!(inside(window.base, window.len(), prefetchable), "{}: {window} sticks out", function.name);
                }
            }
            PlannedKind::Endpoint(endpoint) => {
                assert_virtual_buses(plan, function, bus);
                for (_, what, need, at) in placed_more(plan).iter().filter(|(other, ..)| other.id == function.id) {
                    let (size, prefetchable) =
                        (need.size().unwrap(), need.each.kind == BarKind::Memory64 && need.each.prefetchable);
                    assert!(*at != 0 && at % need.each.size == 0, "{what} of {} at {at:#x}", function.name);
                    assert!(prefetchable || at + size <= 1 << 32);
                    assert!(inside(*at, size, false) || prefetchable && inside(*at, size, true), "{what} of {}", function.name);
                }
                for (spec, at) in endpoint.spec.bars.iter().zip(endpoint.bars) {
                    match (spec, at) {
                        (None, at) => assert_eq!(at, None),
                        (Some(spec), Some(at)) if spec.is_memory() => {
                            let wide = spec.kind == BarKind::Memory64;
                            let prefetchable = wide && spec.prefetchable;
                            assert!(
                                inside(at, spec.size, false) || prefetchable && inside(at, spec.size, true),
                                "{}: {spec} at {at:#x} is in no window",
                                function.name
                            );
                            assert!(wide && spec.prefetchable || at + spec.size <= 1 << 32);
                        }
                        (Some(spec), Some(at)) => {
                            let Parent::RootComplex(root) = function.on else { panic!("I/O below a port") };
                            let (first, last) = plan.root_complexes[root].io.unwrap();
                            assert!(at >= first.into() && at + spec.size - 1 <= last.into() && first >= 0xC000);
                        }
                        (Some(spec), None) => {
                            assert!(!spec.is_memory() && matches!(function.on, Parent::Port(_)), "{spec} has no address");
                        }
                    }
                }
            }
        }
    }
    let mut windows: Vec<(Parent, bool, Window)> = Vec::new();
    for function in &plan.functions {
        if let PlannedKind::Port(port) = &function.kind {
            windows.extend(port.windows.memory.map(|window| (function.on, false, window)));
            windows.extend(port.windows.prefetchable.map(|window| (function.on, true, window)));
        }
    }
    for (index, (on, prefetchable, window)) in windows.iter().enumerate() {
        for (_, _, other) in windows[..index].iter().filter(|other| (other.0, other.1) == (*on, *prefetchable)) {
            assert!(window.limit < other.base || other.limit < window.base, "sibling windows overlap: {window} {other}");
        }
    }
    let inside = |windows: &[Window], given: &[Window]| {
        windows.iter().all(|window| given.iter().any(|given| given.contains(window.base, window.len())))
    };
    for (index, root) in plan.root_complexes.iter().enumerate() {
        assert!(inside(&root.mem32, &space.mem32) && inside(&root.mem64, &space.mem64));
        let on_step = root.mem32.iter().chain(&root.mem64).all(|window| window.base % MIB == 0 && (window.limit + 1) % MIB == 0);
        assert!(on_step, "a root complex's range is not on 1 MiB steps");
        for other in &plan.root_complexes[..index] {
            let apart = |a: &[Window], b: &[Window]| a.iter().all(|a| b.iter().all(|b| a.limit < b.base || b.limit < a.base));
            assert!(apart(&root.mem32, &other.mem32) && apart(&root.mem64, &other.mem64), "root complexes share addresses");
            let buses = root.buses.secondary > other.buses.subordinate || other.buses.secondary > root.buses.subordinate;
            assert!(buses || root.segment != other.segment, "root complexes share buses");
        }
    }
    let mut places: Vec<_> = plan.functions.iter().map(|function| function.at).collect();
    places.sort_unstable();
    assert!(places.is_sorted_by(|a, b| a < b), "two functions at one place");
}

/// A hot-plug port has at least what it keeps, where the largest BAR that fits in it finds its alignment.
fn assert_keeps(function: &PlannedFunction, port: &PlannedPort) {
    let Some(kept) = port.reserved else {
        assert!(port.spec.hotplug.is_none());
        return;
    };
    let asked = port.spec.hotplug.unwrap().reserve;
    assert!(port.buses.subordinate - port.buses.secondary + 1 >= kept.buses && kept.buses >= asked.buses.max(1));
    let windows =
        [(kept.memory, asked.memory, port.windows.memory), (kept.prefetchable, asked.prefetchable, port.windows.prefetchable)];
    for (kept, asked, window) in windows {
        assert!(kept % MIB == 0 && asked.is_none_or(|asked| kept >= asked));
        if kept != 0 {
            let window = window.unwrap();
            assert!(window.len() >= kept, "{}: {window} holds no {kept:#x}", function.name);
            assert_eq!(window.base % (kept.next_power_of_two() >> u32::from(!kept.is_power_of_two())), 0);
        }
    }
}
