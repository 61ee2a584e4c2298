//! Decides which registers the first processor enters a kernel with.
//!
//! A machine that starts in firmware keeps KVM's own reset state (`f000:fff0`), and so does every processor but the
//! first: a kernel starts them by itself.

use kvm_bindings::{kvm_dtable, kvm_regs, kvm_sregs};

use super::gdt::{self, Segment};
use super::layout;

const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Bit 1 of the flags register reads one always.
const RFLAGS_FIXED: u64 = 1 << 1;

/// How the first processor enters the kernel. Other processors are left as KVM made them.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// General registers: give them to `KVM_SET_REGS`.
    pub regs: kvm_regs,
    mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Protected,
    Long,
}

/// Enters by the PVH protocol: 32-bit protected mode without paging, EBX has the address of the start information
/// (linux: Documentation/arch/x86, `xen/include/public/arch-x86/hvm/start_info.h`).
#[must_use]
pub fn pvh(entry: u64, start_info: u64) -> Entry {
    Entry { regs: kvm_regs { rip: entry, rbx: start_info, rflags: RFLAGS_FIXED, ..Default::default() }, mode: Mode::Protected }
}

/// Enters by the 64-bit Linux protocol: long mode, the first 4 GiB mapped to themselves, RSI has the address of the
/// zero page (linux: Documentation/arch/x86/boot.rst, 64-bit boot protocol).
#[must_use]
pub fn linux64(entry: u64, zero_page: u64) -> Entry {
    Entry {
        regs: kvm_regs {
            rip: entry,
            rsi: zero_page,
            rsp: layout::BOOT_STACK,
            rbp: layout::BOOT_STACK,
            rflags: RFLAGS_FIXED,
            ..Default::default()
        },
        mode: Mode::Long,
    }
}

impl Entry {
    /// What must be in guest memory beside the kernel: bytes and the address they go to.
    #[must_use]
    pub fn memory(&self) -> Vec<(u64, Vec<u8>)> {
        let mut memory = vec![(layout::GDT, gdt::table(self.code()).to_vec())];
        if self.mode == Mode::Long {
            memory.push((layout::PAGE_TABLES, super::paging::tables(layout::PAGE_TABLES)));
        }
        memory
    }

    /// Changes the special registers read by `KVM_GET_SREGS` to those of the entry. What it does not name keeps its
    /// value, such as the local APIC's base.
    pub fn apply(&self, sregs: &mut kvm_sregs) {
        sregs.cs = self.code().kvm();
        for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
            *segment = Segment::Data.kvm();
        }
        sregs.tr = Segment::Task.kvm();
        sregs.gdt = kvm_dtable { base: layout::GDT, limit: gdt::LIMIT, ..Default::default() };
        sregs.idt = kvm_dtable::default();
        sregs.cr0 = CR0_PE | CR0_ET;
        sregs.cr3 = 0;
        sregs.cr4 = 0;
        sregs.efer = 0;
        if self.mode == Mode::Long {
            sregs.cr0 |= CR0_PG;
            sregs.cr3 = layout::PAGE_TABLES;
            sregs.cr4 = CR4_PAE;
            sregs.efer = EFER_LME | EFER_LMA;
        }
    }

    fn code(&self) -> Segment {
        match self.mode {
            Mode::Protected => Segment::Code32,
            Mode::Long => Segment::Code64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pvh_enters_flat_protected_mode_without_paging() {
        let entry = pvh(0x100_0000, 0x6000);
        let mut sregs = kvm_sregs { apic_base: 0xFEE0_0900, cr4: 0x20, ..Default::default() };
        entry.apply(&mut sregs);
        assert_eq!((entry.regs.rip, entry.regs.rbx, entry.regs.rflags), (0x100_0000, 0x6000, 2));
        assert_eq!((sregs.cr0, sregs.cr4, sregs.efer), (0x11, 0, 0));
        assert_eq!((sregs.cs.db, sregs.cs.l, sregs.cs.limit), (1, 0, 0xFFFF_FFFF));
        assert_eq!(sregs.apic_base, 0xFEE0_0900, "the local APIC stays where KVM has it");
        assert_eq!(entry.memory().len(), 1);
    }

    #[test]
    fn the_64_bit_protocol_enters_long_mode_with_the_boot_selectors() {
        let entry = linux64(0x100_0200, 0x7000);
        let mut sregs = kvm_sregs::default();
        entry.apply(&mut sregs);
        assert_eq!((entry.regs.rip, entry.regs.rsi), (0x100_0200, 0x7000));
        assert_eq!(sregs.cr0, 0x8000_0011);
        assert_eq!((sregs.cr4, sregs.efer, sregs.cr3), (0x20, 0x500, 0x9000));
        assert_eq!((sregs.cs.selector, sregs.ds.selector, sregs.ss.selector), (0x10, 0x18, 0x18));
        assert_eq!((sregs.cs.db, sregs.cs.l), (0, 1));
    }

    #[test]
    fn what_an_entry_writes_stays_clear_of_the_zero_page_and_the_start_information() {
        for (at, bytes) in linux64(0, 0).memory() {
            let written = crate::memory_map::Range::sized(at, bytes.len() as u64);
            for other in [layout::PVH_START_INFO, crate::memory_map::Range::sized(layout::ZERO_PAGE, 4096), layout::CMDLINE] {
                assert!(!written.overlaps(&other), "{written} meets {other}");
            }
        }
    }
}
