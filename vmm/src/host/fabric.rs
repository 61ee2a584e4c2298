//! What a host function says of the ways that traffic takes through it: access control, address translation, atomic
//! operations, virtual functions, read requests, and the IOMMU above. Plain data, as in the registers.

/// The registers, as far as they were readable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fabric {
    /// Bytes of configuration space that were read: 0 where nobody knows, 64 without privilege, 256 for conventional PCI, 4096
    /// for PCI Express. A capability that lies beyond is not known, and not absent.
    pub config_bytes: u16,
    /// DEVCTL's largest read request, as encoded (0 is 128 bytes, 5 is 4096).
    pub max_read_request: Option<u8>,
    /// Atomic operations, but for the widths that it completes.
    pub atomics: Atomics,
    /// Access Control Services; `None` when it has none or they were not readable.
    pub acs: Option<Acs>,
    /// Address Translation Services.
    pub ats: Option<Ats>,
    /// For a physical function: its virtual functions.
    pub sriov: Option<Sriov>,
    /// Width of the addresses that the IOMMU above translates, in bits, where the kernel tells (VT-d).
    pub iommu_bits: Option<u8>,
}

impl Fabric {
    /// Whether extended capabilities were readable, so that one that is not here does not exist.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        self.config_bytes > 256
    }
}

/// DEVCAP2 and DEVCTL2 (PCIe 6.0 7.5.3.15 and 7.5.3.16).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Atomics {
    /// A port can route them (DEVCAP2 bit 6).
    pub routing: bool,
    /// The function may send them (DEVCTL2 bit 6).
    pub requester: bool,
    /// A port does not let them out (DEVCTL2 bit 7).
    pub egress_blocked: bool,
}

/// Access Control Services (PCIe 6.0 7.7.11).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acs {
    /// What there is, bits 6:0.
    pub capability: u16,
    /// What is on, the same bits.
    pub control: u16,
}

impl Acs {
    /// Source validation.
    pub const SOURCE_VALIDATION: u16 = 0x01;
    /// Translation blocking: translated requests are errors.
    pub const TRANSLATION_BLOCKING: u16 = 0x02;
    /// Peer-to-peer requests go to the root complex.
    pub const REQUEST_REDIRECT: u16 = 0x04;
    /// Peer-to-peer completions go to the root complex.
    pub const COMPLETION_REDIRECT: u16 = 0x08;
    /// Requests that a root port would send back down go on.
    pub const UPSTREAM_FORWARDING: u16 = 0x10;
    /// A vector of ports tells who may be reached.
    pub const EGRESS_CONTROL: u16 = 0x20;
    /// Translated requests take the direct way in spite of redirection.
    pub const DIRECT_TRANSLATED: u16 = 0x40;

    /// Whether all of `bits` are on.
    #[must_use]
    pub const fn has(self, bits: u16) -> bool {
        self.control & bits == bits
    }
}

/// Address Translation Services (PCIe 6.0 10.5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ats {
    /// Capability register.
    pub capability: u16,
    /// Control register.
    pub control: u16,
}

impl Ats {
    /// Whether the function may ask for translations (control bit 15).
    #[must_use]
    pub const fn is_enabled(self) -> bool {
        self.control & 0x8000 != 0
    }
}

/// Single Root I/O Virtualization (PCIe 6.0 9.3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sriov {
    /// TotalVFs: how many virtual functions it can have.
    pub total: u16,
    /// NumVFs: how many it has, 0 while they are off.
    pub enabled: u16,
}
