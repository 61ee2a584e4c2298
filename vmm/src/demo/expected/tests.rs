use api::config::{TopologyConfig, VmConfig};

use super::*;
use crate::demo::TOPOLOGY;
use crate::demo::compare::{Comparison, Pair, Side};
use crate::plan::{self, Limits};
use crate::spec::{self, Host};

/// The report on the machine with this topology file.
fn lines(toml: &str) -> Vec<String> {
    let topology = TopologyConfig::parse("test.toml", toml).unwrap();
    let config = VmConfig { topology: Some(topology), ..VmConfig::default() };
    let spec = spec::spec(&config, &Host::default()).unwrap();
    let limits = Limits { ram: 64 << 20, growth: 0, address_bits: 46, amd: false, firmware: 0 };
    report(&plan::plan(&spec.topology, &limits).unwrap(), &spec, false).unwrap()
}

/// The lines that speak of `place`, without the words in front of it and itself.
fn of(lines: &[String], topic: &str, place: &str) -> Vec<String> {
    let front = format!("{topic} {place} ");
    lines.iter().filter_map(|line| line.strip_prefix(&front)).map(str::to_owned).collect()
}

fn count(lines: &[String], topic: &str) -> usize {
    lines.iter().filter(|line| line.split(' ').next() == Some(topic)).count()
}

const ROOT: &str = "[[root-complex]]\nname = 'rc0'\n";

#[test]
fn the_demonstration_has_20_functions_and_a_ring_of_4_copies() {
    let lines = lines(TOPOLOGY);
    for (topic, expected) in
        [("function", 20), ("bridge", 12), ("bar", 12), ("link", 20), ("clique", 6), ("dma", 4), ("interrupt", 4)]
    {
        assert_eq!(count(&lines, topic), expected, "{topic}");
    }
    assert_eq!(lines.last().map(String::as_str), Some("end functions=20"));
    let peers: Vec<&str> =
        lines.iter().filter(|line| line.starts_with("dma ")).flat_map(|line| line.split("peer=").skip(1)).collect();
    assert_eq!(peers, ["06:00.0 result=ok", "09:00.0 result=ok", "0c:00.0 result=ok", "03:00.0 result=ok"]);
    assert_eq!(
        of(&lines, "function", "06:00.0"),
        ["id=10de:20b8 subsystem=10de:1463 class=030200 type=endpoint multi-function=no"]
    );
    assert_eq!(of(&lines, "capabilities", "06:00.0"), ["standard=express,msix,clique extended=aer"]);
    assert_eq!(of(&lines, "clique", "06:00.0"), ["id=0 at=c8"]);
    assert_eq!(of(&lines, "interrupt", "06:00.0"), ["kind=msix vector=7 result=received"]);
}

#[test]
fn each_kind_of_port_has_its_registers() {
    let lines = lines(&format!(
        "{ROOT}
        [[port]]\nname = 'rp'\nkind = 'root-port'\non = 'rc0'\ndevice = 3\nlink = '8GT/s x8'
        [[port]]\nname = 'up'\nkind = 'upstream-port'\non = 'rp'\nids = '15b3:1978'\nlink = '8GT/s x8'
        [[port]]\nname = 'down'\nkind = 'downstream-port'\non = 'up'\ndevice = 2\nids = '15b3:1978'\nsubsystem = '15b3:0001'
        "
    ));
    let identity = |place| of(&lines, "function", place).concat();
    assert_eq!(identity("00:03.0"), "id=1b36:10ba subsystem=1af4:1100 class=060400 type=root-port multi-function=no");
    assert_eq!(identity("01:00.0"), "id=15b3:1978 subsystem=none class=060400 type=upstream-port multi-function=no");
    assert_eq!(identity("02:02.0"), "id=15b3:1978 subsystem=15b3:0001 class=060400 type=downstream-port multi-function=no");
    let capabilities = |place| of(&lines, "capabilities", place).concat();
    assert_eq!(capabilities("00:03.0"), "standard=express,msi,subsystem,power extended=aer,acs,serial");
    assert_eq!(capabilities("01:00.0"), "standard=express,power extended=aer,serial");
    assert_eq!(capabilities("02:02.0"), "standard=express,msi,subsystem,power extended=aer,acs,serial");
    let interrupts = |place| of(&lines, "interrupts", place).concat();
    assert_eq!(["00:03.0", "01:00.0", "02:02.0"].map(interrupts), ["msi=1 msix=0 pin=A", "", "msi=1 msix=0 pin=none"]);
    let link = |place| of(&lines, "link", place).concat();
    assert_eq!(link("00:03.0"), "max=8GT/s,x8 now=8GT/s,x8");
    assert_eq!(link("02:02.0"), "max=32GT/s,x16 now=2.5GT/s,x0", "nothing is below");
    assert_eq!(of(&lines, "bridge", "00:03.0"), ["primary=00 secondary=01 subordinate=03 io=none memory=none prefetchable=none"]);
}

#[test]
fn stubs_without_a_link_or_with_other_interrupts_are_known() {
    let lines = lines(&format!(
        "{ROOT}
        [[port]]\nname = 'rp'\nkind = 'root-port'\non = 'rc0'\ndevice = 1
        [[device]]\nname = 'wire'\non = 'rc0'\ndevice = 2\nkind = 'stub'\nintx = 'B'\nbars = ['0:64K:mem32', '1:64:io', '2:64K:mem32']\ndma = true
        [[device]]\nname = 'quiet'\non = 'rc0'\ndevice = 3\nkind = 'stub'
        [[device]]\nname = 'messages'\non = 'rp'\nkind = 'stub'\nmsi = 4\nbars = ['0:8K:mem32', '1:64:io', '2:32M:mem64:prefetchable']\ndma = true
        [[device]]\nname = 'other'\non = 'rp'\nfunction = 1\nkind = 'stub'
        "
    ));
    assert_eq!(
        of(&lines, "function", "00:02.0"),
        ["id=1b36:10bd subsystem=1af4:1100 class=088000 type=integrated-endpoint multi-function=no"]
    );
    assert_eq!(of(&lines, "link", "00:02.0"), ["max=none,x0 now=none,x0"]);
    assert_eq!(of(&lines, "capabilities", "00:02.0"), ["standard=express extended=none"]);
    assert_eq!(of(&lines, "interrupts", "00:02.0"), ["msi=0 msix=0 pin=B"]);
    assert_eq!(of(&lines, "interrupts", "00:03.0"), Vec::<String>::new());
    assert_eq!(of(&lines, "interrupts", "01:00.0"), ["msi=4 msix=0 pin=none"]);
    assert!(of(&lines, "function", "01:00.0").concat().ends_with("multi-function=yes"));
    assert!(of(&lines, "function", "01:00.1").concat().ends_with("multi-function=no"));
    let bars = of(&lines, "bar", "01:00.0");
    assert_eq!(bars.get(1).map(String::as_str), Some("1 type=io prefetchable=no base=0 size=40"), "no port forwards I/O");
    // Of equal areas the first one copies; what has no message has no interrupt to wait for.
    let base = |place, bar: usize| {
        let text =
            of(&lines, "bar", place).get(bar).and_then(|line| Some(line.split_once("base=")?.1.split(' ').next()?.to_owned()));
        u64::from_str_radix(&text.unwrap(), 16).unwrap()
    };
    let (wire, messages) = (base("00:02.0", 0) + (32 << 10), base("01:00.0", 2) + (16 << 20));
    let copy = |from, to, peer| vec![format!("from={from:x} to={to:x} bytes=1024 peer={peer} result=ok")];
    assert_eq!(of(&lines, "dma", "00:02.0"), copy(wire, messages + 0x1000, "01:00.0"));
    assert_eq!(of(&lines, "dma", "01:00.0"), copy(messages, wire + 0x1000, "00:02.0"));
    assert_eq!(
        (count(&lines, "interrupt"), of(&lines, "interrupt", "01:00.0").concat()),
        (1, "kind=msi vector=0 result=received".into())
    );
}

#[test]
fn other_segments_come_in_their_order_with_their_number() {
    let lines = lines(
        "[[root-complex]]\nname = 'far'\nsegment = 1
        [[root-complex]]\nname = 'near'
        [[device]]\nname = 'a'\non = 'far'\ndevice = 2\nkind = 'stub'
        [[device]]\nname = 'b'\non = 'near'\ndevice = 3\nkind = 'stub'",
    );
    let segments: Vec<&str> = lines.iter().filter(|line| line.starts_with("segment")).map(String::as_str).collect();
    assert!(
        segments.len() == 2 && segments[0].starts_with("segment 0000 ecam=") && segments[1].ends_with("buses=00-00"),
        "{segments:?}"
    );
    let functions: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("function ")?.split(' ').next()).collect();
    assert_eq!(functions, ["00:03.0", "0001:00:02.0"]);
}

#[test]
fn a_tampered_topology_does_not_agree() {
    let planned = lines(TOPOLOGY).join("\n");
    for (from, to, subject) in [
        ("subsystem = \"10de:1463\"", "subsystem = \"10de:1464\"", "function 06:00.0"),
        ("0:16M:mem32", "0:32M:mem32", "bar 06:00.0"),
        ("clique = 0", "clique = 3", "clique 03:00.0"),
        ("16GT/s x16", "16GT/s x8", "link 00:04.0"),
        ("msix = 16", "msix = 15", "interrupts 03:00.0"),
        ("device = 8", "device = 9", "function 05:08.0"),
    ] {
        let tampered = TOPOLOGY.replacen(from, to, 1);
        assert_ne!(tampered, TOPOLOGY, "{from}");
        let seen = lines(&tampered).join("\n");
        let comparison = Comparison::new(Side { tree: "", report: &planned }, Side { tree: "", report: &seen });
        assert_eq!(comparison.exit_code(), 1, "{from}");
        let differs = |pair: &Pair<'_>| !pair.agrees() && pair.planned.is_some_and(|line| line.starts_with(subject));
        assert!(comparison.pairs.iter().any(differs), "{subject} is to differ with {to}");
        let same = Comparison::new(Side { tree: "", report: &seen }, Side { tree: "", report: &seen });
        assert_eq!(same.exit_code(), 0);
    }
}

#[test]
fn endpoints_that_are_no_stubs_are_refused() {
    let disk = "path=a.img,id=root".parse().unwrap();
    let config = VmConfig { disks: vec![disk], ..VmConfig::default() };
    let spec = spec::spec(&config, &Host::default()).unwrap();
    let limits = Limits { ram: 64 << 20, growth: 0, address_bits: 46, amd: false, firmware: 0 };
    let machine = plan::plan(&spec.topology, &limits).unwrap();
    let error = report(&machine, &spec, false).unwrap_err();
    assert!(error.to_string().contains("root"), "{error}");
}
