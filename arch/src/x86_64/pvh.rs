//! Builds the start information of the PVH boot protocol: one block with the module list and the memory map.
//!
//! Source: `xen/include/public/arch-x86/hvm/start_info.h`.

use crate::memory_map::Range;

use super::e820::E820Entry;

const MAGIC: u32 = 0x336E_C578;
/// The version that has a memory map.
const VERSION: u32 = 1;
const START_INFO_SIZE: usize = 56;
const MODULE_SIZE: usize = 32;
const MEMMAP_ENTRY_SIZE: usize = 24;

/// What a kernel is told.
#[derive(Clone, Copy, Debug)]
pub struct StartInfo<'a> {
    /// Address of the command line with its terminating zero, 0 if there is none.
    pub cmdline: u64,
    /// Address of the ACPI root pointer, 0 if there is none.
    pub rsdp: u64,
    /// The initial RAM disk: module 0.
    pub initrd: Option<Range>,
    /// The memory map.
    pub memmap: &'a [E820Entry],
}

/// The bytes to write at `at`, whose address goes into EBX: start information, module list, memory map.
#[must_use]
pub fn start_info(at: u64, info: &StartInfo<'_>) -> Vec<u8> {
    let modules = usize::from(info.initrd.is_some());
    let modules_at = at + START_INFO_SIZE as u64;
    let memmap_at = modules_at + (modules * MODULE_SIZE) as u64;
    let memmap_entries = u32::try_from(info.memmap.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(START_INFO_SIZE + modules * MODULE_SIZE + info.memmap.len() * MEMMAP_ENTRY_SIZE);

    bytes.extend(MAGIC.to_le_bytes());
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(0u32.to_le_bytes()); // flags
    bytes.extend((u32::from(info.initrd.is_some())).to_le_bytes());
    bytes.extend(if modules > 0 { modules_at } else { 0 }.to_le_bytes());
    bytes.extend(info.cmdline.to_le_bytes());
    bytes.extend(info.rsdp.to_le_bytes());
    bytes.extend(memmap_at.to_le_bytes());
    bytes.extend(memmap_entries.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());

    if let Some(initrd) = info.initrd {
        bytes.extend(initrd.start.to_le_bytes());
        bytes.extend(initrd.len().to_le_bytes());
        bytes.extend(0u64.to_le_bytes()); // the module's own command line
        bytes.extend(0u64.to_le_bytes());
    }
    for entry in info.memmap {
        bytes.extend(entry.range.start.to_le_bytes());
        bytes.extend(entry.range.len().to_le_bytes());
        bytes.extend(entry.kind.number().to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::e820::Kind;
    use super::*;

    const MEMMAP: [E820Entry; 2] = [
        E820Entry { range: Range { start: 0, end: 0xA_0000 }, kind: Kind::Ram },
        E820Entry { range: Range { start: 0x10_0000, end: 0x1_8000_0000 }, kind: Kind::Reserved },
    ];

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn modules_and_memory_map_follow_the_start_information() {
        let initrd = Range { start: 0x7000_0000, end: 0x7000_1234 };
        let info = StartInfo { cmdline: 0x2_0000, rsdp: 0xE_0000, initrd: Some(initrd), memmap: &MEMMAP };
        let bytes = start_info(0x6000, &info);
        assert_eq!((u32_at(&bytes, 0), u32_at(&bytes, 4), u32_at(&bytes, 8)), (0x336E_C578, 1, 0));
        assert_eq!((u32_at(&bytes, 12), u64_at(&bytes, 16)), (1, 0x6038));
        assert_eq!((u64_at(&bytes, 24), u64_at(&bytes, 32)), (0x2_0000, 0xE_0000));
        assert_eq!((u64_at(&bytes, 40), u32_at(&bytes, 48)), (0x6058, 2));
        assert_eq!((u64_at(&bytes, 56), u64_at(&bytes, 64)), (0x7000_0000, 0x1234));
        let second = 0x58 + 24;
        assert_eq!((u64_at(&bytes, second), u64_at(&bytes, second + 8)), (0x10_0000, 0x1_7FF0_0000));
        assert_eq!((u32_at(&bytes, second + 16), bytes.len()), (2, second + 24));
    }

    #[test]
    fn without_an_initial_ram_disk_there_is_no_module() {
        let info = StartInfo { cmdline: 0, rsdp: 0, initrd: None, memmap: &MEMMAP };
        let bytes = start_info(0x6000, &info);
        assert_eq!((u32_at(&bytes, 12), u64_at(&bytes, 16), u64_at(&bytes, 40)), (0, 0, 0x6038));
        assert_eq!(u64_at(&bytes, 56 + 8), 0xA_0000);
    }

    #[test]
    fn the_longest_memory_map_fits_its_place() {
        let memmap = [MEMMAP[0]; super::super::boot_params::E820_MAX];
        let initrd = Some(Range { start: 0, end: 1 });
        let bytes = start_info(0x6000, &StartInfo { cmdline: 0, rsdp: 0, initrd, memmap: &memmap });
        assert!(bytes.len() as u64 <= super::super::layout::PVH_START_INFO.len());
    }
}
