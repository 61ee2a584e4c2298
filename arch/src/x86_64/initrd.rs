//! Decides where the initial RAM disk lies.

use crate::memory_map::{MemoryMap, PAGE, Range};

use super::layout;

/// The address of an initial RAM disk of `size` bytes: the highest page in RAM below 4 GiB whose disk ends at or below
/// `addr_max` and is clear of the kernel and of everything below 1 MiB.
///
/// `kernel` is all the kernel uses before it has a memory allocator: for a bzImage from its load address on
/// `init_size` bytes, for an ELF image its segments with their zeroed parts.
///
/// # Errors
/// If there is no such place.
pub fn place(map: &MemoryMap, kernel: Range, size: u64, addr_max: u64) -> Result<u64, InitrdError> {
    let top = map.low_ram().end.min(addr_max.saturating_add(1));
    let above = Range { start: kernel.end.max(layout::HIGH_MEMORY), end: top };
    let below = Range { start: layout::HIGH_MEMORY, end: kernel.start.min(top) };
    for room in [above, below] {
        let start = room.end.saturating_sub(size) & !(PAGE - 1);
        if size <= room.len() && start >= room.start {
            return Ok(start);
        }
    }
    Err(InitrdError::DoesNotFit { size, free: above.len().max(below.len()), top, ram: map.ram_size() })
}

/// Why there is no place for an initial RAM disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InitrdError {
    /// RAM is too small beside the kernel.
    #[error(
        "an initramfs of {size} bytes does not fit: beside the kernel {free} bytes are free below {top:#x}, \
         of {ram} bytes of memory: give more memory or a smaller initramfs"
    )]
    DoesNotFit {
        /// Bytes of the initial RAM disk.
        size: u64,
        /// Bytes of the largest gap.
        free: u64,
        /// First address it may not reach.
        top: u64,
        /// Bytes of RAM.
        ram: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_map::{GIB, MIB, MemoryMapRequest};

    const KERNEL: Range = Range { start: 16 * MIB, end: 80 * MIB };

    /// Highest address for a bzImage older than protocol 2.03 (linux: Documentation/arch/x86/boot.rst, `initrd_addr_max`).
    const ADDR_MAX_OLD: u64 = 0x37FF_FFFF;
    /// Highest address where nothing else says so. RAM below 4 GiB ends before.
    const ADDR_MAX_ANY: u64 = 0xFFFF_FFFF;

    fn map(ram: u64) -> MemoryMap {
        MemoryMap::new(&MemoryMapRequest {
            ram,
            hot_plug: 0,
            physical_address_bits: 40,
            reserved: Vec::new(),
            firmware_size: 0,
            segments: Vec::new(),
        })
        .unwrap()
    }

    #[test]
    fn case_f5_an_initrd_of_200_mib_has_a_place_whatever_the_size_of_ram() {
        let size = 200 * MIB + 123;
        for ram in [1, 2, 3, 4, 8].map(|gib| gib * GIB) {
            for addr_max in [ADDR_MAX_OLD, 0x7FFF_FFFF, ADDR_MAX_ANY] {
                let map = map(ram);
                let start = place(&map, KERNEL, size, addr_max).unwrap();
                let initrd = Range::sized(start, size);
                assert_eq!(start % PAGE, 0);
                assert!(initrd.last() <= addr_max, "{initrd} with {ram} bytes of RAM and {addr_max:#x}");
                assert!(map.low_ram().contains_range(&initrd));
                assert!(!initrd.overlaps(&KERNEL) && initrd.start >= layout::HIGH_MEMORY);
                let highest = map.low_ram().end.min(addr_max + 1);
                assert!(highest - initrd.end < PAGE, "as high as possible");
            }
        }
    }

    #[test]
    fn case_f5_an_initrd_that_does_not_fit_is_refused_with_the_sizes() {
        let error = place(&map(256 * MIB), KERNEL, 200 * MIB, ADDR_MAX_ANY).unwrap_err();
        assert_eq!(
            error.to_string(),
            "an initramfs of 209715200 bytes does not fit: beside the kernel 184549376 bytes are free below 0x10000000, \
             of 268435456 bytes of memory: give more memory or a smaller initramfs"
        );
        assert!(place(&map(8 * GIB), KERNEL, u64::MAX, ADDR_MAX_ANY).is_err());
        assert!(place(&map(16 * MIB), KERNEL, 16 * MIB, ADDR_MAX_ANY).is_err());
    }

    #[test]
    fn with_a_kernel_at_the_top_of_ram_the_initrd_goes_below_it() {
        let kernel = Range { start: 100 * MIB, end: 128 * MIB };
        assert_eq!(place(&map(128 * MIB), kernel, 3 * MIB, ADDR_MAX_ANY), Ok(97 * MIB));
    }

    #[test]
    fn a_gap_that_only_fits_without_alignment_is_not_used() {
        let kernel = Range { start: MIB, end: 128 * MIB - PAGE - 1 };
        assert_eq!(place(&map(128 * MIB), kernel, PAGE, ADDR_MAX_ANY), Ok(128 * MIB - PAGE));
        assert!(place(&map(128 * MIB), kernel, PAGE + 1, ADDR_MAX_ANY).is_err());
    }
}
