//! Decides which ports stand above the devices that are passed through: a copy of the host's, pruned, or one root port
//! each. Pure, and explains itself in notes.
//!
//! The copy keeps every switch level that leads to a wanted device, with the host's ids and link registers, and one root
//! port for each of the host's. Root ports carry Banyan's own ids, since a guest that knows the host's would look for the
//! chipset around them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use pci::address::HostBdf;
use pci::link::Link;
use pci::topology::{EndpointSpec, Name, NodeKind, NodeSpec, Place, PortKind, PortSpec, RootComplexSpec, Topology};

use crate::host::tree::{HostKind, HostNode, HostTree};

/// A device to place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requested {
    /// Its name in the guest's topology.
    pub name: Name,
    /// The function on the host.
    pub at: HostBdf,
    /// What the planner must know of it.
    pub endpoint: EndpointSpec,
}

/// How the devices are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Each device behind a root port of its own.
    #[default]
    RootPorts,
    /// As on the host: root ports and switches that lead to a device.
    Host,
}

/// A topology and what is worth saying about it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Replica {
    /// Root complexes (`rc0`, `rc1`, ...), ports and the devices.
    pub topology: Topology,
    /// What was left out, guessed, or differs from the host.
    pub notes: Vec<Note>,
    /// Guest root complexes by the name of the host's.
    pub root_complexes: BTreeMap<String, Name>,
}

/// Places `devices`, which must be in `tree`; one that is not gets a root port of its own.
#[must_use]
pub fn replicate(tree: &HostTree, devices: &[Requested], policy: Policy) -> Replica {
    let mut copy = Copy::new(tree, policy);
    let groups = together(tree, devices);
    for group in groups.iter().filter(|group| group.virtual_of.is_none()) {
        copy.reserved.extend(copy.port_above(group.anchor));
    }
    for group in &groups {
        copy.place(group);
    }
    copy.finish(devices)
}

/// Functions that stay one device in the guest, and the host function whose place they take.
struct Group<'a> {
    functions: Vec<&'a Requested>,
    anchor: HostBdf,
    virtual_of: Option<HostBdf>,
}

/// Functions of one host device stay together, in the order in which the first of them was given. A virtual function is a
/// device by itself, at the place of its physical function.
fn together<'a>(tree: &HostTree, devices: &'a [Requested]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for device in devices {
        let virtual_of = tree.get(device.at).and_then(|node| node.physical_function);
        let same = groups.iter_mut().find(|group| {
            group.virtual_of.is_none()
                && virtual_of.is_none()
                && group.anchor.domain == device.at.domain
                && group.anchor.bdf.bus() == device.at.bdf.bus()
                && group.anchor.bdf.devfn().device() == device.at.bdf.devfn().device()
        });
        match same {
            Some(group) => group.functions.push(device),
            None => groups.push(Group { functions: vec![device], anchor: virtual_of.unwrap_or(device.at), virtual_of }),
        }
    }
    groups
}

struct Copy<'a> {
    tree: &'a HostTree,
    policy: Policy,
    replica: Replica,
    /// Guest ports by the host port that they stand for.
    ports: BTreeMap<HostBdf, Name>,
    /// Host ports that a physical device takes, whatever order the devices come in.
    reserved: BTreeSet<HostBdf>,
    /// Host ports whose copy has its device.
    occupied: BTreeSet<HostBdf>,
}

impl<'a> Copy<'a> {
    fn new(tree: &'a HostTree, policy: Policy) -> Self {
        Self {
            tree,
            policy,
            replica: Replica::default(),
            ports: BTreeMap::new(),
            reserved: BTreeSet::new(),
            occupied: BTreeSet::new(),
        }
    }

    /// The ports above a host function, from the top; bridges to conventional PCI are left out.
    fn path(&self, at: HostBdf) -> Vec<(&'a HostNode, PortKind)> {
        let Some(node) = self.tree.get(at) else { return Vec::new() };
        let above = self.tree.above(node).into_iter();
        above.filter_map(|node| if let HostKind::Port(kind) = node.kind { Some((node, kind)) } else { None }).collect()
    }

    fn port_above(&self, at: HostBdf) -> Option<HostBdf> {
        self.path(at).last().map(|(port, _)| port.at)
    }

    fn place(&mut self, group: &Group<'a>) {
        let Some(first) = group.functions.first() else { return };
        let port = match self.policy {
            Policy::RootPorts => self.own_root_port(&first.name, first.at),
            Policy::Host => self.host_port(group, &first.name),
        };
        self.endpoints(group, &port);
    }

    /// A root port that stands for no host port.
    fn own_root_port(&mut self, device: &Name, at: HostBdf) -> Name {
        let on = match self.policy {
            Policy::RootPorts => self.root_complex(None),
            Policy::Host => self.root_complex(Some(at)),
        };
        let completers = self.path(at).first().map_or(0, |(root, _)| root.atomic_completers);
        let link = self.link(at).or_else(|| self.port_above(at).and_then(|port| self.link(port)));
        self.port(own_name(device), on, PortKind::Root, None, link, completers)
    }

    /// The copy of the port above a device, with everything above it.
    fn host_port(&mut self, group: &Group<'a>, device: &Name) -> Name {
        self.mention_bridges(group, device);
        let path = self.path(group.anchor);
        let Some((last, kind)) = path.last().copied() else {
            self.note(Note::Integrated { device: device.clone(), at: group.anchor });
            return self.own_root_port(device, group.anchor);
        };
        let kept_for_another = group.virtual_of.is_some() && self.reserved.contains(&last.at);
        if kind != PortKind::Upstream && !kept_for_another && self.occupied.insert(last.at) {
            return self.grow(&path);
        }
        // A sibling of the port above, since a port has one device below it.
        self.note(Note::OwnPort { device: device.clone(), beside: last.at });
        let link = self.link(group.anchor).or(last.link);
        match (kind, path.split_last()) {
            (PortKind::Downstream, Some((_, above))) if !above.is_empty() => {
                let on = self.grow(above);
                self.port(own_name(device), on, PortKind::Downstream, Some(last), link, 0)
            }
            (PortKind::Upstream, _) => {
                let on = self.grow(&path);
                self.port(own_name(device), on, PortKind::Downstream, None, link, 0)
            }
            _ => self.own_root_port(device, group.anchor),
        }
    }

    /// Makes the ports of a path that are not there yet; returns the lowest.
    fn grow(&mut self, path: &[(&'a HostNode, PortKind)]) -> Name {
        let mut on = self.root_complex(path.first().map(|(node, _)| node.at));
        for (node, kind) in path {
            on = match self.ports.get(&node.at) {
                Some(name) => name.clone(),
                None => {
                    let ids = (*kind != PortKind::Root).then_some(*node);
                    let completers = if *kind == PortKind::Root { node.atomic_completers } else { 0 };
                    let name = self.port(host_name(*kind, node.at), on, *kind, ids, node.link, completers);
                    self.ports.insert(node.at, name.clone());
                    name
                }
            };
        }
        on
    }

    fn port(
        &mut self,
        name: Name,
        on: Name,
        kind: PortKind,
        ids: Option<&HostNode>,
        link: Option<Link>,
        atomic_completers: u8,
    ) -> Name {
        if link.is_none() && self.policy == Policy::Host {
            self.note(Note::NoLink { port: name.clone() });
        }
        let spec =
            PortSpec { kind, ids: ids.map(|node| node.ids), link: link.unwrap_or_default(), atomic_completers, hotplug: None };
        let node = NodeSpec { name: name.clone(), on, place: Place::default(), kind: NodeKind::Port(spec) };
        self.replica.topology.nodes.push(node);
        name
    }

    /// The functions of one device on `port`, with their numbers. Function 0 must exist where another does.
    fn endpoints(&mut self, group: &Group<'a>, port: &Name) {
        let number = |device: &Requested| if group.virtual_of.is_some() { 0 } else { device.at.bdf.devfn().function() };
        let lowest = group.functions.iter().map(|device| number(device)).min().unwrap_or(0);
        for device in &group.functions {
            let (from, mut function) = (number(device), number(device));
            if from == lowest && lowest != 0 {
                function = 0;
                self.note(Note::Renumbered { device: device.name.clone(), from });
            }
            self.replica.topology.nodes.push(NodeSpec {
                name: device.name.clone(),
                on: port.clone(),
                place: Place { device: Some(0), function },
                kind: NodeKind::Endpoint(device.endpoint.clone()),
            });
        }
    }

    /// The guest's root complex for the host's above `at`; without one, the first.
    fn root_complex(&mut self, at: Option<HostBdf>) -> Name {
        let tree = self.tree;
        let host = at.and_then(|at| tree.root_complex(tree.get(at)?)).unwrap_or_default();
        if let Some(name) = self.replica.root_complexes.get(host) {
            return name.clone();
        }
        let name = Name(format!("rc{}", self.replica.root_complexes.len()));
        self.replica.root_complexes.insert(host.to_owned(), name.clone());
        let spec = RootComplexSpec { name: name.clone(), segment: 0, node: None, first_bus: None };
        self.replica.topology.root_complexes.push(spec);
        name
    }

    fn link(&self, at: HostBdf) -> Option<Link> {
        self.tree.get(at).and_then(|node| node.link)
    }

    fn mention_bridges(&mut self, group: &Group<'a>, device: &Name) {
        let Some(node) = self.tree.get(group.anchor) else { return };
        for bridge in self.tree.above(node).into_iter().filter(|bridge| bridge.kind == HostKind::OtherBridge) {
            self.note(Note::BridgeLeftOut { device: device.clone(), bridge: bridge.at });
        }
    }

    fn note(&mut self, note: Note) {
        if !self.replica.notes.contains(&note) {
            self.replica.notes.push(note);
        }
    }

    /// Compares the order in which a guest meets the devices with the order in which they were given.
    fn finish(mut self, devices: &[Requested]) -> Replica {
        if self.replica.topology.root_complexes.is_empty() {
            self.root_complex(None);
        }
        let met = guest_order(&self.replica.topology);
        let given: Vec<&Name> = devices.iter().map(|device| &device.name).collect();
        if met.iter().ne(given) {
            self.note(Note::Order { met });
        }
        self.replica
    }
}

/// Endpoints depth first, siblings by function number, then as listed: how a guest enumerates.
fn guest_order(topology: &Topology) -> Vec<Name> {
    let mut met = Vec::new();
    let mut open: Vec<&Name> = topology.root_complexes.iter().rev().map(|root| &root.name).collect();
    while let Some(name) = open.pop() {
        let mut below: Vec<&NodeSpec> = topology.nodes.iter().filter(|node| node.on == *name).collect();
        below.sort_by_key(|node| node.place.function);
        met.extend(below.iter().filter(|node| matches!(node.kind, NodeKind::Endpoint(_))).map(|node| node.name.clone()));
        open.extend(below.iter().rev().map(|node| &node.name));
    }
    met
}

/// Addresses without the colons, which names must not have.
fn host_name(kind: PortKind, at: HostBdf) -> Name {
    let kind = match kind {
        PortKind::Root => "root",
        PortKind::Upstream => "up",
        PortKind::Downstream => "down",
        PortKind::PciBridge => "bridge",
    };
    Name(format!("{kind}-{}", at.to_string().replace(':', "-")))
}

fn own_name(device: &Name) -> Name {
    Name(format!("{device}-port"))
}

/// A difference between the copy and the host, or a guess.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The host tells nothing of a port's link.
    NoLink {
        /// The port.
        port: Name,
    },
    /// The lowest function given of a device is not function 0.
    Renumbered {
        /// The device.
        device: Name,
        /// Its function number on the host.
        from: u8,
    },
    /// A bridge to conventional PCI is not copied.
    BridgeLeftOut {
        /// The device below it.
        device: Name,
        /// The bridge.
        bridge: HostBdf,
    },
    /// The device shares a port on the host and has its own in the guest.
    OwnPort {
        /// The device.
        device: Name,
        /// The host port.
        beside: HostBdf,
    },
    /// The device is integrated into the root complex.
    Integrated {
        /// The device.
        device: Name,
        /// Where.
        at: HostBdf,
    },
    /// The guest meets the devices in another order than the one given.
    Order {
        /// The guest's order.
        met: Vec<Name>,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLink { port } => write!(f, "port {port} shows {}: the host does not tell its link", Link::default().max),
            Self::Renumbered { device, from } => {
                write!(
                    f,
                    "device {device} is function 0 in the guest and function {from} on the host, whose function 0 is not passed through"
                )
            }
            Self::BridgeLeftOut { device, bridge } => {
                write!(f, "device {device} stands below bridge {bridge} on the host, which is not copied")
            }
            Self::OwnPort { device, beside } => {
                write!(f, "device {device} gets a port of its own beside the copy of host port {beside}")
            }
            Self::Integrated { device, at } => {
                write!(f, "device {device} ({at}) is integrated into the host's root complex and gets a root port of its own")
            }
            Self::Order { met } => {
                let names: Vec<&str> = met.iter().map(|name| name.0.as_str()).collect();
                write!(f, "the host's tree makes the guest meet the devices in another order than given: {}", names.join(", "))
            }
        }
    }
}

#[cfg(test)]
mod tests;
