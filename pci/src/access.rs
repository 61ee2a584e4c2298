//! Which dword of configuration space an access touches, and which of its bytes.

/// Bytes of configuration space that a conventional path carries: a conventional bus, or the ports 0xCF8 and 0xCFC.
pub(crate) const CONVENTIONAL_SPACE: u16 = 0x100;

/// Dword-aligned offset in a function's configuration space, 0 to 0xFFC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reg(u16);

impl Reg {
    /// All dwords of configuration space, in order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..0x1000).step_by(4).map(Self)
    }

    /// The dword that holds byte `offset`; the offset is reduced to the 4 KiB of configuration space.
    #[must_use]
    pub const fn containing(offset: u16) -> Self {
        Self(offset & 0xFFC)
    }

    /// Byte offset, a multiple of 4.
    #[must_use]
    pub const fn offset(self) -> u16 {
        self.0
    }

    /// Index of the dword, 0 to 1023.
    #[must_use]
    pub const fn index(self) -> usize {
        (self.0 >> 2) as usize
    }
}

/// The bytes of a dword that a write carries: bit n stands for byte n.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lanes(u8);

impl Lanes {
    /// All four bytes.
    pub const ALL: Self = Self(0xF);

    /// `len` bytes (1 to 4) from byte `first` (0 to 3); bytes past the dword are dropped.
    #[must_use]
    pub const fn new(first: u8, len: u8) -> Self {
        let run = if len >= 4 { 0xF } else { (1 << len) - 1 };
        Self((run << (first & 3)) & 0xF)
    }

    /// The bytes that `other` does not carry.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether no byte is carried.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// 0xFF in every byte that is carried.
    #[must_use]
    pub const fn mask(self) -> u32 {
        let bits = self.0 as u32;
        // One bit to the bottom of each byte, then spread over it.
        ((bits & 1) | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21) * 0xFF
    }

    /// Whether any of the bytes of `mask` is carried.
    #[must_use]
    pub const fn touch(self, mask: u32) -> bool {
        self.mask() & mask != 0
    }
}

/// One dword and the bytes of it that a write carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The dword.
    pub reg: Reg,
    /// Its bytes.
    pub lanes: Lanes,
}

impl Access {
    /// A whole dword.
    #[must_use]
    pub const fn dword(offset: u16) -> Self {
        Self { reg: Reg::containing(offset), lanes: Lanes::ALL }
    }

    /// `old` with the carried bytes of `value` in place.
    #[must_use]
    pub const fn merge(self, old: u32, value: u32) -> u32 {
        let mask = self.lanes.mask();
        (old & !mask) | (value & mask)
    }
}

/// Low and high dword of an address.
#[must_use]
pub const fn halves(address: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = address.to_le_bytes();
    (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
}

/// Splits a read of `data.len()` bytes at `offset` into dword reads. Bytes past `end` read as 0xFF.
pub fn read(offset: u16, end: u16, data: &mut [u8], mut dword: impl FnMut(Reg) -> u32) {
    let mut held: Option<(Reg, [u8; 4])> = None;
    for (at, byte) in (u32::from(offset)..).zip(data) {
        *byte = match u16::try_from(at) {
            Ok(at) if at < end => {
                let reg = Reg::containing(at);
                let bytes = match held {
                    Some((same, bytes)) if same == reg => bytes,
                    _ => dword(reg).to_le_bytes(),
                };
                held = Some((reg, bytes));
                bytes[usize::from(at & 3)]
            }
            _ => 0xFF,
        };
    }
}

/// Splits a write of `data` at `offset` into dword accesses with lanes. Bytes past `end` are dropped.
pub fn write(offset: u16, end: u16, data: &[u8], mut dword: impl FnMut(Access, u32)) {
    let mut pending: Option<(Reg, u8, u32)> = None;
    for (at, byte) in (u32::from(offset)..).zip(data) {
        let Ok(at) = u16::try_from(at) else { break };
        if at >= end {
            break;
        }
        let (reg, lane) = (Reg::containing(at), at & 3);
        let bits = u32::from(*byte) << (8 * lane);
        pending = match pending {
            Some((same, lanes, value)) if same == reg => Some((reg, lanes | 1 << lane, value | bits)),
            other => {
                if let Some((reg, lanes, value)) = other {
                    dword(Access { reg, lanes: Lanes(lanes) }, value);
                }
                Some((reg, 1 << lane, bits))
            }
        };
    }
    if let Some((reg, lanes, value)) = pending {
        dword(Access { reg, lanes: Lanes(lanes) }, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_across_dwords_is_split_with_its_lanes() {
        let mut seen = Vec::new();
        write(0x3E, 0x1000, &[1, 2, 3], |access, value| seen.push((access.reg.offset(), access.lanes.mask(), value)));
        assert_eq!(seen, [(0x3C, 0xFFFF_0000, 0x0201_0000), (0x40, 0xFF, 3)]);
    }

    #[test]
    fn a_read_across_the_end_gives_ones() {
        let mut data = [0; 4];
        read(0xFFE, 0x1000, &mut data, |reg| u32::from(reg.offset()));
        assert_eq!(data, [0, 0, 0xFF, 0xFF]);
        let mut data = [0; 2];
        read(0xFFFF, 0x1000, &mut data, |_| 0);
        assert_eq!(data, [0xFF, 0xFF]);
    }

    #[test]
    fn eight_byte_reads_give_two_dwords() {
        let mut data = [0; 8];
        read(0x10, 0x1000, &mut data, |reg| if reg.offset() == 0x10 { 0x4433_2211 } else { 0x8877_6655 });
        assert_eq!(data, [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
    }
}
