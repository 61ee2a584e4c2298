//! Makes the functions of a device that comes, finds a port for it, and puts it in: while the guest runs and after a reset.

use std::ops::ControlFlow;

use api::config::{Attach, DeviceConfig, DeviceKind, PcieConfig, VmConfig};
use devices::vfio::Placement;
use pci::address::{Bdf, Devfn, HostBdf, Sbdf};
use pci::effect::Effect;
use pci::function::Shared;
use pci::hierarchy::{BusInfo, Hierarchy, Newcomer, PlugError, PortInfo};
use pci::intx;
use pci::topology::{EndpointSpec, Name, Parent, Window};

use super::HotPlugError;
use super::choice::{self, Candidate, Unfit};
use super::nearness::{Far, HostPlace, PortPlaces};
use super::refusal::more_ports;
use crate::bus_slots::{BusSlots, Functions, Hears, Slot};
use crate::cdi;
use crate::changes::Added;
use crate::effects::Endpoint;
use crate::endpoints::{Factory, FunctionError, Order};
use crate::host::recorded::RecordedHost;
use crate::pci_bus::PciBus;

/// The functions of the device that somebody asked for, with their numbers. A CDI name stands for functions of the host,
/// which are one device here if they are one there; they keep their numbers then. The host may be data (`recorded`).
pub(super) fn functions(
    config: &VmConfig,
    device: &[DeviceConfig],
    recorded: Option<&RecordedHost>,
) -> Result<Vec<(DeviceConfig, u8)>, HotPlugError> {
    let mut functions = Vec::new();
    for asked in device {
        let (cdi_dirs, cdi_mistakes) = (config.cdi_dirs.clone(), config.cdi_mistakes);
        let wanted = VmConfig { devices: vec![asked.clone()], cdi_dirs, cdi_mistakes, ..VmConfig::default() };
        let (found, notes) = match recorded {
            Some(recorded) => cdi::apply_in(&recorded.tree, &wanted)?,
            None => cdi::apply(&wanted)?,
        };
        notes.iter().for_each(|note| log::warn!("{note}"));
        match found.devices.as_slice() {
            [only] => functions.push((only.clone(), only.function)),
            several if device.len() == 1 => {
                let numbers = host_numbers(several);
                let refused = || HotPlugError::Several { device: asked.to_string(), functions: several.len() };
                functions.extend(several.iter().cloned().zip(numbers.ok_or_else(refused)?));
            }
            several => return Err(HotPlugError::Several { device: asked.to_string(), functions: several.len() }),
        }
    }
    let numbers: Vec<u8> = functions.iter().map(|(_, number)| *number).collect();
    let twice = numbers.iter().enumerate().any(|(index, number)| numbers.iter().take(index).any(|other| other == number));
    if twice || !numbers.contains(&0) {
        let numbers = numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        return Err(HotPlugError::Numbers { numbers });
    }
    if let Some(number) = numbers.into_iter().find(|number| *number > 7) {
        return Err(HotPlugError::Function { number });
    }
    let mut ports = functions.iter().filter_map(|(function, _)| function.on.clone());
    let one = ports.next();
    if let Some((one, other)) = one.as_ref().and_then(|one| Some((one.clone(), ports.find(|other| other != one)?))) {
        return Err(HotPlugError::Ports { one, other });
    }
    if let Some((first, _)) = functions.first_mut() {
        first.on = one;
    }
    Ok(functions)
}

/// Function numbers of host functions that are one device of the host, with a function 0.
fn host_numbers(functions: &[DeviceConfig]) -> Option<Vec<u8>> {
    let at = |function: &DeviceConfig| match &function.kind {
        DeviceKind::Vfio(vfio) => vfio.path.to_str()?.parse::<HostBdf>().ok(),
        _ => None,
    };
    let places: Option<Vec<HostBdf>> = functions.iter().map(at).collect();
    let places = places?;
    let slot = |at: &HostBdf| (at.domain, at.bdf.bus(), at.bdf.devfn().device());
    let first = slot(places.first()?);
    let numbers: Vec<u8> = places.iter().map(|at| at.bdf.devfn().function()).collect();
    (places.iter().all(|at| slot(at) == first) && numbers.contains(&0)).then_some(numbers)
}

/// Where a device shall go.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Wish<'a> {
    /// The port or bridge.
    pub(super) on: Option<&'a str>,
    /// The kind of bus.
    pub(super) attach: Option<Attach>,
    /// Device number on that bus.
    pub(super) device: Option<u8>,
    /// How the machine got its ports.
    pub(super) pcie: PcieConfig,
    /// Where the ports are.
    pub(super) places: Option<&'a PortPlaces>,
    /// Where the device is on the host, if it is from there.
    pub(super) from: Option<&'a HostPlace>,
}

impl<'a> Wish<'a> {
    /// What the configuration of a device says.
    pub(super) fn of(device: &'a DeviceConfig) -> Self {
        Self { on: device.on.as_deref(), attach: device.attach, device: device.device, ..Self::default() }
    }

    /// How near a port is to where the device is on the host, and whether another one belongs there.
    fn far(&self, port: &Name) -> (Far, bool) {
        let Some(places) = self.places else { return (Far::Unknown, false) };
        let far = self.from.map_or(Far::Unknown, |from| places.far(port, from));
        (far, far != Far::Own && places.is_home(port))
    }
}

/// Where a device goes.
pub(super) enum Found {
    /// Into the slot of a port.
    Port(Box<PortInfo>),
    /// To a device number of the bus on what has this name.
    Slot(Name, Slot),
}

impl Found {
    /// The name of what the device hangs on, and its number on a bus with several.
    pub(super) fn name_and_number(self) -> (Name, Option<u8>) {
        match self {
            Self::Port(port) => (port.name, None),
            Self::Slot(name, slot) => (name, Some(slot.number)),
        }
    }
}

/// Places of devices that were accepted and are not there yet.
pub(super) struct Promised(pub(super) Vec<(Name, Option<u8>, Name)>);

impl Promised {
    /// Who has this place.
    fn by(&self, on: &Name, number: Option<u8>) -> Option<&Name> {
        self.0.iter().find(|(name, taken, _)| name == on && *taken == number).map(|(.., by)| by)
    }
}

/// Where a device with these `functions` goes: where `wish` says; else to the root bus if devices can come there; else to the
/// best free port with room; else to the first conventional bus with a number and room.
pub(super) fn place(
    pci: &PciBus,
    slots: Option<&BusSlots>,
    wish: &Wish<'_>,
    functions: &[EndpointSpec],
    promised: &Promised,
) -> Result<Found, HotPlugError> {
    let buses = slots.map(BusSlots::buses).unwrap_or_default();
    pci.change(|tree| {
        let hierarchy = &tree.hierarchy;
        let buses: Vec<BusInfo> = buses.iter().filter_map(|on| hierarchy.bus(*on)).collect();
        let conventional = || buses.iter().filter(|bus| matches!(bus.on, Parent::Port(_)));
        let named = wish.on.and_then(|wanted| buses.iter().find(|bus| bus.name.0 == wanted));
        if let Some(bus) = named {
            return slot(hierarchy, bus, wish.device, functions, promised);
        }
        if wish.on.is_none() && wish.attach == Some(Attach::Pci) {
            let first =
                |refusal: Option<HotPlugError>, bus| match (refusal, slot(hierarchy, bus, wish.device, functions, promised)) {
                    (_, Ok(found)) => ControlFlow::Break(found),
                    (first, Err(error)) => ControlFlow::Continue(first.or(Some(error))),
                };
            return match conventional().try_fold(None, first) {
                ControlFlow::Break(found) => Ok(found),
                ControlFlow::Continue(refusal) => {
                    Err(refusal.unwrap_or_else(|| HotPlugError::NoBridge { ports: hierarchy.hot_plug_ports() }))
                }
            };
        }
        if let Some(root) = buses.iter().find(|bus| wish.on.is_none() && matches!(bus.on, Parent::RootComplex(_))) {
            return slot(hierarchy, root, wish.device, functions, promised);
        }
        let port = if let Some(device) = wish.device.filter(|device| *device != 0) {
            Err(HotPlugError::Place { device })
        } else {
            port(hierarchy, wish, functions, promised).map(|port| Found::Port(Box::new(port)))
        };
        let Some(refusal) = port.as_ref().err().filter(|_| wish.on.is_none() && wish.attach.is_none()) else { return port };
        let none_there = matches!(refusal, HotPlugError::NoneFree { .. } | HotPlugError::Place { .. });
        let mut elsewhere = conventional().map(|bus| slot(hierarchy, bus, wish.device, functions, promised)).peekable();
        match elsewhere.peek() {
            None => port,
            // What a bus lacks says more than that there is no port.
            Some(_) => {
                let mut last = port;
                for found in elsewhere {
                    if found.is_ok() {
                        return found;
                    }
                    if none_there {
                        last = found;
                    }
                }
                last
            }
        }
    })
}

/// A device number of `bus` for a device: the one that it asks for, else the first free one.
fn slot(
    hierarchy: &Hierarchy,
    bus: &BusInfo,
    wanted: Option<u8>,
    functions: &[EndpointSpec],
    promised: &Promised,
) -> Result<Found, HotPlugError> {
    if functions.iter().any(|function| function.sriov.is_some()) {
        return Err(HotPlugError::VirtualFunctions { on: bus.name.clone(), ports: hierarchy.hot_plug_ports() });
    }
    // Software takes number 0 of a root bus for the host bridge.
    let least = if matches!(bus.on, Parent::RootComplex(_)) { 1 } else { 0 };
    let mut free = bus.free().filter(|number| *number >= least && promised.by(&bus.name, Some(*number)).is_none());
    let number = match wanted {
        None => free.next().ok_or_else(|| HotPlugError::BusFull { on: bus.name.clone(), ports: hierarchy.hot_plug_ports() })?,
        Some(device) if free.any(|number| number == device) => device,
        Some(device) => {
            let ports = hierarchy.hot_plug_ports();
            return Err(HotPlugError::Number { device, on: bus.name.clone(), least, numbers: bus.numbers, ports });
        }
    };
    hierarchy.check_bus_fit(bus.on, functions)?;
    Ok(Found::Slot(bus.name.clone(), Slot { on: bus.on, number }))
}

/// The port that `wish` names, or the best free one ([`choice`]) for a device with these `functions`.
fn port(
    hierarchy: &Hierarchy,
    wish: &Wish<'_>,
    functions: &[EndpointSpec],
    promised: &Promised,
) -> Result<PortInfo, HotPlugError> {
    let mut ports: Vec<PortInfo> = hierarchy.ports().collect();
    if let Some(wanted) = wish.on {
        let port = ports.into_iter().find(|port| port.name.0 == wanted);
        let missing = || HotPlugError::NoPort { wanted: wanted.to_owned(), ports: hierarchy.hot_plug_ports() };
        let port = port.ok_or_else(missing)?;
        hierarchy.check_fit(port.id, functions)?;
        return match promised.by(&port.name, None) {
            Some(by) => Err(HotPlugError::Promised { by: by.clone(), port: port.name }),
            None => Ok(port),
        };
    }
    ports.retain(PortInfo::is_free);
    let mut free = Vec::new();
    for port in &ports {
        let unfit = match (promised.by(&port.name, None), hierarchy.check_fit(port.id, functions)) {
            (Some(by), _) => Some(Unfit::Promised(by.clone())),
            (None, Ok(())) => None,
            (None, Err(PlugError::NoRoom { missing, .. })) => Some(Unfit::Room(missing)),
            (None, Err(error)) => return Err(error.into()),
        };
        let bytes = |window: Option<Window>| window.map_or(0, Window::len);
        let (far, is_of_other) = wish.far(&port.name);
        free.push(Candidate {
            name: port.name.clone(),
            far,
            is_of_other,
            prefetchable: bytes(port.windows.prefetchable),
            memory: bytes(port.windows.memory),
            unfit,
        });
    }
    match choice::choose(&free) {
        Ok(chosen) => Ok(ports.swap_remove(chosen)),
        Err(_) if free.is_empty() => {
            Err(HotPlugError::NoneFree { more: more_ports(wish.pcie), ports: hierarchy.hot_plug_ports() })
        }
        Err(refusals) => Err(HotPlugError::NoneFits { refusals }),
    }
}

/// Makes a device and puts it in its place.
pub(super) fn put(
    pci: &PciBus,
    factory: &mut Factory,
    slots: Option<&BusSlots>,
    device: &Added,
    hears: Hears,
) -> Result<(), HotPlugError> {
    let missing = || {
        let ports = pci.change(|tree| tree.hierarchy.hot_plug_ports());
        HotPlugError::NoPort { wanted: device.port.to_string(), ports }
    };
    if let (Some(number), Some(slots)) = (device.number, slots) {
        let buses = slots.buses();
        let functions: Vec<EndpointSpec> = device.functions.iter().map(|function| function.spec.clone()).collect();
        let found = pci.change(|tree| {
            let mut buses = buses.iter().filter_map(|on| tree.hierarchy.bus(*on));
            let bus = buses.find(|bus| bus.name == device.port)?;
            Some(slot(&tree.hierarchy, &bus, Some(number), &functions, &Promised(Vec::new())).map(|_| bus.on))
        });
        let at = Slot { on: found.ok_or_else(missing)??, number };
        let functions = plug_in_slot(pci, factory, at, device)?;
        slots.put(at, functions, hears);
        return Ok(());
    }
    let port = pci.change(|tree| tree.hierarchy.ports().find(|port| port.name == device.port));
    plug(pci, factory, &port.ok_or_else(missing)?, device)
}

/// Makes a device and puts it into `port`. The guest finds all of its functions in one moment.
pub(super) fn plug(pci: &PciBus, factory: &mut Factory, port: &PortInfo, device: &Added) -> Result<(), HotPlugError> {
    let made = make(pci, factory, Slot { on: Parent::Port(port.id), number: 0 }, Placement::BelowPort(port.link), device)?;
    put_in(pci, factory, Parent::Port(port.id), made, |hierarchy, made, effects| hierarchy.plug(port.id, made, effects))
}

/// Makes a device and puts it at a number of a bus. Its BARs are left to the guest. Returns its functions.
fn plug_in_slot(pci: &PciBus, factory: &mut Factory, at: Slot, device: &Added) -> Result<Functions, HotPlugError> {
    let on = at.on;
    let placement = if matches!(on, Parent::RootComplex(_)) { Placement::RootBus } else { Placement::Conventional };
    let made = make(pci, factory, at, placement, device)?;
    let functions = made.iter().map(|(newcomer, _)| (newcomer.id, newcomer.name.clone())).collect();
    put_in(pci, factory, on, made, |hierarchy, made, effects| hierarchy.plug_on_bus(on, made, effects))?;
    Ok(functions)
}

/// Makes functions for the bus on `on` known to the machine, shows them in mirrors, and lets `plug` put them into the tree.
fn put_in(
    pci: &PciBus,
    factory: &Factory,
    on: Parent,
    made: Vec<(Newcomer, Endpoint)>,
    plug: impl FnOnce(&mut Hierarchy, Vec<Newcomer>, &mut Vec<Effect>) -> Result<(), PlugError>,
) -> Result<(), HotPlugError> {
    let domain = factory.domain();
    let plugged = pci.change(|tree| {
        tree.mapper.set_domain(domain);
        let bus = tree.hierarchy.planned_number(on);
        let (mut newcomers, mut ids) = (Vec::new(), Vec::new());
        for (mut newcomer, endpoint) in made {
            let id = newcomer.id;
            let at = bus.and_then(|bus| pci.ecam_address(Sbdf { bdf: Bdf::new(bus.bdf.bus(), newcomer.at), ..bus }));
            let mirror = at.and_then(|at| tree.mapper.mirror(at, id));
            newcomer.mirrored = mirror.is_some_and(|mirror| tree.hierarchy.show(on, &newcomer.function, mirror));
            tree.mapper.add(id, endpoint);
            newcomers.push(newcomer);
            ids.push(id);
        }
        let plugged = plug(&mut tree.hierarchy, newcomers, &mut tree.effects);
        if plugged.is_err() {
            ids.into_iter().for_each(|id| tree.mapper.remove(id));
        }
        plugged
    });
    Ok(plugged?)
}

/// Makes the functions of a device for its place.
fn make(
    pci: &PciBus,
    factory: &mut Factory,
    place: Slot,
    placement: Placement,
    device: &Added,
) -> Result<Vec<(Newcomer, Endpoint)>, HotPlugError> {
    let mut made = Vec::new();
    for function in &device.functions {
        let at = Devfn::new(place.number, function.number);
        let (id, gsi) = pci.change(|tree| {
            let route = tree.hierarchy.intx(place.on, at, function.spec.interrupt_pin);
            (tree.hierarchy.next_id(), route.map(intx::gsi))
        });
        let (name, bars, access) = (function.name.0.as_str(), function.spec.bars, function.access);
        let endpoint = &function.endpoint.placed(placement);
        let endpoint = factory.make(&Order { name, id, endpoint, access, bars, gsi, placement })?;
        let (name, spec) = (function.name.clone(), function.spec.clone());
        made.push((Newcomer { id, name, at, spec, function: Shared::clone(&endpoint.function), mirrored: false }, endpoint));
    }
    factory.attach_wires().map_err(|error| HotPlugError::Make(FunctionError::Event(error)))?;
    factory.reset_with_their_bus(made.iter().map(|(_, endpoint)| endpoint));
    Ok(made)
}

/// Puts devices back that came before a reset, where they were, with BARs in the windows of their ports. No guest runs. The one
/// that cannot be put back is told by its name, with its port.
pub(crate) fn restore<'a>(
    pci: &PciBus,
    factory: &mut Factory,
    added: &'a [Added],
    slots: Option<&BusSlots>,
) -> Result<(), (&'a Added, HotPlugError)> {
    for device in added {
        put(pci, factory, slots, device, Hears::Nobody).map_err(|error| (device, error))?;
    }
    if !added.is_empty() {
        // The guest finds them as any other, with no event to take note of.
        pci.change(|tree| tree.hierarchy.reset(&mut tree.effects));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stubs(devices: &[&str]) -> Result<Vec<u8>, String> {
        let devices: Vec<DeviceConfig> = devices.iter().map(|device| device.parse().unwrap()).collect();
        let found = functions(&VmConfig::default(), &devices, None).map_err(|error| error.to_string())?;
        Ok(found.into_iter().map(|(_, number)| number).collect())
    }

    #[test]
    fn functions_form_one_device_with_a_function_0_on_one_port() {
        assert_eq!(stubs(&["stub"]), Ok(vec![0]));
        assert_eq!(stubs(&["stub,function=3,on=a", "stub,function=0", "stub,function=1,on=a"]), Ok(vec![3, 0, 1]));
        for (devices, part) in [
            (&["stub,function=1"][..], "functions 1 are no device"),
            (&["stub", "stub"], "functions 0, 0 are no device"),
            (&["stub", "stub,function=8"], "function 8 cannot be added"),
            (&["stub,on=a", "stub,function=1,on=b"], "both a and b"),
        ] {
            let refused = stubs(devices).unwrap_err();
            assert!(refused.contains(part), "{refused}");
        }
    }

    #[test]
    fn case_b7_host_functions_keep_their_numbers_if_they_are_one_device() {
        let numbers = |places: &[&str]| {
            let functions: Vec<DeviceConfig> = places.iter().map(|place| place.parse().unwrap()).collect();
            host_numbers(&functions)
        };
        assert_eq!(numbers(&["0000:01:00.0", "0000:01:00.1", "0000:01:00.3"]), Some(vec![0, 1, 3]));
        assert_eq!(numbers(&["0000:01:00.1", "0000:01:00.2"]), None, "nothing would be found without a function 0");
        assert_eq!(numbers(&["0000:01:00.0", "0000:02:00.0"]), None, "two devices");
    }
}
