//! Which addresses the host's IOMMU can translate, for the message when it refuses one.

use std::fmt;
use std::os::fd::AsRawFd;

use super::ioctl;

/// Addresses `first` to `last` inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IovaRange {
    first: u64,
    last: u64,
}

impl IovaRange {
    /// Whether `len` bytes from `at` lie inside.
    #[must_use]
    pub fn holds(self, at: u64, len: u64) -> bool {
        self.first <= at && at.checked_add(len.saturating_sub(1)).is_some_and(|last| last <= self.last)
    }
}

/// Ranges as `0x0-0xfedfffff, 0xfef00000-0x7fffffffff (39 bits)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown(pub Vec<IovaRange>);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, IovaRange { first, last }) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{first:#x}-{last:#x}")?;
        }
        let highest = self.0.iter().map(|range| range.last).max().unwrap_or(0);
        write!(f, " ({} bits)", u64::BITS - highest.leading_zeros())
    }
}

/// The ranges of a container; none when the kernel does not tell.
pub fn of(container: &impl AsRawFd) -> Vec<IovaRange> {
    let words = ioctl::iommu_info(container);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    parse(&bytes)
}

/// Walks the capabilities of the info structure (linux: include/uapi/linux/vfio.h).
fn parse(info: &[u8]) -> Vec<IovaRange> {
    const HAS_CAPABILITIES: u32 = 2;
    const IOVA_RANGES: u32 = 1;
    let dword = |at: usize| Some(u32::from_le_bytes(info.get(at..at.checked_add(4)?)?.try_into().ok()?));
    let qword = |at: usize| Some(u64::from_le_bytes(info.get(at..at.checked_add(8)?)?.try_into().ok()?));
    let mut ranges = Vec::new();
    if dword(4).is_none_or(|flags| flags & HAS_CAPABILITIES == 0) {
        return ranges;
    }
    let mut at = dword(16).unwrap_or(0);
    // More capabilities than fit mean a list that loops.
    for _ in 0..64 {
        let Ok(here) = usize::try_from(at) else { break };
        let (Some(header), Some(next)) = (dword(here).filter(|_| here != 0), dword(here.saturating_add(4))) else { break };
        if header & 0xFFFF == IOVA_RANGES {
            let count = dword(here + 8).and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
            let pairs = (here + 16..).step_by(16).take(count);
            ranges.extend(pairs.map_while(|pair| Some(IovaRange { first: qword(pair)?, last: qword(pair + 8)? })));
        }
        at = next;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An info structure with a capability of another kind, then two ranges.
    fn info() -> Vec<u8> {
        let dwords: [u32; 22] = [
            88,
            3,
            0x1000,
            0,
            24,
            0, // argsz, flags, page sizes, offset, padding
            0x0001_0003,
            40,
            0xFFFF,
            0, // available maps
            0x0001_0001,
            0,
            2,
            0, // ranges
            0,
            0,
            0xFEDF_FFFF,
            0,
            0xFEF0_0000,
            0,
            0xFFFF_FFFF,
            0x7F,
        ];
        dwords.iter().flat_map(|dword| dword.to_le_bytes()).collect()
    }

    #[test]
    fn the_ranges_of_a_39_bit_iommu_are_read_and_shown() {
        let ranges = parse(&info());
        assert_eq!(Shown(ranges.clone()).to_string(), "0x0-0xfedfffff, 0xfef00000-0x7fffffffff (39 bits)");
        assert!(ranges[0].holds(0, 0x8000_0000) && ranges[1].holds(0x1_0000_0000, 1 << 38));
        assert!(!ranges.iter().any(|range| range.holds(0xFEE0_0000, 0x1000) || range.holds(1 << 39, 1)));
        assert!(!ranges[1].holds(u64::MAX, 2));
    }

    #[test]
    fn truncated_and_looping_structures_end_the_walk() {
        let whole = info();
        for len in 0..whole.len() {
            assert!(parse(&whole[..len]).len() < 2);
        }
        let mut looping = whole;
        looping[28] = 24;
        assert_eq!(parse(&looping), []);
    }
}
