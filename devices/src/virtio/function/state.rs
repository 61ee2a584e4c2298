//! A virtio function, written down: registers, where each queue stands, and what is particular to the device.

use pci::state::{Reader, StateError, Writer};

use super::{Device, VirtioFunction};
use crate::virtio::common::status;

impl<D: Device> VirtioFunction<D> {
    pub(super) fn save_all(&self, writer: &mut Writer) -> Result<(), StateError> {
        writer.section("device", |writer| self.device.save(writer))?;
        self.registers.save(writer);
        self.window.save(writer);
        self.signals.save(writer);
        self.common.save(writer);
        for mark in &self.marks {
            let (available, used) = mark.get();
            writer.u16(available);
            writer.u16(used);
        }
        Ok(())
    }

    pub(super) fn restore_all(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        reader.section("device", |reader| self.device.restore(reader))?;
        self.registers.restore(reader)?;
        self.window.restore(reader)?;
        self.signals.restore(reader)?;
        self.common.restore(reader)?;
        for mark in &self.marks {
            mark.set(reader.u16()?, reader.u16()?);
        }
        self.publish_vectors();
        self.follow_bus_master();
        if self.common.status & status::DRIVER_OK != 0 && !self.signals.needs_reset() {
            self.start();
            // The driver may not have been told of the last buffers that it got back.
            let signals = self.signals.clone();
            let queues: Vec<usize> = (0..self.common.queues.len()).collect();
            self.crew.at_release(Box::new(move || queues.iter().for_each(|queue| signals.used(*queue))));
        }
        Ok(())
    }
}
