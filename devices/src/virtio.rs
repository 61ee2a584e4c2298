//! Paravirtual devices: the PCI transport of virtio 1.2 (section 4.1, modern only), and the devices on it.
//!
//! | question | module |
//! |---|---|
//! | what does the function show, and who gets an access? | [`function`] |
//! | where in the BAR is each structure? | [`layout`] |
//! | what do the common registers keep, and what does a write set off? | [`common`] |
//! | how does a device signal its driver? | [`signals`] |
//! | how are buffers taken off a queue and given back? | [`ring`], [`buffers`] |
//! | who serves a queue, and when does it stop? | [`worker`] |
//! | which kinds are there, and what ids do they have? | [`kind`] |
//! | how do accesses through configuration space reach the BAR? | [`window`] |
//! | what does a disk do with a request? | [`block`] |
//! | which memory does the guest give back? | [`balloon`] |
//! | which memory comes and goes? | [`mem`] |
//! | what does the guest print, and who types? | [`console`] |
//! | where do random numbers come from? | [`rng`] |
//! | who talks over sockets between guest and host? | [`vsock`] |
//! | how do packets come and go? | [`net`] |
//! | how does another process serve a device? | [`vhost_user`] |
//! | how fast may requests pass? | [`limit`] |
//! | how many passed? | `traffic` |
//!
//! A doorbell is an eventfd, which KVM signals without an exit to this process where it can; a worker thread takes it from
//! there and reads and writes guest memory in place. Threads live from `DRIVER_OK` to the reset, and stand still while the
//! machine is paused. Everything in a ring is the guest's word: a chain that makes no sense ends with an error or with
//! `DEVICE_NEEDS_RESET`, never with a panic or an endless loop.

pub mod balloon;
pub mod block;
pub mod buffers;
pub mod common;
pub mod console;
pub mod function;
pub mod kind;
pub mod layout;
pub mod limit;
pub mod mem;
pub mod net;
mod pages;
pub mod ring;
pub mod rng;
pub mod signals;
#[cfg(test)]
mod testing;
mod traffic;
mod vectored;
pub mod vhost_user;
pub mod vsock;
pub mod window;
pub mod worker;

pub use block::BlockError;
pub use function::{Device, Seat, Start, VirtioError, VirtioFunction};
pub use kind::Kind;
pub use ring::Memory;
pub use traffic::Traffic;

/// Feature bits of rings and transport (virtio 1.2 section 6).
pub mod feature {
    use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
    use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

    /// Not the legacy interface. Always required.
    pub const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
    /// Both sides say by index when they want to be told.
    pub const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
    /// Descriptors may point to tables of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
    /// What the transport offers for every device.
    pub const TRANSPORT: u64 = VERSION_1 | EVENT_IDX | INDIRECT_DESC;
}
