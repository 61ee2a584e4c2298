//! Decides how a bzImage is loaded: where its 64-bit part lies in the file, where it goes, where it is entered.
//!
//! Source: linux: Documentation/arch/x86/boot.rst. Knows nothing about files; the caller passes the first bytes.

use crate::memory_map::Range;

use super::bytes::{get, put};
use super::layout;

/// Offset of the setup header in the file and in the zero page.
pub const HEADER_OFFSET: usize = 0x1F1;
/// How many bytes from the start of a file [`SetupHeader::parse`] can make use of.
pub const HEADER_END: usize = 0x290;

/// Offsets in the file, which are those in the zero page.
mod at {
    pub const SETUP_SECTS: usize = 0x1F1;
    pub const SYSSIZE: usize = 0x1F4;
    pub const BOOT_FLAG: usize = 0x1FE;
    pub const JUMP_LEN: usize = 0x201;
    pub const MAGIC: usize = 0x202;
    pub const VERSION: usize = 0x206;
    pub const LOADFLAGS: usize = 0x211;
    pub const INITRD_ADDR_MAX: usize = 0x22C;
    pub const KERNEL_ALIGNMENT: usize = 0x230;
    pub const RELOCATABLE: usize = 0x234;
    pub const XLOADFLAGS: usize = 0x236;
    pub const CMDLINE_SIZE: usize = 0x238;
    pub const PREF_ADDRESS: usize = 0x258;
    pub const INIT_SIZE: usize = 0x260;
}

const BOOT_FLAG: u16 = 0xAA55;
const MAGIC: [u8; 4] = *b"HdrS";
/// The first protocol with `xloadflags`, so the first whose images say whether they can be entered in 64-bit mode.
const VERSION_MIN: u16 = 0x020C;
/// The version a made-up header names: it has every field used here and no `kernel_info`.
const VERSION_ELF: u16 = 0x020E;
const LOADED_HIGH: u8 = 1 << 0;
const XLF_KERNEL_64: u16 = 1 << 0;
const SECTOR: u64 = 512;
/// From the load address to the 64-bit entry point.
const ENTRY_64: u64 = 0x200;
/// The longest command line Linux keeps on x86, without the terminating zero.
const CMDLINE_MAX: u32 = 2047;

/// The setup header of a bzImage, or a made-up one for an ELF image that is entered by the same protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetupHeader {
    /// A zero page with nothing but the header in it.
    page: [u8; HEADER_END],
    /// First offset after the header.
    end: usize,
}

/// Where a bzImage goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Offset in the file of what is loaded; it goes on to the end of the file.
    pub file_offset: u64,
    /// Address of the first byte loaded.
    pub load: u64,
    /// Address the first processor enters at in 64-bit mode.
    pub entry: u64,
    /// All memory the kernel uses before it has an allocator.
    pub memory: Range,
}

impl SetupHeader {
    /// Whether a file that starts with these bytes is a Linux kernel with a setup header. Nothing else is checked.
    #[must_use]
    pub fn is_present(image: &[u8]) -> bool {
        get(image, at::BOOT_FLAG).map(u16::from_le_bytes) == Some(BOOT_FLAG) && get(image, at::MAGIC) == Some(MAGIC)
    }

    /// Reads the header from the first [`HEADER_END`] bytes of a file, or more.
    ///
    /// # Errors
    /// If the bytes are not a bzImage that can be entered in 64-bit mode.
    pub fn parse(image: &[u8]) -> Result<SetupHeader, BzImageError> {
        if !SetupHeader::is_present(image) {
            return Err(BzImageError::NoHeader);
        }
        let version = get(image, at::VERSION).map_or(0, u16::from_le_bytes);
        if version < VERSION_MIN {
            return Err(BzImageError::OldProtocol { major: version >> 8, minor: version & 0xFF });
        }
        let end = image.get(at::JUMP_LEN).map_or(0, |jump| at::MAGIC + usize::from(*jump)).min(HEADER_END);
        let header = image.get(HEADER_OFFSET..end).ok_or(BzImageError::Truncated { bytes: image.len(), needed: end })?;
        if end < at::INIT_SIZE + 4 {
            return Err(BzImageError::ShortHeader { end });
        }
        let mut page = [0; HEADER_END];
        put(&mut page, HEADER_OFFSET, header);
        let header = SetupHeader { page, end };
        if header.page[at::LOADFLAGS] & LOADED_HIGH == 0 {
            return Err(BzImageError::LoadedLow);
        }
        if header.u16(at::XLOADFLAGS) & XLF_KERNEL_64 == 0 {
            return Err(BzImageError::No64BitEntry);
        }
        Ok(header)
    }

    /// The header for an ELF64 kernel, which has none of its own.
    #[must_use]
    pub fn for_elf() -> SetupHeader {
        let mut page = [0; HEADER_END];
        put(&mut page, at::BOOT_FLAG, &BOOT_FLAG.to_le_bytes());
        put(&mut page, at::MAGIC, &MAGIC);
        put(&mut page, at::VERSION, &VERSION_ELF.to_le_bytes());
        put(&mut page, at::LOADFLAGS, &[LOADED_HIGH]);
        put(&mut page, at::INITRD_ADDR_MAX, &0x7FFF_FFFFu32.to_le_bytes());
        put(&mut page, at::KERNEL_ALIGNMENT, &0x20_0000u32.to_le_bytes());
        put(&mut page, at::XLOADFLAGS, &XLF_KERNEL_64.to_le_bytes());
        put(&mut page, at::CMDLINE_SIZE, &CMDLINE_MAX.to_le_bytes());
        SetupHeader { page, end: at::INIT_SIZE + 4 }
    }

    /// Where the image of `file_len` bytes goes: at `requested` if given, else where it prefers.
    ///
    /// # Errors
    /// If the file ends before the part to load, or the kernel cannot be at the requested address.
    pub fn place(&self, file_len: u64, requested: Option<u64>) -> Result<Placement, BzImageError> {
        let sectors = match self.page[at::SETUP_SECTS] {
            0 => 4,
            sectors => u64::from(sectors),
        };
        let file_offset = (sectors + 1) * SECTOR;
        let needed = file_offset + (u64::from(self.u32(at::SYSSIZE)) * 16).max(ENTRY_64 + 1);
        if file_len < needed {
            return Err(BzImageError::FileTooShort { file_len, needed });
        }
        let preferred = self.u64(at::PREF_ADDRESS);
        let load = requested.unwrap_or(preferred);
        let alignment = u64::from(self.u32(at::KERNEL_ALIGNMENT)).max(1);
        if load != preferred {
            if self.page[at::RELOCATABLE] == 0 {
                return Err(BzImageError::NotRelocatable { load, preferred });
            }
            if !load.is_multiple_of(alignment) {
                return Err(BzImageError::Misaligned { load, alignment });
            }
        }
        let memory = Range::sized(load, u64::from(self.u32(at::INIT_SIZE)).max(file_len - file_offset));
        if load < layout::HIGH_MEMORY || memory.end > crate::memory_map::LOW_RAM_END {
            return Err(BzImageError::OutOfReach { memory });
        }
        Ok(Placement { file_offset, load, entry: load + ENTRY_64, memory })
    }

    /// Highest address an initial RAM disk may reach.
    #[must_use]
    pub fn initrd_addr_max(&self) -> u64 {
        u64::from(self.u32(at::INITRD_ADDR_MAX))
    }

    /// Longest command line in bytes, without the terminating zero.
    #[must_use]
    pub fn cmdline_max(&self) -> u32 {
        self.u32(at::CMDLINE_SIZE)
    }

    /// The header's bytes, to be copied to [`HEADER_OFFSET`] of the zero page.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.page.get(HEADER_OFFSET..self.end).unwrap_or_default()
    }

    fn u16(&self, offset: usize) -> u16 {
        get(&self.page, offset).map_or(0, u16::from_le_bytes)
    }

    fn u32(&self, offset: usize) -> u32 {
        get(&self.page, offset).map_or(0, u32::from_le_bytes)
    }

    fn u64(&self, offset: usize) -> u64 {
        get(&self.page, offset).map_or(0, u64::from_le_bytes)
    }
}

/// Why a bzImage cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BzImageError {
    /// The magic numbers are absent.
    #[error("no Linux setup header: 0xaa55 at offset 0x1fe and `HdrS` at 0x202 were looked for")]
    NoHeader,
    /// The kernel predates the 64-bit entry.
    #[error("boot protocol {major}.{minor:02} is too old: 2.12 or later is needed, that is Linux 3.8 or later")]
    OldProtocol {
        /// Major version.
        major: u16,
        /// Minor version.
        minor: u16,
    },
    /// The bytes end inside the header.
    #[error("the kernel file is truncated: {bytes} bytes of a setup header that ends at {needed}")]
    Truncated {
        /// Bytes there are.
        bytes: usize,
        /// Bytes it takes.
        needed: usize,
    },
    /// The header says it ends before the fields that its version has.
    #[error("the setup header ends at {end:#x}, before the fields of its own version: the kernel file is damaged")]
    ShortHeader {
        /// Offset of its end.
        end: usize,
    },
    /// The kernel is a zImage.
    #[error("the kernel loads below 1 MiB (zImage): only bzImage is supported")]
    LoadedLow,
    /// The kernel has no 64-bit entry point.
    #[error("the kernel has no 64-bit entry point (xloadflags bit 0): a 64-bit kernel is needed")]
    No64BitEntry,
    /// The file is shorter than its header says.
    #[error("the kernel file is truncated: it has {file_len} bytes, its header says {needed}")]
    FileTooShort {
        /// Bytes of the file.
        file_len: u64,
        /// Bytes it takes.
        needed: u64,
    },
    /// Another address than the preferred one is asked for.
    #[error("the kernel is not relocatable: it cannot be at {load:#x}, only at {preferred:#x}")]
    NotRelocatable {
        /// Address asked for.
        load: u64,
        /// Address it was built for.
        preferred: u64,
    },
    /// The address asked for is not aligned.
    #[error("load address {load:#x} is not a multiple of the kernel's alignment {alignment:#x}")]
    Misaligned {
        /// Address asked for.
        load: u64,
        /// Alignment in bytes.
        alignment: u64,
    },
    /// The kernel would leave the RAM it can be loaded into.
    #[error("the kernel would take {memory}: it must lie between 1 MiB and 2 GiB")]
    OutOfReach {
        /// The addresses.
        memory: Range,
    },
}

#[cfg(test)]
pub(super) mod tests;
