//! The SR-IOV capability of a physical function (PCIe 6.0 9.3.3) whose virtual functions cannot be enabled: the guest sees how
//! many there are and assigns their addresses. VF BARs are not in it: [`crate::bar::Bars`] holds them.

use super::{ExtendedCapability, id};
use crate::config::RegDef;
use crate::sriov::SriovSpec;

/// Offset of the first VF BAR from the capability's start.
pub const VF_BAR0: u16 = 0x24;
/// Offset of the dword with NumVFs and the function dependency link.
pub const NUM_VFS: u16 = 0x10;

/// The capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sriov(pub SriovSpec);

impl ExtendedCapability for Sriov {
    fn id(&self) -> u16 {
        id::SRIOV
    }

    fn version(&self) -> u8 {
        1
    }

    fn layout(&self) -> Vec<RegDef> {
        let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        let Self(spec) = self;
        let mut layout = vec![RegDef::default(); 16];
        let known = [
            // ARI capable hierarchy, control bit 4, is kept; enable and memory space of virtual functions stay 0.
            (0x08, RegDef::writable(0, 1 << 4)),
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
