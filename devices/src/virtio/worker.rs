//! Threads that serve queues: started when the driver is ready, woken by doorbells, stopped by a reset.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A queue's doorbell. It lives as long as the function; a ring that nobody took yet wakes the next worker once.
#[derive(Debug)]
pub struct Bell(EventFd);

impl Bell {
    /// A bell that nobody has rung.
    pub fn new() -> io::Result<Self> {
        EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map(Self)
    }

    /// Wakes who waits for it.
    pub fn ring(&self) {
        // Fails when it is full of rings that nobody took: then one more changes nothing.
        let _ = self.0.write(1);
    }

    /// Waits until somebody rings. False when the worker should end.
    #[must_use]
    pub fn wait(&self, stop: &Stop) -> bool {
        self.wait_or(stop, None, None)
    }

    /// Waits until somebody rings, `other` is ready, or `time` has passed. False when the worker should end.
    #[must_use]
    pub fn wait_or(&self, stop: &Stop, other: Option<(BorrowedFd<'_>, PollFlags)>, time: Option<Duration>) -> bool {
        let mut waited = vec![PollFd::new(self, PollFlags::IN)];
        waited.extend(other.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        let time = time
            .map(|time| Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() });
        match poll(&mut waited, time.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
        if waited.first().is_some_and(|bell| bell.revents().contains(PollFlags::IN)) {
            self.take();
        }
        !stop.stopped()
    }

    /// The event, for somebody else to wait for.
    pub(crate) fn event(&self) -> &EventFd {
        &self.0
    }

    /// Forgets rings.
    pub fn take(&self) {
        let _ = self.0.read();
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as `self`, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}

/// Tells a worker to end.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Whether the worker should end. To be asked between system calls that take long.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A running worker. Dropping it stops the thread and waits for it, at most for the system call that it is in.
#[derive(Debug)]
pub struct Worker {
    stop: Stop,
    bells: Vec<Arc<Bell>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts `work` on a thread `name` (Linux keeps 15 bytes of it). `work` waits for one or more of `bells`, all of which
    /// ring when [`Stop::stopped`] has become true, and then ends.
    pub fn start(name: String, bells: Vec<Arc<Bell>>, work: impl FnOnce(&Stop) + Send + 'static) -> io::Result<Self> {
        let stop = Stop::default();
        let inside = stop.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || work(&inside))?;
        Ok(Self { stop, bells, thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.0.store(true, Ordering::Release);
        self.bells.iter().for_each(|bell| bell.ring());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a device worker panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_worker_works_when_rung_and_ends_when_dropped() {
        let (done, seen) = channel();
        let bell = Arc::new(Bell::new().unwrap());
        let inside = bell.clone();
        let worker = Worker::start("blk-test".into(), vec![bell.clone()], move |stop| {
            while inside.wait(stop) {
                done.send(std::thread::current().name().map(str::to_owned)).unwrap();
            }
        })
        .unwrap();
        bell.ring();
        assert_eq!(seen.recv().unwrap().as_deref(), Some("blk-test"));
        drop(worker);
        assert!(seen.recv().is_err(), "the thread is gone");
    }
}
