//! Devices that another process serves, on /dev/kvm: honest servers, and servers that say nothing, die, or come back.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tests::busy::STUB;
use tests::guest::{PASSED, image};
use tests::process::until;
use tests::server::{Server, call, machine_told};
use tests::vhost_user::{Event, Manners, Serves, VhostUser};
use tests::{Guest, Listener};

const SHARED: [&str; 2] = ["--memory", "128M,shared=on"];
const SECTORS: u64 = 2048;

fn folder() -> (TempDir, PathBuf) {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let socket = folder.path().join("vu");
    (folder, socket)
}

/// `disk0` as for `--disk`.
fn disk(socket: &Path) -> String {
    format!("vhost-user={}", socket.display())
}

/// `banyan --api-socket` with a machine that can have served devices and runs `echo`.
fn running() -> Server {
    let server = Server::empty();
    let body = format!(r#"{{"payload":{{"kernel":"{}"}},"memory":{{"size":67108864,"shared":true}}}}"#, image("echo.elf"));
    server.expect("PUT vm.create", &body, 204);
    server.expect("PUT vm.boot", "", 204);
    server
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn what_the_guest_writes_to_a_served_disk_its_server_has() {
    let (_folder, socket) = folder();
    let server = VhostUser::start(&socket, Serves::Disk(SECTORS), Manners::default());
    for wait in ["poll", "interrupt"] {
        let guest = Guest::new("disks").options(&format!("requests=40 bytes=512 wait={wait}")).with(&SHARED);
        let outcome = guest.with(&["--disk", &disk(&socket)]).passes();
        outcome.expect_output(&["disk 0 requests 80"]);
    }
    let contents = server.contents();
    // As resources/guests/disks.c makes it of the offset.
    let pattern = |offset: u64| (offset + 8).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    for offset in (0..40 * 512_u64).step_by(8) {
        let at = usize::try_from(offset).unwrap();
        assert_eq!(contents[at..at + 8], pattern(offset), "at {offset}");
    }
    assert!(contents[40 * 512..].iter().all(|byte| *byte == 0));
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn packets_go_to_the_server_of_an_interface_and_come_from_it() {
    let (_folder, socket) = folder();
    let _server = VhostUser::start(&socket, Serves::Echo, Manners::default());
    let guest = Guest::new("nets").options("packets=100 bytes=1400").with(&SHARED);
    let outcome = guest.with(&["--net", &format!("vhost-user={},mac=02:00:00:00:00:07", socket.display())]).passes();
    outcome.expect_output(&["interface 0 packets 100"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn an_interface_on_its_way_out_is_no_answer_to_one_that_asks_for_its_address() {
    let (folder, one) = folder();
    let other = folder.path().join("other");
    let _servers = [&one, &other].map(|socket| VhostUser::start(socket, Serves::Echo, Manners::default()));
    let machine = running();
    let add = |socket: &Path, id: &str, mac: &str| {
        let socket = socket.display();
        let body = format!(r#"{{"vhost_user":true,"vhost_socket":"{socket}","id":"{id}","mac":"02:00:00:00:00:0{mac}"}}"#);
        machine.call("PUT vm.add-net", &body)
    };
    assert_eq!(add(&one, "net", "1").0, 200);
    let (status, again) = add(&other, "new", "1");
    assert!(status == 200 && again.contains(r#""id":"net""#), "{status} {again}");
    // The guest does not know how to let go of it.
    assert_eq!(machine.remove("net"), 204);
    let (status, refused) = add(&other, "new", "1");
    assert!(status == 409 && refused.contains("net, which has this MAC address, is being removed"), "{status} {refused}");
    assert_eq!(add(&other, "new", "2").0, 200);
    machine.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_server_that_died_before_the_driver_came_is_followed_by_the_next_one() {
    let (_folder, socket) = folder();
    let server = VhostUser::start(&socket, Serves::Disk(SECTORS), Manners { dies_early: true, ..Manners::default() });
    Guest::new("disks").options("requests=4 bytes=512").with(&SHARED).with(&["--disk", &disk(&socket)]).passes();
    server.expect(Event::Ended);
    server.expect(Event::Started);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn when_the_server_of_a_disk_dies_the_machine_goes_on_and_after_a_reset_the_next_one_serves() {
    let (_folder, socket) = folder();
    let server = VhostUser::start(&socket, Serves::Disk(SECTORS), Manners { dies_after: Some(5), ..Manners::default() });
    let guest = Guest::new("disks").options("requests=20 bytes=512").with(&SHARED).with(&["--disk", &disk(&socket)]);
    let mut machine = Server::run(&guest);
    server.expect(Event::Ended);
    machine.expect("GET vmm.ping", "", 200);
    machine.expect("GET vm.info", "", 200);
    machine.expect("GET vm.counters", "", 200);
    machine.expect("PUT vm.reboot", "", 204);
    machine.process.expect("PASS");
    let outcome = machine.process.wait();
    outcome.expect_code(PASSED).expect_error(&["disk0: the server at", "is gone; the device gives up"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_server_that_says_nothing_holds_up_its_own_device_and_nothing_else() {
    let (folder, disk) = folder();
    let (net, fs) = (folder.path().join("net"), folder.path().join("fs"));
    let silent = Manners { silent: true, ..Manners::default() };
    let _servers = [&disk, &net, &fs].map(|socket| VhostUser::start(socket, Serves::Disk(SECTORS), silent));
    let machine = running();
    let path = machine.socket();
    let bodies = [
        ("PUT vm.add-disk", format!(r#"{{"vhost_user":true,"vhost_socket":"{}"}}"#, disk.display())),
        ("PUT vm.add-net", format!(r#"{{"vhost_user":true,"vhost_socket":"{}","vhost_mode":"Client"}}"#, net.display())),
        ("PUT vm.add-fs", format!(r#"{{"socket":"{}","tag":"home"}}"#, fs.display())),
    ];
    let adds: Vec<_> = bodies
        .into_iter()
        .map(|(what, body)| {
            let path = path.clone();
            thread::spawn(move || {
                let start = Instant::now();
                (call(&path, what, &body), start.elapsed())
            })
        })
        .collect();
    let (mut calls, mut slowest) = (0, Duration::ZERO);
    let plain = folder.path().join("plain.img");
    std::fs::write(&plain, vec![0; 4096]).unwrap();
    while !adds.iter().all(thread::JoinHandle::is_finished) {
        let start = Instant::now();
        machine.expect("GET vm.counters", "", 200);
        machine.expect("GET vm.info", "", 200);
        if calls == 0 {
            machine.expect("PUT vm.add-disk", &format!(r#"{{"path":"{}","id":"plain"}}"#, plain.display()), 200);
        }
        slowest = slowest.max(start.elapsed());
        calls += 1;
        thread::sleep(Duration::from_millis(20));
    }
    for add in adds {
        let ((status, reply), took) = add.join().unwrap();
        assert!(status == 400 && reply.contains("did not do what a vhost-user server does"), "{status} {reply}");
        assert!(took > Duration::from_secs(1), "{took:?}: nothing was waited for");
    }
    assert!(calls > 10 && slowest < Duration::from_secs(1), "{calls} calls, the slowest took {slowest:?}");
    machine.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn served_devices_come_and_go_and_are_told_as_they_were_given() {
    let (folder, disk_socket) = folder();
    let (net_socket, fs_socket) = (folder.path().join("net"), folder.path().join("fs"));
    let disk = VhostUser::start(&disk_socket, Serves::Disk(SECTORS), Manners::default());
    let net = VhostUser::start(&net_socket, Serves::Echo, Manners::default());
    let fs = VhostUser::start(&fs_socket, Serves::Folder, Manners::default());
    let machine = running();
    let given = [
        ("vm.add-disk", format!(r#"{{"vhost_user":true,"vhost_socket":"{}","id":"d"}}"#, disk_socket.display())),
        ("vm.add-net", format!(r#"{{"vhost_user":true,"vhost_socket":"{}","id":"n"}}"#, net_socket.display())),
        ("vm.add-fs", format!(r#"{{"socket":"{}","tag":"home","id":"f"}}"#, fs_socket.display())),
    ];
    for (call, body) in &given {
        machine.expect(&format!("PUT {call}"), body, 200);
    }
    machine.expect(
        "PUT vm.add-disk",
        &format!(r#"{{"vhost_user":true,"vhost_socket":"{}"}}"#, folder.path().join("no").display()),
        400,
    );
    for server in [&disk, &net, &fs] {
        server.expect(Event::Connected);
    }
    let info = machine.expect("GET vm.info", "", 200);
    for socket in [&disk_socket, &net_socket] {
        assert!(info.contains(&format!(r#""vhost_socket":"{}""#, socket.display())), "{info}");
    }
    assert_eq!(info.matches(r#""vhost_user":true"#).count(), 2, "{info}");
    machine.expect("PUT vm.reboot", "", 204);
    for id in ["d", "n", "f"] {
        assert!(machine.devices().contains(&format!("{id}@")), "{id} is there after a reset: {}", machine.devices());
    }
    machine.shuts_down();
    for server in [&disk, &net, &fs] {
        server.expect(Event::Ended);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_that_a_server_cannot_map_is_refused_whenever_the_device_comes() {
    let (_folder, socket) = folder();
    let _server = VhostUser::start(&socket, Serves::Disk(SECTORS), Manners::default());
    let outcome = Guest::new("echo").with(&["--disk", &disk(&socket)]).run();
    outcome.expect_code(1).expect_error(&["needs memory that its server can map", "--memory shared=on"]);
    let machine = Server::empty();
    assert_eq!(machine.create(&image("echo.elf"), "").0, 204);
    let body = format!(r#"{{"vhost_user":true,"vhost_socket":"{}"}}"#, socket.display());
    let refused = machine.expect("PUT vm.add-disk", &body, 400);
    assert!(refused.contains("--memory shared=on"), "{refused}");
    machine.expect("PUT vm.boot", "", 204);
    let refused = machine.expect("PUT vm.add-disk", &body, 400);
    assert!(refused.contains("--memory shared=on"), "{refused}");
    machine.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_socket_is_refused_while_another_device_meets_the_server_behind_it() {
    let (_folder, socket) = folder();
    let server = VhostUser::start(&socket, Serves::Disk(SECTORS), Manners { silent: true, ..Manners::default() });
    let machine = running();
    let add = |id: &str| format!(r#"{{"vhost_user":true,"vhost_socket":"{}","id":"{id}"}}"#, socket.display());
    let (path, first) = (machine.socket(), add("first"));
    let first = thread::spawn(move || call(&path, "PUT vm.add-disk", &first));
    server.expect(Event::Connected);
    let refused = machine.expect("PUT vm.add-disk", &add("second"), 400);
    assert!(refused.contains("a socket is for one of them") && refused.contains("or remove first first"), "{refused}");
    let (status, reply) = first.join().unwrap();
    assert_eq!(status, 400, "{reply}");
    // The first one is not on its way any more.
    let refused = machine.expect("PUT vm.add-disk", &add("third"), 400);
    assert!(!refused.contains("a socket is for one of them"), "{refused}");
    machine.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_g8_when_a_machine_cannot_start_its_server_is_let_go() {
    for wrong in [
        &["--disk", "/nonexistent/disk.img"][..],
        &["--serial", "file=/nonexistent/folder/out"],
        &["--vsock", "cid=3,socket=/nonexistent/v"],
    ] {
        let (_folder, socket) = folder();
        let server = VhostUser::start(&socket, Serves::Folder, Manners::default());
        let folder = format!("{},tag=home", socket.display());
        let outcome = Guest::new("echo").with(&SHARED).with(&["--fs", &folder]).with(wrong).run();
        outcome.expect_code(1);
        // It may have been refused before anybody was asked.
        drop(server);
    }
    // By the API the process goes on, and the server must not wait for its end.
    let (_folder, socket) = folder();
    let server = VhostUser::start(&socket, Serves::Folder, Manners::default());
    let machine = Server::empty();
    let kernel = socket.with_file_name("kernel");
    std::fs::copy(image("echo.elf"), &kernel).unwrap();
    let body = format!(
        r#"{{"payload":{{"kernel":"{}"}},"memory":{{"size":67108864,"shared":true}},"fs":[{{"tag":"home","socket":"{}"}}]}}"#,
        kernel.display(),
        socket.display()
    );
    machine.expect("PUT vm.create", &body, 204);
    std::fs::remove_file(&kernel).unwrap();
    let (status, reply) = machine.call("PUT vm.boot", "");
    assert!((400..600).contains(&status) && reply.contains("kernel"), "{status} {reply}");
    server.expect(Event::Connected);
    machine.expect("PUT vm.delete", "", 204);
    server.expect(Event::Ended);
    machine.expect("GET vmm.ping", "", 200);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn when_the_server_of_a_folder_dies_the_machine_goes_on() {
    let (_folder, socket) = folder();
    let server = VhostUser::start(&socket, Serves::Folder, Manners::default());
    let machine = running();
    machine.expect("PUT vm.add-fs", &format!(r#"{{"socket":"{}","tag":"home","id":"f"}}"#, socket.display()), 200);
    server.expect(Event::Connected);
    server.hang_up();
    server.expect(Event::Ended);
    drop(server);
    for what in ["GET vmm.ping", "GET vm.info", "GET vm.counters"] {
        machine.expect(what, "", 200);
    }
    machine.expect("PUT vm.reboot", "", 204);
    machine.expect("PUT vm.pause", "", 204);
    machine.expect("PUT vm.resume", "", 204);
    machine.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn servers_that_say_nothing_when_memory_comes_hold_up_no_command_and_a_pause_waits_for_them_together() {
    let overwhelmed = Manners { overwhelmed: true, ..Manners::default() };
    let sides: Vec<_> = (0..3)
        .map(|_| {
            let (folder, socket) = folder();
            let server = VhostUser::start(&socket, Serves::Disk(SECTORS), overwhelmed);
            (disk(&socket), server, folder)
        })
        .collect();
    let disks: Vec<&str> = sides.iter().flat_map(|(disk, ..)| ["--disk", disk]).collect();
    let guest = Guest::new("keep").with(&["--memory", "64M,hotplug=512M,shared=on", "--rng=/dev/urandom"]).with(&disks);
    let mut machine = Server::run(&guest.devices(&[STUB]));
    machine.process.expect("ready");
    machine.expect("PUT vm.resize", r#"{"desired_ram":201326592}"#, 204);
    // They are told one after the other.
    sides[0].1.expect(Event::Overwhelmed);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        let asked = Instant::now();
        machine.expect("GET vm.counters", "", 200);
        assert!(asked.elapsed() < Duration::from_millis(1900), "{:?} for an answer: a server has two seconds", asked.elapsed());
        thread::sleep(Duration::from_millis(20));
    }
    let asked = Instant::now();
    machine.expect("PUT vm.pause", "", 204);
    let took = asked.elapsed();
    assert!(took > Duration::from_secs(1) && took < Duration::from_secs(4), "{took:?}: two seconds for all of them");
    machine.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn servers_that_say_nothing_are_met_at_the_same_time() {
    let silent = Manners { silent: true, ..Manners::default() };
    let sides: Vec<_> = (0..5)
        .map(|_| {
            let (folder, socket) = folder();
            let server = VhostUser::start(&socket, Serves::Folder, silent);
            (socket.display().to_string(), server, folder)
        })
        .collect();
    let folders = sides.iter().enumerate().map(|(n, (socket, ..))| format!(r#"{{"tag":"t{n}","socket":"{socket}"}}"#));
    let folders = folders.collect::<Vec<_>>().join(",");
    let machine = Server::empty();
    let kernel = image("echo.elf");
    let body = format!(r#"{{"payload":{{"kernel":"{kernel}"}},"memory":{{"size":67108864,"shared":true}},"fs":[{folders}]}}"#);
    let start = Instant::now();
    let reply = machine.expect("PUT vm.create", &body, 400);
    let took = start.elapsed();
    assert!(reply.contains("device fs") && reply.contains("vhost-user"), "{reply}");
    assert!(took > Duration::from_secs(1) && took < Duration::from_secs(6), "{took:?}: two seconds for all of them");
    // Each was met, and none more than once.
    sides.iter().for_each(|(_, server, _)| server.expect(Event::Connected));
    assert_eq!(machine.create(&kernel, "").0, 204);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_dry_run_looks_whether_a_server_can_be_there_and_does_not_disturb_it() {
    let (folder, socket) = folder();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let dry_run = |flag: &str, value: &str| Guest::new("echo").with(&SHARED).with(&["--dry-run", flag, value]).run();
    for flags in [("--disk", "vhost-user=PATH"), ("--net", "vhost-user=PATH"), ("--fs", "PATH,tag=home")] {
        for (path, why) in [(socket.display(), "No such file"), (file.display(), "it is no socket")] {
            let outcome = dry_run(flags.0, &flags.1.replace("PATH", &path.to_string()));
            outcome.expect_code(1).expect_error(&["no server of a device listens at", &path.to_string(), why]);
        }
    }
    let server = VhostUser::start(&socket, Serves::Disk(SECTORS), Manners::default());
    dry_run("--disk", &disk(&socket)).expect_code(0);
    // It is still there for its one client.
    let outcome =
        Guest::new("disks").options("requests=4 bytes=512 wait=poll").with(&SHARED).with(&["--disk", &disk(&socket)]).passes();
    outcome.expect_output(&["disk 0 requests"]);
    drop(server);
}

/// Of each kind one: the name, what is served, the call that adds it, and the body for a server at a socket of that name.
const KINDS: [(&str, Serves, &str); 3] =
    [("d", Serves::Disk(SECTORS), "vm.add-disk"), ("n", Serves::Echo, "vm.add-net"), ("f", Serves::Folder, "vm.add-fs")];

fn body(kind: &str, folder: &Path, id: &str) -> String {
    let socket = folder.join(kind).display().to_string();
    match kind {
        "f" => format!(r#"{{"tag":"home","socket":"{socket}","id":"{id}"}}"#),
        _ => format!(r#"{{"vhost_user":true,"vhost_socket":"{socket}","id":"{id}"}}"#),
    }
}

fn serves_at(folder: &Path, kind: &str, serves: Serves) -> VhostUser {
    VhostUser::start(&folder.join(kind), serves, Manners::default())
}

fn failed(id: &str) -> String {
    format!(r#""event":"device-failed","id":"{id}","why":"{id}: the server at "#)
}

/// The machine's end, before which nothing more was told of failures. What standard error has of servers that are gone.
#[track_caller]
fn ends_without_more(machine: Server, mut listener: Listener) -> usize {
    machine.expect("PUT vmm.shutdown", "", 204);
    let told = listener.until(r#""event":"ended""#);
    assert!(told.iter().all(|line| !line.contains("device-failed")), "{told:?}");
    machine.process.wait().expect_code(0).stderr.matches("is gone").count()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn servers_that_die_before_the_start_are_told_once_and_the_machine_runs_without_them_until_others_are_given() {
    let folder = tempfile::tempdir().unwrap();
    let servers = KINDS.map(|(kind, serves, _)| (kind, serves_at(folder.path(), kind, serves)));
    let given = |kind| body(kind, folder.path(), kind);
    let devices = format!(r#","disks":[{}],"net":[{}],"fs":[{}]"#, given("d"), given("n"), given("f"));
    let machine = Server::empty();
    let body = machine_told(&image("echo.elf"), "", r#""size":67108864,"shared":true"#, &devices);
    machine.expect("PUT vm.create", &body, 204);
    let mut listener = Listener::new(&machine);
    for (kind, server) in servers {
        drop(server);
        listener.until(&failed(kind));
    }
    for what in ["PUT vm.boot", "PUT vm.reboot"] {
        machine.expect(what, "", 204);
        let told = listener.until(r#""event":"kernel-entered""#);
        assert!(told.iter().all(|line| !line.contains("device-failed")), "{told:?}");
        machine.expect("GET vm.counters", "", 200);
    }
    machine.expect("PUT vm.shutdown", "", 204);
    let others = KINDS.map(|(kind, serves, call)| {
        assert_eq!(machine.remove(kind), 204);
        let server = serves_at(folder.path(), kind, serves);
        machine.expect(&format!("PUT {call}"), &given(kind), 204);
        server.expect(Event::Connected);
        server
    });
    machine.expect("PUT vm.boot", "", 204);
    listener.until(r#""event":"kernel-entered""#);
    assert_eq!(ends_without_more(machine, listener), 3);
    others.iter().for_each(|server| server.expect(Event::Ended));
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn servers_that_die_before_a_driver_comes_are_told_once_and_the_same_device_can_come_again() {
    let folder = tempfile::tempdir().unwrap();
    let machine = Server::with_policy("[hot-plug]\nplace = \"ports\"\n[pcie]\nroot-ports = 4\n");
    machine.expect("PUT vm.create", &machine_told(&image("slots.elf"), "", r#""size":67108864,"shared":true"#, ""), 204);
    machine.expect("PUT vm.boot", "", 204);
    let mut listener = Listener::new(&machine);
    for (kind, serves, call) in KINDS {
        let server = serves_at(folder.path(), kind, serves);
        machine.expect(&format!("PUT {call}"), &body(kind, folder.path(), kind), 200);
        server.expect(Event::Connected);
        drop(server);
        listener.until(&failed(kind));
        machine.expect("GET vm.info", "", 200);
        let server = serves_at(folder.path(), kind, serves);
        assert_eq!(machine.remove(kind), 204);
        let again = format!("{kind}-again");
        let reply = machine.until(&format!("PUT {call}"), &body(kind, folder.path(), &again), 200);
        assert!(reply.contains(&again), "{reply}");
        server.expect(Event::Connected);
        assert_eq!(machine.remove(&again), 204);
    }
    assert_eq!(ends_without_more(machine, listener), 3);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_server_that_died_before_is_not_told_again_when_the_driver_finds_out() {
    let (folder, socket) = folder();
    let server = VhostUser::start(&socket, Serves::Disk(SECTORS), Manners::default());
    let mut machine = Server::empty();
    let devices =
        format!(r#","disks":[{{"id":"d","vhost_user":true,"vhost_socket":"{}"}}],"serial":{{"mode":"Tty"}}"#, socket.display());
    let body = machine_told(&image("keep.elf"), "", r#""size":134217728,"shared":true"#, &devices);
    machine.expect("PUT vm.create", &body, 204);
    let mut listener = Listener::new(&machine);
    drop(server);
    listener.until(&failed("d"));
    for what in ["PUT vm.boot", "PUT vm.reboot"] {
        machine.expect(what, "", 204);
        machine.process.expect("ready");
        // Waits for those that serve the device, who have found out.
        machine.expect("PUT vm.pause", "", 204);
        machine.expect("PUT vm.resume", "", 204);
    }
    assert_eq!(ends_without_more(machine, listener), 1);
    drop(folder);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn without_clients_the_log_tells_of_a_server_that_died_before_a_driver_came() {
    let (folder, socket) = folder();
    let server = VhostUser::start(&socket, Serves::Folder, Manners::default());
    let log = folder.path().join("log");
    let arguments = ["--fs", &format!("{},tag=home", socket.display()), "--log", &format!("file={}", log.display())];
    let mut guest = Guest::new("echo").with(&SHARED).with(&arguments).start();
    guest.expect("ready");
    drop(server);
    let lines = || std::fs::read_to_string(&log).unwrap_or_default().matches("fs0: the server at ").count();
    until("a line about the server", lines, |lines| *lines > 0);
    guest.send("on\n");
    guest.wait().expect_code(PASSED);
    assert_eq!(lines(), 1);
}
