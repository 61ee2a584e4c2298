//! Moves bytes between a disk image and guest memory, without a copy in between. Knows nothing of requests.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;

use vm_memory::VolatileSlice;

use crate::virtio::vectored::{Call, SLICES, vectored};

/// Bytes of one system call: a stop need not wait longer than for these.
const BYTES: usize = 16 << 20;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the image into guest memory.
    Read,
    /// From guest memory into the image.
    Write,
}

/// A raw disk image.
#[derive(Debug)]
pub(super) struct Image {
    file: File,
    len: u64,
}

impl Image {
    /// Takes a file or block device as it is; its length is fixed from then on.
    pub(super) fn new(mut file: File) -> io::Result<Self> {
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a regular file nor a block device"));
        }
        let len = file.seek(SeekFrom::End(0))?;
        Ok(Self { file, len })
    }

    /// Bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Makes all completed writes durable.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Moves as many bytes as `memory` has, from or to `offset` of the image. Ends with
    /// [`io::ErrorKind::Interrupted`] as soon as `stopped`.
    pub(super) fn transfer(
        &self,
        direction: Direction,
        memory: &[VolatileSlice<'_>],
        mut offset: u64,
        stopped: impl Fn() -> bool,
    ) -> io::Result<()> {
        let mut left = Left { slices: memory, skip: 0 };
        let mut batch = Vec::new();
        loop {
            left.batch(&mut batch);
            if batch.is_empty() {
                return Ok(());
            }
            if stopped() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let call = match direction {
                Direction::Read => Call::ReadAt(offset),
                Direction::Write => Call::WriteAt(offset),
            };
            match vectored(self.file.as_fd(), call, &batch) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(moved) => {
                    left.advance(moved);
                    offset += u64::try_from(moved).unwrap_or(u64::MAX);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// The part of a list of slices that is still to do.
struct Left<'a, 'm> {
    slices: &'a [VolatileSlice<'m>],
    /// Bytes of the first slice that are done.
    skip: usize,
}

impl<'m> Left<'_, 'm> {
    /// Fills `batch` with what the next system call should move.
    fn batch(&self, batch: &mut Vec<VolatileSlice<'m>>) {
        batch.clear();
        let (mut skip, mut room) = (self.skip, BYTES);
        for slice in self.slices.iter().filter(|slice| !slice.is_empty()).take(SLICES) {
            let rest = slice.offset(skip).ok().and_then(|rest| rest.subslice(0, rest.len().min(room)).ok());
            skip = 0;
            let Some(rest) = rest else { break };
            room -= rest.len();
            batch.push(rest);
            if room == 0 {
                break;
            }
        }
    }

    fn advance(&mut self, moved: usize) {
        self.skip += moved;
        while let Some((first, rest)) = self.slices.split_first()
            && self.skip >= first.len()
        {
            self.skip -= first.len();
            self.slices = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use vm_memory::{Bytes, VolatileMemory};

    type MmapRegion = vm_memory::MmapRegion<()>;

    fn image(content: &[u8]) -> Image {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        Image::new(file).unwrap()
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n % 253).try_into().unwrap()).collect()
    }

    fn content(memory: &MmapRegion, at: usize, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        memory.get_slice(at, len).unwrap().read_slice(&mut data, 0).unwrap();
        data
    }

    #[test]
    fn scattered_slices_are_filled_in_order() {
        let memory = MmapRegion::new(1 << 20).unwrap();
        let image = image(&pattern(8192));
        let slices: Vec<_> = [(0, 100), (5000, 0), (7000, 1), (9000, 411)]
            .map(|(at, len)| memory.get_slice(at, len).unwrap())
            .into_iter()
            .collect();
        image.transfer(Direction::Read, &slices, 512, || false).unwrap();
        let got = [content(&memory, 0, 100), content(&memory, 7000, 1), content(&memory, 9000, 411)].concat();
        assert_eq!(got, pattern(8192)[512..1024]);
    }

    #[test]
    fn more_slices_than_one_call_takes_are_all_moved() {
        let memory = MmapRegion::new(1 << 20).unwrap();
        let image = image(&pattern(1 << 20));
        let empty = (0..2000).map(|n| (n, 0));
        let slices = empty.chain((0..3000).map(|n| (n * 100, 100)));
        let slices: Vec<_> = slices.map(|(at, len)| memory.get_slice(at, len).unwrap()).collect();
        image.transfer(Direction::Read, &slices, 0, || false).unwrap();
        assert!(content(&memory, 0, 300_000) == pattern(300_000));
    }

    #[test]
    fn large_slices_are_moved_in_pieces() {
        let memory = MmapRegion::new(40 << 20).unwrap();
        let image = image(&[]);
        image.file.set_len(40 << 20).unwrap();
        memory.get_slice(35 << 20, 4).unwrap().write_slice(b"here", 0).unwrap();
        let calls = std::cell::Cell::new(0);
        let count = || {
            calls.set(calls.get() + 1);
            false
        };
        image.transfer(Direction::Write, &[memory.get_slice(0, 40 << 20).unwrap()], 0, count).unwrap();
        assert_eq!(calls.get(), 3);
        let back = MmapRegion::new(4096).unwrap();
        image.transfer(Direction::Read, &[back.get_slice(0, 4).unwrap()], 35 << 20, || false).unwrap();
        assert_eq!(content(&back, 0, 4), b"here");
    }

    #[test]
    fn a_shrunk_image_is_an_error() {
        let memory = MmapRegion::new(4096).unwrap();
        let image = image(&pattern(1024));
        image.file.set_len(600).unwrap();
        let error = image.transfer(Direction::Read, &[memory.get_slice(0, 512).unwrap()], 512, || false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_stop_ends_a_transfer() {
        let memory = MmapRegion::new(4096).unwrap();
        let error = image(&pattern(4096)).transfer(Direction::Read, &[memory.as_volatile_slice()], 0, || true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }
}
