//! The registers by which devices come and go on buses without slot registers, a root bus and conventional ones, and by which
//! those leave that were there from the start: tells the guest what to look at, and the main loop what the guest has let go of.
//! ACPI methods read and write them (`arch`: `x86_64::acpi`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use arch::ports;
use pci::function::FunctionId;
use pci::slot::SlotEvent;
use pci::state::{Reader, StateError, Writer};
use pci::sync::lock;
use pci::topology::{Name, Parent};
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};

use crate::kvm::EdgeLine;
use crate::plan::PlannedSlotBus;
use crate::slot_events::SlotEvents;

/// Which slots have what, and what the guest has yet to read.
pub struct BusSlots {
    registers: Mutex<Vec<Registers>>,
    /// Buses to which devices come, with their registers: a device number is its bit.
    buses: Vec<(Parent, usize)>,
    /// Places of other buses, with register and bit.
    places: BTreeMap<Slot, (usize, u8)>,
    line: EdgeLine,
    events: Arc<SlotEvents>,
}

/// Who hears of a device that is put in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hears {
    /// The guest, which runs.
    Guest,
    /// Nobody: it is there before the guest looks.
    Nobody,
}

/// A device number of one of the buses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot {
    /// What the bus hangs on.
    pub on: Parent,
    /// Device number.
    pub number: u8,
}

/// The functions of a device with their names.
pub type Functions = Vec<(FunctionId, Name)>;

#[derive(Default)]
struct Registers {
    came: u32,
    leaves: u32,
    /// By bit.
    there: BTreeMap<u8, (Slot, Functions)>,
}

const CAME: u16 = 0;
const LEAVES: u16 = 4;
const LET_GO: u16 = 8;

impl BusSlots {
    /// Those of `planned`, with nothing in them. `line` tells the guest, `events` the main loop.
    #[must_use]
    pub fn new(planned: &[PlannedSlotBus], line: EdgeLine, events: Arc<SlotEvents>) -> Self {
        let index = |bus: &PlannedSlotBus| usize::from(bus.bus.index);
        let count = planned.iter().map(index).max().map_or(0, |last| last + 1);
        let buses = planned.iter().filter(|bus| bus.hot).map(|bus| (bus.on, index(bus))).collect();
        let places = planned
            .iter()
            .filter(|bus| !bus.hot)
            .flat_map(|bus| bus.bus.slots.iter().map(|slot| (Slot { on: bus.on, number: slot.number }, (index(bus), slot.bit))));
        let registers = std::iter::repeat_with(Registers::default).take(count).collect();
        Self { registers: Mutex::new(registers), buses, places: places.collect(), line, events }
    }

    /// Ports that the registers take.
    #[must_use]
    pub fn ports(&self) -> u16 {
        let registers = self.change(|registers| registers.len());
        u16::try_from(registers).unwrap_or(u16::MAX).saturating_mul(ports::BUS_SLOTS_LEN)
    }

    /// What each bus hangs on to which devices come, in the order of the registers.
    #[must_use]
    pub fn buses(&self) -> Vec<Parent> {
        self.buses.iter().map(|(on, _)| *on).collect()
    }

    /// A device is in `slot`.
    pub fn put(&self, slot: Slot, functions: Functions, hears: Hears) {
        self.with(slot, |registers, number| {
            registers.there.insert(number, (slot, functions));
            registers.leaves &= !bit(number);
            if hears == Hears::Guest {
                registers.came |= bit(number);
            }
        });
        if hears == Hears::Guest {
            self.interrupt();
        }
    }

    /// Asks the guest to let go of what is in `slot`.
    pub fn ask(&self, slot: Slot) {
        self.with(slot, |registers, number| registers.leaves |= bit(number));
        self.interrupt();
    }

    /// What was in `slot` is gone.
    pub fn clear(&self, slot: Slot) {
        self.with(slot, |registers, number| {
            registers.there.remove(&number);
            registers.came &= !bit(number);
            registers.leaves &= !bit(number);
        });
    }

    /// Where the device is that has a function `name`, and all of its functions.
    #[must_use]
    pub fn find(&self, name: &Name) -> Option<(Slot, Functions)> {
        self.change(|registers| {
            let mut all = registers.iter().flat_map(|registers| registers.there.values());
            all.find(|(_, there)| there.iter().any(|(_, there)| there == name)).cloned()
        })
    }

    /// Writes what the guest has yet to read.
    pub fn save(&self, writer: &mut Writer) {
        self.change(|all| {
            writer.count(all.len());
            for registers in all {
                writer.u32(registers.came);
                writer.u32(registers.leaves);
            }
        });
    }

    /// Takes what slots of the same buses with the same devices saved.
    pub fn restore(&self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.change(|all| {
            reader.same_count("registers of slots", all.len())?;
            for registers in all {
                (registers.came, registers.leaves) = (reader.u32()?, reader.u32()?);
            }
            Ok(())
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut Vec<Registers>) -> T) -> T {
        change(&mut lock(&self.registers))
    }

    /// `change` gets the registers of `slot` and its bit, if it has some.
    fn with(&self, slot: Slot, change: impl FnOnce(&mut Registers, u8)) {
        let bus = self.buses.iter().find(|(on, _)| *on == slot.on).map(|(_, index)| (*index, slot.number));
        let Some((index, number)) = self.places.get(&slot).copied().or(bus) else { return };
        self.change(|all| all.get_mut(index).map(|registers| change(registers, number)));
    }

    fn interrupt(&self) {
        if let Err(error) = self.line.pulse() {
            log::error!("cannot tell the guest of a device on a bus: {error}");
        }
    }

    /// A device leaves as a whole: its first function stands for it.
    fn let_go(&self, index: usize, numbers: u32) {
        let ids: Vec<FunctionId> = self.change(|all| {
            let there = all.get(index).into_iter().flat_map(|registers| &registers.there);
            let gone = there.filter(|(number, _)| numbers & bit(**number) != 0);
            gone.filter_map(|(_, (_, functions))| functions.first().map(|(id, _)| *id)).collect()
        });
        ids.into_iter().for_each(|id| self.events.tell(id, SlotEvent::Released));
    }
}

/// Which of the registers, and which dword of them.
const fn register(offset: PioAddressOffset) -> (usize, u16) {
    ((offset / ports::BUS_SLOTS_LEN) as usize, offset % ports::BUS_SLOTS_LEN)
}

impl DevicePio for BusSlots {
    fn pio_read(&self, _: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(0);
        let Ok(data) = <&mut [u8; 4]>::try_from(data) else { return };
        let (index, register) = register(offset);
        let value = self.change(|all| {
            let registers = all.get_mut(index)?;
            match register {
                CAME => Some(std::mem::take(&mut registers.came)),
                LEAVES => Some(std::mem::take(&mut registers.leaves)),
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
    use arch::x86_64::acpi::{BusSlot, SlotBus};

    use super::*;
    use crate::kvm::Vm;

    fn bus(on: Parent, index: u8, slots: &[(u8, u8)]) -> PlannedSlotBus {
        let slots: Vec<BusSlot> = slots.iter().map(|(number, bit)| BusSlot { number: *number, bit: *bit }).collect();
        PlannedSlotBus { on, root_complex: 0, hot: slots.is_empty(), bus: SlotBus { index, way: Vec::new(), slots } }
    }

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn devices_that_only_leave_share_registers_whatever_they_hang_on() {
        let vm = Vm::new().unwrap();
        vm.create_interrupt_controller().unwrap();
        let events = Arc::new(SlotEvents::new().unwrap());
        let (root, port, other) = (Parent::RootComplex(0), Parent::Port(FunctionId(9)), Parent::Port(FunctionId(10)));
        let planned = [bus(root, 0, &[]), bus(port, 1, &[(0, 0)]), bus(other, 1, &[(0, 1)])];
        let slots = BusSlots::new(&planned, EdgeLine::new(vm.fd(), 11), Arc::clone(&events));
        assert_eq!((slots.ports(), slots.buses()), (24, vec![root]), "nothing comes to the others");
        let slot = |on| Slot { on, number: 0 };
        slots.put(slot(port), vec![(FunctionId(1), Name::from("a"))], Hears::Nobody);
        slots.put(slot(other), vec![(FunctionId(2), Name::from("b"))], Hears::Nobody);
        slots.put(Slot { on: other, number: 3 }, vec![(FunctionId(3), Name::from("c"))], Hears::Nobody);
        assert_eq!(slots.find(&Name::from("c")), None, "a place without registers");
        slots.ask(slot(other));
        let mut leaves = [0xFF; 4];
        slots.pio_read(PioAddress(0x640), 12 + LEAVES, &mut leaves);
        assert_eq!(u32::from_le_bytes(leaves), 1 << 1);
        slots.pio_write(PioAddress(0x640), 12 + LET_GO, &2u32.to_le_bytes());
        assert_eq!(events.take(), [(FunctionId(2), SlotEvent::Released)]);
        slots.clear(slot(other));
        assert_eq!((slots.find(&Name::from("b")), slots.find(&Name::from("a")).unwrap().0), (None, slot(port)));
    }

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn the_guest_reads_once_what_came_and_what_is_to_leave_on_each_bus() {
        let vm = Vm::new().unwrap();
        vm.create_interrupt_controller().unwrap();
        let events = Arc::new(SlotEvents::new().unwrap());
        let (root, bridge) = (Parent::RootComplex(0), Parent::Port(FunctionId(9)));
        let slots = BusSlots::new(&[bus(root, 0, &[]), bus(bridge, 1, &[])], EdgeLine::new(vm.fd(), 11), Arc::clone(&events));
        assert_eq!((slots.ports(), slots.buses()), (24, vec![root, bridge]));
        let read = |offset| {
            let mut data = [0xFF; 4];
            slots.pio_read(PioAddress(0x640), offset, &mut data);
            u32::from_le_bytes(data)
        };
        let write = |offset, bits: u32| slots.pio_write(PioAddress(0x640), offset, &bits.to_le_bytes());
        let named = |id: u32, name: &str| (FunctionId(id), Name::from(name));
        let (third, fourth) = (Slot { on: bridge, number: 3 }, Slot { on: bridge, number: 4 });
        slots.put(third, vec![named(7, "d"), named(17, "d1")], Hears::Guest);
        slots.put(fourth, vec![named(8, "e")], Hears::Nobody);
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
