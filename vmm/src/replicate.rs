//! Decides which ports stand above the devices that are passed through: a copy of the host's, pruned.
//! Pure, and explains itself in notes.
//!
//! The copy keeps every switch level that leads to a wanted device, with the host's ids and link registers, and one root
//! port for each of the host's. Root ports carry Banyan's own ids, since a guest that knows the host's would look for the
//! chipset around them. How close two devices are ([`crate::topology::matrix`]) is the same in the copy and on the host.
//!
//! | question | module |
//! |---|---|
//! | which functions are one device, which of them share a port? | `group` |
//! | what hangs on what? | `tree` |
//! | in which order does a guest meet the devices? | `order` |
//! | which ports have a copy for devices that come later? | `vacant` |

mod group;
mod note;
mod order;
mod tree;
mod vacant;

use std::collections::{BTreeMap, BTreeSet};

use api::config::HostPorts;
use pci::address::HostBdf;
use pci::topology::{EndpointSpec, HotPlug, Name, Topology};
use thiserror::Error;

use crate::host::tree::{HostNode, HostTree};
pub use note::Note;
use tree::Copy;

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

/// Which order of GPUs is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GpuOrder {
    /// The one in which they were given. A tree that does not allow it is refused.
    #[default]
    Request,
    /// Any that the tree allows; the given one where it does.
    Topology,
}

/// What is wanted beside the devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wishes {
    /// Which order of GPUs is right.
    pub order: GpuOrder,
    /// Whether root complexes are left without a memory node, since somebody else decides it. By default each node of the host
    /// in use becomes one of the guest, numbered upwards from 0.
    pub leave_nodes: bool,
    /// Which ports have a copy to which devices come while the guest runs.
    pub host_ports: HostPorts,
    /// What those keep, as far as a user says it.
    pub hot_plug: HotPlug,
}

/// A topology and what is worth saying about it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Replica {
    /// Root complexes (`rc0`, `rc1`, ...), ports and the devices, in the order in which a guest meets them.
    pub topology: Topology,
    /// The host function that a port or device stands for.
    pub stands_for: BTreeMap<Name, HostBdf>,
    /// What was left out, guessed, or differs from the host.
    pub notes: Vec<Note>,
    /// The root complex of the host that each of the guest stands for.
    pub host_roots: BTreeMap<Name, HostRoot>,
    /// Ports that stand for one of the host which has a device below.
    pub homes: BTreeSet<Name>,
}

/// A root complex of the host, as far as it belongs to one memory node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRoot {
    /// As in sysfs: `pci0000:00`.
    pub name: String,
    /// The node; `None` where the host does not know.
    pub node: Option<u32>,
}

impl HostRoot {
    /// That of a function: the node is the topmost port's, as NCCL sees it.
    #[must_use]
    pub fn above(tree: &HostTree, function: &HostNode) -> Option<Self> {
        let top = tree.above(function).first().copied().unwrap_or(function);
        Some(Self { name: tree.root_complex(function)?.to_owned(), node: top.numa_node })
    }
}

/// Places `devices`, which must be in `tree`; one that is not gets a root port of its own.
pub fn replicate(tree: &HostTree, devices: &[Requested], wishes: &Wishes) -> Result<Replica, ReplicaError> {
    let groups = group::together(tree, devices);
    let mut copy = Copy::new(tree, &groups, wishes);
    for index in 0..groups.len() {
        copy.place(index);
    }
    copy.place_vacant();
    copy.sort();
    if wishes.order == GpuOrder::Request {
        order::check(&copy.met(), devices)?;
    }
    Ok(copy.finish(devices))
}

/// Devices that cannot be placed as wanted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ReplicaError {
    /// The host's tree gives GPUs another order.
    #[error(
        "GPU {first} was given before GPU {second}, but the host's tree makes the guest meet {second} first; give the GPUs in \
         the order {}, or allow it with --pcie gpu-order=topology",
        names(possible)
    )]
    Order {
        /// Given earlier.
        first: Name,
        /// Met earlier.
        second: Name,
        /// The order nearest to the given one.
        possible: Vec<Name>,
    },
}

fn names(list: &[Name]) -> String {
    list.iter().map(|name| name.0.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod random;
#[cfg(test)]
mod tests;
