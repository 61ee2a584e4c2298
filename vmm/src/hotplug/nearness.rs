//! Decides how near a port of the guest is to where a device is on the host. Pure.

use std::collections::BTreeMap;

use pci::address::HostBdf;
use pci::topology::{Name, NodeKind, NodeSpec, PortKind};

use crate::host::tree::{HostKind, HostTree};
use crate::numa::GuestNuma;
use crate::replicate::HostRoot;
use crate::spec::Spec;

/// How near, the nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Far {
    /// The port stands for the host's port above the device.
    Own,
    /// It is below the copy of a switch that is above the device.
    Switch {
        /// Switches that are above one of the two alone.
        levels: usize,
    },
    /// It is below the copy of the device's root complex.
    RootComplex,
    /// It is on the device's memory node.
    Node,
    /// Nobody knows.
    Unknown,
    /// It is on another memory node.
    OtherNode,
}

/// Where a device is on the host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostPlace {
    port: Option<HostBdf>,
    /// Upstream ports above it, from the top.
    switches: Vec<HostBdf>,
    root: Option<HostRoot>,
    node: Option<u32>,
    /// The guest's memory node that is near.
    guest_node: Option<u32>,
}

impl HostPlace {
    /// That of the function `at`, a virtual one being where its physical function is. `None` if `tree` does not have it.
    pub fn of(at: HostBdf, tree: &HostTree, numa: Option<&GuestNuma>) -> Option<Self> {
        let function = tree.get(at)?;
        let anchor = function.physical_function.and_then(|physical| tree.get(physical)).unwrap_or(function);
        let above = tree.above(anchor);
        let port = above.iter().rfind(|node| matches!(node.kind, HostKind::Port(_)));
        let upstream = above.iter().filter(|node| node.kind == HostKind::Port(PortKind::Upstream));
        let near = function.numa_node.and_then(|node| numa?.near(node, tree));
        Some(Self {
            port: port.map(|port| port.at),
            switches: upstream.map(|port| port.at).collect(),
            root: HostRoot::above(tree, anchor),
            node: function.numa_node,
            guest_node: near.map(|(node, _)| node),
        })
    }
}

/// Where the guest's ports are.
#[derive(Debug, Clone, Default)]
pub struct PortPlaces(BTreeMap<Name, PortPlace>);

#[derive(Debug, Clone, Default)]
struct PortPlace {
    stands_for: Option<HostBdf>,
    /// A device of the host belongs here.
    is_home: bool,
    /// What the upstream ports above it stand for, from the top.
    switches: Vec<HostBdf>,
    root: Option<HostRoot>,
    node: Option<u32>,
}

impl PortPlaces {
    /// Those of the ports to which devices come.
    pub fn new(spec: &Spec) -> Self {
        let nodes: BTreeMap<&Name, &NodeSpec> = spec.topology.nodes.iter().map(|node| (&node.name, node)).collect();
        let is_hot = |node: &&NodeSpec| matches!(&node.kind, NodeKind::Port(port) if port.slot().is_some());
        let is_upstream = |node: &NodeSpec| matches!(&node.kind, NodeKind::Port(port) if port.kind == PortKind::Upstream);
        let place = |port: &NodeSpec| {
            let mut place = PortPlace {
                stands_for: spec.stands_for.get(&port.name).copied(),
                is_home: spec.homes.contains(&port.name),
                ..PortPlace::default()
            };
            let mut on = &port.on;
            // A planned topology has no loops; the bound keeps any other from being one here.
            for _ in 0..nodes.len() {
                let Some(above) = nodes.get(on) else { break };
                if is_upstream(above) {
                    place.switches.extend(spec.stands_for.get(&above.name));
                }
                on = &above.on;
            }
            place.switches.reverse();
            place.root = spec.host_roots.get(on).cloned();
            place.node = spec.topology.root_complexes.iter().find(|root| root.name == *on).and_then(|root| root.node);
            (port.name.clone(), place)
        };
        Self(spec.topology.nodes.iter().filter(is_hot).map(place).collect())
    }

    /// How near `port` is to a device that is at `place`.
    pub fn far(&self, port: &Name, place: &HostPlace) -> Far {
        let Some(port) = self.0.get(port) else { return Far::Unknown };
        if port.stands_for.is_some() && port.stands_for == place.port {
            return Far::Own;
        }
        let shared = port.switches.iter().zip(&place.switches).take_while(|(a, b)| a == b).count();
        if shared > 0 {
            return Far::Switch { levels: port.switches.len() + place.switches.len() - 2 * shared };
        }
        if port.root.is_some() && port.root == place.root {
            return Far::RootComplex;
        }
        let on_host = port.root.as_ref().and_then(|root| root.node).zip(place.node);
        match on_host.or(port.node.zip(place.guest_node)) {
            Some((port, device)) if port == device => Far::Node,
            Some(_) => Far::OtherNode,
            None => Far::Unknown,
        }
    }

    /// Whether a device of the host belongs to `port`.
    pub fn is_home(&self, port: &Name) -> bool {
        self.0.get(port).is_some_and(|port| port.is_home)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use api::config::{NumaConfig, VmConfig};

    use super::*;
    use crate::host;
    use crate::host::recorded::RecordedHost;
    use crate::spec::spec;

    fn recorded(file: &str) -> HostTree {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/topologies").join(file);
        RecordedHost::read(&path).unwrap().tree
    }

    fn planned(tree: &HostTree, pcie: &str, numa: &[&str], devices: &[&str]) -> Spec {
        let config = VmConfig {
            devices: devices.iter().map(|device| device.parse().unwrap()).collect(),
            pcie: pcie.parse().unwrap(),
            numa: NumaConfig::new(numa.iter().map(|text| text.parse().unwrap()).collect()).unwrap(),
            cpus: "2".parse().unwrap(),
            memory: "1G".parse().unwrap(),
            ..VmConfig::default()
        };
        spec(&config, &host::look_in(tree, &config).unwrap()).unwrap()
    }

    /// The hot-plug ports by how near they are to `at`, with whether another device belongs there.
    fn by_nearness(spec: &Spec, tree: &HostTree, at: &str) -> Vec<(Far, bool, String)> {
        let place = HostPlace::of(at.parse().unwrap(), tree, spec.numa.as_ref()).unwrap();
        let places = PortPlaces::new(spec);
        let mut ports: Vec<_> =
            places.0.keys().map(|port| (places.far(port, &place), places.is_home(port), port.to_string())).collect();
        ports.sort();
        ports
    }

    #[test]
    fn a_device_s_own_place_comes_first_then_its_switches_then_its_root_complex() {
        let tree = recorded("hgx-h200.json");
        let spec = planned(&tree, "host,host-ports=all,root-ports=1", &[], &["0000:18:00.0"]);
        let ports = by_nearness(&spec, &tree, "0000:19:00.0");
        let far: Vec<Far> = ports.iter().map(|(far, ..)| *far).collect();
        assert_eq!(far[..2], [Far::Own, Far::Switch { levels: 0 }], "{ports:#?}");
        assert!(far.contains(&Far::RootComplex) && far.contains(&Far::OtherNode), "{ports:#?}");
        assert!(ports.iter().any(|(_, home, name)| name == "port0" && !home), "{ports:#?}");
        assert!(ports.iter().all(|(_, home, name)| *home || name == "port0"), "a device of the host belongs everywhere else");
    }

    #[test]
    fn without_a_copy_the_memory_node_decides() {
        let tree = recorded("hgx-h200.json");
        let spec = planned(&tree, "root-ports=4,ports-on=all", &["host"], &["0000:18:00.0", "0000:5d:00.0"]);
        let near =
            |at: &str| by_nearness(&spec, &tree, at).into_iter().filter(|(far, ..)| *far == Far::Node).map(|(.., name)| name);
        assert_eq!(near("0000:19:00.0").collect::<Vec<_>>(), ["port0", "port2"]);
        assert_eq!(near("0000:5d:00.0").collect::<Vec<_>>(), ["port1", "port3"]);
        // Nobody knows where ports are in a guest without nodes.
        let spec = planned(&tree, "root-ports=2", &[], &["0000:18:00.0"]);
        assert!(by_nearness(&spec, &tree, "0000:19:00.0").iter().all(|(far, ..)| *far == Far::Unknown));
    }
}
