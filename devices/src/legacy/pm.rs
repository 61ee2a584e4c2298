//! Decides when the guest wants to be switched off or started again. What then happens is the machine's business.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use pci::state::{Reader, StateError, Writer};
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};

/// What the guest wants of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerEvent {
    /// Switch off (ACPI S5).
    PowerOff,
    /// Start again.
    Reset,
    /// End with the value written to the debug exit port.
    Exit(u8),
}

/// Takes power events. Called by vCPUs, possibly several times: it must not wait.
pub trait PowerSink: Send + Sync {
    /// The guest wants `event`.
    fn power(&self, event: PowerEvent);
}

impl<F: Fn(PowerEvent) + Send + Sync> PowerSink for F {
    fn power(&self, event: PowerEvent) {
        self(event);
    }
}

/// Sleep control and sleep status registers, two ports (ACPI 6.5 4.8.3.7): offset 0 takes `SLP_TYP` in bits 4:2 and
/// `SLP_EN` in bit 5; offset 1 is the status, always 0. Only S5, of type 5, does something.
pub struct SleepControl {
    power: Arc<dyn PowerSink>,
}

impl SleepControl {
    /// `SLP_TYP` of S5, as the DSDT's `_S5` must say.
    pub const S5: u8 = 5;
    /// The value that switches off: `SLP_EN` with type 5.
    pub const POWER_OFF: u8 = Self::ENABLE | Self::S5 << 2;

    const ENABLE: u8 = 1 << 5;

    /// Registers that tell `power`.
    #[must_use]
    pub fn new(power: Arc<dyn PowerSink>) -> Self {
        Self { power }
    }
}

impl DevicePio for SleepControl {
    fn pio_read(&self, _base: PioAddress, _offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(0);
    }

    fn pio_write(&self, _base: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        const FIELDS: u8 = SleepControl::ENABLE | 7 << 2;
        if let (0, Some(value)) = (offset, data.first())
            && value & FIELDS == Self::POWER_OFF
        {
            self.power.power(PowerEvent::PowerOff);
        }
    }
}

/// The reset control register at 0xCF9, one port: bit 2 resets, whatever kind bits 1 and 3 ask for; these read back.
pub struct ResetControl {
    power: Arc<dyn PowerSink>,
    kind: AtomicU8,
}

impl ResetControl {
    /// The value that the FADT's reset register writes.
    pub const RESET: u8 = 0x06;

    const NOW: u8 = 1 << 2;
    const KIND: u8 = 1 << 1 | 1 << 3;

    /// A register that tells `power`.
    #[must_use]
    pub fn new(power: Arc<dyn PowerSink>) -> Self {
        Self { power, kind: AtomicU8::new(0) }
    }

    /// Writes what it reads.
    pub fn save(&self, writer: &mut Writer) {
        writer.u8(self.kind.load(Ordering::Relaxed));
    }

    /// Takes what another one saved.
    pub fn restore(&self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.kind.store(reader.u8()? & Self::KIND, Ordering::Relaxed);
        Ok(())
    }
}

impl DevicePio for ResetControl {
    fn pio_read(&self, _base: PioAddress, _offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(self.kind.load(Ordering::Relaxed));
    }

    fn pio_write(&self, _base: PioAddress, _offset: PioAddressOffset, data: &[u8]) {
        let Some(value) = data.first() else { return };
        if value & Self::NOW != 0 {
            self.kind.store(0, Ordering::Relaxed);
            self.power.power(PowerEvent::Reset);
        } else {
            self.kind.store(value & Self::KIND, Ordering::Relaxed);
        }
    }
}

/// As much of a keyboard controller as resets need, five ports from 0x60: command 0xFE at offset 4 (0x64) pulses the
/// reset line. Both registers read 0: nothing to read, ready for a command.
pub struct KeyboardController {
    power: Arc<dyn PowerSink>,
}

impl KeyboardController {
    /// Offset of the status and command register from the data register.
    pub const COMMAND: u16 = 4;
    /// The command that resets.
    pub const RESET: u8 = 0xFE;

    /// A controller that tells `power`.
    #[must_use]
    pub fn new(power: Arc<dyn PowerSink>) -> Self {
        Self { power }
    }
}

impl DevicePio for KeyboardController {
    fn pio_read(&self, _base: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(if matches!(offset, 0 | Self::COMMAND) { 0 } else { 0xFF });
    }

    fn pio_write(&self, _base: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        if offset == Self::COMMAND && data.first() == Some(&Self::RESET) {
            self.power.power(PowerEvent::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    const BASE: PioAddress = PioAddress(0);

    /// What `device` asks for when each of `writes` (offset, value) is made in turn.
    fn asked(device: impl FnOnce(Arc<dyn PowerSink>) -> Box<dyn DevicePio>, writes: &[(u16, u8)]) -> Vec<PowerEvent> {
        let events = Arc::new(Mutex::new(Vec::new()));
        let sink = events.clone();
        let device = device(Arc::new(move |event| sink.lock().unwrap().push(event)));
        for (offset, value) in writes {
            device.pio_write(BASE, *offset, &[*value]);
        }
        events.lock().unwrap().clone()
    }

    #[test]
    fn only_s5_with_the_enable_bit_switches_off() {
        let make = |power| -> Box<dyn DevicePio> { Box::new(SleepControl::new(power)) };
        assert_eq!(asked(make, &[(0, 0x14), (0, 0x30), (0, 0x24), (1, 0x34), (1, 0x80)]), []);
        assert_eq!(asked(make, &[(0, 0x34)]), [PowerEvent::PowerOff]);
    }

    #[test]
    fn the_reset_register_resets_by_bit_2() {
        let make = |power| -> Box<dyn DevicePio> { Box::new(ResetControl::new(power)) };
        assert_eq!(asked(make, &[(0, 0x00), (0, 0x02), (0, 0x0A), (0, 0xFB)]), []);
        assert_eq!(asked(make, &[(0, 0x02), (0, 0x06)]), [PowerEvent::Reset]);
        assert_eq!(asked(make, &[(0, 0x0E)]), [PowerEvent::Reset]);
    }

    #[test]
    fn the_kind_of_reset_reads_back() {
        let register = ResetControl::new(Arc::new(|_| {}));
        register.pio_write(BASE, 0, &[0x0A]);
        let mut byte = [0];
        register.pio_read(BASE, 0, &mut byte);
        assert_eq!(byte, [0x0A]);
    }

    #[test]
    fn the_keyboard_controller_resets_by_command_fe() {
        let make = |power| -> Box<dyn DevicePio> { Box::new(KeyboardController::new(power)) };
        assert_eq!(asked(make, &[(0, 0xFE), (4, 0xAA), (4, 0xD1)]), []);
        assert_eq!(asked(make, &[(4, 0xFE)]), [PowerEvent::Reset]);
    }
}
