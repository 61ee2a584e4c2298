//! One queue at work: takes chains of descriptors off it, gives them back, signals as the driver asked for it.

use std::num::Wrapping;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::atomic::GuestMemoryLoadGuard;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

use super::signals::Signals;
use super::worker::{Bell, Stop};

/// Guest memory as devices hold it.
pub type Memory = GuestMemoryAtomic<GuestMemoryMmap>;
/// Guest memory as it is at one moment.
pub type Snapshot = GuestMemoryLoadGuard<GuestMemoryMmap>;
/// Descriptors of one buffer.
pub type Chain<'m> = DescriptorChain<&'m GuestMemoryMmap>;

/// Where a ring stands, as its worker left it. To be read while the worker is held, or has ended.
#[derive(Debug, Default)]
pub struct Mark(AtomicU32);

impl Mark {
    /// The next entry of the available ring that is taken, and of the used ring that is given.
    #[must_use]
    pub fn get(&self) -> (u16, u16) {
        let [a, b, c, d] = self.0.load(Ordering::Acquire).to_le_bytes();
        (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
    }

    /// Sets both.
    pub fn set(&self, available: u16, used: u16) {
        self.0.store(u32::from(available) | u32::from(used) << 16, Ordering::Release);
    }
}

/// A queue that the driver has set up.
pub struct Ring {
    index: usize,
    queue: Queue,
    bell: Arc<Bell>,
    memory: Memory,
    signals: Arc<Signals>,
    /// Where the used ring stood when the driver was last told.
    told: u16,
    mark: Arc<Mark>,
}

/// The ring makes no sense: only a reset helps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt;

impl From<virtio_queue::Error> for Corrupt {
    fn from(_: virtio_queue::Error) -> Self {
        Self
    }
}

/// What became of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// The driver gets it back, with so many bytes written.
    Used(u32),
    /// There is no place for an answer: the driver is broken.
    Malformed,
    /// Not carried out; it stays in the queue and [`Ring::drain`] ends.
    Later,
    /// The worker is being stopped; the driver gets no answer.
    Stopped,
}

impl Ring {
    /// The queue goes on where `mark` is.
    pub(super) fn new(
        index: usize,
        mut queue: Queue,
        bell: Arc<Bell>,
        memory: Memory,
        signals: Arc<Signals>,
        mark: Arc<Mark>,
    ) -> Self {
        let (available, told) = mark.get();
        queue.set_next_avail(available);
        queue.set_next_used(told);
        Self { index, queue, bell, memory, signals, told, mark }
    }

    fn note(&self) {
        self.mark.set(self.queue.next_avail(), self.queue.next_used());
    }

    /// Its number.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Where the driver tells of new buffers. It rings, too, when the function may touch guest memory again.
    #[must_use]
    pub fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// The rings' size and addresses.
    #[must_use]
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Guest memory as it is at this moment.
    #[must_use]
    pub fn memory(&self) -> Snapshot {
        self.memory.memory()
    }

    /// The next buffer that the driver made available; `None` while the function may not touch guest memory.
    pub fn pop<'m>(&mut self, memory: &'m GuestMemoryMmap) -> Result<Option<Chain<'m>>, Corrupt> {
        if !self.signals.bus_master() {
            return Ok(None);
        }
        let chain = self.queue.iter(memory)?.next();
        self.note();
        Ok(chain)
    }

    /// Puts the buffer back that was taken last.
    pub fn put_back(&mut self) {
        self.queue.go_to_previous_position();
        self.note();
    }

    /// Whether the function may touch guest memory.
    #[must_use]
    pub fn allowed(&self) -> bool {
        self.signals.bus_master()
    }

    /// Where the next buffer is taken, for [`Ring::rewind`].
    #[must_use]
    pub fn position(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Puts all buffers back that were taken since `position`.
    pub fn rewind(&mut self, position: u16) {
        self.queue.set_next_avail(position);
        self.note();
    }

    /// Gives several buffers to the driver in one step, pairs of head and bytes written: a packet that lies in several must
    /// not be seen before all of them (virtio 1.2 5.1.6.3.2). [`Ring::tell`] follows.
    pub fn push_all(&mut self, memory: &GuestMemoryMmap, buffers: &[(u16, u32)]) -> Result<(), Corrupt> {
        let Some(((head, len), before)) = buffers.split_last() else { return Ok(()) };
        let size = u64::from(self.queue.size().max(1));
        let mut next = Wrapping(self.queue.next_used());
        for (head, len) in before {
            let entry = 4 + 8 * (u64::from(next.0) % size);
            let at = GuestAddress(self.queue.used_ring().checked_add(entry).ok_or(Corrupt)?);
            let [a, b, c, d] = u32::from(*head).to_le_bytes();
            let [e, f, g, h] = len.to_le_bytes();
            memory.write_slice(&[a, b, c, d, e, f, g, h], at).map_err(|_| Corrupt)?;
            next += 1;
        }
        self.queue.set_next_used(next.0);
        self.push(memory, *head, *len)
    }

    /// Gives a buffer to the driver, `len` bytes of it written. [`Ring::tell`] follows, once for several of them.
    pub fn push(&mut self, memory: &GuestMemoryMmap, head: u16, len: u32) -> Result<(), Corrupt> {
        self.queue.add_used(memory, head, len)?;
        self.note();
        Ok(())
    }

    /// Interrupts the driver, if it wants to hear of the buffers that it was given.
    pub fn tell(&mut self, memory: &GuestMemoryMmap) -> Result<(), Corrupt> {
        if self.wanted(memory)? {
            self.signals.used(self.index);
        }
        self.told = self.queue.next_used();
        Ok(())
    }

    /// Whether the driver wants an interrupt for what was used since it was last told (virtio 1.2 2.7.7 and 2.7.10).
    fn wanted(&self, memory: &GuestMemoryMmap) -> Result<bool, Corrupt> {
        let (old, new) = (Wrapping(self.told), Wrapping(self.queue.next_used()));
        if new == old {
            return Ok(false);
        }
        // The driver sees the used index before its wish is read.
        fence(Ordering::SeqCst);
        let driver = self.queue.avail_ring();
        let word = |at: u64| memory.load::<u16>(GuestAddress(at), Ordering::Acquire).map(u16::from_le).map_err(|_| Corrupt);
        if self.queue.event_idx_enabled() {
            let event = driver.checked_add(4 + 2 * u64::from(self.queue.size())).ok_or(Corrupt)?;
            return Ok(new - Wrapping(word(event)?) - Wrapping(1) < new - old);
        }
        // VIRTQ_AVAIL_F_NO_INTERRUPT.
        Ok(word(driver)? & 1 == 0)
    }

    /// Asks the driver not to ring.
    pub fn hush(&mut self, memory: &GuestMemoryMmap) -> Result<(), Corrupt> {
        Ok(self.queue.disable_notification(memory)?)
    }

    /// Asks the driver to ring for new buffers. Whether some came meanwhile, for which it may not have rung.
    pub fn listen(&mut self, memory: &GuestMemoryMmap) -> Result<bool, Corrupt> {
        // While buffers may not be touched there are none; the bell rings when they may be again.
        Ok(self.queue.enable_notification(memory)? && self.signals.bus_master())
    }

    /// The device cannot go on: the driver must reset it.
    pub fn give_up(&self) {
        self.signals.give_up();
    }

    /// Serves what the ring holds, in order, until it is empty and the driver will ring again.
    pub fn drain(&mut self, stop: &Stop, mut serve: impl FnMut(Chain<'_>, &GuestMemoryMmap) -> Served) -> Result<(), Corrupt> {
        let memory = self.memory();
        while self.signals.bus_master() && !stop.ends() {
            self.hush(&memory)?;
            while !stop.ends() {
                let Some(chain) = self.pop(&memory)? else { break };
                let head = chain.head_index();
                match serve(chain, &memory) {
                    Served::Used(len) => self.push(&memory, head, len)?,
                    Served::Malformed => return Err(Corrupt),
                    Served::Later => {
                        self.put_back();
                        return Ok(());
                    }
                    Served::Stopped => return Ok(()),
                }
                self.tell(&memory)?;
            }
            if !self.listen(&memory)? {
                break;
            }
        }
        Ok(())
    }

    /// Serves the ring whenever the driver rings, until `stop` says so or the ring is corrupt.
    pub fn run(mut self, stop: &Stop, mut serve: impl FnMut(Chain<'_>, &GuestMemoryMmap) -> Served) {
        loop {
            if self.drain(stop, &mut serve).is_err() {
                self.signals.give_up();
                return;
            }
            if !self.bell.wait(stop) {
                return;
            }
        }
    }
}
