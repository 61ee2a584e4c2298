//! Who closes the descriptors of a request that nobody took? A thread that no client waits for: the last close of a tap waits
//! in the kernel until nobody looks at the interface any more (linux: drivers/net/tun.c, `tun_chr_close`), tens of milliseconds
//! for each. And how many may be under way?

use std::mem;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::sync::lock;

/// As many may wait to be closed; beyond that, who has them closes them.
const MOST: usize = 1024;

/// So many may have come with all requests that are not served yet: clients that begin requests and do not end them leave the process
/// the descriptors that it needs.
pub(super) const MOST_UNDER_WAY: usize = 256;

static LEFT: Leftovers<OwnedFd> = Leftovers::new();

/// How many descriptors are under way, of all connections of a server.
#[derive(Debug, Default, Clone)]
pub(super) struct UnderWay(Arc<AtomicUsize>);

/// Descriptors that came with a request. Those that are not taken are closed elsewhere.
#[derive(Debug, Default)]
pub(super) struct Passed {
    descriptors: Vec<OwnedFd>,
    under_way: UnderWay,
}

impl Passed {
    /// None yet.
    pub(super) fn new(under_way: &UnderWay) -> Self {
        Self { descriptors: Vec::new(), under_way: under_way.clone() }
    }

    /// One more; gives it back if [`MOST_UNDER_WAY`] are under way.
    pub(super) fn push(&mut self, descriptor: OwnedFd) -> Result<(), OwnedFd> {
        if self.under_way.0.load(Ordering::Relaxed) >= MOST_UNDER_WAY {
            return Err(descriptor);
        }
        self.under_way.0.fetch_add(1, Ordering::Relaxed);
        self.descriptors.push(descriptor);
        Ok(())
    }

    /// All of them, for who uses them.
    pub(super) fn take(mut self) -> Vec<OwnedFd> {
        self.empty()
    }

    fn empty(&mut self) -> Vec<OwnedFd> {
        self.under_way.0.fetch_sub(self.descriptors.len(), Ordering::Relaxed);
        mem::take(&mut self.descriptors)
    }
}

/// Closes what nobody takes, where no client waits for it.
pub(super) fn close(descriptors: Vec<OwnedFd>) {
    LEFT.add(descriptors);
}

impl Deref for Passed {
    type Target = [OwnedFd];

    fn deref(&self) -> &[OwnedFd] {
        &self.descriptors
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        close(self.empty());
    }
}

/// What is to be dropped by a thread that is there as long as something is.
struct Leftovers<T>(Mutex<Option<Vec<T>>>);

impl<T: Send + 'static> Leftovers<T> {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    fn add(&'static self, mut left: Vec<T>) {
        if left.is_empty() {
            return;
        }
        let mut waiting = lock(&self.0);
        if let Some(waiting) = &mut *waiting {
            let room = MOST.saturating_sub(waiting.len()).min(left.len());
            waiting.extend(left.drain(..room));
        } else if thread::Builder::new().name("close".to_owned()).spawn(|| self.work()).is_ok() {
            *waiting = Some(mem::take(&mut left));
        }
        // What is left is dropped here, with nobody kept waiting for the lock.
        drop(waiting);
    }

    fn work(&self) {
        while let Some(batch) = self.next() {
            drop(batch);
        }
    }

    /// What waits, or nothing, and then the thread ends.
    fn next(&self) -> Option<Vec<T>> {
        let mut waiting = lock(&self.0);
        if waiting.as_ref().is_none_or(Vec::is_empty) {
            *waiting = None;
        }
        waiting.as_mut().map(mem::take)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;

    /// Takes until it is allowed to be dropped, as a tap may, and tells who dropped it.
    struct Slow {
        allowed: Receiver<()>,
        dropped: Sender<thread::ThreadId>,
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.allowed.recv();
            let _ = self.dropped.send(thread::current().id());
        }
    }

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn who_leaves_something_does_not_wait_until_it_is_dropped() {
        static LEFT: Leftovers<Slow> = Leftovers::new();
        let (dropped, told) = channel();
        for _round in 0..3 {
            let slow = || {
                let (allow, allowed) = channel();
                (allow, Slow { allowed, dropped: dropped.clone() })
            };
            let (first, second) = (slow(), slow());
            LEFT.add(vec![first.1]);
            LEFT.add(vec![second.1]);
            assert!(told.try_recv().is_err(), "neither is dropped yet");
            for allow in [first.0, second.0] {
                allow.send(()).unwrap();
                assert_ne!(told.recv_timeout(LIMIT).unwrap(), thread::current().id());
            }
        }
    }

    #[test]
    fn when_too_much_waits_who_has_more_drops_it() {
        static LEFT: Leftovers<Slow> = Leftovers::new();
        let (dropped, told) = channel();
        let (allow, allowed) = channel();
        LEFT.add(vec![Slow { allowed, dropped: dropped.clone() }]);
        let at_once = || Slow { allowed: channel().1, dropped: dropped.clone() };
        // The thread may or may not have begun with the first one.
        LEFT.add((0..MOST + 2).map(|_| at_once()).collect());
        assert_eq!(told.recv_timeout(LIMIT).unwrap(), thread::current().id());
        allow.send(()).unwrap();
        let others = (0..MOST).map(|_| told.recv_timeout(LIMIT).unwrap()).filter(|by| *by != thread::current().id());
        assert!(others.count() >= MOST - 2);
    }
}
