//! Adds the ports that a user asked for beside those of the devices: room for devices that come while the guest runs.

use std::num::NonZeroU8;

use api::config::{
    HotPlugPorts, PcieConfig, PortConfig, PortKind as PortKindConfig, PortsOn, Removal as RemovalConfig, TopologyConfig,
};
use pci::topology::{HotPlug, Name, NodeKind, Place, PortKind, PortSpec, Removal, Reserve, RootComplexSpec, Topology};
use thiserror::Error;

use crate::numa;

/// Device numbers of a conventional bus that take devices, where nobody says how many: as many as Kata Containers counts.
const BRIDGE_SLOTS: u8 = 30;
/// Bridges whose buses take devices, beside the root bus.
const MOST_BRIDGES: u16 = arch::ports::SLOT_BUSES as u16 - 1;

/// Functions of one device number. Ports share device numbers, since a root bus has 32 of them only.
const FUNCTIONS: u16 = 8;

/// Bus numbers of a segment beside that of the root bus (PCIe 6.0 7.5.1.3.4).
const BUSES: u64 = 255;

/// Whether there can be as many ports, and as many bridges with as many slots.
pub fn check(config: &PcieConfig) -> Result<(), BudgetError> {
    let bridges = bridges(config);
    // Each port has a bus of its own behind it. Asked before anything is made of them.
    let switches = if config.switch_ports == 0 { 0 } else { config.switches.unwrap_or(1) };
    let of_switches = u64::from(switches) * (u64::from(config.switch_ports) + 2);
    let ports = u64::from(config.root_ports) + of_switches + 2 * u64::from(bridges);
    if ports > BUSES && bridges <= MOST_BRIDGES {
        return Err(BudgetError::Buses { ports, most: BUSES });
    }
    match config.bridge_slots {
        Some(slots) if !(1..=32).contains(&slots) => return Err(BudgetError::Slots { slots }),
        Some(_) if bridges == 0 => return Err(BudgetError::SlotsOfNothing),
        _ => {}
    }
    if let Some(numbers) = config.bus0_free.filter(|numbers| *numbers > 31) {
        return Err(BudgetError::Free { numbers });
    }
    if bridges > MOST_BRIDGES {
        return Err(BudgetError::Bridges { bridges, most: MOST_BRIDGES });
    }
    if bridges == 0 && config.hot_plug == HotPlugPorts::BridgePort {
        return Err(BudgetError::NoBridge);
    }
    Ok(())
}

/// Whether there are registers for the bridges of `file` to which devices come, beside those that are asked for.
pub fn check_file(config: &PcieConfig, file: &TopologyConfig) -> Result<(), BudgetError> {
    let is_hot = |port: &&PortConfig| port.hotplug && port.kind == PortKindConfig::PciBridge;
    let of_file = u16::try_from(file.ports.iter().filter(is_hot).count()).unwrap_or(u16::MAX);
    let bridges = bridges(config).saturating_add(of_file);
    if bridges > MOST_BRIDGES { Err(BudgetError::Bridges { bridges, most: MOST_BRIDGES }) } else { Ok(()) }
}

/// How many bridges there are for devices that come.
fn bridges(config: &PcieConfig) -> u16 {
    config.bridges.unwrap_or(if config.hot_plug == HotPlugPorts::BridgePort { 1 } else { 0 })
}

/// Names of the root port above bridge `bridge` and of the bridge.
#[must_use]
pub fn bridge_names(bridge: usize) -> [String; 2] {
    [format!("bridge{bridge}-root"), format!("bridge{bridge}")]
}

/// Names of the bridges, and how many device numbers each has.
#[must_use]
pub fn bridge_buses(config: &PcieConfig) -> (Vec<Name>, u8) {
    let names = (0..usize::from(bridges(config))).map(|bridge| {
        let [_, name] = bridge_names(bridge);
        Name(name)
    });
    (names.collect(), config.bridge_slots.unwrap_or(BRIDGE_SLOTS))
}

/// Adds the ports to `topology`, on the root complex `root`.
pub fn add_ports(topology: &mut Topology, root: &Name, config: &PcieConfig) {
    let [root_hot, switch_hot, bridge_hot] = match config.hot_plug {
        HotPlugPorts::Auto => [true; 3],
        HotPlugPorts::RootPort => [true, false, false],
        HotPlugPorts::SwitchPort => [false, true, false],
        HotPlugPorts::BridgePort => [false, false, true],
        HotPlugPorts::NoPort => [false; 3],
    };
    let hot = |hot: bool| hot.then(|| hot_plug(config));
    let port = |kind, hotplug| PortSpec { hotplug, ..PortSpec::new(kind) };
    // A single port keeps a device number of its own.
    let on_root = |index: usize| Place { device: None, function: u8::try_from(index % usize::from(FUNCTIONS)).unwrap_or(0) };
    let alone = Place::default();
    for index in 0..config.root_ports {
        topology.add_port(root_port_name(index).0, root, on_root(index.into()), port(PortKind::Root, hot(root_hot)));
    }
    for (switch, ports) in switch_ports(config).into_iter().enumerate() {
        let [above, upstream] = switch_names(switch);
        let above = topology.add_port(above, root, on_root(switch), port(PortKind::Root, None));
        let upstream = topology.add_port(upstream, &above, alone, port(PortKind::Upstream, None));
        for (number, name) in (0u16..).zip(ports) {
            let function = if config.switch_ports > 32 { u8::try_from(number % FUNCTIONS).unwrap_or(0) } else { 0 };
            let place = Place { device: None, function };
            topology.add_port(name.0, &upstream, place, port(PortKind::Downstream, hot(switch_hot)));
        }
    }
    let (names, slots) = bridge_buses(config);
    for (bridge, name) in names.into_iter().enumerate() {
        let [above, _] = bridge_names(bridge);
        let above = topology.add_port(above, root, on_root(bridge), port(PortKind::Root, None));
        let hotplug = hot(bridge_hot).map(|hotplug| HotPlug { numbers: slots, ..hotplug });
        topology.add_port(name.0, &above, alone, port(PortKind::PciBridge, hotplug));
    }
}

/// Names of the root port above switch `switch` and of its upstream port.
#[must_use]
pub fn switch_names(switch: usize) -> [String; 2] {
    [format!("switch{switch}-root"), format!("switch{switch}")]
}

/// Names of the downstream ports of each switch.
#[must_use]
pub fn switch_ports(config: &PcieConfig) -> Vec<Vec<Name>> {
    let switches = if config.switch_ports == 0 { 0 } else { config.switches.unwrap_or(1) };
    let ports = |switch| (0..config.switch_ports).map(move |port| Name(format!("switch{switch}-port{port}")));
    (0..switches).map(|switch| ports(switch).collect()).collect()
}

/// What every hot-plug port of `config` keeps.
#[must_use]
pub fn hot_plug(config: &PcieConfig) -> HotPlug {
    HotPlug {
        reserve: Reserve {
            memory: config.hotplug_mem32.map(|size| size.bytes()),
            prefetchable: config.hotplug_mem.map(|size| size.bytes()),
            buses: config.hotplug_buses.map_or(1, NonZeroU8::get),
        },
        own: None,
        removal: removal(config.removal),
        numbers: 1,
    }
}

/// What a hot-plug port of a topology file keeps: what it says itself, else what `config` says of all.
#[must_use]
pub fn hot_plug_of(port: &PortConfig, config: &PcieConfig) -> HotPlug {
    let all = hot_plug(config);
    HotPlug {
        reserve: Reserve {
            memory: port.mem32.map(|size| size.bytes()).or(all.reserve.memory),
            prefetchable: port.mem.map(|size| size.bytes()).or(all.reserve.prefetchable),
            buses: port.buses.map_or(all.reserve.buses, NonZeroU8::get),
        },
        own: None,
        removal: port.removal.map_or(all.removal, removal),
        numbers: if port.kind == PortKindConfig::PciBridge { config.bridge_slots.unwrap_or(BRIDGE_SLOTS) } else { 1 },
    }
}

const fn removal(config: RemovalConfig) -> Removal {
    match config {
        RemovalConfig::Surprise => Removal::Surprise,
        RemovalConfig::Orderly => Removal::Orderly,
        RemovalConfig::Button => Removal::Button,
    }
}

/// Hangs the root ports and the switches of the budget on all root complexes in turn, with `ports-on=all`. Each of the first
/// `nodes` memory nodes that has no root complex gets one. Switches that have devices stay where these are.
pub fn spread(topology: &mut Topology, config: &PcieConfig, nodes: usize) {
    if config.ports_on == PortsOn::First {
        return;
    }
    for node in (0..nodes).filter_map(|node| u32::try_from(node).ok()) {
        if topology.root_complexes.iter().all(|root| root.node != Some(node)) {
            let name = numa::free_name(topology);
            topology.root_complexes.push(RootComplexSpec { name, segment: 0, node: Some(node), first_bus: None });
        }
    }
    let roots: Vec<Name> = topology.root_complexes.iter().map(|root| root.name.clone()).collect();
    let ports = (0..config.root_ports).map(root_port_name).collect();
    let has_device = |names: &Vec<Name>| {
        topology.nodes.iter().any(|node| matches!(node.kind, NodeKind::Endpoint(_)) && names.contains(&node.on))
    };
    let of_switches = switch_ports(config);
    let switches = of_switches.iter().enumerate().filter(|(_, ports)| !has_device(ports));
    let switches = switches.map(|(switch, _)| switch_names(switch)).map(|[above, _]| Name(above)).collect();
    for names in [ports, switches] as [Vec<Name>; 2] {
        for (index, name) in names.iter().enumerate() {
            let (Some(root), Some(turn)) = (roots.get(index % roots.len()), index.checked_div(roots.len())) else { continue };
            if let Some(port) = topology.nodes.iter_mut().find(|node| node.name == *name) {
                port.on = root.clone();
                port.place.function = u8::try_from(turn % usize::from(FUNCTIONS)).unwrap_or(0);
            }
        }
    }
}

/// Name of root port `index`.
fn root_port_name(index: u16) -> Name {
    Name(format!("port{index}"))
}

/// Ports and bridges that cannot be.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BudgetError {
    /// More ports than bus numbers.
    #[error(
        "root-ports, switch-ports and bridges make {ports} ports, those above switches and bridges among them: each takes a bus number, and there are {most}"
    )]
    Buses {
        /// Asked for.
        ports: u64,
        /// Most.
        most: u64,
    },
    /// No bridge for devices that shall come to one.
    #[error("hot-plug=bridge-port needs a bridge: leave out bridges=0")]
    NoBridge,
    /// More bridges than have registers.
    #[error(
        "bridges={bridges} is more than the {most} whose buses can take devices while the guest runs, those of a topology file included: each has up to 32 device numbers"
    )]
    Bridges {
        /// Asked for.
        bridges: u16,
        /// Most.
        most: u16,
    },
    /// More slots than a bus has device numbers.
    #[error("bridge-slots={slots} cannot be: a conventional bus has 1 to 32 device numbers")]
    Slots {
        /// Asked for.
        slots: u8,
    },
    /// More numbers to stay free than a bus has.
    #[error("bus0-free={numbers} cannot be: a root bus has 32 device numbers, of which 0 to 31 can stay free")]
    Free {
        /// Asked for.
        numbers: u8,
    },
    /// Slots without a bridge.
    #[error("bridge-slots needs bridges: give bridges=N, or hot-plug=bridge-port for one")]
    SlotsOfNothing,
}

#[cfg(test)]
mod tests;
