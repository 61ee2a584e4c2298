//! Which virtio devices a configuration asks for, in the order in which the guest finds them.

use api::config::{DiskConfig, VmConfig};
use devices::virtio::{Kind, layout};
use pci::topology::{EndpointSpec, Name};

/// A virtio device, as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Virtio {
    /// Disk.
    Disk(DiskConfig),
}

impl Virtio {
    /// Which kind it is.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Disk(_) => Kind::Block,
        }
    }

    /// What trees say of it beside its name and ids.
    #[must_use]
    pub fn label(&self) -> String {
        match self {
            Self::Disk(disk) => disk.path.display().to_string(),
        }
    }

    /// What the planner must know.
    #[must_use]
    pub const fn endpoint(&self) -> EndpointSpec {
        EndpointSpec { ids: self.kind().ids(), bars: layout::bars(), interrupt_pin: 0 }
    }
}

/// All of them with their names: disks first, since guests call the first disk by its address. Unnamed ones are called
/// `disk0`, ... by their place among their kind.
#[must_use]
pub fn devices(config: &VmConfig) -> Vec<(Name, Virtio)> {
    let named = |id: &Option<String>, kind: &str, index: usize| Name(id.clone().unwrap_or_else(|| format!("{kind}{index}")));
    let disks = config.disks.iter().enumerate();
    disks.map(|(index, disk)| (named(&disk.id, "disk", index), Virtio::Disk(disk.clone()))).collect()
}

/// A device that is asked for and that this program does not have.
#[must_use]
pub fn missing(config: &VmConfig) -> Option<&'static str> {
    [
        (!config.nets.is_empty(), "network device (net)"),
        (!config.filesystems.is_empty(), "shared folder device (fs)"),
        (config.vsock.is_some(), "socket device (vsock)"),
        (config.rng.is_some(), "random number device (rng)"),
        (config.balloon.is_some(), "balloon"),
        (!matches!(config.console, api::config::OutputConfig::Off), "virtio console (console)"),
        (config.watchdog, "watchdog"),
    ]
    .into_iter()
    .find_map(|(wanted, what)| wanted.then_some(what))
}
