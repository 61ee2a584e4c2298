use std::thread;
use std::time::Duration;

use api::channel::channel;
use api::command::Command;
use api::config::VmConfig;
use api::error::ApiError;
use api::http::{Limits, Server};
use api::info::{DeviceClass, DeviceInfo, Gauge, Listing, PciAddress, Phase, PortInfo, Published, VmInfo};

use super::*;
use crate::cli::{self, Action};

/// Runs `banyan ctl` against a process whose core does what `core` says. Returns what is printed, or the error.
fn ctl(arguments: &[&str], published: &Published, core: fn(Command)) -> Result<String, CtlError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let (controller, inbox) = channel().unwrap();
    let server = Server::start(&path, controller, published.clone(), VmConfig::default(), Limits::default()).unwrap();
    let core = thread::spawn(move || {
        while let Some(command) = inbox.wait() {
            core(command);
        }
    });
    let result = ctl_at(&path, arguments);
    server.close(Duration::from_secs(1));
    core.join().unwrap();
    result
}

fn ctl_at(path: &Path, arguments: &[&str]) -> Result<String, CtlError> {
    let words = ["banyan", "ctl", "--api-socket", path.to_str().unwrap()];
    let Ok(Action::Ctl(options)) = cli::parse(words.iter().chain(arguments).map(Into::into)) else {
        panic!("{arguments:?} is no command");
    };
    let mut out = Vec::new();
    run(&options, &mut out).map(|()| String::from_utf8(out).unwrap())
}

fn gpu() -> DeviceInfo {
    DeviceInfo {
        id: "gpu0".into(),
        kind: DeviceClass::Vfio,
        bdf: PciAddress { segment: 0, bus: 4, device: 0, function: 0 },
        path: "04/00/01/00".into(),
        port: Some("dsp1".into()),
        host: Some("0000:41:00.0".into()),
        clique: Some(0),
        bars: Vec::new(),
        label: "10de:2901".into(),
    }
}

fn machine() -> Published {
    let published = Published::new();
    let config = VmConfig::default();
    let (phase, memory, balloon) = (Phase::Running, 512 << 20, Gauge::default());
    published.set(Some(VmInfo { config, phase, progress: None, memory, balloon, devices: vec![gpu()] }));
    published
}

#[test]
fn devices_and_ports_are_shown_in_two_tables() {
    let text = ctl(&["list"], &machine(), |command| {
        let Command::ListDevices { reply } = command else { panic!("{command:?}") };
        let mut plain = DeviceInfo { id: "d".into(), kind: DeviceClass::Disk, label: "a\x1b[2J".into(), ..gpu() };
        (plain.port, plain.host, plain.clique) = (None, None, None);
        let port = PortInfo {
            name: "rp1".into(),
            kind: "root-port".into(),
            bdf: PciAddress { segment: 0, bus: 0, device: 5, function: 0 },
            hot_plug: true,
            devices: Vec::new(),
            memory: 2 << 20,
            prefetchable: 256 << 30,
            access_control: Some(vec!["SrcValid".into(), "ReqRedir".into()]),
        };
        let port_with =
            |name: &str, access_control| PortInfo { name: name.into(), hot_plug: false, access_control, ..port.clone() };
        let ports = vec![port.clone(), port_with("rp2", Some(Vec::new())), port_with("up", None)];
        reply.send(Ok(Listing { devices: vec![gpu(), plain], ports, root_complexes: Vec::new(), functions: Vec::new() }));
    });
    let expected = "\
DEVICE  KIND  ADDRESS       PATH         PORT  HOST          CLIQUE  WHAT
gpu0    vfio  0000:04:00.0  04/00/01/00  dsp1  0000:41:00.0  0       10de:2901
d       disk  0000:04:00.0  04/00/01/00  -     -             -       a?[2J

PORT  KIND       ADDRESS       HOT-PLUG  MEMORY  PREFETCHABLE  DEVICES  ACS
rp1   root-port  0000:00:05.0  yes       2M      256G          -        SrcValid,ReqRedir
rp2   root-port  0000:00:05.0  no        2M      256G          -        off
up    root-port  0000:00:05.0  no        2M      256G          -        -

A device that comes to a port and names none (on=) takes the nearest free one with room,
of equally near ones that which keeps least, of those the first.
";
    assert_eq!(text.unwrap(), expected);
}

#[test]
fn state_and_configuration_are_shown_line_by_line() {
    let text = ctl(&["info"], &machine(), |command| panic!("{command:?}")).unwrap();
    let hierarchy = VmConfig::default().pcie;
    let expected = format!(
        "\
state       running
processors  1
memory      512M
hierarchy   {hierarchy}
devices     gpu0
"
    );
    assert_eq!(text, expected);
}

#[test]
fn memory_is_shown_with_what_is_on_its_way_and_what_may_come() {
    let line = |memory: &str, actual: u64| {
        let published = machine();
        published.update(|info| {
            info.config.memory = memory.parse().unwrap();
            info.memory = actual;
        });
        let text = ctl(&["info"], &published, |command| panic!("{command:?}")).unwrap();
        text.lines().find_map(|line| line.strip_prefix("memory      ")).unwrap().to_owned()
    };
    assert_eq!(line("512M,hotplug=1G", 512 << 20), "512M; 1G may come to what it started with");
    assert_eq!(line("1G,hotplug=1G", 640 << 20), "640M, on its way to 1G; 1G may come to what it started with");
}

#[test]
fn json_is_the_reply_itself() {
    let text = ctl(&["--json", "info"], &machine(), |command| panic!("{command:?}")).unwrap();
    let reply: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(reply["device_tree"]["gpu0"]["pci_path"], "04/00/01/00");
    let ping = ctl(&["ping"], &Published::new(), |command| panic!("{command:?}")).unwrap();
    assert!(ping.starts_with("Banyan ") && ping.ends_with(&format!("process {}\n", std::process::id())), "{ping}");
}

#[test]
fn a_device_is_added_as_it_was_written_and_removed_by_its_name() {
    let added = ctl(&["add-device", "stub,id=gpu0,on=rp1,bar0=16M:mem32,msix=8"], &machine(), |command| {
        let Command::AddDevice { functions, reply } = command else { panic!("{command:?}") };
        assert_eq!(functions, ["stub,id=gpu0,on=rp1,bar0=16M:mem32,msix=8".parse().unwrap()]);
        reply.send(Ok(Some(gpu())));
    });
    assert_eq!(added.unwrap(), "gpu0 is at 0000:04:00.0 (path 04/00/01/00)\n");
    let removed = ctl(&["remove-device", "gpu0"], &machine(), |command| {
        let Command::RemoveDevice { id, reply } = command else { panic!("{command:?}") };
        assert_eq!(id, "gpu0");
        reply.send(Ok(()));
    });
    assert_eq!(removed.unwrap(), "");
}

#[test]
fn every_command_reaches_its_endpoint() {
    for (word, name) in [
        ("boot", "vm.boot"),
        ("pause", "vm.pause"),
        ("resume", "vm.resume"),
        ("reboot", "vm.reboot"),
        ("power-button", "vm.power-button"),
        ("stop", "vm.shutdown"),
        ("delete", "vm.delete"),
        ("shutdown", "vmm.shutdown"),
        ("add-disk a.img,id=d", "vm.add-disk"),
        ("resize --cpus 2 --memory 1G", "vm.resize"),
        ("counters", "vm.counters"),
    ] {
        let arguments: Vec<_> = word.split(' ').collect();
        let error = ctl(&arguments, &machine(), Command::refuse_unsupported).unwrap_err();
        let expected = format!("{name}: {}", ApiError::unsupported(name));
        assert_eq!((error.to_string(), error.exit_code()), (expected, 1));
    }
}

#[test]
fn a_machine_is_created_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.json");
    let create = |text: &str, core: fn(Command)| {
        std::fs::write(&file, text).unwrap();
        ctl(&["create", file.to_str().unwrap()], &Published::new(), core)
    };
    let done = create(r#"{"payload":{"kernel":"/k"}}"#, |command| {
        let Command::Create { config, reply } = command else { panic!("{command:?}") };
        assert!(config.payload.is_some());
        reply.send(Ok(()));
    });
    assert_eq!(done.unwrap(), "");
    assert!(matches!(create("{", |_| panic!("nothing is sent")), Err(CtlError::Json { .. })));
}

#[test]
fn nobody_at_the_socket_has_an_exit_code_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let error = ctl_at(&folder.path().join("s"), &["ping"]).unwrap_err();
    assert_eq!(error.exit_code(), exit_code::NO_ANSWER);
    let refused = ctl(&["info"], &Published::new(), |_| panic!("the core is not asked")).unwrap_err();
    assert_eq!(refused.exit_code(), 1);
    assert!(refused.to_string().contains("there is no virtual machine"), "{refused}");
}
