//! A segment beside the first one, from the outside: what a guest finds in it by its own window for configuration cycles, and
//! devices that come and go there. The first segment of `tests/topologies/two-nodes.toml` is there to be mixed up with.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use tests::Guest;
use tests::server::Server;

/// What `probe` reports, line by line.
#[track_caller]
fn probed(pcie: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report");
    let console = format!("file={}", path.display());
    Guest::new("probe").topology("two-nodes").with(&["--pcie", pcie, "--debug-console", &console]).run().expect_code(0);
    std::fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn each_segment_has_its_own_configuration_space_with_and_without_the_mirror() {
    let report = probed("mirror=on");
    let all = report.join("\n");
    for line in [
        "root 0000:00 node=0",
        "root 0000:80 node=1",
        "root 0001:00 node=1",
        "function 06:00.0 id=1b36:00a1 ",
        "bridge 0001:07:11.0 primary=07 secondary=0b subordinate=0b ",
        "function 0001:01:00.0 id=1b36:00a6 ",
        "interrupt 0001:01:00.0 kind=msix vector=3 result=received",
    ] {
        assert!(report.iter().any(|seen| seen.starts_with(line)), "no line `{line}` in\n{all}");
    }
    let segments: Vec<&str> = report.iter().filter_map(|line| line.strip_prefix("segment ")).collect();
    assert!(segments[0].starts_with("0000 ecam=e0000000 buses=00-"), "{segments:?}");
    assert!(segments.len() == 2 && segments[1].starts_with("0001 ") && segments[1].ends_with(" buses=00-0d"), "{segments:?}");
    assert_eq!(report, probed("mirror=off"));
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn interrupts_and_copies_work_in_each_segment_and_between_them() {
    let outcome = Guest::new("interrupts").topology("two-nodes").passes();
    outcome.expect_output(&["tested 0001:01:00.0 msix 4\n", "tested 0001:00:02.0 intx C gsi 20\n"]);
    let outcome = Guest::new("dma").topology("two-nodes").passes();
    outcome.expect_output(&["copied 0001:01:00.0 ", "copied 0001:00:02.0 "]);
}

/// Name, port and place of what comes: on the second root complex of the first segment, then in the other one below a root port,
/// a switch, a switch below that one, and on a conventional bus.
const NEWCOMERS: [(&str, &str, &str); 6] = [
    ("a", "rp2", "0000:82:00.0"),
    ("b", "hot0", "0001:02:00.0"),
    ("c", "hot1", "0001:05:00.0"),
    ("d", "deep0", "0001:08:00.0"),
    ("e", "deep3", "0001:0b:00.0"),
    ("f", "bus", "0001:0d:00.0"),
];

/// As guests write it.
fn short(place: &str) -> &str {
    place.strip_prefix("0000:").unwrap_or(place)
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_come_and_leave_in_another_segment_below_any_port() {
    // The conventional bus is 0001:0d.
    let guest = Guest::new("slots").options("bus=269").topology("two-nodes").with(&["--memory", "64M"]);
    let mut server = Server::run(&guest);
    server.process.expect("slots 7");
    let at_the_start = server.devices();
    for round in 0..3 {
        for (id, on, place) in NEWCOMERS {
            let told = server.adds(&format!("stub,id={id},on={on},bar0=1M:mem32,bar2=32M:mem64:prefetchable,msix=4"));
            assert!(told.contains(&format!(r#""bdf":"{place}""#)), "{told}");
            server.process.expect(&format!("came {} 1b36:10bd", short(place)));
        }
        server.refuses("stub,on=deep3", 409, &["deep3", "e"]);
        server.refuses("stub,on=deep1,bar0=64M:mem32", 409, &["deep1", "memory window lacks"]);
        if round == 1 {
            // They are there after a reset, and are found without an event.
            server.process.send("r");
            server.process.expect("slots 7");
            for (_, _, place) in &NEWCOMERS[..5] {
                server.process.expect(&format!("came {} 1b36:10bd", short(place)));
            }
        }
        let listed = server.devices_json();
        assert!(NEWCOMERS.iter().all(|(_, _, place)| listed.contains(&format!(r#""bdf":"{place}""#))), "{listed}");
        for (id, on, place) in NEWCOMERS {
            assert_eq!(server.remove(id), 204);
            let said = if on == "bus" { "let go of" } else { "left" };
            server.process.expect(&format!("{said} {}", short(place)));
            server.until("PUT vm.remove-device", &format!(r#"{{"id":"{id}"}}"#), 404);
        }
        assert_eq!(server.devices(), at_the_start);
    }
    server.process.send("\n");
    server.process.finish().expect_code(1);
}
