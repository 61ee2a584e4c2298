//! What a guest cost: exits by reason, memory slots, DMA maps, interrupt routes; and what passed through its disks and
//! interfaces. Counts, never times.

use std::fmt;

use api::info::Counters;
use pci::port::WriteCounts;

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
    doorbells: u32,
    vectors: usize,
    route_commits: u64,
    port_writes: WriteCounts,
    bars: Vec<(String, u8, MapCounts)>,
    traffic: Vec<(String, Vec<(&'static str, u64)>)>,
}

impl Report {
    /// Takes the counts of this moment, with those of devices by their names.
    #[must_use]
    pub fn new(threads: &Threads, pci: &PciBus, routes: &GsiTable, traffic: Vec<(String, Vec<(&'static str, u64)>)>) -> Self {
        let total = |(reason, name): &(Count, &'static str)| (*name, threads.total(*reason));
        let (slots, slot_changes, doorbells, port_writes, bars) = pci.change(|tree| {
            let port_writes = tree.hierarchy.port_writes();
            let mapper = &mut tree.mapper;
            let bars = mapper.counts().map(|(name, bar, counts)| (name.to_owned(), bar, counts)).collect();
            (mapper.slots().in_use(), mapper.slots().changes(), mapper.doorbells(), port_writes, bars)
        });
        Self {
            exits: NAMES.iter().map(total).collect(),
            slots,
            slot_changes,
            doorbells,
            vectors: routes.vectors_in_use(),
            route_commits: routes.commits(),
            port_writes,
            bars,
            traffic,
        }
    }
}

impl Report {
    /// Writes of registers of ports, by what they came to.
    fn port_writes(&self) -> [(&'static str, u64); 4] {
        let WriteCounts { hard_wired, nothing_to_clear, same_value, changed } = self.port_writes;
        [
            ("hard-wired", hard_wired),
            ("with nothing to clear", nothing_to_clear),
            ("left as they were", same_value),
            ("changed", changed),
        ]
    }

    /// As the API tells it.
    #[must_use]
    pub fn for_client(&self) -> Counters {
        let mut counters = Counters::new();
        let exits = self.exits.iter().map(|(name, count)| (name.replace(' ', "_"), *count));
        counters.insert("exits".to_owned(), exits.collect());
        let machine = [
            ("memory_slots", u64::from(self.slots)),
            ("memory_slot_changes", self.slot_changes),
            ("doorbells_without_exits", u64::from(self.doorbells)),
            ("interrupt_vectors", self.vectors as u64),
            ("route_table_changes", self.route_commits),
        ];
        counters.insert("machine".to_owned(), machine.map(|(name, count)| (name.to_owned(), count)).into());
        let port_writes = self.port_writes().map(|(name, count)| (name.replace(' ', "_"), count));
        counters.insert("port_registers".to_owned(), port_writes.into());
        for (name, bar, counts) in &self.bars {
            let device = counters.entry(name.clone()).or_default();
            device.insert(format!("bar{bar}_memory_slots"), counts.slots);
            device.insert(format!("bar{bar}_dma_maps"), counts.dma);
            device.insert(format!("bar{bar}_doorbells_without_exits"), counts.doorbells);
            device.insert(format!("bar{bar}_reads"), counts.reads);
            device.insert(format!("bar{bar}_writes"), counts.writes);
        }
        for (name, passed) in &self.traffic {
            let passed = passed.iter().map(|(counter, count)| ((*counter).to_owned(), *count));
            counters.entry(name.clone()).or_default().extend(passed);
        }
        counters
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
        writeln!(f, "  {:<24}{:>10}", "doorbells without exits", self.doorbells)?;
        writeln!(f, "  {:<24}{:>10}", "interrupt vectors", self.vectors)?;
        writeln!(f, "  {:<24}{:>10}", "route table changes", self.route_commits)?;
        for (name, count) in self.port_writes() {
            writeln!(f, "  port registers {name:<21}{count:>10}")?;
        }
        for (name, bar, counts) in &self.bars {
            if (counts.slots, counts.dma) != (0, 0) {
                writeln!(f, "  {name} BAR {bar}: mapped into KVM {} times, for DMA {} times", counts.slots, counts.dma)?;
            }
            if (counts.doorbells, counts.reads, counts.writes) != (0, 0, 0) {
                let MapCounts { doorbells, reads, writes, .. } = counts;
                writeln!(f, "  {name} BAR {bar}: {reads} reads, {writes} writes, {doorbells} doorbells without exits")?;
            }
        }
        for (name, passed) in &self.traffic {
            let passed: Vec<_> = passed.iter().map(|(counter, count)| format!("{count} {}", counter.replace('_', " "))).collect();
            writeln!(f, "  {name}: {}", passed.join(", "))?;
        }
        Ok(())
    }
}
