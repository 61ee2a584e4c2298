//! The INTx wire of hardware. The host masks it when it fires and unmasks it when the guest's interrupt controller has seen
//! the end of the interrupt, both by eventfds; no code of ours runs.

use pci::seams::IntxEvents;

use super::host::IrqKind;
use super::vectors::{Lender, VectorError};

/// The wire of one function.
pub struct Intx {
    events: Box<dyn IntxEvents>,
    enabled: bool,
}

impl Intx {
    /// Off.
    #[must_use]
    pub const fn new(events: Box<dyn IntxEvents>) -> Self {
        Self { events, enabled: false }
    }

    /// Switches it on or off. MSI and MSI-X need it off, since a device signals in one way at a time.
    pub fn set(&mut self, on: bool, lender: &mut Lender<'_>) -> Result<(), VectorError> {
        if on == self.enabled {
            return Ok(());
        }
        let kind = IrqKind::Intx;
        self.enabled = on;
        if !on {
            return lender.device.disable(kind).map_err(|source| VectorError::Host { what: "disable", kind, source });
        }
        let enabled = lender.device.set_triggers(kind, 0, &[Some(self.events.trigger())]);
        let enabled = enabled.and_then(|()| lender.device.set_resample(self.events.resample()));
        enabled.map_err(|source| {
            self.enabled = false;
            VectorError::Host { what: "enable", kind, source }
        })
    }
}
