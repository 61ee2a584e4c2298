//! The subsystem capability, SSVID (PCIe 6.0 7.9.23): what a bridge shows in place of the subsystem ids that its header
//! has no room for.

use super::{Capability, id};
use crate::config::RegDef;
use crate::ids::Ids;

/// Subsystem vendor and subsystem id of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subsystem {
    /// Subsystem vendor id.
    pub vendor: u16,
    /// Subsystem id.
    pub device: u16,
}

impl From<&Ids> for Subsystem {
    fn from(ids: &Ids) -> Self {
        Self { vendor: ids.subsystem_vendor, device: ids.subsystem }
    }
}

impl Capability for Subsystem {
    fn id(&self) -> u8 {
        id::SUBSYSTEM
    }

    fn layout(&self) -> Vec<RegDef> {
        vec![RegDef::default(), RegDef::read_only(u32::from(self.device) << 16 | u32::from(self.vendor))]
    }
}
