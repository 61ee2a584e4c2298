//! Decides what a hot-plug slot shows, when it interrupts, and what the guest tells by it (PCIe 6.0 6.7.3 and 7.5.3.9 to
//! 7.5.3.11). Knows nothing of what is plugged in.
//!
//! | removal | capabilities beside hot-plug, surprise, no command completed | who begins | how the guest says that it is done |
//! |---|---|---|---|
//! | surprise | none | the machine | by clearing the events afterwards |
//! | orderly | power indicator | software in the guest | power indicator from on to off |
//! | button | power indicator, attention button | the machine presses | power indicator from on to off |
//!
//! There is no power controller, latch, interlock or command-completed event: each would only make guests wait.
//!
//! A guest may let go of a device before anybody asks for it, or give up bringing it up. The indicator does not go out once
//! more then, so a request is answered by what the guest has done before.
//!
//! One change at a time: after a removal nothing is inserted before the guest has cleared the events of that removal, since
//! it would otherwise see one change where there were two. Where there is a power indicator, it has to go out as well: until
//! then the guest may be busy with the device that left, and a request to let that go swallows the events of the next one
//! (linux: drivers/pci/hotplug/pciehp_hpc.c, `pciehp_ist`). Removing what was just inserted needs no such care: a guest that
//! finds the slot empty has nothing to undo.

mod state;

use thiserror::Error;

use crate::access::{Access, Lanes};
use crate::function::ResetKind;
use crate::topology::Removal;

/// Slot capabilities: attention button present.
const BUTTON: u32 = 1 << 0;
/// Slot capabilities: power indicator present.
const INDICATOR: u32 = 1 << 4;
/// Slot capabilities: hot-plug surprise, hot-plug capable, no command completed support.
const CAPABLE: u32 = 1 << 5 | 1 << 6 | 1 << 18;

/// Bits of slot control.
mod control {
    pub const BUTTON_ENABLE: u16 = 1 << 0;
    pub const PRESENCE_ENABLE: u16 = 1 << 3;
    pub const INTERRUPT_ENABLE: u16 = 1 << 5;
    pub const ATTENTION: u16 = 3 << 6;
    pub const POWER: u16 = 3 << 8;
    pub const LINK_ENABLE: u16 = 1 << 12;

    /// Values of an indicator field.
    pub const ON: u16 = 1;
    pub const BLINK: u16 = 2;
    pub const OFF: u16 = 3;
}

/// Bits of slot status.
mod status {
    pub const BUTTON: u16 = 1 << 0;
    pub const PRESENCE: u16 = 1 << 3;
    pub const OCCUPIED: u16 = 1 << 6;
    pub const LINK: u16 = 1 << 8;
}

/// Each event with the control bit that lets it interrupt.
const EVENTS: [(u16, u16); 3] = [
    (status::BUTTON, control::BUTTON_ENABLE),
    (status::PRESENCE, control::PRESENCE_ENABLE),
    (status::LINK, control::LINK_ENABLE),
];

/// Something that the guest told by a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotEvent {
    /// It has let go of the device, which can leave.
    Released,
    /// It could not bring the device up.
    AddFailed,
    /// It has taken note of every insertion and removal so far. What a removed device still holds can go.
    EventsCleared,
}

/// What follows from a change of a slot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// The interrupt rose (`true`) or fell.
    pub interrupt: Option<bool>,
    /// What the guest told, in order.
    pub events: Vec<SlotEvent>,
}

/// What the guest has made of the device in the slot, by the power indicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lamp {
    /// Nothing yet.
    Dark,
    /// It has begun to bring it up.
    Trying,
    /// It uses it.
    Lit,
    /// It has let go of it, or has given up bringing it up.
    Out,
}

/// What a guest does about a removal before anything is inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Leaving {
    /// Clears the events.
    events: bool,
    /// Switches the power indicator off.
    indicator: bool,
}

/// Whether the device shall leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    None,
    /// The button is pressed once the guest can hear it.
    Waiting,
    /// The guest knows.
    Made,
    /// The guest has let go of it since then or before, or could not bring it up. It leaves, whatever the guest does meanwhile.
    Granted,
}

/// The slot below a root or downstream port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    removal: Removal,
    number: u16,
    control: u16,
    events: u16,
    occupied: bool,
    /// Level of the interrupt: an enabled event is there.
    asserted: bool,
    /// What the guest has yet to do about a removal.
    leaving: Leaving,
    lamp: Lamp,
    request: Request,
}

impl Slot {
    /// A slot in its reset state. `number` is the physical slot number, 13 bits.
    #[must_use]
    pub fn new(removal: Removal, number: u16, occupied: bool) -> Self {
        let (lamp, request) = (Lamp::Dark, Request::None);
        let mut slot = Self {
            removal,
            number,
            control: 0,
            events: 0,
            occupied,
            asserted: false,
            leaving: Leaving::default(),
            lamp,
            request,
        };
        slot.start();
        slot
    }

    /// How a device leaves.
    #[must_use]
    pub const fn removal(&self) -> Removal {
        self.removal
    }

    /// Whether a device is in it.
    #[must_use]
    pub const fn occupied(&self) -> bool {
        self.occupied
    }

    /// Whether the guest has yet to take note of a removal: nothing can be inserted.
    #[must_use]
    pub const fn leaving(&self) -> bool {
        self.leaving.events || self.leaving.indicator
    }

    /// Whether the guest has yet to clear the events of a removal: what stood behind the device is kept until then.
    #[must_use]
    pub const fn has_news(&self) -> bool {
        self.leaving.events
    }

    /// Whether a removal was asked for and the guest has let go of the device, or could not bring it up: it can leave.
    #[must_use]
    pub fn released(&self) -> bool {
        self.request == Request::Granted
    }

    /// Whether a removal was asked for and has not happened.
    #[must_use]
    pub fn requested(&self) -> bool {
        self.request != Request::None
    }

    /// The slot capabilities register.
    #[must_use]
    pub fn capabilities(&self) -> u32 {
        let own = match self.removal {
            Removal::Surprise => 0,
            Removal::Orderly => INDICATOR,
            Removal::Button => INDICATOR | BUTTON,
        };
        CAPABLE | own | u32::from(self.number & 0x1FFF) << 19
    }

    /// Slot control in the low half, slot status in the high half.
    #[must_use]
    pub fn read(&self) -> u32 {
        let occupied = if self.occupied { status::OCCUPIED } else { 0 };
        u32::from(self.events | occupied) << 16 | u32::from(self.control)
    }

    /// A guest's write to slot control and status.
    pub fn write(&mut self, lanes: Lanes, value: u32) -> Outcome {
        let merged = Access { lanes, ..Access::dword(0) }.merge(self.control.into(), value);
        let [low, high, ..] = merged.to_le_bytes();
        let [_, _, cleared_low, cleared_high] = (value & lanes.mask()).to_le_bytes();
        let mut outcome = Outcome::default();
        let had_events = self.events != 0;
        self.events &= !u16::from_le_bytes([cleared_low, cleared_high]);
        if had_events && self.events == 0 {
            self.leaving.events = false;
            outcome.events.push(SlotEvent::EventsCleared);
        }
        let before = self.control;
        self.control = u16::from_le_bytes([low, high]) & self.writable();
        // Who takes the slot over begins anew with what is in it.
        if self.control & !before & control::INTERRUPT_ENABLE != 0 && self.lamp == Lamp::Out {
            self.lamp = Lamp::Dark;
        }
        if lanes.touch(control::POWER.into()) && get(control::POWER, self.control) == control::OFF {
            self.leaving.indicator = false;
        }
        outcome.events.extend(self.follow_indicators(before));
        self.press();
        outcome.interrupt = self.signal();
        outcome
    }

    /// A device is put in. `link` tells whether its link comes up with it.
    pub fn insert(&mut self, link: bool) -> Result<Outcome, SlotError> {
        if self.occupied {
            return Err(SlotError::Occupied);
        }
        if self.leaving() {
            return Err(SlotError::Leaving);
        }
        self.change(true, link);
        Ok(Outcome { interrupt: self.signal(), events: Vec::new() })
    }

    /// The device is taken out, whether or not the guest has let go of it: presence and, if it was up (`link`), the link go
    /// at the same time.
    pub fn remove(&mut self, link: bool) -> Result<Outcome, SlotError> {
        if !self.occupied {
            return Err(SlotError::Empty);
        }
        let indicated = get(control::POWER, self.control) != control::OFF && self.removal != Removal::Surprise;
        self.change(false, link);
        self.leaving = Leaving { events: true, indicator: indicated && self.control & control::INTERRUPT_ENABLE != 0 };
        Ok(Outcome { interrupt: self.signal(), events: Vec::new() })
    }

    /// Asks for the device's removal; [`SlotEvent::Released`] follows when the guest has let go, at once if it did so before. A
    /// button is pressed as soon as the guest uses the device and listens to the button, which may be later.
    pub fn request(&mut self) -> Result<Outcome, SlotError> {
        match (self.removal, self.request) {
            (Removal::Surprise, _) => return Err(SlotError::NoRelease),
            _ if !self.occupied => return Err(SlotError::Empty),
            (_, Request::Waiting | Request::Made | Request::Granted) => return Err(SlotError::Requested),
            (_, Request::None) if self.lamp == Lamp::Out => {
                self.request = Request::Granted;
                return Ok(Outcome { interrupt: None, events: vec![SlotEvent::Released] });
            }
            (Removal::Orderly, Request::None) => self.request = Request::Made,
            (Removal::Button, Request::None) => self.request = Request::Waiting,
        }
        self.press();
        Ok(Outcome { interrupt: self.signal(), events: Vec::new() })
    }

    /// The guest has had its time: nothing waits for it any longer, neither a new device nor a new request.
    pub const fn expire(&mut self) {
        self.leaving = Leaving { events: false, indicator: false };
        self.request = Request::None;
    }

    /// The link of the device that stays went up or down, since the guest switched it.
    pub fn link_changed(&mut self) -> Outcome {
        self.events |= status::LINK;
        Outcome { interrupt: self.signal(), events: Vec::new() }
    }

    /// Back to the reset state, with what is in it. A cold reset ends the guest that a removal waited for.
    pub fn reset(&mut self, kind: ResetKind) -> Vec<SlotEvent> {
        let mut told = Vec::new();
        if self.events != 0 || self.leaving() {
            told.push(SlotEvent::EventsCleared);
        }
        self.request = match self.request {
            Request::Made | Request::Waiting | Request::Granted if kind == ResetKind::Cold => {
                told.push(SlotEvent::Released);
                Request::None
            }
            Request::Made if self.removal == Removal::Button => Request::Waiting,
            other => other,
        };
        self.start();
        told
    }

    fn start(&mut self) {
        self.events = 0;
        self.asserted = false;
        self.leaving = Leaving::default();
        self.control = 0;
        self.indicate();
    }

    fn change(&mut self, occupied: bool, link: bool) {
        self.occupied = occupied;
        self.events |= status::PRESENCE | if link { status::LINK } else { 0 };
        self.lamp = Lamp::Dark;
        self.request = Request::None;
        // A guest that has not taken over the slot finds the indicator as firmware would have left it, and a device that it
        // finds at its boot it uses without another word.
        if self.control & control::INTERRUPT_ENABLE == 0 {
            self.indicate();
        }
    }

    /// Indicators as firmware leaves them.
    fn indicate(&mut self) {
        self.lamp = if self.occupied { Lamp::Lit } else { Lamp::Dark };
        let power = if self.occupied { control::ON } else { control::OFF };
        if self.removal != Removal::Surprise {
            let others = self.control & !(control::ATTENTION | control::POWER);
            self.control = others | set(control::ATTENTION, control::OFF) | set(control::POWER, power);
        }
    }

    const fn writable(&self) -> u16 {
        let always = control::PRESENCE_ENABLE | control::INTERRUPT_ENABLE | control::LINK_ENABLE;
        let indicators = control::ATTENTION | control::POWER;
        match self.removal {
            Removal::Surprise => always,
            Removal::Orderly => always | indicators,
            Removal::Button => always | indicators | control::BUTTON_ENABLE,
        }
    }

    /// What the power indicator tells of the device, if a write changed it.
    fn follow_indicators(&mut self, before: u16) -> Option<SlotEvent> {
        let power = get(control::POWER, self.control);
        if power == get(control::POWER, before) || !self.occupied {
            return None;
        }
        let failed = get(control::ATTENTION, self.control) == control::ON;
        let (lamp, event) = match (power, self.lamp) {
            (control::ON, _) => (Lamp::Lit, None),
            (control::BLINK, Lamp::Dark | Lamp::Out) => (Lamp::Trying, None),
            (control::OFF, Lamp::Lit) if !failed => (Lamp::Out, Some(SlotEvent::Released)),
            (control::OFF, Lamp::Lit | Lamp::Trying) => (Lamp::Out, Some(SlotEvent::AddFailed)),
            (_, lamp) => (lamp, None),
        };
        self.lamp = lamp;
        if event.is_some() && self.request != Request::None {
            self.request = Request::Granted;
        }
        // The guest goes on using the device: the press came too early or was taken back.
        if power == control::ON && self.removal == Removal::Button && self.request == Request::Made {
            self.request = Request::Waiting;
        }
        event
    }

    /// Presses the button if that is wanted and the guest takes it for what it is: before the device is up it would be a
    /// request to bring it up, while the indicator blinks it would take the earlier request back, and a guest that has not
    /// taken over the slot would discard it.
    fn press(&mut self) {
        let listens = control::BUTTON_ENABLE | control::INTERRUPT_ENABLE;
        let solid = get(control::POWER, self.control) == control::ON;
        if self.request == Request::Waiting && self.lamp == Lamp::Lit && solid && self.control & listens == listens {
            self.events |= status::BUTTON;
            self.request = Request::Made;
        }
    }

    /// The interrupt follows the enabled events; a rise is one message (PCIe 6.0 6.7.3.4).
    fn signal(&mut self) -> Option<bool> {
        let enabled = EVENTS.iter().any(|(event, enable)| self.events & event != 0 && self.control & enable != 0);
        let level = enabled && self.control & control::INTERRUPT_ENABLE != 0;
        let changed = level != self.asserted;
        self.asserted = level;
        changed.then_some(level)
    }
}

/// `value` at the place of `field`.
const fn set(field: u16, value: u16) -> u16 {
    value << field.trailing_zeros()
}

/// The value at the place of `field`.
const fn get(field: u16, register: u16) -> u16 {
    (register & field) >> field.trailing_zeros()
}

/// A change that a slot cannot make now.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum SlotError {
    /// A device is there.
    #[error("a device is in the slot: remove it first")]
    Occupied,
    /// No slot is there.
    #[error("the port has no hot-plug slot: make it hot-pluggable when the machine is configured")]
    Absent,
    /// No device is there.
    #[error("no device is in the slot")]
    Empty,
    /// The guest still works on a removal.
    #[error("the guest has not taken note of the last removal: try again when it has")]
    Leaving,
    /// Asked for before.
    #[error("removal has been requested before: wait for the guest")]
    Requested,
    /// There is no way to ask.
    #[error("the slot knows surprise removal only: there is no way to ask the guest first")]
    NoRelease,
}

#[cfg(test)]
mod tests;
