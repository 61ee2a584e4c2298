//! Which extended capabilities there are, and where they lie (PCIe 6.0 7.6.3). One capability per file.

mod acs;
mod aer;
pub mod ari;
mod serial;
pub mod sriov;

pub use acs::Acs;
pub use aer::{Aer, AerKind};
pub use ari::Ari;
pub use serial::Serial;
pub use sriov::Sriov;

use crate::config::RegDef;

/// Extended capability ids (PCI Code and ID Assignment 1.16, 3).
pub mod id {
    /// An entry that shows nothing and keeps the chain.
    pub const NULL: u16 = 0x0000;
    /// Advanced error reporting.
    pub const AER: u16 = 0x0001;
    /// Device serial number.
    pub const SERIAL: u16 = 0x0003;
    /// Access control services.
    pub const ACS: u16 = 0x000D;
    /// Alternative routing-id interpretation.
    pub const ARI: u16 = 0x000E;
    /// Single-root I/O virtualization.
    pub const SRIOV: u16 = 0x0010;
    /// Resizable BAR.
    pub const REBAR: u16 = 0x0015;
}

/// One extended capability, as the builder places it.
pub trait ExtendedCapability {
    /// Its id.
    fn id(&self) -> u16;
    /// Its version, 0 to 15.
    fn version(&self) -> u8;
    /// Every dword from its start. The first one, the header, is left to the builder.
    fn layout(&self) -> Vec<RegDef>;
}

/// The header dword: id, version (low four bits are used), offset of the next one or 0.
#[must_use]
pub const fn header(id: u16, version: u8, next: u16) -> u32 {
    id as u32 | ((version & 0xF) as u32) << 16 | (next as u32 & 0xFFC) << 20
}

/// The header of an entry that is not to be seen: id 0, version and next pointer as they are, so that the chain holds.
#[must_use]
pub const fn hidden(header: u32) -> u32 {
    header & 0xFFFF_0000
}

/// Where an extended capability lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtendedExtent {
    /// Its id.
    pub id: u16,
    /// Its version.
    pub version: u8,
    /// First byte, 0x100 to 0xFFC.
    pub offset: u16,
}

/// The extended capabilities of any function in list order, entries with id 0 included; `read` gives the dword at an
/// offset. A header of all zeros or all ones, a pointer below 0x100 and a loop end the walk.
pub fn walk_extended(read: impl Fn(u16) -> u32) -> Vec<ExtendedExtent> {
    let mut found: Vec<ExtendedExtent> = Vec::new();
    let mut at = 0x100;
    while at >= 0x100 && !found.iter().any(|seen| seen.offset == at) {
        let header = read(at);
        if header == 0 || header == 0xFFFF_FFFF {
            break;
        }
        let [low, high, middle, _] = header.to_le_bytes();
        found.push(ExtendedExtent { id: u16::from_le_bytes([low, high]), version: middle & 0xF, offset: at });
        at = u16::try_from(header >> 20).map_or(0, |next| next & 0xFFC);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_entry_keeps_the_chain() {
        let read = |at| match at {
            0x100 => hidden(header(id::SRIOV, 1, 0x140)),
            0x140 => header(id::AER, 2, 0),
            _ => 0,
        };
        let found: Vec<(u16, u16)> = walk_extended(read).iter().map(|entry| (entry.id, entry.offset)).collect();
        assert_eq!(found, [(id::NULL, 0x100), (id::AER, 0x140)]);
    }

    #[test]
    fn loops_and_empty_lists_end_the_walk() {
        assert_eq!(walk_extended(|_| 0), []);
        assert_eq!(walk_extended(|_| 0xFFFF_FFFF), []);
        assert_eq!(walk_extended(|_| header(id::AER, 1, 0x100)).len(), 1);
        assert_eq!(walk_extended(|_| header(id::AER, 1, 0x80)).len(), 1);
    }
}
