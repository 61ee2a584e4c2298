//! Decides device and function numbers of what shares a bus.

use super::check::TopologyError;
use super::spec::{NodeKind, NodeSpec, PortKind, PortSpec};
use crate::address::Devfn;

/// Places for `siblings`, in their order. They hang on the same thing; `link` tells that it has device 0 only. A wanted number
/// is kept; others get the lowest device number that nobody wants. Where 32 without the `spare` ones are too few, ports share
/// device numbers, as functions 0 to 7, no more of them than necessary.
pub(super) fn place(siblings: &[&NodeSpec], link: bool, spare: u8) -> Result<Vec<Devfn>, TopologyError> {
    let wanted = siblings.iter().filter_map(|node| node.place.device).fold(0u32, |mask, device| mask | 1 << (device & 31));
    let mut taken = wanted;
    let mut before = None;
    let mut shared = Shared { per_device: if link { 1 } else { ports_per_device(siblings, wanted, spare) }, last: None };
    let mut places = Vec::with_capacity(siblings.len());
    for (index, node) in siblings.iter().enumerate() {
        let place = if link {
            on_link(node)?
        } else if let Some(place) = shared.next(siblings, index) {
            place
        } else {
            let place = Devfn::new(on_bus(node, before, &mut taken)?, node.place.function);
            shared.begin(siblings, index, place);
            place
        };
        before = Some(place.device());
        places.push(place);
    }
    distinct(siblings, &places)?;
    with_function_zero(siblings, &places, link)?;
    Ok(places)
}

/// Whether sibling `index` may share a device number: a port for which nobody wants a number and to which no further function
/// belongs.
fn can_share(siblings: &[&NodeSpec], index: usize) -> bool {
    let alone = |node: &NodeSpec| node.place.device.is_none() && node.place.function == 0;
    let joined = |node: &NodeSpec| node.place.device.is_none() && node.place.function != 0;
    let port = siblings.get(index).is_some_and(|node| matches!(node.kind, NodeKind::Port(_)) && alone(node));
    port && !siblings.get(index + 1).is_some_and(|next| joined(next))
}

/// How many ports share a device number: as few as let everybody find one, at most 8.
fn ports_per_device(siblings: &[&NodeSpec], wanted: u32, spare: u8) -> usize {
    let ports = (0..siblings.len()).filter(|index| can_share(siblings, *index)).count();
    let heads = siblings.iter().filter(|node| node.place.device.is_none() && node.place.function == 0).count();
    let free = usize::try_from(wanted.count_zeros()).unwrap_or(0);
    let for_ports = free.saturating_sub(heads - ports).saturating_sub(spare.into());
    (1..8).find(|count| ports.div_ceil(*count) <= for_ports).unwrap_or(8)
}

/// Ports that share a device number.
struct Shared {
    per_device: usize,
    /// The last one.
    last: Option<Devfn>,
}

impl Shared {
    /// The next function of the device that ports share at the moment.
    fn next(&mut self, siblings: &[&NodeSpec], index: usize) -> Option<Devfn> {
        let last = self.last.filter(|last| usize::from(last.function()) + 1 < self.per_device && can_share(siblings, index))?;
        self.last = Some(Devfn::new(last.device(), last.function() + 1));
        self.last
    }

    /// A port has a device number that others may share.
    fn begin(&mut self, siblings: &[&NodeSpec], index: usize, place: Devfn) {
        if can_share(siblings, index) {
            self.last = Some(place);
        }
    }
}

/// All functions below a link are those of device 0; by alternative routing ids the device number extends the function's.
fn on_link(node: &NodeSpec) -> Result<Devfn, TopologyError> {
    if let Some(device) = node.place.device.filter(|device| *device != 0) {
        return Err(TopologyError::BelowLink { name: node.name.clone(), device, on: node.on.clone() });
    }
    let upstream = matches!(node.kind, NodeKind::Port(PortSpec { kind: PortKind::Upstream, .. }));
    if upstream && node.place.function != 0 {
        let function = node.place.function;
        return Err(TopologyError::UpstreamPlace { name: node.name.clone(), function, on: node.on.clone() });
    }
    Ok(Devfn::from_byte(node.place.function))
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

fn with_function_zero(siblings: &[&NodeSpec], places: &[Devfn], link: bool) -> Result<(), TopologyError> {
    let device = |place: &Devfn| if link { 0 } else { place.device() };
    let first = |place: &&Devfn| if link { **place == Devfn::ZERO } else { place.function() == 0 };
    let headed = places.iter().filter(first).fold(0u32, |mask, place| mask | 1 << device(place));
    match siblings.iter().zip(places).find(|(_, place)| headed & 1 << device(place) == 0) {
        None => Ok(()),
        Some((node, place)) => Err(TopologyError::FunctionZero { name: node.name.clone(), place: *place, on: node.on.clone() }),
    }
}
