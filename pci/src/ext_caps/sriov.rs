//! The SR-IOV capability of a physical function (PCIe 6.0 9.3.3). VF BARs are not in it: [`crate::bar::Bars`] holds them.

use super::{ExtendedCapability, id};
use crate::config::RegDef;
use crate::sriov::SriovSpec;

/// Offset of the first VF BAR from the capability's start.
pub const VF_BAR0: u16 = 0x24;
/// Offset of the dword with control and status.
pub const CONTROL: u16 = 0x08;
/// Offset of the dword with NumVFs and the function dependency link.
pub const NUM_VFS: u16 = 0x10;

/// Bits of the control register (PCIe 6.0 9.3.3.3).
pub mod control {
    /// VF Enable.
    pub const ENABLE: u16 = 1 << 0;
    /// VF Memory Space Enable.
    pub const MEMORY: u16 = 1 << 3;
    /// ARI Capable Hierarchy.
    pub const ARI: u16 = 1 << 4;
}

/// The capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sriov {
    /// What it says.
    pub spec: SriovSpec,
    /// Whether virtual functions can be enabled; otherwise the guest sees how many there are and assigns their addresses.
    pub can_enable: bool,
}

impl ExtendedCapability for Sriov {
    fn id(&self) -> u16 {
        id::SRIOV
    }

    fn version(&self) -> u8 {
        1
    }

    fn layout(&self) -> Vec<RegDef> {
        let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        let Self { spec, can_enable } = self;
        let control = control::ARI | if *can_enable { control::ENABLE | control::MEMORY } else { 0 };
        let mut layout = vec![RegDef::default(); 16];
        let known = [
            (CONTROL, RegDef::writable(0, control.into())),
            (0x0C, RegDef::read_only(pair(spec.total_vfs, spec.total_vfs))),
            (NUM_VFS, RegDef::writable(0, 0xFFFF)),
            (0x14, RegDef::read_only(pair(spec.first_offset, spec.stride))),
            (0x18, RegDef::read_only(pair(0, spec.vf_device))),
            // The page sizes that every function supports: 4K, 8K, 64K, 256K, 1M, 4M.
            (0x1C, RegDef::read_only(0x553)),
            (0x20, RegDef::writable(1, 0x553)),
        ];
        for (offset, def) in known {
            if let Some(dword) = layout.get_mut(usize::from(offset / 4)) {
                *dword = def;
            }
        }
        layout
    }
}
