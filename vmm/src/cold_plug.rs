//! Decides what devices hang on whose place nobody gives and that copy no host: a root port each, a downstream port of a
//! switch each, a conventional bus together, or the root bus; and the same for Banyan's own devices. Pure.
//!
//! Functions of one host device that go to the same kind of bus stay functions of one device. A device with a function
//! number above 0 is a function of the device before it.

use std::collections::{BTreeMap, BTreeSet};

use api::config::{ColdPlugPort, PcieConfig};
use pci::address::HostBdf;
use pci::link::{Link, LinkRate};
use pci::topology::{EndpointSpec, Name, NodeKind, NodeSpec, Place, PortKind, PortSpec, Topology};
use thiserror::Error;

use crate::budget;

/// Devices on one bus at most; a conventional bus takes as many.
const DEVICES: usize = 32;

/// A device without a place.
#[derive(Debug, Clone)]
pub struct Loose {
    /// Its name.
    pub name: Name,
    /// For a function of the host that shares a device number there with others: which.
    pub host: Option<HostBdf>,
    /// What the planner must know of it.
    pub endpoint: EndpointSpec,
    /// Its link, as far as it is known.
    pub link: Option<Link>,
    /// AtomicOp completer widths that the host's root port has for it.
    pub atomic_completers: u8,
    /// Device number that the user wants.
    pub device: Option<u8>,
    /// Function number; above 0 for a function of the device before it.
    pub function: u8,
    /// What it is to hang on.
    pub port: ColdPlugPort,
    /// Root complex that it is to be below.
    pub root: Name,
}

/// A device of Banyan's own.
#[derive(Debug, Clone)]
pub struct Own {
    /// Its name.
    pub name: Name,
    /// What the planner must know of it.
    pub endpoint: EndpointSpec,
    /// It hangs on a root port of its own.
    pub on_port: bool,
}

/// Functions of one device, with their numbers.
struct Group {
    functions: Vec<(Loose, u8)>,
}

/// Adds ports for `devices`, the devices, and the ports of the budget in `config` to `topology`; the latter below `root`.
/// Returns what a user should know and did not ask for.
pub fn place(
    topology: &mut Topology,
    root: &Name,
    config: &PcieConfig,
    devices: Vec<Loose>,
) -> Result<Vec<String>, ColdPlugError> {
    let mut groups = group(devices)?;
    let notes = groups.iter_mut().flat_map(Group::with_function_zero).collect();
    let (mut switched, mut conventional) = (Vec::new(), Vec::new());
    for group in groups {
        match group.first().port {
            ColdPlugPort::RootPort => on_root_port(topology, group),
            ColdPlugPort::NoPort => {
                let on = group.first().root.clone();
                let device = group.first().device;
                group.hang(topology, &on, device);
            }
            ColdPlugPort::SwitchPort => switched.push(group),
            ColdPlugPort::BridgePort => conventional.push(group),
        }
    }
    on_switches(topology, root, config, switched)?;
    on_bridges(topology, root, config, conventional);
    Ok(notes)
}

/// Puts together what is one device, in the order in which the first function of each was given.
fn group(devices: Vec<Loose>) -> Result<Vec<Group>, ColdPlugError> {
    let mut groups: Vec<Group> = Vec::new();
    // Where the device before is.
    let mut last = None;
    for device in devices {
        let same_device = |group: &Group| {
            let first = group.first();
            let together = first.host.zip(device.host).is_some_and(|(a, b)| {
                (a.domain, a.bdf.bus(), a.bdf.devfn().device()) == (b.domain, b.bdf.bus(), b.bdf.devfn().device())
            });
            together && first.port == device.port && first.root == device.root
        };
        let index = if device.function == 0 {
            groups.iter().position(same_device)
        } else {
            let (name, function) = (device.name.clone(), device.function);
            let fits = last.filter(|index| groups.get(*index).is_some_and(|group: &Group| group.first().port == device.port));
            Some(fits.ok_or(ColdPlugError::NothingToJoin { name, function })?)
        };
        let number = match device.host {
            Some(at) if device.function == 0 => at.bdf.devfn().function(),
            _ => device.function,
        };
        if let Some(group) = index.and_then(|index| groups.get_mut(index)) {
            group.functions.push((device, number));
        } else {
            groups.push(Group { functions: vec![(device, number)] });
        }
        last = index.or(groups.len().checked_sub(1));
    }
    Ok(groups)
}

impl Group {
    /// A group is never empty.
    fn first(&self) -> &Loose {
        &self.functions[0].0
    }

    /// Function 0 must exist where another does: the lowest takes its place.
    fn with_function_zero(&mut self) -> Option<String> {
        let (lowest, number) = self.functions.iter_mut().min_by_key(|(_, number)| *number).filter(|(_, number)| *number != 0)?;
        let from = std::mem::take(number);
        Some(format!("device {} is function 0 in the guest and function {from} on the host", lowest.name))
    }

    /// The functions at one device number on `on`; function 0 first, so that the others find it.
    fn hang(mut self, topology: &mut Topology, on: &Name, device: Option<u8>) {
        self.functions.sort_by_key(|(_, number)| *number);
        for (one, function) in self.functions {
            topology.nodes.push(NodeSpec {
                name: one.name,
                on: on.clone(),
                place: Place { device, function },
                kind: NodeKind::Endpoint(one.endpoint),
            });
        }
    }

    fn link(&self) -> Option<Link> {
        self.functions.iter().find_map(|(one, _)| one.link)
    }
}

fn on_root_port(topology: &mut Topology, group: Group) {
    let first = group.first();
    let place = Place { device: first.device, function: 0 };
    let link = group.link().unwrap_or_default();
    let spec = PortSpec { link, atomic_completers: first.atomic_completers, ..PortSpec::new(PortKind::Root) };
    let port = topology.add_port(format!("{}-port", first.name), &first.root, place, spec);
    group.hang(topology, &port, Some(0));
}

/// Hangs Banyan's own devices before all others, in their order: each on the root complex `root`, or, if it is to be on a port,
/// on a root port of its own.
pub fn place_own(topology: &mut Topology, root: &Name, devices: Vec<Own>) {
    let mut own = Topology::default();
    for Own { name, endpoint, on_port } in devices {
        let on = if on_port {
            own.add_port(format!("{name}-port"), root, Place::default(), PortSpec::new(PortKind::Root))
        } else {
            root.clone()
        };
        own.nodes.push(NodeSpec { name, on, place: Place::default(), kind: NodeKind::Endpoint(endpoint) });
    }
    topology.nodes.splice(0..0, own.nodes);
}

/// Makes the ports of the budget, with as many switches as the groups need, and puts each group on a downstream port that is
/// free, in their order.
fn on_switches(topology: &mut Topology, root: &Name, config: &PcieConfig, groups: Vec<Group>) -> Result<(), ColdPlugError> {
    if let Some((name, device)) = groups.iter().find_map(|group| Some((group.first().name.clone(), group.first().device?))) {
        return Err(ColdPlugError::SwitchDevice { name, device });
    }
    let named: BTreeSet<Name> = topology.nodes.iter().map(|node| node.on.clone()).collect();
    let taken = |names: &[Vec<Name>]| names.iter().flatten().filter(|name| named.contains(name)).count();
    let mut config = *config;
    let count = |ports: usize| u16::try_from(ports).unwrap_or(u16::MAX);
    let wanted = usize::from(config.switches.unwrap_or(1).max(1));
    if config.switch_ports == 0 && !groups.is_empty() {
        config.switch_ports = count(groups.len().div_ceil(wanted).min(DEVICES));
    }
    while !groups.is_empty() {
        let names = budget::switch_ports(&config);
        if names.iter().map(Vec::len).sum::<usize>() >= groups.len() + taken(&names) {
            break;
        }
        config.switches = Some(config.switches.unwrap_or(1).max(1).saturating_add(1));
        if config.switches == Some(u16::MAX) {
            break;
        }
    }
    budget::add_ports(topology, root, &config);
    let mut free = budget::switch_ports(&config).into_iter().enumerate().flat_map(|(switch, ports)| {
        let ports: Vec<(usize, Name)> =
            ports.into_iter().filter(|name| !named.contains(name)).map(|name| (switch, name)).collect();
        ports
    });
    let mut needs: BTreeMap<usize, (Option<Link>, u8)> = BTreeMap::new();
    for group in groups {
        let Some((switch, port)) = free.next() else { break };
        let (link, completers) = (group.link(), group.first().atomic_completers);
        if let (Some(link), Some(spec)) = (link, port_spec(topology, &port.0)) {
            spec.link = link;
        }
        let (fastest, common) = needs.entry(switch).or_insert((None, completers));
        *fastest = fastest.map_or(link, |fastest| Some(link.map_or(fastest, |link| faster(fastest, link))));
        *common &= completers;
        group.hang(topology, &port, Some(0));
    }
    for (switch, (link, completers)) in needs {
        let [above, upstream] = budget::switch_names(switch);
        for name in [&above, &upstream] {
            if let (Some(link), Some(spec)) = (link, port_spec(topology, name)) {
                spec.link = faster(spec.link, link);
            }
        }
        if let Some(spec) = port_spec(topology, &above) {
            spec.atomic_completers = completers;
        }
    }
    Ok(())
}

fn port_spec<'a>(topology: &'a mut Topology, name: &str) -> Option<&'a mut PortSpec> {
    topology.nodes.iter_mut().find(|node| node.name.0 == name).and_then(|node| match &mut node.kind {
        NodeKind::Port(port) => Some(port),
        NodeKind::Endpoint(_) => None,
    })
}

/// A link that is in nothing below either.
fn faster(a: Link, b: Link) -> Link {
    let rate = |a: LinkRate, b: LinkRate| LinkRate { speed: a.speed.max(b.speed), width: a.width.max(b.width) };
    Link {
        max: rate(a.max, b.max),
        current: rate(a.current, b.current),
        max_payload_supported: a.max_payload_supported.max(b.max_payload_supported),
        max_payload: a.max_payload.min(b.max_payload),
    }
}

/// Hangs groups on the bridges of the budget in `config`, which are below `root`, as far as their slots go. For the others it
/// makes conventional buses, each behind a PCIe-to-PCI bridge on a root port, as many as the groups of each root complex need.
fn on_bridges(topology: &mut Topology, root: &Name, config: &PcieConfig, groups: Vec<Group>) {
    let (there, slots) = budget::bridge_buses(config);
    let mut bridges = there.len()..;
    let taken = |bridge: &Name| topology.nodes.iter().filter(|node| node.on == *bridge && node.place.function == 0).count();
    let free = there.into_iter().flat_map(|bridge| {
        let free = usize::from(slots).saturating_sub(taken(&bridge));
        std::iter::repeat_n(bridge, free)
    });
    let mut free: Vec<Name> = free.collect();
    let mut by_root: Vec<(Name, Vec<Group>)> = Vec::new();
    for group in groups {
        let root = group.first().root.clone();
        match by_root.iter_mut().find(|(name, _)| *name == root) {
            Some((_, groups)) => groups.push(group),
            None => by_root.push((root, vec![group])),
        }
    }
    for (own_root, groups) in by_root {
        let mut groups = groups.into_iter().peekable();
        let of_budget = if own_root == *root { std::mem::take(&mut free) } else { Vec::new() };
        let on_budget = groups.by_ref().take(of_budget.len()).collect::<Vec<_>>();
        for (group, bridge) in on_budget.into_iter().zip(of_budget) {
            let device = group.first().device;
            group.hang(topology, &bridge, device);
        }
        while groups.peek().is_some() {
            let [above, bridge] = budget::bridge_names(bridges.next().unwrap_or_default());
            let above = topology.add_port(above, &own_root, Place::default(), PortSpec::new(PortKind::Root));
            let bridge = topology.add_port(bridge, &above, Place::default(), PortSpec::new(PortKind::PciBridge));
            for group in groups.by_ref().take(DEVICES) {
                let device = group.first().device;
                group.hang(topology, &bridge, device);
            }
        }
    }
}

/// A device that cannot hang there.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ColdPlugError {
    /// A further function of nothing.
    #[error(
        "device {name} is function {function} of the device before it, and there is none on the same kind of bus: give function 0 first"
    )]
    NothingToJoin {
        /// Which.
        name: Name,
        /// Its number.
        function: u8,
    },
    /// A device number below a link.
    #[error(
        "device {name} asks for device number {device}, and below a port of a switch there is device 0 only: leave the number out, or name the port with `on=`"
    )]
    SwitchDevice {
        /// Which.
        name: Name,
        /// Asked for.
        device: u8,
    },
}

#[cfg(test)]
mod tests;
