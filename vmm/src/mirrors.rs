//! Memory for the mirrors of configuration space: one page for each emulated function, shown to the guest read-only, so that
//! its configuration reads never exit.
//!
//! Pages of neighbouring functions lie side by side, so that a device with several functions needs one memory slot.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use devices::complaints::Complaints;
use log::Level;
use pci::access::{Lanes, Reg};
use pci::function::FunctionId;
use pci::mirror::Mirror;
use thiserror::Error;
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

use crate::kvm::Slots;

/// Bytes of a function's configuration space, and of its page.
const PAGE: u64 = 4096;
const PAGE_LEN: usize = 4096;

/// The pages of a machine's functions, and which of them the guest has.
pub struct Mirrors {
    pages: Arc<MmapRegion>,
    /// By address in ECAM.
    functions: BTreeMap<u64, FunctionId>,
    /// Which page each function has.
    numbers: BTreeMap<FunctionId, usize>,
    /// Pages for functions to come.
    spare: Vec<usize>,
    in_place: BTreeSet<FunctionId>,
    slots: BTreeMap<u64, (u64, u32)>,
    /// A guest renumbers buses as often as it likes.
    complaints: Complaints,
}

impl Mirrors {
    /// One page for each function, given with its address in ECAM, and `spare` ones for functions to come. Pages that nothing
    /// is stored in take no memory.
    pub fn new(functions: BTreeMap<u64, FunctionId>, spare: usize) -> Result<Self, MirrorsError> {
        let count = functions.len().saturating_add(spare);
        let len = count.max(1).saturating_mul(PAGE_LEN);
        let pages = MmapRegion::new(len).map_err(|error| MirrorsError { count, source: io::Error::other(error) })?;
        let spare = (functions.len()..count).rev().collect();
        // In the order of addresses, so that neighbours have neighbouring pages.
        let numbers = functions.values().copied().zip(0..).collect();
        Ok(Self {
            pages: Arc::new(pages),
            functions,
            numbers,
            spare,
            in_place: BTreeSet::new(),
            slots: BTreeMap::new(),
            complaints: Complaints::default(),
        })
    }

    /// The mirror of `function`; `None` if it has no page.
    #[must_use]
    pub fn page(&self, function: FunctionId) -> Option<Arc<dyn Mirror>> {
        let page = self.numbers.get(&function)?;
        Some(Arc::new(Page { pages: Arc::clone(&self.pages), at: page.saturating_mul(PAGE_LEN) }))
    }

    /// Gives a page to a function that comes to `at` in ECAM. `None` when there is none to spare, or the place is taken.
    pub fn add(&mut self, at: u64, function: FunctionId) -> Option<Arc<dyn Mirror>> {
        if self.functions.contains_key(&at) {
            return None;
        }
        let page = self.spare.pop()?;
        // What had it before left ones in it.
        self.pages.get_slice(page.saturating_mul(PAGE_LEN), PAGE_LEN).ok()?.copy_from(&[0u8; PAGE_LEN]);
        self.functions.insert(at, function);
        self.numbers.insert(function, page);
        self.page(function)
    }

    /// Takes the page of a function back that has left. Its slot goes first.
    pub fn remove(&mut self, function: FunctionId, slots: &mut Slots) {
        self.place(function, false);
        self.settle(slots);
        self.functions.retain(|_, id| *id != function);
        self.spare.extend(self.numbers.remove(&function));
    }

    /// Takes note that the page of `function` is, or is no more, where reads reach the function.
    pub fn place(&mut self, function: FunctionId, on: bool) {
        if on {
            self.in_place.insert(function);
        } else {
            self.in_place.remove(&function);
        }
    }

    /// Brings the memory slots to what was noted: one for each run of neighbouring pages.
    pub fn settle(&mut self, slots: &mut Slots) {
        let runs = self.runs();
        let gone: Vec<u64> =
            self.slots.iter().filter(|(at, (len, _))| runs.get(*at).map(|run| run.0) != Some(*len)).map(|(at, _)| *at).collect();
        for at in gone {
            if let Some((_, slot)) = self.slots.remove(&at) {
                slots.remove(slot);
            }
        }
        for (at, (len, host)) in runs {
            if self.slots.contains_key(&at) {
                continue;
            }
            // SAFETY: the pages are kept by the mapper, which ends after the vCPUs; the guest only reads them.
            match unsafe { slots.add_read_only(at, len, host) } {
                Ok(slot) => {
                    self.slots.insert(at, (len, slot));
                }
                Err(error) => {
                    let text = format_args!("configuration reads at {at:#x} exit");
                    self.complaints.add_error(Level::Warn, text, &error);
                }
            }
        }
    }

    /// Runs of neighbouring pages in place: address, bytes and address in this process.
    fn runs(&self) -> BTreeMap<u64, (u64, u64)> {
        let mut runs: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        let base = self.pages.as_ptr().expose_provenance() as u64;
        for (at, function) in &self.functions {
            let Some(page) = self.numbers.get(function).filter(|_| self.in_place.contains(function)) else { continue };
            let host = base + *page as u64 * PAGE;
            match runs.last_entry() {
                Some(mut run) if run.key() + run.get().0 == *at && run.get().1 + run.get().0 == host => run.get_mut().0 += PAGE,
                _ => {
                    runs.insert(*at, (PAGE, host));
                }
            }
        }
        runs
    }
}

struct Page {
    pages: Arc<MmapRegion>,
    at: usize,
}

impl Mirror for Page {
    fn store(&self, reg: Reg, lanes: Lanes, value: u32) {
        let at = self.at + usize::from(reg.offset());
        let Ok(slice) = self.pages.get_slice(at, 4) else { return };
        // Whole dwords in one store, so that a guest never reads half of one.
        let stored = if lanes == Lanes::ALL {
            slice.store(value, 0, Ordering::Release)
        } else {
            let mut bytes = (0..4u8).zip(value.to_le_bytes()).filter(|(lane, _)| lanes.touch(0xFF << (8 * u32::from(*lane))));
            bytes.try_for_each(|(lane, byte)| slice.store(byte, lane.into(), Ordering::Release))
        };
        if let Err(error) = stored {
            log::error!("cannot show a configuration register: {error}");
        }
    }
}

/// Pages that cannot be had.
#[derive(Debug, Error)]
#[error(
    "cannot map {count} pages of configuration space; if the limit of virtual memory is reached, raise it (ulimit -v), or give --pcie mirror=off"
)]
pub struct MirrorsError {
    count: usize,
    #[source]
    source: io::Error,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_takes_dwords_and_single_bytes() {
        let mirrors = Mirrors::new(BTreeMap::from([(0, FunctionId(7)), (PAGE, FunctionId(3))]), 0).unwrap();
        let page = mirrors.page(FunctionId(3)).unwrap();
        page.store(Reg::containing(4), Lanes::ALL, 0x0010_0006);
        page.store(Reg::containing(4), Lanes::new(2, 1), 0xFF18_FFFF);
        let mut read = [0; 4];
        mirrors.pages.get_slice(4096 + 4, 4).unwrap().read_slice(&mut read, 0).unwrap();
        assert_eq!(u32::from_le_bytes(read), 0x0018_0006);
    }

    #[test]
    fn a_page_that_had_another_function_shows_nothing_of_it() {
        let mut mirrors = Mirrors::new(BTreeMap::new(), 1).unwrap();
        let page = mirrors.add(PAGE, FunctionId(1)).unwrap();
        page.store(Reg::containing(0x40), Lanes::ALL, u32::MAX);
        mirrors.functions.clear();
        mirrors.spare.extend(mirrors.numbers.remove(&FunctionId(1)));
        mirrors.add(0, FunctionId(2)).unwrap();
        let mut read = [0xFF; PAGE_LEN];
        mirrors.pages.get_slice(0, PAGE_LEN).unwrap().read_slice(&mut read, 0).unwrap();
        assert_eq!(read, [0; PAGE_LEN]);
    }

    #[test]
    fn neighbours_share_a_run_and_a_page_that_leaves_splits_it() {
        let functions = (0..4).map(|n| (0x1000 * u64::from(n), FunctionId(n))).chain([(0x8000, FunctionId(9))]);
        let mut mirrors = Mirrors::new(functions.collect(), 1).unwrap();
        let lengths = |mirrors: &Mirrors| mirrors.runs().iter().map(|(at, (len, _))| (*at, *len)).collect::<Vec<_>>();
        assert_eq!(lengths(&mirrors), []);
        for id in [0, 1, 2, 3, 9] {
            mirrors.place(FunctionId(id), true);
        }
        assert_eq!(lengths(&mirrors), [(0, 0x4000), (0x8000, 0x1000)]);
        mirrors.place(FunctionId(1), false);
        assert_eq!(lengths(&mirrors), [(0, 0x1000), (0x2000, 0x2000), (0x8000, 0x1000)]);
        assert!(mirrors.add(0x2000, FunctionId(10)).is_none(), "the place is taken");
        assert!(mirrors.add(0x4000, FunctionId(10)).is_some());
        assert!(mirrors.add(0x5000, FunctionId(11)).is_none(), "no page is left");
        mirrors.place(FunctionId(10), true);
        assert!(lengths(&mirrors).contains(&(0x4000, 0x1000)), "its page lies elsewhere");
    }
}
