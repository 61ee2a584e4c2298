//! Field cases and the arithmetic of one plan at a time.

use super::*;

/// A GPU's BARs: registers, framebuffer, a small one.
fn gpu(framebuffer: u64) -> [BarSpec; 3] {
    [mem32(16 * MIB), mem64(framebuffer), mem64(32 * MIB)]
}

fn planned(topology: &Topology, space: &Apertures) -> Plan {
    let plan = topology.plan(space).unwrap();
    assert_sound(topology, &plan, space);
    plan
}

fn shortage(topology: &Topology, space: &Apertures) -> Shortage {
    match topology.plan(space) {
        Err(PlanError::Space(shortage)) => *shortage,
        other => panic!("expected a shortage, not {other:?}"),
    }
}

#[test]
fn case_a2_each_kind_of_bar_lies_in_the_window_of_its_kind() {
    let specs = [mem32(MIB), mem64(64 * MIB), mem64_plain(2 * MIB)];
    let topology = topology(vec![root_port("rp", "rc0"), endpoint("gpu", "rp", &specs)]);
    let plan = planned(&topology, &roomy());
    let windows = port_of(&plan, "rp").windows;
    let gpu = endpoint_of(&plan, "gpu");
    assert_eq!(gpu.spec.bars, bars(&specs));
    let (memory, prefetchable) = (windows.memory.unwrap(), windows.prefetchable.unwrap());
    assert!(memory.contains(gpu.bars[0].unwrap(), MIB));
    assert!(prefetchable.contains(gpu.bars[1].unwrap(), 64 * MIB));
    assert!(memory.contains(gpu.bars[3].unwrap(), 2 * MIB));
    assert!(prefetchable.base >= 1 << 32 && memory.limit < 1 << 32);
}

#[test]
fn case_a4_every_bar_of_identical_gpus_is_assigned() {
    for count in [2, 4, 8] {
        let topology = ports_with(count, &gpu(32 * GIB));
        let plan = planned(&topology, &roomy());
        assert_eq!(placed_bars(&plan).len(), 3 * count);
    }
}

#[test]
fn case_a5_a_short_aperture_is_refused_with_its_numbers() {
    for count in [2, 5, 8] {
        let topology = ports_with(count, &[mem64(64 * GIB)]);
        let there = u64::try_from(count - 1).unwrap() * 64 * GIB;
        let aperture = Window { base: 64 * GIB, limit: 64 * GIB + there - 1 };
        let space = Apertures { mem64: vec![aperture], ..roomy() };
        let shortage = shortage(&topology, &space);
        assert_eq!((shortage.needed, shortage.there, shortage.missing()), (there + 64 * GIB, there, 64 * GIB));
        assert_eq!(shortage.left_over, [Name(format!("gpu{}", count - 1))]);
        assert_eq!(shortage.enough_bits, None);
        let text = topology.plan(&space).unwrap_err().to_string();
        let facts = [
            format!("`gpu{}`", count - 1),
            format!("{}G", there / GIB),
            "64G are missing".into(),
            "one of them finds no place".into(),
        ];
        for fact in facts {
            assert!(text.contains(&fact), "{text} lacks {fact}");
        }
    }
}

#[test]
fn case_a6_no_width_loses_a_device_silently() {
    let topology = ports_with(4, &gpu(128 * GIB));
    for ram in [64, 256, 512, 768] {
        for bits in [40, 42, 46] {
            let space = Apertures {
                mem64: vec![Window { base: ram * GIB + 2 * GIB, limit: (1 << bits) - 1 }],
                address_bits: bits,
                ..roomy()
            };
            match topology.plan(&space) {
                Ok(plan) => assert_sound(&topology, &plan, &space),
                Err(PlanError::Space(shortage)) => {
                    let enough = shortage.enough_bits.unwrap();
                    assert!(shortage.to_string().contains(&format!("{enough} guest-physical address bits")));
                    assert!(enough > bits);
                    let with = |bits: u8| Apertures {
                        mem64: vec![Window { base: ram * GIB + 2 * GIB, limit: (1 << bits) - 1 }],
                        address_bits: bits,
                        ..roomy()
                    };
                    topology.plan(&with(enough)).unwrap();
                    topology.plan(&with(enough - 1)).unwrap_err();
                }
                Err(other) => panic!("{other}"),
            }
            let fits = bits > 40 || ram <= 256;
            assert_eq!(topology.plan(&space).is_ok(), fits, "{ram} GiB, {bits} bits");
        }
    }
}

#[test]
fn case_a6_without_any_aperture_the_needed_width_is_named() {
    let topology = ports_with(4, &gpu(128 * GIB));
    let space = Apertures { mem64: Vec::new(), address_bits: 39, ..roomy() };
    let shortage = shortage(&topology, &space);
    assert_eq!((shortage.there, shortage.left_over.len(), shortage.enough_bits), (0, 4, Some(40)));
    let wider = Apertures { mem64: vec![Window { base: 1 << 39, limit: (1 << 40) - 1 }], address_bits: 40, ..roomy() };
    planned(&topology, &wider);
}

#[test]
fn case_a8_large_bars_are_aligned_from_any_aperture_base() {
    for base in [4 * GIB, 5 * GIB, 66 * GIB + MIB, 129 * GIB] {
        let space = Apertures { mem64: vec![Window { base, limit: (1 << 46) - 1 }], ..roomy() };
        planned(&ports_with(4, &[mem64(128 * GIB)]), &space);
    }
}

#[test]
fn case_a10_forty_devices_fit_below_4_gib_and_two_hundred_are_refused() {
    planned(&ports_with(40, &[mem32(16 * MIB)]), &roomy());
    let shortage = shortage(&ports_with(200, &[mem32(16 * MIB)]), &roomy());
    assert_eq!(shortage.pool, Pool::Memory32);
    assert_eq!((shortage.needed, shortage.there), (200 * 16 * MIB, 1536 * MIB));
    assert_eq!(shortage.left_over.len(), 200 - 96);
}

#[test]
fn all_256_buses_of_a_segment_are_used() {
    let mut switches = Vec::new();
    for switch in 0..15 {
        let (root, up) = (format!("r{switch}"), format!("u{switch}"));
        switches.extend([root_port(&root, "rc0"), upstream(&up, &root)]);
        for index in 0..15 {
            let port = format!("d{switch}-{index}");
            switches.push(downstream(&port, &up));
            switches.push(endpoint(&format!("e{switch}-{index}"), &port, &[mem32(MIB), mem64(GIB)]));
        }
    }
    let mut nested = vec![root_port("d", "rc0")];
    let mut above = "d".to_owned();
    for level in 0..127 {
        let (up, down) = (format!("u{level}"), format!("d{level}"));
        nested.extend([upstream(&up, &above), downstream(&down, &up)]);
        above = down;
    }
    nested.push(endpoint("e", &above, &gpu(GIB)));
    for (nodes, name) in [(switches, "15 switches of 15 ports"), (nested, "127 switches below each other")] {
        let topology = topology(nodes);
        let buses = planned(&topology, &roomy()).root_complexes.iter().map(|root| root.buses.subordinate).max();
        assert_eq!(buses, Some(255), "{name}");
    }
}

#[test]
fn case_a13_a_switch_is_numbered_completely() {
    let nodes = vec![
        root_port("rp", "rc0"),
        upstream("up", "rp"),
        downstream("dp0", "up"),
        downstream("dp1", "up"),
        endpoint("a", "dp0", &gpu(GIB)),
        endpoint("b", "dp1", &gpu(GIB)),
    ];
    let topology = topology(nodes);
    let plan = planned(&topology, &roomy());
    let at: Vec<String> = plan.functions.iter().map(|function| format!("{} {}", function.name, function.at.bdf)).collect();
    assert_eq!(at, ["rp 00:00.0", "up 01:00.0", "dp0 02:00.0", "a 03:00.0", "dp1 02:01.0", "b 04:00.0"]);
    let buses: Vec<String> = ["rp", "up", "dp0", "dp1"].iter().map(|name| port_of(&plan, name).buses.to_string()).collect();
    assert_eq!(buses, ["01-04", "02-04", "03", "04"]);
}

#[test]
fn eight_gpus_with_512_gib_fit_in_46_bits() {
    let plan = planned(&ports_with(8, &gpu(512 * GIB)), &roomy());
    assert_eq!(plan.notes, [], "there is room for the plain rule");
}

#[test]
fn small_prefetchable_bars_make_room_only_where_there_is_none() {
    let topology = ports_with(8, &gpu(256 * GIB));
    let tight = Apertures { mem64: vec![Window { base: 1 << 41, limit: (1 << 42) - 1 }], address_bits: 42, ..roomy() };
    let plan = planned(&topology, &tight);
    let moved: Vec<Note> =
        (0..8).map(|index| Note::PrefetchableBelow4G { function: Name(format!("gpu{index}")), bar: Resource::Bar(3) }).collect();
    assert_eq!(plan.notes, moved);
    let memory = port_of(&plan, "rp7").windows.memory.unwrap();
    assert!(memory.contains(endpoint_of(&plan, "gpu7").bars[3].unwrap(), 32 * MIB));
    assert_eq!(planned(&topology, &roomy()).notes, []);
}

#[test]
fn small_prefetchable_bars_do_not_move_where_the_low_hole_is_full() {
    let tight = Apertures {
        mem32: vec![Window { base: 0xC000_0000, limit: 0xC800_0000 - 1 }],
        mem64: vec![Window { base: 1 << 41, limit: (1 << 42) - 1 }],
        address_bits: 42,
    };
    let shortage = shortage(&ports_with(8, &gpu(256 * GIB)), &tight);
    assert_eq!((shortage.pool, shortage.enough_bits), (Pool::Memory64, Some(43)));
}

#[test]
fn without_a_64_bit_aperture_small_devices_live_below_4_gib() {
    let space = Apertures { mem64: Vec::new(), ..roomy() };
    let plan = planned(&ports_with(4, &[mem64(64 * MIB), mem64(MIB)]), &space);
    assert_eq!(plan.notes.len(), 8);
}

#[test]
fn a_large_bar_that_is_not_prefetchable_is_refused_for_want_of_low_space() {
    let asks = Asks::Bar { bar: Resource::Bar(0), need: Need { each: mem64_plain(4 * GIB), count: 1 } };
    let nodes = vec![root_port("rp", "rc0"), endpoint("e", "rp", &[mem64_plain(4 * GIB)])];
    let shortage = shortage(&topology(nodes), &roomy());
    assert_eq!((shortage.pool, shortage.asks, shortage.enough_bits), (Pool::Memory32, asks, None));
}

#[test]
fn bars_smaller_than_a_page_share_none() {
    let sub_page = [BarSpec { size: 16, ..mem32(16) }, mem32(256)];
    let nodes = vec![endpoint("a", "rc0", &sub_page), root_port("rp", "rc0"), endpoint("b", "rp", &sub_page)];
    let plan = planned(&topology(nodes), &roomy());
    let mut pages: Vec<u64> = placed_bars(&plan).into_iter().map(|(_, _, _, at)| at / 4096).collect();
    pages.sort_unstable();
    pages.dedup();
    assert_eq!(pages.len(), 4);
}

#[test]
fn nothing_is_placed_at_address_0() {
    let space = Apertures { mem32: vec![Window { base: 0, limit: 64 * MIB - 1 }], ..roomy() };
    let plan = planned(&topology(vec![endpoint("a", "rc0", &[mem32(4096)])]), &space);
    assert_eq!(endpoint_of(&plan, "a").bars[0], Some(4096));
    assert_eq!(plan.root_complexes[0].mem32, space.mem32);
}

#[test]
fn case_a9_the_window_holds_the_bars_of_all_virtual_functions() {
    let nic = with_vfs(endpoint("nic", "rp", &[mem32(16 * MIB)]), Some(vfs(16, 8, 1, &[mem64(256 * MIB), mem32(16 << 10)])));
    let topology = topology(vec![root_port("rp", "rc0"), nic]);
    let plan = planned(&topology, &roomy());
    let (windows, nic) = (port_of(&plan, "rp").windows, endpoint_of(&plan, "nic"));
    assert!(windows.prefetchable.unwrap().contains(nic.vf_bars[0].unwrap(), 4 * GIB));
    assert!(windows.memory.unwrap().contains(nic.vf_bars[2].unwrap(), 256 << 10));
    assert!(windows.memory.unwrap().contains(nic.bars[0].unwrap(), 16 * MIB));
}

#[test]
fn case_a9_virtual_functions_that_need_too_much_are_refused_with_the_sum() {
    let with = |sriov| topology(vec![root_port("rp", "rc0"), with_vfs(endpoint("nic", "rp", &[]), Some(sriov))]);
    let shortage = shortage(&with(vfs(128, 8, 1, &[mem64(512 * GIB)])), &roomy());
    assert_eq!((shortage.pool, shortage.asks.size(), shortage.enough_bits), (Pool::Memory64, 64 << 40, Some(47)));
    assert!(shortage.to_string().contains("VF BAR 0 of `nic` (mem64 512G pref for each of 128 virtual functions)"));
    // Sums past 64 bits, whatever BARs there may be.
    assert_eq!(Need { each: mem64(1 << 50), count: u16::MAX }.size(), None);
    for (sriov, part) in [
        (vfs(16, 8, 1, &[mem64(1 << 62)]), "BAR 0 has size 0x4000000000000000"),
        (vfs(16, 8, 1, &[io(256)]), "VF BAR 0 is io 256"),
        (vfs(16, 8, 1, &[mem32(2048)]), "memory BARs of at least 4K"),
        (vfs(0, 8, 1, &[]), "0 virtual functions"),
        (vfs(2, 8, 0, &[]), "0 apart"),
        (vfs(2, 0, 1, &[]), "start 0 behind"),
    ] {
        let Err(PlanError::Topology(TopologyError::Sriov { source, .. })) = with(sriov).plan(&roomy()) else { panic!("{part}") };
        let cause = std::error::Error::source(&source).map(ToString::to_string).unwrap_or_default();
        assert!(format!("{source}: {cause}").contains(part), "{source}: {cause}");
    }
}

#[test]
fn case_a9_virtual_functions_beyond_the_bus_take_the_buses_behind_it() {
    let nodes = vec![
        with_vfs(endpoint("rciep", "rc0", &[]), Some(vfs(2, 255, 1, &[]))),
        root_port("rp0", "rc0"),
        with_vfs(endpoint("nic", "rp0", &[]), Some(vfs(64, 256, 8, &[]))),
        root_port("rp1", "rc0"),
        endpoint("gpu", "rp1", &[]),
    ];
    let plan = planned(&topology(nodes), &roomy());
    let buses: Vec<String> = ["rp0", "rp1"].iter().map(|name| port_of(&plan, name).buses.to_string()).collect();
    // One for the second virtual function on the root bus; 64 of the NIC, 8 apart, from the next bus on: two buses.
    assert_eq!(buses, ["02-04", "05"]);
    let far = with_vfs(endpoint("nic", "rp0", &[]), Some(vfs(u16::MAX, u16::MAX, u16::MAX, &[])));
    let error = topology(vec![root_port("rp0", "rc0"), far]).plan(&roomy()).unwrap_err();
    assert!(matches!(error, PlanError::Buses { segment: 0, needed: 258, over: 2 }), "{error}");
}

#[test]
fn virtual_functions_share_no_number_with_anybody() {
    let nodes = |offset| {
        vec![
            root_port("rp", "rc0"),
            with_vfs(endpoint("nic0", "rp", &[]), Some(vfs(4, offset, 2, &[]))),
            with_vfs(function(endpoint("nic1", "rp", &[]), 1), Some(vfs(4, 4, 2, &[]))),
        ]
    };
    planned(&topology(nodes(4)), &roomy());
    let error = topology(nodes(1)).plan(&roomy()).unwrap_err().to_string();
    assert!(error.starts_with("a virtual function of `nic0` has routing id 0x1 on its bus, as `nic1`"), "{error}");
    assert!(topology(nodes(3)).plan(&roomy()).is_err());
}

#[test]
fn roms_lie_below_4_gib_in_the_port_s_memory_window() {
    let rom = |name: &str, on: &str, size| with_rom(endpoint(name, on, &[mem64(GIB)]), Some(size));
    let nodes = vec![root_port("rp", "rc0"), rom("gpu", "rp", 512 << 10), rom("rciep", "rc0", 2 << 10)];
    let plan = planned(&topology(nodes), &roomy());
    let at = endpoint_of(&plan, "gpu").rom.unwrap();
    assert!(port_of(&plan, "rp").windows.memory.unwrap().contains(at, 512 << 10));
    assert!(endpoint_of(&plan, "rciep").rom.unwrap() < 1 << 32);
    for size in [0, 1 << 10, 3 << 10, 32 * MIB] {
        assert!(matches!(topology(vec![rom("x", "rc0", size)]).check(), Err(TopologyError::Bars { .. })), "{size:#x}");
    }
}

#[test]
fn functions_beyond_7_are_found_by_alternative_routing_ids_below_a_link_alone() {
    let far = |on: &str| function(endpoint("far", on, &[]), 200);
    let plan = planned(&topology(vec![root_port("rp", "rc0"), endpoint("gpu", "rp", &[]), far("rp")]), &roomy());
    assert_eq!(plan.by_name("far").unwrap().at.bdf.requester_id(), 0x1C8);
    assert!(plan.by_name("gpu").unwrap().multifunction && !plan.by_name("far").unwrap().multifunction);
    assert_eq!((endpoint_of(&plan, "gpu").next_function, endpoint_of(&plan, "far").next_function), (200, 0));
    let refused = |nodes| topology(nodes).check().unwrap_err();
    assert!(matches!(refused(vec![endpoint("gpu", "rc0", &[]), far("rc0")]), TopologyError::FunctionNumber { .. }));
    assert!(matches!(refused(vec![root_port("rp", "rc0"), far("rp")]), TopologyError::FunctionZero { .. }));
}

#[test]
fn what_is_missing_below_4_gib_counts_no_gap_before_it() {
    let nodes = vec![root_port("rp", "rc0"), endpoint("e", "rp", &[mem64_plain(512 * GIB)])];
    let shortage = shortage(&topology(nodes), &roomy());
    assert_eq!((shortage.needed, shortage.missing()), (512 * GIB, 512 * GIB - 1536 * MIB));
    let text = shortage.to_string();
    assert!(
        text.contains("need 512G there, it has 1536M") && text.contains("only 64-bit prefetchable BARs can lie above 4 GiB"),
        "{text}"
    );
}
