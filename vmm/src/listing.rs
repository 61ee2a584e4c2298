//! What a machine has at this moment, as the API shows it: devices and ports with the addresses that the guest has given them.

use api::info::{DeviceClass, DeviceInfo, Listing, PciAddress, PortInfo};
use devices::virtio::Kind;
use pci::address::Sbdf;
use pci::hierarchy::EndpointInfo;
use pci::topology::{Name, Window};

use crate::hotplug::HotPlug;
use crate::machine::Machine;
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
    let mut devices: Vec<DeviceInfo> = endpoints.iter().map(|endpoint| info(endpoint, hotplug)).collect();
    devices.sort_by_key(|device| device.bdf);
    devices
}

/// The device `name`, if the machine has it.
#[must_use]
pub fn device(machine: &Machine, hotplug: &HotPlug, name: &Name) -> Option<DeviceInfo> {
    devices(machine, hotplug).into_iter().find(|device| device.id == name.0)
}

fn info(endpoint: &EndpointInfo, hotplug: &HotPlug) -> DeviceInfo {
    let what = hotplug.endpoint(&endpoint.name);
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
