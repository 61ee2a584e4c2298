//! The stub's copy engine: carries out copies on a thread of its own, which starts with the first of them.
//!
//! It reaches memory like a vCPU does, over the machine's bus, and holds no lock while it copies: source and destination
//! may be BARs of other stubs or of its own.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};

use log::Level;
use pci::interrupts::Interrupts;
use pci::seams::{DmaError, DmaPort, Workers};
use pci::sync::{lock, wait};

use super::regs::{ControlRegs, Copy};
use crate::complaints::Complaints;

/// Bytes copied at a time. Ranges that overlap are copied in ascending order of addresses.
const PIECE: u32 = 64 << 10;

/// Copies for one function.
pub struct Engine {
    thread_name: String,
    regs: Arc<Mutex<ControlRegs>>,
    port: Arc<dyn DmaPort>,
    interrupts: Arc<Interrupts>,
    queue: Option<Sender<Copy>>,
    busy: Arc<Busy>,
    complaints: Complaints,
}

/// Copies that were started and have not ended. To hold the engine is to wait for them: they are short, and no vCPU starts new
/// ones meanwhile.
#[derive(Debug, Default)]
pub struct Busy {
    count: Mutex<u32>,
    ended: Condvar,
}

impl Busy {
    fn change(&self, change: impl FnOnce(&mut u32)) {
        change(&mut lock(&self.count));
        self.ended.notify_all();
    }
}

impl Workers for Busy {
    fn hold(&self) {
        let mut count = lock(&self.count);
        while *count > 0 {
            count = wait(&self.ended, count);
        }
    }

    fn release(&self) {}
}

impl Engine {
    /// An engine for the function `name` that reports to `regs` and `interrupts`. Starts nothing yet.
    #[must_use]
    pub fn new(name: &str, regs: Arc<Mutex<ControlRegs>>, port: Arc<dyn DmaPort>, interrupts: Arc<Interrupts>) -> Self {
        let (thread_name, busy, complaints) = (format!("dma-{name}"), Arc::default(), Complaints::default());
        Self { thread_name, regs, port, interrupts, queue: None, busy, complaints }
    }

    /// What is under way.
    #[must_use]
    pub fn busy(&self) -> Arc<Busy> {
        self.busy.clone()
    }

    /// Has `copy` carried out. Its end shows in the registers.
    pub fn start(&mut self, copy: Copy) {
        if self.queue.is_none() {
            self.queue = self.spawn();
        }
        self.busy.change(|count| *count += 1);
        if self.queue.as_ref().is_none_or(|queue| queue.send(copy).is_err()) {
            self.busy.change(|count| *count -= 1);
            lock(&self.regs).finish(&copy, false);
        }
    }

    /// Whether its thread has been started.
    #[cfg(test)]
    pub(super) fn running(&self) -> bool {
        self.queue.is_some()
    }

    fn spawn(&mut self) -> Option<Sender<Copy>> {
        let (queue, copies) = channel();
        let (regs, port, interrupts) = (self.regs.clone(), self.port.clone(), self.interrupts.clone());
        let busy = self.busy.clone();
        let work = move || work(&copies, &regs, &*port, &interrupts, &busy);
        match std::thread::Builder::new().name(self.thread_name.clone()).spawn(work) {
            Ok(_) => Some(queue),
            Err(error) => {
                let text = format_args!("cannot start thread {}, so its copies fail", self.thread_name);
                self.complaints.add_error(Level::Warn, text, &error);
                None
            }
        }
    }
}

/// Ends when the function is gone: the queue closes with it.
fn work(copies: &Receiver<Copy>, regs: &Mutex<ControlRegs>, port: &dyn DmaPort, interrupts: &Interrupts, busy: &Busy) {
    for one in copies {
        let ok = copy(&one, port, || lock(regs).runs(&one)).is_ok();
        let mut regs = lock(regs);
        // Under the lock, so that no interrupt comes after a reset.
        if regs.finish(&one, ok)
            && let Ok(vector) = u16::try_from(one.vector)
        {
            interrupts.raise(vector);
        }
        drop(regs);
        busy.change(|count| *count -= 1);
    }
}

/// Copies in pieces while `wanted`.
fn copy(copy: &Copy, port: &dyn DmaPort, wanted: impl Fn() -> bool) -> Result<(), DmaError> {
    let mut buffer = vec![0; usize::try_from(copy.length.min(PIECE)).unwrap_or(0)];
    let mut done = 0;
    while done < copy.length && wanted() {
        let len = PIECE.min(copy.length - done);
        let piece = usize::try_from(len).ok().and_then(|len| buffer.get_mut(..len)).unwrap_or_default();
        let address = |base: u64| {
            let past = DmaError::Unreachable { at: base, len: copy.length.into() };
            base.checked_add(done.into()).filter(|at| at.checked_add(len.into()).is_some()).ok_or(past)
        };
        port.read(address(copy.source)?, piece)?;
        port.write(address(copy.destination)?, piece)?;
        done += len;
    }
    Ok(())
}
