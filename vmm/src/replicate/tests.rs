//! Copies of made-up hosts.

mod vacant;

use pci::ids::Ids;
use pci::topology::{Apertures, Window};
use pci::topology::{NodeKind, NodeSpec, PortSpec};

use super::*;
use crate::host::fake::{DOWNSTREAM, FakeFunction, FakeHost, ROOT_PORT, UPSTREAM};
use crate::host::scan::scan;

/// Two root complexes; on the first a root port with a switch that has three downstream ports.
fn host() -> FakeHost {
    let host = FakeHost::new();
    let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
    host.add("pci0000:00/0000:00:01.0", &FakeFunction::port(ROOT_PORT));
    host.add(switch, &FakeFunction::port(UPSTREAM));
    for (device, bus) in [(0, 3), (1, 4), (2, 5)] {
        let port = format!("{switch}/0000:02:{device:02x}.0");
        host.add(&port, &FakeFunction::port(DOWNSTREAM));
        host.add(&format!("{port}/0000:{bus:02x}:00.0"), &FakeFunction::default());
    }
    host.add("pci0000:80/0000:80:03.0", &FakeFunction::port(ROOT_PORT));
    host.add("pci0000:80/0000:80:03.0/0000:81:00.0", &FakeFunction::default());
    host
}

/// The replica as lines `name on parent device.function`, and its notes.
fn copy(host: &FakeHost, devices: &[(&str, &str)]) -> (Vec<String>, Vec<Note>) {
    let devices: Vec<Requested> = devices
        .iter()
        .map(|(name, at)| Requested {
            name: Name::from(*name),
            at: at.parse().unwrap(),
            endpoint: EndpointSpec { interrupt_pin: 1, ..EndpointSpec::default() },
        })
        .collect();
    let at: Vec<HostBdf> = devices.iter().map(|device| device.at).collect();
    let wishes = Wishes { order: GpuOrder::Topology, ..Wishes::default() };
    let replica = replicate(&scan(host.sysfs(), &at).unwrap(), &devices, &wishes).unwrap();
    let line = |node: &NodeSpec| match &node.kind {
        NodeKind::Port(_) => format!("{} on {}", node.name, node.on),
        NodeKind::Endpoint(_) => format!("{} on {} {}.{}", node.name, node.on, node.place.device.unwrap(), node.place.function),
    };
    (replica.topology.nodes.iter().map(line).collect(), replica.notes)
}

fn topology(host: &FakeHost, devices: &[(&str, &str)]) -> Topology {
    let devices: Vec<Requested> = devices
        .iter()
        .map(|(name, at)| Requested { name: Name::from(*name), at: at.parse().unwrap(), endpoint: EndpointSpec::default() })
        .collect();
    let at: Vec<HostBdf> = devices.iter().map(|device| device.at).collect();
    let wishes = Wishes::default();
    replicate(&scan(host.sysfs(), &at).unwrap(), &devices, &wishes).unwrap().topology
}

fn port<'a>(topology: &'a Topology, name: &str) -> &'a PortSpec {
    let node = topology.nodes.iter().find(|node| node.name.0 == name).unwrap();
    match &node.kind {
        NodeKind::Port(port) => port,
        NodeKind::Endpoint(_) => panic!("{name} is an endpoint"),
    }
}

#[test]
fn the_copy_has_the_host_s_levels_and_nothing_that_leads_nowhere() {
    let (lines, notes) = copy(&host(), &[("gpu0", "0000:03:00.0"), ("nic0", "0000:05:00.0")]);
    assert_eq!(
        lines,
        [
            "root-0000-00-01.0 on rc0",
            "up-0000-01-00.0 on root-0000-00-01.0",
            "down-0000-02-00.0 on up-0000-01-00.0",
            "gpu0 on down-0000-02-00.0 0.0",
            "down-0000-02-02.0 on up-0000-01-00.0",
            "nic0 on down-0000-02-02.0 0.0",
        ]
    );
    assert_eq!(notes, []);
}

#[test]
fn nested_switches_keep_both_levels() {
    let host = FakeHost::new();
    let mut path = String::from("pci0000:00");
    let levels =
        [("00:01.0", ROOT_PORT), ("01:00.0", UPSTREAM), ("02:04.0", DOWNSTREAM), ("03:00.0", UPSTREAM), ("04:08.0", DOWNSTREAM)];
    for (at, kind) in levels {
        path = format!("{path}/0000:{at}");
        host.add(&path, &FakeFunction::port(kind));
    }
    host.add(&format!("{path}/0000:05:00.0"), &FakeFunction::default());
    let (lines, _) = copy(&host, &[("gpu0", "0000:05:00.0")]);
    assert_eq!(lines.len(), 6);
    assert_eq!(lines[4], "down-0000-04-08.0 on up-0000-03-00.0");
}

#[test]
fn switch_ports_show_the_host_s_ids_and_links_and_root_ports_their_own_ids() {
    let topology = topology(&host(), &[("gpu0", "0000:03:00.0")]);
    let root = port(&topology, "root-0000-00-01.0");
    assert_eq!((root.ids, root.atomic_completers, root.link.current.to_string()), (None, 3, "8GT/s x8".into()));
    for name in ["up-0000-01-00.0", "down-0000-02-00.0"] {
        let port = port(&topology, name);
        assert_eq!(port.ids.map(|ids| (ids.vendor, ids.device)), Some((0x1000, 0xC030)));
        assert_eq!((port.link.max.to_string(), port.atomic_completers), ("16GT/s x16".into(), 0));
    }
}

#[test]
fn case_i2_each_host_root_complex_in_use_becomes_one_of_the_guest() {
    let topology = topology(&host(), &[("far", "0000:81:00.0"), ("gpu0", "0000:03:00.0")]);
    let names: Vec<&str> = topology.root_complexes.iter().map(|root| root.name.0.as_str()).collect();
    assert_eq!(names, ["rc0", "rc1"]);
    let on = |name: &str| topology.nodes.iter().find(|node| node.name.0 == name).unwrap().on.0.clone();
    assert_eq!((on("root-0000-80-03.0"), on("root-0000-00-01.0")), ("rc0".into(), "rc1".into()));
}

#[test]
fn functions_of_one_host_device_stay_one_device() {
    let host = host();
    host.add("pci0000:80/0000:80:03.0/0000:81:00.1", &FakeFunction::default());
    host.add("pci0000:80/0000:80:03.0/0000:81:00.2", &FakeFunction::default());
    let (lines, notes) = copy(&host, &[("gpu0", "0000:81:00.0"), ("usb", "0000:81:00.2")]);
    assert!(lines[1].starts_with("gpu0 on ") && lines[1].ends_with(" 0.0"), "{lines:?}");
    assert!(lines[2].starts_with("usb on ") && lines[2].ends_with(" 0.2"), "{lines:?}");
    assert_eq!(notes, []);
}

#[test]
fn without_function_0_the_lowest_function_takes_its_number() {
    let host = host();
    host.add("pci0000:80/0000:80:03.0/0000:81:00.1", &FakeFunction::default());
    host.add("pci0000:80/0000:80:03.0/0000:81:00.3", &FakeFunction::default());
    let (lines, notes) = copy(&host, &[("usb", "0000:81:00.3"), ("audio", "0000:81:00.1")]);
    assert_eq!(lines[1..], ["audio on root-0000-80-03.0 0.0", "usb on root-0000-80-03.0 0.3"]);
    assert_eq!(notes[0], Note::Renumbered { device: Name::from("audio"), from: 1 });
    assert!(matches!(&notes[1], Note::Order { met } if met[0].0 == "audio"));
}

#[test]
fn virtual_functions_stand_where_their_physical_function_stands() {
    let host = host();
    let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
    let physical = "0000:03:00.0".parse().unwrap();
    for at in ["0000:03:10.0", "0000:03:10.2"] {
        let function = host.add(&format!("{switch}/0000:02:00.0/{at}"), &FakeFunction::default());
        host.make_virtual(function, physical);
    }
    let (lines, notes) = copy(&host, &[("vf0", "0000:03:10.0"), ("vf1", "0000:03:10.2")]);
    assert_eq!(
        lines,
        [
            "root-0000-00-01.0 on rc0",
            "up-0000-01-00.0 on root-0000-00-01.0",
            "down-0000-02-00.0 on up-0000-01-00.0",
            "vf0 on down-0000-02-00.0 0.0",
            "vf1-port on up-0000-01-00.0",
            "vf1 on vf1-port 0.0",
        ]
    );
    assert_eq!(notes, [Note::OwnPort { device: Name::from("vf1"), beside: "0000:02:00.0".parse().unwrap() }]);

    let (lines, _) = copy(&host, &[("vf0", "0000:03:10.0"), ("pf", "0000:03:00.0")]);
    assert!(lines.contains(&"pf on down-0000-02-00.0 0.0".to_owned()), "{lines:?}");
    assert!(lines.contains(&"vf0 on vf0-port 0.0".to_owned()), "{lines:?}");
}

#[test]
fn an_integrated_device_gets_a_root_port_and_a_note() {
    let host = host();
    host.add("pci0000:80/0000:80:01.0", &FakeFunction { express: Some(9), ..FakeFunction::default() });
    let (lines, notes) = copy(&host, &[("dsa0", "0000:80:01.0")]);
    assert_eq!(lines, ["dsa0-port on rc0", "dsa0 on dsa0-port 0.0"]);
    assert!(matches!(notes[0], Note::Integrated { .. }));
}

#[test]
fn conventional_devices_behind_one_bridge_get_ports_of_one_switch() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:1c.0", &FakeFunction::port(ROOT_PORT));
    host.add("pci0000:00/0000:00:1c.0/0000:01:00.0", &FakeFunction::port(7));
    for device in [4, 5] {
        let function = FakeFunction { express: None, ..FakeFunction::default() };
        host.add(&format!("pci0000:00/0000:00:1c.0/0000:01:00.0/0000:02:0{device}.0"), &function);
    }
    let (lines, notes) = copy(&host, &[("a", "0000:02:04.0"), ("b", "0000:02:05.0")]);
    assert_eq!(
        lines,
        [
            "root-0000-00-1c.0 on rc0",
            "a-switch on root-0000-00-1c.0",
            "a-port on a-switch",
            "a on a-port 0.0",
            "b-port on a-switch",
            "b on b-port 0.0"
        ]
    );
    assert!(notes.iter().any(|note| matches!(note, Note::BridgeLeftOut { bridge, .. } if bridge.to_string() == "0000:01:00.0")));
}

#[test]
fn the_order_of_the_list_is_kept_where_the_tree_allows_it() {
    let given = [("b", "0000:05:00.0"), ("a", "0000:03:00.0"), ("c", "0000:81:00.0")];
    let (_, notes) = copy(&host(), &given);
    assert_eq!(notes, []);
    let given = [("b", "0000:05:00.0"), ("c", "0000:81:00.0"), ("a", "0000:03:00.0")];
    let (_, notes) = copy(&host(), &given);
    assert_eq!(notes, [Note::Order { met: ["b", "a", "c"].map(Name::from).to_vec() }]);
}

#[test]
fn every_replica_can_be_planned() {
    let host = host();
    host.add("pci0000:80/0000:80:03.0/0000:81:00.1", &FakeFunction::default());
    host.add("pci0000:80/0000:80:01.0", &FakeFunction { express: Some(9), ..FakeFunction::default() });
    let devices = [("a", "0000:03:00.0"), ("b", "0000:81:00.1"), ("c", "0000:80:01.0"), ("d", "0000:05:00.0")];
    let window = |base, limit| vec![Window { base, limit }];
    let apertures =
        Apertures { mem32: window(0x8000_0000, 0xDFFF_FFFF), mem64: window(1 << 32, (1 << 46) - 1), address_bits: 46 };
    let plan = topology(&host, &devices).plan(&apertures).unwrap();
    for (name, _) in devices {
        assert_eq!(plan.by_name(name).unwrap().at.bdf.devfn().byte(), 0, "{name} is device 0 on its own bus");
    }
}

fn replica(host: &FakeHost, wishes: &Wishes, devices: &[(&str, &str, u32)]) -> Result<Replica, ReplicaError> {
    let devices: Vec<Requested> = devices
        .iter()
        .map(|(name, at, class)| {
            let ids = Ids { class: pci::ids::ClassCode::new(*class), ..Ids::default() };
            Requested {
                name: Name::from(*name),
                at: at.parse().unwrap(),
                endpoint: EndpointSpec { ids, ..EndpointSpec::default() },
            }
        })
        .collect();
    let at: Vec<HostBdf> = devices.iter().map(|device| device.at).collect();
    replicate(&scan(host.sysfs(), &at).unwrap(), &devices, wishes)
}

fn as_host() -> Wishes {
    Wishes::default()
}

const GPU: u32 = 0x03_0200;
const NIC: u32 = 0x02_0000;

/// The places of the devices, in the order of a walk.
fn walk(replica: &Replica) -> Vec<&str> {
    let nodes = replica.topology.nodes.iter().filter(|node| matches!(node.kind, NodeKind::Endpoint(_)));
    nodes.map(|node| node.name.0.as_str()).collect()
}

#[test]
fn gpus_are_met_in_the_order_given_whatever_stands_between_them() {
    // A NIC of the second GPU's switch comes first; its switch comes second all the same.
    let devices = [("nic", "0000:05:00.0", NIC), ("b", "0000:81:00.0", GPU), ("a", "0000:03:00.0", GPU)];
    let found = replica(&host(), &as_host(), &devices).unwrap();
    assert_eq!(walk(&found), ["b", "nic", "a"]);
    let roots: Vec<Option<u32>> = found.topology.root_complexes.iter().map(|root| root.node).collect();
    assert_eq!(roots, [Some(0), Some(0)]);
}

#[test]
fn an_order_that_the_tree_cannot_have_is_refused_with_one_that_it_can() {
    let devices = [("a", "0000:03:00.0", GPU), ("b", "0000:81:00.0", GPU), ("c", "0000:04:00.0", GPU)];
    let error = replica(&host(), &as_host(), &devices).unwrap_err().to_string();
    assert!(error.contains("GPU b was given before GPU c") && error.contains("order a, c, b"), "{error}");
    assert!(error.contains("gpu-order=topology"), "{error}");
    let wishes = Wishes { order: GpuOrder::Topology, ..as_host() };
    let found = replica(&host(), &wishes, &devices).unwrap();
    assert_eq!(walk(&found), ["a", "c", "b"]);
    assert!(found.notes.iter().any(|note| matches!(note, Note::Order { .. })));
    // Nothing but the order of GPUs counts.
    let nics = devices.map(|(name, at, _)| (name, at, NIC));
    assert!(replica(&host(), &as_host(), &nics).is_ok());
}

#[test]
fn case_h1_every_port_shows_the_host_s_link_or_at_least_that_of_the_device_below() {
    let host = FakeHost::new();
    let path = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0";
    host.add("pci0000:00/0000:00:01.0", &FakeFunction::port(ROOT_PORT));
    host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &FakeFunction::port(UPSTREAM));
    host.add(path, &FakeFunction::port(DOWNSTREAM));
    host.add(&format!("{path}/0000:03:00.0"), &FakeFunction::default());
    let mut tree = scan(host.sysfs(), &["0000:03:00.0".parse().unwrap()]).unwrap();
    let devices = [Requested { name: Name::from("gpu"), at: "0000:03:00.0".parse().unwrap(), endpoint: EndpointSpec::default() }];
    let links = |tree: &HostTree| {
        let replica = replicate(tree, &devices, &as_host()).unwrap();
        let ports = replica.topology.nodes.iter().filter_map(|node| match &node.kind {
            NodeKind::Port(port) => Some(format!("{} of {}", port.link.current, port.link.max)),
            NodeKind::Endpoint(_) => None,
        });
        ports.collect::<Vec<_>>()
    };
    assert_eq!(links(&tree), ["8GT/s x8 of 16GT/s x16"; 3]);
    for node in tree.functions.values_mut().filter(|node| matches!(node.kind, crate::host::tree::HostKind::Port(_))) {
        node.link = None;
    }
    assert_eq!(links(&tree), ["8GT/s x8 of 16GT/s x16"; 3], "from the device");
    for node in tree.functions.values_mut() {
        node.link = None;
    }
    assert_eq!(links(&tree), ["32GT/s x16 of 32GT/s x16"; 3], "by default");
}

#[test]
fn atomic_operations_are_completed_as_far_as_the_way_to_the_root_port_routes_them() {
    let host = host();
    let at = "0000:03:00.0".parse().unwrap();
    let mut tree = scan(host.sysfs(), &[at]).unwrap();
    let devices = [Requested { name: Name::from("gpu"), at, endpoint: EndpointSpec::default() }];
    let completers = |tree: &HostTree| {
        let replica = replicate(tree, &devices, &as_host()).unwrap();
        port(&replica.topology, "root-0000-00-01.0").atomic_completers
    };
    for node in tree.functions.values_mut() {
        node.fabric.atomics.routing = true;
    }
    assert_eq!(completers(&tree), 3);
    tree.functions.get_mut(&"0000:01:00.0".parse().unwrap()).unwrap().fabric.atomics.egress_blocked = true;
    assert_eq!(completers(&tree), 0);
}

#[test]
fn case_i1_root_complexes_belong_to_the_guest_nodes_that_stand_for_the_host_s() {
    let host = FakeHost::new();
    for (bus, node) in [("00", 0), ("40", 2), ("80", 3), ("c0", -1)] {
        let function = FakeFunction { numa_node: node, ..FakeFunction::port(ROOT_PORT) };
        let path = format!("pci0000:{bus}/0000:{bus}:01.0");
        host.add(&path, &function);
        let next = u8::from_str_radix(bus, 16).unwrap() + 1;
        host.add(&format!("{path}/0000:{next:02x}:00.0"), &FakeFunction { numa_node: node, ..FakeFunction::default() });
    }
    let devices = [("d", "0000:c1:00.0", GPU), ("c", "0000:81:00.0", GPU), ("b", "0000:41:00.0", GPU)];
    let nodes = |wishes: &Wishes| {
        let found = replica(&host, wishes, &devices).unwrap();
        assert_eq!(found.notes, []);
        found.topology.root_complexes.iter().map(|root| root.node).collect::<Vec<_>>()
    };
    // Nodes 2 and 3 are in use and become 0 and 1; a node that the host does not know stays unknown.
    assert_eq!(nodes(&as_host()), [None, Some(1), Some(0)]);
    assert_eq!(nodes(&Wishes { leave_nodes: true, ..as_host() }), [None; 3]);
}

#[test]
fn virtual_functions_below_one_root_port_stay_as_near_to_each_other_as_there() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:01.0", &FakeFunction::port(ROOT_PORT));
    let physical = host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &FakeFunction::default());
    for function in [1, 2] {
        let at = host.add(&format!("pci0000:00/0000:00:01.0/0000:01:00.{function}"), &FakeFunction::default());
        host.make_virtual(at, physical);
    }
    let both = [("vf0", "0000:01:00.1", NIC), ("vf1", "0000:01:00.2", NIC)];
    let found = replica(&host, &as_host(), &both).unwrap();
    let names: Vec<String> = found.topology.nodes.iter().map(|node| format!("{} on {}", node.name, node.on)).collect();
    assert_eq!(
        names,
        [
            "root-0000-00-01.0 on rc0",
            "vf0-switch on root-0000-00-01.0",
            "vf0-port on vf0-switch",
            "vf0 on vf0-port",
            "vf1-port on vf0-switch",
            "vf1 on vf1-port"
        ]
    );
    assert_eq!(found.notes, [Note::OwnSwitch { switch: Name::from("vf0-switch") }]);
    let alone = replica(&host, &as_host(), &both[1..]).unwrap();
    assert_eq!(alone.topology.nodes.len(), 2);
    assert_eq!(alone.stands_for.get(&Name::from("vf1")), Some(&"0000:01:00.2".parse().unwrap()));
}

#[test]
fn ports_in_impossible_places_are_left_out_with_a_note() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:01.0", &FakeFunction::port(ROOT_PORT));
    host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &FakeFunction::port(DOWNSTREAM));
    host.add("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0", &FakeFunction::default());
    host.add("pci0000:80/0000:80:01.0", &FakeFunction::port(UPSTREAM));
    host.add("pci0000:80/0000:80:01.0/0000:81:00.0", &FakeFunction::port(DOWNSTREAM));
    host.add("pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0", &FakeFunction::default());
    let (lines, notes) = copy(&host, &[("a", "0000:02:00.0"), ("b", "0000:82:00.0")]);
    assert_eq!(lines[..2], ["root-0000-00-01.0 on rc0", "a on root-0000-00-01.0 0.0"]);
    assert_eq!(lines[2..4], ["b-root on rc1", "up-0000-80-01.0 on b-root"]);
    assert!(notes.contains(&Note::PortLeftOut { device: Name::from("a"), port: "0000:01:00.0".parse().unwrap() }), "{notes:?}");
}
