//! Gives pages of guest memory back to the host, and gets them before they are used.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use vm_memory::guest_memory::Permissions;
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileSlice};

/// Parts of a file that are smaller are not replaced: each may be a mapping of its own, and the kernel gives a process
/// 65530 (linux: Documentation/admin-guide/sysctl/vm.rst, `max_map_count`).
const LEAST_REPLACED: usize = 2 << 20;
/// How many parts are replaced at most, whatever the guest does.
const MOST_REPLACED: u32 = 16 << 10;
static REPLACED: AtomicU32 = AtomicU32::new(0);

/// Frees the host's memory behind `len` bytes at `at`: they read as zeros afterwards. What is no RAM has nothing to give.
///
/// Where RAM is that of a snapshot, mapped for this process alone, parts of less than 2 MiB read as they were saved.
pub(super) fn give_back(memory: &GuestMemoryMmap, at: GuestAddress, len: u64) -> io::Result<()> {
    let region = memory.find_region(at);
    match region.map(|region| (region.flags() & libc::MAP_SHARED != 0, region.file_offset().is_some())) {
        // Pages of a file, which others may map, are freed in the file.
        Some((true, _)) => advise(memory, at, len, libc::MADV_REMOVE),
        Some((false, true)) => each(memory, at, len, |slice| {
            let replaces = slice.len() >= LEAST_REPLACED && REPLACED.fetch_add(1, Ordering::Relaxed) < MOST_REPLACED;
            if replaces { replace(slice) } else { advise_slice(slice, libc::MADV_DONTNEED) }
        }),
        _ => advise(memory, at, len, libc::MADV_DONTNEED),
    }
}

/// Gives `len` bytes at `at` their pages. Their content stays.
pub(super) fn populate(memory: &GuestMemoryMmap, at: GuestAddress, len: u64) -> io::Result<()> {
    advise(memory, at, len, libc::MADV_POPULATE_WRITE)
}

/// Follows `advice` for every part; the first failure is told.
fn advise(memory: &GuestMemoryMmap, at: GuestAddress, len: u64, advice: i32) -> io::Result<()> {
    each(memory, at, len, |slice| advise_slice(slice, advice))
}

/// Does something with every part; the first failure is told.
fn each(
    memory: &GuestMemoryMmap,
    at: GuestAddress,
    len: u64,
    act: impl Fn(&VolatileSlice<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut done = Ok(());
    for slice in GuestMemory::get_slices(memory, at, len, Permissions::Write).into_iter().flatten().map_while(Result::ok) {
        done = done.and(act(&slice));
    }
    done
}

fn advise_slice(slice: &VolatileSlice<'_>, advice: i32) -> io::Result<()> {
    let guard = slice.ptr_guard_mut();
    // SAFETY: the guard's range lies in a mapping of guest RAM, which nothing but guests and devices read; they find its
    // content or zeros afterwards, as after any write of the guest's.
    if unsafe { libc::madvise(guard.as_ptr().cast(), slice.len(), advice) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Puts new memory in the place of a part of a private mapping, from the same nodes of the host.
fn replace(slice: &VolatileSlice<'_>) -> io::Result<()> {
    let guard = slice.ptr_guard_mut();
    let (address, len) = (guard.as_ptr().cast::<libc::c_void>(), slice.len());
    // linux: include/uapi/linux/mempolicy.h, MPOL_F_ADDR; room for the nodes of any kernel.
    const OF_ADDRESS: libc::c_ulong = 2;
    let (mut mode, mut nodes): (libc::c_int, [u64; 16]) = (libc::MPOL_DEFAULT, [0; 16]);
    let bits = size_of_val(&nodes) * 8;
    // SAFETY: the kernel writes the mode and at most `bits` bits of the mask.
    let known = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, nodes.as_mut_ptr(), bits, address, OF_ADDRESS) };
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED);
    // SAFETY: the guard's range lies in a mapping of guest RAM, of which it replaces whole pages and changes no bounds. Only
    // guests and devices read it; they find zeros afterwards, as after any write of the guest's.
    if unsafe { libc::mmap(address, len, prot, flags, -1, 0) } == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // A kernel without nodes knows none of this.
    if known == 0 && mode != libc::MPOL_DEFAULT {
        // SAFETY: it says where the pages of this range come from, and changes no content. The mask has the bits that are read.
        if unsafe { libc::syscall(libc::SYS_mbind, address, len, mode, nodes.as_ptr(), bits, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use vm_memory::{Bytes, FileOffset, GuestRegionMmap, MmapRegion};

    use super::*;

    const LEN: usize = 8 << 20;

    fn mapped(file: File) -> GuestMemoryMmap {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
        let region = MmapRegion::build(Some(FileOffset::new(file, 0)), LEN, prot, flags).unwrap();
        GuestMemoryMmap::from_regions(vec![GuestRegionMmap::new(region, GuestAddress(0)).unwrap()]).unwrap()
    }

    #[test]
    fn blocks_of_a_snapshot_read_as_zeros_when_they_were_given_back_and_the_file_stays() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![7; LEN], 0).unwrap();
        let memory = mapped(file.try_clone().unwrap());
        let byte = |at: u64| memory.read_obj::<u8>(GuestAddress(at)).unwrap();
        memory.write_obj(8_u8, GuestAddress(2 << 20)).unwrap();
        give_back(&memory, GuestAddress(2 << 20), 2 << 20).unwrap();
        let (first, last) = (2 << 20, (4 << 20) - 1);
        assert_eq!([first - 1, first, last, last + 1].map(byte), [7, 0, 0, 7]);
        memory.write_obj(9_u8, GuestAddress(first)).unwrap();
        assert_eq!(byte(first), 9);
        give_back(&memory, GuestAddress(first), 2 << 20).unwrap();
        assert_eq!(byte(first), 0);
        let mut saved = [0];
        file.read_exact_at(&mut saved, first).unwrap();
        assert_eq!(saved, [7]);
    }
}
