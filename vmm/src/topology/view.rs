//! A hierarchy as a picture needs it, the same for a host and for a planned guest: who stands below whom, and what is said
//! of each.

use devices::stub::StubSpec;
use pci::emulated::Attachment;
use pci::ids::Ids;
use pci::link::Link;
use pci::port::own_ids;
use pci::topology::{Parent, Plan, PlannedKind, PortKind};

use crate::host::tree::{HostKind, HostParent, HostTree};
use crate::spec::{Endpoint, Spec};

const NVIDIA: u16 = 0x10DE;

/// A hierarchy. Parents and children are indices in `nodes`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// Root complexes, by address.
    pub roots: Vec<Root>,
    /// Functions; siblings in the order of their addresses.
    pub nodes: Vec<Node>,
}

/// A root complex.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// As sysfs names it: `pci0000:00`.
    pub name: String,
    /// NUMA node, where known.
    pub numa_node: Option<u32>,
}

/// What a function hangs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// Index in [`View::roots`].
    Root(usize),
    /// Index in [`View::nodes`].
    Node(usize),
}

/// A function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Address with segment: `0000:03:00.0`.
    pub at: String,
    /// Its name in a guest.
    pub name: Option<String>,
    /// What it hangs on.
    pub on: On,
    /// What it is.
    pub kind: HostKind,
    /// Its ids.
    pub ids: Ids,
    /// The function of the host that it is or stands for, in a guest.
    pub host: Option<String>,
    /// Its link; a port's own registers.
    pub link: Option<Link>,
    /// NUMA node, where known.
    pub numa_node: Option<u32>,
    /// NVIDIA peer-to-peer clique.
    pub clique: Option<u8>,
    /// Driver bound to it.
    pub driver: Option<String>,
}

impl View {
    /// A host.
    #[must_use]
    pub fn of_host(tree: &HostTree) -> Self {
        let mut view = Self::default();
        // Tops first, so that those below find theirs.
        let mut by_depth: Vec<_> = tree.functions.values().map(|node| (tree.above(node).len(), node)).collect();
        by_depth.sort_by_key(|(depth, node)| (*depth, node.at));
        let mut at: Vec<_> = Vec::new();
        for (_, node) in by_depth {
            let on = match &node.on {
                HostParent::RootComplex(name) => On::Root(view.root(name)),
                HostParent::Bridge(bridge) => match at.iter().position(|other| other == bridge) {
                    Some(index) => On::Node(index),
                    None => continue,
                },
            };
            if let On::Root(index) = on
                && let Some(root) = view.roots.get_mut(index)
            {
                root.numa_node = root.numa_node.or(node.numa_node);
            }
            at.push(node.at);
            view.nodes.push(Node {
                at: node.at.to_string(),
                name: None,
                host: None,
                on,
                kind: node.kind,
                ids: node.ids,
                link: node.link,
                numa_node: node.numa_node,
                clique: None,
                driver: node.driver.clone(),
            });
        }
        view
    }

    /// What a guest would see; `tree` is its host.
    #[must_use]
    pub fn of_plan(plan: &Plan, spec: &Spec, tree: &HostTree) -> Self {
        let mut view = Self::default();
        for root in &plan.root_complexes {
            let name = format!("pci{:04x}:{:02x}", root.segment, root.buses.secondary);
            view.roots.push(Root { name, numa_node: root.node });
        }
        for function in &plan.functions {
            let on = match function.on {
                Parent::RootComplex(index) => On::Root(index),
                Parent::Port(id) => On::Node(plan.functions.iter().position(|other| other.id == id).unwrap_or(usize::MAX)),
            };
            let host = spec.stands_for.get(&function.name).copied();
            let host = match spec.endpoints.get(&function.name) {
                Some(Endpoint::Vfio { at, .. }) => Some(*at),
                _ => host,
            };
            let (kind, ids, link) = match &function.kind {
                PlannedKind::Port(port) => (
                    HostKind::Port(port.spec.kind),
                    port.spec.ids.unwrap_or_else(|| own_ids(port.spec.kind)),
                    Some(port.spec.link),
                ),
                PlannedKind::Endpoint(endpoint) => {
                    let own = match spec.endpoints.get(&function.name) {
                        Some(Endpoint::Stub(StubSpec { on: Attachment::Link(link), .. })) => Some(*link),
                        _ => host.and_then(|at| tree.get(at)?.link),
                    };
                    (HostKind::Endpoint, endpoint.spec.ids, own)
                }
            };
            let clique = match spec.endpoints.get(&function.name) {
                Some(Endpoint::Stub(stub)) => stub.clique,
                Some(Endpoint::Vfio { clique, .. }) => *clique,
                _ => None,
            };
            let numa_node = match on {
                On::Root(index) => view.roots.get(index).and_then(|root| root.numa_node),
                On::Node(index) => view.nodes.get(index).and_then(|above| above.numa_node),
            };
            view.nodes.push(Node {
                at: function.at.to_string(),
                name: Some(function.name.to_string()),
                host: host.map(|at| at.to_string()),
                on,
                kind,
                ids,
                link,
                numa_node,
                clique: clique.map(pci::caps::clique::Clique::id),
                driver: None,
            });
        }
        view
    }

    /// The nodes directly on `on`.
    pub fn below(&self, on: On) -> impl Iterator<Item = (usize, &Node)> {
        self.nodes.iter().enumerate().filter(move |(_, node)| node.on == on)
    }

    /// The directory that sysfs has for a node: `pci0000:00/0000:00:01.0/0000:01:00.0`.
    #[must_use]
    pub fn path(&self, node: &Node) -> String {
        let mut path = node.at.clone();
        let mut on = node.on;
        // No node is deeper than there are nodes.
        for _ in 0..=self.nodes.len() {
            match on {
                On::Root(index) => {
                    let root = self.roots.get(index).map_or("", |root| &root.name);
                    return format!("{root}/{path}");
                }
                On::Node(index) => {
                    let Some(above) = self.nodes.get(index) else { break };
                    path = format!("{}/{path}", above.at);
                    on = above.on;
                }
            }
        }
        path
    }

    fn root(&mut self, name: &str) -> usize {
        if let Some(index) = self.roots.iter().position(|root| root.name == name) {
            return index;
        }
        self.roots.push(Root { name: name.to_owned(), numa_node: None });
        self.roots.len() - 1
    }
}

impl Node {
    /// What it is, in words: the port's kind, or what its class says.
    #[must_use]
    pub const fn noun(&self) -> &'static str {
        match self.kind {
            HostKind::Port(PortKind::Root) => "root port",
            HostKind::Port(PortKind::Upstream) => "switch",
            HostKind::Port(PortKind::Downstream) => "port",
            HostKind::Port(PortKind::PciBridge) | HostKind::OtherBridge => "bridge",
            HostKind::Endpoint => match self.ids.class.base_and_sub() {
                0x0300 | 0x0302 | 0x0380 => "GPU",
                0x0108 => "NVMe",
                0x0207 => "InfiniBand",
                0x0200..=0x02FF => "NIC",
                0x1200..=0x12FF => "accelerator",
                0x0680 if self.ids.vendor == NVIDIA => "NVSwitch",
                _ => "device",
            },
        }
    }

    /// Whether it is a port.
    #[must_use]
    pub const fn is_port(&self) -> bool {
        matches!(self.kind, HostKind::Port(_))
    }
}
