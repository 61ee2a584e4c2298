//! A port, written down.

use super::Port;
use crate::access::Reg;
use crate::regs::header;
use crate::slot::Slot;
use crate::state::{Reader, StateError, Writer};

impl Port {
    /// Writes all registers, its slot and what is pending of interrupts.
    pub fn save(&self, writer: &mut Writer) {
        self.space.save(writer);
        if let Some(slot) = &self.slot {
            slot.save(writer);
        }
        writer.bool(self.slot_interrupts);
        writer.bool(self.error_interrupts);
        self.interrupts.save(writer);
    }

    /// Takes what a port of the same kind saved, with as much below it. Nothing is sent. Who has a map of what is forwarded looks
    /// at it again.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.space.restore(reader)?;
        self.slot.as_mut().map_or(Ok(()), |slot: &mut Slot| slot.restore(reader))?;
        self.slot_interrupts = reader.bool()?;
        self.error_interrupts = reader.bool()?;
        self.show_link();
        self.show_slot();
        self.interrupts.restore(reader, self.space.read(Reg::containing(header::COMMAND_STATUS)))
    }
}
