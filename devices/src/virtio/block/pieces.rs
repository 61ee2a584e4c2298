//! How much of a request's memory one system call moves.

use vm_memory::VolatileSlice;

use crate::virtio::vectored::SLICES;

/// Bytes of one system call: a stop need not wait longer than for these.
pub(super) const BYTES: usize = 16 << 20;

/// Bytes that are discarded or made zero at once. An image with a format of its own, or a device, may have to write them.
pub(super) const SPAN: u64 = 16 << 20;

/// The part of a list of slices that is still to do.
pub(super) struct Left<S> {
    slices: S,
    /// Slices that are done.
    done: usize,
    /// Bytes of the next one that are done.
    skip: usize,
}

impl<'m, S: AsRef<[VolatileSlice<'m>]>> Left<S> {
    /// All of them.
    pub(super) const fn new(slices: S) -> Self {
        Self { slices, done: 0, skip: 0 }
    }

    fn rest(&self) -> &[VolatileSlice<'m>] {
        self.slices.as_ref().get(self.done..).unwrap_or_default()
    }

    /// Fills `batch` with what the next system call should move.
    pub(super) fn batch(&self, batch: &mut Vec<VolatileSlice<'m>>) {
        batch.clear();
        let (mut skip, mut room) = (self.skip, BYTES);
        for slice in self.rest().iter().filter(|slice| !slice.is_empty()).take(SLICES) {
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

    /// Bytes that are left.
    pub(super) fn bytes(&self) -> u64 {
        let rest: u64 = self.rest().iter().map(|slice| slice.len() as u64).sum();
        rest.saturating_sub(self.skip as u64)
    }

    /// So many bytes were moved.
    pub(super) fn advance(&mut self, moved: usize) {
        self.skip += moved;
        while let Some(first) = self.rest().first().map(VolatileSlice::len)
            && self.skip >= first
        {
            self.skip -= first;
            self.done += 1;
        }
    }

    /// Whether nothing is left.
    pub(super) fn is_done(&self) -> bool {
        self.rest().is_empty()
    }
}
