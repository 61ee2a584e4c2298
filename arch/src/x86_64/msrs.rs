//! Decides which model-specific registers a processor starts a kernel with.

use kvm_bindings::kvm_msr_entry;

/// `IA32_MISC_ENABLE` (Intel SDM volume 4, table 2-2).
const MISC_ENABLE: u32 = 0x1A0;
/// Fast string operations.
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// `IA32_MTRR_DEF_TYPE` (Intel SDM volume 3, 13.11.2.1).
const MTRR_DEF_TYPE: u32 = 0x2FF;
/// MTRRs enabled, write-back where no range register says otherwise. With the reset value all of memory is uncached,
/// which KVM on Intel honours once a device with non-coherent DMA is attached.
const MTRR_ENABLED_WRITE_BACK: u64 = 1 << 11 | 6;

/// The registers to set on every processor that starts in a kernel. Firmware sets its own.
///
/// Not every KVM knows each of them: `KVM_SET_MSRS` stops at the first it refuses and returns how many it set. The
/// caller goes on with the rest; none of them is vital.
#[must_use]
pub fn boot_entries() -> Vec<kvm_msr_entry> {
    [(MTRR_DEF_TYPE, MTRR_ENABLED_WRITE_BACK), (MISC_ENABLE, MISC_ENABLE_FAST_STRING)]
        .into_iter()
        .map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_write_back_by_default() {
        let entries = boot_entries();
        let mtrr = entries.iter().find(|entry| entry.index == 0x2FF).unwrap();
        assert_eq!(mtrr.data, 0x806);
    }
}
