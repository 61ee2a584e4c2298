//! Decides device and function numbers of what shares a bus.

use super::check::TopologyError;
use super::spec::{NodeKind, NodeSpec, PortKind, PortSpec};
use crate::address::Devfn;

/// Places for `siblings`, in their order. They hang on the same thing; `link` tells that it has device 0 only. A wanted
/// number is kept; others get the lowest device number that nobody wants.
pub(super) fn place(siblings: &[&NodeSpec], link: bool) -> Result<Vec<Devfn>, TopologyError> {
    let wanted = siblings.iter().filter_map(|node| node.place.device).fold(0u32, |mask, device| mask | 1 << (device & 31));
    let mut taken = wanted;
    let mut before = None;
    let mut places = Vec::with_capacity(siblings.len());
    for node in siblings {
        let device = if link { on_link(node)? } else { on_bus(node, before, &mut taken)? };
        before = Some(device);
        places.push(Devfn::new(device, node.place.function));
    }
    distinct(siblings, &places)?;
    with_function_zero(siblings, &places)?;
    Ok(places)
}

fn on_link(node: &NodeSpec) -> Result<u8, TopologyError> {
    if let Some(device) = node.place.device.filter(|device| *device != 0) {
        return Err(TopologyError::BelowLink { name: node.name.clone(), device, on: node.on.clone() });
    }
    let upstream = matches!(node.kind, NodeKind::Port(PortSpec { kind: PortKind::Upstream, .. }));
    if upstream && node.place.function != 0 {
        let function = node.place.function;
        return Err(TopologyError::UpstreamPlace { name: node.name.clone(), function, on: node.on.clone() });
    }
    Ok(0)
}

fn on_bus(node: &NodeSpec, before: Option<u8>, taken: &mut u32) -> Result<u8, TopologyError> {
    let function = node.place.function;
    if let Some(device) = node.place.device {
        return Ok(device);
    }
    if function != 0 {
        return before.ok_or_else(|| TopologyError::NoSibling { name: node.name.clone(), function, on: node.on.clone() });
    }
    let free = (0..32).find(|device| *taken & 1 << device == 0);
    let device = free.ok_or_else(|| TopologyError::Full { name: node.name.clone(), on: node.on.clone() })?;
    *taken |= 1 << device;
    Ok(device)
}

fn distinct(siblings: &[&NodeSpec], places: &[Devfn]) -> Result<(), TopologyError> {
    let mut holders: [Option<&NodeSpec>; 256] = [None; 256];
    for (node, place) in siblings.iter().zip(places) {
        if let Some(first) = holders[usize::from(place.byte())].replace(node) {
            return Err(TopologyError::Occupied {
                first: first.name.clone(),
                second: node.name.clone(),
                place: *place,
                on: node.on.clone(),
            });
        }
    }
    Ok(())
}

fn with_function_zero(siblings: &[&NodeSpec], places: &[Devfn]) -> Result<(), TopologyError> {
    let headed = places.iter().filter(|place| place.function() == 0).fold(0u32, |mask, place| mask | 1 << place.device());
    match siblings.iter().zip(places).find(|(_, place)| headed & 1 << place.device() == 0) {
        None => Ok(()),
        Some((node, place)) => Err(TopologyError::FunctionZero { name: node.name.clone(), place: *place, on: node.on.clone() }),
    }
}
