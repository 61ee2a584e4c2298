//! What is known of a memory device's region: how much the host wants the guest to have, which blocks it has, and who beside
//! the guest reaches them.

use std::error::Error;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use log::Level;
use pci::sync::lock;
use thiserror::Error as ThisError;
use vm_memory::guest_memory::Permissions;
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryMmap};

use super::super::pages;
use super::super::signals::Signals;
use crate::complaints::{Complaints, Listener};

/// The smallest block: the smallest huge page, so that a block costs no page table of its own.
const BLOCK_MIN: u64 = 2 << 20;
/// Blocks of all regions at most: half of what VFIO maps for one container (linux: drivers/vfio/vfio_iommu_type1.c,
/// dma_entry_limit), since each is a map of its own.
const BLOCKS_MAX: u64 = 32_768;

/// Where a region lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Region {
    /// First guest-physical address.
    pub at: u64,
    /// Bytes, a whole number of blocks.
    pub len: u64,
    /// Bytes of a block, a power of two.
    pub block: u64,
}

impl Region {
    /// The size of a block in one of `regions` regions, each of about `len` bytes with pages of `page` bytes.
    #[must_use]
    pub fn block(len: u64, page: u64, regions: u64) -> u64 {
        let fewest = len.div_ceil((BLOCKS_MAX / regions.max(1)).max(1)).checked_next_power_of_two().unwrap_or(1 << 63);
        BLOCK_MIN.max(page).max(fewest)
    }

    /// The numbers of the `count` blocks at `at`, if they lie in its first `usable` bytes.
    fn blocks(&self, usable: u64, at: u64, count: u64) -> Option<std::ops::Range<u64>> {
        let offset = at.checked_sub(self.at).filter(|offset| offset.is_multiple_of(self.block.max(1)))?;
        let end = offset.checked_add(count.checked_mul(self.block)?)?;
        let first = offset / self.block.max(1);
        (count > 0 && end <= usable).then(|| first..first + count)
    }

    /// Whether the address lies in it.
    #[must_use]
    pub fn holds(&self, at: u64) -> bool {
        at.checked_sub(self.at).is_some_and(|offset| offset < self.len)
    }

    fn address(&self, block: u64) -> u64 {
        self.at + block * self.block
    }
}

/// The sizes that both sides look at, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sizes {
    /// From the region's start on, blocks can be plugged up to here: there is memory behind them.
    pub usable: u64,
    /// What the guest has.
    pub plugged: u64,
    /// What the guest is to have.
    pub requested: u64,
}

/// Lets devices of the host reach blocks.
pub trait Reach: Send + Sync {
    /// Lets them reach `len` bytes at `host_address` of this process by the guest address `at`. The memory stays mapped in
    /// this process until it is taken back.
    fn map(&self, at: u64, len: u64, host_address: u64) -> Result<(), Box<dyn Error + Send + Sync>>;
    /// Takes back what one call of [`Reach::map`] mapped.
    fn unmap(&self, at: u64, len: u64) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// What became of a driver's request (virtio 1.2 5.15.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Done.
    Ack,
    /// More than the host wants the guest to have.
    Nack,
    /// The host cannot at this moment.
    Busy,
    /// It makes no sense.
    Error,
    /// Broken off; nothing is changed.
    Stopped,
}

/// Whether blocks are plugged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plugged {
    /// All.
    All,
    /// None.
    None,
    /// Some.
    Some,
}

/// A memory device's region. It outlives the device, which a reset of the machine makes anew.
#[derive(Default)]
pub struct MemControl {
    node: u16,
    /// Whether pages are there before a block is.
    prefault: bool,
    numbers: Mutex<(Region, Sizes)>,
    /// Held while blocks change, and while devices of the host are let to them, which may take long: who serves the guest's
    /// requests does not wait for it. Taken before `numbers`.
    blocks: Mutex<Blocks>,
    /// Held while the driver is interrupted; taken with neither of the two above.
    signals: Mutex<Option<Arc<Signals>>>,
    /// Called with it locked: it must not wait.
    changed: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
}

#[derive(Default)]
struct Blocks {
    /// Bit n of word m: block 64 m + n is plugged.
    plugged: Vec<u64>,
    reach: Option<Arc<dyn Reach>>,
    complaints: Complaints,
}

impl MemControl {
    /// A region of the guest's memory node `node`, whose place is not known yet. With `prefault` a block has its pages before
    /// the guest has it.
    #[must_use]
    pub fn new(node: u16, prefault: bool) -> Arc<Self> {
        Arc::new(Self { node, prefault, ..Self::default() })
    }

    /// Puts it at `region`, with nothing plugged or requested: the machine is new.
    pub fn place(&self, region: Region) {
        *lock(&self.blocks) = Blocks::default();
        *lock(&self.numbers) = (region, Sizes::default());
    }

    /// The machine was reset, nobody reaches its memory: all blocks are unplugged. What is requested stays.
    pub fn restart(&self, memory: &GuestMemoryMmap) {
        let mut blocks = lock(&self.blocks);
        // Its maps ended with the machine.
        blocks.reach = None;
        let region = self.region();
        blocks.plugged.clear();
        lock(&self.numbers).1.plugged = 0;
        if let Err(error) = pages::give_back(memory, GuestAddress(region.at), self.sizes().usable) {
            log::debug!("cannot give memory back: {error}");
        }
    }

    /// The guest's memory node that it belongs to.
    #[must_use]
    pub const fn node(&self) -> u16 {
        self.node
    }

    /// Where it lies.
    #[must_use]
    pub fn region(&self) -> Region {
        lock(&self.numbers).0
    }

    /// How much of it is wanted and there.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        lock(&self.numbers).1
    }

    /// There is memory for the first `usable` bytes, and the guest is to have `requested`. It plugs and unplugs at its own
    /// pace.
    pub fn request(&self, usable: u64, requested: u64) {
        {
            let mut numbers = lock(&self.numbers);
            numbers.1.usable = numbers.1.usable.max(usable);
            numbers.1.requested = requested;
        }
        if let Some(signals) = &*lock(&self.signals) {
            signals.config_changed();
        }
    }

    /// Whom to tell that the guest is to have another size.
    pub fn connect(&self, signals: Arc<Signals>) {
        *lock(&self.signals) = Some(signals);
    }

    /// Calls `changed` whenever the guest has another size.
    pub fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        *lock(&self.changed) = Some(changed);
    }

    /// Devices of the host reach blocks from the first one on: none is plugged yet.
    pub fn reach_from_start(&self, reach: Arc<dyn Reach>) {
        lock(&self.blocks).reach = Some(reach);
    }

    /// No device of the host is there any more, and with the last one all maps have ended.
    pub fn forget_reach(&self) {
        lock(&self.blocks).reach = None;
    }

    /// From here on no device of the host reaches blocks.
    pub fn unreach(&self) {
        let mut blocks = lock(&self.blocks);
        let region = self.region();
        if let Some(reach) = blocks.reach.take() {
            blocks.list(region).for_each(|block| take_back(&*reach, region.address(block), region.block));
        }
    }

    /// From here on devices of the host reach the blocks that the guest has. Takes as long as the host needs to pin them;
    /// `go_on` is asked between blocks. On a failure none is reached.
    pub fn reach(&self, reach: Arc<dyn Reach>, memory: &GuestMemoryMmap, go_on: &dyn Fn(u64) -> bool) -> Result<(), MemError> {
        let mut blocks = lock(&self.blocks);
        let region = self.region();
        let all: Vec<u64> = blocks.list(region).collect();
        let mut done = Vec::new();
        let mapped = all.iter().try_for_each(|block| {
            let at = region.address(*block);
            let host = host_address(memory, at, region.block).ok_or(MemError::NoMemory { at })?;
            reach.map(at, region.block, host).map_err(|source| MemError::Map { at, source })?;
            done.push(at);
            if go_on(region.block) { Ok(()) } else { Err(MemError::Stopped) }
        });
        if mapped.is_err() {
            done.into_iter().for_each(|at| take_back(&*reach, at, region.block));
        } else {
            blocks.reach = Some(reach);
        }
        mapped
    }

    /// Whom it is told that the host has no memory for a block.
    pub(super) fn report_to(&self, listener: Listener) {
        lock(&self.blocks).complaints.report_to(listener);
    }

    /// The guest takes the `count` blocks at `at`. `broken_off` is asked between blocks, and between pieces of large ones, for
    /// what to answer in place of going on.
    pub(super) fn plug(
        &self,
        at: u64,
        count: u64,
        memory: &GuestMemoryMmap,
        broken_off: &dyn Fn() -> Option<Outcome>,
    ) -> Outcome {
        let Some(mut blocks) = try_lock(&self.blocks) else { return Outcome::Busy };
        let (region, sizes) = *lock(&self.numbers);
        let Some(wanted) = region.blocks(sizes.usable, at, count) else { return Outcome::Error };
        if blocks.state(wanted.clone()) != Plugged::None {
            return Outcome::Error;
        }
        let more = count * region.block;
        if sizes.plugged.saturating_add(more) > sizes.requested {
            return Outcome::Nack;
        }
        let mut done = Vec::new();
        let outcome = wanted.clone().find_map(|block| {
            let at = region.address(block);
            if let Some(outcome) = broken_off() {
                return Some(outcome);
            }
            if let Err(error) = self.prepare(&blocks, memory, at, region.block, broken_off) {
                if let Some(outcome) = broken_off() {
                    return Some(outcome);
                }
                let text = format_args!("the guest cannot have the memory at {at:#x} that it is to have");
                blocks.complaints.fail_error(Level::Warn, text, &error);
                return Some(Outcome::Busy);
            }
            done.push(at);
            None
        });
        if let Some(outcome) = outcome {
            if let Some(reach) = &blocks.reach {
                done.into_iter().for_each(|at| take_back(&**reach, at, region.block));
            }
            return outcome;
        }
        blocks.set(wanted, true);
        lock(&self.numbers).1.plugged = sizes.plugged + more;
        drop(blocks);
        self.tell();
        Outcome::Ack
    }

    fn prepare(
        &self,
        blocks: &Blocks,
        memory: &GuestMemoryMmap,
        at: u64,
        len: u64,
        broken_off: &dyn Fn() -> Option<Outcome>,
    ) -> Result<(), MemError> {
        if self.prefault {
            let populated = pages::populate(memory, GuestAddress(at), len, &|| broken_off().is_none());
            populated.map_err(|source| MemError::Pages { at, source })?;
        }
        let Some(reach) = &blocks.reach else { return Ok(()) };
        let host = host_address(memory, at, len).ok_or(MemError::NoMemory { at })?;
        reach.map(at, len, host).map_err(|source| MemError::Map { at, source })
    }

    /// The guest gives the `count` blocks at `at` back.
    pub(super) fn unplug(&self, at: u64, count: u64, memory: &GuestMemoryMmap) -> Outcome {
        let Some(mut blocks) = try_lock(&self.blocks) else { return Outcome::Busy };
        let (region, sizes) = *lock(&self.numbers);
        let Some(wanted) = region.blocks(sizes.usable, at, count) else { return Outcome::Error };
        if blocks.state(wanted.clone()) != Plugged::All {
            return Outcome::Error;
        }
        self.release(&mut blocks, region, wanted, memory);
        drop(blocks);
        self.tell();
        Outcome::Ack
    }

    /// The guest gives everything back.
    pub(super) fn unplug_all(&self, memory: &GuestMemoryMmap) -> Outcome {
        let Some(mut blocks) = try_lock(&self.blocks) else { return Outcome::Busy };
        let region = self.region();
        let all: Vec<u64> = blocks.list(region).collect();
        for run in all.chunk_by(|one, next| one + 1 == *next) {
            if let (Some(first), Some(last)) = (run.first(), run.last()) {
                self.release(&mut blocks, region, *first..*last + 1, memory);
            }
        }
        drop(blocks);
        self.tell();
        Outcome::Ack
    }

    /// No device reaches the blocks any more, then their pages go.
    fn release(&self, blocks: &mut Blocks, region: Region, which: std::ops::Range<u64>, memory: &GuestMemoryMmap) {
        if let Some(reach) = &blocks.reach {
            which.clone().for_each(|block| take_back(&**reach, region.address(block), region.block));
        }
        let (at, len) = (region.address(which.start), (which.end - which.start) * region.block);
        if let Err(error) = pages::give_back(memory, GuestAddress(at), len) {
            // The guest does not use them all the same.
            blocks.complaints.add_error(Level::Debug, format_args!("cannot give memory at {at:#x} back"), &error);
        }
        blocks.set(which, false);
        let mut numbers = lock(&self.numbers);
        numbers.1.plugged = numbers.1.plugged.saturating_sub(len);
    }

    /// Whether the `count` blocks at `at` are plugged, or why that cannot be said.
    pub(super) fn state(&self, at: u64, count: u64) -> Result<Plugged, Outcome> {
        let blocks = try_lock(&self.blocks).ok_or(Outcome::Busy)?;
        let (region, sizes) = *lock(&self.numbers);
        region.blocks(sizes.usable, at, count).map(|which| blocks.state(which)).ok_or(Outcome::Error)
    }

    fn tell(&self) {
        if let Some(changed) = &*lock(&self.changed) {
            changed();
        }
    }
}

impl Blocks {
    fn has(&self, block: u64) -> bool {
        let word = usize::try_from(block / 64).ok().and_then(|word| self.plugged.get(word));
        word.is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    fn list(&self, region: Region) -> impl Iterator<Item = u64> + '_ {
        (0..region.len / region.block.max(1)).filter(|block| self.has(*block))
    }

    fn state(&self, mut which: std::ops::Range<u64>) -> Plugged {
        let Some(first) = which.next().map(|block| self.has(block)) else { return Plugged::None };
        match first {
            _ if which.any(|block| self.has(block) != first) => Plugged::Some,
            true => Plugged::All,
            false => Plugged::None,
        }
    }

    fn set(&mut self, which: std::ops::Range<u64>, plugged: bool) {
        for block in which {
            let Ok(word) = usize::try_from(block / 64) else { return };
            if word >= self.plugged.len() {
                self.plugged.resize(word + 1, 0);
            }
            if let Some(word) = self.plugged.get_mut(word) {
                let bit = 1 << (block % 64);
                *word = if plugged { *word | bit } else { *word & !bit };
            }
        }
    }
}

fn take_back(reach: &dyn Reach, at: u64, len: u64) {
    if let Err(error) = reach.unmap(at, len) {
        log::error!("{error}");
    }
}

/// Where `len` bytes of guest memory at `at` lie in this process, if they lie in one piece.
fn host_address(memory: &GuestMemoryMmap, at: u64, len: u64) -> Option<u64> {
    let slices = GuestMemory::get_slices(memory, GuestAddress(at), usize::try_from(len).ok()?, Permissions::Write).ok()?;
    let slice = slices.into_iter().next()?.ok()?;
    (slice.len() as u64 == len).then(|| slice.ptr_guard_mut().as_ptr().expose_provenance() as u64)
}

/// `None` while somebody else has it.
fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A block that the guest cannot have.
#[derive(Debug, ThisError)]
pub enum MemError {
    /// Pages.
    #[error("no pages for the block at {at:#x}: the host has not enough free memory")]
    Pages {
        /// The block.
        at: u64,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Devices of the host.
    #[error("devices of the host cannot reach the block at {at:#x}")]
    Map {
        /// The block.
        at: u64,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// Nothing there.
    #[error("there is no memory behind the block at {at:#x}")]
    NoMemory {
        /// The block.
        at: u64,
    },
    /// Somebody wanted it.
    #[error("broken off")]
    Stopped,
}
