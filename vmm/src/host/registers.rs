//! Reads the registers of a configuration space of which only the first bytes may be known. Lists that loop end.

use pci::link::{Link, LinkRate, LinkSpeed, LinkWidth};

use super::fabric::{Acs, Atomics, Ats, Fabric, Sriov};

/// Ids of extended capabilities (PCIe 6.0 7.6.3 and following).
const ACS: u16 = 0x000D;
const ATS: u16 = 0x000F;
const SRIOV: u16 = 0x0010;
/// Where extended capabilities begin.
const EXTENDED: usize = 0x100;

/// The bytes that were readable.
#[derive(Debug, Clone, Copy)]
pub struct Registers<'a>(pub &'a [u8]);

impl Registers<'_> {
    fn byte(self, at: usize) -> Option<u8> {
        self.0.get(at).copied()
    }

    /// Two bytes.
    #[must_use]
    pub fn word(self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes([self.byte(at)?, self.byte(at.checked_add(1)?)?]))
    }

    fn dword(self, at: usize) -> Option<u32> {
        Some(u32::from(self.word(at)?) | u32::from(self.word(at.checked_add(2)?)?) << 16)
    }

    /// Layout of the header: 0 function, 1 bridge, 2 CardBus bridge.
    #[must_use]
    pub fn header_type(self) -> Option<u8> {
        self.byte(0x0E).map(|byte| byte & 0x7F)
    }

    /// Class, subclass and interface.
    #[must_use]
    pub fn class(self) -> Option<u32> {
        self.dword(0x08).map(|dword| dword >> 8)
    }

    /// Interrupt pin: 0 none, 1 INTA to 4 INTD.
    #[must_use]
    pub fn interrupt_pin(self) -> u8 {
        self.byte(0x3D).filter(|pin| *pin <= 4).unwrap_or(0)
    }

    /// Where a capability of the standard list is.
    fn capability(self, id: u8) -> Option<usize> {
        const LIST: u16 = 0x10;
        if self.word(6)? & LIST == 0 {
            return None;
        }
        let mut at = usize::from(self.byte(0x34)? & 0xFC);
        // 48 capabilities fill the space; a longer list loops.
        for _ in 0..48 {
            if at < 0x40 {
                return None;
            }
            if self.byte(at)? == id {
                return Some(at);
            }
            at = usize::from(self.byte(at + 1)? & 0xFC);
        }
        None
    }

    /// Where an extended capability is.
    fn extended(self, id: u16) -> Option<usize> {
        let mut at = EXTENDED;
        // As many fit; a longer list loops.
        for _ in 0..(4096 - EXTENDED) / 8 {
            let header = self.dword(at)?;
            let [low, high, ..] = header.to_le_bytes();
            if u16::from_le_bytes([low, high]) == id {
                return Some(at);
            }
            at = usize::try_from(header >> 20 & 0xFFC).ok()?;
            if at < EXTENDED {
                return None;
            }
        }
        None
    }

    /// Subsystem vendor and subsystem of a bridge, which has a capability for them (PCIe 6.0 7.9.23).
    #[must_use]
    pub fn subsystem_of_bridge(self) -> Option<(u16, u16)> {
        let at = self.capability(0x0D)?;
        Some((self.word(at + 4)?, self.word(at + 6)?))
    }

    /// The PCI Express capability.
    #[must_use]
    pub fn express(self) -> Option<Express> {
        let at = self.capability(0x10)?;
        Some(Express {
            flags: self.word(at + 2)?,
            device: self.dword(at + 4)?,
            device_control: self.word(at + 8)?,
            link: self.dword(at + 0x0C)?,
            link_status: self.word(at + 0x12)?,
            device2: self.dword(at + 0x24).unwrap_or(0),
            device_control2: self.word(at + 0x28).unwrap_or(0),
        })
    }

    /// What [`Fabric`] holds.
    #[must_use]
    pub fn fabric(self) -> Fabric {
        let express = self.express();
        let pair = |id| {
            let at = self.extended(id)?;
            Some((self.word(at + 4)?, self.word(at + 6)?))
        };
        Fabric {
            config_bytes: u16::try_from(self.0.len()).unwrap_or(4096).min(4096),
            max_read_request: express.map(Express::max_read_request),
            atomics: express.map_or_else(Atomics::default, Express::atomics),
            acs: pair(ACS).map(|(capability, control)| Acs { capability: capability & 0x7F, control: control & 0x7F }),
            ats: pair(ATS).map(|(capability, control)| Ats { capability, control }),
            sriov: self.sriov(),
            iommu_bits: None,
        }
    }

    fn sriov(self) -> Option<Sriov> {
        let at = self.extended(SRIOV)?;
        let on = self.word(at + 8)? & 1 != 0;
        Some(Sriov { total: self.word(at + 0x0E)?, enabled: if on { self.word(at + 0x10)? } else { 0 } })
    }
}

/// The registers of a PCI Express capability (PCIe 6.0 7.5.3).
#[derive(Debug, Clone, Copy)]
pub struct Express {
    flags: u16,
    device: u32,
    device_control: u16,
    link: u32,
    link_status: u16,
    device2: u32,
    device_control2: u16,
}

impl Express {
    /// What it is (PCIe 6.0 7.5.3.2).
    #[must_use]
    pub const fn port_type(self) -> u16 {
        self.flags >> 4 & 0xF
    }

    /// DEVCAP2 bits 9:7.
    #[must_use]
    pub fn atomic_completers(self) -> u8 {
        (self.device2 >> 7).to_le_bytes()[0] & 7
    }

    fn max_read_request(self) -> u8 {
        (self.device_control >> 12).to_le_bytes()[0] & 7
    }

    const fn atomics(self) -> Atomics {
        Atomics {
            routing: self.device2 & 0x40 != 0,
            requester: self.device_control2 & 0x40 != 0,
            egress_blocked: self.device_control2 & 0x80 != 0,
        }
    }

    /// The link; `None` when it has none, as integrated devices.
    #[must_use]
    pub fn link(self) -> Option<Link> {
        let rate = |register: u32| {
            let [low, ..] = register.to_le_bytes();
            let [width, ..] = (register >> 4 & 0x3F).to_le_bytes();
            Some(LinkRate { speed: LinkSpeed::from_encoding(low & 0xF)?, width: LinkWidth::new(width)? })
        };
        let max = rate(self.link)?;
        Some(Link {
            max,
            // A link that is down shows no width.
            current: rate(self.link_status.into()).unwrap_or(max),
            max_payload_supported: self.device.to_le_bytes()[0] & 7,
            max_payload: (self.device_control >> 5).to_le_bytes()[0] & 7,
        })
    }
}

#[cfg(test)]
mod tests;
