//! The memory that a chain of descriptors names, in order. All that a chain says is the guest's word.

use std::ops::Deref;

use virtio_queue::DescriptorChain;
use vm_memory::guest_memory::Permissions;
use vm_memory::{Bytes, GuestMemory, GuestMemoryMmap, VolatileSlice};

/// The memory of a chain, without empty slices.
pub struct Buffers<'m> {
    /// What the driver has for the device.
    pub readable: Vec<VolatileSlice<'m>>,
    /// Where the device puts what it has for the driver.
    pub writable: Vec<VolatileSlice<'m>>,
    /// Every descriptor before the last led to memory.
    pub whole: bool,
}

impl<'m> Buffers<'m> {
    /// `None` for a chain that breaks off, that has readable parts after writable ones or whose last part is not in guest
    /// memory: there is no telling where an answer should go.
    pub fn of<M>(chain: DescriptorChain<M>, memory: &'m GuestMemoryMmap) -> Option<Self>
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
            let before = list.len();
            let mut add = |slice: VolatileSlice<'m>| {
                if !slice.is_empty() {
                    list.push(slice);
                }
            };
            last_found = match GuestMemory::get_slices(memory, descriptor.addr(), len, access) {
                Ok(mut slices) => slices.all(|slice| slice.map(&mut add).is_ok()),
                Err(_) => false,
            };
            if !last_found {
                list.truncate(before);
                buffers.whole = false;
            }
        }
        (complete && last_found).then_some(buffers)
    }
}

/// Bytes of all slices; `None` if they exceed the address space.
#[must_use]
pub fn total(slices: &[VolatileSlice<'_>]) -> Option<usize> {
    slices.iter().try_fold(0_usize, |sum, slice| sum.checked_add(slice.len()))
}

/// Takes the last byte off.
pub fn split_last<'m>(slices: &mut Vec<VolatileSlice<'m>>) -> Option<VolatileSlice<'m>> {
    let last = slices.pop()?;
    let (front, byte) = last.split_at(last.len().checked_sub(1)?).ok()?;
    if !front.is_empty() {
        slices.push(front);
    }
    Some(byte)
}

/// Takes the first `N` bytes off, which may lie in several parts; `None` if there are fewer.
pub fn take<const N: usize>(slices: &mut Vec<VolatileSlice<'_>>) -> Option<[u8; N]> {
    let mut taken = [0; N];
    let count = gather(&mut taken, slices)?;
    if count < N {
        return None;
    }
    skip(slices, N)?;
    Some(taken)
}

/// Drops the first `count` bytes; `None` if there are fewer.
pub fn skip(slices: &mut Vec<VolatileSlice<'_>>, count: usize) -> Option<()> {
    let mut left = count;
    for slice in slices.iter_mut() {
        let here = slice.len().min(left);
        *slice = slice.offset(here).ok()?;
        left -= here;
        if left == 0 {
            break;
        }
    }
    slices.retain(|slice| !slice.is_empty());
    (left == 0).then_some(())
}

/// Leaves the first `len` bytes, or all if there are fewer.
pub fn cut(slices: &mut Vec<VolatileSlice<'_>>, len: usize) {
    let mut left = len;
    for slice in slices.iter_mut() {
        let here = slice.len().min(left);
        if let Ok(front) = slice.subslice(0, here) {
            *slice = front;
        }
        left -= here;
    }
    slices.retain(|slice| !slice.is_empty());
}

/// Copies from the start of `slices` into `data`; how many bytes there were.
pub fn gather(data: &mut [u8], slices: &[VolatileSlice<'_>]) -> Option<usize> {
    let mut done = 0;
    for slice in slices {
        let (_, left) = data.split_at_mut_checked(done)?;
        let part = left.get_mut(..slice.len().min(left.len()))?;
        if part.is_empty() {
            break;
        }
        slice.read_slice(part, 0).ok()?;
        done += part.len();
    }
    Some(done)
}

/// Writes `data` over `slices`; how many bytes, or `None` if they have no room for it.
pub fn scatter(data: &[u8], slices: &[VolatileSlice<'_>]) -> Option<u32> {
    let mut left = data;
    for slice in slices {
        let (part, rest) = left.split_at(slice.len().min(left.len()));
        slice.write_slice(part, 0).ok()?;
        left = rest;
    }
    left.is_empty().then(|| u32::try_from(data.len()).unwrap_or(u32::MAX))
}
