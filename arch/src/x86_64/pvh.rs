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
    let mut bytes = Vec::with_capacity(
        START_INFO_SIZE + modules * MODULE_SIZE + info.memmap.len() * MEMMAP_ENTRY_SIZE,
    );

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
