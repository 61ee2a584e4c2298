//! Decides where an INTx pin arrives: each bridge turns pins by the device number (PCI-to-PCI Bridge 1.2, 9.1).

/// First GSI of the eight that take INTx.
const FIRST_GSI: u32 = 16;

/// A wire on the root bus after the swizzles of all bridges above.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IntxRoute {
    /// Index of the root complex.
    pub root_complex: usize,
    /// Device number on the root bus.
    pub device: u8,
    /// Pin there: 0 INTA to 3 INTD.
    pub pin: u8,
}

/// The pin (0 INTA to 3 INTD) on the bus above a bridge, for pin `pin` of device `device` on the bus below it.
#[must_use]
pub const fn swizzle(device: u8, pin: u8) -> u8 {
    // Multiples of 4 make no difference, so both can be cut before they are added.
    ((device & 3) + (pin & 3)) & 3
}

/// The interrupt controller's input for a wire. Neighbouring devices get different ones.
#[must_use]
pub fn gsi(route: IntxRoute) -> u32 {
    FIRST_GSI + (u32::from(route.device) + u32::from(route.pin)) % 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bridge_turns_the_pin_by_the_device_number() {
        for (device, pin, above) in [(0, 0, 0), (0, 3, 3), (1, 0, 1), (1, 3, 0), (2, 3, 1), (7, 2, 1), (31, 0, 3)] {
            assert_eq!(swizzle(device, pin), above, "device {device} pin {pin}");
        }
    }

    #[test]
    fn every_wire_of_a_root_bus_has_one_of_eight_inputs() {
        for device in 0..32 {
            for pin in 0..4 {
                let input = gsi(IntxRoute { root_complex: 0, device, pin });
                assert!((16..24).contains(&input));
                assert_eq!(input, 16 + (u32::from(device) + u32::from(pin)) % 8);
            }
        }
    }
}
