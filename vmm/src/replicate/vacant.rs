//! Decides which ports of the host have a copy to which devices come while the guest runs, and what those keep for them.

use std::collections::BTreeSet;

use api::config::HostPorts;
use pci::address::HostBdf;
use pci::topology::{EndpointSpec, HotPlug, PortKind, Reserve};

use crate::host::tree::{HostKind, HostNode, HostParent, HostTree};

/// A card that takes the place of another one may have other registers below 4 GiB.
const MEMORY: u64 = 2 << 20;

/// Ports of the host that have one thing below a link, which is no switch, or nothing: all, or those below the switches of
/// which `copied` has the upstream port. By address.
pub(super) fn ports<'a>(tree: &'a HostTree, which: HostPorts, copied: &BTreeSet<HostBdf>) -> Vec<&'a HostNode> {
    let switches: BTreeSet<HostBdf> = tree
        .functions
        .values()
        .filter(|node| node.kind == HostKind::Port(PortKind::Upstream))
        .filter_map(|node| if let HostParent::Bridge(on) = node.on { Some(on) } else { None })
        .collect();
    let is_wanted = |port: &HostNode| match which {
        HostPorts::Used => false,
        HostPorts::Switches => tree.above(port).iter().any(|above| copied.contains(&above.at)),
        HostPorts::All => true,
    };
    let links = tree.functions.values().filter(|node| matches!(node.kind, HostKind::Port(kind) if kind.has_link_below()));
    links.filter(|port| !switches.contains(&port.at) && is_wanted(port)).collect()
}

/// The functions below `port` on the host, without virtual ones.
pub(super) fn devices(tree: &HostTree, port: HostBdf) -> impl Iterator<Item = &HostNode> {
    let endpoints = tree.functions.values().filter(|node| node.kind == HostKind::Endpoint && node.physical_function.is_none());
    endpoints.filter(move |node| tree.above(node).iter().any(|above| above.at == port))
}

/// What a copy keeps on which nothing hangs: room for the device that the host has there, at its present size, or what
/// `wished` says if that is more. For an empty slot of the host, what is wished.
pub(super) fn keeps(tree: &HostTree, port: HostBdf, wished: HotPlug) -> HotPlug {
    let functions: Vec<EndpointSpec> = devices(tree, port)
        .map(|node| EndpointSpec { bars: node.bars, rom: node.rom, ..EndpointSpec::default() })
        .filter(|function| function.needs().next().is_some())
        .collect();
    if functions.is_empty() {
        return HotPlug { own: Some(NOTHING), ..wished };
    }
    let needed = Reserve::for_device(&functions);
    at_least(Reserve { memory: needed.memory.map(|size| size.max(MEMORY)), ..needed }, wished)
}

/// What a copy keeps on which a device hangs from the start: its place, so that it can go and come back.
pub(super) fn keeps_its_own(wished: HotPlug) -> HotPlug {
    at_least(NOTHING, wished)
}

const NOTHING: Reserve = Reserve { memory: Some(0), prefetchable: Some(0), buses: 1 };

fn at_least(needed: Reserve, wished: HotPlug) -> HotPlug {
    let Reserve { memory, prefetchable, buses } = wished.reserve;
    let reserve = Reserve { memory: needed.memory.max(memory), prefetchable: needed.prefetchable.max(prefetchable), buses };
    HotPlug { reserve, own: Some(needed), ..wished }
}
