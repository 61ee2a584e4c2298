//! The MSI-X capability (PCIe 6.0 7.7.2): where table and pending bits lie. Message control and the table behave as
//! [`crate::msix_table::MsixTable`] says.

use super::{Capability, id};
use crate::bar::BarIndex;
use crate::config::RegDef;

/// A place in a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MsixPlace {
    /// Which BAR, 0 to 5.
    pub bar: BarIndex,
    /// Byte offset in it, a multiple of 8.
    pub offset: u32,
}

impl MsixPlace {
    /// The register: offset with the BAR number in its low three bits.
    #[must_use]
    pub const fn register(self) -> u32 {
        (self.offset & !7) | (self.bar & 7) as u32
    }
}

/// Table and pending bit array of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsixLayout {
    /// Vector table, 16 bytes a vector.
    pub table: MsixPlace,
    /// Pending bits, one 8-byte word for each 64 vectors.
    pub pending: MsixPlace,
}

impl Capability for MsixLayout {
    fn id(&self) -> u8 {
        id::MSIX
    }

    fn layout(&self) -> Vec<RegDef> {
        vec![RegDef::default(), RegDef::read_only(self.table.register()), RegDef::read_only(self.pending.register())]
    }
}
