//! The power management capability (PCIe 6.0 7.5.2): D0 and D3hot.

use super::{Capability, id};
use crate::config::RegDef;

/// Offset of the control and status register from the capability's start.
pub const CONTROL: u8 = 4;
/// Power state field of that register: 0 is D0, 3 is D3hot.
pub const STATE: u32 = 3;
/// No soft reset: registers keep their values on the way from D3hot to D0, so that going there and back resets nothing.
pub const NO_SOFT_RESET: u32 = 1 << 3;

/// Where the control and status register of a capability at `offset` is.
#[must_use]
pub const fn control_of(offset: u8) -> u16 {
    offset as u16 + CONTROL as u16
}

/// Power management of a port. Registers keep their values in D3hot; power management events are passed on, as every port
/// must say (PCIe 6.0 7.5.2.1), and never made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Power;

impl Capability for Power {
    fn id(&self) -> u8 {
        id::POWER
    }

    fn layout(&self) -> Vec<RegDef> {
        const VERSION: u32 = 3;
        /// From D0, D3hot and D3cold.
        const EVENTS_FROM: u32 = 1 << 11 | 1 << 14 | 1 << 15;
        const EVENT_ENABLE: u32 = 1 << 8;
        const EVENT_STATUS: u32 = 1 << 15;
        let control = RegDef {
            reset: NO_SOFT_RESET,
            writable: STATE | EVENT_ENABLE,
            clear_on_one: EVENT_STATUS,
            sticky: EVENT_ENABLE | EVENT_STATUS,
        };
        vec![RegDef::read_only((VERSION | EVENTS_FROM) << 16), control]
    }
}
