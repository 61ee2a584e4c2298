//! One direction of a pair of queues: moves packets in bursts, and waits for the driver, the tap or the limit between them.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use log::Level;
use pci::sync::lock;
use rustix::event::PollFlags;
use vm_memory::GuestMemoryMmap;

use super::tap::Tap;
use crate::complaints::Complaints;
use crate::virtio::limit::Limit;
use crate::virtio::ring::{Corrupt, Ring};
use crate::virtio::worker::Stop;

/// Packets after which the driver is told at the latest.
const BURST: u32 = 64;

/// A queue of the driver and one of the tap.
pub(super) struct Lane {
    /// Of the interface.
    pub(super) name: String,
    pub(super) tap: Arc<Tap>,
    pub(super) ring: Ring,
    pub(super) limit: Limit,
    /// Of all starts of the device, which a guest can repeat.
    pub(super) complaints: Arc<Mutex<Complaints>>,
}

/// Why a burst ends.
pub(super) enum Pause {
    /// The tap is not ready.
    Tap,
    /// The driver has no buffer, or there is no tap any more.
    Driver,
    /// The limit is reached.
    Limit(Duration),
}

/// What became of one packet.
pub(super) enum Packet {
    /// So many bytes went.
    Moved(usize),
    /// None went.
    None(Pause),
}

impl Lane {
    /// Moves packets by `packet`, which waits for `ready` of the tap, until `stop` says so or the ring is corrupt.
    pub(super) fn run(
        mut self,
        ready: PollFlags,
        stop: &Stop,
        packet: impl Fn(&mut Self, &GuestMemoryMmap) -> Result<Packet, Corrupt>,
    ) {
        loop {
            let bell = self.ring.bell().clone();
            let go_on = match self.burst(stop, &packet) {
                Err(Corrupt) => {
                    self.ring.give_up();
                    return;
                }
                Ok(Pause::Tap) => bell.wait_or(stop, Some((self.tap.as_fd(), ready)), None),
                Ok(Pause::Limit(time)) => bell.wait_or(stop, None, Some(time)),
                Ok(Pause::Driver) => bell.wait(stop),
            };
            if !go_on {
                return;
            }
        }
    }

    /// Moves packets until there is a reason to wait.
    fn burst(
        &mut self,
        stop: &Stop,
        packet: &impl Fn(&mut Self, &GuestMemoryMmap) -> Result<Packet, Corrupt>,
    ) -> Result<Pause, Corrupt> {
        let guard = self.ring.memory();
        let memory: &GuestMemoryMmap = &guard;
        self.ring.hush(memory)?;
        let mut moved = 0;
        let pause = loop {
            if stop.held() || stop.stopped() || !self.ring.allowed() {
                break Pause::Driver;
            }
            if let Some(time) = self.limit.wait(Instant::now()) {
                break Pause::Limit(time);
            }
            match packet(self, memory)? {
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

    /// Whether the driver has given a buffer since the last look. If not, it rings for the next.
    pub(super) fn more(&mut self, memory: &GuestMemoryMmap) -> Result<bool, Corrupt> {
        let more = self.ring.listen(memory)?;
        if more {
            self.ring.hush(memory)?;
        }
        Ok(more)
    }

    /// Tells of a packet of the guest that cannot be sent.
    pub(super) fn refuse(&self, what: &str, error: &io::Error) {
        let mut complaints = lock(&self.complaints);
        complaints.add_error(Level::Warn, format_args!("{}: {what}", self.name), error);
    }

    /// Tells of a failure of the tap.
    pub(super) fn complain(&self, what: &str, error: &io::Error) {
        let mut complaints = lock(&self.complaints);
        complaints.fail_error(Level::Warn, format_args!("{}: {what}", self.name), error);
    }
}
