//! Keeps what the guest writes to a console until the host takes it.
//!
//! A vCPU writes straight to the host while the host keeps up: one system call of about a microsecond, less than the exit
//! that brought the byte, and no other thread on the way of the first byte. When the host is slow, bytes collect in a ring
//! that the main loop drains, and order is kept: nobody writes past the ring. The ring grows to [`RING_LIMIT`]; then the
//! oldest bytes give way and are counted.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::Instant;

use pci::sync::lock;
use rustix::io::Errno;
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::output::Output;
use crate::eventfd;

/// Bytes that the ring starts with, when it is first needed.
const RING_START: usize = 64 << 10;
/// Most bytes that wait for the host.
pub const RING_LIMIT: usize = 1 << 20;

const CHUNK: usize = 4096;
/// Chunks of one [`Console::drain`], so that a guest that never stops cannot hold the main loop.
const CHUNKS_AT_ONCE: usize = 64;

/// Takes console output. Called by vCPUs: it must not wait.
pub trait ConsoleSink: Send + Sync {
    /// Takes all of `bytes`, in order after earlier ones.
    fn push(&self, bytes: &[u8]);
}

/// Takes what is typed for a guest.
pub trait InputLine: Send + Sync {
    /// How many bytes [`InputLine::enqueue`] takes at this moment.
    fn room(&self) -> usize;
    /// Passes input to the guest; returns how many bytes were taken. The caller keeps the rest until it is told that there is
    /// room again.
    fn enqueue(&self, bytes: &[u8]) -> usize;
}

/// A sink for output that nobody wants.
#[derive(Debug, Clone, Copy, Default)]
pub struct Discard;

impl ConsoleSink for Discard {
    fn push(&self, _bytes: &[u8]) {}
}

/// What [`Console::drain`] left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// Nothing.
    Empty,
    /// Bytes wait: drain again when [`Console::output`] is writable.
    Waiting,
}

/// Output of a console to a descriptor of the host.
#[derive(Debug)]
pub struct Console {
    ring: Mutex<Ring>,
    /// Held by whoever drains, while the ring is free for vCPUs.
    chunk: Mutex<Vec<u8>>,
    output: Output,
    wake: EventFd,
}

impl Console {
    /// A console that writes to `output`: a terminal, pipe, socket or file.
    pub fn new(output: OwnedFd) -> Result<Self, ConsoleError> {
        let number = output.as_raw_fd();
        let output = Output::new(output).map_err(|source| ConsoleError::Output { number, source })?;
        let wake = eventfd::new().map_err(|source| ConsoleError::Event { source })?;
        Ok(Self { ring: Mutex::default(), chunk: Mutex::default(), output, wake })
    }

    /// Readable when [`Console::drain`] has work, or after [`Console::wake_up`].
    #[must_use]
    pub fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Makes [`Console::wake`] readable, for others that want the main loop's attention.
    pub fn wake_up(&self) {
        // A full counter is readable already.
        let _ = self.wake.write(1);
    }

    /// What to poll for writing after [`Drained::Waiting`].
    #[must_use]
    pub fn output(&self) -> BorrowedFd<'_> {
        self.output.as_fd()
    }

    /// Writes what the host takes without waiting and clears [`Console::wake`].
    pub fn drain(&self) -> Drained {
        let mut chunk = lock(&self.chunk);
        // Nothing to read means that somebody drained already.
        let _ = self.wake.read();
        for _ in 0..CHUNKS_AT_ONCE {
            match self.drain_chunk(&mut chunk) {
                Step::Empty => return Drained::Empty,
                Step::Blocked => return Drained::Waiting,
                Step::Written => {}
            }
        }
        Drained::Waiting
    }

    /// Writes everything that is left, waiting for the host until `deadline`. Returns how many bytes the guest wrote that
    /// never arrived.
    pub fn drain_on_exit(&self, deadline: Instant) -> u64 {
        let mut chunk = lock(&self.chunk);
        loop {
            match self.drain_chunk(&mut chunk) {
                Step::Empty => break,
                Step::Written => {}
                Step::Blocked if matches!(self.output.wait(Some(deadline)), Ok(true)) => {}
                Step::Blocked => break,
            }
        }
        let ring = lock(&self.ring);
        ring.lost.saturating_add(ring.bytes.len().try_into().unwrap_or(u64::MAX))
    }

    /// Bytes that were dropped so far, because the ring was full or the output failed.
    #[must_use]
    pub fn lost(&self) -> u64 {
        lock(&self.ring).lost
    }

    fn drain_chunk(&self, chunk: &mut Vec<u8>) -> Step {
        let at = lock(&self.ring).front(chunk);
        if chunk.is_empty() {
            return Step::Empty;
        }
        match self.output.write(chunk) {
            Ok(written) => {
                lock(&self.ring).written(at, written);
                Step::Written
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Step::Blocked,
            Err(error) => {
                lock(&self.ring).fail(&error);
                Step::Empty
            }
        }
    }
}

impl ConsoleSink for Console {
    fn push(&self, bytes: &[u8]) {
        let mut ring = lock(&self.ring);
        let mut rest = bytes;
        let empty = ring.bytes.is_empty();
        if empty && !ring.failed && self.output.never_waits() {
            match self.output.write(bytes) {
                Ok(written) => rest = bytes.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => ring.fail(&error),
            }
        }
        if rest.is_empty() {
            return;
        }
        ring.push(rest);
        let first = empty && !ring.bytes.is_empty();
        drop(ring);
        if first {
            self.wake_up();
        }
    }
}

enum Step {
    Empty,
    Written,
    Blocked,
}

#[derive(Debug, Default)]
struct Ring {
    bytes: VecDeque<u8>,
    /// How many bytes came before the oldest one here.
    start: u64,
    lost: u64,
    failed: bool,
}

impl Ring {
    fn push(&mut self, bytes: &[u8]) {
        if self.failed {
            self.lost = self.lost.saturating_add(count(bytes.len()));
            return;
        }
        if self.bytes.capacity() == 0 {
            self.bytes.reserve(RING_START);
        }
        let excess = (self.bytes.len() + bytes.len()).saturating_sub(RING_LIMIT);
        let (old, new) = (excess.min(self.bytes.len()), excess.saturating_sub(self.bytes.len()));
        self.bytes.drain(..old);
        self.bytes.extend(bytes.get(new..).unwrap_or_default());
        self.start += count(old + new);
        self.lost = self.lost.saturating_add(count(old + new));
    }

    /// Copies the oldest bytes, at most [`CHUNK`], and tells the position of the first.
    fn front(&self, chunk: &mut Vec<u8>) -> u64 {
        chunk.clear();
        chunk.extend(self.bytes.iter().take(CHUNK));
        self.start
    }

    /// `len` bytes from position `at` have arrived. Some may have been dropped meanwhile; they were not lost after all.
    fn written(&mut self, at: u64, len: usize) {
        let end = at + count(len);
        let rescued = self.start.min(end) - at;
        self.lost = self.lost.saturating_sub(rescued);
        let here = usize::try_from(end.saturating_sub(self.start)).unwrap_or(usize::MAX).min(self.bytes.len());
        self.bytes.drain(..here);
        self.start += count(here);
    }

    fn fail(&mut self, error: &io::Error) {
        if !self.failed {
            log::warn!("console output failed, so the rest of it is dropped: {error}");
        }
        self.failed = true;
        self.lost = self.lost.saturating_add(count(self.bytes.len()));
        self.bytes = VecDeque::new();
    }
}

fn count(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

/// A console that cannot be made.
#[derive(Debug, Error)]
pub enum ConsoleError {
    /// The descriptor is no good.
    #[error("cannot use descriptor {number} for console output; check that it is open")]
    Output {
        /// The descriptor.
        number: i32,
        /// The kernel's reason.
        #[source]
        source: Errno,
    },
    /// No eventfd.
    #[error("cannot make the event descriptor of a console; if the limit of open files is reached, raise it (ulimit -n)")]
    Event {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{PipeReader, Read};
    use std::time::Duration;

    fn piped() -> (PipeReader, Console) {
        let (reader, writer) = io::pipe().unwrap();
        (reader, Console::new(writer.into()).unwrap())
    }

    /// Enough to fill a pipe, each line different.
    fn lines(n: usize) -> Vec<u8> {
        (0..n).flat_map(|n| format!("line {n:010}\n").into_bytes()).collect()
    }

    #[test]
    fn the_first_byte_arrives_without_the_main_loop() {
        let (mut reader, console) = piped();
        console.push(b"X");
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"X");
        assert!(console.wake.read().is_err(), "nobody had to wake up");
    }

    #[test]
    fn a_slow_host_gets_everything_in_order() {
        let (mut reader, console) = piped();
        let sent = lines(20_000);
        for line in sent.chunks(7) {
            console.push(line);
        }
        assert_eq!(console.wake.read().unwrap(), 1, "one wake-up for all that waits");
        let mut got = Vec::new();
        let mut part = [0; 32 << 10];
        while got.len() < sent.len() {
            let n = reader.read(&mut part).unwrap();
            got.extend_from_slice(&part[..n]);
            console.drain();
        }
        assert!(got == sent);
        assert_eq!((console.drain(), console.lost()), (Drained::Empty, 0));
    }

    #[test]
    fn leaving_waits_for_a_slow_reader() {
        let (mut reader, console) = piped();
        let sent = lines(30_000);
        console.push(&sent);
        assert_eq!(console.drain(), Drained::Waiting);
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            let mut got = Vec::new();
            reader.read_to_end(&mut got).unwrap();
            got
        });
        assert_eq!(console.drain_on_exit(Instant::now() + Duration::from_secs(20)), 0);
        drop(console);
        assert!(thread.join().unwrap() == sent);
    }

    #[test]
    fn leaving_gives_up_at_the_deadline_and_counts() {
        let (_reader, console) = piped();
        console.push(&[b'x'; 256 << 10]);
        assert!(console.drain_on_exit(Instant::now()) > 0);
    }

    #[test]
    fn a_full_ring_drops_the_oldest_and_counts_them() {
        let mut ring = Ring::default();
        let sent = lines(100_000);
        for line in sent.chunks(1000) {
            ring.push(line);
        }
        assert_eq!(ring.bytes.len(), RING_LIMIT);
        assert_eq!(ring.lost, count(sent.len() - RING_LIMIT));
        assert!(ring.bytes.iter().copied().eq(sent[sent.len() - RING_LIMIT..].iter().copied()));
        ring.push(&sent);
        assert!(ring.bytes.iter().copied().eq(sent[sent.len() - RING_LIMIT..].iter().copied()));
        assert_eq!(ring.start, ring.lost);
    }

    #[test]
    fn bytes_dropped_while_they_were_written_are_not_written_again() {
        let mut ring = Ring::default();
        ring.push(b"abcdef");
        let mut chunk = Vec::new();
        let at = ring.front(&mut chunk);
        ring.push(&[b'x'; RING_LIMIT - 3]);
        assert_eq!(ring.lost, 3);
        ring.written(at, 5);
        assert_eq!(ring.lost, 0);
        ring.front(&mut chunk);
        assert!(chunk.starts_with(b"fxxx"));
    }

    #[test]
    fn a_closed_reader_ends_output_but_not_the_guest() {
        let (reader, console) = piped();
        drop(reader);
        console.push(b"lost");
        console.push(b"lost too");
        assert_eq!(console.drain(), Drained::Empty);
        assert_eq!(console.lost(), 12);
    }

    #[test]
    fn a_file_gets_output_at_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let console = Console::new(file.reopen().unwrap().into()).unwrap();
        console.push(&lines(10_000));
        assert_eq!(std::fs::read(file.path()).unwrap(), lines(10_000));
    }
}
