//! What a machine stands on and what takes long to get: RAM with its pages, and host functions that may reach it.
//!
//! Opening it takes milliseconds and says what is missing. Laying it takes as long as the host needs for the pages: threads
//! touch RAM piece by piece, and each piece is mapped for the host functions as soon as it is there. Both can be watched
//! and broken off.

mod lay;
mod work;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::config::MemoryConfig;
use arch::memory_map::Range;
use devices::vfio::iommu::DomainError;
use devices::vfio::{Domain, Hardware, HostFunction, VfioError};
use devices::virtio::mem::MemError;
use pci::address::HostBdf;
use thiserror::Error;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

pub use lay::{Lay, fixed, threads, touch_in_background};
pub use work::{Preparation, Work};

use crate::host;
use crate::kvm::{KvmError, Vm};
use crate::memory::file::Use;
use crate::memory::{self, Backing, MemoryError, RamRegion};
use crate::numa::Binding;
use crate::snapshot::SnapshotError;

/// How often clients are told how far memory is.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// What is needed, decided before anything is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// How RAM is backed.
    pub memory: MemoryConfig,
    /// Where the guest has it.
    pub ranges: Vec<Range>,
    /// Which of it is in the file that `memory` names, in this order.
    pub named: Vec<Range>,
    /// Which of it comes from which node of the host.
    pub bindings: Vec<Binding>,
    /// Where blocks of memory come and go; nobody maps these here.
    pub blocks: Vec<Range>,
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
    /// Whether some of it is new.
    fresh: bool,
    /// Host functions.
    pub functions: Functions,
    memory: MemoryConfig,
    blocks: Vec<Range>,
}

/// How memory is backed, without a wish for transparent huge pages.
#[must_use]
pub fn backing(memory: &MemoryConfig) -> Backing {
    let huge_page = memory.hugepages.map(|page| page.size().bytes());
    Backing { shared: memory.shared, huge_page, transparent_huge_pages: false }
}

impl Needs {
    /// RAM in `ranges`, new or in a file.
    fn reserve(&self, ranges: &[Range], backing: Backing) -> Result<GuestMemoryMmap, MemoryError> {
        let (named, rest): (Vec<Range>, Vec<Range>) = ranges.iter().copied().partition(|range| self.named.contains(range));
        match self.named_ram(&named, true)? {
            None => memory::create(&rest, backing),
            Some(named) if rest.is_empty() => Ok(named),
            Some(named) => memory::join(&named, &memory::create(&rest, backing)?),
        }
    }

    /// RAM of a machine that was written down, in `ranges`, which are all that the named file has, if there are some.
    pub fn saved_ram(&self, ranges: &[Range]) -> Result<Option<GuestMemoryMmap>, MemoryError> {
        self.named_ram(ranges, false)
    }

    /// RAM in `ranges`, which are all that the named file has, if there are some. The file `grows` if it has to.
    fn named_ram(&self, ranges: &[Range], grows: bool) -> Result<Option<GuestMemoryMmap>, MemoryError> {
        let (Some(path), false) = (&self.memory.file, ranges.is_empty()) else { return Ok(None) };
        let shared = self.memory.shared;
        let how = Use { shared, grows, pinned: !self.functions.is_empty() };
        let file = memory::file::open(path, ranges.iter().map(Range::len).fold(0, u64::saturating_add), how)?;
        memory::file::map(&file, ranges, shared).map(Some)
    }
}

impl Groundwork {
    /// Reserves RAM, unless the one of a machine before a reset is given, and opens the host functions. Ranges that this RAM
    /// lacks are reserved.
    pub fn open(vm: Vm, needs: &Needs, ram: Option<GuestMemoryMmap>) -> Result<Self, GroundworkError> {
        // A file may hold anything.
        let used = ram.is_some() || !needs.named.is_empty();
        let passthrough = !needs.functions.is_empty();
        let transparent_huge_pages = passthrough || needs.memory.prefault;
        let backing = Backing { transparent_huge_pages, ..backing(&needs.memory) };
        let there = |range: &Range| ram.as_ref().is_some_and(|ram| ram.iter().any(|region| region.start_addr().0 == range.start));
        let missing: Vec<Range> = needs.ranges.iter().filter(|range| !there(range)).copied().collect();
        let ram = match ram {
            Some(ram) if missing.is_empty() => ram,
            ram => {
                let more = needs.reserve(&missing, backing)?;
                let bindings: Vec<Binding> = needs
                    .bindings
                    .iter()
                    .filter(|binding| missing.iter().any(|range| range.contains(binding.range.start)))
                    .cloned()
                    .collect();
                memory::bind(&more, &bindings, backing.huge_page)?;
                match ram {
                    Some(ram) => memory::join(&ram, &more)?,
                    None => more,
                }
            }
        };
        let fresh = !missing.is_empty();
        let mut functions = Functions::default();
        for (at, name) in &needs.functions {
            let domain = match &functions.domain {
                Some(domain) => Arc::clone(domain),
                None => Arc::new(Domain::new(Box::new(vm.vfio_groups()?))?),
            };
            let path = host::scan::directory(Path::new(host::SYSFS), *at);
            let function = HostFunction::open(name, &path, &domain)?;
            functions.domain = Some(domain);
            functions.open.insert(*at, function);
        }
        Ok(Self { vm, ram, used, fresh, functions, memory: needs.memory.clone(), blocks: needs.blocks.clone() })
    }

    /// Whether there is anything to lay.
    #[must_use]
    pub fn is_laid(&self) -> bool {
        !self.touches() && self.functions.domain.is_none()
    }

    /// RAM of a machine before a reset has its pages. What devices reach is pinned, so it is touched in any case, by several
    /// threads instead of the one that maps it.
    const fn touches(&self) -> bool {
        self.fresh && (self.memory.prefault || self.functions.domain.is_some())
    }

    fn regions(&self) -> Vec<RamRegion> {
        fixed(&self.ram, &self.blocks)
    }

    /// What laying it is.
    #[must_use]
    pub fn work(&self) -> Work {
        Work::new(self.touches(), self.functions.domain.is_some(), self.regions().iter().map(|region| region.len).sum())
    }

    /// Lays it, on this thread and some of its own. Returns when all is done, or soon after `work` was told to stop.
    pub fn lay(&self, work: &Work) -> Result<(), GroundworkError> {
        let wanted = || self.memory.prefault_threads.map_or_else(threads, |threads| threads.get().into());
        Lay {
            regions: self.regions(),
            threads: if self.touches() { wanted() } else { 0 },
            domain: self.functions.domain.as_deref(),
            page: self.memory.hugepages.map_or(0, |page| page.size().bytes()),
        }
        .run(work)
    }

    /// Begins to lay it on a thread of its own.
    pub fn start(self) -> Result<Preparation<Self>, GroundworkError> {
        Preparation::start(self.work(), move |work| self.lay(work).map(|()| self))
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
    /// Blocks of memory devices.
    #[error(transparent)]
    Blocks(#[from] MemError),
    /// A snapshot.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// Somebody wanted it.
    #[error("the preparation of memory was broken off")]
    Stopped,
    /// A thread or its event.
    #[error("cannot start a thread to prepare memory: the limit of processes or open files is reached (ulimit -u, -n)")]
    Thread(#[source] io::Error),
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use api::config::Size;
    use api::info::{Progress, Step};

    use super::*;

    fn needs(bytes: u64, memory: MemoryConfig) -> Needs {
        let ranges = vec![Range { start: 0, end: bytes }];
        Needs {
            memory: MemoryConfig { size: Size(bytes), ..memory },
            ranges,
            named: Vec::new(),
            bindings: Vec::new(),
            blocks: Vec::new(),
            functions: BTreeMap::new(),
        }
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
        let laying = ground.start().unwrap();
        while !laying.is_done() {
            thread::yield_now();
        }
        assert_eq!(laying.progress(), Progress { step: Step::Prefault, done: bytes, total: bytes });
        let ground = laying.finish().unwrap();
        // RAM of a machine that ran is not touched again.
        let again = Groundwork::open(Vm::new().unwrap(), &needs(bytes, prefault(3)), Some(ground.ram)).unwrap();
        assert!(again.is_laid() && again.used);
    }

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn case_f2_preparation_that_is_not_wanted_any_more_ends_within_a_piece() {
        let ground = Groundwork::open(Vm::new().unwrap(), &needs(1 << 40, prefault(1)), None).unwrap();
        let laying = ground.start().unwrap();
        while laying.progress().done == 0 {
            thread::yield_now();
        }
        let progress = laying.progress();
        assert_eq!((progress.step, progress.total), (Step::Prefault, 1 << 40));
        let start = Instant::now();
        drop(laying);
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }
}
