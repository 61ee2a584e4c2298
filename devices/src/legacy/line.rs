//! A console that clients attach to and leave: a pseudo-terminal or a unix socket, one client at a time.
//!
//! What the guest prints waits in a ring for the next client, so that every byte arrives once and in order as long as the
//! ring holds it; then the oldest give way. A vCPU only ever puts bytes into the ring. A thread of the line does the rest, for
//! as long as the line lives, through all resets of the guest.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pci::sync::{lock, wait_at_most};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use vmm_sys_util::eventfd::EventFd;

use super::console::{ConsoleSink, InputLine};
use crate::eventfd;

/// Most bytes that wait for a client.
pub const RING_LIMIT: usize = 1 << 20;
const CHUNK: usize = 4096;
/// How often a pseudo-terminal without a client is looked at: the kernel does not tell when one comes.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// A line with its thread.
pub struct Line {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    path: Option<PathBuf>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled when the ring becomes empty or the client leaves.
    drained: Condvar,
    wake: EventFd,
}

#[derive(Default)]
struct State {
    ring: VecDeque<u8>,
    lost: u64,
    attached: bool,
    input: Option<Arc<dyn InputLine>>,
    ended: bool,
}

enum Place {
    /// The side of a pseudo-terminal that is not a terminal.
    Pty(OwnedFd),
    Socket {
        listener: UnixListener,
        client: Option<UnixStream>,
    },
}

impl Line {
    /// A new pseudo-terminal in raw mode. [`Line::path`] says where clients find it.
    pub fn pty(name: &str) -> io::Result<Self> {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&ours)?;
        unlockpt(&ours)?;
        let path = ptsname(&ours, Vec::new())?.into_string().map_err(io::Error::other)?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        // Opened and closed once, the terminal says that it has no client; before, it says nothing.
        let theirs = rustix::fs::open(&path, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
        let mut settings = tcgetattr(&theirs)?;
        settings.make_raw();
        tcsetattr(&theirs, OptionalActions::Now, &settings)?;
        drop(theirs);
        Self::start(name, Place::Pty(ours), Some(path.into()))
    }

    /// Clients connect to `listener`; while one is there the next one waits.
    pub fn socket(name: &str, listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Self::start(name, Place::Socket { listener, client: None }, None)
    }

    fn start(name: &str, place: Place, path: Option<PathBuf>) -> io::Result<Self> {
        let wake = eventfd::new()?;
        let shared = Arc::new(Shared { state: Mutex::default(), drained: Condvar::new(), wake });
        let inside = shared.clone();
        let thread = std::thread::Builder::new().name(format!("line-{name}")).spawn(move || inside.work(place))?;
        Ok(Self { shared, thread: Some(thread), path })
    }

    /// The terminal's path.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// What clients type goes to `input` from here on.
    pub fn connect(&self, input: Arc<dyn InputLine>) {
        lock(&self.shared.state).input = Some(input);
        self.resume();
    }

    /// The input has room again.
    pub fn resume(&self) {
        self.shared.wake();
    }

    /// Waits until a client that is there has everything, at most until `deadline`. Returns how many bytes it has not; those
    /// that no client came for are not counted.
    pub fn drain_on_exit(&self, deadline: Instant) -> u64 {
        let mut state = lock(&self.shared.state);
        while state.attached && !state.ring.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return u64::try_from(state.ring.len()).unwrap_or(u64::MAX);
            }
            state = wait_at_most(&self.shared.drained, state, left);
        }
        0
    }

    /// Bytes that were dropped because the ring was full.
    #[must_use]
    pub fn lost(&self) -> u64 {
        lock(&self.shared.state).lost
    }
}

impl ConsoleSink for Line {
    fn push(&self, bytes: &[u8]) {
        let mut state = lock(&self.shared.state);
        let empty = state.ring.is_empty();
        let new = bytes.get(bytes.len().saturating_sub(RING_LIMIT)..).unwrap_or_default();
        let excess = (state.ring.len() + new.len()).saturating_sub(RING_LIMIT);
        state.ring.drain(..excess);
        state.ring.extend(new);
        let lost = excess + (bytes.len() - new.len());
        state.lost = state.lost.saturating_add(u64::try_from(lost).unwrap_or(u64::MAX));
        drop(state);
        if empty {
            self.shared.wake();
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        lock(&self.shared.state).ended = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of a console panicked");
        }
    }
}

impl Shared {
    fn wake(&self) {
        // A full counter is readable already.
        let _ = self.wake.write(1);
    }

    fn work(&self, mut place: Place) {
        loop {
            let (input, waits, ended) = {
                let state = lock(&self.state);
                (state.input.clone(), !state.ring.is_empty(), state.ended)
            };
            if ended {
                return;
            }
            // Not with the state's lock: a device that prints holds its own lock, which this takes, and wants the state's.
            let room = input.map_or(0, |input| input.room());
            let mut wanted = PollFlags::empty();
            wanted.set(PollFlags::IN, room > 0);
            wanted.set(PollFlags::OUT, waits);
            let (ready, watched) = self.wait(&place, wanted);
            // Nothing to read means that nobody woke us.
            let _ = self.wake.read();
            match place.step(ready, watched) {
                Step::Nothing => {}
                Step::Attached(attached) => self.attach(attached),
                Step::Ready => {
                    if !self.exchange(&place, ready, room) {
                        place.leave();
                        self.attach(false);
                    }
                }
            }
        }
    }

    /// Waits for what is wanted of the client, or for one. What is ready of it, and whether it is there to be waited for.
    fn wait(&self, place: &Place, wanted: PollFlags) -> (PollFlags, bool) {
        let wake = eventfd::borrow(&self.wake);
        let attached = lock(&self.state).attached;
        let (fd, wanted, limit) = match place {
            Place::Pty(fd) if attached => (fd.as_fd(), wanted, None),
            // Its hang-up would wake us at once, always.
            Place::Pty(fd) => {
                let mut sleep = [PollFd::from_borrowed_fd(wake, PollFlags::IN)];
                let _ = poll(&mut sleep, Some(&LOOK));
                let mut look = [PollFd::new(fd, PollFlags::IN)];
                let _ = poll(&mut look, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
                let [look] = look;
                return (look.revents(), false);
            }
            Place::Socket { client: Some(client), .. } => (client.as_fd(), wanted, None),
            Place::Socket { listener, client: None } => (listener.as_fd(), PollFlags::IN, None),
        };
        let mut polled = [PollFd::from_borrowed_fd(fd, wanted), PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        let _ = poll(&mut polled, limit);
        let [client, _] = polled;
        (client.revents(), attached)
    }

    fn attach(&self, attached: bool) {
        lock(&self.state).attached = attached;
        self.drained.notify_all();
    }

    /// Moves bytes in both directions; false when the client has left.
    fn exchange(&self, place: &Place, ready: PollFlags, room: usize) -> bool {
        let Some(client) = place.client() else { return false };
        if ready.contains(PollFlags::OUT) && !self.print(client) {
            return false;
        }
        if ready.contains(PollFlags::IN) && room > 0 {
            let mut typed = [0; CHUNK];
            let part = typed.get_mut(..room.min(CHUNK)).unwrap_or_default();
            match rustix::io::read(client, &mut *part) {
                Ok(0) => return false,
                Ok(count) => {
                    let input = lock(&self.state).input.clone();
                    if let (Some(input), Some(typed)) = (input, part.get(..count)) {
                        input.enqueue(typed);
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => return false,
            }
            return true;
        }
        !ready.intersects(PollFlags::HUP | PollFlags::ERR)
    }

    fn print(&self, client: BorrowedFd<'_>) -> bool {
        let mut state = lock(&self.state);
        let chunk: Vec<u8> = state.ring.iter().take(CHUNK).copied().collect();
        // The descriptor does not wait, so neither does a vCPU that wants the lock.
        match rustix::io::write(client, &chunk) {
            Ok(count) => {
                state.ring.drain(..count.min(chunk.len()));
                if state.ring.is_empty() {
                    self.drained.notify_all();
                }
                true
            }
            Err(error) => matches!(error, Errno::AGAIN | Errno::INTR),
        }
    }
}

enum Step {
    Nothing,
    Attached(bool),
    Ready,
}

impl Place {
    fn step(&mut self, ready: PollFlags, watched: bool) -> Step {
        match self {
            Self::Pty(_) if watched => {
                if ready.is_empty() {
                    Step::Nothing
                } else {
                    Step::Ready
                }
            }
            Self::Pty(_) => {
                if ready.contains(PollFlags::HUP) {
                    Step::Nothing
                } else {
                    Step::Attached(true)
                }
            }
            Self::Socket { client: Some(_), .. } => {
                if ready.is_empty() {
                    Step::Nothing
                } else {
                    Step::Ready
                }
            }
            Self::Socket { listener, client } => match listener.accept() {
                Ok((new, _)) if new.set_nonblocking(true).is_ok() => {
                    *client = Some(new);
                    Step::Attached(true)
                }
                _ => {
                    if ready.contains(PollFlags::IN) {
                        // No descriptor is left, or the client left already: not at once again.
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    Step::Nothing
                }
            },
        }
    }

    fn client(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Pty(fd) => Some(fd.as_fd()),
            Self::Socket { client, .. } => client.as_ref().map(|client| client.as_fd()),
        }
    }

    fn leave(&mut self) {
        if let Self::Socket { client, .. } = self {
            *client = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::io::{Read, Write};

    use super::*;

    #[derive(Default)]
    struct Typed(Mutex<Vec<u8>>);

    impl InputLine for Typed {
        fn room(&self) -> usize {
            4096 - self.0.lock().unwrap().len()
        }

        fn enqueue(&self, bytes: &[u8]) -> usize {
            self.0.lock().unwrap().extend(bytes);
            bytes.len()
        }
    }

    struct Bench {
        line: Line,
        typed: Arc<Typed>,
        socket: Option<PathBuf>,
        _directory: tempfile::TempDir,
    }

    impl Bench {
        fn new(pty: bool) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let (line, socket) = if pty {
                (Line::pty("serial").unwrap(), None)
            } else {
                let path = directory.path().join("line");
                (Line::socket("serial", UnixListener::bind(&path).unwrap()).unwrap(), Some(path))
            };
            let typed = Arc::new(Typed::default());
            line.connect(typed.clone());
            Self { line, typed, socket, _directory: directory }
        }

        fn client(&self) -> File {
            match &self.socket {
                Some(path) => File::from(OwnedFd::from(UnixStream::connect(path).unwrap())),
                None => OpenOptions::new().read(true).write(true).open(self.line.path().unwrap()).unwrap(),
            }
        }

        fn wait(&self, what: &str, reached: impl Fn(&State) -> bool) {
            let limit = Instant::now() + Duration::from_secs(20);
            while !reached(&lock(&self.line.shared.state)) {
                assert!(Instant::now() < limit, "{what}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn lines(range: std::ops::Range<u32>) -> Vec<u8> {
        range.flat_map(|n| format!("line {n:08}\n").into_bytes()).collect()
    }

    fn read(client: &mut File, len: usize) -> Vec<u8> {
        let mut got = vec![0; len];
        client.read_exact(&mut got).unwrap();
        got
    }

    #[test]
    fn case_g2_every_line_arrives_once_and_in_order_through_attach_and_detach() {
        for pty in [false, true] {
            let bench = Bench::new(pty);
            let mut next = 0;
            for _ in 0..5 {
                let unseen = lines(next..next + 3000);
                bench.line.push(&unseen);
                let mut client = bench.client();
                assert!(read(&mut client, unseen.len()) == unseen, "what came before the client, pty {pty}");
                let seen = lines(next + 3000..next + 3100);
                bench.line.push(&seen);
                assert!(read(&mut client, seen.len()) == seen);
                drop(client);
                bench.wait("the client is not missed", |state| !state.attached);
                next += 3100;
            }
            assert_eq!(bench.line.lost(), 0);
        }
    }

    #[test]
    fn case_g1_a_client_that_does_not_read_holds_nobody_up() {
        for pty in [false, true] {
            let bench = Bench::new(pty);
            let mut client = bench.client();
            bench.wait("the client is not seen", |state| state.attached);
            let sent = lines(0..300_000);
            let start = Instant::now();
            for chunk in sent.chunks(64) {
                bench.line.push(chunk);
            }
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            let lost = usize::try_from(bench.line.lost()).unwrap();
            assert!(lost > 0 && sent.len() - lost >= RING_LIMIT);
            // What the kernel took before the ring was full, a gap, and the newest that the ring holds.
            let got = read(&mut client, sent.len() - lost);
            assert!(got.ends_with(&sent[sent.len() - RING_LIMIT..]));
        }
    }

    #[test]
    fn case_g3_what_is_typed_reaches_its_own_device() {
        for pty in [false, true] {
            let (first, second) = (Bench::new(pty), Bench::new(pty));
            let (mut a, mut b) = (first.client(), second.client());
            for _ in 0..100 {
                a.write_all(b"first ").unwrap();
                b.write_all(b"second ").unwrap();
            }
            for (bench, word) in [(&first, "first "), (&second, "second ")] {
                let limit = Instant::now() + Duration::from_secs(20);
                while bench.typed.0.lock().unwrap().len() < word.len() * 100 {
                    assert!(Instant::now() < limit, "input is missing");
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert_eq!(*bench.typed.0.lock().unwrap(), word.repeat(100).as_bytes());
            }
        }
    }

    #[test]
    fn input_waits_while_the_guest_has_no_room() {
        let bench = Bench::new(false);
        let mut client = bench.client();
        client.write_all(&[b'x'; 10_000]).unwrap();
        let limit = Instant::now() + Duration::from_secs(20);
        let mut total = 0;
        while total < 10_000 {
            assert!(Instant::now() < limit, "{total}");
            let taken = std::mem::take(&mut *bench.typed.0.lock().unwrap());
            assert!(taken.len() <= 4096);
            total += taken.len();
            bench.line.resume();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_second_client_of_a_socket_waits_for_the_first_to_leave() {
        let bench = Bench::new(false);
        let first = bench.client();
        bench.wait("the client is not seen", |state| state.attached);
        let mut second = bench.client();
        drop(first);
        bench.line.push(b"for whoever is there");
        // The first one may have been given it in its last moment; the second gets what follows.
        bench.wait("output stays", |state| state.ring.is_empty() || state.attached);
        bench.line.push(b"!");
        let mut last = [0; 1];
        while last != *b"!" {
            second.read_exact(&mut last).unwrap();
        }
    }

    #[test]
    fn leaving_waits_for_a_client_that_reads_and_for_no_other() {
        let bench = Bench::new(false);
        bench.line.push(&lines(0..1000));
        assert_eq!(bench.line.drain_on_exit(Instant::now() + Duration::from_secs(20)), 0, "nobody is there");
        let client = bench.client();
        bench.wait("the client is not seen", |state| state.attached);
        bench.line.push(&lines(0..70_000));
        assert!(bench.line.drain_on_exit(Instant::now() + Duration::from_millis(10)) > 0);
        drop(client);
    }
}
