//! Describes the part of the host's PCI Express hierarchy that matters for the wanted devices: they themselves, every
//! bridge above them, and the other members of their IOMMU groups. Plain data.

use std::collections::BTreeMap;

use api::config::CpuList;
use pci::address::HostBdf;
use pci::bar::BarSpec;
use pci::ids::Ids;
use pci::link::Link;
use pci::topology::PortKind;
use thiserror::Error;

use super::fabric::Fabric;

/// The functions that were looked at, by address.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostTree {
    /// Wanted devices, their bridges up to the root complex, members of their IOMMU groups. An absent device is absent.
    pub functions: BTreeMap<HostBdf, HostNode>,
    /// The host's memory nodes, by number; empty where the host does not tell.
    pub memory_nodes: BTreeMap<u32, HostMemoryNode>,
}

/// A memory node of the host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostMemoryNode {
    /// Its processors.
    pub cpus: CpuList,
    /// Bytes of its memory.
    pub memory: u64,
    /// How far nodes are, itself among them, by number; 10 is within the node (ACPI 6.5 5.2.17).
    pub distances: BTreeMap<u32, u8>,
}

impl HostTree {
    /// The function at `at`, if it exists and was looked at.
    #[must_use]
    pub fn get(&self, at: HostBdf) -> Option<&HostNode> {
        self.functions.get(&at)
    }

    /// All members of IOMMU group `group`, by address.
    pub fn group(&self, group: u32) -> impl Iterator<Item = &HostNode> {
        self.functions.values().filter(move |node| node.group == Some(group))
    }

    /// The bridges above `node`, from the root complex downwards.
    #[must_use]
    pub fn above(&self, node: &HostNode) -> Vec<&HostNode> {
        let mut path = Vec::new();
        let mut next = &node.on;
        while let HostParent::Bridge(at) = next {
            // A path in sysfs has no loops; the bound keeps a made-up tree from having one.
            let Some(bridge) = self.get(*at).filter(|_| path.len() < 256) else { break };
            path.push(bridge);
            next = &bridge.on;
        }
        path.reverse();
        path
    }

    /// Name of the host root complex above `node`, as sysfs has it: `pci0000:00`.
    #[must_use]
    pub fn root_complex<'a>(&'a self, node: &'a HostNode) -> Option<&'a str> {
        let top = self.above(node).first().copied().unwrap_or(node);
        match &top.on {
            HostParent::RootComplex(name) => Some(name),
            HostParent::Bridge(_) => None,
        }
    }

    /// Whether every function hangs, over bridges that are here, on a root complex.
    pub fn check_nesting(&self) -> Result<(), NestingError> {
        for node in self.functions.values() {
            if let HostParent::Bridge(on) = node.on {
                let bridge = self.get(on).ok_or(NestingError::NoParent { at: node.at, on })?;
                if bridge.kind == HostKind::Endpoint {
                    return Err(NestingError::ParentNoBridge { at: node.at, on });
                }
            }
            if self.root_complex(node).is_none() {
                return Err(NestingError::Loop { at: node.at });
            }
        }
        Ok(())
    }
}

/// One function of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostNode {
    /// Where.
    pub at: HostBdf,
    /// What it hangs on.
    pub on: HostParent,
    /// Its ids.
    pub ids: Ids,
    /// What it is.
    pub kind: HostKind,
    /// Its BARs, at their present sizes.
    pub bars: [Option<BarSpec>; 6],
    /// Bytes of its expansion ROM.
    pub rom: Option<u64>,
    /// Interrupt pin register: 0 none, 1 INTA to 4 INTD.
    pub interrupt_pin: u8,
    /// Its link, from its PCI Express capability or, where configuration space is not readable, from sysfs attributes
    /// (payload sizes are then the defaults). `None` when neither tells.
    pub link: Option<Link>,
    /// AtomicOp completer widths, DEVCAP2 bits 9:7 (bit 0 here is 32-bit, 1 is 64-bit, 2 is 128-bit CAS).
    pub atomic_completers: u8,
    /// NUMA node; `None` where the host does not know.
    pub numa_node: Option<u32>,
    /// IOMMU group.
    pub group: Option<u32>,
    /// Name of the driver bound to it.
    pub driver: Option<String>,
    /// For a virtual function: the physical function that it belongs to.
    pub physical_function: Option<HostBdf>,
    /// What its registers say of the ways of traffic.
    pub fabric: Fabric,
}

/// What a host function hangs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostParent {
    /// A root complex, named as in sysfs: `pci0000:00`.
    RootComplex(String),
    /// A bridge of any kind.
    Bridge(HostBdf),
}

/// What a host function is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostKind {
    /// A PCI Express port.
    Port(PortKind),
    /// A bridge that is no PCI Express port: to conventional PCI, or a host bridge.
    OtherBridge,
    /// Everything else.
    Endpoint,
}

/// Functions that hang on nothing.
#[derive(Debug, Clone, Copy, Error, PartialEq, Eq)]
pub enum NestingError {
    /// A parent that is missing.
    #[error("function {at} hangs on {on}, which is not there: add it, or name a root complex such as pci0000:00")]
    NoParent {
        /// The function.
        at: HostBdf,
        /// What it names.
        on: HostBdf,
    },
    /// A parent that has no bus below.
    #[error("function {at} hangs on {on}, which is an endpoint: give a port or bridge")]
    ParentNoBridge {
        /// The function.
        at: HostBdf,
        /// What it names.
        on: HostBdf,
    },
    /// Bridges in a circle.
    #[error("function {at} hangs on itself through its bridges: one of them must hang on a root complex such as pci0000:00")]
    Loop {
        /// The function.
        at: HostBdf,
    },
}
