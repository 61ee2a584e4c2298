//! Decides how one function is written, and what its fields must hold.

use api::config::CpuListError;
use pci::address::{AddressError, HostBdf};
use pci::bar::{BarKind, BarSpec, Bars};
use pci::ids::{ClassCode, Ids};
use pci::link::{Link, LinkError, LinkRate};
use pci::topology::PortKind;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::host::fabric::{Acs, Atomics, Ats, Fabric, Sriov};
use crate::host::tree::{HostKind, HostNode, HostParent};

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Function {
    pub(super) at: String,
    on: String,
    kind: Kind,
    ids: String,
    class: String,
    #[serde(default, skip_serializing_if = "is_zero")]
    revision: u8,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subsystem: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    bars: Vec<Bar>,
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rom: Option<u64>,
    #[serde(default, skip_serializing_if = "is_zero")]
    interrupt_pin: u8,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    link: Option<LinkFacts>,
    #[serde(default, skip_serializing_if = "is_zero")]
    atomic_completers: u8,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    physical_function: Option<String>,
    #[serde(default, skip_serializing_if = "is_zero")]
    config_bytes: u16,
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_read_request: Option<u32>,
    #[serde(default, skip_serializing_if = "is_zero")]
    atomic_routing: bool,
    #[serde(default, skip_serializing_if = "is_zero")]
    atomic_requester: bool,
    #[serde(default, skip_serializing_if = "is_zero")]
    atomic_egress_blocked: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    acs: Option<Pair>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ats: Option<Pair>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sr_iov: Option<Virtual>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    iommu_address_bits: Option<u8>,
}

/// Capability and control register, four hexadecimal digits each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pair {
    capability: String,
    control: String,
}

/// Numbers of virtual functions.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Virtual {
    total: u16,
    enabled: u16,
}

/// Whether a field says what it says when it is left out.
fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    RootPort,
    UpstreamPort,
    DownstreamPort,
    #[serde(rename = "pcie-pci-bridge")]
    PciBridge,
    OtherBridge,
    Endpoint,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bar {
    bar: u8,
    kind: Space,
    #[serde(default)]
    prefetchable: bool,
    size: u64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Space {
    Mem32,
    Mem64,
    Io,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct LinkFacts {
    max: String,
    current: String,
    /// Bytes.
    max_payload_supported: u32,
    /// Bytes.
    max_payload: u32,
}

impl Function {
    /// Of a node.
    pub(super) fn of(node: &HostNode) -> Self {
        let fabric = node.fabric;
        let ids = node.ids;
        let subsystem = (ids.subsystem_vendor, ids.subsystem);
        Self {
            at: node.at.to_string(),
            on: match &node.on {
                HostParent::RootComplex(name) => name.clone(),
                HostParent::Bridge(at) => at.to_string(),
            },
            kind: match node.kind {
                HostKind::Port(PortKind::Root) => Kind::RootPort,
                HostKind::Port(PortKind::Upstream) => Kind::UpstreamPort,
                HostKind::Port(PortKind::Downstream) => Kind::DownstreamPort,
                HostKind::Port(PortKind::PciBridge) => Kind::PciBridge,
                HostKind::OtherBridge => Kind::OtherBridge,
                HostKind::Endpoint => Kind::Endpoint,
            },
            ids: format!("{:04x}:{:04x}", ids.vendor, ids.device),
            class: ids.class.to_string(),
            revision: ids.revision,
            subsystem: (subsystem != (0, 0)).then(|| format!("{:04x}:{:04x}", subsystem.0, subsystem.1)),
            bars: node.bars.iter().zip(0u8..).filter_map(|(spec, bar)| Some(Bar::of(bar, (*spec)?))).collect(),
            rom: node.rom,
            interrupt_pin: node.interrupt_pin,
            link: node.link.map(|link| LinkFacts {
                max: link.max.to_string(),
                current: link.current.to_string(),
                max_payload_supported: bytes(link.max_payload_supported),
                max_payload: bytes(link.max_payload),
            }),
            atomic_completers: node.atomic_completers,
            numa_node: node.numa_node,
            group: node.group,
            driver: node.driver.clone(),
            physical_function: node.physical_function.map(|at| at.to_string()),
            config_bytes: fabric.config_bytes,
            max_read_request: fabric.max_read_request.map(bytes),
            atomic_routing: fabric.atomics.routing,
            atomic_requester: fabric.atomics.requester,
            atomic_egress_blocked: fabric.atomics.egress_blocked,
            acs: fabric.acs.map(|acs| Pair::of(acs.capability, acs.control)),
            ats: fabric.ats.map(|ats| Pair::of(ats.capability, ats.control)),
            iommu_address_bits: fabric.iommu_bits,
            sr_iov: fabric.sriov.map(|Sriov { total, enabled }| Virtual { total, enabled }),
        }
    }

    /// The node, if every field makes sense.
    pub(super) fn node(self) -> Result<HostNode, Problem> {
        let (vendor, device) = pair("ids", &self.ids)?;
        let fabric = self.fabric()?;
        let (subsystem_vendor, subsystem) = self.subsystem.map_or(Ok((0, 0)), |text| pair("subsystem", &text))?;
        let class = hex("class", &self.class, 6)?;
        Ok(HostNode {
            at: self.at.parse()?,
            on: parent(self.on)?,
            ids: Ids { vendor, device, class: ClassCode::new(class), revision: self.revision, subsystem_vendor, subsystem },
            kind: match self.kind {
                Kind::RootPort => HostKind::Port(PortKind::Root),
                Kind::UpstreamPort => HostKind::Port(PortKind::Upstream),
                Kind::DownstreamPort => HostKind::Port(PortKind::Downstream),
                Kind::PciBridge => HostKind::Port(PortKind::PciBridge),
                Kind::OtherBridge => HostKind::OtherBridge,
                Kind::Endpoint => HostKind::Endpoint,
            },
            bars: bars(&self.bars)?,
            rom: self.rom.map(rom).transpose()?,
            interrupt_pin: at_most("interrupt-pin", self.interrupt_pin, 4)?,
            link: self.link.map(LinkFacts::link).transpose()?,
            atomic_completers: at_most("atomic-completers", self.atomic_completers, 7)?,
            numa_node: self.numa_node,
            group: self.group,
            driver: self.driver,
            physical_function: self.physical_function.map(|text| text.parse()).transpose()?,
            fabric,
        })
    }

    fn fabric(&self) -> Result<Fabric, Problem> {
        let acs = self.acs.as_ref().map(|pair| pair.read("acs")).transpose()?;
        let ats = self.ats.as_ref().map(|pair| pair.read("ats")).transpose()?;
        let atomics = Atomics {
            routing: self.atomic_routing,
            requester: self.atomic_requester,
            egress_blocked: self.atomic_egress_blocked,
        };
        Ok(Fabric {
            config_bytes: at_most("config-bytes", self.config_bytes, 4096)?,
            max_read_request: self.max_read_request.map(encoded).transpose()?,
            atomics,
            acs: acs.map(|(capability, control)| Acs { capability, control }),
            ats: ats.map(|(capability, control)| Ats { capability, control }),
            iommu_bits: self.iommu_address_bits.map(|bits| at_most("iommu-address-bits", bits, 64)).transpose()?,
            sriov: self.sr_iov.as_ref().map(|Virtual { total, enabled }| Sriov { total: *total, enabled: *enabled }),
        })
    }
}

impl Bar {
    const fn of(bar: u8, spec: BarSpec) -> Self {
        let kind = match spec.kind {
            BarKind::Memory32 => Space::Mem32,
            BarKind::Memory64 => Space::Mem64,
            BarKind::Io => Space::Io,
        };
        Self { bar, kind, prefetchable: spec.prefetchable, size: spec.size }
    }
}

fn bars(list: &[Bar]) -> Result<[Option<BarSpec>; 6], Problem> {
    let mut bars = [None; 6];
    for bar in list {
        let slot = bars.get_mut(usize::from(bar.bar)).filter(|slot| slot.is_none() && bar.size.is_power_of_two());
        let slot = slot.ok_or(Problem::Bar { bar: bar.bar, size: bar.size })?;
        let kind = match bar.kind {
            Space::Mem32 => BarKind::Memory32,
            Space::Mem64 => BarKind::Memory64,
            Space::Io => BarKind::Io,
        };
        *slot = Some(BarSpec { kind, prefetchable: bar.prefetchable, size: bar.size });
    }
    Ok(bars)
}

fn rom(size: u64) -> Result<u64, Problem> {
    Bars::default().with_rom(size).map_or(Err(Problem::Rom { size }), |_| Ok(size))
}

impl LinkFacts {
    fn link(self) -> Result<Link, Problem> {
        Ok(Link {
            max: self.max.parse::<LinkRate>()?,
            current: self.current.parse::<LinkRate>()?,
            max_payload_supported: encoded(self.max_payload_supported)?,
            max_payload: encoded(self.max_payload)?,
        })
    }
}

impl Pair {
    fn of(capability: u16, control: u16) -> Self {
        Self { capability: format!("{capability:04x}"), control: format!("{control:04x}") }
    }

    fn read(&self, field: &'static str) -> Result<(u16, u16), Problem> {
        Ok((half(field, &self.capability)?, half(field, &self.control)?))
    }
}

/// Bytes of an encoded payload or read request: 0 is 128.
fn bytes(encoded: u8) -> u32 {
    128 << (encoded & 7)
}

fn encoded(bytes: u32) -> Result<u8, Problem> {
    match (bytes.is_power_of_two(), bytes.trailing_zeros().checked_sub(7)) {
        (true, Some(exponent)) if exponent <= 7 => Ok(exponent.to_le_bytes()[0]),
        _ => Err(Problem::Payload { bytes }),
    }
}

/// A root complex is named as in sysfs, `pciDDDD:BB`; everything else is a bridge.
fn parent(text: String) -> Result<HostParent, Problem> {
    let Some(address) = text.strip_prefix("pci") else { return Ok(HostParent::Bridge(text.parse()?)) };
    if format!("{address}:00.0").parse::<HostBdf>().is_ok() && address.contains(':') {
        Ok(HostParent::RootComplex(text))
    } else {
        Err(Problem::RootComplex { text })
    }
}

fn hex(field: &'static str, text: &str, digits: usize) -> Result<u32, Problem> {
    let plain = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = if plain { u32::from_str_radix(text, 16).ok() } else { None };
    number.ok_or_else(|| Problem::Hex { field, text: text.to_owned(), digits })
}

fn pair(field: &'static str, text: &str) -> Result<(u16, u16), Problem> {
    let bad = || Problem::Pair { field, text: text.to_owned() };
    let (vendor, device) = text.split_once(':').ok_or_else(bad)?;
    let number = |text| half(field, text).map_err(|_| bad());
    Ok((number(vendor)?, number(device)?))
}

fn half(field: &'static str, text: &str) -> Result<u16, Problem> {
    let [low, high, ..] = hex(field, text, 4)?.to_le_bytes();
    Ok(u16::from_le_bytes([low, high]))
}

fn at_most<T: PartialOrd + Into<u64> + Copy>(field: &'static str, value: T, most: T) -> Result<T, Problem> {
    if value <= most { Ok(value) } else { Err(Problem::Range { field, value: value.into(), most: most.into() }) }
}

/// A field that holds what it cannot.
#[derive(Debug, Error)]
pub enum Problem {
    /// An address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A root complex.
    #[error("`{text}` is no root complex: write it as pciDDDD:BB, for example pci0000:00")]
    RootComplex {
        /// What is written.
        text: String,
    },
    /// Processors.
    #[error(transparent)]
    Cpus(#[from] CpuListError),
    /// A link rate.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A hexadecimal number.
    #[error("{field} is `{text}`: write {digits} hexadecimal digits")]
    Hex {
        /// Which.
        field: &'static str,
        /// What it holds.
        text: String,
        /// Digits.
        digits: usize,
    },
    /// Vendor and device.
    #[error("{field} is `{text}`: write vendor and device as VVVV:DDDD, for example 10de:2330")]
    Pair {
        /// Which.
        field: &'static str,
        /// What it holds.
        text: String,
    },
    /// A BAR.
    #[error("BAR {bar} of {size} bytes: numbers are 0 to 5, each once, and sizes powers of two")]
    Bar {
        /// Its number.
        bar: u8,
        /// Its size.
        size: u64,
    },
    /// An expansion ROM.
    #[error("rom of {size} bytes: sizes are powers of two from 2048 to 16777216")]
    Rom {
        /// Its size.
        size: u64,
    },
    /// A payload size.
    #[error("a payload of {bytes} bytes: sizes are powers of two from 128 to 16384")]
    Payload {
        /// What it holds.
        bytes: u32,
    },
    /// A small number.
    #[error("{field} is {value}: the most is {most}")]
    Range {
        /// Which.
        field: &'static str,
        /// What it holds.
        value: u64,
        /// The limit.
        most: u64,
    },
}
