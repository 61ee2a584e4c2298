//! Kinds of virtio devices and the ids that drivers find them by (virtio 1.2 4.1.2.1 and 5).

use pci::ids::{ClassCode, Ids};

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Network interface (virtio 1.2 5.1).
    Net,
    /// Disk (5.2).
    Block,
    /// Console (5.3).
    Console,
    /// Random numbers (5.4).
    Entropy,
    /// Memory that the guest gives back (5.5).
    Balloon,
    /// Sockets (5.10).
    Socket,
    /// Memory that comes and goes (5.15).
    Memory,
    /// Shared folder (5.11).
    FileSystem,
}

impl Kind {
    /// The device id of the specification.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            Self::Net => 1,
            Self::Block => 2,
            Self::Console => 3,
            Self::Entropy => 4,
            Self::Balloon => 5,
            Self::Socket => 19,
            Self::Memory => 24,
            Self::FileSystem => 26,
        }
    }

    /// Ids of its PCI function.
    #[must_use]
    pub const fn ids(self) -> Ids {
        let class = match self {
            Self::Net => 0x02_0000,
            Self::Block => 0x01_8000,
            Self::Console => 0x07_8000,
            Self::Entropy | Self::Balloon | Self::Memory => 0x08_8000,
            Self::Socket => 0x02_8000,
            Self::FileSystem => 0x01_8000,
        };
        Ids {
            vendor: 0x1AF4,
            device: 0x1040 + self.number(),
            class: ClassCode::new(class),
            revision: 1,
            subsystem_vendor: 0x1AF4,
            subsystem: 0x1100,
        }
    }
}
