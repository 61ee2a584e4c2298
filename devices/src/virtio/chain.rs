//! Where in guest memory the parts of a descriptor chain lie, and how bytes are taken from them and put there. A chain is the
//! guest's word: one that makes no sense has no parts.

use std::ops::Deref;

use virtio_queue::DescriptorChain;
use vm_memory::guest_memory::Permissions;
use vm_memory::{Bytes, GuestMemory, GuestMemoryMmap, VolatileSlice};

/// The memory of a request, without empty slices.
pub(crate) struct Buffers<'m> {
    /// What the driver wrote, in order.
    pub(crate) readable: Vec<VolatileSlice<'m>>,
    /// Where the device writes, in order.
    pub(crate) writable: Vec<VolatileSlice<'m>>,
    /// Every descriptor before the last led to memory.
    pub(crate) whole: bool,
}

impl<'m> Buffers<'m> {
    /// `None` for a chain that breaks off, that has readable parts after writable ones or whose last part is not in guest
    /// memory: there is no telling where the answer should go.
    pub(crate) fn of<M>(chain: DescriptorChain<M>, memory: &'m GuestMemoryMmap) -> Option<Self>
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
pub(crate) fn total(slices: &[VolatileSlice<'_>]) -> Option<usize> {
    slices.iter().try_fold(0_usize, |sum, slice| sum.checked_add(slice.len()))
}

/// Takes the last byte off.
pub(crate) fn split_last<'m>(slices: &mut Vec<VolatileSlice<'m>>) -> Option<VolatileSlice<'m>> {
    let last = slices.pop()?;
    let (front, byte) = last.split_at(last.len().checked_sub(1)?).ok()?;
    if !front.is_empty() {
        slices.push(front);
    }
    Some(byte)
}

/// Takes the first `N` bytes off, which may lie in several parts. `None` if there are fewer.
pub(crate) fn take<const N: usize>(slices: &mut Vec<VolatileSlice<'_>>) -> Option<[u8; N]> {
    let mut taken = [0; N];
    let mut left = taken.as_mut_slice();
    for slice in slices.iter_mut() {
        let (part, rest) = left.split_at_mut(slice.len().min(left.len()));
        slice.read_slice(part, 0).ok()?;
        *slice = slice.offset(part.len()).ok()?;
        left = rest;
    }
    if !left.is_empty() {
        return None;
    }
    slices.retain(|slice| !slice.is_empty());
    Some(taken)
}

/// Writes `data` over `slices`; how many bytes, or `None` if they have no room for it.
pub(crate) fn scatter(data: &[u8], slices: &[VolatileSlice<'_>]) -> Option<u32> {
    let mut left = data;
    for slice in slices {
        let (part, rest) = left.split_at(slice.len().min(left.len()));
        slice.write_slice(part, 0).ok()?;
        left = rest;
    }
    left.is_empty().then(|| u32::try_from(data.len()).unwrap_or(u32::MAX))
}
