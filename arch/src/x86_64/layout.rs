//! Names where boot structures lie in guest memory. All of it is below 1 MiB, so that kernels, which load at 1 MiB or
//! above, and initial RAM disks are free of it.

use crate::memory_map::Range;

/// The global descriptor table, [`crate::x86_64::gdt`].
pub const GDT: u64 = 0x500;
/// PVH start information with its module list and memory map.
pub const PVH_START_INFO: Range = Range { start: 0x6000, end: 0x7000 };
/// The zero page of the Linux boot protocol.
pub const ZERO_PAGE: u64 = 0x7000;
/// Top of the stack a 64-bit kernel is entered with.
pub const BOOT_STACK: u64 = 0x9000;
/// Page tables of the 64-bit entry, [`crate::x86_64::paging`].
pub const PAGE_TABLES: u64 = 0x9000;
/// The kernel command line with its terminating zero.
pub const CMDLINE: Range = Range { start: 0x2_0000, end: 0x3_0000 };
/// End of conventional memory: above it a PC has its graphics memory and ROMs.
pub const CONVENTIONAL_END: u64 = 0xA_0000;
/// ACPI tables except the root pointer.
pub const ACPI_TABLES: Range = Range { start: 0xC_0000, end: 0xE_0000 };
/// The ACPI root pointer, where a scan of the BIOS area finds it (ACPI 6.5 5.2.5.1).
pub const RSDP: u64 = 0xE_0000;
/// The SMBIOS entry point and tables, where a scan finds them (SMBIOS 3.7 5.2).
pub const SMBIOS: Range = Range { start: 0xF_0000, end: 0x10_0000 };
/// Where kernels may begin.
pub const HIGH_MEMORY: u64 = 0x10_0000;
