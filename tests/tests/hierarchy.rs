//! Devices in deep and odd places (`tests/topologies`), and a guest that rearranges the hierarchy above them.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tests::guest::{Guest, PASSED};
use tests::{Outcome, banyan};

/// Runs `probe`; returns its report, line by line.
#[track_caller]
fn probe(guest: Guest) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report");
    guest.with(&["--debug-console", &format!("file={}", path.display())]).run().expect_code(0);
    let report = std::fs::read_to_string(&path).unwrap();
    assert!(report.starts_with("banyan-probe 1\n") && report.contains("\nend functions="), "{report}");
    report.lines().map(str::to_owned).collect()
}

fn expect_lines(report: &[String], lines: &[&str]) {
    for line in lines {
        assert!(report.iter().any(|seen| seen == line), "no line `{line}` in\n{}", report.join("\n"));
    }
}

/// The places of BARs and windows in the long form of a plan: `01:00.0 bar 2` or `01:00.0 memory` -> `first-last`.
fn planned(tree: &str) -> BTreeMap<String, String> {
    let mut place = "";
    let mut found = BTreeMap::new();
    for line in tree.lines() {
        let mut words = line.split_whitespace();
        if let Some(at) = line.split_whitespace().next().filter(|_| line.starts_with("000")) {
            place = at.strip_prefix("0000:").unwrap_or(at);
        } else if line.starts_with("      ") {
            let (first, second, third) = (words.next(), words.next(), words.next());
            match (first, second, third) {
                (Some("BAR"), Some(n), Some(range)) if range != "none" => {
                    found.insert(format!("{place} bar {n}"), range.to_owned());
                }
                (Some(kind @ ("memory" | "prefetchable")), Some(range), _) if place.contains('.') => {
                    found.insert(format!("{place} {kind}"), range.to_owned());
                }
                _ => {}
            }
        }
    }
    found
}

/// The same of a report.
fn reported(report: &[String]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for line in report {
        let words: Vec<&str> = line.split(' ').collect();
        let value = |key: &str| words.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        match words.as_slice() {
            ["bar", place, n, ..] => {
                let number = |key| u64::from_str_radix(value(key).unwrap(), 16).unwrap();
                let (base, size) = (number("base"), number("size"));
                if base != 0 {
                    found.insert(format!("{place} bar {n}"), format!("{base:x}-{:x}", base + size - 1));
                }
            }
            ["bridge", place, ..] => {
                for kind in ["memory", "prefetchable"] {
                    if let Some(range) = value(kind).filter(|range| *range != "none") {
                        found.insert(format!("{place} {kind}"), range.to_owned());
                    }
                }
            }
            _ => {}
        }
    }
    found
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a13_a_guest_finds_every_bar_and_window_where_the_dry_run_shows_it() {
    for name in ["nested", "chain", "two-nodes"] {
        let plan = banyan(&["run", "--dry-run", "-v", "--topology", &tests::guest::topology(name)]);
        let planned = planned(&plan.expect_code(0).stdout);
        assert!(planned.len() >= 12, "{planned:?}");
        assert_eq!(reported(&probe(Guest::new("probe").topology(name))), planned);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a13_a_guest_walks_as_many_switches_below_each_other_as_256_buses_allow() {
    let port = |name: &str, kind, on: &str| format!("[[port]]\nname = \"{name}\"\nkind = \"{kind}\"\non = \"{on}\"\n");
    let mut file = "[[root-complex]]\nname = \"rc0\"\n".to_owned() + &port("d", "root-port", "rc0");
    let mut above = "d".to_owned();
    for level in 0..127 {
        file += &port(&format!("u{level}"), "upstream-port", &above);
        above = format!("d{level}");
        file += &port(&above, "downstream-port", &format!("u{level}"));
    }
    file += &format!("[[device]]\nname = \"e\"\nkind = \"stub\"\non = \"{above}\"\nbars = [\"0:1M:mem32\"]\n");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep.toml").display().to_string();
    std::fs::write(&path, file).unwrap();
    let plan = banyan(&["run", "--dry-run", "-v", "--topology", &path]);
    let planned = planned(&plan.expect_code(0).stdout);
    assert!(planned.contains_key("ff:00.0 bar 0"), "{planned:?}");
    assert_eq!(reported(&probe(Guest::new("probe").with(&["--topology", &path]))), planned);
}

/// A tree as it is drawn, without the names and ids behind each endpoint.
fn shape(text: &str) -> Vec<String> {
    let tree = text.lines().skip_while(|line| !line.starts_with("-[")).take_while(|line| !line.contains("->"));
    let tree = tree.filter(|line| line.contains("--") || line.contains("+-") || line.contains("\\-"));
    tree.map(|line| line.split("  ").filter(|part| !part.contains(':') || part.contains("-[")).collect()).collect()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a13_the_tree_a_guest_draws_is_the_tree_of_the_dry_run() {
    let plan = banyan(&["run", "--dry-run", "--topology", &tests::guest::topology("nested")]);
    let seen = Guest::new("probe").topology("nested").run();
    assert!(shape(&plan.stdout).len() >= 8, "{plan}");
    assert_eq!(shape(&seen.stdout), shape(&plan.stdout), "{seen}\n{plan}");
}

const NIC: &str = "stub,ids=15b3:a2d6,class=020000,bar0=32M:mem64:prefetchable,intx=A,dma=on";
const GPU: &str = "stub,ids=10de:20b8,class=030200,bar0=16M:mem32,bar1=1G:mem64:prefetchable,msix=4,dma=on";

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_draws_the_trees_of_port_budgets() {
    let devices = |ids: [&str; 4]| ids.map(|id| format!("{},id={}", if id.starts_with('n') { NIC } else { GPU }, id));
    let conventional =
        [format!("{NIC},id=n0,attach=pci"), format!("{NIC},id=n1,attach=pci"), format!("{GPU},id=g0"), format!("{GPU},id=g1")];
    for (pcie, devices, lines) in [
        ("root-ports=4", devices(["n0", "n1", "g0", "g1"]), 8),
        ("cold-plug=switch-port,switches=2,switch-ports=2", devices(["n0", "g0", "n1", "g1"]), 4),
        ("root-ports", conventional, 4),
    ] {
        let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
        let options: Vec<&str> = devices.iter().flat_map(|device| ["--device", device]).chain(["--pcie", pcie]).collect();
        let plan = banyan(&[&["run", "--dry-run"], &options[..]].concat());
        let seen = Guest::new("probe").with(&options).run();
        assert_eq!(shape(&plan.expect_code(0).stdout).len(), lines, "{plan}");
        assert_eq!(shape(&seen.stdout), shape(&plan.stdout), "{seen}\n{plan}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_on_a_conventional_bus_have_256_bytes_and_swizzled_wires() {
    let nics = ["a", "b", "c", "d"].map(|id| format!("stub,id={id},bar0=64K:mem32,intx=A,dma=on,attach=pci"));
    let nics: Vec<&str> = nics.iter().map(String::as_str).collect();
    let report = probe(Guest::new("probe").devices(&nics));
    for device in 0..4 {
        let place = format!("02:{device:02x}.0");
        expect_lines(&report, &[&format!("capabilities {place} standard=none extended=none")]);
        assert!(report.iter().any(|line| line.starts_with(&format!("function {place} ")) && line.contains("type=conventional")));
    }
    // Each device's INTA is another pin of the bridge.
    let outcome = Guest::new("interrupts").devices(&nics).passes();
    for device in 0..4 {
        outcome.expect_output(&[&format!("tested 02:{device:02x}.0 intx A gsi {}\n", 16 + device)]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a9_roms_and_bars_of_virtual_functions_lie_where_the_dry_run_shows_them() {
    let devices = [
        "--device",
        "stub,id=nic,bar0=16M:mem32,rom=512K,vfs=16,vf-offset=2,vf-bars=[0:256M:mem64:prefetchable,2:16K:mem32]",
        "--device",
        "stub,id=gpu,bar0=1G:mem64:prefetchable,rom=2K,attach=pci",
        "--device",
        "stub,id=far,bar0=4K:mem32,rom=64K,vfs=2,vf-offset=300",
    ];
    let plan = banyan(&[&["run", "--dry-run", "-v"], &devices[..]].concat());
    let mut planned = Vec::new();
    let mut place = "";
    for line in plan.expect_code(0).stdout.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            [at, ..] if at.starts_with("0000:") => place = at.trim_start_matches("0000:"),
            ["ROM", range, ..] => planned.push(format!("rom {place} base={}", range.split('-').next().unwrap())),
            ["VF", "BAR", n, range, ..] => planned.push(format!("vf-bar {place} {n} base={}", range.split('-').next().unwrap())),
            _ => {}
        }
    }
    assert_eq!(planned.len(), 5, "{plan}");
    let outcome = Guest::new("roms").with(&devices).passes();
    let found: Vec<&str> =
        outcome.stdout.lines().filter(|line| line.starts_with("rom ") || line.starts_with("vf-bar ")).collect();
    let places: Vec<&str> = found.iter().map(|line| line.split(" size=").next().unwrap()).collect();
    assert_eq!(places, planned, "{outcome}");
    outcome.expect_output(&["size=100000000 vfs=16\n", "size=40000 vfs=16\n", "size=80000\n", "size=800\n"]);
    // The virtual functions of `far` begin on the bus behind its own.
    let port = plan.stdout.lines().find(|line| line.contains("far-port: root port")).unwrap();
    assert!(port.contains(", buses 02-03,"), "{port}");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_c13_odd_layouts_are_found_and_assigned() {
    let report = probe(Guest::new("probe").devices(&["stub,bar2=16K:mem64,bar4=4K:mem64", "stub", "stub,bar5=64K:mem32"]));
    let bars: Vec<&String> = report.iter().filter(|line| line.starts_with("bar ")).collect();
    assert_eq!(bars.len(), 3, "{report:?}");
    expect_lines(
        &report,
        &[
            "bar 01:00.0 2 type=mem64 prefetchable=no base=80000000 size=4000",
            "bar 01:00.0 4 type=mem64 prefetchable=no base=80004000 size=1000",
            "bar 03:00.0 5 type=mem32 prefetchable=no base=80100000 size=10000",
        ],
    );
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn interrupts_of_every_kind_arrive_from_every_depth() {
    let outcome = Guest::new("interrupts").topology("nested").passes();
    outcome.expect_output(&[
        "tested 01:00.0 msix 8\n",
        "tested 04:00.0 msi 4 maskable\n",
        "tested 04:00.1 intx B gsi 20\n",
        "tested 04:00.7 msix 2048\n",
        "tested 07:00.0 intx A gsi 18\n",
        "tested 08:00.0 intx C gsi 19\n",
        "nothing to test at 08:00.1\n",
        "tested 09:00.0 intx D gsi 21\n",
        "tested 00:09.0 intx A gsi 17\n",
    ]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_copy_to_memory_and_to_each_other_and_nowhere_else() {
    let outcome = Guest::new("dma").topology("nested").passes();
    for engine in ["01:00.0", "04:00.0", "04:00.1", "04:00.7", "07:00.0", "08:00.0", "08:00.1", "09:00.0", "00:09.0"] {
        outcome.expect_output(&[&format!("copied {engine} ")]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a1_a_bar_sized_with_decode_on_stays_and_a_moved_one_answers_at_its_new_place_alone() {
    let done = |outcome: &Outcome| {
        outcome.expect_output(&["bar 0: move to", "bar 2: case A1\n", "bar 2: windows\n", "bar 2: move to"]);
    };
    // Large emulated BARs are served by exits, small ones by memory slots, which stay until the BAR moves.
    let trapped = "stub,bar0=4K:mem32,bar2=2G:mem64:prefetchable,msix=4,dma=on";
    let direct = "stub,bar0=4K:mem32,bar2=16M:mem64:prefetchable,msix=4,dma=on";
    done(&Guest::new("bars").devices(&[trapped]).passes());
    done(&Guest::new("bars").devices(&[direct, trapped]).passes());
    let swapped = Guest::new("bars").devices(&[direct, direct]).passes();
    swapped.expect_output(&["renumber: 01 to 02 and back\n"]);
    done(&Guest::new("bars").topology("chain").passes());
    done(&Guest::new("bars").topology("chain").with(&["--memory", "5G", "--cpus", "2"]).passes());
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_a1_a_bar_that_is_sent_where_none_can_be_stays_and_one_line_says_so() {
    let device = "stub,id=dev,bar0=4K:mem32,bar1=64K:mem32,bar2=16M:mem64:prefetchable,msix=4,dma=on";
    let outcome = Guest::new("bars").devices(&[device]).passes();
    outcome.expect_output(&["bar 0: not to RAM", "bar 2: not to RAM", "bar 0: not to another BAR"]);
    for line in [
        "dev BAR 0: the guest moved it to 0x1000000, where its root complex has no BARs; it stays at 0x8",
        "dev BAR 0: the guest moved it to 0xe0000000, where its root complex has no BARs; it stays at 0x8",
    ] {
        assert_eq!(outcome.stderr.matches(line).count(), 1, "{line}: {outcome}");
    }
    // A guest goes on with that as long as it likes.
    assert!(outcome.stderr.matches("the guest moved it").count() <= 8, "{outcome}");
    outcome.expect_error(&["further failures of this device are not logged"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_c9_decode_toggles_cost_no_memory_slots() {
    let device = "stub,id=dev,bar0=4K:mem32,bar2=16M:mem64:prefetchable,bar4=128G:mem64:prefetchable,msix=4,dma=on";
    let mut seen = Vec::new();
    for toggles in ["toggles=1", "toggles=1000"] {
        let outcome = Guest::new("bars").options(toggles).devices(&[device]).with(&["--counters"]).passes();
        let lines = outcome.stderr.lines().filter(|line| line.contains("memory slot") || line.contains("mapped into KVM"));
        seen.push(lines.map(str::to_owned).collect::<Vec<_>>());
    }
    assert!(seen[0].iter().any(|line| line.contains("dev BAR 2: mapped into KVM 1 times")), "{seen:?}");
    assert_eq!(seen[0], seen[1]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_hostile_guest_ends_as_it_wants_and_costs_nothing_that_stays() {
    // With configuration ports as well; with configuration reads that exit and that do not; on several processors at once.
    for (seed, topology, pcie, cpus) in [
        (2, "nested", "cf8=on", 1),
        (3, "chain", "cf8=on,mirror=off", 2),
        (4, "nested", "mirror=on", 3),
        (5, "two-nodes", "mirror=on", 2),
    ] {
        let options = format!("seed={seed} rounds=3000 cpus={cpus}");
        let guest = Guest::new("hostile").topology(topology).with(&["--pcie", pcie, "--cpus", &cpus.to_string()]);
        let mut session = guest.options(&options).start();
        session.expect("rounds 3000");
        let first = session.usage_without_log();
        let mut most = first;
        while let Some(now) = session.usage_without_log() {
            most = most.max(Some(now));
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(most, first, "descriptors and threads, seed {seed}");
        let outcome = session.finish();
        outcome.expect_code(PASSED).expect_output(&[&format!("seed {seed} survived"), "PASS"]);
        assert!(!outcome.stderr.contains("error"), "{outcome}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_that_lets_devices_write_over_it_can_be_ended_and_leaves_no_panic() {
    for seed in [1, 2] {
        let options = format!("seed={seed} rounds=2000 masters=1");
        let mut session = Guest::new("hostile").topology("nested").options(&options).start();
        let deadline = Instant::now() + Duration::from_secs(4);
        while session.is_running() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        if session.is_running() {
            session.signal(Signal::TERM);
        }
        let outcome = session.finish();
        // It passed, failed, lost its interrupt table, ran into an instruction that KVM does not know, or was ended.
        assert!([PASSED, 3, 6, 8, 143].contains(&outcome.code), "{outcome}");
        assert!(!outcome.stderr.contains("panicked"), "{outcome}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_disk_survives_rings_of_any_content_and_serves_after_them() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    for seed in [1, 2] {
        let guest = Guest::new("rings").options(&format!("seed={seed} rounds=60")).with(&["--memory", "128M"]);
        let outcome = guest.with(&["--disk", disk.to_str().unwrap()]).passes();
        assert_eq!(outcome.stderr, "", "{outcome}");
    }
}
