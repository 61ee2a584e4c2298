//! Threads that serve queues: started when the driver is ready, woken by doorbells, stopped by a reset, held while the machine
//! is paused or their function may not touch guest memory.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pci::seams::Workers;
use pci::sync::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::ReadWriteFlags;
use vmm_sys_util::eventfd::EventFd;

use crate::eventfd;
use crate::gate::{Gate, Reason};

/// A queue's doorbell. It lives as long as the function; a ring that nobody took yet wakes the next worker once.
#[derive(Debug)]
pub struct Bell(EventFd);

impl Bell {
    /// A bell that nobody has rung.
    pub fn new() -> io::Result<Self> {
        eventfd::new().map(Self)
    }

    /// Wakes who waits for it.
    pub fn ring(&self) {
        // Fails when it is full of rings that nobody took: then one more changes nothing.
        let _ = self.0.write(1);
    }

    /// Waits until somebody rings, and as long as the worker is held. False when the worker should end.
    #[must_use]
    pub fn wait(&self, stop: &Stop) -> bool {
        self.wait_or(stop, None, None)
    }

    /// Waits until somebody rings, `other` is ready, or `time` has passed, and as long as the worker is held. False when the
    /// worker should end.
    #[must_use]
    pub fn wait_or(&self, stop: &Stop, other: Option<(BorrowedFd<'_>, PollFlags)>, time: Option<Duration>) -> bool {
        let bell = PollFd::new(self, PollFlags::IN);
        let time = time.map(timespec);
        let (polled, bell) = match other {
            Some((fd, flags)) => {
                let mut waited = [bell, PollFd::from_borrowed_fd(fd, flags)];
                let polled = poll(&mut waited, time.as_ref());
                let [bell, _] = waited;
                (polled, bell.revents())
            }
            None => {
                let mut waited = [bell];
                let polled = poll(&mut waited, time.as_ref());
                let [bell] = waited;
                (polled, bell.revents())
            }
        };
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
        if bell.contains(PollFlags::IN) {
            self.take();
        }
        !stop.ends()
    }

    /// The event, for somebody else to wait for.
    pub(crate) fn event(&self) -> &EventFd {
        &self.0
    }

    /// Forgets rings.
    pub fn take(&self) {
        let _ = self.0.read();
    }

    /// As [`Bell::ring`], for a bell that another process has as well, which may have made its end wait.
    pub(super) fn ring_shared(&self) {
        // The flag is of what both have. A bell that can take no ring is rung already.
        let shown = rustix::fs::fcntl_getfl(self).and_then(|flags| rustix::fs::fcntl_setfl(self, flags | OFlags::NONBLOCK));
        let mut waited = [PollFd::new(self, PollFlags::OUT)];
        if shown.is_ok() && poll(&mut waited, Some(&timespec(Duration::ZERO))) == Ok(1) {
            self.ring();
        }
    }

    /// Whether somebody rang since the last call, of a bell that another process has as well: it never waits, whatever that
    /// process makes of it.
    pub(super) fn take_shared(&self) -> bool {
        let mut count = [0; 8];
        let mut into = [IoSliceMut::new(&mut count)];
        // At no place in particular, as read(2) does.
        rustix::io::preadv2(self, &mut into, u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
    }
}

/// As system calls take it. What they cannot say is as long as they can.
pub(super) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        eventfd::borrow(&self.0)
    }
}

/// Tells a worker to end, or to stand still.
#[derive(Debug, Clone)]
pub struct Stop {
    stopped: Arc<AtomicBool>,
    crew: Arc<Crew>,
}

impl Stop {
    /// Whether the worker should end. To be asked between system calls that take long, whatever is under way.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Whether the worker should end; waits as long as it is held. To be asked between two buffers: whatever was taken off a
    /// queue has been given back, and what is done of the rest is known to the rings.
    #[must_use]
    pub fn ends(&self) -> bool {
        self.crew.gate.pass(|| self.stopped());
        self.stopped()
    }

    /// Whether [`Stop::ends`] would wait. For those who have to finish something before.
    #[must_use]
    pub fn held(&self) -> bool {
        self.crew.gate.is_closed()
    }
}

#[cfg(test)]
impl Stop {
    /// One that nobody sets.
    pub(crate) fn never() -> Self {
        Self { stopped: Arc::default(), crew: Arc::default() }
    }
}

/// All workers of a function. They are held and released together; one that starts meanwhile is held, too.
#[derive(Default)]
pub struct Crew {
    gate: Gate,
    /// Nothing else is locked while one of these two is.
    members: Mutex<Members>,
    at_release: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew").field("gate", &self.gate).field("members", &self.members).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Members {
    /// What wakes each of them.
    bells: BTreeMap<u64, Vec<Arc<Bell>>>,
    next: u64,
}

/// How long workers have to come to the gate before they are called again.
const CALL: Duration = Duration::from_micros(100);

impl Crew {
    fn join(self: &Arc<Self>, bells: Vec<Arc<Bell>>) -> Member {
        let mut members = self.members();
        let number = members.next;
        members.next += 1;
        members.bells.insert(number, bells);
        Member { crew: self.clone(), number }
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        lock(&self.members)
    }

    /// Has `act` done when the workers are released next.
    pub fn at_release(&self, act: Box<dyn FnOnce() + Send>) {
        *lock(&self.at_release) = Some(act);
    }

    fn wake(&self) {
        self.members().bells.values().flatten().for_each(|bell| bell.ring());
    }

    /// Has them stand still as [`Workers::hold`] does, whatever pauses and goes on, until [`Crew::work`]. False if one of them
    /// has not come to rest after `limit`: it will, and touches guest memory until then. Workers never wait for the function's
    /// lock, so the caller may hold it.
    pub fn rest(&self, limit: Duration) -> bool {
        self.gate.close(Reason::BusMaster);
        self.gather(Some(limit))
    }

    /// Lets them go on after [`Crew::rest`], and look at everything that may have come meanwhile.
    pub fn work(&self) {
        self.gate.open(Reason::BusMaster);
        self.wake();
    }

    /// Calls all of them to the gate and waits until they are there, at most for `limit`. Whether they are.
    fn gather(&self, limit: Option<Duration>) -> bool {
        let since = Instant::now();
        while self.gate.waiting() < self.members().bells.len() {
            if limit.is_some_and(|limit| since.elapsed() > limit) {
                return false;
            }
            self.wake();
            std::thread::sleep(CALL);
        }
        true
    }
}

impl Workers for Crew {
    fn hold(&self) {
        self.gate.close(Reason::Pause);
        self.gather(None);
    }

    fn call(&self) {
        self.gate.close(Reason::Pause);
        self.wake();
    }

    fn release(&self) {
        self.gate.open(Reason::Pause);
        let act = lock(&self.at_release).take();
        if let Some(act) = act {
            act();
        }
        // What came meanwhile rang for nobody.
        self.wake();
    }
}

/// A worker's place among the others; it leaves with its thread.
struct Member {
    crew: Arc<Crew>,
    number: u64,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.crew.members().bells.remove(&self.number);
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
    /// Starts `work` on a thread `name` (Linux keeps 15 bytes of it), as one of `crew`. `work` waits for one or more of `bells`,
    /// all of which ring when [`Stop::stopped`] or [`Stop::held`] has become true, and then ends or asks [`Stop::ends`].
    pub fn start(
        name: String,
        crew: &Arc<Crew>,
        bells: Vec<Arc<Bell>>,
        work: impl FnOnce(&Stop) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Stop { stopped: Arc::default(), crew: crew.clone() };
        let inside = stop.clone();
        let member = crew.join(bells.clone());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            work(&inside);
            drop(member);
        })?;
        Ok(Self { stop, bells, thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.stopped.store(true, Ordering::Release);
        self.stop.crew.gate.recall();
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
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn workers_that_are_held_stand_still_until_they_are_released_or_end() {
        let crew = Arc::new(Crew::default());
        let count = Arc::new(AtomicU32::new(0));
        let start = || {
            let (bell, count) = (Arc::new(Bell::new().unwrap()), count.clone());
            Worker::start("test".into(), &crew, vec![bell.clone()], move |stop| {
                while bell.wait_or(stop, None, Some(Duration::from_micros(10))) {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })
            .unwrap()
        };
        let moves = || {
            let before = count.load(Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            count.load(Ordering::Relaxed) != before
        };
        let workers = [start(), start()];
        for _ in 0..3 {
            crew.hold();
            assert!(!moves());
            crew.release();
            let since = count.load(Ordering::Relaxed);
            while count.load(Ordering::Relaxed) == since {
                std::thread::yield_now();
            }
        }
        crew.hold();
        let late = start();
        crew.hold();
        assert!(!moves(), "one that came while the others were held");
        drop(workers);
        drop(late);
        crew.hold();
        crew.release();
    }

    #[test]
    fn workers_of_many_functions_come_to_rest_together() {
        let crews: Vec<_> = (0..20).map(|_| Arc::new(Crew::default())).collect();
        let slow = |crew: &Arc<Crew>| {
            let bell = Arc::new(Bell::new().unwrap());
            let inside = bell.clone();
            Worker::start("test".into(), crew, vec![bell], move |stop| {
                loop {
                    if stop.held() {
                        // Such as a process that serves the device and is slow to give its rings back.
                        std::thread::sleep(Duration::from_millis(200));
                    }
                    if !inside.wait(stop) {
                        return;
                    }
                }
            })
            .unwrap()
        };
        let workers: Vec<_> = crews.iter().map(slow).collect();
        let since = Instant::now();
        crews.iter().for_each(|crew| crew.call());
        crews.iter().for_each(|crew| crew.hold());
        assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
        drop(workers);
    }

    #[test]
    fn a_worker_that_rests_is_called_to_the_gate() {
        let crew = Arc::new(Crew::default());
        let bell = Arc::new(Bell::new().unwrap());
        let (inside, rung) = (bell.clone(), Arc::new(AtomicU32::new(0)));
        let seen = rung.clone();
        let _worker = Worker::start("test".into(), &crew, vec![bell], move |stop| {
            while inside.wait(stop) {
                seen.fetch_add(1, Ordering::Relaxed);
            }
        })
        .unwrap();
        crew.hold();
        crew.release();
        while rung.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
    }
}
