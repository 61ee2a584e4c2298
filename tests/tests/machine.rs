//! Processors, memory, and every way in which a guest can end, on /dev/kvm.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::process::Command;

use rustix::process::Signal;
use tests::guest::{PASSED, image};
use tests::process::LIMIT;
use tests::{Guest, Session, executable};

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn all_processors_start() {
    for cpus in ["1", "2", "8", "255"] {
        let outcome = Guest::new("cpus").with(&["--cpus", cpus]).options(&format!("cpus={cpus}")).passes();
        let last: u32 = cpus.parse().unwrap();
        outcome.expect_output(&["cpu 0\n", &format!("cpu {}\n", last - 1)]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn every_processor_has_a_thread_named_after_it_and_no_other_thread_is_called_so() {
    let mut session = Guest::new("echo").with(&["--cpus", "3"]).start();
    session.expect("ready");
    let mut names: Vec<String> = std::fs::read_dir(format!("/proc/{}/task", session.id()))
        .unwrap()
        .map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap().trim().to_owned())
        .collect();
    names.sort();
    let vcpus: Vec<&String> = names.iter().filter(|name| name.starts_with("vcpu")).collect();
    assert_eq!(vcpus, ["vcpu0", "vcpu1", "vcpu2"], "{names:?}");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_is_where_the_map_says_in_every_size() {
    for (size, bytes) in [("16M", 16u64 << 20), ("2G", 2 << 30), ("3G", 3 << 30), ("5G", 5 << 30), ("1T", 1 << 40)] {
        Guest::new("memory").with(&["--memory", size]).options(&format!("ram={bytes}")).passes();
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn shared_and_prefaulted_memory_works_as_the_plain_one() {
    for memory in ["64M,shared=on", "64M,prefault=on,prefault_threads=2", "64M,shared=on,prefault=on"] {
        Guest::new("memory").with(&["--memory", memory]).options("ram=67108864").passes();
    }
}

/// Resident KiB of a guest that waits for input, with this memory.
fn resident(memory: &str) -> u64 {
    let mut session = Guest::new("echo").with(&["--memory", memory]).start();
    session.expect("ready");
    let status = std::fs::read_to_string(format!("/proc/{}/status", session.id())).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap().trim().trim_end_matches(" kB");
    resident.parse().unwrap()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_is_resident_when_it_is_used_or_prefaulted() {
    assert!(resident("256G") < 64 << 10);
    assert!(resident("64M,prefault=on,prefault_threads=3") >= 64 << 10);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn without_debug_exit_its_port_is_not_there() {
    let mut session = Session::start(&["run", "--kernel", &image("exit.elf"), "--serial", "off"]);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(session.is_running(), "a write to an absent port ended the machine");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_debug_exit_port_gives_twice_the_value_plus_one() {
    for (value, code) in [(0, 1), (1, 3), (3, 7), (127, 255)] {
        Guest::new("exit").options(&format!("code={value}")).run().expect_code(code);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_triple_fault_ends_with_exit_code_6() {
    let outcome = Guest::new("triple").run();
    outcome.expect_code(6).expect_output(&["about to fault"]).expect_error(&["triple fault"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_reset_starts_the_guest_again_in_the_same_process() {
    for by in ["cf9", "keyboard", "acpi"] {
        let guest = Guest::new("reset").options(&format!("by={by} boots=3"));
        guest.run().expect_code(0).expect_output(&["PASS"]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_reset_takes_the_hierarchy_back_to_the_plan_and_stops_all_processors() {
    let stub = "stub,bar0=64K:mem32,bar2=1M:mem64:prefetchable,msix=4,dma=on";
    let guest = Guest::new("reset").options("boots=3").with(&["--device", stub, "--device", stub, "--cpus", "3"]);
    guest.run().expect_code(0).expect_output(&["PASS"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn resets_use_up_no_descriptors_and_no_threads() {
    let mut session = Guest::new("reset").topology("nested").with(&["--cpus", "3"]).options("boots=24").start();
    let samples: Vec<_> = (1..=23)
        .map(|number| {
            session.expect(&format!("boot {number} functions 18\n"));
            session.usage_without_log().unwrap_or_default()
        })
        .collect();
    let (early, late) = samples.split_at(8);
    let most = |samples: &[(usize, usize)]| samples.iter().fold((0, 0), |most, one| (most.0.max(one.0), most.1.max(one.1)));
    let ((descriptors, threads), (later_descriptors, later_threads)) = (most(early), most(late));
    assert!(descriptors > 0 && later_descriptors <= descriptors && later_threads <= threads, "{samples:?}");
    session.finish().expect_code(0).expect_output(&["PASS"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn without_reboot_a_reset_ends_with_exit_code_4() {
    for by in ["cf9", "keyboard", "acpi"] {
        Guest::new("reset").options(&format!("by={by}")).with(&["--no-reboot"]).run().expect_code(4);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_signal_ends_with_128_plus_its_number() {
    for (signal, code) in [(Signal::HUP, 129), (Signal::INT, 130), (Signal::TERM, 143)] {
        let mut session = with_signals("--default-signal=HUP,INT,TERM", &Guest::new("echo").with(&["--cpus", "2"]));
        session.expect("ready");
        session.signal(signal);
        session.wait().expect_code(code);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn signals_that_the_caller_ignores_do_not_end_the_guest() {
    let mut session = with_signals("--ignore-signal=HUP,INT", &Guest::new("echo"));
    session.expect("ready");
    session.signal(Signal::HUP);
    session.signal(Signal::INT);
    session.send("still here\n");
    session.finish().expect_code(PASSED).expect_output(&["echo: still here"]);
}

/// Starts a guest with other signals handled or ignored than this process has.
fn with_signals(option: &str, guest: &Guest) -> Session {
    let mut command = Command::new("env");
    command.arg(option).arg(executable::path()).args(guest.arguments());
    Session::spawn(command, LIMIT)
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_that_no_machine_can_have_is_refused_with_the_limit() {
    for (size, parts) in [
        ("0", vec!["memory of 0 bytes", "16M"]),
        ("1", vec!["memory of 1 bytes", "16M"]),
        ("16777217", vec!["4096"]),
        ("8000000T", vec!["address bits"]),
    ] {
        Guest::new("hello").with(&["--memory", size]).run().expect_code(1).expect_error(&parts);
    }
}
