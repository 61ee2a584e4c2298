//! Decides which memory nodes a machine has for which the operator's file names nodes of the host: one for each, with equal
//! parts of processors and memory.

use std::collections::BTreeMap;

use api::config::{CpuList, HostNodes, NumaConfig, NumaNode, Size, VmConfig};
use thiserror::Error;

use super::{list, most_cpus, share};
use crate::host::tree::HostMemoryNode;

/// What a node's memory is a multiple of, but for that of the last one: memory that comes later has blocks of this size.
const PART: u64 = 128 << 20;

/// What a mistake in such memory nodes comes from.
pub const SPREAD: &str = "memory nodes come from `[numa] host-nodes` of the operator's file";

/// The nodes of a machine that says none itself, as `--numa` would give them. `known` are the host's.
///
/// # Errors
/// If the host does not have one of them, or there is not a vCPU and a part of memory for each.
pub fn spread(on: &HostNodes, config: &VmConfig, known: &BTreeMap<u32, HostMemoryNode>) -> Result<NumaConfig, SpreadError> {
    if let Some(node) = on.nodes.iter().find(|node| !known.contains_key(node)) {
        return Err(SpreadError::NoHostNode { node: *node, known: known.keys().copied().collect() });
    }
    let count = on.nodes.len();
    let (started, most) = (u32::from(config.cpus.count), most_cpus(config));
    let nodes = u32::try_from(count).ok().filter(|nodes| *nodes <= most).ok_or(SpreadError::Cpus { count, most })?;
    let (memory, unit) = (config.memory.size.bytes(), unit(config));
    let Some(part) = (memory / unit).checked_div(nodes.into()).map(|units| units * unit) else { return Ok(NumaConfig::Off) };
    if part == 0 {
        return Err(SpreadError::Memory { count, memory: Size(memory), unit: Size(unit) });
    }
    let mut later = started;
    let node = |(id, host): (u32, &u32)| {
        let boot = share(started, nodes, id);
        // A node's share of all vCPUs is never less than its share of those of the start.
        let more = share(most, nodes, id).len().saturating_sub(boot.len());
        let from = later;
        later = u32::try_from(more).map_or(most, |more| from + more);
        let cpus: CpuList = boot.chain(from..later).collect();
        let memory = if id + 1 == nodes { memory - part * u64::from(id) } else { part };
        NumaNode { id, cpus, memory: Size(memory), host: Some((*host, on.placement)), distances: Vec::new(), zones: None }
    };
    Ok(NumaConfig::Nodes((0..nodes).zip(&on.nodes).map(node).collect()))
}

fn unit(config: &VmConfig) -> u64 {
    config.memory.hugepages.map_or(PART, |page| page.size().bytes().max(PART))
}

/// `base` with as many vCPUs and as much memory as the nodes need at least; `None` if no machine has so many.
#[must_use]
pub fn smallest(on: &HostNodes, base: &VmConfig) -> Option<VmConfig> {
    let mut config = base.clone();
    config.cpus.count = u8::try_from(on.nodes.len().max(1)).ok()?;
    config.memory.size = Size(unit(base).checked_mul(config.cpus.count.into())?.max(base.memory.size.bytes()));
    Some(config)
}

/// Nodes that this machine cannot have.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SpreadError {
    /// A node that is not there.
    #[error(
        "`[numa] host-nodes` of the operator's file names node {node}, the host has {}: name those that are there",
        list(known)
    )]
    NoHostNode {
        /// The host's node.
        node: u32,
        /// Those that exist.
        known: Vec<u32>,
    },
    /// Fewer processors than nodes.
    #[error(
        "`[numa] host-nodes` of the operator's file has {count} nodes, the machine has {most} vCPUs at most: give it one for each, or name fewer nodes"
    )]
    Cpus {
        /// Nodes of the list.
        count: usize,
        /// vCPUs.
        most: u32,
    },
    /// Less memory than nodes.
    #[error(
        "`[numa] host-nodes` of the operator's file has {count} nodes, the machine has {memory} of memory: give it {unit} for each, or name fewer nodes"
    )]
    Memory {
        /// Nodes of the list.
        count: usize,
        /// Of the machine.
        memory: Size,
        /// What a node has at least.
        unit: Size,
    },
}

#[cfg(test)]
mod tests {
    use api::config::{CpuConfig, HugePageSize, MemoryConfig, MemoryPolicy, NumaPlacement};
    use proptest::prelude::*;

    use super::*;
    use crate::host::tree::HostTree;
    use crate::numa::resolve;
    use crate::spec::Host;

    const GIB: u64 = 1 << 30;

    fn on(nodes: &[u32]) -> HostNodes {
        HostNodes { nodes: nodes.to_vec(), placement: NumaPlacement::default() }
    }

    fn host(count: u32) -> BTreeMap<u32, HostMemoryNode> {
        (0..count).map(|id| (id, HostMemoryNode { memory: 1 << 50, ..HostMemoryNode::default() })).collect()
    }

    fn machine(count: u8, max: u8, memory: u64) -> VmConfig {
        let cpus = CpuConfig { count, max: (max > count).then_some(max), ..CpuConfig::default() };
        let memory = MemoryConfig { size: Size(memory), ..MemoryConfig::default() };
        VmConfig { cpus, memory, ..VmConfig::default() }
    }

    fn texts(on: &HostNodes, config: &VmConfig) -> Vec<String> {
        spread(on, config, &host(4)).unwrap().texts()
    }

    #[test]
    fn each_host_node_gives_a_node_with_an_equal_part_of_all() {
        assert_eq!(
            texts(&on(&[1, 0]), &machine(3, 8, 2 * GIB + (200 << 20))),
            [r#"id=0,cpus="0-1,3-4",memory=1G,host-node=1"#, r#"id=1,cpus="2,5-7",memory=1224M,host-node=0"#]
        );
        // Kata's smallest pod: the second node's vCPU comes later.
        assert_eq!(
            texts(&on(&[0, 2]), &machine(1, 2, GIB)),
            ["id=0,cpus=0,memory=512M,host-node=0", "id=1,cpus=1,memory=512M,host-node=2"]
        );
        let loose = NumaPlacement { policy: MemoryPolicy::Preferred, pin: false };
        let one = HostNodes { nodes: vec![3], placement: loose };
        assert_eq!(texts(&one, &machine(1, 1, 128 << 20)), ["id=0,cpus=0,memory=128M,host-node=3,policy=preferred,pin=off"]);
    }

    #[test]
    fn parts_are_whole_huge_pages() {
        let mut config = machine(2, 2, 5 * GIB);
        config.memory.hugepages = Some(HugePageSize::OneGib);
        let NumaConfig::Nodes(nodes) = spread(&on(&[0, 1]), &config, &host(2)).unwrap() else { panic!() };
        assert_eq!(nodes.iter().map(|node| node.memory).collect::<Vec<_>>(), [Size(2 * GIB), Size(3 * GIB)]);
    }

    #[test]
    fn what_the_host_or_the_machine_does_not_have_is_refused_by_the_key() {
        let refused = |nodes: &[u32], config: &VmConfig| spread(&on(nodes), config, &host(2)).unwrap_err().to_string();
        for (error, part) in [
            (refused(&[0, 7], &machine(2, 2, GIB)), "names node 7, the host has nodes 0, 1"),
            (refused(&[0, 1], &machine(1, 1, GIB)), "has 2 nodes, the machine has 1 vCPUs at most"),
            (refused(&[0, 1], &machine(2, 2, 255 << 20)), "has 2 nodes, the machine has 255M of memory: give it 128M for each"),
        ] {
            assert!(error.starts_with("`[numa] host-nodes`") && error.contains(part), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_vcpu_and_no_memory_is_lost_or_there_twice(
            (started, more) in (1u8..=255).prop_flat_map(|started| (Just(started), 0..=255 - started)),
            memory in 1u64..4096, count in 1u32..=16, huge: bool,
        ) {
            let mut config = machine(started, started + more, memory * if huge { GIB } else { 2 << 20 });
            config.memory.hugepages = huge.then_some(HugePageSize::OneGib);
            let nodes: Vec<u32> = (0..count).rev().collect();
            let most = most_cpus(&config);
            match spread(&on(&nodes), &config, &host(count)) {
                Ok(NumaConfig::Nodes(nodes)) => {
                    let mut cpus: Vec<u32> = nodes.iter().flat_map(|node| node.cpus.iter()).collect();
                    cpus.sort_unstable();
                    prop_assert_eq!(cpus, (0..most).collect::<Vec<_>>());
                    prop_assert_eq!(nodes.iter().map(|node| node.memory.bytes()).sum::<u64>(), config.memory.size.bytes());
                    let sizes = nodes.iter().map(|node| node.cpus.iter().count());
                    prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
                    // As `--numa` would take them.
                    config.numa = NumaConfig::Nodes(nodes);
                    let tree = HostTree { memory_nodes: host(count), ..HostTree::default() };
                    let numa = resolve(&config, &Host { tree, ..Host::default() });
                    prop_assert_eq!(numa.unwrap().unwrap().nodes.len(), count as usize);
                }
                Ok(other) => prop_assert!(false, "{:?}", other),
                Err(SpreadError::Cpus { .. }) => prop_assert!(count > most),
                Err(SpreadError::Memory { unit, .. }) => prop_assert!(config.memory.size.bytes() < unit.bytes() * u64::from(count)),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    #[test]
    fn the_smallest_machine_has_room_for_each_node() {
        let nodes = on(&[0, 1, 2, 3, 4]);
        let config = smallest(&nodes, &VmConfig::default()).unwrap();
        assert_eq!((config.cpus.count, config.memory.size), (5, Size(640 << 20)));
        assert!(spread(&nodes, &config, &host(5)).is_ok());
        assert_eq!(smallest(&on(&(0..256).collect::<Vec<_>>()), &VmConfig::default()), None);
    }
}
