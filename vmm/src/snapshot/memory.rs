//! RAM in a file: which pages have content, and how they come back.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use arch::memory_map::Range;
use devices::pagemap::{PAGE, PageMap};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use crate::groundwork::Work;

/// What is copied at a time.
const PIECE: u64 = 1 << 20;

/// The parts of `ram` that are to be written: those in `kept` are in a file already.
pub fn apart<'a>(ram: &'a GuestMemoryMmap, kept: &[Range]) -> impl Iterator<Item = &'a GuestRegionMmap> {
    ram.iter().filter(move |region| kept.iter().all(|range| range.start != region.start_addr().0))
}

/// Has the parts of `ram` that are `kept` in a file on the disk, as far as the file system keeps anything there.
pub fn settle(ram: &GuestMemoryMmap, kept: &[Range]) -> io::Result<()> {
    let named = ram.iter().filter(|region| kept.iter().any(|range| range.start == region.start_addr().0));
    named.filter_map(GuestMemoryRegion::file_offset).try_for_each(|file| file.file().sync_data())
}

/// Writes all of `ram` but `kept` to `file`, one range after the other. Pages of zeros become holes. False when it was broken off.
pub fn write(ram: &GuestMemoryMmap, kept: &[Range], file: &File, work: &Work) -> io::Result<bool> {
    let total: u64 = apart(ram, kept).map(GuestMemoryRegion::len).sum();
    file.set_len(total)?;
    let map = PageMap::open().ok();
    let mut at = 0;
    let mut piece = vec![0; usize::try_from(PIECE).unwrap_or(PAGE)];
    for region in apart(ram, kept) {
        for offset in (0..region.len()).step_by(usize::try_from(PIECE).unwrap_or(PAGE)) {
            if work.is_stopped() {
                return Ok(false);
            }
            let len = PIECE.min(region.len() - offset);
            if touched(region, offset, len, map.as_ref()) {
                let bytes = usize::try_from(len).ok().and_then(|len| piece.get_mut(..len)).unwrap_or_default();
                ram.read_slice(bytes, GuestAddress(region.start_addr().0 + offset)).map_err(io::Error::other)?;
                write_pages(file, at + offset, bytes)?;
            }
            work.has_touched(len);
        }
        at += region.len();
    }
    Ok(true)
}

/// Writes runs of pages that are not zero.
fn write_pages(file: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
    let mut start = 0;
    while start < bytes.len() {
        let rest = bytes.get(start..).unwrap_or_default();
        let holds = |page: &[u8]| page.iter().any(|byte| *byte != 0);
        let skipped = rest.chunks(PAGE).take_while(|page| !holds(page)).map(<[u8]>::len).sum::<usize>();
        let rest = rest.get(skipped..).unwrap_or_default();
        let run = rest.chunks(PAGE).take_while(|page| holds(page)).map(<[u8]>::len).sum::<usize>();
        file.write_all_at(rest.get(..run).unwrap_or_default(), at + (start + skipped) as u64)?;
        start += skipped + run;
    }
    Ok(())
}

/// Whether some page in `len` bytes from `offset` of a region may hold something: it is there, or in the file behind.
fn touched(region: &GuestRegionMmap, offset: u64, len: u64, map: Option<&PageMap>) -> bool {
    if let Some(backing) = region.file_offset() {
        let from = backing.start() + offset;
        match seek(backing.file(), SeekFrom::Data(from)) {
            Ok(data) if data < from + len => return true,
            Ok(_) | Err(Errno::NXIO) => {}
            Err(_) => return true,
        }
    }
    let (Some(map), Ok(offset), Ok(len)) = (map, usize::try_from(offset), usize::try_from(len)) else { return true };
    let used = map.used(region.as_ptr().addr() + offset, len.div_ceil(PAGE));
    used.map_or(true, |mut used| used.next().is_some())
}

/// Fills `ram`, which is new, with what `file` holds. False when it was broken off.
pub fn fill(ram: &GuestMemoryMmap, file: &File, work: &Work) -> io::Result<bool> {
    let mut start = 0;
    let mut piece = vec![0; usize::try_from(PIECE).unwrap_or(PAGE)];
    for region in ram.iter() {
        let mut offset = 0;
        while offset < region.len() {
            if work.is_stopped() {
                return Ok(false);
            }
            let data = match seek(file, SeekFrom::Data(start + offset)) {
                Ok(data) => data.saturating_sub(start).min(region.len()),
                Err(Errno::NXIO) => region.len(),
                // A file system without holes.
                Err(_) => offset,
            };
            if data > offset {
                work.has_touched(data - offset);
                offset = data;
                continue;
            }
            let len = PIECE.min(region.len() - offset);
            let bytes = usize::try_from(len).ok().and_then(|len| piece.get_mut(..len)).unwrap_or_default();
            file.read_exact_at(bytes, start + offset)?;
            ram.write_slice(bytes, GuestAddress(region.start_addr().0 + offset)).map_err(io::Error::other)?;
            work.has_touched(len);
            offset += len;
        }
        start += region.len();
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use api::info::Step;

    use super::*;
    use crate::memory::{self, Backing};

    fn map(file: &File, ranges: &[Range]) -> GuestMemoryMmap {
        memory::file::map(file, ranges, false).unwrap()
    }

    const RANGES: [Range; 2] = [Range { start: 0, end: 8 << 20 }, Range { start: 16 << 20, end: 48 << 20 }];

    fn filled(backing: Backing) -> GuestMemoryMmap {
        let ram = memory::create(&RANGES, backing).unwrap();
        ram.write_slice(b"low", GuestAddress(0x1000)).unwrap();
        ram.write_slice(b"high", GuestAddress((48 << 20) - 4)).unwrap();
        ram.write_slice(&[0; 4096], GuestAddress(20 << 20)).unwrap();
        ram
    }

    fn content(ram: &GuestMemoryMmap) -> ([u8; 3], [u8; 4]) {
        (ram.read_obj(GuestAddress(0x1000)).unwrap(), ram.read_obj(GuestAddress((48 << 20) - 4)).unwrap())
    }

    #[test]
    fn ram_comes_back_with_its_holes_however_it_is_backed() {
        for shared in [false, true] {
            let backing = Backing { shared, ..Backing::default() };
            let file = tempfile::tempfile().unwrap();
            let work = Work::step(Step::Snapshot, 40 << 20);
            assert!(write(&filled(backing), &[], &file, &work).unwrap());
            assert_eq!(work.progress().percent(), 100);
            let metadata = file.metadata().unwrap();
            assert_eq!(metadata.len(), 40 << 20);
            assert!(metadata.blocks() * 512 <= 64 << 10, "{} blocks", metadata.blocks());
            let mapped = map(&file, &RANGES);
            assert_eq!(content(&mapped), (*b"low", *b"high"));
            let new = memory::create(&RANGES, backing).unwrap();
            assert!(fill(&new, &file, &Work::step(Step::Restore, 40 << 20)).unwrap());
            assert_eq!(content(&new), (*b"low", *b"high"));
            // Another one of what was mapped has both what was there and what was written since.
            mapped.write_slice(b"new", GuestAddress(0x1000)).unwrap();
            let again = tempfile::tempfile().unwrap();
            assert!(write(&mapped, &[], &again, &Work::step(Step::Snapshot, 40 << 20)).unwrap());
            assert_eq!(content(&map(&again, &RANGES)), (*b"new", *b"high"));
            assert_eq!(content(&map(&file, &RANGES)), (*b"low", *b"high"), "the file is as it was");
        }
    }

    #[test]
    fn what_is_in_a_file_already_is_not_written_again() {
        let file = tempfile::tempfile().unwrap();
        assert!(write(&filled(Backing::default()), &RANGES[..1], &file, &Work::step(Step::Snapshot, 32 << 20)).unwrap());
        assert_eq!(file.metadata().unwrap().len(), 32 << 20);
        let mut last = [0; 4];
        file.read_exact_at(&mut last, (32 << 20) - 4).unwrap();
        assert_eq!(&last, b"high");
    }

    #[test]
    fn writing_ends_when_it_is_broken_off() {
        let work = Work::step(Step::Snapshot, 40 << 20);
        work.stop();
        let file = tempfile::tempfile().unwrap();
        assert!(!write(&filled(Backing::default()), &[], &file, &work).unwrap());
        assert!(!fill(&filled(Backing::default()), &file, &work).unwrap());
    }
}
