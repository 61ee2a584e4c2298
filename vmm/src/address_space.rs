//! Who answers at a guest-physical address: RAM, a BAR's memory, or a function that is asked. I/O ports of BARs are here too,
//! from [`PORTS`] on.
//!
//! vCPUs come here with accesses that left the guest; emulated devices come here with their DMA. The lock is held while a
//! window is looked up; a function is called after it is released.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use devices::virtio::Memory;
use pci::bar::{BarIndex, PORTS};
use pci::function::{Pages, Shared};
use pci::seams::{DmaError, DmaPort};
use pci::sync::{lock, read, write};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryMmap, VolatileSlice};

/// A part of a BAR whose function is asked.
pub struct Trapped {
    /// Which function.
    pub function: Shared,
    /// Which BAR.
    pub bar: BarIndex,
    /// Where the part starts, from the BAR's start.
    pub offset: u64,
    /// Where accesses are counted.
    pub accesses: Arc<Accesses>,
}

/// What answers in a window.
enum Answer {
    Function(Trapped),
    /// Memory of this process.
    Memory(Pages),
}

/// How often a function was asked, by exits of vCPUs and by the DMA of emulated functions.
#[derive(Debug, Default)]
pub struct Accesses {
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Accesses {
    /// Reads so far.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Writes so far.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }
}

struct Window {
    len: u64,
    answer: Answer,
}

#[derive(Default)]
struct Windows {
    by_address: BTreeMap<u64, Window>,
    /// Nobody answers any more, RAM neither.
    ended: bool,
}

/// What answers an access that lies in one window.
enum Found<'a> {
    /// The function, at this offset of its BAR.
    Function(&'a Trapped, u64),
    /// These bytes.
    Memory(VolatileSlice<'a>),
}

impl Windows {
    /// Who answers for `len` bytes from `at`; `None` if no window holds all of them.
    fn find(&self, at: u64, len: usize) -> Option<Found<'_>> {
        let (start, window) = self.by_address.range(..=at).next_back()?;
        let inside = at - start;
        if inside.checked_add(u64::try_from(len).ok()?)? > window.len {
            return None;
        }
        match &window.answer {
            Answer::Function(part) => Some(Found::Function(part, part.offset + inside)),
            Answer::Memory(pages) => {
                let address = usize::try_from(pages.host_address.checked_add(inside)?).ok()?;
                // SAFETY: the bytes lie in the window, as was just checked, and its memory stays mapped and writable until the
                // window is closed (`open_memory`). That takes the windows exclusively, and the result borrows them. Guests
                // write to the same bytes, hence volatile.
                Some(Found::Memory(unsafe { VolatileSlice::new(std::ptr::with_exposed_provenance_mut(address), len) }))
            }
        }
    }
}

/// Guest-physical memory outside RAM's slots, and RAM for those who do not run in the guest.
pub struct AddressSpace {
    ram: Memory,
    windows: RwLock<Windows>,
}

impl AddressSpace {
    /// RAM and no windows.
    #[must_use]
    pub fn new(ram: Memory) -> Arc<Self> {
        Arc::new(Self { ram, windows: RwLock::default() })
    }

    /// RAM, as those hold it who do not run in the guest.
    #[must_use]
    pub const fn ram(&self) -> &Memory {
        &self.ram
    }

    /// Opens a window of `len` bytes in which a function answers. The caller keeps windows from overlapping.
    pub fn open(&self, at: u64, len: u64, part: Trapped) {
        self.insert(at, Window { len, answer: Answer::Function(part) });
    }

    /// As [`AddressSpace::open`], for a window in which memory of this process answers.
    ///
    /// # Safety
    /// `len` bytes of `pages` must stay mapped, readable and writable, until the window is closed, and have no Rust references
    /// into them.
    pub unsafe fn open_memory(&self, at: u64, len: u64, pages: Pages) {
        self.insert(at, Window { len, answer: Answer::Memory(pages) });
    }

    fn insert(&self, at: u64, window: Window) {
        self.write_windows().by_address.insert(at, window);
    }

    /// Closes the window that starts at `at`. No access to its memory is under way when this returns.
    pub fn close(&self, at: u64) {
        self.write_windows().by_address.remove(&at);
    }

    /// Ends every access, by DMA too: none is under way when this returns, and none starts. Lets go of the functions, which
    /// hold this space through their DMA ports; without it neither would ever be freed.
    pub fn end(&self) {
        let mut windows = self.write_windows();
        windows.ended = true;
        let functions = std::mem::take(&mut windows.by_address);
        drop(windows);
        // Outside the lock: the last holder of a function ends it here.
        drop(functions);
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
            match windows.find(at, data.len())? {
                Found::Memory(bytes) => return bytes.read_slice(data, 0).ok(),
                Found::Function(part, offset) => {
                    part.accesses.reads.fetch_add(1, Ordering::Relaxed);
                    (Arc::clone(&part.function), part.bar, offset)
                }
            }
        };
        lock(&function).bar_read(bar, offset, data);
        Some(())
    }

    fn write_window(&self, at: u64, data: &[u8]) -> Option<()> {
        let (function, bar, offset) = {
            let windows = self.read_windows();
            match windows.find(at, data.len())? {
                Found::Memory(bytes) => return bytes.write_slice(data, 0).ok(),
                Found::Function(part, offset) => {
                    part.accesses.writes.fetch_add(1, Ordering::Relaxed);
                    (Arc::clone(&part.function), part.bar, offset)
                }
            }
        };
        lock(&function).bar_write(bar, offset, data);
        Some(())
    }

    /// An access to RAM by who does not run in the guest; whether it succeeds. The lock keeps it from outliving the machine:
    /// after a reset the next one has the same RAM.
    fn with_ram(&self, access: impl FnOnce(&GuestMemoryMmap) -> bool) -> bool {
        let windows = self.read_windows();
        !windows.ended && access(&self.ram.memory())
    }

    fn read_windows(&self) -> RwLockReadGuard<'_, Windows> {
        read(&self.windows)
    }

    fn write_windows(&self) -> RwLockWriteGuard<'_, Windows> {
        write(&self.windows)
    }
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
        // Memory requests reach no ports.
        at.checked_add(bytes).filter(|end| *end <= PORTS).ok_or(DmaError::Unreachable { at, len: bytes })?;
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
            if !self.space.with_ram(|ram| ram.read_slice(data, GuestAddress(at)).is_ok()) {
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
            if !self.space.with_ram(|ram| ram.write_slice(data, GuestAddress(at)).is_ok()) {
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use devices::stub::{StubFunction, StubInterrupt, StubSpec};
    use pci::bar::{BarKind, BarSpec};
    use pci::ids::Ids;
    use pci::testing::FakeMsi;

    use super::*;

    fn space() -> (Arc<AddressSpace>, BusMaster) {
        let space = AddressSpace::new(Memory::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()));
        let dma = BusMaster::new(Arc::clone(&space), Arc::new(AtomicBool::new(true)));
        (space, dma)
    }

    #[test]
    fn dma_crosses_pages_and_stops_at_the_end_of_ram() {
        let (_space, dma) = space();
        let sent: Vec<u8> = (0..10_000).map(|n: u32| n.to_le_bytes()[0]).collect();
        dma.write(0xFF0, &sent).unwrap();
        let mut back = vec![0; sent.len()];
        dma.read(0xFF0, &mut back).unwrap();
        assert!(back == sent);
        assert!(matches!(dma.write((1 << 20) - 8, &[0; 16]), Err(DmaError::Unreachable { .. })));
        assert!(matches!(dma.read(PORTS | 0xC000, &mut [0; 4]), Err(DmaError::Unreachable { .. })));
        assert!(matches!(dma.read(u64::MAX - 4, &mut [0; 16]), Err(DmaError::Unreachable { .. })));
    }

    #[test]
    fn nothing_reaches_ram_after_the_end_of_the_machine() {
        let (space, dma) = space();
        dma.write(0x1000, b"before").unwrap();
        space.end();
        assert!(matches!(dma.write(0x1000, b"after!"), Err(DmaError::Unreachable { .. })));
        assert!(matches!(dma.read(0x1000, &mut [0; 6]), Err(DmaError::Unreachable { .. })));
        let mut kept = [0; 6];
        space.ram.memory().read_slice(&mut kept, GuestAddress(0x1000)).unwrap();
        assert_eq!(&kept, b"before");
    }

    #[test]
    fn functions_whose_dma_comes_here_are_freed_with_the_machine() {
        let (space, dma) = space();
        let bar = BarSpec { kind: BarKind::Memory32, prefetchable: false, size: 8192 };
        let spec = StubSpec {
            ids: Ids::default(),
            bars: [Some(bar), None, None, None, None, None],
            rom: None,
            sriov: None,
            ari: false,
            on: pci::emulated::Attachment::RootBus,
            follows: false,
            interrupt: StubInterrupt::None,
            clique: None,
            clique_any_vendor: false,
            flr: true,
            dma: true,
        };
        let function: Shared =
            Arc::new(Mutex::new(StubFunction::new("stub0", &spec, Arc::new(FakeMsi::default()), None, Arc::new(dma)).unwrap()));
        let (kept, accesses) = (Arc::downgrade(&function), Arc::<Accesses>::default());
        space.open(0x1000_0000, 4096, Trapped { function, bar: 0, offset: 0, accesses: Arc::clone(&accesses) });
        let mut magic = [0; 4];
        space.read(0x1000_0000, &mut magic);
        assert_eq!((accesses.reads(), accesses.writes()), (1, 0));
        assert_eq!(&magic, b"BNYN");
        space.end();
        drop(space);
        assert!(kept.upgrade().is_none());
    }
}
