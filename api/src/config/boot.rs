//! What the guest starts with: a kernel with its initial RAM file system and command line, or a firmware image.

use std::path::PathBuf;

/// What runs first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// An operating system kernel, started directly.
    Kernel(KernelConfig),
    /// `--firmware FILE`: a raw image that ends at 4 GiB and is entered at the reset vector.
    Firmware(PathBuf),
}

/// `--kernel`, `--initramfs`, `--cmdline`, `--load-address`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KernelConfig {
    /// ELF with a PVH note, ELF64 by the 64-bit Linux protocol, or bzImage.
    pub path: PathBuf,
    /// Initial RAM file system.
    pub initramfs: Option<PathBuf>,
    /// Kernel command line, as it is passed.
    pub cmdline: String,
    /// Guest-physical address of the kernel's first byte, instead of the one in the file. Refused before start for kernels
    /// that cannot be moved.
    pub load_address: Option<u64>,
}
