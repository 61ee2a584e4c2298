//! Access control services (PCIe 6.0 7.7.11): which requests between devices a port may send upstream instead.

use super::{ExtendedCapability, id};
use crate::config::RegDef;

/// Source validation, translation blocking, request and completion redirect, upstream forwarding, direct translated. No
/// egress control. The control register is 0 at reset: peers reach each other directly until software says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acs;

impl Acs {
    /// The capability bits, which are also the writable control bits.
    pub const SERVICES: u32 = 0x5F;
    /// Offset of capability and control from the capability's start.
    pub const CAPABILITY_AND_CONTROL: u16 = 4;
    /// Bits of the control register with their names, as lspci writes them.
    pub const NAMES: [(u16, &'static str); 7] = [
        (1 << 0, "SrcValid"),
        (1 << 1, "TransBlk"),
        (1 << 2, "ReqRedir"),
        (1 << 3, "CmpltRedir"),
        (1 << 4, "UpstreamFwd"),
        (1 << 5, "EgressCtrl"),
        (1 << 6, "DirectTrans"),
    ];
}

impl ExtendedCapability for Acs {
    fn id(&self) -> u16 {
        id::ACS
    }

    fn version(&self) -> u8 {
        1
    }

    fn layout(&self) -> Vec<RegDef> {
        vec![RegDef::default(), RegDef::writable(Self::SERVICES, Self::SERVICES << 16)]
    }
}
