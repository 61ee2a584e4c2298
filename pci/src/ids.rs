//! Identity registers: vendor, device, class, revision, subsystem.

use std::fmt;

/// The ids that a function shows in its header (PCIe 6.0 7.5.1.1) and, for bridges, in its subsystem capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ids {
    /// Vendor id. 0xFFFF means "nobody here" and is refused by the topology check.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Class.
    pub class: ClassCode,
    /// Revision id.
    pub revision: u8,
    /// Subsystem vendor id; 0 when there is none.
    pub subsystem_vendor: u16,
    /// Subsystem id; 0 when there is none.
    pub subsystem: u16,
}

/// Base class, subclass and programming interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClassCode(u32);

impl ClassCode {
    /// PCI-to-PCI bridge, 0x060400.
    pub const BRIDGE: Self = Self(0x06_0400);
    /// Host bridge, 0x060000.
    pub const HOST_BRIDGE: Self = Self(0x06_0000);

    /// From the 24-bit value `base << 16 | sub << 8 | interface`; higher bits are dropped.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & 0xFF_FFFF)
    }

    /// The 24-bit value.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// Base class, for example 0x03 for a display controller.
    #[must_use]
    pub const fn base(self) -> u8 {
        self.0.to_le_bytes()[2]
    }

    /// Base class and subclass, for example 0x0302 for a 3D controller.
    #[must_use]
    pub const fn base_and_sub(self) -> u16 {
        u16::from_le_bytes([self.0.to_le_bytes()[1], self.0.to_le_bytes()[2]])
    }

    /// Whether a device of this class is left out when a whole IOMMU group is assigned: exactly host bridges (0x0600)
    /// and PCI-to-PCI bridges (0x0604). Other bridge-class devices, such as NVSwitches (0x0680), are real endpoints.
    #[must_use]
    pub const fn is_topology_bridge(self) -> bool {
        matches!(self.base_and_sub(), 0x0600 | 0x0604)
    }
}

impl fmt::Display for ClassCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:06x}", self.0)
    }
}

/// Banyan's own ids. The vendor is the one that Red Hat lends to virtual PCI devices; the devices are numbered in the
/// range that it leaves to experiments.
pub mod own {
    /// Vendor of emulated ports and stubs.
    pub const VENDOR: u16 = 0x1B36;
    /// Root port.
    pub const ROOT_PORT: u16 = 0x10BA;
    /// Switch upstream port when the host gives no ids.
    pub const UPSTREAM_PORT: u16 = 0x10BB;
    /// Switch downstream port when the host gives no ids.
    pub const DOWNSTREAM_PORT: u16 = 0x10BC;
    /// Stub endpoint.
    pub const STUB: u16 = 0x10BD;
    /// PCIe-to-PCI bridge.
    pub const PCI_BRIDGE: u16 = 0x10BF;
    /// Subsystem vendor and device of the above.
    pub const SUBSYSTEM: (u16, u16) = (0x1AF4, 0x1100);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_c2_only_host_and_pci_bridges_are_left_out_of_a_group() {
        let kept: Vec<u32> = [0x06_0000, 0x06_0400, 0x06_8000, 0x03_0200]
            .into_iter()
            .filter(|class| !ClassCode::new(*class).is_topology_bridge())
            .collect();
        assert_eq!(kept, [0x06_8000, 0x03_0200]);
    }
}
