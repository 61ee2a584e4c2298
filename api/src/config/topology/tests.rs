use super::*;
use crate::config::{BarKind, CliqueId, DeviceKind, InterruptConfig, Size};

const SWITCH: &str = r#"
[[root-complex]]
name = "rc0"
node = 1

[[port]]
name = "rp0"
kind = "root-port"
on = "rc0"
device = 4
link = "16GT/s x16"

[[port]]
name = "usp0"
kind = "upstream-port"
on = "rp0"
ids = "10b5:8725"
subsystem = "10b5:8726"

[[device]]
name = "gpu0"
on = "usp0"
function = 1
kind = "stub"
ids = "10de:20b8"
class = "030200"
clique = 3
bars = ["0:16M:mem32", "1:128G:mem64:prefetchable"]
msix = 8
dma = true

[[device]]
name = "nic0"
on = "usp0"
kind = "vfio"
path = "/sys/bus/pci/devices/0000:03:00.0"
"#;

#[test]
fn a_file_is_read_into_plain_data() {
    let topology = TopologyConfig::parse("a.toml", SWITCH).unwrap();
    assert_eq!(topology.root_complexes, [RootComplexConfig { name: "rc0".to_owned(), segment: 0, node: Some(1), bus: None }]);
    let [root_port, upstream] = topology.ports.as_slice() else { panic!("{:?}", topology.ports) };
    assert_eq!((root_port.kind, root_port.device, root_port.ids), (PortKind::RootPort, Some(4), None));
    assert_eq!(upstream.subsystem, Some(IdPair { vendor: 0x10B5, device: 0x8726 }));
    let [gpu, nic] = topology.devices.as_slice() else { panic!("{:?}", topology.devices) };
    assert_eq!((gpu.id.as_deref(), gpu.on.as_deref(), gpu.function), (Some("gpu0"), Some("usp0"), 1));
    assert_eq!(gpu.clique.map(CliqueId::get), Some(3));
    let DeviceKind::Stub(stub) = &gpu.kind else { panic!("{gpu:?}") };
    assert_eq!(stub.interrupt, InterruptConfig::MsiX(8));
    assert_eq!(stub.bars[1].map(|bar| (bar.size, bar.kind)), Some((Size(128 << 30), BarKind::Mem64)));
    assert!(matches!(nic.kind, DeviceKind::Vfio(_)));
}

#[test]
fn the_demo_topology_is_read() {
    let text = include_str!("../../../../resources/topologies/a100x.toml");
    let topology = TopologyConfig::parse("a100x.toml", text).unwrap();
    let named = |name: &str| topology.devices.iter().any(|device| device.id.as_deref() == Some(name));
    assert!(named("gpu0") && named("gpu1"), "{:?}", topology.devices);
}

#[test]
fn faults_are_named_with_their_line() {
    let root = "[[root-complex]]\nname = \"rc0\"\n";
    for (text, line, part) in [
        ("[[root-complex]]\nsegment = 1\n", 1, "missing field `name`"),
        ("[[root-complex]]\nname = \"rc0\"\ncolour = 1\n", 3, "unknown field `colour`"),
        ("[[root-complex]]\nname = \"rc0\"\nname = \"rc1\"\n", 3, "duplicate key"),
        ("[[root-complex]]\nname = \"rc0\"\nsegment = 65536\n", 3, "65536"),
        ("[[switch]]\nname = \"a\"\n", 1, "unknown field `switch`"),
        ("name = \n", 1, ""),
        ("[[port]]\nname = \"p\"\non = \"rc0\"\nkind = \"port\"\n", 4, "unknown variant `port`"),
        ("[[device]]\nname = \"d\"\non = \"p\"\nkind = \"stub\"\nclique = 16\n", 5, "clique 16 does not exist"),
        ("[[device]]\nname = \"d\"\non = \"p\"\nkind = \"stub\"\nids = \"10de\"\n", 5, "`10de` is no pair of ids"),
        ("[[device]]\nname = \"d\"\non = \"p\"\n", 1, "no device is named"),
        ("[[device]]\nname = \"d\"\non = \"p\"\nkind = \"stub\"\nbars = [\"9:4K:mem32\"]\n", 5, "`9` is no BAR number"),
    ] {
        match TopologyConfig::parse("a.toml", text) {
            Err(TopologyFileError::Syntax { file, line: found, what }) => {
                assert_eq!((file.as_str(), found), ("a.toml", line), "{text}: {what}");
                assert!(what.contains(part), "{text}: {what}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    for (device, key) in [("on = \"rc0\"\nkind = \"stub\"\n", "name"), ("name = \"d\"\nkind = \"stub\"\n", "on")] {
        let error = TopologyConfig::parse("a.toml", &format!("{root}\n[[device]]\n{device}")).unwrap_err();
        assert_eq!(error, TopologyFileError::Missing { file: "a.toml".to_owned(), line: 4, key });
    }
}

#[test]
fn a_file_without_a_root_complex_is_refused() {
    assert!(TopologyConfig::parse("a.toml", "").unwrap_err().to_string().contains("a.toml has no root complex"));
}

mod any_text {
    use proptest::prelude::*;

    use super::super::TopologyConfig;

    proptest! {
        #[test]
        fn gives_an_answer(text in "(\\[\\[(device|port|root-complex)\\]\\]\n|[a-z]{1,6} = (\"[a-z:0-9]{0,9}\"|[0-9-]{1,20}|\\[\\])\n|.){0,12}") {
            let _ = TopologyConfig::parse("a.toml", &text);
        }
    }
}

#[test]
fn a_port_says_what_it_keeps_for_devices_that_come_only_where_they_can() {
    let file = |keys: &str| {
        format!("[[root-complex]]\nname = \"rc0\"\n[[port]]\nname = \"p\"\nkind = \"root-port\"\non = \"rc0\"\n{keys}\n")
    };
    let keys = "mem = \"256G\"\nmem32 = \"64M\"\nbuses = 4\nremoval = \"orderly\"";
    let read = TopologyConfig::parse("f", &file(&format!("hotplug = true\n{keys}"))).unwrap();
    let port = &read.ports[0];
    assert_eq!((port.hotplug, port.mem, port.mem32), (true, Some(Size(256 << 30)), Some(Size(64 << 20))));
    assert_eq!((port.buses.map(NonZeroU8::get), port.removal), (Some(4), Some(Removal::Orderly)));
    for line in keys.lines() {
        let refused = TopologyConfig::parse("f", &file(line)).unwrap_err().to_string();
        let key = line.split(' ').next().unwrap();
        assert!(refused.contains(&format!("line 3: `{key}` of a port has no effect without `hotplug = true`")), "{refused}");
    }
    assert!(TopologyConfig::parse("f", &file("hotplug = true\nbuses = 0")).is_err());
}
