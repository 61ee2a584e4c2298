//! Reads the host's sysfs into a [`HostTree`]. With [`memory_nodes`] the only reader of sysfs; everything is below a given
//! root directory (`/sys`), so that tests can make up a host.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pci::address::{AddressError, HostBdf};
use pci::ids::{ClassCode, Ids};
use pci::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use pci::topology::PortKind;
use thiserror::Error;

use super::fabric::{Fabric, Sriov};
use super::registers::{Express, Registers};
use super::tree::{HostKind, HostNode, HostParent, HostTree, NestingError};
use super::{bars, memory_nodes};
use crate::files;

/// Bytes of a configuration space (PCIe 6.0 7.2.2).
const CONFIG: u64 = 4096;

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
    let of_vendor = entries.filter(|entry| attribute(&entry.path(), "vendor").is_ok_and(|vendor| vendor.as_ref() == Some(&text)));
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
            // A host without PCI has a sysfs all the same.
            Err(source) if source.kind() == io::ErrorKind::NotFound && !sysfs.join("bus").exists() => {
                return Err(ScanError::Read { path: sysfs.join("bus/pci/devices"), source });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(ScanError::Read { path: link, source }),
        };
        // The kernel names the link as the folder; another name would make two functions of one.
        if path.file_name().and_then(|name| name.to_str()?.parse().ok()) != Some(at) {
            return Err(ScanError::OtherFunction { link, path });
        }
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
    let number = |name: &str, largest: u32| checked(path, name, |text| hexadecimal(text).filter(|value| *value <= largest));
    let word = |name: &str| checked(path, name, |text| u16::try_from(hexadecimal(text)?).ok());
    let missing = |name: &str| ScanError::Read { path: path.join(name), source: io::ErrorKind::NotFound.into() };
    // Configuration space may be hidden, as in some containers, or be the only thing that there is.
    let config = unless_hidden(path, "config", |file| files::bytes(file, CONFIG))?.unwrap_or_default();
    let registers = Registers(&config);
    let class = number("class", 0xFF_FFFF)?.or_else(|| registers.class()).ok_or_else(|| missing("class"))?;
    let ids = Ids {
        vendor: word("vendor")?.or_else(|| registers.word(0)).ok_or_else(|| missing("vendor"))?,
        device: word("device")?.or_else(|| registers.word(2)).ok_or_else(|| missing("device"))?,
        class: ClassCode::new(class),
        revision: checked(path, "revision", |text| u8::try_from(hexadecimal(text)?).ok())?.unwrap_or(0),
        subsystem_vendor: word("subsystem_vendor")?.unwrap_or(0),
        subsystem: word("subsystem_device")?.unwrap_or(0),
    };
    let express = registers.express();
    let resource = attribute(path, "resource")?.filter(|text| !text.is_empty());
    if resource.is_none() {
        log::info!("{path} does not tell BARs: there is no text in `resource`", path = path.display());
    }
    let resource = resource.unwrap_or_default();
    let bad_line = |line: &str| ScanError::Attribute { path: path.join("resource"), text: excerpt(line) };
    let link = match express.and_then(Express::link) {
        Some(link) => Some(link),
        None => link_attributes(path)?,
    };
    Ok(HostNode {
        at,
        on: parent(path)?,
        ids,
        kind: kind(ids.class, registers, express),
        bars: bars::parse(&resource).map_err(bad_line)?,
        rom: bars::rom(&resource).map_err(bad_line)?,
        interrupt_pin: registers.interrupt_pin(),
        link,
        atomic_completers: express.map_or(0, Express::atomic_completers),
        numa_node: checked(path, "numa_node", memory_node)?.flatten(),
        group: named(path, "iommu_group")?,
        driver: link_name(&path.join("driver")),
        physical_function: named(path, "physfn")?,
        fabric: fabric(path, registers)?,
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
fn fabric(path: &Path, registers: Registers<'_>) -> Result<Fabric, ScanError> {
    let fabric = registers.fabric();
    let count = |name: &str| checked(path, name, |text| text.parse::<u16>().ok());
    let enabled = count("sriov_numvfs")?.unwrap_or(0);
    let attributes = count("sriov_totalvfs")?.map(|total| Sriov { total, enabled });
    Ok(Fabric { sriov: fabric.sriov.or(attributes), iommu_bits: iommu_bits(path)?, ..fabric })
}

/// MGAW of the capability register that VT-d's driver shows (Intel VT-d specification 11.4.2; linux:
/// drivers/iommu/intel/iommu.c `cap_show`).
fn iommu_bits(path: &Path) -> Result<Option<u8>, ScanError> {
    let capability = checked(path, "iommu/intel-iommu/cap", |text| u64::from_str_radix(text, 16).ok())?;
    Ok(capability.map(|capability| {
        let [width, ..] = (capability >> 16 & 0x3F).to_le_bytes();
        width + 1
    }))
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

/// What `read` finds in a file; `None` for one that is absent or denied, as files of sysfs may be. Anything but a file of
/// fitting size is refused.
fn unless_hidden<T>(path: &Path, name: &str, read: impl Fn(&Path) -> io::Result<T>) -> Result<Option<T>, ScanError> {
    let path = path.join(name);
    match read(&path) {
        Ok(found) => Ok(Some(found)),
        Err(source) if files::is_refused(&source) => Err(ScanError::NoAttribute { path, source }),
        Err(_) => Ok(None),
    }
}

fn attribute(path: &Path, name: &str) -> Result<Option<String>, ScanError> {
    let text = unless_hidden(path, name, |file| files::text(file, files::ATTRIBUTE))?;
    Ok(text.map(|text| text.trim().to_owned()))
}

/// The value of an attribute that is there. One that `parse` does not understand is refused.
fn checked<T>(path: &Path, name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>, ScanError> {
    let Some(text) = attribute(path, name)? else { return Ok(None) };
    parse(&text).map(Some).ok_or_else(|| ScanError::Attribute { path: path.join(name), text: excerpt(&text) })
}

/// What the name of a link's end says.
fn named<T: FromStr>(path: &Path, link: &str) -> Result<Option<T>, ScanError> {
    let Some(name) = link_name(&path.join(link)) else { return Ok(None) };
    name.parse().map(Some).map_err(|_| ScanError::Attribute { path: path.join(link), text: excerpt(&name) })
}

/// Digits with or without `0x`.
fn hexadecimal(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    // The parser of numbers takes a sign.
    digits.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}

/// A number, or -1 for none (linux: Documentation/ABI/testing/sysfs-bus-pci `numa_node`).
fn memory_node(text: &str) -> Option<Option<u32>> {
    if text == "-1" { Some(None) } else { text.parse().ok().map(Some) }
}

/// What fits into a message.
fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}

fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_str()?.to_owned())
}

/// What a link is not known to have is `Unknown` or 0 there, which is no link.
fn link_attributes(path: &Path) -> Result<Option<Link>, ScanError> {
    let rate = |speed: &str, width: &str| -> Result<Option<LinkRate>, ScanError> {
        let speed = attribute(path, speed)?.as_deref().and_then(LinkSpeed::from_sysfs);
        let width = attribute(path, width)?.and_then(|text| LinkWidth::new(text.parse().ok()?));
        Ok(speed.zip(width).map(|(speed, width)| LinkRate { speed, width }))
    };
    let Some(max) = rate("max_link_speed", "max_link_width")? else { return Ok(None) };
    let current = rate("current_link_speed", "current_link_width")?.unwrap_or(max);
    Ok(Some(Link { max, current, ..Link::at(max) }))
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
    /// An attribute does not hold a value that it can have.
    #[error("{path} holds `{text}`, which it cannot hold: copy it from a host again", path = path.display())]
    Attribute {
        /// Which.
        path: PathBuf,
        /// What it holds, or the line, up to 80 characters.
        text: String,
    },
    /// A link that leads to another function.
    #[error("{link} leads to {path}, which is another function: remove the link, or correct it", link = link.display(), path = path.display())]
    OtherFunction {
        /// The link.
        link: PathBuf,
        /// Where it leads.
        path: PathBuf,
    },
    /// An attribute that is no file, or no file of its size.
    #[error("{path} is no attribute of sysfs: copy it from a host again", path = path.display())]
    NoAttribute {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
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
