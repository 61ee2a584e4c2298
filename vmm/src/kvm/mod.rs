//! The kernel's side of the machine: the VM, its memory slots, its interrupt routes. Only this module and
//! [`crate::vcpu`] name kvm-ioctls.

mod doorbells;
mod gsi;
mod interrupt;
mod slots;
mod vm;

pub use doorbells::{DoorbellError, Doorbells};
pub use gsi::GsiTable;
pub use interrupt::{EdgeLine, SharedIntx, SignalMsi};
pub use slots::{SlotError, Slots};
pub use vm::{KvmError, Vm};
