//! What the host lacks or refuses, and what is told about a run.

use std::fs;
use std::process::Command;

use tests::guest::{PASSED, image};
use tests::process::{LIMIT, in_shell};
use tests::{Capabilities, Guest, Session, banyan, with_other_mounts};

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn a_host_without_kvm_is_told_what_to_load() {
    let outcome = with_other_mounts("mount -t tmpfs none /dev", Capabilities::None, &["run", "--kernel", &image("hello.elf")]);
    outcome.expect_code(1).expect_error(&["/dev/kvm", "kvm_intel", "No such file"]);
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn a_user_without_access_to_kvm_is_told_which_group_to_join() {
    let folder = tempfile::tempdir().unwrap();
    let locked = folder.path().join("locked");
    fs::write(&locked, "").unwrap();
    let lock =
        format!("chmod 0 '{0}' && mount -t tmpfs none /dev && touch /dev/kvm && mount --bind '{0}' /dev/kvm", locked.display());
    let outcome = with_other_mounts(&lock, Capabilities::None, &["run", "--kernel", &image("hello.elf")]);
    outcome.expect_code(1).expect_error(&["/dev/kvm", "group kvm", "Permission denied"]);
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn a_file_that_is_not_kvm_is_told() {
    let cover = "mount --bind /dev/zero /dev/kvm";
    let outcome = with_other_mounts(cover, Capabilities::None, &["run", "--kernel", &image("hello.elf")]);
    outcome.expect_code(1).expect_error(&["/dev/kvm is not the KVM device", "10:232"]);
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn a_sysfs_that_cannot_be_read_is_told_and_not_taken_for_an_empty_host() {
    let closed = "mount -t tmpfs none /sys && mkdir -p /sys/bus/pci/devices && chmod 0 /sys/bus/pci/devices";
    for prepare in ["mount -t tmpfs none /sys", closed] {
        for arguments in [
            &["topology", "show"][..],
            &["topology", "record"],
            &["topology", "matrix"],
            &["cdi", "generate"],
            &["check", "0000:00:00.0"],
            &["run", "--dry-run", "--device", "0000:00:00.0"],
        ] {
            let outcome = with_other_mounts(prepare, Capabilities::None, arguments);
            outcome.expect_error(&["cannot read /sys/bus/pci/devices", "is sysfs mounted"]);
            assert!([1, 2].contains(&outcome.code) && outcome.stdout.is_empty(), "{outcome}");
        }
    }
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn a_dry_run_needs_no_kvm() {
    let outcome =
        with_other_mounts("mount -t tmpfs none /dev", Capabilities::None, &["run", "--dry-run", "--device", "stub,id=gpu0"]);
    outcome.expect_code(0).expect_output(&["gpu0"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_disk_that_cannot_be_used_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("empty"), "").unwrap();
    for (disk, parts) in [
        (path("none"), vec!["none", "No such file"]),
        (format!("{},id=root", path("empty")), vec!["root", "512"]),
        (folder.path().display().to_string(), vec![folder.path().to_str().unwrap()]),
    ] {
        let outcome = Guest::new("hello").with(&["--disk", &disk]).run();
        outcome.expect_code(1).expect_error(&parts);
        assert_eq!(outcome.stdout, "", "{outcome}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn counters_are_printed_at_the_end_on_standard_error() {
    let outcome = Guest::new("probe").with(&["--device", "stub,id=s", "--counters"]).run();
    outcome.expect_code(0).expect_error(&["port writes", "configuration reads"]);
    let reads = outcome.stderr.lines().find_map(|line| line.trim().strip_prefix("configuration reads"));
    assert!(reads.and_then(|count| count.trim().parse::<u64>().ok()).is_some_and(|count| count > 10), "{outcome}");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_log_file_is_appended_to_and_keeps_standard_error_clean() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    fs::write(&log, "earlier\n").unwrap();
    let outcome = Guest::new("triple").with(&["--log", &format!("level=trace,file={}", log.display())]).run();
    assert_eq!(outcome.expect_code(6).stderr, "", "{outcome}");
    let text = fs::read_to_string(&log).unwrap();
    assert!(text.starts_with("earlier\n") && text.contains("triple fault"), "{text}");
    banyan(&["run", "--dry-run", "--log", "file=/nowhere/log"]).expect_code(1).expect_error(&["/nowhere/log", "No such file"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_that_fills_files_up_to_their_limit_loses_output_and_requests_and_not_its_machine() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let limited = |guest: &Guest| Session::spawn(in_shell("ulimit -f 4 && exec \"$0\" \"$@\"", guest.arguments()), LIMIT).wait();
    let serial = format!("file={}", path("serial"));
    let outcome = limited(&Guest::new("flood").with(&["--serial", &serial, "--debug-console", "stdio"]));
    outcome.expect_code(PASSED).expect_output(&["flood over"]).expect_error(&["console output failed", "File too large"]);
    assert_eq!(fs::metadata(path("serial")).unwrap().len(), 4096);
    fs::File::create(path("disk")).unwrap().set_len(1 << 20).unwrap();
    for io in ["sync", "uring"] {
        let disk = format!("{},io={io}", path("disk"));
        let outcome = limited(&Guest::new("disks").options("requests=40 bytes=512").with(&["--disk", &disk]));
        assert!(outcome.code < 128 && outcome.stderr.contains("File too large"), "{io}: {outcome}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_disk_that_is_no_image_is_refused_without_waiting_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo").display().to_string();
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for path in [fifo.as_str(), "/dev/zero", "/dev"] {
        for readonly in ["on", "off"] {
            let outcome = Guest::new("hello").with(&["--disk", &format!("{path},readonly={readonly}")]).run();
            outcome.expect_code(1).expect_error(&[path, "no regular file or block device"]);
        }
    }
}

#[test]
fn a_topology_without_an_end_is_refused() {
    banyan(&["run", "--dry-run", "--topology", "/dev/zero"]).expect_code(1).expect_error(&["/dev/zero", "no regular file"]);
    let folder = tempfile::tempdir().unwrap();
    let large = folder.path().join("large.toml");
    fs::File::create(&large).unwrap().set_len((16 << 20) + 1).unwrap();
    banyan(&["run", "--dry-run", "--topology", large.to_str().unwrap()]).expect_code(1).expect_error(&["large.toml", "16 MiB"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn any_node_number_of_a_root_complex_costs_little() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.toml");
    fs::write(&path, "[[root-complex]]\nname = \"rc0\"\nnode = 4294967295\n").unwrap();
    Guest::new("hello").with(&["--topology", path.to_str().unwrap()]).run().expect_code(0);
}
