use pci::ids::Ids;
use pci::topology::{Apertures, Window};

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
fn copy(host: &FakeHost, policy: Policy, devices: &[(&str, &str)]) -> (Vec<String>, Vec<Note>) {
    let devices: Vec<Requested> = devices
        .iter()
        .map(|(name, at)| Requested {
            name: Name::from(*name),
            at: at.parse().unwrap(),
            endpoint: EndpointSpec { ids: Ids::default(), bars: [None; 6], interrupt_pin: 1 },
        })
        .collect();
    let at: Vec<HostBdf> = devices.iter().map(|device| device.at).collect();
    let replica = replicate(&scan(host.sysfs(), &at).unwrap(), &devices, policy);
    let line = |node: &NodeSpec| match &node.kind {
        NodeKind::Port(_) => format!("{} on {}", node.name, node.on),
        NodeKind::Endpoint(_) => format!("{} on {} {}.{}", node.name, node.on, node.place.device.unwrap(), node.place.function),
    };
    (replica.topology.nodes.iter().map(line).collect(), replica.notes)
}

fn topology(host: &FakeHost, devices: &[(&str, &str)]) -> Topology {
    let devices: Vec<Requested> = devices
        .iter()
        .map(|(name, at)| Requested {
            name: Name::from(*name),
            at: at.parse().unwrap(),
            endpoint: EndpointSpec { ids: Ids::default(), bars: [None; 6], interrupt_pin: 0 },
        })
        .collect();
    let at: Vec<HostBdf> = devices.iter().map(|device| device.at).collect();
    replicate(&scan(host.sysfs(), &at).unwrap(), &devices, Policy::Host).topology
}

fn port<'a>(topology: &'a Topology, name: &str) -> &'a PortSpec {
    let node = topology.nodes.iter().find(|node| node.name.0 == name).unwrap();
    match &node.kind {
        NodeKind::Port(port) => port,
        NodeKind::Endpoint(_) => panic!("{name} is an endpoint"),
    }
}

#[test]
fn case_h5_by_default_each_device_has_a_root_port_of_its_own() {
    let (lines, notes) = copy(&host(), Policy::RootPorts, &[("gpu0", "0000:03:00.0"), ("gpu1", "0000:81:00.0")]);
    assert_eq!(lines, ["gpu0-port on rc0", "gpu0 on gpu0-port 0.0", "gpu1-port on rc0", "gpu1 on gpu1-port 0.0"]);
    assert_eq!(notes, []);
}

#[test]
fn the_copy_has_the_host_s_levels_and_nothing_that_leads_nowhere() {
    let (lines, notes) = copy(&host(), Policy::Host, &[("gpu0", "0000:03:00.0"), ("nic0", "0000:05:00.0")]);
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
    let (lines, _) = copy(&host, Policy::Host, &[("gpu0", "0000:05:00.0")]);
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
    for policy in [Policy::RootPorts, Policy::Host] {
        let (lines, notes) = copy(&host, policy, &[("gpu0", "0000:81:00.0"), ("usb", "0000:81:00.2")]);
        assert!(lines[1].starts_with("gpu0 on ") && lines[1].ends_with(" 0.0"), "{lines:?}");
        assert!(lines[2].starts_with("usb on ") && lines[2].ends_with(" 0.2"), "{lines:?}");
        assert_eq!(notes, []);
    }
}

#[test]
fn without_function_0_the_lowest_function_takes_its_number() {
    let host = host();
    host.add("pci0000:80/0000:80:03.0/0000:81:00.1", &FakeFunction::default());
    host.add("pci0000:80/0000:80:03.0/0000:81:00.3", &FakeFunction::default());
    let (lines, notes) = copy(&host, Policy::RootPorts, &[("usb", "0000:81:00.3"), ("audio", "0000:81:00.1")]);
    assert_eq!(lines[1..], ["usb on usb-port 0.3", "audio on usb-port 0.0"]);
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
    let (lines, notes) = copy(&host, Policy::Host, &[("vf0", "0000:03:10.0"), ("vf1", "0000:03:10.2")]);
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

    let (lines, _) = copy(&host, Policy::Host, &[("vf0", "0000:03:10.0"), ("pf", "0000:03:00.0")]);
    assert!(lines.contains(&"pf on down-0000-02-00.0 0.0".to_owned()), "{lines:?}");
    assert!(lines.contains(&"vf0 on vf0-port 0.0".to_owned()), "{lines:?}");
}

#[test]
fn an_integrated_device_gets_a_root_port_and_a_note() {
    let host = host();
    host.add("pci0000:80/0000:80:01.0", &FakeFunction { express: Some(9), ..FakeFunction::default() });
    let (lines, notes) = copy(&host, Policy::Host, &[("dsa0", "0000:80:01.0")]);
    assert_eq!(lines, ["dsa0-port on rc0", "dsa0 on dsa0-port 0.0"]);
    assert!(matches!(notes[0], Note::Integrated { .. }));
}

#[test]
fn conventional_devices_behind_one_bridge_get_ports_of_their_own() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:1c.0", &FakeFunction::port(ROOT_PORT));
    host.add("pci0000:00/0000:00:1c.0/0000:01:00.0", &FakeFunction::port(7));
    for device in [4, 5] {
        let function = FakeFunction { express: None, ..FakeFunction::default() };
        host.add(&format!("pci0000:00/0000:00:1c.0/0000:01:00.0/0000:02:0{device}.0"), &function);
    }
    let (lines, notes) = copy(&host, Policy::Host, &[("a", "0000:02:04.0"), ("b", "0000:02:05.0")]);
    assert_eq!(lines, ["root-0000-00-1c.0 on rc0", "a on root-0000-00-1c.0 0.0", "b-port on rc0", "b on b-port 0.0"]);
    assert!(notes.iter().any(|note| matches!(note, Note::BridgeLeftOut { bridge, .. } if bridge.to_string() == "0000:01:00.0")));
}

#[test]
fn the_order_of_the_list_is_kept_where_the_tree_allows_it() {
    let given = [("b", "0000:05:00.0"), ("a", "0000:03:00.0"), ("c", "0000:81:00.0")];
    let (_, notes) = copy(&host(), Policy::Host, &given);
    assert_eq!(notes, []);
    let given = [("b", "0000:05:00.0"), ("c", "0000:81:00.0"), ("a", "0000:03:00.0")];
    let (_, notes) = copy(&host(), Policy::Host, &given);
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
