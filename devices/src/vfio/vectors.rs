//! An interrupt vector of hardware: an eventfd that the host signals, and the message that the guest gets for it. Vectors
//! are had when the guest first opens them, since each costs a route and a host vector, and a table may have 2048.

use std::io;

use pci::function::FunctionId;
use pci::seams::{MsiError, MsiMessage, MsiRoutes, MsiVector};
use thiserror::Error;

use super::host::{HostDevice, IrqKind};

/// What interrupts are made of, lent for the time of a call.
pub struct Lender<'a> {
    /// Whose interrupts.
    pub id: FunctionId,
    /// Where hardware is told which eventfds to signal.
    pub device: &'a mut dyn HostDevice,
    /// Where eventfds with messages come from.
    pub routes: &'a dyn MsiRoutes,
}

/// A vector in use.
pub struct Held {
    /// The eventfd and its route.
    pub vector: Box<dyn MsiVector>,
    message: MsiMessage,
    masked: bool,
}

impl Held {
    /// A vector that delivers `message`, or keeps it while `masked`.
    pub fn new(lender: &Lender<'_>, message: MsiMessage, masked: bool) -> Result<Self, VectorError> {
        let fail = |source| VectorError::Route { source };
        let mut vector = lender.routes.vector(lender.id).map_err(fail)?;
        vector.program(message).map_err(fail)?;
        vector.mask(masked).map_err(fail)?;
        Ok(Self { vector, message, masked })
    }

    /// Follows what the guest wrote. Nothing happens where nothing differs.
    pub fn update(&mut self, message: MsiMessage, masked: bool) -> Result<(), VectorError> {
        let fail = |source| VectorError::Route { source };
        if message != self.message {
            self.vector.program(message).map_err(fail)?;
            self.message = message;
        }
        if masked != self.masked {
            self.vector.mask(masked).map_err(fail)?;
            self.masked = masked;
        }
        Ok(())
    }
}

/// An interrupt that the guest asked for and that does not work.
#[derive(Debug, Error)]
pub enum VectorError {
    /// The machine has no vector, or cannot change it.
    #[error("an interrupt vector cannot be had or changed")]
    Route {
        /// Why.
        #[source]
        source: MsiError,
    },
    /// The host refuses.
    #[error("the host cannot {what} {kind:?} interrupts")]
    Host {
        /// The step.
        what: &'static str,
        /// Which kind.
        kind: IrqKind,
        /// Its reason.
        #[source]
        source: io::Error,
    },
}
