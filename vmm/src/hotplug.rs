//! Devices that come and go while the guest runs: finds a port, makes the function, lets the guest know, waits for it to let
//! go.
//!
//! The guest sets its own pace. A request is answered when the guest has been told; what a device held is given back when the
//! guest has taken note, or after a deadline.

mod asked;
mod choice;
mod coming;
mod leaving;
mod look;
mod nearness;
pub(crate) mod newcomer;
mod refusal;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use api::config::{Attach, DeviceConfig, DeviceKind, PcieConfig, VmConfig};
use api::events::Event;
use api::info::Progress;
use devices::complaints::Complaints;
use log::Level;
use pci::address::HostBdf;
use pci::topology::Name;

use crate::backends::Backend;
use crate::bus_slots::Hears;
use crate::changes::{Added, AddedFunction, Changes};
use crate::effects::BarAccess;
use crate::host;
use crate::host::recorded::RecordedHost;
use crate::listing;
use crate::machine::Machine;
use crate::numa::GuestNuma;
use crate::spec::{self, Endpoint, Spec, Virtio};

pub use asked::wanted_back;
pub use coming::{Coming, ComingDevices};
use leaving::Leaving;
use look::Looked;
use nearness::PortPlaces;
use newcomer::Wish;
pub use refusal::HotPlugError;

/// The devices of a running machine.
pub struct HotPlug {
    endpoints: BTreeMap<Name, Endpoint>,
    /// Where ports are, as far as host functions belong nearer to some than to others.
    places: PortPlaces,
    numa: Option<GuestNuma>,
    /// A host that is data, in place of this one, and the functions of it that stubs stand for.
    recorded: Option<Arc<RecordedHost>>,
    stand_ins: BTreeMap<Name, HostBdf>,
    /// What makes ports, and whether devices that hang on no hot-plug port leave, too, as far as there are registers.
    pcie: PcieConfig,
    leaving: Vec<Leaving>,
    coming: ComingDevices,
    changes: Changes,
    named: u64,
    /// What went wrong, for those who listen.
    failures: Vec<Event>,
    /// What guests said of the device in each port, as often as they like.
    complaints: BTreeMap<Name, Complaints>,
    /// While the guest is held, nothing that it has to do becomes overdue.
    paused: Option<Instant>,
}

impl HotPlug {
    /// The devices of a machine that starts as `spec` says, with the ports and the removal of `pcie`, and then had these `changes`. Devices
    /// come from the host that is `recorded`, if there is one.
    pub fn new(spec: &Spec, pcie: PcieConfig, changes: Changes, recorded: Option<Arc<RecordedHost>>) -> io::Result<Self> {
        let mut endpoints = spec.endpoints.clone();
        endpoints.retain(|name, _| !changes.has_left(name));
        let added = changes.added().iter().flat_map(|added| &added.functions);
        endpoints.extend(added.map(|function| (function.name.clone(), function.endpoint.clone())));
        let mut stand_ins = spec.stand_ins.clone();
        let added = changes.added().iter().flat_map(|added| &added.functions);
        stand_ins.extend(added.filter_map(|function| Some((function.name.clone(), function.stands_for?))));
        let coming = ComingDevices::new()?;
        Ok(Self {
            endpoints,
            places: PortPlaces::new(spec),
            numa: spec.numa.clone(),
            recorded,
            stand_ins,
            pcie,
            leaving: Vec::new(),
            coming,
            changes,
            named: 0,
            failures: Vec::new(),
            complaints: BTreeMap::new(),
            paused: None,
        })
    }

    /// How the devices of `machine` that ends differ from those of the specification. Devices on their way out have left, as have
    /// those that the host wants back; those that were accepted have come.
    #[must_use]
    pub fn changes(mut self, machine: &Machine) -> Changes {
        for leaving in &self.leaving {
            self.changes.remove(&leaving.names);
        }
        let wanted = wanted_back(machine).into_iter().filter(|name| self.endpoints.contains_key(name));
        self.changes.remove(&wanted.collect::<Vec<_>>());
        self.coming.into_devices().for_each(|added| self.changes.add(added));
        self.changes
    }

    /// The same while the machine goes on.
    #[must_use]
    pub const fn changes_so_far(&self) -> &Changes {
        &self.changes
    }

    /// What the device `name` is.
    #[must_use]
    pub fn endpoint(&self, name: &Name) -> Option<&Endpoint> {
        self.endpoints.get(name)
    }

    /// Adds a device with these functions to the port that it names, or to the best free one on which it fits. The first
    /// functions of the host come when they can reach memory, see [`HotPlug::follow_coming`].
    pub fn add(&mut self, machine: &mut Machine, config: &VmConfig, device: &[DeviceConfig]) -> Result<Coming, HotPlugError> {
        let device = newcomer::functions(config, device, self.recorded.as_deref())?;
        let mut functions: Vec<AddedFunction> = Vec::new();
        let mut from = None;
        let with: Vec<HostBdf> = device.iter().filter_map(|(function, _)| host::address(function)).collect();
        for (function, number) in &device {
            let name = self.name(machine, function, &functions)?;
            let Looked { endpoint, spec, from: place, stands_for } = self.look(config, function, &name, &functions, &with)?;
            from = from.or(place);
            let access = BarAccess::of(function);
            functions.push(AddedFunction { name, endpoint, spec, access, number: *number, stands_for });
        }
        let wish = device.first().map(|(first, _)| Wish::of(first)).unwrap_or_default();
        let wish = Wish { places: Some(&self.places), pcie: self.pcie, from: from.as_ref(), ..wish };
        let added = self.place(machine, functions, &wish)?;
        if self.coming.needed(machine, &added) {
            return self.coming.accept(machine, added, &mut self.endpoints);
        }
        self.put(machine, added).map(Coming::There)
    }

    /// Adds a virtio device, which is called `id`. Its side of the host may be open already; an interface whose address is
    /// there is the one that is there, unless that one is on its way out.
    pub fn add_virtio(
        &mut self,
        machine: &mut Machine,
        device: Virtio,
        id: Option<&str>,
        side: Option<Backend>,
    ) -> Result<Name, HotPlugError> {
        let mac = |device: &Virtio| if let Virtio::Net(net) = device { net.mac } else { None };
        let same =
            |there: &Endpoint| matches!(there, Endpoint::Virtio(there) if mac(there).is_some() && mac(there) == mac(&device));
        if let Some((there, _)) = self.endpoints.iter().find(|(_, endpoint)| same(endpoint)) {
            let name = there.clone();
            return if self.leaves(&name) { Err(HotPlugError::InterfaceLeaves { name }) } else { Ok(name) };
        }
        spec::beside::fits(self.virtio(), &device)?;
        let name = self.free_name(machine, id, listing::class(&device).to_string().as_str(), &[])?;
        if let Some(side) = side {
            machine.parts().1.backends().put(&name, side)?;
        }
        let spec = device.endpoint();
        let function = AddedFunction {
            name: name.clone(),
            endpoint: Endpoint::Virtio(device),
            spec,
            access: BarAccess::default(),
            number: 0,
            stands_for: None,
        };
        // A virtio function shows what a PCI Express one does.
        let wish = Wish { attach: Some(Attach::Pcie), places: Some(&self.places), pcie: self.pcie, ..Wish::default() };
        let put = self.place(machine, vec![function], &wish).and_then(|added| self.put(machine, added));
        if put.is_err() {
            machine.parts().1.backends().close(&name);
        }
        put
    }

    /// The virtio devices that are there.
    pub fn virtio(&self) -> impl Iterator<Item = (&Name, &Virtio)> {
        self.endpoints.iter().filter_map(|(name, endpoint)| match endpoint {
            Endpoint::Virtio(there) => Some((name, there)),
            _ => None,
        })
    }

    /// Where a device goes: where `wish` says, else where devices come to first (see [`newcomer::place`]).
    fn place(&self, machine: &Machine, functions: Vec<AddedFunction>, wish: &Wish<'_>) -> Result<Added, HotPlugError> {
        let specs: Vec<_> = functions.iter().map(|function| function.spec.clone()).collect();
        let slots = machine.bus_slots().map(AsRef::as_ref);
        let (port, number) = newcomer::place(machine.pci(), slots, wish, &specs, &self.coming.places())?.name_and_number();
        Ok(Added { functions, port, number })
    }

    /// Puts a device where it goes, and tells the guest.
    fn put(&mut self, machine: &mut Machine, added: Added) -> Result<Name, HotPlugError> {
        let slots = machine.bus_slots().cloned();
        let (pci, factory) = machine.parts();
        newcomer::put(pci, factory, slots.as_deref(), &added, Hears::Guest)?;
        let port = added.port.clone();
        self.complaints.remove(&port);
        let names: Vec<Name> = added.functions.iter().map(|function| function.name.clone()).collect();
        self.endpoints.extend(added.functions.iter().map(|function| (function.name.clone(), function.endpoint.clone())));
        let stand_ins = added.functions.iter().filter_map(|function| Some((function.name.clone(), function.stands_for?)));
        self.stand_ins.extend(stand_ins);
        self.changes.add(added);
        log::info!("{} came to {port}", list(&names));
        names.into_iter().next().ok_or(HotPlugError::Nothing)
    }

    /// Makes memory ready for the first functions of the host, unless `busy`, and puts them into the machine when it is.
    /// Returns what became of which device.
    pub fn follow_coming(&mut self, machine: &mut Machine, busy: bool) -> Vec<(Name, Result<(), HotPlugError>)> {
        let mut outcomes = Vec::new();
        for (added, ready) in self.coming.follow(machine, busy) {
            let Some(name) = added.functions.first().map(|function| function.name.clone()) else { continue };
            let outcome = ready.and_then(|()| self.put(machine, added.clone()).map(drop));
            if outcome.is_err() {
                self.forget(machine, &added);
            }
            outcomes.push((name, outcome));
        }
        outcomes
    }

    /// A device that was accepted does not come.
    fn forget(&mut self, machine: &mut Machine, added: &Added) {
        added.functions.iter().for_each(|function| drop(self.endpoints.remove(&function.name)));
        coming::close(machine, added);
    }

    /// Devices that were accepted and wait until they can reach memory.
    #[must_use]
    pub fn coming(&self) -> &ComingDevices {
        &self.coming
    }

    /// How far memory was whose preparation ended since the last call.
    pub fn take_last(&mut self) -> Option<Progress> {
        self.coming.last.take()
    }

    /// What went wrong since the last call.
    pub fn take_failures(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.failures)
    }

    /// The name that `device` has or gets. Devices and ports share their names.
    fn name(&mut self, machine: &Machine, device: &DeviceConfig, before: &[AddedFunction]) -> Result<Name, HotPlugError> {
        let kind = if matches!(device.kind, DeviceKind::Vfio(_)) { "vfio" } else { "stub" };
        self.free_name(machine, device.id.as_deref(), kind, before)
    }

    /// The name `id`, or a free one of this kind.
    fn free_name(
        &mut self,
        machine: &Machine,
        id: Option<&str>,
        kind: &str,
        before: &[AddedFunction],
    ) -> Result<Name, HotPlugError> {
        let is_taken = |endpoints: &BTreeMap<Name, Endpoint>, name: &Name| {
            endpoints.contains_key(name) || before.iter().any(|function| function.name == *name)
        };
        let is_port = |name: &Name| machine.pci().change(|tree| tree.hierarchy.ports().any(|port| port.name == *name));
        if let Some(id) = id {
            let name = Name::from(id);
            name.check().map_err(HotPlugError::Name)?;
            return match () {
                () if self.leaves(&name) => Err(HotPlugError::StillLeaves { name }),
                () if is_taken(&self.endpoints, &name) => Err(HotPlugError::Taken { name }),
                () if is_port(&name) => Err(HotPlugError::NamedAsPort { name }),
                () => Ok(name),
            };
        }
        loop {
            let name = Name(format!("{kind}-hot{}", self.named));
            self.named += 1;
            if !is_taken(&self.endpoints, &name) && !is_port(&name) {
                return Ok(name);
            }
        }
    }
}

/// What is said when a guest says that it could not bring up the device in `port`: in the log, and to those who listen.
fn failed(complaints: &mut Complaints, port: &Name) -> Option<Event> {
    let told = complaints.add(Level::Warn, format_args!("the guest could not bring up the device that was added to port {port}"));
    let why = "the guest could not bring up the device that was added to this port".to_owned();
    told.then(|| Event::DeviceFailed { id: port.to_string(), why })
}

fn list(names: &[Name]) -> String {
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_says_of_a_port_in_a_loop_is_told_a_few_times() {
        let (mut complaints, port) = (Complaints::default(), Name::from("port0"));
        let told = (0..100_000).filter_map(|_| failed(&mut complaints, &port)).count();
        assert_eq!(told, usize::from(Complaints::MOST));
    }
}
