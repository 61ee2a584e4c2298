//! Machines that are written down and go on in another process.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tests::Guest;
use tests::busy::{self, STUB};
use tests::guest::{image, topology};
use tests::saved::{put_away, restored, resume, url};
use tests::server::Server;

/// Puts a machine away that counts. Where it is, and how many rounds there were at least.
fn save(mut server: Server, folder: &TempDir) -> (PathBuf, u64) {
    let rounds = busy::count(&mut server);
    (put_away(server, folder.path()), rounds)
}

/// It goes on after `rounds`, and nothing is out of order.
fn goes_on(mut server: Server, rounds: u64) {
    let after = resume(&mut server, rounds);
    assert!(busy::count(&mut server) > after);
    busy::passes(server);
}

/// What vm.info says of a paused machine, as if it ran.
fn running(info: &str) -> String {
    info.replace("Paused", "Running").replace("paused", "running")
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_goes_on_in_another_process_as_often_as_it_is_restored() {
    let (server, folder) = busy::start(&["--memory", "64M", "--device", STUB]);
    let before = server.expect("GET vm.info", "", 200);
    let (saved, rounds) = save(server, &folder);
    for name in ["config.json", "state.json", "memory-ranges"] {
        assert_eq!(fs::metadata(saved.join(name)).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
    }
    for _ in 0..3 {
        let server = restored(&saved);
        let after = server.expect("GET vm.info", "", 200);
        assert_eq!(running(&after), before);
        goes_on(server, rounds);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_machine_goes_on_at_once_if_that_is_asked_for() {
    let (server, folder) = busy::start(&["--memory", "64M", "--device", STUB]);
    let (saved, rounds) = save(server, &folder);
    let mut server = Server::empty();
    let body = format!(r#"{{"source_url":"file://{}","resume":true,"memory_restore_mode":"OnDemand"}}"#, saved.display());
    server.expect("PUT vm.restore", &body, 204);
    assert!(server.expect("GET vm.info", "", 200).contains(r#""state":"Running""#));
    assert!(busy::count(&mut server) > rounds);
    busy::passes(server);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_comes_back_however_it_is_backed() {
    for memory in ["64M,shared=on", "64M,prefault=on"] {
        let (server, folder) = busy::start(&["--memory", memory, "--device", STUB]);
        let (saved, rounds) = save(server, &folder);
        goes_on(restored(&saved), rounds);
        // As Kata Containers does it with its templates.
        let config = fs::read_to_string(saved.join("config.json")).unwrap();
        fs::write(saved.join("config.json"), config.replace(r#""shared": true"#, r#""shared": false"#)).unwrap();
        goes_on(restored(&saved), rounds);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_restored_machine_can_be_saved_again_and_reset() {
    let (server, folder) = busy::start(&["--memory", "64M", "--device", STUB, "--cpus", "2"]);
    let (saved, _) = save(server, &folder);
    let mut server = restored(&saved);
    server.expect("PUT vm.resume", "", 204);
    assert!(busy::count(&mut server) > 0);
    let again = tempfile::tempdir().unwrap();
    let (saved, rounds) = save(server, &again);
    let mut server = restored(&saved);
    server.expect("PUT vm.resume", "", 204);
    assert!(busy::count(&mut server) > rounds);
    server.expect("PUT vm.reboot", "", 204);
    server.process.expect("ready");
    assert!(busy::count(&mut server) > 0);
    busy::passes(server);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_hierarchy_of_several_ports_comes_back_with_what_was_added_and_removed() {
    let stubs = format!("{STUB},on=port0");
    let ports = ["--memory", "64M", "--pcie", "root-ports=3", "--device", &stubs];
    let (server, folder) = busy::start(&ports);
    server.adds("stub,id=late,bar0=64K:mem32,on=port1");
    let disk = folder.path().join("late-disk");
    File::create(&disk).and_then(|file| file.set_len(1 << 20)).unwrap();
    server.expect("PUT vm.add-disk", &format!(r#"{{"path":"{}","id":"late-disk"}}"#, disk.display()), 200);
    let devices = server.devices();
    assert!(devices.contains("late@port1") && devices.contains("late-disk@port2"), "{devices}");
    let (saved, rounds) = save(server, &folder);
    let server = restored(&saved);
    assert_eq!(server.devices(), devices);
    assert!(server.expect("GET vm.info", "", 200).contains(r#""id":"late-disk""#));
    goes_on(server, rounds);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_processor_that_the_guest_was_asked_for_keeps_the_machine_from_being_written_down() {
    let (mut server, folder) = busy::start(&["--memory", "64M", "--cpus", "2,max=3", "--device", STUB]);
    server.expect("PUT vm.pause", "", 204);
    server.expect("PUT vm.resize", r#"{"desired_vcpus":1}"#, 204);
    let saved = folder.path().join("saved");
    fs::create_dir(&saved).unwrap();
    let error = server.expect("PUT vm.snapshot", &url("destination", &saved), 409);
    assert!(error.contains("processor is being removed"), "{error}");
    // It stays, so nothing is under way any more.
    server.expect("PUT vm.resize", r#"{"desired_vcpus":2}"#, 204);
    server.expect("PUT vm.snapshot", &url("destination", &saved), 204);
    server.expect("PUT vm.resume", "", 204);
    let rounds = busy::count(&mut server);
    busy::passes(server);
    let mut restored = restored(&saved);
    restored.expect("PUT vm.resume", "", 204);
    assert!(rounds > 0 && busy::count(&mut restored) > 0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_restore_is_checked_as_the_machine_was() {
    let (server, folder) = busy::start(&["--memory", "64M", "--pcie", "root-ports=2", "--device", &format!("{STUB},on=port0")]);
    let disk = folder.path().join("late-disk");
    File::create(&disk).and_then(|file| file.set_len(1 << 20)).unwrap();
    server.expect("PUT vm.add-disk", &format!(r#"{{"path":"{}","id":"late-disk"}}"#, disk.display()), 200);
    let (saved, rounds) = save(server, &folder);
    let config = fs::read_to_string(saved.join("config.json")).unwrap();
    let refused = |edited: String, part: &str| {
        assert_ne!(edited, config);
        fs::write(saved.join("config.json"), edited).unwrap();
        let (status, error) = Server::empty().call("PUT vm.restore", &url("source", &saved));
        assert!(status == 400 && error.contains(part), "{status} {error}");
    };
    let output = format!(r#"{{"debug_console":{{"mode":"File","file":"{}"}},"#, disk.display());
    refused(config.replacen('{', &output, 1), "would write to");
    let renamed = |name: &str| config.replace(r#""name": "late-disk""#, &format!(r#""name": "{name}""#));
    refused(renamed("../x"), "../x");
    refused(renamed("a"), "two devices are named");
    fs::write(saved.join("config.json"), &config).unwrap();
    let (status, error) = Server::with_policy("[guest]\nreset = 1\n").call("PUT vm.restore", &url("source", &saved));
    assert!(status == 400 && error.contains("config.toml, line 2"), "{status} {error}");
    goes_on(restored(&saved), rounds);
}

/// Firmware that puts `K` at its first byte below 1 MiB and says `ready`, then what is there for each byte that it gets.
fn firmware() -> Vec<u8> {
    const START: usize = 0x800;
    let mut code: Vec<u8> = Vec::new();
    code.extend([0xB8, 0x00, 0xF0, 0x8E, 0xD8]); // mov ax, 0xF000; mov ds, ax
    code.extend([0xC6, 0x06, 0x00, 0xF0, b'K']); // mov byte [0xF000], 'K'
    code.extend([0xBA, 0xF8, 0x03]); // mov dx, 0x3F8
    for byte in *b"ready\n" {
        code.extend([0xB0, byte, 0xEE]); // mov al, byte; out dx, al
    }
    code.extend([0xBA, 0xFD, 0x03, 0xEC, 0xA8, 0x01, 0x74, 0xF8]); // wait: mov dx, 0x3FD; in al, dx; test al, 1; jz wait
    code.extend([0xBA, 0xF8, 0x03, 0xEC]); // mov dx, 0x3F8; in al, dx
    code.extend([0xA0, 0x00, 0xF0, 0xEE]); // mov al, [0xF000]; out dx, al
    code.extend([0xB0, b'\n', 0xEE, 0xEB, 0xEB]); // mov al, 10; out dx, al; jmp wait
    let mut image = vec![0; 4096];
    image[START..START + code.len()].copy_from_slice(&code);
    image[0xFF0..0xFF3].copy_from_slice(&[0xE9, 0x0D, 0xF8]); // jmp to the start
    image
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn firmware_finds_what_it_put_below_1_mib() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("firmware");
    fs::write(&file, firmware()).unwrap();
    let mut server = Server::run(&Guest::from_arguments(&["--memory", "64M", "--firmware", &file.display().to_string()]));
    server.process.expect("ready");
    let mut server = restored(&put_away(server, folder.path()));
    server.expect("PUT vm.resume", "", 204);
    server.process.send("?");
    server.process.expect("K");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn processors_and_memory_that_came_are_there_again() {
    let (server, folder) = busy::start(&["--memory", "128M,hotplug=1G", "--cpus", "1,max=3", "--device", STUB]);
    server.expect("PUT vm.resize", r#"{"desired_vcpus":2,"desired_ram":402653184}"#, 204);
    server.until("GET vm.info", "", 200);
    let (saved, rounds) = save(server, &folder);
    let server = restored(&saved);
    let info = server.expect("GET vm.info", "", 200);
    assert!(info.contains(r#""boot_vcpus":2"#) && info.contains(r#""memory_actual_size":402653184"#), "{info}");
    goes_on(server, rounds);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_machine_of_a_topology_file_comes_back_without_the_file() {
    let file = topology("chain");
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("topology.toml");
    fs::copy(file, &copy).unwrap();
    let mut server = Server::run(&Guest::new("echo").with(&["--memory", "64M", "--topology", &copy.display().to_string()]));
    server.process.expect("ready");
    let devices = server.devices_json();
    fs::remove_file(copy).unwrap();
    let mut server = restored(&put_away(server, folder.path()));
    assert_eq!(server.devices_json(), devices);
    server.expect("PUT vm.resume", "", 204);
    server.process.send("still here\n");
    server.process.finish().expect_code(1).expect_output(&["echo: still here"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_snapshot_that_cannot_be_is_refused_and_nothing_of_it_stays() {
    let (mut server, folder) = busy::start(&["--memory", "64M", "--device", STUB]);
    let saved = folder.path().join("saved");
    let to = |path: &Path| url("destination", path);
    let refused = |server: &Server, body: &str, status: u16, part: &str| {
        let (found, reply) = server.call("PUT vm.snapshot", body);
        assert!(found == status && reply.contains(part), "{body}: {found} {reply}");
    };
    refused(&server, &to(&saved), 405, "pause it first");
    server.expect("PUT vm.pause", "", 204);
    refused(&server, &to(&saved), 400, "No such file");
    refused(&server, r#"{"destination_url":"http://here"}"#, 400, "file:///");
    refused(&server, r#"{"destination_url":"file://here"}"#, 400, "file:///");
    refused(&server, &to(&folder.path().join("disk")), 400, "Not a directory");
    refused(&server, &to(Path::new("/proc/self")), 500, "/proc/self/config.json");
    server.expect("PUT vm.restore", &url("source", &saved), 405);
    fs::create_dir(&saved).unwrap();
    server.expect("PUT vm.snapshot", &to(&saved), 204);
    refused(&server, &to(&saved), 400, "there is a snapshot already");
    fs::remove_file(saved.join("memory-ranges")).unwrap();
    refused(&server, &to(&saved), 400, "there is a snapshot already");
    server.expect("PUT vm.resume", "", 204);
    assert!(busy::count(&mut server) > 0);
    busy::passes(server);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_folder_that_is_no_snapshot_is_refused_and_the_process_goes_on() {
    let (server, folder) = busy::start(&["--memory", "64M", "--device", STUB]);
    let (saved, rounds) = save(server, &folder);
    let server = Server::empty();
    let refused = |part: &str| {
        let (found, reply) = server.call("PUT vm.restore", &url("source", &saved));
        assert!(matches!(found, 400 | 500) && reply.contains(part), "{found} {reply} instead of {part}");
        server.expect("GET vm.info", "", 404);
    };
    let with = |name: &str, change: &dyn Fn(&File), part: &str| {
        let path = saved.join(name);
        let original = fs::read(&path).unwrap();
        change(&File::options().write(true).open(&path).unwrap());
        refused(part);
        fs::write(&path, original).unwrap();
    };
    with("state.json", &|file| file.set_len(100).unwrap(), "damaged");
    with("state.json", &|file| file.set_len(0).unwrap(), "no state");
    with("state.json", &|file| file.write_all_at(&[9], 8).unwrap(), "version");
    with("state.json", &|file| file.write_all_at(&[0xAA; 64], 300).unwrap(), "damaged");
    with("memory-ranges", &|file| file.set_len(4096).unwrap(), "bytes where");
    with("config.json", &|file| file.set_len(0).unwrap(), "it is empty");
    let config = fs::read_to_string(saved.join("config.json")).unwrap();
    for (from, to, part) in [
        (r#""size": 67108864"#, r#""size": 134217728"#, "another machine"),
        ("id=a,", "id=b,", "another machine"),
        ("banyan_machine", "other", "banyan_machine"),
        (r#""path": "#, r#""path": "/nowhere"#, "config.json"),
    ] {
        assert!(config.contains(from), "{from}");
        fs::write(saved.join("config.json"), config.replacen(from, to, 1)).unwrap();
        refused(part);
    }
    fs::write(saved.join("config.json"), config).unwrap();
    server.expect("PUT vm.restore", &url("source", &folder.path().join("missing")), 400);
    server.expect("PUT vm.restore", &url("source", &saved), 204);
    server.expect("PUT vm.restore", &url("source", &saved), 405);
    let (found, reply) = server.create(&image("echo.elf"), "");
    assert_eq!(found, 405, "{reply}");
    goes_on(server, rounds);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_device_that_left_by_a_reset_is_forgotten_and_another_of_its_name_is_saved() {
    // A guest that answers no request for a removal.
    let guest = Guest::new("echo").with(&["--memory", "64M", "--pcie", "root-ports=2,removal=orderly"]);
    let mut server = Server::run(&guest);
    server.process.expect("ready");
    server.adds("stub,id=a,bar0=1M:mem32");
    server.expect("PUT vm.remove-device", r#"{"id":"a"}"#, 204);
    server.expect("PUT vm.reboot", "", 204);
    let info = server.expect("GET vm.info", "", 200);
    assert!(!info.contains(r#""id":"a""#), "{info}");
    server.process.expect("ready");
    server.adds("stub,id=a,bar0=4K:mem32,msix=2");
    let info = server.expect("GET vm.info", "", 200);
    let folder = tempfile::tempdir().unwrap();
    let restored = restored(&put_away(server, folder.path())).expect("GET vm.info", "", 200);
    assert_eq!(running(&restored), info);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_disk_of_another_size_is_refused_since_the_driver_would_not_learn_of_it() {
    let (server, folder) = busy::start(&["--memory", "64M", "--device", STUB]);
    let (saved, rounds) = save(server, &folder);
    let path = folder.path().join("disk");
    let kept = fs::read(&path).unwrap();
    for len in [512, 2 << 20] {
        File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
        let server = Server::empty();
        let reply = server.expect("PUT vm.restore", &url("source", &saved), 400);
        assert!(reply.contains(&format!("2048 sectors, but the machine has {}", len / 512)), "{reply}");
    }
    // The guest may stand between a write and the read that compares.
    fs::write(&path, kept).unwrap();
    goes_on(restored(&saved), rounds);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_machine_without_a_device_of_its_start_comes_back_before_and_after_a_reset() {
    let mut server = Server::run(&Guest::new("echo").devices(&["stub,id=gone,on=port0", "stub,id=stays,on=port1"]).with(&[
        "--memory",
        "64M",
        "--pcie",
        "root-ports=2",
    ]));
    server.process.expect("ready");
    server.expect("PUT vm.remove-device", r#"{"id":"gone"}"#, 204);
    server.until("PUT vm.remove-device", r#"{"id":"gone"}"#, 404);
    let folder = tempfile::tempdir().unwrap();
    for turn in ["removed", "reset", "restored"] {
        if turn == "reset" {
            server.expect("PUT vm.resume", "", 204);
            server.expect("PUT vm.reboot", "", 204);
            server.process.expect("ready");
        }
        if turn != "restored" {
            server.expect("PUT vm.pause", "", 204);
        }
        let (saved, devices) = (folder.path().join(turn), server.devices());
        fs::create_dir(&saved).unwrap();
        // A removal is over when the guest, which looks at no slot, has had its time.
        server.until("PUT vm.snapshot", &url("destination", &saved), 204);
        let restored = restored(&saved);
        assert_eq!(restored.devices(), devices, "{turn}");
        if turn == "reset" {
            server = restored;
        }
    }
    // Another one of its name is another one.
    server.expect("PUT vm.resume", "", 204);
    server.adds("stub,id=gone,bar0=4K:mem32,on=port0");
    let info = server.expect("GET vm.info", "", 200);
    let restored = restored(&put_away(server, folder.path())).expect("GET vm.info", "", 200);
    assert_eq!(running(&restored), info);
}
