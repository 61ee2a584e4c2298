//! Says what KVM tells of an error of its own, and what to look at (linux: Documentation/virt/kvm/api.rst,
//! `KVM_EXIT_INTERNAL_ERROR`).

use std::fmt;

use kvm_bindings::{
    KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES,
    KVM_INTERNAL_ERROR_SIMUL_EX, KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON,
};
use kvm_ioctls::VcpuFd;

/// Bytes of the longest instruction.
const LONGEST: usize = 15;

/// What KVM says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InternalError {
    suberror: u32,
    instruction: [u8; LONGEST],
    /// Bytes of it that KVM read; 0 where it does not tell.
    length: u8,
}

impl InternalError {
    /// That of the exit with which `fd` came back last.
    pub(super) fn of(fd: &mut VcpuFd) -> Self {
        // SAFETY: all members of the union are plain numbers, for which every bit pattern is a value.
        let told = unsafe { fd.get_kvm_run().__bindgen_anon_1.internal };
        Self::read(told.suberror, told.ndata, &told.data)
    }

    /// `ndata` words of `data` hold: flags, then, with the flag for it, the length and bytes of the instruction.
    fn read(suberror: u32, ndata: u32, data: &[u64]) -> Self {
        let flags = data.first().copied().filter(|_| suberror == KVM_INTERNAL_ERROR_EMULATION && ndata >= 3).unwrap_or(0);
        let mut error = Self { suberror, instruction: [0; LONGEST], length: 0 };
        if flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES) != 0 {
            let mut bytes = data.iter().skip(1).flat_map(|word| word.to_ne_bytes());
            error.length = bytes.next().unwrap_or(0).min(15);
            error.instruction.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        }
        error
    }
}

impl fmt::Display for InternalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.suberror {
            KVM_INTERNAL_ERROR_EMULATION => "an instruction that it cannot emulate",
            KVM_INTERNAL_ERROR_SIMUL_EX => "several exceptions at a time",
            KVM_INTERNAL_ERROR_DELIVERY_EV => "an exit while an event was delivered",
            KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => "an exit of the processor that it does not know",
            _ => "of a kind without a name",
        };
        write!(f, "KVM internal error {}, {what}", self.suberror)?;
        for (place, byte) in self.instruction.iter().take(self.length.into()).enumerate() {
            write!(f, "{}{byte:02x}", if place == 0 { ": " } else { " " })?;
        }
        f.write_str("; the host's kernel log may say more (dmesg), and KVM inside a virtual machine can do less than on hardware")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_and_the_instruction_are_told_where_kvm_tells_them() {
        let bytes = u64::from_ne_bytes([3, 0x0F, 0x01, 0xF9, 0x90, 0x90, 0x90, 0x90]);
        let told = |suberror, ndata, flags| InternalError::read(suberror, ndata, &[flags, bytes, 0, 0]).to_string();
        let with = told(KVM_INTERNAL_ERROR_EMULATION, 4, 1);
        assert!(with.starts_with("KVM internal error 1, an instruction that it cannot emulate: 0f 01 f9; "), "{with}");
        for (suberror, ndata, flags) in [(1, 4, 0), (1, 0, 1), (2, 4, 1), (3, 4, 1), (4, 4, 1), (9, 4, 1)] {
            let without = told(suberror, ndata, flags);
            assert!(without.starts_with(&format!("KVM internal error {suberror}, ")), "{without}");
            assert!(!without.contains(": ") && without.contains("dmesg"), "{without}");
        }
    }

    #[test]
    fn a_length_beyond_the_bytes_is_cut() {
        let error = InternalError::read(KVM_INTERNAL_ERROR_EMULATION, 16, &[1, u64::MAX]);
        assert_eq!(usize::from(error.length), LONGEST);
        assert!(error.to_string().contains(": ff ff ff ff ff ff ff 00 "), "{error}");
    }
}
