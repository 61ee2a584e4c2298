//! Devices that another process serves over vhost-user: a shared folder, a disk, a network interface. This process only
//! shows the function; the server works on the rings in guest memory.
//!
//! | question | module |
//! |---|---|
//! | what is said to the server? | [`connection`] |
//! | which process is the server, when one dies and another comes? | [`server`] |
//! | what is told of a conversation that ended? | `ending` |
//! | what is done while a driver uses the device? | `relay` |
//! | what does the function show? | here |

pub mod connection;
mod ending;
mod relay;
pub mod server;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use pci::state::{StateError, Writer};
use pci::sync::lock;
use thiserror::Error;
use virtio_bindings::{virtio_blk, virtio_net};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend};

use super::feature;
use super::function::{Device, Seat, Start, VirtioError, VirtioFunction};
use super::kind::Kind;
use super::net::control::{self, Command};
use super::net::tap::Offloads;
use super::net::{CONTROL_QUEUE, offload_features};
use super::ring::Ring;
use super::worker::{Bell, Stop, Worker};
use crate::complaints::{Complaints, Listener};
pub use connection::{Connection, ConnectionError};
use relay::Relay;
pub use server::{Server, ServerError};

/// Bytes of a shared folder's tag (virtio 1.2 5.11.4).
const TAG_LEN: usize = 36;

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
        /// Largest packet, announced to the guest.
        mtu: Option<u16>,
        /// What may be left to the server, and it to the guest, as far as it can.
        offloads: Offloads,
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
    fn features(&self) -> u64 {
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
            Self::Net { offloads, .. } => {
                offload_features(*offloads) | 1 << virtio_net::VIRTIO_NET_F_MRG_RXBUF | 1 << virtio_net::VIRTIO_NET_F_MQ
            }
        }
    }

    /// The feature that a server of more than the least number of queues must have, if there is one.
    const fn several(&self, queues: u16) -> Option<(u32, &'static str)> {
        match self {
            Self::Disk if queues > 1 => Some((virtio_blk::VIRTIO_BLK_F_MQ, "VIRTIO_BLK_F_MQ")),
            Self::Net { .. } if queues > 2 => Some((virtio_net::VIRTIO_NET_F_MQ, "VIRTIO_NET_F_MQ")),
            Self::Folder { .. } | Self::Disk | Self::Net { .. } => None,
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
    /// All queues of the server.
    #[must_use]
    pub const fn all_queues(&self) -> u16 {
        self.queues.saturating_add(self.served.extra_queues())
    }
}

/// A served device as a PCI function.
pub type RemoteFunction = VirtioFunction<Remote>;

impl RemoteFunction {
    /// The device `name` (for its threads and messages), which `server` serves.
    pub fn new(name: &str, spec: &RemoteSpec, server: Arc<Server>, seat: Seat) -> Result<Self, RemoteError> {
        let (regions, most) = (seat.memory.memory().num_regions(), server.most_regions_at_start());
        if regions > most {
            return Err(RemoteError::Regions { name: name.to_owned(), regions, most });
        }
        let remote = Remote::new(name, spec, server)?;
        Self::with_device(remote, seat).map_err(|source| RemoteError::Function { name: name.to_owned(), source })
    }
}

/// What is particular to a served device.
pub struct Remote {
    name: String,
    server: Arc<Server>,
    kind: Kind,
    features: u64,
    sizes: Vec<u16>,
    config: Shown,
    complaints: Arc<Mutex<Complaints>>,
}

/// Where the configuration comes from that the driver reads.
enum Shown {
    /// From here.
    Own(Vec<u8>),
    /// From the server, but for the number of queues: a disk has as many as were asked for (virtio 1.2 5.2.4).
    Disk {
        /// How many.
        queues: u16,
    },
}

impl Remote {
    fn new(name: &str, spec: &RemoteSpec, server: Arc<Server>) -> Result<Self, RemoteError> {
        let offered = server.features();
        let lacks = |feature| RemoteError::Lacks { name: name.to_owned(), feature };
        if offered & feature::VERSION_1 == 0 {
            return Err(lacks("VIRTIO_F_VERSION_1"));
        }
        if let Some((bit, feature)) = spec.served.several(spec.queues)
            && offered & 1 << bit == 0
        {
            return Err(lacks(feature));
        }
        let mut features = spec.served.features() & offered | feature::TRANSPORT & offered;
        let mut sizes = vec![spec.queue_size; spec.all_queues().into()];
        let config = match &spec.served {
            Served::Folder { tag } => Shown::Own(folder_config(name, tag, spec.queues)?),
            Served::Disk => Shown::Disk { queues: spec.queues },
            Served::Net { mac, mtu, .. } => {
                features |= 1 << virtio_net::VIRTIO_NET_F_MAC | 1 << virtio_net::VIRTIO_NET_F_STATUS;
                if mtu.is_some() {
                    features |= 1 << virtio_net::VIRTIO_NET_F_MTU;
                }
                if spec.queues > 2 {
                    // The driver says on a queue that is served here how many it uses.
                    features |= 1 << virtio_net::VIRTIO_NET_F_CTRL_VQ;
                    sizes.push(CONTROL_QUEUE);
                } else {
                    features &= !(1 << virtio_net::VIRTIO_NET_F_MQ);
                }
                // Address, status with the link up, pairs of queues, MTU.
                let (pairs, mtu) = ((spec.queues / 2).to_le_bytes(), mtu.unwrap_or(0).to_le_bytes());
                Shown::Own([mac.as_slice(), &[1, 0], &pairs, &mtu].concat())
            }
        };
        let (name, kind) = (name.to_owned(), spec.served.kind());
        Ok(Self { name, server, kind, features, sizes, config, complaints: Arc::default() })
    }

    /// How many rings are the server's, and how many of those are in use from the start. Behind them is the control queue of
    /// an interface.
    fn rings(&self, features: u64) -> (usize, usize) {
        match self.kind {
            // Without the feature there is one pair (virtio 1.2 5.1.2).
            Kind::Net if features & 1 << virtio_net::VIRTIO_NET_F_MQ == 0 => (2, 2),
            Kind::Net => (self.sizes.len().saturating_sub(1), 2),
            _ => (self.sizes.len(), self.sizes.len()),
        }
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

    fn report_to(&mut self, listener: Listener) {
        lock(&self.complaints).report_to(listener);
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.sizes
    }

    fn config(&self) -> Cow<'_, [u8]> {
        match &self.config {
            Shown::Own(config) => Cow::Borrowed(config),
            Shown::Disk { queues } => {
                let mut config = self.server.config();
                config.iter_mut().skip(34).zip(queues.to_le_bytes()).for_each(|(to, from)| *to = from);
                Cow::Owned(config)
            }
        }
    }

    fn save(&self, _: &mut Writer) -> Result<(), StateError> {
        Err(StateError::NotKept { why: "another process serves it" })
    }

    fn start(&mut self, mut start: Start) -> io::Result<Vec<Worker>> {
        let (count, enabled) = self.rings(start.features);
        let control = start.ring(count);
        start.rings.retain(|ring| ring.index() < count);
        let calls = start.rings.iter().map(|_| Bell::new().map(Arc::new)).collect::<io::Result<Vec<_>>>()?;
        let (bell, enabled) = (Arc::new(Bell::new()?), Arc::new(AtomicUsize::new(enabled)));
        let crew = start.crew.clone();
        let relay = Relay {
            name: self.name.clone(),
            server: self.server.clone(),
            start,
            enabled: enabled.clone(),
            complaints: self.complaints.clone(),
            calls,
            bell: bell.clone(),
        };
        let mut workers = vec![Worker::start(format!("vu-{}", self.name), &crew, vec![bell], move |stop| relay.run(stop))?];
        if let Some(ring) = control {
            let (server, bells) = (self.server.clone(), vec![ring.bell().clone()]);
            let work = move |stop: &Stop| serve_control(ring, stop, &server, count, &enabled);
            workers.push(Worker::start(format!("ctl-{}", self.name), &crew, bells, work)?);
        }
        Ok(workers)
    }
}

/// Serves the control queue of an interface that has `count` rings, of which it uses the first `enabled`.
fn serve_control(ring: Ring, stop: &Stop, server: &Server, count: usize, enabled: &AtomicUsize) {
    let obey = |command| match command {
        Command::Pairs(pairs) if (1..=count / 2).contains(&pairs) => {
            enabled.store(2 * pairs, Ordering::Relaxed);
            server.current().enable(count, enabled).ok()
        }
        Command::Pairs(_) | Command::Offloads(_) => None,
    };
    ring.run(stop, |chain, memory| control::serve(chain, memory, obey));
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
    /// A feature that is needed.
    #[error("the server of {name} does not offer {feature}: take another one, or ask for fewer queues if that is what it lacks")]
    Lacks {
        /// The device.
        name: String,
        /// As the specification spells it.
        feature: &'static str,
    },
    /// A tag that does not fit.
    #[error("the tag `{tag}` of {name} does not fit; give 1 to {TAG_LEN} bytes")]
    Tag {
        /// The device.
        name: String,
        /// The tag.
        tag: String,
    },
    /// RAM in more parts than the server maps.
    #[error(
        "the server of {name} maps at most {most} regions of memory, and the machine has {regions}: take a server that maps more, or \
         a machine whose memory has fewer parts (one below 3 GiB, one above 4 GiB, and each that came later)"
    )]
    Regions {
        /// The device.
        name: String,
        /// Of RAM.
        regions: usize,
        /// At most.
        most: usize,
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
