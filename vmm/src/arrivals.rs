//! Meets the servers of devices that clients add, each on a thread of its own: a process that says nothing holds up its own
//! device and nothing else. What was met is put into the machine by the main loop, in the order in which they answered.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use api::command::{Added, Reply};
use api::error::{ApiError, ErrorKind};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::backends::{Backend, BackendError};
use crate::spec::Virtio;

/// Most servers that are met at one time.
const MOST: usize = 16;

/// A device whose server was met, or turned out not to be one.
pub struct Arrival {
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
    on_their_way: usize,
}

impl Arrivals {
    /// Nobody is on the way.
    pub fn new() -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let event = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
        Ok(Self { sender, receiver, event, on_their_way: 0 })
    }

    /// Begins to meet the server of `device`.
    pub fn meet(&mut self, device: Virtio, reply: Reply<Added>) {
        if self.on_their_way >= MOST {
            let why = format!("the servers of {MOST} devices have not answered yet: try again when they have");
            return reply.send(Err(ApiError::new(ErrorKind::Conflict, why)));
        }
        let (sender, event) = (self.sender.clone(), Arc::clone(&self.event));
        // The thread takes the reply when there is a thread.
        let (hand_over, handed_over) = mpsc::channel();
        let meet = move || {
            let Ok((device, reply)) = handed_over.recv() else { return };
            let side = Backend::open(&device);
            // Fails when the machine has ended: the reply says so when it is dropped.
            if sender.send(Arrival { device, side, reply }).is_ok() {
                let _ = event.write(1);
            }
        };
        match thread::Builder::new().name("vu-meet".into()).spawn(meet) {
            Ok(_) => {
                self.on_their_way += 1;
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
        self.on_their_way = self.on_their_way.saturating_sub(1);
        Some(arrival)
    }
}

impl AsRawFd for Arrivals {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
