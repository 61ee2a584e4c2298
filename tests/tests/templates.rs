//! Machines of a template: one is booted with its memory in a file and written down, others begin from copies of what was
//! written and from that file, as Kata Containers does it.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use tests::busy::{self, STUB, count};
use tests::guest::image;
use tests::saved::{goes_on, restored, resume, url, write_down};
use tests::server::Server;

const SIZE: u64 = 64 << 20;

fn disk(path: PathBuf) -> PathBuf {
    File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    path
}

/// vm.create as the drivers send it for a template: `memory` beside the zone, and what the zone has beside its file.
fn body(folder: &Path, memory: &Value, zone: &Value) -> Value {
    let mut body = json!({
        "payload": { "kernel": image("keep.elf"), "cmdline": "" },
        "memory": { "size": 0, "shared": true, "zones": [{ "id": "mem0", "size": SIZE, "file": folder.join("memory"), "shared": true }] },
        "disks": [{ "path": disk(folder.join("disk")) }],
        "devices": [{ "banyan": STUB }],
        "rng": { "src": "/dev/urandom" },
        "vsock": { "cid": 3, "socket": folder.join("vsock") },
        "serial": { "mode": "Tty" },
    });
    let put =
        |to: &mut Value, from: &Value| from.as_object().into_iter().flatten().for_each(|(key, value)| to[key] = value.clone());
    put(&mut body["memory"], memory);
    put(&mut body["memory"]["zones"][0], zone);
    body
}

/// A folder with a template and its memory, and how many rounds there were at least.
fn template(memory: &Value) -> (TempDir, u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    // Kata makes the file, of the size of the guest.
    File::create(at.join("memory")).and_then(|file| file.set_len(SIZE)).expect("a file");
    let mut server = Server::empty();
    server.expect("PUT vm.create", &body(at, memory, &json!({})).to_string(), 204);
    server.expect("PUT vm.boot", "", 204);
    server.process.expect("ready");
    let rounds = count(&mut server);
    write_down(server, at);
    (folder, rounds)
}

/// What the drivers do with a template: they edit it, and each new machine has a copy of two files with its own socket.
fn copy(template: &Path, shared: bool) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let mut config: Value = serde_json::from_slice(&fs::read(template.join("config.json")).expect("a template")).expect("JSON");
    config["memory"]["shared"] = shared.into();
    config["memory"]["zones"][0]["shared"] = shared.into();
    config["vsock"]["socket"] = json!(folder.path().join("vsock"));
    config["disks"][0]["path"] = json!(folder.path().join("disk"));
    fs::copy(template.join("disk"), folder.path().join("disk")).expect("a copy");
    fs::write(folder.path().join("config.json"), config.to_string()).expect("a copy");
    fs::copy(template.join("state.json"), folder.path().join("state.json")).expect("a copy");
    folder
}

fn resumed(folder: &TempDir) -> Server {
    let server = restored(folder.path());
    server.expect("PUT vm.resume", "", 204);
    server
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn machines_of_one_template_begin_where_it_was_and_neither_sees_what_the_other_writes() {
    let (folder, rounds) = template(&json!({}));
    let at = folder.path();
    assert!(!at.join("memory-ranges").exists(), "memory is in its file already");
    assert!(fs::metadata(at.join("state.json")).unwrap().len() < 8 << 20, "Kata leaves 8 MiB beside the guest's memory");
    let before = fs::read(at.join("memory")).unwrap();
    assert!(before.iter().any(|byte| *byte != 0) && before.len() as u64 == SIZE);
    fs::set_permissions(at.join("memory"), fs::Permissions::from_mode(0o400)).unwrap();
    let folders = [copy(at, false), copy(at, false)];
    let [mut one, mut other] = folders.each_ref().map(resumed);
    let mut last = count(&mut one);
    assert!(last > rounds, "{last} follows {rounds}");
    for _ in 0..20 {
        let now = count(&mut one);
        assert!(now > last, "{now} follows {last}");
        last = now;
    }
    // This one has slept, and goes on by itself.
    let first = count(&mut other);
    assert!(first > rounds && count(&mut other) > first);
    assert!(count(&mut one) > last);
    assert!(fs::read(at.join("memory")).unwrap() == before, "the template's memory has changed");
    one.expect("PUT vm.reboot", "", 204);
    one.process.expect("ready");
    assert!(count(&mut one) > 0 && count(&mut other) > first);
    one.shuts_down();
    other.shuts_down();
    assert!(fs::read(at.join("memory")).unwrap() == before, "the template's memory has changed");
    // And once more, after those are gone.
    goes_on(copy(at, false).path(), rounds);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_that_stays_shared_goes_on_in_the_file_and_can_be_written_down_again() {
    let (folder, rounds) = template(&json!({}));
    let before = fs::read(folder.path().join("memory")).unwrap();
    let copy = copy(folder.path(), true);
    let mut server = restored(copy.path());
    let after = resume(&mut server, rounds);
    let again = tempfile::tempdir().unwrap();
    write_down(server, again.path());
    assert!(!again.path().join("memory-ranges").exists());
    assert!(fs::read(folder.path().join("memory")).unwrap() != before, "it is the guest's memory");
    goes_on(again.path(), after);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_machine_that_goes_on_in_a_templates_memory_says_so() {
    for shared in [true, false] {
        let (folder, _) = template(&json!({}));
        let copy = copy(folder.path(), shared);
        let server = restored(copy.path());
        let again = tempfile::tempdir().unwrap();
        server.expect("PUT vm.snapshot", &url("destination", again.path()), 204);
        server.expect("PUT vm.resume", "", 204);
        server.expect("PUT vmm.shutdown", "", 204);
        let outcome = server.process.wait();
        assert_eq!(outcome.stderr.contains("cannot be restored any more"), shared, "{}", outcome.stderr);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_machine_of_a_template_is_written_down_with_its_own_memory() {
    let (folder, _) = template(&json!({}));
    let before = fs::read(folder.path().join("memory")).unwrap();
    let copy = copy(folder.path(), false);
    let mut server = resumed(&copy);
    let rounds = count(&mut server);
    let saved = tempfile::tempdir().unwrap();
    write_down(server, saved.path());
    assert_eq!(fs::metadata(saved.path().join("memory-ranges")).unwrap().len(), SIZE);
    // Which would be written over the template's.
    let path = saved.path().join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(&path, config.replace(r#""shared": false"#, r#""shared": true"#)).unwrap();
    let error = Server::empty().expect("PUT vm.restore", &url("source", saved.path()), 400);
    assert!(error.contains("would be written over"), "{error}");
    fs::write(&path, config).unwrap();
    goes_on(saved.path(), rounds);
    assert!(fs::read(folder.path().join("memory")).unwrap() == before);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_that_came_is_in_the_snapshot_and_not_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let mut server = Server::empty();
    let more = json!({ "hotplug_size": 1 << 30 });
    server.expect("PUT vm.create", &body(at, &more, &json!({})).to_string(), 204);
    let made = fs::metadata(at.join("memory")).unwrap();
    assert_eq!((made.len(), made.mode() & 0o777), (SIZE, 0o600));
    server.expect("PUT vm.boot", "", 204);
    server.process.expect("ready");
    server.expect("PUT vm.resize", &format!(r#"{{"desired_ram":{}}}"#, SIZE + (128 << 20)), 204);
    let rounds = count(&mut server);
    server.expect("PUT vm.pause", "", 204);
    server.until("PUT vm.snapshot", &url("destination", at), 204);
    server.shuts_down();
    assert_eq!(fs::metadata(at.join("memory-ranges")).unwrap().len(), 128 << 20);
    for shared in [false, true] {
        let copy = copy(at, shared);
        let error = Server::empty().expect("PUT vm.restore", &url("source", copy.path()), 400);
        assert!(error.contains("memory-ranges"), "{error}");
        fs::copy(at.join("memory-ranges"), copy.path().join("memory-ranges")).unwrap();
        let mut server = resumed(&copy);
        assert!(server.expect("GET vm.info", "", 200).contains(&format!(r#""memory_actual_size":{}"#, SIZE + (128 << 20))));
        assert!(count(&mut server) > rounds);
        server.shuts_down();
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn files_that_cannot_be_memory_are_refused_with_the_file_and_the_reason() {
    let (folder, _) = template(&json!({}));
    let refused = |copy: &TempDir, part: &str| {
        let server = Server::empty();
        let error = server.expect("PUT vm.restore", &url("source", copy.path()), 400);
        assert!(error.contains(part), "{error}");
        server.expect("GET vm.info", "", 404);
        server.shuts_down();
    };
    let copy = copy(folder.path(), false);
    let config = copy.path().join("config.json");
    let original: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let edited = |change: &dyn Fn(&mut Value)| {
        let mut value = original.clone();
        change(&mut value);
        fs::write(&config, value.to_string()).unwrap();
    };
    edited(&|value| drop(value["memory"].as_object_mut().unwrap().remove("zones")));
    refused(&copy, "config.json has to name it");
    let small = copy.path().join("small");
    File::create(&small).and_then(|file| file.set_len(SIZE - 4096)).unwrap();
    let named = |path: &Path| edited(&|value| value["memory"]["zones"][0]["file"] = json!(path));
    named(&small);
    refused(&copy, "which has 67104768");
    assert_eq!(fs::metadata(&small).unwrap().len(), SIZE - 4096);
    named(&copy.path().join("missing"));
    refused(&copy, "missing");
    named(Path::new("/dev/zero"));
    refused(&copy, "no regular file");
    named(copy.path());
    refused(&copy, "no regular file");
    // At vm.create as well.
    for path in [Path::new("/dev/kvm"), folder.path()] {
        let server = Server::empty();
        let zone = json!({ "file": path });
        let error = server.expect("PUT vm.create", &body(copy.path(), &json!({}), &zone).to_string(), 400);
        assert!(error.contains("no regular file"), "{error}");
        let zone = json!({ "file": copy.path().join("disk") });
        let error = server.expect("PUT vm.create", &body(copy.path(), &json!({}), &zone).to_string(), 400);
        assert!(error.contains("the guest's memory would be written to"), "{error}");
        server.shuts_down();
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_file_that_somebody_cuts_ends_its_machine_and_no_other() {
    let (folder, _) = template(&json!({}));
    let private = tempfile::tempdir().unwrap();
    fs::copy(folder.path().join("memory"), private.path().join("memory")).unwrap();
    let (cut, whole) = (copy(folder.path(), false), copy(folder.path(), false));
    let mut config: Value = serde_json::from_slice(&fs::read(cut.path().join("config.json")).unwrap()).unwrap();
    config["memory"]["zones"][0]["file"] = json!(private.path().join("memory"));
    fs::write(cut.path().join("config.json"), config.to_string()).unwrap();
    let (server, mut other) = (restored(cut.path()), resumed(&whole));
    File::options().write(true).open(private.path().join("memory")).unwrap().set_len(0).unwrap();
    let _ = server.call("PUT vm.resume", "");
    let outcome = server.process.wait();
    assert_ne!(outcome.code, 0, "{outcome:?}");
    assert!(count(&mut other) > 0);
    other.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_machine_of_the_command_line_has_its_memory_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let memory = folder.path().join("memory");
    let text = format!("64M,shared=on,file={}", memory.display());
    let (mut server, _disk) = busy::start(&["--memory", &text, "--device", STUB]);
    assert!(count(&mut server) > 0);
    busy::passes(server);
    let mut page = [0; 4096];
    let file = File::open(&memory).unwrap();
    let mut pages =
        (0..SIZE / 4096).map(|n| file.read_exact_at(&mut page, n * 4096).map(|()| page.iter().any(|byte| *byte != 0)));
    assert!(pages.any(Result::unwrap), "the guest's memory is not in the file");
}
