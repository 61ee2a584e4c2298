//! Carries which processors a guest gave back from the vCPU that hears it to the main loop.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Mutex;

use devices::eventfd;
use pci::sync::lock;
use vmm_sys_util::eventfd::EventFd;

/// Processors whose threads are to end.
#[derive(Debug)]
pub struct Ejected {
    numbers: Mutex<BTreeSet<u8>>,
    event: EventFd,
}

impl Ejected {
    /// None yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self { numbers: Mutex::default(), event: eventfd::new()? })
    }

    /// The guest gave `number` back. Returns at once.
    pub fn tell(&self, number: u8) {
        lock(&self.numbers).insert(number);
        // A full counter is readable already.
        let _ = self.event.write(1);
    }

    /// Takes all that were told.
    pub fn take(&self) -> BTreeSet<u8> {
        let mut numbers = lock(&self.numbers);
        let _ = self.event.read();
        std::mem::take(&mut *numbers)
    }
}

impl AsRawFd for Ejected {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
