//! Decides what an end of a link shows of which nobody says the speed and width: what the other end shows, as after training. Pure.

use std::collections::{BTreeMap, BTreeSet};

use api::config::{DeviceConfig, DeviceKind};
use devices::stub::StubSpec;
use pci::emulated::Attachment;
use pci::link::Link;
use pci::topology::{Name, NodeKind, NodeSpec, Topology};

use super::{Endpoint, Host};

/// The link of a device, as far as somebody gives it or the host shows it.
pub(super) fn of(endpoint: Option<&Endpoint>, name: &Name, device: &DeviceConfig, host: &Host) -> Option<Link> {
    match (endpoint, &device.kind) {
        (Some(Endpoint::Stub(StubSpec { on: Attachment::Link(link), .. })), DeviceKind::Stub(stub)) => {
            stub.link.is_some().then_some(*link)
        }
        (Some(Endpoint::Stub(StubSpec { on: Attachment::Link(link), .. })), _) => Some(*link),
        _ => {
            let node = host.wanted.get(&name.0).and_then(|at| host.tree.get(*at))?;
            // The port nearest to the device has the same link partner, and may do more than the device.
            host.tree.above(node).last().and_then(|port| port.link).or(node.link)
        }
    }
}

/// What is known of links: ports that show what somebody gave, and devices with what they, or the ports of the host above
/// them, show.
#[derive(Debug, Default)]
pub(super) struct Known {
    ports: BTreeSet<Name>,
    devices: BTreeMap<Name, Link>,
}

impl Known {
    /// The link registers of port `name` are given.
    pub(super) fn port(&mut self, name: Name) {
        self.ports.insert(name);
    }

    /// Device `name` has this link.
    pub(super) fn device(&mut self, name: Name, link: Link) {
        self.devices.insert(name, link);
    }

    /// Lets each open end of a link follow the known one. Where neither is known both stay as they are, and where both are,
    /// they may differ: who gives both wants it so.
    pub(super) fn join(&self, topology: &mut Topology, endpoints: &mut BTreeMap<Name, Endpoint>) {
        for above in 0..topology.nodes.len() {
            let Some((name, link)) = topology.nodes.get(above).and_then(|node| Some((node.name.clone(), link_below(node)?)))
            else {
                continue;
            };
            let partners: Vec<usize> =
                topology.nodes.iter().zip(0..).filter(|(node, _)| node.on == name).map(|(_, index)| index).collect();
            if self.ports.contains(&name) {
                for partner in partners {
                    self.follow(topology.nodes.get_mut(partner), endpoints, link);
                }
            } else if let Some(known) = partners.iter().find_map(|partner| self.known(topology.nodes.get(*partner)?)) {
                topology.nodes.get_mut(above).and_then(link_of).into_iter().for_each(|link| *link = known);
            }
        }
    }

    /// What the upper end of `node` is known to show.
    fn known(&self, node: &NodeSpec) -> Option<Link> {
        match &node.kind {
            NodeKind::Port(port) => self.ports.contains(&node.name).then_some(port.link),
            NodeKind::Endpoint(_) => self.devices.get(&node.name).copied(),
        }
    }

    /// Shows `link` at the upper end of `node`, unless it is known.
    fn follow(&self, node: Option<&mut NodeSpec>, endpoints: &mut BTreeMap<Name, Endpoint>, link: Link) {
        let Some(node) = node.filter(|node| self.known(node).is_none()) else { return };
        if let Some(Endpoint::Stub(StubSpec { on: Attachment::Link(own), .. })) = endpoints.get_mut(&node.name) {
            *own = link;
        }
        link_of(node).into_iter().for_each(|own| *own = link);
    }
}

/// What `node` shows of the link that leads down from it, if one does.
fn link_below(node: &NodeSpec) -> Option<Link> {
    match &node.kind {
        NodeKind::Port(port) if port.kind.has_link_below() => Some(port.link),
        _ => None,
    }
}

fn link_of(node: &mut NodeSpec) -> Option<&mut Link> {
    match &mut node.kind {
        NodeKind::Port(port) => Some(&mut port.link),
        NodeKind::Endpoint(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use api::config::{TopologyConfig, VmConfig};
    use devices::vfio::Placement;

    use super::*;
    use crate::spec::spec;

    /// What each node of a file shows, with `more` devices beside.
    fn links(file: &str, more: &[&str]) -> BTreeMap<String, String> {
        let topology = Some(TopologyConfig::parse("f", &format!("[[root-complex]]\nname = \"rc0\"\n{file}")).unwrap());
        let devices = more.iter().map(|device| device.parse().unwrap()).collect();
        let pcie = "root-ports=1".parse().unwrap();
        let spec = spec(&VmConfig { topology, devices, pcie, ..VmConfig::default() }, &Host::default()).unwrap();
        let of = |node: &NodeSpec| match (&node.kind, spec.endpoints.get(&node.name)) {
            (NodeKind::Port(port), _) => Some(port.link),
            (_, Some(Endpoint::Stub(StubSpec { on: Attachment::Link(link), .. }))) => Some(*link),
            _ => None,
        };
        let shown = |link: Link| if link.max == link.current { link.max.to_string() } else { format!("{link:?}") };
        spec.topology.nodes.iter().filter_map(|node| Some((node.name.to_string(), shown(of(node)?)))).collect()
    }

    fn port(name: &str, kind: &str, on: &str, link: &str) -> String {
        format!("[[port]]\nname = \"{name}\"\nkind = \"{kind}\"\non = \"{on}\"\n{}", given(link))
    }

    fn device(name: &str, on: &str, link: &str) -> String {
        format!("[[device]]\nname = \"{name}\"\nkind = \"stub\"\non = \"{on}\"\n{}", given(link))
    }

    fn given(link: &str) -> String {
        if link.is_empty() { String::new() } else { format!("link = \"{link}\"\n") }
    }

    #[test]
    fn the_end_of_a_link_of_which_nobody_says_anything_follows_the_other_one() {
        let (slow, fast, usual) = ("8GT/s x4", "16GT/s x8", "32GT/s x16");
        for (root, upstream, downstream, end, bridge) in
            [(slow, "", "", fast, ""), ("", slow, fast, "", fast), ("", "", "", "", ""), (slow, fast, fast, slow, slow)]
        {
            let file = [
                port("r", "root-port", "rc0", root),
                port("u", "upstream-port", "r", upstream),
                port("d", "downstream-port", "u", downstream),
                device("e", "d", end),
                port("d2", "downstream-port", "u", ""),
                port("b", "pcie-pci-bridge", "d2", bridge),
                device("old", "b", ""),
            ];
            let links = links(&file.concat(), &[]);
            for (ends, given) in [(["r", "u"], [root, upstream]), (["d", "e"], [downstream, end]), (["d2", "b"], ["", bridge])] {
                let either = given.into_iter().find(|link| !link.is_empty()).unwrap_or(usual);
                for (name, given) in ends.into_iter().zip(given) {
                    assert_eq!(links[name], if given.is_empty() { either } else { given }, "{name} of {given:?}");
                }
            }
        }
    }

    #[test]
    fn ports_that_a_device_names_or_gets_show_its_link() {
        let links = links("", &["stub,id=a,on=port0,link=8GT/s x4", "stub,id=b,link=5GT/s x2"]);
        assert_eq!((links["port0"].as_str(), links["b-port"].as_str()), ("8GT/s x4", "5GT/s x2"));
    }

    #[test]
    fn a_stub_that_comes_shows_the_link_of_its_port_unless_somebody_says_what_it_has() {
        let port: Link = Link::at("8GT/s x4".parse().unwrap());
        for (device, shown) in [("stub", "8GT/s x4"), ("stub,link=2.5GT/s x1", "2.5GT/s x1")] {
            let config = VmConfig { devices: vec![device.parse().unwrap()], ..VmConfig::default() };
            let (endpoint, _) = crate::spec::single(&config, &Host::default(), None).unwrap();
            let Endpoint::Stub(placed) = endpoint.placed(Placement::BelowPort(port)) else { panic!("{device}") };
            let Attachment::Link(link) = placed.on else { panic!("{device}") };
            assert_eq!(link.current.to_string(), shown, "{device}");
        }
    }
}
