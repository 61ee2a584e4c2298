//! Gives pages of guest memory back to the host, and gets them before they are used.

use std::io;

use vm_memory::guest_memory::Permissions;
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

/// linux: include/uapi/asm-generic/mman-common.h, since 5.14.
const MADV_POPULATE_WRITE: i32 = 23;

/// Frees the host's memory behind `len` bytes at `at`: they read as zeros afterwards. What is no RAM has nothing to give.
pub(super) fn give_back(memory: &GuestMemoryMmap, at: GuestAddress, len: u64) -> io::Result<()> {
    // Pages of a file, which others may map, are freed in the file.
    let shared = memory.find_region(at).is_some_and(|region| region.flags() & libc::MAP_SHARED != 0);
    advise(memory, at, len, if shared { libc::MADV_REMOVE } else { libc::MADV_DONTNEED })
}

/// Gives `len` bytes at `at` their pages. Their content stays.
pub(super) fn populate(memory: &GuestMemoryMmap, at: GuestAddress, len: u64) -> io::Result<()> {
    advise(memory, at, len, MADV_POPULATE_WRITE)
}

/// Follows `advice` for every part; the first failure is told.
fn advise(memory: &GuestMemoryMmap, at: GuestAddress, len: u64, advice: i32) -> io::Result<()> {
    let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut done = Ok(());
    for slice in GuestMemory::get_slices(memory, at, len, Permissions::Write).into_iter().flatten().map_while(Result::ok) {
        done = done.and(advise_slice(&slice, advice));
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
