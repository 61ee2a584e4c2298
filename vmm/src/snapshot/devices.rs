//! Devices that came while the guest ran, as a snapshot names them, and what cannot be in one.

use api::config::{DeviceConfig, DeviceKind, NetConfig, NetSource, VmConfig};
use api::dialect::machine::{Added as SavedDevice, AddedFunction as SavedFunction, Addition, Machine};
use pci::topology::Name;

use super::SnapshotError;
use crate::changes::{Added, AddedFunction, Changes};
use crate::effects::BarAccess;
use crate::spec::{self, Endpoint, Host, Spec, Virtio};

/// Refuses machines with a device whose state is not in this process.
pub fn check(config: &VmConfig, spec: &Spec, changes: &Changes) -> Result<(), SnapshotError> {
    let planned = spec.endpoints.iter().filter(|(name, _)| !changes.has_left(name));
    let added = changes.added().iter().flat_map(|added| &added.functions).map(|function| (&function.name, &function.endpoint));
    for (name, endpoint) in planned.chain(added) {
        let why = match endpoint {
            Endpoint::Vfio { .. } => "it is a device of the host",
            Endpoint::Virtio(device) if device.server().is_some() => "another process serves it",
            Endpoint::Virtio(Virtio::Net(NetConfig { source: NetSource::Descriptors, .. })) => {
                "its tap came as a descriptor and has no name"
            }
            _ => continue,
        };
        return Err(SnapshotError::Device { name: name.to_string(), why });
    }
    let of_host = |device: &&DeviceConfig| !matches!(device.kind, DeviceKind::Stub(_));
    match config.devices.iter().find(of_host) {
        Some(device) => Err(SnapshotError::Device { name: device.to_string(), why: "it is a device of the host" }),
        None => Ok(()),
    }
}

/// The machine as config.json has it. `shown` is its configuration of the moment, with what came.
pub fn describe(config: &VmConfig, shown: &VmConfig, changes: &Changes) -> Result<Machine, SnapshotError> {
    let added = changes.added().iter().map(|added| {
        let functions = added.functions.iter().map(|function| {
            let name = function.name.to_string();
            let kind = match &function.endpoint {
                Endpoint::Virtio(Virtio::Disk(disk)) => Addition::Disk(Box::new(disk.clone())),
                Endpoint::Virtio(Virtio::Net(net)) => Addition::Net(Box::new(net.clone())),
                Endpoint::Virtio(Virtio::Vsock(vsock)) => Addition::Vsock(vsock.clone()),
                _ => {
                    let device = shown.devices.iter().find(|device| device.id.as_deref() == Some(name.as_str()));
                    let unknown =
                        || SnapshotError::Device { name: name.clone(), why: "it was added as one of several functions" };
                    Addition::Device(Box::new(device.cloned().ok_or_else(unknown)?))
                }
            };
            Ok(SavedFunction { name, number: function.number, kind })
        });
        let functions = functions.collect::<Result<_, SnapshotError>>()?;
        Ok(SavedDevice { port: added.port.to_string(), number: added.number, functions })
    });
    let added = added.collect::<Result<_, SnapshotError>>()?;
    Ok(Machine { config: config.clone(), added, left: changes.left().map(ToString::to_string).collect() })
}

/// How the machine differs from one that is started, and the configuration with what came.
pub fn changes(machine: &Machine) -> Result<(Changes, VmConfig), SnapshotError> {
    let (mut changes, mut shown) = (Changes::default(), machine.config.clone());
    for added in &machine.added {
        let functions = added.functions.iter().map(|function| {
            let name = Name::from(function.name.as_str());
            let (endpoint, spec, access) = match &function.kind {
                Addition::Device(device) => {
                    shown.devices.push((**device).clone());
                    let (endpoint, spec) = stub(&machine.config, device, &function.name)?;
                    (endpoint, spec, BarAccess::of(device))
                }
                Addition::Disk(disk) => virtio(Virtio::Disk((**disk).clone()), &name, &mut shown),
                Addition::Net(net) => virtio(Virtio::Net((**net).clone()), &name, &mut shown),
                Addition::Vsock(vsock) => virtio(Virtio::Vsock(vsock.clone()), &name, &mut shown),
            };
            Ok(AddedFunction { name, endpoint, spec, access, number: function.number })
        });
        let functions = functions.collect::<Result<_, SnapshotError>>()?;
        changes.add(Added { functions, port: Name::from(added.port.as_str()), number: added.number });
    }
    changes.remove(&machine.left.iter().map(|name| Name::from(name.as_str())).collect::<Vec<_>>());
    Ok((changes, shown))
}

fn virtio(device: Virtio, name: &Name, shown: &mut VmConfig) -> (Endpoint, pci::topology::EndpointSpec, BarAccess) {
    crate::additions::note(shown, device.clone(), name);
    let spec = device.endpoint();
    (Endpoint::Virtio(device), spec, BarAccess::default())
}

fn stub(config: &VmConfig, device: &DeviceConfig, name: &str) -> Result<(Endpoint, pci::topology::EndpointSpec), SnapshotError> {
    let device = DeviceConfig { id: Some(name.to_owned()), on: None, ..device.clone() };
    let alone = VmConfig { devices: vec![device], memory: config.memory.clone(), ..VmConfig::default() };
    let failed = |source| SnapshotError::Added { name: name.to_owned(), source: Box::new(source) };
    spec::single(&alone, &Host::default(), None).map_err(failed)
}
