use api::config::VmConfig;
use pci::address::HostBdf;
use pci::topology::PortKind;

use super::check::{CheckError, CheckWarning, Members, Wanted, check_beside, check_memlock};
use super::fabric::{Acs, Ats, Sriov};
use super::fake::{DOWNSTREAM, FakeFunction, FakeHost, ROOT_PORT, UPSTREAM};
use super::scan::{ScanError, of_vendor, resolve, scan, scan_all};
use super::tree::{HostKind, HostParent, HostTree, NestingError};
use super::{HostError, look_in};

/// As for a guest without other functions.
fn check(tree: &HostTree, wanted: &[Wanted]) -> Result<Vec<CheckWarning>, CheckError> {
    check_beside(tree, wanted, &[])
}

fn bdf(text: &str) -> HostBdf {
    text.parse().unwrap()
}

fn wanted(name: &str, at: &str) -> Wanted {
    Wanted { name: name.into(), at: bdf(at) }
}

/// A switch with two GPUs, each in a group of its own.
fn switch() -> FakeHost {
    let host = FakeHost::new();
    let port = |kind| FakeFunction { group: Some(9), ..FakeFunction::port(kind) };
    host.add("pci0000:00/0000:00:01.0", &port(ROOT_PORT));
    host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &port(UPSTREAM));
    for (down, gpu, group) in [("0000:02:00.0", "0000:03:00.0", 1), ("0000:02:01.0", "0000:04:00.0", 2)] {
        let path = format!("pci0000:00/0000:00:01.0/0000:01:00.0/{down}");
        host.add(&path, &port(DOWNSTREAM));
        host.add(&format!("{path}/{gpu}"), &FakeFunction { group: Some(group), ..FakeFunction::default() });
    }
    host
}

fn scan_for(host: &FakeHost, devices: &[&str]) -> HostTree {
    let devices: Vec<HostBdf> = devices.iter().map(|at| bdf(at)).collect();
    scan(host.sysfs(), &devices).unwrap()
}

#[test]
fn every_bridge_above_a_device_is_read() {
    let host = switch();
    let tree = scan_for(&host, &["0000:03:00.0"]);
    let gpu = tree.get(bdf("0000:03:00.0")).unwrap();
    let path: Vec<(String, HostKind)> = tree.above(gpu).iter().map(|node| (node.at.to_string(), node.kind)).collect();
    assert_eq!(
        path,
        [
            ("0000:00:01.0".into(), HostKind::Port(PortKind::Root)),
            ("0000:01:00.0".into(), HostKind::Port(PortKind::Upstream)),
            ("0000:02:00.0".into(), HostKind::Port(PortKind::Downstream)),
        ]
    );
    assert_eq!(tree.root_complex(gpu), Some("pci0000:00"));
    assert!(tree.get(bdf("0000:04:00.0")).is_none());
}

#[test]
fn ids_link_and_completers_come_from_the_registers() {
    let host = switch();
    let tree = scan_for(&host, &["0000:03:00.0"]);
    let gpu = tree.get(bdf("0000:03:00.0")).unwrap();
    assert_eq!((gpu.ids.vendor, gpu.ids.device, gpu.ids.class.value()), (0x10DE, 0x2330, 0x03_0200));
    assert_eq!((gpu.ids.revision, gpu.ids.subsystem_vendor, gpu.ids.subsystem), (0xA1, 0x10DE, 0x16C1));
    let link = gpu.link.unwrap();
    assert_eq!((link.max.to_string(), link.current.to_string()), ("16GT/s x16".into(), "8GT/s x8".into()));
    assert_eq!((link.max_payload_supported, link.max_payload), (3, 2));
    assert_eq!(gpu.atomic_completers, 3);
    assert_eq!((gpu.group, gpu.driver.as_deref(), gpu.numa_node), (Some(1), Some("vfio-pci"), Some(0)));
}

#[test]
fn without_privilege_kinds_come_from_levels_and_links_from_attributes() {
    let host = FakeHost::new();
    let port = FakeFunction { config_len: 64, ..FakeFunction::port(ROOT_PORT) };
    let mut path = String::from("pci10000:e0");
    for at in ["10000:e0:01.0", "10000:e1:00.0", "10000:e2:00.0", "10000:e3:00.0", "10000:e4:00.0"] {
        path = format!("{path}/{at}");
        host.add(&path, &port);
    }
    let gpu =
        host.add(&format!("{path}/10000:e5:00.0"), &FakeFunction { config_len: 64, numa_node: -1, ..FakeFunction::default() });
    let tree = scan(host.sysfs(), &[gpu]).unwrap();
    let node = tree.get(gpu).unwrap();
    let kinds: Vec<HostKind> = tree.above(node).iter().map(|node| node.kind).collect();
    let expected = [PortKind::Root, PortKind::Upstream, PortKind::Downstream, PortKind::Upstream, PortKind::Downstream];
    assert_eq!(kinds, expected.map(HostKind::Port));
    assert_eq!(node.link.unwrap().current.to_string(), "8GT/s x8");
    assert_eq!(node.numa_node, None);
}

#[test]
fn a_function_inside_a_nested_domain_hangs_on_that_domain_s_root_complex() {
    let host = FakeHost::new();
    let gpu = host.add("pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:01.0", &FakeFunction::default());
    let tree = scan(host.sysfs(), &[gpu]).unwrap();
    assert_eq!(tree.get(gpu).unwrap().on, HostParent::RootComplex("pci10000:e0".into()));
}

#[test]
fn a_capability_list_that_loops_ends_the_search() {
    let host = FakeHost::new();
    let gpu = host.add("pci0000:00/0000:00:02.0", &FakeFunction::default());
    let mut config = vec![0; 256];
    config[6] = 0x10;
    config[0x34] = 0x40;
    config[0x40] = 0x09;
    config[0x41] = 0x40;
    std::fs::write(host.link("0000:00:02.0").join("config"), config).unwrap();
    let tree = scan(host.sysfs(), &[gpu]).unwrap();
    assert_eq!(tree.get(gpu).unwrap().kind, HostKind::Endpoint);
}

#[test]
fn devices_are_named_by_address_link_or_resolved_path() {
    let host = switch();
    let link = host.link("0000:03:00.0");
    let resolved = std::fs::canonicalize(&link).unwrap();
    let elsewhere = host.sysfs().join("gpu");
    std::os::unix::fs::symlink(&link, &elsewhere).unwrap();
    let texts = [
        "0000:03:00.0".to_owned(),
        "03:00.0".to_owned(),
        link.display().to_string(),
        format!("{}/", link.display()),
        resolved.display().to_string(),
        elsewhere.display().to_string(),
        "/sys/bus/pci/devices/0000:03:00.0/".to_owned(),
    ];
    for text in texts {
        assert_eq!(resolve(&text).unwrap(), bdf("0000:03:00.0"), "{text}");
    }
    for text in ["", "gpu0", "/", "/sys/bus/pci", "03:00", "03:00.0/config"] {
        assert!(resolve(text).is_err(), "{text}");
    }
}

#[test]
fn an_absent_device_is_refused() {
    let host = switch();
    let tree = scan_for(&host, &["0000:77:00.0"]);
    let error = check(&tree, &[wanted("gpu0", "0000:77:00.0")]).unwrap_err();
    assert_eq!(error, CheckError::Absent { name: "gpu0".into(), at: bdf("0000:77:00.0") });
}

#[test]
fn bridges_and_host_bridges_are_refused() {
    let host = switch();
    let class = 0x06_0000;
    host.add("pci0000:00/0000:00:00.0", &FakeFunction { class, express: None, driver: None, ..FakeFunction::default() });
    for at in ["0000:00:01.0", "0000:02:00.0", "0000:00:00.0"] {
        let tree = scan_for(&host, &[at]);
        assert_eq!(check(&tree, &[wanted("x", at)]), Err(CheckError::Bridge { name: "x".into(), at: bdf(at) }));
    }
}

#[test]
fn a_device_with_another_driver_is_refused_with_the_commands_that_bind_it() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:02.0", &FakeFunction { driver: Some("nvidia"), ..FakeFunction::default() });
    host.add("pci0000:00/0000:00:03.0", &FakeFunction { driver: None, group: Some(2), ..FakeFunction::default() });
    let tree = scan_for(&host, &["0000:00:02.0", "0000:00:03.0"]);
    let text = check(&tree, &[wanted("gpu0", "0000:00:02.0")]).unwrap_err().to_string();
    for part in [
        "gpu0",
        "0000:00:02.0",
        "bound to nvidia",
        "echo vfio-pci > /sys/bus/pci/devices/0000:00:02.0/driver_override",
        "echo 0000:00:02.0 > /sys/bus/pci/devices/0000:00:02.0/driver/unbind",
        "echo 0000:00:02.0 > /sys/bus/pci/drivers_probe",
    ] {
        assert!(text.contains(part), "{part} in: {text}");
    }
    let text = check(&tree, &[wanted("gpu1", "0000:00:03.0")]).unwrap_err().to_string();
    assert!(text.contains("bound to no driver") && !text.contains("unbind"), "{text}");
}

#[test]
fn variants_of_vfio_pci_are_accepted() {
    for driver in ["vfio-pci", "mlx5_vfio_pci", "nvgrace-gpu-vfio-pci"] {
        let host = FakeHost::new();
        host.add("pci0000:00/0000:00:02.0", &FakeFunction { driver: Some(driver), ..FakeFunction::default() });
        let tree = scan_for(&host, &["0000:00:02.0"]);
        assert_eq!(check(&tree, &[wanted("gpu0", "0000:00:02.0")]), Ok(Vec::new()));
    }
}

#[test]
fn a_group_that_host_drivers_use_is_refused_and_its_members_are_named() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:01.0", &FakeFunction::port(ROOT_PORT));
    host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &FakeFunction::default());
    let audio = FakeFunction { class: 0x04_0300, driver: Some("snd_hda_intel"), ..FakeFunction::default() };
    host.add("pci0000:00/0000:00:01.0/0000:01:00.1", &audio);
    let tree = scan_for(&host, &["0000:01:00.0"]);
    let error = check(&tree, &[wanted("gpu0", "0000:01:00.0")]).unwrap_err();
    let offenders = Members(vec![(bdf("0000:01:00.1"), Some("snd_hda_intel".into()))]);
    assert_eq!(error, CheckError::GroupNotViable { name: "gpu0".into(), group: 1, offenders });
    assert!(error.to_string().contains("0000:01:00.1 (snd_hda_intel)"));
    assert!(error.to_string().contains("echo vfio-pci > /sys/bus/pci/devices/0000:01:00.1/driver_override"));
}

#[test]
fn a_device_outside_any_iommu_group_is_refused() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:02.0", &FakeFunction { group: None, ..FakeFunction::default() });
    let tree = scan_for(&host, &["0000:00:02.0"]);
    let error = check(&tree, &[wanted("gpu0", "0000:00:02.0")]).unwrap_err();
    assert!(
        error.to_string().contains("with a processor of Intel, on the host kernel's command line (intel_iommu=on)"),
        "{error}"
    );
}

#[test]
fn case_c2_nvswitches_of_a_group_are_not_taken_for_bridges() {
    let host = FakeHost::new();
    for (at, class) in [(0, 0x06_0000), (1, 0x06_0400), (2, 0x06_8000), (3, 0x03_0200)] {
        let function = FakeFunction { class, express: None, bridge: class == 0x06_0400, ..FakeFunction::default() };
        host.add(&format!("pci0000:00/0000:00:0{at}.0"), &function);
    }
    let tree = scan_for(&host, &["0000:00:03.0"]);
    assert_eq!(check(&tree, &[wanted("switch0", "0000:00:02.0"), wanted("gpu0", "0000:00:03.0")]), Ok(Vec::new()));
    let told = check(&tree, &[wanted("gpu0", "0000:00:03.0")]).unwrap()[0].to_string();
    assert!(told.contains("0000:00:02.0") && !told.contains("0000:00:01.0"), "{told}");
}

#[test]
fn case_c3_a_part_of_a_group_is_accepted_with_a_warning_that_lists_the_rest() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:02.0", &FakeFunction::default());
    host.add("pci0000:00/0000:00:02.1", &FakeFunction { class: 0x04_0300, driver: None, ..FakeFunction::default() });
    let tree = scan_for(&host, &["0000:00:02.0"]);
    let warnings = check(&tree, &[wanted("gpu0", "0000:00:02.0")]).unwrap();
    let others = Members(vec![(bdf("0000:00:02.1"), None)]);
    assert_eq!(warnings, [CheckWarning::PartialGroup { name: "gpu0".into(), group: 1, others }]);
    assert!(warnings[0].to_string().contains("0000:00:02.1 (no driver)"));
}

#[test]
fn case_c3_a_whole_group_is_accepted_without_a_warning() {
    let host = FakeHost::new();
    for at in ["0000:00:02.0", "0000:00:02.1"] {
        host.add(&format!("pci0000:00/{at}"), &FakeFunction::default());
    }
    let tree = scan_for(&host, &["0000:00:02.0", "0000:00:02.1"]);
    assert_eq!(check(&tree, &[wanted("a", "0000:00:02.0"), wanted("b", "0000:00:02.1")]), Ok(Vec::new()));
    // One after the other.
    assert_eq!(check_beside(&tree, &[wanted("b", "0000:00:02.1")], &[bdf("0000:00:02.0")]), Ok(Vec::new()));
    assert_eq!(check_beside(&tree, &[wanted("b", "0000:00:02.1")], &[bdf("0000:00:03.0")]).unwrap().len(), 1);
}

#[test]
fn case_c4_the_same_device_twice_is_refused_with_both_names() {
    let host = switch();
    let link = host.link("0000:03:00.0");
    let resolved = std::fs::canonicalize(&link).unwrap();
    for (first, second) in [
        (link.display().to_string(), link.display().to_string()),
        (link.display().to_string(), format!("{}/", link.display())),
        (link.display().to_string(), resolved.display().to_string()),
        ("03:00.0".to_owned(), "0000:03:00.0".to_owned()),
    ] {
        let pair =
            [("gpu0", first), ("gpu1", second)].map(|(name, text)| Wanted { name: name.into(), at: resolve(&text).unwrap() });
        let tree = scan_for(&host, &["0000:03:00.0"]);
        let error = check(&tree, &pair).unwrap_err();
        assert_eq!(error, CheckError::Twice { first: "gpu0".into(), second: "gpu1".into(), at: bdf("0000:03:00.0") });
    }
}

#[test]
fn case_c5_a_low_limit_on_locked_memory_is_found_before_any_device_is_opened() {
    let gib = 1 << 30;
    let error = check_memlock(Some(64 << 10), gib, false).unwrap_err();
    assert_eq!(error, CheckError::Memlock { limit: 64 << 10, needed: gib });
    let text = error.to_string();
    for part in ["1073741824 bytes", "65536 bytes", "ulimit -l 1048576"] {
        assert!(text.contains(part), "{part} in: {text}");
    }
    assert_eq!(check_memlock(Some(64 << 10), gib, true), Ok(()));
    assert_eq!(check_memlock(Some(gib), gib, false), Ok(()));
    assert_eq!(check_memlock(None, u64::MAX, false), Ok(()));
}

#[test]
fn a_plan_for_a_host_that_is_data_looks_at_no_driver_and_no_group() {
    let host = switch();
    let bare = FakeFunction { driver: Some("nvidia"), group: None, ..FakeFunction::default() };
    host.add("pci0000:00/0000:00:02.0", &bare);
    let tree = scan_all(host.sysfs()).unwrap();
    let config = |at: &str| VmConfig { devices: vec![format!("{at},id=gpu").parse().unwrap()], ..VmConfig::default() };
    let found = look_in(&tree, &config("0000:00:02.0")).unwrap();
    assert_eq!(found.wanted.get("gpu"), Some(&bdf("0000:00:02.0")));
    assert!(check(&tree, &[wanted("gpu", "0000:00:02.0")]).is_err());
    assert!(matches!(look_in(&tree, &config("0000:09:00.0")), Err(HostError::Check(CheckError::Absent { .. }))));
    assert!(matches!(look_in(&tree, &config("0000:01:00.0")), Err(HostError::Check(CheckError::Bridge { .. }))));
}

#[test]
fn functions_of_a_vendor_are_found_without_those_that_left() {
    let host = switch();
    std::os::unix::fs::symlink(host.sysfs().join("devices/gone"), host.link("0000:09:00.0")).unwrap();
    let mut found = of_vendor(host.sysfs(), 0x10DE);
    found.sort();
    assert_eq!(found, [bdf("0000:03:00.0"), bdf("0000:04:00.0")]);
}

#[test]
fn a_machine_without_pci_has_no_functions() {
    let empty = tempfile::tempdir().unwrap();
    assert!(scan_all(empty.path()).is_err());
    std::fs::create_dir(empty.path().join("bus")).unwrap();
    assert_eq!(scan_all(empty.path()).unwrap(), HostTree::default());
}

/// A root port, a NIC with virtual functions on it and ATS off.
fn nic_host() -> FakeHost {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:01.0", &FakeFunction { acs: Some((0x5F, 0x1D)), ..FakeFunction::port(ROOT_PORT) });
    let nic =
        FakeFunction { vendor: 0x15B3, class: 0x02_0000, ats: Some(false), sriov: Some((16, 2)), ..FakeFunction::default() };
    host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &nic);
    host
}

#[test]
fn access_control_translation_atomics_virtual_functions_and_read_requests_come_from_configuration_space() {
    let tree = scan_all(nic_host().sysfs()).unwrap();
    let port = tree.get(bdf("0000:00:01.0")).unwrap().fabric;
    assert_eq!(port.acs, Some(Acs { capability: 0x5F, control: 0x1D }));
    assert_eq!((port.ats, port.sriov, port.is_whole()), (None, None, true));
    let nic = tree.get(bdf("0000:01:00.0")).unwrap().fabric;
    assert_eq!(nic.ats.map(Ats::is_enabled), Some(false));
    assert_eq!(nic.sriov, Some(Sriov { total: 16, enabled: 2 }));
    assert_eq!((nic.max_read_request, nic.acs), (Some(5), None));
    assert!(nic.atomics.routing && nic.atomics.requester && !nic.atomics.egress_blocked);
}

#[test]
fn with_64_bytes_the_rest_is_unknown_and_virtual_functions_come_from_attributes() {
    let host = FakeHost::new();
    let nic = FakeFunction { sriov: Some((16, 2)), ats: Some(true), config_len: 64, ..FakeFunction::default() };
    let at = host.add("pci0000:00/0000:00:01.0", &nic);
    let fabric = scan_all(host.sysfs()).unwrap().get(at).unwrap().fabric;
    assert_eq!((fabric.config_bytes, fabric.is_whole(), fabric.ats), (64, false, None));
    assert_eq!(fabric.sriov, Some(Sriov { total: 16, enabled: 2 }));
}

#[test]
fn ids_come_from_configuration_space_where_attributes_are_missing_and_the_other_way_round() {
    let host = FakeHost::new();
    let at = host.add("pci0000:00/0000:00:01.0", &FakeFunction::default());
    for attribute in ["vendor", "device", "class", "revision", "subsystem_vendor", "numa_node", "resource", "max_link_speed"] {
        std::fs::remove_file(host.link("0000:00:01.0").join(attribute)).unwrap();
        assert_eq!(scan_all(host.sysfs()).unwrap().get(at).unwrap().ids.vendor, 0x10DE, "{attribute}");
    }
    let other = host.add("pci0000:00/0000:00:02.0", &FakeFunction::default());
    let config = host.link("0000:00:02.0").join("config");
    std::fs::remove_file(&config).unwrap();
    assert_eq!(scan_all(host.sysfs()).unwrap().get(other).unwrap().ids.device, 0x2330);
    std::fs::remove_file(host.link("0000:00:02.0").join("device")).unwrap();
    let error = scan_all(host.sysfs()).unwrap_err().to_string();
    assert!(error.contains("0000:00:02.0/device"), "{error}");
}

#[test]
fn an_attribute_that_is_no_number_is_named_with_what_it_holds() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:01.0", &FakeFunction { config_len: 0, ..FakeFunction::default() });
    std::fs::write(host.link("0000:00:01.0").join("class"), "display\n").unwrap();
    let error = scan_all(host.sysfs()).unwrap_err().to_string();
    assert!(error.contains("0000:00:01.0/class holds `display`"), "{error}");
}

#[test]
fn bridges_that_hang_on_each_other_are_refused() {
    let host = FakeHost::new();
    for path in ["pci0000:00/0000:01:00.0/0000:02:00.0", "pci0000:00/0000:02:00.0/0000:01:00.0"] {
        host.add(path, &FakeFunction::port(ROOT_PORT));
    }
    let error = scan_all(host.sysfs()).unwrap_err();
    assert!(matches!(error, ScanError::Nesting(NestingError::Loop { .. })), "{error}");
}

#[test]
fn a_link_that_leads_to_itself_is_named() {
    let host = FakeHost::new();
    std::os::unix::fs::symlink(host.link("0000:00:01.0"), host.link("0000:00:01.0")).unwrap();
    let error = scan_all(host.sysfs()).unwrap_err().to_string();
    assert!(error.contains("bus/pci/devices/0000:00:01.0"), "{error}");
}

#[test]
fn a_device_below_a_bridge_that_has_left_has_left_too() {
    let host = switch();
    std::fs::remove_file(host.link("0000:01:00.0")).unwrap();
    let tree = scan_for(&host, &["0000:03:00.0"]);
    assert_eq!(tree.get(bdf("0000:03:00.0")), None);
    let error = check(&tree, &[wanted("gpu0", "0000:03:00.0")]).unwrap_err();
    assert!(matches!(error, CheckError::Absent { .. }));
    let dangling = host.link("0000:09:00.0");
    std::os::unix::fs::symlink(host.sysfs().join("devices/gone"), dangling).unwrap();
    assert_eq!(scan_all(host.sysfs()).unwrap().get(bdf("0000:09:00.0")), None);
}

#[test]
fn devices_that_come_and_go_while_they_are_looked_at_are_there_whole_or_not_at_all() {
    let host = FakeHost::new();
    let stays = host.add("pci0000:00/0000:00:01.0", &FakeFunction::default());
    let path = "pci0000:00/0000:00:02.0";
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let at = host.add(path, &FakeFunction { group: None, driver: None, ..FakeFunction::default() });
                // As the kernel does: the link goes before what it leads to.
                std::fs::remove_file(host.link(&at.to_string())).unwrap();
                std::fs::remove_dir_all(host.sysfs().join("devices").join(path)).unwrap();
            }
        });
        for _ in 0..300 {
            let tree = scan_all(host.sysfs());
            let seen = tree.as_ref().map(|tree| tree.get(stays).is_some() && tree.functions.len() <= 2);
            assert!(matches!(seen, Ok(true)), "{tree:?}");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn what_others_hang_on_is_a_bridge_even_where_nothing_of_it_can_be_read() {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:01.0", &FakeFunction { class: 0x06_0700, config_len: 0, ..FakeFunction::default() });
    host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &FakeFunction::default());
    let tree = scan_all(host.sysfs()).unwrap();
    assert_eq!(tree.get(bdf("0000:00:01.0")).unwrap().kind, HostKind::OtherBridge);
}

#[test]
fn the_iommu_s_address_width_comes_from_its_capability_register() {
    let host = FakeHost::new();
    let at = host.add("pci0000:00/0000:00:01.0", &FakeFunction::default());
    let iommu = host.link("0000:00:01.0").join("iommu/intel-iommu");
    std::fs::create_dir_all(&iommu).unwrap();
    for (text, bits) in [("1c0000c40660462\n", Some(39)), ("8d2078c106f0466\n", Some(48))] {
        std::fs::write(iommu.join("cap"), text).unwrap();
        assert_eq!(scan_all(host.sysfs()).unwrap().get(at).unwrap().fabric.iommu_bits, bits, "{text}");
    }
}

#[test]
fn nodes_come_with_the_tree() {
    let host = switch();
    host.add_node(0, "10 21");
    host.add_node(1, "21 10");
    let tree = scan_for(&host, &["0000:03:00.0"]);
    assert_eq!(tree.memory_nodes.get(&1).unwrap().distances.get(&0), Some(&21));
}

#[test]
fn extended_capabilities_that_loop_end_the_search() {
    let host = FakeHost::new();
    let at = host.add("pci0000:00/0000:00:01.0", &FakeFunction::default());
    let path = host.link("0000:00:01.0").join("config");
    let mut config = std::fs::read(&path).unwrap();
    config[0x100..0x104].copy_from_slice(&(0x0Bu32 | 1 << 16 | 0x100 << 20).to_le_bytes());
    std::fs::write(path, config).unwrap();
    assert_eq!(scan_all(host.sysfs()).unwrap().get(at).unwrap().fabric.acs, None);
}

/// What a scan says of a host with one function, one of whose attributes is changed.
fn with_attribute(name: &str, change: impl Fn(&std::path::Path)) -> Result<HostTree, String> {
    let host = FakeHost::new();
    host.add("pci0000:00/0000:00:02.0", &FakeFunction::default());
    let file = host.link("0000:00:02.0").join(name);
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    if std::fs::symlink_metadata(&file).is_ok() {
        std::fs::remove_file(&file).unwrap();
    }
    change(&file);
    scan_all(host.sysfs()).map_err(|error| error.to_string())
}

#[test]
fn attributes_with_values_that_they_cannot_hold_are_refused_by_name_and_value() {
    for (name, text) in [
        ("vendor", "zz"),
        ("vendor", "0xfffff"),
        ("vendor", ""),
        ("device", "-1"),
        ("device", "+1"),
        ("class", "0x1000000"),
        ("revision", "0x100"),
        ("subsystem_vendor", "x"),
        ("subsystem_device", "0x"),
        ("numa_node", "-2"),
        ("numa_node", "many"),
        ("sriov_totalvfs", "65536"),
        ("sriov_numvfs", "-1"),
        ("iommu/intel-iommu/cap", "x"),
        ("resource", "garbage"),
        ("resource", "0x10 0x0 0x200"),
    ] {
        let error = with_attribute(name, |file| std::fs::write(file, format!("{text}\n")).unwrap()).unwrap_err();
        assert!(error.contains(&format!("0000:00:02.0/{name} holds `{text}`")), "{error}");
    }
    let error = with_attribute("iommu_group", |link| std::os::unix::fs::symlink("groups/x", link).unwrap()).unwrap_err();
    assert!(error.contains("iommu_group holds `x`"), "{error}");
    for name in ["vendor", "device", "revision", "resource", "numa_node", "config"] {
        assert!(with_attribute(name, |_| ()).is_ok(), "{name} may be absent");
    }
}

#[test]
fn attributes_that_are_no_files_of_their_size_are_refused_by_name() {
    for name in ["vendor", "config", "resource", "numa_node", "revision"] {
        let zero = with_attribute(name, |file| std::os::unix::fs::symlink("/dev/zero", file).unwrap());
        let large = with_attribute(name, |file| std::fs::write(file, vec![b'0'; (64 << 10) + 1]).unwrap());
        let fifo = with_attribute(name, |file| {
            rustix::fs::mknodat(rustix::fs::CWD, file, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        });
        for result in [zero, large, fifo] {
            let error = result.unwrap_err();
            assert!(error.contains(&format!("0000:00:02.0/{name} is no attribute of sysfs")), "{error}");
        }
    }
}

#[test]
fn one_folder_is_not_two_functions() {
    let host = switch();
    std::os::unix::fs::symlink(host.link("0000:03:00.0"), host.link("0000:03:00.1")).unwrap();
    let error = scan_all(host.sysfs()).unwrap_err().to_string();
    assert!(error.contains("0000:03:00.1 leads to") && error.contains("another function"), "{error}");
}
