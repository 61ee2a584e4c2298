//! What a guest does about a slot: the order of reads and writes of Linux's driver for native hot-plug (linux:
//! drivers/pci/hotplug/pciehp_hpc.c and pciehp_ctrl.c), one step at a time, so that a test can put anything in between.
//!
//! It sees configuration space alone. The interrupt handler and the thread behind it are separate, as in Linux: the handler
//! clears the events and remembers them, the thread acts on them later.

use super::assign::{self, AssignError};
use super::{Cycles, Enumerator, Found, reg};
use crate::address::{BusRange, Sbdf};

/// Bits of slot status and control, by their own weight.
mod bit {
    pub const BUTTON: u16 = 1 << 0;
    pub const PRESENCE: u16 = 1 << 3;
    pub const OCCUPIED: u16 = 1 << 6;
    pub const LINK: u16 = 1 << 8;
    pub const EVENTS: u16 = BUTTON | 1 << 1 | 1 << 2 | PRESENCE | 1 << 4 | LINK;
    pub const INTERRUPT: u16 = 1 << 5;
    pub const LINK_ENABLE: u16 = 1 << 12;
    pub const POWER: u16 = 3 << 8;
    pub const POWER_ON: u16 = 1 << 8;
    pub const POWER_BLINK: u16 = 2 << 8;
    pub const POWER_OFF: u16 = 3 << 8;
    /// Not of a register: software asks for the device to be let go.
    pub const DISABLE: u16 = 1 << 15;
}

/// Where the driver is with its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing is used.
    Off,
    /// A device is being brought up: its link has been waited for.
    BringingUp,
    /// A device is being brought up: it has answered.
    Configuring,
    /// A device is used.
    On,
    /// The button was pressed; the device is let go when the time is over.
    BlinkingOff,
}

/// How far the driver has taken the slot over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    No,
    Cleared,
    Done,
}

/// The driver of one slot.
#[derive(Debug)]
pub struct Pciehp {
    port: Sbdf,
    /// Offset of the PCI Express capability.
    express: u16,
    capabilities: u32,
    state: State,
    probe: Probe,
    pending: u16,
    /// What it uses.
    known: Vec<Found>,
    /// What could not be brought up, and why.
    failures: u32,
}

impl Pciehp {
    /// A driver for the port at `port`; `None` if that has no hot-plug slot. What the port has at this moment is in use, as
    /// after a boot.
    pub fn boot(cycles: &mut dyn Cycles, port: Sbdf) -> Option<Self> {
        let mut enumerator = Enumerator { cycles, segment: port.segment };
        let express = enumerator.capability(port, 0x10)?;
        if enumerator.read16(port, express + 2) & 0x100 == 0 {
            return None;
        }
        let capabilities = enumerator.read32(port, express + 0x14);
        let bus = enumerator.buses(port).secondary;
        let windows = enumerator.windows(port);
        let known = assign::added(cycles, port, bus, windows).ok()?;
        let state = if known.is_empty() { State::Off } else { State::On };
        Some(Self { port, express, capabilities, state, probe: Probe::No, pending: 0, known, failures: 0 })
    }

    /// Takes the slot over, first half: messages with `data` are enabled, stale events discarded.
    pub fn probe(&mut self, cycles: &mut dyn Cycles, data: u16) {
        if self.probe != Probe::No {
            return;
        }
        let mut enumerator = Enumerator { cycles, segment: self.port.segment };
        if let Some(msi) = enumerator.capability(self.port, 5) {
            enumerator.write32(self.port, msi + 4, 0xFEE0_0000);
            enumerator.write32(self.port, msi + 8, 0);
            enumerator.write16(self.port, msi + 12, data);
            enumerator.write16(self.port, msi + 2, 1);
        }
        let command = enumerator.read16(self.port, reg::COMMAND);
        enumerator.write16(self.port, reg::COMMAND, command | 6);
        self.write_status(cycles, bit::EVENTS);
        self.probe = Probe::Cleared;
    }

    /// Takes the slot over, second half: events are enabled, then presence is held against what is in use.
    pub fn listen(&mut self, cycles: &mut dyn Cycles) {
        if self.probe != Probe::Cleared {
            return;
        }
        let event = if self.has_button() { bit::BUTTON } else { bit::PRESENCE };
        let enables = event | bit::INTERRUPT | bit::LINK_ENABLE;
        let control = self.control(cycles);
        self.write_control(cycles, control & bit::POWER | enables);
        self.probe = Probe::Done;
        let occupied = self.status(cycles) & bit::OCCUPIED != 0 || self.link(cycles).is_some();
        if occupied != (self.state == State::On) {
            self.pending |= bit::PRESENCE;
        }
    }

    /// The interrupt handler: notes and clears events until none is left.
    pub fn interrupt(&mut self, cycles: &mut dyn Cycles) {
        if self.probe != Probe::Done {
            return;
        }
        loop {
            let events = self.status(cycles) & bit::EVENTS;
            if events == 0 {
                break;
            }
            self.pending |= events;
            self.write_status(cycles, events);
        }
    }

    /// One step of the thread; whether there was anything to do.
    pub fn work(&mut self, cycles: &mut dyn Cycles) -> bool {
        match self.state {
            State::BringingUp => {
                let bus = self.buses(cycles).secondary;
                let mut enumerator = Enumerator { cycles, segment: self.port.segment };
                if enumerator.scan_bus(bus, Some(self.port)).is_empty() {
                    self.fail(cycles);
                } else {
                    // What changed up to here is taken care of.
                    self.pending &= !(bit::PRESENCE | bit::LINK);
                    self.state = State::Configuring;
                }
                true
            }
            State::Configuring => {
                match self.configure(cycles) {
                    Ok(known) if !known.is_empty() => {
                        self.known = known;
                        self.state = State::On;
                        self.light(cycles, bit::POWER_ON);
                    }
                    Ok(_) | Err(_) => self.fail(cycles),
                }
                true
            }
            State::Off | State::On | State::BlinkingOff => {
                let events = std::mem::take(&mut self.pending);
                if events & bit::BUTTON != 0 {
                    self.button(cycles);
                }
                if events & bit::DISABLE != 0 {
                    self.let_go(cycles);
                } else if events & (bit::PRESENCE | bit::LINK) != 0 {
                    self.change(cycles);
                }
                events != 0
            }
        }
    }

    /// The time after a press is over.
    pub fn time_is_over(&mut self) {
        if self.state == State::BlinkingOff {
            self.pending |= bit::DISABLE;
        }
    }

    /// Software asks for the device to be let go; whether it is in use.
    pub fn power_off(&mut self) -> bool {
        let in_use = matches!(self.state, State::On | State::BlinkingOff);
        if in_use {
            self.pending |= bit::DISABLE;
        }
        in_use
    }

    /// Software asks for what is in the slot to be used; whether nothing is.
    pub fn power_on(&mut self) -> bool {
        let unused = self.state == State::Off;
        if unused {
            self.pending |= bit::PRESENCE;
        }
        unused
    }

    /// Where the driver is.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Whether it has taken the slot over.
    #[must_use]
    pub fn listens(&self) -> bool {
        self.probe == Probe::Done
    }

    /// What it uses.
    #[must_use]
    pub fn known(&self) -> &[Found] {
        &self.known
    }

    /// How often a device could not be brought up.
    #[must_use]
    pub const fn failures(&self) -> u32 {
        self.failures
    }

    const fn has_button(&self) -> bool {
        self.capabilities & 1 != 0
    }

    /// A first press asks for the device to go, a second one takes that back.
    fn button(&mut self, cycles: &mut dyn Cycles) {
        match self.state {
            State::On => {
                self.state = State::BlinkingOff;
                self.light(cycles, bit::POWER_BLINK);
            }
            State::BlinkingOff => {
                self.state = State::On;
                self.light(cycles, bit::POWER_ON);
            }
            _ => {}
        }
    }

    /// Presence or link changed: what was used is gone, whatever is there is new.
    fn change(&mut self, cycles: &mut dyn Cycles) {
        if self.state != State::Off {
            self.gone(cycles);
        }
        let occupied = self.status(cycles) & bit::OCCUPIED != 0;
        if !occupied && self.link(cycles).is_none() {
            return;
        }
        self.light(cycles, bit::POWER_BLINK);
        match self.link(cycles) {
            Some(lanes) if lanes != 0 => self.state = State::BringingUp,
            _ => self.fail(cycles),
        }
    }

    fn let_go(&mut self, cycles: &mut dyn Cycles) {
        if self.state == State::Off {
            return;
        }
        let mut enumerator = Enumerator { cycles, segment: self.port.segment };
        for function in &self.known {
            enumerator.write16(function.at, reg::COMMAND, 0);
        }
        self.gone(cycles);
    }

    fn gone(&mut self, cycles: &mut dyn Cycles) {
        self.known.clear();
        self.state = State::Off;
        self.light(cycles, bit::POWER_OFF);
    }

    fn fail(&mut self, cycles: &mut dyn Cycles) {
        self.failures += 1;
        self.gone(cycles);
    }

    fn configure(&self, cycles: &mut dyn Cycles) -> Result<Vec<Found>, AssignError> {
        let bus = self.buses(cycles).secondary;
        let windows = Enumerator { cycles, segment: self.port.segment }.windows(self.port);
        assign::added(cycles, self.port, bus, windows)
    }

    /// Power indicator, where there is one.
    fn light(&self, cycles: &mut dyn Cycles, power: u16) {
        if self.capabilities & 0x10 != 0 {
            let control = self.control(cycles) & !bit::POWER;
            self.write_control(cycles, control | power);
        }
    }

    /// Lanes of the link, if it is active.
    fn link(&self, cycles: &mut dyn Cycles) -> Option<u16> {
        let status = Enumerator { cycles, segment: self.port.segment }.read16(self.port, self.express + 0x12);
        (status & 0x2000 != 0).then_some(status >> 4 & 0x3F)
    }

    fn buses(&self, cycles: &mut dyn Cycles) -> BusRange {
        Enumerator { cycles, segment: self.port.segment }.buses(self.port)
    }

    fn control(&self, cycles: &mut dyn Cycles) -> u16 {
        Enumerator { cycles, segment: self.port.segment }.read16(self.port, self.express + 0x18)
    }

    fn write_control(&self, cycles: &mut dyn Cycles, value: u16) {
        Enumerator { cycles, segment: self.port.segment }.write16(self.port, self.express + 0x18, value);
    }

    fn status(&self, cycles: &mut dyn Cycles) -> u16 {
        Enumerator { cycles, segment: self.port.segment }.read16(self.port, self.express + 0x1A)
    }

    fn write_status(&self, cycles: &mut dyn Cycles, value: u16) {
        Enumerator { cycles, segment: self.port.segment }.write16(self.port, self.express + 0x1A, value);
    }
}
