//! Devices that a client adds: before the start the same as if vm.create had named them, later as vm.info tells of them.

use api::command::Command;
use api::config::{DiskConfig, FsConfig, NetConfig, VmConfig, VsockConfig};
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
    fn a_socket_device_does_not_take_the_place_of_another() {
        let add = || Command::AddVsock { config: Box::new("cid=4,socket=/b".parse().unwrap()), reply: Reply::new().0 };
        let there = VmConfig { vsock: Some("cid=3,socket=/a".parse().unwrap()), ..VmConfig::default() };
        assert!(matches!(check(&add(), &there), Err(BesideError::Vsock { .. })));
        assert_eq!(check(&add(), &VmConfig::default()), Ok(()));
    }
}
