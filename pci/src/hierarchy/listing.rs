//! What the tree holds at this moment, with the addresses that the guest has given.

use super::hotplug::PortList;
use super::{Hierarchy, What};
use crate::address::{Bdf, Devfn, Sbdf};
use crate::function::FunctionId;
use crate::topology::{Name, Parent};

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

impl Hierarchy {
    /// All endpoints.
    pub fn endpoints(&self) -> impl Iterator<Item = EndpointInfo> + '_ {
        self.nodes.iter().filter(|(_, node)| matches!(node.what, What::Endpoint(_))).filter_map(|(id, node)| {
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
        let found = bus.map(|bus| Bdf::new(bus, node.devfn));
        let found = found.filter(|bdf| self.find(node.planned_at.segment, *bdf) == Some(id));
        Some(found.map_or(node.planned_at, |bdf| Sbdf { bdf, ..node.planned_at }))
    }

    /// Hot-plug ports, for messages.
    #[must_use]
    pub fn hot_plug_ports(&self) -> PortList {
        PortList(self.ports().filter(|port| port.removal.is_some()).collect())
    }

    fn path(&self, id: FunctionId) -> Vec<Devfn> {
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
