//! Decides what becomes of a line of the log while nobody reads: no thread waits for the reader but one that does nothing else.
//!
//! A line is written straight to its output, without waiting, as output of a guest is. What does not fit waits in a queue, and
//! with it all that comes later, so that order is kept; a thread writes the queue out and ends when it is empty. Lines that do
//! not fit into the queue are dropped, and their number is told in their place.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use devices::legacy::Output;
use pci::sync::{lock, wait_at_most};

/// Most bytes that wait, but for a single longer line.
const LIMIT: usize = 256 << 10;
/// Bytes of one write, so that it is soon seen when nobody reads.
const CHUNK: usize = 4096;
/// Until a terminal that said that it has room, and had too little, is asked again.
const REST: Duration = Duration::from_millis(20);
const STACK: usize = 64 << 10;

/// Where lines go.
pub struct Lines(Arc<Shared>);

struct Shared {
    output: Output,
    queue: Mutex<Queue>,
    /// Signalled when the thread ends.
    written: Condvar,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    /// Of all lines that wait, and of the one that is being written.
    bytes: usize,
    /// Lines that were dropped since the last one that waits.
    dropped: u64,
    /// There is a thread, and nobody else writes.
    writing: bool,
}

impl Lines {
    /// Nothing waits yet, and there is no thread.
    #[must_use]
    pub fn new(output: Output) -> Self {
        Self(Arc::new(Shared { output, queue: Mutex::default(), written: Condvar::new() }))
    }

    /// Writes text with its line ends, after what was written before. Never waits for a reader.
    pub fn write(&self, text: &str) {
        let mut queue = lock(&self.0.queue);
        let mut rest = text.as_bytes();
        if !queue.writing && self.0.output.never_waits() {
            rest = match self.0.write(rest) {
                Ok(rest) => rest,
                // A log that cannot be written has nowhere to say so.
                Err(_) => return,
            };
        }
        if rest.is_empty() {
            return;
        }
        queue.push(rest);
        if !queue.writing {
            let shared = Arc::clone(&self.0);
            queue.writing = thread::Builder::new().name("log".to_owned()).stack_size(STACK).spawn(move || shared.work()).is_ok();
            if !queue.writing {
                // Nobody would write it.
                queue.drop_all();
            }
        }
    }

    /// Waits until nothing waits any more, at most until `deadline`.
    pub fn drain(&self, deadline: Instant) {
        let mut queue = lock(&self.0.queue);
        while queue.writing {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queue = wait_at_most(&self.0.written, queue, left);
        }
    }
}

impl Shared {
    /// Writes what fits of `bytes`; the rest.
    fn write<'b>(&self, mut bytes: &'b [u8]) -> io::Result<&'b [u8]> {
        while !bytes.is_empty() {
            match self.output.write(bytes) {
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(bytes)
    }

    /// The thread.
    fn work(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let Some(line) = queue.next() else {
                queue.writing = false;
                drop(queue);
                self.written.notify_all();
                return;
            };
            drop(queue);
            let done = line.chunks(CHUNK).try_for_each(|chunk| self.write_all(chunk));
            let mut queue = lock(&self.queue);
            queue.bytes = queue.bytes.saturating_sub(line.len());
            if done.is_err() {
                // Nobody will read them.
                queue.drop_all();
                queue.dropped = 0;
            }
        }
    }

    fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.output.wait(None)?;
            let rest = self.write(bytes)?;
            if rest.len() == bytes.len() {
                thread::sleep(REST);
            }
            bytes = rest;
        }
        Ok(())
    }
}

impl Queue {
    fn push(&mut self, line: &[u8]) {
        // Having dropped some, it takes more when there is room for many, not line by line.
        let limit = if self.dropped == 0 { LIMIT } else { LIMIT / 2 };
        if self.bytes > 0 && self.bytes + line.len() > limit {
            self.dropped += 1;
            return;
        }
        self.tell_dropped();
        self.bytes += line.len();
        self.lines.push_back(line.to_vec());
    }

    fn tell_dropped(&mut self) {
        if self.dropped != 0 {
            let text = format!("banyan: WARN: {} lines of the log are missing here: nobody read them in time\n", self.dropped);
            self.dropped = 0;
            self.bytes += text.len();
            self.lines.push_back(text.into_bytes());
        }
    }

    /// The oldest line.
    fn next(&mut self) -> Option<Vec<u8>> {
        if self.lines.is_empty() {
            self.tell_dropped();
        }
        self.lines.pop_front()
    }

    fn drop_all(&mut self) {
        self.dropped = self.dropped.saturating_add(self.lines.len().try_into().unwrap_or(u64::MAX));
        self.lines = VecDeque::new();
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{PipeReader, Read, Write};

    /// A pipe that is full but for `room` pages.
    fn full(room: usize) -> (PipeReader, Lines) {
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(&vec![b'-'; (16 - room) * 4096]).unwrap();
        (reader, Lines::new(Output::new(writer.into()).unwrap()))
    }

    fn read(reader: &mut PipeReader, until: &str) -> String {
        let mut text = Vec::new();
        while !text.ends_with(until.as_bytes()) {
            let mut part = [0; 4096];
            let count = reader.read(&mut part).unwrap();
            text.extend_from_slice(&part[..count]);
        }
        String::from_utf8(text).unwrap().trim_start_matches('-').to_owned()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn a_line_that_fits_is_written_at_once_and_by_no_thread() {
        let (mut reader, lines) = full(1);
        lines.write("one\n");
        assert!(!lock(&lines.0.queue).writing);
        assert_eq!(read(&mut reader, "one\n"), "one\n");
    }

    #[test]
    fn lines_that_nobody_reads_hold_nobody_up_and_arrive_in_order() {
        for room in [0, 1] {
            let (mut reader, lines) = full(room);
            let all: String = (0..2000).map(|n| format!("line {n}\n")).collect();
            all.split_inclusive('\n').for_each(|line| lines.write(line));
            assert!(lock(&lines.0.queue).writing);
            assert!(read(&mut reader, "line 1999\n") == all);
            lines.drain(soon());
            assert!(!lock(&lines.0.queue).writing, "the thread has ended");
            lines.write("more\n");
            assert_eq!(read(&mut reader, "more\n"), "more\n");
        }
    }

    #[test]
    fn what_the_queue_has_no_room_for_is_dropped_and_told_in_its_place() {
        let (mut reader, lines) = full(0);
        let sent = 2 * LIMIT / 16;
        (0..sent).for_each(|n| lines.write(&format!("line {n:010}\n")));
        let dropped = lock(&lines.0.queue).dropped;
        assert!(lock(&lines.0.queue).bytes <= LIMIT);
        let kept = u64::try_from(sent).unwrap() - dropped;
        let text = read(&mut reader, "in time\n");
        let mut told = text.lines();
        assert!((0..kept).all(|n| told.next() == Some(&format!("line {n:010}"))));
        let missing = format!("banyan: WARN: {dropped} lines of the log are missing here: nobody read them in time");
        assert_eq!((told.next(), told.next()), (Some(missing.as_str()), None));
        assert!(dropped > 1000);
    }

    #[test]
    fn leaving_waits_for_a_reader_that_is_slow_and_not_for_one_that_never_reads() {
        let (mut reader, lines) = full(0);
        lines.write("last\n");
        lines.drain(Instant::now() + Duration::from_millis(20));
        assert!(lock(&lines.0.queue).writing);
        let reads = thread::spawn(move || read(&mut reader, "last\n"));
        lines.drain(soon());
        assert!(!lock(&lines.0.queue).writing);
        assert_eq!(reads.join().unwrap(), "last\n");
    }

    #[test]
    fn a_reader_that_left_ends_the_wait() {
        let (reader, lines) = full(0);
        lines.write("one\n");
        drop(reader);
        lines.drain(soon());
        lines.write("two\n");
        let queue = lock(&lines.0.queue);
        assert!(!queue.writing && queue.lines.is_empty() && queue.bytes == 0);
    }
}
