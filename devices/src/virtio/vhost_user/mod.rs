//! Devices that another process serves over vhost-user: a shared folder, a disk, a network interface. This process only
//! shows the function; the server works on the rings in guest memory.
//!
//! | question | module |
//! |---|---|
//! | what is said to the server? | [`connection`] |
//! | what does the function show, and who signals the driver? | here |

pub mod connection;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use log::Level;
use pci::seams::MsiPort;
use rustix::event::{PollFd, PollFlags, poll};
use thiserror::Error;
use virtio_bindings::{virtio_blk, virtio_net};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::feature;
use super::function::{Device, Start, VirtioError, VirtioFunction};
use super::kind::Kind;
use super::ring::Memory;
use super::worker::{Bell, Stop, Worker};
use crate::complaints::Complaints;
pub use connection::{Connection, ConnectionError};

/// Bytes of a shared folder's tag (virtio 1.2 5.11.4).
pub const TAG_LEN: usize = 36;
/// Bytes of a disk's configuration.
const BLOCK_CONFIG: u16 = 60;

/// What is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Served {
    /// A shared folder.
    Folder {
        /// What the guest mounts, 1 to [`TAG_LEN`] bytes.
        tag: String,
    },
    /// A disk.
    Disk,
    /// A network interface.
    Net {
        /// The guest's address.
        mac: [u8; 6],
    },
}

impl Served {
    const fn kind(&self) -> Kind {
        match self {
            Self::Folder { .. } => Kind::FileSystem,
            Self::Disk => Kind::Block,
            Self::Net { .. } => Kind::Net,
        }
    }

    /// Device features that make sense without knowledge of this process.
    const fn features(&self) -> u64 {
        match self {
            Self::Folder { .. } => 0,
            Self::Disk => {
                1 << virtio_blk::VIRTIO_BLK_F_SIZE_MAX
                    | 1 << virtio_blk::VIRTIO_BLK_F_SEG_MAX
                    | 1 << virtio_blk::VIRTIO_BLK_F_GEOMETRY
                    | 1 << virtio_blk::VIRTIO_BLK_F_RO
                    | 1 << virtio_blk::VIRTIO_BLK_F_BLK_SIZE
                    | 1 << virtio_blk::VIRTIO_BLK_F_FLUSH
                    | 1 << virtio_blk::VIRTIO_BLK_F_TOPOLOGY
                    | 1 << virtio_blk::VIRTIO_BLK_F_MQ
                    | 1 << virtio_blk::VIRTIO_BLK_F_DISCARD
                    | 1 << virtio_blk::VIRTIO_BLK_F_WRITE_ZEROES
            }
            Self::Net { .. } => {
                1 << virtio_net::VIRTIO_NET_F_CSUM
                    | 1 << virtio_net::VIRTIO_NET_F_GUEST_CSUM
                    | 1 << virtio_net::VIRTIO_NET_F_GUEST_TSO4
                    | 1 << virtio_net::VIRTIO_NET_F_GUEST_TSO6
                    | 1 << virtio_net::VIRTIO_NET_F_GUEST_ECN
                    | 1 << virtio_net::VIRTIO_NET_F_GUEST_UFO
                    | 1 << virtio_net::VIRTIO_NET_F_HOST_TSO4
                    | 1 << virtio_net::VIRTIO_NET_F_HOST_TSO6
                    | 1 << virtio_net::VIRTIO_NET_F_HOST_ECN
                    | 1 << virtio_net::VIRTIO_NET_F_HOST_UFO
                    | 1 << virtio_net::VIRTIO_NET_F_MRG_RXBUF
            }
        }
    }

    /// Queues before the request queues, which are counted apart.
    const fn extra_queues(&self) -> u16 {
        match self {
            // The queue for what must not wait.
            Self::Folder { .. } => 1,
            Self::Disk | Self::Net { .. } => 0,
        }
    }
}

/// A device to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteSpec {
    /// What it is.
    pub served: Served,
    /// Request queues; of a network interface receive and transmit counted each.
    pub queues: u16,
    /// Entries of each queue, a power of two.
    pub queue_size: u16,
}

impl RemoteSpec {
    /// All queues, for [`Connection::open`].
    #[must_use]
    pub const fn all_queues(&self) -> u16 {
        self.queues.saturating_add(self.served.extra_queues())
    }
}

/// A served device as a PCI function.
pub type RemoteFunction = VirtioFunction<Remote>;

impl RemoteFunction {
    /// The device `name` (for its thread and messages), which the server at the other end of `connection` serves.
    pub fn new(
        name: &str,
        spec: &RemoteSpec,
        connection: Arc<Connection>,
        memory: Memory,
        msi: Arc<dyn MsiPort>,
    ) -> Result<Self, RemoteError> {
        let remote = Remote::new(name, spec, connection)?;
        Self::with_device(remote, memory, msi).map_err(|source| RemoteError::Function { name: name.to_owned(), source })
    }
}

/// What is particular to a served device.
pub struct Remote {
    name: String,
    connection: Arc<Connection>,
    kind: Kind,
    features: u64,
    sizes: Vec<u16>,
    config: Vec<u8>,
    complaints: Arc<Mutex<Complaints>>,
}

impl Remote {
    fn new(name: &str, spec: &RemoteSpec, connection: Arc<Connection>) -> Result<Self, RemoteError> {
        let features = connection.features();
        if features & feature::VERSION_1 == 0 {
            return Err(RemoteError::Legacy { name: name.to_owned() });
        }
        let config = match &spec.served {
            Served::Folder { tag } => folder_config(name, tag, spec.queues)?,
            Served::Disk => {
                let mut config = connection.config(BLOCK_CONFIG).map_err(RemoteError::Connection)?;
                // Of queues the function has as many as were asked for (virtio 1.2 5.2.4).
                config.iter_mut().skip(34).zip(spec.queues.to_le_bytes()).for_each(|(to, from)| *to = from);
                config
            }
            // Address, then the status, which says that the link is up.
            Served::Net { mac } => [mac.as_slice(), &[1, 0]].concat(),
        };
        let mut taken = spec.served.features() & features;
        if matches!(spec.served, Served::Net { .. }) {
            taken |= 1 << virtio_net::VIRTIO_NET_F_MAC | 1 << virtio_net::VIRTIO_NET_F_STATUS;
        }
        Ok(Self {
            name: name.to_owned(),
            connection,
            kind: spec.served.kind(),
            features: taken | feature::TRANSPORT & features,
            sizes: vec![spec.queue_size; spec.all_queues().into()],
            config,
            complaints: Arc::default(),
        })
    }
}

impl Device for Remote {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn features(&self) -> u64 {
        self.features & !feature::TRANSPORT
    }

    fn transport_features(&self) -> u64 {
        self.features & feature::TRANSPORT
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.sizes
    }

    fn config(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.config)
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let calls = start.rings.iter().map(|_| EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)).collect::<io::Result<Vec<_>>>()?;
        let bell = Arc::new(Bell::new()?);
        let relay = Relay {
            name: self.name.clone(),
            connection: self.connection.clone(),
            start,
            complaints: self.complaints.clone(),
            calls,
            bell: bell.clone(),
        };
        Ok(vec![Worker::start(format!("vu-{}", self.name), vec![bell], move |stop| relay.run(stop))?])
    }
}

/// Between the server and the driver, from `DRIVER_OK` to the reset.
struct Relay {
    name: String,
    connection: Arc<Connection>,
    start: Start,
    /// Of all starts of the device, which a guest can repeat.
    complaints: Arc<Mutex<Complaints>>,
    calls: Vec<EventFd>,
    bell: Arc<Bell>,
}

impl Relay {
    fn run(self, stop: &Stop) {
        let mut complaints = self.complaints.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = self.connection.start(self.start.features, &self.start.memory, &self.start.rings, &self.calls) {
            complaints.add_error(Level::Error, format_args!("{}: the device gives up", self.name), &error);
            self.connection.close();
            self.start.signals.give_up();
            return;
        }
        if self.relay(stop) {
            // Without an answer the server may still write to guest memory: it gets no more of it.
            if let Err(error) = self.connection.stop(&self.start.rings) {
                complaints.add_error(Level::Warn, format_args!("{}: its server does not stop", self.name), &error);
                self.connection.close();
            }
        } else {
            let path = self.connection.path().display();
            complaints.add(Level::Error, format_args!("{}: the server at {path} is gone; the device gives up", self.name));
            self.connection.close();
            self.start.signals.give_up();
        }
    }

    /// Signals the driver when the server says so. False when the server is gone.
    fn relay(&self, stop: &Stop) -> bool {
        while !stop.stopped() {
            let calls = self.calls.iter().map(borrow);
            let mut waited: Vec<_> = calls.map(|call| PollFd::from_borrowed_fd(call, PollFlags::IN)).collect();
            waited.push(PollFd::new(&*self.bell, PollFlags::IN));
            waited.push(PollFd::new(&*self.connection, PollFlags::RDHUP));
            match poll(&mut waited, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
            let gone = waited.last().is_some_and(|server| !server.revents().is_empty());
            for (ring, call) in self.start.rings.iter().zip(&self.calls) {
                // Fails when nothing was said.
                if call.read().is_ok() {
                    self.start.signals.used(ring.index());
                }
            }
            if gone && !stop.stopped() {
                return false;
            }
        }
        true
    }
}

fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as `event`, which outlives the borrow.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// `struct virtio_fs_config`: the tag, filled up with zeros, and the number of request queues.
fn folder_config(name: &str, tag: &str, queues: u16) -> Result<Vec<u8>, RemoteError> {
    if !(1..=TAG_LEN).contains(&tag.len()) {
        return Err(RemoteError::Tag { name: name.to_owned(), tag: tag.to_owned() });
    }
    let mut config = tag.as_bytes().to_vec();
    config.resize(TAG_LEN, 0);
    config.extend(u32::from(queues).to_le_bytes());
    Ok(config)
}

/// A served device that cannot be made.
#[derive(Debug, Error)]
pub enum RemoteError {
    /// The server.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// Old server.
    #[error("the server of {name} does not offer VIRTIO_F_VERSION_1; take a newer one")]
    Legacy {
        /// The device.
        name: String,
    },
    /// A tag that does not fit.
    #[error("the tag `{tag}` of {name} does not fit; give 1 to {TAG_LEN} bytes")]
    Tag {
        /// The device.
        name: String,
        /// The tag.
        tag: String,
    },
    /// The function.
    #[error("cannot make the device {name}")]
    Function {
        /// The device.
        name: String,
        /// Why.
        #[source]
        source: VirtioError,
    },
}
