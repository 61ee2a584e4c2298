//! Decides how a host is written to a file and what a file must hold to stand for a host: JSON with one object for each
//! function. Serial numbers are in no field.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use api::config::CpuListError;
use pci::address::{AddressError, HostBdf};
use pci::bar::{BarKind, BarSpec};
use pci::ids::{ClassCode, Ids};
use pci::link::{Link, LinkError, LinkRate};
use pci::topology::PortKind;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::tree::{HostKind, HostMemoryNode, HostNode, HostParent, HostTree};

/// A host as data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedHost {
    /// Its functions.
    pub tree: HostTree,
    /// Width of its physical addresses in bits, 32 to 64.
    pub address_bits: u8,
}

impl RecordedHost {
    /// The text of the file, the same for the same host.
    pub fn to_json(&self) -> Result<String, RecordedError> {
        let functions = self.tree.functions.values().map(Function::of).collect();
        let memory_nodes = self.tree.memory_nodes.iter().map(|(id, node)| MemoryNode::of(*id, node)).collect();
        let file = Document { version: VERSION, address_bits: self.address_bits, memory_nodes, functions };
        serde_json::to_string_pretty(&file).map(|text| text + "\n").map_err(|source| RecordedError::Json { source })
    }

    /// Reads what [`RecordedHost::to_json`] writes.
    pub fn from_json(text: &str) -> Result<Self, RecordedError> {
        let file: Document = serde_json::from_str(text).map_err(|source| RecordedError::Json { source })?;
        if file.version != VERSION {
            return Err(RecordedError::Version { version: file.version });
        }
        if !(32..=64).contains(&file.address_bits) {
            return Err(RecordedError::AddressBits { bits: file.address_bits });
        }
        let mut tree = HostTree::default();
        for function in file.functions {
            let at = function.at.clone();
            let node = function.node().map_err(|problem| RecordedError::Function { at: at.clone(), problem })?;
            if tree.functions.insert(node.at, node).is_some() {
                return Err(RecordedError::Twice { at });
            }
        }
        for node in file.memory_nodes {
            let id = node.id;
            let node = node.node().map_err(|problem| RecordedError::MemoryNode { id, problem })?;
            if tree.memory_nodes.insert(id, node).is_some() {
                return Err(RecordedError::MemoryNodeTwice { id });
            }
        }
        check_nesting(&tree)?;
        Ok(Self { tree, address_bits: file.address_bits })
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, RecordedError> {
        let unreadable = |source| RecordedError::Read { path: path.to_owned(), source };
        let mut text = String::new();
        let file = File::open(path).map_err(unreadable)?;
        file.take(LARGEST + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > LARGEST {
            return Err(unreadable(io::Error::other(format!("it has more than {} MiB", LARGEST >> 20))));
        }
        Self::from_json(&text).map_err(|source| RecordedError::File { path: path.to_owned(), source: Box::new(source) })
    }
}

/// Every function hangs, over bridges of the file, on a root complex.
fn check_nesting(tree: &HostTree) -> Result<(), RecordedError> {
    for node in tree.functions.values() {
        if let HostParent::Bridge(on) = node.on {
            let bridge = tree.get(on).ok_or(RecordedError::NoParent { at: node.at, on })?;
            if bridge.kind == HostKind::Endpoint {
                return Err(RecordedError::ParentNoBridge { at: node.at, on });
            }
        }
        if tree.root_complex(node).is_none() {
            return Err(RecordedError::Loop { at: node.at });
        }
    }
    Ok(())
}

/// A host with thousands of virtual functions fits.
const LARGEST: u64 = 64 << 20;
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Document {
    #[serde(rename = "banyan-host")]
    version: u32,
    address_bits: u8,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    memory_nodes: Vec<MemoryNode>,
    functions: Vec<Function>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryNode {
    id: u32,
    cpus: String,
    /// Bytes.
    memory: u64,
    distances: BTreeMap<u32, u8>,
}

impl MemoryNode {
    fn of(id: u32, node: &HostMemoryNode) -> Self {
        Self { id, cpus: node.cpus.to_string(), memory: node.memory, distances: node.distances.clone() }
    }

    fn node(self) -> Result<HostMemoryNode, Problem> {
        Ok(HostMemoryNode { cpus: self.cpus.parse()?, memory: self.memory, distances: self.distances })
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Function {
    at: String,
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
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the form that serde calls")]
const fn is_zero(value: &u8) -> bool {
    *value == 0
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
    fn of(node: &HostNode) -> Self {
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
            interrupt_pin: node.interrupt_pin,
            link: node.link.map(|link| LinkFacts {
                max: link.max.to_string(),
                current: link.current.to_string(),
                max_payload_supported: 128 << (link.max_payload_supported & 7),
                max_payload: 128 << (link.max_payload & 7),
            }),
            atomic_completers: node.atomic_completers,
            numa_node: node.numa_node,
            group: node.group,
            driver: node.driver.clone(),
            physical_function: node.physical_function.map(|at| at.to_string()),
        }
    }

    fn node(self) -> Result<HostNode, Problem> {
        let (vendor, device) = pair("ids", &self.ids)?;
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
            interrupt_pin: at_most("interrupt-pin", self.interrupt_pin, 4)?,
            link: self.link.map(LinkFacts::link).transpose()?,
            atomic_completers: at_most("atomic-completers", self.atomic_completers, 7)?,
            numa_node: self.numa_node,
            group: self.group,
            driver: self.driver,
            physical_function: self.physical_function.map(|text| text.parse()).transpose()?,
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

impl LinkFacts {
    fn link(self) -> Result<Link, Problem> {
        let encoded = |bytes: u32| match (bytes.is_power_of_two(), bytes.trailing_zeros().checked_sub(7)) {
            (true, Some(exponent)) if exponent <= 7 => Ok(exponent.to_le_bytes()[0]),
            _ => Err(Problem::Payload { bytes }),
        };
        Ok(Link {
            max: self.max.parse::<LinkRate>()?,
            current: self.current.parse::<LinkRate>()?,
            max_payload_supported: encoded(self.max_payload_supported)?,
            max_payload: encoded(self.max_payload)?,
        })
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
    let half = |text: &str| hex(field, text, 4).ok().and_then(|number| u16::try_from(number).ok());
    let (vendor, device) = text.split_once(':').ok_or_else(bad)?;
    half(vendor).zip(half(device)).ok_or_else(bad)
}

fn at_most(field: &'static str, value: u8, most: u8) -> Result<u8, Problem> {
    if value <= most { Ok(value) } else { Err(Problem::Range { field, value, most }) }
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
        value: u8,
        /// The limit.
        most: u8,
    },
}

/// A file that stands for no host.
#[derive(Debug, Error)]
pub enum RecordedError {
    /// It cannot be read.
    #[error("recorded host {path} cannot be read; give a file that `banyan topology record` wrote", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It was read and makes no sense.
    #[error("recorded host {path} cannot be used", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<RecordedError>,
    },
    /// Not this JSON.
    #[error("this is no recorded host: write one with `banyan topology record`")]
    Json {
        /// What, with line and column.
        #[source]
        source: serde_json::Error,
    },
    /// Another version.
    #[error("banyan-host is {version}; this program reads version {VERSION}: record the host again")]
    Version {
        /// What the file says.
        version: u32,
    },
    /// No address width.
    #[error("address-bits is {bits}: physical addresses have 32 to 64 bits")]
    AddressBits {
        /// What the file says.
        bits: u8,
    },
    /// A function's field.
    #[error("function {at}")]
    Function {
        /// As written.
        at: String,
        /// What is wrong.
        #[source]
        problem: Problem,
    },
    /// A memory node's field.
    #[error("memory node {id}")]
    MemoryNode {
        /// Its number.
        id: u32,
        /// What is wrong.
        #[source]
        problem: Problem,
    },
    /// One number for two memory nodes.
    #[error("memory node {id} is there twice: remove one")]
    MemoryNodeTwice {
        /// Its number.
        id: u32,
    },
    /// One address for two functions.
    #[error("function {at} is there twice: remove one")]
    Twice {
        /// Which.
        at: String,
    },
    /// A parent that is missing.
    #[error("function {at} hangs on {on}, which is not in the file: add it, or write a root complex such as pci0000:00")]
    NoParent {
        /// The function.
        at: HostBdf,
        /// What it names.
        on: HostBdf,
    },
    /// A parent that has no bus below.
    #[error("function {at} hangs on {on}, which is an endpoint: give a port or bridge")]
    ParentNoBridge {
        /// The function.
        at: HostBdf,
        /// What it names.
        on: HostBdf,
    },
    /// Bridges in a circle.
    #[error("function {at} hangs on itself through its bridges: one of them must hang on a root complex such as pci0000:00")]
    Loop {
        /// The function.
        at: HostBdf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake::{DOWNSTREAM, FakeFunction, FakeHost, ROOT_PORT, UPSTREAM};
    use crate::host::scan::scan_all;

    fn recorded() -> RecordedHost {
        let host = FakeHost::new();
        let port = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0";
        host.add("pci0000:00/0000:00:01.0", &FakeFunction::port(ROOT_PORT));
        host.add("pci0000:00/0000:00:01.0/0000:01:00.0", &FakeFunction::port(UPSTREAM));
        host.add(port, &FakeFunction::port(DOWNSTREAM));
        let physical = host.add(&format!("{port}/0000:03:00.0"), &FakeFunction::default());
        let function = host.add(&format!("{port}/0000:03:00.4"), &FakeFunction { driver: None, ..FakeFunction::default() });
        host.make_virtual(function, physical);
        host.add("pci10000:00/10000:00:02.0", &FakeFunction { numa_node: -1, group: None, ..FakeFunction::default() });
        let mut tree = scan_all(host.sysfs()).unwrap();
        let bars = &mut tree.functions.get_mut(&physical).unwrap().bars;
        bars[0] = Some(BarSpec { kind: BarKind::Memory32, prefetchable: false, size: 16 << 20 });
        bars[1] = Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size: 128 << 30 });
        let near = HostMemoryNode { cpus: "0-3,8".parse().unwrap(), memory: 1 << 38, distances: [(0, 10), (1, 21)].into() };
        tree.memory_nodes = [(0, near), (1, HostMemoryNode::default())].into();
        RecordedHost { tree, address_bits: 46 }
    }

    fn error(text: &str) -> String {
        let mut error: Box<dyn std::error::Error> = Box::new(RecordedHost::from_json(text).unwrap_err());
        let mut told = error.to_string();
        while let Some(cause) = error.source() {
            told = format!("{told}: {cause}");
            error = cause.to_string().into();
        }
        told
    }

    #[test]
    fn a_recorded_host_is_read_back_as_it_was() {
        let host = recorded();
        assert_eq!(host.tree.functions.len(), 6);
        let text = host.to_json().unwrap();
        assert_eq!(RecordedHost::from_json(&text).unwrap(), host);
        assert_eq!(RecordedHost::from_json(&text).unwrap().to_json().unwrap(), text);
    }

    #[test]
    fn a_file_that_is_no_host_is_refused_with_the_place() {
        assert!(error("").contains("line 1"));
        assert!(error("{\n \"banyan-host\": 1, \"serial\": 3}").contains("unknown field `serial`"));
        assert!(error(r#"{"banyan-host": 9, "address-bits": 46, "functions": []}"#).contains("banyan-host is 9"));
        assert!(error(r#"{"banyan-host": 1, "address-bits": 7, "functions": []}"#).contains("address-bits is 7"));
    }

    #[test]
    fn each_field_says_what_it_takes() {
        let text = recorded().to_json().unwrap();
        for (from, to, told) in [
            ("\"class\": \"030200\"", "\"class\": \"3\"", "class is `3`"),
            ("\"ids\": \"10de:2330\"", "\"ids\": \"10de\"", "ids is `10de`"),
            ("16GT/s x16", "16GT/s x3", "no link"),
            ("\"0-3,8\"", "\"3-0\"", "memory node 0: `3-0` is no list"),
            ("\"id\": 1", "\"id\": 0", "memory node 0 is there twice"),
            ("\"bar\": 1", "\"bar\": 6", "BAR 6"),
            ("\"bar\": 1", "\"bar\": 0", "BAR 0"),
            ("\"size\": 16777216", "\"size\": 0", "BAR 0 of 0 bytes"),
            ("\"max-payload\": 512", "\"max-payload\": 100", "payload of 100"),
            ("\"at\": \"0000:03:00.4\"", "\"at\": \"0000:03:00.9\"", "0000:03:00.9"),
            ("\"at\": \"0000:03:00.4\"", "\"at\": \"0000:03:00.0\"", "twice"),
            ("\"on\": \"0000:02:00.0\"", "\"on\": \"0000:09:00.0\"", "not in the file"),
            ("\"on\": \"0000:02:00.0\"", "\"on\": \"10000:00:02.0\"", "is an endpoint"),
            ("\"on\": \"pci0000:00\"", "\"on\": \"0000:02:00.0\"", "hangs on itself"),
            ("\"on\": \"pci0000:00\"", "\"on\": \"pci<0>\"", "no root complex"),
            ("\"on\": \"pci0000:00\"", "\"on\": \"pci00\"", "no root complex"),
        ] {
            assert!(text.contains(from), "{from}");
            let told_really = error(&text.replacen(from, to, 1));
            assert!(told_really.contains(told), "{to}: {told_really}");
        }
    }
}
