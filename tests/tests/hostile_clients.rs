//! What clients of the API socket may do wrong, through the executable: lengths, bodies, silence, descriptors, calls out of turn.

use std::fs::{self, File};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tests::Session;
use tests::guest::image;
use tests::process::{LIMIT, in_shell, until};
use tests::server::{Server, listens, machine};

fn connect(server: &Server) -> UnixStream {
    connect_to(&server.socket())
}

fn connect_to(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap_or_else(|error| panic!("{error}"));
    let timed = stream.set_read_timeout(Some(LIMIT)).and_then(|()| stream.set_write_timeout(Some(LIMIT)));
    timed.unwrap_or_else(|error| panic!("no time limit: {error}"));
    stream
}

/// Status of the next reply; `None` if the connection ends without one.
fn status(stream: &mut UnixStream) -> Option<u16> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n") {
        match stream.read(&mut byte) {
            Ok(1) => head.extend(byte),
            _ => return None,
        }
    }
    String::from_utf8_lossy(&head).split(' ').nth(1)?.parse().ok()
}

/// The rest of a reply of which `status` has read the first line; true when the connection goes on.
fn rest(stream: &mut UnixStream) -> bool {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1) => head.extend(byte),
            _ => return false,
        }
    }
    let text = String::from_utf8_lossy(&head).to_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok()).unwrap_or(0);
    stream.read_exact(&mut vec![0; length]).is_ok()
}

fn alive(server: &Server) {
    let start = Instant::now();
    server.expect("GET vmm.ping", "", 200);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_socket_is_for_its_owner_alone() {
    let server = Server::empty();
    let mode = fs::metadata(server.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "{mode:o}");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn lengths_that_make_no_sense_are_refused_and_a_missing_one_is_an_empty_body() {
    let server = Server::empty();
    for length in
        ["-1", "+5", "5x", "18446744073709551616", "99999999999999999999999", "0x10", "5, 6", "", "2\r\nContent-Length: 3"]
    {
        let mut stream = connect(&server);
        stream
            .write_all(format!("PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{{}}   ").as_bytes())
            .unwrap();
        assert_eq!(status(&mut stream), Some(400), "{length}");
    }
    let mut stream = connect(&server);
    stream.write_all(b"PUT /api/v1/vm.create HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(status(&mut stream), Some(400));
    alive(&server);
    server.expect("GET vm.info", "", 404);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_body_of_100_mib_is_refused_without_being_kept() {
    let server = Server::empty();
    let before = server.process.resident();
    let chunk = vec![b' '; 1 << 20];
    for framing in ["Content-Length: 104857600", "Transfer-Encoding: chunked"] {
        let mut stream = connect(&server);
        stream.write_all(format!("PUT /api/v1/vm.create HTTP/1.1\r\n{framing}\r\n\r\n").as_bytes()).unwrap();
        let mut sent = 0;
        for _ in 0..100 {
            let piece = if framing.starts_with('T') { [b"100000\r\n", &chunk[..], b"\r\n"].concat() } else { chunk.clone() };
            match stream.write_all(&piece) {
                Ok(()) => sent += 1,
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
                    break;
                }
            }
        }
        assert!(sent < 100, "{framing}: everything was taken");
        // The reply may be lost with the reset, but is no success.
        assert!(status(&mut stream).is_none_or(|status| status == 400), "{framing}");
    }
    alive(&server);
    assert!(server.process.resident() < before + 16_384, "{} KiB, {before} before", server.process.resident());
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_thousand_idle_connections_shut_nobody_out_and_leave_nothing() {
    let server = Server::empty();
    let mut kept = connect(&server);
    let ping = b"GET /api/v1/vmm.ping HTTP/1.1\r\nHost: x\r\n\r\n";
    kept.write_all(ping).unwrap();
    assert!(status(&mut kept) == Some(200) && rest(&mut kept));
    let Some((before, _)) = server.process.usage() else { panic!("it has ended") };
    let idle: Vec<_> = (0..1000).map(|_| connect(&server)).collect();
    alive(&server);
    assert_eq!(server.create(&image("echo.elf"), "").0, 204);
    server.expect("PUT vm.boot", "", 204);
    kept.write_all(ping).unwrap();
    assert_eq!(status(&mut kept), Some(200), "a connection that was used is kept");
    server.expect("PUT vm.delete", "", 204);
    drop(idle);
    server.process.falls_to(before);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_e2_half_requests_and_slow_clients_hold_up_their_own_connections_alone() {
    let server = Server::empty();
    let mut half = connect(&server);
    half.write_all(b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 20\r\n\r\n123456789").unwrap();
    let mut head = connect(&server);
    head.write_all(b"PUT /api/v1/vm.cr").unwrap();
    let mut slow = connect(&server);
    let begun = Instant::now();
    let mut dropped = None;
    // 30 seconds are what a request may take; the slow one sends a byte each 300 ms.
    while begun.elapsed() < Duration::from_secs(45) && dropped.is_none() {
        alive(&server);
        if slow.write_all(b"G").is_err() {
            dropped = Some(begun.elapsed());
        }
        thread::sleep(Duration::from_millis(300));
    }
    let dropped = dropped.unwrap_or_else(|| panic!("the slow client is still there"));
    assert!(dropped > Duration::from_secs(20), "{dropped:?}");
    for stream in [&mut half, &mut head] {
        let mut left = Vec::new();
        assert!(stream.read_to_end(&mut left).is_ok(), "it is closed");
    }
    alive(&server);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_e3_unknown_paths_and_wrong_verbs_are_answered_and_the_connection_goes_on() {
    let server = Server::empty();
    let mut stream = connect(&server);
    for (request, expected) in [
        ("GET /api/v1/vm.nothing", 404),
        ("GET /nowhere", 404),
        ("PUT /api/v1/vmm.ping", 405),
        ("GET /api/v1/vm.create", 405),
        ("BREW /api/v1/vmm.ping", 405),
        ("GET /api/v1/vmm.ping", 200),
    ] {
        stream.write_all(format!("{request} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).unwrap();
        assert_eq!(status(&mut stream), Some(expected), "{request}");
        assert!(rest(&mut stream), "{request}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_e6_bad_json_and_calls_out_of_turn_are_refused_with_the_reason() {
    let server = Server::empty();
    for call in [
        "boot",
        "shutdown",
        "reboot",
        "pause",
        "resume",
        "delete",
        "power-button",
        "resize",
        "add-disk",
        "add-net",
        "remove-device",
    ] {
        server.expect(&format!("PUT vm.{call}"), "{}", 404);
    }
    for body in ["{\"payload\": ]", "[", "7", "{}x", &"[".repeat(100_000), "\u{0}", r#"{"payload":{"kernel":7}}"#] {
        let reply = server.expect("PUT vm.create", body, 400);
        assert!(reply.contains("vm.create"), "{reply}");
    }
    let more = r#","cpus":{"boot_vcpus":1,"max_vcpus":2}"#;
    assert_eq!(server.create(&image("echo.elf"), more).0, 204);
    assert_eq!(server.create(&image("echo.elf"), more).0, 405);
    for call in ["pause", "resume", "reboot"] {
        server.expect(&format!("PUT vm.{call}"), "", 405);
    }
    server.expect("PUT vm.boot", "", 204);
    server.expect("PUT vm.boot", "", 405);
    // Beyond what it may have.
    let reply = server.expect("PUT vm.resize", r#"{"desired_vcpus":3}"#, 400);
    assert!(reply.contains('2'), "{reply}");
    server.expect("PUT vm.resize", r#"{"desired_ram":1099511627776}"#, 400);
    server.expect("PUT vm.remove-device", r#"{"id":"nobody"}"#, 404);
    let info = server.expect("GET vm.info", "", 200);
    assert!(info.contains(r#""phase":"running""#), "{info}");
    server.shuts_down();
}

/// Sends a request with descriptors; the reply's status.
fn send_with(server: &Server, request: &str, descriptors: &[BorrowedFd<'_>]) -> Option<u16> {
    let mut stream = connect(server);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "too many for one message");
    let sent = sendmsg(&stream, &[IoSlice::new(request.as_bytes())], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(request.len()));
    status(&mut stream)
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn descriptors_too_many_too_few_and_of_wrong_kinds_are_refused_and_closed() {
    let server = Server::empty();
    assert_eq!(server.create(&image("echo.elf"), "").0, 204);
    let file = File::open("/dev/null").unwrap();
    let disk = tempfile::tempfile().unwrap();
    let (one, other) = UnixStream::pair().unwrap();
    let body = |queues: u32| format!(r#"{{"id":"n","mac":"02:00:00:00:00:01","num_queues":{queues}}}"#);
    let add = |queues: u32| {
        let body = body(queues);
        format!("PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    for running in [false, true] {
        if running {
            server.expect("PUT vm.boot", "", 204);
        }
        let Some((before, _)) = server.process.usage() else { panic!("it has ended") };
        assert_eq!(server.call("PUT vm.add-net", &body(2)).0, 400, "none");
        for (queues, count) in [(4, 1), (2, 2), (2, 64), (2, 200)] {
            assert_eq!(send_with(&server, &add(queues), &vec![file.as_fd(); count]), Some(400), "{count} for {queues} queues");
        }
        for (what, wrong) in [("null", file.as_fd()), ("file", disk.as_fd()), ("socket", one.as_fd())] {
            assert_eq!(send_with(&server, &add(2), &[wrong]), Some(400), "{what}, running: {running}");
        }
        // Where none are wanted they are closed.
        assert_eq!(send_with(&server, "GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n", &[other.as_fd(); 10]), Some(200));
        server.process.falls_to(before);
        let info = server.expect("GET vm.info", "", 200);
        assert!(!info.contains("02:00:00:00:00:01"), "{info}");
    }
    server.shuts_down();
}

/// All that comes until the connection ends.
fn until_the_end(stream: &mut UnixStream) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap_or_else(|error| panic!("the connection does not end: {error}"));
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn clients_that_end_their_side_after_a_request_get_their_reply_and_are_let_go() {
    let server = Server::empty();
    let path = server.socket();
    let ping = "GET /api/v1/vmm.ping HTTP/1.1\r\nHost: x\r\n\r\n";
    let create = |memory: &str| {
        let body = format!(r#"{{"payload":{{"kernel":"{}"}},"memory":{memory}}}"#, image("echo.elf"));
        format!("PUT /api/v1/vm.create HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let ask = |request: &str| {
        let mut stream = connect_to(&path);
        stream.write_all(request.as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        until_the_end(&mut stream)
    };
    // Each connection ends a moment after the reply.
    thread::scope(|scope| {
        let clients: Vec<_> = (0..50).map(|_| scope.spawn(|| ask(ping))).collect();
        for reply in clients.into_iter().map(|client| client.join().unwrap()) {
            assert!(reply.starts_with("HTTP/1.1 200 ") && reply.ends_with('}'), "{reply}");
        }
    });
    assert_eq!(ask(&ping.repeat(3)).matches("HTTP/1.1 200 ").count(), 3, "requests that follow each other");
    let reply = ask("GET /api/v1/openapi.yaml HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(reply.contains("/vm.boot:") && reply.contains("components:"), "{} bytes", reply.len());
    // An answer that takes its time, for a request with a body that came in parts.
    let request = create(r#"{"size":805306368,"prefault":true}"#);
    let (first, rest) = request.split_at(request.len() - 7);
    let mut stream = connect(&server);
    stream.write_all(first.as_bytes()).unwrap();
    thread::sleep(Duration::from_millis(20));
    stream.write_all(rest.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(until_the_end(&mut stream).starts_with("HTTP/1.1 204 "));
    assert!(ask("PUT /api/v1/vm.boot HTTP/1.1\r\nHost: x\r\n\r\n").starts_with("HTTP/1.1 204 "));
    assert!(ask("PUT /api/v1/vmm.shutdown HTTP/1.1\r\nHost: x\r\n\r\n").starts_with("HTTP/1.1 204 "));
    server.ends(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn clients_that_end_their_side_keep_nothing_when_they_have_no_request_or_are_gone() {
    let server = Server::empty();
    alive(&server);
    let Some((before, _)) = server.process.usage() else { panic!("it has ended") };
    // Half a request is none: it is not waited for until the limit of slow clients.
    for half in ["", "GET /api/v1/vm", "PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 20\r\n\r\n123"] {
        let mut stream = connect(&server);
        stream.write_all(half.as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let start = Instant::now();
        let reply = until_the_end(&mut stream);
        assert!(!reply.contains(" 20"), "{half}: {reply}");
        assert!(start.elapsed() < Duration::from_secs(10), "{half}: {:?}", start.elapsed());
    }
    // Who listens to events hears of them, until it is gone.
    let mut listeners: Vec<_> = (0..20).map(|_| connect(&server)).collect();
    for stream in &mut listeners {
        stream.write_all(b"GET /api/v1/vm.events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(status(stream), Some(200));
    }
    assert_eq!(server.create(&image("echo.elf"), "").0, 204);
    for stream in &mut listeners {
        let mut heard = Vec::new();
        while !String::from_utf8_lossy(&heard).contains("created") {
            let mut bytes = [0; 512];
            let count = stream.read(&mut bytes).unwrap_or_else(|error| panic!("no event: {error}"));
            assert!(count > 0, "the connection ended");
            heard.extend(&bytes[..count]);
        }
    }
    server.expect("PUT vm.delete", "", 204);
    drop(listeners);
    server.process.falls_to(before);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_machine_that_lacks_descriptors_is_refused_and_one_that_was_promised_runs() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let call = |what: &str, body: &str| tests::server::call(&socket, what, body);
    let body = machine(&image("echo.elf"), r#""size":67108864"#, r#","serial":{"mode":"Tty"}"#);
    let mut booted = Vec::new();
    for files in 16..64 {
        let script = format!("ulimit -n {files} && exec \"$0\" \"$@\" < /dev/null");
        let mut process = Session::spawn(in_shell(&script, &["--api-socket", &socket.display().to_string()]), LIMIT);
        while process.is_running() && call("GET vmm.ping", "").0 != 200 {
            thread::sleep(Duration::from_millis(2));
        }
        if !process.is_running() {
            process.wait().expect_code(1);
            continue;
        }
        if call("PUT vm.create", &body).0 == 204 {
            let (status, reply) = call("PUT vm.boot", "");
            assert!(status == 204 || reply.contains("Too many open files") || reply.contains("ulimit -n"), "{files}: {reply}");
            let phase = if status == 204 { "running" } else { "created" };
            let info = call("GET vm.info", "").1;
            assert!(info.contains(&format!(r#""phase":"{phase}""#)), "{files}: {status}, {info}");
            booted.push(status == 204);
        }
        assert_eq!(call("PUT vmm.shutdown", "").0, 204, "{files}");
        process.wait().expect_code(0);
    }
    assert!(booted.contains(&true) && booted.contains(&false), "{booted:?}");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn clients_that_wait_for_descriptors_get_none_that_a_machine_needs_for_its_reset() {
    const RESET: &[u8] = b"PUT /api/v1/vm.reboot HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let call = |what: &str, body: &str| tests::server::call(&socket, what, body).0;
    let arguments = ["--api-socket", &socket.display().to_string()];
    let process = Session::spawn(in_shell("ulimit -n 64 && exec \"$0\" \"$@\" < /dev/null", &arguments), LIMIT);
    listens(&socket);
    let more = r#","serial":{"mode":"Tty"},"cpus":{"boot_vcpus":4,"max_vcpus":4}"#;
    assert_eq!(call("PUT vm.create", &machine(&image("echo.elf"), r#""size":67108864"#, more)), 204);
    assert_eq!(call("PUT vm.boot", ""), 204);
    let open = || UnixStream::connect(&socket).unwrap_or_else(|error| panic!("{error}"));
    let mut first = open();
    first.set_read_timeout(Some(LIMIT)).unwrap();
    let mut asks = || {
        first.write_all(RESET).unwrap();
        (status(&mut first), rest(&mut first))
    };
    assert_eq!(asks(), (Some(204), true));
    // More than there are descriptors; those that are let in stay.
    let waiting: Vec<UnixStream> = (0..80).map(|_| open()).collect();
    waiting.iter().for_each(|mut client| client.write_all(b"GET /api/v1/vmm.ping HTTP/1.1\r\nHost: x\r\n\r\n").unwrap());
    until("lack of descriptors", || process.usage(), |usage| usage.is_some_and(|(open, _)| open >= 64));
    for reset in 0..20 {
        assert_eq!(asks(), (Some(204), true), "reset {reset}");
        // At another moment of the server's rest each.
        thread::sleep(Duration::from_millis(7 * reset));
    }
    drop(waiting);
    assert_eq!(asks(), (Some(204), true));
    assert_eq!(call("PUT vmm.shutdown", ""), 204);
    process.wait().expect_code(0);
}
