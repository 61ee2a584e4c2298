//! The registers by which devices come and go on buses without slot registers, a root bus and conventional ones: tells the guest
//! what to look at, and the main loop what the guest has let go of. ACPI methods read and write them (`arch`:
//! `x86_64::acpi`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use arch::ports;
use pci::function::FunctionId;
use pci::slot::SlotEvent;
use pci::state::{Reader, StateError, Writer};
use pci::topology::{Name, Parent};
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};

use crate::kvm::EdgeLine;
use crate::slot_events::SlotEvents;

/// Which device numbers have what, and what the guest has yet to read.
pub struct BusSlots {
    buses: Mutex<Vec<Bus>>,
    line: EdgeLine,
    events: Arc<SlotEvents>,
}

/// A device number of one of the buses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// What the bus hangs on.
    pub on: Parent,
    /// Device number.
    pub number: u8,
}

/// The functions of a device with their names.
pub type Functions = Vec<(FunctionId, Name)>;

struct Bus {
    on: Parent,
    came: u32,
    leaves: u32,
    there: BTreeMap<u8, Functions>,
}

const CAME: u16 = 0;
const LEAVES: u16 = 4;
const LET_GO: u16 = 8;

impl BusSlots {
    /// Those of the buses on `buses`, whose registers are in this order, with nothing in them. `line` tells the guest, `events`
    /// the main loop.
    #[must_use]
    pub fn new(buses: impl IntoIterator<Item = Parent>, line: EdgeLine, events: Arc<SlotEvents>) -> Self {
        let bus = |on| Bus { on, came: 0, leaves: 0, there: BTreeMap::new() };
        Self { buses: Mutex::new(buses.into_iter().map(bus).collect()), line, events }
    }

    /// Ports that the registers take.
    #[must_use]
    pub fn ports(&self) -> u16 {
        let buses = self.change(|buses| buses.len());
        u16::try_from(buses).unwrap_or(u16::MAX).saturating_mul(ports::BUS_SLOTS_LEN)
    }

    /// What each bus hangs on, in the order of the registers.
    #[must_use]
    pub fn buses(&self) -> Vec<Parent> {
        self.change(|buses| buses.iter().map(|bus| bus.on).collect())
    }

    /// A device is in `slot`. A guest that runs is told.
    pub fn put(&self, slot: Slot, functions: Functions, tell: bool) {
        self.with(slot, |bus, bit| {
            bus.there.insert(slot.number, functions);
            bus.leaves &= !bit;
            if tell {
                bus.came |= bit;
            }
        });
        if tell {
            self.interrupt();
        }
    }

    /// Asks the guest to let go of what is in `slot`.
    pub fn ask(&self, slot: Slot) {
        self.with(slot, |bus, bit| bus.leaves |= bit);
        self.interrupt();
    }

    /// What was in `slot` is gone.
    pub fn clear(&self, slot: Slot) {
        self.with(slot, |bus, bit| {
            bus.there.remove(&slot.number);
            bus.came &= !bit;
            bus.leaves &= !bit;
        });
    }

    /// Where the device is that has a function `name`, and all of its functions.
    #[must_use]
    pub fn find(&self, name: &Name) -> Option<(Slot, Functions)> {
        self.change(|buses| {
            let mut all = buses.iter().flat_map(|bus| bus.there.iter().map(move |there| (bus.on, there)));
            let (on, (number, functions)) = all.find(|(_, (_, there))| there.iter().any(|(_, there)| there == name))?;
            Some((Slot { on, number: *number }, functions.clone()))
        })
    }

    /// Writes what the guest has yet to read.
    pub fn save(&self, writer: &mut Writer) {
        self.change(|buses| {
            writer.count(buses.len());
            for bus in buses {
                writer.u32(bus.came);
                writer.u32(bus.leaves);
            }
        });
    }

    /// Takes what slots of the same buses with the same devices saved.
    pub fn restore(&self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.change(|buses| {
            reader.same_count("buses with slots", buses.len())?;
            for bus in buses {
                (bus.came, bus.leaves) = (reader.u32()?, reader.u32()?);
            }
            Ok(())
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut Vec<Bus>) -> T) -> T {
        change(&mut self.buses.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn with(&self, slot: Slot, change: impl FnOnce(&mut Bus, u32)) {
        self.change(|buses| {
            if let Some(bus) = buses.iter_mut().find(|bus| bus.on == slot.on) {
                change(bus, bit(slot.number));
            }
        });
    }

    fn interrupt(&self) {
        if let Err(error) = self.line.pulse() {
            log::error!("cannot tell the guest of a device on a bus: {error}");
        }
    }

    /// A device leaves as a whole: its first function stands for it.
    fn let_go(&self, index: usize, numbers: u32) {
        let ids: Vec<FunctionId> = self.change(|buses| {
            let there = buses.get(index).into_iter().flat_map(|bus| &bus.there);
            let gone = there.filter(|(number, _)| numbers & bit(**number) != 0);
            gone.filter_map(|(_, functions)| functions.first().map(|(id, _)| *id)).collect()
        });
        ids.into_iter().for_each(|id| self.events.tell(id, SlotEvent::Released));
    }
}

/// Which bus's register, and which of them.
const fn register(offset: PioAddressOffset) -> (usize, u16) {
    ((offset / ports::BUS_SLOTS_LEN) as usize, offset % ports::BUS_SLOTS_LEN)
}

impl DevicePio for BusSlots {
    fn pio_read(&self, _: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(0);
        let Ok(data) = <&mut [u8; 4]>::try_from(data) else { return };
        let (index, register) = register(offset);
        let value = self.change(|buses| {
            let bus = buses.get_mut(index)?;
            match register {
                CAME => Some(std::mem::take(&mut bus.came)),
                LEAVES => Some(std::mem::take(&mut bus.leaves)),
                _ => None,
            }
        });
        *data = value.unwrap_or(0).to_le_bytes();
    }

    fn pio_write(&self, _: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        let (index, register) = register(offset);
        if let (LET_GO, Ok(data)) = (register, <[u8; 4]>::try_from(data)) {
            self.let_go(index, u32::from_le_bytes(data));
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
    fn the_guest_reads_once_what_came_and_what_is_to_leave_on_each_bus() {
        let vm = Vm::new().unwrap();
        vm.create_interrupt_controller().unwrap();
        let events = Arc::new(SlotEvents::new().unwrap());
        let (root, bridge) = (Parent::RootComplex(0), Parent::Port(FunctionId(9)));
        let slots = BusSlots::new([root, bridge], EdgeLine::new(vm.fd(), 11), Arc::clone(&events));
        assert_eq!((slots.ports(), slots.buses()), (24, vec![root, bridge]));
        let read = |offset| {
            let mut data = [0xFF; 4];
            slots.pio_read(PioAddress(0x640), offset, &mut data);
            u32::from_le_bytes(data)
        };
        let write = |offset, bits: u32| slots.pio_write(PioAddress(0x640), offset, &bits.to_le_bytes());
        let named = |id: u32, name: &str| (FunctionId(id), Name::from(name));
        let (third, fourth) = (Slot { on: bridge, number: 3 }, Slot { on: bridge, number: 4 });
        slots.put(third, vec![named(7, "d"), named(17, "d1")], true);
        slots.put(fourth, vec![named(8, "e")], false);
        assert_eq!((read(CAME), read(LEAVES)), (0, 0), "nothing on the root bus");
        assert_eq!((read(12 + CAME), read(12 + CAME), read(12 + LEAVES)), (1 << 3, 0, 0));
        slots.ask(third);
        assert_eq!((read(12 + LEAVES), read(12 + LEAVES)), (1 << 3, 0));
        write(LET_GO, u32::MAX);
        assert!(events.take().is_empty(), "nothing is on the root bus");
        write(12 + LET_GO, !(1 << 4));
        assert_eq!(events.take(), [(FunctionId(7), SlotEvent::Released)]);
        for name in ["d", "d1"] {
            assert_eq!(slots.find(&Name::from(name)), Some((third, vec![named(7, "d"), named(17, "d1")])));
        }
        slots.ask(third);
        slots.clear(third);
        assert_eq!((slots.find(&Name::from("d")), read(12 + LEAVES)), (None, 0));
        write(12 + LET_GO, 1 << 3);
        write(36 + LET_GO, u32::MAX);
        assert!(events.take().is_empty());
        let mut byte = [0xFF];
        slots.pio_read(PioAddress(0x640), CAME, &mut byte);
        assert_eq!((byte, read(36)), ([0], 0));
    }
}
