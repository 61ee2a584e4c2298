//! Names, nesting, device and function numbers, buses, INTx, I/O ports.

use super::*;

/// Device and function numbers by name, in bus order.
fn places(nodes: Vec<NodeSpec>) -> Vec<String> {
    let topology = topology(nodes);
    let plan = topology.plan(&roomy()).unwrap();
    assert_sound(&topology, &plan, &roomy());
    plan.functions.iter().map(|function| format!("{} {}", function.name, function.at.bdf)).collect()
}

fn on_root(name: &str) -> NodeSpec {
    endpoint(name, "rc0", &[])
}

#[test]
fn numbers_that_nobody_asked_for_are_the_lowest_that_nobody_wants() {
    let nodes = vec![on_root("a"), at(on_root("b"), 1, 0), on_root("c"), at(on_root("d"), 0, 0)];
    assert_eq!(places(nodes), ["d 00:00.0", "b 00:01.0", "a 00:02.0", "c 00:03.0"]);
}

#[test]
fn a_further_function_joins_the_sibling_before_it() {
    let nodes = vec![on_root("a"), on_root("b"), function(on_root("b1"), 1), function(on_root("b2"), 2), on_root("c")];
    assert_eq!(places(nodes.clone()), ["a 00:00.0", "b 00:01.0", "b1 00:01.1", "b2 00:01.2", "c 00:02.0"]);
    let plan = topology(nodes).plan(&roomy()).unwrap();
    let multi: Vec<&str> =
        plan.functions.iter().filter(|function| function.multifunction).map(|function| function.name.0.as_str()).collect();
    assert_eq!(multi, ["b"], "only function 0 of a device with several says so");
}

#[test]
fn ports_beyond_32_share_device_numbers() {
    let ports = |count: usize, others: usize| -> Vec<NodeSpec> {
        let others = (0..others).map(|index| on_root(&format!("e{index}")));
        others.chain((0..count).map(|index| root_port(&format!("p{index}"), "rc0"))).collect()
    };
    for (count, others, last) in [(32, 0, "1f.0"), (33, 0, "10.0"), (200, 0, "1c.3"), (200, 3, "1f.3"), (252, 0, "1f.3")] {
        let nodes = ports(count, others);
        let plan = topology(nodes.clone()).plan(&roomy()).unwrap();
        assert_sound(&topology(nodes), &plan, &roomy());
        let place = |name: &str| plan.by_name(name).unwrap().at.bdf.devfn().to_string();
        assert_eq!(place(&format!("p{}", count - 1)), last, "{count} ports and {others} others");
    }
    assert_eq!(topology(ports(1, 32)).check(), Err(TopologyError::Full { name: "p0".into(), on: "rc0".into() }));
    let mixed = |count: usize| {
        let mut nodes = ports(count, 0);
        nodes.extend([root_port("q", "rc0"), function(root_port("q3", "rc0"), 3), at(root_port("r", "rc0"), 1, 0)]);
        places(nodes)
    };
    let few = mixed(2);
    assert_eq!(few, ["p0 00:00.0", "r 00:01.0", "p1 00:02.0", "q 00:03.0", "q3 00:03.3"]);
    let many = mixed(60);
    for place in ["p0 00:00.0", "p1 00:00.1", "r 00:01.0", "p2 00:02.0", "p59 00:1e.1", "q 00:1f.0", "q3 00:1f.3"] {
        assert!(many.iter().any(|shown| shown == place), "{many:?} lacks {place}");
    }
}

#[test]
fn numbers_of_the_first_root_bus_stay_free_as_far_as_ports_can_share() {
    let taken = |ports: usize, others: usize, spare_numbers: u8| {
        let others = (0..others).map(|index| on_root(&format!("e{index}")));
        let nodes = others.chain((0..ports).map(|index| root_port(&format!("p{index}"), "rc0"))).collect();
        let plan = Topology { spare_numbers, ..topology(nodes) }.plan(&roomy()).unwrap();
        let numbers: std::collections::BTreeSet<u8> =
            plan.functions.iter().map(|function| function.at.bdf.devfn().device()).collect();
        numbers.len()
    };
    assert_eq!([taken(10, 6, 0), taken(10, 6, 16)], [16, 16], "nobody shares without need");
    assert_eq!([taken(12, 6, 16), taken(24, 6, 16), taken(80, 6, 16)], [12, 14, 16]);
    assert_eq!([taken(200, 6, 16), taken(4, 30, 16)], [31, 31], "more cannot be done");
}

#[test]
fn a_switch_has_more_than_32_downstream_ports_by_functions() {
    let mut nodes = vec![root_port("rp", "rc0"), upstream("up", "rp")];
    nodes.extend((0..64).map(|index| downstream(&format!("d{index}"), "up")));
    let shown = places(nodes);
    assert!(
        ["d0 02:00.0", "d1 02:00.1", "d63 02:1f.1"].iter().all(|place| shown.iter().any(|shown| shown == place)),
        "{shown:?}"
    );
}

#[test]
fn every_endpoint_below_a_port_is_device_0_of_its_own_bus() {
    let nodes = vec![
        root_port("rp0", "rc0"),
        endpoint("nic", "rp0", &[]),
        function(endpoint("nic1", "rp0", &[]), 1),
        root_port("rp1", "rc0"),
        endpoint("gpu", "rp1", &[]),
    ];
    assert_eq!(places(nodes), ["rp0 00:00.0", "nic 01:00.0", "nic1 01:00.1", "rp1 00:01.0", "gpu 02:00.0"]);
}

#[test]
fn a_management_function_may_sit_beside_an_upstream_port() {
    let nodes = vec![root_port("rp", "rc0"), upstream("up", "rp"), function(endpoint("m", "rp", &[]), 1), downstream("dp", "up")];
    assert_eq!(places(nodes), ["rp 00:00.0", "up 01:00.0", "dp 02:00.0", "m 01:00.1"]);
}

#[test]
fn what_cannot_exist_is_refused_and_said() {
    let switch = || vec![root_port("rp", "rc0"), upstream("up", "rp"), downstream("dp", "up")];
    let with = |node: NodeSpec| [switch(), vec![node]].concat();
    let mut ids = root_port("rp2", "rc0");
    if let NodeKind::Port(port) = &mut ids.kind {
        port.ids = Some(Ids::default());
    }
    let mut nobody = endpoint("e", "dp", &[]);
    if let NodeKind::Endpoint(endpoint) = &mut nobody.kind {
        endpoint.ids.vendor = 0xFFFF;
    }
    let mut pin = endpoint("e", "dp", &[]);
    if let NodeKind::Endpoint(endpoint) = &mut pin.kind {
        endpoint.interrupt_pin = 5;
    }
    let cases = [
        (with(endpoint("", "dp", &[])), "`` is no name"),
        (with(endpoint("a b", "dp", &[])), "`a b` is no name"),
        (with(endpoint(&"x".repeat(65), "dp", &[])), "1 to 64 characters"),
        (with(endpoint("up", "dp", &[])), "`up` names two things, upstream port and endpoint"),
        (with(endpoint("rc0", "dp", &[])), "`rc0` names two things, root complex and endpoint"),
        (vec![on_root("a"), on_root("a")], "`a` names two things, endpoint and another endpoint"),
        (with(endpoint("e", "dp9", &[])), "endpoint `e` hangs on `dp9`, which does not exist"),
        (with(endpoint("e", "up", &[])), "endpoint `e` cannot hang on upstream port `up`"),
        (with(root_port("rp2", "dp")), "root port `rp2` cannot hang on downstream port `dp`"),
        (with(upstream("up2", "rc0")), "upstream port `up2` cannot hang on root complex `rc0`"),
        (with(upstream("up2", "up")), "upstream port `up2` cannot hang on upstream port `up`"),
        (with(downstream("dp2", "rp")), "downstream port `dp2` cannot hang on root port `rp`"),
        (with(upstream("up2", "rp")), "`up` and `up2` are both 00.0 on `rp`"),
        (with(function(upstream("up2", "dp"), 1)), "upstream port `up2` asks for function 1"),
        (with(at(endpoint("e", "dp", &[]), 3, 0)), "`e` asks for device 3 on `dp`"),
        (with(at(downstream("dp2", "up"), 32, 0)), "`dp2` asks for device 32"),
        (with(at(downstream("dp2", "up"), 1, 8)), "`dp2` asks for function 8"),
        (vec![at(on_root("a"), 2, 0), at(on_root("b"), 2, 0)], "`a` and `b` are both 02.0 on `rc0`"),
        (with(at(downstream("dp2", "up"), 4, 2)), "`dp2` is 04.2 on `up`, but nothing is function 0 of device 4"),
        (with(function(endpoint("e", "dp", &[]), 1)), "`e` is 00.1 on `dp`, but nothing is function 0"),
        (vec![function(on_root("e"), 1)], "`e` is function 1 on `rc0`, but nothing"),
        ((0..33).map(|n| on_root(&format!("e{n}"))).collect(), "no device number is left on `rc0` for `e32`"),
        (vec![pci_bridge("pb", "rc0")], "PCIe-to-PCI bridge `pb` cannot hang on root complex `rc0`"),
        (with(pci_bridge("pb", "up")), "PCIe-to-PCI bridge `pb` cannot hang on upstream port `up`"),
        ([with(pci_bridge("pb", "dp")), vec![root_port("p", "pb")]].concat(), "`p` cannot hang on PCIe-to-PCI bridge `pb`"),
        (with(ids), "root port `rp2` has ids"),
        (with(nobody), "`e` has vendor id ffff"),
        (with(pin), "`e` has interrupt pin 5"),
        (with(endpoint("e", "dp", &[mem32(3 * MIB)])), "`e` cannot have these BARs"),
        (with(endpoint("e", "dp", &[mem64(1024 * GIB)])), "`e` cannot have these BARs"),
        (vec![upstream("a", "b"), downstream("b", "a")], "`a` hangs on `b`, `b` hangs on `a`: no root complex"),
    ];
    for (nodes, said) in cases {
        let topology = topology(nodes);
        let error = topology.check().unwrap_err();
        assert!(error.to_string().contains(said), "`{error}` lacks `{said}`");
        assert_eq!(topology.plan(&roomy()).unwrap_err(), PlanError::Topology(error));
    }
}

#[test]
fn a_loop_is_named_without_what_only_hangs_on_it() {
    let nodes = vec![
        function(endpoint("e", "d2", &[]), 1),
        upstream("u1", "d2"),
        downstream("d1", "u1"),
        upstream("u2", "d1"),
        downstream("d2", "u2"),
    ];
    let Err(TopologyError::Loop { mut names }) = topology(nodes).check() else { panic!("not found to be a loop") };
    names.sort();
    assert_eq!(names, ["d1", "d2", "u1", "u2"].map(Name::from));
}

#[test]
fn a_conventional_bus_has_many_devices_whose_pins_spread() {
    let mut nodes = vec![at(root_port("rp", "rc0"), 1, 0), pci_bridge("pb", "rp")];
    nodes.extend((0..5).map(|index| endpoint(&format!("e{index}"), "pb", &[mem32(4096), mem64(MIB), io(32)])));
    nodes.push(function(endpoint("f", "pb", &[]), 1));
    let topology = topology(nodes);
    let plan = topology.plan(&roomy()).unwrap();
    assert_sound(&topology, &plan, &roomy());
    let places: Vec<String> = plan.functions.iter().skip(2).map(|function| function.at.bdf.to_string()).collect();
    assert_eq!(places, ["02:00.0", "02:01.0", "02:02.0", "02:03.0", "02:04.0", "02:04.1"]);
    let wire = |name: &str| endpoint_of(&plan, name).intx.unwrap();
    let wires: Vec<(u8, u8)> = (0..5).map(|index| wire(&format!("e{index}"))).map(|wire| (wire.device, wire.pin)).collect();
    assert_eq!(wires, [(1, 0), (1, 1), (1, 2), (1, 3), (1, 0)]);
    assert_eq!((port_of(&plan, "pb").slot, port_of(&plan, "rp").slot), (0, 1));
    let unassigned = plan.notes.iter().filter(|note| matches!(note, Note::IoBarUnassigned { .. })).count();
    assert_eq!(unassigned, 5, "bridges have no I/O window");
}

#[test]
fn a_pin_turns_at_every_bridge_on_its_way_up() {
    let nodes = vec![
        at(root_port("rp", "rc0"), 3, 0),
        upstream("up", "rp"),
        at(downstream("dp0", "up"), 0, 0),
        at(downstream("dp1", "up"), 1, 0),
        endpoint("a", "dp0", &[]),
        endpoint("b", "dp1", &[]),
        at(endpoint("c", "rc0", &[]), 7, 0),
    ];
    let plan = topology(nodes).plan(&roomy()).unwrap();
    let wires: Vec<IntxRoute> = ["a", "b", "c"].iter().filter_map(|name| endpoint_of(&plan, name).intx).collect();
    let wire = |device, pin| IntxRoute { root_complex: 0, device, pin };
    assert_eq!(wires, [wire(3, 0), wire(3, 1), wire(7, 0)]);
    let inputs: Vec<u32> = wires.into_iter().map(crate::intx::gsi).collect();
    assert_eq!(inputs, [19, 20, 23]);
}

#[test]
fn io_bars_get_ports_on_a_root_bus_and_a_note_below_a_port() {
    let nodes =
        vec![endpoint("a", "rc0", &[io(32), mem32(MIB), io(256)]), root_port("rp", "rc0"), endpoint("b", "rp", &[io(32)])];
    let topology = topology(nodes);
    let plan = topology.plan(&roomy()).unwrap();
    assert_sound(&topology, &plan, &roomy());
    let a = endpoint_of(&plan, "a");
    assert_eq!((a.bars[0], a.bars[2]), (Some(0xC100), Some(0xC000)));
    assert_eq!(plan.root_complexes[0].io, Some((0xC000, 0xC1FF)));
    assert_eq!(endpoint_of(&plan, "b").bars, [None; 6]);
    assert_eq!(plan.notes, [Note::IoBarUnassigned { function: "b".into(), bar: 0 }]);
    assert_eq!(plan.notes[0].to_string(), "BAR 0 of `b` gets no I/O ports: ports have no I/O window");
}

#[test]
fn io_bars_beyond_the_ports_are_refused() {
    let many = |count: usize| {
        topology((0..count).map(|n| at(on_root_io(n), u8::try_from(n / 8).unwrap(), u8::try_from(n % 8).unwrap())).collect())
    };
    many(64).plan(&roomy()).unwrap();
    let Err(PlanError::Space(shortage)) = many(65).plan(&roomy()) else { panic!("there are no such ports") };
    assert_eq!((shortage.pool, shortage.missing()), (Pool::Io, 256));
}

fn on_root_io(index: usize) -> NodeSpec {
    endpoint(&format!("e{index}"), "rc0", &[io(256)])
}
