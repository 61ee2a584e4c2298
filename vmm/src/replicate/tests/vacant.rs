//! Ports of the copy to which devices come while the guest runs.

use std::collections::BTreeMap;
use std::path::Path;

use api::config::VmConfig;
use pci::bar::{BarKind, BarSpec};
use pci::topology::{Plan, PlannedKind, Reserve};

use super::*;
use crate::host::recorded::RecordedHost;
use crate::plan::{Limits, plan};

/// The host of the other tests, with an empty slot in the switch and a device on a root port of its own.
fn host() -> FakeHost {
    let host = super::host();
    let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
    host.add(&format!("{switch}/0000:02:04.0"), &FakeFunction::port(DOWNSTREAM));
    host.add("pci0000:00/0000:00:03.0", &FakeFunction::port(ROOT_PORT));
    host
}

fn wishes(host_ports: HostPorts) -> Wishes {
    Wishes { order: GpuOrder::Topology, host_ports, ..Wishes::default() }
}

fn copy_of(tree: &HostTree, host_ports: HostPorts, devices: &[&str]) -> Replica {
    let requested = |at: &&str| {
        let node = tree.get(at.parse().unwrap()).unwrap();
        let endpoint = EndpointSpec { ids: node.ids, bars: node.bars, rom: node.rom, ..EndpointSpec::default() };
        Requested { name: Name(format!("d{}", at.replace(':', "-"))), at: node.at, endpoint }
    };
    let devices: Vec<Requested> = devices.iter().map(requested).collect();
    replicate(tree, &devices, &wishes(host_ports)).unwrap()
}

/// Ports as `name on parent`, with `hot` for those to which devices come.
fn ports(replica: &Replica) -> Vec<String> {
    let line = |node: &NodeSpec| match &node.kind {
        NodeKind::Port(port) => Some(format!("{} on {}{}", node.name, node.on, if port.hotplug.is_some() { " hot" } else { "" })),
        NodeKind::Endpoint(_) => None,
    };
    replica.topology.nodes.iter().filter_map(line).collect()
}

fn all(host: &FakeHost) -> HostTree {
    crate::host::scan::scan_all(host.sysfs()).unwrap()
}

#[test]
fn a_switch_that_is_copied_has_all_of_its_ports() {
    let replica = copy_of(&all(&host()), HostPorts::Switches, &["0000:04:00.0"]);
    assert_eq!(
        ports(&replica),
        [
            "root-0000-00-01.0 on rc0",
            "up-0000-01-00.0 on root-0000-00-01.0",
            "down-0000-02-01.0 on up-0000-01-00.0 hot",
            "down-0000-02-00.0 on up-0000-01-00.0 hot",
            "down-0000-02-02.0 on up-0000-01-00.0 hot",
            "down-0000-02-04.0 on up-0000-01-00.0 hot",
        ]
    );
    let homes: Vec<&str> = replica.homes.iter().map(|name| name.0.as_str()).collect();
    assert_eq!(homes, ["down-0000-02-00.0", "down-0000-02-01.0", "down-0000-02-02.0"], "the fourth has no device");
    assert_eq!(replica.stands_for.get(&Name::from("down-0000-02-04.0")), Some(&"0000:02:04.0".parse().unwrap()));
    assert_eq!(replica.notes, []);
}

#[test]
fn without_the_option_nothing_leads_nowhere() {
    let tree = all(&host());
    let used = copy_of(&tree, HostPorts::Used, &["0000:04:00.0"]);
    assert_eq!(ports(&used).len(), 3);
    assert!(ports(&used).iter().all(|port| !port.ends_with("hot")) && used.homes.is_empty());
    assert_eq!(copy_of(&tree, HostPorts::Switches, &["0000:81:00.0"]).topology.nodes.len(), 2, "no switch is copied");
}

#[test]
fn all_ports_have_a_copy_without_any_device_of_the_guest() {
    let replica = copy_of(&all(&host()), HostPorts::All, &[]);
    assert_eq!(
        ports(&replica),
        [
            "root-0000-00-03.0 on rc0 hot",
            "root-0000-00-01.0 on rc0",
            "up-0000-01-00.0 on root-0000-00-01.0",
            "down-0000-02-00.0 on up-0000-01-00.0 hot",
            "down-0000-02-01.0 on up-0000-01-00.0 hot",
            "down-0000-02-02.0 on up-0000-01-00.0 hot",
            "down-0000-02-04.0 on up-0000-01-00.0 hot",
            "root-0000-80-03.0 on rc1 hot",
        ]
    );
    let roots: Vec<(&str, &str)> = replica.host_roots.iter().map(|(name, host)| (name.0.as_str(), host.name.as_str())).collect();
    assert_eq!(roots, [("rc0", "pci0000:00"), ("rc1", "pci0000:80")]);
    let root = port(&replica.topology, "root-0000-80-03.0");
    assert_eq!((root.atomic_completers, root.ids), (3, None), "for the device that may come");
}

/// Everything fits where the host has it, and what comes there fits into what the port keeps.
fn assert_room(tree: &HostTree, replica: &Replica) -> Plan {
    let window = |base, limit| vec![Window { base, limit }];
    let space = Apertures { mem32: window(0x8000_0000, 0xDFFF_FFFF), mem64: window(1 << 37, (1 << 46) - 1), address_bits: 46 };
    let plan = replica.topology.plan(&space).unwrap_or_else(|error| panic!("{error}"));
    for (name, at) in &replica.stands_for {
        let PlannedKind::Port(port) = &plan.by_name(&name.0).unwrap().kind else { continue };
        if port.spec.slot().is_none() {
            continue;
        }
        let functions: Vec<EndpointSpec> = super::super::vacant::devices(tree, *at)
            .map(|node| EndpointSpec { bars: node.bars, rom: node.rom, ..EndpointSpec::default() })
            .collect();
        let needed = Reserve::for_device(&functions);
        let len = |window: Option<Window>| window.map_or(0, Window::len);
        assert!(Some(len(port.windows.memory)) >= needed.memory, "{name}");
        assert!(Some(len(port.windows.prefetchable)) >= needed.prefetchable, "{name}");
    }
    plan
}

#[test]
fn every_recorded_host_can_be_copied_with_all_of_its_ports() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/topologies");
    let mut hosts = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        hosts += 1;
        let tree = RecordedHost::read(&path).unwrap().tree;
        let everywhere = copy_of(&tree, HostPorts::All, &[]);
        assert_room(&tree, &everywhere);
        let gpu = tree.functions.values().find(|node| node.ids.class.base() == 3 && !tree.above(node).is_empty());
        let Some(gpu) = gpu.map(|node| node.at.to_string()) else { continue };
        for which in [HostPorts::Switches, HostPorts::All] {
            let replica = copy_of(&tree, which, &[&gpu]);
            assert_room(&tree, &replica);
            assert_eq!(replica.topology.check(), Ok(()), "{}", path.display());
        }
    }
    assert!(hosts >= 9);
}

#[test]
fn a_port_keeps_room_for_the_device_that_the_host_has_there_and_no_less_than_is_asked_for() {
    let tree =
        RecordedHost::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/topologies/a100x-dpu.json")).unwrap().tree;
    let replica = copy_of(&tree, HostPorts::Switches, &["0000:3d:00.0"]);
    let kept = |replica: &Replica, name: &str| port(&replica.topology, name).hotplug.unwrap().reserve;
    let of_gpu = kept(&replica, "down-0000-40-08.0");
    let gpu = tree.get("0000:41:00.0".parse().unwrap()).unwrap();
    let largest = gpu.bars.iter().flatten().map(|bar| bar.size).max().unwrap();
    assert!(of_gpu.prefetchable >= Some(largest) && of_gpu.prefetchable < Some(2 * largest), "{of_gpu:?}");
    let mut more = wishes(HostPorts::Switches);
    more.hot_plug.reserve.prefetchable = Some(1 << 40);
    let asked = replicate(&tree, &[], &Wishes { host_ports: HostPorts::All, ..more }).unwrap();
    assert_eq!(kept(&asked, "down-0000-40-08.0").prefetchable, Some(1 << 40));
}

/// What is planned, or what is said instead, with these options of `--pcie` for a host of H200s whose GPUs have a BAR of `low` below
/// 4 GiB and one of 64 GiB.
fn planned(options: &BTreeMap<String, String>, low: u64, address_bits: u8) -> Result<(), String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/topologies/hgx-h200.json");
    let mut tree = RecordedHost::read(&path).unwrap().tree;
    for node in tree.functions.values_mut().filter(|node| node.ids.class.base() == 3) {
        node.bars[0] = Some(BarSpec { kind: BarKind::Memory32, prefetchable: false, size: low });
        node.bars[2] = Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size: 64 << 30 });
    }
    let options: Vec<String> = options.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let config = VmConfig {
        devices: vec!["0000:18:00.0".parse().unwrap()],
        pcie: options.join(",").parse().unwrap(),
        ..VmConfig::default()
    };
    let spec = crate::spec::spec(&config, &crate::host::look_in(&tree, &config).unwrap()).unwrap();
    let limits = Limits { ram: 1 << 30, growth: 0, address_bits, amd: false, firmware: 0 };
    plan(&spec.topology, &limits).map(drop).map_err(|error| error.to_string())
}

#[test]
fn case_b1_options_that_are_told_where_ports_of_the_host_keep_too_much_are_enough() {
    let options = |text: &str| -> BTreeMap<String, String> {
        text.split(',').map(|pair| pair.split_once('=').unwrap()).map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    };
    let mut followed: BTreeMap<String, usize> = BTreeMap::new();
    for which in ["all", "switches", "used"] {
        for more in [
            "",
            ",hotplug-mem=0,hotplug-mem32=0",
            ",hotplug-mem=256G",
            ",hotplug-mem32=512M",
            ",root-ports=3,hotplug-mem=256G",
            ",hotplug-buses=99",
        ] {
            for (low, bits) in [(16 << 20, 46), (16 << 20, 38), (256 << 20, 38), (256 << 20, 40), (512 << 20, 46)] {
                let asked = options(&format!("topology=host,host-ports={which}{more}"));
                let Err(told) = planned(&asked, low, bits) else { continue };
                for way in told.split("--pcie ").skip(1) {
                    let way = way.split([' ', ';']).next().unwrap().trim_end_matches(',');
                    let mut less = asked.clone();
                    less.extend(options(way));
                    assert_eq!(planned(&less, low, bits), Ok(()), "{asked:?}: {told}");
                    options(way).into_keys().for_each(|key| *followed.entry(key).or_default() += 1);
                }
                if let Some((_, ports)) = told.split_once(" of the 3 free hot-plug ports") {
                    let stay = told.strip_suffix(ports).unwrap().rsplit(' ').nth(6).unwrap();
                    let fewer = BTreeMap::from([("root-ports".to_owned(), stay.to_owned())]);
                    assert_eq!(
                        planned(&asked.clone().into_iter().chain(fewer).collect(), low, bits),
                        Ok(()),
                        "{asked:?}: {told}"
                    );
                    *followed.entry("root-ports".to_owned()).or_default() += 1;
                }
            }
        }
    }
    for key in ["hotplug-mem", "hotplug-mem32", "hotplug-buses", "host-ports", "root-ports"] {
        assert!(followed.contains_key(key), "{key}: {followed:?}");
    }
}
