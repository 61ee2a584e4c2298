//! Makes virtio devices around what they use of the host.

use std::sync::{Arc, Mutex};

use devices::virtio::block::{BlockFunction, BlockSpec, SERIAL_LEN};
use pci::function::Shared;

use super::{Factory, FunctionError};
use crate::backends::Backend;
use crate::spec::Virtio;

impl Factory {
    /// The device `name`, for which the host's side is open or can be opened.
    pub(super) fn virtio(&self, name: &str, device: &Virtio) -> Result<Shared, FunctionError> {
        let memory = self.memory.clone();
        let msi = Arc::clone(&self.msi);
        let backend = self.backends.get(name, device)?;
        Ok(match (device, backend) {
            (Virtio::Disk(disk), Backend::Image(file)) => {
                let serial = disk.serial.clone().unwrap_or_else(|| name.chars().take(SERIAL_LEN).collect());
                let spec = BlockSpec { file, readonly: disk.readonly, serial };
                Arc::new(Mutex::new(BlockFunction::new(name, spec, memory, msi)?))
            }
        })
    }
}
