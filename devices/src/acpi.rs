//! Registers by which ACPI learns what came up while the machine runs: processors and memory that come and go, the power
//! button. The methods that use them are in DSDT; the caller raises the interrupt and does what a guest asks for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use pci::state::{Reader, StateError, Writer};
use pci::sync::lock;
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};

/// Codes for `Notify` (ACPI 6.5 5.6.6).
const DEVICE_CHECK: u32 = 1;
const EJECT_REQUEST: u32 = 3;
/// What a register for the next one reads when there is none.
pub const NOTHING_NEXT: u32 = u32::MAX;
/// Bit of the event register: a processor came or is to go.
pub const CPU_EVENT: u32 = 1 << 0;
/// Bit of the event register: memory came.
pub const MEMORY_EVENT: u32 = 1 << 1;
/// Bit of the event register: the power button was pressed.
pub const POWER_BUTTON_EVENT: u32 = 1 << 2;
/// Bit of a state that says that something is there.
const PRESENT: u8 = 1 << 0;
/// What a guest writes to a processor's state to take it away.
pub const EJECT: u8 = 1 << 3;
/// Ports of a memory device.
pub const MEMORY_DEVICE_LEN: u16 = 24;

/// Memory that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryDevice {
    /// First guest-physical address.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Memory node.
    pub node: u32,
}

#[derive(Default)]
struct State {
    events: u32,
    cpus: BTreeSet<u8>,
    /// Codes that the guest has not taken yet, by processor.
    cpu_changes: BTreeMap<u8, u32>,
    /// Processors that were asked to go.
    leaving: BTreeSet<u8>,
    memory: Vec<MemoryDevice>,
    memory_changes: BTreeSet<u16>,
}

/// The registers, shared by those who answer at their ports and those who tell the guest.
pub struct HotPlugRegisters {
    state: Mutex<State>,
    /// Raises the interrupt.
    interrupt: Box<dyn Fn() + Send + Sync>,
    /// The guest has given a processor back. Called by a vCPU: it must not wait.
    ejected: Box<dyn Fn(u8) + Send + Sync>,
}

impl HotPlugRegisters {
    /// A machine that starts with processors `cpus` and memory devices `memory`.
    #[must_use]
    pub fn new(
        cpus: BTreeSet<u8>,
        memory: Vec<MemoryDevice>,
        interrupt: Box<dyn Fn() + Send + Sync>,
        ejected: Box<dyn Fn(u8) + Send + Sync>,
    ) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { cpus, memory, ..State::default() }), interrupt, ejected })
    }

    /// Shows the guest processor `number`, whose thread runs.
    pub fn add_cpu(&self, number: u8) {
        let mut state = self.lock();
        state.cpus.insert(number);
        state.leaving.remove(&number);
        state.cpu_changes.insert(number, DEVICE_CHECK);
        self.raise(state, CPU_EVENT);
    }

    /// Asks the guest to give processor `number` back.
    pub fn ask_for_cpu(&self, number: u8) {
        let mut state = self.lock();
        if state.cpus.contains(&number) {
            state.leaving.insert(number);
            state.cpu_changes.insert(number, EJECT_REQUEST);
            self.raise(state, CPU_EVENT);
        }
    }

    /// Takes back what [`HotPlugRegisters::ask_for_cpu`] asked for. Whether it came in time: the guest still has it.
    pub fn keep_cpu(&self, number: u8) -> bool {
        let mut state = self.lock();
        state.leaving.remove(&number);
        if state.cpu_changes.get(&number) == Some(&EJECT_REQUEST) {
            state.cpu_changes.remove(&number);
        }
        state.cpus.contains(&number)
    }

    /// Shows the guest memory that it can use from now on; the number of its device.
    pub fn add_memory(&self, device: MemoryDevice) -> usize {
        let mut state = self.lock();
        state.memory.push(device);
        let number = state.memory.len() - 1;
        state.memory_changes.extend(u16::try_from(number));
        self.raise(state, MEMORY_EVENT);
        number
    }

    /// Presses the power button.
    pub fn press_power_button(&self) {
        let state = self.lock();
        self.raise(state, POWER_BUTTON_EVENT);
    }

    /// Writes what the guest has yet to take.
    pub fn save(&self, writer: &mut Writer) {
        let state = self.lock();
        writer.u32(state.events);
        writer.count(state.cpu_changes.len());
        for (number, code) in &state.cpu_changes {
            writer.u8(*number);
            writer.u32(*code);
        }
        writer.count(state.leaving.len());
        state.leaving.iter().for_each(|number| writer.u8(*number));
        writer.count(state.memory_changes.len());
        state.memory_changes.iter().for_each(|number| writer.u16(*number));
    }

    /// Takes what registers with the same processors and memory saved.
    pub fn restore(&self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        let mut state = self.lock();
        state.events = reader.u32()? & (CPU_EVENT | MEMORY_EVENT | POWER_BUTTON_EVENT);
        for _ in 0..reader.count()? {
            let (number, code) = (reader.u8()?, reader.u32()?);
            if !matches!(code, DEVICE_CHECK | EJECT_REQUEST) {
                return Err(reader.wrong("a change of a processor", code));
            }
            state.cpu_changes.insert(number, code);
        }
        for _ in 0..reader.count()? {
            let number = reader.u8()?;
            state.leaving.insert(number);
        }
        for _ in 0..reader.count()? {
            let number = reader.u16()?;
            state.memory_changes.insert(number);
        }
        Ok(())
    }

    fn raise(&self, mut state: MutexGuard<'_, State>, event: u32) {
        state.events |= event;
        drop(state);
        (self.interrupt)();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Event register and the registers for the next change, 12 ports.
pub struct EventPorts(pub Arc<HotPlugRegisters>);

impl DevicePio for EventPorts {
    fn pio_read(&self, _base: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        let mut state = self.0.lock();
        let value = match offset {
            0 => std::mem::take(&mut state.events),
            4 => state.cpu_changes.pop_first().map_or(NOTHING_NEXT, |(number, code)| code << 16 | u32::from(number)),
            8 => state.memory_changes.pop_first().map_or(NOTHING_NEXT, |number| DEVICE_CHECK << 16 | u32::from(number)),
            _ => NOTHING_NEXT,
        };
        fill(data, &value.to_le_bytes());
    }

    fn pio_write(&self, _base: PioAddress, _offset: PioAddressOffset, _data: &[u8]) {}
}

/// States of processors, a port each.
pub struct CpuPorts(pub Arc<HotPlugRegisters>);

impl DevicePio for CpuPorts {
    fn pio_read(&self, _base: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        let there = u8::try_from(offset).is_ok_and(|number| self.0.lock().cpus.contains(&number));
        fill(data, &[if there { PRESENT } else { 0 }]);
    }

    /// Takes a processor that was asked for. A guest that gives back others keeps them.
    fn pio_write(&self, _base: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        let (Ok(number), Some(value)) = (u8::try_from(offset), data.first()) else { return };
        if value & EJECT == 0 {
            return;
        }
        let mut state = self.0.lock();
        if state.leaving.remove(&number) && state.cpus.remove(&number) {
            drop(state);
            (self.0.ejected)(number);
        }
    }
}

/// Memory devices, 24 ports each.
pub struct MemoryPorts(pub Arc<HotPlugRegisters>);

impl DevicePio for MemoryPorts {
    fn pio_read(&self, _base: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        let state = self.0.lock();
        let device = state.memory.get(usize::from(offset / MEMORY_DEVICE_LEN));
        let mut registers = [0; 24];
        if let Some(device) = device {
            let fields = [device.base.to_le_bytes(), device.len.to_le_bytes()].concat();
            let rest = [device.node.to_le_bytes(), u32::from(PRESENT).to_le_bytes()].concat();
            fill(&mut registers, &[fields, rest].concat());
        }
        fill(data, registers.get(usize::from(offset % MEMORY_DEVICE_LEN)..).unwrap_or_default());
    }

    fn pio_write(&self, _base: PioAddress, _offset: PioAddressOffset, _data: &[u8]) {}
}

/// The first bytes of `value`, and zeros behind them.
fn fill(data: &mut [u8], value: &[u8]) {
    for (index, byte) in data.iter_mut().enumerate() {
        *byte = value.get(index).copied().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    struct Rig {
        registers: Arc<HotPlugRegisters>,
        interrupts: Arc<AtomicUsize>,
        ejected: Arc<Mutex<Vec<u8>>>,
    }

    fn rig() -> Rig {
        let (interrupts, ejected) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let (raise, eject) = (Arc::clone(&interrupts), Arc::clone(&ejected));
        let registers = HotPlugRegisters::new(
            [0, 1].into(),
            Vec::new(),
            Box::new(move || {
                raise.fetch_add(1, Ordering::Relaxed);
            }),
            Box::new(move |number| eject.lock().unwrap().push(number)),
        );
        Rig { registers, interrupts, ejected }
    }

    fn dword(device: &dyn DevicePio, offset: u16) -> u32 {
        let mut data = [0xAA; 4];
        device.pio_read(PioAddress(0), offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn byte(device: &dyn DevicePio, offset: u16) -> u8 {
        let mut data = [0xAA];
        device.pio_read(PioAddress(0), offset, &mut data);
        data[0]
    }

    #[test]
    fn a_processor_that_came_is_there_and_told_once() {
        let Rig { registers, interrupts, .. } = rig();
        let (events, cpus) = (EventPorts(Arc::clone(&registers)), CpuPorts(Arc::clone(&registers)));
        assert_eq!((byte(&cpus, 1), byte(&cpus, 5), dword(&events, 0), dword(&events, 4)), (1, 0, 0, u32::MAX));
        registers.add_cpu(5);
        assert_eq!(interrupts.load(Ordering::Relaxed), 1);
        assert_eq!((dword(&events, 0), dword(&events, 0)), (1, 0));
        assert_eq!((byte(&cpus, 5), dword(&events, 4), dword(&events, 4)), (1, 0x1_0005, u32::MAX));
    }

    #[test]
    fn a_processor_goes_when_the_guest_gives_it_back_and_only_if_it_was_asked_for() {
        let Rig { registers, ejected, .. } = rig();
        let (events, cpus) = (EventPorts(Arc::clone(&registers)), CpuPorts(Arc::clone(&registers)));
        for offset in [1, 9, 255, 300] {
            cpus.pio_write(PioAddress(0), offset, &[8]);
        }
        registers.ask_for_cpu(9);
        assert_eq!((byte(&cpus, 1), dword(&events, 4)), (1, u32::MAX), "nobody asked for it; nobody has number 9");
        registers.ask_for_cpu(1);
        assert_eq!((byte(&cpus, 1), dword(&events, 4)), (1, 0x3_0001));
        cpus.pio_write(PioAddress(0), 1, &[1]);
        cpus.pio_write(PioAddress(0), 1, &[]);
        assert_eq!(*ejected.lock().unwrap(), []);
        cpus.pio_write(PioAddress(0), 1, &[8]);
        cpus.pio_write(PioAddress(0), 1, &[8]);
        assert_eq!((byte(&cpus, 1), ejected.lock().unwrap().clone()), (0, vec![1]));
        // Asked for and left alone again.
        registers.add_cpu(1);
        registers.ask_for_cpu(1);
        assert!(registers.keep_cpu(1) && !registers.keep_cpu(7));
        cpus.pio_write(PioAddress(0), 1, &[8]);
        assert_eq!((byte(&cpus, 1), ejected.lock().unwrap().len()), (1, 1));
    }

    #[test]
    fn memory_that_came_tells_its_place_and_node() {
        let Rig { registers, .. } = rig();
        let (events, memory) = (EventPorts(Arc::clone(&registers)), MemoryPorts(Arc::clone(&registers)));
        let device = |base, node| MemoryDevice { base, len: 0x1_2345_6000, node };
        assert_eq!((registers.add_memory(device(1 << 40, 0)), registers.add_memory(device(3 << 32, 2))), (0, 1));
        assert_eq!(
            (dword(&events, 0), dword(&events, 8), dword(&events, 8), dword(&events, 8)),
            (2, 0x1_0000, 0x1_0001, u32::MAX)
        );
        let second = [24, 28, 32, 36, 40, 44].map(|offset| dword(&memory, offset));
        assert_eq!(second, [0, 3, 0x2345_6000, 1, 2, 1]);
        assert_eq!([48, 68, 1148].map(|offset| dword(&memory, offset)), [0; 3], "nothing there");
    }

    #[test]
    fn the_power_button_is_an_event() {
        let Rig { registers, interrupts, .. } = rig();
        registers.press_power_button();
        registers.press_power_button();
        assert_eq!((dword(&EventPorts(registers), 0), interrupts.load(Ordering::Relaxed)), (4, 2));
    }
}
