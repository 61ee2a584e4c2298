//! The registers of an emulated endpoint, written down.

use super::Emulated;
use crate::state::{Reader, StateError, Writer};

impl Emulated {
    /// Writes all registers and what is pending of interrupts.
    pub fn save(&self, writer: &mut Writer) {
        self.space.save(writer);
        self.bars.save(writer);
        if let Some(functions) = &self.virtual_functions {
            functions.save(writer);
        }
        self.interrupts.save(writer);
    }

    /// Takes what an endpoint of the same kind saved. Nothing is sent. Who has a map of what decodes looks at it again.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.space.restore(reader)?;
        self.bars.restore(reader)?;
        if let Some(functions) = &mut self.virtual_functions {
            functions.restore(&self.space, reader)?;
        }
        self.follow_command();
        self.show_bars();
        self.interrupts.restore(reader, self.command())
    }
}
