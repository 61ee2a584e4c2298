//! Carries what a guest tells about its slots, and that it moves BARs, from the vCPU that hears it to the main loop.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// Whether BARs have moved since somebody looked.
    moved: AtomicBool,
    event: EventFd,
}

impl SlotEvents {
    /// Nothing told yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self { waiting: Mutex::default(), moved: AtomicBool::new(false), event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? })
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

    /// A BAR has a place that it had not. Told once until somebody looks.
    pub fn tell_moved(&self) {
        if !self.moved.swap(true, Ordering::AcqRel) {
            let _ = self.event.write(1);
        }
    }

    /// Whether BARs have moved since the last call. To be called before their places are looked at.
    pub fn take_moved(&self) -> bool {
        self.moved.swap(false, Ordering::AcqRel)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_that_move_in_a_loop_wake_the_main_loop_once_until_it_looks() {
        let events = SlotEvents::new().unwrap();
        for _ in 0..2 {
            (0..1000).for_each(|_| events.tell_moved());
            assert_eq!(events.event.read().unwrap(), 1);
            assert!(events.take_moved() && !events.take_moved());
        }
    }
}
