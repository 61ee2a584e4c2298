//! The registers by which devices come and go on the root bus: tells the guest what to look at, and the main loop what the
//! guest has let go of. ACPI methods read and write them (`arch`: `x86_64/acpi/slots.rs`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use pci::function::FunctionId;
use pci::slot::SlotEvent;
use pci::topology::Name;
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};

use crate::kvm::EdgeLine;
use crate::slot_events::SlotEvents;

/// Which device numbers have what, and what the guest has yet to read.
pub struct RootSlots {
    state: Mutex<State>,
    line: EdgeLine,
    events: Arc<SlotEvents>,
}

#[derive(Default)]
struct State {
    came: u32,
    leaves: u32,
    there: BTreeMap<u8, (FunctionId, Name)>,
}

const CAME: u16 = 0;
const LEAVES: u16 = 4;
const LET_GO: u16 = 8;

impl RootSlots {
    /// With nothing in them. `line` tells the guest, `events` the main loop.
    #[must_use]
    pub fn new(line: EdgeLine, events: Arc<SlotEvents>) -> Self {
        Self { state: Mutex::default(), line, events }
    }

    /// A device is at `number`. A guest that runs is told.
    pub fn put(&self, number: u8, id: FunctionId, name: Name, tell: bool) {
        self.change(|state| {
            state.there.insert(number, (id, name));
            state.leaves &= !bit(number);
            if tell {
                state.came |= bit(number);
            }
        });
        if tell {
            self.interrupt();
        }
    }

    /// Asks the guest to let go of what is at `number`.
    pub fn ask(&self, number: u8) {
        self.change(|state| state.leaves |= bit(number));
        self.interrupt();
    }

    /// What was at `number` is gone.
    pub fn clear(&self, number: u8) {
        self.change(|state| {
            state.there.remove(&number);
            state.came &= !bit(number);
            state.leaves &= !bit(number);
        });
    }

    /// Where the device `name` is, and its function.
    #[must_use]
    pub fn find(&self, name: &Name) -> Option<(u8, FunctionId)> {
        self.change(|state| state.there.iter().find(|(_, (_, there))| there == name).map(|(number, (id, _))| (*number, *id)))
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn interrupt(&self) {
        if let Err(error) = self.line.pulse() {
            log::error!("cannot tell the guest of a device on the root bus: {error}");
        }
    }

    fn let_go(&self, numbers: u32) {
        let ids: Vec<FunctionId> = self.change(|state| {
            let there = state.there.iter().filter(|(number, _)| numbers & bit(**number) != 0);
            there.map(|(_, (id, _))| *id).collect()
        });
        ids.into_iter().for_each(|id| self.events.tell(id, SlotEvent::Released));
    }
}

impl DevicePio for RootSlots {
    fn pio_read(&self, _: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(0);
        let Ok(data) = <&mut [u8; 4]>::try_from(data) else { return };
        *data = self
            .change(|state| match offset {
                CAME => std::mem::take(&mut state.came),
                LEAVES => std::mem::take(&mut state.leaves),
                _ => 0,
            })
            .to_le_bytes();
    }

    fn pio_write(&self, _: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        if let (LET_GO, Ok(data)) = (offset, <[u8; 4]>::try_from(data)) {
            self.let_go(u32::from_le_bytes(data));
        }
    }
}

const fn bit(number: u8) -> u32 {
    1 << (number & 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::Vm;

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn the_guest_reads_once_what_came_and_what_is_to_leave() {
        let vm = Vm::new().unwrap();
        vm.create_interrupt_controller().unwrap();
        let events = Arc::new(SlotEvents::new().unwrap());
        let slots = RootSlots::new(EdgeLine::new(vm.fd(), 11), Arc::clone(&events));
        let read = |offset| {
            let mut data = [0xFF; 4];
            slots.pio_read(PioAddress(0x640), offset, &mut data);
            u32::from_le_bytes(data)
        };
        let write = |bits: u32| slots.pio_write(PioAddress(0x640), LET_GO, &bits.to_le_bytes());
        let name = Name::from("d");
        slots.put(3, FunctionId(7), Name::from("d"), true);
        slots.put(4, FunctionId(8), Name::from("e"), false);
        assert_eq!((read(CAME), read(CAME), read(LEAVES)), (1 << 3, 0, 0));
        slots.ask(3);
        assert_eq!((read(LEAVES), read(LEAVES)), (1 << 3, 0));
        write(!(1 << 4));
        assert_eq!(events.take(), [(FunctionId(7), SlotEvent::Released)]);
        assert_eq!(slots.find(&name), Some((3, FunctionId(7))));
        slots.ask(3);
        slots.clear(3);
        assert_eq!((slots.find(&name), read(LEAVES)), (None, 0));
        write(1 << 3);
        assert!(events.take().is_empty());
        let mut byte = [0xFF];
        slots.pio_read(PioAddress(0x640), CAME, &mut byte);
        assert_eq!(byte, [0]);
    }
}
