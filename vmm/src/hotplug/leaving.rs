//! Devices that leave: asks the guest, waits for it to let go and to take note, and gives back what they held.
//!
//! A device leaves in two stages, each with a deadline. One that is gone is still held, unreachable, until the guest has taken
//! note of it.

use std::time::{Duration, Instant};

use api::events::Event;
use pci::function::{FunctionId, Shared};
use pci::hierarchy::PortInfo;
use pci::slot::SlotEvent;
use pci::topology::{Name, Removal};

use super::{HotPlug, HotPlugError, failed, list};
use crate::bus_slots::Slot;
use crate::machine::Machine;

/// How long a guest may take to let go of a device that it was asked for.
const RELEASE: Duration = Duration::from_secs(30);
/// How long a guest may take to note that a device has left.
const NOTE: Duration = Duration::from_secs(10);

/// A device on its way out.
pub(super) struct Leaving {
    /// Its functions.
    pub(super) names: Vec<Name>,
    port: FunctionId,
    stage: Stage,
    deadline: Instant,
    /// Where it is on a bus with several device numbers; `None` for one in the slot of a port.
    slot: Option<Slot>,
    /// The host waits for it, and goes on waiting while the guest is held.
    pub(super) urgent: bool,
}

enum Stage {
    /// The guest was asked to let go of it.
    Asked,
    /// The guest was told that it is gone. What these functions hold goes when the guest has taken note.
    Gone(Vec<(FunctionId, Shared)>),
}

impl HotPlug {
    /// Devices on their way out.
    pub fn leaving(&self) -> impl Iterator<Item = &Name> {
        self.leaving.iter().flat_map(|leaving| &leaving.names)
    }

    /// The guest is held.
    pub fn pause(&mut self, now: Instant) {
        self.paused.get_or_insert(now);
    }

    /// The guest goes on, and has for all that it was told the time that it had left.
    pub fn resume(&mut self, now: Instant) {
        if let Some(since) = self.paused.take() {
            let held = now.saturating_duration_since(since);
            self.leaving.iter_mut().filter(|leaving| !leaving.urgent).for_each(|leaving| leaving.deadline += held);
        }
    }

    /// Begins to remove the device `name`. It is gone when the guest has let go of it, at the latest after a deadline.
    pub fn remove(&mut self, machine: &mut Machine, name: &str, now: Instant) -> Result<(), HotPlugError> {
        let name = Name::from(name);
        if self.leaves(&name) {
            return Err(HotPlugError::LeavesAlready { name });
        }
        match self.endpoints.get(&name) {
            None => return Err(HotPlugError::Unknown { name }),
            Some(endpoint) if !endpoint.can_leave() => return Err(HotPlugError::Kept { name }),
            Some(_) => {}
        }
        if let Some(added) = self.coming.cancel(&name) {
            self.forget(machine, &added);
            return Ok(());
        }
        if let Some((slots, (slot, functions))) = machine.bus_slots().and_then(|slots| Some((slots, slots.find(&name)?))) {
            let port = functions.first().map(|(id, _)| *id).ok_or(HotPlugError::Nothing)?;
            slots.ask(slot);
            let names = functions.into_iter().map(|(_, name)| name).collect();
            self.leaving.push(Leaving::asked(names, port, Some(slot), now));
            return Ok(());
        }
        let ports = machine.pci().change(|tree| tree.hierarchy.ports().collect::<Vec<_>>());
        let port = ports.into_iter().find(|port| port.occupants.iter().any(|(_, occupant)| *occupant == name));
        let port = port
            .filter(|port| port.removal.is_some())
            .ok_or_else(|| HotPlugError::Fixed { name: name.clone(), cold_removal: self.pcie.cold_removal })?;
        let names = port.occupants.into_iter().map(|(_, name)| name).collect();
        let leaving = Leaving::asked(names, port.id, None, now);
        if port.removal == Some(Removal::Surprise) {
            return self.take_out(machine, leaving, now);
        }
        machine.pci().change(|tree| tree.hierarchy.request_removal(port.id, &mut tree.effects))?;
        self.leaving.push(leaving);
        Ok(())
    }

    pub(super) fn leaves(&self, name: &Name) -> bool {
        self.leaving.iter().any(|leaving| leaving.names.contains(name))
    }

    /// Takes the device out, whether or not the guest has let go of it.
    fn take_out(&mut self, machine: &Machine, leaving: Leaving, now: Instant) -> Result<(), HotPlugError> {
        let names = list(&leaving.names);
        if let (Some(slot), Some(slots)) = (leaving.slot, machine.bus_slots()) {
            // Nobody else hears of it: what it held goes in the next round.
            let gone = machine.pci().change(|tree| tree.hierarchy.unplug_from_bus(slot.on, slot.number, &mut tree.effects));
            slots.clear(slot);
            log::info!("{names} left its bus");
            self.leaving.push(Leaving { stage: Stage::Gone(gone), deadline: now, ..leaving });
            return Ok(());
        }
        let gone = machine.pci().change(|tree| tree.hierarchy.unplug(leaving.port, &mut tree.effects))?;
        log::info!("{names} left its port");
        self.leaving.push(Leaving { stage: Stage::Gone(gone), deadline: now + NOTE, ..leaving });
        Ok(())
    }

    /// Follows what the guest has told and what is overdue. Returns whether a device has left.
    pub fn follow(&mut self, machine: &mut Machine, now: Instant) -> bool {
        let mut ready = Vec::new();
        for (port, event) in machine.slot_events().take() {
            if event == SlotEvent::AddFailed
                && let Some(port) = machine.pci().change(|tree| tree.hierarchy.port(port))
            {
                self.failures.extend(failed(self.complaints.entry(port.name.clone()).or_default(), &port.name));
            }
            // On a bus, what the guest says is all that there is.
            let let_go = |leaving: &Leaving| leaving.slot.is_some() && matches!(leaving.stage, Stage::Asked);
            let released = |leaving: &mut Leaving| leaving.port == port && event == SlotEvent::Released && let_go(leaving);
            ready.extend(self.leaving.extract_if(.., released));
        }
        // What was told may be from before the removal: the slot has what holds.
        let pci = machine.pci();
        let over = |leaving: &mut Leaving| {
            leaving.slot.is_none() && leaving.stage.is_over(pci.change(|tree| tree.hierarchy.port(leaving.port)).as_ref())
        };
        ready.extend(self.leaving.extract_if(.., over));
        let held = self.paused.is_some();
        for late in self.leaving.extract_if(.., |leaving| leaving.deadline <= now && (leaving.urgent || !held)) {
            let names = list(&late.names);
            match late.stage {
                Stage::Asked => {
                    log::warn!("the guest did not let go of {names} in time: it leaves all the same");
                    self.failures.extend(not_released(&late.names));
                }
                Stage::Gone(_) if late.slot.is_some() => {}
                Stage::Gone(_) => log::warn!("the guest did not take note in time that {names} left"),
            }
            if late.slot.is_none() {
                machine.pci().change(|tree| tree.hierarchy.expire(late.port));
            }
            ready.push(late);
        }
        let mut left = false;
        for leaving in ready {
            match leaving.stage {
                Stage::Asked => {
                    let names = list(&leaving.names);
                    if let Err(error) = self.take_out(machine, leaving, now) {
                        log::error!("{names} stays in its port: {error}");
                    }
                }
                Stage::Gone(functions) => {
                    machine.pci().change(|tree| functions.iter().for_each(|(id, _)| tree.mapper.remove(*id)));
                    for name in &leaving.names {
                        self.endpoints.remove(name);
                        self.stand_ins.remove(name);
                        machine.parts().1.backends().close(name);
                    }
                    self.changes.remove(&leaving.names);
                    left = true;
                }
            }
        }
        left
    }

    /// When something is overdue.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let counts = |leaving: &&Leaving| leaving.urgent || self.paused.is_none();
        self.leaving.iter().filter(counts).map(|leaving| leaving.deadline).min()
    }
}

impl Leaving {
    /// One that the guest was asked to let go of.
    fn asked(names: Vec<Name>, port: FunctionId, slot: Option<Slot>, now: Instant) -> Self {
        Self { names, port, stage: Stage::Asked, deadline: now + RELEASE, slot, urgent: false }
    }
}

impl Stage {
    /// Whether the guest has done its part in the slot of this port, or the slot waits for it no longer.
    fn is_over(&self, port: Option<&PortInfo>) -> bool {
        port.is_none_or(|port| match self {
            Self::Asked => port.released || !port.requested,
            Self::Gone(_) => !port.has_news,
        })
    }
}

/// What those who listen hear of a device that the guest keeps: for each of its functions, which have names of their own.
fn not_released(names: &[Name]) -> impl Iterator<Item = Event> {
    let why = "the guest did not let go of it in time: it leaves all the same";
    names.iter().map(move |name| Event::DeviceFailed { id: name.to_string(), why: why.to_owned() })
}

#[cfg(test)]
mod tests {
    use pci::address::Sbdf;
    use pci::link::Link;
    use pci::topology::{PortKind, Windows};

    use super::*;

    #[test]
    fn a_stage_ends_by_what_the_slot_says_and_not_by_what_was_told_before() {
        let port = |requested, released, has_news| PortInfo {
            id: FunctionId(1),
            name: "port0".into(),
            kind: PortKind::Root,
            slot: 1,
            removal: Some(Removal::Orderly),
            occupants: Vec::new(),
            leaving: has_news,
            has_news,
            requested,
            released,
            windows: Windows::default(),
            access_control: None,
            link: Link::default(),
            below: Sbdf::default(),
        };
        for (requested, released, over) in [(true, false, false), (true, true, true), (false, false, true)] {
            assert_eq!(Stage::Asked.is_over(Some(&port(requested, released, false))), over, "{requested} {released}");
        }
        for (has_news, over) in [(true, false), (false, true)] {
            assert_eq!(Stage::Gone(Vec::new()).is_over(Some(&port(false, false, has_news))), over);
        }
        assert!(Stage::Asked.is_over(None), "a port that is gone waits for nobody");
    }

    #[test]
    fn a_device_that_a_guest_keeps_is_told_of_by_the_name_of_each_function() {
        let told = not_released(&["gpu".into(), "audio".into()]).map(|event| event.json()["id"].clone()).collect::<Vec<_>>();
        assert_eq!(told, ["gpu", "audio"]);
    }
}
