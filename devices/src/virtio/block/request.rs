//! What one request asks of a disk, and its answer. All that a chain of descriptors says is the guest's word.

use std::io;
use std::ops::Deref;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT,
};
use virtio_queue::DescriptorChain;
use vm_memory::guest_memory::Permissions;
use vm_memory::{Bytes, GuestMemory, GuestMemoryMmap, VolatileSlice};

use super::image::{Direction, Image};
use super::{SECTOR, SERIAL_LEN};

/// Bytes of the header: type, reserved, sector.
const HEADER: usize = 16;

/// What requests work on.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) image: Image,
    pub(super) sectors: u64,
    pub(super) readonly: bool,
    pub(super) serial: [u8; SERIAL_LEN],
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Served {
    /// The guest has its answer; this many bytes of it.
    Used(u32),
    /// There is no place for an answer: the driver is broken.
    Malformed,
    /// The worker is being stopped; the guest gets no answer.
    Stopped,
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
        let Some(mut buffers) = Buffers::of(chain, memory) else { return Served::Malformed };
        let Some(status) = split_last(&mut buffers.writable) else { return Served::Malformed };
        let answer = if buffers.whole { self.answer(buffers, durable, &stopped) } else { Err(Fault::Failed) };
        if stopped() {
            return Served::Stopped;
        }
        let (code, len) = match answer {
            Ok(written) => (VIRTIO_BLK_S_OK, written.saturating_add(1)),
            Err(Fault::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 1),
            Err(Fault::Failed) => (VIRTIO_BLK_S_IOERR, 1),
        };
        match status.write_slice(&[code.to_le_bytes()[0]], 0) {
            Ok(()) => Served::Used(len),
            Err(_) => Served::Malformed,
        }
    }

    /// Carries the request out; how many bytes before the status byte it wrote to guest memory.
    fn answer(&self, buffers: Buffers<'_>, durable: bool, stopped: &impl Fn() -> bool) -> Result<u32, Fault> {
        let Buffers { mut readable, writable, .. } = buffers;
        let (kind, sector) = take_header(&mut readable).ok_or(Fault::Failed)?;
        match kind {
            VIRTIO_BLK_T_IN => {
                let (offset, len) = self.range(sector, &writable)?;
                self.image.transfer(Direction::Read, &writable, offset, stopped)?;
                Ok(len)
            }
            VIRTIO_BLK_T_OUT if self.readonly => Err(Fault::Failed),
            VIRTIO_BLK_T_OUT => {
                let (offset, _) = self.range(sector, &readable)?;
                self.image.transfer(Direction::Write, &readable, offset, stopped)?;
                if durable {
                    self.image.flush()?;
                }
                Ok(0)
            }
            VIRTIO_BLK_T_FLUSH => {
                self.image.flush()?;
                Ok(0)
            }
            VIRTIO_BLK_T_GET_ID => scatter(&self.serial, &writable).ok_or(Fault::Failed),
            _ => Err(Fault::Unsupported),
        }
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

/// Why a request is not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Unsupported,
    Failed,
}

impl From<io::Error> for Fault {
    fn from(_: io::Error) -> Self {
        // The guest gets one error for all of them and writes its own log.
        Self::Failed
    }
}

/// The memory of a request, without empty slices.
struct Buffers<'m> {
    readable: Vec<VolatileSlice<'m>>,
    writable: Vec<VolatileSlice<'m>>,
    /// Every descriptor before the last led to memory.
    whole: bool,
}

impl<'m> Buffers<'m> {
    /// `None` for a chain that breaks off, that has readable parts after writable ones or whose last part is not in guest
    /// memory: there is no telling where the answer should go.
    fn of<M>(chain: DescriptorChain<M>, memory: &'m GuestMemoryMmap) -> Option<Self>
    where
        M: Deref<Target = GuestMemoryMmap>,
    {
        let mut buffers = Self { readable: Vec::new(), writable: Vec::new(), whole: true };
        let (mut complete, mut last_found) = (false, false);
        for descriptor in chain {
            let writable = descriptor.is_write_only();
            if !writable && !buffers.writable.is_empty() {
                return None;
            }
            complete = !descriptor.has_next();
            let (list, access) =
                if writable { (&mut buffers.writable, Permissions::Write) } else { (&mut buffers.readable, Permissions::Read) };
            let len = usize::try_from(descriptor.len()).ok()?;
            let slices = GuestMemory::get_slices(memory, descriptor.addr(), len, access);
            let found = slices.ok().and_then(|slices| slices.collect::<Result<Vec<_>, _>>().ok());
            last_found = found.is_some();
            match found {
                Some(slices) => list.extend(slices.into_iter().filter(|slice| !slice.is_empty())),
                None => buffers.whole = false,
            }
        }
        (complete && last_found).then_some(buffers)
    }
}

/// Bytes of all slices; `None` if they exceed the address space.
fn total(slices: &[VolatileSlice<'_>]) -> Option<usize> {
    slices.iter().try_fold(0_usize, |sum, slice| sum.checked_add(slice.len()))
}

/// Takes the last byte off.
fn split_last<'m>(slices: &mut Vec<VolatileSlice<'m>>) -> Option<VolatileSlice<'m>> {
    let last = slices.pop()?;
    let (front, byte) = last.split_at(last.len().checked_sub(1)?).ok()?;
    if !front.is_empty() {
        slices.push(front);
    }
    Some(byte)
}

/// Takes the header off: type and sector. It may lie in several parts.
fn take_header(slices: &mut Vec<VolatileSlice<'_>>) -> Option<(u32, u64)> {
    let mut header = [0; HEADER];
    let mut left = header.as_mut_slice();
    let mut taken = 0;
    for slice in slices.iter_mut() {
        let (part, rest) = left.split_at_mut(slice.len().min(left.len()));
        slice.read_slice(part, 0).ok()?;
        *slice = slice.offset(part.len()).ok()?;
        taken += part.len();
        left = rest;
    }
    if taken < HEADER {
        return None;
    }
    slices.retain(|slice| !slice.is_empty());
    let [a, b, c, d, _, _, _, _, sector @ ..] = header;
    Some((u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(sector)))
}

/// Writes `data` over `slices`; how many bytes, or `None` if they have no room for it.
fn scatter(data: &[u8], slices: &[VolatileSlice<'_>]) -> Option<u32> {
    let mut left = data;
    for slice in slices {
        let (part, rest) = left.split_at(slice.len().min(left.len()));
        slice.write_slice(part, 0).ok()?;
        left = rest;
    }
    left.is_empty().then(|| u32::try_from(data.len()).unwrap_or(u32::MAX))
}
