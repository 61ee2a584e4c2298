//! Decides which memory node each root complex is near to, from the devices below it.
//!
//! A root complex has one node (`_PXM`). Where Banyan made one for devices of several nodes, its root ports are moved to
//! one root complex for each node; a copy of the host's and a topology file stay as they are.

use std::collections::BTreeMap;

use pci::address::HostBdf;
use pci::topology::{Name, Place, RootComplexSpec, Topology};

use super::{GuestNuma, NumaError};
use crate::host::tree::HostTree;
use crate::replicate::HostRoot;

/// What of the host is known of a topology.
#[derive(Debug, Clone, Copy)]
pub struct Near<'a> {
    /// The host functions among the endpoints.
    pub devices: &'a BTreeMap<Name, HostBdf>,
    /// What root complexes stand for.
    pub roots: &'a BTreeMap<Name, HostRoot>,
}

/// What a user should know where root complexes name the guest's only nodes beside 0, without memory and processors: a number
/// that leaves others out is likely typed wrongly.
pub fn gaps(topology: &Topology) -> Option<String> {
    let named = topology.root_complexes.iter().filter_map(|root| Some((root.node?, &root.name)));
    let mut by_node: BTreeMap<u32, &Name> = named.collect();
    by_node.remove(&0);
    let (expected, (node, root)) = (1u32..).zip(by_node).find(|(expected, (node, _))| expected != node)?;
    Some(format!(
        "root complex {root} is on memory node {node}, and nothing is on node {expected}: check the number, or give the guest its nodes by --numa"
    ))
}

/// Whether root complexes may be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Roots {
    /// They may: devices move to one of their own node.
    MayBeAdded,
    /// They are a copy of the host's, or a topology file's.
    AreGiven,
}

/// Gives root complexes their nodes, by what is `near` them. Returns what a user should know.
///
/// # Errors
/// If a root complex names a node that does not exist.
pub fn place_roots(
    topology: &mut Topology,
    numa: &GuestNuma,
    tree: &HostTree,
    near: &Near<'_>,
    roots: Roots,
) -> Result<Vec<String>, NumaError> {
    check_nodes(topology, numa)?;
    let mut notes = Vec::new();
    let below = Below::new(topology, near.devices);
    for (index, devices) in below.roots.iter().enumerate() {
        let Some(root) = topology.root_complexes.get(index).cloned() else { continue };
        let sorted = ByNode::sort(devices, &below, numa, tree, &mut notes);
        let node = root.node.or_else(|| sorted.most()).or_else(|| {
            // Host devices may come to the copy of a root complex. Emulated ones are as near to one node as to another.
            let copied = near.roots.get(&root.name).and_then(|host| numa.near(host.node?, tree));
            copied.map(|(node, _)| node).or((!sorted.unknown).then_some(0))
        });
        if let Some(root) = topology.root_complexes.get_mut(index) {
            root.node = node;
        }
        for (other, devices) in sorted.nodes.into_iter().filter(|(other, _)| Some(*other) != node) {
            let (free, fixed): (Vec<_>, Vec<_>) = devices.into_iter().partition(|(_, top)| {
                roots == Roots::MayBeAdded && topology.nodes.get(*top).is_some_and(|top| top.place == Place::default())
            });
            if !free.is_empty() {
                move_to_own_root(topology, &free, root.segment, other);
            }
            for (device, _) in fixed {
                notes.push(format!(
                    "{device} is near to guest node {other}, but its root complex {} is on node {}, which the guest takes for the device's",
                    root.name,
                    node.map_or_else(|| "none".to_owned(), |node| node.to_string())
                ));
            }
        }
    }
    Ok(notes)
}

/// Whether every node that a root complex names is there.
fn check_nodes(topology: &Topology, numa: &GuestNuma) -> Result<(), NumaError> {
    let last = numa.nodes.len().saturating_sub(1);
    for root in &topology.root_complexes {
        if let Some(node) = root.node.filter(|node| usize::try_from(*node).is_ok_and(|node| node > last)) {
            return Err(NumaError::RootNode { root: root.name.to_string(), node, last });
        }
    }
    Ok(())
}

/// Moves what holds `devices` on the root bus to a new root complex on `node`.
fn move_to_own_root(topology: &mut Topology, devices: &[&(Name, usize)], segment: u16, node: u32) {
    let name = free_name(topology);
    for (_, top) in devices {
        topology.nodes.iter_mut().skip(*top).take(1).for_each(|top| top.on = name.clone());
    }
    topology.root_complexes.push(RootComplexSpec { name, segment, node: Some(node), first_bus: None });
}

/// Devices below a root complex, and what holds each on the root bus, by the guest's node that they are near to.
struct ByNode<'a> {
    nodes: BTreeMap<u32, Vec<&'a (Name, usize)>>,
    /// There are some of which nobody knows it.
    unknown: bool,
}

impl<'a> ByNode<'a> {
    /// Sorts `devices`; adds to `notes` where none of the guest's nodes stands for the host's.
    fn sort(devices: &'a [(Name, usize)], below: &Below<'_>, numa: &GuestNuma, tree: &HostTree, notes: &mut Vec<String>) -> Self {
        let mut sorted = Self { nodes: BTreeMap::new(), unknown: false };
        for device in devices {
            let host = below.of.get(&device.0).and_then(|at| tree.get(*at)?.numa_node);
            match host.and_then(|host| Some((host, numa.near(host, tree)?))) {
                Some((host, (node, exact))) => {
                    if !exact {
                        notes.push(format!(
                            "{} is near to host node {host}, which no guest node stands for: it is told to be near to guest node {node}, the nearest",
                            device.0
                        ));
                    }
                    sorted.nodes.entry(node).or_default().push(device);
                }
                None => sorted.unknown = true,
            }
        }
        sorted
    }

    /// The node that most are near to; on a tie the lowest number.
    fn most(&self) -> Option<u32> {
        self.nodes.iter().max_by_key(|(node, devices)| (devices.len(), u32::MAX - **node)).map(|(node, _)| *node)
    }
}

/// The host functions below each root complex, and what holds each on the root bus.
struct Below<'a> {
    roots: Vec<Vec<(Name, usize)>>,
    of: &'a BTreeMap<Name, HostBdf>,
}

impl<'a> Below<'a> {
    fn new(topology: &Topology, of: &'a BTreeMap<Name, HostBdf>) -> Self {
        let roots: BTreeMap<&Name, usize> =
            topology.root_complexes.iter().zip(0..).map(|(root, index)| (&root.name, index)).collect();
        let nodes: BTreeMap<&Name, usize> = topology.nodes.iter().zip(0..).map(|(node, index)| (&node.name, index)).collect();
        let mut below = vec![Vec::new(); topology.root_complexes.len()];
        for name in of.keys() {
            let mut next = nodes.get(name).copied();
            // A topology that loops is refused later; here it only has to end.
            for _ in 0..=topology.nodes.len() {
                let Some((top, node)) = next.and_then(|index| Some((index, topology.nodes.get(index)?))) else { break };
                if let Some(root) = roots.get(&node.on) {
                    below.iter_mut().skip(*root).take(1).for_each(|devices| devices.push((name.clone(), top)));
                    break;
                }
                next = nodes.get(&node.on).copied();
            }
        }
        Self { roots: below, of }
    }
}

/// `rc0`, `rc1`, ...: the first that nothing is called.
#[must_use]
pub fn free_name(topology: &Topology) -> Name {
    let taken = |name: &Name| {
        topology.root_complexes.iter().any(|root| root.name == *name) || topology.nodes.iter().any(|node| node.name == *name)
    };
    (0u32..).map(|number| Name(format!("rc{number}"))).find(|name| !taken(name)).unwrap_or_else(|| Name::from("rc"))
}
