//! What replies look like, to the byte, and which call gets which.

use std::time::Duration;

use crate::core::{Client, MACHINE, Vmm};

fn raw(client: &mut Client, request: &str) -> crate::core::Got {
    client.send(request.as_bytes());
    client.receive().unwrap()
}

#[test]
fn a_status_line_ends_after_the_code_and_one_space() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    assert_eq!(client.call("GET", "vmm.ping", "").status_line, "HTTP/1.1 200 ");
    assert_eq!(client.call("PUT", "vm.create", MACHINE).status_line, "HTTP/1.1 204 ");
    assert_eq!(client.call("GET", "nothing", "").status_line, "HTTP/1.1 404 ");
}

#[test]
fn headers_are_spelled_as_clients_search_for_them() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    let ping = client.call("GET", "vmm.ping", "");
    assert_eq!(ping.header("Content-Type"), Some("application/json"));
    assert_eq!(ping.header("Connection"), Some("keep-alive"));
    assert_eq!(ping.header("Content-Length"), Some(ping.body.len().to_string().as_str()));
    assert_eq!(ping.json()["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(ping.json()["pid"], std::process::id());
    let created = client.call("PUT", "vm.create", MACHINE);
    let names: Vec<_> = created.headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["Server", "Connection"], "a 204 has neither length nor type");
}

#[test]
fn bodies_are_ascii_whatever_is_in_them() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    let machine = MACHINE.replace("/k", "/f\u{fc}r/\u{1f333}");
    assert_eq!(client.status("PUT", "vm.create", &machine), 204);
    let info = client.call("GET", "vm.info", "");
    assert!(info.body.is_ascii());
    assert_eq!(info.json()["config"]["payload"]["kernel"], "/f\u{fc}r/\u{1f333}");
    let error = client.call("PUT", "vm.add-disk", "{\"path\":\"a\",\"image_type\":\"\u{fc}\"}");
    assert!(error.status() == 400 && error.body.is_ascii());
}

#[test]
fn an_error_is_an_array_of_causes_and_the_connection_goes_on() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    assert_eq!(client.status("PUT", "vm.create", MACHINE), 204);
    let error = client.call("PUT", "vm.add-device", r#"{"path":"/sys/bus/pci/devices/ffff:00:00.0"}"#);
    assert_eq!((error.status(), error.header("Content-Type")), (404, Some("application/json")));
    assert_eq!(error.json(), serde_json::json!(["the device cannot be added", "host function ffff:00:00.0 does not exist"]));
    assert_eq!(client.status("GET", "vmm.ping", ""), 200);
}

#[test]
fn case_e3_unknown_paths_and_wrong_verbs_are_answered_at_once_and_the_connection_goes_on() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    for (verb, name, status, allow) in [
        ("GET", "no.such", 404, None),
        ("PUT", "vmm.ping", 405, Some("GET")),
        ("GET", "vm.create", 405, Some("PUT")),
        ("DELETE", "vm.info", 405, Some("GET")),
        ("BREW", "vm.boot", 405, Some("PUT")),
    ] {
        for body in ["", "{\"a\":1}"] {
            let got = client.call(verb, name, body);
            assert_eq!((got.status(), got.header("Allow")), (status, allow), "{verb} {name}");
            assert_eq!(got.header("Content-Length"), Some(got.body.len().to_string().as_str()));
            assert_eq!(client.status("GET", "vmm.ping", ""), 200, "after {verb} {name}");
        }
    }
}

#[test]
fn a_path_outside_the_prefix_is_not_known() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    for path in ["/", "/vmm.ping", "/api/v1", "/api/v2/vmm.ping", "http://localhost/vmm.ping", "*"] {
        let verb = if path == "*" { "OPTIONS" } else { "GET" };
        let got = raw(&mut client, &format!("{verb} {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert_eq!(got.status(), 404, "{path}");
    }
    let query = raw(&mut client, "GET /api/v1/vmm.ping?x=1 HTTP/1.1\r\n\r\n");
    assert_eq!(query.status(), 200);
}

#[test]
fn connection_close_is_answered_so_and_honoured() {
    let vmm = Vmm::start();
    for (request, closes) in [
        ("GET /api/v1/vmm.ping HTTP/1.1\r\nConnection: close\r\n\r\n", true),
        ("GET /api/v1/vmm.ping HTTP/1.1\r\nconnection: Keep-Alive, CLOSE\r\n\r\n", true),
        ("GET /api/v1/vmm.ping HTTP/1.0\r\n\r\n", true),
        ("GET /api/v1/vmm.ping HTTP/1.0\r\nConnection: keep-alive, close\r\n\r\n", true),
        ("GET /api/v1/vmm.ping HTTP/1.0\r\nConnection: close\r\nConnection: keep-alive\r\n\r\n", true),
        ("GET /api/v1/vmm.ping HTTP/1.1\r\nConnection: x\r\nConnection: close\r\n\r\n", true),
        ("PUT /api/v1/vm.pause HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx", true),
        ("PUT /api/v1/vm.pause HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 5000000\r\n\r\n", true),
        ("GET /api/v1/vmm.ping HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", false),
        ("GET /api/v1/vmm.ping HTTP/1.1\r\nConnection: keep-alive\r\n\r\n", false),
        ("GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n", false),
    ] {
        let mut client = vmm.connect();
        let got = raw(&mut client, request);
        assert_eq!(got.status(), if request.starts_with("PUT") { 400 } else { 200 });
        assert_eq!(got.headers.iter().filter(|(name, _)| name == "Connection").count(), 1);
        assert_eq!(got.header("Connection"), Some(if closes { "close" } else { "keep-alive" }), "{request}");
        if closes {
            assert!(client.is_closed(), "{request}");
        } else {
            assert_eq!(client.status("GET", "vmm.ping", ""), 200);
        }
    }
}

#[test]
fn a_request_may_come_in_any_pieces() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    let request = format!("PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: {}\r\n\r\n{MACHINE}", MACHINE.len());
    for byte in request.bytes() {
        client.send(&[byte]);
    }
    assert_eq!(client.receive().unwrap().status(), 204);
    client.send(b"PUT /api/v1/vm.boot HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n");
    assert_eq!(client.receive().unwrap().status(), 204);
}

#[test]
fn a_client_that_waits_for_a_hundred_gets_none_and_is_served_when_it_has_sent_its_body_all_the_same() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    let body = format!("{MACHINE}{}", " ".repeat(2 << 20));
    let length = body.len();
    client.send(format!("PUT /api/v1/vm.create HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n").as_bytes());
    assert!(!client.has_something(Duration::from_millis(1100)), "an interim reply, or a refusal");
    assert_eq!(raw(&mut client, &body).status(), 204);
    assert_eq!(client.status("GET", "vmm.ping", ""), 200);
}

#[test]
fn no_interim_reply_is_sent_however_a_request_that_expects_one_comes() {
    let vmm = Vmm::start();
    let head = "PUT /api/v1/vm.pause HTTP/1.1\r\nexpect:  100-Continue\r\n";
    for request in [
        format!("{head}Content-Length: 2\r\n\r\n{{}}"),
        format!("{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"),
        format!("{head}\r\n"),
    ] {
        let mut client = vmm.connect();
        client.send(request.repeat(3).as_bytes());
        for end in 1..request.len() {
            client.send(&request.as_bytes()[..end]);
            client.send(&request.as_bytes()[end..]);
        }
        for _ in 0..request.len() + 2 {
            assert_eq!(client.receive().unwrap().status_line, "HTTP/1.1 404 ");
        }
    }
    // One whose body would be refused need not be sent.
    let mut client = vmm.connect();
    client.send(b"PUT /api/v1/vm.create HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5000000\r\n\r\n");
    assert_eq!(client.receive().unwrap().status(), 400);
}

#[test]
fn requests_that_follow_each_other_without_waiting_are_answered_in_their_order() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    client.send(
        &b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\nGET /api/v1/a HTTP/1.1\r\n\r\nGET /api/v1/vm.info HTTP/1.1\r\n\r\n".repeat(20),
    );
    for _ in 0..20 {
        let statuses = [(); 3].map(|()| client.receive().unwrap().status());
        assert_eq!(statuses, [200, 404, 404]);
    }
}

#[test]
fn case_e6_before_create_every_call_for_a_machine_says_that_there_is_none() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    let calls = [
        "delete",
        "boot",
        "shutdown",
        "reboot",
        "power-button",
        "pause",
        "resume",
        "resize",
        "add-device",
        "add-disk",
        "add-net",
        "add-fs",
        "add-vsock",
        "remove-device",
    ];
    let mut all: Vec<_> = calls.iter().map(|call| ("PUT", format!("vm.{call}"))).collect();
    all.extend(["info", "counters", "devices"].map(|call| ("GET", format!("vm.{call}"))));
    for (verb, name) in all {
        for body in ["", "{}", "{"] {
            let got = client.call(verb, &name, body);
            assert_eq!(got.status(), 404, "{name}");
            assert!(got.json()[0].as_str().unwrap().contains("vm.create"), "{name}");
        }
    }
    assert_eq!(client.status("GET", "vmm.ping", ""), 200);
    assert!(vmm.seen.lock().unwrap().commands.is_empty(), "the core is not asked");
}

#[test]
fn calls_in_the_wrong_state_are_refused_with_the_state() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    assert_eq!(client.status("PUT", "vm.create", MACHINE), 204);
    assert_eq!(client.status("PUT", "vm.create", MACHINE), 405);
    assert_eq!(client.status("PUT", "vm.pause", ""), 405);
    assert_eq!(client.status("PUT", "vm.boot", ""), 204);
    let twice = client.call("PUT", "vm.boot", "");
    assert_eq!(twice.status(), 405);
    assert_eq!(twice.json()[0], "vm.boot is not possible while the virtual machine is running");
    assert_eq!(client.status("PUT", "vm.resume", ""), 405);
    assert_eq!(client.status("PUT", "vm.delete", ""), 204);
    assert_eq!(client.status("GET", "vm.info", ""), 404);
    assert_eq!(client.status("PUT", "vm.create", MACHINE), 204);
}

#[test]
fn what_the_dialect_has_and_banyan_has_not_is_no_unknown_path() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    assert_eq!(client.status("PUT", "vm.create", MACHINE), 204);
    for (name, body) in [
        ("vm.add-pmem", ""),
        ("vm.nmi", ""),
        ("vmm.nmi", ""),
        ("vm.add-generic-vhost-user", "{\"socket\":\"/s\"}"),
        ("vm.add-fs", "{\"tag\":\"a\",\"socket\":\"/s\"}"),
        ("vm.add-vsock", "{\"cid\":3,\"socket\":\"/s\"}"),
        ("vm.add-user-device", "{\"socket\":\"/s\"}"),
    ] {
        let got = client.call("PUT", name, body);
        assert_eq!(got.status(), 400, "{name}");
        let text = format!("{name} is not supported by this version of Banyan");
        assert_eq!(got.json(), serde_json::json!([text]));
    }
}

#[test]
fn devices_ports_and_counters_are_listed() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    client.call("PUT", "vm.create", MACHINE);
    client.call("PUT", "vm.boot", "");
    let added = client.call("PUT", "vm.add-device", r#"{"banyan":"stub,id=gpu0,on=rp0"}"#);
    assert_eq!(added.json(), serde_json::json!({"id":"gpu0","bdf":"0000:00:05.0","pci_path":"05"}));
    assert_eq!(vmm.seen.lock().unwrap().devices[0], "stub,id=gpu0,on=rp0".parse().unwrap());
    let listing = client.call("GET", "vm.devices", "").json();
    assert_eq!((&listing["devices"][0]["id"], &listing["ports"][0]["name"]), (&"gpu0".into(), &"rp0".into()));
    assert_eq!(client.call("GET", "vm.counters", "").json()["vcpu0"]["mmio"], 3);
    assert_eq!(client.call("GET", "vm.info", "").json()["device_tree"]["gpu0"]["pci_path"], "05");
    assert_eq!(client.status("PUT", "vm.remove-device", "{\"id\":\"gpu0\"}"), 204);
    assert_eq!(client.status("PUT", "vm.remove-device", "{\"id\":\"gpu0\"}"), 404);
}
