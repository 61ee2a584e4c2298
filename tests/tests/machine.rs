//! Processors, memory, and every way in which a guest can end, on /dev/kvm.

use rustix::process::Signal;
use tests::Guest;

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn all_processors_start() {
    for cpus in ["1", "2", "8"] {
        let outcome = Guest::new("cpus").with(&["--cpus", cpus]).options(&format!("cpus={cpus}")).passes();
        let last: u32 = cpus.parse().unwrap();
        outcome.expect_output(&["cpu 0\n", &format!("cpu {}\n", last - 1)]);
    }
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
    Guest::new("triple").run().expect_code(6);
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
fn without_reboot_a_reset_ends_with_exit_code_4() {
    for by in ["cf9", "keyboard", "acpi"] {
        Guest::new("reset").options(&format!("by={by}")).with(&["--no-reboot"]).run().expect_code(4);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_signal_ends_with_128_plus_its_number() {
    for (signal, code) in [(Signal::HUP, 129), (Signal::INT, 130), (Signal::TERM, 143)] {
        let mut session = Guest::new("echo").with(&["--cpus", "2"]).start();
        session.expect("ready");
        session.signal(signal);
        session.wait().expect_code(code);
    }
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
