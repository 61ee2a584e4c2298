//! Devices that come to a conventional bus and leave it by ACPI, and those of the start that leave, from the outside: a guest
//! that drives the registers as ACPI's methods do.

use std::thread;
use std::time::Duration;

use tests::Guest;
use tests::guest::image;
use tests::saved::{restored, write_down};
use tests::server::Server;

/// Follows the registers of bus 2, on a machine with one bridge.
fn follower(options: &str, pcie: &str) -> Guest {
    Guest::new("slots").options(&format!("bus=2 {options}")).with(&["--memory", "64M", "--pcie", pcie])
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_come_to_a_conventional_bus_and_leave_when_the_guest_lets_go() {
    let mut server = Server::run(&follower("", "hot-plug=bridge-port"));
    server.process.expect("slots 0");
    server.adds("stub,id=a,bar0=64K:mem32,intx=A");
    server.process.expect("came 02:00.0 1b36:10bd pin 1, first 256 bytes alone");
    server.adds("stub,id=b,bar0=1M:mem32,device=7,attach=pci");
    server.process.expect("came 02:07.0");
    server.adds("stub,id=c,on=bridge0");
    server.process.expect("came 02:01.0");
    assert_eq!(server.devices(), "a@bridge0 c@bridge0 b@bridge0");
    server.refuses("stub,device=7", 409, &["device number 7 of the bus of bridge0", "27 of 30 device numbers free"]);
    server.refuses("stub,device=30", 409, &["device number 30 of the bus of bridge0"]);
    server.refuses("stub,attach=pcie", 409, &["no hot-plug port is free", "`bridge0` has 27 of 30"]);
    server.refuses("stub,bar0=1G:mem32", 409, &["`bridge0`", "memory window lacks"]);
    server.refuses("stub,on=bridge0-root", 409, &["not hot-pluggable"]);
    server.refuses("stub,vfs=2,on=bridge0", 400, &["could not be enabled on the bus of bridge0", "leave out `vfs`"]);
    assert_eq!(server.remove("b"), 204);
    server.process.expect("let go of 02:07.0");
    server.until("PUT vm.remove-device", r#"{"id":"b"}"#, 404);
    assert_eq!(server.devices(), "a@bridge0 c@bridge0");
    server.process.send("\n");
    server.process.finish().expect_code(1).expect_output(&["came 3 left 1"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_removal_waits_for_the_guest_until_a_deadline_and_a_second_one_is_refused() {
    let mut server = Server::run(&follower("eject=0", "bridges=1,bridge-slots=2").devices(&["stub,id=cold,on=bridge0"]));
    server.process.expect("slots 0");
    let functions = r#"{"banyan":["stub,id=f1,function=1,attach=pci","stub,id=f0,attach=pci"]}"#;
    server.expect("PUT vm.add-device", functions, 200);
    server.process.expect("came 02:01.0");
    server.refuses("stub,attach=pci", 409, &["no device number is free on the bus of bridge0", "0 of 2 device numbers free"]);
    for (name, place) in [("cold", "02:00.0"), ("f1", "02:01.0")] {
        assert_eq!((server.remove(name), server.remove(name)), (204, 409));
        server.process.expect(&format!("asked for {place}"));
    }
    assert_eq!(server.remove("f0"), 409, "it leaves with the other function");
    assert_eq!(server.devices(), "cold@bridge0 f0@bridge0 f1@bridge0", "the guest keeps them");
    // Until it has had its thirty seconds.
    thread::sleep(Duration::from_secs(29));
    for name in ["cold", "f0", "f1"] {
        server.until("PUT vm.remove-device", &format!(r#"{{"id":"{name}"}}"#), 404);
    }
    assert_eq!(server.devices(), "");
    server.process.send("\n");
    let outcome = server.process.finish();
    outcome.expect_code(1).expect_output(&["came 1 left 0"]);
    outcome.expect_error(&["the guest did not let go of cold in time", "the guest did not let go of f1, f0 in time"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn what_came_to_a_conventional_bus_is_there_after_a_reset_and_what_left_is_not() {
    let guest = follower("", "hot-plug=bridge-port,cold-plug=bridge-port");
    let mut server = Server::run(&guest.devices(&["stub,id=cold0,bar0=64K:mem32", "stub,id=cold1"]));
    server.process.expect("slots 0");
    server.adds("stub,id=late,bar0=1M:mem32");
    server.process.expect("came 02:02.0");
    assert_eq!(server.remove("cold1"), 204);
    server.process.expect("let go of 02:01.0");
    server.until("PUT vm.remove-device", r#"{"id":"cold1"}"#, 404);
    server.process.send("r");
    server.process.expect("slots 0");
    assert_eq!(server.devices(), "cold0@bridge0 late@bridge0");
    let info = server.expect("GET vm.devices", "", 200);
    assert!(info.contains(r#""bdf":"0000:02:02.0""#), "{info}");
    server.adds("stub,id=again");
    server.process.expect("came 02:01.0");
    assert_eq!(server.remove("late"), 204);
    server.process.expect("let go of 02:02.0");
    server.process.send("\n");
    server.process.finish().expect_code(1).expect_output(&["came 1 left 1"]);
}

#[test]
fn bridges_that_cannot_be_are_refused_with_the_limit() {
    for (pcie, part) in [
        ("hot-plug=bridge-port,bridges=0", "leave out bridges=0"),
        ("bridges=16", "more than the 15"),
        ("bridges=1,bridge-slots=33", "1 to 32 device numbers"),
        ("bus0-free=32,root-hot-plug=on", "0 to 31 can stay free"),
        ("bridge-slots=4", "give bridges=N"),
    ] {
        let guest = Guest::new("slots").with(&["--pcie", pcie, "--dry-run"]);
        guest.run().expect_code(1).expect_error(&[part]);
    }
}

/// A machine of vm.create with the built-in policy, whose guest follows two registers: a disk and a source of random numbers on
/// the root bus, three stubs below root ports.
fn created(folder: &tempfile::TempDir) -> Server {
    let disk = folder.path().join("d.img");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap_or_else(|error| panic!("{error}"));
    let server = Server::with_policy("");
    let (kernel, disk) = (image("slots.elf"), disk.display());
    let body = format!(
        r#"{{"payload":{{"kernel":"{kernel}","cmdline":"places=2"}},"memory":{{"size":67108864}},"serial":{{"mode":"Tty"}},
           "disks":[{{"path":"{disk}"}}],"rng":{{"src":"/dev/urandom"}},
           "devices":[{{"banyan":"stub,id=a,bar0=64K:mem32"}},{{"banyan":"stub,id=b,bar0=64K:mem32"}},{{"banyan":"stub"}}]}}"#
    );
    server.expect("PUT vm.create", &body, 204);
    server
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_of_vm_create_leave_when_the_guest_lets_go_and_stay_away() {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let mut server = created(&folder);
    server.expect("PUT vm.boot", "", 204);
    server.process.expect("slots 0");
    assert_eq!(server.devices(), "disk0@rc0 rng0@rc0 a@a-port b@b-port stub2@stub2-port");
    let leaves = |server: &mut Server, name: &str, place: &str| {
        assert_eq!(server.remove(name), 204, "{name}");
        server.process.expect(&format!("let go of place {place}"));
        server.until("PUT vm.remove-device", &format!(r#"{{"id":"{name}"}}"#), 404);
    };
    leaves(&mut server, "b", "1.1");
    leaves(&mut server, "disk0", "0.0");
    assert_eq!(server.remove("b"), 404);
    let kept = server.expect("PUT vm.remove-device", r#"{"id":"rng0"}"#, 400);
    assert!(kept.contains("rng0 is a part of the machine"), "{kept}");
    let info = server.expect("GET vm.info", "", 200);
    assert!(!info.contains("d.img") && info.contains(r#""id":"stub2""#) && !info.contains(r#""id":"b""#), "{info}");
    for turn in ["before", "after"] {
        assert_eq!(server.devices(), "rng0@rc0 a@a-port stub2@stub2-port", "{turn} a reset");
        if turn == "before" {
            server.expect("PUT vm.reboot", "", 204);
            server.process.expect("slots 0");
        }
    }
    // Its port has no slot, so that what comes goes to the root bus.
    assert!(server.adds("stub,id=b").contains(r#""bdf":"0000:00:"#));
    leaves(&mut server, "stub2", "1.2");
    leaves(&mut server, "b", "0.");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn before_the_start_a_device_is_taken_out_of_the_configuration() {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let mut server = created(&folder);
    assert_eq!((server.remove("a"), server.remove("a"), server.remove("nobody")), (204, 404, 404));
    let kept = server.expect("PUT vm.remove-device", r#"{"id":"rng0"}"#, 400);
    assert!(kept.contains("rng0 is a part of the machine"), "{kept}");
    let info = server.expect("GET vm.info", "", 200);
    assert!(info.contains(r#""state":"Created""#) && !info.contains(r#""id":"a""#) && info.contains(r#""id":"stub2""#), "{info}");
    assert_eq!(server.remove("disk0"), 204);
    server.expect("PUT vm.boot", "", 204);
    server.process.expect("slots 0");
    assert_eq!(server.devices(), "rng0@rc0 b@b-port stub2@stub2-port", "it keeps its name");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_below_ports_without_slots_leave_where_the_flag_says_so_and_keep_their_places_in_a_snapshot() {
    let devices = ["a", "b", "c"].map(|name| format!("stub,id={name}"));
    let machine = |pcie: &str| {
        let guest = Guest::new("slots").options("places=1").with(&["--memory", "64M", "--pcie", pcie]);
        let mut server = Server::run(&guest.devices(&devices.each_ref().map(String::as_str)));
        server.process.expect("slots 0");
        server
    };
    let server = machine("switch,hot-plug=no-port");
    let info = server.expect("GET vm.info", "", 200);
    let fixed = server.expect("PUT vm.remove-device", r#"{"id":"a"}"#, 400);
    assert!(fixed.contains("hangs on no hot-plug port") && fixed.contains("cold-removal=on"), "{fixed}");
    assert_eq!(server.expect("GET vm.info", "", 200), info, "a refusal changes nothing");
    server.shuts_down();

    let mut server = machine("switch,hot-plug=no-port,cold-removal=on");
    assert_eq!(server.remove("a"), 204);
    server.process.expect("let go of place 0.0");
    server.until("PUT vm.remove-device", r#"{"id":"a"}"#, 404);
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    write_down(server, folder.path());
    let mut again = restored(folder.path());
    again.expect("PUT vm.resume", "", 204);
    assert_eq!(again.devices(), "b@switch0-port1 c@switch0-port2");
    assert_eq!(again.remove("b"), 204);
    again.process.expect("let go of place 0.1");
    again.until("PUT vm.remove-device", r#"{"id":"b"}"#, 404);
    assert_eq!(again.devices(), "c@switch0-port2");
    again.shuts_down();
}
