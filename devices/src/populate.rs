//! Gives memory of this process its pages, in pieces.

use std::io;

/// What one call populates. The kernel keeps others from changing this process's mappings meanwhile, and a thread that is
/// started, or an allocation, changes them: they must not wait longer than a moment.
const PIECE: u64 = 4 << 20;

/// Gives `len` bytes at `host`, an address in this process, their pages. Their content stays. `progress` hears of each finished
/// part, in bytes, and says whether to go on; if not, the error is [`io::ErrorKind::Interrupted`].
pub fn populate(host: u64, len: u64, progress: &dyn Fn(u64) -> bool) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let chunk = PIECE.min(len - done);
        let (address, bytes) = (usize::try_from(host + done), usize::try_from(chunk));
        let (Ok(address), Ok(bytes)) = (address, bytes) else { return Err(io::ErrorKind::OutOfMemory.into()) };
        // SAFETY: whatever the range is, the advice changes neither content nor mappings: pages that are missing come as a write
        // of the same bytes would bring them, and what is not mapped or not writable is an error.
        if unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(address), bytes, libc::MADV_POPULATE_WRITE) } != 0 {
            return Err(io::Error::last_os_error());
        }
        done += chunk;
        if !progress(chunk) {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use vm_memory::MmapRegion;

    use super::*;

    #[test]
    fn others_may_come_in_between_any_two_pieces_and_end_it() {
        let region = MmapRegion::<()>::new(10 << 20).unwrap();
        let host = region.as_ptr().expose_provenance() as u64;
        let told = RefCell::new(Vec::new());
        let progress = |bytes| {
            told.borrow_mut().push(bytes);
            true
        };
        populate(host, 10 << 20, &progress).unwrap();
        assert_eq!(*told.borrow(), [4 << 20, 4 << 20, 2 << 20]);
        let error = populate(host, 10 << 20, &|_| false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }
}
