//! Writes little-endian fields into a structure that is kept as bytes.

/// Puts `field` at `offset`. The structures written here have a fixed size and every offset is a constant.
pub fn put(bytes: &mut [u8], offset: usize, field: &[u8]) {
    bytes[offset..offset + field.len()].copy_from_slice(field);
}

/// The byte that makes the sum of all bytes zero, given that it is zero in `bytes`.
pub fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte))
}

/// Reads a field; `None` if the bytes end before it.
pub fn get<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}
