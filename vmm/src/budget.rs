//! Adds the ports that a user asked for beside those of the devices: room for devices that come while the guest runs.

use api::config::{HotPlugPorts, PcieConfig, Removal as RemovalConfig};
use pci::link::Link;
use pci::topology::{HotPlug, Name, NodeKind, NodeSpec, Place, PortKind, PortSpec, Removal, Reserve, Topology};

/// Functions of one device number. Ports share device numbers, since a root bus has 32 of them only.
const FUNCTIONS: u16 = 8;

/// Adds the ports to `topology`, on the root complex `root`.
pub fn add_ports(topology: &mut Topology, root: &Name, config: &PcieConfig) {
    let (root_hot, switch_hot) = match config.hot_plug {
        HotPlugPorts::Auto => (true, true),
        HotPlugPorts::RootPort => (true, false),
        HotPlugPorts::SwitchPort => (false, true),
        HotPlugPorts::BridgePort | HotPlugPorts::NoPort => (false, false),
    };
    let hot = |hot: bool| hot.then(|| hot_plug(config));
    for index in 0..config.root_ports {
        // A single port keeps a device number of its own.
        let function = u8::try_from(index % FUNCTIONS).unwrap_or(0);
        add(topology, format!("port{index}"), root, function, PortKind::Root, hot(root_hot));
    }
    for (switch, ports) in switch_ports(config).into_iter().enumerate() {
        let function = u8::try_from(switch % usize::from(FUNCTIONS)).unwrap_or(0);
        let [above, upstream] = switch_names(switch);
        let above = add(topology, above, root, function, PortKind::Root, None);
        let upstream = add(topology, upstream, &above, 0, PortKind::Upstream, None);
        for (port, name) in (0u16..).zip(ports) {
            let function = if config.switch_ports > 32 { u8::try_from(port % FUNCTIONS).unwrap_or(0) } else { 0 };
            add(topology, name.0, &upstream, function, PortKind::Downstream, hot(switch_hot));
        }
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
            buses: 1,
        },
        removal: match config.removal {
            RemovalConfig::Surprise => Removal::Surprise,
            RemovalConfig::Orderly => Removal::Orderly,
            RemovalConfig::Button => Removal::Button,
        },
    }
}

fn add(topology: &mut Topology, name: String, on: &Name, function: u8, kind: PortKind, hotplug: Option<HotPlug>) -> Name {
    let name = Name(name);
    topology.nodes.push(NodeSpec {
        name: name.clone(),
        on: on.clone(),
        place: Place { device: None, function },
        kind: NodeKind::Port(PortSpec { kind, ids: None, link: Link::default(), atomic_completers: 0, hotplug }),
    });
    name
}
