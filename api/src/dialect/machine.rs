//! A whole machine as a file: the body of vm.create with what that cannot say under the key `banyan_machine`, devices that came
//! and went since the start among it.

use std::str::FromStr;

use serde::Deserialize;
use serde_json::{Value, json};

use super::json::{Notes, bad, read};
use super::{add_disk, add_net, add_vsock, create, disk_body, info, net_body, vsock_body};
use crate::config::{
    CpuConfig, DeviceConfig, DiskConfig, NetConfig, Payload, PcieConfig, PortConfig, RootComplexConfig, TopologyConfig, VmConfig,
    VsockConfig,
};
use crate::error::ApiError;

const WHAT: &str = "config.json";
const KEY: &str = "banyan_machine";

/// A machine and how it differs from the one that was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// As started.
    pub config: VmConfig,
    /// Devices that came, in this order.
    pub added: Vec<Added>,
    /// Names of devices that left.
    pub left: Vec<String>,
}

/// A device that came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Added {
    /// Name of its port or root complex.
    pub port: String,
    /// Its device number, if it is on a bus with several.
    pub number: Option<u8>,
    /// Its functions.
    pub functions: Vec<AddedFunction>,
}

/// A function of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddedFunction {
    /// Its name.
    pub name: String,
    /// Its number.
    pub number: u8,
    /// What it is.
    pub kind: Addition,
}

/// What can come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Addition {
    /// A stub.
    Device(Box<DeviceConfig>),
    /// A disk.
    Disk(Box<DiskConfig>),
    /// A network interface.
    Net(Box<NetConfig>),
    /// The socket device.
    Vsock(VsockConfig),
}

#[derive(Deserialize)]
struct Body {
    cpus: String,
    devices: Vec<String>,
    debug_exit: bool,
    load_address: Option<u64>,
    max_physical_bits: Option<u8>,
    topology: Option<TopologyBody>,
    added: Vec<AddedBody>,
    left: Vec<String>,
}

#[derive(Deserialize)]
struct TopologyBody {
    root_complexes: Vec<RootComplexConfig>,
    ports: Vec<PortConfig>,
    devices: Vec<String>,
}

#[derive(Deserialize)]
struct AddedBody {
    port: String,
    number: Option<u8>,
    functions: Vec<FunctionBody>,
}

#[derive(Deserialize)]
struct FunctionBody {
    name: String,
    number: u8,
    device: Option<String>,
    disk: Option<Value>,
    net: Option<Value>,
    vsock: Option<Value>,
}

impl Machine {
    /// As a file.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let texts = |devices: &[DeviceConfig]| devices.iter().map(ToString::to_string).collect::<Vec<_>>();
        let config = &self.config;
        let load_address = match &config.payload {
            Some(Payload::Kernel(kernel)) => kernel.load_address,
            _ => None,
        };
        let topology = config.topology.as_ref().map(|topology| {
            json!({
                "root_complexes": topology.root_complexes.iter().map(root_complex).collect::<Vec<_>>(),
                "ports": topology.ports.iter().map(port).collect::<Vec<_>>(),
                "devices": texts(&topology.devices),
            })
        });
        let own = json!({
            "cpus": config.cpus.to_string(),
            "devices": texts(&config.devices),
            "debug_exit": config.debug_exit,
            "load_address": load_address,
            "max_physical_bits": config.max_physical_bits,
            "topology": topology,
            "added": self.added.iter().map(added).collect::<Vec<_>>(),
            "left": self.left,
        });
        let mut value = info::config(config);
        if let Some(map) = value.as_object_mut() {
            // Here with all kinds of devices, and with no address that was not asked for.
            map.remove("devices");
            map.insert("net".to_owned(), config.nets.iter().map(net_body).collect());
            map.insert(KEY.to_owned(), own);
        }
        value
    }

    /// Reads a file. Keys of vm.create may have been edited since it was written; what the file does not say is taken from
    /// `base`.
    pub fn from_json(bytes: &[u8], base: &VmConfig, notes: &Notes) -> Result<Self, ApiError> {
        let mut value: Value = read(WHAT, bytes, notes)?;
        let own = value.as_object_mut().and_then(|map| map.remove(KEY));
        let own = own.ok_or_else(|| bad(WHAT, &format!("key `{KEY}` is missing: it is not from a snapshot of Banyan")))?;
        let own: Body = read(WHAT, &super::json::ascii(&own), notes)?;
        let mut base = base.clone();
        if value.get("banyan").is_some_and(Value::is_string) {
            // It leaves out what is as by default, not what is as in `base`.
            base.pcie = PcieConfig::default();
        }
        let mut config = create(&super::json::ascii(&value), &base, notes)?;
        let saved = text::<CpuConfig>(&own.cpus)?;
        let counts = |cpus: &CpuConfig| (cpus.count, cpus.max.unwrap_or(cpus.count), cpus.topology);
        let bits = |bits: Option<u8>| bits.unwrap_or(info::PHYSICAL_BITS);
        if counts(&saved) != counts(&config.cpus) || bits(own.max_physical_bits) != bits(config.max_physical_bits) {
            let why = format!(
                "key `cpus`: it differs from that of the machine that was saved, which has {saved} and addresses of {} bits; it cannot be \
                 edited",
                bits(own.max_physical_bits)
            );
            return Err(bad(WHAT, &why));
        }
        config.cpus.kvm_signature = saved.kvm_signature;
        config.devices = own.devices.iter().map(|device| text(device)).collect::<Result<_, _>>()?;
        config.debug_exit = own.debug_exit;
        config.max_physical_bits = own.max_physical_bits;
        if let Some(Payload::Kernel(kernel)) = &mut config.payload {
            kernel.load_address = own.load_address;
        }
        if let Some(topology) = own.topology {
            let devices = topology.devices.iter().map(|device| text(device)).collect::<Result<_, _>>()?;
            config.topology = Some(TopologyConfig { root_complexes: topology.root_complexes, ports: topology.ports, devices });
        }
        let added = own.added.into_iter().map(|added| added.read(notes)).collect::<Result<_, _>>()?;
        Ok(Self { config, added, left: own.left })
    }
}

fn text<T: FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, ApiError> {
    text.parse().map_err(|error: T::Err| bad(WHAT, &error.to_string()))
}

impl AddedBody {
    fn read(self, notes: &Notes) -> Result<Added, ApiError> {
        let functions = self.functions.into_iter().map(|function| {
            let FunctionBody { name, number, device, disk, net, vsock } = function;
            let bytes = |value: Value| super::json::ascii(&value);
            let kind = match (device, disk, net, vsock) {
                (Some(device), None, None, None) => text(&device).map(|device| Addition::Device(Box::new(device))),
                (None, Some(disk), None, None) => add_disk(&bytes(disk), notes).map(|disk| Addition::Disk(Box::new(disk))),
                (None, None, Some(net), None) => add_net(&bytes(net), 0, notes).map(|net| Addition::Net(Box::new(net))),
                (None, None, None, Some(vsock)) => add_vsock(&bytes(vsock), notes).map(Addition::Vsock),
                _ => Err(bad(WHAT, "it is not one of device, disk, net and vsock")),
            };
            let kind = kind.map_err(|error| error.within(format!("device {name}")))?;
            Ok(AddedFunction { name, number, kind })
        });
        Ok(Added { port: self.port, number: self.number, functions: functions.collect::<Result<_, _>>()? })
    }
}

fn added(added: &Added) -> Value {
    let functions = added.functions.iter().map(|function| {
        let (key, value) = match &function.kind {
            Addition::Device(device) => ("device", json!(device.to_string())),
            Addition::Disk(disk) => ("disk", disk_body(disk)),
            Addition::Net(net) => ("net", net_body(net)),
            Addition::Vsock(vsock) => ("vsock", vsock_body(vsock)),
        };
        json!({ "name": function.name, "number": function.number, key: value })
    });
    json!({ "port": added.port, "number": added.number, "functions": functions.collect::<Vec<_>>() })
}

fn root_complex(root: &RootComplexConfig) -> Value {
    json!({ "name": root.name, "segment": root.segment, "node": root.node, "bus": root.bus })
}

fn port(port: &PortConfig) -> Value {
    json!({
        "name": port.name,
        "kind": port.kind.to_string(),
        "on": port.on,
        "device": port.device,
        "function": port.function,
        "ids": port.ids.map(|ids| ids.to_string()),
        "subsystem": port.subsystem.map(|ids| ids.to_string()),
        "link": port.link,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        let topology = "[[root-complex]]\nname = \"rc0\"\nbus = 0\n[[port]]\nname = \"rp0\"\nkind = \"root-port\"\non = \"rc0\"\n\
            ids = \"10b5:8725\"\nlink = \"16GT/s x16\"\n[[device]]\nname = \"a\"\non = \"rp0\"\nkind = \"stub\"\n\
            bars = [\"0:64K:mem32\"]\n";
        let config = VmConfig {
            cpus: "2,max=4,kvm-signature=off".parse().unwrap(),
            memory: "256M,shared=on,hotplug=1G".parse().unwrap(),
            payload: Some(Payload::Kernel(crate::config::KernelConfig {
                path: "/k".into(),
                initramfs: Some("/i".into()),
                cmdline: "console=ttyS0".into(),
                load_address: Some(16 << 20),
            })),
            serial: "file=/tmp/out".parse().unwrap(),
            topology: Some(TopologyConfig::parse("t", topology).unwrap()),
            devices: vec!["stub,id=b,bar0=64K:mem32,msix=4,dma=on".parse().unwrap()],
            disks: vec!["/d,readonly=on,id=root".parse().unwrap()],
            nets: vec!["tap0".parse().unwrap()],
            vsock: Some("cid=3,socket=/v".parse().unwrap()),
            debug_exit: true,
            watchdog: true,
            ..VmConfig::default()
        };
        let function = |name: &str, kind| AddedFunction { name: name.to_owned(), number: 0, kind };
        let on = |port: &str, function| Added { port: port.to_owned(), number: None, functions: vec![function] };
        Machine {
            config,
            added: vec![
                on("port0", function("disk-hot0", Addition::Disk(Box::new("/e".parse().unwrap())))),
                on("port1", function("s", Addition::Device(Box::new("stub,id=s,bar0=4K:mem32".parse().unwrap())))),
            ],
            left: vec!["b".to_owned()],
        }
    }

    #[test]
    fn a_machine_is_read_as_it_was_written() {
        let machine = machine();
        let text = super::super::json::ascii(&machine.to_json());
        for pcie in [PcieConfig::default(), "flat,root-ports=4,root-hot-plug=on,cold-removal=on".parse().unwrap()] {
            let base = VmConfig { pcie, ..VmConfig::default() };
            assert_eq!(Machine::from_json(&text, &base, &Notes::default()).unwrap(), machine, "{pcie}");
        }
    }

    #[test]
    fn keys_of_vm_create_can_be_edited() {
        let mut value = machine().to_json();
        value["memory"]["shared"] = false.into();
        value["vsock"]["socket"] = "/w".into();
        let read = Machine::from_json(&super::super::json::ascii(&value), &VmConfig::default(), &Notes::default()).unwrap();
        assert!(!read.config.memory.shared);
        assert_eq!(read.config.vsock.unwrap().socket.to_str(), Some("/w"));
    }

    #[test]
    fn processors_cannot_be_edited() {
        let original = machine().to_json();
        for (key, value) in [
            ("boot_vcpus", json!(1)),
            ("max_vcpus", json!(5)),
            ("max_phys_bits", json!(40)),
            ("topology", json!({"threads_per_core": 2, "cores_per_die": 2, "dies_per_package": 1, "packages": 1})),
        ] {
            let mut edited = original.clone();
            edited["cpus"][key] = value;
            let text = super::super::json::ascii(&edited);
            let error = Machine::from_json(&text, &VmConfig::default(), &Notes::default()).unwrap_err().to_string();
            assert!(error.contains("key `cpus`: it differs") && error.contains("2,max=4"), "{key}: {error}");
        }
    }

    #[test]
    fn what_is_no_machine_is_refused() {
        let notes = Notes::default();
        for (text, part) in [("", "it is empty"), ("{}", "banyan_machine"), (r#"{"banyan_machine":{}}"#, "missing field")] {
            let error = Machine::from_json(text.as_bytes(), &VmConfig::default(), &notes).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
