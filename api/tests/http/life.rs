//! Slow machines, clients that hang, and the end of the process.

use std::thread;
use std::time::{Duration, Instant};

use api::http::Limits;

use crate::core::{Client, Knobs, MACHINE, Vmm};

#[test]
fn case_e2_a_request_that_is_not_finished_holds_up_nobody_and_is_dropped() {
    let unfinished = Duration::from_millis(400);
    let vmm = Vmm::with(Knobs { limits: Limits { unfinished, ..Limits::default() }, ..Knobs::default() });
    let mut idle = vmm.connect();
    assert_eq!(idle.status("GET", "vmm.ping", ""), 200);
    let start = Instant::now();
    let mut body = vmm.connect();
    body.send(b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 20\r\n\r\n123456789");
    let mut head = vmm.connect();
    head.send(b"PUT /api/v1/vm.cr");
    assert_eq!(vmm.connect().status("GET", "vmm.ping", ""), 200);
    assert!(start.elapsed() < unfinished, "the others are answered at once");
    let refused = body.receive().unwrap();
    assert_eq!((refused.status(), refused.header("Connection")), (400, Some("close")));
    assert!(body.is_closed() && head.is_closed());
    assert!(start.elapsed() >= unfinished);
    thread::sleep(unfinished * 2);
    assert_eq!(idle.status("GET", "vmm.ping", ""), 200, "between requests there is no limit");
}

#[test]
fn a_client_that_sends_a_byte_now_and_then_is_dropped_as_well() {
    let unfinished = Duration::from_millis(300);
    let vmm = Vmm::with(Knobs { limits: Limits { unfinished, ..Limits::default() }, ..Knobs::default() });
    let mut client = vmm.connect();
    let start = Instant::now();
    for byte in b"GET /api/v1/vmm.ping HTTP/1.1\r\n".iter().cycle() {
        if !client.try_send(&[*byte]) {
            break;
        }
        thread::sleep(Duration::from_millis(50));
        assert!(start.elapsed() < Duration::from_secs(10), "a slow client is never dropped");
    }
}

#[test]
fn a_complete_request_is_carried_out_although_its_client_left_at_once() {
    for _ in 0..20 {
        let vmm = Vmm::start();
        let length = MACHINE.len();
        let mut hasty = vmm.connect();
        hasty.send(format!("PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{MACHINE}").as_bytes());
        drop(hasty);
        let start = Instant::now();
        while vmm.connect().status("GET", "vm.info", "") != 200 {
            assert!(start.elapsed() < Duration::from_secs(10), "the request was dropped");
        }
    }
}

#[test]
fn a_command_may_take_longer_than_a_request() {
    let knobs = Knobs {
        boot: Duration::from_millis(500),
        limits: Limits { unfinished: Duration::from_millis(100), ..Limits::default() },
    };
    let vmm = Vmm::with(knobs);
    let mut client = vmm.connect();
    client.call("PUT", "vm.create", MACHINE);
    assert_eq!(client.status("PUT", "vm.boot", ""), 204);
    assert_eq!(client.status("GET", "vmm.ping", ""), 200);
}

#[test]
fn case_e1_case_e5_a_slow_boot_delays_neither_ping_nor_info() {
    let vmm = Vmm::with(Knobs { boot: Duration::from_secs(2), ..Knobs::default() });
    let mut client = vmm.connect();
    client.call("PUT", "vm.create", MACHINE);
    let path = vmm.path();
    let booting = thread::spawn(move || Client::connect(&path).status("PUT", "vm.boot", ""));
    let mut others = [vmm.connect(), vmm.connect()];
    let mut times = Vec::new();
    let mut starting = 0;
    while !booting.is_finished() {
        for (client, name) in others.iter_mut().zip(["vm.info", "vmm.ping"]) {
            let start = Instant::now();
            let got = client.call("GET", name, "");
            times.push(start.elapsed());
            assert_eq!(got.status(), 200);
            if name == "vm.info" && got.json()["phase"] == "starting" {
                starting += 1;
                assert_eq!(got.json()["progress"]["percent"], 25);
                assert_eq!(got.json()["state"], "Created");
            }
        }
        thread::sleep(Duration::from_millis(25));
    }
    assert_eq!(booting.join().unwrap(), 204);
    times.sort_unstable();
    assert!(starting >= 10, "info told of the boot {starting} times");
    assert!(times[times.len() / 2] < Duration::from_millis(50), "half of the replies took {:?}", times[times.len() / 2]);
    assert!(times[times.len() - 1] < Duration::from_secs(1), "the slowest reply took {:?}", times[times.len() - 1]);
    let state = client.call("GET", "vm.info", "").json();
    assert_eq!((&state["state"], state.get("progress")), (&"Running".into(), None));
}

#[test]
fn case_e4_the_reply_to_shutdown_is_complete_before_the_end() {
    for _ in 0..10 {
        let vmms: Vec<_> = (0..40).map(|_| Vmm::start()).collect();
        let calls: Vec<_> = vmms
            .iter()
            .map(|vmm| {
                let mut client = vmm.connect();
                thread::spawn(move || {
                    let got = client.call("PUT", "vmm.shutdown", "");
                    (got.status(), client.is_closed())
                })
            })
            .collect();
        for call in calls {
            assert_eq!(call.join().unwrap(), (204, true));
        }
        vmms.into_iter().for_each(Vmm::ended);
    }
}

#[test]
fn at_the_end_idle_clients_are_let_go_and_waiting_ones_are_answered() {
    let vmm = Vmm::with(Knobs { boot: Duration::from_millis(300), ..Knobs::default() });
    let mut idle = vmm.connect();
    assert_eq!(idle.status("PUT", "vm.create", MACHINE), 204);
    let (mut first, mut second, mut last) = (vmm.connect(), vmm.connect(), vmm.connect());
    first.send(b"PUT /api/v1/vm.boot HTTP/1.1\r\n\r\n");
    thread::sleep(Duration::from_millis(100));
    second.send(b"PUT /api/v1/vmm.shutdown HTTP/1.1\r\n\r\n");
    thread::sleep(Duration::from_millis(100));
    last.send(b"PUT /api/v1/vm.pause HTTP/1.1\r\n\r\n");
    assert_eq!(first.receive().unwrap().status(), 204);
    assert_eq!(second.receive().unwrap().status(), 204);
    let unanswered = last.receive().unwrap();
    assert_eq!(unanswered.status(), 500);
    assert!(unanswered.json()[0].as_str().unwrap().contains("ended before it answered"));
    assert!(idle.is_closed() && last.is_closed());
    vmm.ended();
}

#[test]
fn a_client_that_reads_nothing_does_not_hold_up_the_end() {
    let vmm = Vmm::start();
    let mut deaf = vmm.connect();
    deaf.send(&b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n".repeat(5_000));
    let start = Instant::now();
    assert_eq!(vmm.connect().status("PUT", "vmm.shutdown", ""), 204);
    vmm.ended();
    assert!(start.elapsed() < Duration::from_secs(15));
}
