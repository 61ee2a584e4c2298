//! What `banyan demo` shows, and that it agrees with itself.

use tests::banyan;

#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
#[test]
fn the_demonstration_shows_both_trees_and_the_guest_sees_what_was_planned() {
    let outcome = banyan(&["demo"]);
    outcome.expect_code(0).expect_output(&["planned:\n-[0000:00]-+-", "seen by the guest:\n-[0000:00]-+-", "DMA copies"]);
    let (planned, rest) = outcome.stdout.split_once("seen by the guest:\n").unwrap();
    let (seen, table) = rest.split_once("planned").unwrap();
    for (name, ids) in [("gpu0", "10de:20b8"), ("gpu1", "10de:20b8"), ("nic0-port0", "15b3:a2d6"), ("nic1-port1", "15b3:a2d6")] {
        assert!(planned.contains(&format!("{name} {ids}, clique 0")), "the planned tree lacks {name}\n{outcome}");
    }
    assert_eq!(seen.matches("10de:20b8 clique 0 16GT/s x16").count(), 2, "{outcome}");
    assert_eq!(seen.matches("15b3:a2d6 clique 0 16GT/s x16").count(), 4, "{outcome}");
    assert_eq!(seen.lines().filter(|line| line.contains(" -> ") && line.ends_with(" ok")).count(), 4, "{outcome}");
    for (row, count) in [("functions", "20"), ("bridges", "12"), ("BARs", "12"), ("interrupts received", "4")] {
        let cells = table.lines().find_map(|line| line.strip_prefix(row)).unwrap_or_default();
        assert_eq!(cells.split_whitespace().collect::<Vec<_>>(), [count, count, "0"], "{row}\n{outcome}");
    }
    assert!(outcome.stdout.ends_with("\nthe guest sees what was planned\n"), "{outcome}");
    assert_eq!(outcome.stderr, "", "{outcome}");
}

#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
#[test]
fn the_demonstration_is_the_same_every_time_and_shows_every_line_on_request() {
    let first = banyan(&["demo", "-v"]);
    first.expect_code(0).expect_output(&[
        "  agrees   capabilities 06:00.0 standard=express,msix,clique extended=aer\n",
        "  agrees   interrupt 06:00.0 kind=msix vector=7 result=received\n",
        "  agrees   ports answered=yes agree=yes\n",
        "  agrees   end functions=20\n",
    ]);
    assert_eq!(banyan(&["demo", "-v"]).expect_code(0).stdout, first.stdout);
}
