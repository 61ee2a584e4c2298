//! Holds threads back while the machine is paused: vCPUs, and the workers of devices, those also while their function may not
//! touch guest memory.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use pci::sync::{lock, wait};

/// Why a gate is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The machine is paused.
    Pause = 1,
    /// The function may not touch guest memory.
    BusMaster = 2,
}

/// A gate that threads pass before they touch what is the guest's. An open gate costs one load.
#[derive(Debug, Default)]
pub struct Gate {
    /// The reasons for which it is closed.
    closed: AtomicU8,
    waiting: Mutex<usize>,
    changed: Condvar,
}

impl Gate {
    /// Waits while the gate is closed, unless `leave` says that the thread has to go.
    pub fn pass(&self, leave: impl Fn() -> bool) {
        if !self.is_closed() {
            return;
        }
        let mut waiting = self.lock();
        *waiting += 1;
        while self.is_closed() && !leave() {
            waiting = wait(&self.changed, waiting);
        }
        *waiting -= 1;
    }

    /// Whether it is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    /// Closes the gate. Threads that have passed it have to be called back. Closed twice for a reason is closed once.
    pub fn close(&self, reason: Reason) {
        self.closed.fetch_or(reason as u8, Ordering::AcqRel);
    }

    /// Opens the gate, unless there is another reason for which it is closed.
    pub fn open(&self, reason: Reason) {
        self.closed.fetch_and(!(reason as u8), Ordering::AcqRel);
        self.recall();
    }

    /// Makes those who wait look again whether they have to go.
    pub fn recall(&self) {
        // Taken so that nobody is between looking and waiting.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        lock(&self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn those_who_wait_go_on_when_the_gate_opens_or_when_they_have_to_leave() {
        let (gate, stop) = (Gate::default(), AtomicBool::new(false));
        gate.pass(|| false);
        gate.close(Reason::Pause);
        thread::scope(|scope| {
            let held: Vec<_> = (0..3).map(|_| scope.spawn(|| gate.pass(|| stop.load(Ordering::Acquire)))).collect();
            while gate.waiting() < 3 {
                thread::yield_now();
            }
            assert!(held.iter().all(|held| !held.is_finished()));
            stop.store(true, Ordering::Release);
            gate.recall();
        });
        assert_eq!(gate.waiting(), 0);
        gate.close(Reason::BusMaster);
        gate.close(Reason::Pause);
        gate.open(Reason::Pause);
        assert!(gate.is_closed(), "the other reason is left");
        gate.open(Reason::BusMaster);
        gate.pass(|| false);
    }
}
