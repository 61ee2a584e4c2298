//! Maps the memory of a BAR into this process, placed so that the kernel can use huge page-table entries.

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// The largest page-table entry that is worth aligning for: 1 GiB.
const HUGE: u64 = 1 << 30;

/// Address space for a BAR, with parts of it mapped. Dropping it unmaps them.
#[derive(Debug)]
pub struct Mapping {
    reserved: *mut c_void,
    len: usize,
    /// Where byte 0 of the BAR lies: a multiple of the BAR's size, up to 1 GiB.
    start: u64,
    size: u64,
}

// SAFETY: the mapping is owned by this value and the pointer is used for nothing but unmapping it.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Reserves address space for a BAR of `size` bytes. A BAR lies at a multiple of its size in host memory, so an address
    /// that is a multiple of the size as well (at most of 1 GiB) lets every part be mapped with the largest entries.
    pub fn reserve(size: u64) -> io::Result<Self> {
        let align = size.next_power_of_two().clamp(PAGE, HUGE);
        let len = size.checked_add(align).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: asks for address space that nothing uses, and accesses to it fault.
        let reserved =
            unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE) }?;
        let start = (reserved.addr() as u64).next_multiple_of(align);
        Ok(Self { reserved, len, start, size })
    }

    /// Maps `len` bytes of `file` from `at` to `offset` of the BAR and returns their address. All three are multiples of the
    /// page size.
    pub fn map(&self, file: BorrowedFd<'_>, at: u64, offset: u64, len: u64) -> io::Result<u64> {
        if offset.checked_add(len).is_none_or(|end| end > self.size) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let address = self.start + offset;
        let (from, bytes) = (usize::try_from(address), usize::try_from(len));
        let (Ok(from), Ok(bytes)) = (from, bytes) else { return Err(io::Error::from(io::ErrorKind::OutOfMemory)) };
        let place = self.reserved.with_addr(from);
        // SAFETY: the span lies inside the reservation (checked above), which this value owns, so nothing else is replaced.
        unsafe { mmap(place, bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED, file, at) }?;
        Ok(address)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `reserve` mapped. The owner of a function keeps it until the guest and the IOMMU have
        // let go of its pages (the contract of `pci::function::Pages`).
        if let Err(error) = unsafe { munmap(self.reserved, self.len) } {
            log::error!("cannot unmap a BAR: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn a_bar_starts_at_a_multiple_of_its_size_up_to_1_gib() {
        for size in [4096, 64 << 10, 16 << 20, 3 << 30, 512 << 30] {
            let mapping = Mapping::reserve(size).unwrap();
            let align = size.next_power_of_two().min(1 << 30);
            assert_eq!(mapping.start % align, 0, "{size:#x}");
        }
    }

    #[test]
    fn parts_are_mapped_at_their_own_offset_and_not_past_the_bar() {
        let file = memfd_create("bar", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4 * PAGE).unwrap();
        let mapping = Mapping::reserve(4 * PAGE).unwrap();
        let address = mapping.map(file.as_fd(), 2 * PAGE, PAGE, PAGE).unwrap();
        assert_eq!(address, mapping.start + PAGE);
        assert!(mapping.map(file.as_fd(), 0, 3 * PAGE, 2 * PAGE).is_err());
        assert!(mapping.map(file.as_fd(), 0, u64::MAX - PAGE + 1, PAGE).is_err());
    }
}
