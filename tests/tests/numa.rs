//! Memory nodes of the guest, as on a recorded host.

use tests::Guest;
use tests::guest::image;
use tests::process::banyan;
use tests::server::Server;

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

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_guest_sees_the_nodes_that_an_api_client_made_of_zones() {
    let mut server = Server::empty();
    let mib = |count: u64| count << 20;
    let zone = |id: &str, size: u64, more: &str| format!(r#"{{"id":"{id}","size":{size}{more}}}"#);
    let on_host = r#","host_numa_node":0"#;
    let zones = [zone("a", mib(64), on_host), zone("b", mib(128), ""), zone("c", mib(32), on_host)].join(",");
    let numa = r#"[{"guest_numa_id":0,"cpus":[0,2],"distances":[{"destination":1,"distance":31}],"memory_zones":["a","c"]},
                   {"guest_numa_id":1,"cpus":[1],"distances":[],"memory_zones":["b"]}]"#;
    let body = format!(
        r#"{{"payload":{{"kernel":"{}"}},"cpus":{{"boot_vcpus":3}},"memory":{{"size":0,"zones":[{zones}]}},
             "numa":{numa},"serial":{{"mode":"Tty"}}}}"#,
        image("nodes.elf")
    );
    server.expect("PUT vm.create", &body, 204);
    let info = server.expect("GET vm.info", "", 200);
    for part in [r#""memory_zones":["a","c"]"#, r#""destination":1,"distance":31"#, r#""size":234881024"#] {
        assert!(info.contains(part), "{part}: {info}");
    }
    server.expect("PUT vm.boot", "", 204);
    server.process.expect("node 0 processors 2 memory 6000000 far 10 31");
    server.process.expect("node 1 processors 1 memory 8000000 far 31 10");
    server.process.expect("PASS");
}
