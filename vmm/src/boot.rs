//! Puts into guest memory what runs first, and says how the first vCPU enters it.

mod elf;
mod file;
mod firmware;
mod kernel;
mod load;

pub use firmware::{Firmware, FirmwareError};
pub use kernel::{Kernel, KernelError};
pub use load::{BootError, BootInputs, check_initramfs, load_kernel, put};
