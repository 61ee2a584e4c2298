//! What one request asks of a disk, and its answer. All that a chain of descriptors says is the guest's word.

use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use log::Level;
use pci::sync::lock;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestMemoryMmap, VolatileSlice};

use super::image::{Direction, Image};
use super::{SECTOR, SERIAL_LEN};
use crate::complaints::Complaints;
use crate::virtio::buffers::{Buffers, scatter, split_last, take, total};
use crate::virtio::ring::Served;

/// Bytes of the header: type, reserved, sector.
const HEADER: usize = 16;
/// Flag of zeros to write: the space may be given back.
const UNMAP: u32 = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
/// Most sectors of a discard or of zeros to write.
pub(super) const MOST_SECTORS: u32 = 1 << 22;

/// What requests work on.
pub(super) struct Disk {
    pub(super) image: Arc<Image>,
    pub(super) sectors: u64,
    pub(super) serial: [u8; SERIAL_LEN],
    pub(super) name: String,
    /// Of requests that the image failed, which a guest can repeat.
    pub(super) complaints: Mutex<Complaints>,
}

impl Disk {
    /// Serves the request in `chain`, whose memory is `memory`. `durable` makes a write reach the medium before its answer.
    pub(super) fn serve<M>(
        &self,
        chain: DescriptorChain<M>,
        memory: &GuestMemoryMmap,
        durable: bool,
        stopped: impl Fn() -> bool,
    ) -> Served
    where
        M: Deref<Target = GuestMemoryMmap>,
    {
        let Some(Request { status, work }) = self.request(chain, memory) else { return Served::Malformed };
        let answer = work.and_then(|work| self.carry_out(work, durable, &stopped));
        if stopped() {
            return Served::Stopped;
        }
        status.put(answer).map_or(Served::Malformed, Served::Used)
    }

    /// What `chain` asks for; `None` if it has no place for an answer.
    pub(super) fn request<'m, M>(&self, chain: DescriptorChain<M>, memory: &'m GuestMemoryMmap) -> Option<Request<'m>>
    where
        M: Deref<Target = GuestMemoryMmap>,
    {
        let mut buffers = Buffers::of(chain, memory)?;
        let status = Status(split_last(&mut buffers.writable)?);
        let work = if buffers.whole { self.work(buffers) } else { Err(Fault::Failed) };
        Some(Request { status, work })
    }

    fn work<'m>(&self, buffers: Buffers<'m>) -> Result<Work<'m>, Fault> {
        let Buffers { mut readable, writable, .. } = buffers;
        let (kind, sector) = take_header(&mut readable).ok_or(Fault::Failed)?;
        match kind {
            VIRTIO_BLK_T_IN => {
                let (offset, len) = self.range(sector, &writable)?;
                Ok(Work::Transfer { direction: Direction::Read, memory: writable, offset, len })
            }
            VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES if self.image.readonly() => Err(Fault::Failed),
            VIRTIO_BLK_T_OUT => {
                let (offset, len) = self.range(sector, &readable)?;
                Ok(Work::Transfer { direction: Direction::Write, memory: readable, offset, len })
            }
            VIRTIO_BLK_T_FLUSH => Ok(Work::Flush),
            VIRTIO_BLK_T_DISCARD => {
                let Segment { offset, len, flags } = self.segment(&mut readable)?;
                // None are defined (virtio 1.2 5.2.6.2).
                if flags == 0 { Ok(Work::Discard { offset, len }) } else { Err(Fault::Unsupported) }
            }
            VIRTIO_BLK_T_WRITE_ZEROES => {
                let Segment { offset, len, flags } = self.segment(&mut readable)?;
                let unmap = flags & UNMAP != 0;
                if flags & !UNMAP == 0 { Ok(Work::Zeroes { offset, len, unmap }) } else { Err(Fault::Unsupported) }
            }
            VIRTIO_BLK_T_GET_ID => scatter(&self.serial, &writable).map(Work::Done).ok_or(Fault::Failed),
            _ => Err(Fault::Unsupported),
        }
    }

    /// Does it; how many bytes before the status byte it wrote to guest memory.
    pub(super) fn carry_out(&self, work: Work<'_>, durable: bool, stopped: &impl Fn() -> bool) -> Result<u32, Fault> {
        let (written, moved, durable) = (work.written(), work.moves(), durable && work.changes());
        let done = match work {
            Work::Transfer { direction, memory, offset, .. } => self.image.transfer(direction, &memory, offset, stopped),
            Work::Flush => self.image.flush(),
            Work::Discard { offset, len } => self.image.discard(offset, len, stopped),
            Work::Zeroes { offset, len, unmap } => self.image.write_zeroes(offset, len, unmap, stopped),
            Work::Done(_) => Ok(()),
        };
        let done = done.and_then(|()| if durable { self.image.flush() } else { Ok(()) });
        done.map_err(|error| self.failed(&error, stopped))?;
        self.image.count(moved);
        Ok(written)
    }

    /// Tells that the image failed a request, unless that was broken off. The guest gets one error for all of them and writes
    /// its own log.
    pub(super) fn failed(&self, error: &io::Error, stopped: impl Fn() -> bool) -> Fault {
        if !stopped() {
            let mut complaints = lock(&self.complaints);
            complaints.fail_error(Level::Warn, format_args!("{}: its image failed a request", self.name), error);
        }
        Fault::Failed
    }

    /// The only segment of a discard or of zeros to write, which lies on the disk.
    fn segment(&self, readable: &mut Vec<VolatileSlice<'_>>) -> Result<Segment, Fault> {
        let [a, b, c, d, e, f, g, h, len0, len1, len2, len3, flags @ ..] = take::<16>(readable).ok_or(Fault::Failed)?;
        let sector = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let count = u32::from_le_bytes([len0, len1, len2, len3]);
        let end = sector.checked_add(count.into()).ok_or(Fault::Failed)?;
        if !readable.is_empty() || count > MOST_SECTORS || end > self.sectors {
            return Err(Fault::Failed);
        }
        let sector_bytes = u64::from(SECTOR);
        Ok(Segment { offset: sector * sector_bytes, len: u64::from(count) * sector_bytes, flags: u32::from_le_bytes(flags) })
    }

    /// Byte offset and length of a transfer that lies on the disk and consists of whole sectors.
    fn range(&self, sector: u64, data: &[VolatileSlice<'_>]) -> Result<(u64, u32), Fault> {
        let len = total(data).and_then(|len| u32::try_from(len).ok()).ok_or(Fault::Failed)?;
        let end = sector.checked_add(u64::from(len / SECTOR)).ok_or(Fault::Failed)?;
        if !len.is_multiple_of(SECTOR) || end > self.sectors {
            return Err(Fault::Failed);
        }
        Ok((sector * u64::from(SECTOR), len))
    }
}

/// A request that has a place for an answer.
pub(super) struct Request<'m> {
    pub(super) status: Status<'m>,
    pub(super) work: Result<Work<'m>, Fault>,
}

/// What is to be done, all of it possible.
pub(super) enum Work<'m> {
    /// Bytes between the image, from `offset` on, and memory.
    Transfer {
        /// Which way.
        direction: Direction,
        /// The memory, of `len` bytes.
        memory: Vec<VolatileSlice<'m>>,
        offset: u64,
        len: u32,
    },
    /// What was written is to stay.
    Flush,
    /// A part is not used any more.
    Discard { offset: u64, len: u64 },
    /// A part is to read as zeros.
    Zeroes { offset: u64, len: u64, unmap: bool },
    /// Nothing: so many bytes are in guest memory already.
    Done(u32),
}

impl Work<'_> {
    /// How many bytes before the status byte the driver has when it is done.
    pub(super) const fn written(&self) -> u32 {
        match self {
            Self::Transfer { direction: Direction::Read, len, .. } | Self::Done(len) => *len,
            _ => 0,
        }
    }

    /// Which bytes it moves, and how many.
    pub(super) const fn moves(&self) -> Option<(Direction, u32)> {
        match self {
            Self::Transfer { direction, len, .. } => Some((*direction, *len)),
            _ => None,
        }
    }

    /// Whether the image is another when it is done.
    pub(super) const fn changes(&self) -> bool {
        matches!(self, Self::Transfer { direction: Direction::Write, .. } | Self::Zeroes { .. })
    }
}

/// Where the answer goes.
pub(super) struct Status<'m>(VolatileSlice<'m>);

impl Status<'_> {
    /// Answers; the bytes written to guest memory, or `None` if that cannot be done.
    pub(super) fn put(self, answer: Result<u32, Fault>) -> Option<u32> {
        let (code, len) = match answer {
            Ok(written) => (VIRTIO_BLK_S_OK, written.saturating_add(1)),
            Err(Fault::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 1),
            Err(Fault::Failed) => (VIRTIO_BLK_S_IOERR, 1),
        };
        self.0.write_slice(&[code.to_le_bytes()[0]], 0).ok().map(|()| len)
    }
}

/// A part of the disk, as discards and zeros name it.
struct Segment {
    offset: u64,
    len: u64,
    flags: u32,
}

/// Why a request is not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Unsupported,
    Failed,
}

/// Takes the header off: type and sector. It may lie in several parts.
fn take_header(slices: &mut Vec<VolatileSlice<'_>>) -> Option<(u32, u64)> {
    let [a, b, c, d, _, _, _, _, sector @ ..] = take::<HEADER>(slices)?;
    Some((u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(sector)))
}
