//! A checked topology by index: what hangs on what, in which order, at which device and function number.

use std::collections::BTreeMap;

use super::check::{self, Above, TopologyError};
use super::place::place;
use super::spec::{EndpointSpec, Name, Need, NodeKind, NodeSpec, PortKind, PortSpec, Resource, Topology};
use crate::address::Devfn;
use crate::sriov::SriovSpec;

/// What a node hangs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum On {
    /// Index in [`Topology::root_complexes`].
    RootComplex(usize),
    /// Index in [`Topology::nodes`].
    Node(usize),
}

/// One node.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) spec: &'a NodeSpec,
    pub(super) on: On,
    pub(super) devfn: Devfn,
    /// Whether function 0 has company at its device number; only ever set on function 0.
    pub(super) multifunction: bool,
    /// Below a link: the function after it, 0 for the last one.
    pub(super) next_function: u8,
    /// Whether it is on a conventional bus.
    pub(super) conventional: bool,
    /// Indexes of what hangs on it, in order of device and function number.
    pub(super) below: Vec<usize>,
}

impl<'a> Entry<'a> {
    pub(super) const fn port(&self) -> Option<&'a PortSpec> {
        match &self.spec.kind {
            NodeKind::Port(port) => Some(port),
            NodeKind::Endpoint(_) => None,
        }
    }

    pub(super) const fn endpoint(&self) -> Option<&'a EndpointSpec> {
        match &self.spec.kind {
            NodeKind::Endpoint(endpoint) => Some(endpoint),
            NodeKind::Port(_) => None,
        }
    }

    /// Virtual functions, where they can be seen.
    pub(super) fn sriov(&self) -> Option<&'a SriovSpec> {
        self.endpoint()?.sriov.as_deref().filter(|_| !self.conventional)
    }

    /// What takes addresses, where it can be seen.
    pub(super) fn needs(&self) -> impl Iterator<Item = (Resource, Need)> + use<'a> {
        let conventional = self.conventional;
        let needs = self.endpoint().into_iter().flat_map(EndpointSpec::needs);
        needs.filter(move |(what, _)| !(conventional && matches!(what, Resource::VfBar(_))))
    }
}

/// The whole topology.
#[derive(Debug)]
pub(super) struct Outline<'a> {
    pub(super) topology: &'a Topology,
    /// Parallel to [`Topology::nodes`].
    pub(super) entries: Vec<Entry<'a>>,
    /// Parallel to [`Topology::root_complexes`]: what is on each root bus, in order of device and function number.
    pub(super) root_buses: Vec<Vec<usize>>,
    /// All nodes, depth first: parents before children, siblings in order of their numbers.
    pub(super) depth_first: Vec<usize>,
}

impl<'a> Outline<'a> {
    /// Checks everything that [`TopologyError`] knows.
    pub(super) fn new(topology: &'a Topology) -> Result<Self, TopologyError> {
        let named = names(topology)?;
        let mut entries = Vec::with_capacity(topology.nodes.len());
        for spec in &topology.nodes {
            let on = *named.get(&spec.on).ok_or_else(|| TopologyError::Parent {
                name: spec.name.clone(),
                noun: spec.kind.noun(),
                on: spec.on.clone(),
            })?;
            let above = match on {
                On::RootComplex(_) => Above::RootComplex,
                On::Node(parent) => Above::Node(&topology.nodes[parent].kind),
            };
            check::values(spec, above.is_link())?;
            check::nesting(spec, above)?;
            let conventional = matches!(above, Above::Node(NodeKind::Port(port)) if port.kind == PortKind::PciBridge);
            entries.push(Entry {
                spec,
                on,
                devfn: Devfn::ZERO,
                multifunction: false,
                next_function: 0,
                conventional,
                below: Vec::new(),
            });
        }
        let mut outline = Self { topology, entries, root_buses: Vec::new(), depth_first: Vec::new() };
        outline.hang()?;
        outline.walk()?;
        Ok(outline)
    }

    /// Gives places on every bus and orders what is there.
    fn hang(&mut self) -> Result<(), TopologyError> {
        self.root_buses = vec![Vec::new(); self.topology.root_complexes.len()];
        for index in 0..self.entries.len() {
            match self.entries[index].on {
                On::RootComplex(root) => self.root_buses[root].push(index),
                On::Node(parent) => self.entries[parent].below.push(index),
            }
        }
        for root in 0..self.root_buses.len() {
            let mut bus = std::mem::take(&mut self.root_buses[root]);
            let spare = if root == 0 { self.topology.spare_numbers } else { 0 };
            self.place(&mut bus, false, spare)?;
            self.root_buses[root] = bus;
        }
        for parent in 0..self.entries.len() {
            let mut bus = std::mem::take(&mut self.entries[parent].below);
            self.place(&mut bus, Above::Node(&self.entries[parent].spec.kind).is_link(), 0)?;
            self.entries[parent].below = bus;
        }
        Ok(())
    }

    fn place(&mut self, bus: &mut [usize], link: bool, spare: u8) -> Result<(), TopologyError> {
        let siblings: Vec<&NodeSpec> = bus.iter().map(|node| self.entries[*node].spec).collect();
        let places = place(&siblings, link, spare)?;
        for (node, devfn) in bus.iter().zip(&places) {
            // Below a link all are functions of one device, whatever their numbers look like.
            let company = places.iter().any(|other| (link || other.device() == devfn.device()) && other != devfn);
            let first = if link { *devfn == Devfn::ZERO } else { devfn.function() == 0 };
            self.entries[*node].devfn = *devfn;
            self.entries[*node].multifunction = first && company;
        }
        bus.sort_by_key(|node| self.entries[*node].devfn);
        if link {
            for (node, next) in bus.iter().zip(bus.iter().skip(1)) {
                self.entries[*node].next_function = self.entries[*next].devfn.byte();
            }
        }
        virtual_functions(&self.entries, bus)?;
        Ok(())
    }

    /// Orders all nodes depth first. Whoever is not reached hangs in a loop.
    fn walk(&mut self) -> Result<(), TopologyError> {
        let mut stack: Vec<usize> = self.root_buses.iter().rev().flat_map(|bus| bus.iter().rev()).copied().collect();
        let mut reached = vec![false; self.entries.len()];
        while let Some(node) = stack.pop() {
            reached[node] = true;
            self.depth_first.push(node);
            stack.extend(self.entries[node].below.iter().rev());
        }
        match reached.iter().position(|reached| !reached) {
            None => Ok(()),
            Some(lost) => Err(TopologyError::Loop { names: self.ring(lost) }),
        }
    }

    /// The ring that is above `lost`, which leads to no root complex.
    fn ring(&self, lost: usize) -> Vec<Name> {
        let above = |node: usize| match self.entries[node].on {
            On::Node(parent) => parent,
            On::RootComplex(_) => node,
        };
        // As many steps up as there are nodes end inside the ring.
        let start = (0..self.entries.len()).fold(lost, |node, _| above(node));
        let mut names = vec![self.entries[start].spec.name.clone()];
        let mut node = above(start);
        while node != start {
            names.push(self.entries[node].spec.name.clone());
            node = above(node);
        }
        names
    }

    /// The root complex that a node is below.
    pub(super) fn root_of(&self, node: usize) -> usize {
        let mut on = self.entries[node].on;
        loop {
            match on {
                On::RootComplex(root) => return root,
                On::Node(parent) => on = self.entries[parent].on,
            }
        }
    }
}

/// Whether virtual functions of the physical functions on a bus share no number with anybody. Numbers past the last bus are
/// too many buses, which is told elsewhere.
fn virtual_functions(entries: &[Entry<'_>], bus: &[usize]) -> Result<(), TopologyError> {
    if bus.iter().all(|node| entries[*node].sriov().is_none()) {
        return Ok(());
    }
    let mut holders: BTreeMap<u64, usize> = bus.iter().map(|node| (entries[*node].devfn.byte().into(), *node)).collect();
    for node in bus {
        let Some(sriov) = entries[*node].sriov() else { continue };
        for id in sriov.routing_ids(entries[*node].devfn).take_while(|id| *id < 1 << 16) {
            if let Some(other) = holders.insert(id, *node) {
                let name = |node: usize| entries[node].spec.name.clone();
                return Err(TopologyError::VirtualFunction { name: name(*node), other: name(other), id });
            }
        }
    }
    Ok(())
}

fn names(topology: &Topology) -> Result<BTreeMap<&Name, On>, TopologyError> {
    let roots = topology.root_complexes.iter().enumerate().map(|(index, root)| (&root.name, On::RootComplex(index)));
    let nodes = topology.nodes.iter().enumerate().map(|(index, node)| (&node.name, On::Node(index)));
    let noun = |on: On| match on {
        On::RootComplex(_) => "root complex",
        On::Node(node) => topology.nodes[node].kind.noun(),
    };
    let mut named = BTreeMap::new();
    for (name, on) in roots.chain(nodes) {
        name.check()?;
        if let Some(first) = named.insert(name, on) {
            return Err(TopologyError::Duplicate { name: name.clone(), first: noun(first), second: noun(on) });
        }
    }
    Ok(named)
}
