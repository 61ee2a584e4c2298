//! A disk's image: moves bytes between it and guest memory, gives space back, makes writes durable. Knows nothing of requests.
//!
//! Raw images are read and written in place. Images with a format of their own are the `imago` crate's work; what they refer
//! to (backing files) is not opened, since whoever may write an image could so have any file of the host read.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::FileTypeExt;
use std::ptr::NonNull;

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use thiserror::Error;
use vm_memory::VolatileSlice;

use super::SECTOR;
use super::pieces::{BYTES, Left, SPAN};
use crate::virtio::Traffic;
use crate::virtio::vectored::{Call, vectored};

/// Alignment of memory that satisfies every file system for direct access.
const ALIGNED: usize = 4096;

/// What an image is. Never found out by looking: a guest could have written what is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The disk's bytes.
    Raw,
    /// QEMU's format, version 2 or 3.
    Qcow2,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the image into guest memory.
    Read,
    /// From guest memory into the image.
    Write,
}

/// An image that is open. Its length is fixed.
pub struct Image {
    content: Content,
    len: u64,
    /// Bytes in whose multiples requests are made.
    block: u32,
    readonly: bool,
    read: Traffic,
    written: Traffic,
}

enum Content {
    Raw { file: File, direct: bool },
    Qcow2(FormatAccess<imago::file::File>),
}

/// How the file of an image is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Opened {
    /// For reading alone.
    pub readonly: bool,
    /// Past the host's page cache.
    pub direct: bool,
}

impl Image {
    /// Takes a regular file or block device. Reads and writes of it wait from here on (no `O_NONBLOCK`).
    pub fn new(mut file: File, format: Format, opened: Opened) -> Result<Self, ImageError> {
        let Opened { readonly, direct } = opened;
        let kind = file.metadata().map_err(ImageError::Length)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(ImageError::Kind);
        }
        // Whoever opened it so that the opening does not wait is done: an answer that says to come again would be for nobody.
        let flags = fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags - OFlags::NONBLOCK));
        flags.map_err(|error| ImageError::Flags(error.into()))?;
        let block = if direct { direct_block(&file) } else { SECTOR };
        let (content, len) = match format {
            Format::Raw => {
                let len = file.seek(SeekFrom::End(0)).map_err(ImageError::Length)?;
                (Content::Raw { file, direct }, len)
            }
            Format::Qcow2 => {
                let len = file.seek(SeekFrom::End(0)).map_err(ImageError::Length)?;
                if let Some(header) = Header::read(&file) {
                    header.check(len)?;
                }
                let storage = imago::file::File::try_from(file).map_err(ImageError::Length)?;
                let builder = Qcow2::<imago::file::File>::builder(storage).write(!readonly);
                let image = builder.open(DenyImplicitOpenGate::default()).map_err(ImageError::Qcow2)?;
                let access = FormatAccess::new(image);
                let len = access.size();
                (Content::Qcow2(access), len)
            }
        };
        if len < u64::from(block) {
            return Err(ImageError::Small { len, block });
        }
        Ok(Self { content, len, block, readonly, read: Traffic::default(), written: Traffic::default() })
    }

    /// Bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.len
    }

    /// Bytes of a block, 512 or more: what a driver should read and write at once at least.
    #[must_use]
    pub const fn block(&self) -> u32 {
        self.block
    }

    /// Whether nothing may be written.
    #[must_use]
    pub const fn readonly(&self) -> bool {
        self.readonly
    }

    /// Reads that guests have asked for and got.
    #[must_use]
    pub const fn read(&self) -> &Traffic {
        &self.read
    }

    /// Writes that guests have asked for, carried out.
    #[must_use]
    pub const fn written(&self) -> &Traffic {
        &self.written
    }

    /// A request of a guest is carried out.
    pub(super) fn count(&self, moved: Option<(Direction, u32)>) {
        match moved {
            Some((Direction::Read, bytes)) => self.read.add(bytes.into()),
            Some((Direction::Write, bytes)) => self.written.add(bytes.into()),
            None => {}
        }
    }

    /// The file whose bytes are the disk's, if the image has no format of its own.
    pub(super) const fn raw(&self) -> Option<&File> {
        match &self.content {
            Content::Raw { file, .. } => Some(file),
            Content::Qcow2(_) => None,
        }
    }

    /// Whether the file of a raw image can be read into and written from `memory` as it is.
    pub(super) fn takes(&self, memory: &[VolatileSlice<'_>]) -> bool {
        !matches!(self.content, Content::Raw { direct: true, .. }) || memory.iter().all(aligned)
    }

    /// Makes all completed writes durable.
    pub(super) fn flush(&self) -> io::Result<()> {
        match &self.content {
            Content::Raw { file, .. } => file.sync_data(),
            Content::Qcow2(image) => {
                image.flush()?;
                image.sync()
            }
        }
    }

    /// Gives `len` bytes at `offset` back; what is read there later is anything. Ends with [`io::ErrorKind::Interrupted`] as soon
    /// as `stopped`.
    pub(super) fn discard(&self, offset: u64, len: u64, stopped: impl Fn() -> bool) -> io::Result<()> {
        in_spans(offset, len, stopped, |offset, len| match &self.content {
            Content::Raw { file, .. } => {
                match fallocate(file, how_to_discard(), offset, len) {
                    // Advice that nobody can follow is followed.
                    Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) | Ok(()) => Ok(()),
                    Err(error) => Err(error.into()),
                }
            }
            Content::Qcow2(image) => image.write_zeroes(offset, len),
        })
    }

    /// Makes `len` bytes at `offset` read as zeros. With `unmap` their space may be given back. Ends with
    /// [`io::ErrorKind::Interrupted`] as soon as `stopped`.
    pub(super) fn write_zeroes(&self, offset: u64, len: u64, unmap: bool, stopped: impl Fn() -> bool) -> io::Result<()> {
        let file = match &self.content {
            Content::Raw { file, .. } => file,
            Content::Qcow2(image) => return in_spans(offset, len, stopped, |offset, len| image.write_zeroes(offset, len)),
        };
        match in_spans(offset, len, &stopped, |offset, len| Ok(fallocate(file, how_to_zero(unmap), offset, len)?)) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {}
            done => return done,
        }
        let zeros = Bounce::new(usize::try_from(len).unwrap_or(usize::MAX).min(1 << 20))?;
        let mut done = 0;
        while done < len {
            if stopped() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let part = zeros.slice(usize::try_from(len - done).unwrap_or(usize::MAX).min(zeros.len()))?;
            match vectored(file.as_fd(), Call::WriteAt(offset + done), &[part]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(moved) => done += moved as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Moves as many bytes as `memory` has, from or to `offset` of the image. Ends with
    /// [`io::ErrorKind::Interrupted`] as soon as `stopped`.
    pub(super) fn transfer(
        &self,
        direction: Direction,
        memory: &[VolatileSlice<'_>],
        offset: u64,
        stopped: impl Fn() -> bool,
    ) -> io::Result<()> {
        match &self.content {
            Content::Raw { file, .. } if !self.takes(memory) => bounced(file, direction, memory, offset, stopped),
            Content::Raw { file, .. } => transfer(file, direction, memory, offset, stopped),
            Content::Qcow2(image) => qcow2(image, direction, memory, offset, stopped),
        }
    }
}

/// How the space of a part of a raw image is given back.
pub(super) fn how_to_discard() -> FallocateFlags {
    FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
}

/// How a part of a raw image is made to read as zeros.
pub(super) fn how_to_zero(unmap: bool) -> FallocateFlags {
    FallocateFlags::KEEP_SIZE | if unmap { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE }
}

fn qcow2(
    image: &FormatAccess<imago::file::File>,
    direction: Direction,
    memory: &[VolatileSlice<'_>],
    offset: u64,
    stopped: impl Fn() -> bool,
) -> io::Result<()> {
    in_pieces(memory, offset, stopped, |piece, offset| {
        match direction {
            Direction::Read => {
                let (vector, _guard) = IoVectorMut::from_volatile_slice(piece);
                image.readv(vector, offset)?;
            }
            Direction::Write => {
                let (vector, _guard) = IoVector::from_volatile_slice(piece);
                image.writev(vector, offset)?;
            }
        }
        Ok(bytes(piece))
    })
}

fn transfer(
    file: &File,
    direction: Direction,
    memory: &[VolatileSlice<'_>],
    offset: u64,
    stopped: impl Fn() -> bool,
) -> io::Result<()> {
    in_pieces(memory, offset, stopped, |piece, offset| {
        let call = match direction {
            Direction::Read => Call::ReadAt(offset),
            Direction::Write => Call::WriteAt(offset),
        };
        match vectored(file.as_fd(), call, piece) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            moved => moved,
        }
    })
}

/// Moves bytes by way of aligned memory: files that are open past the page cache take no other.
fn bounced(
    file: &File,
    direction: Direction,
    memory: &[VolatileSlice<'_>],
    offset: u64,
    stopped: impl Fn() -> bool,
) -> io::Result<()> {
    let bounce = Bounce::new(bytes(memory).min(BYTES))?;
    in_pieces(memory, offset, &stopped, |piece, offset| {
        let between = bounce.slice(bytes(piece))?;
        let copy = |to_guest: bool| {
            let mut at = 0;
            for slice in piece {
                let Ok(part) = between.subslice(at, slice.len()) else { continue };
                if to_guest {
                    part.copy_to_volatile_slice(*slice);
                } else {
                    slice.copy_to_volatile_slice(part);
                }
                at += slice.len();
            }
        };
        if direction == Direction::Write {
            copy(false);
        }
        transfer(file, direction, &[between], offset, &stopped)?;
        if direction == Direction::Read {
            copy(true);
        }
        Ok(between.len())
    })
}

/// Has `carry` move all of `memory`, from or to `offset` of an image, in pieces of one system call. It says how many bytes of
/// a piece it moved. Ends with [`io::ErrorKind::Interrupted`] as soon as `stopped`.
fn in_pieces<'m>(
    memory: &[VolatileSlice<'m>],
    mut offset: u64,
    stopped: impl Fn() -> bool,
    mut carry: impl FnMut(&[VolatileSlice<'m>], u64) -> io::Result<usize>,
) -> io::Result<()> {
    let mut left = Left::new(memory);
    let mut piece = Vec::new();
    loop {
        left.batch(&mut piece);
        if piece.is_empty() {
            return Ok(());
        }
        if stopped() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let moved = carry(&piece, offset)?;
        left.advance(moved);
        offset += u64::try_from(moved).unwrap_or(u64::MAX);
    }
}

/// Has `each` do something with `len` bytes from `offset` on, in spans that a stop may wait for. Ends with
/// [`io::ErrorKind::Interrupted`] as soon as `stopped`.
fn in_spans(
    mut offset: u64,
    mut len: u64,
    stopped: impl Fn() -> bool,
    mut each: impl FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    while len > 0 {
        if stopped() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let span = len.min(SPAN);
        each(offset, span)?;
        (offset, len) = (offset + span, len - span);
    }
    Ok(())
}

fn bytes(slices: &[VolatileSlice<'_>]) -> usize {
    slices.iter().map(VolatileSlice::len).sum()
}

fn aligned(slice: &VolatileSlice<'_>) -> bool {
    let sector = SECTOR as usize;
    slice.ptr_guard().as_ptr().addr().is_multiple_of(sector) && slice.len().is_multiple_of(sector)
}

/// Bytes in whose multiples a file that is open past the page cache is read and written.
fn direct_block(file: &File) -> u32 {
    let mut size: libc::c_int = 0;
    // SAFETY: the call writes one int; on what is no block device it fails and writes nothing.
    let known = unsafe { libc::ioctl(file.as_raw_fd(), libc::BLKSSZGET, &raw mut size) } == 0;
    let size = if known { u32::try_from(size).unwrap_or(SECTOR) } else { SECTOR };
    size.clamp(SECTOR, 4096)
}

/// Memory of this process, aligned for direct access, all zeros at first.
struct Bounce {
    memory: NonNull<u8>,
    layout: Layout,
}

impl Bounce {
    fn new(len: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(len.max(1), ALIGNED).map_err(io::Error::other)?;
        // SAFETY: the layout has at least one byte.
        let memory = unsafe { alloc_zeroed(layout) };
        let memory = NonNull::new(memory).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { memory, layout })
    }

    fn len(&self) -> usize {
        self.layout.size()
    }

    fn slice(&self, len: usize) -> io::Result<VolatileSlice<'_>> {
        if len > self.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the memory is this value's, lives as long as the borrow, and is reached by such slices alone.
        Ok(unsafe { VolatileSlice::new(self.memory.as_ptr(), len) })
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no slice of it is left.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

/// What is looked at in the header of a qcow2 image before it is opened (QEMU: docs/interop/qcow2.txt).
struct Header {
    /// `crypt_method`: 0 for an image that is not encrypted.
    encryption: u32,
    /// Where the last table ends that the header names.
    end_of_tables: u64,
}

impl Header {
    /// `None` for one that is none.
    fn read(file: &File) -> Option<Self> {
        let mut header = [0; 56];
        file.read_exact_at(&mut header, 0).ok()?;
        if !header.starts_with(b"QFI\xfb") {
            return None;
        }
        let word = |at: usize| Some(u32::from_be_bytes(header.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_be_bytes(header.get(at..at + 8)?.try_into().ok()?));
        let mapping = long(40)?.saturating_add(8 * u64::from(word(36)?));
        // Of the counts of references the last cluster may be written in part.
        let end_of_tables = mapping.max(long(48)?.saturating_add(8));
        Some(Self { encryption: word(32)?, end_of_tables })
    }

    /// Whether an image of `len` bytes can have it.
    const fn check(&self, len: u64) -> Result<(), ImageError> {
        match self {
            Self { encryption: 1.., .. } => Err(ImageError::Encrypted { method: self.encryption }),
            Self { end_of_tables, .. } if *end_of_tables > len => Err(ImageError::Cut { len, needed: *end_of_tables }),
            _ => Ok(()),
        }
    }
}

/// An image that cannot be a disk.
#[derive(Debug, Error)]
pub enum ImageError {
    /// A pipe, a folder.
    #[error("it is no regular file or block device")]
    Kind,
    /// Not a file of known length.
    #[error("cannot find its length")]
    Length(#[source] io::Error),
    /// Its flags.
    #[error("cannot have reads of it wait")]
    Flags(#[source] io::Error),
    /// Not of the format.
    #[error("it is no qcow2 image that can be used: backing and data files of its own are not opened")]
    Qcow2(#[source] io::Error),
    /// Nobody here has a key.
    #[error(
        "it is encrypted (method {method}{}), which is not supported: decrypt it with qemu-img convert",
        match method { 1 => ", AES", 2 => ", LUKS", _ => "" }
    )]
    Encrypted {
        /// `crypt_method` of its header.
        method: u32,
    },
    /// Less than there was.
    #[error("it has been cut off: it ends at byte {len}, and its tables reach to byte {needed}")]
    Cut {
        /// Bytes.
        len: u64,
        /// Where the last table ends.
        needed: u64,
    },
    /// Nothing to show.
    #[error("it has {len} bytes, and a disk needs at least {block}")]
    Small {
        /// Bytes.
        len: u64,
        /// The least.
        block: u32,
    },
}

#[cfg(test)]
mod tests;
