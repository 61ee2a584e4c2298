//! Base address registers, written down.

use super::{Bars, Halves, Slot};
use crate::bar::BarKind;
use crate::state::{Reader, StateError, Writer};

impl Bars {
    /// Writes addresses and the ROM's enable bit. Decode enables follow the command register.
    pub fn save(&self, writer: &mut Writer) {
        for slot in &self.slots {
            if let Slot::Low { address, sizing, .. } = slot {
                writer.u64(*address);
                writer.bool(sizing.low);
                writer.bool(sizing.high);
            }
        }
        if let Some(rom) = &self.rom {
            writer.u32(rom.address);
            writer.bool(rom.enabled);
        }
    }

    /// Takes what registers of the same kinds and sizes saved.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        for slot in &mut self.slots {
            if let Slot::Low { spec, address, sizing } = slot {
                let at = reader.u64()?;
                let room = if spec.kind == BarKind::Memory64 { u64::MAX } else { 0xFFFF_FFFF };
                if at & (spec.size - 1) != 0 || at > room {
                    return Err(reader.wrong("an address that the BAR can have", at));
                }
                *address = at;
                *sizing = Halves { low: reader.bool()?, high: reader.bool()? };
            }
        }
        if let Some(rom) = &mut self.rom {
            let at = reader.u32()?;
            if at & (rom.size - 1) != 0 {
                return Err(reader.wrong("an address that the ROM can have", at));
            }
            (rom.address, rom.enabled) = (at, reader.bool()?);
        }
        Ok(())
    }
}
