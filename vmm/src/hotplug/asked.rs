//! What follows when the host says something of a function that the guest has: it wants the function back, or hardware
//! reported an error.
//!
//! The guest is not told of an error. The host says neither which error it was nor how far it reached, and a guest that hears
//! of one may reset what hangs on the port, or stop. Who knows more passes it on by vm.inject-error.

use std::time::Instant;

use api::events::Event;
use pci::topology::Name;

use super::{HotPlug, HotPlugError};
use crate::host_signals::{ERROR, Said, What};
use crate::machine::Machine;

impl HotPlug {
    /// Follows what the host says. Returns whether devices began to leave.
    pub fn follow_host(&mut self, machine: &mut Machine, now: Instant) -> bool {
        let mut any = false;
        for said in machine.host_signals().take() {
            match said.what {
                What::Error => {
                    let (id, host_bdf) = (said.name, said.at.to_string());
                    self.failures.push(Event::DeviceError { id, host_bdf, why: ERROR.to_owned() });
                }
                What::Request { .. } => any |= self.give_back(machine, &said, now),
            }
        }
        any
    }

    /// The host wants a function back: it leaves as if a client had asked. One that cannot does with the next reset, see
    /// [`wanted_back`].
    fn give_back(&mut self, machine: &mut Machine, said: &Said, now: Instant) -> bool {
        let name = Name::from(said.name.as_str());
        let (why, began) = match self.remove(machine, &said.name, now) {
            Ok(()) => ("it leaves, at the latest when the guest's time to let go is over".to_owned(), true),
            Err(HotPlugError::LeavesAlready { .. }) => ("it is leaving already".to_owned(), false),
            Err(HotPlugError::Unknown { .. }) => ("it has left".to_owned(), false),
            Err(error) => (format!("{error}; else it leaves when the guest resets or ends"), false),
        };
        self.leaving.iter_mut().filter(|leaving| leaving.names.contains(&name)).for_each(|leaving| leaving.urgent = true);
        if said.answer(&why) {
            let (id, host_bdf) = (said.name.clone(), said.at.to_string());
            self.failures.push(Event::DeviceRequested { id, host_bdf, why });
        }
        began
    }
}

/// Functions that are not there after a reset of `machine`, since the host wants them back or one that shares their port.
#[must_use]
pub fn wanted_back(machine: &Machine) -> Vec<Name> {
    let mut wanted = machine.host_signals().wanted();
    if wanted.is_empty() {
        return wanted;
    }
    let ports = machine.pci().change(|tree| tree.hierarchy.ports().collect::<Vec<_>>());
    for port in ports {
        let beside = || port.occupants.iter().map(|(_, name)| name);
        if beside().any(|name| wanted.contains(name)) {
            wanted.extend(beside().cloned());
        }
    }
    wanted
}
