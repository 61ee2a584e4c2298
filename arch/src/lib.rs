//! The x86-64 machine as data: where memory lies, what the tables say, how a processor starts.
//!
//! | question | module |
//! |---|---|
//! | which guest addresses are RAM, ECAM, windows for BARs | [`memory_map`] |
//! | which I/O ports exist | [`ports`] |
//! | where boot structures lie below 1 MiB | [`x86_64::layout`] |
//! | which APIC ids processors have | [`x86_64::processors`] |
//! | what a processor reports and starts with | [`x86_64::cpuid`], [`x86_64::regs`], [`x86_64::msrs`] |
//! | what a kernel is handed | [`x86_64::boot_params`], [`x86_64::pvh`], [`x86_64::e820`], [`x86_64::bzimage`], [`x86_64::initrd`] |
//! | what firmware tables say | [`x86_64::acpi`], [`x86_64::smbios`] |
//!
//! Everything here returns bytes or plain structures. The caller writes them into guest memory and into KVM.
#![forbid(unsafe_code)]

pub mod memory_map;
pub mod ports;
pub mod x86_64;
