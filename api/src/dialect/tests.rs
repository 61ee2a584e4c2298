use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use super::*;
use crate::config::{
    BalloonConfig, CpuConfig, CpuTopology, DiskIo, FsConfig, HugePageSize, ImageFormat, IoEngine, MacAddress, NetConfig,
    NetSource, OutputConfig, Payload, PcieConfig, RateLimit, Size, TokenBucket, TopologyPolicy, VmConfig, VsockConfig,
};
use crate::error::{ApiError, ErrorKind};
use crate::info::{DeviceClass, DeviceInfo, Gauge, PciAddress, Phase, Progress, Step, VmInfo};

fn created_from(extra: Value) -> Result<VmConfig, ApiError> {
    let mut body = json!({ "payload": { "kernel": "/k" } });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    create(body.to_string().as_bytes(), &VmConfig::default(), &Notes::default())
}

fn refused_text(extra: Value) -> String {
    let error = created_from(extra.clone()).expect_err(&extra.to_string());
    assert_eq!(error.kind, ErrorKind::BadRequest);
    error.to_string()
}

#[test]
fn a_payload_is_a_kernel_or_a_firmware() {
    let Some(Payload::Kernel(kernel)) = created_from(json!({})).unwrap().payload else { panic!("no kernel") };
    assert_eq!((kernel.path.to_str(), kernel.initramfs, kernel.cmdline.as_str()), (Some("/k"), None, ""));
    let firmware = created_from(json!({ "payload": { "firmware": "/f" } })).unwrap();
    assert_eq!(firmware.payload, Some(Payload::Firmware("/f".into())));
    for (payload, part) in [
        (json!(null), "`payload` is missing"),
        (json!({}), "neither `payload.kernel` nor `payload.firmware`"),
        (json!({"kernel": "/k", "firmware": "/f"}), "leave out one of the two"),
        (json!({"kernel": ""}), "payload.kernel"),
        (json!({"kernel": "/k", "host_data": "x"}), "payload.host_data"),
    ] {
        let text = refused_text(json!({ "payload": payload }));
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn every_section_reaches_the_configuration() {
    let config = created_from(json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 8, "max_phys_bits": 46,
                 "topology": {"threads_per_core": 2, "cores_per_die": 4, "dies_per_package": 1, "packages": 1}},
        "memory": {"size": 2147483648_u64, "hotplug_size": 4294967296_u64, "hotplug_method": "Acpi", "shared": true,
                   "hugepages": true, "hugepage_size": 1073741824, "prefault": true},
        "disks": [{"path": "/d", "id": "root", "readonly": true, "direct": true, "image_type": "Qcow2", "num_queues": 2,
                   "queue_size": 64, "serial": "S1",
                   "rate_limiter_config": {"bandwidth": {"size": 10, "refill_time": 100}, "ops": null}}],
        "net": [{"tap": "tap0", "mac": "02:00:00:00:00:01", "num_queues": 4, "mtu": 9000, "offload_tso": false}],
        "fs": [{"tag": "t", "socket": "/v"}],
        "devices": [{"path": "/sys/bus/pci/devices/0000:41:00.0", "id": "g", "x_nv_gpudirect_clique": 3},
                    {"banyan": "stub,id=s"}],
        "vsock": {"cid": 7, "socket": "/s"},
        "rng": {"src": "/dev/hwrng"},
        "balloon": {"size": 0, "free_page_reporting": true},
        "serial": {"mode": "Tty"},
        "console": {"mode": "File", "file": "/c"},
        "debug_console": {"mode": "File", "file": "/d", "iobase": 233},
        "watchdog": true,
        "banyan": "topology=host",
    }))
    .unwrap();
    let of = |n| NonZeroU16::new(n).unwrap();
    let topology = CpuTopology { threads_per_core: of(2), cores_per_die: of(4), dies_per_package: of(1), packages: of(1) };
    assert_eq!(
        (config.cpus, config.max_physical_bits),
        (CpuConfig { count: 2, max: Some(8), topology: Some(topology), ..CpuConfig::default() }, Some(46))
    );
    assert_eq!(config.memory.growth, Size(4 << 30));
    assert_eq!((config.memory.size, config.memory.hugepages), (Size(2 << 30), Some(HugePageSize::OneGib)));
    assert!(config.memory.shared && config.memory.prefault);
    let bucket = TokenBucket { size: 10, one_time_burst: None, refill_ms: 100 };
    let rate_limit = RateLimit { bandwidth: Some(bucket), operations: None };
    let io = DiskIo { format: ImageFormat::Qcow2, direct: true, engine: IoEngine::Auto, queues: 2, queue_size: 64, rate_limit };
    let disk = &config.disks[0];
    assert_eq!((disk.id.as_deref(), disk.readonly, disk.serial.as_deref(), disk.io), (Some("root"), true, Some("S1"), io));
    let net = NetConfig {
        source: NetSource::Tap("tap0".into()),
        mac: Some(MacAddress([2, 0, 0, 0, 0, 1])),
        queues: 4,
        mtu: Some(9000),
        offload_tcp: false,
        ..NetConfig::default()
    };
    assert_eq!(config.nets, [net]);
    let fs = FsConfig { id: None, tag: "t".into(), socket: "/v".into(), queues: 1, queue_size: 1024 };
    assert_eq!(config.filesystems, [fs]);
    let devices = ["path=/sys/bus/pci/devices/0000:41:00.0,id=g,clique=3", "stub,id=s"].map(|text| text.parse().unwrap());
    assert_eq!(config.devices, devices);
    assert_eq!(config.vsock, Some(VsockConfig { id: None, cid: 7, socket: "/s".into() }));
    assert_eq!(config.rng.unwrap().source.to_str(), Some("/dev/hwrng"));
    let balloon = BalloonConfig { size: Size(0), deflate_on_oom: false, free_page_reporting: true };
    assert_eq!(config.balloon, Some(balloon));
    assert_eq!((config.serial, config.console), (OutputConfig::Stdio, OutputConfig::File("/c".into())));
    assert_eq!((config.debug_console, config.watchdog), (Some(OutputConfig::File("/d".into())), true));
    assert_eq!(config.pcie.topology, TopologyPolicy::Host);
}

#[test]
fn null_is_absent_in_every_section() {
    let sections = [
        "cpus",
        "memory",
        "disks",
        "net",
        "fs",
        "devices",
        "vsock",
        "rng",
        "balloon",
        "serial",
        "console",
        "debug_console",
        "platform",
        "iommu",
        "watchdog",
        "pvpanic",
        "landlock_enable",
        "banyan",
        "pmem",
        "user_devices",
        "vdpa",
        "numa",
        "tpm",
    ];
    let nulls: serde_json::Map<_, _> = sections.map(|section| (section.to_owned(), Value::Null)).into_iter().collect();
    assert_eq!(created_from(nulls.into()).unwrap(), created_from(json!({})).unwrap());
}

#[test]
fn what_the_body_cannot_say_is_taken_from_the_process() {
    let pcie = PcieConfig { topology: TopologyPolicy::Host, ..PcieConfig::default() };
    let base = VmConfig { pcie, debug_exit: true, ..VmConfig::default() };
    let config = create(br#"{"payload":{"kernel":"/k"}}"#, &base, &Notes::default()).unwrap();
    assert_eq!((config.pcie, config.debug_exit), (pcie, true));
    let with_text = create(br#"{"payload":{"kernel":"/k"},"banyan":"root-ports=2"}"#, &base, &Notes::default()).unwrap();
    assert_eq!(with_text.pcie, PcieConfig { root_ports: 2, ..pcie });
    assert_eq!(config.serial, OutputConfig::Off, "a machine that says nothing of its serial port does not write to the terminal");
}

#[test]
fn what_a_guest_would_miss_is_refused_with_its_key() {
    let disk = |extra: Value| {
        let mut disk = json!({ "path": "/d" });
        for (key, value) in extra.as_object().unwrap() {
            disk[key] = value.clone();
        }
        json!({ "disks": [disk] })
    };
    for (extra, part) in [
        (json!({"iommu": true}), "`iommu`: Banyan has no IOMMU"),
        (json!({"rng": {"iommu": true}}), "`rng.iommu`"),
        (json!({"console": {"mode": "Off", "iommu": true}}), "`console.iommu`"),
        (json!({"vsock": {"cid": 3, "socket": "/s", "iommu": true}}), "`vsock.iommu`"),
        (json!({"platform": {"iommu_segments": [0]}}), "`platform.iommu_segments`"),
        (json!({"platform": {"tdx": true}}), "`platform.tdx`: confidential"),
        (json!({"platform": {"sev_snp": true}}), "`platform.sev_snp`"),
        (json!({"pmem": [{}]}), "`pmem`: it is not supported"),
        (json!({"generic_vhost_user": [{}]}), "`generic_vhost_user`: it is not supported"),
        (json!({"rate_limit_groups": [{}]}), "`rate_limit_groups`: it is not supported"),
        (json!({"disks": [{"path": "/a", "rate_limit_group": "g"}]}), "`rate_limit_group`: disks that share a limit"),
        (json!({"numa": [{}]}), "`numa[0]`: missing field `guest_numa_id`"),
        (json!({"cpus": {"boot_vcpus": 0}}), "`cpus.boot_vcpus`: 0 processors are not possible; 1 to 255 are"),
        (json!({"cpus": {"boot_vcpus": 256}}), "256 processors"),
        (json!({"cpus": {"boot_vcpus": 4, "max_vcpus": 2}}), "`cpus.max_vcpus`: 2 is less than the 4"),
        (json!({"cpus": {"boot_vcpus": 1, "max_phys_bits": 64}}), "36 to 52 bits"),
        (json!({"cpus": {"boot_vcpus": 1, "kvm_hyperv": true}}), "`cpus.kvm_hyperv`"),
        (
            json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 8,
                   "topology": {"threads_per_core": 1, "cores_per_die": 4, "dies_per_package": 1, "packages": 1}}}),
            "make 4 processors, but 8 are asked for",
        ),
        (
            json!({"cpus": {"boot_vcpus": 1,
                   "topology": {"threads_per_core": 0, "cores_per_die": 4, "dies_per_package": 1, "packages": 1}}}),
            "`cpus.topology.threads_per_core`: invalid value: integer `0`, expected a whole number from 1 to 65535",
        ),
        (json!({"memory": {"size": 3, "hugepages": true}}), "no multiple of the huge page size 2M"),
        (json!({"memory": {"size": 4096, "hugepages": true, "hugepage_size": 4096}}), "huge pages of 4K do not exist"),
        (json!({"memory": {"size": 0, "zones": [{"id": "mem0"}]}}), "`memory.zones[0]`: missing field `size`"),
        (json!({"memory": {"size": 1, "hotplugged_size": 1}}), "`memory.hotplugged_size`: no memory has come"),
        (json!({"rtc": {}}), "`rtc`"),
        (json!({"rng": {"src": "/dev/urandom", "pci_device_id": 3}}), "`rng.pci_device_id`: a client cannot choose it"),
        (json!({"balloon": {"size": 0, "pci_device_id": 3}}), "`balloon.pci_device_id`"),
        (json!({"balloon": {"size": 0, "iommu": true}}), "`balloon.iommu`"),
        (json!({"console": {"mode": "Null", "pci_device_id": 3}}), "`console.pci_device_id`"),
        (json!({"vsock": {"cid": 3, "socket": "/s", "pci_device_id": 3}}), "`vsock.pci_device_id`"),
        (json!({"fs": [{"tag": "t", "socket": "/s", "pci_device_id": 3}]}), "`pci_device_id`"),
        (json!({"net": [{"tap": "t0", "pci_device_id": 3}]}), "`pci_device_id`"),
        (json!({"devices": [{"path": "/sys/bus/pci/devices/0000:01:00.0", "pci_device_id": 3}]}), "`pci_device_id`"),
        (json!({"devices": [{"path": "/d", "x_exclude_mmap_bars": [6]}]}), "`x_exclude_mmap_bars`: `6` names no BARs"),
        (disk(json!({"pci_device_id": 3})), "`pci_device_id`"),
        (json!({"memory": {"size": 1, "hotplug_method": "Pmem"}}), "`memory.hotplug_method`: `Pmem`"),
        (json!({"memory": {"size": u64::MAX, "hotplug_size": 1}}), "`memory.hotplug_size`"),
        (json!({"serial": {"mode": "Socket"}}), "`serial.socket` is missing"),
        (json!({"serial": {"mode": "File"}}), "`serial.file` is missing"),
        (json!({"serial": {"mode": "tty"}}), "unknown variant `tty`"),
        (json!({"debug_console": {"mode": "Off", "iobase": 1000}}), "port 0x3e8"),
        (json!({"vsock": {"cid": 2, "socket": "/s"}}), "`cid`: 2 is no guest's"),
        (json!({"vsock": {"cid": 4_294_967_295_u64, "socket": "/s"}}), "no guest's"),
        (disk(json!({"iommu": true})), "`iommu`"),
        (disk(json!({"vhost_user": true})), "`vhost_socket` is missing"),
        (disk(json!({"vhost_user": true, "vhost_socket": "/s"})), "two disks"),
        (disk(json!({"vhost_socket": "/s"})), "for devices with `vhost_user` true"),
        (json!({"disks": [{"vhost_user": true, "vhost_socket": "/s", "readonly": true}]}), "readonly: the process"),
        (disk(json!({"num_queues": 0})), "`num_queues`"),
        (disk(json!({"queue_size": 100})), "100 is no power of two"),
        (disk(json!({"serial": "with blank"})), "1 to 20 printable"),
        (disk(json!({"banyan": "b.img"})), "leave out `path`, `vhost_socket` and `id`"),
        (json!({"disks": [{"banyan": "readonly=on"}]}), "key `path` is missing"),
        (json!({"disks": [{}]}), "`path` is missing"),
        (json!({"disks": [{"path": ""}]}), "`path` is missing"),
        (json!({"devices": [{"id": "a"}]}), "`path` is missing"),
        (json!({"devices": [{"path": "/a", "x_nv_gpudirect_clique": 16}]}), "cliques are 0 to 15"),
        (json!({"devices": [{"path": "/a", "banyan": "stub"}]}), "leave out `path`"),
        (json!({"net": [{"num_queues": 3}]}), "`num_queues`: 3 queues are not possible"),
        (json!({"net": [{"mac": "02"}]}), "`02` is no hardware address"),
        (json!({"banyan": "topology=hots"}), "did you mean `host`?"),
        (json!({"disks": vec![json!({"path": "a"}); 4097]}), "key `disks`: 4097 entries"),
        (json!({"net": vec![json!({"tap": "a"}); 4097]}), "key `net`: 4097 entries"),
        (json!({"devices": vec![json!({"banyan": "stub"}); 4097]}), "at most 4096"),
        (json!({"fs": vec![json!({"tag": "a", "socket": "/s"}); 4097]}), "key `fs`: 4097 entries"),
        (json!({"numa": vec!["0"; 4097]}), "key `numa`: 4097 entries"),
    ] {
        let text = refused_text(extra.clone());
        assert!(text.contains("vm.create") && text.contains(part), "{extra}: {text}");
    }
}

#[test]
fn keys_without_effect_are_noted_by_name() {
    let notes = Notes::default();
    let body = json!({
        "payload": {"kernel": "/k", "shim": 1}, "pvpanic": true, "landlock_enable": true, "colour": "red",
        "memory": {"size": 1, "mergeable": true}, "cpus": {"boot_vcpus": 1, "nested": true, "features": {"amx": true}},
        "disks": [{"path": "/d", "sparse": true, "x": 1}],
    });
    create(body.to_string().as_bytes(), &VmConfig::default(), &notes).unwrap();
    assert_eq!(
        notes.seen(),
        [
            "vm.create colour",
            "vm.create cpus.features.amx, a warning",
            "vm.create disks.0.x",
            "vm.create landlock_enable, a warning",
            "vm.create memory.mergeable",
            "vm.create payload.shim",
        ]
    );
}

#[test]
fn interfaces_and_descriptors_match() {
    let notes = Notes::default();
    let add = |body: Value, descriptors| add_net(body.to_string().as_bytes(), descriptors, &notes);
    assert_eq!(add(json!({"num_queues": 4}), 2).unwrap().queues, 4);
    assert_eq!(add(json!({"fds": [28, 29]}), 1).unwrap(), NetConfig::default());
    let served = add(json!({"vhost_user": true, "vhost_socket": "/s", "vhost_mode": "Client"}), 0).unwrap();
    assert_eq!(served.source, NetSource::Server("/s".into()));
    assert_eq!(add(net_body(&served), 0), Ok(served), "what is told can be given");
    assert_eq!(add(json!({"tap": "t"}), 0).unwrap().source, NetSource::Tap("t".into()));
    for (body, descriptors, part) in [
        (json!({}), 0, "no descriptor"),
        (json!({}), 2, "1 pairs, but 2 descriptors"),
        (json!({"num_queues": 4}), 1, "2 pairs, but 1 descriptors"),
        (json!({"tap": "t"}), 1, "keep one"),
        (json!({"vhost_user": true, "vhost_socket": "/s"}), 1, "keep one"),
        (json!({"vhost_user": true, "vhost_socket": "/s", "tap": "t"}), 0, "two interfaces"),
        (json!({"vhost_user": true, "vhost_socket": "/s", "vhost_mode": "Server"}), 0, "this side connects"),
        (json!({"vhost_user": true}), 0, "`vhost_socket` is missing"),
    ] {
        let text = add(body, descriptors).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn interfaces_and_folders_have_the_limits_of_the_command_line() {
    let notes = Notes::default();
    for (body, part) in [
        (json!({"num_queues": 3}), "even number from 2 to 32"),
        (json!({"num_queues": 34}), "even number from 2 to 32"),
        (json!({"queue_size": 300}), "power of two"),
        (json!({"queue_size": 1}), "power of two"),
        (json!({"mtu": 67}), "smallest is 68"),
        (json!({"mac": "00:00:00:00:00:00"}), "nobody's"),
        (json!({"mac": "03:00:00:00:00:01"}), "a group"),
    ] {
        let mut net = body;
        net["tap"] = json!("t");
        let error = add_net(net.to_string().as_bytes(), 0, &notes).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        let whole = json!({"payload": {"kernel": "k"}, "net": [net]});
        assert!(create(whole.to_string().as_bytes(), &VmConfig::default(), &notes).is_err(), "{whole}");
    }
    for (key, value, part) in [
        ("tag", json!(""), "1 to 36 bytes"),
        ("tag", json!("t".repeat(37)), "1 to 36 bytes"),
        ("num_queues", json!(0), "1 to 64"),
        ("queue_size", json!(1000), "power of two"),
    ] {
        let mut folder = json!({"tag": "t", "socket": "/s"});
        folder[key] = value;
        let error = add_fs(folder.to_string().as_bytes(), &notes).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        let whole = json!({"payload": {"kernel": "k"}, "fs": [folder]});
        assert!(create(whole.to_string().as_bytes(), &VmConfig::default(), &notes).is_err(), "{whole}");
    }
}

#[test]
fn resize_takes_totals() {
    let notes = Notes::default();
    let read = |body: &str| resize(body.as_bytes(), &notes).map(|to| (to.cpus, to.ram, to.balloon));
    assert_eq!(read(r#"{"desired_vcpus":2}"#), Ok((Some(2), None, None)));
    assert_eq!(
        read(r#"{"desired_vcpus":null,"desired_ram":1073741824,"desired_balloon":0}"#),
        Ok((None, Some(1 << 30), Some(0)))
    );
    assert_eq!(read("{}"), Ok((None, None, None)));
    for body in [r#"{"desired_vcpus":0}"#, r#"{"desired_vcpus":256}"#, r#"{"desired_vcpus":-1}"#, r#"{"desired_ram":1.5}"#] {
        assert!(read(body).is_err(), "{body}");
    }
}

#[test]
fn bodies_that_banyan_writes_it_reads_back() {
    let notes = Notes::default();
    for text in
        ["path=0000:03:00.0,id=gpu0,on=rp1,clique=2", "stub,ids=10de:20b8,class=030200,bar1=128G:mem64:prefetchable,msix=8"]
    {
        let device = text.parse().unwrap();
        let body = device_body(std::slice::from_ref(&device)).to_string();
        assert_eq!(add_device(body.as_bytes(), &notes).unwrap(), std::slice::from_ref(&device));
        let both = [device.clone(), crate::config::DeviceConfig { function: 1, ..device }];
        assert_eq!(add_device(device_body(&both).to_string().as_bytes(), &notes).unwrap(), both);
    }
    for text in ["path=\"a,b.img\",readonly=on,id=root", "a.img"] {
        let disk = text.parse().unwrap();
        assert_eq!(add_disk(disk_body(&disk).to_string().as_bytes(), &notes).unwrap(), disk);
    }
    assert_eq!(notes.seen(), [""; 0]);
}

#[test]
fn info_round_trips_what_was_created() {
    let first = created_from(json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 4},
        "memory": {"size": 1073741824, "hotplug_size": 5, "hugepages": true},
        "disks": [{"path": "/d", "image_type": "Vhdx", "rate_limiter_config": {"ops": {"size": 1, "one_time_burst": 2, "refill_time": 3}}}],
        "net": [{"tap": "t", "mac": "02:00:00:00:00:09"}],
        "fs": [{"tag": "t", "socket": "/v", "num_queues": 3}],
        "devices": [{"path": "/sys/a", "id": "g", "x_nv_gpudirect_clique": 3}],
        "vsock": {"cid": 3, "socket": "/s"}, "rng": {"src": "/r"}, "balloon": {"size": 7}, "serial": {"mode": "File", "file": "/f"},
        "banyan": "topology=flat",
    }))
    .unwrap();
    let info = VmInfo {
        config: first.clone(),
        phase: Phase::Created,
        progress: None,
        memory: 1,
        balloon: Gauge::default(),
        devices: Vec::new(),
    };
    let mut said = vm_info(&info)["config"].clone();
    // A device is said twice, in the dialect's form and in Banyan's; a body has one of them.
    said["devices"][0].as_object_mut().unwrap().remove("banyan");
    let mut second = create(said.to_string().as_bytes(), &VmConfig::default(), &Notes::default()).unwrap();
    second.max_physical_bits = first.max_physical_bits;
    assert_eq!(second, first);
}

#[test]
fn info_tells_phase_progress_and_places() {
    let device = DeviceInfo {
        id: "gpu0".into(),
        kind: DeviceClass::Vfio,
        bdf: PciAddress { segment: 0, bus: 4, device: 0, function: 0 },
        path: "04/00/01/00".into(),
        port: Some("dsp1".into()),
        host: Some("0000:41:00.0".into()),
        clique: Some(0),
        bars: Vec::new(),
        label: String::new(),
    };
    let progress = Some(Progress { step: Step::DmaMap, done: 3, total: 4 });
    let mut info = VmInfo {
        config: VmConfig::default(),
        phase: Phase::Starting,
        progress,
        memory: 9,
        balloon: Gauge::default(),
        devices: vec![device],
    };
    let said = vm_info(&info);
    assert_eq!(said["progress"], json!({"step": "dma-map", "done": 3, "total": 4, "percent": 75}));
    assert_eq!((&said["state"], &said["phase"], &said["memory_actual_size"]), (&json!("Created"), &json!("starting"), &json!(9)));
    let node = &said["device_tree"]["gpu0"];
    assert_eq!(
        (&node["pci_bdf"], &node["pci_path"], &node["host_bdf"]),
        (&json!("0000:04:00.0"), &json!("04/00/01/00"), &json!("0000:41:00.0"))
    );
    let balloon = Arc::new(AtomicU64::new(4));
    info.balloon = Gauge::of(balloon.clone());
    assert_eq!(vm_info(&info)["memory_actual_size"], 5);
    balloon.store(6, Ordering::Relaxed);
    assert_eq!(vm_info(&info)["memory_actual_size"], 3, "as the guest goes on");
    for (phase, state) in [
        (Phase::Created, "Created"),
        (Phase::Running, "Running"),
        (Phase::Paused, "Paused"),
        (Phase::Stopping, "Running"),
        (Phase::Stopped, "Shutdown"),
    ] {
        info.phase = phase;
        assert_eq!(vm_info(&info)["state"], state);
    }
}

#[test]
fn memory_nodes_are_given_and_shown_as_texts() {
    let texts = json!(["id=0,cpus=0,memory=256M,host-node=1,distance=[1:20]", "id=1,memory=256M"]);
    let config = created_from(json!({ "numa": texts })).unwrap();
    assert_eq!(json!(config.numa.texts()), texts);
    let info =
        VmInfo { config, phase: Phase::Created, progress: None, memory: 0, balloon: Gauge::default(), devices: Vec::new() };
    assert_eq!(vm_info(&info)["config"]["numa"], texts);
    for (numa, part) in [
        (json!([7]), "expected a text such as `id=0"),
        (json!([{"guest_numa_id": 0}]), "write each node as a text"),
        (json!(["id=0", "id=0"]), "memory node 0 is given twice"),
        (json!(["host", "id=0"]), "give it alone"),
    ] {
        let text = refused_text(json!({ "numa": numa }));
        assert!(text.contains(part), "{text}");
    }
}

/// The bodies of vm.create that both drivers of Kata Containers were seen to send.
fn recorded() -> Vec<Value> {
    let mut bodies = Vec::new();
    for text in [
        include_str!("../../tests/http/kata/go.toml"),
        include_str!("../../tests/http/kata/rust.toml"),
        include_str!("../../tests/http/kata/variants.toml"),
    ] {
        let file: toml::Value = toml::from_str(text).unwrap();
        for call in file["call"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|call| call["name"].as_str().unwrap().contains("vm.create") && call["status"].as_integer() == Some(204))
        {
            let request: String = call["writes"].as_array().unwrap().iter().map(|write| write.as_str().unwrap()).collect();
            let body = request.split_once("\r\n\r\n").unwrap().1;
            bodies.push(serde_json::from_str(body).unwrap());
        }
    }
    bodies
}

fn lost(sent: &Value, told: &Value, at: &str, found: &mut Vec<String>) {
    match (sent, told) {
        (Value::Null, _) => {}
        (Value::Object(sent), Value::Object(told)) => {
            sent.iter()
                .for_each(|(key, value)| lost(value, told.get(key).unwrap_or(&Value::Null), &format!("{at}/{key}"), found));
        }
        (Value::Array(sent), Value::Array(told)) if sent.len() == told.len() => {
            sent.iter().zip(told).for_each(|(sent, told)| lost(sent, told, &format!("{at}/*"), found));
        }
        _ if sent == told => {}
        _ => found.push(format!("{at}: {sent} is told as {told}")),
    }
}

#[test]
fn what_drivers_sent_is_told_key_by_key() {
    let bodies = recorded();
    assert_eq!(bodies.len(), 6);
    for body in bodies {
        let config = create(body.to_string().as_bytes(), &VmConfig::default(), &Notes::default()).unwrap();
        let info =
            VmInfo { config, phase: Phase::Created, progress: None, memory: 0, balloon: Gauge::default(), devices: Vec::new() };
        let mut found = Vec::new();
        lost(&body, &vm_info(&info)["config"], "", &mut found);
        found.retain(|lost| {
            ![
                // All is on segment 0, of which there is one.
                "/platform/num_pci_segments: 2 ",
                "/fs/*/pci_segment: 1 ",
                // The host's own policy decides.
                "/memory/thp: ",
                // A format is never looked for.
                "/disks/*/image_type: \"Unknown\" is told as \"Raw\"",
            ]
            .iter()
            .any(|exception| lost.starts_with(exception))
        });
        assert_eq!(found, [""; 0], "{body}");
    }
}

#[test]
fn protection_and_processors_that_are_asked_for_and_not_there_are_warned_of() {
    let notes = Notes::default();
    let body = |on: bool| {
        let cpus = json!({"boot_vcpus": 1, "nested": !on, "features": {"amx": false, "other": on}});
        json!({"payload": {"kernel": "/k"}, "landlock_enable": on, "cpus": cpus}).to_string()
    };
    create(body(false).as_bytes(), &VmConfig::default(), &notes).unwrap();
    assert_eq!(notes.seen(), [""; 0], "what drivers send");
    create(body(true).as_bytes(), &VmConfig::default(), &notes).unwrap();
    let warned = ["cpus.features.other", "cpus.nested", "landlock_enable"];
    assert_eq!(notes.seen(), warned.map(|key| format!("vm.create {key}, a warning")));
}
