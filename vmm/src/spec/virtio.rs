//! Which virtio devices a configuration asks for, in the order in which the guest finds them.

use api::config::{DiskConfig, RngConfig, VmConfig, VsockConfig};
use devices::virtio::{Kind, layout};
use pci::topology::{EndpointSpec, Name};

/// A virtio device, as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Virtio {
    /// Disk.
    Disk(DiskConfig),
    /// Sockets.
    Vsock(VsockConfig),
    /// Random numbers.
    Rng(RngConfig),
}

impl Virtio {
    /// Which kind it is.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Disk(_) => Kind::Block,
            Self::Vsock(_) => Kind::Socket,
            Self::Rng(_) => Kind::Entropy,
        }
    }

    /// What trees say of it beside its name and ids.
    #[must_use]
    pub fn label(&self) -> String {
        match self {
            Self::Disk(disk) => disk.path.display().to_string(),
            Self::Vsock(vsock) => format!("context id {}, {}", vsock.cid, vsock.socket.display()),
            Self::Rng(rng) => rng.source.display().to_string(),
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
    let disks = disks.map(|(index, disk)| (named(&disk.id, "disk", index), Virtio::Disk(disk.clone())));
    let vsock = config.vsock.iter().map(|vsock| (named(&vsock.id, "vsock", 0), Virtio::Vsock(vsock.clone())));
    let rng = config.rng.iter().map(|rng| (named(&None, "rng", 0), Virtio::Rng(rng.clone())));
    disks.chain(vsock).chain(rng).collect()
}

/// A device that is asked for and that this program does not have.
#[must_use]
pub fn missing(config: &VmConfig) -> Option<&'static str> {
    [
        (!config.nets.is_empty(), "network device (net)"),
        (!config.filesystems.is_empty(), "shared folder device (fs)"),
        (config.balloon.is_some(), "balloon"),
        (!matches!(config.console, api::config::OutputConfig::Off), "virtio console (console)"),
        (config.watchdog, "watchdog"),
    ]
    .into_iter()
    .find_map(|(wanted, what)| wanted.then_some(what))
}
