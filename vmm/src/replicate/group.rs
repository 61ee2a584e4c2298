//! Decides which host functions are one device of the guest, and which devices share a place on the host.

use pci::address::HostBdf;

use super::Requested;
use crate::host::tree::{HostKind, HostTree};

/// Functions that stay one device in the guest, and the host function whose place they take.
pub(super) struct Group<'a> {
    /// By function number, which must be 0 for one.
    pub functions: Vec<&'a Requested>,
    /// Place of the first function in the list that was given.
    pub position: usize,
    /// The same for its first GPU, if it has one.
    pub gpu: Option<usize>,
    /// Whose place it takes: its own, or for a virtual function that of the physical one.
    pub anchor: HostBdf,
    /// Whether it is a virtual function.
    pub is_virtual: bool,
    /// With whom it shares a host device.
    pub cluster: Cluster,
}

/// What sits at one place of the host: functions of one device number, or all that is behind one bridge to conventional PCI.
/// Such devices are near each other even below a root port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cluster {
    /// Domain, bus and device.
    Device(u32, u8, u8),
    /// The bridge.
    Behind(HostBdf),
}

/// Functions of one host device stay together, in the place of the first of them that was given. A virtual function is a
/// device by itself, at the place of its physical function: drivers look for network functions at device 0, function 0.
pub(super) fn together<'a>(tree: &HostTree, devices: &'a [Requested]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for (position, device) in devices.iter().enumerate() {
        let physical = tree.get(device.at).and_then(|node| node.physical_function);
        let cluster = cluster(tree, device.at);
        let same = |group: &&mut Group<'_>| !group.is_virtual && physical.is_none() && same_device(group.anchor, device.at);
        let gpu = is_gpu(device).then_some(position);
        match groups.iter_mut().find(same) {
            Some(group) => {
                group.functions.push(device);
                group.gpu = group.gpu.or(gpu);
            }
            None => groups.push(Group {
                functions: vec![device],
                position,
                gpu,
                anchor: physical.unwrap_or(device.at),
                is_virtual: physical.is_some(),
                cluster,
            }),
        }
    }
    for group in &mut groups {
        group.functions.sort_by_key(|device| device.at.bdf.devfn().function());
    }
    groups
}

fn same_device(a: HostBdf, b: HostBdf) -> bool {
    a.domain == b.domain && a.bdf.bus() == b.bdf.bus() && a.bdf.devfn().device() == b.bdf.devfn().device()
}

fn cluster(tree: &HostTree, at: HostBdf) -> Cluster {
    let bridge = tree.get(at).and_then(|node| tree.above(node).last().copied());
    match bridge.filter(|bridge| bridge.kind == HostKind::OtherBridge) {
        Some(bridge) => Cluster::Behind(bridge.at),
        None => Cluster::Device(at.domain, at.bdf.bus(), at.bdf.devfn().device()),
    }
}

impl Group<'_> {
    /// The function that has the group's place in the list.
    pub fn name(&self) -> String {
        self.functions.first().map_or_else(String::new, |device| device.name.to_string())
    }
}

/// Whether a guest numbers a function as a GPU: display controllers and accelerators.
pub(super) fn is_gpu(device: &Requested) -> bool {
    matches!(device.endpoint.ids.class.base_and_sub() >> 8, 0x03 | 0x12)
}
