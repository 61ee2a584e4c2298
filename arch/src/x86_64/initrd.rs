//! Decides where the initial RAM disk lies.

use crate::memory_map::{MemoryMap, PAGE, Range};

use super::layout;

/// Highest address of an initial RAM disk for a bzImage older than protocol 2.03
/// (linux: Documentation/arch/x86/boot.rst, `initrd_addr_max`).
pub const ADDR_MAX_OLD: u64 = 0x37FF_FFFF;
/// Highest address where nothing else says so: 4 GiB less one. RAM below 4 GiB ends before.
pub const ADDR_MAX_ANY: u64 = 0xFFFF_FFFF;

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
    let above = Range {
        start: kernel.end.max(layout::HIGH_MEMORY),
        end: top,
    };
    let below = Range {
        start: layout::HIGH_MEMORY,
        end: kernel.start.min(top),
    };
    for room in [above, below] {
        let start = room.end.saturating_sub(size) & !(PAGE - 1);
        if size <= room.len() && start >= room.start {
            return Ok(start);
        }
    }
    Err(InitrdError::DoesNotFit {
        size,
        free: above.len().max(below.len()),
        top,
        ram: map.ram_size(),
    })
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
