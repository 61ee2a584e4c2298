//! Memory slots: which guest-physical ranges KVM serves from this process's memory without an exit.

use std::io;
use std::sync::Arc;

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use thiserror::Error;

/// The VM's memory slots. Numbers of removed slots are used again.
pub struct Slots {
    vm: Arc<VmFd>,
    limit: u32,
    next: u32,
    free: Vec<u32>,
    changes: u64,
}

impl Slots {
    /// No slots yet; at most `limit` at a time.
    #[must_use]
    pub const fn new(vm: Arc<VmFd>, limit: u32) -> Self {
        Self { vm, limit, next: 0, free: Vec::new(), changes: 0 }
    }

    /// Maps `len` bytes of this process at `host` to `at`; returns the slot's number.
    ///
    /// # Safety
    /// The host range stays mapped, and nothing but guest-safe memory, until [`Slots::remove`] or the end of the VM.
    pub unsafe fn add(&mut self, at: u64, len: u64, host: u64) -> Result<u32, SlotError> {
        // SAFETY: upheld by the caller.
        unsafe { self.take(at, len, host, 0) }
    }

    /// As [`Slots::add`], for memory that the guest cannot write: its writes exit.
    ///
    /// # Safety
    /// As [`Slots::add`].
    pub unsafe fn add_read_only(&mut self, at: u64, len: u64, host: u64) -> Result<u32, SlotError> {
        // SAFETY: upheld by the caller.
        unsafe { self.take(at, len, host, KVM_MEM_READONLY) }
    }

    /// # Safety
    /// As [`Slots::add`].
    unsafe fn take(&mut self, at: u64, len: u64, host: u64, flags: u32) -> Result<u32, SlotError> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.next < self.limit => {
                self.next += 1;
                self.next - 1
            }
            None => return Err(SlotError::Exhausted { at, limit: self.limit }),
        };
        // SAFETY: upheld by the caller.
        if let Err(source) = unsafe { self.set(slot, at, len, host, flags) } {
            self.free.push(slot);
            return Err(SlotError::Refused { at, len, source });
        }
        Ok(slot)
    }

    /// Takes a slot away. The guest's accesses exit from then on.
    pub fn remove(&mut self, slot: u32) {
        // SAFETY: a slot of length 0 refers to no memory.
        if let Err(error) = unsafe { self.set(slot, 0, 0, 0, 0) } {
            log::error!("cannot remove memory slot {slot}: {error}");
            return;
        }
        self.free.push(slot);
    }

    /// How many slots are in use.
    #[must_use]
    pub fn in_use(&self) -> u32 {
        self.next.saturating_sub(u32::try_from(self.free.len()).unwrap_or(u32::MAX))
    }

    /// How many times a slot was set or removed.
    #[must_use]
    pub const fn changes(&self) -> u64 {
        self.changes
    }

    /// # Safety
    /// As [`Slots::add`].
    unsafe fn set(&mut self, slot: u32, at: u64, len: u64, host: u64, flags: u32) -> Result<(), io::Error> {
        self.changes += 1;
        let region = kvm_userspace_memory_region { slot, flags, guest_phys_addr: at, memory_size: len, userspace_addr: host };
        // SAFETY: upheld by the caller.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(io::Error::from)
    }
}

/// A range that KVM does not take.
#[derive(Debug, Error)]
pub enum SlotError {
    /// All slots are in use.
    #[error("no memory slot is left for {at:#x}: all {limit} are in use")]
    Exhausted {
        /// Guest-physical address.
        at: u64,
        /// How many there are.
        limit: u32,
    },
    /// The kernel refused.
    #[error("KVM refuses a memory slot of {len:#x} bytes at {at:#x}")]
    Refused {
        /// Guest-physical address.
        at: u64,
        /// Bytes.
        len: u64,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}
