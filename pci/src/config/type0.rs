//! Lays out the header of an endpoint (PCIe 6.0 7.5.1.2). Base address registers are not in it: [`crate::bar::Bars`] holds
//! them.

use super::RegDef;
use crate::ids::Ids;
use crate::regs::{command, header, status, type0};

/// What an endpoint's header shows.
#[derive(Debug, Clone, Copy)]
pub struct Type0<'a> {
    /// Identity.
    pub ids: &'a Ids,
    /// Interrupt pin register: 0 none, 1 INTA to 4 INTD.
    pub interrupt_pin: u8,
    /// Header type bit 7.
    pub multifunction: bool,
    /// Whether it has memory BARs: memory space enable is writable.
    pub memory: bool,
    /// Whether it has I/O BARs: I/O space enable is writable.
    pub io: bool,
}

impl Type0<'_> {
    /// The dwords with their offsets.
    pub(super) fn registers(&self) -> Vec<(u16, RegDef)> {
        let mut kept = command::BUS_MASTER | command::PARITY | command::SERR | command::INTX_DISABLE;
        for (has, bit) in [(self.memory, command::MEMORY), (self.io, command::IO)] {
            kept |= if has { bit } else { 0 };
        }
        let subsystem = u32::from(self.ids.subsystem) << 16 | u32::from(self.ids.subsystem_vendor);
        let mut registers = common(self.ids, kept, if self.multifunction { header::MULTI_FUNCTION } else { 0 });
        registers.push((type0::SUBSYSTEM, RegDef::read_only(subsystem)));
        registers.push((header::CAPABILITIES, RegDef::default()));
        registers.push((header::INTERRUPT, interrupt(self.interrupt_pin)));
        registers
    }
}

/// The first four dwords of any header: `kept` are the writable command bits, `kind` the header type in its place.
pub(super) fn common(ids: &Ids, kept: u32, kind: u32) -> Vec<(u16, RegDef)> {
    let command = RegDef { reset: 0, writable: kept, clear_on_one: status::ERRORS, sticky: 0 };
    vec![
        (header::IDS, RegDef::read_only(u32::from(ids.device) << 16 | u32::from(ids.vendor))),
        (header::COMMAND_STATUS, command),
        (header::CLASS, RegDef::read_only(ids.class.value() << 8 | u32::from(ids.revision))),
        // The cache line size is kept for old software and has no effect (PCIe 6.0 7.5.1.1.7).
        (header::HEADER_TYPE, RegDef::writable(kind, 0xFF)),
    ]
}

/// Interrupt line, which only software uses, and pin. The line survives resets that a guest does by itself: nobody would
/// write it again.
pub(super) fn interrupt(pin: u8) -> RegDef {
    RegDef { reset: u32::from(pin) << 8, writable: 0xFF, clear_on_one: 0, sticky: 0xFF }
}
