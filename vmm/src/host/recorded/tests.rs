use pci::bar::{BarKind, BarSpec};

use super::*;
use crate::host::fake::{DOWNSTREAM, FakeFunction, FakeHost, ROOT_PORT, UPSTREAM};
use crate::host::scan::scan_all;

fn recorded() -> RecordedHost {
    let host = FakeHost::new();
    let port = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0";
    host.add("pci0000:00/0000:00:01.0", &FakeFunction::port(ROOT_PORT));
    host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &FakeFunction::port(UPSTREAM));
    host.add(port, &FakeFunction::port(DOWNSTREAM));
    let physical = host.add(&format!("{port}/0000:03:00.0"), &FakeFunction::default());
    let function = host.add(&format!("{port}/0000:03:00.4"), &FakeFunction { driver: None, ..FakeFunction::default() });
    host.make_virtual(function, physical);
    host.add("pci10000:00/10000:00:02.0", &FakeFunction { numa_node: -1, group: None, ..FakeFunction::default() });
    let mut tree = scan_all(host.sysfs()).unwrap();
    let bars = &mut tree.functions.get_mut(&physical).unwrap().bars;
    bars[0] = Some(BarSpec { kind: BarKind::Memory32, prefetchable: false, size: 16 << 20 });
    bars[1] = Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size: 128 << 30 });
    let near = HostMemoryNode { cpus: "0-3,8".parse().unwrap(), memory: 1 << 38, distances: [(0, 10), (1, 21)].into() };
    tree.memory_nodes = [(0, near), (1, HostMemoryNode::default())].into();
    RecordedHost { tree, address_bits: 46 }
}

fn error(text: &str) -> String {
    let mut error: Box<dyn std::error::Error> = Box::new(RecordedHost::from_json(text).unwrap_err());
    let mut told = error.to_string();
    while let Some(cause) = error.source() {
        told = format!("{told}: {cause}");
        error = cause.to_string().into();
    }
    told
}

#[test]
fn a_recorded_host_is_read_back_as_it_was() {
    let host = recorded();
    assert_eq!(host.tree.functions.len(), 6);
    let text = host.to_json().unwrap();
    assert_eq!(RecordedHost::from_json(&text).unwrap(), host);
    assert_eq!(RecordedHost::from_json(&text).unwrap().to_json().unwrap(), text);
}

#[test]
fn a_file_that_is_no_host_is_refused_with_the_place() {
    assert!(error("").contains("it is empty"));
    assert!(error("{\n \"banyan-host\": 1, \"serial\": 3}").contains("unknown field `serial`"));
    assert!(error(r#"{"banyan-host": 9, "address-bits": 46, "functions": []}"#).contains("banyan-host is 9"));
    assert!(error(r#"{"banyan-host": 1, "address-bits": 7, "functions": []}"#).contains("address-bits is 7"));
}

#[test]
fn each_field_says_what_it_takes() {
    let text = recorded().to_json().unwrap();
    for (from, to, told) in [
        ("\"class\": \"030200\"", "\"class\": \"3\"", "class is `3`"),
        ("\"ids\": \"10de:2330\"", "\"ids\": \"10de\"", "ids is `10de`"),
        ("16GT/s x16", "16GT/s x3", "no link"),
        ("\"0-3,8\"", "\"3-0\"", "memory node 0: `3-0` is no list"),
        ("\"id\": 1", "\"id\": 0", "memory node 0 is there twice"),
        ("\"bar\": 1", "\"bar\": 6", "BAR 6"),
        ("\"bar\": 1", "\"bar\": 0", "BAR 0"),
        ("\"size\": 16777216", "\"size\": 0", "BAR 0 of 0 bytes"),
        ("\"max-payload\": 512", "\"max-payload\": 100", "payload of 100"),
        ("\"at\": \"0000:03:00.4\"", "\"at\": \"0000:03:00.9\"", "0000:03:00.9"),
        ("\"at\": \"0000:03:00.4\"", "\"at\": \"0000:03:00.0\"", "twice"),
        ("\"on\": \"0000:02:00.0\"", "\"on\": \"0000:09:00.0\"", "is not there"),
        ("\"on\": \"0000:02:00.0\"", "\"on\": \"10000:00:02.0\"", "is an endpoint"),
        ("\"on\": \"pci0000:00\"", "\"on\": \"0000:02:00.0\"", "hangs on itself"),
        ("\"on\": \"pci0000:00\"", "\"on\": \"pci<0>\"", "no root complex"),
        ("\"on\": \"pci0000:00\"", "\"on\": \"pci00\"", "no root complex"),
    ] {
        assert!(text.contains(from), "{from}");
        let told_really = error(&text.replacen(from, to, 1));
        assert!(told_really.contains(told), "{to}: {told_really}");
    }
}

#[test]
fn everything_that_a_scan_finds_is_kept() {
    let host = FakeHost::new();
    let port = FakeFunction { acs: Some((0x5F, 0x1D)), ..FakeFunction::port(ROOT_PORT) };
    host.add("pci0000:00/0000:00:01.0", &port);
    let nic = FakeFunction { ats: Some(true), sriov: Some((16, 2)), ..FakeFunction::default() };
    host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &nic);
    host.add_node(0, "10 21");
    host.add_node(3, "21 10");
    let host = RecordedHost { tree: scan_all(host.sysfs()).unwrap(), address_bits: 46 };
    let text = host.to_json().unwrap();
    assert_eq!(RecordedHost::from_json(&text).unwrap(), host);
    for part in ["\"acs\": {", "\"control\": \"001d\"", "\"max-read-request\": 4096", "\"cpus\": \"3\"", "\"sr-iov\""] {
        assert!(text.contains(part), "{part}: {text}");
    }
    for (from, to, told) in [
        ("\"001d\"", "\"1d\"", "acs is `1d`"),
        ("\"max-read-request\": 4096", "\"max-read-request\": 5", "payload of 5"),
        ("\"config-bytes\": 4096", "\"config-bytes\": 4097", "config-bytes is 4097: the most is 4096"),
    ] {
        assert!(text.contains(from), "{from}");
        let told_really = error(&text.replacen(from, to, 1));
        assert!(told_really.contains(told), "{to}: {told_really}");
    }
}

#[test]
fn files_of_version_1_are_read() {
    let text = recorded().to_json().unwrap().replace("\"banyan-host\": 2", "\"banyan-host\": 1");
    assert!(RecordedHost::from_json(&text).is_ok());
}
