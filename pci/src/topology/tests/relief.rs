//! What is said of hot-plug ports that keep more than there is.

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
    assert_eq!(told, Relief { keep: Some(Limits { prefetchable: Some(most), ..Limits::default() }), ports: Some((2, 3)) });
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
    assert_eq!(relief(&topology, &space), Some(Relief { keep: None, ports: Some((8, 16)) }));
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
