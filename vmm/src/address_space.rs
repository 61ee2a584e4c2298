//! Who answers at a guest-physical address: RAM, a BAR's memory, or a function that is asked.
//!
//! vCPUs come here with accesses that left the guest; emulated devices come here with their DMA. The lock is held while a
//! window is looked up; a function is called after it is released.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pci::bar::BarIndex;
use pci::function::{Pages, PciFunction, Shared};
use pci::seams::{DmaError, DmaPort};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, VolatileSlice};

/// What answers in a window.
#[derive(Clone)]
pub enum Answer {
    /// The function, at `offset` of its BAR.
    Function {
        /// Which.
        function: Shared,
        /// Which BAR.
        bar: BarIndex,
        /// From the BAR's start.
        offset: u64,
    },
    /// Memory of this process.
    Memory(Pages),
}

struct Window {
    len: u64,
    answer: Answer,
}

/// Guest-physical memory outside RAM's slots, and RAM for those who do not run in the guest.
pub struct AddressSpace {
    ram: GuestMemoryMmap,
    windows: RwLock<BTreeMap<u64, Window>>,
}

impl AddressSpace {
    /// RAM and no windows.
    #[must_use]
    pub fn new(ram: GuestMemoryMmap) -> Arc<Self> {
        Arc::new(Self { ram, windows: RwLock::default() })
    }

    /// Opens a window. The caller keeps windows from overlapping; memory stays mapped until the window is closed.
    pub fn open(&self, at: u64, len: u64, answer: Answer) {
        self.write_windows().insert(at, Window { len, answer });
    }

    /// Closes the window that starts at `at`. No access to its memory is under way when this returns.
    pub fn close(&self, at: u64) {
        self.write_windows().remove(&at);
    }

    /// Reads 1 to 8 bytes for a vCPU; all ones where nobody answers or the access straddles a window's end.
    pub fn read(&self, at: u64, data: &mut [u8]) {
        if self.read_window(at, data).is_none() {
            data.fill(0xFF);
        }
    }

    /// Writes 1 to 8 bytes for a vCPU; dropped where nobody answers or the access straddles a window's end.
    pub fn write(&self, at: u64, data: &[u8]) {
        let _ = self.write_window(at, data);
    }

    fn read_window(&self, at: u64, data: &mut [u8]) -> Option<()> {
        let (function, bar, offset) = {
            let windows = self.read_windows();
            let (answer, inside) = find(&windows, at, data.len())?;
            match answer {
                Answer::Memory(pages) => return volatile(*pages, inside, data.len())?.read_slice(data, 0).ok(),
                Answer::Function { function, bar, offset } => (Arc::clone(function), *bar, offset + inside),
            }
        };
        lock(&function).bar_read(bar, offset, data);
        Some(())
    }

    fn write_window(&self, at: u64, data: &[u8]) -> Option<()> {
        let (function, bar, offset) = {
            let windows = self.read_windows();
            let (answer, inside) = find(&windows, at, data.len())?;
            match answer {
                Answer::Memory(pages) => return volatile(*pages, inside, data.len())?.write_slice(data, 0).ok(),
                Answer::Function { function, bar, offset } => (Arc::clone(function), *bar, offset + inside),
            }
        };
        lock(&function).bar_write(bar, offset, data);
        Some(())
    }

    fn read_windows(&self) -> RwLockReadGuard<'_, BTreeMap<u64, Window>> {
        self.windows.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_windows(&self) -> RwLockWriteGuard<'_, BTreeMap<u64, Window>> {
        self.windows.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The window that holds all `len` bytes from `at`, and how far into it they start.
fn find(windows: &BTreeMap<u64, Window>, at: u64, len: usize) -> Option<(&Answer, u64)> {
    let (start, window) = windows.range(..=at).next_back()?;
    let inside = at - start;
    let end = inside.checked_add(u64::try_from(len).ok()?)?;
    (end <= window.len).then_some((&window.answer, inside))
}

fn volatile<'a>(pages: Pages, offset: u64, len: usize) -> Option<VolatileSlice<'a>> {
    let address = usize::try_from(pages.host_address.checked_add(offset)?).ok()?;
    // SAFETY: `find` keeps offset and length inside the window, whose memory stays mapped while it is open; the read lock
    // that the callers hold keeps it open. Guests write to the same bytes, hence volatile.
    Some(unsafe { VolatileSlice::new(std::ptr::with_exposed_provenance_mut(address), len) })
}

fn lock(function: &Shared) -> std::sync::MutexGuard<'_, dyn PciFunction + 'static> {
    function.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An emulated function's DMA: the same addresses as a vCPU's, while bus mastering is on.
pub struct BusMaster {
    space: Arc<AddressSpace>,
    enabled: Arc<AtomicBool>,
}

impl BusMaster {
    /// Requests into `space` while `enabled` is set.
    #[must_use]
    pub const fn new(space: Arc<AddressSpace>, enabled: Arc<AtomicBool>) -> Self {
        Self { space, enabled }
    }

    /// Cuts a request at page boundaries, so that each part lies in one window or one range of RAM.
    fn parts(at: u64, len: usize) -> Result<impl Iterator<Item = (u64, std::ops::Range<usize>)>, DmaError> {
        const PAGE: usize = 4096;
        let bytes = u64::try_from(len).unwrap_or(u64::MAX);
        at.checked_add(bytes).ok_or(DmaError::Unreachable { at, len: bytes })?;
        let mut done = 0;
        Ok(std::iter::from_fn(move || {
            let here = at + u64::try_from(done).ok()?;
            let room = PAGE - usize::try_from(here % 4096).ok()?;
            let part = done..len.min(done + room);
            done = part.end;
            (!part.is_empty()).then_some((here, part))
        }))
    }

    fn check(&self) -> Result<(), DmaError> {
        if self.enabled.load(Ordering::Acquire) { Ok(()) } else { Err(DmaError::BusMasterOff) }
    }
}

impl DmaPort for BusMaster {
    fn read(&self, at: u64, data: &mut [u8]) -> Result<(), DmaError> {
        for (at, part) in Self::parts(at, data.len())? {
            self.check()?;
            let Some(data) = data.get_mut(part) else { break };
            let unreachable = DmaError::Unreachable { at, len: data.len() as u64 };
            if self.space.ram.read_slice(data, GuestAddress(at)).is_err() {
                in_eights(at, data.len(), |at, range| self.space.read_window(at, data.get_mut(range)?)).ok_or(unreachable)?;
            }
        }
        Ok(())
    }

    fn write(&self, at: u64, data: &[u8]) -> Result<(), DmaError> {
        for (at, part) in Self::parts(at, data.len())? {
            self.check()?;
            let Some(data) = data.get(part) else { break };
            let unreachable = DmaError::Unreachable { at, len: data.len() as u64 };
            if self.space.ram.write_slice(data, GuestAddress(at)).is_err() {
                in_eights(at, data.len(), |at, range| self.space.write_window(at, data.get(range)?)).ok_or(unreachable)?;
            }
        }
        Ok(())
    }
}

/// Calls `step` for naturally aligned parts of at most 8 bytes; stops at the first that nobody answers.
fn in_eights(at: u64, len: usize, mut step: impl FnMut(u64, std::ops::Range<usize>) -> Option<()>) -> Option<()> {
    let mut done = 0;
    while done < len {
        let here = at.checked_add(u64::try_from(done).ok()?)?;
        let room = 8 - usize::try_from(here % 8).ok()?;
        let part = room.min(len - done);
        let part = if part.is_power_of_two() { part } else { 1 };
        step(here, done..done + part)?;
        done += part;
    }
    Some(())
}
