//! What answers at the machine's fixed I/O ports.

use std::sync::Arc;

use api::config::VmConfig;
use arch::ports;
use devices::legacy::{DebugConsole, DebugExit, KeyboardController, PowerEvent, PowerSink, ResetControl, Serial, SleepControl};
use thiserror::Error;
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioRange};
use vm_device::device_manager::{IoManager, PioManager};

use crate::driver::{End, Ending};
use crate::kvm::{EdgeLine, Vm};
use crate::machine::Surroundings;
use crate::pci_bus::{ConfigPorts, PciBus};

/// Connects everything; returns the serial line beside, for input.
pub fn wire(
    vm: &Vm,
    config: &VmConfig,
    surroundings: &Surroundings,
    ending: &Arc<Ending>,
    pci: &Arc<PciBus>,
) -> Result<(IoManager, Arc<Serial>), PortsError> {
    let mut bus = Bus(IoManager::new());
    let power: Arc<dyn PowerSink> = {
        let ending = Arc::clone(ending);
        Arc::new(move |event: PowerEvent| ending.say(End::Power(event)))
    };
    bus.add(ports::SLEEP_CONTROL, 2, "sleep control", SleepControl::new(Arc::clone(&power)))?;
    bus.add(ports::I8042_COMMAND - 4, 5, "keyboard controller", KeyboardController::new(Arc::clone(&power)))?;
    let reset = ResetControl::new(Arc::clone(&power));
    if pci.answers_ports() {
        bus.add(ports::CONFIG_ADDRESS, 8, "PCI configuration", ConfigPorts { pci: Arc::clone(pci), reset })?;
    } else {
        bus.add(ports::RESET, 1, "reset register", reset)?;
    }
    if config.debug_exit {
        // Guests made for QEMU write 1, 2 or 4 bytes.
        bus.add(ports::DEBUG_EXIT, 4, "debug exit", DebugExit::new(power))?;
    }
    if let Some(sink) = &surroundings.debug_console {
        bus.add(ports::DEBUG_CONSOLE, 1, "debug console", DebugConsole::new(Arc::clone(sink)))?;
    }
    let line = EdgeLine::new(vm.fd(), ports::SERIAL_GSI);
    let interrupt = move || {
        if let Err(error) = line.pulse() {
            log::error!("cannot raise the serial line's interrupt: {error}");
        }
    };
    let resume = Arc::clone(&surroundings.resume);
    let resume = move || {
        // A full counter is readable already.
        let _ = resume.write(1);
    };
    let serial = Arc::new(Serial::new(Arc::clone(&surroundings.serial), Box::new(interrupt), Box::new(resume)));
    bus.add_shared(ports::SERIAL, ports::SERIAL_LEN, "serial line", serial.clone())?;
    Ok((bus.0, serial))
}

/// Reads a port for a vCPU: 1, 2 or 4 bytes, or as many as a string instruction takes at once. All ones where nobody answers.
pub fn read(ports: &IoManager, port: u16, data: &mut [u8]) {
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
pub fn write(ports: &IoManager, port: u16, data: &[u8]) {
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

    use super::*;

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

    #[test]
    fn the_debug_exit_port_takes_accesses_of_every_size() {
        for data in [[3].as_slice(), &[3, 0], &[3, 0, 0, 0]] {
            let (bus, events) = bus();
            write(&bus.0, ports::DEBUG_EXIT, data);
            assert_eq!(*events.lock().unwrap(), [PowerEvent::Exit(3)], "{data:?}");
        }
    }

    #[test]
    fn a_string_instruction_reads_and_writes_one_register() {
        let (bus, events) = bus();
        write(&bus.0, ONE_BYTE, &[0x02, 0x0A]);
        assert!(events.lock().unwrap().is_empty());
        let mut data = [0; 1024];
        read(&bus.0, ONE_BYTE, &mut data);
        assert_eq!(data, [0x0A; 1024]);
    }

    #[test]
    fn ports_that_nobody_has_read_all_ones() {
        let mut data = [0; 4];
        read(&bus().0.0, 0x70, &mut data);
        assert_eq!(data, [0xFF; 4]);
    }
}
