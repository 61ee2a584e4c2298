//! Carries what a guest tells about its slots, and that it moves BARs, from the vCPU that hears it to the main loop.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use devices::eventfd;
use pci::function::FunctionId;
use pci::slot::SlotEvent;
use pci::sync::lock;
use vmm_sys_util::eventfd::EventFd;

/// Most events that wait. A guest that writes slot registers in a loop makes the same ones again and again.
const LIMIT: usize = 1024;

/// How long BARs may move on before somebody looks where they are. A guest that moves them in a loop costs one look in this
/// time, and what it does when it sizes a BAR is over by then.
const PAUSE: Duration = Duration::from_millis(250);

/// Events in the order in which they were told.
#[derive(Debug)]
pub struct SlotEvents {
    waiting: Mutex<Vec<(FunctionId, SlotEvent)>>,
    /// When the first BAR moved, came or was hidden since somebody looked.
    moved: Mutex<Option<Instant>>,
    event: EventFd,
}

impl SlotEvents {
    /// Nothing told yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self { waiting: Mutex::default(), moved: Mutex::default(), event: eventfd::new()? })
    }

    /// A guest told `event` about the slot of `port`. The same event twice in a row is told once.
    pub fn tell(&self, port: FunctionId, event: SlotEvent) {
        let mut waiting = lock(&self.waiting);
        if waiting.last() != Some(&(port, event)) && waiting.len() < LIMIT {
            waiting.push((port, event));
            // A full counter is readable already.
            let _ = self.event.write(1);
        }
    }

    /// A BAR moved, came or was hidden. Wakes the main loop once until somebody looks.
    pub fn tell_moved(&self) {
        let mut moved = self.moved();
        if moved.is_none() {
            *moved = Some(Instant::now());
            let _ = self.event.write(1);
        }
    }

    /// When somebody has to look where BARs are, if they have moved since the last look.
    pub fn look_at(&self) -> Option<Instant> {
        self.moved().map(|first| first + PAUSE)
    }

    /// Somebody looks. To be called before the places are read: what moves meanwhile is looked at again.
    pub fn look(&self) {
        *self.moved() = None;
    }

    fn moved(&self) -> MutexGuard<'_, Option<Instant>> {
        lock(&self.moved)
    }

    /// Takes all that waits.
    pub fn take(&self) -> Vec<(FunctionId, SlotEvent)> {
        let mut waiting = lock(&self.waiting);
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
            assert_eq!(events.look_at(), None);
            (0..1000).for_each(|_| events.tell_moved());
            assert_eq!(events.event.read().unwrap(), 1);
            assert!(events.look_at().is_some());
            events.look();
        }
    }

    #[test]
    fn bars_that_move_in_a_loop_are_looked_at_a_few_times_a_second() {
        let events = SlotEvents::new().unwrap();
        let before = Instant::now();
        events.tell_moved();
        let first = events.look_at().unwrap();
        assert!((before + PAUSE..before + 2 * PAUSE).contains(&first), "late enough to cost little, in time for who asks");
        std::thread::sleep(Duration::from_millis(2));
        events.tell_moved();
        assert_eq!(events.look_at(), Some(first), "a guest that goes on does not put it off");
        events.look();
        events.tell_moved();
        assert!(events.look_at().unwrap() > first, "the next look has its own pause");
    }
}
