//! Builds the zero page of the Linux boot protocol and the command line.
//!
//! Source: linux: Documentation/arch/x86/zero-page.rst and boot.rst.

use crate::memory_map::{FOUR_GIB, Range};

use super::bytes::put;
use super::bzimage::{HEADER_OFFSET, SetupHeader};
use super::e820::E820Entry;
use super::layout;

/// Offsets in the zero page.
mod at {
    pub const RSDP: usize = 0x070;
    pub const EXT_RAMDISK_IMAGE: usize = 0x0C0;
    pub const EXT_RAMDISK_SIZE: usize = 0x0C4;
    pub const E820_ENTRIES: usize = 0x1E8;
    pub const TYPE_OF_LOADER: usize = 0x210;
    pub const CODE32_START: usize = 0x214;
    pub const RAMDISK_IMAGE: usize = 0x218;
    pub const RAMDISK_SIZE: usize = 0x21C;
    pub const CMD_LINE_PTR: usize = 0x228;
    pub const E820_TABLE: usize = 0x2D0;
}

/// Size of the zero page.
pub const SIZE: usize = 4096;
/// How many entries the table in the zero page holds.
pub const E820_MAX: usize = 128;
/// A boot loader without an assigned number.
const LOADER_UNDEFINED: u8 = 0xFF;

/// What goes into the zero page.
#[derive(Clone, Copy, Debug)]
pub struct BootParams<'a> {
    /// The kernel's own setup header, or a made-up one.
    pub header: &'a SetupHeader,
    /// Where the kernel is loaded.
    pub load: u64,
    /// Address of the command line, below 4 GiB.
    pub cmdline: u64,
    /// The initial RAM disk.
    pub initrd: Option<Range>,
    /// Address of the ACPI root pointer, 0 if there is none.
    pub rsdp: u64,
    /// The memory map: at most [`E820_MAX`] entries.
    pub memmap: &'a [E820Entry],
}

/// The zero page, to be written at [`layout::ZERO_PAGE`] or wherever RSI points.
///
/// # Errors
/// If the memory map is too long, or an address does not fit its field.
pub fn zero_page(params: &BootParams<'_>) -> Result<[u8; SIZE], BootParamsError> {
    let entries = u8::try_from(params.memmap.len())
        .ok()
        .filter(|entries| usize::from(*entries) <= E820_MAX)
        .ok_or(BootParamsError::MemoryMapTooLong { entries: params.memmap.len() })?;

    let mut page = [0; SIZE];
    put(&mut page, HEADER_OFFSET, params.header.bytes());
    put(&mut page, at::TYPE_OF_LOADER, &[LOADER_UNDEFINED]);
    put(&mut page, at::CODE32_START, &below_4_gib("kernel", params.load)?);
    put(&mut page, at::CMD_LINE_PTR, &below_4_gib("command line", params.cmdline)?);
    put(&mut page, at::RSDP, &params.rsdp.to_le_bytes());
    if let Some(initrd) = params.initrd {
        let (start, len) = (initrd.start.to_le_bytes(), initrd.len().to_le_bytes());
        put(&mut page, at::RAMDISK_IMAGE, &start[..4]);
        put(&mut page, at::EXT_RAMDISK_IMAGE, &start[4..]);
        put(&mut page, at::RAMDISK_SIZE, &len[..4]);
        put(&mut page, at::EXT_RAMDISK_SIZE, &len[4..]);
    }
    put(&mut page, at::E820_ENTRIES, &[entries]);
    for (slot, entry) in page[at::E820_TABLE..].chunks_exact_mut(20).zip(params.memmap) {
        put(slot, 0, &entry.range.start.to_le_bytes());
        put(slot, 8, &entry.range.len().to_le_bytes());
        put(slot, 16, &entry.kind.number().to_le_bytes());
    }
    Ok(page)
}

/// The command line as it lies in memory, with its terminating zero. `max` is the longest the kernel takes without it,
/// [`SetupHeader::cmdline_max`]; a kernel that does not say takes what fits [`layout::CMDLINE`].
///
/// # Errors
/// If it is too long or holds a zero.
pub fn cmdline(text: &str, max: Option<u32>) -> Result<Vec<u8>, BootParamsError> {
    let room = layout::CMDLINE.len() - 1;
    let max = max.map_or(room, |max| u64::from(max).min(room));
    if text.len() as u64 > max {
        return Err(BootParamsError::CmdlineTooLong { len: text.len(), max });
    }
    if let Some(at) = text.bytes().position(|byte| byte == 0) {
        return Err(BootParamsError::CmdlineZero { at });
    }
    let mut bytes = Vec::with_capacity(text.len() + 1);
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(0);
    Ok(bytes)
}

fn below_4_gib(what: &'static str, address: u64) -> Result<[u8; 4], BootParamsError> {
    u32::try_from(address).map(u32::to_le_bytes).map_err(|_| BootParamsError::AddressTooHigh { what, address })
}

/// Why a kernel cannot be told what it must know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BootParamsError {
    /// The memory map does not fit the zero page.
    #[error("a memory map of {entries} entries does not fit the zero page, which holds {E820_MAX}")]
    MemoryMapTooLong {
        /// Entries there are.
        entries: usize,
    },
    /// An address needs more than 32 bits.
    #[error("the {what} lies at {address:#x}: the boot protocol takes addresses below {FOUR_GIB:#x}")]
    AddressTooHigh {
        /// What it is the address of.
        what: &'static str,
        /// The address.
        address: u64,
    },
    /// The command line is too long.
    #[error("a command line of {len} bytes is too long: the kernel takes {max}")]
    CmdlineTooLong {
        /// Bytes of it.
        len: usize,
        /// Bytes the kernel takes.
        max: u64,
    },
    /// The command line holds a zero byte.
    #[error("the command line holds a zero byte at offset {at}, where it would end")]
    CmdlineZero {
        /// Offset of the zero.
        at: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::super::bzimage::tests::image;
    use super::super::e820::Kind;
    use super::*;

    const MEMMAP: [E820Entry; 2] = [
        E820Entry { range: Range { start: 0, end: 0xA_0000 }, kind: Kind::Ram },
        E820Entry { range: Range { start: 0xE000_0000, end: 0xF000_0000 }, kind: Kind::Reserved },
    ];

    fn params(header: &SetupHeader) -> BootParams<'_> {
        BootParams {
            header,
            load: 0x200_0000,
            cmdline: layout::CMDLINE.start,
            initrd: Some(Range { start: 0x7000_0000, end: 0x7123_4567 }),
            rsdp: layout::RSDP,
            memmap: &MEMMAP,
        }
    }

    fn u32_at(page: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(page[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn the_zero_page_holds_the_header_and_what_the_loader_adds() {
        let image = image();
        let header = SetupHeader::parse(&image).unwrap();
        let page = zero_page(&params(&header)).unwrap();
        assert_eq!(page[0x1F1..0x210], image[0x1F1..0x210]);
        assert_eq!(page[0x230..0x26C], image[0x230..0x26C]);
        assert!(page[0x26C..0x2D0].iter().all(|byte| *byte == 0), "no bytes after the header's end");
        assert_eq!(page[0x210], 0xFF);
        assert_eq!(u32_at(&page, 0x214), 0x200_0000);
        assert_eq!((u32_at(&page, 0x218), u32_at(&page, 0x21C)), (0x7000_0000, 0x123_4567));
        assert_eq!((u32_at(&page, 0xC0), u32_at(&page, 0xC4)), (0, 0));
        assert_eq!(u32_at(&page, 0x228), 0x2_0000);
        assert_eq!((u32_at(&page, 0x70), u32_at(&page, 0x74)), (0xE_0000, 0));
        assert_eq!(page[0x1E8], 2);
        assert_eq!((u32_at(&page, 0x2D8), u32_at(&page, 0x2E0)), (0xA_0000, 1));
        assert_eq!((u32_at(&page, 0x2E4), u32_at(&page, 0x2EC), u32_at(&page, 0x2F4)), (0xE000_0000, 0x1000_0000, 2));
    }

    #[test]
    fn an_elf_kernel_gets_a_header_a_kernel_recognises() {
        let header = SetupHeader::for_elf();
        let page = zero_page(&BootParams { initrd: None, ..params(&header) }).unwrap();
        assert!(SetupHeader::is_present(&page));
        assert_eq!(page[0x211], 1);
        assert_eq!((u32_at(&page, 0x218), u32_at(&page, 0x21C)), (0, 0));
        assert!(header.initrd_addr_max() > 0);
    }

    #[test]
    fn what_does_not_fit_the_zero_page_is_refused() {
        let header = SetupHeader::for_elf();
        let long = [MEMMAP[0]; E820_MAX + 1];
        assert!(zero_page(&BootParams { memmap: &long[..E820_MAX], ..params(&header) }).is_ok());
        assert_eq!(
            zero_page(&BootParams { memmap: &long, ..params(&header) }),
            Err(BootParamsError::MemoryMapTooLong { entries: 129 })
        );
        assert_eq!(
            zero_page(&BootParams { load: 1 << 32, ..params(&header) }).unwrap_err().to_string(),
            "the kernel lies at 0x100000000: the boot protocol takes addresses below 0x100000000"
        );
    }

    #[test]
    fn a_command_line_ends_with_a_zero_and_is_not_cut_silently() {
        assert_eq!(cmdline("console=ttyS0", Some(2047)).unwrap(), b"console=ttyS0\0");
        assert_eq!(cmdline("", None).unwrap(), b"\0");
        assert!(cmdline(&"x".repeat(2047), Some(2047)).is_ok());
        assert_eq!(
            cmdline(&"x".repeat(2048), Some(2047)).unwrap_err().to_string(),
            "a command line of 2048 bytes is too long: the kernel takes 2047"
        );
        assert!(cmdline(&"x".repeat(0xFFFF), None).is_ok());
        assert!(cmdline(&"x".repeat(0x1_0000), Some(u32::MAX)).is_err());
        assert_eq!(cmdline("a\0b", None), Err(BootParamsError::CmdlineZero { at: 1 }));
    }
}
