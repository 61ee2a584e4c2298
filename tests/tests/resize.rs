//! Processors and memory that come and go, and the power button, by the registers that the guest's firmware tables use.

use tests::Guest;
use tests::server::Server;

fn growing(options: &str, cpus: &str, memory: &str) -> Guest {
    Guest::new("growth").options(options).with(&["--cpus", cpus, "--memory", memory])
}

fn resize(server: &Server, body: &str, status: u16) -> String {
    server.expect("PUT vm.resize", body, status)
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn processors_come_start_go_and_come_again() {
    let mut server = Server::run(&growing("", "boot=1,max=4", "64M"));
    server.process.expect("processors 0");
    server.process.expect("ready");
    resize(&server, r#"{"desired_vcpus":3}"#, 204);
    assert!(server.expect("GET vm.info", "", 200).contains(r#""boot_vcpus":3"#));
    server.process.expect("processor 1 came");
    server.process.expect("processor 2 came");
    // Equal is no work; what is more than the most is refused.
    resize(&server, r#"{"desired_vcpus":3}"#, 204);
    let told = resize(&server, r#"{"desired_vcpus":5}"#, 400);
    assert!(told.contains("1 to 4 are"), "{told}");
    resize(&server, r#"{"desired_vcpus":1}"#, 204);
    server.process.expect("processor 1 went");
    server.process.expect("processor 2 went");
    for _ in 0..3 {
        resize(&server, r#"{"desired_vcpus":2}"#, 204);
        server.process.expect("processor 1 came");
        resize(&server, r#"{"desired_vcpus":1}"#, 204);
        server.process.expect("processor 1 went");
    }
    server.process.send("\n");
    server.process.finish().expect_code(1).expect_output(&["PASS"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_processor_that_is_wanted_again_before_it_went_stays() {
    let mut server = Server::run(&growing("keep=1", "boot=2,max=3", "64M"));
    server.process.expect("processors 0 1");
    server.process.expect("ready");
    resize(&server, r#"{"desired_vcpus":1}"#, 204);
    server.process.expect("processor 1 stays");
    resize(&server, r#"{"desired_vcpus":2}"#, 204);
    // The guest is told once more that it has it, and starts it anew.
    server.process.expect("processor 1 came");
    server.process.send("\n");
    server.process.finish().expect_code(1);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_comes_where_it_was_kept_and_stays_through_a_reset_with_the_processors() {
    let mut server = Server::run(&growing("reset=1", "boot=1,max=2", "64M,hotplug=16G"));
    server.process.expect("ready");
    resize(&server, r#"{"desired_ram":201326592,"desired_vcpus":2}"#, 204);
    assert!(server.expect("GET vm.info", "", 200).contains(r#""memory_actual_size":201326592"#));
    server.process.expect("memory 100000000 size 8000000 node 0 came");
    resize(&server, r#"{"desired_ram":1275068416}"#, 204);
    server.process.expect("memory 108000000 size 40000000 node 0 came");
    for (body, part) in [
        (r#"{"desired_ram":201326592}"#, "does not shrink"),
        (r#"{"desired_ram":1275072512}"#, "multiples of 128M"),
        (r#"{"desired_ram":1099511627776}"#, "more than the"),
        (r#"{"desired_ram":18446744073709551615}"#, "more than the"),
        (r#"{"desired_ram":1409286144,"desired_vcpus":9}"#, "1 to 2 are"),
    ] {
        let told = resize(&server, body, 400);
        assert!(told.contains(part), "{body}: {told}");
    }
    assert!(server.expect("GET vm.info", "", 200).contains(r#""memory_actual_size":1275068416"#), "all or nothing");
    for _ in 0..2 {
        server.process.send("\n");
        server.process.expect("processors 0 1");
        server.process.expect("memory 100000000 size 8000000 node 0 stayed");
        server.process.expect("memory 108000000 size 40000000 node 0 stayed");
        server.process.expect("ready");
    }
    server.expect("PUT vm.reboot", "", 204);
    server.process.expect("memory 108000000 size 40000000 node 0 stayed");
    server.process.expect("ready");
    server.expect("PUT vmm.shutdown", "", 204);
    server.ends(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_comes_as_often_as_the_guest_can_be_told() {
    let mut server = Server::run(&growing("", "1", "64M,hotplug=16G"));
    server.process.expect("ready");
    for count in 1..=48_u64 {
        resize(&server, &format!(r#"{{"desired_ram":{}}}"#, (64 + 128 * count) << 20), 204);
    }
    let told = resize(&server, &format!(r#"{{"desired_ram":{}}}"#, (64 + 128 * 49_u64) << 20), 400);
    assert!(told.contains("48 times already"), "{told}");
    server.process.expect("memory 278000000 size 8000000 node 0 came");
    server.process.send("\n");
    server.process.finish().expect_code(1);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_power_button_reaches_the_guest() {
    let mut server = Server::run(&growing("", "1", "64M"));
    server.process.expect("ready");
    server.expect("PUT vm.power-button", "", 204);
    server.process.expect("button");
    server.process.send("\n");
    server.process.finish().expect_code(1);
}
