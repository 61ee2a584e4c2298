//! What runs when a guest restarts through the BIOS: code at the real-mode reset vector that resets the machine.
//!
//! A directly booted machine has no BIOS. Linux goes there all the same where ACPI is hardware-reduced and there is no EFI
//! (linux: `arch/x86/platform/efi/quirks.c`, `efi_reboot_required`; `arch/x86/kernel/reboot.c`, `BOOT_EFI` then `BOOT_BIOS`).

use crate::ports;

/// The guest-physical address of F000:FFF0, in conventional memory's copy of the BIOS.
pub const AT: u64 = 0xF_FFF0;

/// Real-mode code: writes the reset value to the reset register, then halts for ever.
#[must_use]
pub fn code() -> [u8; 9] {
    let [low, high] = ports::RESET.to_le_bytes();
    [
        0xBA,
        low,
        high, // mov $RESET, %dx
        0xB0,
        ports::RESET_VALUE, // mov $RESET_VALUE, %al
        0xEE,               // out %al, %dx
        0xF4,               // hlt
        0xEB,
        0xFD, // jmp to the hlt
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86_64::layout;

    #[test]
    fn code_at_the_reset_vector_writes_the_reset_register_and_ends_below_1_mib() {
        let code = code();
        assert_eq!(code[..6], [0xBA, 0xF9, 0x0C, 0xB0, 0x06, 0xEE]);
        assert_eq!(AT, layout::SMBIOS.end - 16);
        assert!(AT + code.len() as u64 <= layout::HIGH_MEMORY);
    }
}
