use std::path::PathBuf;

use super::reach::Verdict;
use api::config::NvlinkMode;

use super::*;
use crate::host::fabric::Fabric;
use crate::host::fake::{DOWNSTREAM, FakeFunction, FakeHost, ROOT_PORT, UPSTREAM};

/// The access control that is asked for.
const GOOD: Option<(u16, u16)> = Some((0x5F, 0x5D));

/// What a host of one switch is varied by.
#[derive(Clone, Copy)]
struct Host {
    gpu_port: Option<(u16, u16)>,
    nic_port: Option<(u16, u16)>,
    root_port: Option<(u16, u16)>,
    ats: Option<bool>,
    config_len: usize,
}

const BEST: Host = Host { gpu_port: GOOD, nic_port: GOOD, root_port: GOOD, ats: Some(true), config_len: 4096 };

/// A switch with a GPU and a NIC, a GPU on a root port of its own, and one below another root complex.
fn host(host: Host) -> FakeHost {
    let fake = FakeHost::new();
    let port = |kind, acs| FakeFunction { acs, config_len: host.config_len, group: Some(90), ..FakeFunction::port(kind) };
    let gpu = |group| FakeFunction { group: Some(group), ..FakeFunction::default() };
    let nic = FakeFunction {
        vendor: 0x15B3,
        device: 0x1021,
        class: 0x02_0000,
        ats: host.ats,
        config_len: host.config_len,
        group: Some(2),
        ..FakeFunction::default()
    };
    let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
    fake.add("pci0000:00/0000:00:01.0", &port(ROOT_PORT, host.root_port));
    fake.add(switch, &port(UPSTREAM, None));
    fake.add(&format!("{switch}/0000:02:00.0"), &port(DOWNSTREAM, host.gpu_port));
    fake.add(&format!("{switch}/0000:02:00.0/0000:03:00.0"), &gpu(1));
    fake.add(&format!("{switch}/0000:02:01.0"), &port(DOWNSTREAM, host.nic_port));
    fake.add(&format!("{switch}/0000:02:01.0/0000:04:00.0"), &nic);
    fake.add("pci0000:00/0000:00:02.0", &port(ROOT_PORT, GOOD));
    fake.add("pci0000:00/0000:00:02.0/0000:05:00.0", &gpu(3));
    fake.add("pci0000:40/0000:40:01.0", &port(ROOT_PORT, GOOD));
    fake.add("pci0000:40/0000:40:01.0/0000:41:00.0", &gpu(4));
    fake
}

fn report(host: &FakeHost, devices: &[&str], nvlink: Option<NvlinkMode>) -> Report {
    let wanted: Vec<Wanted> = devices.iter().map(|at| Wanted { name: format!("dev-{at}"), at: at.parse().unwrap() }).collect();
    let options = CheckOptions {
        devices: Vec::new(),
        given: Vec::new(),
        memory: None,
        pcie: None,
        nvlink,
        cdi_dirs: Vec::new(),
        host: None,
        json: false,
    };
    judge(&scan_all(host.sysfs()).unwrap(), &wanted, &options, None)
}

/// The way between GPU and NIC below the switch, why, and the faults of the ports between.
fn way(variant: Host) -> (Verdict, String, Vec<String>) {
    let report = report(&host(variant), &["03:00.0", "04:00.0"], None);
    let pair = report.pairs.first().unwrap();
    (pair.way, pair.why.clone(), pair.ports.iter().map(|port| format!("{} {}", port.at, port.fault)).collect())
}

#[test]
fn case_h2_the_recommended_access_control_with_translation_is_a_direct_way_without_a_remark() {
    let (verdict, why, ports) = way(BEST);
    assert_eq!((verdict, ports), (Verdict::Direct, Vec::new()));
    assert_eq!(why, "0000:04:00.0 uses ATS and 0000:02:01.0 lets translated requests pass");
    let report = report(&host(BEST), &["03:00.0", "04:00.0"], None);
    assert_eq!(exit_code(report.severity()), 0, "{report}");
}

#[test]
fn case_h2_each_variant_of_access_control_and_translation_has_one_verdict_that_names_port_and_bit() {
    let acs = |control| Some((0x5F, control));
    for (variant, verdict, part, fault) in [
        (
            Host { ats: Some(false), ..BEST },
            Verdict::RootComplex,
            "0000:02:01.0 redirects (ReqRedir) and 0000:04:00.0 does not",
            None,
        ),
        (Host { ats: None, ..BEST }, Verdict::RootComplex, "does not use ATS", None),
        (
            Host { nic_port: acs(0x1D), ..BEST },
            Verdict::RootComplex,
            "0000:02:01.0 redirects translated requests, too",
            Some("0000:02:01.0 ACS control is 0x1d, DirectTrans- (off)"),
        ),
        (
            Host { nic_port: acs(0x5F), ..BEST },
            Verdict::Impossible,
            "0000:02:01.0 takes translated requests for errors",
            Some("0000:02:01.0 ACS control is 0x5f, TransBlk+ (on)"),
        ),
        (Host { root_port: acs(0x5F), ..BEST }, Verdict::Impossible, "0000:00:01.0 takes translated requests", None),
        (
            Host { nic_port: Some((0x7F, 0x71)), ..BEST },
            Verdict::Impossible,
            "0000:02:01.0 blocks requests to its peers",
            Some("ReqRedir- CmpltRedir- (off), EgressCtrl+ (on)"),
        ),
        (
            Host { nic_port: acs(0), gpu_port: acs(0), ..BEST },
            Verdict::Direct,
            "the switch 0000:01:00.0 redirects nothing",
            Some("SrcValid- ReqRedir- CmpltRedir- UpstreamFwd- DirectTrans- (off)"),
        ),
        (
            Host { gpu_port: acs(0x1D), ..BEST },
            Verdict::Direct,
            "lets translated requests pass",
            Some("0000:02:00.0 ACS control is 0x1d, DirectTrans- (off)"),
        ),
        (
            Host { nic_port: Some((0x1F, 0x1D)), ..BEST },
            Verdict::RootComplex,
            "redirects translated requests, too",
            Some("0000:02:01.0 ACS control is 0x1d, DirectTrans- (not there)"),
        ),
        (Host { nic_port: None, ..BEST }, Verdict::Direct, "redirects nothing", Some("0000:02:01.0 it has no access control")),
        (Host { config_len: 64, ..BEST }, Verdict::Unknown, "access control of 0000:02:", Some("which root can")),
    ] {
        let (found, why, ports) = way(variant);
        assert!(found == verdict && why.contains(part), "{verdict} {part}: {found} {why}");
        match fault {
            Some(fault) => assert!(ports.iter().any(|port| port.contains(fault)), "{fault}: {ports:?}"),
            None => assert_eq!(ports, Vec::<String>::new(), "{part}"),
        }
    }
}

#[test]
fn case_h2_an_operator_is_told_the_register_write_and_the_firmware_switch() {
    let variant = Host { nic_port: Some((0x5F, 0x1D)), ats: None, ..BEST };
    let report = report(&host(variant), &["03:00.0", "04:00.0"], None);
    let text = report.to_string();
    for part in ["to do: setpci -s 0000:02:01.0 ECAP_ACS+6.w=005d", "ATS_ENABLED=true", "warning  acs      port 0000:02:01.0: "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(exit_code(report.severity()), 1);
}

#[test]
fn devices_without_a_common_switch_reach_each_other_through_the_root_complex() {
    let report = report(&host(BEST), &["03:00.0", "05:00.0", "41:00.0", "04:00.0"], None);
    let ways: Vec<String> = report.pairs.iter().map(|pair| format!("{} {} {}: {}", pair.a, pair.b, pair.way, pair.why)).collect();
    let near = "no switch is above both; 0000:03:00.0 is below root port 0000:00:01.0";
    assert_eq!(ways.first(), Some(&format!("dev-03:00.0 dev-05:00.0 root complex: {near}")));
    assert!(ways.get(1).is_some_and(|way| way.ends_with("below different root complexes")), "{ways:?}");
    assert_eq!(report.pairs.len(), 6);
    assert_eq!(exit_code(report.severity()), 1);
}

#[test]
fn gpus_below_one_switch_go_through_the_root_complex_where_it_redirects() {
    let fake = host(BEST);
    let port = FakeFunction { acs: GOOD, ..FakeFunction::port(DOWNSTREAM) };
    let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
    fake.add(&format!("{switch}/0000:02:02.0"), &port);
    fake.add(&format!("{switch}/0000:02:02.0/0000:06:00.0"), &FakeFunction::default());
    let report = report(&fake, &["03:00.0", "06:00.0"], None);
    let pair = report.pairs.first().unwrap();
    assert_eq!(pair.way, Verdict::RootComplex);
    assert!(pair.why.contains("redirects (ReqRedir)"), "{}", pair.why);
}

#[test]
fn case_h2_in_nested_switches_the_port_where_requests_turn_decides_and_every_port_between_is_named() {
    let fake = FakeHost::new();
    let port = |kind, acs| FakeFunction { acs, group: Some(90), ..FakeFunction::port(kind) };
    let acs = |control| Some((0x5F, control));
    let nic = FakeFunction { class: 0x02_0000, ats: Some(true), group: Some(1), ..FakeFunction::default() };
    let top = "pci0000:00/0000:00:01.0/0000:01:00.0";
    fake.add("pci0000:00/0000:00:01.0", &port(ROOT_PORT, acs(0)));
    fake.add(top, &port(UPSTREAM, None));
    for (index, turn, below) in [(0, acs(0x1D), acs(0x5D)), (1, acs(0x5D), acs(0x1D))] {
        let (turn_at, up) = (format!("0000:02:0{index}.0"), format!("0000:1{index}:00.0"));
        let path = format!("{top}/{turn_at}/{up}");
        fake.add(&format!("{top}/{turn_at}"), &port(DOWNSTREAM, turn));
        fake.add(&path, &port(UPSTREAM, None));
        fake.add(&format!("{path}/0000:2{index}:00.0"), &port(DOWNSTREAM, below));
        fake.add(&format!("{path}/0000:2{index}:00.0/0000:3{index}:00.0"), &nic);
    }
    let tree = scan_all(fake.sysfs()).unwrap();
    let node = |at: &str| tree.get(at.parse().unwrap()).unwrap();
    let (first, second) = (node("30:00.0"), node("31:00.0"));
    assert_eq!(
        reach::way(&tree, first, second).to_string(),
        "0000:30:00.0 uses ATS, but 0000:02:00.0 redirects translated requests, too (ReqRedir without DirectTrans)"
    );
    assert_eq!(reach::way(&tree, second, first).verdict(), Verdict::Direct);
    let report = report(&fake, &["30:00.0", "31:00.0"], None);
    let pair = report.pairs.first().unwrap();
    let ports: Vec<&str> = pair.ports.iter().map(|port| port.at.as_str()).collect();
    // The root port is not between them.
    assert_eq!((pair.way, ports), (Verdict::RootComplex, vec!["0000:02:00.0", "0000:21:00.0"]));
}

#[test]
fn functions_of_one_device_and_virtual_functions_of_one_reach_each_other_in_it() {
    let fake = host(BEST);
    let path = "pci0000:00/0000:00:02.0";
    let nic = FakeFunction { class: 0x02_0000, group: Some(3), ..FakeFunction::default() };
    fake.add(&format!("{path}/0000:05:00.1"), &nic);
    let function = fake.add(&format!("{path}/0000:05:01.0"), &nic);
    fake.make_virtual(function, "05:00.1".parse().unwrap());
    let report = report(&fake, &["05:00.0", "05:00.1", "05:01.0"], None);
    assert!(report.pairs.iter().all(|pair| pair.way == Verdict::Direct && pair.why == "functions of one device"), "{report}");
}

#[test]
fn devices_that_cannot_be_passed_through_are_all_named_and_the_exit_code_is_2() {
    let fake = host(BEST);
    let bound = FakeFunction { driver: Some("mlx5_core"), group: Some(7), ..FakeFunction::default() };
    fake.add("pci0000:40/0000:40:02.0", &bound);
    fake.add("pci0000:40/0000:40:03.0", &FakeFunction { group: None, ..FakeFunction::default() });
    let report = report(&fake, &["40:02.0", "40:03.0", "77:00.0", "02:01.0", "03:00.0", "03:00.0"], None);
    let text = report.to_string();
    for part in [
        "problem  driver   dev-40:02.0: ",
        "bound to mlx5_core",
        "problem  iommu    dev-40:03.0: ",
        "problem  device   dev-77:00.0: ",
        "problem  device   dev-02:01.0: ",
        "are the same PCI function 0000:03:00.0",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(exit_code(report.severity()), 2);
}

#[test]
fn a_host_without_groups_has_its_iommu_off() {
    let fake = FakeHost::new();
    fake.add("pci0000:00/0000:00:01.0", &FakeFunction { group: None, ..FakeFunction::default() });
    let text = report(&fake, &["00:01.0"], None).to_string();
    assert!(
        text.contains("problem  iommu    dev-00:01.0: 0000:00:01.0 is in no IOMMU group") && text.contains("intel_iommu=on"),
        "{text}"
    );
}

/// Eight GPUs and four NVSwitches, which are the last four devices of the bus.
fn hgx() -> (FakeHost, Vec<String>) {
    let fake = FakeHost::new();
    let mut at = Vec::new();
    for device in 1..=12 {
        let class = if device <= 8 { 0x03_0200 } else { 0x06_8000 };
        let function = FakeFunction { class, group: Some(device), ..FakeFunction::default() };
        at.push(fake.add(&format!("pci0000:00/0000:00:{device:02x}.0"), &function).to_string());
    }
    (fake, at)
}

fn fabric(devices: &[String], nvlink: Option<NvlinkMode>) -> Option<(Severity, String)> {
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let report = report(&hgx().0, &devices, nvlink);
    let finding = report.findings.into_iter().find(|finding| finding.topic == "nvlink")?;
    Some((finding.severity, format!("{} {}", finding.text, finding.remedy.unwrap_or_default())))
}

#[test]
fn case_h6_a_fabric_that_nobody_sets_up_is_warned_of_and_half_of_one_refused_with_what_is_missing() {
    let (_, all) = hgx();
    let (gpus, switches) = all.split_at(8);
    let (two, part) = (gpus.split_at(2).0, [gpus, switches.split_at(2).0].concat());
    for (devices, declared, severity, words) in [
        (all.as_slice(), None, Severity::Note, "runs in the guest"),
        (&all, Some(NvlinkMode::Full), Severity::Note, "runs in the guest"),
        (gpus, None, Severity::Warning, "error 802"),
        (two, None, Severity::Warning, "keeps the NVSwitches 0000:00:09.0, 0000:00:0a.0"),
        (gpus, Some(NvlinkMode::Shared), Severity::Note, "a partition of exactly these GPUs"),
        (two, Some(NvlinkMode::Shared), Severity::Note, "FABRIC_MODE=1"),
        (switches, None, Severity::Note, "FABRIC_MODE=1"),
        (two, Some(NvlinkMode::Off), Severity::Note, "NVreg_NvLinkDisable=1"),
        (&part, None, Severity::Problem, "missing are 0000:00:0b.0, 0000:00:0c.0"),
        (gpus, Some(NvlinkMode::Full), Severity::Problem, "missing are 0000:00:09.0"),
        (two, Some(NvlinkMode::Full), Severity::Problem, "missing are 0000:00:03.0"),
        (&all, Some(NvlinkMode::Shared), Severity::Problem, "stay where Fabric Manager runs"),
    ] {
        let (found, text) = fabric(devices, declared).unwrap();
        assert!(found == severity && text.contains(words), "{} {declared:?} {words}: {found} {text}", devices.len());
    }
    assert!(report(&host(BEST), &["03:00.0"], None).findings.iter().all(|finding| finding.topic != "nvlink"));
}

#[test]
fn json_has_a_result_pairs_with_ports_and_findings_with_remedies() {
    let report = report(&host(Host { nic_port: Some((0x5F, 0x5F)), ..BEST }), &["03:00.0", "04:00.0"], None);
    let value: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(value["result"], "problem");
    assert_eq!(value["devices"][1]["what"], "NIC");
    let pair = &value["pairs"][0];
    assert_eq!((&pair["way"], &pair["a"]), (&"impossible".into(), &"dev-03:00.0".into()));
    assert_eq!(pair["ports"][0]["on"], serde_json::json!(["TransBlk+"]));
    let acs = value["findings"].as_array().unwrap().iter().find(|finding| finding["remedy"].is_string()).unwrap();
    assert_eq!((&acs["topic"], &acs["severity"]), (&"acs".into(), &"warning".into()));
}

#[test]
fn a_recorded_host_is_judged_and_planned_for() {
    let fake = host(BEST);
    let tree = scan_all(fake.sysfs()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), RecordedHost { tree, address_bits: 39 }.to_json().unwrap()).unwrap();
    let mut options = CheckOptions {
        devices: ["03:00.0,id=gpu0", "04:00.0,id=nic0"].map(|device| device.parse().unwrap()).to_vec(),
        given: Vec::new(),
        memory: None,
        pcie: None,
        nvlink: None,
        cdi_dirs: Vec::new(),
        host: Some(PathBuf::from(file.path())),
        json: false,
    };
    let mut text = Vec::new();
    assert_eq!(run(&options, &mut text).unwrap(), 0);
    let text = String::from_utf8(text).unwrap();
    for part in ["gpu0  ", "nic0 direct", "whether they fit was not judged; 39 address bits", "were not judged"] {
        assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(part.trim()), "{part}: {text}");
    }
    options.memory = Some("1T".parse().unwrap());
    let mut text = Vec::new();
    assert_eq!(run(&options, &mut text).unwrap(), 2);
    assert!(String::from_utf8(text).unwrap().contains("problem  space"));
}

#[test]
fn what_is_in_no_recorded_file_is_not_judged() {
    let mut tree = scan_all(host(BEST).sysfs()).unwrap();
    for node in tree.functions.values_mut() {
        (node.driver, node.group, node.bars) = (None, None, [None; 6]);
        node.fabric = Fabric::default();
        node.link = None;
    }
    let wanted = ["03:00.0", "04:00.0"].map(|at| Wanted { name: at.to_owned(), at: at.parse().unwrap() });
    let silence = Silence::of(&tree);
    assert_eq!(silence, Silence { of_use: true, of_registers: true, of_bars: true });
    assert_eq!(devices::findings(&tree, &wanted, silence), []);
    assert_eq!(pairs::findings(&tree, &wanted, silence), []);
    let space = machine::space(&tree, &wanted, 46, Ok(Tops::default()));
    assert_eq!(space[0].severity, Severity::Note);
    assert!(silence.finding().text.contains("drivers, IOMMU groups, registers (access control, ATS), BARs and device nodes"));
    // One driver is enough: whoever recorded this host saw that there are no groups.
    tree.functions.values_mut().next().unwrap().driver = Some("pcieport".to_owned());
    let silence = Silence::of(&tree);
    assert!(!silence.of_use && !silence.of_registers);
    let found = devices::findings(&tree, &wanted, silence);
    assert!(found.iter().any(|finding| finding.severity == Severity::Problem && finding.topic == "iommu"), "{found:?}");
}
