//! A slot, written down.

use super::{EVENTS, Lamp, Leaving, Request, Slot};
use crate::state::{Reader, StateError, Writer};

impl Slot {
    /// Writes its registers and what it waits for.
    pub fn save(&self, writer: &mut Writer) {
        writer.bool(self.occupied);
        writer.u16(self.control);
        writer.u16(self.events);
        writer.bool(self.asserted);
        writer.bool(self.leaving.events);
        writer.bool(self.leaving.indicator);
        writer.u8(match self.lamp {
            Lamp::Dark => 0,
            Lamp::Trying => 1,
            Lamp::Lit => 2,
            Lamp::Out => 3,
        });
        writer.u8(match self.request {
            Request::None => 0,
            Request::Waiting => 1,
            Request::Made => 2,
            Request::Granted => 3,
        });
    }

    /// Takes what a slot of the same kind saved, with as much in it as in this one.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        let occupied = reader.bool()?;
        if occupied != self.occupied {
            return Err(reader.wrong("what is in the slot", occupied));
        }
        let possible = EVENTS.iter().fold(0, |all, (event, _)| all | event);
        self.control = reader.u16()? & self.writable();
        self.events = reader.u16()? & possible;
        self.asserted = reader.bool()?;
        self.leaving = Leaving { events: reader.bool()?, indicator: reader.bool()? };
        self.lamp = match reader.u8()? {
            0 => Lamp::Dark,
            1 => Lamp::Trying,
            2 => Lamp::Lit,
            3 => Lamp::Out,
            other => return Err(reader.wrong("a state of the power indicator", other)),
        };
        self.request = match reader.u8()? {
            0 => Request::None,
            1 => Request::Waiting,
            2 => Request::Made,
            3 => Request::Granted,
            other => return Err(reader.wrong("a state of a removal", other)),
        };
        Ok(())
    }
}
