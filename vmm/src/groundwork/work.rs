//! Work that takes as long as the host needs for pages: how far it is, whether it is to go on, and the thread that does it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use api::info::{Progress, Step};
use devices::eventfd;
use vmm_sys_util::eventfd::EventFd;

use super::GroundworkError;
use crate::signals::Signals;

/// How far it is, and whether it is to go on.
#[derive(Debug, Default)]
pub struct Work {
    touches: bool,
    /// Functions of the host are to reach it.
    maps: bool,
    /// What it is, if it is one step alone.
    step: Option<Step>,
    total: u64,
    touched: AtomicU64,
    mapped: AtomicU64,
    stopped: AtomicBool,
}

impl Work {
    /// With `total` bytes, which are touched, mapped for functions of the host, or both, in this order.
    #[must_use]
    pub fn new(touches: bool, maps: bool, total: u64) -> Self {
        Self { touches, maps, total, ..Self::default() }
    }

    /// The step `step` alone, with `total` bytes.
    #[must_use]
    pub fn step(step: Step, total: u64) -> Self {
        Self { step: Some(step), total, ..Self::default() }
    }

    /// So many bytes more have their pages.
    pub fn has_touched(&self, bytes: u64) {
        self.touched.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many bytes more can be reached.
    pub fn has_mapped(&self, bytes: u64) {
        self.mapped.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Breaks it off.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether it was broken off.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || Signals::came()
    }

    /// What is under way.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let (total, touched) = (self.total, self.touched.load(Ordering::Relaxed));
        let step = match self.step {
            Some(step) => step,
            None if self.touches && (touched < total || !self.maps) => Step::Prefault,
            None => Step::DmaMap,
        };
        let done = if step == Step::DmaMap { self.mapped.load(Ordering::Relaxed) } else { touched };
        Progress { step, done, total }
    }
}

/// A thread `prep` that works. Dropping it breaks the work off and takes as long as a piece does.
pub struct Preparation<T> {
    work: Arc<Work>,
    done: Arc<EventFd>,
    /// Set before `done` is signalled: the thread itself may end a moment later.
    finished: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<T, GroundworkError>>>,
}

impl<T: Send + 'static> Preparation<T> {
    /// Begins.
    pub fn start(
        work: Work,
        run: impl FnOnce(&Work) -> Result<T, GroundworkError> + Send + 'static,
    ) -> Result<Self, GroundworkError> {
        Self::start_with(work, Arc::new(eventfd::new().map_err(GroundworkError::Thread)?), run)
    }

    /// Begins; `done` becomes readable at the end.
    pub fn start_with(
        work: Work,
        done: Arc<EventFd>,
        run: impl FnOnce(&Work) -> Result<T, GroundworkError> + Send + 'static,
    ) -> Result<Self, GroundworkError> {
        let (work, finished) = (Arc::new(work), Arc::new(AtomicBool::new(false)));
        let (theirs, told, over) = (Arc::clone(&work), Arc::clone(&done), Arc::clone(&finished));
        let run = move || {
            let result = run(&theirs);
            over.store(true, Ordering::Release);
            // A full counter is readable already.
            let _ = told.write(1);
            result
        };
        let thread = thread::Builder::new().name("prep".to_owned()).spawn(run).map_err(GroundworkError::Thread)?;
        Ok(Self { work, done, finished, thread: Some(thread) })
    }

    /// Readable when it has ended.
    #[must_use]
    pub fn event(&self) -> &EventFd {
        &self.done
    }

    /// Has it end soon, without a wait for it.
    pub fn stop(&self) {
        self.work.stop();
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.work.progress()
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.finished.load(Ordering::Acquire) || self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Result<T, GroundworkError> {
        let thread = self.thread.take().ok_or(GroundworkError::Stopped)?;
        thread.join().unwrap_or_else(|_| Err(GroundworkError::Thread(io::Error::other("a thread ended early"))))
    }
}

impl<T> Drop for Preparation<T> {
    fn drop(&mut self) {
        self.work.stop();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
