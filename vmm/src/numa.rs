//! Decides the guest's memory nodes: which vCPUs and how much memory each has, which host node gives them, and how far they
//! are from each other. Pure: the host has been looked at before.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use api::config::{CpuList, HostPorts, MemoryPolicy, NumaConfig, NumaNode, NumaPlacement, Size, VmConfig};
use arch::memory_map::{MemoryMap, Range, take};
use arch::x86_64::acpi::Node;
use arch::x86_64::processors::Processors;
use thiserror::Error;

use crate::host::tree::{HostKind, HostTree};
use crate::plan::MachinePlan;
use crate::resize;
use crate::spec::Host;

mod roots;
mod spread;

pub use roots::{Near, Roots, free_name, gaps, place_roots};
pub use spread::{SPREAD, SpreadError, smallest, spread};

/// Within a node (ACPI 6.5 5.2.17).
const LOCAL: u8 = 10;
/// From one node to another, where nobody says.
const REMOTE: u8 = 20;
/// What an even split of memory is rounded to, if memory is large enough: a node's end then cuts no huge page.
const SPLIT: u64 = 2 << 20;

/// The guest's memory nodes; a node's place in the list is its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestNuma {
    /// At least one.
    pub nodes: Vec<GuestNode>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestNode {
    /// Its vCPUs, those that may come later among them.
    pub cpus: CpuList,
    /// Bytes of its memory at the start.
    pub memory: u64,
    /// What gives memory and processors.
    pub host: Option<HostSide>,
    /// To each node, in the order of nodes.
    pub distances: Vec<u8>,
}

/// A host node that stands behind a guest node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSide {
    /// Its number.
    pub node: u32,
    /// Its processors, as far as the host tells.
    pub cpus: CpuList,
    /// How it is used.
    pub placement: NumaPlacement,
}

/// Memory that comes from a host node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// Guest-physical addresses.
    pub range: Range,
    /// The host node.
    pub node: u32,
    /// What happens when it has none left.
    pub policy: MemoryPolicy,
}

/// The nodes of `config`; `None` when the guest is to know of none.
///
/// # Errors
/// If nodes do not hold each vCPU once and all memory, or name a host node that does not exist or is too small.
pub fn resolve(config: &VmConfig, host: &Host) -> Result<Option<GuestNuma>, NumaError> {
    let numa = match &config.numa {
        NumaConfig::Off => return Ok(None),
        NumaConfig::Host(placement) => match as_on_host(config, host, *placement) {
            Some(numa) => numa,
            None => return Ok(None),
        },
        NumaConfig::Nodes(nodes) => GuestNuma { nodes: as_given(nodes, config, &host.tree)? },
    };
    for (id, node) in (0u32..).zip(&numa.nodes) {
        check_pages(id, node, config)?;
        check_host_memory(id, node, config, &host.tree)?;
    }
    Ok(Some(numa))
}

/// vCPUs at most: those of the start and those that may come.
#[must_use]
pub fn most_cpus(config: &VmConfig) -> u32 {
    u32::from(config.cpus.max.unwrap_or(config.cpus.count))
}

/// A guest node for each host node that a device is near to, or may come near to; vCPUs and memory are shared out evenly.
fn as_on_host(config: &VmConfig, host: &Host, placement: NumaPlacement) -> Option<GuestNuma> {
    let mut near: BTreeSet<u32> = host.wanted.values().filter_map(|at| host.tree.get(*at)?.numa_node).collect();
    if config.pcie.host_ports == HostPorts::All {
        let ports = host.tree.functions.values().filter(|node| matches!(node.kind, HostKind::Port(_)));
        near.extend(ports.filter_map(|port| port.numa_node));
    }
    let count = u32::try_from(near.len()).ok().filter(|count| *count > 0)?;
    let (started, most) = (u32::from(config.cpus.count), most_cpus(config));
    let unit = match config.memory.hugepages {
        Some(page) => page.size().bytes(),
        None if config.memory.size.bytes() / SPLIT >= u64::from(count) => SPLIT,
        None => arch::memory_map::PAGE,
    };
    let units = config.memory.size.bytes() / unit;
    let nodes = (0..count).zip(&near).map(|(index, node)| {
        // Those of the start and those that come later are shared out one after the other, so that a machine that
        // starts with few has some on each node.
        let cpus = share(started, count, index).chain(share(most - started, count, index).map(|cpu| started + cpu)).collect();
        let (size, more) = (units / u64::from(count), units % u64::from(count));
        let mut memory = (size + u64::from(u64::from(index) < more)) * unit;
        if index + 1 == count {
            memory += config.memory.size.bytes() % unit;
        }
        let distances = near.iter().map(|other| host_distance(&host.tree, *node, *other).unwrap_or(REMOTE)).collect();
        GuestNode { cpus, memory, host: Some(host_side(&host.tree, *node, placement)), distances }
    });
    let mut nodes: Vec<GuestNode> = nodes.collect();
    for (index, node) in nodes.iter_mut().enumerate() {
        node.distances.iter_mut().skip(index).take(1).for_each(|own| *own = LOCAL);
    }
    Some(GuestNuma { nodes })
}

/// The numbers of `total` that node `index` of `count` gets: runs of equal length, the first ones longer by one.
fn share(total: u32, count: u32, index: u32) -> std::ops::Range<u32> {
    let start = |index: u32| total / count * index + index.min(total % count);
    start(index)..start(index + 1)
}

fn as_given(nodes: &[NumaNode], config: &VmConfig, tree: &HostTree) -> Result<Vec<GuestNode>, NumaError> {
    let mut sorted: Vec<&NumaNode> = nodes.iter().collect();
    sorted.sort_by_key(|node| node.id);
    if let Some((expected, node)) = (0u32..).zip(&sorted).find(|(expected, node)| node.id != *expected) {
        return Err(NumaError::Gap { id: node.id, missing: expected });
    }
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].cpus.is_empty() && !pair[1].cpus.is_empty()) {
        return Err(NumaError::Order { without: pair[0].id, with: pair[1].id });
    }
    check_cpus(&sorted, config)?;
    check_memory(&sorted, config)?;
    let given: BTreeMap<(u32, u32), u8> =
        sorted.iter().flat_map(|node| node.distances.iter().map(|far| ((node.id, far.to), far.value))).collect();
    if let Some(((id, to), _)) = given.iter().find(|((_, to), _)| sorted.get(*to as usize).is_none()) {
        return Err(NumaError::DistanceToNone { id: *id, to: *to, last: sorted.len() - 1 });
    }
    sorted
        .iter()
        .map(|node| {
            let distance = |other: &&NumaNode| {
                let told = given.get(&(node.id, other.id)).or_else(|| given.get(&(other.id, node.id))).copied();
                let of_host = || host_distance(tree, node.host?.0, other.host?.0);
                if other.id == node.id { LOCAL } else { told.or_else(of_host).unwrap_or(REMOTE) }
            };
            let host = node.host.map(|(host, placement)| {
                let exists = tree.memory_nodes.contains_key(&host);
                let known = || tree.memory_nodes.keys().copied().collect();
                if exists {
                    Ok(host_side(tree, host, placement))
                } else {
                    Err(NumaError::NoHostNode { id: node.id, host, known: known() })
                }
            });
            Ok(GuestNode {
                cpus: node.cpus.clone(),
                memory: node.memory.bytes(),
                host: host.transpose()?,
                distances: sorted.iter().map(distance).collect(),
            })
        })
        .collect()
}

fn check_cpus(nodes: &[&NumaNode], config: &VmConfig) -> Result<(), NumaError> {
    let most = most_cpus(config);
    let mut owners: BTreeMap<u32, u32> = BTreeMap::new();
    for node in nodes {
        for cpu in node.cpus.iter() {
            if cpu >= most {
                return Err(NumaError::NoCpu { id: node.id, cpu, most });
            }
            if let Some(first) = owners.insert(cpu, node.id) {
                return Err(NumaError::CpuTwice { cpu, first, second: node.id });
            }
        }
    }
    let left: CpuList = (0..most).filter(|cpu| !owners.contains_key(cpu)).collect();
    if left.is_empty() { Ok(()) } else { Err(NumaError::CpusLeft { cpus: left }) }
}

fn check_memory(nodes: &[&NumaNode], config: &VmConfig) -> Result<(), NumaError> {
    let sum = nodes.iter().try_fold(0u64, |sum, node| sum.checked_add(node.memory.bytes()));
    if sum == Some(config.memory.size.bytes()) {
        return Ok(());
    }
    let (sum, memory) = (Size(sum.unwrap_or(u64::MAX)), config.memory.size);
    // A node may have none, so only the sum tells that something was left out.
    let without = nodes.iter().find(|node| node.memory == Size(0)).map(|node| node.id);
    match (without, memory.bytes().checked_sub(sum.bytes())) {
        (Some(id), Some(left)) => Err(NumaError::NoMemory { id, sum, memory, left: Size(left) }),
        _ => Err(NumaError::Memory { sum, memory }),
    }
}

fn check_pages(id: u32, node: &GuestNode, config: &VmConfig) -> Result<(), NumaError> {
    let page = config.memory.hugepages.map_or(Size(arch::memory_map::PAGE), |page| page.size());
    if node.memory.is_multiple_of(page.bytes()) { Ok(()) } else { Err(NumaError::Pages { id, memory: Size(node.memory), page }) }
}

fn check_host_memory(id: u32, node: &GuestNode, config: &VmConfig, tree: &HostTree) -> Result<(), NumaError> {
    let Some(host) = node.host.as_ref().filter(|host| host.placement.policy == MemoryPolicy::Bind) else { return Ok(()) };
    // Huge pages are counted when they are taken.
    let has = tree.memory_nodes.get(&host.node).map_or(0, |node| node.memory);
    if config.memory.hugepages.is_none() && has > 0 && node.memory > has {
        return Err(NumaError::HostMemory { id, memory: Size(node.memory), host: host.node, has: Size(has >> 20 << 20) });
    }
    Ok(())
}

fn host_side(tree: &HostTree, node: u32, placement: NumaPlacement) -> HostSide {
    HostSide { node, cpus: tree.memory_nodes.get(&node).map(|node| node.cpus.clone()).unwrap_or_default(), placement }
}

/// How far two host nodes are, if the host tells something that can be between nodes.
fn host_distance(tree: &HostTree, from: u32, to: u32) -> Option<u8> {
    let told = tree.memory_nodes.get(&from)?.distances.get(&to).copied()?;
    (from != to && told > LOCAL && told < u8::MAX).then_some(told)
}

impl GuestNuma {
    /// The guest node that stands for host node `host`, or else the nearest one that stands for any, and whether it is exact.
    #[must_use]
    pub fn near(&self, host: u32, tree: &HostTree) -> Option<(u32, bool)> {
        let standing = (0u32..).zip(&self.nodes).filter_map(|(id, node)| Some((id, node.host.as_ref()?.node)));
        let far = |node: u32| if node == host { 0 } else { host_distance(tree, host, node).unwrap_or(u8::MAX) };
        standing.min_by_key(|(id, node)| (far(*node), *id)).map(|(id, node)| (id, node == host))
    }

    /// The addresses of each node's memory: RAM in order of address, shared out in order of nodes.
    #[must_use]
    pub fn memory(&self, map: &MemoryMap) -> Vec<Vec<Range>> {
        let mut rest = map.ram.iter().copied().collect();
        self.nodes.iter().map(|node| take(&mut rest, node.memory)).collect()
    }

    /// Which memory comes from which host node.
    #[must_use]
    pub fn bindings(&self, map: &MemoryMap) -> Vec<Binding> {
        let of_node = |(node, ranges): (&GuestNode, Vec<Range>)| {
            let host = node.host.clone();
            let binding =
                move |range| host.as_ref().map(|host| Binding { range, node: host.node, policy: host.placement.policy });
            ranges.into_iter().filter_map(binding).collect::<Vec<_>>()
        };
        self.nodes.iter().zip(self.memory(map)).flat_map(of_node).collect()
    }

    /// The host processors that vCPU `cpu` keeps to, if it is to keep to any.
    #[must_use]
    pub fn pinned_to(&self, cpu: u32) -> Option<&CpuList> {
        let host = self.nodes.iter().find(|node| node.cpus.contains(cpu))?.host.as_ref()?;
        (host.placement.pin && !host.cpus.is_empty()).then_some(&host.cpus)
    }
}

/// The nodes as ACPI shows them. Without nodes of the configuration there are such that root complexes name: all RAM and
/// all processors then belong to node 0.
#[must_use]
pub fn acpi_nodes(numa: Option<&GuestNuma>, processors: &Processors, plan: &MachinePlan) -> Vec<Node> {
    let ids: Vec<u32> = processors.placements().iter().map(|placement| placement.apic_id).collect();
    let hot_plug = &plan.map.hot_plug;
    let Some(numa) = numa else {
        let named: BTreeSet<u32> = plan.pci.root_complexes.iter().filter_map(|root| root.node).collect();
        // A node tells where memory may come, too.
        if named.is_empty() && hot_plug.is_empty() {
            return Vec::new();
        }
        let others = named.into_iter().filter(|proximity| *proximity != 0).map(|proximity| Node { proximity, ..Node::default() });
        let whole = Node { cpus: ids, memory: plan.map.ram.clone(), hot_plug: hot_plug.clone(), ..Node::default() };
        return std::iter::once(whole).chain(others).collect();
    };
    let parts = resize::share_out(hot_plug, numa.nodes.len());
    let ranges = numa.memory(&plan.map).into_iter().zip(parts);
    let node = |(node, (memory, hot_plug)): (&GuestNode, (Vec<Range>, Vec<Range>))| Node {
        proximity: 0,
        cpus: node.cpus.iter().filter_map(|cpu| ids.get(usize::try_from(cpu).ok()?).copied()).collect(),
        memory,
        hot_plug,
        distances: node.distances.clone(),
    };
    let nodes = numa.nodes.iter().zip(ranges).map(node);
    (0u32..).zip(nodes).map(|(proximity, node)| Node { proximity, ..node }).collect()
}

impl fmt::Display for GuestNuma {
    /// A line for each node, for `--dry-run -v`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (id, node) in self.nodes.iter().enumerate() {
            write!(f, "node {id}: ")?;
            if node.cpus.is_empty() { write!(f, "no vCPU, ") } else { write!(f, "vCPUs {}, ", node.cpus) }?;
            write!(f, "memory {}, distances", Size(node.memory))?;
            node.distances.iter().try_for_each(|distance| write!(f, " {distance}"))?;
            if let Some(host) = &node.host {
                let pinned = if host.placement.pin && !host.cpus.is_empty() { ", pinned to CPUs " } else { "" };
                let cpus = if pinned.is_empty() { String::new() } else { host.cpus.to_string() };
                write!(f, "; host node {} ({}){pinned}{cpus}", host.node, host.placement.policy)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Memory nodes that no guest can have on this host.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NumaError {
    /// Numbers with a hole.
    #[error("--numa id={id} is given but id={missing} is not: number memory nodes from 0 on without a gap")]
    Gap {
        /// The first that is too large.
        id: u32,
        /// The one that is missing.
        missing: u32,
    },
    /// Linux numbers nodes with processors first.
    #[error("--numa id={without} has no vCPUs but id={with} has: number nodes with vCPUs first, guests do so themselves")]
    Order {
        /// Without vCPUs.
        without: u32,
        /// With.
        with: u32,
    },
    /// A vCPU that the machine does not have.
    #[error("--numa id={id} has vCPU {cpu}, but the machine has vCPUs 0 to {}: raise --cpus or leave it out", .most.saturating_sub(1))]
    NoCpu {
        /// The node.
        id: u32,
        /// The vCPU.
        cpu: u32,
        /// How many there are.
        most: u32,
    },
    /// A vCPU in two nodes.
    #[error("vCPU {cpu} is in --numa id={first} and id={second}: leave it out of one")]
    CpuTwice {
        /// The vCPU.
        cpu: u32,
        /// One node.
        first: u32,
        /// The other.
        second: u32,
    },
    /// vCPUs in no node.
    #[error("vCPUs {cpus} are in no memory node: add them to the `cpus` of one --numa")]
    CpusLeft {
        /// Which.
        cpus: CpuList,
    },
    /// A sum that is not the machine's.
    #[error("the memory nodes have {sum} together, --memory is {memory}: make them equal")]
    Memory {
        /// Of all nodes.
        sum: Size,
        /// Of the machine.
        memory: Size,
    },
    /// A node that says nothing of its memory.
    #[error("--numa id={id} has no `memory`, and the nodes have {sum} together where --memory is {memory}: add memory={left}")]
    NoMemory {
        /// The node.
        id: u32,
        /// Of all nodes.
        sum: Size,
        /// Of the machine.
        memory: Size,
        /// What no node has.
        left: Size,
    },
    /// Cut pages.
    #[error("--numa id={id} has {memory}, which is no multiple of the page size {page}: round it")]
    Pages {
        /// The node.
        id: u32,
        /// Its memory.
        memory: Size,
        /// The page.
        page: Size,
    },
    /// A distance to nowhere.
    #[error("--numa id={id} gives a distance to node {to}, the last node is {last}: leave it out")]
    DistanceToNone {
        /// The node.
        id: u32,
        /// The other.
        to: u32,
        /// The highest number.
        last: usize,
    },
    /// A host node that does not exist.
    #[error("--numa id={id} asks for host-node={host}, the host has {}: give one of them", list(known))]
    NoHostNode {
        /// The guest's node.
        id: u32,
        /// The host's.
        host: u32,
        /// Those that exist.
        known: Vec<u32>,
    },
    /// A host node that is too small.
    #[error(
        "--numa id={id} binds {memory} to host node {host}, which has {has} in all: give it less, or add policy=preferred to take memory of other nodes, too"
    )]
    HostMemory {
        /// The guest's node.
        id: u32,
        /// Its memory.
        memory: Size,
        /// The host's.
        host: u32,
        /// What it has, in whole MiB.
        has: Size,
    },
    /// A root complex of a node that does not exist.
    #[error("root complex {root} of the topology file is on node {node}, --numa gives nodes 0 to {last}: change one of them")]
    RootNode {
        /// Its name.
        root: String,
        /// What it names.
        node: u32,
        /// The highest number.
        last: usize,
    },
}

fn list(nodes: &[u32]) -> String {
    match nodes {
        [] => "no memory nodes that it tells of".to_owned(),
        [one] => format!("node {one} only"),
        several => format!("nodes {}", several.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests;
