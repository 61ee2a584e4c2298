//! How functions reach interrupts and memory: traits that the machine implements, and fakes of `testing` for tests.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use thiserror::Error;

use crate::function::FunctionId;

/// The memory write that signals an interrupt (PCIe 6.0 6.1.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct MsiMessage {
    /// Address, as the guest programmed it.
    pub address: u64,
    /// Data.
    pub data: u32,
}

/// Sends message-signalled interrupts of emulated functions. Needs no route: a message is sent as it is.
pub trait MsiPort: Send + Sync {
    /// Delivers `message` now; a message that no interrupt controller takes is dropped.
    fn send(&self, message: MsiMessage);
    /// Takes an eventfd through which others raise an interrupt. `None` if there is no such way, or none is left: then its
    /// signals are for who holds it to see.
    fn event(&self, _event: Arc<dyn AsFd + Send + Sync>) -> Option<Box<dyn MsiEvent>> {
        None
    }
}

/// An eventfd through which others raise an interrupt. It delivers nothing at first, and nothing once it is dropped.
pub trait MsiEvent: Send + Sync {
    /// Each signal delivers `message` from here on; `None` leaves signals in the eventfd. False if that cannot be done: they
    /// are left there, too.
    fn deliver(&mut self, message: Option<MsiMessage>) -> bool;
}

/// Hands out interrupt vectors that hardware or another process can fire through an eventfd.
pub trait MsiRoutes: Send + Sync {
    /// A vector for `who`. It costs an eventfd and a route, so ask when the guest first unmasks it.
    fn vector(&self, who: FunctionId) -> Result<Box<dyn MsiVector>, MsiError>;
}

/// One vector. Dropping it gives everything back.
pub trait MsiVector: Send + Sync {
    /// Sets the message that [`MsiVector::event`] delivers.
    fn program(&mut self, message: MsiMessage) -> Result<(), MsiError>;
    /// While masked, events stay in the eventfd; the route stays. Unmasking delivers what is pending.
    fn mask(&mut self, masked: bool) -> Result<(), MsiError>;
    /// Whether an event waits behind the mask.
    fn pending(&self) -> bool;
    /// The eventfd to hand to VFIO.
    fn event(&self) -> BorrowedFd<'_>;
}

/// A function's INTx wire. Its GSI is fixed by the plan (pin, swizzle, device number).
pub trait IntxLine: Send + Sync {
    /// Asserts or deasserts. Functions that share a GSI do not disturb each other.
    fn set(&self, level: bool);
}

/// A level-triggered interrupt that hardware fires: an eventfd for the trigger and one that tells when the guest is done.
pub trait IntxEvents: Send + Sync {
    /// Signalled by the device.
    fn trigger(&self) -> BorrowedFd<'_>;
    /// Signalled by the interrupt controller at end of interrupt.
    fn resample(&self) -> BorrowedFd<'_>;
}

/// What a function has at work beside the vCPUs: threads that touch guest memory, or that count time for the guest.
pub trait Workers: Send + Sync {
    /// Has them stand still. When this returns they touch no guest memory and take nothing off a queue until they are released;
    /// what they had begun is done. Call without the function's lock, while no vCPU runs. Held twice is held once.
    fn hold(&self);
    /// Has them know of the [`Workers::hold`] that follows, without a wait: those of many functions come to rest together.
    fn call(&self) {}
    /// Lets them go on, and look at everything once that may have come meanwhile.
    fn release(&self);
}

/// An emulated function's way to guest-physical addresses: RAM and peers' BARs.
pub trait DmaPort: Send + Sync {
    /// Fills `data` from `at`. Fails while bus mastering is off or where nothing answers.
    fn read(&self, at: u64, data: &mut [u8]) -> Result<(), DmaError>;
    /// Writes `data` to `at`.
    fn write(&self, at: u64, data: &[u8]) -> Result<(), DmaError>;
}

/// A request that reached nobody.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum DmaError {
    /// The function or a bridge above it may not send requests.
    #[error("bus mastering is off")]
    BusMasterOff,
    /// Neither RAM nor a reachable BAR.
    #[error("nothing answers at {at:#x} for {len:#x} bytes")]
    Unreachable {
        /// First address.
        at: u64,
        /// Bytes.
        len: u64,
    },
}

/// An interrupt vector that cannot be had or changed.
#[derive(Debug, Error)]
pub enum MsiError {
    /// All routes are in use.
    #[error("no interrupt route is left for {who:?}: all {limit} are in use")]
    Exhausted {
        /// Who asked.
        who: FunctionId,
        /// How many there are.
        limit: u32,
    },
    /// The kernel refused.
    #[error("cannot {what}")]
    Kernel {
        /// The step.
        what: &'static str,
        /// Its reason.
        #[source]
        source: std::io::Error,
    },
}
