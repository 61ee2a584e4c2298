//! Which addresses the host's IOMMU can translate, for the message when it refuses one.

use std::fmt;
use std::os::fd::AsRawFd;

use super::info::Info;
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
    parse(&ioctl::iommu_info(container))
}

/// Ranges out of struct vfio_iommu_type1_info (linux: include/uapi/linux/vfio.h).
fn parse(info: &Info) -> Vec<IovaRange> {
    const HAS_CAPABILITIES: u32 = 2;
    const IOVA_RANGES: u16 = 1;
    if info.dword(4).is_none_or(|flags| flags & HAS_CAPABILITIES == 0) {
        return Vec::new();
    }
    let ranges = info.capabilities(info.dword(16).unwrap_or(0), IOVA_RANGES).into_iter().flat_map(|at| {
        let count = info.dword(at.saturating_add(8)).unwrap_or(0);
        info.pairs(at.saturating_add(16), count)
    });
    ranges.map(|(first, last)| IovaRange { first, last }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An info structure with a capability of another kind, then two ranges.
    fn info() -> Info {
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
        Info::of_dwords(&dwords)
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
    fn truncated_structures_end_the_walk() {
        let whole = info();
        for len in 0..88 {
            assert!(parse(&whole.truncated(len)).len() < 2);
        }
    }
}
