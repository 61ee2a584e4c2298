//! Which virtio devices a configuration asks for, in the order in which the guest finds them.

use std::path::Path;

use api::config::{
    BalloonConfig, DiskConfig, DiskSource, FsConfig, NetConfig, NetSource, OutputConfig, RngConfig, VmConfig, VsockConfig,
};
use devices::virtio::{Kind, layout};
use pci::topology::{EndpointSpec, Name};

use crate::resize::region_count;

/// A virtio device, as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Virtio {
    /// Disk.
    Disk(DiskConfig),
    /// Sockets.
    Vsock(VsockConfig),
    /// Random numbers.
    Rng(RngConfig),
    /// Network interface.
    Net(NetConfig),
    /// Shared folder.
    Folder(FsConfig),
    /// A console.
    Console(OutputConfig),
    /// Memory that the guest gives back.
    Balloon(BalloonConfig),
    /// Memory that comes and goes.
    Memory {
        /// The guest's memory node.
        node: u16,
        /// It has its pages before the guest has it.
        prefault: bool,
    },
}

impl Virtio {
    /// Which kind it is.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Disk(_) => Kind::Block,
            Self::Vsock(_) => Kind::Socket,
            Self::Rng(_) => Kind::Entropy,
            Self::Net(_) => Kind::Net,
            Self::Folder(_) => Kind::FileSystem,
            Self::Console(_) => Kind::Console,
            Self::Balloon(_) => Kind::Balloon,
            Self::Memory { .. } => Kind::Memory,
        }
    }

    /// The name that it was given.
    #[must_use]
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Disk(disk) => disk.id.as_deref(),
            Self::Net(net) => net.id.as_deref(),
            Self::Folder(folder) => folder.id.as_deref(),
            Self::Vsock(vsock) => vsock.id.as_deref(),
            Self::Rng(_) | Self::Console(_) | Self::Balloon(_) | Self::Memory { .. } => None,
        }
    }

    /// Where the process listens that serves it, if one does. It works on the guest's memory.
    #[must_use]
    pub fn server(&self) -> Option<&Path> {
        match self {
            Self::Disk(DiskConfig { source: DiskSource::Server(socket), .. })
            | Self::Net(NetConfig { source: NetSource::Server(socket), .. })
            | Self::Folder(FsConfig { socket, .. }) => Some(socket),
            _ => None,
        }
    }

    /// What trees say of it beside its name and ids.
    #[must_use]
    pub fn label(&self) -> String {
        match self {
            Self::Disk(disk) => match &disk.source {
                DiskSource::Image(path) => path.display().to_string(),
                DiskSource::Server(socket) => format!("served at {}", socket.display()),
            },
            Self::Vsock(vsock) => format!("context id {}, {}", vsock.cid, vsock.socket.display()),
            Self::Rng(rng) => rng.source.display().to_string(),
            Self::Net(net) => match &net.source {
                NetSource::Descriptors => String::new(),
                NetSource::Tap(tap) => tap.clone(),
                NetSource::Server(socket) => format!("served at {}", socket.display()),
            },
            Self::Folder(folder) => folder.tag.clone(),
            Self::Console(output) => output.to_string(),
            Self::Balloon(balloon) => balloon.to_string(),
            Self::Memory { node, .. } => format!("memory node {node}"),
        }
    }

    /// What the planner must know.
    #[must_use]
    pub const fn endpoint(&self) -> EndpointSpec {
        EndpointSpec { ids: self.kind().ids(), bars: layout::bars(), interrupt_pin: 0, rom: None, sriov: None }
    }
}

/// The memory devices of a machine whose memory comes and goes in blocks, one for each of its `nodes` memory nodes.
pub fn memory_devices(config: &VmConfig, nodes: usize) -> impl Iterator<Item = (Name, Virtio)> {
    let prefault = config.memory.prefault;
    let nodes = (0..u16::MAX).take(region_count(config, nodes));
    nodes.map(move |node| (Name(format!("mem{node}")), Virtio::Memory { node, prefault }))
}

/// All others with their names: disks first, since guests call the first disk by its address. Unnamed ones are called
/// `disk0`, ... by their place among their kind.
#[must_use]
pub fn devices(config: &VmConfig) -> Vec<(Name, Virtio)> {
    let named = |id: &Option<String>, kind: &str, index: usize| Name(id.clone().unwrap_or_else(|| format!("{kind}{index}")));
    let disks = config.disks.iter().enumerate();
    let disks = disks.map(|(index, disk)| (named(&disk.id, "disk", index), Virtio::Disk(disk.clone())));
    let vsock = config.vsock.iter().map(|vsock| (named(&vsock.id, "vsock", 0), Virtio::Vsock(vsock.clone())));
    let rng = config.rng.iter().map(|rng| (named(&None, "rng", 0), Virtio::Rng(rng.clone())));
    let nets = config.nets.iter().enumerate();
    let nets = nets.map(|(index, net)| (named(&net.id, "net", index), Virtio::Net(net.clone())));
    let folders = config.filesystems.iter().enumerate();
    let folders = folders.map(|(index, folder)| (named(&folder.id, "fs", index), Virtio::Folder(folder.clone())));
    let console = Some(&config.console).filter(|output| **output != OutputConfig::Off);
    let console = console.map(|output| (named(&None, "console", 0), Virtio::Console(output.clone())));
    let balloon = config.balloon.map(|balloon| (named(&None, "balloon", 0), Virtio::Balloon(balloon)));
    disks.chain(nets).chain(folders).chain(vsock).chain(rng).chain(console).chain(balloon).collect()
}
