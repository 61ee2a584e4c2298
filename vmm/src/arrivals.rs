//! Meets the servers of devices that clients add, each on a thread of its own: a process that says nothing holds up its own
//! device and nothing else. What was met is put into the machine by the main loop, in the order in which they answered.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use api::command::{Added, Reply};
use api::error::{ApiError, ErrorKind};
use devices::eventfd;
use pci::topology::Name;
use vmm_sys_util::eventfd::EventFd;

use crate::backends::{Backend, BackendError};
use crate::spec::Virtio;

/// Most servers that are met at one time.
const MOST: usize = 16;

/// A device whose server was met, or turned out not to be one.
pub struct Arrival {
    number: u64,
    /// The device.
    pub device: Virtio,
    /// What its server is for it.
    pub side: Result<Backend, BackendError>,
    /// Who asked for it.
    pub reply: Reply<Added>,
}

/// Devices that are on their way.
pub struct Arrivals {
    sender: Sender<Arrival>,
    receiver: Receiver<Arrival>,
    event: Arc<EventFd>,
    /// Numbered, since two may be alike.
    on_their_way: Vec<(u64, Name, Virtio)>,
    met: u64,
}

impl Arrivals {
    /// Nobody is on the way.
    pub fn new() -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let event = Arc::new(eventfd::new()?);
        Ok(Self { sender, receiver, event, on_their_way: Vec::new(), met: 0 })
    }

    /// Those whose servers have not answered, under the names that were given for them.
    pub fn on_their_way(&self) -> impl Iterator<Item = (&Name, &Virtio)> {
        self.on_their_way.iter().map(|(_, name, device)| (name, device))
    }

    /// Begins to meet the server of `device`.
    pub fn meet(&mut self, device: Virtio, reply: Reply<Added>) {
        if self.on_their_way.len() >= MOST {
            let why = format!("the servers of {MOST} devices have not answered yet: try again when they have");
            return reply.send(Err(ApiError::new(ErrorKind::Conflict, why)));
        }
        let (sender, event) = (self.sender.clone(), Arc::clone(&self.event));
        let number = self.met;
        self.met = self.met.wrapping_add(1);
        // The thread takes the reply when there is a thread.
        let (hand_over, handed_over) = mpsc::channel();
        let meet = move || {
            let Ok((device, reply)) = handed_over.recv() else { return };
            let side = Backend::open(&device);
            // Fails when the machine has ended: the reply says so when it is dropped.
            if sender.send(Arrival { number, device, side, reply }).is_ok() {
                let _ = event.write(1);
            }
        };
        match thread::Builder::new().name("vu-meet".into()).spawn(meet) {
            Ok(_) => {
                let name = Name::from(device.id().unwrap_or("a device on its way"));
                self.on_their_way.push((number, name, device.clone()));
                // Fails never: the thread waits for it.
                let _ = hand_over.send((device, reply));
            }
            Err(error) => {
                let why = format!("cannot start a thread to meet the device's server: {error}");
                reply.send(Err(ApiError::new(ErrorKind::Internal, why)));
            }
        }
    }

    /// The next one that is there.
    pub fn arrived(&mut self) -> Option<Arrival> {
        // Fails when nobody came; who comes after this is told of again.
        let _ = self.event.read();
        let arrival = self.receiver.try_recv().ok()?;
        self.on_their_way.retain(|(number, ..)| *number != arrival.number);
        Some(arrival)
    }
}

impl AsRawFd for Arrivals {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
