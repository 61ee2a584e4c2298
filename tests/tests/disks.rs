//! Disks at work on /dev/kvm, with an honest driver in the guest: what requests cost, and doorbells whose BARs move.

use std::fs::File;

use tempfile::TempDir;
use tests::Guest;
use tests::guest::image;
use tests::process::{Outcome, until};
use tests::server::Server;

fn disks(folder: &TempDir, count: usize) -> Vec<String> {
    let make = |index: usize| {
        let path = folder.path().join(format!("disk{index}.img"));
        let made = File::create(&path).and_then(|file| file.set_len(16 << 20));
        made.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        path.display().to_string()
    };
    (0..count).map(make).collect()
}

/// Runs the driver on as many disks, each with `keys`.
fn drive(count: usize, keys: &str, more: &[&str], options: &str) -> Outcome {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let paths = disks(&folder, count);
    let guest = Guest::new("disks").options(&format!("{options} bytes=512")).with(&["--memory", "128M", "--counters"]).with(more);
    paths.iter().fold(guest, |guest, path| guest.with(&["--disk", &format!("{path}{keys}")])).passes()
}

/// Reads and writes of a disk's BAR that reached this process, by its counters.
fn accesses(outcome: &Outcome) -> (u64, u64) {
    let line = outcome.stderr.lines().find_map(|line| line.trim().strip_prefix("disk0 BAR 0: "));
    let counts = line.and_then(|line| {
        let (reads, rest) = line.split_once(" reads, ")?;
        Some((reads.parse().ok()?, rest.split_once(" writes")?.0.parse().ok()?))
    });
    counts.unwrap_or_else(|| panic!("no counts: {outcome}"))
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn requests_cost_no_exit_to_this_process_whatever_ends_them() {
    for (keys, wait) in [("", "wait=poll"), (",io=sync", "wait=poll"), ("", "wait=interrupt"), (",io=sync", "wait=interrupt")] {
        let few = accesses(&drive(1, keys, &[], &format!("requests=10 {wait}")));
        let many = accesses(&drive(1, keys, &[], &format!("requests=310 {wait}")));
        assert_eq!(few, many, "{keys} {wait}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn what_was_written_is_read_back_whole_however_many_requests_are_under_way() {
    for keys in ["", ",io=sync"] {
        for options in ["bytes=4096 batch=80 requests=80", "bytes=65536 batch=16 requests=16"] {
            drive(2, keys, &["--cpus", "2"], options);
        }
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn disks_behind_ports_of_their_own_work_as_those_on_the_root_bus_do() {
    let ports = ["--pcie", "virtio=ports"];
    let few = accesses(&drive(2, "", &ports, "requests=10"));
    let many = accesses(&drive(2, "", &ports, "requests=310"));
    assert_eq!(few, many, "doorbells below ports cost no exit either");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn without_ioeventfd_a_request_costs_one_exit() {
    let off = ["--pcie", "ioeventfd=off"];
    let few = accesses(&drive(1, "", &off, "requests=10"));
    let many = accesses(&drive(1, "", &off, "requests=310"));
    assert_eq!((many.0 - few.0, many.1 - few.1), (0, 600), "three hundred writes and as many reads");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn doorbells_are_rung_through_configuration_space_as_well() {
    let outcome = drive(1, "", &[], "requests=50 ring=window");
    outcome.expect_output(&["disk 0 requests 100 "]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn disks_that_change_places_are_rung_at_their_new_ones_while_others_ring_at_all() {
    for (cpus, switch) in [(1, "on"), (2, "on"), (2, "off")] {
        let more = ["--cpus", &cpus.to_string(), "--pcie", &format!("ioeventfd={switch}")];
        let outcome = drive(2, "", &more, &format!("moves=60 cpus={cpus}"));
        outcome.expect_output(&["disk 0 requests 92 ", "disk 1 requests 92 "]);
        let doorbells = if switch == "on" { "1 doorbells without exits" } else { "0 doorbells without exits" };
        assert_eq!(outcome.stderr.matches(doorbells).count(), 2, "{outcome}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn doorbells_are_given_back_when_their_device_leaves() {
    let server = Server::with_policy("[hot-plug]\nplace = \"ports\"\n[pcie]\nroot-ports = 1\n");
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let path = disks(&folder, 1).remove(0);
    assert_eq!(server.create(&image("slots.elf"), "").0, 204);
    server.expect("PUT vm.boot", "", 204);
    let until = |text: &str| until(text, || server.expect("GET vm.counters", "", 200), |told| told.contains(text));
    for _ in 0..20 {
        server.expect("PUT vm.add-disk", &format!(r#"{{"path":"{path}","id":"d"}}"#), 200);
        until(r#""bar0_doorbells_without_exits":1"#);
        server.expect("PUT vm.remove-device", r#"{"id":"d"}"#, 204);
        until(r#""doorbells_without_exits":0,"#);
    }
    server.shuts_down();
}
