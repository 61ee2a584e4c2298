//! Decides which global system interrupt a conventional PCI pin drives.
//!
//! Pins are numbered from 0 here: INTA is 0, INTD is 3. A function's interrupt pin register counts from 1.

/// First GSI that PCI pins drive. Lower ones belong to ISA.
pub const FIRST_GSI: u32 = 16;
/// How many GSIs PCI pins share; with [`FIRST_GSI`] this fills the 24 pins of the I/O APIC.
pub const GSI_COUNT: u32 = 8;

/// The pin on a bridge's primary side that pin `pin` of device `device` on its secondary side arrives at
/// (PCI-to-PCI Bridge 1.2, 9.1). Apply it once per bridge on the way up.
#[must_use]
pub fn swizzle(device: u8, pin: u8) -> u8 {
    (device % 4 + pin % 4) % 4
}

/// The GSI that pin `pin` of device `device` on a root bus drives.
#[must_use]
pub fn intx_gsi(device: u8, pin: u8) -> u32 {
    FIRST_GSI + (u32::from(device) + u32::from(pin)) % GSI_COUNT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pin_drives_an_io_apic_input_above_isa() {
        for device in 0..32 {
            for pin in 0..4 {
                assert!((16..24).contains(&intx_gsi(device, pin)), "device {device} pin {pin}");
            }
        }
    }

    #[test]
    fn the_four_pins_of_a_device_drive_four_different_gsis() {
        let gsis: Vec<u32> = (0..4).map(|pin| intx_gsi(5, pin)).collect();
        assert_eq!(gsis, [21, 22, 23, 16]);
    }

    #[test]
    fn a_bridge_rotates_pins_by_the_device_number_below_it() {
        assert_eq!(swizzle(0, 2), 2);
        assert_eq!(swizzle(1, 3), 0);
        assert_eq!(swizzle(31, 1), 0);
        assert_eq!(swizzle(255, 255), 2);
    }
}
