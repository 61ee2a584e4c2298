//! Decides what a change of a machine's processors and memory is made of, and follows it until the guest has what it was
//! promised.
//!
//! A reply is sent when the new numbers are accounted. Processors that come are there at once; those that go are asked for,
//! and go when the guest gives them back. Memory is mapped, and pinned for host functions, by a thread of its own; then the
//! guest is told.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use api::command::Resize;
use api::config::{Size, VmConfig};
use api::error::{ApiError, ErrorKind};
use arch::memory_map::Range;
use arch::ports::MEMORY_DEVICES;
use devices::acpi::MemoryDevice;
use devices::complaints::chain;
use devices::vfio::Domain;
use devices::vfio::iommu::DomainError;
use thiserror::Error;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::machine::{Machine, MachineError};
use crate::memory::{self, Backing, MemoryError};
use crate::numa::{Binding, GuestNuma};
use crate::signals::Signals;

/// Memory comes in multiples of this: the smallest that Linux takes (linux: arch/x86/include/asm/sparsemem.h).
pub const BLOCK: u64 = 128 << 20;

/// The processors and the added memory of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Extent {
    /// Processors, by number; 0 is among them.
    pub cpus: BTreeSet<u8>,
    /// Memory beside that of the start, in the order in which it came.
    pub memory: Vec<MemoryDevice>,
}

impl Extent {
    /// That of a machine at its first start.
    #[must_use]
    pub fn at_start(config: &VmConfig) -> Self {
        Self { cpus: (0..config.cpus.count).collect(), memory: Vec::new() }
    }

    /// Bytes that were added.
    #[must_use]
    pub fn added(&self) -> u64 {
        self.memory.iter().map(|device| device.len).sum()
    }
}

/// What a machine can become, decided before it starts.
#[derive(Debug, Clone)]
pub struct Room {
    /// Processors at most.
    pub most_cpus: u8,
    /// Bytes at the start.
    pub memory: u64,
    /// Where memory may come, and the node of each range; in order of node.
    pub ranges: Vec<(u32, Range)>,
    /// Bytes of each node at the start, by number.
    pub nodes: Vec<u64>,
}

impl Room {
    /// Of `config`, whose memory may grow into `hot_plug`.
    #[must_use]
    pub fn new(config: &VmConfig, numa: Option<&GuestNuma>, hot_plug: &[Range]) -> Self {
        let nodes =
            numa.map_or_else(|| vec![config.memory.size.bytes()], |numa| numa.nodes.iter().map(|node| node.memory).collect());
        let ranges = (0u32..).zip(share_out(hot_plug, nodes.len()));
        Self {
            most_cpus: config.cpus.max.unwrap_or(config.cpus.count),
            memory: config.memory.size.bytes(),
            ranges: ranges.flat_map(|(node, ranges)| ranges.into_iter().map(move |range| (node, range))).collect(),
            nodes,
        }
    }

    fn growth(&self) -> u64 {
        self.ranges.iter().map(|(_, range)| range.len()).sum()
    }

    /// What is still free of each range, in the order of the ranges.
    fn free(&self, taken: &[MemoryDevice]) -> Vec<(u32, Range)> {
        let start = |range: &Range| {
            let inside = taken.iter().filter(|device| range.contains(device.base));
            inside.map(|device| device.base + device.len).max().unwrap_or(range.start)
        };
        self.ranges.iter().map(|(node, range)| (*node, Range { start: start(range), end: range.end })).collect()
    }

    /// Where `bytes` more go: to the node with the least memory, and on to others when its place is full.
    fn place(&self, mut bytes: u64, extent: &Extent) -> Vec<MemoryDevice> {
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

/// `ranges` in `count` parts of equal length, in order of address, each a whole number of blocks.
#[must_use]
pub fn share_out(ranges: &[Range], count: usize) -> Vec<Vec<Range>> {
    let total: u64 = ranges.iter().map(Range::len).sum();
    let count = u64::try_from(count.max(1)).unwrap_or(1);
    let mut rest: std::collections::VecDeque<Range> = ranges.iter().copied().collect();
    let blocks = total / BLOCK;
    let part = |index: u64| {
        // What is no whole block goes to the last one.
        let last = if index + 1 == count { total % BLOCK } else { 0 };
        (blocks / count + u64::from(index < blocks % count)) * BLOCK + last
    };
    let mut take = |mut wanted: u64| {
        let mut part = Vec::new();
        while wanted > 0
            && let Some(range) = rest.pop_front()
        {
            let end = range.start + range.len().min(wanted);
            wanted -= end - range.start;
            part.push(Range { start: range.start, end });
            if end < range.end {
                rest.push_front(Range { start: end, end: range.end });
            }
        }
        part
    };
    (0..count).map(|index| take(part(index))).collect()
}

/// What a change consists of.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Step {
    come: Vec<u8>,
    go: Vec<u8>,
    memory: Vec<MemoryDevice>,
}

/// Decides the change from `extent` to `to`.
fn step(room: &Room, extent: &Extent, to: &Resize) -> Result<Step, ResizeError> {
    let mut step = Step::default();
    if let Some(wanted) = to.cpus {
        if wanted == 0 || wanted > room.most_cpus {
            return Err(ResizeError::Cpus { wanted, most: room.most_cpus });
        }
        let (wanted, has) = (usize::from(wanted), extent.cpus.len());
        let absent = (0..room.most_cpus).filter(|number| !extent.cpus.contains(number));
        step.come = absent.take(wanted.saturating_sub(has)).collect();
        step.go = extent.cpus.iter().rev().copied().take(has.saturating_sub(wanted)).collect();
    }
    if let Some(wanted) = to.ram {
        let (has, most) = (room.memory + extent.added(), room.memory.saturating_add(room.growth()));
        if wanted > most {
            return Err(ResizeError::Memory { wanted: Size(wanted), most: Size(most) });
        }
        let more = wanted.checked_sub(has).ok_or(ResizeError::Shrink { wanted: Size(wanted), has: Size(has) })?;
        if !more.is_multiple_of(BLOCK) {
            return Err(ResizeError::Block { more: Size(more) });
        }
        step.memory = room.place(more, extent);
        if extent.memory.len() + step.memory.len() > usize::from(MEMORY_DEVICES) {
            return Err(ResizeError::Devices);
        }
    }
    Ok(step)
}

/// Memory that a thread prepares.
struct Growing {
    devices: Vec<MemoryDevice>,
    /// Set before `done` is signalled: the thread itself may end a moment later.
    finished: Arc<AtomicBool>,
    thread: JoinHandle<Result<GuestMemoryMmap, GrowthError>>,
}

/// One machine's changes.
pub struct Resizer {
    room: Room,
    /// How memory is backed.
    backing: Backing,
    numa: Option<GuestNuma>,
    prefault: bool,
    /// With what was promised.
    extent: Extent,
    growing: Vec<Growing>,
    /// Signalled when a thread is done.
    done: Arc<EventFd>,
}

impl Resizer {
    /// For a machine that has just been started with `extent`.
    pub fn new(config: &VmConfig, numa: Option<&GuestNuma>, hot_plug: &[Range], extent: Extent) -> io::Result<Self> {
        Ok(Self {
            room: Room::new(config, numa, hot_plug),
            backing: Backing {
                shared: config.memory.shared,
                huge_page: config.memory.hugepages.map(|page| page.size().bytes()),
                transparent_huge_pages: config.memory.prefault,
            },
            numa: numa.cloned(),
            prefault: config.memory.prefault,
            extent,
            growing: Vec::new(),
            done: Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?),
        })
    }

    /// Changes `machine`, or promises it. All or nothing of what is asked for is accepted.
    pub fn resize(&mut self, machine: &mut Machine, to: &Resize) -> Result<(), ResizeError> {
        let step = step(&self.room, &self.extent, to)?;
        // First, since it can fail.
        for number in step.come {
            machine.add_cpu(number).map_err(|source| ResizeError::Machine { number, source })?;
            self.extent.cpus.insert(number);
        }
        for number in step.go {
            machine.ask_for_cpu(number);
            self.extent.cpus.remove(&number);
        }
        if !step.memory.is_empty() {
            self.grow(machine, step.memory)?;
        }
        Ok(())
    }

    fn grow(&mut self, machine: &Machine, devices: Vec<MemoryDevice>) -> Result<(), ResizeError> {
        let ranges: Vec<Range> = devices.iter().map(|device| Range::sized(device.base, device.len)).collect();
        let binding = |device: &MemoryDevice| {
            let node = self.numa.as_ref()?.nodes.get(usize::try_from(device.node).ok()?)?.host.as_ref()?;
            Some(Binding { range: Range::sized(device.base, device.len), node: node.node, policy: node.placement.policy })
        };
        let work = Work {
            ranges,
            bindings: devices.iter().filter_map(binding).collect(),
            backing: self.backing,
            prefault: self.prefault,
            domain: machine.domain(),
        };
        let done = Arc::clone(&self.done);
        let finished = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&finished);
        let run = move || {
            let result = work.run();
            told.store(true, Ordering::Release);
            // A full counter is readable already.
            let _ = done.write(1);
            result
        };
        let thread = thread::Builder::new().name("prep0".into()).spawn(run).map_err(ResizeError::Thread)?;
        self.extent.memory.extend(&devices);
        self.growing.push(Growing { devices, finished, thread });
        Ok(())
    }

    /// Does what guests and threads have made possible. Says whether numbers changed that were told.
    pub fn follow(&mut self, machine: &mut Machine) -> bool {
        machine.take_ejected();
        let _ = self.done.read();
        let (ready, growing) = std::mem::take(&mut self.growing)
            .into_iter()
            .partition(|growing| growing.finished.load(Ordering::Acquire) || growing.thread.is_finished());
        self.growing = growing;
        self.finish(machine, ready)
    }

    /// Waits for memory that is being prepared: a host function that comes must find all of it. Says as
    /// [`Resizer::follow`].
    pub fn settle(&mut self, machine: &mut Machine) -> bool {
        let growing = std::mem::take(&mut self.growing);
        self.finish(machine, growing)
    }

    fn finish(&mut self, machine: &mut Machine, ready: Vec<Growing>) -> bool {
        let mut changed = false;
        for Growing { devices, thread, .. } in ready {
            let made = thread.join().unwrap_or(Err(GrowthError::Thread));
            let added = made
                .and_then(|memory| machine.add_memory(&memory, &devices).map_err(|error| GrowthError::Machine(Box::new(error))));
            if let Err(error) = added {
                let bytes = Size(devices.iter().map(|device| device.len).sum());
                log::error!("cannot add {bytes} of memory: {}", chain(&error));
                self.extent.memory.retain(|device| !devices.contains(device));
                changed = true;
            }
        }
        changed
    }

    /// Processors and memory, with what was promised.
    #[must_use]
    pub fn extent(&self) -> &Extent {
        &self.extent
    }

    /// Bytes of memory in all.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.room.memory + self.extent.added()
    }

    /// How many processors.
    #[must_use]
    pub fn cpus(&self) -> u8 {
        u8::try_from(self.extent.cpus.len()).unwrap_or(u8::MAX)
    }
}

impl AsRawFd for Resizer {
    fn as_raw_fd(&self) -> RawFd {
        self.done.as_raw_fd()
    }
}

/// Memory to be made.
struct Work {
    ranges: Vec<Range>,
    bindings: Vec<Binding>,
    backing: Backing,
    prefault: bool,
    domain: Option<Arc<Domain>>,
}

impl Work {
    fn run(&self) -> Result<GuestMemoryMmap, GrowthError> {
        let memory = memory::create(&self.ranges, self.backing)?;
        memory::bind(&memory, &self.bindings, self.backing.huge_page)?;
        if self.prefault {
            for region in memory::regions(&memory) {
                let failed = |source| MemoryError::Prefault { at: region.at, len: region.len, source };
                memory::populate(region.host, region.len, &|_| !Signals::came()).map_err(failed)?;
            }
        }
        let Some(domain) = self.domain.as_ref().filter(|domain| !domain.is_empty()) else { return Ok(memory) };
        let mut mapped: Vec<memory::RamRegion> = Vec::new();
        for region in memory::regions(&memory) {
            // SAFETY: whoever takes the result keeps it until the domain has ended; on an error the maps end before it.
            if let Err(error) = unsafe { domain.map(region.at, region.len, region.host, "added memory") } {
                for region in mapped {
                    if let Err(error) = domain.unmap(region.at, region.len) {
                        log::error!("{error}");
                    }
                }
                return Err(error.into());
            }
            mapped.push(region);
        }
        Ok(memory)
    }
}

/// Memory that cannot be added after it was promised.
#[derive(Debug, Error)]
enum GrowthError {
    /// Pages.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// DMA maps.
    #[error("host functions cannot reach it: raise the limit of locked memory (ulimit -l)")]
    Dma(#[from] DomainError),
    /// The machine.
    #[error(transparent)]
    Machine(Box<MachineError>),
    /// A panic.
    #[error("the thread that prepared it ended early")]
    Thread,
}

/// A change that cannot be made.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// Processors.
    #[error("{wanted} processors are not possible: 1 to {most} are; start the machine with a larger --cpus max")]
    Cpus {
        /// Asked for.
        wanted: u8,
        /// At most.
        most: u8,
    },
    /// Too much memory.
    #[error("{wanted} of memory is more than the {most} that this machine can have; start it with a larger --memory hotplug")]
    Memory {
        /// Asked for.
        wanted: Size,
        /// At most.
        most: Size,
    },
    /// Less memory.
    #[error("memory does not shrink: the machine has {has}, {wanted} is less; use a balloon")]
    Shrink {
        /// Asked for.
        wanted: Size,
        /// In all.
        has: Size,
    },
    /// Part of a block.
    #[error("memory grows by multiples of 128M, {more} more is none; round it")]
    Block {
        /// How much more was asked for.
        more: Size,
    },
    /// Too often.
    #[error(
        "memory came {MEMORY_DEVICES} times already, the most that this machine can tell its guest; reboot it with more memory"
    )]
    Devices,
    /// A processor.
    #[error("processor {number} cannot be added")]
    Machine {
        /// Which.
        number: u8,
        /// Why.
        #[source]
        source: MachineError,
    },
    /// A thread.
    #[error("cannot start a thread that prepares memory: the limit of processes is reached (ulimit -u)")]
    Thread(#[source] io::Error),
}

impl ResizeError {
    /// As a client is told.
    #[must_use]
    pub fn for_client(&self) -> ApiError {
        let kind = match self {
            Self::Machine { .. } | Self::Thread(_) => ErrorKind::Internal,
            _ => ErrorKind::BadRequest,
        };
        ApiError::from_error(kind, self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn room(config: &VmConfig, numa: Option<&GuestNuma>, growth: u64) -> Room {
        Room::new(config, numa, &[Range::sized(16 * GIB, growth)])
    }

    fn machine(cpus: &str, memory: &str) -> VmConfig {
        VmConfig { cpus: cpus.parse().unwrap(), memory: memory.parse().unwrap(), ..VmConfig::default() }
    }

    fn cpus(count: u8) -> Resize {
        Resize { cpus: Some(count), ..Resize::default() }
    }

    fn ram(bytes: u64) -> Resize {
        Resize { ram: Some(bytes), ..Resize::default() }
    }

    #[test]
    fn the_lowest_processors_come_and_the_highest_go() {
        let config = machine("boot=2,max=6", "1G");
        let (room, mut extent) = (room(&config, None, 0), Extent::at_start(&config));
        assert_eq!(step(&room, &extent, &cpus(4)).unwrap(), Step { come: vec![2, 3], ..Step::default() });
        extent.cpus = [0, 1, 4, 5].into();
        assert_eq!(step(&room, &extent, &cpus(5)).unwrap().come, [2]);
        assert_eq!(step(&room, &extent, &cpus(1)).unwrap().go, [5, 4, 1]);
        assert_eq!(step(&room, &extent, &cpus(4)).unwrap(), Step::default());
        for count in [0, 7, 255] {
            assert!(step(&room, &extent, &cpus(count)).unwrap_err().to_string().contains("1 to 6 are"));
        }
    }

    #[test]
    fn memory_grows_by_blocks_up_to_its_limit_and_never_shrinks() {
        let config = machine("1", "1G,hotplug=4G");
        let room = room(&config, None, 4 * GIB);
        let mut extent = Extent::at_start(&config);
        for (base, total) in [(16, 2), (17, 5)] {
            let step = step(&room, &extent, &ram(total * GIB)).unwrap();
            let len = (total * GIB) - GIB - extent.added();
            assert_eq!(step.memory, [MemoryDevice { base: base * GIB, len, node: 0 }]);
            extent.memory.extend(step.memory);
        }
        assert_eq!(step(&room, &extent, &ram(5 * GIB)).unwrap(), Step::default());
        let refused = |bytes| step(&room, &extent, &ram(bytes)).unwrap_err().to_string();
        assert!(refused(6 * GIB).contains("more than the 5G"));
        assert!(refused(u64::MAX).contains("more than the 5G"));
        assert!(refused(4 * GIB).contains("does not shrink"));
        let odd = step(&room, &Extent::at_start(&config), &ram(GIB + BLOCK / 2)).unwrap_err();
        assert!(odd.to_string().contains("multiples of 128M, 64M more is none"));
        extent.memory = (0..48).map(|n| MemoryDevice { base: 16 * GIB + n * BLOCK / 4, len: BLOCK / 4, node: 0 }).collect();
        assert!(step(&room, &extent, &ram(4 * GIB)).unwrap_err().to_string().contains("came 48 times already"));
    }

    #[test]
    fn memory_goes_to_the_node_that_has_the_least_and_then_to_the_next() {
        let mut config = machine("2", "3G,hotplug=4G");
        let nodes = ["0,cpus=0,memory=2G", "1,cpus=1,memory=1G"].map(|text| text.parse().unwrap());
        config.numa = api::config::NumaConfig::new(nodes.to_vec()).unwrap();
        let numa = crate::numa::resolve(&config, &crate::spec::Host::default()).unwrap().unwrap();
        let room = room(&config, Some(&numa), 4 * GIB);
        assert_eq!(room.ranges, [(0, Range::sized(16 * GIB, 2 * GIB)), (1, Range::sized(18 * GIB, 2 * GIB))]);
        let placed = step(&room, &Extent::at_start(&config), &ram(6 * GIB)).unwrap().memory;
        let device = |base, len, node| MemoryDevice { base: base * GIB, len: len * GIB, node };
        assert_eq!(placed, [device(18, 2, 1), device(16, 1, 0)]);
    }

    #[test]
    fn what_may_come_is_shared_out_in_whole_blocks_around_holes() {
        let ranges = [Range::sized(0, 3 * BLOCK), Range::sized(1 << 40, 2 * BLOCK + 4096)];
        let parts = share_out(&ranges, 2);
        assert_eq!(parts[0], [Range::sized(0, 3 * BLOCK)]);
        assert_eq!(parts[1], [Range::sized(1 << 40, 2 * BLOCK + 4096)]);
        assert_eq!(share_out(&[], 3), vec![Vec::new(); 3]);
    }
}
