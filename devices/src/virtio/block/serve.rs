//! Serves a disk's queue: takes requests in ring order, one after the other, and signals as the driver asked for it.

use std::sync::Arc;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

use super::request::{Disk, Served};
use crate::virtio::function::QueueStart;
use crate::virtio::signals::Signals;
use crate::virtio::worker::Bell;

/// Serves one queue.
pub(super) struct Server {
    disk: Arc<Disk>,
    queue: Queue,
    index: usize,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    signals: Arc<Signals>,
    durable_writes: bool,
}

/// The ring makes no sense: only a reset helps.
struct Corrupt;

impl From<virtio_queue::Error> for Corrupt {
    fn from(_: virtio_queue::Error) -> Self {
        Self
    }
}

impl Server {
    pub(super) fn new(disk: Arc<Disk>, start: QueueStart, durable_writes: bool) -> Self {
        let QueueStart { index, queue, memory, signals, .. } = start;
        Self { disk, queue, index, memory, signals, durable_writes }
    }

    /// Works until the bell says stop or the ring is corrupt.
    pub(super) fn run(mut self, bell: &Bell) {
        loop {
            if self.drain(bell).is_err() {
                self.signals.give_up();
                return;
            }
            if !bell.wait() {
                return;
            }
        }
    }

    /// Serves what the ring holds, until it is empty and the driver will ring again.
    fn drain(&mut self, bell: &Bell) -> Result<(), Corrupt> {
        let guard = self.memory.memory();
        let memory: &GuestMemoryMmap = &guard;
        let allowed = || self.signals.bus_master() && !bell.stopped();
        while allowed() {
            self.queue.disable_notification(memory)?;
            while allowed() {
                let Some(chain) = self.queue.iter(memory)?.next() else { break };
                let head = chain.head_index();
                match self.disk.serve(chain, memory, self.durable_writes, || bell.stopped()) {
                    Served::Used(len) => self.queue.add_used(memory, head, len)?,
                    Served::Malformed => return Err(Corrupt),
                    Served::Stopped => return Ok(()),
                }
                if self.queue.needs_notification(memory)? {
                    self.signals.used(self.index);
                }
            }
            if !self.queue.enable_notification(memory)? {
                break;
            }
        }
        Ok(())
    }
}
