//! Serves a queue of a raw image by io_uring: requests that wait together are handed to the kernel by one call, which moves bytes
//! between the image and guest memory while others are taken off the queue.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::{PollFd, PollFlags, poll};
use vm_memory::{GuestMemoryMmap, VolatileSlice};

use super::image::{Direction, how_to_discard, how_to_zero};
use super::pieces::{Left, SPAN};
use super::request::{Disk, Fault, Request, Status, Work};
use crate::virtio::limit::Limit;
use crate::virtio::ring::{Corrupt, Ring};
use crate::virtio::worker::{Stop, timespec};

/// Most requests that are under way, with one more for the call that ends them.
const ENTRIES: u32 = if cfg!(test) { 8 } else { 128 };
const UNDER_WAY: usize = ENTRIES as usize - 1;
/// Bytes from which on no further request is taken: a stop and a pause wait for what is under way.
const MOST_BYTES: u64 = 32 << 20;
/// What stands for that call in place of a request's number.
const CANCEL: u64 = u64::MAX;
/// When a call that the kernel refused is made again.
const AGAIN: Duration = Duration::from_millis(1);

/// The kernel's side of a queue.
pub(super) type Uring = IoUring;

/// An io_uring for one queue, if this process may have one.
pub(super) fn open() -> io::Result<Uring> {
    IoUring::builder().dontfork().build(ENTRIES)
}

/// What the requests of a queue are served with.
pub(super) struct Lane<'a> {
    pub(super) disk: &'a Disk,
    /// The disk's raw image.
    pub(super) file: &'a File,
    /// A write reaches the medium before its answer.
    pub(super) durable: bool,
    pub(super) limit: Limit,
    pub(super) stop: &'a Stop,
}

/// How a round ended. Nothing is under way then.
enum After {
    /// The queue is empty, or its limit says to wait so long.
    Wait(Option<Duration>),
    /// The worker is to stand still, or guest memory is another.
    Again,
}

impl Lane<'_> {
    /// Serves a queue until the worker is to end or the ring is corrupt. Afterwards the kernel touches no guest memory. Gives the
    /// io_uring back if it can be used again.
    pub(super) fn serve(mut self, mut ring: Ring, mut uring: Uring) -> Option<Uring> {
        let stop = self.stop;
        loop {
            let goes_on = match self.round(&mut ring, &mut uring) {
                Ok(After::Wait(pause)) => ring.bell().wait_or(stop, None, pause),
                Ok(After::Again) => !stop.ends(),
                Err(Corrupt) => {
                    ring.give_up();
                    false
                }
            };
            if !goes_on {
                let clean = uring.submission().is_empty() && uring.completion().is_empty();
                return clean.then_some(uring);
            }
        }
    }

    /// Serves as long as there is something to do, in one state of guest memory.
    fn round(&mut self, ring: &mut Ring, uring: &mut IoUring) -> Result<After, Corrupt> {
        let snapshot = ring.memory();
        let memory: &GuestMemoryMmap = &snapshot;
        let mut flights = Flights::new(uring, self.file.as_fd());
        let mut done = Vec::new();
        let outcome = loop {
            let same = std::ptr::eq(memory, &raw const *ring.memory());
            let takes = same && !self.stop.stopped() && !self.stop.held();
            let taken = if takes { self.take(ring, memory, &mut flights, &mut done) } else { Ok(None) };
            let Ok(pause) = taken else { break Err(Corrupt) };
            flights.submit();
            let landed = flights.land(self, &mut done) || !done.is_empty();
            if self.stop.stopped() {
                break Ok(After::Again);
            }
            if give_back(ring, memory, &mut done).is_err() {
                break Err(Corrupt);
            }
            match (flights.under_way > 0, takes) {
                (false, true) if !landed => break Ok(After::Wait(pause)),
                (false, false) => break Ok(After::Again),
                (true, _) if !landed => flights.wait(ring, pause),
                _ => {}
            }
        };
        let clean = flights.end();
        drop(flights);
        if clean {
            return outcome;
        }
        // What the kernel would not take is still in the ring.
        *uring = open().map_err(|_| Corrupt)?;
        outcome
    }

    /// Takes requests off the queue until it is empty, enough are under way, or the limit says to wait: then how long. Those that
    /// need no help of the kernel come to `done`.
    fn take<'m>(
        &mut self,
        ring: &mut Ring,
        memory: &'m GuestMemoryMmap,
        flights: &mut Flights<'_, 'm>,
        done: &mut Vec<(u16, u32)>,
    ) -> Result<Option<Duration>, Corrupt> {
        while ring.allowed() {
            ring.hush(memory)?;
            while !flights.full(done.len()) && !self.stop.stopped() && !self.stop.held() {
                let Some(chain) = ring.pop(memory)? else { break };
                if let Some(pause) = self.limit.wait(Instant::now()) {
                    ring.put_back();
                    return Ok(Some(pause));
                }
                self.limit.take(chain.clone().map(|descriptor| u64::from(descriptor.len())).fold(0, u64::saturating_add));
                let head = chain.head_index();
                let Request { status, work } = self.disk.request(chain, memory).ok_or(Corrupt)?;
                let answer = match work.map(|work| (work.written(), work.moves(), work.changes(), Step::of(work, self))) {
                    Ok((written, moves, changes, Ok(step))) => {
                        let bytes = step.bytes();
                        flights.start(Flight { head, status, written, moves, durable: self.durable && changes, bytes, step });
                        continue;
                    }
                    Ok((.., Err(work))) => self.disk.carry_out(work, self.durable, &|| self.stop.stopped()),
                    Err(fault) => Err(fault),
                };
                done.push((head, status.put(answer).ok_or(Corrupt)?));
            }
            if flights.full(done.len()) || self.stop.stopped() || self.stop.held() || !ring.listen(memory)? {
                break;
            }
        }
        Ok(None)
    }
}

/// Gives buffers to the driver and tells of all of them at once.
fn give_back(ring: &mut Ring, memory: &GuestMemoryMmap, done: &mut Vec<(u16, u32)>) -> Result<(), Corrupt> {
    if done.is_empty() {
        return Ok(());
    }
    for (head, len) in done.drain(..) {
        ring.push(memory, head, len)?;
    }
    ring.tell(memory)
}

/// A request that the kernel works on.
struct Flight<'m> {
    head: u16,
    status: Status<'m>,
    /// Bytes that the driver has when it is done.
    written: u32,
    /// Bytes between image and memory.
    moves: Option<(Direction, u32)>,
    /// It is to be made durable when it is done.
    durable: bool,
    /// That it moves in all.
    bytes: u64,
    step: Step<'m>,
}

/// What the kernel does for it at this moment.
enum Step<'m> {
    Transfer { direction: Direction, left: Left<Vec<VolatileSlice<'m>>>, offset: u64, vectors: Vec<libc::iovec> },
    Flush,
    Discard { offset: u64, len: u64 },
    Zeroes { offset: u64, len: u64, unmap: bool },
}

impl<'m> Step<'m> {
    /// The first step of `work`, which is given back if the kernel cannot do it in this way.
    fn of(work: Work<'m>, lane: &Lane<'_>) -> Result<Self, Work<'m>> {
        match work {
            Work::Transfer { direction, memory, offset, len } if len > 0 && lane.disk.image.takes(&memory) => {
                Ok(Self::Transfer { direction, left: Left::new(memory), offset, vectors: Vec::new() })
            }
            Work::Flush => Ok(Self::Flush),
            Work::Discard { offset, len } if len > 0 => Ok(Self::Discard { offset, len }),
            Work::Zeroes { offset, len, unmap } if len > 0 => Ok(Self::Zeroes { offset, len, unmap }),
            work => Err(work),
        }
    }

    /// Bytes that are moved, or written, until it is done.
    fn bytes(&self) -> u64 {
        match self {
            Self::Transfer { left, .. } => left.bytes(),
            Self::Zeroes { len, .. } => *len,
            Self::Flush | Self::Discard { .. } => 0,
        }
    }

    /// The call for it. What it points to stays where it is as long as this does.
    fn entry(&mut self, file: RawFd) -> squeue::Entry {
        let file = types::Fd(file);
        let part = |offset: u64, len: u64, mode: rustix::fs::FallocateFlags| {
            opcode::Fallocate::new(file, len.min(SPAN)).offset(offset).mode(mode.bits().cast_signed()).build()
        };
        match self {
            Self::Transfer { direction, left, offset, vectors } => {
                let mut piece = Vec::new();
                left.batch(&mut piece);
                vectors.clear();
                vectors.extend(piece.iter().map(|slice| {
                    let guard = slice.ptr_guard_mut();
                    libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: slice.len() }
                }));
                let count = u32::try_from(vectors.len()).unwrap_or(0);
                match direction {
                    Direction::Read => opcode::Readv::new(file, vectors.as_ptr(), count).offset(*offset).build(),
                    Direction::Write => opcode::Writev::new(file, vectors.as_ptr(), count).offset(*offset).build(),
                }
            }
            Self::Flush => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
            Self::Discard { offset, len } => part(*offset, *len, how_to_discard()),
            Self::Zeroes { offset, len, unmap } => part(*offset, *len, how_to_zero(*unmap)),
        }
    }

    /// Takes what the kernel says of it. True when it is done, false when there is more of it.
    fn take(&mut self, result: i32, lane: &Lane<'_>) -> Result<bool, Fault> {
        let error = result.checked_neg().filter(|error| *error > 0);
        if error == Some(libc::EINTR) {
            return Ok(false);
        }
        let stopped = || lane.stop.stopped();
        let failed = |error: io::Error| lane.disk.failed(&error, stopped);
        match (self, error) {
            (Self::Transfer { left, offset, .. }, None) => {
                let moved = usize::try_from(result).unwrap_or(0);
                if moved == 0 {
                    return Err(lane.disk.failed(&io::ErrorKind::UnexpectedEof.into(), stopped));
                }
                left.advance(moved);
                *offset += moved as u64;
                Ok(left.is_done())
            }
            // The kernel could not do it without waiting, and would say so again.
            (Self::Transfer { direction, left, offset, .. }, Some(libc::EAGAIN)) => {
                let mut piece = Vec::new();
                left.batch(&mut piece);
                lane.disk.image.transfer(*direction, &piece, *offset, stopped).map_err(failed)?;
                let moved = piece.iter().map(VolatileSlice::len).sum();
                left.advance(moved);
                *offset += moved as u64;
                Ok(left.is_done())
            }
            (Self::Flush, Some(libc::EAGAIN)) => lane.disk.image.flush().map(|()| true).map_err(failed),
            (Self::Discard { offset, len } | Self::Zeroes { offset, len, .. }, None) => {
                let span = SPAN.min(*len);
                *offset += span;
                *len -= span;
                Ok(*len == 0)
            }
            (Self::Flush, None) => Ok(true),
            (_, Some(libc::ECANCELED)) => Err(Fault::Failed),
            // The file, its medium or the kernel may not know how; there are other ways.
            (Self::Discard { offset, len }, Some(_)) => {
                lane.disk.image.discard(*offset, *len, stopped).map(|()| true).map_err(failed)
            }
            (Self::Zeroes { offset, len, unmap }, Some(_)) => {
                lane.disk.image.write_zeroes(*offset, *len, *unmap, stopped).map(|()| true).map_err(failed)
            }
            (Self::Transfer { .. } | Self::Flush, Some(error)) => Err(failed(io::Error::from_raw_os_error(error))),
        }
    }
}

/// Requests under way. Before it ends, all of them have.
struct Flights<'u, 'm> {
    uring: &'u mut IoUring,
    file: RawFd,
    /// By number.
    slots: Vec<Option<Flight<'m>>>,
    free: Vec<usize>,
    under_way: usize,
    /// Bytes of all of them.
    bytes: u64,
    /// The call that ends all is under way.
    cancels: bool,
}

impl<'u, 'm> Flights<'u, 'm> {
    fn new(uring: &'u mut IoUring, file: BorrowedFd<'_>) -> Self {
        Self { uring, file: file.as_raw_fd(), slots: Vec::new(), free: Vec::new(), under_way: 0, bytes: 0, cancels: false }
    }

    /// Whether no further request is to be taken when so many answers wait.
    fn full(&self, answers: usize) -> bool {
        self.under_way + answers >= UNDER_WAY || self.bytes >= MOST_BYTES
    }

    fn start(&mut self, flight: Flight<'m>) {
        self.bytes += flight.bytes;
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.under_way += 1;
        self.launch(number, flight);
    }

    fn launch(&mut self, number: usize, mut flight: Flight<'m>) {
        let entry = flight.step.entry(self.file).user_data(number as u64);
        if let Some(slot) = self.slots.get_mut(number) {
            *slot = Some(flight);
        }
        // SAFETY: the entry points to the vectors of the flight, whose place does not change when the flight moves, and by them
        // to guest memory, which is mapped as long as 'm. Both outlive the call: a flight is taken out of its slot when its
        // completion is there, and `self` does not end before all of them are. There is room, since each entry that is not
        // submitted belongs to another flight.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        assert!(pushed.is_ok(), "an io_uring has an entry for each request under way");
    }

    /// Hands over what is new. What the kernel does not take now it is given again at the next call.
    fn submit(&mut self) {
        if !self.uring.submission().is_empty() {
            let _ = self.uring.submit();
        }
    }

    fn completion(&mut self) -> Option<cqueue::Entry> {
        self.uring.completion().next()
    }

    /// Takes in what the kernel has done: answers to `done`. Whether there was anything.
    fn land(&mut self, lane: &Lane<'_>, done: &mut Vec<(u16, u32)>) -> bool {
        let mut landed = false;
        while let Some(completion) = self.completion() {
            let number = usize::try_from(completion.user_data()).unwrap_or(usize::MAX);
            let Some(flight) = self.slots.get_mut(number).and_then(Option::take) else { continue };
            landed = true;
            self.go_on(number, flight, completion.result(), lane, done);
        }
        landed
    }

    fn go_on(&mut self, number: usize, mut flight: Flight<'m>, result: i32, lane: &Lane<'_>, done: &mut Vec<(u16, u32)>) {
        let answer = match flight.step.take(result, lane) {
            Ok(finished) if !lane.stop.stopped() && (!finished || flight.durable) => {
                if finished {
                    (flight.durable, flight.step) = (false, Step::Flush);
                }
                return self.launch(number, flight);
            }
            Ok(_) => Ok(flight.written),
            Err(fault) => Err(fault),
        };
        self.under_way -= 1;
        self.bytes -= flight.bytes;
        self.free.push(number);
        // A worker that ends answers nobody.
        if !lane.stop.stopped()
            && let Some(len) = flight.status.put(answer)
        {
            if answer.is_ok() {
                lane.disk.image.count(flight.moves);
            }
            done.push((flight.head, len));
        }
    }

    /// Waits until the kernel has done something or the driver rings, at most for `time`.
    fn wait(&mut self, ring: &Ring, time: Option<Duration>) {
        let refused = !self.uring.submission().is_empty();
        let time = if refused { Some(time.unwrap_or(AGAIN).min(AGAIN)) } else { time };
        let time = time.map(timespec);
        let mut waited = [PollFd::new(ring.bell(), PollFlags::IN), PollFd::new(&*self.uring, PollFlags::IN)];
        // After a signal, as after everything else, the caller looks.
        let _ = poll(&mut waited, time.as_ref());
        let [bell, _] = waited;
        if bell.revents().contains(PollFlags::IN) {
            ring.bell().take();
        }
    }

    /// Waits until nothing is under way, without answers. False if the ring must not be used any more: it has calls that the
    /// kernel would not take.
    fn end(&mut self) -> bool {
        if self.flying() > 0 {
            let all = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build().user_data(CANCEL);
            // SAFETY: it points to nothing. Kernels before 5.19 refuse it, and what is under way comes to its own end.
            self.cancels = unsafe { self.uring.submission().push(&all) }.is_ok();
        }
        self.settle();
        self.uring.submission().is_empty()
    }

    /// How many the kernel has.
    fn flying(&mut self) -> usize {
        // The call that ends all is the last one.
        let here = self.uring.submission().len().saturating_sub(self.cancels.into());
        self.under_way.saturating_sub(here)
    }

    fn settle(&mut self) {
        while self.flying() > 0 || self.cancels && self.uring.submission().is_empty() {
            if self.uring.submit_and_wait(1).is_err() {
                std::thread::sleep(AGAIN);
            }
            while let Some(completion) = self.completion() {
                self.cancels &= completion.user_data() != CANCEL;
                let number = usize::try_from(completion.user_data()).unwrap_or(usize::MAX);
                if self.slots.get_mut(number).is_some_and(|slot| slot.take().is_some()) {
                    self.under_way -= 1;
                }
            }
        }
    }
}

impl Drop for Flights<'_, '_> {
    fn drop(&mut self) {
        self.settle();
    }
}

#[cfg(test)]
#[cfg(not(without_io_uring))]
mod tests;
