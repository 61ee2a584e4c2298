//! What a passed-through function needs of its owner on the host: registers, memory, interrupts, reset. The kernel's VFIO
//! implements it ([`super::hardware`]), tests have a fake.

use std::io;
use std::os::fd::BorrowedFd;

use super::neighbours::NotReset;
use super::signals::Signal;

/// Regions as VFIO numbers them for PCI (linux: include/uapi/linux/vfio.h): 0 to 5 are the BARs.
pub type RegionIndex = u32;

/// Region of the configuration space.
pub const CONFIG: RegionIndex = 7;

/// A span of a region, in bytes from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Area {
    /// First byte past it; saturates.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Whether it shares a byte with `other`.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

/// Kind of interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IrqKind {
    /// The INTx wire.
    Intx,
    /// Message signalled.
    Msi,
    /// Message signalled, with a table.
    Msix,
}

/// Interrupts of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Irqs {
    /// How many the device has; 0 for none.
    pub count: u16,
    /// Whether vectors can be added to a set that is enabled (Linux 6.5 and later for MSI-X).
    pub growable: bool,
}

/// A function of the host, opened for this process alone.
pub trait HostDevice: Send {
    /// Bytes of a region; 0 for one that the device does not have.
    fn size(&self, index: RegionIndex) -> u64;
    /// The parts of a region that can be mapped into this process.
    fn mappable(&self, index: RegionIndex) -> Vec<Area>;
    /// Reads `data.len()` bytes at `offset` of a region, all of them or none.
    fn read(&mut self, index: RegionIndex, offset: u64, data: &mut [u8]) -> io::Result<()>;
    /// Writes `data` at `offset` of a region, all of it or none.
    fn write(&mut self, index: RegionIndex, offset: u64, data: &[u8]) -> io::Result<()>;
    /// The file that a region is mapped from, and where the region starts in it.
    fn file(&self, index: RegionIndex) -> Option<(BorrowedFd<'_>, u64)>;
    /// Interrupts of `kind`.
    fn irqs(&self, kind: IrqKind) -> Irqs;
    /// Has interrupts `start`, `start + 1`, ... of `kind` signal `events`; `None` for one that signals nobody. The first call
    /// enables the kind with `start + events.len()` vectors; later ones stay below that unless the kind is growable.
    fn set_triggers(&mut self, kind: IrqKind, start: u16, events: &[Option<BorrowedFd<'_>>]) -> io::Result<()>;
    /// Has `event` unmask the INTx wire, which masks itself whenever it fires.
    fn set_resample(&mut self, event: BorrowedFd<'_>) -> io::Result<()>;
    /// Switches interrupts of `kind` off and gives their host vectors back.
    fn disable(&mut self, kind: IrqKind) -> io::Result<()>;
    /// Has `event` signalled whenever the host gives `signal`; `false` for a function of which it never does.
    fn hear(&mut self, signal: Signal, event: BorrowedFd<'_>) -> io::Result<bool>;
    /// Whether the host can reset this function alone.
    fn can_reset(&self) -> bool;
    /// Begins a reset of the function: nothing reaches it as long as the result lives. There is one at a time.
    fn begin_reset(&self) -> io::Result<Box<dyn HostReset>>;
}

/// A reset of a function that has begun.
pub trait HostReset: Send {
    /// Resets the function, or all of its bus if it cannot be reset alone and all on it that the machine has is under reset. On any
    /// thread. The host keeps its configuration (BARs, enables) across it.
    fn run(&mut self) -> Result<(), NotReset>;
}
