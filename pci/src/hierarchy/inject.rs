//! Decides the way of an error from the function where it happens to the root port that hears of it (PCIe 6.0 6.2.6).

use thiserror::Error;

use super::{Hierarchy, What};
use crate::errors::{PcieError, Recorded, Severity};
use crate::function::FunctionId;
use crate::sync::lock;
use crate::topology::{Name, Parent};

/// What became of an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injected {
    /// The function whose registers show it.
    pub at: Name,
    /// The root port that was told, or why none was.
    pub told: Result<Name, Silence>,
}

/// Why no root port hears of an error. Software decides all of it.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum Silence {
    /// The function keeps it for itself.
    #[error("`{at}` does not report it: the error is masked, or device control and SERR enable let nothing be sent")]
    Unreported {
        /// Which.
        at: Name,
    },
    /// A port on the way lets nothing through.
    #[error("port `{by}` lets nothing up: it is in D3hot, its link is disabled, or it holds what is below in reset")]
    Cut {
        /// Which.
        by: Name,
    },
    /// A bridge on the way stops it.
    #[error("bridge `{by}` passes no reports up: SERR is disabled in its bridge control")]
    Stopped {
        /// Which.
        by: Name,
    },
}

impl Hierarchy {
    /// An error happens at the function `id`. `header` is the start of the packet that it is about. The registers of the
    /// function show it, or those of the next port above that has such registers; if it is reported, the root port collects
    /// it, with the requester id of that function, and interrupts as software has enabled.
    pub fn inject(&mut self, id: FunctionId, error: PcieError, header: [u32; 4]) -> Result<Injected, InjectError> {
        let missing = || InjectError::Unknown { id: id.0 };
        let name = self.nodes.get(&id).map(|node| node.name.clone()).ok_or_else(missing)?;
        let mut at = id;
        let recorded = loop {
            let node = self.nodes.get_mut(&at).ok_or_else(missing)?;
            let recorded = match &mut node.what {
                What::Port(port) => port.record(error, header),
                What::Endpoint(shared) => lock(shared).record_error(error, header),
            };
            match (recorded, node.on) {
                (Recorded::Nothing, Parent::Port(above)) => at = above,
                (Recorded::Nothing, Parent::RootComplex(_)) => return Err(InjectError::Nowhere { at: name, error }),
                (recorded, _) => break recorded,
            }
        };
        let told = match recorded {
            Recorded::Reported(severity) => self.report(at, severity),
            _ => Err(Silence::Unreported { at: self.name_of(at) }),
        };
        Ok(Injected { at: self.name_of(at), told })
    }

    /// Takes a report from `source` up to its root port.
    fn report(&mut self, source: FunctionId, severity: Severity) -> Result<Name, Silence> {
        let requester = self.requester_id(source).unwrap_or(0);
        let mut at = source;
        while let Some(Parent::Port(above)) = self.nodes.get(&at).map(|node| node.on) {
            at = above;
            if self.port_mut(at).is_some_and(|port| port.in_reset()) {
                return Err(Silence::Cut { by: self.name_of(at) });
            }
            if !self.port_mut(at).is_some_and(|port| port.forward_error(severity)) {
                return Err(Silence::Stopped { by: self.name_of(at) });
            }
        }
        if let Some(root) = self.port_mut(at) {
            root.collect(severity, requester);
        }
        Ok(self.name_of(at))
    }

    pub(crate) fn name_of(&self, id: FunctionId) -> Name {
        self.nodes.get(&id).map_or_else(|| Name::from("?"), |node| node.name.clone())
    }
}

/// An error that leaves no trace.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum InjectError {
    /// No such function.
    #[error("there is no function {id}")]
    Unknown {
        /// Asked for.
        id: u32,
    },
    /// No registers for it.
    #[error("neither `{at}` nor a port above it has registers for the error {error}: take a device below a port, or a port")]
    Nowhere {
        /// Where it was to happen.
        at: Name,
        /// What.
        error: PcieError,
    },
}
