//! What takes as long as the guest is large must not keep clients waiting: memory is prepared from vm.create on, vm.boot is
//! answered in time, and the guest starts when its memory is there.

use std::fs;
use std::time::{Duration, Instant};

use tests::guest::image;
use tests::process::until;
use tests::server::Server;

/// More than can be touched while a test waits.
const FOREVER: &str = r#""size":1099511627776,"prefault":true"#;
/// Takes one thread some hundred milliseconds.
const A_WHILE: &str = r#""size":1073741824,"prefault":true"#;

fn create(server: &Server, memory: &str) {
    let kernel = image("echo.elf");
    let body = format!(r#"{{"payload":{{"kernel":"{kernel}"}},"cpus":{{"boot_vcpus":2}},"memory":{{{memory}}}}}"#);
    server.expect("PUT vm.create", &body, 204);
}

fn threads(server: &Server) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", server.process.id())).into_iter().flatten().flatten();
    let names = tasks.map(|task| fs::read_to_string(task.path().join("comm")).unwrap_or_default().trim().to_owned());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("vcpu")).collect();
    names.sort();
    names
}

#[track_caller]
fn quick<T>(what: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = what();
    // Generous for a machine that also runs other tests; what is waited for here would take minutes.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    done
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_e1_a_start_is_answered_before_memory_is_there() {
    let server = Server::with_policy("[boot]\nanswer-after = 1\n[memory]\nprefault-threads = 1\n");
    quick(|| create(&server, FOREVER));
    let info = server.expect("GET vm.info", "", 200);
    assert!(info.contains(r#""state":"Created""#) && info.contains(r#""step":"prefault""#), "{info}");
    assert_eq!(threads(&server), [""; 0]);
    let start = Instant::now();
    server.expect("PUT vm.boot", "", 204);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let info = quick(|| server.expect("GET vm.info", "", 200));
    assert!(info.contains(r#""state":"Running""#) && info.contains(r#""percent":"#), "{info}");
    assert_eq!(threads(&server), ["vcpu0", "vcpu1"]);
    for what in ["PUT vm.boot", "PUT vm.pause", "PUT vm.reboot"] {
        server.expect(what, "", 405);
    }
    quick(|| server.expect("PUT vm.shutdown", "", 204));
    let info = server.expect("GET vm.info", "", 200);
    assert!(info.contains(r#""state":"Created""#) && !info.contains("progress"), "{info}");
    assert_eq!(threads(&server), [""; 0]);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_whose_start_was_promised_starts_when_memory_is_there() {
    let server = Server::with_policy("[boot]\nanswer-after = 0\n[memory]\nprefault-threads = 1\n");
    create(&server, A_WHILE);
    server.expect("PUT vm.boot", "", 204);
    let promised = threads(&server);
    until("all memory", || server.expect("GET vm.info", "", 200), |info| !info.contains("progress"));
    // The same threads go on: others have noted their numbers.
    assert_eq!((promised.len(), threads(&server)), (2, promised));
    server.until("GET vm.counters", "", 200);
    server.expect("PUT vm.pause", "", 204);
    server.expect("PUT vm.resume", "", 204);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_e5_the_end_does_not_wait_for_memory() {
    for calls in [&["vm.info"][..], &["vm.delete", "vmm.ping"]] {
        let server = Server::with_policy("[boot]\nanswer-after = 0\n");
        create(&server, FOREVER);
        server.expect("PUT vm.boot", "", 204);
        for call in calls {
            let (verb, status) = if *call == "vm.delete" { ("PUT", 204) } else { ("GET", 200) };
            quick(|| server.expect(&format!("{verb} {call}"), "", status));
        }
        quick(|| server.expect("PUT vmm.shutdown", "", 204));
        server.ends(0);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_is_kept_while_devices_are_added_before_the_start() {
    let server = Server::with_policy("[memory]\nprefault-threads = 1\n");
    create(&server, FOREVER);
    let done = |info: &str| -> u64 {
        let (_, rest) = info.split_once(r#""done":"#).unwrap_or_else(|| panic!("no progress: {info}"));
        rest.split(|digit: char| !digit.is_ascii_digit()).next().unwrap().parse().unwrap()
    };
    until("the first memory", || server.expect("GET vm.info", "", 200), |info| done(info) > 0);
    server.expect("PUT vm.add-device", r#"{"banyan":"stub,id=late"}"#, 204);
    let info = server.expect("GET vm.info", "", 200);
    assert!(done(&info) > 0 && info.contains(r#""late""#) && info.contains(r#""pci_path":"#), "{info}");
    server.expect("PUT vm.add-device", r#"{"banyan":"stub,id=late"}"#, 400);
    server.expect("PUT vm.delete", "", 204);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_that_comes_slowly_holds_up_neither_commands_nor_the_end() {
    let server = Server::with_policy("");
    let kernel = image("growth.elf");
    let memory = r#""memory":{"size":67108864,"hotplug_size":1099511627776,"prefault":true}"#;
    let body = format!(r#"{{"payload":{{"kernel":"{kernel}"}},"cpus":{{"boot_vcpus":1,"max_vcpus":2}},{memory}}}"#);
    server.expect("PUT vm.create", &body, 204);
    server.expect("PUT vm.boot", "", 204);
    // More than can be touched while a test waits.
    quick(|| server.expect("PUT vm.resize", r#"{"desired_ram":1099578736640}"#, 204));
    until("memory on its way", || server.expect("GET vm.info", "", 200), |info| info.contains(r#""step":"prefault""#));
    quick(|| server.expect("PUT vm.resize", r#"{"desired_vcpus":2}"#, 204));
    assert_eq!(threads(&server), ["vcpu0", "vcpu1"]);
    quick(|| server.expect("PUT vm.shutdown", "", 204));
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_is_touched_ahead_of_devices_that_may_come_if_the_operator_wants_it() {
    let server = Server::with_policy("[memory]\npremap = true\n");
    create(&server, r#""size":268435456"#);
    server.expect("PUT vm.boot", "", 204);
    until("256 MiB of resident memory", || server.process.resident(), |kib| *kib >= 256 << 10);
    assert!(!server.expect("GET vm.info", "", 200).contains("progress"), "the guest waits for nothing");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_f2_each_further_gpu_with_a_bar_of_32_gib_costs_about_the_same_and_less_than_50_ms() {
    let kernel = image("hello.elf");
    let timed = |count: usize| {
        let gpu = |n: usize| format!("stub,id=g{n},bar0=16M:mem32,bar2=32G:mem64:prefetchable,bar4=32M:mem64:prefetchable");
        let devices = (0..count).flat_map(|n| ["--device".to_owned(), gpu(n)]);
        let arguments: Vec<_> = ["run".to_owned(), "--kernel".into(), kernel.clone()].into_iter().chain(devices).collect();
        // The least of several runs: the machine's noise only adds.
        let run = || {
            let start = Instant::now();
            tests::banyan(&arguments).expect_code(0).expect_output(&["X"]);
            start.elapsed()
        };
        (0..5).map(|_| run()).min().unwrap_or_default()
    };
    let (one, four, eight) = (timed(1), timed(4), timed(8));
    let (first, later) = (four.saturating_sub(one) / 3, eight.saturating_sub(four) / 4);
    assert!(first < Duration::from_millis(50) && later < Duration::from_millis(50), "{one:?}, {four:?}, {eight:?}");
}
