//! Eventfds as all of Banyan has them: reading and writing one never waits, and no other program inherits it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// An eventfd that nobody has signalled.
pub fn new() -> io::Result<EventFd> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)
}

/// Its descriptor, for as long as `event` is borrowed.
#[must_use]
pub fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: an `EventFd` owns its descriptor and closes it when it is dropped, which the borrow in the result does not outlive.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
