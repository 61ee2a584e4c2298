//! What a machine stands on and what takes long to get: RAM with its pages, and host functions that may reach it.
//!
//! Opening it takes milliseconds and says what is missing. Laying it takes as long as the host needs for the pages: threads
//! touch RAM piece by piece, and each piece is mapped for the host functions as soon as it is there. Both can be watched
//! and broken off.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use api::config::MemoryConfig;
use api::info::{Progress, Step};
use arch::memory_map::Range;
use devices::vfio::iommu::DomainError;
use devices::vfio::{Domain, Hardware, HostFunction, VfioError};
use pci::address::HostBdf;
use thiserror::Error;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::host;
use crate::kvm::{KvmError, Vm};
use crate::memory::{self, Backing, MemoryError, RamRegion};
use crate::numa::Binding;
use crate::signals::Signals;

/// What is needed, decided before anything is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// How RAM is backed.
    pub memory: MemoryConfig,
    /// Where the guest has it.
    pub ranges: Vec<Range>,
    /// Which of it comes from which node of the host.
    pub bindings: Vec<Binding>,
    /// Host functions by address, with their names.
    pub functions: BTreeMap<HostBdf, String>,
}

/// Host functions that are open and not in a machine yet, and the domain that they share.
#[derive(Default)]
pub struct Functions {
    /// `None` as long as there was no function.
    pub domain: Option<Arc<Domain>>,
    /// By address.
    pub open: BTreeMap<HostBdf, HostFunction<Hardware>>,
}

/// What a machine stands on.
pub struct Groundwork {
    /// The VM, with nothing in it.
    pub vm: Vm,
    /// RAM.
    pub ram: GuestMemoryMmap,
    /// Whether a machine has run in this RAM.
    pub used: bool,
    /// Host functions.
    pub functions: Functions,
    memory: MemoryConfig,
}

impl Groundwork {
    /// Reserves RAM, unless the one of a machine before a reset is given, and opens the host functions.
    pub fn open(vm: Vm, needs: &Needs, ram: Option<GuestMemoryMmap>) -> Result<Self, GroundworkError> {
        let used = ram.is_some();
        let passthrough = !needs.functions.is_empty();
        let ram = match ram {
            Some(ram) => ram,
            None => {
                let backing = Backing {
                    shared: needs.memory.shared,
                    huge_page: needs.memory.hugepages.map(|page| page.size().bytes()),
                    transparent_huge_pages: passthrough || needs.memory.prefault,
                };
                let ram = memory::create(&needs.ranges, backing)?;
                memory::bind(&ram, &needs.bindings, backing.huge_page)?;
                ram
            }
        };
        let mut functions = Functions::default();
        for (at, name) in &needs.functions {
            let domain = match &functions.domain {
                Some(domain) => Arc::clone(domain),
                None => Arc::new(Domain::new(Some(vm.create_vfio_device()?))?),
            };
            let path = host::scan::directory(Path::new(host::SYSFS), *at);
            let function = HostFunction::open(name, &path, &domain)?;
            functions.domain = Some(domain);
            functions.open.insert(*at, function);
        }
        Ok(Self { vm, ram, used, functions, memory: needs.memory.clone() })
    }

    /// Whether there is anything to lay.
    #[must_use]
    pub fn is_laid(&self) -> bool {
        !self.touches() && self.functions.domain.is_none()
    }

    /// RAM of a machine before a reset has its pages. What devices reach is pinned, so it is touched in any case, by several
    /// threads instead of the one that maps it.
    const fn touches(&self) -> bool {
        !self.used && (self.memory.prefault || self.functions.domain.is_some())
    }

    /// Lays it, on this thread and some of its own. Returns when all is done, or soon after `work` was told to stop.
    pub fn lay(&self, work: &Work) -> Result<(), GroundworkError> {
        let pieces = pieces(&self.ram, self.piece());
        let touching =
            Touching { pieces: &pieces, next: AtomicUsize::new(0), touched: Mutex::default(), changed: Condvar::new(), work };
        thread::scope(|scope| {
            if self.touches() {
                let cpus = thread::available_parallelism().map_or(1, |cpus| u16::try_from(cpus.get()).unwrap_or(u16::MAX));
                let threads = self.memory.prefault_threads.map_or(cpus.min(16), std::num::NonZero::get);
                for n in 0..usize::from(threads).min(pieces.len()) {
                    let thread = thread::Builder::new().name(format!("prep{n}")).spawn_scoped(scope, || touching.touch());
                    if let (Err(error), 0) = (thread, n) {
                        touching.fail(0, error);
                    }
                }
            }
            let laid = pieces.iter().enumerate().try_for_each(|(index, piece)| {
                if self.touches() {
                    touching.wait_for(index)?;
                }
                if work.is_stopped() {
                    return Err(GroundworkError::Stopped);
                }
                if let Some(domain) = &self.functions.domain {
                    map(domain, piece)?;
                    work.mapped.fetch_add(piece.len, Ordering::Relaxed);
                }
                Ok(())
            });
            if laid.is_err() {
                // The threads that touch have nothing to do any more.
                work.stop();
            }
            laid
        })
    }

    fn piece(&self) -> u64 {
        self.memory.hugepages.map_or(PIECE, |page| page.size().bytes().max(PIECE))
    }
}

/// What is touched and mapped at once: small enough to report progress and to be broken off soon, large enough that even
/// terabytes are few maps.
const PIECE: u64 = 256 << 20;

fn pieces(ram: &GuestMemoryMmap, piece: u64) -> Vec<RamRegion> {
    let cut = |region: RamRegion| {
        let count = region.len.div_ceil(piece);
        (0..count).map(move |n| {
            let offset = n * piece;
            RamRegion { at: region.at + offset, len: piece.min(region.len - offset), host: region.host + offset }
        })
    };
    memory::regions(ram).into_iter().flat_map(cut).collect()
}

/// Lets host functions reach all of RAM, at once. For those that come while the guest runs.
pub fn map_ram(domain: &Domain, ram: &GuestMemoryMmap) -> Result<(), GroundworkError> {
    memory::regions(ram).iter().try_for_each(|region| map(domain, region))
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
                self.work.touched.fetch_add(bytes, Ordering::Relaxed);
                !self.work.is_stopped()
            };
            match memory::populate(piece.host, piece.len, &progress) {
                Ok(()) => {
                    let mut touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.touched.lock().unwrap_or_else(PoisonError::into_inner).failed.get_or_insert((index, error));
        self.changed.notify_all();
    }

    fn wait_for(&self, index: usize) -> Result<(), GroundworkError> {
        let mut touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner);
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
            touched = self.changed.wait(touched).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// How far it is, and whether it is to go on.
#[derive(Debug, Default)]
pub struct Work {
    touches: bool,
    total: u64,
    touched: AtomicU64,
    mapped: AtomicU64,
    stopped: AtomicBool,
}

impl Work {
    /// All of `ground` is to be done.
    #[must_use]
    pub fn of(ground: &Groundwork) -> Self {
        let total = memory::regions(&ground.ram).iter().map(|region| region.len).sum();
        Self { touches: ground.touches(), total, ..Self::default() }
    }

    /// Breaks it off.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || Signals::came()
    }

    /// What is under way.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let (total, touched) = (self.total, self.touched.load(Ordering::Relaxed));
        if self.touches && touched < total {
            Progress { step: Step::Prefault, done: touched, total }
        } else {
            Progress { step: Step::DmaMap, done: self.mapped.load(Ordering::Relaxed), total }
        }
    }
}

/// Groundwork that is being laid.
pub struct Laying {
    work: Arc<Work>,
    done: Arc<EventFd>,
    thread: Option<JoinHandle<Result<Groundwork, GroundworkError>>>,
}

impl Laying {
    /// Begins.
    pub fn start(ground: Groundwork) -> Result<Self, GroundworkError> {
        let done = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(GroundworkError::Thread)?);
        let work = Arc::new(Work::of(&ground));
        let (theirs, told) = (Arc::clone(&work), Arc::clone(&done));
        let lay = move || {
            let laid = ground.lay(&theirs);
            let _ = told.write(1);
            laid.map(|()| ground)
        };
        let thread = thread::Builder::new().name("prep".to_owned()).spawn(lay).map_err(GroundworkError::Thread)?;
        Ok(Self { work, done, thread: Some(thread) })
    }

    /// Readable when it has ended.
    #[must_use]
    pub fn event(&self) -> &EventFd {
        &self.done
    }

    /// Has it end soon, without a wait for it.
    pub fn stop(&self) {
        self.work.stop();
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.work.progress()
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Result<Groundwork, GroundworkError> {
        let thread = self.thread.take().ok_or(GroundworkError::Stopped)?;
        thread.join().unwrap_or_else(|_| Err(GroundworkError::Thread(io::Error::other("a thread ended early"))))
    }
}

impl Drop for Laying {
    /// Breaks it off; takes as long as a piece does.
    fn drop(&mut self) {
        self.work.stop();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// What the host cannot give.
#[derive(Debug, Error)]
pub enum GroundworkError {
    /// RAM.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The DMA domain.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// KVM's side of it.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A host function.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// RAM cannot be mapped for DMA.
    #[error("cannot let the passed-through devices reach RAM")]
    Ram(#[source] DomainError),
    /// Somebody wanted it.
    #[error("the preparation of memory was broken off")]
    Stopped,
    /// A thread or its event.
    #[error("cannot start a thread to prepare memory: the limit of processes or open files is reached (ulimit -u, -n)")]
    Thread(#[source] io::Error),
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use api::config::Size;

    use super::*;

    fn needs(bytes: u64, memory: MemoryConfig) -> Needs {
        let ranges = vec![Range { start: 0, end: bytes }];
        Needs { memory: MemoryConfig { size: Size(bytes), ..memory }, ranges, bindings: Vec::new(), functions: BTreeMap::new() }
    }

    fn prefault(threads: u16) -> MemoryConfig {
        MemoryConfig { prefault: true, prefault_threads: std::num::NonZeroU16::new(threads), ..MemoryConfig::default() }
    }

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn memory_that_nobody_wants_touched_is_laid_at_once() {
        let ground = Groundwork::open(Vm::new().unwrap(), &needs(4 << 40, MemoryConfig::default()), None).unwrap();
        assert!(ground.is_laid() && !ground.used);
    }

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn every_byte_is_touched_and_told_of() {
        let bytes = (256 << 20) + (1 << 20);
        let ground = Groundwork::open(Vm::new().unwrap(), &needs(bytes, prefault(3)), None).unwrap();
        assert!(!ground.is_laid());
        let laying = Laying::start(ground).unwrap();
        let work = Arc::clone(&laying.work);
        let ground = laying.finish().unwrap();
        assert_eq!(work.touched.load(Ordering::Relaxed), bytes);
        // RAM of a machine that ran is not touched again.
        let again = Groundwork::open(Vm::new().unwrap(), &needs(bytes, prefault(3)), Some(ground.ram)).unwrap();
        assert!(again.is_laid() && again.used);
    }

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn case_f2_preparation_that_is_not_wanted_any_more_ends_within_a_piece() {
        let ground = Groundwork::open(Vm::new().unwrap(), &needs(1 << 40, prefault(1)), None).unwrap();
        let laying = Laying::start(ground).unwrap();
        while laying.progress().done == 0 {
            thread::yield_now();
        }
        let progress = laying.progress();
        assert_eq!((progress.step, progress.total), (Step::Prefault, 1 << 40));
        let start = Instant::now();
        drop(laying);
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }

    #[test]
    fn pieces_cover_every_region_once() {
        let ranges = [Range { start: 0, end: 600 << 20 }, Range { start: 4 << 30, end: (4 << 30) + 4096 }];
        let ram = memory::create(&ranges, Backing::default()).unwrap();
        let cut: Vec<_> = pieces(&ram, 256 << 20).iter().map(|piece| (piece.at >> 20, piece.len >> 12)).collect();
        assert_eq!(cut, [(0, 65536), (256, 65536), (512, 22528), (4096, 1)]);
    }
}
