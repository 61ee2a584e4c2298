//! What is planned, as the command line shows it and as a bare-metal guest finds it: section A of the field cases, where a unit
//! test of the planner does not show all of it.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use tests::guest::{Guest, image};
use tests::server::Server;
use tests::{Outcome, banyan};

const GIB: u64 = 1 << 30;

/// A GPU's BARs, the large one of this many GiB.
fn gpus(count: usize, large: u64) -> Vec<String> {
    let gpu = |index| format!("stub,id=gpu{index},bar0=16M:mem32,bar1={large}G:mem64:prefetchable,bar3=32M:mem64:prefetchable");
    (0..count).map(gpu).collect()
}

fn options(devices: &[String]) -> Vec<&str> {
    devices.iter().flat_map(|device| ["--device", device.as_str()]).collect()
}

fn dry_run(more: &[&str]) -> Outcome {
    banyan(&[&["run", "--dry-run", "-v"], more].concat())
}

/// Lines of BARs and windows of a plan, without those of memory.
fn places(plan: &str) -> Vec<&str> {
    let pci = plan.split_once("\n0000:00 ").unwrap().1;
    pci.lines().filter(|line| line.starts_with("      ") && line.contains('-')).collect()
}

/// First and last address of each BAR of `size`, as `-v` shows it.
fn bars(plan: &str, size: &str) -> Vec<(u64, u64)> {
    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let of_size = plan.lines().filter(|line| line.starts_with("      BAR") && line.contains(&format!(" {size}")));
    of_size.map(|line| line.split_whitespace().nth(2).unwrap().split_once('-').unwrap()).map(|(a, b)| (hex(a), hex(b))).collect()
}

#[test]
fn case_a3_a_machine_with_firmware_has_its_bars_where_a_kernel_finds_them() {
    let devices = gpus(1, 32);
    for memory in ["4G", "30G"] {
        let common = [&["--memory", memory], &options(&devices)[..]].concat();
        let direct = dry_run(&[&common[..], &["--kernel", &image("hello.elf")]].concat());
        let firmware = dry_run(&[&common[..], &["--firmware", &image("firmware.bin")]].concat());
        assert_eq!(places(&direct.expect_code(0).stdout), places(&firmware.expect_code(0).stdout), "{memory}");
        let bars = places(&direct.stdout).iter().filter(|line| line.starts_with("      BAR")).count();
        assert_eq!(bars, 3, "{direct}");
        assert!(!direct.stdout.contains("none"), "{direct}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a4_a_guest_finds_every_bar_of_identical_gpus() {
    for count in [2, 4, 8] {
        let devices = gpus(count, 32);
        let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
        let report = probe(&Guest::new("probe").devices(&devices));
        let mut found: Vec<(u64, u64)> = report.lines().filter(|line| line.starts_with("bar ")).map(span).collect();
        found.sort_unstable();
        assert_eq!(found.len(), 3 * count);
        assert!(found.iter().all(|(base, _)| *base != 0) && found.is_sorted_by(|a, b| a.1 < b.0), "{report}");
    }
}

fn probe(guest: &Guest) -> String {
    guest.clone().with(&["--debug-console", "stdio", "--serial", "off"]).run().expect_code(0).stdout.clone()
}

/// First and last address of a reported BAR.
fn span(line: &str) -> (u64, u64) {
    let value = |key: &str| {
        let text = line.split(' ').find_map(|word| word.strip_prefix(key)).unwrap();
        u64::from_str_radix(text, 16).unwrap()
    };
    (value("base="), value("base=") + value("size=") - 1)
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a6_a_width_that_is_too_small_is_refused_with_the_bits_and_one_that_is_not_boots() {
    // Four times 128 GiB do not fit into 39 bits beside the alignment of the first.
    for (bits, code) in [(39, 400), (42, 204)] {
        let server = Server::empty();
        let devices: Vec<String> = gpus(4, 128).iter().map(|device| format!("{{\"banyan\": \"{device}\"}}")).collect();
        let cpus = format!("\"cpus\": {{\"boot_vcpus\": 1, \"max_vcpus\": 1, \"max_phys_bits\": {bits}}}");
        let (status, body) = server.create(&image("hello.elf"), &format!(", {cpus}, \"devices\": [{}]", devices.join(", ")));
        assert_eq!(status, code, "{bits} bits: {body}");
        if code == 204 {
            server.expect("PUT vm.boot", "", 204);
        } else {
            assert!(body.contains("40 guest-physical address bits would be enough, the guest has 39"), "{body}");
        }
    }
}

#[test]
fn case_a7_bars_of_any_size_need_no_aperture_to_be_chosen() {
    for large in [64, 256, 512] {
        let devices = gpus(2, large);
        let firmware = image("firmware.bin");
        let more = [&["--firmware", firmware.as_str()], &options(&devices)[..]].concat();
        let plan = dry_run(&more);
        let found = bars(&plan.expect_code(0).stdout, &format!("{large}G"));
        assert_eq!(found.len(), 2, "{plan}");
        assert!(found.iter().all(|(base, last)| base % (large * GIB) == 0 && last - base + 1 == large * GIB), "{plan}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a8_a_guest_finds_large_bars_at_their_natural_alignment() {
    let devices = gpus(4, 128);
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let report = probe(&Guest::new("probe").devices(&devices));
    let large: Vec<(u64, u64)> = report.lines().filter(|line| line.ends_with("size=2000000000")).map(span).collect();
    assert_eq!(large.len(), 4, "{report}");
    assert!(large.iter().all(|(base, _)| *base != 0 && base % (128 * GIB) == 0), "{report}");
}

#[test]
fn case_a10_what_does_not_fit_below_4_gib_is_refused_with_the_sum_and_what_there_is() {
    let devices = |count: usize| -> Vec<String> { (0..count).map(|index| format!("stub,id=d{index},bar0=16M:mem32")).collect() };
    dry_run(&options(&devices(40))).expect_code(0);
    let refused = dry_run(&options(&devices(200)));
    refused.expect_code(1).expect_error(&["the memory aperture below 4 GiB", "need 3200M", "it has 1536M", "1664M are missing"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a12_forty_ports_have_no_io_window_and_all_their_devices_are_there() {
    let devices: Vec<String> = (0..40).map(|index| format!("stub,id=d{index},bar0=64K:mem32")).collect();
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let report = probe(&Guest::new("probe").devices(&devices));
    let count = |start: &str, part: &str| report.lines().filter(|line| line.starts_with(start) && line.contains(part)).count();
    assert_eq!((count("bridge ", " io=none "), count("bridge ", "")), (40, 40), "{report}");
    assert_eq!((count("bar ", " size=10000"), count("bar ", "base=0 ")), (40, 0), "{report}");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn io_bars_answer_on_a_root_bus_and_are_said_to_be_unassigned_below_ports() {
    let devices = ["stub,id=a,bar0=32:io,bar1=4K:mem32,bar2=256:io", "stub,id=b,bar4=4:io"];
    let outcome = Guest::new("ports").devices(&devices).with(&["--pcie", "flat"]).passes();
    assert_eq!(outcome.stdout.lines().filter(|line| line.starts_with("ports 00:")).count(), 3, "{outcome}");
    Guest::new("ports").devices(&["stub,id=a,bar0=32:io"]).with(&["--pcie", "flat"]).options("move=1").passes();
    let below = dry_run(&options(&devices.map(str::to_owned)));
    below.expect_code(0).expect_output(&["note: BAR 0 of `a` gets no I/O ports: ports have no I/O window"]);
    assert!(!Guest::new("ports").devices(&devices).passes().stdout.contains("ports 0"));
}
