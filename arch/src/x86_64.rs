//! What is particular to x86-64: processor state, boot protocols, firmware tables.

pub mod acpi;
pub mod boot_params;
mod bytes;
pub mod bzimage;
pub mod cpuid;
pub mod e820;
pub mod gdt;
pub mod initrd;
pub mod layout;
pub mod msrs;
pub mod paging;
pub mod processors;
pub mod pvh;
pub mod regs;
pub mod reset_vector;
pub mod smbios;
