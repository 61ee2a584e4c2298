//! What the host says of a function beside its interrupts: that hardware reported an error, and that the host wants it back.
//!
//! linux: drivers/vfio/pci/vfio_pci_core.c, `vfio_pci_core_aer_err_detected` and `vfio_pci_core_request`. The second is said
//! about every ten seconds until the function is closed, and what unbinds the driver waits as long.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

/// Something that the host says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Signal {
    /// Hardware reported an uncorrectable error of the function, or of a port above it.
    Error,
    /// The host wants the function back.
    Request,
}

impl Signal {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Error, Self::Request];
}

/// Where the host says it: an event descriptor for each.
#[derive(Debug)]
pub struct Signals {
    error: OwnedFd,
    request: OwnedFd,
}

impl Signals {
    /// Nothing said yet.
    pub fn new() -> io::Result<Self> {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self { error: event()?, request: event()? })
    }

    /// Becomes readable when `signal` is given.
    #[must_use]
    pub fn event(&self, signal: Signal) -> BorrowedFd<'_> {
        match signal {
            Signal::Error => self.error.as_fd(),
            Signal::Request => self.request.as_fd(),
        }
    }

    /// How often `signal` was given since the last call.
    #[must_use]
    pub fn take(&self, signal: Signal) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(self.event(signal), &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_counted_apart_and_taken_once() {
        let signals = Signals::new().unwrap();
        assert_eq!(Signal::ALL.map(|signal| signals.take(signal)), [0, 0]);
        for _ in 0..3 {
            rustix::io::write(signals.event(Signal::Error), &1_u64.to_ne_bytes()).unwrap();
        }
        assert_eq!(Signal::ALL.map(|signal| signals.take(signal)), [3, 0]);
        assert_eq!(Signal::ALL.map(|signal| signals.take(signal)), [0, 0]);
    }
}
