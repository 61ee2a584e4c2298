//! Builds the segment descriptors a kernel is entered with, as the table in memory and as KVM wants them.

use kvm_bindings::kvm_segment;

/// A flat or system segment, as far as the entry protocols differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// 32-bit code, base 0, 4 GiB.
    Code32,
    /// 64-bit code.
    Code64,
    /// Data, base 0, 4 GiB.
    Data,
    /// A busy 32-bit task state segment.
    Task,
}

/// Selector of code: `__BOOT_CS` of the Linux boot protocol.
pub const CODE_SELECTOR: u16 = 0x10;
/// Selector of data: `__BOOT_DS` of the Linux boot protocol.
pub const DATA_SELECTOR: u16 = 0x18;
/// Selector of the task state segment.
pub const TASK_SELECTOR: u16 = 0x20;
/// Size of the table in bytes.
pub const SIZE: usize = 5 * 8;
/// What the GDT register holds as its limit.
pub const LIMIT: u16 = 5 * 8 - 1;

impl Segment {
    /// The segment as `KVM_SET_SREGS` takes it.
    #[must_use]
    pub fn kvm(self) -> kvm_segment {
        let flat = kvm_segment { limit: 0xFFFF_FFFF, present: 1, s: 1, g: 1, ..Default::default() };
        match self {
            Segment::Code32 => kvm_segment { selector: CODE_SELECTOR, type_: 0xB, db: 1, ..flat },
            Segment::Code64 => kvm_segment { selector: CODE_SELECTOR, type_: 0xB, l: 1, ..flat },
            Segment::Data => kvm_segment { selector: DATA_SELECTOR, type_: 0x3, db: 1, ..flat },
            Segment::Task => kvm_segment { selector: TASK_SELECTOR, type_: 0xB, limit: 0x67, present: 1, ..Default::default() },
        }
    }

    /// The segment as a descriptor in memory (Intel SDM volume 3, 3.4.5). Its base is 0.
    #[must_use]
    pub fn descriptor(self) -> u64 {
        let segment = self.kvm();
        let limit = if segment.g == 1 { segment.limit >> 12 } else { segment.limit };
        let (limit, bit) = (u64::from(limit), |value: u8, at: u32| u64::from(value) << at);
        limit & 0xFFFF
            | bit(segment.type_, 40)
            | bit(segment.s, 44)
            | bit(segment.dpl, 45)
            | bit(segment.present, 47)
            | (limit >> 16 & 0xF) << 48
            | bit(segment.l, 53)
            | bit(segment.db, 54)
            | bit(segment.g, 55)
    }
}

/// The table with `code` at [`CODE_SELECTOR`]; the caller writes it at [`crate::x86_64::layout::GDT`].
#[must_use]
pub fn table(code: Segment) -> [u8; SIZE] {
    let mut bytes = [0; SIZE];
    let descriptors = [0, 0, code.descriptor(), Segment::Data.descriptor(), Segment::Task.descriptor()];
    for (slot, descriptor) in bytes.chunks_exact_mut(8).zip(descriptors) {
        slot.copy_from_slice(&descriptor.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_segments_have_the_well_known_descriptors() {
        assert_eq!(Segment::Code32.descriptor(), 0x00CF_9B00_0000_FFFF);
        assert_eq!(Segment::Code64.descriptor(), 0x00AF_9B00_0000_FFFF);
        assert_eq!(Segment::Data.descriptor(), 0x00CF_9300_0000_FFFF);
        assert_eq!(Segment::Task.descriptor(), 0x0000_8B00_0000_0067);
    }

    #[test]
    fn each_selector_finds_its_descriptor() {
        let bytes = table(Segment::Code64);
        let at = |selector: u16| {
            let at = usize::from(selector);
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        assert_eq!(at(CODE_SELECTOR), Segment::Code64.descriptor());
        assert_eq!(at(DATA_SELECTOR), Segment::Data.descriptor());
        assert_eq!(at(TASK_SELECTOR), Segment::Task.descriptor());
        assert_eq!(usize::from(LIMIT) + 1, bytes.len());
    }
}
