//! Decides what a kernel file is, and by which protocol it is entered.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use arch::memory_map::Range;
use arch::x86_64::bzimage::{BzImageError, Placement, SetupHeader};
use thiserror::Error;

use super::elf::{self, ElfError, Layout};
use super::file::open_regular;

/// A kernel file, checked as far as possible without guest memory.
pub struct Kernel {
    /// For messages.
    pub path: PathBuf,
    /// Open for reading.
    pub file: File,
    /// What it is.
    pub format: Format,
}

/// A kind of kernel.
pub enum Format {
    /// ELF64: entered by its PVH note if it has one, else by the 64-bit Linux protocol.
    Elf {
        /// Memory and entry point.
        layout: Layout,
    },
    /// bzImage: entered by the 64-bit Linux protocol.
    BzImage {
        /// Its header.
        header: Box<SetupHeader>,
        /// Where it goes.
        placement: Placement,
    },
}

impl Kernel {
    /// Opens and identifies the file at `path`, to be loaded at `address` instead of where it wants to be.
    pub fn open(path: &Path, address: Option<u64>) -> Result<Self, KernelError> {
        let named = path.to_path_buf();
        let unreadable = |source| KernelError::Open { path: named.clone(), source };
        let (mut file, len) = open_regular(path).map_err(unreadable)?;
        if len == 0 {
            return Err(KernelError::Empty { path: named });
        }
        let mut head = Vec::with_capacity(HEAD);
        (&mut file).take(HEAD as u64).read_to_end(&mut head).map_err(unreadable)?;
        file.rewind().map_err(unreadable)?;
        let format = if elf::is_elf(&head) {
            let layout = elf::layout(&mut file).map_err(|source| KernelError::Elf { path: named.clone(), source })?;
            if let Some(address) = address.filter(|address| *address != layout.memory.start) {
                return Err(KernelError::Fixed { path: named, linked: layout.memory.start, address });
            }
            Format::Elf { layout }
        } else if SetupHeader::is_present(&head) {
            let bad = |source| KernelError::BzImage { path: named.clone(), source };
            let header = SetupHeader::parse(&head).map_err(bad)?;
            let placement = header.place(len, address).map_err(bad)?;
            Format::BzImage { header: Box::new(header), placement }
        } else {
            return Err(KernelError::Unknown { path: named, found: describe(&head) });
        };
        Ok(Self { path: named, file, format })
    }

    /// All memory that the kernel takes before it has an allocator.
    #[must_use]
    pub const fn memory(&self) -> Range {
        match &self.format {
            Format::Elf { layout } => layout.memory,
            Format::BzImage { placement, .. } => placement.memory,
        }
    }
}

/// Enough for every signature below.
const HEAD: usize = 4096;

/// What a file is that is no kernel, for the message.
fn describe(head: &[u8]) -> &'static str {
    let at = |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|rest| rest.starts_with(magic));
    match () {
        () if at(56, b"ARM\x64") => "a Linux image for 64-bit ARM",
        () if at(36, &[0x18, 0x28, 0x6F, 0x01]) => "a Linux image for 32-bit ARM",
        () if at(48, b"RISCV") => "a Linux image for RISC-V",
        () if at(0, &[0x1F, 0x8B]) => "a gzip archive: unpack it first",
        () if at(0, &[0xFD, b'7', b'z', b'X', b'Z']) => "an xz archive: unpack it first",
        () if at(0, &[0x28, 0xB5, 0x2F, 0xFD]) => "a zstd archive: unpack it first",
        () if at(0, b"070701") => "a cpio archive: it belongs to --initramfs",
        () if at(0, b"MZ") => "a PE executable without a Linux setup header",
        () if at(0, b"QFI\xfb") => "a qcow2 disk image",
        () if head.iter().all(|byte| matches!(byte, b'\t' | b'\n' | b'\r' | 0x20..=0x7E | 0x80..)) => "a text file",
        () => "data of an unknown kind",
    }
}

/// A file that is no kernel for this machine.
#[derive(Debug, Error)]
pub enum KernelError {
    /// It cannot be opened.
    #[error("cannot open the kernel {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// No bytes.
    #[error("the kernel {} is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// None of the formats.
    #[error(
        "the kernel {} is {found}; an x86-64 ELF file (vmlinux) or a bzImage (vmlinuz) is needed",
        path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        found: &'static str,
    },
    /// ELF, and unusable.
    #[error("the kernel {} cannot be used", path.display())]
    Elf {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: ElfError,
    },
    /// A bzImage, and unusable.
    #[error("the kernel {} cannot be used", path.display())]
    BzImage {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: BzImageError,
    },
    /// An ELF kernel cannot move.
    #[error(
        "the kernel {} is linked for address {linked:#x} and cannot be loaded at {address:#x}; use a relocatable bzImage, or leave the load address out",
        path.display()
    )]
    Fixed {
        /// The file.
        path: PathBuf,
        /// Where it must be.
        linked: u64,
        /// Where it was wanted.
        address: u64,
    },
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn open(bytes: &[u8], address: Option<u64>) -> Result<Kernel, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        Kernel::open(file.path(), address).map_err(|error| {
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            format!("{error}{cause}")
        })
    }

    /// An ELF64 file for `machine` with one segment of `in_memory` bytes at 1 MiB.
    fn elf(machine: u16, in_memory: u64) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 56 + 16];
        bytes[..8].copy_from_slice(&[0x7F, b'E', b'L', b'F', 2, 1, 1, 0]);
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[24..32].copy_from_slice(&0x10_0000u64.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..58].copy_from_slice(&[56, 0, 1, 0]);
        bytes[64] = 1;
        for (offset, value) in [(72, 120), (88, 0x10_0000), (96, 16), (104, in_memory)] {
            bytes[offset..offset + 8].copy_from_slice(&u64::to_le_bytes(value));
        }
        bytes
    }

    #[test]
    fn case_f3_what_was_found_and_what_is_needed_is_said() {
        let mut arm = vec![0; 64];
        arm[56..60].copy_from_slice(b"ARM\x64");
        let mut truncated = elf(62, 16);
        truncated.truncate(100);
        for (bytes, part) in [
            (b"hello\nworld\n".to_vec(), "is a text file; an x86-64 ELF file"),
            (Vec::new(), "is empty"),
            (arm, "a Linux image for 64-bit ARM"),
            (vec![0x1F, 0x8B, 8, 0], "a gzip archive: unpack it first"),
            (elf(183, 16), "an ELF file for 64-bit ARM (machine 183)"),
            (truncated, "truncated ELF file: program headers reach to byte 120, the file has 100"),
            (elf(62, 16)[..130].to_vec(), "segments reach to byte 136, the file has 130"),
            (vec![0; 4096], "data of an unknown kind"),
        ] {
            let error = open(&bytes, None).err().unwrap();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_zeroed_part_of_a_segment_counts() {
        let kernel = open(&elf(62, 0x5000), None).unwrap();
        assert_eq!(kernel.memory(), Range { start: 0x10_0000, end: 0x10_5000 });
    }

    #[test]
    fn case_f4_an_elf_kernel_is_loaded_where_it_is_linked_or_refused() {
        assert!(open(&elf(62, 16), Some(0x10_0000)).is_ok());
        let error = open(&elf(62, 16), Some(0x20_0000)).err().unwrap();
        assert!(error.contains("linked for address 0x100000 and cannot be loaded at 0x200000"), "{error}");
    }
}
