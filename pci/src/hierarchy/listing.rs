//! What the tree holds at this moment, with the addresses that the guest has given.

use std::ops::Add;

use super::hotplug::PortList;
use super::{Hierarchy, SPACE, What};
use crate::address::{Bdf, Devfn, Sbdf};
use crate::function::FunctionId;
use crate::port::WriteCounts;
use crate::topology::{Name, Parent, PortKind};

/// An endpoint as a user sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Which function it is.
    pub id: FunctionId,
    /// Its name.
    pub name: Name,
    /// Where the guest finds it; as planned while no bus number leads to it.
    pub at: Sbdf,
    /// Device and function numbers from the root bus down to it: an address that does not depend on bus numbers.
    pub path: Vec<Devfn>,
    /// The port or root complex that it hangs on.
    pub on: Name,
}

/// A function as a user sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Which function it is.
    pub id: FunctionId,
    /// Its name.
    pub name: Name,
    /// The port or root complex that it hangs on.
    pub on: Name,
    /// Where the guest finds it; as planned while no bus number leads to it.
    pub at: Sbdf,
    /// Its kind, if it is a port.
    pub port: Option<PortKind>,
}

/// A root complex as a user sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootComplexInfo {
    /// Its name.
    pub name: Name,
    /// PCI segment group.
    pub segment: u16,
    /// Number of the root bus.
    pub bus: u8,
    /// Guest NUMA node.
    pub node: Option<u32>,
}

impl Hierarchy {
    /// All root complexes.
    pub fn root_complexes(&self) -> impl Iterator<Item = RootComplexInfo> + '_ {
        self.roots.iter().map(|root| RootComplexInfo {
            name: root.name.clone(),
            segment: root.segment,
            bus: root.buses.secondary,
            node: root.node,
        })
    }

    /// All functions but virtual ones, parents before children, siblings in the order of their numbers.
    #[must_use]
    pub fn functions(&self) -> Vec<FunctionInfo> {
        let mut functions = Vec::new();
        let mut open: Vec<(FunctionId, &Name)> = Vec::new();
        for root in self.roots.iter().rev() {
            open.extend(self.in_order(&root.children).into_iter().rev().map(|id| (id, &root.name)));
        }
        while let Some((id, on)) = open.pop() {
            let Some((node, at)) = self.nodes.get(&id).filter(|node| !node.is_virtual).zip(self.address(id)) else { continue };
            let port = if let What::Port(port) = &node.what { Some(port.kind()) } else { None };
            functions.push(FunctionInfo { id, name: node.name.clone(), on: on.clone(), at, port });
            open.extend(self.in_order(&node.children).into_iter().rev().map(|id| (id, &node.name)));
        }
        functions
    }

    pub(super) fn in_order(&self, children: &[FunctionId]) -> Vec<FunctionId> {
        let mut children = children.to_vec();
        children.sort_by_key(|id| self.nodes.get(id).map(|node| node.devfn));
        children
    }

    /// The first `len` bytes (up to 4096) of a function's configuration space; all ones for one that is not there.
    #[must_use]
    pub fn config_bytes(&mut self, id: FunctionId, len: u16) -> Vec<u8> {
        let mut bytes = vec![0; usize::from(len.min(SPACE))];
        for (piece, offset) in bytes.chunks_mut(4).zip((0u16..).step_by(4)) {
            self.read_function(id, offset, SPACE, piece);
        }
        bytes
    }

    /// What configuration writes of all ports came to.
    #[must_use]
    pub fn port_writes(&self) -> WriteCounts {
        let ports =
            self.nodes.values().filter_map(|node| if let What::Port(port) = &node.what { Some(port.writes()) } else { None });
        ports.fold(WriteCounts::default(), WriteCounts::add)
    }

    /// All endpoints but virtual functions, which come and go as the guest likes.
    pub fn endpoints(&self) -> impl Iterator<Item = EndpointInfo> + '_ {
        let endpoints = self.nodes.iter().filter(|(_, node)| matches!(node.what, What::Endpoint(_)) && !node.is_virtual);
        endpoints.filter_map(|(id, node)| {
            Some(EndpointInfo {
                id: *id,
                name: node.name.clone(),
                at: self.address(*id)?,
                path: self.path(*id),
                on: match node.on {
                    Parent::Port(port) => self.nodes.get(&port)?.name.clone(),
                    Parent::RootComplex(root) => self.roots.get(root)?.name.clone(),
                },
            })
        })
    }

    /// Where the guest finds a function; as planned while no bus number leads to it. `None` for one that is not there.
    #[must_use]
    pub fn address(&self, id: FunctionId) -> Option<Sbdf> {
        let node = self.nodes.get(&id)?;
        let bus = match node.on {
            Parent::RootComplex(root) => Some(self.roots.get(root)?.buses.secondary),
            Parent::Port(port) => match &self.nodes.get(&port)?.what {
                What::Port(port) => port.buses().map(|buses| buses.secondary),
                What::Endpoint(_) => None,
            },
        };
        let found = bus.and_then(|bus| Some(Bdf::new(bus.checked_add(node.further)?, node.devfn)));
        let found = found.filter(|bdf| self.find(node.planned_at.segment, *bdf) == Some(id));
        Some(found.map_or(node.planned_at, |bdf| Sbdf { bdf, ..node.planned_at }))
    }

    /// Hot-plug ports, for messages.
    #[must_use]
    pub fn hot_plug_ports(&self) -> PortList {
        let open = self.roots.iter().enumerate().filter(|(_, root)| root.takes_devices);
        let roots = open.filter_map(|(index, _)| self.bus(Parent::RootComplex(index)));
        PortList(self.ports().filter(|port| port.removal.is_some()).collect(), roots.chain(self.conventional_buses()).collect())
    }

    /// Device and function numbers from the root bus down to a function; empty for one that is not there.
    #[must_use]
    pub fn path(&self, id: FunctionId) -> Vec<Devfn> {
        let mut path = Vec::new();
        let mut next = Some(id);
        while let Some(node) = next.and_then(|id| self.nodes.get(&id)) {
            path.push(node.devfn);
            next = if let Parent::Port(port) = node.on { Some(port) } else { None };
        }
        path.reverse();
        path
    }
}
