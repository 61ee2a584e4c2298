//! Trees as they are printed, of configurations as they are given.

use api::config::{PcieConfig, VmConfig};
use pci::topology::{Parent, PlannedKind, PortKind, Tree};

use crate::host::fake::{FakeFunction, FakeHost, ROOT_PORT};
use crate::host::scan::scan;
use crate::plan::{self, Limits, MachinePlan};
use crate::spec::{self, Host, Spec, SpecError};

const NIC: &str = "stub,ids=15b3:a2d6,class=020000,bar0=32M:mem64:prefetchable";
const GPU: &str = "stub,ids=10de:20b8,class=030200,bar0=16M:mem32,bar1=1G:mem64:prefetchable";

const LIMITS: Limits = Limits { ram: 1 << 30, growth: 0, address_bits: 46, amd: false, firmware: 0 };

fn config(pcie: &str, devices: &[String]) -> VmConfig {
    let devices = devices.iter().map(|device| device.parse().unwrap()).collect();
    let pcie = if pcie.is_empty() { PcieConfig::default() } else { pcie.parse().unwrap() };
    VmConfig { pcie, devices, ..VmConfig::default() }
}

fn planned(config: &VmConfig, host: &Host) -> (Spec, MachinePlan) {
    let spec = spec::spec(config, host).unwrap();
    let plan = plan::plan(&spec.topology, &LIMITS).unwrap();
    (spec, plan)
}

fn tree(pcie: &str, devices: &[String]) -> String {
    let (_, plan) = planned(&config(pcie, devices), &Host::default());
    Tree { plan: &plan.pci, label: &|_| String::new(), verbose: false }.to_string()
}

fn refusal(pcie: &str, devices: &[String]) -> SpecError {
    spec::spec(&config(pcie, devices), &Host::default()).unwrap_err()
}

fn two_nics_and_two_gpus() -> Vec<String> {
    vec![format!("{NIC},id=nic0"), format!("{NIC},id=nic1"), format!("{GPU},id=gpu0"), format!("{GPU},id=gpu1")]
}

#[test]
fn flat_root_ports_with_spare_ones() {
    let expected = "\
-[0000:00]-+-00.0-[01]----00.0  nic0 15b3:a2d6
           +-01.0-[02]----00.0  nic1 15b3:a2d6
           +-02.0-[03]----00.0  gpu0 10de:20b8
           +-03.0-[04]----00.0  gpu1 10de:20b8
           +-04.0-[05]--
           +-04.1-[06]--
           +-04.2-[07]--
           \\-04.3-[08]--
";
    assert_eq!(tree("root-ports=4", &two_nics_and_two_gpus()), expected);
}

#[test]
fn two_switches_with_a_gpu_and_a_nic_under_each() {
    let devices = ["nic0", "gpu0", "nic1", "gpu1"].map(|id| format!("{},id={id}", if id.starts_with("nic") { NIC } else { GPU }));
    let expected = "\
-[0000:00]-+-00.0-[01-04]----00.0-[02-04]--+-00.0-[03]----00.0  nic0 15b3:a2d6
           |                               \\-01.0-[04]----00.0  gpu0 10de:20b8
           \\-00.1-[05-08]----00.0-[06-08]--+-00.0-[07]----00.0  nic1 15b3:a2d6
                                           \\-01.0-[08]----00.0  gpu1 10de:20b8
";
    for pcie in ["cold-plug=switch-port,switches=2,switch-ports=2", "topology=switch,switches=2", "switch,switch-ports=2"] {
        assert_eq!(tree(pcie, &devices), expected, "{pcie}");
    }
}

#[test]
fn switches_keep_the_ports_that_are_left_and_those_that_a_device_names() {
    let named = format!("{NIC},id=nic0,on=switch0-port0");
    let expected = "\
-[0000:00]---00.0-[01-05]----00.0-[02-05]--+-00.0-[03]----00.0  nic0 15b3:a2d6
                                           +-01.0-[04]----00.0  gpu0 10de:20b8
                                           \\-02.0-[05]--
";
    assert_eq!(tree("cold-plug=switch-port,switch-ports=3", &[format!("{GPU},id=gpu0"), named]), expected);
}

#[test]
fn gpus_on_root_ports_with_two_nics_on_the_conventional_bus() {
    let devices = [
        format!("{NIC},id=nic0,attach=pci"),
        format!("{NIC},id=nic1,attach=pci"),
        format!("{GPU},id=gpu0"),
        format!("{GPU},id=gpu1"),
    ];
    let expected = "\
-[0000:00]-+-00.0-[01]----00.0  gpu0 10de:20b8
           +-01.0-[02]----00.0  gpu1 10de:20b8
           \\-02.0-[03-04]----00.0-[04]--+-00.0  nic0 15b3:a2d6
                                        \\-01.0  nic1 15b3:a2d6
";
    assert_eq!(tree("", &devices), expected);
    let cold =
        devices.map(|device| if device.contains("nic") { device.replace(",attach=pci", "") } else { device + ",attach=pcie" });
    assert_eq!(tree("cold-plug=bridge-port", &cold), expected);
}

/// `cards` cards on a host, each with a GPU, its audio and two USB functions.
fn cards(cards: u8) -> FakeHost {
    let host = FakeHost::new();
    for card in 0..cards {
        let port = format!("pci0000:00/0000:00:{card:02x}.0");
        host.add(&port, &FakeFunction::port(ROOT_PORT));
        for (function, class) in [(0, 0x03_0000), (1, 0x04_0300), (2, 0x0C_0330), (3, 0x0C_8000)] {
            let function = format!("{port}/0000:{:02x}:00.{function}", card + 1);
            host.add(&function, &FakeFunction { class, ..FakeFunction::default() });
        }
    }
    host
}

fn on_host(host: &FakeHost, pcie: &str, devices: &[String]) -> (Spec, MachinePlan) {
    let config = config(pcie, devices);
    let wanted: Vec<_> = devices.iter().map(|device| device.split(',').next().unwrap().parse().unwrap()).collect();
    let tree = scan(host.sysfs(), &wanted).unwrap();
    planned(&config, &crate::host::look_in(&tree, &config).unwrap())
}

fn functions_on<'a>(plan: &'a MachinePlan, bus: &str) -> Vec<&'a str> {
    let at = |function: &&pci::topology::PlannedFunction| function.at.bdf.to_string().starts_with(bus);
    plan.pci.functions.iter().filter(at).map(|function| function.name.0.as_str()).collect()
}

#[test]
fn eight_cards_of_four_functions_fit_with_the_gpus_alone_on_ports() {
    let host = cards(8);
    let mut devices = Vec::new();
    for card in 1..=8 {
        devices.push(format!("0000:{card:02x}:00.0,id=gpu{card}"));
        devices.extend((1..4).map(|function| format!("0000:{card:02x}:00.{function},id=f{card}-{function},attach=pci")));
    }
    for policy in ["root-ports", "host"] {
        let (spec, plan) = on_host(&host, policy, &devices);
        let endpoints = plan.pci.functions.iter().filter(|function| matches!(function.kind, PlannedKind::Endpoint(_)));
        let (gpus, rest): (Vec<_>, Vec<_>) = endpoints.partition(|function| function.name.0.starts_with("gpu"));
        assert_eq!((gpus.len(), rest.len()), (8, 24));
        assert!(gpus.iter().all(|gpu| gpu.at.bdf.devfn().byte() == 0 && !gpu.multifunction));
        // One bus for all of them; the functions of each card share a device number.
        assert!(rest.iter().all(|function| function.at.bdf.bus() == rest[0].at.bdf.bus()), "{policy}");
        for function in &rest {
            let card: u8 = function.name.0[1..2].parse().unwrap();
            assert_eq!(function.at.bdf.devfn().device(), card - 1, "{}", function.name);
            assert_eq!(function.multifunction, function.name.0.ends_with("-1"), "{}", function.name);
        }
        assert_eq!(
            spec.notes.iter().filter(|note| note.contains("is function 0 in the guest and function 1 on the host")).count(),
            8
        );
    }
}

#[test]
fn functions_of_one_host_device_stay_one_device_in_every_kind_of_place() {
    let host = cards(1);
    // Given out of order.
    let devices = [2, 0, 3, 1].map(|function| format!("0000:01:00.{function},id=f{function}"));
    for (pcie, place) in [
        ("root-ports", "01:00."),
        ("switch", "03:00."),
        ("cold-plug=bridge-port", "02:00."),
        ("flat", "00:00."),
        ("host", "01:00."),
    ] {
        let (_, plan) = on_host(&host, pcie, &devices);
        assert_eq!(functions_on(&plan, place), ["f0", "f1", "f2", "f3"], "{pcie}");
        let several: Vec<&str> = plan
            .pci
            .functions
            .iter()
            .filter(|function| function.multifunction)
            .map(|function| function.name.0.as_str())
            .collect();
        assert_eq!(several, ["f0"], "{pcie}");
    }
}

#[test]
fn a_device_with_a_function_number_belongs_to_the_device_before_it() {
    let devices = ["stub,id=gpu", "stub,id=audio,function=1", "stub,id=usb,function=3", "stub,id=nic"].map(str::to_owned);
    let expected = "\
-[0000:00]-+-00.0-[01]--+-00.0  gpu 1b36:0000
           |            +-00.1  audio 1b36:0000
           |            \\-00.3  usb 1b36:0000
           \\-01.0-[02]----00.0  nic 1b36:0000
";
    let ids = pci::ids::own::VENDOR;
    let expected = expected.replace("1b36:0000", &format!("{ids:04x}:{:04x}", pci::ids::own::STUB));
    assert_eq!(tree("", &devices), expected);
    assert!(matches!(refusal("", &["stub,id=a,function=1".to_owned()]), SpecError::ColdPlug(_)));
    let split = ["stub,id=a".to_owned(), "stub,id=b,function=1,attach=pci".to_owned()];
    assert!(refusal("", &split).to_string().starts_with("device b is function 1 of the device before it"));
}

#[test]
fn a_full_conventional_bus_is_followed_by_another() {
    let devices: Vec<String> = (0..33).map(|index| format!("stub,id=d{index},attach=pci")).collect();
    let (_, plan) = planned(&config("", &devices), &Host::default());
    assert_eq!((functions_on(&plan, "02:").len(), functions_on(&plan, "04:")), (32, vec!["d32"]));
}

#[test]
fn the_ports_above_a_fast_device_are_as_fast() {
    let device = "stub,id=gpu,link=64GT/s x16".to_owned();
    for pcie in ["", "switch"] {
        let (_, plan) = planned(&config(pcie, std::slice::from_ref(&device)), &Host::default());
        for function in &plan.pci.functions {
            if let PlannedKind::Port(port) = &function.kind {
                assert_eq!(port.spec.link.max.to_string(), "64GT/s x16", "{pcie} {}", function.name);
            }
        }
    }
}

#[test]
fn places_that_contradict_each_other_are_refused_with_what_to_use_instead() {
    let device = || vec!["stub,id=a".to_owned()];
    for (pcie, devices, part) in [
        ("hot-plug=bridge-port,bridges=0", device(), "hot-plug=bridge-port needs a bridge"),
        ("bridges=16", device(), "bridges=16 is more than the 15"),
        ("bridges=1,bridge-slots=0", device(), "1 to 32 device numbers"),
        ("bus0-free=32", device(), "of which 0 to 31 can stay free"),
        ("bridge-slots=4", device(), "bridge-slots needs bridges"),
        ("flat,cold-plug=root-port", device(), "topology=flat and cold-plug=root-port say different things"),
        ("switch", vec!["stub,id=a,device=3".to_owned()], "device a asks for device number 3"),
    ] {
        let error = refusal(pcie, &devices).to_string();
        assert!(error.contains(part), "{error}");
    }
    tree("flat,cold-plug=no-port", &device());
}

#[test]
fn devices_on_a_conventional_bus_share_the_bridges_for_those_that_come() {
    let devices: Vec<String> = (0..5).map(|n| format!("stub,id=d{n}")).collect();
    let expected = "\
-[0000:00]-+-00.0-[01-02]----00.0-[02]--+-00.0  d0 1b36:10bd
           |                            \\-01.0  d1 1b36:10bd
           +-00.1-[03-04]----00.0-[04]--+-00.0  d2 1b36:10bd
           |                            \\-01.0  d3 1b36:10bd
           \\-01.0-[05-06]----00.0-[06]----00.0  d4 1b36:10bd
";
    assert_eq!(tree("cold-plug=bridge-port,hot-plug=bridge-port,bridges=2,bridge-slots=2", &devices), expected);
    let (_, plan) = planned(&config("cold-plug=bridge-port,bridges=2,bridge-slots=2", &devices), &Host::default());
    let with_root = PcieConfig { root_hot_plug: true, ..PcieConfig::default() };
    let buses = plan.slot_buses(&with_root);
    let ways: Vec<_> = buses.iter().map(|bus| (bus.bus.index, bus.bus.way.len(), bus.bus.slots.len())).collect();
    assert_eq!(ways, [(0, 0, 30), (1, 2, 2), (2, 2, 2)], "the root bus first; the third bridge is for devices that stay");
    assert_eq!(plan.slot_buses(&PcieConfig::default())[0].bus.index, 0);
    let all = plan.slot_buses(&PcieConfig { cold_removal: true, ..with_root });
    let third: Vec<_> =
        all.iter().filter(|bus| !bus.hot).map(|bus| (bus.bus.index, bus.bus.way.len(), bus.bus.slots.len())).collect();
    assert_eq!((all.len(), third), (4, vec![(3, 2, 1)]), "its devices leave, and none comes there");
}

/// A machine with a device of every virtio kind that takes no server, and one given device.
fn with_own(pcie: &str) -> VmConfig {
    VmConfig {
        disks: vec!["/root.img".parse().unwrap(), "/data.img,id=data".parse().unwrap()],
        nets: vec!["tap0".parse().unwrap()],
        vsock: Some("cid=3,socket=/v".parse().unwrap()),
        rng: Some("/dev/urandom".parse().unwrap()),
        console: "file=/console.txt".parse().unwrap(),
        balloon: Some("0".parse().unwrap()),
        watchdog: true,
        ..config(pcie, &[format!("{GPU},id=gpu0")])
    }
}

/// Functions that are no ports, with bus, device and function, in the order of their addresses.
fn endpoints(config: &VmConfig) -> String {
    let (_, plan) = planned(config, &Host::default());
    let of = plan.pci.functions.iter().filter(|function| matches!(function.kind, PlannedKind::Endpoint(_)));
    let mut all: Vec<_> = of.map(|function| (function.at, function.name.clone())).collect();
    all.sort();
    all.iter().map(|(at, name)| format!("{} {name}", at.bdf)).collect::<Vec<_>>().join("\n")
}

#[test]
fn virtio_devices_are_on_the_root_bus_or_behind_a_port_each_in_the_same_order() {
    let on_bus0 = "\
00:00.0 disk0
00:01.0 data
00:02.0 net0
00:03.0 vsock0
00:04.0 rng0
00:05.0 console0
00:06.0 balloon0
00:07.0 watchdog0
01:00.0 gpu0";
    assert_eq!(endpoints(&with_own("")), on_bus0);
    assert_eq!(endpoints(&with_own("virtio=bus0")), on_bus0);
    let on_ports = "\
00:07.0 watchdog0
01:00.0 disk0
02:00.0 data
03:00.0 net0
04:00.0 vsock0
05:00.0 rng0
06:00.0 console0
07:00.0 balloon0
08:00.0 gpu0";
    assert_eq!(endpoints(&with_own("virtio=ports")), on_ports);
    let behind = |pcie: &str| {
        let all = endpoints(&with_own(pcie));
        all.lines().filter(|line| !line.starts_with("00:")).map(|line| format!("\n{line}")).collect::<String>()
    };
    assert_eq!(format!("00:07.0 watchdog0{}", behind("virtio=ports,bus0-free=29")), on_ports, "few numbers: ports share them");
    assert_eq!(format!("00:07.0 watchdog0{}\n08:00.0 gpu0", behind("flat,virtio=ports")), on_ports, "ports for virtio alone");
}

#[test]
fn more_virtio_devices_than_bus_numbers_are_refused_as_given_devices_are() {
    let refusal = |config: &VmConfig| plan::plan(&spec::spec(config, &Host::default()).unwrap().topology, &LIMITS).unwrap_err();
    let disks = (0..256).map(|index| format!("/{index}.img").parse().unwrap()).collect();
    let own = refusal(&VmConfig { disks, ..config("virtio=ports", &[]) }).to_string();
    let given: Vec<String> = (0..256).map(|index| format!("{NIC},id=d{index}")).collect();
    assert_eq!(own.replace("disk", "d"), refusal(&config("", &given)).to_string());
    assert!(own.contains("bus numbers"), "{own}");
}

mod any_list {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    /// A stub with random wishes: a function of the one before, an attachment, virtual functions, a ROM.
    fn any_device() -> impl Strategy<Value = (u8, Option<&'static str>, bool, bool)> {
        let attach = prop_oneof![3 => Just(None), 1 => Just(Some("pci")), 1 => Just(Some("pcie"))];
        (prop_oneof![3 => Just(0u8), 1 => 1u8..8], attach, any::<bool>(), any::<bool>())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        /// Whatever is asked for, each device is there once, with those of the same slot, on the kind of bus that was asked for.
        #[test]
        fn is_placed_as_asked_or_refused_by_name(
            devices in prop::collection::vec(any_device(), 0..40),
            pcie in prop::sample::select(vec![
                "root-ports", "flat", "switch", "cold-plug=bridge-port", "cold-plug=switch-port,switches=2", "switch,switch-ports=3",
                "root-ports=4,hot-plug=root-port", "cold-plug=no-port,switch-ports=2",
                "cold-plug=bridge-port,hot-plug=bridge-port,bridges=2,bridge-slots=3",
            ]),
        ) {
            let texts: Vec<String> = devices
                .iter()
                .enumerate()
                .map(|(index, (function, attach, vfs, rom))| {
                    let attach = attach.map_or(String::new(), |kind| format!(",attach={kind}"));
                    let vfs = if *vfs { ",vfs=2,vf-offset=64,vf-stride=8" } else { "" };
                    let rom = if *rom { ",rom=4K" } else { "" };
                    format!("stub,id=d{index},bar0=4K:mem32,function={function}{attach}{vfs}{rom}")
                })
                .collect();
            let config = config(pcie, &texts);
            let spec = match spec::spec(&config, &Host::default()) {
                Ok(spec) => spec,
                Err(SpecError::ColdPlug(error)) => {
                    prop_assert!(error.to_string().contains("device d"));
                    return Ok(());
                }
                // Where no port is above.
                Err(SpecError::VirtualFunctions { name, .. }) => {
                    let index: usize = name.0.trim_start_matches('d').parse().unwrap();
                    let (_, attach, vfs, _) = devices[index];
                    let conventional = attach.map_or(pcie.contains("bridge-port"), |kind| kind == "pci");
                    prop_assert!(vfs && (conventional || pcie.contains("flat") || pcie.contains("no-port")), "{}", name);
                    return Ok(());
                }
                Err(other) => return Err(TestCaseError::fail(other.to_string())),
            };
            let plan = match plan::plan(&spec.topology, &LIMITS) {
                Ok(plan) => plan,
                // Two with one function number, more than 32 on the root bus, or virtual functions of neighbours at one place.
                Err(error) => {
                    let text = error.to_string();
                    let known = ["both", "no device number is left", "a virtual function of", "virtual functions take those"];
                    prop_assert!(known.iter().any(|part| text.contains(part)), "{}", text);
                    return Ok(());
                }
            };
            let kinds: BTreeMap<_, _> = plan.pci.functions.iter().map(|function| (function.id, &function.kind)).collect();
            let mut slots = BTreeSet::new();
            let mut last = None;
            for (index, (function, attach, ..)) in devices.iter().enumerate() {
                let planned = plan.pci.by_name(&format!("d{index}")).unwrap();
                let slot = (planned.on, planned.at.bdf.devfn().device());
                prop_assert_eq!(planned.at.bdf.devfn().function(), *function);
                if *function == 0 {
                    prop_assert!(slots.insert(slot), "d{} shares a slot with a device given apart", index);
                } else {
                    prop_assert_eq!(Some(slot), last, "d{} is not with the one before", index);
                }
                last = Some(slot);
                let bridge = match planned.on {
                    Parent::Port(port) => matches!(kinds[&port], PlannedKind::Port(port) if port.spec.kind == PortKind::PciBridge),
                    Parent::RootComplex(_) => false,
                };
                match attach {
                    Some("pci") => prop_assert!(bridge),
                    Some(_) => prop_assert!(!bridge),
                    None => prop_assert_eq!(bridge, pcie.contains("bridge-port")),
                }
            }
        }
    }
}
