use arch::memory_map::GIB;
use pci::topology::Parent;

use super::*;
use crate::host::fake::{DOWNSTREAM, FakeFunction, FakeHost, ROOT_PORT, UPSTREAM};
use crate::host::look_in;
use crate::host::scan::scan_all;
use crate::host::tree::HostMemoryNode;
use crate::plan::{self, Limits};
use crate::spec::{Spec, SpecError, spec};

fn nic() -> FakeFunction<'static> {
    FakeFunction { vendor: 0x15B3, device: 0x1021, class: 0x02_0000, ..FakeFunction::default() }
}

/// Below `root`: a switch with a GPU at `bus + 3` and a network card at `bus + 4`.
fn board(host: &FakeHost, root: &str, bus: u8, numa_node: i32) {
    let port = |kind| FakeFunction { numa_node, ..FakeFunction::port(kind) };
    let root_port = format!("{root}/0000:{bus:02x}:01.0");
    host.add(&root_port, &port(ROOT_PORT));
    let switch = format!("{root_port}/0000:{:02x}:00.0", bus + 1);
    host.add(&switch, &port(UPSTREAM));
    for (number, below) in [(0, FakeFunction::default()), (1, nic())] {
        let down = format!("{switch}/0000:{:02x}:0{number}.0", bus + 2);
        host.add(&down, &port(DOWNSTREAM));
        let at = format!("{down}/0000:{:02x}:00.0", bus + 3 + number);
        host.add(&at, &FakeFunction { numa_node, group: Some(u32::from(bus + number)), ..below });
    }
}

fn memory_node(cpus: &str, memory: u64, distances: &[(u32, u8)]) -> HostMemoryNode {
    HostMemoryNode { cpus: cpus.parse().unwrap(), memory, distances: distances.iter().copied().collect() }
}

/// Two sockets, each with a board.
fn two_sockets() -> HostTree {
    let host = FakeHost::new();
    board(&host, "pci0000:00", 0x00, 0);
    board(&host, "pci0000:80", 0x80, 1);
    let mut tree = scan_all(host.sysfs()).unwrap();
    tree.memory_nodes =
        [(0, memory_node("0-31", 64 * GIB, &[(0, 10), (1, 32)])), (1, memory_node("32-63", 64 * GIB, &[(0, 32), (1, 10)]))]
            .into();
    tree
}

fn machine(cpus: u8, memory: &str, numa: &[&str], devices: &[&str], topology: &str) -> VmConfig {
    VmConfig {
        cpus: cpus.to_string().parse().unwrap(),
        memory: memory.parse().unwrap(),
        numa: NumaConfig::new(numa.iter().map(|text| text.parse().unwrap()).collect()).unwrap(),
        devices: devices.iter().map(|text| text.parse().unwrap()).collect(),
        pcie: topology.parse().unwrap(),
        ..VmConfig::default()
    }
}

fn planned(config: &VmConfig, tree: &HostTree) -> (Spec, MachinePlan) {
    let spec = spec(config, &look_in(tree, config).unwrap()).unwrap();
    let limits = Limits { ram: config.memory.size.bytes(), growth: 0, address_bits: 46, amd: false, firmware: 0 };
    let plan = plan::plan(&spec.topology, &limits).unwrap();
    (spec, plan)
}

/// The node that a guest finds for the device `name`: that of its root complex.
fn node_of(plan: &MachinePlan, name: &str) -> Option<u32> {
    let mut on = plan.pci.by_name(name).unwrap().on;
    loop {
        on = match on {
            Parent::RootComplex(index) => return plan.pci.root_complexes[index].node,
            Parent::Port(id) => plan.pci.functions.iter().find(|function| function.id == id).unwrap().on,
        };
    }
}

fn acpi(spec: &Spec, plan: &MachinePlan) -> Vec<Node> {
    acpi_nodes(spec.numa.as_ref(), &spec.processors, plan)
}

fn refused(config: &VmConfig, tree: &HostTree) -> String {
    match spec(config, &look_in(tree, config).unwrap()) {
        Err(SpecError::Numa(error)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn case_i1_no_endpoint_is_left_without_a_node_and_each_has_that_of_the_host() {
    let tree = two_sockets();
    let devices =
        ["0000:03:00.0,id=gpu0", "0000:04:00.0,id=nic0", "0000:83:00.0,id=gpu1", "0000:84:00.0,id=nic1", "stub,id=stub"];
    for topology in ["host", "root-ports", "flat"] {
        let (spec, plan) = planned(&machine(5, "8G", &["host"], &devices, topology), &tree);
        for (name, node) in [("gpu0", 0), ("nic0", 0), ("gpu1", 1), ("nic1", 1), ("stub", 0)] {
            assert_eq!(node_of(&plan, name), Some(node), "{topology}: {name}");
        }
        // As ACPI tells it: every root bridge has a node, every node its processors and memory, distances are the host's.
        assert!(plan.root_bridges().iter().all(|bridge| bridge.proximity.is_some_and(|node| node < 2)));
        let nodes = acpi(&spec, &plan);
        assert_eq!(nodes.iter().map(|node| node.cpus.as_slice()).collect::<Vec<_>>(), [&[0, 1, 2][..], &[4, 5]]);
        assert_eq!(nodes.iter().map(|node| node.distances.as_slice()).collect::<Vec<_>>(), [[10, 32], [32, 10]]);
        let sizes = nodes.iter().map(|node| node.memory.iter().map(Range::len).sum::<u64>());
        assert_eq!(sizes.collect::<Vec<_>>(), [4 * GIB; 2]);
    }
}

#[test]
fn case_i2_two_root_complexes_of_one_node_stay_two_with_one_node() {
    let host = FakeHost::new();
    board(&host, "pci0000:00", 0x00, 0);
    board(&host, "pci0000:40", 0x40, 0);
    let tree = scan_all(host.sysfs()).unwrap();
    let devices = ["0000:03:00.0,id=near", "0000:04:00.0,id=nic", "0000:43:00.0,id=far"];
    let (spec, plan) = planned(&machine(2, "2G", &["host"], &devices, "host"), &tree);
    assert_eq!(plan.pci.root_complexes.iter().map(|root| root.node).collect::<Vec<_>>(), [Some(0), Some(0)]);
    assert_eq!((acpi(&spec, &plan).len(), spec.notes), (1, Vec::<String>::new()));
    let root = |name: &str| plan.pci.by_name(name).unwrap().at.bdf.bus() >= plan.pci.root_complexes[1].buses.secondary;
    assert_eq!((root("near"), root("nic"), root("far")), (false, false, true));
}

#[test]
fn memory_is_shared_out_in_order_of_address_around_the_hole() {
    let tree = two_sockets();
    let nodes = ["0,cpus=0,memory=3G,host-node=1", "1,memory=1G,host-node=0,policy=preferred", "2"];
    let config = machine(1, "4G", &nodes, &[], "root-ports");
    let (spec, plan) = planned(&config, &tree);
    let range = |start: u64, end: u64| Range { start: start * GIB, end: end * GIB };
    let numa = spec.numa.unwrap();
    assert_eq!(numa.memory(&plan.map), [vec![range(0, 2), range(4, 5)], vec![range(5, 6)], vec![]]);
    let bound = |start, end, node, policy| Binding { range: range(start, end), node, policy };
    assert_eq!(
        numa.bindings(&plan.map),
        [bound(0, 2, 1, MemoryPolicy::Bind), bound(4, 5, 1, MemoryPolicy::Bind), bound(5, 6, 0, MemoryPolicy::Preferred)]
    );
    assert_eq!(numa.pinned_to(0).unwrap().to_string(), "32-63");
    // Nodes of the host are as far as the host says, others as far as by default.
    assert_eq!(numa.nodes[0].distances, [10, 32, 20]);
    assert_eq!(plan.pci.root_complexes[0].node, Some(0));
}

#[test]
fn distances_hold_in_both_directions_unless_both_are_given() {
    let nodes = ["0,cpus=0,memory=1G,distance=[1:15,2:17]", "1,cpus=1,distance=0:16", "2,cpus=2"];
    let numa = resolve(&machine(3, "1G", &nodes, &[], "flat"), &Host::default()).unwrap().unwrap();
    let rows: Vec<_> = numa.nodes.iter().map(|node| node.distances.clone()).collect();
    assert_eq!(rows, [[10, 15, 17], [16, 10, 20], [17, 20, 10]]);
}

#[test]
fn processors_that_come_later_are_shared_out_as_those_of_the_start() {
    let tree = two_sockets();
    let mut config = machine(3, "1G", &["host"], &["0000:03:00.0", "0000:83:00.0"], "host");
    config.cpus.max = Some(8);
    let numa = resolve(&config, &look_in(&tree, &config).unwrap()).unwrap().unwrap();
    assert_eq!(numa.nodes.iter().map(|node| node.cpus.to_string()).collect::<Vec<_>>(), ["0-1,3-5", "2,6-7"]);
}

#[test]
fn a_device_without_a_node_or_of_a_host_node_that_no_guest_node_stands_for_is_told_so() {
    let host = FakeHost::new();
    board(&host, "pci0000:00", 0x00, 0);
    board(&host, "pci0000:40", 0x40, -1);
    board(&host, "pci0000:80", 0x80, 2);
    let mut tree = scan_all(host.sysfs()).unwrap();
    tree.memory_nodes = (0..3).map(|id| (id, memory_node("", 0, &[(0, 32), (1, 12), (2, 32)]))).collect();
    let devices = ["0000:03:00.0,id=a", "0000:43:00.0,id=b", "0000:83:00.0,id=c"];
    let nodes = ["0,cpus=0,memory=512M,host-node=0", "1,host-node=1"];
    let (spec, plan) = planned(&machine(1, "512M", &nodes, &devices, "host"), &tree);
    assert_eq!(["a", "b", "c"].map(|name| node_of(&plan, name)), [Some(0), None, Some(1)]);
    assert!(spec.notes.iter().any(|note| note.starts_with("c is near to host node 2, which no guest node")), "{:?}", spec.notes);
    // Without any node there is nothing to copy.
    let (spec, _) = planned(&machine(1, "512M", &["host"], &["0000:43:00.0"], "host"), &tree);
    assert_eq!(spec.numa, None);
    assert!(spec.notes.iter().any(|note| note.contains("no device tells its memory node")), "{:?}", spec.notes);
}

#[test]
fn nodes_that_no_guest_can_have_are_refused_with_numbers_and_limits() {
    let tree = two_sockets();
    for (cpus, nodes, told) in [
        (2, &["0,cpus=0-1,memory=512M", "2"][..], "id=2 is given but id=1 is not"),
        (2, &["0,memory=512M", "1,cpus=0-1"], "id=0 has no vCPUs but id=1 has"),
        (2, &["0,cpus=0-2,memory=512M"], "has vCPU 2, but the machine has vCPUs 0 to 1"),
        (2, &["0,cpus=0-1,memory=512M", "1,cpus=1"], "vCPU 1 is in --numa id=0 and id=1"),
        (4, &["0,cpus=1,memory=512M"], "vCPUs 0,2-3 are in no memory node"),
        (1, &["0,cpus=0"], "--numa id=0 has no `memory`, and the nodes have 0 together where --memory is 512M: add memory=512M"),
        (1, &["0,cpus=0,memory=128M", "1"], "--numa id=1 has no `memory`, and the nodes have 128M together"),
        (1, &["0,cpus=0,memory=256M", "1,memory=128M"], "384M together, --memory is 512M"),
        (1, &["0,cpus=0,memory=15000000T", "1,memory=15000000T"], "--memory is 512M"),
        (1, &["0,cpus=0,memory=1", "1,memory=536870911"], "id=0 has 1, which is no multiple of the page size 4K"),
        (1, &["0,cpus=0,memory=512M,distance=1:20"], "a distance to node 1, the last node is 0"),
        (1, &["0,cpus=0,memory=512M,host-node=7"], "host-node=7, the host has nodes 0, 1"),
    ] {
        let text = refused(&machine(cpus, "512M", nodes, &[], "root-ports"), &tree);
        assert!(text.contains(told), "{nodes:?}: {text}");
    }
    let large = machine(1, "80G", &["0,cpus=0,memory=80G,host-node=1"], &[], "root-ports");
    let text = refused(&large, &tree);
    assert!(text.contains("binds 80G to host node 1, which has 64G in all"), "{text}");
    let preferred = machine(1, "80G", &["0,cpus=0,memory=80G,host-node=1,policy=preferred"], &[], "root-ports");
    assert!(resolve(&preferred, &look_in(&tree, &preferred).unwrap()).is_ok());
    let huge = machine(1, "3G,hugepages=1G", &["0,cpus=0,memory=1536M", "1,memory=1536M"], &[], "flat");
    assert!(refused(&huge, &tree).contains("page size 1G"));
    let file = api::config::TopologyConfig::parse("t", "[[root-complex]]\nname = \"rc7\"\nnode = 2\n").unwrap();
    let config = VmConfig { topology: Some(file), ..machine(1, "512M", &["0,cpus=0,memory=512M", "1"], &[], "root-ports") };
    assert!(refused(&config, &tree).contains("rc7 of the topology file is on node 2, --numa gives nodes 0 to 1"));
}

#[test]
fn a_file_keeps_its_root_complexes_and_what_it_says_wrongly_is_noted() {
    let tree = two_sockets();
    let text = "[[root-complex]]\nname = \"rc0\"\n[[root-complex]]\nname = \"rc1\"\nnode = 1\n";
    let mut config = machine(2, "2G", &["host"], &["0000:03:00.0,id=a,on=rc0", "0000:83:00.0,id=b,on=rc0"], "root-ports");
    config.topology = Some(api::config::TopologyConfig::parse("t", text).unwrap());
    let (spec, plan) = planned(&config, &tree);
    assert_eq!(plan.pci.root_complexes.iter().map(|root| root.node).collect::<Vec<_>>(), [Some(0), Some(1)]);
    assert!(
        spec.notes.iter().any(|note| note.starts_with("b is near to guest node 1, but its root complex rc0")),
        "{:?}",
        spec.notes
    );
}

#[test]
fn huge_pages_are_never_cut_and_a_small_machine_is_shared_out_by_pages() {
    let tree = two_sockets();
    let devices = ["0000:03:00.0", "0000:83:00.0"];
    let shares = |memory: &str| {
        let config = machine(2, memory, &["host"], &devices, "host");
        let numa = resolve(&config, &look_in(&tree, &config).unwrap()).unwrap().unwrap();
        numa.nodes.iter().map(|node| node.memory).collect::<Vec<_>>()
    };
    assert_eq!(shares("3G,hugepages=1G"), [2 * GIB, GIB]);
    assert_eq!(shares("1G,hugepages=1G"), [GIB, 0]);
    assert_eq!(shares("515M"), [258 << 20, 257 << 20]);
}

#[test]
fn the_dry_run_tells_each_node_in_a_line() {
    let tree = two_sockets();
    let config = machine(2, "2G", &["0,cpus=0-1,memory=1G,host-node=1", "1,memory=1G"], &[], "root-ports");
    let numa = resolve(&config, &look_in(&tree, &config).unwrap()).unwrap();
    // Nothing of the host is looked at without a device; a tree that is data is there.
    let numa = numa.unwrap().to_string();
    assert_eq!(
        numa,
        "node 0: vCPUs 0-1, memory 1G, distances 10 20; host node 1 (bind), pinned to CPUs 32-63\n\
         node 1: no vCPU, memory 1G, distances 20 10\n"
    );
}

#[test]
fn a_root_complex_on_a_node_behind_others_that_nothing_is_on_is_told_of() {
    let notes = |nodes: &[&str]| {
        let text: String =
            nodes.iter().enumerate().map(|(i, node)| format!("[[root-complex]]\nname = \"rc{i}\"\n{node}\n")).collect();
        let topology = Some(api::config::TopologyConfig::parse("f", &text).unwrap());
        let notes = spec(&VmConfig { topology, ..VmConfig::default() }, &Host::default()).unwrap().notes;
        notes.into_iter().filter(|note| note.contains("memory node")).collect::<Vec<_>>()
    };
    for right in [&["", ""][..], &["node = 0"], &["node = 1", "node = 0"], &["node = 2", "node = 1", "node = 1"]] {
        assert_eq!(notes(right), [] as [&str; 0], "{right:?}");
    }
    let wrong = notes(&["node = 1", "node = 99", "node = 100"]);
    assert!(
        matches!(&wrong[..], [note] if note.starts_with("root complex rc1 is on memory node 99, and nothing is on node 2")),
        "{wrong:?}"
    );
    assert_eq!(notes(&["node = 99"]).len(), 1);
}
