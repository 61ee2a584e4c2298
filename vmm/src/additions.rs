//! Devices that a client adds or removes: before the start the same as if vm.create had named them or not, later as vm.info tells
//! of them.

use api::command::Command;
use api::config::{DeviceConfig, DeviceKind, DiskConfig, FsConfig, NetConfig, VmConfig, VsockConfig};
use pci::topology::Name;

use crate::backends::{Backend, BackendError, Backends};
use crate::spec::{self, BesideError, Virtio};

/// The configuration with the device that `command` adds; `None` if it adds none.
#[must_use]
pub fn apply(command: &Command, config: &VmConfig) -> Option<VmConfig> {
    let mut config = config.clone();
    match command {
        Command::AddDevice { functions, .. } => config.devices.extend(functions.iter().cloned()),
        Command::AddDisk { config: disk, .. } => config.disks.push((**disk).clone()),
        Command::AddNet { config: net, .. } => config.nets.push((**net).clone()),
        Command::AddFs { config: fs, .. } => config.filesystems.push((**fs).clone()),
        Command::AddVsock { config: vsock, .. } => config.vsock = Some((**vsock).clone()),
        _ => return None,
    }
    Some(config)
}

/// Whether the device that `command` adds can be beside those of `config`.
pub fn check(command: &Command, config: &VmConfig) -> Result<(), BesideError> {
    let device = match command {
        Command::AddDisk { config, .. } => Virtio::Disk((**config).clone()),
        Command::AddNet { config, .. } => Virtio::Net((**config).clone()),
        Command::AddFs { config, .. } => Virtio::Folder((**config).clone()),
        Command::AddVsock { config, .. } => Virtio::Vsock((**config).clone()),
        _ => return Ok(()),
    };
    spec::beside::reaches(config, &device)?;
    let there = spec::devices(config);
    spec::beside::fits(there.iter().map(|(name, there)| (name, there)), &device)
}

/// A configuration of what a running machine that was started as `config` uses of the host, with `device` beside what is there.
#[must_use]
pub fn beside<'a>(config: &VmConfig, there: impl Iterator<Item = (&'a Name, &'a Virtio)>, device: &Virtio) -> VmConfig {
    let again = |there: &Virtio| match (there, device) {
        // Asking twice for one interface is no mistake: the answer is the one that is there.
        (Virtio::Net(there), Virtio::Net(new)) => there.mac.is_some() && there.mac == new.mac,
        // Which is refused by what is said of the kind.
        (Virtio::Vsock(_), Virtio::Vsock(_)) => true,
        _ => false,
    };
    let mut with = holding(config, there.filter(|(_, there)| !again(there)));
    put(&mut with, device, device.id().map(str::to_owned));
    with
}

/// A configuration of what a machine that was started as `config` uses of the host, whose virtio devices are those of `there`.
#[must_use]
pub fn holding<'a>(config: &VmConfig, there: impl Iterator<Item = (&'a Name, &'a Virtio)>) -> VmConfig {
    let (disks, nets, filesystems) = (Vec::new(), Vec::new(), Vec::new());
    let mut with = VmConfig { disks, nets, filesystems, vsock: None, ..config.clone() };
    there.for_each(|(name, device)| put(&mut with, device, Some(name.0.clone())));
    with
}

fn put(config: &mut VmConfig, device: &Virtio, name: Option<String>) {
    match device {
        Virtio::Disk(disk) => config.disks.push(DiskConfig { id: name, ..disk.clone() }),
        Virtio::Net(net) => config.nets.push(NetConfig { id: name, ..net.clone() }),
        Virtio::Folder(folder) => config.filesystems.push(FsConfig { id: name, ..folder.clone() }),
        Virtio::Vsock(vsock) => config.vsock = Some(VsockConfig { id: name, ..vsock.clone() }),
        Virtio::Rng(_) | Virtio::Console(_) | Virtio::Balloon(_) | Virtio::Memory { .. } => {}
    }
}

/// Hands the descriptors of an interface that `config` ends with to `backends`, under the name that it gets.
pub fn take_taps(command: &mut Command, config: &mut VmConfig, backends: &Backends) -> Result<Option<Name>, BackendError> {
    let Command::AddNet { taps, .. } = command else { return Ok(None) };
    let index = config.nets.len().saturating_sub(1);
    let Some((net, before)) = config.nets.split_last_mut().filter(|_| !taps.is_empty()) else { return Ok(None) };
    let name = Name(net.id.get_or_insert_with(|| format!("net{index}")).clone());
    if before.iter().any(|there| there.id.as_deref() == Some(name.0.as_str())) {
        // Which is refused in a moment; the other one keeps its taps.
        return Ok(None);
    }
    backends.put(&name, Backend::of_taps(net, std::mem::take(taps))?);
    Ok(Some(name))
}

/// Tells the client that the machine will have it.
pub fn done(command: Command) {
    match command {
        Command::AddDevice { reply, .. }
        | Command::AddDisk { reply, .. }
        | Command::AddNet { reply, .. }
        | Command::AddFs { reply, .. }
        | Command::AddVsock { reply, .. } => reply.send(Ok(None)),
        other => other.refuse_unsupported(),
    }
}

/// Notes that the running machine has a virtio device that came as `name`. One that is there is not noted twice.
pub fn note(config: &mut VmConfig, device: Virtio, name: &Name) {
    let id = Some(name.0.clone());
    match device {
        Virtio::Disk(mut disk) if config.disks.iter().all(|there| there.id != id) => {
            disk.id = id;
            config.disks.push(disk);
        }
        Virtio::Net(mut net)
            if config.nets.iter().all(|there| there.id != id && (there.mac.is_none() || there.mac != net.mac)) =>
        {
            net.id = id;
            config.nets.push(net);
        }
        Virtio::Folder(mut folder) if config.filesystems.iter().all(|there| there.id != id) => {
            folder.id = id;
            config.filesystems.push(folder);
        }
        Virtio::Vsock(mut vsock) => {
            vsock.id = id;
            config.vsock = Some(vsock);
        }
        _ => {}
    }
}

/// Gives all devices the names that they have by their place, so that they keep them when others leave. Devices that stand for
/// several, which CDI files say, leave those that were given one by one as they are.
pub fn name_all(config: &mut VmConfig) {
    let named = |id: &mut Option<String>, kind: &str, index: usize| {
        id.get_or_insert_with(|| format!("{kind}{index}"));
    };
    config.disks.iter_mut().enumerate().for_each(|(index, disk)| named(&mut disk.id, "disk", index));
    config.nets.iter_mut().enumerate().for_each(|(index, net)| named(&mut net.id, "net", index));
    config.filesystems.iter_mut().enumerate().for_each(|(index, folder)| named(&mut folder.id, "fs", index));
    config.vsock.iter_mut().for_each(|vsock| named(&mut vsock.id, "vsock", 0));
    let names: Vec<String> = spec::names(config).into_iter().map(|(name, _)| name).collect();
    let in_file = config.topology.iter_mut().flat_map(|file| &mut file.devices);
    let devices = in_file.chain(&mut config.devices).zip(names);
    let expands = |kind: &DeviceKind| matches!(kind, DeviceKind::Cdi(_));
    for (device, name) in devices.take_while(|(device, _)| !expands(&device.kind)) {
        device.id.get_or_insert(name);
    }
}

/// The configuration without the device `name`, all others with names of their own; `None` if it has no such device that can
/// leave. Functions that a device has beside its first one leave with that.
#[must_use]
pub fn without(config: &VmConfig, name: &str) -> Option<VmConfig> {
    let mut config = config.clone();
    name_all(&mut config);
    let before = config.clone();
    let is_it = |id: &Option<String>| id.as_deref() == Some(name);
    let mut leaves = false;
    let mut stays = |device: &DeviceConfig| {
        leaves = is_it(&device.id) || (leaves && device.function > 0 && device.on.is_none());
        !leaves
    };
    config.topology.iter_mut().for_each(|file| file.devices.retain(&mut stays));
    config.devices.retain(&mut stays);
    config.disks.retain(|disk| !is_it(&disk.id));
    config.nets.retain(|net| !is_it(&net.id));
    config.filesystems.retain(|folder| !is_it(&folder.id));
    config.vsock = config.vsock.take().filter(|vsock| !is_it(&vsock.id));
    (config != before).then_some(config)
}

/// Forgets devices with names of their own that are not there any more.
pub fn forget(config: &mut VmConfig, there: impl Fn(&str) -> bool) {
    let stays = |id: &Option<String>| id.as_deref().is_none_or(&there);
    config.disks.retain(|disk| stays(&disk.id));
    config.nets.retain(|net| stays(&net.id));
    config.filesystems.retain(|folder| stays(&folder.id));
    config.devices.retain(|device| stays(&device.id));
    config.vsock = config.vsock.take().filter(|vsock| stays(&vsock.id));
}

#[cfg(test)]
mod tests {
    use api::command::Reply;

    use super::*;

    #[test]
    fn a_device_that_is_taken_out_leaves_the_names_of_all_others() {
        let config = VmConfig {
            disks: ["a.img", "b.img,id=b", "c.img"].map(|disk| disk.parse().unwrap()).into(),
            devices: ["stub", "stub,id=f0", "stub,id=f1,function=1", "stub"].map(|device| device.parse().unwrap()).into(),
            vsock: Some("cid=3,socket=/a".parse().unwrap()),
            ..VmConfig::default()
        };
        let names = |config: &VmConfig| {
            let virtio = spec::devices(config).into_iter().map(|(name, _)| name.0);
            spec::names(config).into_iter().map(|(name, _)| name).chain(virtio).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&config), "stub0 f0 f1 stub3 disk0 b disk2 vsock0");
        let left = |name| without(&config, name).map(|config| names(&config));
        assert_eq!(left("disk0").unwrap(), "stub0 f0 f1 stub3 b disk2 vsock0");
        assert_eq!(left("vsock0").unwrap(), "stub0 f0 f1 stub3 disk0 b disk2");
        assert_eq!(left("f0").unwrap(), "stub0 stub3 disk0 b disk2 vsock0");
        assert_eq!(left("f1").unwrap(), "stub0 f0 stub3 disk0 b disk2 vsock0");
        assert_eq!(left("rng0"), None);
        assert_eq!(left("disk1"), None, "b has that place and another name");
    }

    #[test]
    fn a_socket_device_does_not_take_the_place_of_another() {
        let add = || Command::AddVsock { config: Box::new("cid=4,socket=/b".parse().unwrap()), reply: Reply::new().0 };
        let there = VmConfig { vsock: Some("cid=3,socket=/a".parse().unwrap()), ..VmConfig::default() };
        assert!(matches!(check(&add(), &there), Err(BesideError::Vsock { .. })));
        assert_eq!(check(&add(), &VmConfig::default()), Ok(()));
    }
}
