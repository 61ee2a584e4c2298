//! The 16550 serial line at 0x3F8: registers by vm-superio, output to a [`ConsoleSink`], input with room for bursts.
//!
//! Input is never lost: what the FIFO has no room for waits here, and the owner stops reading while [`InputLine::room`] is 0.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex};

use pci::state::{Reader, StateError, Writer};
use pci::sync::lock;
use vm_device::DevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, SerialState};

use super::Notify;
use super::console::{ConsoleSink, InputLine};

/// Most input bytes that wait for the guest.
pub const INPUT_LIMIT: usize = 4096;
/// I/O ports that the device takes.
pub const PORTS: u16 = 8;

const DATA: u8 = 0;
const MODEM_CONTROL: u8 = 4;
const LOOP: u8 = 1 << 4;
const FIFO: usize = 64;

/// A serial line.
pub struct Serial {
    line: Mutex<Line>,
}

impl Serial {
    /// A line that writes to `sink`, calls `interrupt` for each edge of its interrupt line, and calls `resume` when input
    /// has room again after [`InputLine::room`] had fallen to 0.
    #[must_use]
    pub fn new(sink: Arc<dyn ConsoleSink>, interrupt: Notify, resume: Notify) -> Self {
        let interrupt: Arc<dyn Fn() + Send + Sync> = Arc::from(interrupt);
        let uart = vm_superio::Serial::new(Edge(interrupt.clone()), Out(sink.clone()));
        Self { line: Mutex::new(Line { uart, sink, interrupt, waiting: VecDeque::new(), full: false, resume }) }
    }

    /// Writes its registers and the input that waits.
    pub fn save(&self, writer: &mut Writer) {
        let mut line = lock(&self.line);
        let state = line.uart.state();
        registers(&state).into_iter().for_each(|register| writer.u8(register));
        writer.bytes(&state.in_buffer);
        writer.bytes(line.waiting.make_contiguous());
    }

    /// Raises the interrupt of a restored line once more if the driver asked for any: input may have come between the moments
    /// at which interrupt controllers and the line were saved, and the edge is in neither. To a driver it is one without a cause
    /// otherwise. The interrupt controllers are restored.
    pub fn remind(&self) {
        let line = lock(&self.line);
        if line.uart.state().interrupt_enable != 0 {
            (line.interrupt)();
        }
    }

    /// Takes what another line saved.
    pub fn restore(&self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        let state = SerialState {
            baud_divisor_low: reader.u8()?,
            baud_divisor_high: reader.u8()?,
            interrupt_enable: reader.u8()?,
            interrupt_identification: reader.u8()?,
            line_control: reader.u8()?,
            line_status: reader.u8()?,
            modem_control: reader.u8()?,
            modem_status: reader.u8()?,
            scratch: reader.u8()?,
            in_buffer: reader.bytes()?.to_vec(),
        };
        let waiting = reader.bytes()?;
        if waiting.len() > INPUT_LIMIT {
            return Err(reader.wrong("a number of bytes that can wait", waiting.len() as u64));
        }
        let mut line = lock(&self.line);
        let (edge, out) = (Edge(line.interrupt.clone()), Out(line.sink.clone()));
        let received = state.in_buffer.len() as u64;
        line.uart = vm_superio::Serial::from_state(&state, edge, NoEvents, out)
            .map_err(|_| reader.wrong("a number of bytes that the FIFO holds", received))?;
        line.waiting = waiting.to_vec().into();
        Ok(())
    }
}

impl InputLine for Serial {
    fn room(&self) -> usize {
        lock(&self.line).room()
    }

    fn enqueue(&self, bytes: &[u8]) -> usize {
        let mut line = lock(&self.line);
        let taken = bytes.get(..line.room()).unwrap_or(bytes);
        line.waiting.extend(taken);
        line.feed();
        line.full = line.room() == 0 || taken.len() < bytes.len();
        taken.len()
    }
}

impl DevicePio for Serial {
    fn pio_read(&self, _base: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        let mut line = lock(&self.line);
        for byte in data {
            *byte = u8::try_from(offset).map_or(0xFF, |register| line.read(register));
        }
    }

    fn pio_write(&self, _base: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        let Ok(register) = u8::try_from(offset) else { return };
        let mut line = lock(&self.line);
        for byte in data {
            line.write(register, *byte);
        }
    }
}

fn registers(state: &SerialState) -> [u8; 9] {
    [
        state.baud_divisor_low,
        state.baud_divisor_high,
        state.interrupt_enable,
        state.interrupt_identification,
        state.line_control,
        state.line_status,
        state.modem_control,
        state.modem_status,
        state.scratch,
    ]
}

struct Line {
    uart: vm_superio::Serial<Edge, NoEvents, Out>,
    sink: Arc<dyn ConsoleSink>,
    interrupt: Arc<dyn Fn() + Send + Sync>,
    waiting: VecDeque<u8>,
    /// The owner was told that there is no room.
    full: bool,
    resume: Notify,
}

impl Line {
    fn room(&self) -> usize {
        INPUT_LIMIT.saturating_sub(self.waiting.len())
    }

    fn read(&mut self, register: u8) -> u8 {
        let value = self.uart.read(register);
        // Not after every byte: each refill may raise an interrupt.
        if register == DATA && self.uart.fifo_capacity() == FIFO {
            self.feed();
        }
        value
    }

    fn write(&mut self, register: u8, value: u8) {
        // Neither side can fail: the trigger returns nothing and the sink takes everything.
        let _ = self.uart.write(register, value);
        if register == MODEM_CONTROL {
            self.feed();
        }
    }

    /// Moves waiting input into the FIFO. In loopback mode the receiver is cut off from the line, so it stays here.
    fn feed(&mut self) {
        if self.uart.read(MODEM_CONTROL) & LOOP == 0 {
            let moved = self.uart.enqueue_raw_bytes(self.waiting.make_contiguous()).unwrap_or(0);
            self.waiting.drain(..moved.min(self.waiting.len()));
        }
        if self.full && self.waiting.is_empty() {
            self.full = false;
            (self.resume)();
        }
    }
}

struct Edge(Arc<dyn Fn() + Send + Sync>);

impl Trigger for Edge {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        (self.0)();
        Ok(())
    }
}

struct Out(Arc<dyn ConsoleSink>);

impl io::Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::legacy::testing::Kept;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    struct Bench {
        serial: Serial,
        output: Arc<Kept>,
        interrupts: Arc<AtomicUsize>,
        resumed: Arc<AtomicUsize>,
    }

    const BASE: PioAddress = PioAddress(0x3F8);

    impl Bench {
        fn new() -> Self {
            let (output, interrupts, resumed) = <(Arc<Kept>, Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
            let counter = |n: &Arc<AtomicUsize>| -> Notify {
                let n = n.clone();
                Box::new(move || {
                    n.fetch_add(1, Relaxed);
                })
            };
            let serial = Serial::new(output.clone(), counter(&interrupts), counter(&resumed));
            Self { serial, output, interrupts, resumed }
        }

        fn read(&self, register: u16) -> u8 {
            let mut byte = [0];
            self.serial.pio_read(BASE, register, &mut byte);
            byte[0]
        }

        fn write(&self, register: u16, value: u8) {
            self.serial.pio_write(BASE, register, &[value]);
        }

        /// Reads as a driver does, while the line status says that data is ready.
        fn take(&self) -> Vec<u8> {
            let mut got = Vec::new();
            while self.read(5) & 1 != 0 {
                got.push(self.read(0));
            }
            got
        }
    }

    #[test]
    fn output_reaches_the_sink_also_by_string_instructions() {
        let bench = Bench::new();
        bench.write(0, b'a');
        bench.serial.pio_write(BASE, 0, b"bcd");
        assert_eq!(*bench.output.0.lock().unwrap(), b"abcd");
        assert_eq!(bench.read(5) & 0x20, 0x20, "the transmitter is always empty");
    }

    #[test]
    fn a_burst_of_input_is_never_lost() {
        let bench = Bench::new();
        let sent: Vec<u8> = (0..INPUT_LIMIT + 3000).map(|n| (n % 251).try_into().unwrap()).collect();
        let taken = bench.serial.enqueue(&sent);
        assert!(taken < sent.len());
        assert_eq!(bench.resumed.load(Relaxed), 0);
        let mut got = bench.take();
        assert_eq!(bench.resumed.load(Relaxed), 1);
        assert_eq!(bench.serial.enqueue(&sent[taken..]), sent.len() - taken);
        got.extend(bench.take());
        assert!(got == sent);
    }

    #[test]
    fn input_interrupts_a_driver_that_asked_for_it() {
        let bench = Bench::new();
        bench.serial.enqueue(b"x");
        assert_eq!(bench.interrupts.load(Relaxed), 0);
        bench.write(1, 1);
        assert_eq!(bench.interrupts.load(Relaxed), 1);
        assert_eq!(bench.read(2) & 0xF, 4);
        assert_eq!(bench.take(), b"x");
    }

    #[test]
    fn a_restored_line_interrupts_once_more_if_its_driver_asked_for_that() {
        for (enable, interrupts) in [(0, 0), (1, 1)] {
            let before = Bench::new();
            before.write(1, enable);
            before.serial.enqueue(b"x");
            let mut writer = Writer::new();
            before.serial.save(&mut writer);
            let bytes = writer.into_bytes();
            let after = Bench::new();
            after.serial.restore(&mut Reader::new(&bytes, "serial")).unwrap();
            // What delivers it is restored later.
            let lost = after.interrupts.load(Relaxed);
            after.serial.remind();
            assert_eq!(after.interrupts.load(Relaxed) - lost, interrupts);
            assert_eq!(after.take(), b"x");
        }
    }

    #[test]
    fn input_waits_while_the_driver_tests_loopback() {
        let bench = Bench::new();
        bench.write(4, LOOP);
        bench.serial.enqueue(b"typed early");
        assert_eq!(bench.take(), b"");
        bench.write(0, b'z');
        assert_eq!(bench.take(), b"z");
        bench.write(4, 0);
        assert_eq!(bench.take(), b"typed early");
    }

    proptest! {
        #[test]
        fn no_access_panics(accesses in proptest::collection::vec((any::<bool>(), any::<u16>(), any::<[u8; 8]>(), 0..=8usize), 0..200)) {
            let bench = Bench::new();
            for (write, offset, mut data, len) in accesses {
                if write {
                    bench.serial.pio_write(BASE, offset % 300, &data[..len]);
                } else {
                    bench.serial.pio_read(BASE, offset % 300, &mut data[..len]);
                }
                bench.serial.enqueue(&data);
            }
        }
    }
}
