//! What holds for every topology, tried on random ones.

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

/// One node of a random tree: what it is, which fitting parent it hangs on, its BARs.
#[derive(Debug, Clone)]
struct Seed {
    kind: u8,
    parent: Index,
    function: u8,
    bars: Vec<BarSpec>,
    hotplug: Option<HotPlug>,
    rom: Option<u64>,
    sriov: Option<SriovSpec>,
}

fn any_bar() -> impl Strategy<Value = BarSpec> {
    prop_oneof![
        (12u32..26).prop_map(|shift| mem32(1 << shift)),
        (4u32..12).prop_map(|shift| BarSpec { prefetchable: true, ..mem32(1 << shift) }),
        (12u32..38).prop_map(|shift| mem64(1 << shift)),
        (12u32..25).prop_map(|shift| mem64_plain(1 << shift)),
        (2u32..9).prop_map(|shift| io(1 << shift)),
    ]
}

fn any_hotplug() -> impl Strategy<Value = Option<HotPlug>> {
    let size = |most: u32| prop::option::of((10u32..most, 0u64..1 << 20).prop_map(|(shift, more)| (1 << shift) + more));
    let removal = prop_oneof![Just(Removal::Surprise), Just(Removal::Orderly), Just(Removal::Button)];
    let hotplug = (size(25), size(37), 0u8..4, removal, 0u8..34).prop_map(|(memory, prefetchable, buses, removal, numbers)| {
        HotPlug { reserve: Reserve { memory, prefetchable, buses }, own: None, removal, numbers }
    });
    prop::option::weighted(0.5, hotplug)
}

/// Mostly such as can be: offsets and strides may lead onto another function, or onto the next bus.
fn any_sriov() -> impl Strategy<Value = Option<SriovSpec>> {
    let bar = prop_oneof![(12u32..20).prop_map(|shift| mem32(1 << shift)), (12u32..26).prop_map(|shift| mem64(1 << shift))];
    let sriov = (1u16..40, prop_oneof![Just(256u16), 1u16..300], 1u16..20, prop::collection::vec(bar, 0..3));
    prop::option::weighted(0.2, sriov.prop_map(|(total, offset, stride, bars)| vfs(total, offset, stride, &bars)))
}

fn any_seed() -> impl Strategy<Value = Seed> {
    let rom = prop::option::weighted(0.2, (11u32..22).prop_map(|shift| 1u64 << shift));
    let fields = (0u8..10, any::<Index>(), 0u8..12, prop::collection::vec(any_bar(), 0..4), any_hotplug(), rom, any_sriov());
    fields.prop_map(|(kind, parent, function, bars, hotplug, rom, sriov)| Seed {
        kind,
        parent,
        function,
        hotplug,
        rom,
        sriov,
        bars: if bars.iter().map(|bar| 1 + usize::from(bar.kind == BarKind::Memory64)).sum::<usize>() > 6 {
            vec![bars[0]]
        } else {
            bars
        },
    })
}

/// A tree that is mostly, not always, one that can exist.
pub fn any_topology() -> impl Strategy<Value = Topology> {
    let root = (0u16..2, prop::option::weighted(0.2, 0u8..64));
    (prop::collection::vec(root, 1..4), prop::collection::vec(any_seed(), 0..48)).prop_map(|(roots, seeds)| {
        let root_complexes: Vec<RootComplexSpec> = (0..)
            .zip(roots)
            .map(|(index, (segment, first_bus)): (usize, _)| RootComplexSpec {
                segment,
                first_bus,
                ..root_complex(&format!("rc{index}"))
            })
            .collect();
        Topology { nodes: grow(&root_complexes, &seeds), root_complexes, spare_numbers: 0 }
    })
}

fn grow(roots: &[RootComplexSpec], seeds: &[Seed]) -> Vec<NodeSpec> {
    let buses: Vec<Name> = roots.iter().map(|root| root.name.clone()).collect();
    // Links that are free, and upstream ports.
    let (mut links, mut switches): (Vec<Name>, Vec<Name>) = (Vec::new(), Vec::new());
    let mut conventional: Vec<Name> = Vec::new();
    let mut nodes = Vec::new();
    for (index, seed) in seeds.iter().enumerate() {
        let name = format!("n{index}");
        let mut node = match seed.kind {
            0 | 1 => root_port(&name, &seed.parent.get(&buses).0),
            2 if !links.is_empty() => upstream(&name, &links.swap_remove(seed.parent.index(links.len())).0),
            3 | 4 if !switches.is_empty() => downstream(&name, &seed.parent.get(&switches).0),
            8 if !links.is_empty() => pci_bridge(&name, &links.swap_remove(seed.parent.index(links.len())).0),
            9 if !conventional.is_empty() => endpoint(&name, &seed.parent.get(&conventional).0, &seed.bars),
            5 => endpoint(&name, &seed.parent.get(&buses).0, &seed.bars),
            _ if !links.is_empty() => {
                let link = links.swap_remove(seed.parent.index(links.len()));
                if seed.function > 4 {
                    let second = function(endpoint(&format!("{name}f"), &link.0, &seed.bars), seed.function);
                    nodes.push(endpoint(&name, &link.0, &seed.bars));
                    second
                } else {
                    endpoint(&name, &link.0, &seed.bars)
                }
            }
            _ => continue,
        };
        node = with_vfs(with_rom(node, seed.rom), seed.sriov);
        if let NodeKind::Port(port) = &mut node.kind {
            port.hotplug = seed.hotplug.filter(|_| port.kind != PortKind::Upstream);
        }
        match &node.kind {
            NodeKind::Port(PortSpec { kind: PortKind::Upstream, .. }) => switches.push(node.name.clone()),
            NodeKind::Port(PortSpec { kind: PortKind::PciBridge, .. }) => conventional.push(node.name.clone()),
            NodeKind::Port(_) => links.push(node.name.clone()),
            NodeKind::Endpoint(_) => {}
        }
        nodes.push(node);
    }
    nodes
}

fn any_apertures() -> impl Strategy<Value = Apertures> {
    (37u8..46, 4u64..100, any::<bool>()).prop_map(|(address_bits, base, hole)| {
        let top = (1u64 << address_bits) - 1;
        let mem64 = if hole {
            let middle = 300 * GIB;
            vec![Window { base: middle + 4 * GIB, limit: top }, Window { base: base * GIB + MIB, limit: middle - 1 }]
        } else {
            vec![Window { base: base * GIB, limit: top }]
        };
        Apertures { mem64, address_bits, ..roomy() }
    })
}

proptest! {
    #[test]
    fn every_plan_is_sound_and_the_same_each_time(topology in any_topology(), space in any_apertures()) {
        match topology.plan(&space) {
            Ok(plan) => {
                assert_sound(&topology, &plan, &space);
                prop_assert_eq!(topology.plan(&space), Ok(plan));
            }
            // Wanted root buses may clash, a full root bus and a full aperture are possible.
            Err(PlanError::Space(shortage)) => {
                prop_assert!(shortage.missing() > 0 && !shortage.left_over.is_empty());
                prop_assert!(topology.nodes.iter().any(|node| node.name == shortage.name));
                prop_assert_eq!(topology.plan(&space), Err(PlanError::Space(shortage)));
            }
            Err(PlanError::RootBusTaken { .. } | PlanError::RootBusTooHigh { .. }) => {}
            Err(PlanError::Topology(TopologyError::Full { .. } | TopologyError::VirtualFunction { .. })) => {}
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    #[test]
    fn the_aperture_that_the_error_asks_for_is_enough(count in 1usize..12, shift in 21u32..40, base in 4u64..2000) {
        let topology = ports_with(count, &[mem64(1 << shift), mem64(32 * MIB)]);
        let tiny = Apertures { mem64: vec![Window { base: base * GIB, limit: base * GIB + MIB - 1 }], ..roomy() };
        if let Err(PlanError::Space(shortage)) = topology.plan(&tiny) {
            let with = |len: u64| Apertures { mem64: vec![Window { base: base * GIB, limit: base * GIB + len - 1 }], ..roomy() };
            let plan = topology.plan(&with(shortage.needed)).unwrap();
            assert_sound(&topology, &plan, &with(shortage.needed));
            prop_assert!(topology.plan(&with(shortage.needed - MIB)).is_err());
        }
    }

    #[test]
    fn whatever_is_asked_for_nothing_panics(
        seeds in prop::collection::vec((0u8..5, 0usize..12, prop::option::of(0u8..40), 0u8..10, any_bar()), 0..12),
        bits in 0u8..80,
        windows in prop::collection::vec((any::<u64>(), any::<u64>()), 0..4),
    ) {
        let names = ["rc0", "n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9", "x"];
        let kinds = [PortKind::Root, PortKind::Upstream, PortKind::Downstream, PortKind::PciBridge];
        let nodes = seeds.iter().enumerate().map(|(index, (kind, on, device, function, bar))| {
            let (name, on) = (format!("n{index}"), names[*on]);
            let node = kinds.get(usize::from(*kind)).map_or_else(|| endpoint(&name, on, &[*bar]), |kind| port(&name, *kind, on));
            NodeSpec { place: Place { device: *device, function: *function }, ..node }
        });
        let windows: Vec<Window> = windows.into_iter().map(|(base, limit)| Window { base, limit }).collect();
        let space = Apertures { mem32: windows.clone(), mem64: windows, address_bits: bits };
        if let Err(error) = topology(nodes.collect()).plan(&space) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
