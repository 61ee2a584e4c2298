//! The first functions of the host that come while the guest runs: memory has to be made ready for them, which takes as long
//! as the host needs to pin it. They are opened and have their place at once; a thread maps memory; then they are put in.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use api::info::Progress;
use devices::complaints::chain;
use pci::topology::Name;
use vmm_sys_util::eventfd::EventFd;

use super::HotPlugError;
use super::newcomer::Promised;
use crate::changes::Added;
use crate::groundwork::Preparation;
use crate::machine::Machine;
use crate::spec::Endpoint;

/// What became of a request for a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Coming {
    /// It is there.
    There(Name),
    /// It comes when it can reach memory.
    Waits(Name),
}

/// Devices that were accepted.
pub struct ComingDevices {
    devices: Vec<Added>,
    mapping: Option<Preparation<()>>,
    /// Nobody waited for it any more.
    broken_off: bool,
    /// How far memory was when mapping it ended, until that is told.
    pub(super) last: Option<Progress>,
    done: Arc<EventFd>,
}

impl ComingDevices {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { devices: Vec::new(), mapping: None, broken_off: false, last: None, done: Arc::new(devices::eventfd::new()?) })
    }

    /// Whether memory has to be made ready for the device.
    pub(super) fn needed(&self, machine: &mut Machine, added: &Added) -> bool {
        let of_host = added.functions.iter().any(|function| matches!(function.endpoint, Endpoint::Vfio { .. }));
        of_host && (self.is_busy() || !machine.parts().1.is_reached())
    }

    /// Opens the functions of a device and keeps its place.
    pub(super) fn accept(
        &mut self,
        machine: &mut Machine,
        added: Added,
        endpoints: &mut BTreeMap<Name, Endpoint>,
    ) -> Result<Coming, HotPlugError> {
        for function in &added.functions {
            if let Endpoint::Vfio { at, .. } = &function.endpoint
                && let Err(error) = machine.parts().1.open_ahead(&function.name.0, *at)
            {
                close(machine, &added);
                return Err(error.into());
            }
        }
        let name = added.functions.first().map(|function| function.name.clone()).ok_or(HotPlugError::Nothing)?;
        endpoints.extend(added.functions.iter().map(|function| (function.name.clone(), function.endpoint.clone())));
        self.devices.push(added);
        Ok(Coming::Waits(name))
    }

    /// Whether a device waits, or memory is being mapped: it must not grow meanwhile.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.devices.is_empty() || self.mapping.is_some()
    }

    /// How far memory is.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        self.mapping.as_ref().filter(|_| !self.devices.is_empty()).map(Preparation::progress)
    }

    /// The device whose first function is `name`.
    #[must_use]
    pub fn device(&self, name: &Name) -> Option<&Added> {
        self.devices.iter().find(|added| added.functions.first().is_some_and(|function| function.name == *name))
    }

    /// Places that are promised, and to whom.
    pub(super) fn places(&self) -> Promised {
        let place = |added: &Added| Some((added.port.clone(), added.number, added.functions.first()?.name.clone()));
        Promised(self.devices.iter().filter_map(place).collect())
    }

    /// Takes out the device that `name` is a function of.
    pub(super) fn cancel(&mut self, name: &Name) -> Option<Added> {
        let index = self.devices.iter().position(|added| added.functions.iter().any(|function| function.name == *name))?;
        let added = self.devices.remove(index);
        if let (true, Some(mapping)) = (self.devices.is_empty(), &self.mapping) {
            // The thread ends soon; nobody waits for it.
            mapping.stop();
            self.broken_off = true;
        }
        Some(added)
    }

    pub(super) fn into_devices(self) -> impl Iterator<Item = Added> {
        self.devices.into_iter()
    }

    /// Begins to map memory, unless somebody else is `busy` with it. Returns the devices that can be put in, or why not.
    pub(super) fn follow(&mut self, machine: &mut Machine, busy: bool) -> Vec<(Added, Result<(), HotPlugError>)> {
        let _ = self.done.read();
        let mut result = Ok(());
        if let Some(mapping) = self.mapping.take_if(|mapping| mapping.is_done()) {
            let last = mapping.progress();
            result = mapping.finish();
            if !std::mem::take(&mut self.broken_off) {
                self.last = Some(last);
                return self.all(result.map_err(|error| chain(&error)));
            }
        }
        if result.is_err() {
            log::debug!("memory was not made ready, since nobody waited for it any more");
        }
        if self.mapping.is_some() || self.devices.is_empty() || busy {
            return Vec::new();
        }
        let started = machine.parts().1.reaching().map_err(|error| chain(&error)).and_then(|reaching| {
            let (work, done) = (reaching.work(), Arc::clone(&self.done));
            Preparation::start_with(work, done, move |work| reaching.run(work)).map_err(|error| chain(&error))
        });
        match started {
            Ok(mapping) => {
                self.mapping = Some(mapping);
                Vec::new()
            }
            Err(why) => self.all(Err(why)),
        }
    }

    fn all(&mut self, result: Result<(), String>) -> Vec<(Added, Result<(), HotPlugError>)> {
        let told = || result.clone().map_err(|why| HotPlugError::Unreached { why });
        let devices = std::mem::take(&mut self.devices);
        devices.into_iter().map(|added| (added, told())).collect()
    }
}

impl AsRawFd for ComingDevices {
    fn as_raw_fd(&self) -> RawFd {
        self.done.as_raw_fd()
    }
}

/// Closes what was opened for a device that does not come.
pub(super) fn close(machine: &mut Machine, added: &Added) {
    for function in &added.functions {
        if let Endpoint::Vfio { at, .. } = &function.endpoint {
            machine.parts().1.close_ahead(*at);
        }
    }
}
