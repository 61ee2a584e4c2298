//! Devices that clients add by the API: where stock Kata Containers looks for them, and where the operator says.

use std::fs::File;

use tempfile::TempDir;
use tests::guest::{Guest, image};
use tests::server::Server;

fn disk(folder: &TempDir) -> String {
    let path = folder.path().join("disk.img");
    let made = File::create(&path).and_then(|file| file.set_len(1 << 20));
    made.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    path.display().to_string()
}

/// The text value of `key`.
fn value(json: &str, key: &str) -> String {
    let found = json.split_once(&format!(r#""{key}":""#)).and_then(|(_, rest)| rest.split('"').next());
    found.unwrap_or_else(|| panic!("no {key}: {json}")).to_owned()
}

/// The only form that both of Kata's drivers take: `0000:00:DD.0`, DD at most 1f.
fn is_on_bus_0(address: &str) -> bool {
    let device = address.strip_prefix("0000:00:").and_then(|rest| rest.strip_suffix(".0"));
    device.is_some_and(|device| device.len() == 2 && u8::from_str_radix(device, 16).is_ok_and(|device| device < 32))
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn what_comes_without_a_port_is_where_kata_looks_for_it() {
    let (server, folder) = (Server::empty(), tempfile::tempdir().unwrap());
    let path = disk(&folder);
    assert_eq!(server.create(&image("echo.elf"), "").0, 204);
    server.expect("PUT vm.add-disk", &format!(r#"{{"path":"{path}","readonly":true,"id":"root"}}"#), 204);
    server.expect("PUT vm.boot", "", 204);
    assert!(is_on_bus_0(&value(&server.devices_json(), "bdf")));
    let body = format!(r#"{{"path":"{path}","readonly":true,"iommu":false,"num_queues":1,"queue_size":128,"image_type":"Raw"}}"#);
    let (one, two) = (server.expect("PUT vm.add-disk", &body, 200), server.expect("PUT vm.add-disk", &body, 200));
    for reply in [&one, &two] {
        assert!(is_on_bus_0(&value(reply, "bdf")) && value(reply, "pci_path").len() == 2, "{reply}");
    }
    assert!(value(&one, "bdf") != value(&two, "bdf") && value(&one, "id") != value(&two, "id"), "{one} {two}");
    let info = server.expect("GET vm.info", "", 200);
    assert!(info.contains(&format!(r#""id":"{}""#, value(&one, "id"))), "{info}");
    // This guest takes note of nothing: the devices stay until the time is up.
    let remove = format!(r#"{{"id":"{}"}}"#, value(&one, "id"));
    server.expect("PUT vm.remove-device", &remove, 204);
    server.expect("PUT vm.remove-device", &remove, 409);
    server.expect("PUT vm.remove-device", r#"{"id":"nobody"}"#, 404);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_full_bus_is_told_and_the_guest_goes_on() {
    let server = Server::empty();
    assert_eq!(server.create(&image("echo.elf"), "").0, 204);
    server.expect("PUT vm.boot", "", 204);
    for n in 1..32 {
        let (status, reply) = server.add(&format!("stub,id=s{n}"));
        assert!(status == 200 && is_on_bus_0(&value(&reply, "bdf")), "{n}: {status} {reply}");
    }
    server.refuses("stub", 409, &["no device number is free on the bus of rc0", "remove a device"]);
    server.expect("PUT vm.pause", "", 204);
    server.expect("PUT vm.resume", "", 204);
    server.expect("PUT vm.reboot", "", 204);
    assert_eq!(server.devices().matches("s31@rc0").count(), 1, "what came stays through a reset");
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_operator_can_send_what_comes_to_ports() {
    let server = Server::with_policy("[hot-plug]\nplace = \"ports\"\n[pcie]\nroot-ports = 1\n");
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(server.create(&image("echo.elf"), "").0, 204);
    server.expect("PUT vm.boot", "", 204);
    let body = format!(r#"{{"path":"{}","id":"d"}}"#, disk(&folder));
    let reply = server.expect("PUT vm.add-disk", &body, 200);
    assert_eq!((value(&reply, "pci_path").matches('/').count(), value(&reply, "bdf").as_str()), (1, "0000:01:00.0"));
    server.refuses("stub", 409, &["no hot-plug port is free", "`port0` has `d`"]);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_without_an_id_are_told_with_the_one_by_which_they_can_be_removed() {
    let (server, folder) = (Server::empty(), tempfile::tempdir().unwrap());
    let (path, socket) = (disk(&folder), folder.path().join("vsock"));
    let more = format!(
        r#","disks":[{{"path":"{path}","readonly":true}},{{"path":"{path}","readonly":true,"id":"own"}},{{"path":"{path}","readonly":true}}],
           "vsock":{{"cid":3,"socket":"{}"}},"devices":[{{"banyan":"stub,bar0=4K:mem32"}}]"#,
        socket.display()
    );
    assert_eq!(server.create(&image("echo.elf"), &more).0, 204);
    let ids = || {
        let info: serde_json::Value = serde_json::from_str(&server.expect("GET vm.info", "", 200)).unwrap();
        let id = |device: &serde_json::Value| device["id"].as_str().unwrap_or_else(|| panic!("no id: {device}")).to_owned();
        let config = &info["config"];
        let mut ids: Vec<String> = config["disks"].as_array().unwrap().iter().map(id).collect();
        ids.push(id(&config["vsock"]));
        assert!(ids.iter().all(|id| info["device_tree"][id]["id"] == id.as_str()), "{info}");
        ids
    };
    assert_eq!(ids(), ["disk0", "own", "disk2", "vsock0"]);
    server.expect("PUT vm.remove-device", r#"{"id":"disk0"}"#, 204);
    assert_eq!(ids(), ["own", "disk2", "vsock0"]);
    server.expect("PUT vm.boot", "", 204);
    assert_eq!(ids(), ["own", "disk2", "vsock0"]);
    server.shuts_down();
}

/// Root ports that keep what their names say above 4 GiB, the largest first.
const SIZES: &str = r#"
[[root-complex]]
name = "rc0"

[[port]]
name = "p64G"
kind = "root-port"
on = "rc0"
hotplug = true
mem = "64G"

[[port]]
name = "p1G"
kind = "root-port"
on = "rc0"
hotplug = true
mem = "1G"

[[port]]
name = "p1Gtoo"
kind = "root-port"
on = "rc0"
hotplug = true
mem = "1G"
"#;

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_small_device_leaves_the_large_window_to_one_that_needs_it() {
    let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("no folder: {error}"));
    let file = folder.path().join("ports.toml");
    std::fs::write(&file, SIZES).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let server = Server::run(&Guest::new("echo").with(&["--topology", &file.display().to_string()]));
    server.until("GET vm.info", "", 200);
    server.adds("stub,id=nic,bar0=64M:mem64:prefetchable");
    server.adds("stub,id=gpu,bar0=16M:mem32,bar1=32G:mem64:prefetchable");
    server.refuses(
        "stub,bar0=16M:mem32,bar1=128G:mem64:prefetchable",
        409,
        &["no free port does", "`p1Gtoo`: its prefetchable window lacks", "--pcie hotplug-mem=128G"],
    );
    server.adds("stub,id=next,bar0=1G:mem64:prefetchable");
    assert_eq!(server.devices(), "gpu@p64G nic@p1G next@p1Gtoo");
    server.refuses("stub", 409, &["no hot-plug port is free", "`p64G` has `gpu`"]);
    server.shuts_down();
}
