//! System calls that move bytes between a descriptor and guest memory, without a copy in between.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;

/// Slices of one call (`IOV_MAX`).
pub(crate) const SLICES: usize = 1024;

/// Which way bytes go, and from where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    /// Into guest memory, from where the descriptor stands.
    Read,
    /// From guest memory, to where the descriptor stands.
    Write,
    /// Into guest memory, from this offset.
    ReadAt(u64),
    /// From guest memory, to this offset.
    WriteAt(u64),
}

/// Makes one call with at most [`SLICES`] slices; how many bytes it moved.
pub(crate) fn vectored(fd: BorrowedFd<'_>, call: Call, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let guards: Vec<_> = slices.iter().map(|slice| (slice.ptr_guard_mut(), slice.len())).collect();
    let vectors: Vec<_> =
        guards.iter().map(|(guard, len)| libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: *len }).collect();
    let count = libc::c_int::try_from(vectors.len()).map_err(io::Error::other)?;
    let offset = |at: u64| libc::off64_t::try_from(at).map_err(io::Error::other);
    let (fd, first) = (fd.as_raw_fd(), vectors.as_ptr());
    // SAFETY: `first` points to `count` vectors, each of which lies in a guest memory mapping that its slice keeps mapped
    // and writable while `guards` lives. Guest memory has no Rust references into it, so the kernel may change it, as vCPUs
    // do.
    let moved = unsafe {
        match call {
            Call::Read => libc::readv(fd, first, count),
            Call::Write => libc::writev(fd, first, count),
            Call::ReadAt(at) => libc::preadv64(fd, first, count, offset(at)?),
            Call::WriteAt(at) => libc::pwritev64(fd, first, count, offset(at)?),
        }
    };
    drop(guards);
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}
