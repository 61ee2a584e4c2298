//! Brings packets from a tap to the guest: one read for each, straight into the driver's buffers.

use std::io;
use std::time::Duration;

use rustix::event::PollFlags;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestMemoryMmap, VolatileSlice};

use super::HEADER;
use super::lane::{Lane, Packet, Pause};
use crate::virtio::buffers::{Buffers, total};
use crate::virtio::ring::Corrupt;
use crate::virtio::vectored::SLICES;
use crate::virtio::worker::Stop;

/// Offset of the number of buffers in a packet's header.
const NUM_BUFFERS: usize = 10;

/// How a receive queue is served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Receiver {
    /// A packet may lie in several buffers.
    pub(super) mergeable: bool,
    /// Bytes of the largest packet, with its header.
    pub(super) largest: usize,
}

impl Receiver {
    /// Works until `stop` says so or the ring is corrupt.
    pub(super) fn run(self, lane: Lane, stop: &Stop) {
        lane.run(PollFlags::IN, stop, |lane, memory| self.packet(lane, memory));
    }

    fn packet(self, lane: &mut Lane, memory: &GuestMemoryMmap) -> Result<Packet, Corrupt> {
        let first = lane.ring.position();
        let (mut chains, mut slices, mut room) = (Vec::new(), Vec::new(), 0);
        while room < self.largest && (chains.is_empty() || self.mergeable) {
            let Some(chain) = lane.ring.pop(memory)? else {
                // All that the ring can hold is there and too small: the driver will give no more.
                if chains.len() == usize::from(lane.ring.queue().size()) {
                    break;
                }
                // Asked for from here on, so that the driver rings for what it adds to what was found.
                if lane.more(memory)? {
                    continue;
                }
                lane.ring.rewind(first);
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
        let bytes = match lane.tap.receive(&slices) {
            Ok(bytes) if bytes >= HEADER => bytes,
            nothing => {
                lane.ring.rewind(first);
                return Ok(Packet::None(nothing.map_or_else(|error| failed(lane, &error), |_| Pause::Driver)));
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
        lane.tap.received().add((bytes - HEADER) as u64);
        lane.ring.rewind(first.wrapping_add(count));
        lane.ring.push_all(memory, &used)?;
        Ok(Packet::Moved(bytes))
    }
}

fn failed(lane: &Lane, error: &io::Error) -> Pause {
    match error.kind() {
        io::ErrorKind::WouldBlock => Pause::Tap,
        io::ErrorKind::Interrupted => Pause::Limit(Duration::ZERO),
        _ => {
            lane.complain("the tap gives no more packets", error);
            Pause::Driver
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
