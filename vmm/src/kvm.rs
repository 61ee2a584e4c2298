//! The kernel's side of the machine: the VM, its memory slots, its interrupt routes. Only this module and
//! [`crate::vcpu`] name kvm-ioctls.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};

use vmm_sys_util::eventfd::EventFd;

mod ahead;
mod doorbells;
mod groups;
mod gsi;
mod interrupt;
mod slots;
mod vm;

pub use ahead::{CpuidAhead, host_cpuid};
pub use doorbells::Doorbells;
pub use gsi::GsiTable;
pub use interrupt::{EdgeLine, RoutedMsi, SharedIntx, SignalMsi};
pub use slots::{SlotError, Slots};
pub use vm::{KvmError, KvmStateError, Vm};

/// An eventfd as the type that kvm-ioctls wants.
fn as_event(event: BorrowedFd<'_>) -> ManuallyDrop<EventFd> {
    // SAFETY: the descriptor is open as long as the borrow, which outlives every use of the result in this module, and is
    // not closed with it.
    ManuallyDrop::new(unsafe { EventFd::from_raw_fd(event.as_raw_fd()) })
}
