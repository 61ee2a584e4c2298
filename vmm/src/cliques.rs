//! Decides which GPUs of a guest may talk peer to peer: NVIDIA's driver lets those do that show the same clique. Pure.
//!
//! GPUs form a set where the host has a direct way between them. All of a set get one id, and sets get different ones: the
//! driver asks for a group of GPUs at once, and one that shows another id, or none, is a no for all of them. What a user gives
//! stands above that.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use pci::address::HostBdf;
use pci::caps::clique::Clique;
use pci::topology::PortKind;
use thiserror::Error;

use crate::host::tree::{HostKind, HostNode, HostTree};

/// NVIDIA.
pub const NVIDIA: u16 = 0x10DE;
/// Base class of display controllers.
const DISPLAY: u8 = 0x03;
/// As many ids as the capability has room for.
const IDS: u8 = 16;

/// A device of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// The function on the host.
    pub at: HostBdf,
    /// The clique that a user gives it.
    pub given: Option<Clique>,
}

/// What counts as a direct way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Nothing: only what users give.
    Off,
    /// A switch above both, at whatever level.
    #[default]
    Switch,
    /// One root complex above both, for hosts whose root complexes forward peer-to-peer requests.
    RootComplex,
}

/// Who is in which clique.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cliques {
    /// The clique of each device that has one, given ones included.
    pub of: BTreeMap<HostBdf, Clique>,
    /// What the user should know.
    pub notes: Vec<Note>,
}

/// Whether NVIDIA's driver looks for a clique on this function: a display controller of NVIDIA, function 0, and no virtual
/// function.
#[must_use]
pub fn takes_part(node: &HostNode) -> bool {
    node.ids.vendor == NVIDIA
        && node.ids.class.base() == DISPLAY
        && node.at.bdf.devfn().function() == 0
        && node.physical_function.is_none()
}

/// The cliques of `devices`; those that are not in `tree`, or are no GPUs, keep what they were given.
///
/// Sets are numbered from 0 by their lowest address, with the numbers left out that somebody was given. A set of which one
/// member was given a clique shares it.
pub fn cliques(tree: &HostTree, devices: &[Member], policy: Policy) -> Result<Cliques, CliqueError> {
    let given: BTreeMap<HostBdf, Clique> = devices.iter().filter_map(|member| Some((member.at, member.given?))).collect();
    let gpus: BTreeSet<HostBdf> =
        devices.iter().map(|member| member.at).filter(|at| tree.get(*at).is_some_and(takes_part)).collect();
    let mut cliques = Cliques { of: given.clone(), notes: Vec::new() };
    let sets = if policy == Policy::Off { Vec::new() } else { sets(tree, &gpus, policy) };
    let mut free = (0..IDS).filter_map(|id| Clique::new(id).ok()).filter(|id| given.values().all(|given| given != id));
    for set in &sets {
        let ids: BTreeSet<Clique> = set.iter().filter_map(|at| given.get(at).copied()).collect();
        let open: Vec<HostBdf> = set.iter().copied().filter(|at| !given.contains_key(at)).collect();
        if ids.len() > 1 {
            cliques.notes.push(Note::Split { set: set.clone() });
        }
        if open.is_empty() {
            continue;
        }
        let id = match ids.first() {
            Some(id) if ids.len() == 1 => *id,
            _ => free.next().ok_or(CliqueError::TooMany { sets: sets.len(), given: given.len() })?,
        };
        cliques.of.extend(open.into_iter().map(|at| (at, id)));
    }
    let (with, without): (Vec<_>, Vec<_>) = gpus.iter().copied().partition(|at| cliques.of.contains_key(at));
    if !with.is_empty() && !without.is_empty() {
        cliques.notes.push(Note::Uncovered { with, without });
    }
    Ok(cliques)
}

/// GPUs that have a direct way to each other, each set and all sets by lowest address.
fn sets(tree: &HostTree, gpus: &BTreeSet<HostBdf>, policy: Policy) -> Vec<Vec<HostBdf>> {
    let mut sets: Vec<(Meeting<'_>, Vec<HostBdf>)> = Vec::new();
    for node in gpus.iter().filter_map(|at| tree.get(*at)) {
        let meeting = Meeting::of(tree, node, policy);
        match sets.iter_mut().find(|(other, _)| *other == meeting) {
            Some((_, set)) => set.push(node.at),
            None => sets.push((meeting, vec![node.at])),
        }
    }
    sets.into_iter().map(|(_, set)| set).collect()
}

/// What a GPU must have in common with another.
#[derive(Debug, PartialEq, Eq)]
enum Meeting<'a> {
    Switch(HostBdf),
    RootComplex(&'a str),
    Nothing(HostBdf),
}

impl<'a> Meeting<'a> {
    fn of(tree: &'a HostTree, node: &'a HostNode, policy: Policy) -> Self {
        // Whoever shares a switch shares the topmost one.
        let switch = || tree.above(node).into_iter().find(|above| above.kind == HostKind::Port(PortKind::Upstream));
        let found = match policy {
            Policy::Off => None,
            Policy::Switch => switch().map(|upstream| Self::Switch(upstream.at)),
            Policy::RootComplex => tree.root_complex(node).map(Self::RootComplex),
        };
        found.unwrap_or(Self::Nothing(node.at))
    }
}

/// Something about cliques that is likely a mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// GPUs with a direct way were given different cliques.
    Split {
        /// All of the set.
        set: Vec<HostBdf>,
    },
    /// Some GPUs are in no clique.
    Uncovered {
        /// Those that are in one.
        with: Vec<HostBdf>,
        /// Those that are in none.
        without: Vec<HostBdf>,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |addresses: &[HostBdf]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Split { set } => write!(
                f,
                "the GPUs {} have a direct way to each other on the host and are in different cliques: they will not talk peer \
                 to peer",
                list(set)
            ),
            Self::Uncovered { with, without } => write!(
                f,
                "the GPUs {} are in a clique and {} in none: NVIDIA's driver refuses peer-to-peer to any group of GPUs with one \
                 of the latter",
                list(with),
                list(without)
            ),
        }
    }
}

/// Cliques that cannot be.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum CliqueError {
    /// More sets than ids.
    #[error(
        "the GPUs form {sets} sets without a direct way to each other, and there are {IDS} cliques, {given} of them given: give \
         some GPUs the same `clique`, or switch automatic cliques off"
    )]
    TooMany {
        /// Sets.
        sets: usize,
        /// Devices with a clique of their own.
        given: usize,
    },
}

#[cfg(test)]
mod tests;
