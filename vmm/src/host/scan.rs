//! Reads the host's sysfs into a [`HostTree`]. With [`memory_nodes`] the only reader of sysfs; everything is below a given
//! root directory (`/sys`), so that tests can make up a host.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use pci::address::{AddressError, HostBdf};
use pci::ids::{ClassCode, Ids};
use pci::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use pci::topology::PortKind;
use thiserror::Error;

use super::fabric::{Fabric, Sriov};
use super::registers::{Express, Registers};
use super::tree::{HostKind, HostNode, HostParent, HostTree, NestingError};
use super::{bars, memory_nodes};

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

/// The functions of a vendor. Those that vanish meanwhile are left out.
#[must_use]
pub fn of_vendor(sysfs: &Path, vendor: u16) -> Vec<HostBdf> {
    let entries = fs::read_dir(sysfs.join("bus/pci/devices")).into_iter().flatten().flatten();
    let text = format!("{vendor:#06x}");
    let of_vendor = entries.filter(|entry| attribute(&entry.path(), "vendor").as_ref() == Some(&text));
    of_vendor.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Looks at `devices`, at every bridge above them, at the physical functions of virtual ones, at the members of their
/// IOMMU groups, and at the memory nodes. Devices that do not exist, or leave meanwhile, are left out with all below them.
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
            // It left meanwhile. The kernel takes the link away first.
            Err(_) if !link.exists() => continue,
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
    drop_orphans(&mut tree);
    name_bridges(&mut tree);
    tree.check_nesting()?;
    deduce_port_kinds(&mut tree);
    Ok(tree)
}

/// With a bridge that left meanwhile, everything below it left.
fn drop_orphans(tree: &mut HostTree) {
    loop {
        let present: BTreeSet<HostBdf> = tree.functions.keys().copied().collect();
        tree.functions.retain(|_, node| match &node.on {
            HostParent::Bridge(on) => present.contains(on),
            HostParent::RootComplex(_) => true,
        });
        if tree.functions.len() == present.len() {
            return;
        }
    }
}

/// What others hang on is a bridge, whatever its registers say or hide.
fn name_bridges(tree: &mut HostTree) {
    let above = tree.functions.values().filter_map(|node| if let HostParent::Bridge(on) = node.on { Some(on) } else { None });
    for at in above.collect::<BTreeSet<HostBdf>>() {
        if let Some(node) = tree.functions.get_mut(&at).filter(|node| node.kind == HostKind::Endpoint) {
            node.kind = HostKind::OtherBridge;
        }
    }
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
    // Configuration space may be hidden, as in some containers, or be the only thing that there is.
    let config = fs::read(path.join("config")).unwrap_or_default();
    let registers = Registers(&config);
    let ids = Ids {
        vendor: word("vendor").or_else(|error| registers.word(0).ok_or(error))?,
        device: word("device").or_else(|error| registers.word(2).ok_or(error))?,
        class: ClassCode::new(number("class").or_else(|error| registers.class().ok_or(error))?),
        revision: number("revision").ok().and_then(|n| u8::try_from(n).ok()).unwrap_or(0),
        subsystem_vendor: word("subsystem_vendor").unwrap_or(0),
        subsystem: word("subsystem_device").unwrap_or(0),
    };
    let express = registers.express();
    let resource = attribute(path, "resource");
    Ok(HostNode {
        at,
        on: parent(path)?,
        ids,
        kind: kind(ids.class, registers, express),
        bars: resource.as_deref().map_or([None; 6], bars::parse),
        rom: resource.as_deref().and_then(bars::rom),
        interrupt_pin: registers.interrupt_pin(),
        link: express.and_then(Express::link).or_else(|| link_attributes(path)),
        atomic_completers: express.map_or(0, Express::atomic_completers),
        numa_node: attribute(path, "numa_node").and_then(|text| text.parse().ok()),
        group: link_name(&path.join("iommu_group")).and_then(|name| name.parse().ok()),
        driver: link_name(&path.join("driver")),
        physical_function: link_name(&path.join("physfn")).and_then(|name| name.parse().ok()),
        fabric: fabric(path, registers),
    })
}

fn kind(class: ClassCode, registers: Registers<'_>, express: Option<Express>) -> HostKind {
    let header = registers.header_type().unwrap_or(u8::from(class == ClassCode::BRIDGE));
    match (express.map(Express::port_type), header) {
        (Some(4), _) => HostKind::Port(PortKind::Root),
        (Some(5), _) => HostKind::Port(PortKind::Upstream),
        (Some(6), _) => HostKind::Port(PortKind::Downstream),
        (Some(7 | 8), _) => HostKind::OtherBridge,
        _ if class == ClassCode::HOST_BRIDGE => HostKind::OtherBridge,
        // Its kind cannot be read; deduced from the levels once all are known.
        (None, 1) if registers.0.len() <= 64 => HostKind::Port(PortKind::Root),
        (_, 1 | 2) => HostKind::OtherBridge,
        _ => HostKind::Endpoint,
    }
}

/// The registers, with attributes for what they hide.
fn fabric(path: &Path, registers: Registers<'_>) -> Fabric {
    let fabric = registers.fabric();
    let count = |name: &str| attribute(path, name)?.parse::<u16>().ok();
    let attributes = || Some(Sriov { total: count("sriov_totalvfs")?, enabled: count("sriov_numvfs").unwrap_or(0) });
    Fabric { sriov: fabric.sriov.or_else(attributes), iommu_bits: iommu_bits(path), ..fabric }
}

/// MGAW of the capability register that VT-d's driver shows (Intel VT-d specification 11.4.2; linux:
/// drivers/iommu/intel/iommu.c `cap_show`).
fn iommu_bits(path: &Path) -> Option<u8> {
    let capability = u64::from_str_radix(&attribute(path, "iommu/intel-iommu/cap")?, 16).ok()?;
    let [width, ..] = (capability >> 16 & 0x3F).to_le_bytes();
    Some(width + 1)
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
    /// Functions hang on each other in a circle.
    #[error("the links in sysfs make no tree")]
    Nesting(#[from] NestingError),
    /// The directory lies neither below another function nor below a root complex.
    #[error("{path} lies below no PCI root complex", path = path.display())]
    Parent {
        /// Which.
        path: PathBuf,
    },
}
