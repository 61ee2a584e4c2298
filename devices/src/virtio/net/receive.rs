//! Brings packets from a tap to the guest: one read for each, straight into the driver's buffers.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use log::Level;
use rustix::event::PollFlags;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestMemoryMmap, VolatileSlice};

use super::HEADER;
use super::tap::Tap;
use crate::complaints::Complaints;
use crate::virtio::buffers::{Buffers, total};
use crate::virtio::limit::Limit;
use crate::virtio::ring::{Corrupt, Ring};
use crate::virtio::vectored::SLICES;
use crate::virtio::worker::Stop;

/// Packets after which the driver is told at the latest.
const BURST: u32 = 64;
/// Offset of the number of buffers in a packet's header.
const NUM_BUFFERS: usize = 10;

/// Serves a receive queue.
pub(super) struct Receiver {
    tap: Arc<Tap>,
    ring: Ring,
    /// A packet may lie in several buffers.
    mergeable: bool,
    /// Bytes of the largest packet, with its header.
    largest: usize,
    limit: Limit,
    /// Of all starts of the device, which a guest can repeat.
    complaints: Arc<Mutex<Complaints>>,
}

/// Why a burst ended.
enum Pause {
    /// The tap has no packet.
    Tap,
    /// The driver has no room for one.
    Driver,
    /// The limit is reached.
    Limit(Duration),
    /// The tap is gone.
    Gone,
}

/// What became of one packet.
enum Packet {
    Moved(usize),
    None(Pause),
}

impl Receiver {
    pub(super) fn new(
        tap: Arc<Tap>,
        ring: Ring,
        mergeable: bool,
        largest: usize,
        limit: Limit,
        complaints: Arc<Mutex<Complaints>>,
    ) -> Self {
        Self { tap, ring, mergeable, largest, limit, complaints }
    }

    /// Works until `stop` says so or the ring is corrupt.
    pub(super) fn run(mut self, stop: &Stop) {
        loop {
            let bell = self.ring.bell().clone();
            let go_on = match self.burst(stop) {
                Err(Corrupt) => {
                    self.ring.give_up();
                    return;
                }
                Ok(Pause::Tap) => bell.wait_or(stop, Some((self.tap.as_fd(), PollFlags::IN)), None),
                Ok(Pause::Limit(time)) => bell.wait_or(stop, None, Some(time)),
                Ok(Pause::Driver | Pause::Gone) => bell.wait(stop),
            };
            if !go_on {
                return;
            }
        }
    }

    /// Moves packets until there is a reason to wait.
    fn burst(&mut self, stop: &Stop) -> Result<Pause, Corrupt> {
        let guard = self.ring.memory();
        let memory: &GuestMemoryMmap = &guard;
        let mut moved = 0;
        let pause = loop {
            if stop.stopped() || !self.ring.allowed() {
                break Pause::Driver;
            }
            if let Some(time) = self.limit.wait(Instant::now()) {
                break Pause::Limit(time);
            }
            match self.packet(memory)? {
                Packet::Moved(bytes) => self.limit.take(bytes as u64),
                Packet::None(pause) => break pause,
            }
            moved += 1;
            if moved % BURST == 0 {
                self.ring.tell(memory)?;
            }
        };
        self.ring.tell(memory)?;
        Ok(pause)
    }

    fn packet(&mut self, memory: &GuestMemoryMmap) -> Result<Packet, Corrupt> {
        self.ring.hush(memory)?;
        let first = self.ring.position();
        let (mut chains, mut slices, mut room) = (Vec::new(), Vec::new(), 0);
        while room < self.largest && (chains.is_empty() || self.mergeable) {
            let Some(chain) = self.ring.pop(memory)? else {
                // All that the ring can hold is there and too small: the driver will give no more.
                if chains.len() == usize::from(self.ring.queue().size()) {
                    break;
                }
                // Asked for from here on, so that the driver rings for what it adds to what was found.
                if self.ring.listen(memory)? {
                    self.ring.hush(memory)?;
                    continue;
                }
                self.ring.rewind(first);
                return Ok(Packet::None(Pause::Driver));
            };
            let head = chain.head_index();
            let buffers = Buffers::of(chain, memory).filter(|buffers| buffers.whole && buffers.readable.is_empty());
            let len = buffers.as_ref().and_then(|buffers| total(&buffers.writable)).ok_or(Corrupt)?;
            if len < HEADER {
                return Err(Corrupt);
            }
            chains.push((head, len));
            slices.extend(buffers.into_iter().flat_map(|buffers| buffers.writable));
            room += len;
        }
        slices.truncate(SLICES);
        let bytes = match self.tap.receive(&slices) {
            Ok(bytes) if bytes >= HEADER => bytes,
            Ok(_) => {
                self.ring.rewind(first);
                return Ok(Packet::None(Pause::Gone));
            }
            Err(error) => {
                self.ring.rewind(first);
                return Ok(Packet::None(self.failed(&error)));
            }
        };
        let mut left = bytes;
        let mut used = Vec::with_capacity(1);
        for (head, len) in chains {
            if left == 0 {
                break;
            }
            let part = left.min(len);
            used.push((head, u32::try_from(part).unwrap_or(u32::MAX)));
            left -= part;
        }
        let count = u16::try_from(used.len()).unwrap_or(u16::MAX);
        put(&slices, NUM_BUFFERS, count.to_le_bytes());
        self.ring.rewind(first.wrapping_add(count));
        self.ring.push_all(memory, &used)?;
        Ok(Packet::Moved(bytes))
    }

    fn failed(&mut self, error: &io::Error) -> Pause {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Pause::Tap,
            Some(libc::EINTR) => Pause::Limit(Duration::ZERO),
            _ => {
                self.complaints.lock().unwrap_or_else(PoisonError::into_inner).add_error(
                    Level::Warn,
                    format_args!("the tap gives no more packets"),
                    error,
                );
                Pause::Gone
            }
        }
    }
}

/// Writes `bytes` at `at` of what `slices` are together.
fn put(slices: &[VolatileSlice<'_>], mut at: usize, bytes: [u8; 2]) {
    let mut left = bytes.as_slice();
    for slice in slices {
        if at >= slice.len() {
            at -= slice.len();
            continue;
        }
        let (part, rest) = left.split_at(left.len().min(slice.len() - at));
        // The range lies in the slice.
        let _ = slice.write_slice(part, at);
        (left, at) = (rest, 0);
        if left.is_empty() {
            break;
        }
    }
}
