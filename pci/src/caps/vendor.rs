//! The vendor-specific capability (PCIe 6.0 7.9.4).

use super::{Capability, id};
use crate::config::RegDef;

/// A read-only vendor-specific capability: these bytes follow the length byte. At most 189 bytes; the builder refuses what
/// has no room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vendor(pub Vec<u8>);

impl Capability for Vendor {
    fn id(&self) -> u8 {
        id::VENDOR
    }

    fn layout(&self) -> Vec<RegDef> {
        let len = u8::try_from(self.0.len().saturating_add(3)).unwrap_or(u8::MAX);
        let bytes: Vec<u8> = [0, 0, len].into_iter().chain(self.0.iter().copied()).collect();
        let dword = |chunk: &[u8]| {
            let bits = chunk.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte));
            RegDef::read_only(bits)
        };
        bytes.chunks(4).map(dword).collect()
    }
}
