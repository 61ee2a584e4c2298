//! A console (virtio 1.2 5.3) with one port, which Linux calls hvc0: output goes where a serial line's would, input waits until
//! the guest takes it.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use pci::state::{Reader, StateError, Writer};
use pci::sync::lock;
use vm_memory::{Bytes, GuestMemoryMmap};

use super::buffers::{Buffers, scatter, total};
use super::function::{Device, Start};
use super::kind::Kind;
use super::ring::{Chain, Corrupt, Ring, Served};
use super::worker::{Bell, Stop, Worker};
use crate::legacy::{ConsoleSink, InputLine, Notify};

/// Most input bytes that wait for the guest.
pub const INPUT_LIMIT: usize = 4096;
/// Bytes that are copied at a time.
const CHUNK: usize = 4096;
const QUEUE_SIZES: [u16; 2] = [64; 2];
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// `struct virtio_console_config`: size in characters, ports, emergency write. None of it is offered.
const CONFIG: [u8; 12] = [0; 12];

/// What is particular to a console.
pub struct Console {
    thread_name: String,
    output: Arc<dyn ConsoleSink>,
    input: Arc<Input>,
}

/// Input for the guest.
pub struct Input {
    state: Mutex<State>,
    resume: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<u8>,
    /// The owner was told that there is no room.
    full: bool,
    /// Who moves it into the guest, while the guest has a driver.
    worker: Option<Arc<Bell>>,
}

impl Input {
    /// No input yet. `resume` is called when there is room again after [`InputLine::room`] had fallen to 0.
    #[must_use]
    pub fn new(resume: Notify) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), resume })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn serve_by(&self, worker: Option<Arc<Bell>>) {
        self.lock().worker = worker;
    }

    /// Takes out at most `most` bytes.
    fn take(&self, most: usize) -> Vec<u8> {
        let mut state = self.lock();
        let count = most.min(state.waiting.len());
        let taken = state.waiting.drain(..count).collect();
        let resumes = state.waiting.is_empty() && std::mem::take(&mut state.full);
        drop(state);
        if resumes {
            (self.resume)();
        }
        taken
    }
}

impl InputLine for Input {
    fn room(&self) -> usize {
        INPUT_LIMIT.saturating_sub(self.lock().waiting.len())
    }

    fn enqueue(&self, bytes: &[u8]) -> usize {
        let mut state = self.lock();
        let room = INPUT_LIMIT.saturating_sub(state.waiting.len());
        let taken = bytes.get(..room).unwrap_or(bytes);
        state.waiting.extend(taken);
        state.full = room == taken.len() || taken.len() < bytes.len();
        if let Some(worker) = &state.worker {
            worker.ring();
        }
        taken.len()
    }
}

impl Console {
    /// The device `name`, between `output` and `input`.
    #[must_use]
    pub fn new(name: &str, output: Arc<dyn ConsoleSink>, input: Arc<Input>) -> Self {
        Self { thread_name: name.to_owned(), output, input }
    }
}

impl Device for Console {
    fn kind(&self) -> Kind {
        Kind::Console
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&CONFIG)
    }

    fn start(&mut self, mut start: Start) -> io::Result<Vec<Worker>> {
        let mut workers = Vec::new();
        if let Some(ring) = start.ring(TRANSMIT) {
            let output = self.output.clone();
            let name = format!("out-{}", self.thread_name);
            workers.push(Worker::start(name, &start.crew, vec![ring.bell().clone()], move |stop| {
                ring.run(stop, |chain, memory| print(&*output, chain, memory, stop));
            })?);
        }
        if let Some(ring) = start.ring(RECEIVE) {
            let (input, bell) = (self.input.clone(), ring.bell().clone());
            input.serve_by(Some(bell.clone()));
            let name = format!("in-{}", self.thread_name);
            workers.push(Worker::start(name, &start.crew, vec![bell], move |stop| type_in(ring, &input, stop))?);
        }
        Ok(workers)
    }

    fn save(&self, writer: &mut Writer) -> Result<(), StateError> {
        writer.bytes(self.input.lock().waiting.make_contiguous());
        Ok(())
    }

    fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        let waiting = reader.bytes()?;
        if waiting.len() > INPUT_LIMIT {
            return Err(reader.wrong("a number of bytes that can wait", waiting.len() as u64));
        }
        self.input.lock().waiting = waiting.to_vec().into();
        Ok(())
    }

    fn reset(&mut self) {
        self.input.serve_by(None);
    }
}

/// Passes on what the guest prints.
fn print(output: &dyn ConsoleSink, chain: Chain<'_>, memory: &GuestMemoryMmap, stop: &Stop) -> Served {
    let buffers = Buffers::of(chain, memory).filter(|buffers| buffers.whole && buffers.writable.is_empty());
    let Some(Buffers { readable, .. }) = buffers else { return Served::Malformed };
    let mut chunk = [0; CHUNK];
    for slice in &readable {
        for at in (0..slice.len()).step_by(CHUNK) {
            if stop.stopped() {
                return Served::Stopped;
            }
            let part = chunk.get_mut(..CHUNK.min(slice.len() - at)).unwrap_or_default();
            if slice.read_slice(part, at).is_err() {
                return Served::Malformed;
            }
            output.push(part);
        }
    }
    Served::Used(0)
}

/// Moves input into the guest whenever there is some and the guest has a place for it.
fn type_in(mut ring: Ring, input: &Input, stop: &Stop) {
    loop {
        if fill(&mut ring, input, stop).is_err() {
            ring.give_up();
            return;
        }
        if !ring.bell().wait(stop) {
            return;
        }
    }
}

fn fill(ring: &mut Ring, input: &Input, stop: &Stop) -> Result<(), Corrupt> {
    let memory = ring.memory();
    while !stop.ends() && !input.lock().waiting.is_empty() {
        let Some(chain) = ring.pop(&memory)? else {
            // The driver rings for the next buffer, or has offered one meanwhile.
            if ring.listen(&memory)? {
                continue;
            }
            break;
        };
        let head = chain.head_index();
        let buffers = Buffers::of(chain, &memory).filter(|buffers| buffers.whole && buffers.readable.is_empty());
        let Some(Buffers { writable, .. }) = buffers else { return Err(Corrupt) };
        let typed = input.take(total(&writable).unwrap_or(usize::MAX));
        let len = scatter(&typed, &writable).ok_or(Corrupt)?;
        ring.push(&memory, head, len)?;
        ring.tell(&memory)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::legacy::testing::Kept;
    use crate::virtio::testing::{DATA, Driver, WRITE, survives_hostile_rings};

    fn console() -> (Console, Arc<Kept>, Arc<Input>, Arc<AtomicUsize>) {
        let (kept, resumed) = (Arc::new(Kept::default()), Arc::new(AtomicUsize::new(0)));
        let counter = resumed.clone();
        let input = Input::new(Box::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        }));
        (Console::new("hvc0", kept.clone(), input.clone()), kept, input, resumed)
    }

    #[test]
    fn what_the_guest_prints_arrives_in_order() {
        let (console, kept, ..) = console();
        let mut driver = Driver::started(console);
        let line: Vec<u8> = (0..9000).map(|n: u32| n.to_le_bytes()[0]).collect();
        driver.put(DATA, &line);
        driver.send(TRANSMIT, &[(DATA, 5, 0), (DATA + 5, 8995, 0)]);
        assert_eq!(driver.answer(TRANSMIT).len, 0);
        assert!(*kept.0.lock().unwrap() == line);
    }

    #[test]
    fn what_is_typed_waits_for_the_guest_and_arrives_in_order() {
        let (console, _, input, resumed) = console();
        let mut driver = Driver::new(console);
        assert_eq!(input.enqueue(b"before the driver, "), 19);
        driver.set_up(u64::MAX);
        assert_eq!(input.enqueue(b"before a buffer"), 15);
        driver.send(RECEIVE, &[(DATA, 8, WRITE), (DATA + 0x100, 2, WRITE)]);
        assert_eq!(driver.answer(RECEIVE).len, 10);
        driver.send(RECEIVE, &[(DATA + 0x200, 100, WRITE)]);
        assert_eq!(driver.answer(RECEIVE).len, 24);
        let got = [driver.bytes(DATA, 8), driver.bytes(DATA + 0x100, 2), driver.bytes(DATA + 0x200, 24)].concat();
        assert_eq!(got, b"before the driver, before a buffer");
        assert_eq!(resumed.load(Ordering::Relaxed), 0, "it was never full");
    }

    #[test]
    fn input_has_a_bound_and_its_end_is_told() {
        let (console, _, input, resumed) = console();
        let mut driver = Driver::started(console);
        assert_eq!(input.enqueue(&[b'x'; INPUT_LIMIT + 10]), INPUT_LIMIT);
        assert_eq!((input.room(), input.enqueue(b"y")), (0, 0));
        driver.send(RECEIVE, &[(DATA, 4000, WRITE)]);
        driver.answer(RECEIVE);
        assert_eq!((input.room(), resumed.load(Ordering::Relaxed)), (4000, 0));
        driver.send(RECEIVE, &[(DATA, 4000, WRITE)]);
        assert_eq!(driver.answer(RECEIVE).len, 96);
        driver.wait("being told", |_| resumed.load(Ordering::Relaxed) == 1);
    }

    #[test]
    fn a_reset_keeps_what_was_typed() {
        let (console, _, input, _) = console();
        let mut driver = Driver::started(console);
        for _ in 0..10 {
            input.enqueue(b"typed");
            driver.write(0x14, &[0]);
            driver.set_up(u64::MAX);
            driver.send(RECEIVE, &[(DATA, 64, WRITE)]);
            assert_eq!(driver.answer(RECEIVE).len, 5);
        }
    }

    #[test]
    fn hostile_rings_neither_panic_nor_hang() {
        let inputs = Mutex::new(Vec::new());
        survives_hostile_rings(|| {
            let (console, _, input, _) = console();
            input.enqueue(b"something to put into the guest's buffers");
            inputs.lock().unwrap().push(input);
            console
        });
    }
}
