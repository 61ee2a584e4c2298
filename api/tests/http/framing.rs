//! Where a request ends: none can hide in another one, and each gets what came with it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use api::http::Limits;

use crate::core::{Knobs, MACHINE, Vmm};
use crate::hostile::{alive, refused_by_its_head};

const PING: &str = "GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n";
const BOTH: &str = "PUT /api/v1/vm.boot HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n";

#[test]
fn a_head_that_says_two_ends_of_its_body_is_refused_and_nothing_behind_it_is_read() {
    let vmm = Vmm::start();
    let chunk = "2\r\n{}\r\n0\r\n\r\n";
    for headers in [
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 2",
        "content-length: 2\r\nContent-Length: 2\r\nA: b\r\ntransfer-encoding: CHUNKED",
        "Transfer-Encoding: chunked\r\nContent-Length: +2",
        "Transfer-Encoding: chunked\r\nContent-Length: 99999999999999999999999",
    ] {
        let request =
            format!("PUT /api/v1/vm.boot HTTP/1.1\r\n{headers}\r\n\r\n{chunk}PUT /api/v1/vmm.shutdown HTTP/1.1\r\n\r\n");
        refused_by_its_head(&vmm, request.as_bytes(), "both content-length and transfer-encoding");
    }
    alive(&vmm);
    assert!(vmm.seen.lock().unwrap().commands.is_empty());
}

#[test]
fn a_body_in_a_form_that_is_not_understood_is_refused() {
    let vmm = Vmm::start();
    for (version, headers) in [
        ("1.1", "Transfer-Encoding: gzip, chunked"),
        ("1.1", "Transfer-Encoding: chunked, gzip"),
        ("1.1", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
        ("1.1", "Transfer-Encoding: identity"),
        ("1.1", "Transfer-Encoding: chunkedx"),
        ("1.1", "Transfer-Encoding:"),
        ("1.0", "Transfer-Encoding: chunked"),
    ] {
        let request = format!("PUT /api/v1/vm.create HTTP/{version}\r\n{headers}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n");
        refused_by_its_head(&vmm, request.as_bytes(), "transfer-encoding must be `chunked` alone");
    }
    for headers in [
        "Content-Length : 2",
        " Content-Length: 2",
        "A: b\r\n\tContent-Length: 2",
        "A: b\rContent-Length: 2",
        "Content-Length\r\n",
    ] {
        let request = format!("PUT /api/v1/vm.create HTTP/1.1\r\n{headers}\r\n\r\n{{}}");
        refused_by_its_head(&vmm, request.as_bytes(), "header");
    }
    assert!(vmm.seen.lock().unwrap().commands.is_empty());
}

#[test]
fn a_chunk_whose_size_is_not_clear_ends_the_connection() {
    let vmm = Vmm::start();
    for body in [
        "0x2\r\n{}\r\n0\r\n\r\n",
        "+2\r\n{}\r\n",
        "-2\r\n{}",
        "2\n{}\n0\n\n",
        "2\r\n{}0\r\n\r\n",
        "10000000000000000\r\n",
        "\r\n",
    ] {
        let mut client = vmm.connect();
        client.send(format!("PUT /api/v1/vm.pause HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{body}{PING}").as_bytes());
        let got = client.receive().unwrap();
        assert_eq!((got.status(), got.header("Connection")), (400, Some("close")), "{body}");
        assert!(client.is_closed(), "{body}");
    }
    assert!(vmm.seen.lock().unwrap().commands.is_empty());
}

#[test]
fn what_looks_like_a_head_in_a_body_is_none() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    let length = BOTH.len();
    let known = format!("PUT /api/v1/vm.pause HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{BOTH}");
    let chunked = format!(
        "PUT /api/v1/vm.pause HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{length:x};a=b\r\n{BOTH}\r\n{length:X}\r\n{BOTH}\r\n0\r\nA: b\r\n\r\n"
    );
    for requests in [[&known, PING], [&chunked, PING]] {
        client.send(requests.concat().repeat(3).as_bytes());
        for byte in requests.concat().bytes() {
            client.send(&[byte]);
        }
        for _ in 0..4 {
            assert_eq!([(); 2].map(|()| client.receive().unwrap().status()), [404, 200]);
        }
    }
    client.send(BOTH.as_bytes());
    assert_eq!(client.receive().unwrap().status(), 400);
}

#[test]
fn requests_before_one_that_is_refused_are_answered() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    assert_eq!(client.status("PUT", "vm.create", MACHINE), 204);
    client.send(format!("{PING}PUT /api/v1/vm.boot HTTP/1.1\r\n\r\n{PING}{BOTH}{PING}").as_bytes());
    let statuses = [(); 4].map(|()| client.receive().unwrap().status());
    assert_eq!(statuses, [200, 204, 200, 400]);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
}

#[test]
fn what_speaks_another_protocol_is_told_so_at_once() {
    let vmm = Vmm::start();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0";
    refused_by_its_head(&vmm, preface, "version");
    let mut after = vmm.connect();
    after.send(&[PING.as_bytes(), preface].concat());
    assert_eq!([(); 2].map(|()| after.receive().unwrap().status()), [200, 400]);
    let hello = b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03";
    let start = Instant::now();
    refused_by_its_head(&vmm, hello, "method");
    assert!(start.elapsed() < Duration::from_secs(5), "it waits for a line's end that never comes");
}

#[test]
fn each_of_the_requests_that_follow_each_other_without_waiting_has_its_own_descriptors() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    assert_eq!(client.status("PUT", "vm.create", MACHINE), 204);
    let files: Vec<_> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
    for (mut file, text) in files.iter().zip(["first", "second", "third"]) {
        file.write_all(text.as_bytes()).unwrap();
    }
    let add = |mac: u8| {
        let body = format!("{{\"mac\":\"02:00:00:00:00:0{mac}\",\"num_queues\":2}}");
        format!("PUT /api/v1/vm.add-net HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    // While the first one is served, the others come; what has none is read in one piece with what has.
    client.send(PING.as_bytes());
    client.send_with(add(1).as_bytes(), &[files[0].as_fd()]);
    client.send(format!("\r\n{PING}").as_bytes());
    let (second, third) = (add(2), add(3));
    let (head, rest) = second.split_at(30);
    client.send_with(head.as_bytes(), &[files[1].as_fd()]);
    client.send(format!("{rest}{PING}").as_bytes());
    client.send_with(b"\r\n", &[File::open("/dev/null").unwrap().as_fd()]);
    let (head, rest) = third.split_at(30);
    client.send(head.as_bytes());
    client.send_with(rest.as_bytes(), &[files[2].as_fd()]);
    let statuses = [(); 6].map(|()| client.receive().unwrap().status());
    assert_eq!(statuses, [200, 204, 200, 204, 200, 204]);
    let taps = &vmm.seen.lock().unwrap().taps;
    let texts: Vec<_> = taps
        .iter()
        .map(|tap| {
            let mut text = [0; 16];
            let count = rustix::io::pread(tap, &mut text, 0).unwrap();
            String::from_utf8(text[..count].to_vec()).unwrap()
        })
        .collect();
    assert_eq!(texts, ["first", "second", "third"]);
}

#[test]
fn empty_lines_between_requests_begin_none() {
    let limits = Limits { unfinished: Duration::from_millis(300), ..Limits::default() };
    let vmm = Vmm::with(Knobs { limits, ..Knobs::default() });
    let mut client = vmm.connect();
    for _ in 0..3 {
        assert_eq!(client.status("GET", "vmm.ping", ""), 200);
        client.send(b"\r\n");
        sleep(Duration::from_millis(500));
    }
    assert_eq!(client.status("GET", "vmm.ping", ""), 200);
}

#[test]
fn a_request_that_follows_another_one_has_its_time_and_no_more() {
    let limits = Limits { unfinished: Duration::from_millis(500), ..Limits::default() };
    let vmm = Vmm::with(Knobs { limits, ..Knobs::default() });
    for half in ["GET /api/v1/vmm.pi", "PUT /api/v1/vm.pause HTTP/1.1\r\nContent-Length: 3\r\n\r\n{"] {
        let mut client = vmm.connect();
        client.send(format!("{PING}{half}").as_bytes());
        assert_eq!(client.receive().unwrap().status(), 200);
        let start = Instant::now();
        assert!(half.starts_with("GET") || client.receive().unwrap().status() == 400);
        assert!(client.is_closed());
        assert!(start.elapsed() < Duration::from_secs(10), "{half}");
    }
    alive(&vmm);
}

#[test]
fn a_stream_of_events_for_an_older_client_ends_with_its_connection() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    client.send(b"GET /api/v1/vm.events HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    let got = client.receive().unwrap();
    assert_eq!((got.status(), got.header("Connection")), (200, Some("close")));
}
