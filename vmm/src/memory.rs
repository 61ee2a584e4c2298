//! Guest RAM: reserves address space for it, gives it pages when asked, and says what is missing when the host cannot.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use arch::memory_map::Range;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use thiserror::Error;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

mod bind;
pub mod file;

pub use bind::bind;
pub use file::FileError;

/// How RAM is backed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Backing {
    /// Mapped shared, so that another process can map it.
    pub shared: bool,
    /// Size of pages from the host's pool, bytes: 2 MiB or 1 GiB.
    pub huge_page: Option<u64>,
    /// Ask for transparent huge pages: fewer IOMMU entries, at the price of memory that a small guest never uses.
    pub transparent_huge_pages: bool,
}

/// One contiguous range of RAM as this process sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamRegion {
    /// First guest-physical address.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// Address in this process.
    pub host: u64,
}

/// Maps every range of RAM. Nothing is touched: ordinary pages appear when the guest uses them.
pub fn create(ranges: &[Range], backing: Backing) -> Result<GuestMemoryMmap, MemoryError> {
    if let Some(page) = backing.huge_page {
        check_pool(ranges.iter().map(Range::len).sum(), page)?;
    }
    let mut regions = Vec::new();
    for range in ranges {
        let failed = |source: io::Error| MemoryError::Map { at: range.start, len: range.len(), source };
        let len = usize::try_from(range.len()).map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, mmap_flags(backing));
        // Shared memory has a descriptor, by which another process can map it.
        let file = if backing.shared { Some(memory_file(range.len(), backing.huge_page).map_err(failed)?) } else { None };
        let region = MmapRegion::build(file, len, prot, flags).map_err(|error| failed(io::Error::other(error)))?;
        if backing.transparent_huge_pages && backing.huge_page.is_none() {
            want_huge_pages(region.as_ptr(), len);
        }
        let region = GuestRegionMmap::new(region, GuestAddress(range.start));
        regions.push(region.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?);
    }
    GuestMemoryMmap::from_regions(regions).map_err(|error| MemoryError::Layout { reason: error.to_string() })
}

/// `ram` with `more` beside it.
pub fn join(ram: &GuestMemoryMmap, more: &GuestMemoryMmap) -> Result<GuestMemoryMmap, MemoryError> {
    let failed = |error: vm_memory::GuestRegionCollectionError| MemoryError::Layout { reason: error.to_string() };
    let (mut all, mut rest) = (ram.clone(), more.clone());
    for region in more.iter() {
        let (left, region) = rest.remove_region(region.start_addr(), region.len()).map_err(failed)?;
        (rest, all) = (left, all.insert_region(region).map_err(failed)?);
    }
    Ok(all)
}

/// Where each range of RAM lies in this process.
#[must_use]
pub fn regions(memory: &GuestMemoryMmap) -> Vec<RamRegion> {
    memory
        .iter()
        .map(|region| RamRegion {
            at: region.start_addr().0,
            len: region.len(),
            host: region.as_ptr().expose_provenance() as u64,
        })
        .collect()
}

/// A file of memory alone, of `len` bytes, that cannot change its length (a server that cut it would take pages away).
fn memory_file(len: u64, huge_page: Option<u64>) -> io::Result<FileOffset> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match huge_page {
        Some(page) if page == 1 << 30 => flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        Some(_) => flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        None => {}
    }
    let file = File::from(memfd_create("banyan-ram", flags)?);
    file.set_len(len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(FileOffset::new(file, 0))
}

fn mmap_flags(backing: Backing) -> i32 {
    if backing.shared {
        // The file says which pages.
        return libc::MAP_SHARED | if backing.huge_page.is_none() { libc::MAP_NORESERVE } else { 0 };
    }
    // Pool pages are reserved at once, so that a short pool is an error here and not a signal later.
    let pages = match backing.huge_page {
        Some(size) => libc::MAP_HUGETLB | i32::try_from(size.trailing_zeros()).unwrap_or(0) << libc::MAP_HUGE_SHIFT,
        None => libc::MAP_NORESERVE,
    };
    libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | pages
}

fn want_huge_pages(address: *mut u8, len: usize) {
    // SAFETY: whatever the range is, MADV_HUGEPAGE changes neither content nor mappings, only which pages come when they are
    // touched.
    if unsafe { libc::madvise(address.cast(), len, libc::MADV_HUGEPAGE) } != 0 {
        log::debug!("no transparent huge pages: {}", io::Error::last_os_error());
    }
}

fn check_pool(bytes: u64, page: u64) -> Result<(), MemoryError> {
    let pool = PathBuf::from(format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page >> 10));
    let free = std::fs::read_to_string(pool.join("free_hugepages")).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let needed = bytes.div_ceil(page);
    if free < needed {
        return Err(MemoryError::Pool { page_mib: page >> 20, needed, free, pool: pool.join("nr_hugepages") });
    }
    Ok(())
}

/// RAM that cannot be had.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The pool of huge pages is too small.
    #[error("{needed} huge pages of {page_mib} MiB are needed, {free} are free: write more to {}", pool.display())]
    Pool {
        /// Size of a page.
        page_mib: u64,
        /// Pages needed.
        needed: u64,
        /// Pages free.
        free: u64,
        /// Where the pool grows.
        pool: PathBuf,
    },
    /// Address space.
    #[error("cannot map {len:#x} bytes of RAM for {at:#x}: lower --memory, or raise the limit of virtual memory (ulimit -v)")]
    Map {
        /// Guest-physical address.
        at: u64,
        /// Bytes.
        len: u64,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// A node of the host.
    #[error(
        "cannot take {len:#x} bytes of RAM at {at:#x} from host node {node} as asked: it must exist and this process be allowed to use it (cpuset.mems of its control group)"
    )]
    Bind {
        /// Guest-physical address.
        at: u64,
        /// Bytes.
        len: u64,
        /// The node.
        node: u32,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Pages.
    #[error("cannot prefault {len:#x} bytes of RAM at {at:#x}: the host has not enough free memory")]
    Prefault {
        /// Guest-physical address.
        at: u64,
        /// Bytes.
        len: u64,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// A file that was named for it.
    #[error(transparent)]
    File(#[from] FileError),
    /// Ranges that do not fit together.
    #[error("RAM ranges do not fit together: {reason}")]
    Layout {
        /// Why.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    #[test]
    fn terabytes_are_reserved_without_being_touched() {
        let ranges = [Range { start: 0, end: 2 << 30 }, Range { start: 4 << 30, end: 4 << 40 }];
        let memory = create(&ranges, Backing::default()).unwrap();
        assert_eq!(regions(&memory).iter().map(|region| region.len).sum::<u64>(), (4 << 40) - (2 << 30));
    }

    #[test]
    fn shared_memory_can_be_mapped_again_and_keeps_its_length() {
        let ranges = [Range { start: 0, end: 1 << 20 }, Range { start: 4 << 20, end: 6 << 20 }];
        let memory = create(&ranges, Backing { shared: true, ..Backing::default() }).unwrap();
        memory.write_slice(b"seen by both", GuestAddress(5 << 20)).unwrap();
        let region = memory.find_region(GuestAddress(5 << 20)).unwrap();
        let file = region.file_offset().unwrap();
        let mut seen = [0; 12];
        std::os::unix::fs::FileExt::read_exact_at(file.file(), &mut seen, file.start() + (1 << 20)).unwrap();
        assert_eq!(&seen, b"seen by both");
        assert!(file.file().set_len(4096).is_err());
    }

    #[test]
    fn a_short_pool_is_named_with_what_it_has() {
        let error = create(&[Range { start: 0, end: 1 << 50 }], Backing { huge_page: Some(2 << 20), ..Backing::default() });
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("536870912 huge pages of 2 MiB are needed, "), "{text}");
    }
}
