//! RAM in a file that somebody named: which files can be that, how they are opened, and how they become RAM.
//!
//! A process of another's that cuts the file takes pages away: whoever touches them gets SIGBUS, which ends this process, or an
//! error from the kernel, which ends the guest. No file system lets a mapping forbid that.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use arch::memory_map::Range;
use rustix::fs::{fstatfs, fstatvfs};
use thiserror::Error;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::MemoryError;

/// File systems whose pages can be pinned for devices while the file shows what is written (linux: mm/gup.c,
/// `writable_file_mapping_allowed`; include/uapi/linux/magic.h).
const OF_MEMORY: [i64; 2] = [0x0102_1994, 0x9584_58F6];
/// Bytes of what `st_blocks` counts.
const BLOCK: u64 = 512;

/// What a file is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// What the guest writes is in the file. Otherwise it stays in this process, and the file is as it was.
    pub shared: bool,
    /// It is made, or made longer, if need be. Otherwise it has to be there and hold all of RAM.
    pub grows: bool,
    /// Functions of the host are to reach it.
    pub pinned: bool,
}

/// Whether something else than a file is at `path`, as far as that shows without opening it.
pub fn look(path: &Path) -> Result<(), FileError> {
    match fs::metadata(path) {
        Ok(there) if !there.is_file() => Err(FileError::Kind { path: path.to_owned() }),
        _ => Ok(()),
    }
}

/// Opens the file at `path` for `len` bytes of RAM. Never waits, and does nothing to what is no regular file.
pub fn open(path: &Path, len: u64, how: Use) -> Result<File, FileError> {
    let failed = |source| FileError::Open { path: path.to_owned(), source };
    let refused = || FileError::Kind { path: path.to_owned() };
    // First, since opening a device may do something.
    let there = match fs::metadata(path) {
        Ok(there) if there.is_file() => there.len(),
        Ok(_) => return Err(refused()),
        Err(error) if how.grows && error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => return Err(failed(error)),
    };
    let grows = there < len;
    if grows && !how.grows {
        return Err(FileError::Short { path: path.to_owned(), found: there, wanted: len });
    }
    let mut options = OpenOptions::new();
    options.read(true).write(how.shared || grows).create(grows).mode(0o600);
    let file = options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).map_err(failed)?;
    let there = file.metadata().map_err(failed)?;
    if !there.is_file() {
        return Err(refused());
    }
    if how.shared {
        check(&file, there.blocks().saturating_mul(BLOCK), path, len, how.pinned)?;
    }
    if there.len() < len {
        if !how.grows {
            return Err(FileError::Short { path: path.to_owned(), found: there.len(), wanted: len });
        }
        file.set_len(len).map_err(failed)?;
    }
    Ok(file)
}

/// Whether the file system of `file`, which has `kept` bytes of it, can hold `len`.
fn check(file: &File, kept: u64, path: &Path, len: u64, pinned: bool) -> Result<(), FileError> {
    let failed = |source: rustix::io::Errno| FileError::Open { path: path.to_owned(), source: source.into() };
    let kind = fstatfs(file).map_err(failed)?.f_type;
    if pinned && OF_MEMORY.iter().all(|of_memory| *of_memory != kind) {
        return Err(FileError::Pinned { path: path.to_owned() });
    }
    let room = fstatvfs(file).map_err(failed)?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    // A file system of memory without a limit has no blocks.
    if room.f_blocks > 0 && free < len.saturating_sub(kept) {
        return Err(FileError::Room { path: path.to_owned(), wanted: len, free });
    }
    Ok(())
}

/// Maps `file` as RAM in `ranges`, one after the other from its start on. Unless it is `shared`, what the guest writes stays in
/// this process.
pub fn map(file: &File, ranges: &[Range], shared: bool) -> Result<GuestMemoryMmap, MemoryError> {
    let mut regions = Vec::new();
    let mut at = 0;
    let kind = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    for range in ranges {
        let failed = |source: io::Error| MemoryError::Map { at: range.start, len: range.len(), source };
        let len = usize::try_from(range.len()).map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
        let offset = FileOffset::new(file.try_clone().map_err(failed)?, at);
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, kind | libc::MAP_NORESERVE);
        let region = MmapRegion::build(Some(offset), len, prot, flags).map_err(|error| failed(io::Error::other(error)))?;
        let region = GuestRegionMmap::new(region, GuestAddress(range.start));
        regions.push(region.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?);
        at += range.len();
    }
    GuestMemoryMmap::from_regions(regions).map_err(|error| MemoryError::Layout { reason: error.to_string() })
}

/// A file that cannot be RAM.
#[derive(Debug, Error)]
pub enum FileError {
    /// Something else than a file.
    #[error("memory cannot be in {}: it is no regular file; name one, best in a tmpfs", path.display())]
    Kind {
        /// The path.
        path: PathBuf,
    },
    /// Opening it.
    #[error("cannot have memory in {}", path.display())]
    Open {
        /// The path.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// It ends too early.
    #[error(
        "memory of {wanted} bytes cannot be in {}, which has {found}: name the file that the machine was written down with",
        path.display()
    )]
    Short {
        /// The path.
        path: PathBuf,
        /// Bytes.
        found: u64,
        /// Bytes of RAM.
        wanted: u64,
    },
    /// Its file system is too small.
    #[error(
        "memory of {wanted} bytes cannot be in {}: its file system has room for {free} more; make room, or name a file elsewhere",
        path.display()
    )]
    Room {
        /// The path.
        path: PathBuf,
        /// Bytes of RAM.
        wanted: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// Devices cannot reach it.
    #[error(
        "functions of the host cannot reach memory that is shared in {}: put the file into a tmpfs or a hugetlbfs",
        path.display()
    )]
    Pinned {
        /// The path.
        path: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use vm_memory::Bytes;

    use super::*;

    const START: Use = Use { shared: true, grows: true, pinned: false };
    const RESTORE: Use = Use { shared: false, grows: false, pinned: false };
    const MIB: u64 = 1 << 20;

    #[test]
    fn a_file_is_made_for_its_owner_and_grown_and_never_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        open(&path, MIB, START).unwrap();
        let there = || fs::metadata(&path).unwrap();
        assert_eq!((there().len(), there().permissions().mode() & 0o777), (MIB, 0o600));
        open(&path, 2 * MIB, START).unwrap();
        assert_eq!(there().len(), 2 * MIB);
        open(&path, MIB, START).unwrap();
        open(&path, MIB, RESTORE).unwrap();
        assert_eq!(there().len(), 2 * MIB);
        let error = open(&path, 3 * MIB, RESTORE).unwrap_err().to_string();
        assert!(error.contains("memory of 3145728 bytes") && error.contains("which has 2097152"), "{error}");
        assert_eq!(there().len(), 2 * MIB);
        let missing = folder.path().join("missing");
        assert!(matches!(open(&missing, MIB, RESTORE), Err(FileError::Open { .. })));
        assert!(!missing.exists());
    }

    #[test]
    fn folders_devices_fifos_and_sockets_are_no_memory_also_behind_links() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        symlink("/dev/null", at("link")).unwrap();
        for path in [folder.path().to_owned(), "/dev/zero".into(), at("fifo"), at("socket"), at("link")] {
            for how in [START, RESTORE, Use { shared: false, ..START }] {
                let error = open(&path, MIB, how).unwrap_err().to_string();
                assert!(error.contains("it is no regular file"), "{} {how:?}: {error}", path.display());
            }
        }
    }

    #[test]
    fn a_private_machine_reads_a_file_that_nobody_can_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        fs::write(&path, vec![7; 8192]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        let ranges = [Range { start: 0, end: 4096 }, Range { start: 1 << 32, end: (1 << 32) + 4096 }];
        let file = open(&path, 8192, RESTORE).unwrap();
        let (one, other) = (map(&file, &ranges, false).unwrap(), map(&file, &ranges, false).unwrap());
        one.write_slice(b"one", GuestAddress(1 << 32)).unwrap();
        other.write_slice(b"two", GuestAddress(1 << 32)).unwrap();
        let seen = |ram: &GuestMemoryMmap| ram.read_obj::<[u8; 4]>(GuestAddress(1 << 32)).unwrap();
        assert_eq!((&seen(&one), &seen(&other)), (b"one\x07", b"two\x07"));
        assert_eq!(fs::read(&path).unwrap(), vec![7; 8192]);
    }

    #[test]
    fn what_a_shared_machine_writes_is_in_the_file_one_range_after_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let ranges = [Range { start: 0, end: 4096 }, Range { start: 1 << 32, end: (1 << 32) + 4096 }];
        let ram = map(&open(&path, 8192, START).unwrap(), &ranges, true).unwrap();
        ram.write_slice(b"low", GuestAddress(0)).unwrap();
        ram.write_slice(b"high", GuestAddress(1 << 32)).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!((&bytes[..4], &bytes[4096..4101]), (b"low\0".as_slice(), b"high\0".as_slice()));
    }

    #[test]
    fn what_no_file_system_has_room_for_is_refused_before_it_is_touched() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let error = open(&path, 1 << 60, START).unwrap_err().to_string();
        assert!(error.contains("its file system has room for"), "{error}");
        assert_eq!(fs::metadata(&path).map_or(0, |there| there.len()), 0);
    }
}
