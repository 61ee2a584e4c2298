//! Decides bus numbers: depth first, strictly increasing downwards, no number left unused.

use super::outline::Outline;
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

/// Numbers all buses. A port takes one for the link or the switch's inner bus below it, a root complex one for its root bus.
pub(super) fn number(outline: &Outline<'_>) -> Result<Buses, PlanError> {
    let roots = root_ranges(outline)?;
    let mut ports = vec![None; outline.entries.len()];
    for (bus, range) in outline.root_buses.iter().zip(&roots) {
        descend(outline, bus, range.secondary, &mut ports);
    }
    Ok(Buses { roots, ports })
}

/// Numbers the buses below `bus`, whose own number is `last`; returns the highest number used. The range was counted
/// before, so that the numbers do not run out.
fn descend(outline: &Outline<'_>, bus: &[usize], mut last: u8, ports: &mut [Option<BusRange>]) -> u8 {
    for node in bus {
        if outline.entries[*node].port().is_some() {
            let secondary = last.saturating_add(1);
            last = descend(outline, &outline.entries[*node].below, secondary, ports);
            ports[*node] = Some(BusRange { secondary, subordinate: last });
        }
    }
    last
}

fn root_ranges(outline: &Outline<'_>) -> Result<Vec<BusRange>, PlanError> {
    let specs = &outline.topology.root_complexes;
    let mut needs = vec![1usize; specs.len()];
    for (node, entry) in outline.entries.iter().enumerate() {
        if entry.port().is_some() {
            needs[outline.root_of(node)] += 1;
        }
    }
    for root in specs {
        let needed = specs.iter().zip(&needs).filter(|(other, _)| other.segment == root.segment).map(|(_, need)| need).sum();
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
