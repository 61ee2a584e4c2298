//! A port at which a guest's kernel says that it cannot go on (qemu: docs/specs/pvpanic.rst; linux: drivers/misc/pvpanic).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use pci::state::{Reader, StateError, Writer};
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};

/// The kernel panicked.
const PANICKED: u8 = 1 << 0;
/// It panicked and another kernel goes on, to save what is left.
const CRASH_KERNEL: u8 = 1 << 1;

/// What a guest can say there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Panic {
    /// It cannot go on.
    Panicked,
    /// It cannot go on, and another kernel saves what is left.
    CrashKernel,
}

/// Who hears of it, on the vCPU's thread. It must not wait.
pub type PanicSink = Arc<dyn Fn(Panic) + Send + Sync>;

/// The port. Each thing is told once, however often a guest says it.
pub struct PanicPort {
    told: AtomicU8,
    sink: PanicSink,
}

impl PanicPort {
    /// Tells `sink`.
    #[must_use]
    pub fn new(sink: PanicSink) -> Self {
        Self { told: AtomicU8::new(0), sink }
    }

    /// Writes what was told.
    pub fn save(&self, writer: &mut Writer) {
        writer.u8(self.told.load(Ordering::Relaxed));
    }

    /// Takes what another one saved.
    pub fn restore(&self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.told.store(reader.u8()?, Ordering::Relaxed);
        Ok(())
    }
}

impl DevicePio for PanicPort {
    fn pio_read(&self, _: PioAddress, _: PioAddressOffset, data: &mut [u8]) {
        data.fill(0);
        if let Some(first) = data.first_mut() {
            *first = PANICKED | CRASH_KERNEL;
        }
    }

    fn pio_write(&self, _: PioAddress, _: PioAddressOffset, data: &[u8]) {
        let Some(said) = data.first() else { return };
        let new = said & !self.told.fetch_or(*said, Ordering::Relaxed);
        for (bit, panic) in [(PANICKED, Panic::Panicked), (CRASH_KERNEL, Panic::CrashKernel)] {
            if new & bit != 0 {
                (self.sink)(panic);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn what_a_guest_says_is_told_once() {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&heard);
        let port = PanicPort::new(Arc::new(move |panic| sink.lock().unwrap().push(panic)));
        let mut data = [0xFF; 2];
        port.pio_read(PioAddress(0x505), 0, &mut data);
        assert_eq!(data, [3, 0]);
        for data in [&[0x80][..], &[1], &[1, 7], &[3], &[]] {
            port.pio_write(PioAddress(0x505), 0, data);
        }
        assert_eq!(*heard.lock().unwrap(), [Panic::Panicked, Panic::CrashKernel]);
    }
}
