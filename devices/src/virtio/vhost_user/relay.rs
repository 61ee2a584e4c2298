//! What is done between a server and the driver, from `DRIVER_OK` to the reset: hands the rings over, passes interrupts and
//! changes of the configuration on, gives up when the conversation ends, and takes the rings back. That it ended is told by who
//! watches the server, see [`Server::take_end`].

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use log::Level;
use pci::sync::lock;
use rustix::event::{PollFd, PollFlags, poll};

use super::connection::{Connection, ConnectionError, Handed};
use super::server::{Server, ServerError};
use crate::complaints::Complaints;
use crate::virtio::function::Start;
use crate::virtio::worker::{Bell, Stop};

/// The work of one start of a device.
pub(super) struct Relay {
    pub(super) name: String,
    pub(super) server: Arc<Server>,
    /// Rings for the server, without those that are served here.
    pub(super) start: Start,
    /// How many of the rings are in use.
    pub(super) enabled: Arc<AtomicUsize>,
    /// Of all starts of the device, which a guest can repeat.
    pub(super) complaints: Arc<Mutex<Complaints>>,
    /// By which the server tells of used buffers of each ring. KVM takes them where it can, and no thread of this process wakes
    /// up; what it leaves, while a vector is masked for one, is passed on here.
    pub(super) calls: Vec<Arc<Bell>>,
    pub(super) bell: Arc<Bell>,
}

/// Why a relay ends.
enum Ended {
    /// The device is reset, or held.
    Stopped,
    /// The server hung up.
    Gone,
}

impl Relay {
    /// Works until `stop` says so or the server is gone. While it is held, the server has no rings.
    pub(super) fn run(mut self, stop: &Stop) {
        let rings = self.start.rings.iter().zip(&self.calls);
        let _told: Vec<_> = rings.map(|(ring, call)| self.start.signals.told_by(ring.index(), call.clone())).collect();
        // A reset that comes at once finds the server with its rings, as any other.
        while !(stop.held() && stop.ends()) && self.serve(stop) && !stop.ends() {}
    }

    /// Has the server work until it is to stand still. False when nothing more is to come from it.
    fn serve(&mut self, stop: &Stop) -> bool {
        let connection = match self.begin(stop) {
            Ok(connection) => connection,
            Err(error) => {
                // Of a server that ended, and after which nobody came, is told elsewhere.
                if !matches!(error, ServerError::Connection(ConnectionError::Connect { .. }) | ServerError::Ended) {
                    let mut complaints = lock(&self.complaints);
                    complaints.fail_error(Level::Error, format_args!("{}: the device gives up", self.name), &error);
                }
                self.start.signals.give_up();
                return false;
            }
        };
        // For what came while nobody had the rings, or while the server had one that was not enabled: many forget rings of its
        // bell.
        self.start.rings.iter().for_each(|ring| ring.bell().ring_shared());
        match self.relay(&connection, stop) {
            Ended::Stopped => {
                if let Ok(positions) = connection.stop(&self.start.rings) {
                    self.start.rings.iter_mut().zip(positions).for_each(|(ring, position)| ring.rewind(position));
                    self.pass_on();
                    return true;
                }
            }
            Ended::Gone => connection.close(),
        }
        self.start.signals.give_up();
        false
    }

    /// Hands the rings to the server, to another process than before if that one has died meanwhile.
    fn begin(&self, stop: &Stop) -> Result<Arc<Connection>, ServerError> {
        let before = self.server.config();
        let connection = self.server.connection()?;
        let (start, stop) = (&self.start, stop.clone());
        let unwanted = move || stop.stopped() || stop.held();
        let handed = Handed { features: start.features, rings: &start.rings, calls: &self.calls, enabled: &self.enabled };
        let started = connection.start(&start.memory, handed, unwanted);
        started.map_err(|_| ServerError::Ended)?;
        if self.server.config() != before {
            self.start.signals.config_changed();
        }
        Ok(connection)
    }

    /// Signals the driver when the server says so.
    fn relay(&self, connection: &Connection, stop: &Stop) -> Ended {
        while !stop.stopped() && !stop.held() {
            let mut waited: Vec<_> = self.calls.iter().map(|call| PollFd::new(&**call, PollFlags::IN)).collect();
            waited.push(PollFd::new(&*self.bell, PollFlags::IN));
            waited.push(PollFd::new(connection, PollFlags::RDHUP));
            waited.extend(connection.requests().map(|requests| PollFd::new(requests, PollFlags::IN)));
            match poll(&mut waited, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Ended::Gone,
            }
            let said = |at: usize| waited.get(at).is_some_and(|entry| !entry.revents().is_empty());
            let (gone, asked) = (said(self.calls.len() + 1), said(self.calls.len() + 2));
            self.pass_on();
            if stop.stopped() || stop.held() {
                break;
            }
            if !gone && asked {
                // The next round sees it.
                let _ = self.follow(connection).inspect_err(|error| connection.end(error));
            }
            if gone {
                return Ended::Gone;
            }
        }
        Ended::Stopped
    }

    /// Signals the driver for what the server said and KVM left.
    fn pass_on(&self) {
        for (ring, call) in self.start.rings.iter().zip(&self.calls) {
            if call.take_shared() {
                self.start.signals.used(ring.index());
            }
        }
    }

    /// Takes in what the server asks for: that its configuration is read again.
    fn follow(&self, connection: &Connection) -> Result<(), ConnectionError> {
        if connection.config_changed()? && self.server.read_config()? {
            self.start.signals.config_changed();
        }
        Ok(())
    }
}
