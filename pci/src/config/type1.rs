//! Lays out the header of a bridge (PCIe 6.0 7.5.1.3): bus numbers, memory windows, no I/O window, no BARs.

use super::RegDef;
use super::type0::{common, interrupt};
use crate::ids::Ids;
use crate::regs::{command, header, status, type1};

/// What a bridge's header shows.
#[derive(Debug, Clone, Copy)]
pub struct Type1<'a> {
    /// Identity; the subsystem ids go to a capability.
    pub ids: &'a Ids,
    /// Interrupt pin register: 0 none, 1 INTA to 4 INTD.
    pub interrupt_pin: u8,
    /// Header type bit 7.
    pub multifunction: bool,
}

impl Type1<'_> {
    /// The dwords with their offsets. Windows are closed (base above limit) at reset.
    pub(super) fn registers(&self) -> Vec<(u16, RegDef)> {
        let kept = command::MEMORY | command::BUS_MASTER | command::PARITY | command::SERR | command::INTX_DISABLE;
        let kind = header::TYPE_1 | if self.multifunction { header::MULTI_FUNCTION } else { 0 };
        let mut registers = common(self.ids, kept, kind);
        let mut control = interrupt(self.interrupt_pin);
        control.writable |= type1::BRIDGE_CONTROL;
        registers.extend([
            (type1::BUS_NUMBERS, RegDef::writable(0, 0x00FF_FFFF)),
            // I/O base and limit are read-only 0: no I/O window, ever. The secondary status has the error bits of the primary.
            (type1::IO_AND_STATUS, RegDef { clear_on_one: status::ERRORS, ..RegDef::default() }),
            (type1::MEMORY, RegDef::writable(0x0000_FFF0, 0xFFF0_FFF0)),
            // The low nibbles are read-only 1: 64-bit.
            (type1::PREFETCHABLE, RegDef::writable(0x0001_FFF1, 0xFFF0_FFF0)),
            (type1::PREFETCHABLE_BASE_UPPER, RegDef::writable(0, 0xFFFF_FFFF)),
            (type1::PREFETCHABLE_LIMIT_UPPER, RegDef::writable(0, 0xFFFF_FFFF)),
            (header::CAPABILITIES, RegDef::default()),
            (header::INTERRUPT, control),
        ]);
        registers
    }
}
