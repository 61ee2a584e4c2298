//! Doorbells: guest-physical addresses at which KVM signals an eventfd in place of an exit to this process.
//!
//! They have no length and no value to match, so that KVM need not decode the guest's instruction (linux:
//! virt/kvm/eventfd.c, `kvm_assign_ioeventfd`, KVM_FAST_MMIO_BUS).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use thiserror::Error;

use super::as_event;

/// The VM's doorbells.
pub struct Doorbells {
    vm: Arc<VmFd>,
    in_use: u32,
}

impl Doorbells {
    /// None yet.
    #[must_use]
    pub const fn new(vm: Arc<VmFd>) -> Self {
        Self { vm, in_use: 0 }
    }

    /// Signals `event` whenever the guest writes at `at`, where no memory slot is.
    pub fn add(&mut self, at: u64, event: BorrowedFd<'_>) -> Result<(), DoorbellError> {
        let added = self.vm.register_ioevent(&as_event(event), &IoEventAddress::Mmio(at), NoDatamatch);
        added.map_err(|error| DoorbellError { at, source: error.into() })?;
        self.in_use += 1;
        Ok(())
    }

    /// Takes away what [`Doorbells::add`] was given. The guest's accesses exit from then on.
    pub fn remove(&mut self, at: u64, event: BorrowedFd<'_>) {
        match self.vm.unregister_ioevent(&as_event(event), &IoEventAddress::Mmio(at), NoDatamatch) {
            Ok(()) => self.in_use = self.in_use.saturating_sub(1),
            Err(error) => log::error!("cannot remove the doorbell at {at:#x}: {error}"),
        }
    }

    /// How many there are.
    #[must_use]
    pub const fn in_use(&self) -> u32 {
        self.in_use
    }
}

/// A doorbell that KVM does not take.
#[derive(Debug, Error)]
#[error("KVM refuses a doorbell at {at:#x}")]
pub struct DoorbellError {
    at: u64,
    #[source]
    source: io::Error,
}
