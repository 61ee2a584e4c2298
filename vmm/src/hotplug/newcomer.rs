//! Makes the functions of a device that comes, finds a port for it, and puts it in: while the guest runs and after a reset.

use std::sync::PoisonError;

use api::config::{DeviceConfig, DeviceKind, VmConfig};
use devices::vfio::Placement;
use pci::address::{Devfn, HostBdf};
use pci::bar::BarSpec;
use pci::function::{FunctionId, Shared};
use pci::hierarchy::{Newcomer, PortInfo, PortList};
use pci::intx::{self, IntxRoute};

use super::HotPlugError;
use crate::cdi;
use crate::changes::Added;
use crate::effects::Endpoint;
use crate::endpoints::{Factory, FunctionError, Order};
use crate::pci_bus::PciBus;
use crate::root_slots::RootSlots;

/// The functions of the device that somebody asked for, with their numbers. A CDI name stands for functions of the host,
/// which are one device here if they are one there; they keep their numbers then.
pub(super) fn functions(config: &VmConfig, device: &[DeviceConfig]) -> Result<Vec<(DeviceConfig, u8)>, HotPlugError> {
    let mut functions = Vec::new();
    for asked in device {
        let wanted = VmConfig { devices: vec![asked.clone()], cdi_dirs: config.cdi_dirs.clone(), ..VmConfig::default() };
        let (found, notes) = cdi::apply(&wanted)?;
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
    if let Some(number) = functions.iter().find_map(|(function, _)| function.device.filter(|number| *number != 0)) {
        return Err(HotPlugError::Place { device: number });
    }
    let numbers: Vec<u8> = functions.iter().map(|(_, number)| *number).collect();
    let twice = numbers.iter().enumerate().any(|(index, number)| numbers.iter().take(index).any(|other| other == number));
    if twice || !numbers.contains(&0) {
        let numbers = numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        return Err(HotPlugError::Numbers { numbers });
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

/// The port called `wanted`, or the first free one that has room for functions with `bars`.
pub(super) fn port(pci: &PciBus, wanted: Option<&str>, bars: &[[Option<BarSpec>; 6]]) -> Result<PortInfo, HotPlugError> {
    pci.change(|tree| {
        let ports: Vec<PortInfo> = tree.hierarchy.ports().collect();
        if let Some(wanted) = wanted {
            let port = ports.into_iter().find(|port| port.name.0 == wanted);
            let missing = || HotPlugError::NoPort { wanted: wanted.to_owned(), ports: tree.hierarchy.hot_plug_ports() };
            let port = port.ok_or_else(missing)?;
            tree.hierarchy.check_fit(port.id, bars)?;
            return Ok(port);
        }
        let mut refusal = HotPlugError::NoneFree { ports: tree.hierarchy.hot_plug_ports() };
        for port in ports.into_iter().filter(PortInfo::is_free) {
            match tree.hierarchy.check_fit(port.id, bars) {
                Ok(()) => return Ok(port),
                Err(error) => refusal = error.into(),
            }
        }
        Err(refusal)
    })
}

/// Makes a device and puts it into `port`. The guest finds all of its functions in one moment.
pub(super) fn plug(pci: &PciBus, factory: &mut Factory, port: &PortInfo, device: &Added) -> Result<(), HotPlugError> {
    let mut made: Vec<(FunctionId, Devfn, Endpoint)> = Vec::new();
    for function in &device.functions {
        let at = Devfn::new(0, function.number);
        let (id, gsi) = pci.change(|tree| {
            let route = tree.hierarchy.intx(port.id, at, function.spec.interrupt_pin);
            (tree.hierarchy.next_id(), route.map(intx::gsi))
        });
        let placement = Placement::BelowPort(port.link);
        let (name, endpoint, bars) = (function.name.0.as_str(), &function.endpoint, function.spec.bars);
        let access = function.access;
        made.push((id, at, factory.make(&Order { name, id, endpoint, access, bars, gsi, placement })?));
    }
    factory.attach_wires().map_err(|error| HotPlugError::Make(FunctionError::Event(error)))?;
    let domain = factory.domain();
    let shown_at = pci.ecam_address(port.below);
    pci.change(|tree| {
        tree.mapper.set_domain(domain);
        let (mut newcomers, mut ids) = (Vec::new(), Vec::new());
        for ((id, at, endpoint), wanted) in made.into_iter().zip(&device.functions) {
            let function = Shared::clone(&endpoint.function);
            let mirror = shown_at.and_then(|bus| tree.mapper.mirror(bus + (u64::from(at.function()) << 12), id));
            let mirrored = mirror.is_some_and(|mirror| {
                let mut function = function.lock().unwrap_or_else(PoisonError::into_inner);
                function.mirror(&mirror)
            });
            newcomers.push(Newcomer { id, name: wanted.name.clone(), at, function, mirrored });
            tree.mapper.add(id, endpoint);
            ids.push(id);
        }
        let plugged = tree.hierarchy.plug(port.id, newcomers, &mut tree.effects);
        if plugged.is_err() {
            ids.into_iter().for_each(|id| tree.mapper.remove(id));
        }
        plugged
    })?;
    Ok(())
}

/// Makes a device of one function and puts it on the root bus at its number. Its BARs are left to the guest.
pub(super) fn plug_on_root(
    pci: &PciBus,
    factory: &mut Factory,
    slots: &RootSlots,
    device: &Added,
    tell: bool,
) -> Result<(), HotPlugError> {
    let (Some(number), [function]) = (device.root_number, device.functions.as_slice()) else { return Err(HotPlugError::Nothing) };
    let at = Devfn::new(number, 0);
    let id = pci.change(|tree| tree.hierarchy.next_id());
    let pin = function.spec.interrupt_pin.checked_sub(1);
    let gsi = pin.map(|pin| intx::gsi(IntxRoute { root_complex: 0, device: number, pin }));
    let (name, endpoint, bars) = (function.name.0.as_str(), &function.endpoint, function.spec.bars);
    let access = function.access;
    let made = factory.make(&Order { name, id, endpoint, access, bars, gsi, placement: Placement::RootBus })?;
    factory.attach_wires().map_err(|error| HotPlugError::Make(FunctionError::Event(error)))?;
    let domain = factory.domain();
    let newcomer = Newcomer { id, name: function.name.clone(), at, function: Shared::clone(&made.function), mirrored: false };
    pci.change(|tree| {
        tree.mapper.set_domain(domain);
        tree.mapper.add(id, made);
        let plugged = tree.hierarchy.plug_root(0, newcomer, &mut tree.effects);
        if plugged.is_err() {
            tree.mapper.remove(id);
        }
        plugged
    })?;
    slots.put(number, id, function.name.clone(), tell);
    Ok(())
}

/// Puts devices back that came before a reset, where they were, with BARs in the windows of their ports. No guest runs.
pub(crate) fn restore(
    pci: &PciBus,
    factory: &mut Factory,
    added: &[Added],
    slots: Option<&RootSlots>,
) -> Result<(), HotPlugError> {
    for device in added {
        if let (Some(_), Some(slots)) = (device.root_number, slots) {
            plug_on_root(pci, factory, slots, device, false)?;
            continue;
        }
        let port = pci.change(|tree| tree.hierarchy.ports().find(|port| port.name == device.port));
        let port = port.ok_or_else(|| HotPlugError::NoPort { wanted: device.port.to_string(), ports: PortList::default() })?;
        plug(pci, factory, &port, device)?;
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
        let found = functions(&VmConfig::default(), &devices).map_err(|error| error.to_string())?;
        Ok(found.into_iter().map(|(_, number)| number).collect())
    }

    #[test]
    fn functions_form_one_device_with_a_function_0_on_one_port() {
        assert_eq!(stubs(&["stub"]), Ok(vec![0]));
        assert_eq!(stubs(&["stub,function=3,on=a", "stub,function=0", "stub,function=1,on=a"]), Ok(vec![3, 0, 1]));
        for (devices, part) in [
            (&["stub,function=1"][..], "functions 1 are no device"),
            (&["stub", "stub"], "functions 0, 0 are no device"),
            (&["stub,device=2"], "not device 2"),
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
