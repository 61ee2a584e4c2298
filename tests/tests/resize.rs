//! Processors and memory that come and go, and the power button, by the registers that the guest's firmware tables use.

use tests::Guest;
use tests::process::until;
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
    server.shuts_down();
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

fn blocks(options: &str, memory: &str) -> Server {
    Server::run(&Guest::new("blocks").options(options).with(&["--memory", memory]))
}

fn actual(server: &Server) -> u64 {
    let info = server.expect("GET vm.info", "", 200);
    let value = info.split(r#""memory_actual_size":"#).nth(1).and_then(|rest| rest.split([',', '}']).next());
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("{info}"))
}

/// Waits until the guest has so much memory, as vm.info says.
fn reaches(server: &Server, bytes: u64) {
    until(&format!("a memory of {bytes} bytes"), || actual(server), |actual| *actual == bytes);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn blocks_of_memory_come_and_go_and_come_again_after_a_reset() {
    const MIB: u64 = 1 << 20;
    let mut server = blocks("reset=1", "64M,hotplug=16G,hotplug-method=virtio-mem");
    server.process.expect("region 100000000 size 400000000 block 200000 node 0");
    server.process.expect("ready");
    assert_eq!(actual(&server), 64 * MIB);
    // Up over what there is memory for, up and down within it, down to nothing, up again.
    for (more, has) in [(1026, "40200000"), (1024, "40000000"), (2, "200000"), (130, "8200000"), (0, "0"), (640, "28000000")] {
        resize(&server, &format!(r#"{{"desired_ram":{}}}"#, (64 + more) * MIB), 204);
        let info = server.expect("GET vm.info", "", 200);
        assert!(info.contains(&format!(r#""size":{}"#, (64 + more) * MIB)), "told at once: {info}");
        server.process.expect(&format!("has {has}"));
        reaches(&server, (64 + more) * MIB);
    }
    for (ram, part) in [
        (62 * MIB, "does not shrink below 64M"),
        (65 * MIB, "in multiples of 2M, 1M more is none"),
        ((64 + 2) * MIB + 4096, "in multiples of 2M"),
        (17 << 30, "more than the"),
        (u64::MAX, "more than the"),
    ] {
        let told = resize(&server, &format!(r#"{{"desired_ram":{ram}}}"#), 400);
        assert!(told.contains(part), "{ram}: {told}");
    }
    // A reset takes all blocks; the next driver is to have as many.
    server.process.send("\n");
    server.process.expect("region 100000000");
    server.process.expect("has 28000000");
    server.process.expect("ready");
    reaches(&server, 704 * MIB);
    resize(&server, &format!(r#"{{"desired_ram":{}}}"#, 64 * MIB), 204);
    server.process.expect("has 0");
    // A machine that starts anew has what it was created with.
    resize(&server, &format!(r#"{{"desired_ram":{}}}"#, 128 * MIB), 204);
    server.process.expect("has 4000000");
    server.expect("PUT vm.shutdown", "", 204);
    server.expect("PUT vm.boot", "", 204);
    server.process.expect("region 100000000");
    server.process.expect("ready");
    assert_eq!(actual(&server), 64 * MIB);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn blocks_that_go_give_their_pages_back_to_the_host() {
    let mut server = blocks("", "64M,hotplug=1G,hotplug-method=virtio-mem,shared=on,prefault=on");
    server.process.expect("ready");
    let resident = |server: &Server| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.process.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("RssShmem:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
    };
    let before = resident(&server);
    resize(&server, &format!(r#"{{"desired_ram":{}}}"#, 320_u64 << 20), 204);
    server.process.expect("has 10000000");
    let with = resident(&server);
    assert!(with >= before + 256, "{before} MiB, then {with} MiB: touched before the guest has them");
    resize(&server, &format!(r#"{{"desired_ram":{}}}"#, 64_u64 << 20), 204);
    server.process.expect("has 0");
    let after = resident(&server);
    assert!(after <= before + 4, "{before} MiB, {with} MiB, then {after} MiB");
    server.process.send("\n");
    server.process.finish().expect_code(1);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_does_not_shrink_below_the_balloon() {
    let guest = Guest::new("blocks").with(&["--memory", "64M,hotplug=1G,hotplug-method=virtio-mem", "--balloon", "0"]);
    let mut server = Server::run(&guest);
    server.process.expect("ready");
    resize(&server, r#"{"desired_ram":335544320,"desired_balloon":134217728}"#, 204);
    server.process.expect("has 10000000");
    let told = resize(&server, r#"{"desired_ram":67108864}"#, 400);
    assert!(told.contains("larger than the guest's memory"), "{told}");
    resize(&server, r#"{"desired_ram":67108864,"desired_balloon":0}"#, 204);
    server.process.expect("has 0");
    server.process.send("\n");
    server.process.finish().expect_code(1);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn each_memory_node_has_blocks_of_its_own() {
    let guest = Guest::new("blocks").with(&[
        "--cpus",
        "2",
        "--memory",
        "192M,hotplug=1G,hotplug-method=virtio-mem",
        "--numa",
        "0,cpus=0,memory=128M",
        "--numa",
        "1,cpus=1,memory=64M",
    ]);
    let mut server = Server::run(&guest);
    server.process.expect("region 100000000 size 20000000 block 200000 node 0");
    server.process.expect("region 120000000 size 20000000 block 200000 node 1");
    server.process.expect("ready");
    resize(&server, &format!(r#"{{"desired_ram":{}}}"#, 256_u64 << 20), 204);
    server.process.expect("has 4000000");
    resize(&server, &format!(r#"{{"desired_ram":{}}}"#, 512_u64 << 20), 204);
    reaches(&server, 512 << 20);
    server.process.send("\n");
    server.process.finish().expect_code(1);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_change_that_cannot_be_in_one_part_is_none() {
    let guest = growing("", "boot=1,max=2", "64M,hotplug=1G").with(&["--balloon", "0"]);
    let mut server = Server::run(&guest);
    server.process.expect("ready");
    for (body, part) in [
        (r#"{"desired_vcpus":2,"desired_ram":201326592,"desired_balloon":4097}"#, "not whole pages"),
        (r#"{"desired_vcpus":2,"desired_ram":201326592,"desired_balloon":201330688}"#, "larger than the guest's memory"),
        (r#"{"desired_vcpus":9,"desired_ram":201326592,"desired_balloon":4096}"#, "1 to 2 are"),
        (r#"{"desired_vcpus":2,"desired_ram":4096,"desired_balloon":4096}"#, "does not shrink"),
    ] {
        let told = resize(&server, body, 400);
        assert!(told.contains(part), "{body}: {told}");
    }
    let info = server.expect("GET vm.info", "", 200);
    for part in [r#""boot_vcpus":1"#, r#""memory_actual_size":67108864"#, r#""free_page_reporting":false,"size":0"#] {
        assert!(info.contains(part), "{part}: {info}");
    }
    resize(&server, r#"{"desired_vcpus":2,"desired_ram":201326592,"desired_balloon":201326592}"#, 204);
    server.process.expect("processor 1 came");
    let info = server.expect("GET vm.info", "", 200);
    for part in [r#""boot_vcpus":2"#, r#""memory_actual_size":201326592"#, r#""free_page_reporting":false,"size":201326592"#] {
        assert!(info.contains(part), "{part}: {info}");
    }
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
