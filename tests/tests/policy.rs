//! The operator's file, from the outside: what it changes for machines that clients create, and what a wrong one does.

use std::fs;

use tests::guest::image;
use tests::process::banyan;
use tests::server::{Server, machine, machine_told};

#[test]
fn a_wrong_file_lets_the_process_start_and_refuses_machines_with_the_reason() {
    let server = Server::with_policy("[pcie]\ntopology = \"hots\"\n");
    let (status, reply) = server.create("/nonexistent", "");
    assert_eq!(status, 400, "{reply}");
    for part in ["config.toml, line 2", "hots", "root-ports"] {
        assert!(reply.contains(part), "{part}: {reply}");
    }
    server.expect("GET vmm.ping", "", 200);
    server.shuts_down();
}

#[test]
fn a_named_file_that_is_absent_is_told_to_the_client() {
    let server = Server::with_environment(&[("BANYAN_CONFIG", "/nonexistent/config.toml")]);
    let (status, reply) = server.create("/nonexistent", "");
    assert!(status == 400 && reply.contains("/nonexistent/config.toml cannot be read"), "{status} {reply}");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_hierarchy_and_the_ports_of_devices_come_from_the_file() {
    let server = Server::with_policy("[pcie]\nroot-ports = 2\n[guest]\nreset = \"exit\"\n");
    let (status, reply) = server.create(&image("echo.elf"), r#","devices":[{"banyan":"stub,id=a,on=port1"}]"#);
    assert_eq!(status, 204, "{reply}");
    assert!(server.expect("GET vm.info", "", 200).contains("root-ports=2"));
    server.expect("PUT vm.boot", "", 204);
    assert_eq!(server.devices(), "a@port1");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_nodes_come_from_the_file_unless_the_client_says_them() {
    let body = |memory: u64, more: &str| {
        let more = format!(r#","cpus":{{"boot_vcpus":1,"max_vcpus":2}}{more}"#);
        machine(&image("echo.elf"), &format!(r#""size":{memory}"#), &more)
    };
    let server = Server::with_policy("[numa]\nhost-nodes = [0]\n");
    let shown = || server.expect("GET vm.info", "", 200);
    for (memory, more, nodes) in [
        (256 << 20, "", r#""numa":["id=0,cpus=0-1,memory=256M,host-node=0"]"#),
        (256 << 20, r#","numa":["id=0,cpus=0-1,memory=256M"]"#, r#""numa":["id=0,cpus=0-1,memory=256M"]"#),
    ] {
        server.expect("PUT vm.create", &body(memory, more), 204);
        assert!(shown().contains(nodes), "{nodes}: {}", shown());
        server.expect("PUT vm.boot", "", 204);
        server.expect("PUT vm.delete", "", 204);
    }
    let refused = server.expect("PUT vm.create", &body(64 << 20, ""), 400);
    assert!(refused.contains("[numa] host-nodes") && refused.contains("give it 128M for each"), "{refused}");
    server.shuts_down();

    let server = Server::with_policy("[numa]\nhost-nodes = [0, 4000]\n");
    let refused = server.expect("PUT vm.create", &body(256 << 20, ""), 400);
    assert!(refused.contains("`[numa] host-nodes` of the operator's file names node 4000, the host has"), "{refused}");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn where_virtio_devices_live_comes_from_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.img");
    fs::write(&disk, [0; 4096]).unwrap();
    let more = format!(
        r#","disks":[{{"path":"{}","id":"root","image_type":"Raw"}}],"rng":{{"src":"/dev/urandom"}},"devices":[{{"banyan":"stub,id=a"}}]"#,
        disk.display()
    );
    for (policy, places) in [
        ("", ["root 0000:00:00.0", "rng0 0000:00:01.0", "a 0000:01:00.0"]),
        ("[pcie]\nvirtio = \"bus0\"\n", ["root 0000:00:00.0", "rng0 0000:00:01.0", "a 0000:01:00.0"]),
        ("[pcie]\nvirtio = \"ports\"\n", ["root 0000:01:00.0", "rng0 0000:02:00.0", "a 0000:03:00.0"]),
    ] {
        let server = Server::with_policy(policy);
        let (status, reply) = server.create(&image("echo.elf"), &more);
        assert_eq!(status, 204, "{reply}");
        // The same before the start and after it.
        for boots in [true, false] {
            let info = server.expect("GET vm.info", "", 200);
            assert_eq!(info.contains("virtio=ports"), policy.contains("ports"), "{info}");
            for place in places {
                let (name, at) = place.split_once(' ').unwrap();
                let entry = info.split_once(&format!(r#""{name}":{{"#)).map(|(_, rest)| rest.split("},").next().unwrap());
                assert!(entry.is_some_and(|entry| entry.contains(at)), "{policy}: {place}: {info}");
            }
            if boots {
                server.expect("PUT vm.boot", "", 204);
            }
        }
        server.shuts_down();
    }
    let (status, reply) = Server::with_policy("[pcie]\nvirtio = \"port\"\n").create("/nonexistent", "");
    assert!(status == 400 && reply.contains("config.toml, line 2") && reply.contains("ports"), "{status} {reply}");
}

#[test]
fn the_file_can_be_checked_and_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    let name = file.display().to_string();
    fs::write(&file, "[guest]\nreset = \"exit\"\n").unwrap();
    banyan(&["config", "check", &name]).expect_code(0).expect_output(&["config.toml: fine"]);
    banyan(&["config", "show", &name])
        .expect_code(0)
        .expect_output(&["[guest] reset              exit", "answer-after        6 s"]);
    fs::write(&file, "[pcie]\nvirtio = \"ports\"\n").unwrap();
    banyan(&["config", "check", &name]).expect_code(0).expect_output(&["config.toml: fine"]);
    banyan(&["config", "show", &name]).expect_code(0).expect_output(&["virtio=ports", "root-hot-plug=on", "cold-removal=on"]);
    fs::write(&file, "[guest]\nreset = \"maybe\"\n").unwrap();
    banyan(&["config", "check", &name]).expect_code(1);
    fs::write(&file, "[numa]\nhost-nodes = [0]\n").unwrap();
    banyan(&["config", "check", &name]).expect_code(0);
    banyan(&["config", "show", &name]).expect_code(0).expect_output(&["[numa] host-nodes          0 (bind, vCPUs pinned)"]);
    for (nodes, part) in [("[0, 0]", "names node 0 twice"), ("[0, 4000]", "names node 4000, the host has")] {
        fs::write(&file, format!("[numa]\nhost-nodes = {nodes}\n")).unwrap();
        banyan(&["config", "check", &name]).expect_code(1).expect_error(&["[numa] host-nodes", part]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn what_a_reset_means_is_the_operators_to_say() {
    let create = |policy: &str| {
        let server = Server::with_policy(policy);
        let serial = r#","serial":{"mode":"Tty"}"#;
        let body = machine_told(&image("reset.elf"), "by=cf9 boots=3", r#""size":67108864"#, serial);
        server.expect("PUT vm.create", &body, 204);
        server.expect("PUT vm.boot", "", 204);
        server
    };
    create("[guest]\nreset = \"exit\"\n").ends(4);
    create("").ends(4);
    create("[guest]\nreset = \"reboot\"\n").ends(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_that_panics_ends_the_process_unless_it_may_start_again_or_another_kernel_goes_on() {
    let ends = |policy: &str, panic: u8, code: i32| {
        let server = Server::with_policy(policy);
        let more = r#","serial":{"mode":"Tty"},"pvpanic":true"#;
        let body = machine_told(&image("exit.elf"), &format!("panic={panic}"), r#""size":67108864"#, more);
        server.expect("PUT vm.create", &body, 204);
        server.expect("PUT vm.boot", "", 204);
        server.ends(code);
    };
    ends("", 1, 10);
    ends("", 2, 0);
    ends("[guest]\nreset = \"reboot\"\n", 1, 0);
}
