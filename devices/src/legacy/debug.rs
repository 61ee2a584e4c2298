//! Ports for test guests: a console without a protocol, and a way to end with a status.

use std::sync::Arc;

use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};

use super::console::ConsoleSink;
use super::pm::{PowerEvent, PowerSink};

/// The debug console, one port, usually 0xE9. Bytes written are output; it reads 0xE9, by which guests find it.
pub struct DebugConsole {
    sink: Arc<dyn ConsoleSink>,
}

impl DebugConsole {
    /// What a read gives.
    pub const PRESENT: u8 = 0xE9;

    /// A console that writes to `sink`.
    #[must_use]
    pub fn new(sink: Arc<dyn ConsoleSink>) -> Self {
        Self { sink }
    }
}

impl DevicePio for DebugConsole {
    fn pio_read(&self, _base: PioAddress, _offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(Self::PRESENT);
    }

    fn pio_write(&self, _base: PioAddress, _offset: PioAddressOffset, data: &[u8]) {
        self.sink.push(data);
    }
}

/// The debug exit port, usually 0xF4. A write of v ends the machine; by the convention of QEMU's `isa-debug-exit` the
/// process then ends with status `v << 1 | 1`. Reads give 0.
pub struct DebugExit {
    power: Arc<dyn PowerSink>,
}

impl DebugExit {
    /// A port that tells `power`.
    #[must_use]
    pub fn new(power: Arc<dyn PowerSink>) -> Self {
        Self { power }
    }
}

impl DevicePio for DebugExit {
    fn pio_read(&self, _base: PioAddress, _offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(0);
    }

    fn pio_write(&self, _base: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        if let (0, Some(value)) = (offset, data.first()) {
            self.power.power(PowerEvent::Exit(*value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Kept {
        output: Mutex<Vec<u8>>,
        events: Mutex<Vec<PowerEvent>>,
    }

    impl ConsoleSink for Kept {
        fn push(&self, bytes: &[u8]) {
            self.output.lock().unwrap().extend(bytes);
        }
    }

    impl PowerSink for Kept {
        fn power(&self, event: PowerEvent) {
            self.events.lock().unwrap().push(event);
        }
    }

    #[test]
    fn the_debug_console_is_found_and_written() {
        let kept = Arc::new(Kept::default());
        let console = DebugConsole::new(kept.clone());
        let mut byte = [0];
        console.pio_read(PioAddress(0xE9), 0, &mut byte);
        console.pio_write(PioAddress(0xE9), 0, b"key=value\n");
        assert_eq!((byte, kept.output.lock().unwrap().as_slice()), ([0xE9], b"key=value\n".as_slice()));
    }

    #[test]
    fn the_exit_port_passes_its_value() {
        let kept = Arc::new(Kept::default());
        let exit = DebugExit::new(kept.clone());
        exit.pio_write(PioAddress(0xF4), 0, &[]);
        exit.pio_write(PioAddress(0xF4), 1, &[9]);
        exit.pio_write(PioAddress(0xF4), 0, &[3, 0, 0, 0]);
        assert_eq!(*kept.events.lock().unwrap(), [PowerEvent::Exit(3)]);
    }
}
