//! The API socket and devices that come and go, from the outside: raw requests to the real executable.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tests::Guest;
use tests::guest::image;
use tests::server::{NOBODY, Server, call};

/// Follows slots and uses what comes.
fn slots(options: &str, ports: &str) -> Guest {
    Guest::new("slots").options(options).with(&["--memory", "64M", "--pcie", ports])
}

const WORKER: &str = "bar0=64K:mem32,bar1=1M:mem64:prefetchable,msix=4,dma=on";

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_machine_that_cannot_be_is_refused_when_it_is_created() {
    let server = Server::empty();
    let kernel = image("echo.elf");
    for (more, status, part) in [
        (r#","vsock":{"cid":2,"socket":"/tmp/v.sock"}"#, 400, "cid"),
        (r#","devices":[{"path":"/sys/bus/pci/devices/0000:99:00.0"}]"#, 400, "0000:99:00.0"),
        (r#","devices":[{"banyan":"stub,id=a"},{"banyan":"stub,id=a"}]"#, 400, "named `a`"),
    ] {
        let (found, reply) = server.create(&kernel, more);
        assert!(found == status && reply.contains(part), "{more}: {found} {reply}");
        server.expect("GET vm.info", "", 404);
    }
    assert_eq!(server.create(&kernel, "").0, 204);
    server.expect("PUT vm.boot", "", 204);
    assert_eq!(server.create(&kernel, "").0, 405);
    server.expect("PUT vm.delete", "", 204);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_boot_that_fails_can_be_tried_again() {
    let server = Server::empty();
    let kernel = server.socket().with_file_name("kernel");
    assert_eq!(server.create(&kernel.display().to_string(), "").0, 204);
    for _ in 0..2 {
        let reply = server.expect("PUT vm.boot", "", 400);
        assert!(reply.contains("No such file"), "{reply}");
        assert!(server.expect("GET vm.info", "", 200).contains(r#""phase":"created""#));
    }
    fs::copy(image("echo.elf"), &kernel).unwrap();
    server.expect("PUT vm.boot", "", 204);
    assert!(server.expect("GET vm.info", "", 200).contains(r#""phase":"running""#));
    server.process.signal(Signal::TERM);
    server.ends(143);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_e4_every_client_that_asks_for_the_end_is_told_of_it() {
    for calls in [&[][..], &["PUT vm.boot"], &["PUT vm.boot", "PUT vm.pause"]] {
        let server = Server::empty();
        assert_eq!(server.create(&image("echo.elf"), "").0, 204);
        for what in calls {
            server.expect(what, "", 204);
        }
        let clients: Vec<_> = (0..8)
            .map(|_| {
                let socket = server.socket();
                thread::spawn(move || call(&socket, "PUT vmm.shutdown", "").0)
            })
            .collect();
        let replies: Vec<u16> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert!(replies.contains(&204), "{replies:?}");
        assert!(replies.iter().all(|status| matches!(*status, 204 | NOBODY)), "{calls:?}: {replies:?}");
        server.ends(0);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_e4_forty_processes_that_are_told_to_end_at_once_all_answer_first_ten_times_in_a_row() {
    for _ in 0..10 {
        let servers: Vec<_> = (0..40).map(|_| Server::empty()).collect();
        // Some have a guest to end.
        for server in servers.iter().step_by(4) {
            assert_eq!(server.create(&image("echo.elf"), "").0, 204);
            server.expect("PUT vm.boot", "", 204);
        }
        let clients: Vec<_> = servers
            .iter()
            .map(|server| {
                let socket = server.socket();
                thread::spawn(move || call(&socket, "PUT vmm.shutdown", ""))
            })
            .collect();
        for client in clients {
            assert_eq!(client.join().unwrap(), (204, String::new()));
        }
        servers.into_iter().for_each(|server| server.ends(0));
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn commands_at_once_from_many_clients_are_all_answered() {
    let server = Server::empty();
    let clients: Vec<_> = (0..4u32)
        .map(|client| {
            let (socket, kernel) = (server.socket(), image("echo.elf"));
            thread::spawn(move || {
                let create = format!(r#"{{"payload":{{"kernel":"{kernel}"}},"memory":{{"size":67108864}}}}"#);
                let calls = ["create", "boot", "pause", "reboot", "resume", "shutdown", "delete"];
                for round in 0..70 {
                    let name = calls[usize::try_from((round * (client + 1) + client) % 7).unwrap()];
                    let (status, reply) = call(&socket, &format!("PUT vm.{name}"), if name == "create" { &create } else { "" });
                    assert!(matches!(status, 204 | 404 | 405 | 409), "vm.{name}: {status} {reply}");
                }
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().unwrap());
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_signal_while_memory_is_prepared_ends_the_process_and_removes_the_socket() {
    let guest = Guest::new("echo").with(&["--memory", "size=1G,prefault=on,prefault_threads=1"]);
    let server = Server::run(&guest);
    server.until("GET vmm.ping", "", 200);
    server.process.signal(Signal::TERM);
    server.ends(143);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_b4_a_device_can_be_added_as_soon_as_somebody_listens() {
    for _ in 0..5 {
        let mut server = Server::run(&slots("", "root-ports=2"));
        let (status, reply) = loop {
            let (status, reply) = server.add(&format!("stub,id=x,{WORKER}"));
            if status != NOBODY {
                break (status, reply);
            }
        };
        assert_eq!(status, 200, "{reply}");
        server.process.expect("came 01:00.0");
        server.process.send("\n");
        server.process.finish().expect_code(1).expect_output(&["came 1 left 0"]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_b3_a_device_that_cannot_be_added_is_told_what_there_is() {
    let server = Server::run(&slots("acknowledge=0", "root-ports=2,hotplug-mem=64G").devices(&["stub,id=cold"]));
    assert_eq!(server.until("PUT vm.add-device", r#"{"banyan":"stub,id=a"}"#, 200).matches("\"id\":\"a\"").count(), 1);
    server.refuses("stub,id=a", 409, &["device a already"]);
    server.refuses("stub,id=port1", 409, &["name of a port"]);
    server.refuses("stub,id=b,on=nowhere", 404, &["no port nowhere", "`port0` has `a`", "`port1` is free"]);
    server.refuses("stub,id=b,on=port0", 409, &["`port0` has `a`", "`port1` is free"]);
    server.refuses("stub,id=b,on=cold-port", 409, &["`port1` is free"]);
    server.refuses("stub,id=b,function=1", 400, &["functions 1 are no device", "leave out"]);
    server.refuses(
        "stub,id=b,bar0=512G:mem64:prefetchable",
        409,
        &["port1", "prefetchable window lacks", "--pcie hotplug-mem=512G"],
    );
    server.refuses("stub,id=b,bar0=1G:mem32", 409, &["port1", "memory window lacks", "--pcie hotplug-mem32=1G"]);
    server.adds("stub,id=b");
    server.refuses("stub,id=c", 409, &["no hot-plug port is free", "`port0` has `a`", "`port1` has `b`"]);
    // This guest takes note of nothing.
    assert_eq!((server.remove("a"), server.remove("a"), server.remove("cold"), server.remove("none")), (204, 409, 400, 404));
    server.refuses("stub,id=a", 409, &["is being removed"]);
    server.refuses("stub,id=c,on=port0", 409, &["port0", "has not taken note"]);
    assert_eq!(server.devices(), "cold@cold-port b@port1");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_b5_a_thousand_rounds_of_adding_and_removing_leave_nothing_behind() {
    let mut server = Server::run(&slots("quiet=1", "root-ports=2"));
    server.process.expect("slots 2");
    let mut before = None;
    for round in 0..1000 {
        let interrupts = ["msix=4", "msi=2", "intx=A"][round % 3];
        let device = format!("stub,id=x,bar0=64K:mem32,bar1=1M:mem64:prefetchable,{interrupts},dma=on");
        server.until("PUT vm.add-device", &format!(r#"{{"banyan":"{device}"}}"#), 200);
        if round % 20 == 0 {
            // Long enough for the guest to use it.
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(server.remove("x"), 204);
        if round == 20 || round == 999 {
            // A name is free again when the guest has taken note.
            server.until("PUT vm.remove-device", r#"{"id":"x"}"#, 404);
            let counters = server.expect("GET vm.counters", "", 200);
            let count = |name: &str| -> u32 {
                let (_, rest) = counters.split_once(&format!(r#""{name}":"#)).unwrap();
                rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
            };
            let kept = ["memory_slots", "interrupt_vectors", "doorbells_without_exits"].map(count);
            // Threads of copy engines end by themselves.
            thread::sleep(Duration::from_millis(100));
            let (now, memory) = ((server.process.usage_without_log(), kept), server.process.resident());
            let (then, first) = *before.get_or_insert((now, memory));
            assert_eq!(then, now, "after round {round}");
            assert!(memory < first + 512, "memory grew from {first} to {memory} KiB");
        }
    }
    assert_eq!(server.devices(), "");
    server.process.send("\n");
    server.process.finish().expect_code(1).expect_output(&["PASS"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_that_came_and_went_stay_so_through_a_reset() {
    let cold = ["stub,id=c0,on=port0", "stub,id=c1,on=port1"];
    let mut server = Server::run(&slots("", "root-ports=4").devices(&cold).with(&["--no-reboot"]));
    for place in ["came 01:00.0", "came 02:00.0"] {
        server.process.expect(place);
    }
    // One after the other: a guest that looks at its slots in turn may see two changes in either order.
    assert_eq!(server.remove("c0"), 204);
    server.process.expect("left 01:00.0");
    server.adds(&format!("stub,id=hot,on=port2,{WORKER}"));
    server.process.expect("came 03:00.0");
    // A request for a reset is none of the guest's.
    for _ in 0..3 {
        server.expect("PUT vm.reboot", "", 204);
        assert_eq!(server.devices(), "c1@port1 hot@port2");
        server.process.expect("slots 4");
        let found = server.process.expect("came 03:00.0");
        assert!(found.contains("came 02:00.0") && !found.contains("01:00.0"), "{found}");
    }
    // What is on its way out does not come back, and a name that is free can be taken again.
    server.expect("PUT vm.pause", "", 204);
    assert_eq!(server.remove("hot"), 204);
    server.expect("PUT vm.reboot", "", 204);
    assert_eq!(server.devices(), "c1@port1");
    server.adds("stub,id=hot,on=port3");
    server.process.expect("came 04:00.0");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_that_resets_itself_finds_the_devices_that_came() {
    let mut server = Server::run(&slots("", "root-ports=2"));
    server.process.expect("slots 2");
    server.adds(&format!("stub,id=hot,on=port1,{WORKER}"));
    server.process.expect("came 02:00.0");
    server.process.send("r");
    server.process.expect("slots 2");
    server.process.expect("came 02:00.0");
    assert_eq!(server.remove("hot"), 204);
    server.process.expect("left 02:00.0");
    server.process.send("r");
    server.process.expect("slots 2");
    server.process.send("\n");
    server.process.finish().expect_code(1).expect_output(&["came 0 left 0"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn functions_of_one_device_leave_together_and_free_their_names() {
    let cold = ["stub,id=f0,on=port0", "stub,id=f1,on=port0,function=1"];
    let mut server = Server::run(&slots("", "root-ports=1").devices(&cold));
    server.process.expect("came 01:00.0");
    assert_eq!(server.remove("f1"), 204);
    assert!(matches!(server.remove("f0"), 404 | 409));
    server.process.expect("left 01:00.0");
    server.until("PUT vm.remove-device", r#"{"id":"f0"}"#, 404);
    assert_eq!(server.devices(), "");
    server.adds("stub,id=f0");
    server.process.expect("came 01:00.0");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_b6_a_device_that_the_guest_let_go_of_or_could_not_bring_up_leaves_as_soon_as_it_is_asked_for() {
    for removal in ["orderly", "button"] {
        for (options, letter, said) in [("", "o", "let go of 01:00.0"), ("fail=1", "", "failed 01:00.0")] {
            let mut server = Server::run(&slots(options, &format!("root-ports=1,removal={removal}")));
            server.process.expect("slots 1");
            // The second one finds the slot as the first one left it.
            for id in ["a", "b"] {
                server.adds(&format!("stub,id={id},{WORKER}"));
                if !letter.is_empty() {
                    server.process.expect("came 01:00.0");
                }
                server.process.send(letter);
                server.process.expect(said);
                let begun = Instant::now();
                assert_eq!(server.remove(id), 204);
                server.process.expect("left 01:00.0");
                server.until("PUT vm.remove-device", &format!(r#"{{"id":"{id}"}}"#), 404);
                // A guest that has to be waited for has 30 s.
                assert!(begun.elapsed() < Duration::from_secs(20), "{removal} {said}: {:?}", begun.elapsed());
            }
            server.process.send("\n");
            let ended = server.process.finish();
            ended.expect_code(1).expect_output(&["came 2 left 2"]);
            assert!(!ended.stderr.contains("did not let go"), "{ended}");
        }
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_b3_virtual_functions_without_bus_numbers_are_refused_with_the_option_that_keeps_some() {
    let more = "vfs=256,vf-offset=300,vf-bars=[0:4K:mem32]";
    for (buses, there, fits) in [("", 1, false), (",hotplug-buses=2", 2, false), (",hotplug-buses=3", 3, true)] {
        let mut server = Server::run(&slots("", &format!("root-ports=2{buses}")));
        server.process.expect("slots 2");
        if fits {
            server.adds(&format!("stub,id=v,on=port0,{more}"));
            server.process.expect("came");
        } else {
            let lack = format!("(3 needed, {there} there)");
            for on in ["", "on=port0,"] {
                server.refuses(&format!("stub,id=v,{on}{more}"), 409, &["bus number", &lack, "hotplug-buses=3"]);
            }
        }
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_that_writes_everywhere_meets_devices_that_come_and_go() {
    let options = ["--cpus", "2", "--memory", "64M", "--pcie", "root-ports=2,switch-ports=2,removal=button"];
    let guest = Guest::new("hostile").options("cpus=2 seed=7 rounds=4000").with(&options);
    let server = Server::run(&guest);
    server.until("GET vmm.ping", "", 200);
    let mut counts = [0u32; 2];
    for round in 0.. {
        let id = format!("x{}", round % 5);
        let (added, reply) = server.add(&format!("stub,id={id},{WORKER}"));
        let removed = server.remove(&format!("x{}", (round * 3) % 5));
        // The guest's end meets a request that is under way, or comes before it.
        if [added, removed].iter().any(|status| matches!(*status, NOBODY | 500)) {
            break;
        }
        assert!(matches!(added, 200 | 409) && matches!(removed, 204 | 404 | 409), "{added} {reply} {removed}");
        counts[0] += u32::from(added == 200);
        counts[1] += u32::from(removed == 204);
    }
    assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
    server.process.finish().expect_code(1).expect_output(&["survived", "PASS"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn ports_interrupt_by_wire_and_by_message() {
    // Ports at several depths, so that wires turn at bridges.
    for wait in ["wire", "message"] {
        let guest = Guest::new("slots").options(&format!("wait={wait} errors=1"));
        let mut server = Server::run(&guest.with(&["--memory", "64M", "--pcie", "root-ports=2,switch-ports=2"]));
        server.process.expect("slots 4");
        for (port, place) in
            [("port0", "01:00.0"), ("port1", "02:00.0"), ("switch0-port0", "05:00.0"), ("switch0-port1", "06:00.0")]
        {
            assert_eq!(server.add(&format!("stub,id=dev,on={port},{WORKER}")).0, 200, "{wait}");
            server.process.expect(&format!("came {place}"));
            assert_eq!(server.remove("dev"), 204);
            server.process.expect(&format!("left {place}"));
            server.until("PUT vm.remove-device", r#"{"id":"dev"}"#, 404);
        }
        for (at, root, error, line) in [
            ("port1", "port1", "receiver", "error 00:00.1 00000000 00000001"),
            ("switch0-port1", "switch0-root", "completion-timeout", "error 04:01.0 00004000 00000000"),
            ("switch0", "switch0-root", "bad-tlp", "error 03:00.0 00000000 00000040"),
        ] {
            let reply = server.expect("PUT vm.inject-error", &format!(r#"{{"at":"{at}","error":"{error}"}}"#), 200);
            assert!(reply.contains(&format!(r#""reported_to":"{root}""#)), "{reply}");
            server.process.expect(line);
        }
        server.process.send("\n");
        server.process.finish().expect_code(1).expect_output(&["came 4 left 4"]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn an_error_that_the_guest_has_masked_is_told_to_nobody() {
    let server = Server::run(&slots("", "root-ports=1").devices(&["stub,id=cold"]));
    let inject = |at: &str, error: &str, status| {
        server.expect("PUT vm.inject-error", &format!(r#"{{"at":"{at}","error":"{error}"}}"#), status)
    };
    server.until("GET vm.devices", "", 200);
    for at in ["cold", "port0", "cold-port"] {
        let reply = inject(at, "internal", 200);
        assert!(reply.contains(&format!(r#""recorded_at":"{at}""#)) && reply.contains("does not report it"), "{reply}");
    }
    assert!(inject("cold", "fire", 400).contains("there are receiver"));
    assert!(inject("nothing", "internal", 404).contains("nothing"));
    server.expect("PUT vm.inject-error", r#"{"at":"cold"}"#, 400);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_b7_functions_that_come_together_are_one_device_to_the_guest() {
    let mut server = Server::run(&slots("wait=message", "root-ports=2").with(&["--no-reboot"]));
    server.process.expect("slots 2");
    let functions = |ids: [&str; 3]| {
        let numbered = ids.iter().zip([1, 0, 4]).map(|(id, number)| format!(r#""stub,id={id},function={number},{WORKER}""#));
        format!(r#"{{"banyan":[{}]}}"#, numbered.collect::<Vec<_>>().join(","))
    };
    let reply = server.expect("PUT vm.add-device", &functions(["b", "a", "e"]), 200);
    assert!(reply.contains(r#""pci_path":"00/00.1""#), "{reply}");
    // One look finds all of them.
    let all = ["came 01:00.0", "came 01:00.1", "came 01:00.4"];
    let found = server.process.expect(all[2]);
    assert!(found.contains(all[0]) && found.contains(all[1]), "{found}");
    assert_eq!(server.devices(), "a@port0 b@port0 e@port0");
    for (body, status) in [
        (functions(["b", "x", "y"]), 409),
        (functions(["x", "x", "y"]), 409),
        (r#"{"banyan":["stub,function=1","stub,function=2"]}"#.to_owned(), 400),
        (r#"{"banyan":[]}"#.to_owned(), 400),
    ] {
        server.expect("PUT vm.add-device", &body, status);
    }
    server.expect("PUT vm.reboot", "", 204);
    server.process.expect("slots 2");
    let found = server.process.expect(all[2]);
    assert!(found.contains(all[0]) && found.contains(all[1]), "as before: {found}");
    assert_eq!(server.remove("e"), 204);
    server.process.expect("left 01:00.0");
    server.until("PUT vm.remove-device", r#"{"id":"a"}"#, 404);
    assert_eq!(server.devices(), "");
    server.expect("PUT vm.add-device", &functions(["e", "a", "b"]), 200);
    server.process.expect(all[2]);
    server.process.send("\n");
    server.process.finish().expect_code(1).expect_output(&["came 2 left 1"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_c10_what_a_bar_loses_is_shown_for_each_of_them() {
    let device = "stub,id=dev,bar0=64K:mem32,bar2=1M:mem64:prefetchable,bar4=16M:mem64:prefetchable,direct=0+4,dma=on";
    let mut server = Server::run(&slots("", "root-ports=1").devices(&[device]));
    server.process.expect("slots 1");
    let info = server.until("GET vm.info", "", 200);
    let (_, bars) = info.split_once(r#""bars":["#).unwrap_or_else(|| panic!("{info}"));
    for (bar, guest) in [(0, "direct"), (2, "exits"), (4, "direct")] {
        let shown = bars.split('}').find(|shown| shown.contains(&format!(r#""bar":{bar}"#))).unwrap_or_else(|| panic!("{info}"));
        assert!(shown.contains(&format!(r#""guest":"{guest}""#)) && shown.contains(r#""dma":"emulated""#), "{bar}: {shown}");
    }
    server.refuses("stub,id=x,p2p=off", 400, &["p2p"]);
    server.process.send("\n");
    let outcome = server.process.finish();
    outcome
        .expect_code(1)
        .expect_error(&["dev: BARs that the guest reaches by exits: 2; that no other device reaches by DMA: none"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_b8_a_busy_host_delays_no_addition() {
    let mut server = Server::run(&slots("", "root-ports=1"));
    server.process.expect("slots 1");
    let over = Arc::new(AtomicBool::new(false));
    let cpus = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let work = |over: Arc<AtomicBool>| move || while !over.load(Ordering::Relaxed) {};
    let busy: Vec<_> = (0..2 * cpus).map(|_| thread::spawn(work(over.clone()))).collect();
    let mut times = Vec::new();
    for _ in 0..100 {
        let start = Instant::now();
        server.until("PUT vm.add-device", &format!(r#"{{"banyan":"stub,id=x,{WORKER}"}}"#), 200);
        times.push(start.elapsed());
        server.process.expect("came 01:00.0");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}: runtimes wait no longer", start.elapsed());
        assert_eq!(server.remove("x"), 204);
        server.process.expect("left 01:00.0");
        server.until("PUT vm.remove-device", r#"{"id":"x"}"#, 404);
    }
    over.store(true, Ordering::Relaxed);
    busy.into_iter().for_each(|thread| thread.join().unwrap());
    times.sort_unstable();
    assert!(times[98] < Duration::from_secs(1), "{times:?}");
}
