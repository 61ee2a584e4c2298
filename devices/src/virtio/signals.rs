//! How a virtio device tells its driver something: used buffers, and that it gave up. Shared by the function, which has the
//! registers, and its workers.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};

use pci::interrupts::Interrupts;
use pci::state::{Reader, StateError, Writer};

use super::common::NO_VECTOR;

const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// Interrupt state of a virtio function.
pub struct Signals {
    interrupts: Arc<Interrupts>,
    isr: AtomicU8,
    config_vector: AtomicU16,
    queue_vectors: Vec<AtomicU16>,
    needs_reset: AtomicBool,
    generation: AtomicU8,
    bus_master: AtomicBool,
}

impl Signals {
    /// Signals of a device with `queues` queues.
    #[must_use]
    pub fn new(interrupts: Arc<Interrupts>, queues: usize) -> Self {
        Self {
            interrupts,
            isr: AtomicU8::new(0),
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            needs_reset: AtomicBool::new(false),
            generation: AtomicU8::new(0),
            bus_master: AtomicBool::new(false),
        }
    }

    /// Queue `queue` has used buffers.
    pub fn used(&self, queue: usize) {
        self.isr.fetch_or(ISR_QUEUE, Ordering::AcqRel);
        if let Some(vector) = self.queue_vectors.get(queue) {
            self.raise(vector.load(Ordering::Acquire));
        }
    }

    /// Lets another process tell of used buffers of queue `queue` by signals of `event`, until the result is dropped. Those that
    /// stay in it (see [`Interrupts::add_event`]) are for the caller, who calls [`Signals::used`].
    #[must_use]
    pub fn told_by(self: &Arc<Self>, queue: usize, event: Arc<dyn AsFd + Send + Sync>) -> Told {
        let vector = || self.queue_vectors.get(queue).map_or(NO_VECTOR, |vector| vector.load(Ordering::Acquire));
        if self.interrupts.add_event(queue, vector(), event) {
            // The driver may have chosen another meanwhile.
            self.interrupts.move_event(queue, vector());
        }
        Told { interrupts: self.interrupts.clone(), queue }
    }

    /// The device configuration has changed (virtio 1.2 2.3).
    pub fn config_changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.isr.fetch_or(ISR_CONFIG, Ordering::AcqRel);
        self.raise(self.config_vector.load(Ordering::Acquire));
    }

    /// How often the device configuration has changed.
    #[must_use]
    pub fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// The device cannot go on; the driver must reset it (virtio 1.2 2.1.2).
    pub fn give_up(&self) {
        self.needs_reset.store(true, Ordering::Release);
        self.isr.fetch_or(ISR_CONFIG, Ordering::AcqRel);
        self.raise(self.config_vector.load(Ordering::Acquire));
    }

    /// Whether the device gave up.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Whether the function may touch guest memory.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        self.bus_master.load(Ordering::Acquire)
    }

    /// Sets whether the function may touch guest memory.
    pub fn set_bus_master(&self, on: bool) {
        self.bus_master.store(on, Ordering::Release);
    }

    /// Sets the vectors that the driver chose.
    pub fn set_vectors(&self, config: u16, queues: impl Iterator<Item = u16>) {
        self.config_vector.store(config, Ordering::Release);
        for (queue, (kept, vector)) in self.queue_vectors.iter().zip(queues).enumerate() {
            kept.store(vector, Ordering::Release);
            self.interrupts.move_event(queue, vector);
        }
    }

    /// Reads the ISR status register, which clears it (virtio 1.2 4.1.4.5).
    pub fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    /// As after a device reset. Vectors are set apart.
    pub fn reset(&self) {
        self.take_isr();
        self.needs_reset.store(false, Ordering::Release);
    }

    /// Writes what a driver can read of it.
    pub fn save(&self, writer: &mut Writer) {
        writer.u8(self.isr.load(Ordering::Acquire));
        writer.bool(self.needs_reset());
        writer.u8(self.generation());
    }

    /// Takes what another device saved.
    pub fn restore(&self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.isr.store(reader.u8()? & (ISR_QUEUE | ISR_CONFIG), Ordering::Release);
        self.needs_reset.store(reader.bool()?, Ordering::Release);
        self.generation.store(reader.u8()?, Ordering::Release);
        Ok(())
    }

    fn raise(&self, vector: u16) {
        if vector != NO_VECTOR {
            self.interrupts.raise(vector);
        }
    }
}

/// Another process can tell the driver of used buffers, as long as this lives.
pub struct Told {
    interrupts: Arc<Interrupts>,
    queue: usize,
}

impl Drop for Told {
    fn drop(&mut self) {
        self.interrupts.remove_event(self.queue);
    }
}
