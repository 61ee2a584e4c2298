//! Makes virtio devices around what they use of the host.

use std::sync::{Arc, Mutex};

use devices::virtio::block::{BlockFunction, BlockSpec, SERIAL_LEN};
use devices::virtio::rng::Rng;
use devices::virtio::vsock::{Vsock, VsockSpec};
use devices::virtio::{Device, Memory, VirtioFunction};
use pci::function::Shared;
use pci::seams::MsiPort;

use super::{Factory, FunctionError};
use crate::backends::Backend;
use crate::spec::Virtio;

impl Factory {
    /// The device `name`, for which the host's side is open or can be opened.
    pub(super) fn virtio(&self, name: &str, device: &Virtio) -> Result<Shared, FunctionError> {
        let memory = self.memory.clone();
        let msi = Arc::clone(&self.msi);
        let backend = self.backends.get(name, device)?;
        let failed = |source| FunctionError::Virtio { source };
        Ok(match (device, backend) {
            (Virtio::Disk(disk), Backend::Image(file)) => {
                let serial = disk.serial.clone().unwrap_or_else(|| name.chars().take(SERIAL_LEN).collect());
                let spec = BlockSpec { file, readonly: disk.readonly, serial };
                Arc::new(Mutex::new(BlockFunction::new(name, spec, memory, msi)?))
            }
            (Virtio::Vsock(vsock), Backend::Listening(socket)) => {
                let listener = socket.listener().map_err(failed)?;
                let spec = VsockSpec { cid: vsock.cid, path: vsock.socket.clone(), listener };
                function(Vsock::new(name, spec).map_err(failed)?, memory, msi)?
            }
            (Virtio::Rng(_), Backend::Random(file)) => function(Rng::new(name, file).map_err(failed)?, memory, msi)?,
            _ => return Err(FunctionError::Unknown),
        })
    }
}

fn function<D: Device + 'static>(device: D, memory: Memory, msi: Arc<dyn MsiPort>) -> Result<Shared, FunctionError> {
    Ok(Arc::new(Mutex::new(VirtioFunction::with_device(device, memory, msi)?)))
}
