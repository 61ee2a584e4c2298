//! Devices that came while the guest ran, as a snapshot names them, and what cannot be in one.

use std::collections::BTreeSet;
use std::error::Error;

use api::config::{DeviceConfig, DeviceKind, MacAddress, NetConfig, NetSource, VmConfig};
use api::dialect::machine::{Added as SavedDevice, AddedFunction as SavedFunction, Addition, Machine};
use pci::topology::{EndpointSpec, Name};

use super::SnapshotError;
use crate::additions;
use crate::changes::{Added, AddedFunction, Changes};
use crate::effects::BarAccess;
use crate::plan::MachinePlan;
use crate::spec::{self, Endpoint, Host, Spec, SpecError, Virtio};

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
    let mut came = changes.added().iter().flat_map(|added| &added.functions);
    let why = if spec.stand_ins.is_empty() && came.all(|function| function.stands_for.is_none()) {
        "it is a device of the host"
    } else {
        "it stands for a device of the host that --host names"
    };
    let of_host = |device: &&DeviceConfig| !matches!(device.kind, DeviceKind::Stub(_));
    match config.devices.iter().find(of_host) {
        Some(device) => Err(SnapshotError::Device { name: device.to_string(), why }),
        None => Ok(()),
    }
}

/// The machine as config.json has it. `shown` is its configuration of the moment, with what came; `address` tells that of an
/// interface, which the guest keeps if nobody chose one.
pub fn describe(
    config: &VmConfig,
    shown: &VmConfig,
    changes: &Changes,
    address: impl Fn(&Name) -> Option<MacAddress>,
) -> Result<Machine, SnapshotError> {
    let addressed = |net: &NetConfig, name: &Name| NetConfig { mac: net.mac.or_else(|| address(name)), ..net.clone() };
    let added = changes.added().iter().map(|added| {
        let functions = added.functions.iter().map(|function| {
            let name = function.name.to_string();
            let kind = match &function.endpoint {
                Endpoint::Virtio(Virtio::Disk(disk)) => Addition::Disk(Box::new(disk.clone())),
                Endpoint::Virtio(Virtio::Net(net)) => Addition::Net(Box::new(addressed(net, &function.name))),
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
    let nets = spec::devices(config).into_iter().filter_map(|(name, device)| match device {
        Virtio::Net(net) => Some(addressed(&net, &name)),
        _ => None,
    });
    let config = VmConfig { nets: nets.collect(), ..config.clone() };
    Ok(Machine { config, added, left: changes.left().map(ToString::to_string).collect() })
}

/// How the machine differs from one that is started, and the configuration with what came.
pub fn changes(machine: &Machine) -> Result<(Changes, VmConfig), SnapshotError> {
    let (mut changes, mut shown) = (Changes::default(), machine.config.clone());
    // First: one that came may have the name of one that left.
    changes.remove(&machine.left.iter().map(|name| Name::from(name.as_str())).collect::<Vec<_>>());
    if !machine.left.is_empty() {
        additions::name_all(&mut shown, None);
    }
    additions::forget(&mut shown, |id| machine.left.iter().all(|left| left != id));
    for added in &machine.added {
        let functions = added.functions.iter().map(|function| {
            let name = Name::from(function.name.as_str());
            name.check().map_err(|source| unusable(&name, source))?;
            if function.number > 7 {
                return Err(SnapshotError::Function { name: name.to_string(), number: function.number });
            }
            let (endpoint, spec, access) = match &function.kind {
                Addition::Device(device) => {
                    if !matches!(device.kind, DeviceKind::Stub(_)) {
                        return Err(SnapshotError::Device { name: name.to_string(), why: "it is a device of the host" });
                    }
                    shown.devices.push((**device).clone());
                    let (endpoint, spec) = stub(&machine.config, device, &function.name)?;
                    (endpoint, spec, BarAccess::of(device))
                }
                Addition::Disk(disk) => put(Virtio::Disk((**disk).clone())),
                Addition::Net(net) => put(Virtio::Net((**net).clone())),
                Addition::Vsock(vsock) => put(Virtio::Vsock(vsock.clone())),
            };
            if let Endpoint::Virtio(device) = &endpoint {
                let there = virtio(&machine.config, &changes);
                let fits = spec::beside::reaches(&machine.config, device)
                    .and_then(|()| spec::beside::fits(there.iter().map(|(name, there)| (name, there)), device));
                fits.map_err(|source| unusable(&name, source))?;
                additions::note(&mut shown, device.clone(), &name);
            }
            Ok(AddedFunction { name, endpoint, spec, access, number: function.number, stands_for: None })
        });
        let functions = functions.collect::<Result<_, SnapshotError>>()?;
        changes.add(Added { functions, port: Name::from(added.port.as_str()), number: added.number });
    }
    Ok((changes, shown))
}

/// The virtio devices of a machine that was started as `config`, with names.
pub fn virtio(config: &VmConfig, changes: &Changes) -> Vec<(Name, Virtio)> {
    let planned = spec::devices(config).into_iter().filter(|(name, _)| !changes.has_left(name));
    let functions = changes.added().iter().flat_map(|added| &added.functions);
    let added = functions.filter_map(|function| match &function.endpoint {
        Endpoint::Virtio(device) => Some((function.name.clone(), device.clone())),
        _ => None,
    });
    planned.chain(added).collect()
}

/// Whether all that came have names that nothing else has.
pub fn check_names(plan: &MachinePlan, changes: &Changes) -> Result<(), SnapshotError> {
    let mut before = BTreeSet::new();
    for function in changes.added().iter().flat_map(|added| &added.functions) {
        let name = &function.name;
        let planned = plan.pci.by_name(&name.0).is_some() && !changes.has_left(name);
        if planned || !before.insert(name) {
            return Err(unusable(name, SpecError::SameName { name: name.to_string() }));
        }
    }
    Ok(())
}

fn unusable(name: &Name, source: impl Error + Send + Sync + 'static) -> SnapshotError {
    SnapshotError::Added { name: name.to_string(), source: Box::new(source) }
}

fn put(device: Virtio) -> (Endpoint, EndpointSpec, BarAccess) {
    let spec = device.endpoint();
    (Endpoint::Virtio(device), spec, BarAccess::default())
}

fn stub(config: &VmConfig, device: &DeviceConfig, name: &str) -> Result<(Endpoint, EndpointSpec), SnapshotError> {
    let device = DeviceConfig { id: Some(name.to_owned()), on: None, ..device.clone() };
    let alone = VmConfig { devices: vec![device], memory: config.memory.clone(), ..VmConfig::default() };
    spec::single(&alone, &Host::default(), None).map_err(|source| unusable(&Name::from(name), source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{self, Limits};

    fn plan_of(config: &VmConfig) -> (Spec, MachinePlan) {
        let spec = spec::spec(config, &Host::default()).unwrap();
        let limits = Limits { ram: 64 << 20, growth: 0, address_bits: 40, amd: false, firmware: 0 };
        let plan = plan::plan(&spec.topology, &limits).unwrap();
        (spec, plan)
    }

    fn config() -> VmConfig {
        VmConfig {
            pcie: "root-ports=3".parse().unwrap(),
            disks: vec!["/a.img,id=a".parse().unwrap()],
            nets: vec!["tap0".parse().unwrap()],
            ..VmConfig::default()
        }
    }

    fn with(kinds: Vec<(&str, Addition)>, left: &[&str]) -> Machine {
        let added = kinds.into_iter().enumerate().map(|(index, (name, kind))| SavedDevice {
            port: format!("port{index}"),
            number: None,
            functions: vec![SavedFunction { name: name.to_owned(), number: 0, kind }],
        });
        Machine { config: config(), added: added.collect(), left: left.iter().map(ToString::to_string).collect() }
    }

    fn disk(path: &str) -> Addition {
        Addition::Disk(Box::new(path.parse().unwrap()))
    }

    #[test]
    fn an_interface_keeps_the_address_that_was_made_up_for_it() {
        let (made_up, chosen): (MacAddress, MacAddress) =
            ("02:00:00:00:00:07".parse().unwrap(), "02:00:00:00:00:08".parse().unwrap());
        let net = |text: &str| Addition::Net(Box::new(text.parse().unwrap()));
        let machine = with(vec![("late", net("tap1")), ("own", net("tap2,mac=02:00:00:00:00:08"))], &[]);
        let (changes, shown) = changes(&machine).unwrap();
        let address = |name: &Name| matches!(name.0.as_str(), "net0" | "late" | "own").then_some(made_up);
        let described = describe(&machine.config, &shown, &changes, address).unwrap();
        assert_eq!(described.config.nets[0].mac, Some(made_up));
        let of = |index: usize| match &described.added[index].functions[0].kind {
            Addition::Net(net) => net.mac,
            other => panic!("{other:?}"),
        };
        assert_eq!((of(0), of(1)), (Some(made_up), Some(chosen)));
    }

    #[test]
    fn what_came_under_the_name_of_what_left_is_there_once() {
        let machine = with(vec![("a", disk("/b.img"))], &["a"]);
        let (changes, _) = changes(&machine).unwrap();
        assert!(changes.has_left(&Name::from("a")));
        assert_eq!(changes.added().len(), 1);
        let (_, plan) = plan_of(&machine.config);
        check_names(&plan, &changes).unwrap();
        let there = virtio(&machine.config, &changes);
        let paths: Vec<_> = there
            .iter()
            .filter_map(|(name, device)| match device {
                Virtio::Disk(disk) => Some(format!("{name} {disk}")),
                _ => None,
            })
            .collect();
        assert_eq!(paths.len(), 1, "{paths:?}");
        assert!(paths[0].contains("/b.img"), "{paths:?}");
        let in_use = additions::holding(&machine.config, there.iter().map(|(name, device)| (name, device)));
        assert_eq!((in_use.disks.len(), in_use.nets.len()), (1, 1));
    }

    #[test]
    fn what_an_edited_file_adds_is_checked_as_what_a_client_adds() {
        let vsock = |cid: u32| Addition::Vsock(format!("cid={cid},socket=/s{cid}").parse().unwrap());
        let net = || Addition::Net(Box::new("tap1,mac=02:00:00:00:00:01".parse().unwrap()));
        let host = Addition::Device(Box::new("0000:01:00.0".parse().unwrap()));
        for (kinds, part) in [
            (vec![("../x", disk("/b.img"))], "../x"),
            (vec![("v", vsock(3)), ("w", vsock(4))], "w"),
            (vec![("m", net()), ("n", net())], "n"),
            (vec![("s", Addition::Disk(Box::new("vhost-user=/s".parse().unwrap())))], "s"),
            (vec![("h", host)], "h"),
        ] {
            let error = changes(&with(kinds, &[])).unwrap_err().to_string();
            assert!(error.contains(part), "{part}: {error}");
        }
        let (_, plan) = plan_of(&config());
        for names in [vec!["b", "b"], vec!["a"], vec!["port2"]] {
            let kinds = names.iter().map(|name| (*name, disk("/b.img"))).collect();
            let (changes, _) = changes(&with(kinds, &[])).unwrap();
            assert!(matches!(check_names(&plan, &changes), Err(SnapshotError::Added { .. })), "{names:?}");
        }
    }

    #[test]
    fn a_device_of_a_recorded_host_is_refused_as_the_stand_in_that_it_is() {
        let config = VmConfig { devices: vec!["0000:01:00.0,id=gpu".parse().unwrap()], ..VmConfig::default() };
        let (of_host, _) = plan_of(&self::config());
        let at = "0000:01:00.0".parse().unwrap();
        let stands = Spec { stand_ins: std::iter::once((Name::from("gpu"), at)).collect(), ..of_host.clone() };
        for (spec, why) in
            [(of_host, "it is a device of the host"), (stands, "it stands for a device of the host that --host names")]
        {
            let error = check(&config, &spec, &Changes::default()).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("remove it first"), "{error}");
        }
    }
}
