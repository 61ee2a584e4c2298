//! Gives pages of guest memory back to the host, and gets them before they are used.

use std::fs;
use std::io;
use std::sync::Mutex;

use pci::sync::lock;
use vm_memory::guest_memory::Permissions;
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileSlice};

use crate::populate;

/// How many more mappings this process may have for parts that are replaced: the kernel makes one of neighbours where it can.
static ROOM: Mutex<Room> = Mutex::new(Room { mappings: 0, refused: 0 });

/// Frees the host's memory behind `len` bytes at `at`: they read as zeros afterwards. What is no RAM has nothing to give.
///
/// Where RAM is that of a snapshot, mapped for this process alone, new memory takes the place of the file's. Each part may be a
/// mapping of its own, of which a process has a limited number. While half of them are in use, parts read as they were saved.
pub(super) fn give_back(memory: &GuestMemoryMmap, at: GuestAddress, len: u64) -> io::Result<()> {
    let region = memory.find_region(at);
    match region.map(|region| (region.flags() & libc::MAP_SHARED != 0, region.file_offset().is_some())) {
        // Pages of a file, which others may map, are freed in the file.
        Some((true, _)) => advise(memory, at, len, libc::MADV_REMOVE),
        Some((false, true)) => each(memory, at, len, |slice| {
            let replaces = lock(&ROOM).take();
            if replaces { replace(slice) } else { advise_slice(slice, libc::MADV_DONTNEED) }
        }),
        _ => advise(memory, at, len, libc::MADV_DONTNEED),
    }
}

/// Mappings that may still be made.
struct Room {
    /// Surely.
    mappings: usize,
    /// How often there were none since they were last counted.
    refused: usize,
}

impl Room {
    /// How often there has to be none before mappings are counted again, and how many there are to be then.
    const RARELY: usize = 1024;

    /// Whether a part may be replaced, which leaves two mappings more than before at most.
    fn take(&mut self) -> bool {
        if self.mappings < 2 && self.refused.is_multiple_of(Self::RARELY) {
            self.mappings = Some(room()).filter(|room| *room >= Self::RARELY).unwrap_or(0);
        }
        let there = self.mappings >= 2;
        if there {
            (self.mappings, self.refused) = (self.mappings - 2, 0);
        } else {
            self.refused += 1;
        }
        there
    }
}

/// How many mappings this process has less than half of those that it may have
/// (linux: Documentation/admin-guide/sysctl/vm.rst, `max_map_count`).
fn room() -> usize {
    let most = fs::read_to_string("/proc/sys/vm/max_map_count").ok().and_then(|text| text.trim().parse().ok());
    let most: usize = most.unwrap_or(65530);
    let has = fs::read("/proc/self/maps").map_or(usize::MAX, |maps| maps.iter().filter(|byte| **byte == b'\n').count());
    (most / 2).saturating_sub(has)
}

/// Gives `len` bytes at `at` their pages. Their content stays. `go_on` is asked between pieces; if not, the error is
/// [`io::ErrorKind::Interrupted`].
pub(super) fn populate(memory: &GuestMemoryMmap, at: GuestAddress, len: u64, go_on: &dyn Fn() -> bool) -> io::Result<()> {
    each(memory, at, len, |slice| {
        let guard = slice.ptr_guard_mut();
        populate::populate(guard.as_ptr().expose_provenance() as u64, slice.len() as u64, &|_| go_on())
    })
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
    use std::sync::MutexGuard;

    use vm_memory::{Bytes, FileOffset, GuestRegionMmap, MmapRegion};

    use super::*;

    const LEN: usize = 8 << 20;

    /// The mappings of this process, for one test at a time, and not counted yet.
    fn alone() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = lock(&TURN);
        *ROOM.lock().unwrap() = Room { mappings: 0, refused: 0 };
        turn
    }

    fn mapped(file: File) -> GuestMemoryMmap {
        mapped_as(file, LEN)
    }

    fn mapped_as(file: File, len: usize) -> GuestMemoryMmap {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
        let region = MmapRegion::build(Some(FileOffset::new(file, 0)), len, prot, flags).unwrap();
        GuestMemoryMmap::from_regions(vec![GuestRegionMmap::new(region, GuestAddress(0)).unwrap()]).unwrap()
    }

    #[test]
    fn blocks_of_a_snapshot_read_as_zeros_when_they_were_given_back_and_the_file_stays() {
        let _turn = alone();
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

    #[test]
    fn single_pages_of_a_snapshot_read_as_zeros_when_they_were_given_back() {
        let _turn = alone();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![7; LEN], 0).unwrap();
        let memory = mapped(file);
        for page in [1, 2, 5] {
            give_back(&memory, GuestAddress(page << 12), 4096).unwrap();
        }
        let first: Vec<u8> = (0..7).map(|page| memory.read_obj(GuestAddress(page << 12)).unwrap()).collect();
        assert_eq!(first, [7, 0, 0, 7, 7, 0, 7]);
        memory.write_obj(9_u8, GuestAddress(1 << 12)).unwrap();
        give_back(&memory, GuestAddress(1 << 12), 4096).unwrap();
        assert_eq!(memory.read_obj::<u8>(GuestAddress(1 << 12)).unwrap(), 0);
    }

    #[test]
    fn a_guest_that_gives_every_second_page_back_leaves_the_process_half_of_its_mappings() {
        const LARGE: usize = 512 << 20;
        let _turn = alone();
        let file = tempfile::tempfile().unwrap();
        file.set_len(LARGE as u64).unwrap();
        let memory = mapped_as(file, LARGE);
        for at in (0..LARGE as u64).step_by(8192) {
            give_back(&memory, GuestAddress(at), 4096).unwrap();
        }
        let most: usize = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        // Others of this process make some as well.
        assert!(maps > 8192.min(most / 4) && maps < most / 2 + 4096, "{maps} of {most}");
        // What is refused reads as it was saved, and others have room again when it is gone.
        drop(memory);
        assert!(room() > Room::RARELY, "{}", room());
    }
}
