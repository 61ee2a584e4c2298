//! The served description of the API against the replies of real machines: whatever a reply has is described, by name, type and
//! range.

#[path = "described/schema.rs"]
mod schema;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use schema::Document;
use serde_json::{Value, json};
use tests::guest::image;
use tests::server::Server;
use tests::vhost_user::{Manners, Serves, VhostUser};

/// Calls, and compares the reply with what the document says of this call and status.
fn call(server: &Server, document: &Document, what: &str, body: &Value, status: u16) -> Value {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let reply = server.expect(what, &body, status);
    let reply = if reply.is_empty() { Value::Null } else { parsed(&reply) };
    document.check_reply(what, status, &reply);
    reply
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn document(server: &Server) -> Document {
    Document::read(&server.expect("GET openapi.yaml", "", 200))
}

/// Everything that a machine of the API can have without a host's functions and taps. `images`: two disks.
fn rich(folder: &Path, images: [&Path; 2]) -> Value {
    let path = |name: &str| folder.join(name).display().to_string();
    let bucket = json!({"size": 1_000_000, "one_time_burst": 5, "refill_time": 100});
    json!({
        "payload": {"kernel": image("echo.elf"), "cmdline": "quiet"},
        "cpus": {"boot_vcpus": 2, "max_vcpus": 4, "max_phys_bits": 40,
                 "topology": {"threads_per_core": 1, "cores_per_die": 4, "dies_per_package": 1, "packages": 1}},
        "memory": {"size": 268_435_456, "hotplug_size": 268_435_456, "hotplug_method": "VirtioMem", "shared": true},
        "numa": ["id=0,cpus=0-1,memory=128M,distance=[1:20]", "id=1,cpus=2-3,memory=128M"],
        "disks": [
            {"path": images[0], "readonly": true, "id": "root", "serial": "abc", "direct": false,
             "rate_limiter_config": {"bandwidth": bucket, "ops": bucket}},
            {"vhost_user": true, "vhost_socket": path("vu-disk"), "num_queues": 1, "queue_size": 128},
        ],
        "net": [{"vhost_user": true, "vhost_socket": path("vu-net"), "mac": "02:00:00:00:00:01", "mtu": 1400}],
        "fs": [{"tag": "t", "socket": path("vu-fs"), "num_queues": 1, "queue_size": 128}],
        "vsock": {"cid": 3, "socket": path("vsock")},
        "rng": {"src": "/dev/urandom"},
        "balloon": {"size": 4096, "deflate_on_oom": true, "free_page_reporting": true},
        "serial": {"mode": "File", "file": path("serial")},
        "console": {"mode": "Socket", "socket": path("console")},
        "debug_console": {"mode": "File", "file": path("debug")},
        "watchdog": true,
        "pvpanic": true,
        "banyan": "root-ports=3,bridges=1",
        "devices": [{"banyan": "stub,id=gpu,ids=10de:2330,class=030200,clique=3,bar0=4K:mem32,bar2=16M:mem64:prefetchable,on=port0"}],
    })
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn replies_of_a_machine_with_all_kinds_of_devices_are_described_to_the_last_key() {
    let folder = tempfile::tempdir().unwrap();
    let images = ["one", "two"].map(|name| folder.path().join(name));
    for image in &images {
        File::create(image).unwrap().set_len(1 << 20).unwrap();
    }
    let serves = |name: &str, what| VhostUser::start(&folder.path().join(name), what, Manners::default());
    let _servers = [serves("vu-disk", Serves::Disk(2048)), serves("vu-net", Serves::Echo), serves("vu-fs", Serves::Folder)];
    let server = Server::empty();
    let document = document(&server);
    let ask = |what: &str, body: &Value, status: u16| call(&server, &document, what, body, status);
    let mut events = listen(&server);

    ask("GET vmm.ping", &Value::Null, 200);
    let mut in_zones = rich(folder.path(), [&images[0], &images[1]]);
    let zone = |id: &str| json!({"id": id, "size": 134_217_728, "shared": true, "hugepages": false, "prefault": false});
    in_zones["memory"] = json!({"size": 0, "zones": [zone("a"), zone("b")]});
    let far = json!([{"destination": 1, "distance": 20}]);
    in_zones["numa"] = json!([{"guest_numa_id": 0, "cpus": [0, 1], "distances": far, "memory_zones": ["a"]},
                              {"guest_numa_id": 1, "cpus": [2, 3], "memory_zones": ["b"]}]);
    ask("PUT vm.create", &in_zones, 204);
    ask("GET vm.info", &Value::Null, 200);
    ask("PUT vm.delete", &Value::Null, 204);
    ask("GET vm.info", &Value::Null, 404);
    ask("PUT vm.create", &json!({"payload": {}}), 400);
    ask("PUT vm.create", &rich(folder.path(), [&images[0], &images[1]]), 204);
    ask("GET vm.info", &Value::Null, 200);
    ask("PUT vm.pause", &Value::Null, 405);
    ask("PUT vm.add-user-device", &json!({"socket": "/s"}), 400);
    ask("PUT vm.boot", &Value::Null, 204);
    let info = ask("GET vm.info", &Value::Null, 200);
    let kinds: Vec<_> = info["device_tree"].as_object().unwrap().values().map(|node| node["kind"].as_str().unwrap()).collect();
    for kind in ["stub", "disk", "net", "fs", "vsock", "rng", "balloon", "mem", "console"] {
        assert!(kinds.contains(&kind), "no {kind} is in the tree: {kinds:?}");
    }
    let listing = ask("GET vm.devices", &Value::Null, 200);
    for list in ["devices", "ports", "root_complexes", "functions"] {
        assert!(!listing[list].as_array().unwrap().is_empty(), "no {list}");
    }
    let counters = ask("GET vm.counters", &Value::Null, 200);
    for counter in ["read_bytes", "write_bytes", "read_ops", "write_ops"] {
        assert_eq!(counters["root"][counter], 0, "{counters}");
    }
    ask("PUT vm.add-disk", &json!({"path": images[1], "readonly": true, "id": "late"}), 200);
    ask("PUT vm.add-device", &json!({"banyan": "stub,id=late2,bar0=4K:mem32,on=port2"}), 200);
    ask("PUT vm.add-device", &json!({"banyan": "stub,id=late2"}), 409);
    ask("PUT vm.add-user-device", &json!({"socket": "/s"}), 400);
    ask("PUT vm.inject-error", &json!({"at": "gpu", "error": "completion-timeout"}), 200);
    ask("PUT vm.inject-error", &json!({"at": "nobody", "error": "completion-timeout"}), 404);
    ask("PUT vm.resize", &json!({"desired_vcpus": 3, "desired_balloon": 8192}), 204);
    ask("PUT vm.resize", &json!({"desired_vcpus": 200}), 400);
    ask("PUT vm.coredump", &Value::Null, 400);
    ask("PUT vm.pause", &Value::Null, 204);
    ask("GET vm.info", &Value::Null, 200);
    ask("PUT vm.resume", &Value::Null, 204);
    ask("PUT vm.remove-device", &json!({"id": "late"}), 204);
    ask("PUT vm.remove-device", &json!({"id": "nobody"}), 404);
    ask("GET vm.info", &Value::Null, 200);
    server.shuts_down();
    let heard: Vec<Value> = events.by_ref().map(|line| parsed(&line)).collect();
    assert!(heard.len() > 10, "{heard:?}");
    for event in heard {
        document.check("event", "Event", &event);
    }
}

/// What is told from here on to the end of the process.
fn listen(server: &Server) -> impl Iterator<Item = String> + use<> {
    let connected = UnixStream::connect(server.socket()).and_then(|mut stream| {
        stream.set_read_timeout(Some(tests::process::LIMIT))?;
        stream.write_all(b"GET /api/v1/vm.events HTTP/1.1\r\nHost: x\r\n\r\n").map(|()| stream)
    });
    let stream = connected.unwrap_or_else(|error| panic!("nobody can listen: {error}"));
    BufReader::new(stream).lines().map_while(Result::ok).filter(|line| line.starts_with('{'))
}

#[test]
fn what_is_not_described_is_found() {
    let document = Document::read(
        "paths:\n  /a:\n    get:\n      responses:\n        '200':\n          content:\n            application/json:\n              \
         schema: {$ref: '#/components/schemas/A'}\n        '204': {description: Done}\ncomponents:\n  schemas:\n    A:\n      \
         type: object\n      required: [n]\n      properties:\n        n: {type: integer, minimum: 1, maximum: 3}\n        \
         e: {type: string, enum: [x, y]}\n        l: {type: array, items: {type: boolean}, maxItems: 1}\n        \
         o: {type: object}\n        m: {type: object, additionalProperties: {type: integer}}\n",
    );
    let problems = |value: Value| document.problems("GET a", 200, &value).join("; ");
    for good in [json!({"n": 1}), json!({"n": 3, "e": "y", "l": [true], "m": {"k": 1}})] {
        assert_eq!(problems(good), "");
    }
    for (bad, part) in [
        (json!({}), "n is missing"),
        (json!({"n": 0}), "/n: 0 is below 1"),
        (json!({"n": 4}), "/n: 4 is above 3"),
        (json!({"n": "1"}), "/n: \"1\" is no integer"),
        (json!({"n": 1, "z": 1}), "/z is not described"),
        (json!({"n": 1, "e": "z"}), "/e: \"z\" is none of"),
        (json!({"n": 1, "l": [1]}), "/l/0: 1 is no boolean"),
        (json!({"n": 1, "l": [true, true]}), "/l has 2 entries"),
        (json!({"n": 1, "o": {"k": 1}}), "/o/k is not described"),
        (json!({"n": 1, "m": {"k": "v"}}), "/m/k: \"v\" is no integer"),
        (json!({"n": null}), "/n: null is no integer"),
        (json!([]), "[] is no object"),
    ] {
        let found = problems(bad);
        assert!(found.contains(part), "`{part}` is not in `{found}`");
    }
    assert!(document.problems("GET a", 404, &json!([])).join("").contains("404 is not described"));
    assert!(document.problems("GET a", 204, &json!([])).join("").contains("no body is described"));
    assert!(document.problems("PUT b", 204, &json!([])).join("").contains("is not described"));
}
