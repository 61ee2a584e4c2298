//! Carries what a guest tells about its slots from the vCPU that hears it to the main loop.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, PoisonError};

use pci::function::FunctionId;
use pci::slot::SlotEvent;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Most events that wait. A guest that writes slot registers in a loop makes the same ones again and again.
const LIMIT: usize = 1024;

/// Events in the order in which they were told.
#[derive(Debug)]
pub struct SlotEvents {
    waiting: Mutex<Vec<(FunctionId, SlotEvent)>>,
    event: EventFd,
}

impl SlotEvents {
    /// Nothing told yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self { waiting: Mutex::default(), event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? })
    }

    /// A guest told `event` about the slot of `port`. The same event twice in a row is told once.
    pub fn tell(&self, port: FunctionId, event: SlotEvent) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.last() != Some(&(port, event)) && waiting.len() < LIMIT {
            waiting.push((port, event));
            // A full counter is readable already.
            let _ = self.event.write(1);
        }
    }

    /// Takes all that waits.
    pub fn take(&self) -> Vec<(FunctionId, SlotEvent)> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.event.read();
        std::mem::take(&mut *waiting)
    }
}

impl AsRawFd for SlotEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
