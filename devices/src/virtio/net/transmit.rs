//! Brings packets from the guest to a tap: one write for each, straight from the driver's buffers.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use log::Level;
use rustix::event::PollFlags;
use vm_memory::{GuestMemoryMmap, VolatileSlice};

use super::tap::Tap;
use super::{HEADER, LARGEST};
use crate::complaints::Complaints;
use crate::virtio::buffers::{Buffers, total};
use crate::virtio::limit::Limit;
use crate::virtio::ring::{Corrupt, Ring};
use crate::virtio::vectored::SLICES;
use crate::virtio::worker::Stop;

/// Packets after which the driver is told at the latest.
const BURST: u32 = 64;

/// Serves a transmit queue.
pub(super) struct Transmitter {
    tap: Arc<Tap>,
    ring: Ring,
    limit: Limit,
    /// Of all starts of the device, which a guest can repeat.
    complaints: Arc<Mutex<Complaints>>,
}

enum Pause {
    Driver,
    Tap,
    Limit(Duration),
}

impl Transmitter {
    pub(super) fn new(tap: Arc<Tap>, ring: Ring, limit: Limit, complaints: Arc<Mutex<Complaints>>) -> Self {
        Self { tap, ring, limit, complaints }
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
                Ok(Pause::Driver) => bell.wait(stop),
                Ok(Pause::Tap) => bell.wait_or(stop, Some((self.tap.as_fd(), PollFlags::OUT)), None),
                Ok(Pause::Limit(time)) => bell.wait_or(stop, None, Some(time)),
            };
            if !go_on {
                return;
            }
        }
    }

    fn burst(&mut self, stop: &Stop) -> Result<Pause, Corrupt> {
        let guard = self.ring.memory();
        let memory: &GuestMemoryMmap = &guard;
        self.ring.hush(memory)?;
        let mut moved = 0;
        let pause = loop {
            if stop.stopped() || !self.ring.allowed() {
                break Pause::Driver;
            }
            if let Some(time) = self.limit.wait(Instant::now()) {
                break Pause::Limit(time);
            }
            let Some(chain) = self.ring.pop(memory)? else {
                if self.ring.listen(memory)? {
                    self.ring.hush(memory)?;
                    continue;
                }
                break Pause::Driver;
            };
            let head = chain.head_index();
            let buffers = Buffers::of(chain, memory).filter(|buffers| buffers.whole && buffers.writable.is_empty());
            let packet = buffers.ok_or(Corrupt)?.readable;
            let len = total(&packet).filter(|len| *len >= HEADER).ok_or(Corrupt)?;
            // A driver that sends more than a packet can be loses it, as on a wire.
            if len <= LARGEST && packet.len() <= SLICES && self.send(&packet).is_none() {
                self.ring.put_back();
                break Pause::Tap;
            }
            self.limit.take(len as u64);
            self.ring.push(memory, head, 0)?;
            moved += 1;
            if moved % BURST == 0 {
                self.ring.tell(memory)?;
            }
        };
        self.ring.tell(memory)?;
        Ok(pause)
    }

    /// Sends one packet, or loses it if the tap does not take it. `None` if it may be sent later.
    fn send(&mut self, packet: &[VolatileSlice<'_>]) -> Option<()> {
        loop {
            match self.tap.send(packet) {
                Ok(_) => return Some(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) => {
                    self.complaints.lock().unwrap_or_else(PoisonError::into_inner).add_error(
                        Level::Warn,
                        format_args!("the tap does not take packets, which are lost"),
                        &error,
                    );
                    return Some(());
                }
            }
        }
    }
}
