//! Lets errors happen in the hierarchy of a running machine, to see what its guest makes of them.

use api::error::{ApiError, ErrorKind};
use api::info::Injection;
use pci::errors::{NoError, PcieError};
use pci::hierarchy::InjectError as TreeError;
use thiserror::Error;

use crate::pci_bus::PciBus;

/// Lets the error called `error` happen at the device or port called `at`. The guest's registers show it, and its interrupt
/// is raised, when this returns.
pub fn inject(pci: &PciBus, at: &str, error: &str) -> Result<Injection, ApiError> {
    let injected = || -> Result<_, InjectError> {
        let error: PcieError = error.parse()?;
        pci.change(|tree| {
            let id = tree.hierarchy.named(at).ok_or_else(|| InjectError::Unknown { name: at.chars().take(256).collect() })?;
            // The start of a packet, which only a real link would have.
            Ok(tree.hierarchy.inject(id, error, [0; 4])?)
        })
    };
    let injected = injected().map_err(|error| error.for_client())?;
    Ok(Injection {
        recorded_at: injected.at.to_string(),
        reported_to: injected.told.map(|root| root.to_string()).map_err(|silence| silence.to_string()),
    })
}

/// An error that cannot happen.
#[derive(Debug, Error)]
enum InjectError {
    /// Its name.
    #[error(transparent)]
    Name(#[from] NoError),
    /// Where.
    #[error("there is no device or port {name}; `banyan ctl list` shows those that there are")]
    Unknown { name: String },
    /// Nobody takes note of it.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

impl InjectError {
    fn for_client(&self) -> ApiError {
        let kind = match self {
            Self::Unknown { .. } => ErrorKind::NotFound,
            Self::Name(_) | Self::Tree(_) => ErrorKind::BadRequest,
        };
        ApiError::from_error(kind, self)
    }
}
