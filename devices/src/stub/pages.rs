//! Memory behind the BARs of one function: reserved at full size, there only where somebody wrote.

use pci::bar::{BarIndex, Bars, Size};
use pci::state::{Reader, StateError, Writer};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use thiserror::Error;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

use crate::pagemap::{self, PageMap};

/// Page size: memory of a BAR that is at least this large can be mapped into a guest.
pub const PAGE: u64 = 4096;

/// Most bytes of BAR memory that are written down.
pub const MOST_SAVED: usize = 256 << 20;
/// Pages that are looked up at a time.
const BATCH: usize = 8192;

/// One mapping for all BARs of a function, each from a page boundary.
#[derive(Debug)]
pub struct BarMemory {
    region: Option<MmapRegion>,
    /// Offset in the mapping and size of each BAR.
    bars: [Option<(usize, usize)>; 6],
}

impl BarMemory {
    /// Reserves memory for `bars`, all zero.
    pub fn new(bars: &Bars) -> Result<Self, PagesError> {
        let mut places = [None; 6];
        let mut total = 0_usize;
        for (place, bar) in places.iter_mut().zip(0..) {
            let Some(spec) = bars.spec(bar) else { continue };
            let too_large = || PagesError::Large { size: Size(spec.size) };
            let size = usize::try_from(spec.size).map_err(|_| too_large())?;
            let padded = spec.size.next_multiple_of(PAGE);
            *place = Some((total, size));
            total = usize::try_from(padded).ok().and_then(|size| total.checked_add(size)).ok_or_else(too_large)?;
        }
        if total == 0 {
            return Ok(Self { region: None, bars: places });
        }
        let region = MmapRegion::new(total).map_err(|source| PagesError::Map { total, source })?;
        let memory = Self { region: Some(region), bars: places };
        // With huge pages each touch of sparse memory would cost 2 MiB. A kernel without them refuses, which is as good.
        let _ = memory.advise(Advice::LinuxNoHugepage);
        Ok(memory)
    }

    /// Address in this process of `offset` in BAR `bar`; 0 if there is no such byte.
    #[must_use]
    pub fn host_address(&self, bar: BarIndex, offset: u64) -> u64 {
        let place = self.place(bar, offset, 0).zip(self.region.as_ref());
        place.map_or(0, |(at, region)| u64::try_from(region.as_ptr().addr() + at).unwrap_or(0))
    }

    /// Reads memory of a BAR; all ones unless all of it is inside.
    pub fn read(&self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        let read = self
            .place(bar, offset, data.len())
            .zip(self.region.as_ref())
            .is_some_and(|(at, region)| region.get_slice(at, data.len()).is_ok_and(|slice| slice.read_slice(data, 0).is_ok()));
        if !read {
            data.fill(0xFF);
        }
    }

    /// Writes memory of a BAR; dropped unless all of it is inside.
    pub fn write(&self, bar: BarIndex, offset: u64, data: &[u8]) {
        if let Some((at, region)) = self.place(bar, offset, data.len()).zip(self.region.as_ref())
            && let Ok(slice) = region.get_slice(at, data.len())
        {
            // The slice is exactly as long.
            let _ = slice.write_slice(data, 0);
        }
    }

    /// All zero again, and no memory in use. Mappings into a guest stay.
    pub fn clear(&self) {
        if let Err(error) = self.advise(Advice::LinuxDontNeed) {
            log::warn!("cannot clear the memory of a stub's BARs: {error}");
        }
    }

    /// Writes each page that is not zero, with its number.
    pub fn save(&self, writer: &mut Writer) -> Result<(), StateError> {
        const UNKNOWN: StateError = StateError::NotKept { why: "/proc/self/pagemap does not say which memory its BARs use" };
        let mut pages: Vec<(u64, Vec<u8>)> = Vec::new();
        if let Some(region) = &self.region {
            let map = PageMap::open().map_err(|_| UNKNOWN)?;
            let all = region.size() / pagemap::PAGE;
            for start in (0..all).step_by(BATCH) {
                let first = region.as_ptr().addr() + start * pagemap::PAGE;
                for used in map.used(first, BATCH.min(all - start)).map_err(|_| UNKNOWN)? {
                    let number = start + used;
                    let mut bytes = vec![0; pagemap::PAGE];
                    let slice = region.get_slice(number * pagemap::PAGE, pagemap::PAGE).map_err(|_| UNKNOWN)?;
                    slice.read_slice(&mut bytes, 0).map_err(|_| UNKNOWN)?;
                    if bytes.iter().any(|byte| *byte != 0) {
                        pages.push((number as u64, bytes));
                    }
                    if pages.len() * pagemap::PAGE > MOST_SAVED {
                        return Err(StateError::NotKept { why: "its BARs hold more than 256 MiB" });
                    }
                }
            }
        }
        writer.count(pages.len());
        for (number, bytes) in pages {
            writer.u64(number);
            writer.bytes(&bytes);
        }
        Ok(())
    }

    /// Takes what memory of the same size saved; this one is zero.
    pub fn restore(&self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        for _ in 0..reader.count()? {
            let (number, bytes) = (reader.u64()?, reader.bytes()?);
            let wrong = || reader.wrong("a page of its BARs", number);
            let at = number.checked_mul(PAGE).and_then(|at| usize::try_from(at).ok()).ok_or_else(wrong)?;
            let slice = self.region.as_ref().and_then(|region| region.get_slice(at, bytes.len()).ok()).ok_or_else(wrong)?;
            slice.write_slice(bytes, 0).map_err(|_| wrong())?;
        }
        Ok(())
    }

    fn place(&self, bar: BarIndex, offset: u64, len: usize) -> Option<usize> {
        let (start, size) = (*self.bars.get(usize::from(bar))?)?;
        let offset = usize::try_from(offset).ok()?;
        (offset.checked_add(len)? <= size).then_some(start + offset)
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        let Some(region) = &self.region else { return Ok(()) };
        // SAFETY: the range is this region's own private anonymous mapping, which nobody in this process reads by
        // reference, only by volatile copies; both pieces of advice at most make its bytes zero.
        unsafe { madvise(region.as_ptr().cast(), region.size(), advice) }
    }
}

/// Memory that cannot be had.
#[derive(Debug, Error)]
pub enum PagesError {
    /// More than the address space of this process.
    #[error("a BAR of {size} and those before it exceed the address space of this process")]
    Large {
        /// Of the BAR that does not fit.
        size: Size,
    },
    /// The kernel refused.
    #[error(
        "cannot reserve {total:#x} bytes of address space for BARs; check `ulimit -v` and vm.overcommit_memory (2 refuses large BARs)"
    )]
    Map {
        /// Of all BARs of the function.
        total: usize,
        /// The kernel's reason.
        #[source]
        source: MmapRegionError,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use pci::bar::{BarKind, BarSpec};

    fn memory(sizes: [u64; 3]) -> BarMemory {
        let bar = |size| (size != 0).then_some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size });
        BarMemory::new(&Bars::new(&[bar(sizes[0]), None, bar(sizes[1]), None, bar(sizes[2]), None]).unwrap()).unwrap()
    }

    #[test]
    fn a_bar_of_512_gib_costs_only_what_is_written() {
        let memory = memory([512 << 30, 512 << 30, 4096]);
        for at in [0, 1 << 30, (512 << 30) - 8] {
            memory.write(0, at, &at.to_le_bytes());
            let mut back = [1; 8];
            memory.read(0, at, &mut back);
            assert_eq!(u64::from_le_bytes(back), at);
        }
        let mut other = [1; 8];
        memory.read(2, 1 << 30, &mut other);
        assert_eq!(other, [0; 8], "BARs do not share memory");
    }

    #[test]
    fn nothing_outside_a_bar_is_reached() {
        let memory = memory([256, 4096, 0]);
        memory.write(0, 252, &[7; 8]);
        let mut data = [0; 8];
        memory.read(2, 0, &mut data);
        assert_eq!(data, [0; 8]);
        for (bar, at) in [(0, 249), (0, 256), (0, u64::MAX), (1, 0), (4, 0), (9, 0)] {
            memory.read(bar, at, &mut data);
            assert_eq!(data, [0xFF; 8], "BAR {bar} at {at:#x}");
        }
    }

    #[test]
    fn every_bar_starts_on_a_page_of_its_own() {
        let memory = memory([16, 4096, 1 << 20]);
        let pages: Vec<u64> = [0, 2, 4].map(|bar| memory.host_address(bar, 0)).to_vec();
        assert!(pages.iter().all(|at| at % PAGE == 0 && *at != 0));
        assert_eq!((pages[1] - pages[0], pages[2] - pages[1]), (PAGE, PAGE));
    }

    #[test]
    fn clearing_zeroes_all() {
        let memory = memory([1 << 20, 0, 0]);
        memory.write(0, 0x1234, &[9; 4]);
        memory.clear();
        let mut data = [1; 4];
        memory.read(0, 0x1234, &mut data);
        assert_eq!(data, [0; 4]);
    }

    #[test]
    fn a_function_without_bars_needs_no_mapping() {
        let memory = memory([0; 3]);
        assert!(memory.region.is_none());
        memory.clear();
    }
}
