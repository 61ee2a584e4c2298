//! What those hear who listen: a machine's life, what takes long, devices that move, fail and leave, and guests that panic.

use std::fs::File;

use tests::busy::STUB;
use tests::guest::image;
use tests::server::{Server, machine, machine_told};
use tests::vhost_user::{Manners, Serves, VhostUser};
use tests::{Guest, Listener};

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn those_who_listen_hear_a_life_from_its_beginning_to_the_end_of_the_process() {
    let server = Server::empty();
    let mut listener = Listener::new(&server);
    assert_eq!(server.create(&image("echo.elf"), r#","devices":[{"banyan":"stub,id=cold"}]"#).0, 204);
    listener.hears(r#""phase":"created""#);
    listener.hears(r#""event":"device-added","id":"cold""#);
    server.expect("PUT vm.boot", "", 204);
    listener.hears(r#""phase":"starting""#);
    listener.hears(r#""phase":"running""#);
    listener.hears(r#""event":"kernel-entered""#);
    server.adds("stub,id=late");
    listener.hears(r#""event":"device-added","id":"late""#);
    server.expect("PUT vm.pause", "", 204);
    listener.hears(r#""phase":"paused""#);
    server.expect("PUT vm.reboot", "", 204);
    listener.hears(r#"{"event":"reset","why":"a client asked for it"}"#);
    listener.hears(r#""phase":"running""#);
    listener.hears(r#""event":"kernel-entered""#);
    server.expect("PUT vmm.shutdown", "", 204);
    listener.hears(r#"{"event":"ended","why":"a client asked for it"}"#);
    listener.ends();
    server.ends(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_start_that_was_promised_is_told_up_to_its_last_percent_and_then_the_kernel() {
    let server = Server::with_policy("[boot]\nanswer-after = 0\n[memory]\nprefault-threads = 1\n");
    let mut listener = Listener::new(&server);
    let body = machine(&image("echo.elf"), r#""size":1073741824,"prefault":true"#, "");
    server.expect("PUT vm.create", &body, 204);
    server.expect("PUT vm.boot", "", 204);
    // Memory may be there before the machine is called running, on a slow host, and never after its kernel runs.
    let told = listener.until(r#""event":"kernel-entered""#);
    let whole = |line: &String| line.contains(r#""percent":100,"step":"prefault""#);
    assert_eq!(told.iter().filter(|line| whole(line)).count(), 1, "{told:?}");
    let running = told.iter().position(|line| line.contains(r#""phase":"running""#));
    assert!(running.is_some(), "{told:?}");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_that_comes_is_told_up_to_its_last_percent() {
    let server = Server::with_policy("[memory]\nprefault-threads = 1\n");
    let body = machine(&image("echo.elf"), r#""size":67108864,"hotplug_size":1073741824,"prefault":true"#, "");
    server.expect("PUT vm.create", &body, 204);
    server.expect("PUT vm.boot", "", 204);
    let mut listener = Listener::new(&server);
    server.expect("PUT vm.resize", r#"{"desired_ram":1140850688}"#, 204);
    listener.until(r#""percent":100,"step":"prefault""#);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_that_cannot_go_on_is_told_before_its_end() {
    let server = Server::empty();
    let mut listener = Listener::new(&server);
    assert_eq!(server.create(&image("triple.elf"), "").0, 204);
    server.expect("PUT vm.boot", "", 204);
    let told = listener.until(r#""event":"ended""#);
    let panic = told.iter().position(|line| line.contains(r#"{"event":"guest-panic","why":"triple fault"#));
    assert_eq!(panic, Some(told.len() - 2), "{told:?}");
    listener.ends();
    server.ends(6);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_kernel_that_says_that_it_panicked_is_heard() {
    let server = Server::empty();
    let mut listener = Listener::new(&server);
    let body = machine_told(&image("exit.elf"), "panic=1", r#""size":67108864"#, r#","pvpanic":true"#);
    server.expect("PUT vm.create", &body, 204);
    server.expect("PUT vm.boot", "", 204);
    let told = listener.until(r#""event":"guest-panic""#);
    assert!(told.iter().any(|line| line.contains(r#"{"event":"guest-panic","why":"the guest's kernel panicked"}"#)), "{told:?}");
    listener.hears(r#"{"event":"ended","why":"the guest's kernel panicked"}"#);
    listener.ends();
    server.ends(10);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_device_that_leaves_is_told_when_it_is_gone() {
    let guest = Guest::new("echo").with(&["--pcie", "root-ports=1,removal=surprise"]);
    let server = Server::run(&guest);
    server.until("GET vm.counters", "", 200);
    server.adds("stub,id=late,on=port0");
    let mut listener = Listener::new(&server);
    assert_eq!(server.remove("late"), 204);
    listener.hears(r#"{"event":"device-removed","id":"late"}"#);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_device_that_another_one_moves_before_the_start_is_told_with_its_new_address() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.img");
    File::create(&disk).and_then(|file| file.set_len(1 << 20)).unwrap();
    let server = Server::empty();
    let mut listener = Listener::new(&server);
    assert_eq!(server.create(&image("echo.elf"), r#","rng":{"src":"/dev/urandom"}"#).0, 204);
    let before = listener.until(r#""event":"device-added""#);
    server.expect("PUT vm.add-disk", &format!(r#"{{"path":"{}","id":"root"}}"#, disk.display()), 204);
    let after = listener.until(r#""event":"device-moved""#);
    let address = |lines: &[String]| {
        let line = lines.last().unwrap_or_else(|| panic!("nothing was told"));
        line.split_once(r#""pci_path":""#).map(|(_, rest)| rest.split('"').next().map(str::to_owned))
    };
    assert!(after.last().is_some_and(|line| line.contains(r#""kind":"rng""#)), "{after:?}");
    assert!(address(&before) != address(&after), "{before:?} {after:?}");
    let info = server.expect("GET vm.info", "", 200);
    assert!(address(&after).flatten().is_some_and(|path| info.contains(&format!(r#""pci_path":"{path}""#))), "{info}");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_disk_whose_server_dies_is_told_as_failed() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vu");
    let _served = VhostUser::start(&socket, Serves::Disk(2048), Manners { dies_after: Some(5), ..Manners::default() });
    let server = Server::empty();
    let mut listener = Listener::new(&server);
    let disk = format!(r#","disks":[{{"id":"served","vhost_user":true,"vhost_socket":"{}"}}]"#, socket.display());
    let body = machine_told(&image("disks.elf"), "requests=20 bytes=512", r#""size":134217728,"shared":true"#, &disk);
    server.expect("PUT vm.create", &body, 204);
    server.expect("PUT vm.boot", "", 204);
    let told = listener.until(r#""event":"device-failed","id":"served""#);
    assert!(told.last().is_some_and(|line| line.contains("is gone; the device gives up")), "{told:?}");
    // Once, however it was found out.
    server.expect("PUT vm.pause", "", 204);
    server.expect("PUT vmm.shutdown", "", 204);
    let told = listener.until(r#""event":"ended""#);
    assert!(!told.iter().any(|line| line.contains("device-failed")), "{told:?}");
    server.ends(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_disk_whose_image_is_cut_off_is_told_as_failed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    let file = File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let server = Server::empty();
    let mut listener = Listener::new(&server);
    let disk = format!(r#","disks":[{{"id":"cut","path":"{}"}}]"#, path.display());
    let body = machine_told(&image("disks.elf"), "reads=100000000 bytes=65536", r#""size":134217728"#, &disk);
    server.expect("PUT vm.create", &body, 204);
    server.expect("PUT vm.boot", "", 204);
    listener.until(r#""event":"kernel-entered""#);
    file.set_len(0).unwrap();
    let told = listener.until(r#""event":"device-failed","id":"cut""#);
    assert!(told.last().is_some_and(|line| line.contains("its image failed a request")), "{told:?}");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_server_that_does_not_take_memory_that_comes_is_told_with_its_device() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vu");
    let leaves = Manners { overwhelmed: true, leaves: true, ..Manners::default() };
    let _served = VhostUser::start(&socket, Serves::Disk(2048), leaves);
    let disk = format!("vhost-user={},id=served", socket.display());
    let guest = Guest::new("keep").with(&["--memory", "64M,hotplug=512M,shared=on", "--rng=/dev/urandom", "--disk", &disk]);
    let mut server = Server::run(&guest.devices(&[STUB]));
    server.process.expect("ready");
    let mut listener = Listener::new(&server);
    server.expect("PUT vm.resize", r#"{"desired_ram":201326592}"#, 204);
    let told = listener.until("told of memory that came");
    assert!(told.last().is_some_and(|line| line.contains(r#""event":"device-failed","id":"served""#)), "{told:?}");
    server.shuts_down();
}
