//! What a guest cost: exits by reason, memory slots, DMA maps, interrupt routes. Counts, never times.

use std::fmt;

use crate::effects::MapCounts;
use crate::kvm::GsiTable;
use crate::pci_bus::PciBus;
use crate::vcpu::{Count, NAMES, Threads};

/// A table for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    exits: Vec<(&'static str, u64)>,
    slots: u32,
    slot_changes: u64,
    vectors: usize,
    route_commits: u64,
    bars: Vec<(String, u8, MapCounts)>,
}

impl Report {
    /// Takes the counts of this moment.
    #[must_use]
    pub fn new(threads: &Threads, pci: &PciBus, routes: &GsiTable) -> Self {
        let total = |(reason, name): &(Count, &'static str)| (*name, threads.total(*reason));
        let (slots, slot_changes, bars) = pci.with_mapper(|mapper| {
            let bars = mapper.counts().map(|(name, bar, counts)| (name.to_owned(), bar, counts)).collect();
            (mapper.slots().in_use(), mapper.slots().changes(), bars)
        });
        Self {
            exits: NAMES.iter().map(total).collect(),
            slots,
            slot_changes,
            vectors: routes.vectors_in_use(),
            route_commits: routes.commits(),
            bars,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "counters:")?;
        for (name, count) in &self.exits {
            writeln!(f, "  {name:<24}{count:>10}")?;
        }
        writeln!(f, "  {:<24}{:>10}", "memory slots in use", self.slots)?;
        writeln!(f, "  {:<24}{:>10}", "memory slot changes", self.slot_changes)?;
        writeln!(f, "  {:<24}{:>10}", "interrupt vectors", self.vectors)?;
        writeln!(f, "  {:<24}{:>10}", "route table changes", self.route_commits)?;
        for (name, bar, counts) in self.bars.iter().filter(|(.., counts)| *counts != MapCounts::default()) {
            writeln!(f, "  {name} BAR {bar}: mapped into KVM {} times, for DMA {} times", counts.slots, counts.dma)?;
        }
        Ok(())
    }
}
