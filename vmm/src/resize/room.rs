//! What a machine can become: how many processors, and where memory may come. Pure.

use std::collections::BTreeSet;

use api::config::{HotPlugMethod, Size, VmConfig};
use arch::memory_map::{Range, take};
use arch::ports::MEMORY_DEVICES;
use devices::acpi::MemoryDevice;
use devices::virtio::mem::Region;

use crate::numa::GuestNuma;

/// Memory comes in multiples of this: the smallest that Linux takes (linux: arch/x86/include/asm/sparsemem.h).
pub const BLOCK: u64 = 128 << 20;

/// The processors and the added memory of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Extent {
    /// Processors, by number; 0 is among them.
    pub cpus: BTreeSet<u8>,
    /// Memory beside that of the start, in the order in which it came.
    pub memory: Vec<MemoryDevice>,
    /// Bytes that the guest is to have of each region of blocks.
    pub blocks: Vec<u64>,
}

impl Extent {
    /// That of a machine at its first start.
    #[must_use]
    pub fn at_start(config: &VmConfig) -> Self {
        Self { cpus: (0..config.cpus.count).collect(), ..Self::default() }
    }

    /// Bytes that were added.
    #[must_use]
    pub fn added(&self) -> u64 {
        self.memory.iter().map(|device| device.len).chain(self.blocks.iter().copied()).sum()
    }
}

/// What a machine can become, decided before it starts.
#[derive(Debug, Clone)]
pub struct Room {
    /// Processors at most.
    pub most_cpus: u8,
    /// Bytes at the start.
    pub memory: u64,
    /// Where memory devices may come, and the node of each range; in order of node.
    pub ranges: Vec<(u32, Range)>,
    /// Where blocks may come, and the node of each region; in order of node.
    pub regions: Vec<(u32, Region)>,
    /// Bytes of each node at the start, by number.
    pub nodes: Vec<u64>,
}

impl Room {
    /// Of `config`, whose memory may grow into `hot_plug`.
    #[must_use]
    pub fn new(config: &VmConfig, numa: Option<&GuestNuma>, hot_plug: &[Range]) -> Self {
        let nodes =
            numa.map_or_else(|| vec![config.memory.size.bytes()], |numa| numa.nodes.iter().map(|node| node.memory).collect());
        let shares = || (0u32..).zip(share_out(hot_plug, nodes.len()));
        let (ranges, regions) = match config.memory.method {
            HotPlugMethod::Acpi => {
                let ranges = shares().flat_map(|(node, ranges)| ranges.into_iter().map(move |range| (node, range)));
                (ranges.collect(), Vec::new())
            }
            HotPlugMethod::VirtioMem => (Vec::new(), regions(config, shares())),
        };
        Self {
            most_cpus: config.cpus.max.unwrap_or(config.cpus.count),
            memory: config.memory.size.bytes(),
            ranges,
            regions,
            nodes,
        }
    }

    /// Bytes that may come, in whole blocks.
    #[must_use]
    pub fn growth(&self) -> u64 {
        let devices: u64 = self.ranges.iter().map(|(_, range)| range.len()).sum();
        let regions: u64 = self.regions.iter().map(|(_, region)| region.len).sum();
        devices / BLOCK * BLOCK + regions
    }

    /// What is to be said of `config` if not all of the memory that may come can.
    #[must_use]
    pub fn note(config: &VmConfig, numa: Option<&GuestNuma>) -> Option<String> {
        let wanted = config.memory.growth;
        let usable = Self::new(config, numa, &[Range::sized(0, wanted.bytes())]).growth();
        (usable < wanted.bytes()).then(|| {
            let (usable, block) = (Size(usable), Size(BLOCK));
            format!(
                "{wanted} of memory may come (--memory hotplug), of which the guest can have {usable}: it comes in multiples of {block}"
            )
        })
    }

    /// What the guest is asked to have of each region so that it has `bytes` in all of them, a multiple of [`Room::unit`]:
    /// what comes goes to the node with the least memory, what goes is taken from the one with the most.
    #[must_use]
    pub fn share(&self, bytes: u64, wanted: &[u64]) -> Vec<u64> {
        let unit = self.unit().max(BLOCK);
        let mut wanted: Vec<u64> = (0..self.regions.len()).map(|index| wanted.get(index).copied().unwrap_or(0)).collect();
        let of_node = |node: u32| usize::try_from(node).ok().and_then(|node| self.nodes.get(node)).copied().unwrap_or(0);
        loop {
            let has: u64 = wanted.iter().sum();
            let regions = self.regions.iter().zip(&mut wanted);
            let all = regions.map(|((node, region), wanted)| (of_node(*node) + *wanted, *node, region.len, wanted));
            let (grows, difference) = (bytes > has, bytes.abs_diff(has));
            let next = match grows {
                _ if difference == 0 => return wanted,
                true => all.filter(|(_, _, len, wanted)| **wanted < *len).min_by_key(|(has, node, ..)| (*has, *node)),
                false => all.filter(|(.., wanted)| **wanted > 0).max_by_key(|(has, node, ..)| (*has, *node)),
            };
            let Some((.., len, next)) = next else { return wanted };
            if grows {
                *next += difference.min(unit).min(len - *next);
            } else {
                *next -= difference.min(unit).min(*next);
            }
        }
    }

    /// Memory comes in multiples of this, bytes.
    #[must_use]
    pub fn unit(&self) -> u64 {
        self.regions.iter().map(|(_, region)| region.block).max().unwrap_or(BLOCK)
    }

    /// How much of the region `index` there must be memory for, so that the guest can have `wanted` of it: in steps, since
    /// each takes a memory slot.
    #[must_use]
    pub fn usable(&self, index: usize, wanted: u64) -> u64 {
        let Some((_, region)) = self.regions.get(index) else { return 0 };
        let unit = region.block.max(BLOCK);
        let step = (region.len / STEPS).next_multiple_of(unit).max(unit);
        wanted.checked_next_multiple_of(step).unwrap_or(region.len).min(region.len)
    }

    /// What is still free of each range, in the order of the ranges.
    fn free(&self, taken: &[MemoryDevice]) -> Vec<(u32, Range)> {
        let start = |range: &Range| {
            let inside = taken.iter().filter(|device| range.contains(device.base));
            inside.map(|device| device.base + device.len).max().unwrap_or(range.start)
        };
        self.ranges.iter().map(|(node, range)| (*node, Range { start: start(range), end: range.end })).collect()
    }

    /// Whether a machine with this room can have come to `extent`. Its blocks are not looked at.
    #[must_use]
    pub fn holds(&self, extent: &Extent) -> bool {
        let cpus = extent.cpus.contains(&0) && extent.cpus.iter().all(|cpu| *cpu < self.most_cpus);
        let comes_after = |(index, device): (usize, &MemoryDevice)| {
            let before = extent.memory.get(..index).unwrap_or_default();
            self.free(before).iter().any(|(node, range)| {
                let end = device.base.checked_add(device.len).filter(|end| *end <= range.end);
                let whole = device.len.is_multiple_of(BLOCK) || end == Some(range.end);
                *node == device.node && device.base >= range.start && device.len > 0 && end.is_some() && whole
            })
        };
        let count = extent.memory.len() <= usize::from(MEMORY_DEVICES);
        cpus && count && extent.memory.iter().enumerate().all(comes_after)
    }

    /// Where `bytes` more go: to the node with the least memory, and on to others when its place is full.
    #[must_use]
    pub fn place(&self, mut bytes: u64, extent: &Extent) -> Vec<MemoryDevice> {
        let mut taken = extent.memory.clone();
        let before = taken.len();
        while bytes > 0 {
            let has = |node: u32| {
                let added = taken.iter().filter(|device| device.node == node).map(|device| device.len).sum::<u64>();
                usize::try_from(node).ok().and_then(|node| self.nodes.get(node)).copied().unwrap_or(0) + added
            };
            let free = self.free(&taken).into_iter().filter(|(_, range)| !range.is_empty());
            let Some((node, range)) = free.min_by_key(|(node, range)| (has(*node), *node, range.start)) else { break };
            let len = range.len().min(bytes);
            taken.push(MemoryDevice { base: range.start, len, node });
            bytes -= len;
        }
        taken.split_off(before)
    }
}

/// Steps in which a region grows at most.
const STEPS: u64 = 48;

/// A region of whole blocks for each node: the longest range of its share.
fn regions(config: &VmConfig, shares: impl Iterator<Item = (u32, Vec<Range>)>) -> Vec<(u32, Region)> {
    let page = config.memory.hugepages.map_or(0, |page| page.size().bytes());
    let shares: Vec<_> = shares.collect();
    let count = u64::try_from(shares.len()).unwrap_or(u64::MAX);
    let region = |range: Range| {
        let block = Region::block(range.len(), page, count);
        let unit = block.max(BLOCK);
        Region { at: range.start, len: range.len() / unit * unit, block }
    };
    shares.into_iter().filter_map(|(node, ranges)| Some((node, region(ranges.into_iter().max_by_key(Range::len)?)))).collect()
}

/// How many regions of blocks a machine has with memory of `nodes` nodes, if it has any.
#[must_use]
pub fn region_count(config: &VmConfig, nodes: usize) -> usize {
    let blocks = usize::try_from(config.memory.growth.bytes() / BLOCK).unwrap_or(usize::MAX);
    if config.memory.method == HotPlugMethod::VirtioMem { nodes.max(1).min(blocks) } else { 0 }
}

/// `ranges` in `count` parts of equal length, in order of address, each a whole number of blocks.
#[must_use]
pub fn share_out(ranges: &[Range], count: usize) -> Vec<Vec<Range>> {
    let total: u64 = ranges.iter().map(Range::len).sum();
    let count = u64::try_from(count.max(1)).unwrap_or(1);
    let mut rest = ranges.iter().copied().collect();
    let blocks = total / BLOCK;
    let part = |index: u64| {
        // What is no whole block goes to the last one.
        let last = if index + 1 == count { total % BLOCK } else { 0 };
        (blocks / count + u64::from(index < blocks % count)) * BLOCK + last
    };
    (0..count).map(|index| take(&mut rest, part(index))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn of_memory_that_may_come_whole_blocks_can_be_had_and_the_rest_is_told() {
        for (memory, usable) in [
            ("1G,hotplug=1G", None),
            ("1G,hotplug=200M", Some("of which the guest can have 128M")),
            ("1G,hotplug=1000M", Some("of which the guest can have 896M")),
            ("1G,hotplug=64M", Some("of which the guest can have 0")),
            ("1G,hotplug=1000M,hotplug-method=virtio-mem", Some("of which the guest can have 896M")),
            ("1G", None),
        ] {
            let config = VmConfig { memory: memory.parse().unwrap(), ..VmConfig::default() };
            let note = Room::note(&config, None);
            assert_eq!(note.is_some(), usable.is_some(), "{memory}: {note:?}");
            assert!(note.zip(usable).is_none_or(|(note, usable)| note.contains(usable)), "{memory}");
            let growth = config.memory.growth.bytes();
            let room = Room::new(&config, None, &[Range::sized(4 * GIB, growth)]);
            assert!(room.growth().is_multiple_of(BLOCK) && growth - room.growth() < BLOCK, "{memory}");
        }
    }

    #[test]
    fn what_may_come_is_shared_out_in_whole_blocks_around_holes() {
        let ranges = [Range::sized(0, 3 * BLOCK), Range::sized(1 << 40, 2 * BLOCK + 4096)];
        let parts = share_out(&ranges, 2);
        assert_eq!(parts[0], [Range::sized(0, 3 * BLOCK)]);
        assert_eq!(parts[1], [Range::sized(1 << 40, 2 * BLOCK + 4096)]);
        assert_eq!(share_out(&[], 3), vec![Vec::new(); 3]);
    }

    fn blocks(memory: &str, nodes: &[u64], hot_plug: &[Range]) -> Room {
        let config = VmConfig { memory: memory.parse().unwrap(), ..VmConfig::default() };
        let shares = (0u32..).zip(share_out(hot_plug, nodes.len()));
        Room {
            most_cpus: 1,
            memory: nodes.iter().sum(),
            ranges: Vec::new(),
            regions: regions(&config, shares),
            nodes: nodes.into(),
        }
    }

    #[test]
    fn blocks_come_to_the_node_that_has_the_least_and_go_from_the_one_that_has_the_most() {
        let room = blocks("3G,hotplug=4G,hotplug-method=virtio-mem", &[2 * GIB, GIB], &[Range::sized(16 * GIB, 4 * GIB)]);
        assert_eq!((room.unit(), room.growth()), (2 << 20, 4 * GIB));
        let one = room.share(GIB, &[]);
        assert_eq!(one, [0, GIB]);
        let three = room.share(3 * GIB, &one);
        assert_eq!(three, [GIB, 2 * GIB]);
        assert_eq!(room.share(4 * GIB, &three), [2 * GIB, 2 * GIB], "the second has no room for more");
        assert_eq!(room.share(2 * GIB - (2 << 20), &three), [GIB / 2, 3 * GIB / 2 - (2 << 20)]);
        assert_eq!(room.share(0, &three), [0, 0]);
    }

    #[test]
    fn a_region_is_whole_blocks_and_gets_its_memory_in_few_steps() {
        let odd = blocks("1G,hotplug=24G,hotplug-method=virtio-mem", &[GIB], &[Range::sized(4 * GIB, 24 * GIB + 4096)]);
        assert_eq!(odd.regions, [(0, Region { at: 4 * GIB, len: 24 * GIB, block: 2 << 20 })]);
        assert_eq!(
            [0, 1, GIB / 2, GIB / 2 + 1, 24 * GIB].map(|wanted| odd.usable(0, wanted)),
            [0, GIB / 2, GIB / 2, GIB, 24 * GIB]
        );
        // What a hole cuts off is not used.
        let cut =
            blocks("1G,hotplug=2T,hotplug-method=virtio-mem", &[GIB], &[Range::sized(0, GIB), Range::sized(1 << 41, 1 << 40)]);
        assert_eq!(cut.regions, [(0, Region { at: 1 << 41, len: 1 << 40, block: 32 << 20 })]);
        let config = |memory: &str| VmConfig { memory: memory.parse().unwrap(), ..VmConfig::default() };
        assert_eq!(region_count(&config("1G,hotplug=4G"), 2), 0);
        for (memory, nodes, count) in [("1G,hotplug=4G", 2, 2), ("1G,hotplug=4G", 0, 1), ("1G,hotplug=128M", 4, 1)] {
            assert_eq!(region_count(&config(&format!("{memory},hotplug-method=virtio-mem")), nodes), count);
        }
    }

    #[test]
    fn a_room_holds_what_it_can_have_come_to_and_nothing_else() {
        let config =
            VmConfig { memory: "1G,hotplug=4G".parse().unwrap(), cpus: "2,max=4".parse().unwrap(), ..VmConfig::default() };
        let room = Room::new(&config, None, &[Range::sized(16 * GIB, 4 * GIB)]);
        let mut extent = Extent::at_start(&config);
        assert!(room.holds(&extent));
        for bytes in [BLOCK, 2 * BLOCK, GIB] {
            let more = room.place(bytes, &extent);
            extent.memory.extend(more);
            assert!(room.holds(&extent), "{extent:?}");
        }
        // One that failed left a gap.
        extent.memory.remove(1);
        assert!(room.holds(&extent));
        let device = |base, len, node| MemoryDevice { base, len, node };
        for other in [
            device(0xE000_0000, BLOCK, 0),
            device(16 * GIB, BLOCK, 0),
            device(19 * GIB, 2 * GIB, 0),
            device(19 * GIB, BLOCK, 1),
            device(19 * GIB, 4096, 0),
            device(19 * GIB, 0, 0),
            device(u64::MAX - BLOCK + 1, BLOCK, 0),
        ] {
            let mut with = extent.clone();
            with.memory.push(other);
            assert!(!room.holds(&with), "{other:?}");
        }
        let many = (0..=u64::from(MEMORY_DEVICES)).map(|index| device(16 * GIB + index * BLOCK, BLOCK, 0));
        assert!(!room.holds(&Extent { memory: many.collect(), ..Extent::at_start(&config) }));
        for cpus in [vec![], vec![1], vec![0, 4]] {
            assert!(!room.holds(&Extent { cpus: cpus.iter().copied().collect(), ..Extent::default() }), "{cpus:?}");
        }
    }
}
