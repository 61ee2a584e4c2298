//! Which standard capabilities there are, where they lie in a function's configuration space, and how long they are
//! (PCIe 6.0 7.5.3, 7.7 to 7.9). One capability per file; registers with behaviour of their own live in [`crate::msi`]
//! and [`crate::msix_table`].

pub mod clique;
pub mod express;
mod msi;
mod msix;
pub mod power;
mod subsystem;
mod vendor;

pub use clique::Clique;
pub use express::Express;
pub use msi::MsiLayout;
pub use msix::{MsixLayout, MsixPlace};
pub use power::Power;
pub use subsystem::Subsystem;
pub use vendor::Vendor;

use crate::config::RegDef;
use crate::regs::{header, status};

/// Capability ids (PCI Code and ID Assignment 1.16, 2).
pub mod id {
    /// Power management.
    pub const POWER: u8 = 0x01;
    /// Vital product data.
    pub const VPD: u8 = 0x03;
    /// Slot identification.
    pub const SLOT_ID: u8 = 0x04;
    /// Message signalled interrupts.
    pub const MSI: u8 = 0x05;
    /// Vendor-specific.
    pub const VENDOR: u8 = 0x09;
    /// Debug port.
    pub const DEBUG_PORT: u8 = 0x0A;
    /// Standard hot-plug controller.
    pub const HOT_PLUG: u8 = 0x0C;
    /// Subsystem ids of a bridge.
    pub const SUBSYSTEM: u8 = 0x0D;
    /// PCI Express.
    pub const EXPRESS: u8 = 0x10;
    /// MSI-X.
    pub const MSIX: u8 = 0x11;
    /// Serial ATA index and data.
    pub const SATA: u8 = 0x12;
    /// Advanced features of conventional functions.
    pub const ADVANCED_FEATURES: u8 = 0x13;
    /// Enhanced allocation.
    pub const ENHANCED_ALLOCATION: u8 = 0x14;
}

/// One standard capability, as the builder places it.
pub trait Capability {
    /// Its id.
    fn id(&self) -> u8;
    /// Every dword from its start. The low half of the first one, id and next pointer, is left to the builder.
    fn layout(&self) -> Vec<RegDef>;
}

/// Where a capability lies. `offset + len` is at most 0x100.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Capability id.
    pub id: u8,
    /// First byte, a multiple of 4, 0x40 or more.
    pub offset: u8,
    /// Bytes, a multiple of 4.
    pub len: u16,
}

impl Extent {
    /// Whether it shares a byte with `len` bytes from `at`.
    #[must_use]
    pub fn overlaps(self, at: u16, len: u16) -> bool {
        let start = u16::from(self.offset);
        start < at.saturating_add(len) && at < start.saturating_add(self.len)
    }
}

/// The standard capabilities of any function in list order; `read` gives the dword at an offset. The length of a
/// capability with an unknown id reaches to the next one by offset, since nothing behind it may be taken for free. The
/// walk ends at a pointer into the header and where the list comes back to itself.
pub fn walk(read: impl Fn(u8) -> u32) -> Vec<Extent> {
    let mut found: Vec<Extent> = Vec::new();
    if read(0x04) & status::CAPABILITIES == 0 {
        return found;
    }
    let [mut at, ..] = read(0x34).to_le_bytes();
    loop {
        at &= 0xFC;
        if at < header::END || found.iter().any(|seen| seen.offset == at) {
            break;
        }
        let [id, next, low, high] = read(at).to_le_bytes();
        let len = length(id, at, u16::from_le_bytes([low, high]), &read);
        found.push(Extent { id, offset: at, len: len.unwrap_or(0) });
        at = next;
    }
    let offsets: Vec<u16> = found.iter().map(|extent| extent.offset.into()).collect();
    for extent in &mut found {
        let start = u16::from(extent.offset);
        let next = offsets.iter().copied().filter(|other| *other > start).min().unwrap_or(0x100);
        let longest = 0x100 - start;
        extent.len = if extent.len == 0 { next - start } else { extent.len.min(longest) };
    }
    found
}

/// Length of capability `id` at `at`, with `flags` behind its header; `None` for ids that say nothing of it.
fn length(id: u8, at: u8, flags: u16, read: impl Fn(u8) -> u32) -> Option<u16> {
    Some(match id {
        id::POWER | id::VPD | id::HOT_PLUG | id::SUBSYSTEM | id::SATA | id::ADVANCED_FEATURES => 8,
        id::SLOT_ID | id::DEBUG_PORT => 4,
        id::MSIX => 12,
        // 64-bit addresses add a dword, masks two; the 32-bit form without masks ends with a half dword.
        id::MSI => 12 + if flags & 0x80 != 0 { 4 } else { 0 } + if flags & 0x100 != 0 { 8 } else { 0 },
        id::VENDOR => match flags & 0xFF {
            0..=2 => return None,
            bytes => bytes.next_multiple_of(4),
        },
        id::EXPRESS if flags & 0xF >= 2 => 0x3C,
        // Version 1 ends with the last register that the port type has: root, slot, link, device.
        id::EXPRESS => match flags >> 4 & 0xF {
            4 | 10 => 0x24,
            _ if flags & 0x100 != 0 => 0x1C,
            9 => 0x0C,
            _ => 0x14,
        },
        id::ENHANCED_ALLOCATION => {
            // A bridge has a dword of bus numbers before the entries.
            let mut len: u16 = if read(0x0C) & 0x7F_0000 == header::TYPE_1 { 8 } else { 4 };
            for _ in 0..flags & 0x3F {
                let entry = u8::try_from(u16::from(at).saturating_add(len)).map_or(0, &read);
                len = len.saturating_add(4 * (1 + u16::from(entry.to_le_bytes()[0] & 7)));
            }
            len
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A configuration space with these dwords and a list that starts at `first`.
    fn space(first: u8, dwords: &[(u8, u32)]) -> impl Fn(u8) -> u32 {
        let mut bytes = [0u32; 64];
        bytes[1] = status::CAPABILITIES;
        bytes[0x34 / 4] = first.into();
        for (at, value) in dwords {
            bytes[usize::from(at / 4)] = *value;
        }
        move |at| bytes[usize::from(at / 4)]
    }

    fn lengths(first: u8, dwords: &[(u8, u32)]) -> Vec<(u8, u16)> {
        walk(space(first, dwords)).iter().map(|extent| (extent.offset, extent.len)).collect()
    }

    #[test]
    fn lengths_follow_the_capability_s_own_flags() {
        for (first_dword, len) in [
            (0x0000_0001, 8),
            (0x0000_0005, 12),
            (0x0080_0005, 16),
            (0x0100_0005, 20),
            (0x018A_0005, 24),
            (0x0000_0011, 12),
            (0x0002_0010, 0x3C),
            (0x0001_0010, 0x14),
            (0x0041_0010, 0x24),
            (0x0161_0010, 0x1C),
            (0x0014_0009, 0x14),
            (0x0006_0009, 8),
            (0x0000_000D, 8),
            (0x0000_0013, 8),
        ] {
            assert_eq!(lengths(0x60, &[(0x60, first_dword)]), [(0x60, len)], "{first_dword:#x}");
        }
    }

    #[test]
    fn an_enhanced_allocation_is_as_long_as_its_entries() {
        let dwords = [(0x60, 0x0002_0014), (0x64, 2), (0x70, 4)];
        assert_eq!(lengths(0x60, &dwords), [(0x60, 4 + 12 + 20)]);
        let bridge = [(0x60, 0x0001_0014), (0x68, 2), (0x0C, header::TYPE_1)];
        assert_eq!(lengths(0x60, &bridge), [(0x60, 8 + 12)]);
    }

    #[test]
    fn an_unknown_capability_reaches_to_the_next_by_offset() {
        let dwords = [(0x80, 0x0000_4008), (0x40, 0x0000_A001), (0xA0, 0x0000_0011)];
        assert_eq!(lengths(0x80, &dwords), [(0x80, 0x20), (0x40, 8), (0xA0, 12)]);
        assert_eq!(lengths(0x80, &[(0x80, 8)]), [(0x80, 0x80)]);
        assert_eq!(lengths(0x80, &[(0x80, 0x0002_0009)]), [(0x80, 0x80)]);
    }

    #[test]
    fn a_bad_list_ends_the_walk() {
        assert_eq!(lengths(0x60, &[(0x60, 0x6001)]), [(0x60, 8)]);
        assert_eq!(lengths(0x60, &[(0x60, 0x3001)]), [(0x60, 8)]);
        assert_eq!(lengths(0x61, &[(0x60, 0x0001)]), [(0x60, 8)]);
        assert_eq!(walk(|_| 0), []);
        assert!(walk(|_| 0xFFFF_FFFF).len() <= 1);
        assert_eq!(lengths(0xFC, &[(0xFC, 0x0010)]), [(0xFC, 4)]);
    }

    proptest! {
        #[test]
        fn any_content_gives_extents_inside_the_standard_area(dwords in prop::collection::vec(any::<u32>(), 64)) {
            let read = |at: u8| if at == 4 { status::CAPABILITIES } else { dwords[usize::from(at / 4)] };
            let found = walk(read);
            for extent in &found {
                prop_assert!(extent.offset >= header::END && extent.offset % 4 == 0, "{extent:?}");
                prop_assert!(extent.len > 0 && u16::from(extent.offset) + extent.len <= 0x100, "{extent:?}");
            }
            prop_assert!(found.len() <= 48);
            if let Some(at) = clique::place(&found) {
                prop_assert!(!found.iter().any(|extent| extent.overlaps(at.into(), 8)));
            }
            prop_assert!(clique::decode(read).is_none_or(|id| id < 16));
        }
    }
}
