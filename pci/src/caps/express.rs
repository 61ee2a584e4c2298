//! The PCI Express capability, version 2 (PCIe 6.0 7.5.3): what a function's link and device registers show and keep.
//!
//! No ASPM, clock power management, LTR, 10-bit tags or bandwidth notification, since nothing behind them exists. Slot control
//! and status are kept in [`crate::slot`].

use super::{Capability, id};
use crate::config::RegDef;
use crate::link::{Link, LinkRate, LinkSpeed, LinkWidth};

/// Offsets of registers from the capability's start, and their bits in the dword.
pub mod reg {
    /// Device control, device status.
    pub const DEVICE_CONTROL: u8 = 0x08;
    /// Link capabilities.
    pub const LINK_CAPABILITIES: u8 = 0x0C;
    /// Link control, link status.
    pub const LINK_CONTROL: u8 = 0x10;
    /// Slot control, slot status.
    pub const SLOT_CONTROL: u8 = 0x18;
    /// Link capabilities 2.
    pub const LINK_CAPABILITIES_2: u8 = 0x2C;
    /// Device control 2, device status 2.
    pub const DEVICE_CONTROL_2: u8 = 0x28;
    /// Device control 2: ARI forwarding enable.
    pub const ARI_FORWARDING: u32 = 1 << 5;
    /// Device control: initiate a function-level reset (reads 0).
    pub const INITIATE_FLR: u32 = 1 << 15;
    /// Link control 2, link status 2.
    pub const LINK_CONTROL_2: u8 = 0x30;
    /// Link control: link disable.
    pub const LINK_DISABLE: u32 = 1 << 4;
    /// Link status: data link layer link active.
    pub const LINK_ACTIVE: u32 = 1 << 29;
    /// Bytes of the capability.
    pub const LEN: u8 = 0x3C;
}

/// Device/port type field (PCIe 6.0 7.5.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpressType {
    /// Endpoint below a port.
    Endpoint,
    /// Root port.
    RootPort,
    /// Switch upstream port.
    UpstreamPort,
    /// Switch downstream port.
    DownstreamPort,
    /// PCIe-to-PCI bridge; its link is the one above.
    PciBridge,
    /// Endpoint on a root bus: its link registers are zero.
    RootComplexEndpoint,
}

impl ExpressType {
    /// The register encoding.
    #[must_use]
    pub const fn encoding(self) -> u32 {
        match self {
            Self::Endpoint => 0,
            Self::RootPort => 4,
            Self::UpstreamPort => 5,
            Self::DownstreamPort => 6,
            Self::PciBridge => 7,
            Self::RootComplexEndpoint => 9,
        }
    }

    /// Whether a link leads down from it.
    #[must_use]
    pub const fn has_link_below(self) -> bool {
        matches!(self, Self::RootPort | Self::DownstreamPort)
    }

    const fn is_endpoint(self) -> bool {
        matches!(self, Self::Endpoint | Self::RootComplexEndpoint)
    }
}

/// What the capability shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Express {
    /// Device/port type.
    pub kind: ExpressType,
    /// Link registers and payload sizes; ignored for root-complex integrated endpoints.
    pub link: Link,
    /// Ports with a link below: whether a partner is there.
    pub link_up: bool,
    /// Port number, LNKCAP bits 31:24.
    pub port_number: u8,
    /// Ports with a slot: the slot capabilities register.
    pub slot: Option<u32>,
    /// Endpoints: function-level reset is possible.
    pub flr: bool,
    /// Root ports: AtomicOp completer widths, bits 2:0 (32-bit, 64-bit, 128-bit CAS).
    pub atomic_completers: u8,
}

impl Capability for Express {
    fn id(&self) -> u8 {
        id::EXPRESS
    }

    fn layout(&self) -> Vec<RegDef> {
        /// Slot implemented.
        const SLOT: u32 = 1 << 24;
        let linked = self.kind != ExpressType::RootComplexEndpoint;
        let zero = RegDef::default();
        let [link_capabilities, link_control] =
            if linked { [RegDef::read_only(self.link_capabilities()), self.link_control()] } else { [zero; 2] };
        let [link_capabilities_2, link_control_2] = if linked { self.link_2() } else { [zero; 2] };
        // Root control: error and PME interrupt enables. Root status: PME status.
        let [root_control, root_status] = match self.kind {
            ExpressType::RootPort => [RegDef::writable(0, 0xF), RegDef { clear_on_one: 1 << 16, ..zero }],
            _ => [zero; 2],
        };
        let [slot_control, slot_capabilities_2, slot_control_2] = [zero; 3];
        vec![
            RegDef::read_only((2 | self.kind.encoding() << 4) << 16 | if self.slot.is_some() { SLOT } else { 0 }),
            RegDef::read_only(self.device_capabilities()),
            self.device_control(),
            link_capabilities,
            link_control,
            RegDef::read_only(self.slot.unwrap_or(0)),
            slot_control,
            root_control,
            root_status,
            RegDef::read_only(self.device_capabilities_2()),
            self.device_control_2(),
            link_capabilities_2,
            link_control_2,
            slot_capabilities_2,
            slot_control_2,
        ]
    }
}

impl Express {
    fn device_capabilities(&self) -> u32 {
        const EXTENDED_TAG: u32 = 1 << 5;
        const ROLE_BASED_ERRORS: u32 = 1 << 15;
        const FLR: u32 = 1 << 28;
        let flr = if self.flr && self.kind.is_endpoint() { FLR } else { 0 };
        u32::from(self.link.max_payload_supported & 7) | EXTENDED_TAG | ROLE_BASED_ERRORS | flr
    }

    fn device_control(&self) -> RegDef {
        /// Error reporting enables, payload size, extended tag, read request size.
        const KEPT: u32 = 0xF | 7 << 5 | 1 << 8 | 7 << 12;
        const RELAXED_ORDERING: u32 = 1 << 4;
        const NO_SNOOP: u32 = 1 << 11;
        const EXTENDED_TAG: u32 = 1 << 8;
        const READ_512: u32 = 2 << 12;
        let endpoint = if self.kind.is_endpoint() { RELAXED_ORDERING | NO_SNOOP } else { 0 };
        let reset = endpoint | EXTENDED_TAG | READ_512 | u32::from(self.link.max_payload & 7) << 5;
        // Device status: correctable, non-fatal, fatal, unsupported request.
        RegDef { reset, writable: KEPT | endpoint, clear_on_one: 0xF << 16, sticky: 0 }
    }

    fn link_capabilities(&self) -> u32 {
        const LINK_ACTIVE_REPORTING: u32 = 1 << 20;
        const ASPM_OPTIONALITY: u32 = 1 << 22;
        let reporting = if self.kind.has_link_below() { LINK_ACTIVE_REPORTING } else { 0 };
        let rate = self.link.max;
        u32::from(rate.speed.encoding())
            | u32::from(rate.width.lanes()) << 4
            | reporting
            | ASPM_OPTIONALITY
            | u32::from(self.port_number) << 24
    }

    fn link_control(&self) -> RegDef {
        const ASPM: u32 = 3;
        const READ_COMPLETION_BOUNDARY: u32 = 1 << 3;
        const COMMON_CLOCK: u32 = 1 << 6;
        const EXTENDED_SYNCH: u32 = 1 << 7;
        const SLOT_CLOCK: u32 = 1 << 28;
        let kept = ASPM | COMMON_CLOCK | EXTENDED_SYNCH;
        let own = match self.kind {
            ExpressType::RootPort | ExpressType::DownstreamPort => reg::LINK_DISABLE,
            ExpressType::Endpoint => READ_COMPLETION_BOUNDARY,
            _ => 0,
        };
        let up = !self.kind.has_link_below() || self.link_up;
        let active = if self.kind.has_link_below() { 0 } else { reg::LINK_ACTIVE };
        RegDef::writable(SLOT_CLOCK | link_status(self.link, up) & !active, kept | own)
    }

    fn device_capabilities_2(&self) -> u32 {
        const TIMEOUT_DISABLE: u32 = 1 << 4;
        const ARI_FORWARDING: u32 = 1 << 5;
        const ATOMIC_ROUTING: u32 = 1 << 6;
        match self.kind {
            ExpressType::RootPort => TIMEOUT_DISABLE | ARI_FORWARDING | u32::from(self.atomic_completers & 7) << 7,
            ExpressType::UpstreamPort => ATOMIC_ROUTING,
            ExpressType::DownstreamPort => ATOMIC_ROUTING | ARI_FORWARDING,
            // Nothing conventional knows AtomicOps, and the bridge asks for nothing by itself.
            ExpressType::PciBridge => 0,
            ExpressType::Endpoint | ExpressType::RootComplexEndpoint => TIMEOUT_DISABLE,
        }
    }

    fn device_control_2(&self) -> RegDef {
        const TIMEOUT_DISABLE: u32 = 1 << 4;
        const ATOMIC_EGRESS_BLOCKING: u32 = 1 << 7;
        RegDef::writable(
            0,
            match self.kind {
                ExpressType::RootPort => TIMEOUT_DISABLE | reg::ARI_FORWARDING,
                ExpressType::UpstreamPort => ATOMIC_EGRESS_BLOCKING,
                ExpressType::DownstreamPort => ATOMIC_EGRESS_BLOCKING | reg::ARI_FORWARDING,
                ExpressType::PciBridge => 0,
                _ => TIMEOUT_DISABLE,
            },
        )
    }

    /// Link capabilities 2, then link control and status 2.
    fn link_2(&self) -> [RegDef; 2] {
        const TARGET_SPEED: u32 = 0xF;
        let max = self.link.max.speed;
        let up = !self.kind.has_link_below() || self.link_up;
        let control = RegDef {
            reset: u32::from(max.encoding()) | link_status_2(self.link, up),
            writable: TARGET_SPEED,
            clear_on_one: 0,
            sticky: TARGET_SPEED,
        };
        [RegDef::read_only(max.supported_vector()), control]
    }
}

/// Bits of link status that follow the link partner: speed, width and link active, in the dword at [`reg::LINK_CONTROL`].
pub const LINK_STATUS: u32 = reg::LINK_ACTIVE | 0x3FF << 16;

/// The most that a link can do whose capabilities register has this value; `None` where it says nothing that is known.
#[must_use]
pub fn rate(link_capabilities: u32) -> Option<LinkRate> {
    let field = |shift: u32, mask: u32| u8::try_from(link_capabilities >> shift & mask).ok();
    Some(LinkRate { speed: LinkSpeed::from_encoding(field(0, 0xF)?)?, width: LinkWidth::new(field(4, 0x3F)?)? })
}

/// Link status of a port. A link without a partner shows the lowest rate and no lanes.
#[must_use]
pub fn link_status(link: Link, up: bool) -> u32 {
    let rate = link.current;
    if up { reg::LINK_ACTIVE | u32::from(rate.speed.encoding()) << 16 | u32::from(rate.width.lanes()) << 20 } else { 1 << 16 }
}

/// Bits of link status 2 that follow the link partner, in the dword at [`reg::LINK_CONTROL_2`]: equalization complete, all
/// three phases successful, which is what a link at 8 GT/s or more shows.
pub const LINK_STATUS_2: u32 = 0x1E << 16;

/// Link status 2 of a port.
#[must_use]
pub const fn link_status_2(link: Link, up: bool) -> u32 {
    if up && link.current.speed.encoding() >= 3 { LINK_STATUS_2 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers(kind: ExpressType, link: Link, link_up: bool) -> Vec<u32> {
        let express = Express { kind, link, link_up, port_number: 9, slot: None, flr: true, atomic_completers: 7 };
        express.layout().iter().map(|def| def.reset).collect()
    }

    fn rate(speed: u8, lanes: u8) -> LinkRate {
        LinkRate { speed: LinkSpeed::from_encoding(speed).unwrap(), width: LinkWidth::new(lanes).unwrap() }
    }

    const ALL: [ExpressType; 6] = [
        ExpressType::Endpoint,
        ExpressType::RootPort,
        ExpressType::UpstreamPort,
        ExpressType::DownstreamPort,
        ExpressType::PciBridge,
        ExpressType::RootComplexEndpoint,
    ];

    #[test]
    fn the_four_link_registers_agree() {
        for speed in 1..=6u8 {
            for lanes in [1u8, 2, 4, 8, 12, 16, 32] {
                let link = Link { current: rate(1, 1), ..Link::at(rate(speed, lanes)) };
                for kind in &ALL[..5] {
                    let read = registers(*kind, link, true);
                    let (speed, lanes) = (u32::from(speed), u32::from(lanes));
                    assert_eq!(read[3] & 0x3FF, speed | lanes << 4, "maximum");
                    assert_eq!(read[4] >> 16 & 0x3FF, 1 | 1 << 4, "current");
                    assert_eq!(read[11], (1 << (speed + 1)) - 2, "supported speeds");
                    assert_eq!(read[12] & 0xF, speed, "target");
                }
            }
        }
    }

    #[test]
    fn each_kind_has_its_own_bits() {
        // Type, link active reporting, link active, completers and routing, function-level reset.
        let expected =
            [(0, 0, 0, 0, 1), (4, 1, 1, 7 << 1, 0), (5, 0, 0, 1, 0), (6, 1, 1, 1, 0), (7, 0, 0, 0, 0), (9, 0, 0, 0, 1)];
        for (kind, expected) in ALL.into_iter().zip(expected) {
            let read = registers(kind, Link::default(), true);
            let bits = (read[0] >> 20, read[3] >> 20 & 1, read[4] >> 29 & 1, read[9] >> 6 & 0xF, read[1] >> 28 & 1);
            assert_eq!(bits, expected, "{kind:?}");
            assert_eq!((read.len() * 4, read[0] >> 16 & 0xF), (reg::LEN.into(), 2));
        }
    }

    #[test]
    fn what_is_not_emulated_is_not_offered() {
        for kind in ALL {
            let read = registers(kind, Link::default(), true);
            let (aspm, clock_power, notification) = (read[3] >> 10 & 3, read[3] >> 18 & 1, read[3] >> 21 & 1);
            assert_eq!((aspm, clock_power, notification), (0, 0, 0), "link capabilities of {kind:?}");
            let (ari, ltr, ten_bit_tags) = (read[9] >> 5 & 1, read[9] >> 11 & 1, read[9] >> 16 & 3);
            let forwards = u32::from(kind.has_link_below());
            assert_eq!((ari, ltr, ten_bit_tags), (forwards, 0, 0), "device capabilities 2 of {kind:?}");
        }
    }

    #[test]
    fn an_integrated_endpoint_has_no_link_registers() {
        let read = registers(ExpressType::RootComplexEndpoint, Link::default(), true);
        assert_eq!([read[3], read[4], read[11], read[12]], [0; 4]);
    }

    #[test]
    fn a_link_without_a_partner_is_down() {
        for kind in [ExpressType::RootPort, ExpressType::DownstreamPort] {
            let status = registers(kind, Link::default(), false)[4];
            assert_eq!((status & reg::LINK_ACTIVE, status >> 16 & 0x3FF), (0, 1));
        }
    }

    #[test]
    fn the_payload_size_is_the_link_s() {
        for encoded in 0..6u8 {
            let link = Link { max_payload: encoded, max_payload_supported: 5, ..Link::default() };
            let read = registers(ExpressType::UpstreamPort, link, true);
            assert_eq!((read[1] & 7, read[2] >> 5 & 7), (5, encoded.into()));
        }
    }
}
