//! Devices that a client adds or removes: before the start the same as if vm.create had named them or not, later as vm.info tells
//! of them.

use std::collections::BTreeSet;

use api::command::Command;
use api::config::{DeviceConfig, DeviceKind, DiskConfig, FsConfig, NetConfig, VmConfig, VsockConfig};
use pci::topology::Name;

use crate::backends::{Backend, BackendError, Backends};
use crate::cdi;
use crate::plan::MachinePlan;
use crate::spec::{self, BesideError, Spec, Virtio};

/// Names that a machine before its start has given.
pub struct Taken {
    names: BTreeSet<String>,
    /// How many devices there are with what CDI files say.
    devices: usize,
}

impl Taken {
    /// Those of a machine that is `spec`, configured as `resolved`, with what CDI files say.
    #[must_use]
    pub fn of(resolved: &VmConfig, spec: &Spec) -> Self {
        let (roots, nodes) = (spec.topology.root_complexes.iter(), spec.topology.nodes.iter());
        let names = roots.map(|root| &root.name).chain(nodes.map(|node| &node.name)).map(|name| name.0.clone()).collect();
        Self { names, devices: spec::names(resolved).len() }
    }

    /// Gives a device the first free name of its kind if the name that it has by its place is taken.
    fn name(&mut self, id: &mut Option<String>, kind: &str, index: usize) {
        let by_place = format!("{kind}{index}");
        if id.is_none() && self.names.contains(&by_place) {
            *id = (0u32..).map(|number| format!("{kind}{number}")).find(|name| !self.names.contains(name));
        }
        self.names.insert(id.clone().unwrap_or(by_place));
    }

    /// The same for devices that come after all others.
    fn name_devices(&mut self, devices: &mut [DeviceConfig]) {
        self.names.extend(devices.iter().filter_map(|device| device.id.clone()));
        let mut several = false;
        for (device, index) in devices.iter_mut().zip(self.devices..) {
            several |= cdi::may_be_several(&device.kind);
            let kind = if matches!(device.kind, DeviceKind::Stub(_)) { "stub" } else { "vfio" };
            // How many names by place it takes is not known, nor the first one of those that follow.
            let number = |name: &String| name.strip_prefix(kind)?.parse::<usize>().ok();
            let later = self.names.iter().filter_map(number).find(|number| several && *number > index);
            self.name(&mut device.id, kind, later.unwrap_or(index));
        }
    }
}

/// The configuration with the device that `command` adds; `None` if it adds none. It has a name of its own where the one by
/// its place is `taken`.
#[must_use]
pub fn apply(command: &Command, config: &VmConfig, mut taken: Taken) -> Option<VmConfig> {
    let mut config = config.clone();
    match command {
        Command::AddDevice { functions, .. } => {
            let mut functions = functions.clone();
            taken.name_devices(&mut functions);
            config.devices.append(&mut functions);
        }
        Command::AddDisk { config: disk, .. } => {
            let mut disk = (**disk).clone();
            taken.name(&mut disk.id, "disk", config.disks.len());
            config.disks.push(disk);
        }
        Command::AddNet { config: net, .. } => {
            let mut net = (**net).clone();
            taken.name(&mut net.id, "net", config.nets.len());
            config.nets.push(net);
        }
        Command::AddFs { config: fs, .. } => {
            let mut fs = (**fs).clone();
            taken.name(&mut fs.id, "fs", config.filesystems.len());
            config.filesystems.push(fs);
        }
        Command::AddVsock { config: vsock, .. } => {
            let mut vsock = (**vsock).clone();
            taken.name(&mut vsock.id, "vsock", 0);
            config.vsock = Some(vsock);
        }
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
    backends.put(&name, Backend::of_taps(net, std::mem::take(taps))?)?;
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
/// several, which CDI files say, get the name of their first one; with what those files say, as the machine is `resolved`. What
/// is between two of those stays as it is, and all from the first one on if that is not known.
pub fn name_all(config: &mut VmConfig, resolved: Option<&VmConfig>) {
    let named = |id: &mut Option<String>, kind: &str, index: usize| {
        id.get_or_insert_with(|| format!("{kind}{index}"));
    };
    config.disks.iter_mut().enumerate().for_each(|(index, disk)| named(&mut disk.id, "disk", index));
    config.nets.iter_mut().enumerate().for_each(|(index, net)| named(&mut net.id, "net", index));
    config.filesystems.iter_mut().enumerate().for_each(|(index, folder)| named(&mut folder.id, "fs", index));
    config.vsock.iter_mut().for_each(|vsock| named(&mut vsock.id, "vsock", 0));
    // Those of a topology file have names.
    let with_files = resolved.unwrap_or(config);
    let in_file = with_files.topology.as_ref().map_or(0, |file| file.devices.len());
    let names: Vec<String> = spec::names(with_files).into_iter().skip(in_file).map(|(name, _)| name).collect();
    let several = |device: &DeviceConfig| cdi::may_be_several(&device.kind);
    let (first, last) = (config.devices.iter().position(several), config.devices.iter().rposition(several));
    let count = config.devices.len();
    for (index, device) in config.devices.iter_mut().enumerate() {
        let place = match (resolved.is_some(), first, last) {
            (_, Some(first), _) if index < first => Some(index),
            (_, None, _) => Some(index),
            (true, Some(first), _) if index == first || names.len() == count => Some(index),
            (true, _, Some(last)) if index > last => (names.len() + index).checked_sub(count),
            _ => None,
        };
        if let Some(name) = place.and_then(|place| names.get(place)) {
            device.id.get_or_insert_with(|| name.clone());
        }
    }
}

/// The configuration without the device `name`, all others with names of their own; `None` if it has no such device that can
/// leave. Functions that a device has beside its first one leave with that, by `plan`. `resolved` is the configuration with
/// what CDI files say.
#[must_use]
pub fn without(config: &VmConfig, resolved: &VmConfig, plan: &MachinePlan, name: &str) -> Option<VmConfig> {
    let mut config = config.clone();
    name_all(&mut config, Some(resolved));
    let before = config.clone();
    let companions = plan.companions(name);
    let is_it = |id: &Option<String>| id.as_deref() == Some(name);
    let stays = |device: &DeviceConfig| !is_it(&device.id) && device.id.as_deref().is_none_or(|id| !companions.contains(id));
    config.topology.iter_mut().for_each(|file| file.devices.retain(stays));
    config.devices.retain(stays);
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
    use crate::plan::{self, Limits};
    use crate::spec::Host;

    fn planned(config: &VmConfig) -> (Spec, MachinePlan) {
        let spec = spec::spec(config, &Host::default()).unwrap();
        let limits = Limits { ram: 64 << 20, growth: 0, address_bits: 40, amd: false, firmware: 0 };
        let plan = plan::plan(&spec.topology, &limits).unwrap();
        (spec, plan)
    }

    fn stubs<const N: usize>(devices: [&str; N]) -> Vec<DeviceConfig> {
        devices.map(|device| device.parse().unwrap()).into()
    }

    #[test]
    fn what_comes_after_a_removal_gets_the_first_free_name_where_the_next_one_is_taken() {
        let config = VmConfig {
            disks: ["a.img", "b.img"].map(|disk| disk.parse().unwrap()).into(),
            nets: ["tap1", "tap2"].map(|net| net.parse().unwrap()).into(),
            filesystems: ["tag=a,socket=/a", "tag=b,socket=/b"].map(|fs| fs.parse().unwrap()).into(),
            devices: stubs(["stub", "stub", "stub,id=stub3"]),
            memory: "size=64M,shared=on".parse().unwrap(),
            ..VmConfig::default()
        };
        let added = |config: &VmConfig, command: &Command| {
            let plan = planned(config).1;
            let left = ["disk0", "net0", "fs0", "stub0"].into_iter().fold(config.clone(), |left, name| {
                without(&left, &left, &plan, name).unwrap_or_else(|| panic!("{name} cannot leave"))
            });
            let before = planned(&left).0;
            let with = planned(&apply(command, &left, Taken::of(&left, &before)).unwrap()).0;
            let new = with.endpoints.into_keys().filter(|name| !before.endpoints.contains_key(name));
            let new: Vec<String> = new.map(|name| name.0).collect();
            new.join(" ")
        };
        let reply = || Reply::new().0;
        let disk = Command::AddDisk { config: Box::new("c.img".parse().unwrap()), reply: reply() };
        assert_eq!(added(&config, &disk), "disk0");
        let net = Command::AddNet { config: Box::new("tap3".parse().unwrap()), taps: Vec::new(), reply: reply() };
        assert_eq!(added(&config, &net), "net0");
        let fs = Command::AddFs { config: Box::new("tag=c,socket=/c".parse().unwrap()), reply: reply() };
        assert_eq!(added(&config, &fs), "fs0");
        let device = Command::AddDevice { functions: stubs(["stub", "stub,function=1"]), reply: reply() };
        assert_eq!(added(&config, &device), "stub0 stub2");
    }

    #[test]
    fn names_by_place_are_those_that_the_machine_has_beside_devices_that_stand_for_several() {
        let of = |devices: [&str; 5]| VmConfig { devices: stubs(devices), ..VmConfig::default() };
        let names = |config: &VmConfig| {
            config.devices.iter().map(|device| device.id.clone().unwrap_or_default()).collect::<Vec<_>>().join(" ")
        };
        let asked = of(["stub", "vendor.com/gpu=0", "stub", "stub,id=own", "stub"]);
        let gpu = ["0000:01:00.0", "0000:01:00.1"];
        let mut resolved = asked.clone();
        resolved.devices.splice(1..2, stubs(gpu));
        let mut named = asked.clone();
        name_all(&mut named, Some(&resolved));
        assert_eq!(names(&named), "stub0 vfio1 stub3 own stub5");
        let mut named = asked;
        name_all(&mut named, None);
        assert_eq!(names(&named), "stub0   own ");

        let asked = of(["stub", "vendor.com/gpu=0", "stub", "vendor.com/gpu=1", "stub"]);
        let mut resolved = asked.clone();
        resolved.devices.splice(1..2, stubs(["0000:01:00.0"]));
        resolved.devices.splice(3..4, stubs(["0000:02:00.0"]));
        let mut named = asked;
        name_all(&mut named, Some(&resolved));
        assert_eq!(names(&named), "stub0 vfio1 stub2 vfio3 stub4");
    }

    #[test]
    fn functions_leave_with_the_first_one_of_their_place() {
        let devices = stubs([
            "stub,id=a0,on=rc0,device=9",
            "stub,id=b0,on=rc0,device=10",
            "stub,id=a1,on=rc0,device=9,function=1",
            "stub,id=b1,on=rc0,device=10,function=1",
        ]);
        let config = VmConfig { devices, ..VmConfig::default() };
        let plan = planned(&config).1;
        let left = |name| {
            let left = without(&config, &config, &plan, name).unwrap();
            planned(&left);
            left.devices.into_iter().filter_map(|device| device.id).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(left("a0"), "b0 b1");
        assert_eq!(left("b1"), "a0 b0 a1");
    }

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
        let plan = planned(&config).1;
        let left = |name| without(&config, &config, &plan, name).map(|config| names(&config));
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
