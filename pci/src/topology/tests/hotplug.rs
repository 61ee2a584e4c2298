//! What hot-plug ports keep for devices to come.

use super::*;

fn hot(node: NodeSpec, reserve: Reserve) -> NodeSpec {
    super::hot(node, reserve, Removal::Surprise)
}

fn hot_ports(count: usize, reserve: Reserve) -> Topology {
    let port = |index: usize| {
        let place = (u8::try_from(index / 8).unwrap(), u8::try_from(index % 8).unwrap());
        at(hot(root_port(&format!("rp{index}"), "rc0"), reserve), place.0, place.1)
    };
    topology((0..count).map(port).collect())
}

fn planned(topology: &Topology, space: &Apertures) -> Plan {
    let plan = topology.plan(space).unwrap();
    assert_sound(topology, &plan, space);
    plan
}

fn reserved(plan: &Plan, name: &str) -> Reserved {
    port_of(plan, name).reserved.unwrap()
}

#[test]
fn case_b1_an_empty_port_has_windows_for_a_gpu() {
    let plan = planned(&hot_ports(4, Reserve::default()), &roomy());
    for name in ["rp0", "rp3"] {
        let windows = port_of(&plan, name).windows;
        let (memory, prefetchable) = (windows.memory.unwrap(), windows.prefetchable.unwrap());
        assert!(memory.len() >= 16 * MIB && memory.base % (16 * MIB) == 0);
        assert!(prefetchable.len() >= 288 * MIB && prefetchable.base % (256 * MIB) == 0);
    }
}

#[test]
fn asked_for_sizes_are_kept_and_aligned_for_the_largest_bar_in_them() {
    let plan = planned(&hot_ports(3, kept(48 * MIB, 384 * GIB, 4)), &roomy());
    for name in ["rp0", "rp1", "rp2"] {
        let port = port_of(&plan, name);
        let (memory, prefetchable) = (port.windows.memory.unwrap(), port.windows.prefetchable.unwrap());
        assert_eq!((memory.len(), memory.base % (32 * MIB)), (48 * MIB, 0));
        assert_eq!((prefetchable.len(), prefetchable.base % (256 * GIB)), (384 * GIB, 0));
        assert_eq!(port.reserved, Some(Reserved { memory: 48 * MIB, prefetchable: 384 * GIB, buses: 4 }));
    }
    let buses: Vec<String> = ["rp0", "rp1", "rp2"].map(|name| port_of(&plan, name).buses.to_string()).into();
    assert_eq!(buses, ["01-04", "05-08", "09-0c"]);
}

#[test]
fn sizes_are_rounded_up_to_the_step_of_a_window() {
    let plan = planned(&hot_ports(1, kept(1, MIB + 1, 0)), &roomy());
    assert_eq!(reserved(&plan, "rp0"), Reserved { memory: MIB, prefetchable: 2 * MIB, buses: 1 });
}

#[test]
fn what_hangs_on_a_port_lives_in_what_the_port_keeps() {
    let nodes = vec![
        hot(root_port("rp0", "rc0"), kept(16 * MIB, GIB, 1)),
        endpoint("small", "rp0", &[mem32(MIB), mem64(2 * MIB)]),
        hot(root_port("rp1", "rc0"), kept(16 * MIB, GIB, 1)),
        endpoint("large", "rp1", &[mem32(64 * MIB), mem64(8 * GIB)]),
    ];
    let plan = planned(&topology(nodes), &roomy());
    let size = |name: &str| {
        let windows = port_of(&plan, name).windows;
        (windows.memory.unwrap().len() / MIB, windows.prefetchable.unwrap().len() / GIB)
    };
    assert_eq!((size("rp0"), size("rp1")), ((16, 1), (64, 8)));
}

#[test]
fn a_switch_s_ports_keep_theirs_inside_the_port_above() {
    let nodes = vec![
        hot(root_port("rp", "rc0"), kept(2 * MIB, 2 * MIB, 16)),
        upstream("up", "rp"),
        hot(downstream("dp0", "up"), kept(2 * MIB, GIB, 2)),
        hot(downstream("dp1", "up"), kept(2 * MIB, GIB, 2)),
    ];
    let plan = planned(&topology(nodes), &roomy());
    let buses: Vec<String> = ["rp", "up", "dp0", "dp1"].map(|name| port_of(&plan, name).buses.to_string()).into();
    assert_eq!(buses, ["01-10", "02-06", "03-04", "05-06"]);
    assert_eq!(port_of(&plan, "rp").windows.memory.unwrap().len(), 4 * MIB);
    assert_eq!(port_of(&plan, "rp").windows.prefetchable.unwrap().len(), 2 * GIB);
}

#[test]
fn sizes_that_nobody_chose_shrink_until_everything_fits() {
    for (count, memory, prefetchable) in [(1, 32, 1 << 20), (40, 32, 1 << 20), (60, 16, 1 << 20), (250, 4, 256 << 10)] {
        let plan = planned(&hot_ports(count, Reserve::default()), &roomy());
        assert_eq!(reserved(&plan, "rp0"), Reserved { memory: memory * MIB, prefetchable: prefetchable * MIB, buses: 1 });
    }
    let narrow = Apertures { mem64: vec![Window { base: 4 * GIB, limit: 32 * GIB - 1 }], address_bits: 36, ..roomy() };
    let plan = planned(&hot_ports(40, Reserve::default()), &narrow);
    assert_eq!(reserved(&plan, "rp39").prefetchable, 512 * MIB);
    let vast = Apertures { mem64: vec![Window { base: 64 * GIB, limit: (1 << 48) - 1 }], address_bits: 48, ..roomy() };
    let plan = planned(&hot_ports(100, Reserve::default()), &vast);
    assert_eq!(reserved(&plan, "rp99").prefetchable, 512 * GIB, "nothing lies above 2^46 for devices that may never come");
    let none = Apertures { mem64: Vec::new(), ..roomy() };
    assert_eq!(reserved(&planned(&hot_ports(8, Reserve::default()), &none), "rp7").prefetchable, 0);
}

#[test]
fn devices_that_are_there_come_before_room_for_others() {
    let mut topology = hot_ports(12, Reserve::default());
    topology.nodes.push(root_port("rp", "rc0"));
    topology.nodes.push(endpoint("gpu", "rp", &[mem64(256 * GIB), mem64(32 * MIB)]));
    let narrow = Apertures { mem64: vec![Window { base: 64 * GIB, limit: 1024 * GIB - 1 }], address_bits: 40, ..roomy() };
    let plan = planned(&topology, &narrow);
    assert_eq!((reserved(&plan, "rp0").prefetchable, plan.notes.len()), (8 * GIB, 0));
}

#[test]
fn case_b2_a_budget_that_does_not_fit_is_refused_and_named() {
    let small = Apertures { mem64: vec![Window { base: 4 * GIB, limit: 36 * GIB - 1 }], address_bits: 40, ..roomy() };
    let topology = hot_ports(3, kept(2 * MIB, 16 * GIB, 1));
    let Err(PlanError::Space(shortage)) = topology.plan(&small) else { panic!("48 GiB are not in 32 GiB") };
    assert_eq!((&shortage.name.0[..], shortage.asks), ("rp1", Asks::Reserve { size: 16 * GIB }));
    assert_eq!((shortage.there, shortage.left_over.len()), (32 * GIB, 2));
    let text = shortage.to_string();
    for fact in ["what `rp1` keeps for hot-plug (16G)", "2 of them find no place: `rp1`, `rp2`", "keep less for hot-plug"] {
        assert!(text.contains(fact), "{text} lacks {fact}");
    }
    let enough = Apertures { mem64: vec![Window { base: 4 * GIB, limit: 4 * GIB + shortage.needed - 1 }], ..small };
    planned(&topology, &enough);
}

#[test]
fn buses_that_are_kept_count() {
    let error = hot_ports(20, kept(MIB, MIB, 20)).plan(&roomy()).unwrap_err();
    assert_eq!(error, PlanError::Buses { segment: 0, needed: 401, over: 145 });
}

#[test]
fn an_upstream_port_has_no_slot() {
    let nodes = vec![root_port("rp", "rc0"), hot(upstream("up", "rp"), Reserve::default())];
    assert_eq!(topology(nodes).check(), Err(TopologyError::NoSlot { name: "up".into(), noun: "upstream port" }));
}

#[test]
fn a_size_beyond_all_addresses_is_refused() {
    for size in [u64::MAX, 1 << 63, 1 << 52] {
        assert!(matches!(hot_ports(2, kept(size, size, 1)).plan(&roomy()), Err(PlanError::Space(_))), "{size:#x}");
    }
}

#[test]
fn the_plan_shows_what_is_kept() {
    let plan = planned(&hot_ports(1, kept(2 * MIB, 16 * GIB, 3)), &roomy());
    let shown = Tree { plan: &plan, label: &|_| String::new(), verbose: true }.to_string();
    let line = "hot-plug (surprise removal) keeps 2M memory, 16G prefetchable, 3 buses";
    assert!(shown.contains(line), "{shown}");
}
