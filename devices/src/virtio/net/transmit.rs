//! Brings packets from the guest to a tap: one write for each, straight from the driver's buffers.

use std::io;

use rustix::event::PollFlags;
use vm_memory::{GuestMemoryMmap, VolatileSlice};

use super::lane::{Lane, Packet, Pause};
use super::{HEADER, LARGEST};
use crate::virtio::buffers::{Buffers, total};
use crate::virtio::ring::Corrupt;
use crate::virtio::vectored::SLICES;
use crate::virtio::worker::Stop;

/// Serves a transmit queue until `stop` says so or the ring is corrupt.
pub(super) fn run(lane: Lane, stop: &Stop) {
    lane.run(PollFlags::OUT, stop, packet);
}

fn packet(lane: &mut Lane, memory: &GuestMemoryMmap) -> Result<Packet, Corrupt> {
    let chain = loop {
        if let Some(chain) = lane.ring.pop(memory)? {
            break chain;
        }
        if !lane.more(memory)? {
            return Ok(Packet::None(Pause::Driver));
        }
    };
    let head = chain.head_index();
    let buffers = Buffers::of(chain, memory).filter(|buffers| buffers.whole && buffers.writable.is_empty());
    let packet = buffers.ok_or(Corrupt)?.readable;
    let len = total(&packet).filter(|len| *len >= HEADER).ok_or(Corrupt)?;
    // A driver that sends more than a packet can be loses it, as on a wire.
    if len <= LARGEST && packet.len() <= SLICES && send(lane, &packet).is_none() {
        lane.ring.put_back();
        return Ok(Packet::None(Pause::Tap));
    }
    lane.ring.push(memory, head, 0)?;
    Ok(Packet::Moved(len))
}

/// Sends one packet, or loses it if the tap does not take it. `None` if it may be sent later.
fn send(lane: &Lane, packet: &[VolatileSlice<'_>]) -> Option<()> {
    loop {
        match lane.tap.send(packet) {
            Ok(bytes) => {
                lane.tap.sent().add(bytes.saturating_sub(HEADER) as u64);
                return Some(());
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
            // Of a header that contradicts its packet, or a packet without an Ethernet header (linux: drivers/net/tun.c).
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                lane.refuse("a packet of the guest is not well-formed and is lost", &error);
                return Some(());
            }
            Err(error) => {
                lane.complain("the tap does not take packets, which are lost", &error);
                return Some(());
            }
        }
    }
}
