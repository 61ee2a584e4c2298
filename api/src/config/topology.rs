//! Reads a hierarchy from a TOML file: root complexes, ports and devices, each with a name and what it hangs on.
//!
//! ```toml
//! [[root-complex]]
//! name = "rc0"            # segment = 0, node = 0, bus = 0
//!
//! [[port]]
//! name = "rp0"
//! kind = "root-port"      # root-port, upstream-port, downstream-port or pcie-pci-bridge
//! on = "rc0"              # device = 4, function = 0, ids = "10b5:8725", subsystem = "10b5:8725"
//! link = "16GT/s x16"
//! hotplug = true          # mem = "256G", mem32 = "32M", buses = 1, removal = "orderly"
//!
//! [[device]]              # the keys of --device
//! name = "gpu0"
//! on = "rp0"
//! kind = "stub"
//! ids = "10de:20b8"
//! bars = ["0:16M:mem32", "1:128G:mem64:prefetchable"]
//! ```
//!
//! Whether the names make a tree is decided in the planner.

use std::num::NonZeroU8;

use serde::Deserialize;
use thiserror::Error;
use toml::Spanned;

use super::device::DeviceConfig;
use super::flags::choice;
use super::pcie::Removal;
use super::size::Size;
use super::stub::IdPair;
use crate::json::plain;

/// A hierarchy, as it is written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TopologyConfig {
    /// Root complexes.
    pub root_complexes: Vec<RootComplexConfig>,
    /// Ports.
    pub ports: Vec<PortConfig>,
    /// Devices; each has an id and a place.
    pub devices: Vec<DeviceConfig>,
}

/// `[[root-complex]]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootComplexConfig {
    /// Name.
    pub name: String,
    /// PCI segment group.
    #[serde(default)]
    pub segment: u16,
    /// Guest NUMA node.
    pub node: Option<u32>,
    /// Number of the root bus.
    pub bus: Option<u8>,
}

/// `[[port]]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortConfig {
    /// Name.
    pub name: String,
    /// Which kind.
    pub kind: PortKind,
    /// What it hangs on.
    pub on: String,
    /// Device number; by default the next free one.
    pub device: Option<u8>,
    /// Function number.
    #[serde(default)]
    pub function: u8,
    /// Vendor and device; by default Banyan's own.
    pub ids: Option<IdPair>,
    /// Subsystem vendor and subsystem.
    pub subsystem: Option<IdPair>,
    /// Speed and width, as `16GT/s x16`; by default those of the other end of the link. As given; read where links are known.
    pub link: Option<String>,
    /// Whether devices come and go while the guest runs.
    #[serde(default)]
    pub hotplug: bool,
    /// Bytes of 64-bit prefetchable memory that it keeps for them; by default as for all hot-plug ports.
    pub mem: Option<Size>,
    /// Bytes of memory below 4 GiB that it keeps for them; by default as for all hot-plug ports.
    pub mem32: Option<Size>,
    /// Bus numbers that it keeps for them, the one below it included; by default as for all hot-plug ports.
    pub buses: Option<NonZeroU8>,
    /// How they leave; by default as from all hot-plug ports.
    pub removal: Option<Removal>,
}

impl PortConfig {
    /// A key that says something of hot-plug.
    fn of_hotplug(&self) -> Option<&'static str> {
        let keys = [
            ("mem", self.mem.is_some()),
            ("mem32", self.mem32.is_some()),
            ("buses", self.buses.is_some()),
            ("removal", self.removal.is_some()),
        ];
        keys.into_iter().find_map(|(key, there)| there.then_some(key))
    }
}

choice!(
    /// Kind of a port.
    PortKind {
        /// On a root complex.
        RootPort = "root-port",
        /// Head of a switch, below a root or downstream port.
        UpstreamPort = "upstream-port",
        /// Of a switch, on its upstream port.
        DownstreamPort = "downstream-port",
        /// PCIe-to-PCI bridge, below a root or downstream port: several devices on one conventional bus.
        PciBridge = "pcie-pci-bridge",
    }
);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default, rename = "root-complex")]
    root_complexes: Vec<RootComplexConfig>,
    #[serde(default, rename = "port")]
    ports: Vec<Spanned<PortConfig>>,
    #[serde(default, rename = "device")]
    devices: Vec<Spanned<DeviceConfig>>,
}

impl TopologyConfig {
    /// Reads the text of the file `name`, which appears in errors only.
    pub fn parse(name: &str, text: &str) -> Result<Self, TopologyFileError> {
        let file: File = toml::from_str(text).map_err(|error| TopologyFileError::Syntax {
            file: name.to_owned(),
            line: error.span().map_or(1, |span| line(text, span.start)),
            what: plain(error.message()),
        })?;
        for device in &file.devices {
            let missing = match device.get_ref() {
                DeviceConfig { id: None, .. } => "name",
                DeviceConfig { on: None, attach: None, .. } => "on",
                _ => continue,
            };
            let line = line(text, device.span().start);
            return Err(TopologyFileError::Missing { file: name.to_owned(), line, key: missing });
        }
        for port in &file.ports {
            if let Some(key) = port.get_ref().of_hotplug().filter(|_| !port.get_ref().hotplug) {
                let line = line(text, port.span().start);
                return Err(TopologyFileError::NoHotPlug { file: name.to_owned(), line, key });
            }
        }
        if file.root_complexes.is_empty() {
            return Err(TopologyFileError::NoRootComplex { file: name.to_owned() });
        }
        Ok(Self {
            root_complexes: file.root_complexes,
            ports: file.ports.into_iter().map(Spanned::into_inner).collect(),
            devices: file.devices.into_iter().map(Spanned::into_inner).collect(),
        })
    }
}

/// Line number of a byte offset, from 1.
pub(super) fn line(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count()
}

/// A file that is no hierarchy.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum TopologyFileError {
    /// Not TOML, an unknown or missing key, or a value that its key cannot have.
    #[error("{file}, line {line}: {what}")]
    Syntax {
        /// The file.
        file: String,
        /// Where.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// A device without a key that it needs in a file.
    #[error("{file}, line {line}: a device has no `{key}`; add `{key} = \"...\"` to this [[device]]")]
    Missing {
        /// The file.
        file: String,
        /// Where the device starts.
        line: usize,
        /// The key.
        key: &'static str,
    },
    /// What a port keeps for devices that cannot come.
    #[error("{file}, line {line}: `{key}` of a port has no effect without `hotplug = true`; add it to this [[port]]")]
    NoHotPlug {
        /// The file.
        file: String,
        /// Where the port starts.
        line: usize,
        /// The key.
        key: &'static str,
    },
    /// Nothing for ports to hang on.
    #[error("{file} has no root complex; start it with [[root-complex]] and `name = \"rc0\"`")]
    NoRootComplex {
        /// The file.
        file: String,
    },
}

#[cfg(test)]
mod tests;
