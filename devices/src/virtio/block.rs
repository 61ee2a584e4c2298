//! A disk: request queues over an image (virtio 1.2 5.2).
//!
//! | question | module |
//! |---|---|
//! | what does a request ask for, and what is the answer? | `request` |
//! | how do bytes get between image and guest memory? | `image` |
//! | how are many requests under way at once? | `uring` |

pub mod image;
mod pieces;
mod request;
#[cfg(test)]
mod tests;
#[cfg(test)]
#[cfg(not(without_io_uring))]
#[path = "block/tests.rs"]
#[expect(clippy::duplicate_mod, reason = "the same tests, with the other engine")]
mod tests_by_uring;
mod uring;

use std::borrow::Cow;
use std::io;
use std::sync::{Arc, Mutex, Once};
use std::time::Instant;

use log::Level;
use pci::state::{Reader, StateError, Writer};
use pci::sync::lock;
use thiserror::Error;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_WRITE_ZEROES,
};

use super::function::{Device, Seat, Start, VirtioError, VirtioFunction};
use super::kind::Kind;
use super::limit::{Limit, LimitSpec};
use super::ring::{Ring, Served};
use super::worker::{Stop, Worker};
use crate::complaints::{Complaints, Listener};
pub use image::{Format, Image, ImageError, Opened};
use request::Disk;
use uring::Uring;

/// Bytes of a sector, the unit of capacity and addresses.
pub const SECTOR: u32 = 512;
/// Most bytes of a disk's serial.
pub const SERIAL_LEN: usize = 20;

/// Most request queues.
pub const MAX_QUEUES: u16 = 64;

const CONFIG_LEN: usize = 60;

/// How requests of a raw image are carried out. Images with a format of their own are read and written by one call after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    /// By io_uring where this process may use it.
    #[default]
    Auto,
    /// By io_uring, or the disk cannot be.
    Uring,
    /// By one call after another.
    Sync,
}

/// A disk to make.
#[derive(Clone)]
pub struct BlockSpec {
    /// The image. A last part below a sector is not shown.
    pub image: Arc<Image>,
    /// What the guest reads as the disk's serial: at most 20 bytes.
    pub serial: String,
    /// Request queues, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Entries of each, a power of two, at least 4.
    pub queue_size: u16,
    /// How much may pass, in each queue.
    pub limit: LimitSpec,
    /// How requests are carried out.
    pub engine: Engine,
}

/// A disk as a PCI function.
pub type BlockFunction = VirtioFunction<Block>;

impl BlockFunction {
    /// The disk `name` (for its thread and messages).
    pub fn new(name: &str, spec: BlockSpec, seat: Seat) -> Result<Self, BlockError> {
        let block = Block::new(name, spec)?;
        Self::with_device(block, seat).map_err(|source| BlockError::Function { name: name.to_owned(), source })
    }
}

/// What is particular to a disk.
pub struct Block {
    thread_name: String,
    disk: Arc<Disk>,
    sizes: Vec<u16>,
    limit: LimitSpec,
    engine: Arc<Chosen>,
    config: [u8; CONFIG_LEN],
}

impl Block {
    fn new(name: &str, spec: BlockSpec) -> Result<Self, BlockError> {
        let name = || name.to_owned();
        let BlockSpec { image, serial, queues, queue_size, limit, engine } = spec;
        if !(1..=MAX_QUEUES).contains(&queues) || queue_size < 4 || !queue_size.is_power_of_two() {
            return Err(BlockError::Queues { name: name(), queues, queue_size });
        }
        if engine == Engine::Uring {
            image.raw().ok_or_else(|| BlockError::UringFormat { name: name() })?;
            uring::open().map_err(|source| BlockError::Uring { name: name(), source })?;
        }
        let sectors = image.size() / u64::from(SECTOR);
        let given = serial.as_bytes();
        let mut serial = [0; SERIAL_LEN];
        let room = serial.get_mut(..given.len()).ok_or(BlockError::Serial { name: name(), len: given.len() })?;
        room.copy_from_slice(given);
        Ok(Self {
            thread_name: format!("blk-{}", name()),
            config: config(sectors, image.block(), queues, queue_size),
            disk: Arc::new(Disk { image, sectors, serial, name: name(), complaints: Mutex::default() }),
            sizes: vec![queue_size; queues.into()],
            limit,
            engine: Arc::new(Chosen::new(name(), engine)),
        })
    }
}

impl Device for Block {
    fn kind(&self) -> Kind {
        Kind::Block
    }

    fn features(&self) -> u64 {
        let mut features = 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_FLUSH;
        features |= if self.disk.image.readonly() {
            1 << VIRTIO_BLK_F_RO
        } else {
            1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        };
        if self.sizes.len() > 1 { features | 1 << VIRTIO_BLK_F_MQ } else { features }
    }

    fn report_to(&mut self, listener: Listener) {
        lock(&self.disk.complaints).report_to(listener);
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.sizes
    }

    fn config(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.config)
    }

    fn save(&self, writer: &mut Writer) -> Result<(), StateError> {
        writer.u64(self.disk.sectors);
        Ok(())
    }

    /// Takes nothing: a driver does not read the capacity again, so the image must be as large as it was.
    fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        reader.same("sectors", self.disk.sectors)
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        // A driver that does not know flushes counts on every write (virtio 1.2 5.2.5.2).
        let durable = start.features & 1 << VIRTIO_BLK_F_FLUSH == 0;
        let crew = start.crew;
        let worker = |ring: Ring| {
            let (disk, limit) = (self.disk.clone(), Limit::new(self.limit, Instant::now()));
            let engine = self.engine.clone();
            let uring = engine.uring(&disk, ring.index())?;
            let bells = vec![ring.bell().clone()];
            Worker::start(self.thread_name.clone(), &crew, bells, move |stop| {
                if let (Some(file), Some(uring)) = (disk.image.raw(), uring) {
                    let uring = uring::Lane { disk: &disk, file, durable, limit, stop }.serve(ring, uring);
                    engine.keep(uring);
                } else {
                    serve(ring, &disk, durable, limit, stop);
                }
            })
        };
        start.rings.into_iter().map(worker).collect()
    }
}

/// How the queues of a disk are served.
struct Chosen {
    name: String,
    wanted: Engine,
    /// That it is by io_uring was told.
    told: Once,
    /// Of queues that are not.
    complaints: Mutex<Complaints>,
    /// Makes an io_uring.
    open: fn() -> io::Result<Uring>,
    /// Of queues that were served before: a guest may reset its disk as often as it likes. Never locked with `complaints`.
    spare: Mutex<Vec<Uring>>,
}

impl Chosen {
    fn new(name: String, wanted: Engine) -> Self {
        let (told, complaints, spare) = (Once::new(), Mutex::default(), Mutex::default());
        Self { name, wanted, told, complaints, open: uring::open, spare }
    }

    /// An io_uring for a queue of `disk`, if it is to have one. With [`Engine::Uring`] it has one, or the disk does not start.
    fn uring(&self, disk: &Disk, queue: usize) -> io::Result<Option<Uring>> {
        if self.wanted == Engine::Sync || disk.image.raw().is_none() {
            return Ok(None);
        }
        let name = &self.name;
        let spare = lock(&self.spare).pop();
        match spare.map_or_else(self.open, Ok) {
            Ok(uring) => {
                self.told.call_once(|| log::info!("{name}: requests by io_uring"));
                Ok(Some(uring))
            }
            Err(source) if self.wanted == Engine::Uring => {
                Err(io::Error::other(BlockError::Uring { name: name.clone(), source }))
            }
            Err(error) => {
                let mut complaints = lock(&self.complaints);
                let text = "requests by one call after another, since io_uring is refused";
                complaints.add(Level::Info, format_args!("{name}: {text}: {error} (queue {queue})"));
                Ok(None)
            }
        }
    }

    /// Keeps an io_uring with which nothing is under way for the next start.
    fn keep(&self, uring: Option<Uring>) {
        lock(&self.spare).extend(uring);
    }
}

/// Serves a queue until `stop` says so or the ring is corrupt.
fn serve(mut ring: Ring, disk: &Disk, durable: bool, mut limit: Limit, stop: &Stop) {
    loop {
        let mut pause = None;
        let drained = ring.drain(stop, |chain, memory| {
            pause = limit.wait(Instant::now());
            if pause.is_some() {
                return Served::Later;
            }
            let bytes = chain.clone().map(|descriptor| u64::from(descriptor.len())).fold(0, u64::saturating_add);
            limit.take(bytes);
            disk.serve(chain, memory, durable, || stop.stopped())
        });
        if drained.is_err() {
            ring.give_up();
            return;
        }
        if !ring.bell().wait_or(stop, None, pause) {
            return;
        }
    }
}

/// `struct virtio_blk_config`: capacity at 0, most segments at 12, block size at 20, queues at 34, limits of discards at 36 and
/// of zeros to write at 48.
fn config(sectors: u64, block: u32, queues: u16, queue_size: u16) -> [u8; CONFIG_LEN] {
    let mut config = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| {
        config.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
    };
    put(0, &sectors.to_le_bytes());
    // All but header and status.
    put(12, &(u32::from(queue_size) - 2).to_le_bytes());
    put(20, &block.to_le_bytes());
    put(34, &queues.to_le_bytes());
    put(36, &request::MOST_SECTORS.to_le_bytes());
    put(40, &1_u32.to_le_bytes());
    put(44, &(block / SECTOR).to_le_bytes());
    put(48, &request::MOST_SECTORS.to_le_bytes());
    put(52, &1_u32.to_le_bytes());
    put(56, &[1]);
    config
}

/// A disk that cannot be made.
#[derive(Debug, Error)]
pub enum BlockError {
    /// Queues that cannot be.
    #[error("disk {name} cannot have {queues} queues of {queue_size} entries; 1 to {MAX_QUEUES} of a power of two from 4 on")]
    Queues {
        /// The disk.
        name: String,
        /// Asked for.
        queues: u16,
        /// Entries.
        queue_size: u16,
    },
    /// No io_uring.
    #[error("disk {name} cannot be served by io_uring; leave out `io=uring`, or allow io_uring_setup")]
    Uring {
        /// The disk.
        name: String,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// A format that is not served in this way.
    #[error("disk {name} cannot be served by io_uring, since its image is not raw; leave out `io=uring`")]
    UringFormat {
        /// The disk.
        name: String,
    },
    /// Too long.
    #[error("the serial of disk {name} has {len} bytes; at most {SERIAL_LEN} are possible")]
    Serial {
        /// The disk.
        name: String,
        /// Bytes.
        len: usize,
    },
    /// The function.
    #[error("cannot make disk {name}")]
    Function {
        /// The disk.
        name: String,
        /// Why.
        #[source]
        source: VirtioError,
    },
}
