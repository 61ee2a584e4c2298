//! What a machine has at this moment, as the API shows it: devices and ports with the addresses that the guest has given them.

use api::info::{BarInfo, DeviceClass, DeviceInfo, FunctionInfo, Listing, PciAddress, PortInfo, RootComplexInfo};
use devices::virtio::Kind;
use pci::address::{Bdf, Devfn, Sbdf};
use pci::ext_caps::Acs;
use pci::function::FunctionId;
use pci::hierarchy::{self, EndpointInfo};
use pci::topology::{Name, Parent, PlannedKind, PortKind, Window};

use crate::changes::Added;
use crate::host::registers::Registers;
use crate::hotplug::HotPlug;
use crate::machine::Machine;
use crate::run::Blueprint;
use crate::spec::{Endpoint, Virtio};

/// Devices, ports and everything of the hierarchy.
#[must_use]
pub fn listing(machine: &Machine, hotplug: &HotPlug) -> Listing {
    let (ports, root_complexes, functions) = machine.pci().change(|tree| {
        let bytes = |window: Option<Window>| window.map_or(0, Window::len);
        let ports = tree.hierarchy.ports().map(|port| PortInfo {
            name: port.name.to_string(),
            kind: port.kind.noun().replace(' ', "-"),
            bdf: address(tree.hierarchy.address(port.id).unwrap_or_default()),
            hot_plug: port.removal.is_some() || tree.hierarchy.bus(Parent::Port(port.id)).is_some(),
            devices: port.occupants.iter().map(|(_, name)| name.to_string()).collect(),
            memory: bytes(port.windows.memory),
            prefetchable: bytes(port.windows.prefetchable),
            access_control: port.access_control.map(|control| {
                let enabled = Acs::NAMES.iter().filter(|(bit, _)| control & bit != 0);
                enabled.map(|(_, name)| (*name).to_owned()).collect()
            }),
        });
        let ports: Vec<PortInfo> = ports.collect();
        let roots = tree.hierarchy.root_complexes().map(|root| RootComplexInfo {
            name: root.name.to_string(),
            segment: root.segment,
            bus: root.bus,
            memory_node: root.node,
        });
        let roots: Vec<RootComplexInfo> = roots.collect();
        let functions = tree.hierarchy.functions();
        let functions = functions.iter().map(|what| function(what, &tree.hierarchy.config_bytes(what.id, CONVENTIONAL), hotplug));
        let functions: Vec<FunctionInfo> = functions.collect();
        (ports, roots, functions)
    });
    Listing { devices: devices(machine, hotplug), ports, root_complexes, functions }
}

/// What the capabilities that are shown lie in.
const CONVENTIONAL: u16 = 256;

fn function(what: &hierarchy::FunctionInfo, config: &[u8], hotplug: &HotPlug) -> FunctionInfo {
    let registers = Registers(config);
    let word = |at| registers.word(at).unwrap_or(0);
    let link = registers.express().and_then(|express| express.link());
    let subsystem = match what.port {
        Some(_) => registers.subsystem_of_bridge().unwrap_or((0, 0)),
        None => (word(0x2C), word(0x2E)),
    };
    let endpoint = hotplug.endpoint(&what.name);
    FunctionInfo {
        name: what.name.to_string(),
        on: what.on.to_string(),
        bdf: address(what.at),
        kind: what.port.map_or_else(|| "endpoint".to_owned(), kind),
        ids: format!("{:04x}:{:04x}", word(0), word(2)),
        subsystem: format!("{:04x}:{:04x}", subsystem.0, subsystem.1),
        class: format!("{:06x}", registers.class().unwrap_or(0)),
        max_link: link.map(|link| link.max.to_string()),
        link: link.map(|link| link.current.to_string()),
        clique: endpoint.and_then(clique),
        host: endpoint.and_then(host),
    }
}

fn kind(port: PortKind) -> String {
    match port {
        PortKind::PciBridge => "pcie-pci-bridge".to_owned(),
        _ => port.noun().replace(' ', "-"),
    }
}

fn clique(what: &Endpoint) -> Option<u8> {
    match what {
        Endpoint::Vfio { clique, .. } => clique.map(|clique| clique.id()),
        Endpoint::Stub(stub) => stub.clique.map(|clique| clique.id()),
        _ => None,
    }
}

fn host(what: &Endpoint) -> Option<String> {
    if let Endpoint::Vfio { at, .. } = what { Some(at.to_string()) } else { None }
}

/// All devices, by address.
#[must_use]
pub fn devices(machine: &Machine, hotplug: &HotPlug) -> Vec<DeviceInfo> {
    let endpoints: Vec<(EndpointInfo, Vec<BarInfo>)> = machine.pci().change(|tree| {
        let mapper = &tree.mapper;
        let with_bars = |endpoint: EndpointInfo| {
            let bars = mapper.bars(endpoint.id);
            (endpoint, bars)
        };
        tree.hierarchy.endpoints().map(with_bars).collect()
    });
    let info =
        |(endpoint, bars): (EndpointInfo, Vec<BarInfo>)| DeviceInfo { bars, ..info(&endpoint, hotplug.endpoint(&endpoint.name)) };
    let mut devices: Vec<DeviceInfo> = endpoints.into_iter().map(info).collect();
    devices.sort_by_key(|device| device.bdf);
    devices
}

/// All devices of a machine that does not exist yet, where the plan has them.
#[must_use]
pub fn planned(blueprint: &Blueprint) -> Vec<DeviceInfo> {
    let functions = &blueprint.plan.pci.functions;
    let port = |id: FunctionId| functions.iter().find(|function| function.id == id);
    let roots = &blueprint.plan.pci.root_complexes;
    let devices = functions.iter().filter(|function| matches!(function.kind, PlannedKind::Endpoint(_))).map(|function| {
        let (mut path, mut next) = (Vec::new(), Some(function));
        while let Some(function) = next {
            path.insert(0, function.at.bdf.devfn());
            next = if let Parent::Port(id) = function.on { port(id) } else { None };
        }
        let on = match function.on {
            Parent::Port(id) => port(id).map(|port| port.name.clone()),
            Parent::RootComplex(index) => roots.get(index).map(|root| root.name.clone()),
        };
        let (id, name, at) = (function.id, function.name.clone(), function.at);
        let what = blueprint.spec.endpoints.get(&name);
        info(&EndpointInfo { id, name, at, path, on: on.unwrap_or_else(|| Name::from("")) }, what)
    });
    let mut devices: Vec<DeviceInfo> = devices.collect();
    devices.sort_by_key(|device| device.bdf);
    devices
}

/// The device `name`, if the machine has it.
#[must_use]
pub fn device(machine: &Machine, hotplug: &HotPlug, name: &Name) -> Option<DeviceInfo> {
    devices(machine, hotplug).into_iter().find(|device| device.id == name.0)
}

/// The first function of a device that has its place and is not there yet.
#[must_use]
pub fn promised(machine: &Machine, added: &Added) -> Option<DeviceInfo> {
    let function = added.functions.first()?;
    let endpoint = machine.pci().change(|tree| {
        let devfn = Devfn::new(added.number.unwrap_or(0), function.number);
        let root = tree.hierarchy.root_complexes().find(|root| root.name == added.port);
        let port = || tree.hierarchy.ports().find(|port| port.name == added.port);
        let (segment, bus, mut path) = match root {
            Some(root) => (root.segment, root.bus, Vec::new()),
            None => port().map(|port| (port.below.segment, port.below.bdf.bus(), tree.hierarchy.path(port.id)))?,
        };
        path.push(devfn);
        let at = Sbdf { segment, bdf: Bdf::new(bus, devfn) };
        // It has no id yet, and none is told.
        Some(EndpointInfo { id: FunctionId(0), name: function.name.clone(), at, path, on: added.port.clone() })
    })?;
    Some(info(&endpoint, Some(&function.endpoint)))
}

fn info(endpoint: &EndpointInfo, what: Option<&Endpoint>) -> DeviceInfo {
    let path = endpoint.path.iter().map(|devfn| match devfn.function() {
        0 => format!("{:02x}", devfn.device()),
        function => format!("{:02x}.{function}", devfn.device()),
    });
    DeviceInfo {
        id: endpoint.name.to_string(),
        kind: match what {
            Some(Endpoint::Vfio { .. }) => DeviceClass::Vfio,
            Some(Endpoint::Virtio(device)) => class(device),
            Some(Endpoint::Watchdog) => DeviceClass::Watchdog,
            Some(Endpoint::Stub(_)) | None => DeviceClass::Stub,
        },
        bdf: address(endpoint.at),
        path: path.collect::<Vec<_>>().join("/"),
        port: Some(endpoint.on.to_string()),
        host: what.and_then(host),
        clique: what.and_then(clique),
        bars: Vec::new(),
        label: match what {
            Some(Endpoint::Stub(stub)) => format!("{:04x}:{:04x}", stub.ids.vendor, stub.ids.device),
            Some(Endpoint::Virtio(device)) => device.label(),
            _ => String::new(),
        },
    }
}

/// What a virtio device is.
#[must_use]
pub const fn class(device: &Virtio) -> DeviceClass {
    match device.kind() {
        Kind::Block => DeviceClass::Disk,
        Kind::Net => DeviceClass::Net,
        Kind::FileSystem => DeviceClass::Fs,
        Kind::Socket => DeviceClass::Vsock,
        Kind::Entropy => DeviceClass::Rng,
        Kind::Balloon => DeviceClass::Balloon,
        Kind::Memory => DeviceClass::Memory,
        Kind::Console => DeviceClass::Console,
    }
}

fn address(at: Sbdf) -> PciAddress {
    let devfn = at.bdf.devfn();
    PciAddress { segment: at.segment, bus: at.bdf.bus(), device: devfn.device(), function: devfn.function() }
}
