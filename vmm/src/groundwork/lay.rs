//! Touches memory on several threads and maps it for host functions, piece by piece: each as soon as it is there.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;

use arch::memory_map::Range;
use devices::populate::populate;
use devices::vfio::Domain;
use pci::sync::{lock, wait};
use vm_memory::GuestMemoryMmap;

use super::{GroundworkError, Work};
use crate::memory::{self, MemoryError, RamRegion};

/// What is touched and mapped at once: small enough to report progress and to be broken off soon, large enough that even
/// terabytes are few maps.
const PIECE: u64 = 256 << 20;

/// What is to be done.
pub struct Lay<'a> {
    /// Which memory.
    pub regions: Vec<RamRegion>,
    /// With how many threads it is touched; 0 for memory that has its pages, or need not have them.
    pub threads: usize,
    /// What it is mapped in.
    pub domain: Option<&'a Domain>,
    /// Bytes of its pages.
    pub page: u64,
}

impl Lay<'_> {
    /// Does it, on this thread and some of its own. Returns when all is done, or soon after `work` was told to stop.
    /// Nothing stays mapped if it fails.
    pub fn run(&self, work: &Work) -> Result<(), GroundworkError> {
        let pieces = pieces(&self.regions, self.page.max(PIECE));
        let touching =
            Touching { pieces: &pieces, next: AtomicUsize::new(0), touched: Mutex::default(), changed: Condvar::new(), work };
        thread::scope(|scope| {
            for n in 0..self.threads.min(pieces.len()) {
                let thread = thread::Builder::new().name(format!("prep{n}")).spawn_scoped(scope, || touching.touch());
                if let (Err(error), 0) = (thread, n) {
                    touching.fail(0, error);
                }
            }
            let mut mapped = Vec::new();
            let laid = pieces.iter().enumerate().try_for_each(|(index, piece)| {
                if self.threads > 0 {
                    touching.wait_for(index)?;
                }
                if work.is_stopped() {
                    return Err(GroundworkError::Stopped);
                }
                if let Some(domain) = self.domain {
                    map(domain, piece)?;
                    mapped.push(piece);
                    work.has_mapped(piece.len);
                }
                Ok(())
            });
            if laid.is_err() {
                // The threads that touch have nothing to do any more.
                work.stop();
                for piece in mapped {
                    if let Some(Err(error)) = self.domain.map(|domain| domain.unmap(piece.at, piece.len)) {
                        log::error!("{error}");
                    }
                }
            }
            laid
        })
    }
}

/// Touches memory of a guest that runs, on this thread and in no hurry: whoever pins it later finds its pages there.
pub fn touch_in_background(regions: &[RamRegion], work: &Work) -> Result<(), GroundworkError> {
    // This thread's alone (nice(2) of Linux). It goes on as fast as it can if that is not possible.
    if let Err(error) = rustix::process::nice(19) {
        log::debug!("memory is not touched at a lower priority: {error}");
    }
    let progress = |bytes| {
        work.has_touched(bytes);
        !work.is_stopped()
    };
    pieces(regions, TOUCH).iter().try_for_each(|piece| {
        populate(piece.host, piece.len, &progress).map_err(|source| match work.is_stopped() {
            true => GroundworkError::Stopped,
            false => MemoryError::Prefault { at: piece.at, len: piece.len, source }.into(),
        })
    })
}

/// What is touched in the background at once: short enough that the end of a machine does not wait for it.
const TOUCH: u64 = 16 << 20;

/// How many threads touch memory if nobody says it.
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get).min(16)
}

/// The parts of `ram` that are all in place: a memory device has its blocks mapped one by one, as they come.
#[must_use]
pub fn fixed(ram: &GuestMemoryMmap, blocks: &[Range]) -> Vec<RamRegion> {
    let in_blocks = |region: &RamRegion| blocks.iter().any(|range| range.contains(region.at));
    memory::regions(ram).into_iter().filter(|region| !in_blocks(region)).collect()
}

fn pieces(regions: &[RamRegion], piece: u64) -> Vec<RamRegion> {
    let cut = |region: &RamRegion| {
        let (region, count) = (*region, region.len.div_ceil(piece));
        (0..count).map(move |n| {
            let offset = n * piece;
            RamRegion { at: region.at + offset, len: piece.min(region.len - offset), host: region.host + offset }
        })
    };
    regions.iter().flat_map(cut).collect()
}

fn map(domain: &Domain, region: &RamRegion) -> Result<(), GroundworkError> {
    // SAFETY: the machine keeps RAM mapped until its DMA domain has ended.
    unsafe { domain.map(region.at, region.len, region.host, "RAM") }.map_err(GroundworkError::Ram)
}

/// Threads that touch pieces in their order, and the one that waits for them.
struct Touching<'a> {
    pieces: &'a [RamRegion],
    next: AtomicUsize,
    touched: Mutex<Touched>,
    changed: Condvar,
    work: &'a Work,
}

#[derive(Default)]
struct Touched {
    done: Vec<bool>,
    failed: Option<(usize, io::Error)>,
}

impl Touching<'_> {
    fn touch(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = self.pieces.get(index) else { return };
            let progress = |bytes| {
                self.work.has_touched(bytes);
                !self.work.is_stopped()
            };
            match populate(piece.host, piece.len, &progress) {
                Ok(()) => {
                    let mut touched = lock(&self.touched);
                    touched.done.resize(self.pieces.len(), false);
                    if let Some(done) = touched.done.get_mut(index) {
                        *done = true;
                    }
                    drop(touched);
                    self.changed.notify_all();
                }
                Err(error) => return self.fail(index, error),
            }
        }
    }

    fn fail(&self, index: usize, error: io::Error) {
        lock(&self.touched).failed.get_or_insert((index, error));
        self.changed.notify_all();
    }

    fn wait_for(&self, index: usize) -> Result<(), GroundworkError> {
        let mut touched = lock(&self.touched);
        loop {
            if touched.done.get(index).copied().unwrap_or(false) {
                return Ok(());
            }
            if let Some((index, source)) = touched.failed.take() {
                if self.work.is_stopped() {
                    return Err(GroundworkError::Stopped);
                }
                let piece = self.pieces.get(index).map_or((0, 0), |piece| (piece.at, piece.len));
                return Err(MemoryError::Prefault { at: piece.0, len: piece.1, source }.into());
            }
            touched = wait(&self.changed, touched);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Backing;

    #[test]
    fn pieces_cover_every_region_once() {
        let ranges = [Range { start: 0, end: 600 << 20 }, Range { start: 4 << 30, end: (4 << 30) + 4096 }];
        let ram = memory::create(&ranges, Backing::default()).unwrap();
        let cut = |regions: &[RamRegion]| {
            pieces(regions, 256 << 20).iter().map(|piece| (piece.at >> 20, piece.len >> 12)).collect::<Vec<_>>()
        };
        assert_eq!(cut(&fixed(&ram, &[])), [(0, 65536), (256, 65536), (512, 22528), (4096, 1)]);
        assert_eq!(cut(&fixed(&ram, &[Range { start: 3 << 30, end: 8 << 30 }])), [(0, 65536), (256, 65536), (512, 22528)]);
    }
}
