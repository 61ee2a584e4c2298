//! Files of a snapshot that somebody changed: what cannot be is the client's mistake, named, and holds nobody up.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tests::guest::image;
use tests::saved::{put_away, url};
use tests::server::{Server, call};

/// A machine with a stub from the start, one that came, and a disk that came; written down. `place` is where they came.
fn saved(folder: &TempDir, stub: &str, place: &str) -> PathBuf {
    let server = Server::with_policy(&format!("[pcie]\nroot-ports = 3\n[hot-plug]\nplace = \"{place}\"\n"));
    let disk = folder.path().join("disk");
    File::create(&disk).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    let devices = format!(r#","devices":[{{"banyan":"{stub}"}}]"#);
    let (status, reply) = server.create(&image("echo.elf"), &devices);
    assert_eq!(status, 204, "{reply}");
    server.expect("PUT vm.boot", "", 204);
    let (status, reply) = server.add("stub,id=late,bar0=64K:mem32");
    assert_eq!(status, 200, "{reply}");
    server.expect("PUT vm.add-disk", &format!(r#"{{"path":"{}","id":"late-disk"}}"#, disk.display()), 200);
    put_away(server, folder.path())
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn edits_of_a_machine_that_cannot_be_are_refused_with_what_and_which() {
    let folder = tempfile::tempdir().unwrap();
    let saved = saved(&folder, "stub,id=early,bar0=64K:mem32", "ports");
    let small = folder.path().join("small");
    File::create(&small).and_then(|file| file.set_len(4096)).unwrap();
    let large = folder.path().join("disk");
    let config: Value = serde_json::from_slice(&fs::read(saved.join("config.json")).unwrap()).unwrap();
    let (late, disk) = ("/banyan_machine/added/0", "/banyan_machine/added/1/functions/0");
    let cases: Vec<(String, Value, Vec<&str>)> = vec![
        (format!("{late}/port"), json!("nowhere"), vec!["late", "nowhere", "port"]),
        (format!("{late}/port"), config["banyan_machine"]["added"][1]["port"].clone(), vec!["late-disk", "late"]),
        (format!("{late}/port"), json!("rc0"), vec!["late", "rc0"]),
        (format!("{late}/port"), json!(""), vec!["late"]),
        (format!("{late}/port"), json!(7), vec!["config.json", "port"]),
        (format!("{late}/number"), json!(256), vec!["config.json", "256"]),
        (format!("{late}/functions"), json!([]), vec!["without functions"]),
        (format!("{late}/functions/0/number"), json!(1), vec!["late", "function 0"]),
        (format!("{late}/functions/0/number"), json!(8), vec!["late", "8"]),
        (format!("{late}/functions/0/name"), json!("early"), vec!["early"]),
        (format!("{late}/functions/0/name"), json!("late-disk"), vec!["late-disk"]),
        (format!("{late}/functions/0/name"), json!("../x"), vec!["../x"]),
        (format!("{late}/functions/0/device"), json!("stub,bar0=3K:mem32"), vec!["late", "BAR 0"]),
        (format!("{late}/functions/0/device"), json!("nothing=7"), vec!["config.json", "late", "nothing"]),
        (format!("{late}/functions/0/device"), json!("stub,bar0=1G:mem32"), vec!["late", "fit"]),
        (format!("{late}/functions/0/device"), json!("stub,bar0=128K:mem32,msix=4"), vec!["late"]),
        (format!("{late}/functions/0/device"), json!(null), vec!["late"]),
        (format!("{disk}/disk/banyan"), json!("/nonexistent/disk"), vec!["late-disk", "/nonexistent/disk"]),
        (format!("{disk}/disk/banyan"), json!(small), vec!["late-disk"]),
        (format!("{disk}/disk/banyan"), json!(format!("{},queues=3", large.display())), vec!["late-disk"]),
        (format!("{disk}/disk/banyan"), json!(format!("{},queue-size=7", large.display())), vec!["late-disk", "7"]),
        (format!("{disk}/disk/path"), json!("/nonexistent/disk"), vec!["config.json", "late-disk", "`path`"]),
        ("/banyan_machine/devices/0".into(), json!("stub,id=early"), vec!["config.json", "another machine"]),
        ("/banyan_machine/devices/0".into(), json!("nothing"), vec!["nothing"]),
        ("/banyan_machine/devices".into(), json!([]), vec!["another machine"]),
        ("/banyan_machine/left".into(), json!(["early"]), vec!["another machine"]),
        ("/banyan_machine/max_physical_bits".into(), json!(3), vec!["3"]),
        ("/banyan_machine/cpus".into(), json!("many"), vec!["many"]),
        ("/memory/size".into(), json!(128 << 20), vec!["another machine"]),
        ("/memory/size".into(), json!(1_u64 << 62), vec!["memory"]),
        ("/memory/hotplug_size".into(), json!(1 << 30), vec!["another machine"]),
        ("/cpus/boot_vcpus".into(), json!(0), vec!["boot_vcpus"]),
        ("/cpus/max_vcpus".into(), json!(2), vec!["`cpus`: it differs"]),
        ("/cpus/max_phys_bits".into(), json!(45), vec!["`cpus`: it differs", "46 bits"]),
        ("/payload".into(), json!(null), vec!["payload"]),
        ("/serial".into(), json!({"mode": "File", "file": "/nonexistent/folder/out"}), vec!["/nonexistent/folder/out"]),
        ("/vsock".into(), json!({"cid": 3, "socket": folder.path().join("v")}), vec!["another machine"]),
        ("/rng".into(), json!({"src": "/dev/urandom"}), vec!["another machine"]),
        ("/banyan".into(), json!("root-ports=2"), vec!["another machine"]),
        ("/banyan".into(), json!("root-ports=x"), vec!["root-ports"]),
        ("/banyan_machine".into(), json!({}), vec!["config.json"]),
    ];
    check(&saved, &config, &cases);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn edits_of_places_on_a_bus_that_cannot_be_are_refused_with_what_and_which() {
    let folder = tempfile::tempdir().unwrap();
    let saved = saved(&folder, "stub,id=early,bar0=64K:mem32", "bus0");
    let config: Value = serde_json::from_slice(&fs::read(saved.join("config.json")).unwrap()).unwrap();
    let (late, disk) = ("/banyan_machine/added/0", "/banyan_machine/added/1");
    let cases: Vec<(String, Value, Vec<&str>)> = vec![
        (format!("{disk}/number"), config["banyan_machine"]["added"][0]["number"].clone(), vec!["late-disk", "number"]),
        (format!("{late}/number"), json!(0), vec!["late", "number 0"]),
        (format!("{late}/number"), json!(32), vec!["late", "number 32"]),
        (format!("{late}/number"), json!(255), vec!["late", "number 255"]),
        (format!("{late}/number"), json!(null), vec!["late", "no port rc0"]),
        (format!("{late}/port"), json!("nowhere"), vec!["late", "no port nowhere"]),
    ];
    check(&saved, &config, &cases);
}

/// Every edit is refused as the client's mistake, with these words, and leaves a process that restores what was written.
fn check(saved: &Path, config: &Value, cases: &[(String, Value, Vec<&str>)]) {
    let server = Server::empty();
    let write = |config: &Value| fs::write(saved.join("config.json"), config.to_string()).expect("the file can be written");
    let mut wrong = Vec::new();
    for (at, value, parts) in cases {
        let mut edited = config.clone();
        let (above, key) = at.rsplit_once('/').unwrap_or_else(|| panic!("{at} is no place"));
        let place = edited.pointer_mut(above).unwrap_or_else(|| panic!("no {above} in {config:#}"));
        match key.parse::<usize>() {
            Ok(index) => place[index] = value.clone(),
            Err(_) => place[key] = value.clone(),
        }
        write(&edited);
        let (status, reply) = server.call("PUT vm.restore", &url("source", saved));
        let missing: Vec<_> = parts.iter().filter(|part| !reply.contains(**part)).collect();
        if status != 400 || !missing.is_empty() {
            wrong.push(format!("{at} = {value}: {status} {reply}, without {missing:?}"));
        }
        if server.call("GET vm.info", "").0 != 404 {
            wrong.push(format!("{at} = {value}: there is a machine"));
            server.expect("PUT vm.delete", "", 204);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    write(config);
    server.expect("PUT vm.restore", &url("source", saved), 204);
    server.expect("PUT vm.resume", "", 204);
    server.expect("PUT vmm.shutdown", "", 204);
    server.ends(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_state_that_is_longer_than_the_machines_can_be_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let saved = saved(&folder, "stub,id=early,bar0=64K:mem32", "ports");
    File::options().write(true).open(saved.join("state.json")).unwrap().set_len(1 << 40).unwrap();
    let server = Server::empty();
    let before = server.process.resident();
    let start = Instant::now();
    let reply = server.expect("PUT vm.restore", &url("source", &saved), 400);
    assert!(reply.contains("state.json has 1099511627776 bytes") && reply.contains("at most"), "{reply}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert!(server.process.resident() < before + 65_536, "{} KiB, {before} before", server.process.resident());
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn commands_are_answered_while_a_long_state_is_read_and_can_end_that() {
    let folder = tempfile::tempdir().unwrap();
    // Whose memory behind its BAR could fill the file.
    let saved = saved(&folder, "stub,id=early,bar0=256M:mem64:prefetchable", "bus0");
    let state = File::options().read(true).write(true).open(saved.join("state.json")).unwrap();
    const LENGTH: u64 = 240 << 20;
    state.set_len(LENGTH).unwrap();
    // The length in the head, behind the magic and the version, so that all of it is read before the checksum is found wrong.
    state.write_all_at(&(LENGTH - 28).to_le_bytes(), 12).unwrap();
    let server = Server::empty();
    let (socket, body) = (server.socket(), url("source", &saved));
    let restoring = thread::spawn(move || call(&socket, "PUT vm.restore", &body));
    server.until("GET vm.info", "", 200);
    assert!(server.expect("GET vm.info", "", 200).contains(r#""phase":"starting""#));
    // Without a machine on its way it would be created.
    let (status, reply) = server.create(&image("echo.elf"), "");
    assert_eq!(status, 405, "{reply}");
    server.expect("PUT vm.delete", "", 204);
    let (status, reply) = restoring.join().unwrap();
    assert!(status == 405 && reply.contains("vm.delete came before"), "{status} {reply}");
    server.expect("GET vm.info", "", 404);
    // To its end.
    let reply = server.expect("PUT vm.restore", &url("source", &saved), 400);
    assert!(reply.contains("state.json cannot be used") && reply.contains("checksum"), "{reply}");
    assert_eq!(server.create(&image("echo.elf"), "").0, 204);
}
