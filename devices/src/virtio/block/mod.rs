//! A disk: one queue over a raw image (virtio 1.2 5.2).
//!
//! | question | module |
//! |---|---|
//! | what does a request ask for, and what is the answer? | `request` |
//! | how do bytes get between image and guest memory? | `image` |

mod image;
mod request;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::sync::Arc;

use pci::seams::MsiPort;
use thiserror::Error;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX};

use super::function::{Device, Start, VirtioError, VirtioFunction};
use super::kind::Kind;
use super::ring::{Memory, Ring};
use super::worker::Worker;
use image::Image;
use request::Disk;

/// Bytes of a sector, the unit of capacity and addresses.
pub const SECTOR: u32 = 512;
/// Most bytes of a disk's serial.
pub const SERIAL_LEN: usize = 20;

const QUEUE_SIZE: u16 = 256;
/// Data segments of a request: a queue's descriptors without header and status.
const SEGMENTS: u32 = QUEUE_SIZE as u32 - 2;
const CONFIG_LEN: usize = 60;

/// A disk to make.
#[derive(Debug)]
pub struct BlockSpec {
    /// The image, a regular file or a block device, open for writing unless `readonly`. A last part below 512 bytes is not
    /// shown.
    pub file: File,
    /// Refuse writes.
    pub readonly: bool,
    /// What the guest reads as the disk's serial: at most 20 bytes.
    pub serial: String,
}

/// A disk as a PCI function.
pub type BlockFunction = VirtioFunction<Block>;

impl BlockFunction {
    /// The disk `name` (for its thread and messages) on a root bus.
    pub fn new(name: &str, spec: BlockSpec, memory: Memory, msi: Arc<dyn MsiPort>) -> Result<Self, BlockError> {
        let block = Block::new(name, spec)?;
        Self::with_device(block, memory, msi).map_err(|source| BlockError::Function { name: name.to_owned(), source })
    }
}

/// What is particular to a disk.
pub struct Block {
    thread_name: String,
    disk: Arc<Disk>,
    config: [u8; CONFIG_LEN],
}

impl Block {
    fn new(name: &str, spec: BlockSpec) -> Result<Self, BlockError> {
        let name = || name.to_owned();
        let image = Image::new(spec.file).map_err(|source| BlockError::Length { name: name(), source })?;
        let sectors = image.len() / u64::from(SECTOR);
        if sectors == 0 {
            return Err(BlockError::Small { name: name(), len: image.len() });
        }
        let mut serial = [0; SERIAL_LEN];
        let given = spec.serial.as_bytes();
        let room = serial.get_mut(..given.len()).ok_or(BlockError::Serial { name: name(), len: given.len() })?;
        room.copy_from_slice(given);
        Ok(Self {
            thread_name: format!("blk-{}", name()),
            disk: Arc::new(Disk { image, sectors, readonly: spec.readonly, serial }),
            config: config(sectors),
        })
    }
}

impl Device for Block {
    fn kind(&self) -> Kind {
        Kind::Block
    }

    fn features(&self) -> u64 {
        let features = 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_FLUSH;
        if self.disk.readonly { features | 1 << VIRTIO_BLK_F_RO } else { features }
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn config(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.config)
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        // A driver that does not know flushes counts on every write (virtio 1.2 5.2.5.2).
        let durable = start.features & 1 << VIRTIO_BLK_F_FLUSH == 0;
        let worker = |ring: Ring| {
            let disk = self.disk.clone();
            Worker::start(self.thread_name.clone(), vec![ring.bell().clone()], move |stop| {
                ring.run(stop, |chain, memory| disk.serve(chain, memory, durable, || stop.stopped()));
            })
        };
        start.rings.into_iter().map(worker).collect()
    }
}

/// `struct virtio_blk_config`: capacity at 0, most segments at 12, block size at 20.
fn config(sectors: u64) -> [u8; CONFIG_LEN] {
    let mut config = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| {
        config.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
    };
    put(0, &sectors.to_le_bytes());
    put(12, &SEGMENTS.to_le_bytes());
    put(20, &SECTOR.to_le_bytes());
    config
}

/// A disk that cannot be made.
#[derive(Debug, Error)]
pub enum BlockError {
    /// Not a file of known length.
    #[error("cannot find the length of the image of disk {name}; take a regular file or a block device")]
    Length {
        /// The disk.
        name: String,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Nothing to show.
    #[error("the image of disk {name} has {len} bytes; it needs at least 512")]
    Small {
        /// The disk.
        name: String,
        /// Bytes.
        len: u64,
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
