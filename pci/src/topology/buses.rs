//! Decides bus numbers: depth first, strictly increasing downwards, no number left unused.

use super::outline::{On, Outline};
use super::planner::PlanError;
use crate::address::BusRange;

/// Bus numbers in a segment.
const BUSES: usize = 256;

/// Who has which buses.
#[derive(Debug)]
pub(super) struct Buses {
    /// Root bus and highest bus below it, by root complex.
    pub(super) roots: Vec<BusRange>,
    /// Secondary and subordinate bus, by node; `None` for endpoints.
    pub(super) ports: Vec<Option<BusRange>>,
}

/// Numbers all buses. A port takes one for the link or the switch's inner bus below it, a root complex one for its root bus;
/// a hot-plug port takes at least those that it reserves.
pub(super) fn number(outline: &Outline<'_>) -> Result<Buses, PlanError> {
    let (below_ports, below_roots) = counts(outline);
    let roots = root_ranges(outline, &below_roots)?;
    let mut ports = vec![None; outline.entries.len()];
    for (bus, range) in outline.root_buses.iter().zip(&roots) {
        descend(outline, bus, range.secondary, &below_ports, &mut ports);
    }
    Ok(Buses { roots, ports })
}

/// Buses that each port and each root complex takes.
fn counts(outline: &Outline<'_>) -> (Vec<usize>, Vec<usize>) {
    let mut ports = vec![0usize; outline.entries.len()];
    let mut roots = vec![1usize; outline.root_buses.len()];
    for (root, bus) in roots.iter_mut().zip(&outline.root_buses) {
        *root += virtual_buses(outline, bus);
    }
    // Children come before parents, so that a port's own count is complete when it is reached.
    for node in outline.depth_first.iter().rev().copied() {
        let entry = &outline.entries[node];
        let Some(port) = entry.port() else { continue };
        // Siblings of the ports below come first on the bus, with the buses of their virtual functions.
        ports[node] += virtual_buses(outline, &entry.below);
        let reserved = port.hotplug.map_or(1, |hotplug| usize::from(hotplug.reserve.buses));
        ports[node] = (ports[node] + 1).max(reserved);
        match entry.on {
            On::RootComplex(root) => roots[root] += ports[node],
            On::Node(parent) => ports[parent] += ports[node],
        }
    }
    (ports, roots)
}

/// Buses that virtual functions of what is on `bus` reach, beside that one.
fn virtual_buses(outline: &Outline<'_>, bus: &[usize]) -> usize {
    let more = |node: &usize| outline.entries[*node].sriov().map(|sriov| sriov.more_buses(outline.entries[*node].devfn));
    bus.iter().filter_map(more).max().unwrap_or(0)
}

/// Numbers the buses of the ports on `bus`, whose own number is `last`. They were counted before, so that the numbers do not
/// run out.
fn descend(outline: &Outline<'_>, bus: &[usize], mut last: u8, counts: &[usize], ports: &mut [Option<BusRange>]) {
    last = last.saturating_add(u8::try_from(virtual_buses(outline, bus)).unwrap_or(u8::MAX));
    for node in bus.iter().copied().filter(|node| outline.entries[*node].port().is_some()) {
        let secondary = last.saturating_add(1);
        descend(outline, &outline.entries[node].below, secondary, counts, ports);
        last = last.saturating_add(u8::try_from(counts[node]).unwrap_or(u8::MAX));
        ports[node] = Some(BusRange { secondary, subordinate: last });
    }
}

fn root_ranges(outline: &Outline<'_>, needs: &[usize]) -> Result<Vec<BusRange>, PlanError> {
    let specs = &outline.topology.root_complexes;
    for root in specs {
        let needed = specs.iter().zip(needs).filter(|(other, _)| other.segment == root.segment).map(|(_, need)| need).sum();
        if needed > BUSES {
            return Err(PlanError::Buses { segment: root.segment, needed, over: needed - BUSES });
        }
    }
    let mut ranges: Vec<Option<BusRange>> = vec![None; specs.len()];
    // Wanted numbers first; the others then find the gaps between them.
    let wanted = (0..specs.len()).filter(|index| specs[*index].first_bus.is_some());
    let others = (0..specs.len()).filter(|index| specs[*index].first_bus.is_none());
    for index in wanted.chain(others) {
        let (root, need) = (&specs[index], needs[index]);
        let clash = |range: BusRange| {
            let others = specs.iter().zip(&ranges).filter(|(other, _)| other.segment == root.segment);
            others.filter_map(|(other, taken)| Some((other, (*taken)?))).find(|(_, taken)| overlap(*taken, range))
        };
        let range = if let Some(first) = root.first_bus {
            let range = range(usize::from(first), need).ok_or_else(|| PlanError::RootBusTooHigh {
                name: root.name.clone(),
                first,
                needed: need,
                highest: BUSES - need,
            })?;
            if let Some((other, taken)) = clash(range) {
                return Err(PlanError::RootBusTaken { name: root.name.clone(), range, other: other.name.clone(), taken });
            }
            range
        } else {
            let free = (0..BUSES).filter_map(|first| range(first, need)).find(|range| clash(*range).is_none());
            free.ok_or_else(|| PlanError::NoRun { name: root.name.clone(), segment: root.segment, needed: need })?
        };
        ranges[index] = Some(range);
    }
    Ok(ranges.into_iter().flatten().collect())
}

fn range(first: usize, need: usize) -> Option<BusRange> {
    Some(BusRange { secondary: u8::try_from(first).ok()?, subordinate: u8::try_from(first + need - 1).ok()? })
}

const fn overlap(a: BusRange, b: BusRange) -> bool {
    a.secondary <= b.subordinate && b.secondary <= a.subordinate
}
