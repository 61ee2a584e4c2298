//! The room of an MSI capability (PCIe 6.0 7.7.1). Its registers behave as [`crate::msi::Msi`] says.

use super::{Capability, id};
use crate::config::RegDef;
use crate::msi::Msi;

/// Length of the MSI capability of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiLayout {
    /// Bytes.
    len: u8,
}

impl From<&Msi> for MsiLayout {
    fn from(msi: &Msi) -> Self {
        Self { len: msi.len() }
    }
}

impl Capability for MsiLayout {
    fn id(&self) -> u8 {
        id::MSI
    }

    fn layout(&self) -> Vec<RegDef> {
        vec![RegDef::default(); usize::from(self.len / 4)]
    }
}
