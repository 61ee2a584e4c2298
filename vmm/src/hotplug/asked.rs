//! What follows when the host says something of a function that the guest has: it wants the function back, or hardware
//! reported an error.
//!
//! The guest is not told of an error. The host says neither which error it was nor how far it reached, and a guest that hears
//! of one may reset what hangs on the port, or stop. Who knows more passes it on by vm.inject-error.

use std::time::Instant;

use api::events::Event;
use pci::topology::Name;

use super::{HotPlug, HotPlugError, list};
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
                What::Request { first } => any |= self.give_back(machine, &said, first, now),
            }
        }
        any
    }

    /// The host wants a function back: it leaves as if a client had asked. Told of when it is the `first` time.
    fn give_back(&mut self, machine: &mut Machine, said: &Said, first: bool, now: Instant) -> bool {
        let name = Name::from(said.name.as_str());
        let (why, began) = match self.remove(machine, &said.name, now) {
            Ok(()) => ("it leaves, at the latest when the guest's time to let go is over".to_owned(), true),
            Err(HotPlugError::LeavesAlready { .. }) => ("it is leaving already".to_owned(), false),
            Err(HotPlugError::Unknown { .. }) => ("it has left".to_owned(), false),
            Err(error) => {
                self.kept.extend(self.together(machine, &name));
                (format!("{error}; else it leaves when the guest resets or ends"), false)
            }
        };
        self.leaving.iter_mut().filter(|leaving| leaving.names.contains(&name)).for_each(|leaving| leaving.urgent = true);
        if first {
            log::warn!("the host wants {name} ({}) back: {why}", said.at);
            let (id, host_bdf) = (said.name.clone(), said.at.to_string());
            self.failures.push(Event::DeviceRequested { id, host_bdf, why });
        }
        began
    }

    /// The functions of the device that `name` is a function of, as far as they share a port.
    fn together(&self, machine: &Machine, name: &Name) -> Vec<Name> {
        let ports = machine.pci().change(|tree| tree.hierarchy.ports().collect::<Vec<_>>());
        let mut occupants = ports.into_iter().map(|port| port.occupants.into_iter().map(|(_, name)| name).collect::<Vec<_>>());
        let names = occupants.find(|names| names.contains(name)).unwrap_or_else(|| vec![name.clone()]);
        log::debug!("{} cannot leave while the guest runs", list(&names));
        names
    }
}
