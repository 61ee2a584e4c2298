//! Disk images that are missing, in use, read-only, cut off or not what they are called, at the start and while a guest runs.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;
use tests::guest::image;
use tests::server::Server;
use tests::{Capabilities, Guest, banyan, with_other_mounts};

const SIZE: u64 = 1 << 20;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap_or_else(|error| panic!("no temporary directory: {error}"))
}

fn raw(folder: &TempDir, name: &str) -> String {
    let path = folder.path().join(name);
    let made = File::create(&path).and_then(|file| file.set_len(SIZE));
    made.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    path.display().to_string()
}

/// Images that no machine can have: as in `--disk`, as in vm.add-disk, and what is said.
fn bad(folder: &TempDir) -> Vec<(String, String, &'static str)> {
    let at = |name: &str| folder.path().join(name).display().to_string();
    let write = |name: &str, bytes: &[u8]| {
        fs::write(folder.path().join(name), bytes).unwrap_or_else(|error| panic!("{error}"));
        at(name)
    };
    let cut = write("cut.raw", &[0; 511]);
    let empty = write("empty.raw", &[]);
    // A qcow2 image that ends within its header, one whose table lies behind its end, and one that is encrypted.
    let header = write("header.qcow2", b"QFI\xfb\0\0\0\x03");
    let mut table = vec![0; 4096];
    table[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    table[20..24].copy_from_slice(&16_u32.to_be_bytes());
    table[24..32].copy_from_slice(&(1_u64 << 30).to_be_bytes());
    table[36..40].copy_from_slice(&2_u32.to_be_bytes());
    table[40..48].copy_from_slice(&(1_u64 << 40).to_be_bytes());
    table[48..56].copy_from_slice(&(1_u64 << 41).to_be_bytes());
    table[56..60].copy_from_slice(&1_u32.to_be_bytes());
    table[96..100].copy_from_slice(&4_u32.to_be_bytes());
    table[100..104].copy_from_slice(&104_u32.to_be_bytes());
    let mut encrypted = table.clone();
    encrypted[32..36].copy_from_slice(&1_u32.to_be_bytes());
    let encrypted = write("secret.qcow2", &encrypted);
    let table = write("table.qcow2", &table);
    let plain = raw(folder, "plain.raw");
    let json = |path: &str, kind: &str| format!(r#"{{"path":"{path}","image_type":"{kind}"}}"#);
    vec![
        (at("missing.raw"), json(&at("missing.raw"), "Raw"), "No such file"),
        (
            folder.path().display().to_string(),
            json(&folder.path().display().to_string(), "Raw"),
            "no regular file or block device",
        ),
        ("/dev/null".into(), json("/dev/null", "Raw"), "no regular file or block device"),
        (cut.clone(), json(&cut, "Raw"), "511 bytes"),
        (empty.clone(), json(&empty, "Raw"), "0 bytes"),
        (format!("{plain},format=qcow2"), json(&plain, "Qcow2"), "no qcow2 image"),
        (format!("{header},format=qcow2"), json(&header, "Qcow2"), "header.qcow2"),
        (format!("{table},format=qcow2"), json(&table, "Qcow2"), "cut off"),
        (format!("{encrypted},format=qcow2"), json(&encrypted, "Qcow2"), "is encrypted (method 1, AES)"),
    ]
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn an_image_that_is_no_disk_is_refused_with_the_reason_and_a_machine_that_runs_goes_on() {
    let folder = folder();
    let server = Server::empty();
    assert_eq!(server.create(&image("echo.elf"), "").0, 204);
    server.expect("PUT vm.boot", "", 204);
    for (flag, body, part) in bad(&folder) {
        let outcome = Guest::new("echo").with(&["--disk", &flag]).run();
        assert!(outcome.code != 0 && outcome.stderr.contains(part) && outcome.stdout.is_empty(), "{flag}: {outcome}");
        let reply = server.expect("PUT vm.add-disk", &body, 400);
        assert!(reply.contains(part), "{body}: {reply}");
    }
    let info = server.expect("GET vm.info", "", 200);
    assert!(info.contains(r#""phase":"running""#) && !info.contains("image_type"), "{info}");
    server.expect("PUT vm.reboot", "", 204);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn an_image_that_another_machine_writes_is_busy_until_that_one_ends() {
    let folder = folder();
    let path = raw(&folder, "disk.raw");
    let owner = Server::run(&Guest::new("echo").with(&["--disk", &path]));
    owner.until("GET vm.info", "", 200);
    let other = Server::empty();
    assert_eq!(other.create(&image("echo.elf"), "").0, 204);
    other.expect("PUT vm.boot", "", 204);
    for readonly in [false, true] {
        let body = format!(r#"{{"path":"{path}","readonly":{readonly},"id":"d"}}"#);
        let reply = other.expect("PUT vm.add-disk", &body, 400);
        assert!(reply.contains("in use by another process"), "{reply}");
    }
    banyan(&["run", "--kernel", &image("hello.elf"), "--disk", &path])
        .expect_code(1)
        .expect_error(&["in use by another process"]);
    owner.shuts_down();
    other.expect("PUT vm.add-disk", &format!(r#"{{"path":"{path}","id":"d"}}"#), 200);
    other.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn an_image_that_may_not_be_written_is_refused_but_for_reading() {
    let folder = folder();
    let path = raw(&folder, "disk.raw");
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    let kernel = image("hello.elf");
    // Root may write to any file; one without capabilities may not.
    let run = |disk: &str| with_other_mounts("true", Capabilities::None, &["run", "--kernel", &kernel, "--disk", disk]);
    run(&path).expect_code(1).expect_error(&["cannot open the disk", "for writing", "readonly=on"]);
    run(&format!("{path},readonly=on")).expect_code(0);
    // A file system that is mounted read-only.
    let mount = format!("mount --bind {0} {0} && mount -o remount,bind,ro {0}", folder.path().display());
    let run = |disk: &str| with_other_mounts(&mount, Capabilities::All, &["run", "--kernel", &kernel, "--disk", disk]);
    run(&path).expect_code(1).expect_error(&["for writing", "readonly=on"]);
    run(&format!("{path},readonly=on")).expect_code(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn an_image_that_is_cut_off_while_a_guest_uses_it_costs_requests_and_not_the_machine() {
    let folder = folder();
    let reads = |options: &str, path: &str| Guest::new("disks").options(options).with(&["--memory", "128M", "--disk", path]);
    let shorten = |path: &str, len| File::options().write(true).open(Path::new(path)).and_then(|file| file.set_len(len)).unwrap();
    // It ends with the first request that fails.
    reads("reads=16 bytes=4096", &raw(&folder, "whole.raw")).passes();
    let path = raw(&folder, "disk.raw");
    let mut server = Server::run(&reads("reads=100000000 bytes=65536", &path));
    server.until("GET vm.counters", "", 200);
    shorten(&path, 0);
    server.process.expect("FAIL disk 0: any: status 1");
    // The guest ended itself: it had its answer.
    server.ends(3);
}
