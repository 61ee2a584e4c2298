//! The hierarchy and its endpoints as a bare-metal guest finds them, on /dev/kvm.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::fs;

use tests::{Guest, banyan};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../resources/topologies/a100x.toml");
const GPU: &str = "stub,ids=10de:20b8,class=030200,bar0=16M:mem32,bar1=1G:mem64:prefetchable,msix=8,dma=on,clique=0";

/// `GPU` with another name.
fn gpu(id: &str) -> String {
    format!("{GPU},id={id}")
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn interrupts_arrive_by_msix_msi_and_wire() {
    let outcome = Guest::new("interrupts")
        .with(&["--device", "stub,id=x,bar0=64K:mem32,msix=4,dma=on", "--device", "stub,id=m,bar0=4K:mem32,msi=8,dma=on"])
        .with(&["--device", "stub,id=a,bar0=4K:mem32,intx=A,dma=on", "--device", "stub,id=d,bar0=4K:mem32,intx=D,dma=on"])
        .passes();
    assert_eq!(outcome.stdout.matches("tested ").count(), 4, "{outcome}");
}

/// Also where they are on the bus behind that of the physical function.
#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn interrupts_of_virtual_functions_arrive() {
    for offset in ["8", "300"] {
        let device = format!("stub,bar0=64K:mem32,msix=4,dma=on,vfs=3,vf-offset={offset},vf-stride=2,vf-bars=[0:16K:mem32]");
        let outcome = Guest::new("interrupts").with(&["--device", &device]).passes();
        assert_eq!(outcome.stdout.matches("tested ").count(), 4, "{outcome}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_d1_every_size_of_msi_works_without_msix() {
    for vectors in ["1", "4", "32"] {
        Guest::new("interrupts").with(&["--device", &format!("stub,bar0=4K:mem32,msi={vectors},dma=on")]).passes();
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_copy_to_memory_and_to_each_other() {
    let outcome = Guest::new("dma").with(&["--device", &gpu("gpu0"), "--device", &gpu("gpu1")]).passes();
    assert_eq!(outcome.stdout.matches("copied ").count(), 2, "{outcome}");
    Guest::new("dma").with(&["--topology", DEMO]).passes();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_configuration_ports_are_silent_for_guests_that_find_ecam_by_acpi() {
    for (choice, cmdline, expected) in [
        ("cf8=auto", "", "ports answered=no"),
        ("cf8=off", "", "ports answered=no"),
        ("cf8=on", "", "ports answered=yes agree=yes"),
        ("cf8=auto", "acpi=off", "ports answered=yes agree=yes"),
        ("cf8=auto", "pci=nommconf", "ports answered=yes agree=yes"),
    ] {
        let report = probed(&["--device", "stub,id=a", "--pcie", choice, "--cmdline", cmdline]);
        assert!(report.iter().any(|line| line == expected), "{choice} {cmdline}: {report:#?}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_hostile_guest_neither_crashes_nor_hangs_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    for seed in 1..=4 {
        Guest::new("hostile")
            .options(&format!("seed={seed} rounds=3000"))
            .with(&["--device", &gpu("gpu0"), "--device", "stub,bar0=4K:mem32,bar1=32:io,msi=4,dma=on", "--pcie", "cf8=on"])
            .with(&["--device", "stub,bar0=64K:mem32,msix=4,vfs=4,vf-bars=[0:16K:mem32,2:1M:mem64:prefetchable]"])
            .with(&["--disk", disk.to_str().unwrap(), "--cpus", "2"])
            .passes();
    }
    Guest::new("hostile").options("seed=77").with(&["--topology", DEMO]).passes();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_probe_reports_every_function_of_the_demo_topology() {
    let outcome = Guest::new("probe").with(&["--topology", DEMO, "--debug-console", "stdio", "--serial", "off"]).run();
    outcome.expect_code(0).expect_output(&["banyan-probe 1\n", "\nend functions=", "clique ", "result=ok", "result=received"]);
    assert!(!outcome.stdout.contains("missing"), "{outcome}");
}

/// What the probe reports of a machine with these flags.
fn probed(flags: &[&str]) -> Vec<String> {
    let outcome = Guest::new("probe").with(flags).with(&["--debug-console", "stdio", "--serial", "off"]).run();
    outcome.expect_code(0).stdout.lines().map(str::to_owned).collect()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a2_a_guest_reads_the_flags_of_each_bar_and_each_lies_in_the_window_of_its_kind() {
    let report = probed(&["--device", "stub,bar0=4K:mem32,bar1=1M:mem64:prefetchable,bar3=64K:mem64"]);
    let fact =
        |start: &str| report.iter().find_map(|line| line.strip_prefix(start)).unwrap_or_else(|| panic!("{start}: {report:#?}"));
    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let window = |kind: &str| {
        let (_, range) = fact("bridge 00:00.0 ").split_once(&format!(" {kind}=")).unwrap();
        let (start, end) = range.split(' ').next().unwrap().split_once('-').unwrap();
        hex(start)..=hex(end)
    };
    for (bar, flags, kind) in [
        ("0", "type=mem32 prefetchable=no", "memory"),
        ("1", "type=mem64 prefetchable=yes", "prefetchable"),
        ("3", "type=mem64 prefetchable=no", "memory"),
    ] {
        let (seen, place) = fact(&format!("bar 01:00.0 {bar} ")).split_once(" base=").unwrap();
        assert_eq!(seen, flags);
        let (base, size) = place.split_once(" size=").unwrap();
        let (first, last) = (hex(base), hex(base) + hex(size) - 1);
        assert!(window(kind).contains(&first) && window(kind).contains(&last), "BAR {bar}: {report:#?}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a13_a_guest_that_programs_nothing_finds_every_bus_and_bar_at_its_planned_place() {
    let topology = ["--topology", DEMO];
    let plan = banyan(&[&["run", "--dry-run", "-v"], &topology[..]].concat());
    let mut planned = Vec::new();
    let mut place = "";
    for line in plan.expect_code(0).stdout.lines() {
        if let Some((function, rest)) = line.strip_prefix("0000:").and_then(|line| line.split_once("  "))
            && function.contains('.')
        {
            place = function;
            let buses = rest.split_once(", buses ").map(|(_, buses)| buses.split(',').next().unwrap_or_default());
            planned.push(format!("{place} buses {}", buses.unwrap_or("none")));
        } else if let Some(bar) = line.strip_prefix("      BAR ") {
            let mut words = bar.split_whitespace();
            let (number, range) = (words.next().unwrap(), words.next().unwrap());
            planned.push(format!("{place} BAR {number} {}", range.split('-').next().unwrap()));
        }
    }
    let report = probed(&topology);
    let mut seen = Vec::new();
    for line in &report {
        let words: Vec<&str> = line.split(' ').collect();
        let value = |key: &str| words.iter().find_map(|word| word.strip_prefix(key)).unwrap_or_default();
        match words.as_slice() {
            ["function", place, ..] => seen.push(format!("{place} buses none")),
            ["bridge", place, ..] => {
                let (first, last) = (value("secondary="), value("subordinate="));
                let buses = if first == last { first.to_owned() } else { format!("{first}-{last}") };
                seen.pop();
                seen.push(format!("{place} buses {buses}"));
            }
            ["bar", place, number, ..] => seen.push(format!("{place} BAR {number} {}", value("base="))),
            _ => {}
        }
    }
    assert_eq!(planned.iter().filter(|fact| fact.contains("buses")).count(), 20, "{plan}");
    assert_eq!(seen, planned);
}

#[test]
fn a_dry_run_prints_the_tree_and_with_v_the_addresses() {
    let plain = banyan(&["run", "--dry-run", "--topology", DEMO]);
    plain.expect_code(0).expect_output(&["10de:20b8", "04.0", "05.0"]);
    let verbose = banyan(&["run", "--dry-run", "-v", "--topology", DEMO]);
    verbose.expect_code(0).expect_output(&["10de:20b8", "128G"]);
    assert!(verbose.stdout.len() > plain.stdout.len(), "{verbose}");
}

#[test]
fn a_device_hangs_on_a_root_port_or_flat_on_the_root_bus() {
    for (policy, buses) in [("root-ports", "-[0000:00]---00.0-[01]----00.0  gpu0"), ("flat", "-[0000:00]---00.0  gpu0")] {
        let outcome = banyan(&["run", "--dry-run", "--device", &gpu("gpu0"), "--pcie", &format!("topology={policy}")]);
        outcome.expect_code(0).expect_output(&[buses]);
    }
}

/// A topology file with these tables behind a root complex `rc0`.
fn planned(tables: &str) -> tests::Outcome {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.toml");
    fs::write(&path, format!("[[root-complex]]\nname = \"rc0\"\n{tables}")).unwrap();
    banyan(&["run", "--dry-run", "--topology", path.to_str().unwrap()])
}

#[test]
fn a_topology_that_is_no_tree_is_refused_with_the_names_in_question() {
    let port = |name: &str, kind: &str, on: &str| format!("[[port]]\nname = \"{name}\"\nkind = \"{kind}\"\non = \"{on}\"\n");
    let stub = |name: &str, on: &str| format!("[[device]]\nname = \"{name}\"\non = \"{on}\"\nkind = \"stub\"\n");
    for (tables, parts) in [
        (format!("{}{}", port("a", "upstream-port", "b"), port("b", "downstream-port", "a")), vec!["a", "b"]),
        (stub("d", "nowhere"), vec!["d", "nowhere"]),
        (format!("{}{}", port("rp0", "root-port", "rc0"), port("rp0", "root-port", "rc0")), vec!["rp0"]),
        (format!("{}{}{}", port("rp0", "root-port", "rc0"), stub("d0", "rp0"), stub("d1", "rp0")), vec!["d0", "d1", "rp0"]),
        (format!("{}device = 3\n{}device = 3\n", stub("d0", "rc0"), stub("d1", "rc0")), vec!["d0", "d1"]),
    ] {
        planned(&tables).expect_code(1).expect_error(&parts);
    }
    planned("[[port]]\nkind = \"root-port\"\non = \"rc0\"\n").expect_code(1).expect_error(&["line 3", "`name`"]);
}

#[test]
fn a_device_that_cannot_be_is_refused() {
    for (device, parts) in [
        ("0000:ff:1f.7", vec!["0000:ff:1f.7"]),
        ("/sys/bus/pci/devices/nothing", vec!["nothing"]),
        ("stub,id=s,clique=0", vec!["s", "10de"]),
        ("stub,id=s,bar0=3M:mem32", vec!["s"]),
        ("stub,id=s,link=33GT/s x16", vec!["s", "33GT/s"]),
        ("stub,id=s,on=rp9", vec!["s", "rp9"]),
    ] {
        banyan(&["run", "--dry-run", "--device", device]).expect_code(1).expect_error(&parts);
    }
    banyan(&["run", "--dry-run", "--device", "stub,id=s", "--device", "stub,id=s"])
        .expect_code(1)
        .expect_error(&["two devices are named `s`"]);
}

/// The host's physical address width, which is the guest's.
fn address_bits() -> u32 {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap();
    let line = cpu.lines().find_map(|line| line.strip_prefix("address sizes\t: ")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn bars_beyond_the_address_width_are_refused_with_the_bits_they_need() {
    let bits = address_bits();
    // All but 1 TiB is taken by RAM, and 1.5 TiB of BARs is asked for.
    let memory = format!("{}T", (1u64 << (bits - 40)) - 1);
    let bars = "stub,id=huge,bar0=512G:mem64:prefetchable,bar2=512G:mem64:prefetchable,bar4=512G:mem64:prefetchable";
    let outcome = banyan(&["run", "--dry-run", "--memory", &memory, "--device", bars]);
    outcome.expect_code(1).expect_error(&["huge", &format!("{} ", bits + 1), "bits"]);
}
