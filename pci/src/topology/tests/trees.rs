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
    Topology { root_complexes: vec![root_complex("rc0"), rc1], nodes }
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
    assert_eq!(Tree { plan: &empty, label: &|_| String::new(), verbose: false }.to_string(), "-[0000:00]-\n");
}

#[test]
fn the_long_form_lists_every_number() {
    let plan = nested().plan(&roomy()).unwrap();
    let shown = Tree { plan: &plan, label: &label, verbose: true }.to_string();
    let (_, list) = shown.split_once("\n\n").unwrap();
    assert_eq!(list, include_str!("long_form.txt"));
}
