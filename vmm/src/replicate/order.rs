//! Decides whether the order in which a guest meets its GPUs is the one in which they were given. Drivers number GPUs by
//! ascending bus address, so that order is what the guest calls GPU 0, 1, ...

use pci::topology::Name;

use super::group::is_gpu;
use super::{ReplicaError, Requested};

/// `met` is the order of the tree, nearest to the order of `devices` that the tree allows.
pub(super) fn check(met: &[Name], devices: &[Requested]) -> Result<(), ReplicaError> {
    let given: Vec<&Name> = devices.iter().filter(|device| is_gpu(device)).map(|device| &device.name).collect();
    let possible: Vec<Name> = met.iter().filter(|name| given.contains(name)).cloned().collect();
    match given.iter().zip(&possible).find(|(given, met)| **given != *met) {
        Some((first, second)) => {
            Err(ReplicaError::Order { first: (*first).clone(), second: second.clone(), possible: possible.clone() })
        }
        None => Ok(()),
    }
}
