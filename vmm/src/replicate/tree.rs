//! Builds the copy: first who hangs on whom, by host address, then the order of siblings, then names and values.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use api::config::HostPorts;
use pci::address::HostBdf;
use pci::link::Link;
use pci::topology::{HotPlug, Name, NodeKind, NodeSpec, Place, PortKind, PortSpec, RootComplexSpec};

use super::group::{Cluster, Group};
use super::{HostRoot, Note, Replica, Requested, Wishes, vacant};
use crate::host::tree::{HostKind, HostNode, HostTree};

/// What a branch is, as far as finding it again goes. Siblings differ in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key<'a> {
    /// A host root complex, as far as it belongs to one NUMA node.
    Root(&'a str, Option<u32>),
    /// A port with a link below stands for one of the host and leads to one thing.
    Link(HostBdf, Behind),
    /// The upstream port of a host switch.
    Upstream(HostBdf),
    /// A port that stands for none of the host.
    Own(Behind),
    /// An upstream port that stands for none of the host.
    OwnUpstream,
    /// A device.
    Device(usize),
}

/// What a port with a link below leads to: one thing only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Behind {
    Switch(HostBdf),
    Cluster(Cluster),
    Group(usize),
    /// A device may come.
    Nothing,
}

/// Values of a port.
#[derive(Clone, Copy)]
struct Port<'a> {
    kind: PortKind,
    /// The port of the host that it stands for.
    host: Option<&'a HostNode>,
    /// Whose ids it carries.
    ids: Option<&'a HostNode>,
    link: Option<Link>,
}

impl<'a> Port<'a> {
    /// The copy of a host's port.
    fn of(host: &'a HostNode, kind: PortKind) -> Self {
        Self { kind, host: Some(host), ids: (kind != PortKind::Root).then_some(host), link: host.link }
    }
}

enum What<'a> {
    Root { node: Option<u32> },
    Port(Port<'a>),
    Device(usize),
}

struct Branch<'a> {
    key: Key<'a>,
    what: What<'a>,
    below: Vec<usize>,
}

/// A copy in the making.
pub(super) struct Copy<'a> {
    tree: &'a HostTree,
    groups: &'a [Group<'a>],
    wishes: &'a Wishes,
    /// How many groups share a port of the host, by port and cluster.
    sharers: BTreeMap<(Option<HostBdf>, Cluster), usize>,
    branches: Vec<Branch<'a>>,
    roots: Vec<usize>,
    notes: Vec<Note>,
}

impl<'a> Copy<'a> {
    pub(super) fn new(tree: &'a HostTree, groups: &'a [Group<'a>], wishes: &'a Wishes) -> Self {
        let mut copy =
            Self { tree, groups, wishes, sharers: BTreeMap::new(), branches: Vec::new(), roots: Vec::new(), notes: Vec::new() };
        for group in groups {
            let port = copy.ports_above(group.anchor).last().map(|port| port.at);
            *copy.sharers.entry((port, group.cluster)).or_default() += 1;
        }
        copy
    }

    /// Adds what leads to group `index`, and the group itself.
    pub(super) fn place(&mut self, index: usize) {
        let Some(group) = self.groups.get(index) else { return };
        let on = self.copied(index, group);
        self.child(Some(on), Key::Device(index), What::Device(index));
    }

    /// The copy of the port above a group, with everything above that.
    fn copied(&mut self, index: usize, group: &'a Group<'a>) -> usize {
        let tree = self.tree;
        let root = self.root(tree.get(group.anchor));
        let path = self.copied_path(group);
        let Some((last, kind)) = path.last().copied() else {
            self.note(Note::Integrated { device: Name(group.name()), at: group.anchor });
            let port = Port { kind: PortKind::Root, host: None, ids: None, link: self.link_of(group) };
            return self.shared(root, None, index, |behind| (Key::Own(behind), port));
        };
        let on = self.descend(root, &path);
        let port = Port::of(last, kind);
        match kind {
            PortKind::Root => self.shared(on, Some(last.at), index, |behind| (Key::Link(last.at, behind), port)),
            PortKind::Upstream => {
                // On the bus inside a switch: a port of that switch leads to it.
                let port = Port { kind: PortKind::Downstream, host: None, ids: Some(last), link: self.link_of(group) };
                self.child(Some(on), Key::Own(Behind::Group(index)), What::Port(port))
            }
            _ => self.child(Some(on), Key::Link(last.at, Behind::Group(index)), What::Port(port)),
        }
    }

    /// The copies of what `path` leads through, on the root complex `on`; a last port with a link below is left to the caller.
    fn descend(&mut self, mut on: usize, path: &[(&'a HostNode, PortKind)]) -> usize {
        for (place, (host, kind)) in path.iter().copied().enumerate() {
            let port = Port::of(host, kind);
            on = match (kind, path.get(place + 1)) {
                (PortKind::Upstream, _) => {
                    // A switch that hangs on no root port of the host gets one.
                    if place == 0 {
                        let above = Port { kind: PortKind::Root, host: None, ids: None, link: host.link };
                        on = self.child(Some(on), Key::Own(Behind::Switch(host.at)), What::Port(above));
                    }
                    self.child(Some(on), Key::Upstream(host.at), What::Port(port))
                }
                (_, Some((switch, _))) => self.child(Some(on), Key::Link(host.at, Behind::Switch(switch.at)), What::Port(port)),
                (_, None) => on,
            };
        }
        on
    }

    /// Adds ports to which devices may come, where nothing hangs at the start.
    pub(super) fn place_vacant(&mut self) {
        let tree = self.tree;
        let upstream = |branch: &Branch<'_>| if let Key::Upstream(at) = branch.key { Some(at) } else { None };
        let copied = self.branches.iter().filter_map(upstream).collect();
        for port in vacant::ports(tree, self.wishes.host_ports, &copied) {
            let is_copy = |branch: &Branch<'_>| matches!(branch.key, Key::Link(at, _) if at == port.at);
            let (path, _) = path_of(tree.above(port).into_iter().chain([port]));
            let Some((last, kind)) = path.last().copied().filter(|(last, _)| last.at == port.at) else { continue };
            if !self.branches.iter().any(is_copy) {
                let root = self.root(Some(port));
                let on = self.descend(root, &path);
                self.child(Some(on), Key::Link(last.at, Behind::Nothing), What::Port(Port::of(last, kind)));
            }
        }
    }

    /// A root port for group `index`. Where the group shares its device number on the host with others of `port`, a switch of
    /// Banyan's own below the root port keeps them as near to each other as they are there.
    fn shared(&mut self, root: usize, port: Option<HostBdf>, index: usize, key: impl Fn(Behind) -> (Key<'a>, Port<'a>)) -> usize {
        let Some(group) = self.groups.get(index) else { return root };
        let sharers = self.sharers.get(&(port, group.cluster)).copied().unwrap_or(1);
        let (key, values) = key(Behind::Cluster(group.cluster));
        let on = self.child(Some(root), key, What::Port(values));
        if sharers < 2 { on } else { self.below_upstream(on, index, group, values.link) }
    }

    /// A downstream port for a group, of a switch of Banyan's own on port `on`.
    fn below_upstream(&mut self, on: usize, index: usize, group: &'a Group<'a>, link: Option<Link>) -> usize {
        let port = |kind, link| What::Port(Port { kind, host: None, ids: None, link });
        let upstream = self.child(Some(on), Key::OwnUpstream, port(PortKind::Upstream, link));
        let link = self.link_of(group).or(link);
        self.child(Some(upstream), Key::Own(Behind::Group(index)), port(PortKind::Downstream, link))
    }

    /// The child of `on` with this key; made if it is not there.
    fn child(&mut self, on: Option<usize>, key: Key<'a>, what: What<'a>) -> usize {
        let siblings = match on {
            Some(on) => self.branches.get(on).map_or(&[][..], |branch| &branch.below),
            None => &self.roots,
        };
        let same = |index: &&usize| self.branches.get(**index).is_some_and(|branch| branch.key == key);
        if let Some(index) = siblings.iter().find(same) {
            return *index;
        }
        let index = self.branches.len();
        self.branches.push(Branch { key, what, below: Vec::new() });
        match on.and_then(|on| self.branches.get_mut(on)) {
            Some(above) => above.below.push(index),
            None => self.roots.push(index),
        }
        index
    }

    /// The root complex above a function.
    fn root(&mut self, function: Option<&'a HostNode>) -> usize {
        let name = function.and_then(|function| self.tree.root_complex(function)).unwrap_or_default();
        let node = function.and_then(|function| HostRoot::above(self.tree, function)?.node);
        self.child(None, Key::Root(name, node), What::Root { node })
    }

    /// The ports above a host function, from the top.
    fn ports_above(&self, at: HostBdf) -> Vec<&'a HostNode> {
        let Some(node) = self.tree.get(at) else { return Vec::new() };
        self.tree.above(node).into_iter().filter(|node| matches!(node.kind, HostKind::Port(_))).collect()
    }

    /// The ports above a group that can be copied: a root port, then upstream and downstream ports by turns.
    fn copied_path(&mut self, group: &Group<'_>) -> Vec<(&'a HostNode, PortKind)> {
        let tree = self.tree;
        let Some(node) = tree.get(group.anchor) else { return Vec::new() };
        let device = || Name(group.name());
        let (path, left_out) = path_of(tree.above(node).into_iter());
        for node in left_out {
            self.note(match node.kind {
                HostKind::Port(_) => Note::PortLeftOut { device: device(), port: node.at },
                _ => Note::BridgeLeftOut { device: device(), bridge: node.at },
            });
        }
        path
    }

    /// The link of a device and, where it is not known, of the port above it.
    fn link_of(&self, group: &Group<'_>) -> Option<Link> {
        let own = self.tree.get(group.anchor).and_then(|node| node.link);
        own.or_else(|| self.ports_above(group.anchor).last().and_then(|port| port.link))
    }

    /// Orders siblings by their first GPU, those without one by their first device: if a tree can have its GPUs in the order
    /// given, it then has.
    pub(super) fn sort(&mut self) {
        let ranks: Vec<usize> = (0..self.branches.len()).map(|index| self.rank(index)).collect();
        let rank = |index: &usize| ranks.get(*index).copied();
        for branch in &mut self.branches {
            branch.below.sort_by_key(rank);
        }
        self.roots.sort_by_key(rank);
    }

    fn rank(&self, index: usize) -> usize {
        let below = self.groups_below(index);
        let first_gpu = below.iter().filter_map(|group| group.gpu).min();
        first_gpu.or_else(|| below.iter().map(|group| group.position).min()).unwrap_or(usize::MAX)
    }

    fn groups_below(&self, index: usize) -> Vec<&'a Group<'a>> {
        let group = |branch: &Branch<'a>| if let What::Device(group) = branch.what { self.groups.get(group) } else { None };
        self.below(index).filter_map(group).collect()
    }

    /// Branch `index` and all that is below it.
    fn below(&self, index: usize) -> impl Iterator<Item = &Branch<'a>> {
        let mut open = vec![index];
        std::iter::from_fn(move || {
            let branch = self.branches.get(open.pop()?)?;
            open.extend(&branch.below);
            Some(branch)
        })
    }

    /// The devices depth first: how a guest meets them.
    pub(super) fn met(&self) -> Vec<Name> {
        let mut met = Vec::new();
        let mut open: Vec<usize> = self.roots.iter().rev().copied().collect();
        while let Some(branch) = open.pop().and_then(|index| self.branches.get(index)) {
            if let What::Device(group) = branch.what {
                let functions = self.groups.get(group).into_iter().flat_map(|group| &group.functions);
                met.extend(functions.map(|device| device.name.clone()));
            }
            open.extend(branch.below.iter().rev());
        }
        met
    }

    /// Gives names and values.
    pub(super) fn finish(mut self, devices: &[Requested]) -> Replica {
        let met = self.met();
        if self.roots.is_empty() {
            self.root(None);
        }
        let mut out = Replica::default();
        let nodes = self.guest_nodes();
        let named = self.names();
        for index in self.roots.clone() {
            let name = self.emit_root(index, &nodes, &mut out);
            self.emit_below(index, &name, &named, &mut out);
        }
        if met.iter().ne(devices.iter().map(|device| &device.name)) {
            self.note(Note::Order { met });
        }
        out.notes = self.notes;
        out
    }

    /// Guest nodes by the host's.
    fn guest_nodes(&self) -> BTreeMap<u32, u32> {
        if self.wishes.leave_nodes {
            return BTreeMap::new();
        }
        let mut nodes: Vec<u32> = self.branches.iter().filter_map(|branch| host_node(&branch.what)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.into_iter().zip(0..).collect()
    }

    /// Names of ports. Of several copies of one port, that which leads to a switch has its name, else that of a physical
    /// device, else the first.
    fn names(&mut self) -> Vec<Option<Name>> {
        let mut first: BTreeMap<HostBdf, (Reverse<u8>, usize)> = BTreeMap::new();
        for (index, branch) in self.branches.iter().enumerate() {
            if let What::Port(Port { host: Some(host), .. }) = &branch.what {
                let physical = self.groups_below(index).iter().any(|group| !group.is_virtual);
                let claim = match branch.key {
                    Key::Link(_, Behind::Switch(_)) => 2,
                    _ => u8::from(physical),
                };
                let holder = first.entry(host.at).or_insert((Reverse(claim), index));
                *holder = (*holder).min((Reverse(claim), index));
            }
        }
        let mut names = vec![None; self.branches.len()];
        for (index, slot) in names.iter_mut().enumerate() {
            let Some(branch) = self.branches.get(index) else { continue };
            let What::Port(port) = &branch.what else { continue };
            let device = self.groups_below(index).iter().min_by_key(|group| group.position).map_or(String::new(), |g| g.name());
            *slot = Some(match (port.host, port.kind) {
                (Some(host), kind) if first.get(&host.at).is_some_and(|(_, holder)| *holder == index) => host_name(kind, host.at),
                (_, PortKind::Upstream) => Name(format!("{device}-switch")),
                // Above a switch of the host to which devices may come.
                (_, PortKind::Root) if device.is_empty() => self.root_above(index),
                // Above a switch of Banyan's own.
                (_, PortKind::Root) if self.leads_to_switch(index) => Name(format!("{device}-root")),
                _ => Name(format!("{device}-port")),
            });
        }
        names
    }

    /// Name of a root port that stands for none of the host, above the copy of a switch.
    fn root_above(&self, index: usize) -> Name {
        match self.branches.get(index).map(|branch| branch.key) {
            Some(Key::Own(Behind::Switch(at))) => host_name(PortKind::Root, at),
            _ => Name(format!("root-{index}")),
        }
    }

    fn leads_to_switch(&self, index: usize) -> bool {
        let below = self.branches.get(index).map_or(&[][..], |branch| &branch.below);
        below.iter().any(|index| matches!(self.branches.get(*index), Some(Branch { what: What::Port(_), .. })))
    }

    fn emit_root(&mut self, index: usize, nodes: &BTreeMap<u32, u32>, out: &mut Replica) -> Name {
        let host = self.branches.get(index).and_then(|branch| host_node(&branch.what));
        let name = Name(format!("rc{}", out.topology.root_complexes.len()));
        let node = host.and_then(|host| nodes.get(&host).copied());
        if let Some(Key::Root(root, _)) = self.branches.get(index).map(|branch| branch.key) {
            let stands_for = HostRoot { name: root.to_owned(), node: host };
            out.host_roots.extend((!root.is_empty()).then(|| (name.clone(), stands_for)));
        }
        out.topology.root_complexes.push(RootComplexSpec { name: name.clone(), segment: 0, node, first_bus: None });
        name
    }

    fn emit_below(&mut self, index: usize, on: &Name, names: &[Option<Name>], out: &mut Replica) {
        let below = self.branches.get(index).map_or_else(Vec::new, |branch| branch.below.clone());
        for index in below {
            let Some(branch) = self.branches.get(index) else { continue };
            match &branch.what {
                What::Device(group) => self.emit_group(*group, on, out),
                What::Port(port) => {
                    let port = *port;
                    let name = names.get(index).cloned().flatten().unwrap_or_else(|| Name(String::new()));
                    self.emit_port(index, &port, &name, on, out);
                    self.emit_below(index, &name, names, out);
                }
                What::Root { .. } => {}
            }
        }
    }

    fn emit_port(&mut self, index: usize, port: &Port<'a>, name: &Name, on: &Name, out: &mut Replica) {
        let below = self.groups_below(index);
        let fastest = || below.iter().filter_map(|group| self.tree.get(group.anchor)?.link).max_by_key(|link| rank_of(*link));
        let link = port.link.or_else(fastest);
        let hotplug = self.hot_plug(index, port);
        if let Some(host) = port.host {
            if host_name(port.kind, host.at) == *name {
                out.stands_for.insert(name.clone(), host.at);
                if hotplug.is_some() && vacant::devices(self.tree, host.at).next().is_some() {
                    out.homes.insert(name.clone());
                }
            } else if let Some(group) = below.iter().min_by_key(|group| group.position) {
                self.note(Note::OwnPort { device: Name(group.name()), beside: host.at });
            }
        }
        if port.kind == PortKind::Upstream && port.host.is_none() {
            self.note(Note::OwnSwitch { switch: name.clone() });
        }
        if link.is_none() && !below.is_empty() {
            self.note(Note::NoLink { port: name.clone() });
        }
        let spec = PortSpec {
            kind: port.kind,
            ids: port.ids.map(|host| host.ids),
            link: link.unwrap_or_default(),
            atomic_completers: if port.kind == PortKind::Root { self.completers(index, &below) } else { 0 },
            hotplug,
        };
        let kind = NodeKind::Port(spec);
        out.topology.nodes.push(NodeSpec { name: name.clone(), on: on.clone(), place: Place::default(), kind });
    }

    /// How devices come to a port and go: to those that lead to no further port, as far as that is wished.
    fn hot_plug(&self, index: usize, port: &Port<'a>) -> Option<HotPlug> {
        let wished = match self.wishes.host_ports {
            HostPorts::Used => false,
            HostPorts::Switches => port.kind == PortKind::Downstream,
            HostPorts::All => port.kind.has_link_below(),
        };
        if !wished || self.leads_to_switch(index) {
            return None;
        }
        Some(match self.branches.get(index).map(|branch| branch.key) {
            Some(Key::Link(at, Behind::Nothing)) => vacant::keeps(self.tree, at, self.wishes.hot_plug),
            _ => vacant::keeps_its_own(self.wishes.hot_plug),
        })
    }

    /// AtomicOp widths that the host's root ports complete for all of `groups`, which are those below branch `index`: none for
    /// those whose requests a port on the way does not route (linux: drivers/pci/pci.c, `pci_enable_atomic_ops_to_root`). Where
    /// there are none, for all that may come.
    fn completers(&self, index: usize, groups: &[&Group<'_>]) -> u8 {
        let stops = |port: &&HostNode| {
            let atomics = port.fabric.atomics;
            let unrouted = port.kind != HostKind::Port(PortKind::Root) && !atomics.routing;
            port.fabric.config_bytes > 64 && (unrouted || atomics.egress_blocked)
        };
        let by = |ports: Vec<&HostNode>| {
            if ports.iter().any(stops) { 0 } else { ports.first().map_or(0, |root| root.atomic_completers) }
        };
        let for_groups = groups.iter().map(|group| by(self.ports_above(group.anchor))).reduce(|all, one| all & one);
        let vacant = self.below(index).filter_map(|branch| match branch.key {
            Key::Link(at, Behind::Nothing) => self.tree.get(at),
            _ => None,
        });
        let for_others = || vacant.map(|port| by(self.ports_above(port.at).into_iter().chain([port]).collect()));
        for_groups.or_else(|| for_others().reduce(|all, one| all & one)).unwrap_or(0)
    }

    /// The functions of one device, with their numbers. Function 0 must exist where another does.
    fn emit_group(&mut self, index: usize, on: &Name, out: &mut Replica) {
        let Some(group) = self.groups.get(index) else { return };
        let number = |device: &Requested| if group.is_virtual { 0 } else { device.at.bdf.devfn().function() };
        let lowest = group.functions.iter().map(|device| number(device)).min().unwrap_or(0);
        for device in &group.functions {
            let (from, mut function) = (number(device), number(device));
            if from == lowest && lowest != 0 {
                function = 0;
                self.note(Note::Renumbered { device: device.name.clone(), from });
            }
            out.stands_for.insert(device.name.clone(), device.at);
            out.topology.nodes.push(NodeSpec {
                name: device.name.clone(),
                on: on.clone(),
                place: Place { device: Some(0), function },
                kind: NodeKind::Endpoint(device.endpoint.clone()),
            });
        }
    }

    fn note(&mut self, note: Note) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

/// What of the bridges `above` something can be copied, from the top: a root port, then upstream and downstream ports by turns;
/// and the others.
fn path_of<'a>(above: impl Iterator<Item = &'a HostNode>) -> (Vec<(&'a HostNode, PortKind)>, Vec<&'a HostNode>) {
    let (mut path, mut left_out): (Vec<(&HostNode, PortKind)>, Vec<&HostNode>) = (Vec::new(), Vec::new());
    for node in above {
        let fits = |kind| match path.last() {
            None => matches!(kind, PortKind::Root | PortKind::Upstream),
            Some((_, PortKind::Upstream)) => kind == PortKind::Downstream,
            Some(_) => kind == PortKind::Upstream,
        };
        match node.kind {
            HostKind::Port(kind) if fits(kind) => path.push((node, kind)),
            _ => left_out.push(node),
        }
    }
    (path, left_out)
}

const fn host_node(what: &What<'_>) -> Option<u32> {
    match what {
        What::Root { node } => *node,
        _ => None,
    }
}

const fn rank_of(link: Link) -> (u8, u8) {
    (link.max.speed.encoding(), link.max.width.lanes())
}

/// Addresses without the colons, which names must not have.
fn host_name(kind: PortKind, at: HostBdf) -> Name {
    let kind = match kind {
        PortKind::Root => "root",
        PortKind::Upstream => "up",
        PortKind::Downstream => "down",
        PortKind::PciBridge => "bridge",
    };
    Name(format!("{kind}-{}", at.to_string().replace(':', "-")))
}
