//! What Kata Containers' two drivers send, replayed: as it was sent, in one piece, and byte by byte.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::core::{Client, Got, MACHINE, Vmm};

const GO: &str = include_str!("kata/go.toml");
const RUST: &str = include_str!("kata/rust.toml");
const VARIANTS: &str = include_str!("kata/variants.toml");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Life {
    call: Vec<Call>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Call {
    name: String,
    #[serde(default)]
    before: Vec<String>,
    #[serde(default = "one")]
    connection: u8,
    #[serde(default)]
    descriptors: usize,
    writes: Vec<String>,
    status: u16,
    #[serde(default)]
    values: BTreeMap<String, Value>,
    address: Option<String>,
    keeps: Option<String>,
}

fn one() -> u8 {
    1
}

#[derive(Debug, Clone, Copy)]
enum Pieces {
    AsSent,
    Joined,
    Bytes,
}

const ALL: [Pieces; 3] = [Pieces::AsSent, Pieces::Joined, Pieces::Bytes];

fn calls(text: &str) -> Vec<Call> {
    toml::from_str::<Life>(text).unwrap().call
}

/// Sends a call's request and checks its reply.
fn replay(call: &Call, client: &mut Client, pieces: Pieces, kept: &mut BTreeMap<String, String>) -> Got {
    let mut writes = call.writes.clone();
    for (name, value) in &*kept {
        for write in &mut writes {
            *write = write.replace(&format!("{{{name}}}"), value);
        }
    }
    let length = writes.concat().split_once("\r\n\r\n").unwrap().1.len().to_string();
    for write in &mut writes {
        *write = write.replace("{length}", &length);
    }
    let writes: Vec<Vec<u8>> = match pieces {
        Pieces::AsSent => writes.into_iter().map(String::into_bytes).collect(),
        Pieces::Joined => vec![writes.concat().into_bytes()],
        Pieces::Bytes => writes.concat().bytes().map(|byte| vec![byte]).collect(),
    };
    let files: Vec<File> = (0..call.descriptors).map(|_| File::open("/dev/null").unwrap()).collect();
    let mut descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    for write in writes {
        client.send_with(&write, &descriptors);
        descriptors.clear();
    }
    let got = client.receive().unwrap_or_else(|| panic!("{} is not answered", call.name));
    check(call, &got, kept);
    got
}

fn check(call: &Call, got: &Got, kept: &mut BTreeMap<String, String>) {
    let name = &call.name;
    let body = String::from_utf8_lossy(&got.body);
    assert_eq!(got.status_line, format!("HTTP/1.1 {} ", call.status), "{name}: {body}");
    assert!(got.header("Transfer-Encoding").is_none() && got.body.is_ascii(), "{name}");
    if call.status == 204 {
        assert_eq!((got.header("Content-Length"), got.header("Content-Type")), (None, None), "{name}");
        return;
    }
    assert_eq!(got.header("Content-Type"), Some("application/json"), "{name}");
    let json = got.json();
    if call.status >= 400 {
        assert!(
            json.as_array().is_some_and(|causes| !causes.is_empty() && causes.iter().all(Value::is_string)),
            "{name}: {json}"
        );
    }
    for (pointer, value) in &call.values {
        assert_eq!(json.pointer(pointer), Some(value), "{name}: {pointer}");
    }
    if let Some(pointer) = &call.address {
        assert!(is_on_bus_0(json.pointer(pointer).and_then(Value::as_str).unwrap()), "{name}: {json}");
        assert!(json["id"].is_string(), "{name}: {json}");
    }
    if let Some(keep) = &call.keeps {
        kept.insert(keep.clone(), json["id"].as_str().unwrap().to_owned());
    }
}

/// The only form that both drivers take: `0000:00:DD.0`, DD at most 1f.
fn is_on_bus_0(address: &str) -> bool {
    address
        .strip_prefix("0000:00:")
        .and_then(|rest| rest.strip_suffix(".0"))
        .is_some_and(|device| device.len() == 2 && u8::from_str_radix(device, 16).is_ok_and(|device| device <= 0x1F))
}

fn live(life: &str) {
    for pieces in ALL {
        let vmm = Vmm::start();
        let (mut connections, mut kept) = (BTreeMap::new(), BTreeMap::new());
        for call in calls(life) {
            let client = connections.entry(call.connection).or_insert_with(|| vmm.connect());
            let got = replay(&call, client, pieces, &mut kept);
            if call.name == "vm.info" {
                parses_as_the_rust_driver_does(&got.json());
            }
        }
        let taps = vmm.seen.lock().unwrap().taps.len();
        let sent: usize = calls(life).iter().filter(|call| call.status < 300).map(|call| call.descriptors).sum();
        assert_eq!(taps, sent, "every descriptor arrived: {pieces:?}");
        vmm.ended();
    }
}

#[test]
fn a_life_as_the_go_driver_calls_it() {
    live(GO);
}

#[test]
fn a_life_as_the_rust_driver_calls_it() {
    live(RUST);
}

#[test]
fn single_calls_of_both_drivers() {
    for pieces in ALL {
        for call in calls(VARIANTS) {
            let vmm = Vmm::start();
            let mut client = vmm.connect();
            for name in &call.before {
                let body = if name == "vm.create" { MACHINE } else { "" };
                assert_eq!(client.status("PUT", name, body), 204, "{}", call.name);
            }
            let got = replay(&call, &mut client, pieces, &mut BTreeMap::new());
            if call.name.ends_with("close") {
                assert_eq!(got.header("Connection"), Some("close"));
                assert!(client.is_closed());
            } else {
                assert_eq!(client.status("GET", "vmm.ping", ""), 200, "after {}", call.name);
            }
        }
    }
}

#[test]
fn descriptors_that_are_refused_are_closed() {
    let mismatch = calls(VARIANTS).into_iter().find(|call| call.name.contains("mismatch")).unwrap();
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    client.call("PUT", "vm.create", MACHINE);
    // The other end of a pipe says when the last copy of a descriptor is closed.
    let (reader, writer) = std::io::pipe().unwrap();
    let request = mismatch.writes.concat();
    client.send_with(request.as_bytes(), &[writer.as_fd(), writer.as_fd()]);
    let refused = client.receive().unwrap();
    assert_eq!(refused.status(), 400);
    assert!(refused.json()[1].as_str().unwrap().contains("2 queues are 1 pairs, but 2 descriptors came"), "{}", refused.json());
    drop(writer);
    assert_eq!(std::io::read_to_string(reader).unwrap(), "", "ends once nobody holds the writer");
    assert!(vmm.seen.lock().unwrap().commands.iter().all(|name| *name != "vm.add-net"), "the core is not asked");
}

/// What the Rust driver reads of a machine's configuration; a missing key or another type fails its call.
fn parses_as_the_rust_driver_does(info: &Value) {
    let config = &info["config"];
    let has = |value: &Value, keys: &[&str]| {
        for key in keys {
            assert!(value.get(key).is_some_and(|value| !value.is_null()), "{key} is missing in {value}");
        }
    };
    assert!(["Created", "Running", "Shutdown", "Paused"].contains(&info["state"].as_str().unwrap()));
    has(info, &["memory_actual_size", "device_tree"]);
    has(config, &["serial", "console", "memory", "cpus", "iommu", "watchdog"]);
    has(&config["cpus"], &["boot_vcpus", "max_vcpus", "max_phys_bits"]);
    if let Some(topology) = config["cpus"].get("topology") {
        has(topology, &["threads_per_core", "cores_per_die", "dies_per_package", "packages"]);
    }
    has(&config["memory"], &["size", "hotplug_size", "hotplug_method", "shared", "hugepages", "prefault", "mergeable"]);
    for console in ["serial", "console"] {
        assert!(["Off", "Pty", "Tty", "File", "Null"].contains(&config[console]["mode"].as_str().unwrap()));
    }
    let every = |list: &str, keys: &[&str]| config[list].as_array().into_iter().flatten().for_each(|value| has(value, keys));
    every("disks", &["path", "num_queues", "queue_size", "image_type", "readonly", "direct", "vhost_user"]);
    every("net", &["ip", "mask", "mac", "num_queues", "queue_size", "vhost_user"]);
    every("fs", &["tag", "socket", "num_queues", "queue_size"]);
    every("devices", &["path"]);
    if let Some(vsock) = config.get("vsock") {
        has(vsock, &["cid", "socket"]);
    }
    if let Some(rng) = config.get("rng") {
        has(rng, &["src"]);
    }
    for key in ["kernel", "initramfs", "cmdline"] {
        assert!(config.get(key).is_none(), "{key} is a section of its own in an older dialect");
    }
    for device in info["device_tree"].as_object().unwrap().values() {
        assert!(device["resources"].as_array().unwrap().iter().all(Value::is_object));
    }
    assert!(!info.to_string().contains("null"), "null is not taken for every type");
}

#[test]
fn what_was_sent_is_what_the_machine_is_asked_for_and_what_info_says() {
    for (life, size, shared, growth) in [(GO, 512_u64 << 20, false, 4_u64 << 30), (RUST, 512 << 20, true, 24_740_102_144)] {
        let vmm = Vmm::start();
        let mut client = vmm.connect();
        let call = calls(life).into_iter().find(|call| call.name == "vm.create").unwrap();
        replay(&call, &mut client, Pieces::AsSent, &mut BTreeMap::new());
        let config = vmm.seen.lock().unwrap().configs[0].clone();
        assert_eq!((config.memory.size.bytes(), config.memory.shared), (size, shared));
        assert_eq!((config.memory.growth.bytes(), config.cpus.max, config.cpus.count), (growth, Some(4), 1));
        assert_eq!((config.vsock.unwrap().cid, config.disks.len(), config.disks[0].readonly), (3, 1, true));
        let info = client.call("GET", "vm.info", "").json();
        let sent: Value = serde_json::from_str(call.writes.concat().split_once("\r\n\r\n").unwrap().1).unwrap();
        for pointer in [
            "/memory/hotplug_size",
            "/memory/size",
            "/memory/shared",
            "/cpus/max_vcpus",
            "/cpus/boot_vcpus",
            "/cpus/topology",
            "/payload/kernel",
            "/payload/cmdline",
            "/vsock/socket",
            "/vsock/cid",
            "/rng/src",
            "/serial/mode",
            "/console/mode",
            "/disks/0/path",
            "/disks/0/num_queues",
            "/disks/0/queue_size",
        ] {
            assert_eq!(info["config"].pointer(pointer), sent.pointer(pointer), "{pointer}");
        }
        assert_eq!(info["memory_actual_size"], json!(size));
    }
}

#[test]
fn devices_of_the_host_keep_the_names_that_kata_gives_them() {
    let vmm = Vmm::start();
    let mut client = vmm.connect();
    let call = calls(VARIANTS).into_iter().find(|call| call.name == "Go: vm.create-vfio").unwrap();
    replay(&call, &mut client, Pieces::AsSent, &mut BTreeMap::new());
    let config = vmm.seen.lock().unwrap().configs[0].clone();
    assert_eq!(config.devices, ["path=/sys/bus/pci/devices/0000:41:00.0,id=vfio-test0".parse().unwrap()]);
    let info = client.call("GET", "vm.info", "").json();
    assert_eq!(info["config"]["devices"][0]["id"], "vfio-test0");
}
