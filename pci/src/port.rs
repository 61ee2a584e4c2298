//! A root port, switch upstream port, switch downstream port or PCIe-to-PCI bridge: a bridge with a PCI Express capability.
//! What it forwards is decided in [`crate::bridge`].
//!
//! | capability | offset | root | upstream | downstream | PCIe-to-PCI |
//! |---|---|---|---|---|---|
//! | PCI Express version 2 | 0x40 | type 4 | type 5 | type 6 | type 7 |
//! | MSI, 64-bit, maskable, 1 vector | 0x80 | yes | no | yes | no |
//! | subsystem ids, unless 0 | 0xA0 | own | host's or own | host's or own | host's or own |
//! | power management, D0 and D3hot | 0xA8 | yes | yes | yes | yes |
//! | AER | 0x100 | with root registers | yes | yes | no |
//! | ACS, control 0 at reset | 0x150 | yes | no | yes | no |
//! | serial number, one for all ports of a switch | 0x160 | yes | yes | yes | no |
//!
//! Hot-plug root and downstream ports have a slot ([`crate::slot`]), which raises the port's interrupt; their link status
//! follows what is in it. There is no I/O window, no ASPM and no LTR. A port in D3hot lets nothing
//! through; disabling the link has the effect of a secondary bus reset that is held: nothing below answers.

mod state;
mod writes;

use std::sync::Arc;

use thiserror::Error;

use crate::access::{Access, Reg};
use crate::address::{BusRange, Devfn};
use crate::bridge;
use crate::caps::express::{ExpressType, LINK_STATUS, LINK_STATUS_2, link_status, link_status_2, reg as express};
use crate::caps::{Express, MsiLayout, Power, Subsystem, power};
use crate::config::{BuildError, Change, ConfigBuilder, ConfigSpace, RegDef, Type1};
use crate::errors::{self, ErrorRegisters, PcieError, Recorded, Severity};
use crate::ext_caps::{Acs, Aer, AerKind, Serial};
use crate::function::{Changes, ResetKind};
use crate::ids::{ClassCode, Ids, own};
use crate::interrupts::{Interrupts, Messages};
use crate::link::{Link, LinkRate};
use crate::mirror::Mirror;
use crate::msi::{Msi, MsiVectorsError};
use crate::regs::{command, header, type1};
use crate::seams::{IntxLine, MsiPort};
use crate::slot::{Outcome, Slot, SlotError, SlotEvent};
use crate::topology::{Name, PlannedFunction, PlannedPort, PortKind, Windows};

pub use writes::WriteCounts;

const EXPRESS: u8 = 0x40;
const MSI: u8 = 0x80;
const SUBSYSTEM: u8 = 0xA0;
const POWER: u8 = 0xA8;
const AER: u16 = 0x100;
const ACS: u16 = 0x150;
const SERIAL: u16 = 0x160;

/// Offset of a register of the PCI Express capability.
const fn express(register: u8) -> u16 {
    (EXPRESS + register) as u16
}

const DEVICE_CONTROL_2: Reg = Reg::containing(express(express::DEVICE_CONTROL_2));
const LINK_CONTROL: Reg = Reg::containing(express(express::LINK_CONTROL));
const POWER_CONTROL: Reg = Reg::containing((POWER + power::CONTROL) as u16);
const SLOT_CONTROL: Reg = Reg::containing(express(express::SLOT_CONTROL));

/// A port with its registers.
pub struct Port {
    kind: PortKind,
    space: ConfigSpace,
    interrupts: Arc<Interrupts>,
    slot: Option<Slot>,
    /// Levels of the two things that interrupt.
    slot_interrupts: bool,
    error_interrupts: bool,
    /// What the guest told by the slot since the last [`Port::take_events`].
    told: Vec<SlotEvent>,
    writes: WriteCounts,
    /// Number of the bus that it is on, by the plan.
    primary: u8,
    planned: PlannedPort,
    /// What the link below comes to: as planned for what is there from the start, for what comes what both ends can do.
    trained: LinkRate,
}

impl Port {
    /// The port in its reset state: no buses, closed windows, decode off. Its interrupts leave through `msi`.
    pub fn new(planned: &PlannedFunction, port: &PlannedPort, msi: Arc<dyn MsiPort>) -> Result<Self, PortError> {
        let error = |source| PortError::Layout { name: planned.name.clone(), source };
        let kind = port.spec.kind;
        let ids = Ids { class: ClassCode::BRIDGE, ..port.spec.ids.unwrap_or_else(|| own_ids(kind)) };
        let slot = port.spec.slot().map(|hotplug| Slot::new(hotplug.removal, port.slot, port.occupied));
        let header = Type1 { ids: &ids, interrupt_pin: port.spec.interrupt_pin(), multifunction: planned.multifunction };
        let mut builder = ConfigBuilder::type1(&header);
        let [port_number, _] = port.slot.to_le_bytes();
        let express = Express {
            kind: express_type(kind),
            link: port.spec.link,
            link_up: port.occupied,
            port_number,
            slot: slot.as_ref().map(Slot::capabilities),
            flr: false,
            atomic_completers: port.spec.atomic_completers,
        };
        builder.capability_at(EXPRESS, &express).map_err(error)?;
        let mut messages = Messages::default();
        if kind.has_link_below() {
            let state = Msi::new(1, true).map_err(|source| PortError::Msi { name: planned.name.clone(), source })?;
            messages.msi = Some((state.clone(), builder.capability_at(MSI, &MsiLayout::from(&state)).map_err(error)?));
        }
        if (ids.subsystem_vendor, ids.subsystem) != (0, 0) {
            builder.capability_at(SUBSYSTEM, &Subsystem::from(&ids)).map_err(error)?;
        }
        builder.capability_at(POWER, &Power).map_err(error)?;
        let aer = match kind {
            PortKind::Root => Some(AerKind::RootPort),
            PortKind::Upstream | PortKind::Downstream => Some(AerKind::SwitchPort),
            PortKind::PciBridge => None,
        };
        if let Some(aer) = aer {
            builder.extended_at(AER, &Aer(aer)).map_err(error)?;
        }
        if kind.has_link_below() {
            builder.extended_at(ACS, &Acs).map_err(error)?;
        }
        if let Some(number) = serial_number(planned, port) {
            builder.extended_at(SERIAL, &Serial(number)).map_err(error)?;
        }
        let port_plan = port.clone();
        let mut port = Self {
            kind,
            space: builder.build(),
            interrupts: Interrupts::new(messages, msi, None),
            slot,
            slot_interrupts: false,
            error_interrupts: false,
            told: Vec::new(),
            writes: WriteCounts::default(),
            primary: planned.at.bdf.bus(),
            trained: if port_plan.occupied { port_plan.spec.link.current } else { port_plan.spec.link.max },
            planned: port_plan,
        };
        port.show_slot();
        Ok(port)
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
        let before = self.config_read(access.reg);
        let changes = self.write(access, value);
        let (def, changed) = (self.definition(access.reg), self.config_read(access.reg) != before);
        self.writes.count(def, access.lanes, changed);
        changes
    }

    /// What configuration writes came to since the port was made.
    #[must_use]
    pub const fn writes(&self) -> WriteCounts {
        self.writes
    }

    fn write(&mut self, access: Access, value: u32) -> Changes {
        if let Some(slot) = self.slot.as_mut().filter(|_| access.reg == SLOT_CONTROL) {
            let outcome = slot.write(access.lanes, value);
            self.follow(outcome);
            return if self.told.is_empty() { Changes::empty() } else { Changes::SLOT };
        }
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

    /// How a dword behaves, whoever keeps it.
    fn definition(&self, reg: Reg) -> RegDef {
        let def = self.space.definition(reg);
        match &self.slot {
            Some(_) if reg == SLOT_CONTROL => RegDef { writable: 0xFFFF, clear_on_one: 0xFFFF_0000, ..def },
            _ => RegDef { writable: def.writable | self.interrupts.msi_writable(reg), ..def },
        }
    }

    fn changes(&mut self, offset: u16, change: Change) -> Changes {
        const CONTROL_2: u16 = DEVICE_CONTROL_2.offset();
        const LINK: u16 = LINK_CONTROL.offset();
        const ROOT_COMMAND: u16 = AER + errors::reg::ROOT_COMMAND;
        const ROOT_STATUS: u16 = AER + errors::reg::ROOT_STATUS;
        const POWER_STATE: u16 = POWER_CONTROL.offset();
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
            POWER_STATE if flipped(power::STATE) => {
                // A state that the port does not have is not taken (PCIe 6.0 7.5.2.2).
                if matches!(change.new & power::STATE, 1 | 2) {
                    self.space.set(POWER_CONTROL, power::STATE, change.old);
                } else {
                    changes |= Changes::WINDOWS | Changes::BUS_MASTER | Changes::LINK;
                }
            }
            CONTROL_2 => changes.set(Changes::LINK, flipped(express::ARI_FORWARDING)),
            LINK if flipped(express::LINK_DISABLE) => {
                changes |= Changes::LINK;
                changes.set(Changes::RESET_BELOW, change.risen() & express::LINK_DISABLE != 0);
                if self.show_link()
                    && let Some(slot) = &mut self.slot
                {
                    let outcome = slot.link_changed();
                    self.follow(outcome);
                }
            }
            ROOT_COMMAND | ROOT_STATUS => self.follow_errors(),
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
        !self.asleep() && bridge::forwards(&self.space, at, len)
    }

    /// Whether a configuration request goes to `devfn` of the bus below. Over a link those for device 0 do, and others only with
    /// alternative routing-IDs, to functions above 7 (PCIe 6.0 6.13).
    #[must_use]
    pub fn forwards_to(&self, devfn: Devfn) -> bool {
        !self.kind.has_link_below() || devfn.device() == 0 || self.space.read(DEVICE_CONTROL_2) & express::ARI_FORWARDING != 0
    }

    /// Whether requests from below go up.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        !self.asleep() && self.space.read(Reg::containing(header::COMMAND_STATUS)) & command::BUS_MASTER != 0
    }

    /// Whether nothing below can answer: secondary bus reset is held, the link is disabled, or the port is in D3hot.
    #[must_use]
    pub fn in_reset(&self) -> bool {
        let control = self.space.read(Reg::containing(header::INTERRUPT));
        control & type1::SECONDARY_BUS_RESET != 0 || self.link_disabled() || self.asleep()
    }

    /// Back to the reset state: no buses, closed windows, decode off. What hangs below stays.
    pub fn reset(&mut self, kind: ResetKind) {
        self.space.reset(kind);
        self.interrupts.reset();
        self.slot_interrupts = false;
        self.error_interrupts = false;
        self.follow_errors();
        if let Some(slot) = &mut self.slot {
            let told = slot.reset(kind);
            self.told.extend(told);
        }
        self.show_link();
        self.show_slot();
    }

    /// The slot of a hot-plug port.
    #[must_use]
    pub const fn slot(&self) -> Option<&Slot> {
        self.slot.as_ref()
    }

    /// What the plan says of it.
    #[must_use]
    pub const fn planned(&self) -> &PlannedPort {
        &self.planned
    }

    /// The memory windows as they are programmed; `None` for closed ones.
    #[must_use]
    pub fn windows(&self) -> Windows {
        bridge::windows(&self.space)
    }

    /// Whether memory requests go down at all: memory space is enabled and the port is awake.
    #[must_use]
    pub fn decodes(&self) -> bool {
        !self.asleep() && self.space.read(Reg::containing(header::COMMAND_STATUS)) & command::MEMORY != 0
    }

    /// The ACS control register, which decides where requests between devices below go; `None` for ports without it.
    #[must_use]
    pub fn access_control(&self) -> Option<u16> {
        let [_, _, low, high] = self.space.read(Reg::containing(ACS + Acs::CAPABILITY_AND_CONTROL)).to_le_bytes();
        self.kind.has_link_below().then_some(u16::from_le_bytes([low, high]))
    }

    /// Whether a link partner is there.
    #[must_use]
    pub fn occupied(&self) -> bool {
        self.slot.as_ref().map_or(self.planned.occupied, Slot::occupied)
    }

    /// The link below as the registers show it, or would for a device that can do as much as the port.
    #[must_use]
    pub const fn link(&self) -> Link {
        Link { current: self.trained, ..self.planned.spec.link }
    }

    /// The device that is put into the slot next can do this much, if that is known.
    pub fn meet(&mut self, partner: Option<LinkRate>) {
        let max = self.planned.spec.link.max;
        self.trained = partner.map_or(max, |partner| max.between(partner));
    }

    /// A device is put into the slot: call when it can answer. The guest is told.
    pub fn insert(&mut self) -> Result<(), SlotError> {
        let enabled = !self.link_disabled();
        self.change_slot(|slot| slot.insert(enabled))
    }

    /// The device is taken out of the slot: call when it does not answer any longer. The guest is told.
    pub fn remove(&mut self) -> Result<(), SlotError> {
        let active = !self.link_disabled();
        self.change_slot(|slot| slot.remove(active))?;
        self.meet(None);
        Ok(())
    }

    /// The device of a port without a slot is gone for good: the link goes down. Nothing here tells the guest.
    pub fn vacate(&mut self) {
        if self.slot.is_none() {
            self.planned.occupied = false;
            self.show_link();
        }
    }

    /// Asks the guest to let go of the device in the slot.
    pub fn request_removal(&mut self) -> Result<(), SlotError> {
        self.change_slot(Slot::request)
    }

    /// Nothing waits for the guest any longer.
    pub fn expire(&mut self) {
        if let Some(slot) = &mut self.slot {
            slot.expire();
        }
    }

    /// What the guest told by the slot since the last call, in order.
    pub fn take_events(&mut self) -> Vec<SlotEvent> {
        std::mem::take(&mut self.told)
    }

    /// Gives the port a wire for guests that use no messages.
    pub fn connect(&self, line: Box<dyn IntxLine>) {
        self.interrupts.connect(line);
    }

    fn change_slot(&mut self, change: impl FnOnce(&mut Slot) -> Result<Outcome, SlotError>) -> Result<(), SlotError> {
        let outcome = change(self.slot.as_mut().ok_or(SlotError::Absent)?)?;
        // The link is up or down when the guest hears of it.
        self.show_link();
        self.follow(outcome);
        Ok(())
    }

    fn follow(&mut self, outcome: Outcome) {
        // Shown before the guest can hear of it.
        self.show_slot();
        if let Some(level) = outcome.interrupt {
            self.slot_interrupts = level;
            self.interrupt(level);
        }
        self.told.extend(outcome.events);
    }

    /// Something has begun or ended to interrupt. Each beginning is a message; the wire is low when nothing is left.
    fn interrupt(&self, begins: bool) {
        if begins {
            self.interrupts.raise(0);
        } else if !self.slot_interrupts && !self.error_interrupts {
            self.interrupts.lower();
        }
    }

    /// Records an error of the port, with the start of the packet that it is about.
    pub fn record(&mut self, error: PcieError, header: [u32; 4]) -> Recorded {
        errors::record(&mut self.space, ErrorRegisters { aer: AER, express: EXPRESS }, error, header)
    }

    /// A report comes from below. Whether it goes up: SERR is enabled in bridge control.
    pub fn forward_error(&mut self, severity: Severity) -> bool {
        errors::forward(&mut self.space, severity)
    }

    /// A root port takes the report of `source`, a requester id: its root registers show it, and it interrupts if that is
    /// enabled.
    pub fn collect(&mut self, severity: Severity, source: u16) {
        if self.kind == PortKind::Root {
            errors::collect(&mut self.space, AER, severity, source);
            self.follow_errors();
        }
    }

    fn follow_errors(&mut self) {
        let level = self.kind == PortKind::Root && errors::interrupts(&self.space, AER);
        if level != self.error_interrupts {
            self.error_interrupts = level;
            self.interrupt(level);
        }
    }

    fn show_slot(&mut self) {
        if let Some(slot) = &self.slot {
            self.space.set(SLOT_CONTROL, u32::MAX, slot.read());
        }
    }

    fn asleep(&self) -> bool {
        self.space.read(POWER_CONTROL) & power::STATE != 0
    }

    fn link_disabled(&self) -> bool {
        self.space.read(LINK_CONTROL) & express::LINK_DISABLE != 0
    }

    /// Lets link status follow the link partner and link disable; tells whether link active changed.
    fn show_link(&mut self) -> bool {
        if !self.kind.has_link_below() {
            return false;
        }
        let (link, occupied) = (self.link(), self.occupied());
        let inactive = if self.link_disabled() { express::LINK_ACTIVE } else { 0 };
        let change = self.space.set(LINK_CONTROL, LINK_STATUS, link_status(link, occupied) & !inactive);
        self.space.set(Reg::containing(express(express::LINK_CONTROL_2)), LINK_STATUS_2, link_status_2(link, occupied));
        change.flipped() & express::LINK_ACTIVE != 0
    }

    /// Programs the plan's bus numbers and windows and lets the port forward in both directions, and error reports up, as
    /// firmware would. Where nothing is below, memory waits until software enables it: a guest that sizes the BARs which the
    /// port does not have would otherwise switch memory off and on for each.
    pub fn program(&mut self) {
        let BusRange { secondary, subordinate } = self.planned.buses;
        let numbers = u32::from_le_bytes([self.primary, secondary, subordinate, 0]);
        self.space.set(Reg::containing(type1::BUS_NUMBERS), 0x00FF_FFFF, numbers);
        bridge::set_windows(&mut self.space, &self.planned.windows);
        self.space.set(Reg::containing(header::INTERRUPT), type1::SERR_FORWARDING, type1::SERR_FORWARDING);
        let enables = if self.occupied() { command::MEMORY } else { 0 } | command::BUS_MASTER;
        let change = self.space.set(Reg::containing(header::COMMAND_STATUS), command::MEMORY | command::BUS_MASTER, enables);
        self.interrupts.config_written(Access::dword(header::COMMAND_STATUS), change.new, change.new);
    }
}

/// An EUI-64 of the locally administered kind: the segment with a root port's place, or with the bus inside the switch.
fn serial_number(planned: &PlannedFunction, port: &PlannedPort) -> Option<u64> {
    const LOCAL: u64 = 0x0242_4E59 << 32;
    let place = match port.spec.kind {
        PortKind::Root => planned.at.bdf.requester_id(),
        PortKind::Upstream => u16::from(port.buses.secondary) << 8,
        PortKind::Downstream => u16::from(planned.at.bdf.bus()) << 8,
        PortKind::PciBridge => return None,
    };
    Some(LOCAL | u64::from(planned.at.segment) << 16 | u64::from(place))
}

const fn express_type(kind: PortKind) -> ExpressType {
    match kind {
        PortKind::Root => ExpressType::RootPort,
        PortKind::Upstream => ExpressType::UpstreamPort,
        PortKind::Downstream => ExpressType::DownstreamPort,
        PortKind::PciBridge => ExpressType::PciBridge,
    }
}

/// What a port shows when the host gives no ids.
#[must_use]
pub const fn own_ids(kind: PortKind) -> Ids {
    let device = match kind {
        PortKind::Root => own::ROOT_PORT,
        PortKind::Upstream => own::UPSTREAM_PORT,
        PortKind::Downstream => own::DOWNSTREAM_PORT,
        PortKind::PciBridge => own::PCI_BRIDGE,
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
