//! Reads the host's sysfs into a [`HostTree`]. With [`super::memory_nodes`] the only reader of sysfs; everything is below a given root directory
//! (`/sys`), so that tests can make up a host.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use pci::address::{AddressError, HostBdf};
use pci::ids::{ClassCode, Ids};
use pci::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use pci::topology::PortKind;
use thiserror::Error;

use super::bars;
use super::memory_nodes;
use super::tree::{HostKind, HostNode, HostParent, HostTree};

/// The directory of function `at`. It need not exist.
#[must_use]
pub fn directory(sysfs: &Path, at: HostBdf) -> PathBuf {
    sysfs.join("bus/pci/devices").join(at.to_string())
}

/// The function that a user means by `text`: an address (`0000:03:00.0`, `03:00.0`) or a path, which may be a link, end in
/// a slash, or lead through `/sys/bus` or `/sys/devices`. Whether the function exists is not looked at.
pub fn resolve(text: &str) -> Result<HostBdf, ScanError> {
    if !text.contains('/') {
        return text.parse().map_err(|source| ScanError::Address { source });
    }
    let path = fs::canonicalize(text).unwrap_or_else(|_| PathBuf::from(text));
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.parse().map_err(|_| ScanError::Path { path: text.into() })
}

/// Looks at every function of the host.
pub fn scan_all(sysfs: &Path) -> Result<HostTree, ScanError> {
    let path = sysfs.join("bus/pci/devices");
    let entries = match fs::read_dir(&path) {
        Ok(entries) => entries,
        // A machine without PCI.
        Err(error) if error.kind() == io::ErrorKind::NotFound && sysfs.join("bus").exists() => return Ok(HostTree::default()),
        Err(source) => return Err(ScanError::Read { path, source }),
    };
    let devices: Vec<HostBdf> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    scan(sysfs, &devices)
}

/// Looks at `devices`, at every bridge above them, at the physical functions of virtual ones and at the members of their
/// IOMMU groups. Devices that do not exist are left out.
pub fn scan(sysfs: &Path, devices: &[HostBdf]) -> Result<HostTree, ScanError> {
    let mut tree = HostTree { memory_nodes: memory_nodes::scan(sysfs), ..HostTree::default() };
    let mut seen = BTreeSet::new();
    let mut wanted: Vec<HostBdf> = devices.to_vec();
    while let Some(at) = wanted.pop() {
        if !seen.insert(at) {
            continue;
        }
        let link = directory(sysfs, at);
        let path = match fs::canonicalize(&link) {
            Ok(path) => path,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(ScanError::Read { path: link, source }),
        };
        let node = match node(&path, at) {
            // It left meanwhile.
            Err(_) if !path.exists() => continue,
            node => node?,
        };
        if let HostParent::Bridge(bridge) = node.on {
            wanted.push(bridge);
        }
        wanted.extend(node.physical_function);
        if devices.contains(&at) {
            wanted.extend(group_members(&path)?);
        }
        tree.functions.insert(at, node);
    }
    deduce_port_kinds(&mut tree);
    Ok(tree)
}

fn node(path: &Path, at: HostBdf) -> Result<HostNode, ScanError> {
    let number = |name: &str| -> Result<u32, ScanError> {
        let file = path.join(name);
        let text = fs::read_to_string(&file).map_err(|source| ScanError::Read { path: file.clone(), source })?;
        let digits = text.trim().trim_start_matches("0x");
        u32::from_str_radix(digits, 16).map_err(|_| ScanError::Attribute { path: file, text: text.trim().to_owned() })
    };
    let word = |name: &str| -> Result<u16, ScanError> {
        let value = number(name)?;
        u16::try_from(value).map_err(|_| ScanError::Attribute { path: path.join(name), text: format!("{value:#x}") })
    };
    let ids = Ids {
        vendor: word("vendor")?,
        device: word("device")?,
        class: ClassCode::new(number("class")?),
        revision: number("revision").ok().and_then(|n| u8::try_from(n).ok()).unwrap_or(0),
        subsystem_vendor: word("subsystem_vendor").unwrap_or(0),
        subsystem: word("subsystem_device").unwrap_or(0),
    };
    let config_file = path.join("config");
    let config = fs::read(&config_file).map_err(|source| ScanError::Read { path: config_file, source })?;
    let express = Express::find(&config);
    let kind = match (express.map(|express| express.port_type()), header_type(&config)) {
        (Some(4), _) => HostKind::Port(PortKind::Root),
        (Some(5), _) => HostKind::Port(PortKind::Upstream),
        (Some(6), _) => HostKind::Port(PortKind::Downstream),
        (Some(7 | 8), _) => HostKind::OtherBridge,
        _ if ids.class == ClassCode::HOST_BRIDGE => HostKind::OtherBridge,
        // Its kind cannot be read; deduced from the levels once all are known.
        (None, 1) if config.len() <= 64 => HostKind::Port(PortKind::Root),
        (_, 1) => HostKind::OtherBridge,
        _ => HostKind::Endpoint,
    };
    Ok(HostNode {
        at,
        on: parent(path)?,
        ids,
        kind,
        bars: attribute(path, "resource").map_or([None; 6], |text| bars::parse(&text)),
        interrupt_pin: config.get(0x3D).copied().filter(|pin| *pin <= 4).unwrap_or(0),
        link: express.and_then(Express::link).or_else(|| link_attributes(path)),
        atomic_completers: express.map_or(0, Express::atomic_completers),
        numa_node: attribute(path, "numa_node").and_then(|text| text.parse().ok()),
        group: link_name(&path.join("iommu_group")).and_then(|name| name.parse().ok()),
        driver: link_name(&path.join("driver")),
        physical_function: link_name(&path.join("physfn")).and_then(|name| name.parse().ok()),
    })
}

/// The directory above tells what a function hangs on: another function, or a root complex `pciDDDD:BB`.
fn parent(path: &Path) -> Result<HostParent, ScanError> {
    let name = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
    if let Ok(bridge) = name.parse() {
        Ok(HostParent::Bridge(bridge))
    } else if name.starts_with("pci") {
        Ok(HostParent::RootComplex(name.to_owned()))
    } else {
        Err(ScanError::Parent { path: path.to_owned() })
    }
}

fn group_members(path: &Path) -> Result<Vec<HostBdf>, ScanError> {
    let directory = path.join("iommu_group/devices");
    match fs::read_dir(&directory) {
        Ok(entries) => Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(ScanError::Read { path: directory, source }),
    }
}

fn attribute(path: &Path, name: &str) -> Option<String> {
    Some(fs::read_to_string(path.join(name)).ok()?.trim().to_owned())
}

fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_str()?.to_owned())
}

fn link_attributes(path: &Path) -> Option<Link> {
    let rate = |speed: &str, width: &str| {
        let speed = LinkSpeed::from_sysfs(&attribute(path, speed)?)?;
        let width = LinkWidth::new(attribute(path, width)?.parse().ok()?)?;
        Some(LinkRate { speed, width })
    };
    let max = rate("max_link_speed", "max_link_width")?;
    let current = rate("current_link_speed", "current_link_width").unwrap_or(max);
    Some(Link { max, current, ..Link::at(max) })
}

/// Without privilege 64 bytes of configuration space are readable, which do not tell a port's kind. Levels do: a bridge on
/// a root complex is a root port, below a root or downstream port comes an upstream port, below that downstream ports.
fn deduce_port_kinds(tree: &mut HostTree) {
    let mut kinds = Vec::new();
    for node in tree.functions.values().filter(|node| matches!(node.kind, HostKind::Port(_))) {
        let levels = tree.above(node).len();
        let kind = match levels {
            0 => PortKind::Root,
            odd if odd % 2 == 1 => PortKind::Upstream,
            _ => PortKind::Downstream,
        };
        kinds.push((node.at, kind));
    }
    for (at, kind) in kinds {
        if let Some(node) = tree.functions.get_mut(&at)
            && node.kind == HostKind::Port(PortKind::Root)
        {
            node.kind = HostKind::Port(kind);
        }
    }
}

fn header_type(config: &[u8]) -> u8 {
    config.get(0x0E).map_or(0, |byte| byte & 0x7F)
}

/// The registers of a PCI Express capability (PCIe 6.0 7.5.3).
#[derive(Debug, Clone, Copy)]
struct Express {
    flags: u32,
    device: u32,
    device_control: u32,
    link: u32,
    link_status: u32,
    device2: u32,
}

impl Express {
    /// Walks the capability list; `None` when it has no such capability or the bytes end before it.
    fn find(config: &[u8]) -> Option<Self> {
        let byte = |at: usize| config.get(at).copied();
        let dword = |at: usize| Some(u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?));
        if byte(6)? & 0x10 == 0 {
            return None;
        }
        let mut at = usize::from(byte(0x34)? & 0xFC);
        // 48 capabilities fill the space; a longer list loops.
        for _ in 0..48 {
            if at < 0x40 {
                return None;
            }
            if byte(at)? == 0x10 {
                return Some(Self {
                    flags: dword(at)?,
                    device: dword(at + 4)?,
                    device_control: dword(at + 8)?,
                    link: dword(at + 0x0C)?,
                    link_status: dword(at + 0x10)?,
                    device2: dword(at + 0x24).unwrap_or(0),
                });
            }
            at = usize::from(byte(at + 1)? & 0xFC);
        }
        None
    }

    const fn port_type(self) -> u32 {
        self.flags >> 20 & 0xF
    }

    fn atomic_completers(self) -> u8 {
        (self.device2 >> 7).to_le_bytes()[0] & 7
    }

    fn link(self) -> Option<Link> {
        let rate = |register: u32| {
            let [low, _, _, _] = register.to_le_bytes();
            let [width, _, _, _] = (register >> 4 & 0x3F).to_le_bytes();
            Some(LinkRate { speed: LinkSpeed::from_encoding(low & 0xF)?, width: LinkWidth::new(width)? })
        };
        let max = rate(self.link)?;
        Some(Link {
            max,
            // A link that is down shows no width.
            current: rate(self.link_status >> 16).unwrap_or(max),
            max_payload_supported: self.device.to_le_bytes()[0] & 7,
            max_payload: (self.device_control >> 5).to_le_bytes()[0] & 7,
        })
    }
}

/// A device that cannot be found, or a sysfs that cannot be read.
#[derive(Debug, Error)]
pub enum ScanError {
    /// The text is no address.
    #[error("cannot tell which PCI function is meant")]
    Address {
        /// Why.
        #[source]
        source: AddressError,
    },
    /// The path leads to no PCI function.
    #[error("{path} is no PCI function: give an address such as 0000:03:00.0 or a path such as /sys/bus/pci/devices/0000:03:00.0", path = path.display())]
    Path {
        /// What was given.
        path: PathBuf,
    },
    /// A file or link cannot be read.
    #[error("cannot read {path}: is sysfs mounted, and may this user read it?", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// An attribute does not hold a number of its size.
    #[error("{path} holds `{text}`, no number of the expected size", path = path.display())]
    Attribute {
        /// Which.
        path: PathBuf,
        /// What it holds.
        text: String,
    },
    /// The directory lies neither below another function nor below a root complex.
    #[error("{path} lies below no PCI root complex", path = path.display())]
    Parent {
        /// Which.
        path: PathBuf,
    },
}
