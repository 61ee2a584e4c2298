//! Which function and register an address in a segment's enhanced configuration access window means (PCIe 6.0 7.2.2).

use crate::address::{Bdf, Devfn};

/// Bytes of configuration space per bus.
pub const BUS_SIZE: u64 = 1 << 20;

/// Offset in the window of `segment`'s bus 0 to function and byte offset (0 to 0xFFF); `None` past bus 255.
#[must_use]
pub fn decode(offset: u64) -> Option<(Bdf, u16)> {
    let bus = u8::try_from(offset >> 20).ok()?;
    let [low, middle, high, ..] = offset.to_le_bytes();
    let devfn = Devfn::from_byte(middle >> 4 | high << 4);
    Some((Bdf::new(bus, devfn), u16::from_le_bytes([low, middle & 0xF])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_device_function_and_register_are_bit_fields() {
        let (bdf, register) = decode(0x3D << 20 | 0x1F << 15 | 7 << 12 | 0xFFE).unwrap();
        assert_eq!((bdf.to_string().as_str(), register), ("3d:1f.7", 0xFFE));
        assert_eq!(decode(1 << 28), None);
    }
}
