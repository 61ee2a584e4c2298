//! Devices that come and go while the guest runs: finds a port, makes the function, lets the guest know, waits for it to let
//! go.
//!
//! The guest sets its own pace. A request is answered when the guest has been told; what a device held is given back when the
//! guest has taken note, or after a deadline.

pub(crate) mod newcomer;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use api::config::{DeviceConfig, DeviceKind, VmConfig};
use api::error::{ApiError, ErrorKind};
use api::events::Event;
use pci::function::{FunctionId, Shared};
use pci::hierarchy::{PlugError, PortList};
use pci::slot::SlotEvent;
use pci::topology::{EndpointSpec, Name, Removal, TopologyError};
use thiserror::Error;

use crate::backends::{Backend, BackendError};
use crate::cdi::CdiError;
use crate::changes::{Added, AddedFunction, Changes};
use crate::effects::BarAccess;
use crate::endpoints::FunctionError;
use crate::host::{self, HostError};
use crate::listing;
use crate::machine::Machine;
use crate::spec::{self, BesideError, Endpoint, Spec, SpecError, Virtio};

/// How long a guest may take to let go of a device that it was asked for.
const RELEASE: Duration = Duration::from_secs(30);
/// How long a guest may take to note that a device has left.
const NOTE: Duration = Duration::from_secs(10);

/// The devices of a running machine.
pub struct HotPlug {
    endpoints: BTreeMap<Name, Endpoint>,
    leaving: Vec<Leaving>,
    changes: Changes,
    named: u64,
    /// What went wrong, for those who listen.
    failures: Vec<Event>,
    /// While the guest is held, nothing that it has to do becomes overdue.
    paused: Option<Instant>,
}

/// A device on its way out.
struct Leaving {
    /// Its functions.
    names: Vec<Name>,
    port: FunctionId,
    stage: Stage,
    deadline: Instant,
    /// It is on the root bus, and not in the slot of a port.
    on_root: bool,
}

enum Stage {
    /// The guest was asked to let go of it.
    Asked,
    /// The guest was told that it is gone. What these functions hold goes when the guest has taken note.
    Gone(Vec<(FunctionId, Shared)>),
}

impl HotPlug {
    /// The devices of a machine that starts as `spec` says, and then had these `changes`.
    #[must_use]
    pub fn new(spec: &Spec, changes: Changes) -> Self {
        let mut endpoints = spec.endpoints.clone();
        endpoints.retain(|name, _| !changes.has_left(name));
        let added = changes.added().iter().flat_map(|added| &added.functions);
        endpoints.extend(added.map(|function| (function.name.clone(), function.endpoint.clone())));
        Self { endpoints, leaving: Vec::new(), changes, named: 0, failures: Vec::new(), paused: None }
    }

    /// Devices on their way out.
    pub fn leaving(&self) -> impl Iterator<Item = &Name> {
        self.leaving.iter().flat_map(|leaving| &leaving.names)
    }

    /// How the devices differ from those of the specification. Devices on their way out have left.
    #[must_use]
    pub fn changes(mut self) -> Changes {
        for leaving in &self.leaving {
            self.changes.remove(&leaving.names);
        }
        self.changes
    }

    /// The guest is held.
    pub fn pause(&mut self, now: Instant) {
        self.paused.get_or_insert(now);
    }

    /// The guest goes on, and has for all that it was told the time that it had left.
    pub fn resume(&mut self, now: Instant) {
        if let Some(since) = self.paused.take() {
            let held = now.saturating_duration_since(since);
            self.leaving.iter_mut().for_each(|leaving| leaving.deadline += held);
        }
    }

    /// What the device `name` is.
    #[must_use]
    pub fn endpoint(&self, name: &Name) -> Option<&Endpoint> {
        self.endpoints.get(name)
    }

    /// Adds a device with these functions to the port that it names, or to the first free one on which it fits. Returns the
    /// name of the first function.
    pub fn add(&mut self, machine: &mut Machine, config: &VmConfig, device: &[DeviceConfig]) -> Result<Name, HotPlugError> {
        let device = newcomer::functions(config, device)?;
        let mut functions: Vec<AddedFunction> = Vec::new();
        for (function, number) in &device {
            let name = self.name(machine, function, &functions)?;
            let (endpoint, spec) = self.look(config, function, &name, &functions)?;
            functions.push(AddedFunction { name, endpoint, spec, access: BarAccess::of(function), number: *number });
        }
        self.put(machine, functions, device.first().and_then(|(first, _)| first.on.as_deref()))
    }

    /// Adds a virtio device, which is called `id`. Its side of the host may be open already; an interface whose address is
    /// there is the one that is there.
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
            return Ok(there.clone());
        }
        spec::beside::fits(self.virtio(), &device)?;
        let name = self.free_name(machine, id, listing::class(&device).to_string().as_str(), &[])?;
        if let Some(side) = side {
            machine.parts().1.backends().put(&name, side);
        }
        let spec = device.endpoint();
        let function = AddedFunction {
            name: name.clone(),
            endpoint: Endpoint::Virtio(device),
            spec,
            access: BarAccess::default(),
            number: 0,
        };
        let put = self.put(machine, vec![function], None);
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

    /// Puts a device on the port `on`, else on the root bus if devices can come there, else on the first free port with room.
    fn put(&mut self, machine: &mut Machine, functions: Vec<AddedFunction>, on: Option<&str>) -> Result<Name, HotPlugError> {
        let slots = machine.root_slots().filter(|_| on.is_none() && functions.len() == 1).cloned();
        let added = if let Some(slots) = slots {
            let (number, root) = machine.pci().change(|tree| {
                let free = tree.hierarchy.free_root_numbers(0).into_iter().find(|number| *number != 0);
                let root = tree.hierarchy.root_bus(0).map(|(name, ..)| name);
                free.zip(root).ok_or(HotPlugError::RootFull)
            })?;
            let added = Added { functions, port: root, root_number: Some(number) };
            let (pci, factory) = machine.parts();
            newcomer::plug_on_root(pci, factory, &slots, &added, true)?;
            added
        } else {
            let bars: Vec<_> = functions.iter().map(|function| function.spec.bars).collect();
            let port = newcomer::port(machine.pci(), on, &bars)?;
            let added = Added { functions, port: port.name.clone(), root_number: None };
            let (pci, factory) = machine.parts();
            newcomer::plug(pci, factory, &port, &added)?;
            added
        };
        let port = added.port.clone();
        let names: Vec<Name> = added.functions.iter().map(|function| function.name.clone()).collect();
        self.endpoints.extend(added.functions.iter().map(|function| (function.name.clone(), function.endpoint.clone())));
        self.changes.add(added);
        log::info!("{} came to {port}", list(&names));
        names.into_iter().next().ok_or(HotPlugError::Nothing)
    }

    /// Begins to remove the device `name`. It is gone when the guest has let go of it, at the latest after a deadline.
    pub fn remove(&mut self, machine: &mut Machine, name: &str, now: Instant) -> Result<(), HotPlugError> {
        let name = Name::from(name);
        if self.leaves(&name) {
            return Err(HotPlugError::LeavesAlready { name });
        }
        if !self.endpoints.contains_key(&name) {
            return Err(HotPlugError::Unknown { name });
        }
        if let Some((slots, (number, id))) = machine.root_slots().and_then(|slots| Some((slots, slots.find(&name)?))) {
            slots.ask(number);
            self.leaving.push(Leaving {
                names: vec![name],
                port: id,
                stage: Stage::Asked,
                deadline: now + RELEASE,
                on_root: true,
            });
            return Ok(());
        }
        let ports = machine.pci().change(|tree| tree.hierarchy.ports().collect::<Vec<_>>());
        let port = ports.into_iter().find(|port| port.occupants.iter().any(|(_, occupant)| *occupant == name));
        let port = port.filter(|port| port.removal.is_some()).ok_or_else(|| HotPlugError::Fixed { name: name.clone() })?;
        let names: Vec<Name> = port.occupants.into_iter().map(|(_, name)| name).collect();
        if port.removal == Some(Removal::Surprise) {
            return self.take_out(machine, names, port.id, now);
        }
        machine.pci().change(|tree| tree.hierarchy.request_removal(port.id))?;
        self.leaving.push(Leaving { names, port: port.id, stage: Stage::Asked, deadline: now + RELEASE, on_root: false });
        Ok(())
    }

    fn leaves(&self, name: &Name) -> bool {
        self.leaving.iter().any(|leaving| leaving.names.contains(name))
    }

    /// Takes the device out, whether or not the guest has let go of it.
    fn take_out(&mut self, machine: &Machine, names: Vec<Name>, port: FunctionId, now: Instant) -> Result<(), HotPlugError> {
        let on_root = names.first().and_then(|name| machine.root_slots().and_then(|slots| Some((slots, slots.find(name)?))));
        if let Some((slots, (number, id))) = on_root {
            // Nobody else hears of it: what it held goes in the next round.
            let gone = machine.pci().change(|tree| tree.hierarchy.unplug_root(id, &mut tree.effects));
            slots.clear(number);
            log::info!("{} left the root bus", list(&names));
            let gone = gone.into_iter().map(|function| (id, function)).collect();
            self.leaving.push(Leaving { names, port: id, stage: Stage::Gone(gone), deadline: now, on_root: true });
            return Ok(());
        }
        let gone = machine.pci().change(|tree| tree.hierarchy.unplug(port, &mut tree.effects))?;
        log::info!("{} left its port", list(&names));
        self.leaving.push(Leaving { names, port, stage: Stage::Gone(gone), deadline: now + NOTE, on_root: false });
        Ok(())
    }

    /// Follows what the guest has told and what is overdue. Returns whether a device has left.
    pub fn follow(&mut self, machine: &mut Machine, now: Instant) -> bool {
        let mut ready = Vec::new();
        for (port, event) in machine.slot_events().take() {
            if event == SlotEvent::AddFailed {
                let ports = machine.pci().change(|tree| tree.hierarchy.ports().collect::<Vec<_>>());
                if let Some(port) = ports.iter().find(|info| info.id == port) {
                    log::warn!("the guest could not bring up the device that was added to port {}", port.name);
                    let why = "the guest could not bring up the device that was added to this port".to_owned();
                    self.failures.push(Event::DeviceFailed { id: port.name.to_string(), why });
                }
            }
            ready.extend(self.leaving.extract_if(.., |leaving| leaving.port == port && leaving.stage.ends_with(event)));
        }
        let held = self.paused.is_some();
        for late in self.leaving.extract_if(.., |leaving| leaving.deadline <= now && !held) {
            let names = list(&late.names);
            match late.stage {
                Stage::Asked => {
                    log::warn!("the guest did not let go of {names} in time: it leaves all the same");
                    let why = "the guest did not let go of it in time: it leaves all the same".to_owned();
                    self.failures.push(Event::DeviceFailed { id: names, why });
                }
                Stage::Gone(_) if late.on_root => {}
                Stage::Gone(_) => log::warn!("the guest did not take note in time that {names} left"),
            }
            if !late.on_root {
                machine.pci().change(|tree| tree.hierarchy.expire(late.port));
            }
            ready.push(late);
        }
        let mut left = false;
        for leaving in ready {
            match leaving.stage {
                Stage::Asked => {
                    if let Err(error) = self.take_out(machine, leaving.names.clone(), leaving.port, now) {
                        log::error!("{} stays in its port: {error}", list(&leaving.names));
                    }
                }
                Stage::Gone(functions) => {
                    machine.pci().change(|tree| functions.iter().for_each(|(id, _)| tree.mapper.remove(*id)));
                    for name in &leaving.names {
                        self.endpoints.remove(name);
                        machine.parts().1.backends().close(name);
                    }
                    self.changes.remove(&leaving.names);
                    left = true;
                }
            }
        }
        left
    }

    /// What went wrong since the last call.
    pub fn take_failures(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.failures)
    }

    /// When something is overdue.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let deadlines = self.leaving.iter().map(|leaving| leaving.deadline);
        deadlines.min().filter(|_| self.paused.is_none())
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

    /// What a function is, checked against the host and against those that are there or come with it.
    fn look(
        &self,
        config: &VmConfig,
        device: &DeviceConfig,
        name: &Name,
        before: &[AddedFunction],
    ) -> Result<(Endpoint, EndpointSpec), HotPlugError> {
        let mut alone = VmConfig { devices: vec![device.clone()], memory: config.memory.clone(), ..VmConfig::default() };
        if let Some(device) = alone.devices.first_mut() {
            device.id = Some(name.0.clone());
            device.on = None;
        }
        let host = host::look(&alone)?;
        let at = host.wanted.get(&name.0);
        let same = |endpoint: &Endpoint| matches!(endpoint, Endpoint::Vfio { at: there, .. } if Some(there) == at);
        let there = self.endpoints.iter().chain(before.iter().map(|function| (&function.name, &function.endpoint)));
        if let Some((there, _)) = there.into_iter().find(|(_, endpoint)| same(endpoint)) {
            return Err(HotPlugError::Twice { name: name.clone(), there: there.clone() });
        }
        spec::single(&alone, &host).map_err(HotPlugError::Spec)
    }
}

impl Stage {
    const fn ends_with(&self, event: SlotEvent) -> bool {
        matches!((self, event), (Self::Asked, SlotEvent::Released) | (Self::Gone(_), SlotEvent::EventsCleared))
    }
}

fn list(names: &[Name]) -> String {
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A device that cannot come or go.
#[derive(Debug, Error)]
pub enum HotPlugError {
    /// The name is taken.
    #[error("there is a device {name} already: give another id, or remove it first")]
    Taken {
        /// The name.
        name: Name,
    },
    /// The name is still taken.
    #[error("device {name} is being removed: add it when the guest has let go of it, or give another id")]
    StillLeaves {
        /// The name.
        name: Name,
    },
    /// A port has the name.
    #[error("{name} is the name of a port: give another id")]
    NamedAsPort {
        /// The name.
        name: Name,
    },
    /// No device number is free.
    #[error("all 32 device numbers of the root bus are taken: remove a device first, or add it to a port (`on`)")]
    RootFull,
    /// What a virtio device uses of the host.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// No function at all.
    #[error("a device without functions cannot be added")]
    Nothing,
    /// Another device than the first.
    #[error("a device that is added becomes device 0 below its port, not device {device}: leave out `device`")]
    Place {
        /// Device number asked for.
        device: u8,
    },
    /// Functions that form no device.
    #[error(
        "functions {numbers} are no device: software looks for function 0 first, and each number can be there once; leave out `function` for a device with one"
    )]
    Numbers {
        /// Numbers asked for, in this order.
        numbers: String,
    },
    /// Functions at several ports.
    #[error("the functions of one device cannot be on both {one} and {other}: leave out `on` but for the first")]
    Ports {
        /// One port.
        one: String,
        /// Another one.
        other: String,
    },
    /// The host function is in this machine already.
    #[error("device {name} is the host function that this machine has as {there}")]
    Twice {
        /// The new one.
        name: Name,
        /// The one that is there.
        there: Name,
    },
    /// More than one function.
    #[error(
        "{device} stands for {functions} host functions that are not one device with a function 0: add them one by one, by their addresses"
    )]
    Several {
        /// As given.
        device: String,
        /// How many.
        functions: usize,
    },
    /// CDI files.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// No device of that name.
    #[error("there is no device {name}; `banyan ctl list` shows those that there are")]
    Unknown {
        /// The name.
        name: Name,
    },
    /// A second request.
    #[error("device {name} is being removed already")]
    LeavesAlready {
        /// The name.
        name: Name,
    },
    /// No slot that it could leave.
    #[error("device {name} does not hang on a hot-plug port: it stays until the machine ends")]
    Fixed {
        /// The name.
        name: Name,
    },
    /// No port of that name.
    #[error("there is no port {wanted}; {ports}")]
    NoPort {
        /// Asked for.
        wanted: String,
        /// What there is.
        ports: PortList,
    },
    /// All ports are taken.
    #[error("no hot-plug port is free: remove a device, or start the machine with more (--pcie root-ports=N); {ports}")]
    NoneFree {
        /// What there is.
        ports: PortList,
    },
    /// The port refuses.
    #[error(transparent)]
    Plug(#[from] PlugError),
    /// The host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The device's configuration.
    #[error(transparent)]
    Spec(SpecError),
    /// A name of the wrong form.
    #[error(transparent)]
    Name(TopologyError),
    /// A device that is there already in its way.
    #[error(transparent)]
    Beside(#[from] BesideError),
    /// The function.
    #[error(transparent)]
    Make(#[from] FunctionError),
}

impl HotPlugError {
    /// As the API tells it.
    #[must_use]
    pub fn for_client(&self) -> ApiError {
        let kind = match self {
            Self::Unknown { .. } | Self::NoPort { .. } => ErrorKind::NotFound,
            Self::Taken { .. }
            | Self::StillLeaves { .. }
            | Self::NamedAsPort { .. }
            | Self::Twice { .. }
            | Self::LeavesAlready { .. }
            | Self::NoneFree { .. }
            | Self::RootFull
            | Self::Plug(_) => ErrorKind::Conflict,
            Self::Beside(error) => error.kind(),
            Self::Nothing
            | Self::Place { .. }
            | Self::Numbers { .. }
            | Self::Ports { .. }
            | Self::Fixed { .. }
            | Self::Several { .. }
            | Self::Cdi(_)
            | Self::Host(_)
            | Self::Backend(_)
            | Self::Name(_)
            // Files, taps and servers that a client named.
            | Self::Make(FunctionError::Backend(_) | FunctionError::Block(_) | FunctionError::Net(_) | FunctionError::Remote(_))
            | Self::Spec(_) => ErrorKind::BadRequest,
            Self::Make(_) => ErrorKind::Internal,
        };
        ApiError::from_error(kind, self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_the_wrong_form_is_the_clients_mistake_and_a_place_that_is_taken_a_conflict() {
        let name = Name::from("../x").check().map_err(HotPlugError::Name).unwrap_err();
        assert_eq!(name.for_client().kind, ErrorKind::BadRequest);
        let taken = HotPlugError::from(BesideError::Vsock { there: Name::from("vsock0") });
        assert_eq!(taken.for_client().kind, ErrorKind::Conflict);
        let path = "/nonexistent".into();
        let source = std::io::Error::from(std::io::ErrorKind::NotFound);
        let missing = HotPlugError::Make(BackendError::Disk { path, readonly: false, source }.into());
        assert_eq!(missing.for_client().kind, ErrorKind::BadRequest);
    }
}
