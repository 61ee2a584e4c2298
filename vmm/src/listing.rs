//! What a machine has at this moment, as the API shows it: devices and ports with the addresses that the guest has given them.

use api::info::{DeviceClass, DeviceInfo, Listing, PciAddress, PortInfo};
use devices::virtio::Kind;
use pci::address::Sbdf;
use pci::function::FunctionId;
use pci::hierarchy::EndpointInfo;
use pci::topology::{Name, Parent, PlannedKind, Window};

use crate::hotplug::HotPlug;
use crate::machine::Machine;
use crate::run::Blueprint;
use crate::spec::{Endpoint, Virtio};

/// Devices and ports.
#[must_use]
pub fn listing(machine: &Machine, hotplug: &HotPlug) -> Listing {
    let ports = machine.pci().change(|tree| {
        let bytes = |window: Option<Window>| window.map_or(0, Window::len);
        tree.hierarchy
            .ports()
            .map(|port| PortInfo {
                name: port.name.to_string(),
                kind: port.kind.noun().replace(' ', "-"),
                bdf: address(tree.hierarchy.address(port.id).unwrap_or_default()),
                hot_plug: port.removal.is_some(),
                devices: port.occupants.iter().map(|(_, name)| name.to_string()).collect(),
                memory: bytes(port.windows.memory),
                prefetchable: bytes(port.windows.prefetchable),
            })
            .collect()
    });
    Listing { devices: devices(machine, hotplug), ports }
}

/// All devices, by address.
#[must_use]
pub fn devices(machine: &Machine, hotplug: &HotPlug) -> Vec<DeviceInfo> {
    let endpoints: Vec<EndpointInfo> = machine.pci().change(|tree| tree.hierarchy.endpoints().collect());
    let mut devices: Vec<DeviceInfo> =
        endpoints.iter().map(|endpoint| info(endpoint, hotplug.endpoint(&endpoint.name))).collect();
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
            Some(Endpoint::Stub(_)) | None => DeviceClass::Stub,
        },
        bdf: address(endpoint.at),
        path: path.collect::<Vec<_>>().join("/"),
        port: Some(endpoint.on.to_string()),
        host: match what {
            Some(Endpoint::Vfio { at, .. }) => Some(at.to_string()),
            _ => None,
        },
        clique: match what {
            Some(Endpoint::Vfio { clique, .. }) => clique.map(|clique| clique.id()),
            Some(Endpoint::Stub(stub)) => stub.clique.map(|clique| clique.id()),
            _ => None,
        },
        label: match what {
            Some(Endpoint::Stub(stub)) => format!("{:04x}:{:04x}", stub.ids.vendor, stub.ids.device),
            Some(Endpoint::Virtio(device)) => device.label(),
            _ => String::new(),
        },
    }
}

const fn class(device: &Virtio) -> DeviceClass {
    match device.kind() {
        Kind::Block => DeviceClass::Disk,
        Kind::Net => DeviceClass::Net,
        Kind::FileSystem => DeviceClass::Fs,
        Kind::Socket => DeviceClass::Vsock,
        Kind::Entropy => DeviceClass::Rng,
        Kind::Balloon => DeviceClass::Balloon,
        Kind::Console => DeviceClass::Console,
    }
}

fn address(at: Sbdf) -> PciAddress {
    let devfn = at.bdf.devfn();
    PciAddress { segment: at.segment, bus: at.bdf.bus(), device: devfn.device(), function: devfn.function() }
}
