//! A thread that serves one queue: started when the driver is ready, woken by the doorbell, stopped by a reset.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

/// What wakes a worker and tells it to stop.
#[derive(Debug)]
pub struct Bell {
    event: EventFd,
    stop: AtomicBool,
}

impl Bell {
    /// A bell that nobody has rung.
    pub fn new() -> io::Result<Self> {
        Ok(Self { event: EventFd::new(EFD_CLOEXEC)?, stop: AtomicBool::new(false) })
    }

    /// Wakes the worker.
    pub fn ring(&self) {
        // Fails only if the event is closed. It waits only after 2^64 rings that nobody took.
        let _ = self.event.write(1);
    }

    /// Waits until somebody rings. False when the worker should end.
    #[must_use]
    pub fn wait(&self) -> bool {
        while !self.stopped() {
            match self.event.read() {
                Ok(_) => return !self.stopped(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        false
    }

    /// Whether the worker should end. To be asked between system calls that take long.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// A running worker. Dropping it stops the thread and waits for it, at most for one read or write of the image.
#[derive(Debug)]
pub struct Worker {
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts `work` on a thread `name` (Linux keeps 15 bytes of it). `work` ends when [`Bell::wait`] says so.
    pub fn start(name: String, work: impl FnOnce(&Bell) + Send + 'static) -> io::Result<Self> {
        let bell = Arc::new(Bell::new()?);
        let inside = bell.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || work(&inside))?;
        Ok(Self { bell, thread: Some(thread) })
    }

    /// Wakes it.
    pub fn ring(&self) {
        self.bell.ring();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.bell.stop.store(true, Ordering::Release);
        self.bell.ring();
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
        let worker = Worker::start("blk-test".into(), move |bell| {
            while bell.wait() {
                done.send(std::thread::current().name().map(str::to_owned)).unwrap();
            }
        })
        .unwrap();
        worker.ring();
        assert_eq!(seen.recv().unwrap().as_deref(), Some("blk-test"));
        drop(worker);
        assert!(seen.recv().is_err(), "the thread is gone");
    }
}
