//! What answers at the machine's fixed I/O ports.

use std::sync::Arc;

use api::config::{HotPlugMethod, VmConfig};
use arch::ports;
use devices::acpi::{self, CpuPorts, EventPorts, HotPlugRegisters, MemoryPorts};
use devices::legacy::{
    DebugConsole, DebugExit, KeyboardController, Panic, PanicPort, PanicSink, PowerEvent, PowerSink, ResetControl, Serial,
    SleepControl,
};
use pci::bar::PORTS;
use pci::topology::FIRST_PORT;
use thiserror::Error;
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioRange};
use vm_device::device_manager::{IoManager, PioManager};

use crate::address_space::AddressSpace;
use crate::bus_slots::BusSlots;
use crate::kvm::EdgeLine;
use crate::machine::{Assembly, Surroundings};
use crate::main_loop::{End, Ending};
use crate::pci_bus::{ConfigPorts, PciBus};

// The tables and the registers mean the same.
const _: () = {
    assert!(ports::NOTHING_NEXT == acpi::NOTHING_NEXT && ports::CPU_EJECT == acpi::EJECT);
    assert!(ports::event::CPU == acpi::CPU_EVENT && ports::event::MEMORY == acpi::MEMORY_EVENT);
    assert!(ports::event::POWER_BUTTON == acpi::POWER_BUTTON_EVENT && ports::MEMORY_DEVICE_LEN == acpi::MEMORY_DEVICE_LEN);
    assert!(ports::SLEEP_TYPE_S5 == SleepControl::S5 && ports::RESET_VALUE == ResetControl::RESET);
};

/// What is not a PCI function and has a state.
pub struct Legacy {
    /// The serial line.
    pub serial: Arc<Serial>,
    /// The reset register.
    pub reset: Arc<ResetControl>,
    /// Where the guest's kernel says that it panicked.
    pub panic: Option<Arc<PanicPort>>,
    /// Processors and memory that come and go.
    pub hot_plug: Arc<HotPlugRegisters>,
    /// Devices that come and go by ACPI.
    pub bus_slots: Option<Arc<BusSlots>>,
}

/// Puts all that answers at fixed ports in its place.
pub fn wire(
    assembly: &Assembly<'_>,
    pci: &Arc<PciBus>,
    hot_plug: Arc<HotPlugRegisters>,
    bus_slots: Option<Arc<BusSlots>>,
) -> Result<(IoManager, Legacy), PortsError> {
    let config = assembly.design.config;
    let mut bus = Bus(IoManager::new());
    let reset = power(&mut bus, assembly, pci)?;
    acpi_registers(&mut bus, config, &hot_plug)?;
    if let Some(slots) = &bus_slots {
        bus.add_shared(ports::BUS_SLOTS, slots.ports(), "slots of buses", Arc::clone(slots) as _)?;
    }
    let panic = config.panic_port.then(|| Arc::new(PanicPort::new(panic_sink(assembly.surroundings, &assembly.ending))));
    if let Some(panic) = &panic {
        bus.add_shared(ports::PANIC, 1, "panic port", Arc::clone(panic) as _)?;
    }
    if let Some(sink) = &assembly.surroundings.debug_console {
        bus.add(ports::DEBUG_CONSOLE, 1, "debug console", DebugConsole::new(Arc::clone(sink)))?;
    }
    let serial = serial(assembly);
    bus.add_shared(ports::SERIAL, ports::SERIAL_LEN, "serial line", Arc::clone(&serial) as _)?;
    Ok((bus.0, Legacy { serial, reset, panic, hot_plug, bus_slots }))
}

/// All by which a guest ends, and configuration access, among whose ports one of them lies.
fn power(bus: &mut Bus, assembly: &Assembly<'_>, pci: &Arc<PciBus>) -> Result<Arc<ResetControl>, PortsError> {
    let power: Arc<dyn PowerSink> = {
        let ending = Arc::clone(&assembly.ending);
        Arc::new(move |event: PowerEvent| ending.say(End::Power(event)))
    };
    bus.add(ports::SLEEP_CONTROL, 2, "sleep control", SleepControl::new(Arc::clone(&power)))?;
    let keyboard = ports::I8042_COMMAND - KeyboardController::COMMAND;
    bus.add(keyboard, 5, "keyboard controller", KeyboardController::new(Arc::clone(&power)))?;
    let reset = Arc::new(ResetControl::new(Arc::clone(&power)));
    if pci.answers_ports() {
        bus.add(ports::CONFIG_ADDRESS, 8, "PCI configuration", ConfigPorts { pci: Arc::clone(pci), reset: Arc::clone(&reset) })?;
    } else {
        bus.add_shared(ports::RESET, 1, "reset register", Arc::clone(&reset) as _)?;
    }
    if assembly.design.config.debug_exit {
        // Guests made for QEMU write 1, 2 or 4 bytes.
        bus.add(ports::DEBUG_EXIT, 4, "debug exit", DebugExit::new(power))?;
    }
    Ok(reset)
}

/// What the methods of DSDT read and write for processors, memory and the power button.
fn acpi_registers(bus: &mut Bus, config: &VmConfig, hot_plug: &Arc<HotPlugRegisters>) -> Result<(), PortsError> {
    let registers = || Arc::clone(hot_plug);
    bus.add(ports::HOT_PLUG_EVENTS, ports::HOT_PLUG_EVENTS_LEN, "event registers", EventPorts(registers()))?;
    if config.cpus.max.is_some() {
        bus.add(ports::CPU_STATE, ports::CPU_STATES, "processor states", CpuPorts(registers()))?;
    }
    if config.memory.growth.bytes() > 0 && config.memory.method == HotPlugMethod::Acpi {
        let len = ports::MEMORY_DEVICES * ports::MEMORY_DEVICE_LEN;
        bus.add(ports::MEMORY_DEVICE, len, "memory devices", MemoryPorts(registers()))?;
    }
    Ok(())
}

fn serial(assembly: &Assembly<'_>) -> Arc<Serial> {
    let interrupt = EdgeLine::new(assembly.vm.fd(), ports::SERIAL_GSI).sink("the serial line");
    let resume = Arc::clone(&assembly.surroundings.resume);
    let output = Arc::clone(&assembly.surroundings.serial);
    Arc::new(Serial::new(output, interrupt, Box::new(move || resume())))
}

/// Who hears that the guest's kernel panicked. A kernel that saves what is left after it is a guest that goes on.
fn panic_sink(surroundings: &Surroundings, ending: &Arc<Ending>) -> PanicSink {
    let (told, ending, ends) = (Arc::clone(&surroundings.panicked), Arc::clone(ending), surroundings.ends_at_panic);
    Arc::new(move |panic| {
        told(panic);
        if ends && panic == Panic::Panicked {
            ending.say(End::Panic);
        }
    })
}

/// Reads a port for a vCPU: 1, 2 or 4 bytes, or as many as a string instruction takes at once. All ones where nobody answers.
/// Ports of BARs are in `space`.
pub fn read(ports: &IoManager, space: &AddressSpace, port: u16, data: &mut [u8]) {
    if let Some(at) = of_bar(port) {
        // What a string instruction takes comes from one register, byte by byte.
        let width = if matches!(data.len(), 2 | 4) { data.len() } else { 1 };
        data.chunks_mut(width).for_each(|element| space.read(at, element));
        return;
    }
    if ports.pio_read(PioAddress(port), data).is_ok() {
        return;
    }
    for byte in data {
        // More than the device has ports: a string instruction, whose bytes all come from one register.
        if is_wide(port) || ports.pio_read(PioAddress(port), std::slice::from_mut(byte)).is_err() {
            *byte = 0xFF;
        }
    }
}

/// Writes a port for a vCPU, as [`read`]. Dropped where nobody answers.
pub fn write(ports: &IoManager, space: &AddressSpace, port: u16, data: &[u8]) {
    if let Some(at) = of_bar(port) {
        let width = if matches!(data.len(), 2 | 4) { data.len() } else { 1 };
        data.chunks(width).for_each(|element| space.write(at, element));
        return;
    }
    if ports.pio_write(PioAddress(port), data).is_err() && !is_wide(port) {
        for byte in data {
            let _ = ports.pio_write(PioAddress(port), std::slice::from_ref(byte));
        }
    }
}

/// Whether a device has registers of several bytes there, so that what goes past its last port is no string instruction.
fn is_wide(port: u16) -> bool {
    (ports::CONFIG_ADDRESS..ports::CONFIG_DATA + 4).contains(&port)
}

/// Where a port lies in the address space, if BARs can have it.
fn of_bar(port: u16) -> Option<u64> {
    (port >= FIRST_PORT).then_some(PORTS | u64::from(port))
}

struct Bus(IoManager);

impl Bus {
    fn add(
        &mut self,
        port: u16,
        len: u16,
        what: &'static str,
        device: impl DevicePio + Send + Sync + 'static,
    ) -> Result<(), PortsError> {
        self.add_shared(port, len, what, Arc::new(device))
    }

    fn add_shared(
        &mut self,
        port: u16,
        len: u16,
        what: &'static str,
        device: Arc<dyn DevicePio + Send + Sync>,
    ) -> Result<(), PortsError> {
        let taken = |source| PortsError { what, port, source };
        let range = PioRange::new(PioAddress(port), len).map_err(taken)?;
        self.0.register_pio(range, device).map_err(taken)
    }
}

/// Two devices at one port.
#[derive(Debug, Error)]
#[error("cannot put the {what} at port {port:#x}")]
pub struct PortsError {
    what: &'static str,
    port: u16,
    #[source]
    source: vm_device::bus::Error,
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use devices::stub::{StubFunction, StubSpec};
    use pci::bar::{BarKind, BarSpec};
    use pci::function::Shared;
    use pci::testing::{FakeDma, FakeMsi};

    use super::*;
    use crate::address_space::Trapped;

    const ONE_BYTE: u16 = 0x92;

    fn bus() -> (Bus, Arc<Mutex<Vec<PowerEvent>>>) {
        let events = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&events);
        let power: Arc<dyn PowerSink> = Arc::new(move |event| sink.lock().unwrap().push(event));
        let mut bus = Bus(IoManager::new());
        bus.add(ONE_BYTE, 1, "reset register", ResetControl::new(Arc::clone(&power))).unwrap();
        bus.add(ports::DEBUG_EXIT, 4, "debug exit", DebugExit::new(power)).unwrap();
        (bus, events)
    }

    fn stub(bars: [Option<BarSpec>; 6]) -> StubSpec {
        StubSpec {
            ids: pci::ids::Ids::default(),
            bars,
            rom: None,
            sriov: None,
            ari: false,
            on: pci::emulated::Attachment::RootBus,
            follows: false,
            interrupt: devices::stub::StubInterrupt::None,
            clique: None,
            clique_any_vendor: false,
            flr: true,
            dma: false,
        }
    }

    fn nothing() -> Arc<AddressSpace> {
        AddressSpace::new(devices::virtio::Memory::new(vm_memory::GuestMemoryMmap::default()))
    }

    #[test]
    fn ports_of_bars_are_answered_by_their_function() {
        let io = BarSpec { kind: BarKind::Io, prefetchable: false, size: 32 };
        let spec = stub([Some(io), None, None, None, None, None]);
        let dma = Arc::new(FakeDma::new(0, 0));
        let function: Shared =
            Arc::new(Mutex::new(StubFunction::new("a", &spec, Arc::new(FakeMsi::default()), None, dma).unwrap()));
        let (bus, space) = (bus().0, nothing());
        space.open(PORTS | 0xC020, 32, Trapped { function, bar: 0, offset: 0, accesses: Arc::default() });
        write(&bus.0, &space, 0xC024, &[1, 2, 3, 4]);
        let seen = |port, len| {
            let mut data = vec![0; len];
            read(&bus.0, &space, port, &mut data);
            data
        };
        assert_eq!((seen(0xC024, 4), seen(0xC026, 2), seen(0xC025, 1)), (vec![1, 2, 3, 4], vec![3, 4], vec![2]));
        assert_eq!(seen(0xC025, 3), [2, 2, 2], "a string instruction");
        assert_eq!((seen(0xC040, 1), seen(0xC03E, 4), seen(0xC01F, 2)), (vec![0xFF], vec![0xFF; 4], vec![0xFF; 2]));
    }

    #[test]
    fn the_debug_exit_port_takes_accesses_of_every_size() {
        for data in [[3].as_slice(), &[3, 0], &[3, 0, 0, 0]] {
            let (bus, events) = bus();
            write(&bus.0, &nothing(), ports::DEBUG_EXIT, data);
            assert_eq!(*events.lock().unwrap(), [PowerEvent::Exit(3)], "{data:?}");
        }
    }

    #[test]
    fn a_string_instruction_reads_and_writes_one_register() {
        let (bus, events) = bus();
        write(&bus.0, &nothing(), ONE_BYTE, &[0x02, 0x0A]);
        assert!(events.lock().unwrap().is_empty());
        let mut data = [0; 1024];
        read(&bus.0, &nothing(), ONE_BYTE, &mut data);
        assert_eq!(data, [0x0A; 1024]);
    }

    #[test]
    fn ports_that_nobody_has_read_all_ones() {
        let mut data = [0; 4];
        read(&bus().0.0, &nothing(), 0x70, &mut data);
        assert_eq!(data, [0xFF; 4]);
    }
}
