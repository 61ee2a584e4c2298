//! Interrupts of a function, written down.

use super::Interrupts;
use crate::regs::command;
use crate::state::{Reader, StateError, Writer};

impl Interrupts {
    /// Writes the registers that are kept here, what is pending, and the level that the function wants of its wire.
    pub fn save(&self, writer: &mut Writer) {
        let state = self.state();
        writer.bool(state.asserted);
        if let Some(msi) = &state.msi {
            msi.save(writer);
        }
        if let Some(msix) = &state.msix {
            msix.save(writer);
        }
    }

    /// Takes what a function of the same kind saved, whose command register holds `enables`. Nothing is sent; a wire goes to the
    /// level that it had.
    pub fn restore(&self, reader: &mut Reader<'_>, enables: u32) -> Result<(), StateError> {
        let mut state = self.state();
        let state = &mut *state;
        state.asserted = reader.bool()? && state.intx.is_some();
        if let Some(msi) = &mut state.msi {
            msi.restore(reader)?;
        }
        if let Some(msix) = &mut state.msix {
            msix.restore(reader)?;
        }
        state.sender.on = enables & command::BUS_MASTER != 0;
        state.intx_disabled = enables & command::INTX_DISABLE != 0;
        self.show(state);
        state.drive();
        Ok(())
    }
}
