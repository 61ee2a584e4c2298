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
        bus.add(ports::DEBUG_EXIT, 1, "debug exit", DebugExit::new(power))?;
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
