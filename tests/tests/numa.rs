//! Memory nodes of the guest, as on a recorded host.

use tests::Guest;
use tests::process::banyan;

const HOST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/a100x-dpu.json");
const DEVICES: [&str; 4] = ["--device", "0000:41:00.0,id=gpu0", "--device", "0000:de:00.0,id=gpu1"];

#[test]
fn case_i1_a_plan_tells_the_nodes_of_the_guest_and_of_each_root_complex() {
    let arguments = ["run", "--dry-run", "-v", "--host", HOST, "--numa", "host", "--cpus", "boot=3,max=8", "--memory", "4G"];
    let planned = banyan(&[&arguments[..], &["--pcie", "topology=host"], &DEVICES].concat());
    planned.expect_code(0).expect_output(&[
        "node 0: vCPUs 0-1,3-5, memory 2G, distances 10 ",
        "node 1: vCPUs 2,6-7, memory 2G, distances ",
        "; host node 0 (bind)",
        "; host node 1 (bind)",
        "node 0\n",
        "node 1\n",
    ]);
}

#[test]
fn a_node_that_the_host_does_not_have_is_refused_with_those_that_it_has() {
    let node = "id=0,cpus=0,memory=512M,host-node=7";
    let refused = banyan(&["run", "--dry-run", "--host", HOST, "--numa", node]);
    refused.expect_code(1).expect_error(&["--numa id=0 asks for host-node=7", "the host has nodes 0, 1"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn processors_of_each_node_have_the_apic_ids_that_acpi_tells() {
    for cpus in ["2", "5", "7"] {
        let nodes = ["--numa", "host", "--host", HOST, "--pcie", "topology=host", "--cpus", cpus];
        Guest::new("cpus").options(&format!("cpus={cpus}")).with(&nodes).with(&DEVICES).run().expect_code(1);
    }
}
