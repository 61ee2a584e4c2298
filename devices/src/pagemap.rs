//! Which pages of this process hold something, so that only those are written down.
//!
//! Source: linux: Documentation/admin-guide/mm/pagemap.rst.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of a page on x86-64.
pub const PAGE: usize = 4096;
/// Of an entry: there is memory, or it was swapped out.
const PRESENT: u64 = 3 << 62;

/// What the kernel says of the pages of this process at the moment when it is asked.
#[derive(Debug)]
pub struct PageMap(File);

impl PageMap {
    /// Opens it. Fails where there is no /proc.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// Those of `pages` pages from `address` on, a multiple of [`PAGE`], that have memory of their own or in the swap space,
    /// numbered from 0. Takes 8 bytes for each page.
    pub fn used(&self, address: usize, pages: usize) -> io::Result<impl Iterator<Item = usize> + use<>> {
        let mut entries = vec![[0; 8]; pages];
        let offset = u64::try_from(address / PAGE * 8).map_err(io::Error::other)?;
        self.0.read_exact_at(entries.as_flattened_mut(), offset)?;
        let used = |(number, entry): (usize, [u8; 8])| (u64::from_le_bytes(entry) & PRESENT != 0).then_some(number);
        Ok(entries.into_iter().enumerate().filter_map(used))
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, MmapRegion, VolatileMemory};

    use super::*;

    #[test]
    fn pages_that_were_written_are_used_and_no_others() {
        let memory: MmapRegion = MmapRegion::new(64 * PAGE).unwrap();
        for page in [3, 40] {
            memory.get_slice(page * PAGE + 5, 1).unwrap().write_slice(&[1], 0).unwrap();
        }
        let map = PageMap::open().unwrap();
        let used = |first: usize, pages| map.used(memory.as_ptr().addr() + first * PAGE, pages).unwrap().collect::<Vec<_>>();
        assert_eq!(used(3, 1), [0]);
        assert_eq!(used(4, 36), [0; 0]);
        assert_eq!((used(0, 64).contains(&3), used(0, 64).contains(&40)), (true, true));
    }
}
