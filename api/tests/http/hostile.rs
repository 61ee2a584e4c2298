//! Bytes that no client should send: none of them reaches the core, keeps a descriptor, or stops the server.

use std::cell::RefCell;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use api::http::Limits;
use proptest::prelude::*;

use crate::core::{Knobs, MACHINE, Vmm};

/// Whether the server still serves others.
pub fn alive(vmm: &Vmm) {
    assert_eq!(vmm.connect().status("GET", "vmm.ping", ""), 200);
}

fn send_raw(vmm: &Vmm, request: &[u8]) -> Option<u16> {
    let mut client = vmm.connect();
    client.try_send(request);
    client.receive().map(|got| got.status())
}

/// Sends all of `request`, and gets the whole of a refusal in the usual form that says `what`, and then the end of the
/// connection.
pub fn refused_by_its_head(vmm: &Vmm, request: &[u8], what: &str) {
    let mut client = vmm.connect();
    client.send(request);
    let got = client.receive().unwrap();
    let request = String::from_utf8_lossy(request.get(..80).unwrap_or(request)).into_owned();
    assert_eq!(got.status_line, "HTTP/1.1 400 ", "{request}");
    assert_eq!((got.header("Content-Type"), got.header("Connection")), (Some("application/json"), Some("close")), "{request}");
    let chain = got.json();
    assert_eq!(chain[0], "the head of the request cannot be read", "{request}");
    assert!(chain[1].as_str().unwrap().contains(what), "{request}: {chain}");
    assert_eq!(client.read(&mut [0]).unwrap(), 0, "the connection is reset, or goes on: {request}");
}

#[test]
fn a_length_that_makes_no_sense_is_refused() {
    let vmm = Vmm::start();
    for length in ["-1", "+5", "5x", "18446744073709551616", "99999999999999999999999", "0x10", "5, 6", "", " "] {
        let request = format!("PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: {length}\r\n\r\n12345");
        refused_by_its_head(&vmm, request.as_bytes(), "content-length");
    }
    let twice = "PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}";
    refused_by_its_head(&vmm, twice.as_bytes(), "content-length");
    alive(&vmm);
    assert!(vmm.seen.lock().unwrap().commands.is_empty());
}

#[test]
fn a_body_is_taken_up_to_its_limit() {
    let limits = Limits { body: 100_000, ..Limits::default() };
    let vmm = Vmm::with(Knobs { limits, ..Knobs::default() });
    let padded = |length: usize| format!("{MACHINE}{}", " ".repeat(length - MACHINE.len()));
    let mut client = vmm.connect();
    assert_eq!(client.status("PUT", "vm.create", &padded(100_000)), 204);
    for length in [100_001_u64, 100 << 20, u64::MAX - 2] {
        let mut client = vmm.connect();
        client.send(format!("PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: {length}\r\n\r\n").as_bytes());
        let got = client.receive().unwrap();
        assert_eq!((got.status(), got.header("Connection")), (400, Some("close")), "{length}");
        assert!(got.json()[0].as_str().unwrap().contains("longer than 100000 bytes"));
        assert!(client.is_closed());
    }
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let chunks = format!("PUT /api/v1/vm.create HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{}", chunk.repeat(3));
    assert_eq!(send_raw(&vmm, chunks.as_bytes()), Some(400));
    alive(&vmm);
}

#[test]
fn four_mebibytes_are_read_by_default() {
    let vmm = Vmm::start();
    let body = format!("{MACHINE}{}", " ".repeat((4 << 20) - MACHINE.len()));
    assert_eq!(vmm.connect().status("PUT", "vm.create", &body), 204);
}

#[test]
fn a_head_that_is_too_long_is_refused_and_read_to_its_end() {
    let vmm = Vmm::start();
    for head in [
        format!("GET /api/v1/{} HTTP/1.1\r\n\r\n", "x".repeat(100_000)),
        format!("GET /api/v1/vmm.ping HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(100_000)),
        format!("GET /api/v1/vmm.ping HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(2_000)),
    ] {
        refused_by_its_head(&vmm, head.as_bytes(), "too large: at most 16384 bytes and 100 headers");
    }
    alive(&vmm);
}

#[test]
fn what_is_no_http_is_refused_after_replies_to_what_was() {
    let vmm = Vmm::start();
    for (head, what) in [
        ("GET /api/v1/vmm.ping\r\n\r\n", "URI"),
        ("GET /api/v1/vmm.ping HTTP/7.0\r\n\r\n", "version"),
        ("GE\0T /api/v1/vmm.ping HTTP/1.1\r\n\r\n", "method"),
        ("GET /api/v1/vmm.ping HTTP/1.1\r\nA B: c\r\n\r\n", "header"),
    ] {
        refused_by_its_head(&vmm, head.as_bytes(), what);
        let mut client = vmm.connect();
        assert_eq!(client.status("GET", "vmm.ping", ""), 200);
        client.send(head.as_bytes());
        assert_eq!(client.receive().unwrap().status_line, "HTTP/1.1 400 ");
    }
}

#[test]
fn a_body_that_is_too_long_may_be_sent_to_its_end_by_a_client_that_reads_the_reply_then() {
    let limits = Limits { body: 100_000, ..Limits::default() };
    let vmm = Vmm::with(Knobs { limits, ..Knobs::default() });
    let mut client = vmm.connect();
    let body = vec![b' '; 6 << 20];
    client.send(format!("PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes());
    client.send(&body);
    assert_eq!(client.receive().unwrap().status(), 400);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_body_of_more_keys_and_values_than_a_machine_can_have_is_refused_by_every_call_before_it_is_read() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    let machine = |values: usize| {
        let known = MACHINE.bytes().filter(|byte| b",:".contains(byte)).count() + 2;
        MACHINE.replacen('{', &format!("{{\"unknown\":[0{}],", ",0".repeat(values - known)), 1)
    };
    assert_eq!(client.status("PUT", "vm.create", &machine(1 << 16)), 204);
    assert_eq!(client.status("PUT", "vm.boot", ""), 204);
    for name in ["create", "resize", "add-device", "add-disk", "add-net", "add-fs", "add-vsock", "remove-device"] {
        let got = client.call("PUT", &format!("vm.{name}"), &machine((1 << 16) + 1));
        assert_eq!(got.status(), 400, "{name}");
        assert!(got.json()[1].as_str().unwrap().contains("65537 keys and values"), "{name}: {}", got.json());
    }
}

#[test]
fn case_e6_bad_json_is_answered_with_its_position_and_the_connection_goes_on() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    assert_eq!(client.status("PUT", "vm.create", MACHINE), 204);
    assert_eq!(client.status("PUT", "vm.boot", ""), 204);
    for name in ["create", "resize", "add-device", "add-disk", "add-net", "add-fs", "add-vsock", "remove-device"] {
        let name = format!("vm.{name}");
        for (body, part) in [
            ("{\"id\": ]", "line 1 column 8"),
            ("[", "line 1 column 1"),
            ("{\n\"a\":1,}", "line 2 column 7"),
            ("7", "line 1 column 1"),
            ("{}x", "line 1 column"),
        ] {
            let got = client.call("PUT", &name, body);
            assert_eq!(got.status(), 400, "{name} {body}");
            let text = got.json().to_string();
            assert!(text.contains(&name) && (text.contains(part) || text.contains("missing")), "{name} {body}: {text}");
        }
        let deep = client.call("PUT", &name, &"[".repeat(100_000));
        assert_eq!(deep.status(), 400, "{name}");
    }
    assert_eq!(client.status("GET", "vmm.ping", ""), 200);
    assert_eq!(vmm.seen.lock().unwrap().commands, ["vm.create", "vm.boot"]);
}

#[test]
fn silent_connections_do_not_shut_others_out() {
    let limits = Limits { connections: 20, ..Limits::default() };
    let vmm = Vmm::with(Knobs { limits, ..Knobs::default() });
    let mut kept = vmm.connect();
    assert_eq!(kept.status("GET", "vmm.ping", ""), 200);
    let silent: Vec<_> = (0..100).map(|_| vmm.connect()).collect();
    alive(&vmm);
    assert_eq!(kept.status("GET", "vmm.ping", ""), 200, "a connection that was used is kept");
    drop(silent);
    alive(&vmm);
}

#[test]
fn with_all_connections_in_use_new_ones_wait_until_one_ends() {
    let limits = Limits { connections: 20, ..Limits::default() };
    let vmm = Vmm::with(Knobs { limits, ..Knobs::default() });
    let mut used: Vec<_> = (0..19).map(|_| vmm.connect()).collect();
    for client in &mut used {
        assert_eq!(client.status("GET", "vmm.ping", ""), 200);
    }
    let mut last = vmm.connect();
    sleep(Duration::from_millis(400));
    assert_eq!(last.status("GET", "vmm.ping", ""), 200, "silent for a while, and nobody waited for its place");
    used.push(last);
    let mut waiting: Vec<_> = (0..3).map(|_| vmm.connect()).collect();
    for client in &mut waiting {
        client.send(b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n");
    }
    assert!(!waiting[0].has_something(Duration::from_millis(600)), "served beside twenty others, or shut out");
    for client in &mut used {
        assert_eq!(client.status("GET", "vmm.ping", ""), 200, "one that is used makes way for none");
    }
    for mut client in waiting {
        drop(used.pop());
        assert_eq!(client.receive().unwrap().status(), 200);
        used.push(client);
    }
}

#[test]
fn a_connection_that_has_just_come_has_time_to_say_something() {
    let limits = Limits { connections: 1, ..Limits::default() };
    let vmm = Vmm::with(Knobs { limits, ..Knobs::default() });
    for _ in 0..10 {
        let mut first = vmm.connect();
        let _second = vmm.connect();
        sleep(Duration::from_millis(20));
        assert_eq!(first.status("GET", "vmm.ping", ""), 200);
    }
}

#[test]
fn clients_that_hang_up_at_any_byte_do_no_harm() {
    let vmm = Vmm::start();
    let request = format!("PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: {}\r\n\r\n{MACHINE}", MACHINE.len());
    for end in 0..request.len() {
        vmm.connect().send(&request.as_bytes()[..end]);
    }
    let mut half = vmm.connect();
    half.send(&request.as_bytes()[..40]);
    half.close_writing();
    assert!(half.is_closed());
    alive(&vmm);
    assert!(vmm.seen.lock().unwrap().commands.is_empty(), "half a request is no request");
}

#[test]
fn requests_that_do_not_end_keep_256_descriptors_and_no_more() {
    let vmm = Vmm::start();
    let file = File::open("/dev/null").unwrap();
    let ping = b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n";
    let halves: Vec<_> = (0..6)
        .map(|_| {
            let mut half = vmm.connect();
            half.send_with(&ping[..10], &[file.as_fd(); 60]);
            half
        })
        .collect();
    // Answered on a connection that was made later, so what came before has been looked at.
    let mut client = vmm.connect();
    assert_eq!(client.status("GET", "vmm.ping", ""), 200, "who brings none is served");
    client.send_with(ping, &[file.as_fd()]);
    let refused = client.receive().unwrap();
    assert_eq!(refused.status(), 400);
    assert!(refused.json()[0].as_str().unwrap().contains("more than 256 with all"), "{}", refused.json());
    let statuses = halves.into_iter().map(|mut half| {
        half.send(&ping[10..]);
        half.receive().unwrap().status()
    });
    assert_eq!(statuses.filter(|status| *status == 200).count(), 4);
    client.send_with(ping, &[file.as_fd(); 60]);
    assert_eq!(client.receive().unwrap().status(), 200, "there is room again");
}

#[test]
fn more_descriptors_than_a_request_may_bring_are_refused_and_closed() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    let file = File::open("/dev/null").unwrap();
    let before = open_files();
    for count in [65, 200] {
        let many: Vec<BorrowedFd<'_>> = vec![file.as_fd(); count];
        client.send_with(b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n", &many);
        let got = client.receive().unwrap();
        assert_eq!(got.status(), 400);
        assert!(got.json()[0].as_str().unwrap().contains("more than 64 descriptors"));
    }
    for part in [&b"GET /api/v1/vmm.pi"[..], b"ng HTTP/1.1\r\n", b"\r\n"] {
        client.send_with(part, &[file.as_fd(); 40]);
    }
    assert_eq!(client.receive().unwrap().status(), 400);
    client.send_with(b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n", &[file.as_fd(); 64]);
    assert_eq!(client.receive().unwrap().status(), 200, "a call that wants none closes them");
    assert_eq!(client.status("GET", "vmm.ping", ""), 200);
    // Nobody waits until they are closed. Other tests of this process open and close files, too, but not hundreds.
    let start = Instant::now();
    while open_files() >= before + 60 {
        assert!(start.elapsed() < Duration::from_secs(20), "{} files are open, {before} were", open_files());
        sleep(Duration::from_millis(5));
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter(|entry| {
            let target = entry.as_ref().ok().and_then(|entry| std::fs::read_link(entry.path()).ok());
            target.is_some_and(|target| target.as_os_str() == "/dev/null")
        })
        .count()
}

/// Pieces that requests are made of, right and wrong.
fn pieces() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        8 => prop::sample::select(vec![
            "GET ", "PUT ", "POST ", "HEAD ", "/api/v1/", "vmm.ping", "vm.info", "vm.create", "vm.add-net", "vm.resize", " HTTP/1.1\r\n",
            " HTTP/1.0\r\n", " HTTP/9\r\n", "\r\n", "\r\n\r\n", "\n", "Content-Length: ", "0", "2", "17", "-1", "Transfer-Encoding: chunked\r\n",
            "Connection: close\r\n", "Connection: upgrade\r\nUpgrade: h2c\r\n", "Expect: 100-continue\r\n", "Host: a\r\n", "{}", "{\"id\":\"a\"}",
            "[", "null", "0\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\0", ":", " ",
        ]).prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..64),
    ]
}

/// JSON of any shape, with the dialect's keys.
fn json() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::Value;
    let key = prop::sample::select(vec![
        "payload",
        "kernel",
        "cpus",
        "boot_vcpus",
        "max_vcpus",
        "topology",
        "memory",
        "size",
        "hotplug_size",
        "disks",
        "net",
        "path",
        "id",
        "mac",
        "num_queues",
        "queue_size",
        "vsock",
        "cid",
        "socket",
        "serial",
        "mode",
        "devices",
        "banyan",
        "iommu",
        "rng",
        "desired_ram",
        "desired_vcpus",
        "fs",
        "tag",
        "balloon",
        "platform",
        "hugepages",
        "rate_limiter_config",
        "x",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i8>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec!["", "a", "Tty", "File", "Raw", "stub,id=a", "02:00:00:00:00:01", "\u{fc}\0"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 64, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(key.clone().prop_map(str::to_owned), inner, 0..8)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

#[test]
fn any_bytes_are_answered_or_the_connection_is_closed() {
    let vmm = Vmm::with(Knobs { limits: Limits { unfinished: Duration::from_secs(5), ..Limits::default() }, ..Knobs::default() });
    proptest!(ProptestConfig::with_cases(400), |(parts in prop::collection::vec(pieces(), 0..24), fd: bool)| {
        let file = File::open("/dev/null").unwrap();
        let mut client = vmm.connect();
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let sent = if fd { client.try_send_with(part, &[file.as_fd()]) } else { client.try_send(part) };
            if !sent {
                break;
            }
        }
        client.close_writing();
        let mut rest = Vec::new();
        let _ = client.read_to_end(&mut rest);
        prop_assert!(rest.is_empty() || rest.starts_with(b"HTTP/1."), "{:?}", String::from_utf8_lossy(&rest));
        alive(&vmm);
    });
}

#[test]
fn any_json_is_answered_by_every_call() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    client.call("PUT", "vm.create", MACHINE);
    client.call("PUT", "vm.boot", "");
    let client = RefCell::new(client);
    proptest!(ProptestConfig::with_cases(400), |(body in json(), name in prop::sample::select(vec![
        "create", "resize", "add-device", "add-disk", "add-net", "add-fs", "add-vsock", "remove-device",
    ]))| {
        let got = client.borrow_mut().call("PUT", &format!("vm.{name}"), &body.to_string());
        prop_assert!([200, 204, 400, 404, 405].contains(&got.status()), "{} {body}", got.status());
        prop_assert!(got.body.is_ascii());
    });
    alive(&vmm);
}
