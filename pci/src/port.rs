//! A root port, switch upstream port or switch downstream port: a bridge with a PCI Express capability. What it forwards is
//! decided in [`crate::bridge`].
//!
//! | capability | offset | root | upstream | downstream |
//! |---|---|---|---|---|
//! | PCI Express version 2 | 0x40 | type 4 | type 5 | type 6 |
//! | MSI, 64-bit, maskable, 1 vector | 0x80 | yes | no | yes |
//! | subsystem ids, unless 0 | 0xA0 | own | host's or own | host's or own |
//! | AER | 0x100 | with root registers | yes | yes |
//! | ACS, control 0 at reset | 0x150 | yes | no | yes |
//!
//! There is no I/O window, no ASPM, no LTR, no power management and no slot: ports never leave D0, and nothing is added or
//! removed while they run, so that nothing interrupts. Disabling the link has the effect of a secondary bus reset that is held: nothing below answers.

use std::sync::Arc;

use thiserror::Error;

use crate::access::{Access, Reg};
use crate::address::BusRange;
use crate::bridge;
use crate::caps::express::{ExpressType, reg as express};
use crate::caps::{Express, MsiLayout, Subsystem};
use crate::config::{BuildError, Change, ConfigBuilder, ConfigSpace, Type1};
use crate::ext_caps::{Acs, Aer, AerKind};
use crate::function::{Changes, ResetKind};
use crate::ids::{ClassCode, Ids, own};
use crate::interrupts::{Interrupts, Messages};
use crate::mirror::Mirror;
use crate::msi::{Msi, MsiVectorsError};
use crate::regs::{command, header, type1};
use crate::seams::MsiPort;
use crate::topology::{Name, PlannedFunction, PlannedPort, PortKind};

const EXPRESS: u8 = 0x40;
const MSI: u8 = 0x80;
const SUBSYSTEM: u8 = 0xA0;
const AER: u16 = 0x100;
const ACS: u16 = 0x150;

/// Offset of a register of the PCI Express capability.
const fn express(register: u8) -> u16 {
    (EXPRESS + register) as u16
}

/// A port with its registers.
pub struct Port {
    kind: PortKind,
    space: ConfigSpace,
    interrupts: Arc<Interrupts>,
    /// Number of the bus that it is on, by the plan.
    primary: u8,
    planned: PlannedPort,
}

impl Port {
    /// The port in its reset state: no buses, closed windows, decode off. Its interrupts leave through `msi`.
    pub fn new(planned: &PlannedFunction, port: &PlannedPort, msi: Arc<dyn MsiPort>) -> Result<Self, PortError> {
        let error = |source| PortError::Layout { name: planned.name.clone(), source };
        let kind = port.spec.kind;
        let ids = Ids { class: ClassCode::BRIDGE, ..port.spec.ids.unwrap_or_else(|| own_ids(kind)) };
        // Only root ports have services that interrupt; a hot-plug slot would be another.
        let interrupt_pin = u8::from(kind == PortKind::Root);
        let header = Type1 { ids: &ids, interrupt_pin, multifunction: planned.multifunction };
        let mut builder = ConfigBuilder::type1(&header);
        let [port_number, _] = port.slot.to_le_bytes();
        let express = Express {
            kind: express_type(kind),
            link: port.spec.link,
            link_up: port.occupied,
            port_number,
            flr: false,
            atomic_completers: port.spec.atomic_completers,
        };
        builder.capability_at(EXPRESS, &express).map_err(error)?;
        let mut messages = Messages::default();
        if kind != PortKind::Upstream {
            let state = Msi::new(1, true).map_err(|source| PortError::Msi { name: planned.name.clone(), source })?;
            messages.msi = Some((state.clone(), builder.capability_at(MSI, &MsiLayout::from(&state)).map_err(error)?));
        }
        if (ids.subsystem_vendor, ids.subsystem) != (0, 0) {
            builder.capability_at(SUBSYSTEM, &Subsystem::from(&ids)).map_err(error)?;
        }
        let aer = if kind == PortKind::Root { AerKind::RootPort } else { AerKind::SwitchPort };
        builder.extended_at(AER, &Aer(aer)).map_err(error)?;
        if kind != PortKind::Upstream {
            builder.extended_at(ACS, &Acs).map_err(error)?;
        }
        Ok(Self {
            kind,
            space: builder.build(),
            interrupts: Interrupts::new(messages, msi, None),
            primary: planned.at.bdf.bus(),
            planned: port.clone(),
        })
    }

    /// Which kind of port.
    #[must_use]
    pub const fn kind(&self) -> PortKind {
        self.kind
    }

    /// One dword of configuration space.
    #[must_use]
    pub fn config_read(&self, reg: Reg) -> u32 {
        let value = self.space.read(reg);
        self.interrupts.overlay(reg).map_or(value, |(mask, own)| (value & !mask) | own)
    }

    /// Writes the carried bytes of one dword; returns what must be looked at again.
    pub fn config_write(&mut self, access: Access, value: u32) -> Changes {
        let change = self.space.write(access, value);
        self.interrupts.config_written(access, value, change.new);
        self.changes(access.reg.offset(), change)
    }

    /// Shows its configuration space in `mirror` from this point on.
    pub fn mirror(&mut self, mirror: Arc<dyn Mirror>) {
        let stored = self.space.read(Reg::containing(header::COMMAND_STATUS));
        self.interrupts.mirror(Arc::clone(&mirror), stored);
        self.space.mirror(mirror, self.interrupts.owned());
    }

    fn changes(&mut self, offset: u16, change: Change) -> Changes {
        const LINK_CONTROL: u16 = express(express::LINK_CONTROL);
        const BUSES: u32 = 0x00FF_FF00;
        let mut changes = Changes::empty();
        let flipped = |mask| change.flipped() & mask != 0;
        match offset {
            header::COMMAND_STATUS => {
                changes.set(Changes::DECODE | Changes::WINDOWS, flipped(command::MEMORY));
                changes.set(Changes::BUS_MASTER, flipped(command::BUS_MASTER));
            }
            type1::BUS_NUMBERS => changes.set(Changes::BUS_RANGE, flipped(BUSES)),
            type1::MEMORY | type1::PREFETCHABLE | type1::PREFETCHABLE_BASE_UPPER | type1::PREFETCHABLE_LIMIT_UPPER => {
                changes.set(Changes::WINDOWS, flipped(u32::MAX));
            }
            header::INTERRUPT => {
                changes.set(Changes::LINK, flipped(type1::SECONDARY_BUS_RESET));
                changes.set(Changes::RESET_BELOW, change.risen() & type1::SECONDARY_BUS_RESET != 0);
            }
            LINK_CONTROL if flipped(express::LINK_DISABLE) => {
                changes |= Changes::LINK;
                changes.set(Changes::RESET_BELOW, change.risen() & express::LINK_DISABLE != 0);
                let up = self.planned.occupied && change.new & express::LINK_DISABLE == 0;
                let active = if up { express::LINK_ACTIVE } else { 0 };
                self.space.set(Reg::containing(LINK_CONTROL), express::LINK_ACTIVE, active);
            }
            _ => {}
        }
        changes
    }

    /// The buses below; `None` while the secondary bus is 0 or above the subordinate one.
    #[must_use]
    pub fn buses(&self) -> Option<BusRange> {
        bridge::buses(&self.space)
    }

    /// Whether a memory request for `len` bytes from `at` goes down: memory space is enabled and one window holds all of it.
    #[must_use]
    pub fn forwards(&self, at: u64, len: u64) -> bool {
        bridge::forwards(&self.space, at, len)
    }

    /// Whether requests from below go up.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        self.space.read(Reg::containing(header::COMMAND_STATUS)) & command::BUS_MASTER != 0
    }

    /// Whether nothing below can answer: secondary bus reset is held, or the link is disabled.
    #[must_use]
    pub fn in_reset(&self) -> bool {
        let control = self.space.read(Reg::containing(header::INTERRUPT));
        let link = self.space.read(Reg::containing(express(express::LINK_CONTROL)));
        control & type1::SECONDARY_BUS_RESET != 0 || link & express::LINK_DISABLE != 0
    }

    /// Back to the reset state: no buses, closed windows, decode off.
    pub fn reset(&mut self, kind: ResetKind) {
        self.space.reset(kind);
        self.interrupts.reset();
    }

    /// Programs the plan's bus numbers and windows and lets the port forward in both directions, as firmware would.
    pub fn program(&mut self) {
        let BusRange { secondary, subordinate } = self.planned.buses;
        let numbers = u32::from_le_bytes([self.primary, secondary, subordinate, 0]);
        self.space.set(Reg::containing(type1::BUS_NUMBERS), 0x00FF_FFFF, numbers);
        bridge::set_windows(&mut self.space, &self.planned.windows);
        let enables = command::MEMORY | command::BUS_MASTER;
        let change = self.space.set(Reg::containing(header::COMMAND_STATUS), enables, enables);
        self.interrupts.config_written(Access::dword(header::COMMAND_STATUS), change.new, change.new);
    }
}

const fn express_type(kind: PortKind) -> ExpressType {
    match kind {
        PortKind::Root => ExpressType::RootPort,
        PortKind::Upstream => ExpressType::UpstreamPort,
        PortKind::Downstream => ExpressType::DownstreamPort,
    }
}

/// What a port shows when the host gives no ids.
const fn own_ids(kind: PortKind) -> Ids {
    let device = match kind {
        PortKind::Root => own::ROOT_PORT,
        PortKind::Upstream => own::UPSTREAM_PORT,
        PortKind::Downstream => own::DOWNSTREAM_PORT,
    };
    let (subsystem_vendor, subsystem) = own::SUBSYSTEM;
    Ids { vendor: own::VENDOR, device, class: ClassCode::BRIDGE, revision: 0, subsystem_vendor, subsystem }
}

/// A port that cannot be.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PortError {
    /// Its capabilities.
    #[error("the capabilities of port {name} do not fit in configuration space")]
    Layout {
        /// Which port.
        name: Name,
        /// What is wrong.
        #[source]
        source: BuildError,
    },
    /// Its MSI capability.
    #[error("the MSI capability of port {name} is impossible")]
    Msi {
        /// Which port.
        name: Name,
        /// What is wrong.
        #[source]
        source: MsiVectorsError,
    },
}

#[cfg(test)]
mod tests;
