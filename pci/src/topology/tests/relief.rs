//! What is said of hot-plug ports that keep more than there is.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;

fn hot_ports(count: usize, reserve: Reserve) -> Topology {
    let port = |index: usize| {
        let place = (u8::try_from(index / 8).unwrap(), u8::try_from(index % 8).unwrap());
        at(hot(root_port(&format!("rp{index}"), "rc0"), reserve, Removal::Surprise), place.0, place.1)
    };
    topology((0..count).map(port).collect())
}

fn relief(topology: &Topology, space: &Apertures) -> Option<Relief> {
    topology.relief(space, &topology.plan(space).unwrap_err())
}

/// The same with other values, changed as the advice says.
fn with(topology: &Topology, change: impl Fn(&mut Reserve)) -> Topology {
    let mut changed = topology.clone();
    for node in &mut changed.nodes {
        if let NodeKind::Port(PortSpec { hotplug: Some(hotplug), .. }) = &mut node.kind {
            change(&mut hotplug.reserve);
        }
    }
    changed
}

fn narrow(gib: u64) -> Apertures {
    Apertures { mem64: vec![Window { base: 64 * GIB, limit: (64 + gib) * GIB - 1 }], ..roomy() }
}

#[test]
fn case_b2_the_largest_prefetchable_window_that_fits_is_told_and_so_is_the_number_of_ports() {
    let topology = hot_ports(3, kept(2 * MIB, 16 * GIB, 1));
    let space = narrow(32);
    let told = relief(&topology, &space).unwrap();
    let most = told.keep.unwrap().prefetchable.unwrap();
    assert_eq!(
        told,
        Relief { keep: Some(Limits { prefetchable: Some(most), ..Limits::default() }), ports: Some((2, 3)), places: false }
    );
    assert!(most >= 8 * GIB, "{most:#x}");
    let keeps = |size: u64| with(&topology, |reserve| reserve.prefetchable = Some(size)).plan(&space);
    assert!(keeps(most).is_ok() && keeps(most + MIB).is_err(), "{most:#x}");
}

#[test]
fn a_device_that_finds_no_place_beside_what_is_kept_is_told_of_that() {
    let mut topology = hot_ports(2, kept(2 * MIB, 64 * GIB, 1));
    topology.nodes.push(at(root_port("rp", "rc0"), 4, 0));
    topology.nodes.push(endpoint("gpu", "rp", &[mem64(16 * GIB)]));
    let space = narrow(128);
    let refused = topology.plan(&space).unwrap_err();
    assert!(refused.to_string().starts_with("BAR 0 of `gpu`"), "{refused}");
    let told = topology.relief(&space, &refused).unwrap();
    let most = told.keep.unwrap().prefetchable.unwrap();
    assert!(with(&topology, |reserve| reserve.prefetchable = Some(most)).plan(&space).is_ok());
    assert_eq!(told.ports, Some((1, 2)));
}

#[test]
fn memory_below_4_gib_and_bus_numbers_are_told_likewise() {
    let topology = hot_ports(10, kept(256 * MIB, 0, 1));
    let most = relief(&topology, &roomy()).unwrap().keep.unwrap().memory.unwrap();
    let keeps = |size: u64| with(&topology, |reserve| reserve.memory = Some(size)).plan(&roomy());
    assert!(keeps(most).is_ok() && keeps(most + MIB).is_err() && most >= 128 * MIB, "{most:#x}");

    let topology = hot_ports(20, kept(MIB, MIB, 20));
    let told = relief(&topology, &roomy()).unwrap();
    assert_eq!(told.keep, Some(Limits { buses: Some(12), ..Limits::default() }));
    assert_eq!(told.ports, Some((12, 20)));
}

#[test]
fn several_things_that_run_out_are_told_together() {
    let topology = hot_ports(20, kept(128 * MIB, 64 * GIB, 20));
    let space = narrow(128);
    let limits = relief(&topology, &space).unwrap().keep.unwrap();
    assert!(limits.memory.is_some() && limits.prefetchable.is_some() && limits.buses == Some(12), "{limits:?}");
    let less = with(&topology, |reserve| {
        *reserve = Reserve { memory: limits.memory, prefetchable: limits.prefetchable, buses: limits.buses.unwrap() };
    });
    assert!(less.plan(&space).is_ok());
}

#[test]
fn where_sizes_are_the_planner_s_the_number_of_ports_is_what_can_be_less() {
    let mut topology = hot_ports(16, Reserve::default());
    topology
        .nodes
        .extend([at(root_port("rp", "rc0"), 4, 0), endpoint("card", "rp", &[mem32(GIB), mem32(256 * MIB), mem32(128 * MIB)])]);
    let space = Apertures { mem32: vec![Window { base: 0x8000_0000, limit: 0x8000_0000 + GIB + 392 * MIB - 1 }], ..roomy() };
    assert_eq!(relief(&topology, &space), Some(Relief { keep: None, ports: Some((8, 16)), places: false }));
}

#[test]
fn nothing_is_said_of_hot_plug_where_it_is_not_in_the_way() {
    let mut topology = hot_ports(2, kept(2 * MIB, GIB, 1));
    topology.nodes.extend([at(root_port("rp", "rc0"), 4, 0), endpoint("gpu", "rp", &[mem64(256 * GIB)])]);
    assert_eq!(relief(&topology, &narrow(128)), None);
    topology.nodes.push(endpoint("other", "nowhere", &[]));
    assert_eq!(relief(&topology, &narrow(128)), None);
    let mut full = topology_of_io(65);
    assert_eq!(relief(&full, &roomy()), None, "hot-plug ports keep no I/O ports");
    full.nodes.truncate(1);
    assert!(full.plan(&roomy()).is_ok());
}

fn topology_of_io(count: usize) -> Topology {
    let device = |index: usize| {
        let (device, function) = (u8::try_from(index / 8).unwrap(), u8::try_from(index % 8).unwrap());
        at(endpoint(&format!("io{index}"), "rc0", &[io(256)]), device + 8, function)
    };
    let mut topology = hot_ports(1, kept(MIB, MIB, 1));
    topology.nodes.extend((0..count).map(device));
    topology
}

#[test]
fn sizes_beyond_all_addresses_are_cut_to_some_that_fit() {
    for size in [u64::MAX, 1 << 63, 1 << 52] {
        let topology = hot_ports(2, kept(MIB, size, 1));
        let most = relief(&topology, &roomy()).unwrap().keep.unwrap().prefetchable.unwrap();
        assert!(with(&topology, |reserve| reserve.prefetchable = Some(most)).plan(&roomy()).is_ok(), "{most:#x}");
        assert!(most >= 16 << 40, "{most:#x}");
    }
}

/// Ports for devices that come, some of them the place of a certain one, and devices beside them.
fn crowded() -> impl Strategy<Value = (Topology, Apertures)> {
    let size =
        |most: u32| prop::option::weighted(0.8, (20u32..most, 0u64..3).prop_map(|(shift, more)| (1u64 << shift) + more * MIB));
    let own = prop::option::weighted(0.3, (size(29), size(37)));
    let port = (size(30), size(38), 0u8..30, own);
    let bar = prop_oneof![(20u32..28).prop_map(|shift| mem32(1 << shift)), (20u32..36).prop_map(|shift| mem64(1 << shift))];
    let fields = (prop::collection::vec(port, 1..12), prop::collection::vec((bar, any::<bool>()), 0..6), 1u64..200, 1u64..1500);
    fields.prop_map(|(ports, devices, gib, mib)| {
        let mut topology = topology(Vec::new());
        for (index, (memory, prefetchable, buses, own)) in ports.into_iter().enumerate() {
            let own = own.map(|(memory, prefetchable)| Reserve {
                memory: memory.or(Some(0)),
                prefetchable: prefetchable.or(Some(0)),
                buses: 1,
            });
            let least = own.unwrap_or_default();
            let reserve = Reserve { memory: memory.max(least.memory), prefetchable: prefetchable.max(least.prefetchable), buses };
            let mut port = hot(root_port(&format!("rp{index}"), "rc0"), reserve, Removal::Surprise);
            if let NodeKind::Port(PortSpec { hotplug: Some(hotplug), .. }) = &mut port.kind {
                hotplug.own = own;
            }
            topology.nodes.push(port);
        }
        for (index, (bar, is_below)) in devices.into_iter().enumerate() {
            let on = if is_below { format!("rp{index}") } else { "rc0".to_owned() };
            let on = if topology.nodes.iter().any(|node| node.name.0 == on) { on } else { "rc0".to_owned() };
            topology.nodes.push(endpoint(&format!("d{index}"), &on, &[bar]));
        }
        let low = Window { base: 0x8000_0000, limit: 0x8000_0000 + mib * MIB - 1 };
        (topology, Apertures { mem32: vec![low], ..narrow(gib) })
    })
}

#[test]
fn every_way_that_is_told_is_enough() {
    let mut runner = TestRunner::deterministic();
    let mut told = [0; 3];
    for _ in 0..400 {
        let (topology, space) = crowded().new_tree(&mut runner).unwrap().current();
        let Err(refused) = topology.plan(&space) else { continue };
        let Some(relief) = topology.relief(&space, &refused) else { continue };
        if let Some(most) = relief.keep {
            // As an option does it: what a device needs that belongs to a port, that keeps in any case.
            let mut less = topology.clone();
            for node in &mut less.nodes {
                let NodeKind::Port(PortSpec { hotplug: Some(HotPlug { reserve, own, .. }), .. }) = &mut node.kind else {
                    continue;
                };
                let own = own.unwrap_or_default();
                let cut = |kept: Option<u64>, most: Option<u64>, own: Option<u64>| match most {
                    Some(most) => kept.map(|kept| kept.min(most)).max(own),
                    None => kept,
                };
                reserve.memory = cut(reserve.memory, most.memory, own.memory);
                reserve.prefetchable = cut(reserve.prefetchable, most.prefetchable, own.prefetchable);
                reserve.buses = reserve.buses.min(most.buses.unwrap_or(u8::MAX));
            }
            assert!(less.plan(&space).is_ok(), "{topology:#?}: {most:?}");
            told[0] += 1;
        }
        let used: Vec<Name> = topology.nodes.iter().map(|node| node.on.clone()).collect();
        let free = |node: &NodeSpec, is_place: bool| {
            let NodeKind::Port(PortSpec { hotplug: Some(hotplug), .. }) = &node.kind else { return false };
            hotplug.own.is_some() == is_place && !used.contains(&node.name)
        };
        if let Some((stay, of)) = relief.ports {
            let mut fewer = topology.clone();
            let (mut seen, mut gone) = (0, 0);
            fewer.nodes.retain(|node| {
                seen += usize::from(free(node, false));
                let stays = !free(node, false) || seen <= stay;
                gone += usize::from(!stays);
                stays
            });
            assert!(fewer.plan(&space).is_ok() && (stay, gone) == (stay.min(of), of - stay), "{topology:#?}: {stay} of {of}");
            told[1] += 1;
        }
        if relief.places {
            let mut fewer = topology.clone();
            fewer.nodes.retain(|node| !free(node, true));
            for node in &mut fewer.nodes {
                let NodeKind::Port(port) = &mut node.kind else { continue };
                port.hotplug = port.hotplug.filter(|hotplug| hotplug.own.is_none());
            }
            assert!(fewer.plan(&space).is_ok(), "{topology:#?}");
            told[2] += 1;
        }
    }
    assert!(told.iter().all(|times| *times >= 20), "{told:?}");
}

#[test]
fn what_a_device_needs_that_belongs_to_a_port_is_not_to_be_lowered() {
    let mut topology = hot_ports(3, kept(MIB, 16 * GIB, 1));
    for node in &mut topology.nodes {
        let NodeKind::Port(PortSpec { hotplug: Some(hotplug), .. }) = &mut node.kind else { continue };
        hotplug.own = Some(hotplug.reserve);
    }
    let told = |topology: &Topology| relief(topology, &narrow(32));
    assert_eq!(told(&topology), Some(Relief { keep: None, ports: None, places: true }));
    topology.nodes.push(at(root_port("rp", "rc0"), 4, 0));
    topology.nodes.push(endpoint("gpu", "rp", &[mem64(64 * GIB)]));
    assert_eq!(told(&topology), None, "it does not fit without them either");
    // More than is needed can be lowered to that.
    let mut topology = with(&hot_ports(2, kept(MIB, 64 * GIB, 1)), |_| {});
    for node in &mut topology.nodes {
        let NodeKind::Port(PortSpec { hotplug: Some(hotplug), .. }) = &mut node.kind else { continue };
        hotplug.own = Some(kept(MIB, GIB, 1));
    }
    let most = told(&topology).unwrap().keep.unwrap().prefetchable.unwrap();
    assert!((16 * GIB..64 * GIB).contains(&most), "{most:#x}");
}
