//! The operator's file, from the outside: what it changes for machines that clients create, and what a wrong one does.

use std::fs;

use tests::guest::image;
use tests::process::banyan;
use tests::server::Server;

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
fn the_file_can_be_checked_and_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    let name = file.display().to_string();
    fs::write(&file, "[guest]\nreset = \"exit\"\n").unwrap();
    banyan(&["config", "check", &name]).expect_code(0).expect_output(&["config.toml: fine"]);
    banyan(&["config", "show", &name])
        .expect_code(0)
        .expect_output(&["[guest] reset              exit", "answer-after        6 s"]);
    fs::write(&file, "[guest]\nreset = \"maybe\"\n").unwrap();
    banyan(&["config", "check", &name]).expect_code(1);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn what_a_reset_means_is_the_operators_to_say() {
    let create = |policy: &str| {
        let server = Server::with_policy(policy);
        let kernel = image("reset.elf");
        let body = format!(
            r#"{{"payload":{{"kernel":"{kernel}","cmdline":"by=cf9 boots=3"}},"memory":{{"size":67108864}},"serial":{{"mode":"Tty"}}}}"#
        );
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
        let kernel = image("exit.elf");
        let body = format!(
            r#"{{"payload":{{"kernel":"{kernel}","cmdline":"panic={panic}"}},"memory":{{"size":67108864}},"serial":{{"mode":"Tty"}},"pvpanic":true}}"#
        );
        server.expect("PUT vm.create", &body, 204);
        server.expect("PUT vm.boot", "", 204);
        server.ends(code);
    };
    ends("", 1, 10);
    ends("", 2, 0);
    ends("[guest]\nreset = \"reboot\"\n", 1, 0);
}
