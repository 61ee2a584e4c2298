//! What a stub's expansion ROM holds: one image in the form of PCI Firmware 3.3, 5.1.1, with no code in it.

use pci::ids::Ids;

/// Where the PCI data structure starts.
const DATA: u8 = 0x1C;
/// Length of that structure.
const DATA_LEN: u8 = 0x1C;
/// Bytes that are not erased flash.
const HEAD: usize = 0x38;

/// Reads `data.len()` bytes at `offset` of a ROM of `size` bytes; all ones past its end.
pub fn read(ids: &Ids, size: u64, offset: u64, data: &mut [u8]) {
    let head = head(ids, size);
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let inside = head.get(start..).unwrap_or_default().iter().copied();
    for (byte, inside) in data.iter_mut().zip(inside.chain(std::iter::repeat(0xFF))) {
        *byte = inside;
    }
}

fn head(ids: &Ids, size: u64) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    let mut put = |at: u8, bytes: &[u8]| {
        let start = usize::from(at);
        if let Some(place) = head.get_mut(start..start + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(0, &[0x55, 0xAA]);
    put(0x18, &[DATA, 0]);
    put(DATA, b"PCIR");
    put(DATA + 4, &ids.vendor.to_le_bytes());
    put(DATA + 6, &ids.device.to_le_bytes());
    put(DATA + 0x0A, &[DATA_LEN, 0]);
    // Revision 3 of the structure.
    put(DATA + 0x0C, &[3]);
    let [interface, sub, base, _] = ids.class.value().to_le_bytes();
    put(DATA + 0x0D, &[interface, sub, base]);
    // In units of 512 bytes. The largest ROM has half as many as 16 bits can say.
    put(DATA + 0x10, &u16::try_from(size / 512).unwrap_or(u16::MAX).to_le_bytes());
    // For no machine that exists, and the last image.
    put(DATA + 0x14, &[0xFF, 0x80]);
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_finds_one_image_as_long_as_the_rom() {
        let ids = Ids { vendor: 0x10DE, device: 0x20B8, ..Ids::default() };
        let byte = |at: u64| {
            let mut data = [0];
            read(&ids, 64 << 10, at, &mut data);
            data[0]
        };
        let word = |at: u64| u16::from_le_bytes([byte(at), byte(at + 1)]);
        assert_eq!(word(0), 0xAA55);
        let data: u64 = word(0x18).into();
        assert_eq!([0, 1, 2, 3].map(|at| byte(data + at)), *b"PCIR");
        assert_eq!((word(data + 4), word(data + 6), word(data + 0x10), byte(data + 0x15)), (0x10DE, 0x20B8, 128, 0x80));
        assert_eq!((byte(0x1000), byte(u64::MAX)), (0xFF, 0xFF));
    }
}
