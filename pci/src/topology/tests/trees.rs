//! How plans are printed.

use super::*;

fn nested() -> Topology {
    let mut host = downstream("dp1", "up");
    if let NodeKind::Port(port) = &mut host.kind {
        port.ids = Some(Ids { vendor: 0x1000, device: 0xC030, ..Ids::default() });
        port.link = Link::at("16GT/s x8".parse().unwrap());
        port.link.max = "32GT/s x16".parse().unwrap();
    }
    let mut nodes = vec![
        endpoint("console", "rc0", &[io(32), mem32(4096)]),
        at(root_port("rp0", "rc0"), 4, 0),
        upstream("up", "rp0"),
        downstream("dp0", "up"),
        host,
        endpoint("gpu0", "dp0", &[mem32(16 * MIB), mem64(128 * GIB), mem64(32 * MIB)]),
        endpoint("nic0", "dp1", &[mem64(32 * MIB), io(32)]),
        function(endpoint("nic1", "dp1", &[mem64(32 * MIB)]), 1),
        root_port("rp1", "rc1"),
    ];
    nodes.push(root_port("rp2", "rc1"));
    nodes.push(endpoint("gpu1", "rp2", &[]));
    let rc1 = RootComplexSpec { node: Some(1), segment: 1, ..root_complex("rc1") };
    Topology { root_complexes: vec![root_complex("rc0"), rc1], nodes, spare_numbers: 0 }
}

fn label(function: &PlannedFunction) -> String {
    if function.name.0.starts_with("gpu") { "clique 0".to_owned() } else { String::new() }
}

#[test]
fn the_short_form_is_drawn_as_lspci_draws_it() {
    let plan = nested().plan(&roomy()).unwrap();
    let shown = Tree { plan: &plan, label: &label, verbose: false }.to_string();
    let expected = r"
-+-[0000:00]-+-00.0  console 10de:20b8
 |           \-04.0-[01-04]----00.0-[02-04]--+-00.0-[03]----00.0  gpu0 10de:20b8, clique 0
 |                                           \-01.0-[04]--+-00.0  nic0 10de:20b8
 |                                                        \-00.1  nic1 10de:20b8
 \-[0001:00]-+-00.0-[01]--
             \-01.0-[02]----00.0  gpu1 10de:20b8, clique 0
";
    assert_eq!(format!("\n{shown}"), expected);
}

#[test]
fn one_root_complex_with_one_function_is_one_line() {
    let plan = topology(vec![endpoint("e", "rc0", &[])]).plan(&roomy()).unwrap();
    let shown = Tree { plan: &plan, label: &|_| String::new(), verbose: false }.to_string();
    assert_eq!(shown, "-[0000:00]---00.0  e 10de:20b8\n");
    let empty = topology(Vec::new()).plan(&roomy()).unwrap();
    assert_eq!(Tree { plan: &empty, label: &|_| String::new(), verbose: false }.to_string(), "-[0000:00]-  no devices\n");
}

#[test]
fn a_conventional_bus_is_drawn_with_its_devices() {
    let nodes = vec![root_port("rp", "rc0"), pci_bridge("pb", "rp"), endpoint("a", "pb", &[]), endpoint("b", "pb", &[])];
    let plan = topology(nodes).plan(&roomy()).unwrap();
    let shown = Tree { plan: &plan, label: &|_| String::new(), verbose: true }.to_string();
    let drawing = r"
-[0000:00]---00.0-[01-02]----00.0-[02]--+-00.0  a 10de:20b8
                                        \-01.0  b 10de:20b8
";
    assert!(format!("\n{shown}").starts_with(drawing), "{shown}");
    assert!(shown.contains("0000:01:00.0  pb: PCIe-to-PCI bridge 1b36:10bf, buses 02, link 32GT/s x16\n"), "{shown}");
}

#[test]
fn the_long_form_lists_every_number() {
    let plan = nested().plan(&roomy()).unwrap();
    let shown = Tree { plan: &plan, label: &label, verbose: true }.to_string();
    let (_, list) = shown.split_once("\n\n").unwrap();
    assert_eq!(list, include_str!("long_form.txt"));
}

/// A converged card: a switch with network functions on one port and, behind an inner switch, a GPU on the other.
fn card(index: u8) -> Vec<NodeSpec> {
    let name = |part: &str| format!("{part}{index}");
    let nic = |part: &str| endpoint(&name(part), &name("nicport"), &[mem64(32 * MIB)]);
    vec![
        at(root_port(&name("rp"), "rc0"), 4 + index, 0),
        upstream(&name("up"), &name("rp")),
        at(downstream(&name("nicport"), &name("up")), 0, 0),
        at(downstream(&name("inner"), &name("up")), 1, 0),
        nic("a"),
        function(nic("b"), 1),
        function(nic("c"), 2),
        upstream(&name("innerup"), &name("inner")),
        at(downstream(&name("gpuport"), &name("innerup")), 8, 0),
        endpoint(&name("gpu"), &name("gpuport"), &[mem32(16 * MIB), mem64(128 * GIB), mem64(32 * MIB)]),
    ]
}

#[test]
fn two_converged_cards_keep_the_shape_of_their_host() {
    let topology = topology([card(0), card(1)].concat());
    let plan = topology.plan(&roomy()).unwrap();
    assert_sound(&topology, &plan, &roomy());
    let shown = Tree { plan: &plan, label: &|_| String::new(), verbose: false }.to_string();
    let expected = r"
-[0000:00]-+-04.0-[01-06]----00.0-[02-06]--+-00.0-[03]--+-00.0  a0 10de:20b8
           |                               |            +-00.1  b0 10de:20b8
           |                               |            \-00.2  c0 10de:20b8
           |                               \-01.0-[04-06]----00.0-[05-06]----08.0-[06]----00.0  gpu0 10de:20b8
           \-05.0-[07-0c]----00.0-[08-0c]--+-00.0-[09]--+-00.0  a1 10de:20b8
                                           |            +-00.1  b1 10de:20b8
                                           |            \-00.2  c1 10de:20b8
                                           \-01.0-[0a-0c]----00.0-[0b-0c]----08.0-[0c]----00.0  gpu1 10de:20b8
";
    assert_eq!(format!("\n{shown}"), expected);
}
