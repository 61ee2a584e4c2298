//! Sockets between host and guest, through the executable: clients that come too early, and clients that mean harm.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tests::Guest;
use tests::process::LIMIT;
use tests::server::Server;

/// A machine whose guest has not begun to listen, and the device's socket.
fn machine() -> (Server, TempDir, PathBuf) {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let socket = folder.path().join("v");
    let guest = Guest::new("sockets").with(&["--vsock", &format!("cid=42,socket={}", socket.display())]);
    let mut server = Server::run(&guest);
    server.process.expect("ready");
    (server, folder, socket)
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap_or_else(|error| panic!("{}: {error}", socket.display()));
    let timed = stream.set_read_timeout(Some(LIMIT)).and_then(|()| stream.set_write_timeout(Some(LIMIT)));
    timed.unwrap_or_else(|error| panic!("no time limit: {error}"));
    stream
}

/// Asks for the guest's port; the connection if it is accepted.
fn dial(socket: &Path) -> Option<UnixStream> {
    let mut stream = connect(socket);
    stream.write_all(b"CONNECT 1024\n").ok()?;
    let mut answer = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).is_ok_and(|read| read == 1) {
        answer.extend(byte);
        if byte == *b"\n" {
            assert!(answer.starts_with(b"OK "), "{}", String::from_utf8_lossy(&answer));
            return Some(stream);
        }
    }
    assert!(answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
    None
}

fn echoes(stream: &mut UnixStream, text: &[u8]) {
    let mut back = vec![0; text.len()];
    let done = stream.write_all(text).and_then(|()| stream.read_exact(&mut back));
    assert!(done.is_ok() && back == text, "{done:?}: {}", String::from_utf8_lossy(&back));
}

/// Keeps all processors of the host busy until it is dropped.
struct Busy(Arc<AtomicBool>);

impl Busy {
    fn new() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        for _ in 0..thread::available_parallelism().map_or(2, usize::from) {
            let stop = Arc::clone(&stop);
            thread::spawn(move || while !stop.load(Ordering::Relaxed) {});
        }
        Self(stop)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_g6_in_200_boots_the_first_dial_once_the_guest_listens_succeeds_and_earlier_ones_return_at_once() {
    for process in 0..20 {
        let busy = (process % 4 == 0).then(Busy::new);
        let (mut server, _folder, socket) = machine();
        for boot in 0..10 {
            if boot > 0 {
                server.expect("PUT vm.reboot", "", 204);
                server.process.expect("ready");
            }
            for _ in 0..3 {
                let start = Instant::now();
                assert!(dial(&socket).is_none(), "nobody listens");
                assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            }
            server.process.send("l");
            server.process.expect("listening");
            let Some(mut first) = dial(&socket) else { panic!("process {process}, boot {boot}: the first dial is turned away") };
            echoes(&mut first, b"the first");
        }
        drop(busy);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_g6_a_client_that_dials_every_100_ms_from_before_the_boot_gets_through_once_and_keeps_its_connection() {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let socket = folder.path().join("v");
    let dialer = {
        let socket = socket.clone();
        thread::spawn(move || {
            let (start, mut tries) = (Instant::now(), 0);
            loop {
                tries += 1;
                assert!(start.elapsed() < LIMIT, "{tries} tries");
                if socket.exists()
                    && let Some(stream) = dial(&socket)
                {
                    return stream;
                }
                thread::sleep(Duration::from_millis(100));
            }
        })
    };
    let guest = Guest::new("sockets").with(&["--vsock", &format!("cid=42,socket={}", socket.display())]);
    let mut server = Server::run(&guest);
    server.process.expect("ready");
    thread::sleep(Duration::from_millis(350));
    server.process.send("l");
    let mut stream = dialer.join().unwrap();
    for _ in 0..10 {
        echoes(&mut stream, b"kept");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_g5_bad_clients_are_closed_and_their_descriptors_freed_while_others_are_served() {
    let (mut server, _folder, socket) = machine();
    server.process.send("l");
    server.process.expect("listening");
    let Some(mut good) = dial(&socket) else { panic!("nobody listens") };
    echoes(&mut good, b"before");
    let Some((before, _)) = server.process.usage() else { panic!("it has ended") };
    for round in 0..100 {
        // Part of a line, junk, a port that is none, a hang-up in the middle of data.
        let mut part = connect(&socket);
        part.write_all(b"CONNECT 10").unwrap();
        drop(part);
        for junk in [&[b'x'; 100][..], b"CONNECT 4294967296\n", b"connect -1\n", b"\n", &[0xFF; 65]] {
            let mut bad = connect(&socket);
            bad.write_all(junk).unwrap();
            // With an end of file or a reset, as bytes that nobody took are dropped.
            let mut rest = Vec::new();
            let read = bad.read_to_end(&mut rest);
            assert!(
                rest.is_empty() && read.as_ref().map_or_else(|error| error.kind() == ErrorKind::ConnectionReset, |_| true),
                "{junk:?}: {read:?}"
            );
        }
        if round % 10 == 0 {
            let Some(mut leaves) = dial(&socket) else { panic!("turned away") };
            leaves.write_all(&[1; 10_000]).unwrap();
            drop(leaves);
        }
    }
    let idle: Vec<_> = (0..1000).map(|_| connect(&socket)).collect();
    echoes(&mut good, b"beside a thousand");
    let Some(mut another) = dial(&socket) else { panic!("the idle ones shut others out") };
    echoes(&mut another, b"another");
    drop((idle, another));
    server.process.falls_to(before);
    echoes(&mut good, b"after");
    server.expect("GET vmm.ping", "", 200);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_peer_that_floods_a_guest_which_takes_nothing_is_held_up_and_costs_no_memory() {
    let (mut server, _folder, socket) = machine();
    server.process.send("l");
    server.process.expect("listening");
    let Some(mut warm) = dial(&socket) else { panic!("nobody listens") };
    echoes(&mut warm, b"warm");
    server.process.send("h");
    server.process.expect("holding");
    let before = server.process.resident();
    let mut floods = Vec::new();
    for _ in 0..16 {
        let Some(mut flood) = dial(&socket) else { panic!("turned away") };
        flood.set_nonblocking(true).unwrap();
        let (mut sent, quiet) = (0, Instant::now());
        while quiet.elapsed() < Duration::from_millis(100) {
            match flood.write(&[7; 65_536]) {
                Ok(count) => sent += count,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            assert!(sent < 16 << 20, "it takes whatever comes");
        }
        floods.push(flood);
    }
    let after = server.process.resident();
    assert!(after < before + 8192, "{before} KiB before, {after} KiB after");
    server.expect("GET vmm.ping", "", 200);
    server.expect("PUT vm.reboot", "", 204);
    server.process.expect("ready");
    assert!(dial(&socket).is_none());
    server.process.send("l");
    server.process.expect("listening");
    let Some(mut fresh) = dial(&socket) else { panic!("turned away after a reset") };
    echoes(&mut fresh, b"fresh");
    drop(floods);
}
