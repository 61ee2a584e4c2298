//! Prints how long the planner takes for hierarchies that need all 256 buses of a segment. `cargo bench -p banyan-pci`.
#![expect(clippy::expect_used, reason = "a benchmark that cannot plan has nothing to print")]

use std::time::{Duration, Instant};

use pci::bar::{BarKind, BarSpec};
use pci::link::Link;
use pci::topology::{
    Apertures, EndpointSpec, HotPlug, NodeKind, NodeSpec, Place, PortKind, PortSpec, RootComplexSpec, Topology, Window,
};

/// Plans of each hierarchy; the fastest and the middle one are printed.
const ROUNDS: usize = 101;

fn port(name: String, kind: PortKind, on: &str, function: usize, hot: bool) -> NodeSpec {
    let hotplug = hot.then(HotPlug::default);
    let spec = PortSpec { kind, ids: None, link: Link::default(), atomic_completers: 0, hotplug };
    let function = u8::try_from(function % 8).unwrap_or(0);
    NodeSpec { name: name.as_str().into(), on: on.into(), place: Place { device: None, function }, kind: NodeKind::Port(spec) }
}

/// Registers, a frame buffer and a small BAR.
fn gpu(name: &str, on: &str) -> NodeSpec {
    let bar = |kind, prefetchable, size| Some(BarSpec { kind, prefetchable, size });
    let large = bar(BarKind::Memory64, true, 1 << 30);
    let bars = [bar(BarKind::Memory32, false, 4 << 20), large, None, bar(BarKind::Memory64, true, 32 << 20), None, None];
    let kind = NodeKind::Endpoint(EndpointSpec { bars, interrupt_pin: 1, ..EndpointSpec::default() });
    NodeSpec { name: name.into(), on: on.into(), place: Place::default(), kind }
}

/// 255 root ports, empty ones that keep room, or with a device each.
fn root_ports(hot: bool) -> Vec<NodeSpec> {
    let mut nodes = Vec::new();
    for index in 0..255 {
        nodes.push(port(format!("p{index}"), PortKind::Root, "rc0", index, hot));
        if !hot {
            nodes.push(gpu(&format!("gpu{index}"), &format!("p{index}")));
        }
    }
    nodes
}

/// 15 switches of 15 ports with a device each: 255 buses below the root bus.
fn switches() -> Vec<NodeSpec> {
    let mut nodes = Vec::new();
    for switch in 0..15 {
        let (root, upstream) = (format!("r{switch}"), format!("u{switch}"));
        nodes.push(port(root.clone(), PortKind::Root, "rc0", 0, false));
        nodes.push(port(upstream.clone(), PortKind::Upstream, &root, 0, false));
        for index in 0..15 {
            let below = format!("d{switch}-{index}");
            nodes.push(port(below.clone(), PortKind::Downstream, &upstream, 0, false));
            nodes.push(gpu(&format!("gpu{switch}-{index}"), &below));
        }
    }
    nodes
}

/// A switch below a switch, as deep as bus numbers go.
fn chain() -> Vec<NodeSpec> {
    let mut nodes = vec![port("r".into(), PortKind::Root, "rc0", 0, false)];
    let mut above = "r".to_owned();
    for level in 0..127 {
        let (upstream, downstream) = (format!("u{level}"), format!("d{level}"));
        nodes.push(port(upstream.clone(), PortKind::Upstream, &above, 0, false));
        nodes.push(port(downstream.clone(), PortKind::Downstream, &upstream, 0, false));
        above = downstream;
    }
    nodes.push(gpu("gpu", &above));
    nodes
}

fn main() {
    let space = Apertures {
        mem32: vec![Window { base: 0x8000_0000, limit: 0xDFFF_FFFF }],
        mem64: vec![Window { base: 1 << 36, limit: (1 << 46) - 1 }],
        address_bits: 46,
    };
    println!("{:46}{:>9}{:>11}{:>11}", "plan", "buses", "fastest", "median");
    for (what, nodes) in [
        ("255 root ports with a GPU each", root_ports(false)),
        ("255 empty hot-plug root ports", root_ports(true)),
        ("15 switches of 15 ports with a GPU each", switches()),
        ("127 switches below each other", chain()),
    ] {
        let root = RootComplexSpec { name: "rc0".into(), segment: 0, node: None, first_bus: None };
        let topology = Topology { root_complexes: vec![root], nodes, ..Topology::default() };
        let mut buses = 0;
        let mut times: Vec<Duration> = (0..ROUNDS)
            .map(|_| {
                let start = Instant::now();
                let plan = topology.plan(&space).expect("there is room");
                let taken = start.elapsed();
                buses = plan.root_complexes.iter().map(|root| usize::from(root.buses.subordinate) + 1).sum();
                taken
            })
            .collect();
        times.sort_unstable();
        let ms = |time: Option<&Duration>| time.map_or(0.0, Duration::as_secs_f64) * 1000.0;
        println!("{what:46}{buses:>9}{:>8.2} ms{:>8.2} ms", ms(times.first()), ms(times.get(ROUNDS / 2)));
    }
    println!("\nbar: 5 ms for 256 buses; times depend on the machine");
}
