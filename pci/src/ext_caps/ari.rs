//! The alternative routing-id capability (PCIe 6.0 7.8.8): functions of one device beyond 7, found by a chain.

use super::{ExtendedCapability, id};
use crate::config::RegDef;

/// The capability. The owner shows the next function's number in bits 15:8 of [`CAPABILITY`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ari;

/// Offset of the capability register's dword.
pub const CAPABILITY: u16 = 4;

impl ExtendedCapability for Ari {
    fn id(&self) -> u16 {
        id::ARI
    }

    fn version(&self) -> u8 {
        1
    }

    fn layout(&self) -> Vec<RegDef> {
        // Without function groups control has nothing to keep.
        vec![RegDef::default(), RegDef::default()]
    }
}
