//! Adds devices to a bus with many device numbers, a root bus or a conventional one, and takes them out. Such a bus has no slot
//! registers here: how the guest learns of it is somebody else's business (ACPI).

use std::collections::BTreeMap;

use super::fit;
use super::hotplug::{Newcomer, PlugError};
use super::{Hierarchy, What};
use crate::address::{Bdf, Devfn, Sbdf};
use crate::bar::{PORTS, ROM};
use crate::effect::Effect;
use crate::function::{FunctionId, Shared};
use crate::port::Port;
use crate::sync::lock;
use crate::topology::{EndpointSpec, Name, Need, Parent, Resource, Window, Windows};

/// A bus that takes devices at several numbers while the guest runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BusInfo {
    /// What it hangs on.
    pub on: Parent,
    /// The name of that.
    pub name: Name,
    /// Device numbers from 0 on that take devices; 32 on a root bus.
    pub numbers: u8,
    /// Functions by device number, ports among them.
    pub devices: BTreeMap<u8, Vec<(FunctionId, Name)>>,
}

impl BusInfo {
    /// Numbers that take a device at this moment, in ascending order.
    pub fn free(&self) -> impl Iterator<Item = u8> + '_ {
        (0..self.numbers).filter(|number| !self.devices.contains_key(number))
    }
}

/// Which addresses of siblings count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// Those of this moment.
    Now,
    /// Those that they have after a reset of the machine.
    AfterReset,
}

impl Hierarchy {
    /// The bus on `on`, if devices can come to it: the bus of a root complex, or that of a bridge that is planned so.
    #[must_use]
    pub fn bus(&self, on: Parent) -> Option<BusInfo> {
        let (name, numbers) = match on {
            Parent::RootComplex(root) => (&self.roots.get(root)?.name, 32),
            Parent::Port(id) => {
                let node = self.nodes.get(&id)?;
                let What::Port(port) = &node.what else { return None };
                (&node.name, port.planned().spec.bus_slots())
            }
        };
        (numbers > 0).then(|| BusInfo { on, name: name.clone(), numbers, devices: self.devices_on(on) })
    }

    /// Functions on the bus on `on` by device number, ports among them and virtual functions not.
    #[must_use]
    pub fn devices_on(&self, on: Parent) -> BTreeMap<u8, Vec<(FunctionId, Name)>> {
        let mut devices: BTreeMap<u8, Vec<(FunctionId, Name)>> = BTreeMap::new();
        for id in self.in_order(self.children(on)) {
            let Some(node) = self.nodes.get(&id).filter(|node| !node.is_virtual) else { continue };
            devices.entry(node.devfn.device()).or_default().push((id, node.name.clone()));
        }
        devices
    }

    /// Conventional buses that take devices while the guest runs, in the order of the plan.
    pub fn conventional_buses(&self) -> impl Iterator<Item = BusInfo> + '_ {
        self.nodes.keys().filter_map(|id| self.bus(Parent::Port(*id)))
    }

    /// Whether a device with these `functions` finds addresses on the bus on `on`: on a root bus those of the root complex that
    /// neither devices there nor windows of ports have.
    pub fn check_bus_fit(&self, on: Parent, functions: &[EndpointSpec]) -> Result<(), PlugError> {
        let mut needs: Vec<_> = functions.iter().map(fit::conventional_needs).collect();
        let id = match on {
            Parent::Port(id) => id,
            Parent::RootComplex(index) => {
                let root = self.roots.get(index).ok_or(PlugError::NoBus)?;
                let windows: Vec<Window> = root.windows.iter().filter(|window| window.base < PORTS).copied().collect();
                let (mut taken, unassigned) = self.siblings(on, &windows, When::Now);
                taken.extend(self.windows_below(on));
                needs.push(unassigned);
                return fit::place_on_root(&windows, &taken, &needs).map(drop).map_err(|missing| PlugError::NoRoomOnRoot {
                    root: root.name.clone(),
                    missing,
                    ports: self.hot_plug_ports(),
                });
            }
        };
        let (node, port) = self.hot_port(id)?;
        let windows = super::hotplug::usable(port);
        let (taken, unassigned) = self.siblings(on, &both(windows), When::Now);
        needs.push(unassigned);
        fit::place(windows, &taken, &needs).map(drop).map_err(|missing| PlugError::NoRoom {
            port: node.name.clone(),
            missing,
            ports: self.hot_plug_ports(),
        })
    }

    /// Adds the functions of one device to the bus on `on`, with nothing assigned. After a reset of the machine they have
    /// addresses on a conventional bus, if they find some, and none on a root bus.
    pub fn plug_on_bus(&mut self, on: Parent, functions: Vec<Newcomer>, effects: &mut Vec<Effect>) -> Result<(), PlugError> {
        let bus = self.bus(on).ok_or(PlugError::NoBus)?;
        let device = functions.first().map_or(0, |newcomer| newcomer.at.device());
        let refusal = match () {
            () if bus.devices.contains_key(&device) => Some("a device is there"),
            () if device >= bus.numbers => Some("no device can come to that number"),
            () => None,
        };
        if let (Some(why), Some(newcomer)) = (refusal, functions.first()) {
            return Err(PlugError::Number { function: newcomer.name.clone(), at: newcomer.at, on: bus.name, why });
        }
        self.check_places(&bus.name, device, &functions)?;
        let specs: Vec<EndpointSpec> = functions.iter().map(|newcomer| newcomer.spec.clone()).collect();
        self.check_bus_fit(on, &specs)?;
        let number = self.planned_number(on).ok_or(PlugError::NoBus)?;
        let places = match on {
            Parent::RootComplex(_) => None,
            Parent::Port(port) => {
                let windows = self.hot_port(port)?.1.planned().windows;
                let (taken, _) = self.siblings(on, &both(windows), When::AfterReset);
                let needs: Vec<_> = specs.iter().map(fit::conventional_needs).collect();
                fit::place(windows, &taken, &needs).ok()
            }
        };
        let programmed = self.programming(on, &functions, places.as_deref());
        let ids = self.insert(on, number, functions, programmed);
        self.settle(&ids, effects);
        self.settle_mirrors(effects);
        Ok(())
    }

    /// Takes the device at number `device` out of the bus on `on` at once: its functions read all ones from here on and never
    /// come back. Below a port without slot registers the link goes down. Returns the functions; none if there is none, if it is
    /// a port, or if the port has a slot, which tells the guest of what leaves ([`Hierarchy::unplug`]).
    pub fn unplug_from_bus(&mut self, on: Parent, device: u8, effects: &mut Vec<Effect>) -> Vec<(FunctionId, Shared)> {
        let functions = self.devices_on(on).remove(&device).unwrap_or_default();
        let (with_slot, with_link) = match on {
            Parent::RootComplex(_) => (false, false),
            Parent::Port(id) => {
                let port = self.hot_port(id).ok().map(|(_, port)| port);
                let link = |port: &Port| port.kind().has_link_below();
                (port.is_some_and(|port| port.slot().is_some()), port.is_some_and(link))
            }
        };
        let ids: Vec<FunctionId> = match on {
            // Virtual functions may have numbers of their own.
            Parent::Port(id) if with_link && !functions.is_empty() => self.below(id).into_iter().skip(1).collect(),
            _ => functions.into_iter().map(|(id, _)| id).collect(),
        };
        if with_slot || ids.is_empty() || ids.iter().any(|id| self.endpoint(*id).is_none()) {
            return Vec::new();
        }
        let gone = self.take_out(on, &ids, effects);
        if let Parent::Port(id) = on
            && with_link
            && let Some(What::Port(port)) = self.nodes.get_mut(&id).map(|node| &mut node.what)
        {
            port.vacate();
        }
        gone
    }

    /// Segment and bus number on `on`, as planned, with device and function 0: where mirrors of newcomers lie.
    #[must_use]
    pub fn planned_number(&self, on: Parent) -> Option<Sbdf> {
        match on {
            Parent::RootComplex(root) => {
                let root = self.roots.get(root)?;
                Some(Sbdf { segment: root.segment, bdf: Bdf::new(root.buses.secondary, Devfn::ZERO) })
            }
            Parent::Port(port) => self.planned_bus(port).ok(),
        }
    }

    /// Windows of the ports on a bus.
    fn windows_below(&self, on: Parent) -> impl Iterator<Item = Window> + '_ {
        self.children(on).iter().filter_map(|id| self.nodes.get(id)).flat_map(|node| match &node.what {
            What::Port(port) => both(super::hotplug::usable(port)),
            What::Endpoint(_) => Vec::new(),
        })
    }

    /// What the devices on a bus have of `windows`, and what of theirs has no address there.
    fn siblings(&self, on: Parent, windows: &[Window], when: When) -> (Vec<Window>, fit::Needs) {
        let (mut taken, mut unassigned) = (Vec::new(), Vec::new());
        let inside = |at: u64, size: u64| windows.iter().any(|window| window.contains(at, size));
        for node in self.children(on).iter().filter_map(|id| self.nodes.get(id)) {
            let What::Endpoint(shared) = &node.what else { continue };
            let function = lock(shared);
            let bars = function.bars();
            let all = bars.specs().chain(bars.spec(ROM).map(|spec| (ROM, spec)));
            for (bar, each) in all.filter(|(_, spec)| spec.is_memory()) {
                let at = match when {
                    When::Now => bars.address(bar),
                    When::AfterReset if bar == ROM => node.programming.rom,
                    When::AfterReset => node.programming.bars.get(usize::from(bar)).copied().flatten(),
                };
                match at.filter(|at| inside(*at, each.size)) {
                    // A page is one device's.
                    Some(base) => taken.push(Window { base, limit: (base | 0xFFF).max(base + (each.size - 1)) }),
                    None if bar == ROM => unassigned.push((Resource::Rom, Need { each, count: 1 })),
                    None => unassigned.push((Resource::Bar(bar), Need { each, count: 1 })),
                }
            }
        }
        (taken, unassigned)
    }
}

fn both(windows: Windows) -> Vec<Window> {
    windows.memory.into_iter().chain(windows.prefetchable).collect()
}

#[cfg(test)]
mod tests;
