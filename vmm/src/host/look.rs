//! Looks at the host functions that a configuration names, and judges them before anything is opened.

use std::path::Path;

use api::config::{DeviceConfig, DeviceKind, HostPorts, NumaConfig, NvlinkMode, TopologyPolicy, VmConfig};
use pci::address::HostBdf;
use pci::topology::EndpointSpec;
use thiserror::Error;

use super::check::{CheckError, Wanted, check_beside, check_memlock, check_present};
use super::limits::memlock;
use super::scan::{ScanError, of_vendor, resolve, scan, scan_all};
use super::tree::HostTree;
use crate::check::nvswitch::{self, is_nvswitch};
use crate::check::report::Severity;
use crate::cliques::{NVIDIA, takes_part};
use crate::spec::{self, Host};

/// Where sysfs is.
pub const SYSFS: &str = "/sys";

/// What the host has for this guest. Nothing is looked at when no host function and no memory node is named.
pub fn look(config: &VmConfig) -> Result<Host, HostError> {
    look_below(Path::new(SYSFS), config, &[])
}

/// The same for devices that come to a guest which has the functions `beside`, or gets them with these.
pub fn look_beside(config: &VmConfig, beside: &[HostBdf]) -> Result<Host, HostError> {
    look_below(Path::new(SYSFS), config, beside)
}

/// What a host that is data has for this guest. Drivers, groups and limits are not judged: nothing is to be opened.
pub fn look_in(tree: &HostTree, config: &VmConfig) -> Result<Host, HostError> {
    let wanted = wanted(config)?;
    check_present(tree, &wanted)?;
    let given: Vec<HostBdf> = wanted.iter().map(|device| device.at).collect();
    mention_nvlink(tree, &given, config.pcie.nvlink);
    Ok(host(tree.clone(), wanted))
}

fn look_below(sysfs: &Path, config: &VmConfig, beside: &[HostBdf]) -> Result<Host, HostError> {
    let wanted = wanted(config)?;
    // Ports to which devices may come are looked for among all.
    let copies_ports = config.pcie.topology == TopologyPolicy::Host && config.pcie.host_ports != HostPorts::Used;
    if wanted.is_empty() && config.numa == NumaConfig::Off && !copies_ports {
        return Ok(Host::default());
    }
    let addresses: Vec<_> = wanted.iter().map(|device| device.at).collect();
    let tree = if copies_ports { scan_all(sysfs)? } else { scan(sysfs, &addresses)? };
    if wanted.is_empty() {
        return Ok(host(tree, wanted));
    }
    for warning in check_beside(&tree, &wanted, beside)? {
        log::warn!("{warning}");
    }
    if addresses.iter().filter_map(|at| tree.get(*at)).any(|node| is_nvswitch(node) || takes_part(node)) {
        mention_nvlink(&scan(sysfs, &of_vendor(sysfs, NVIDIA))?, &addresses, config.pcie.nvlink);
    }
    let limits = memlock();
    check_memlock(limits.limit, config.memory.size.bytes(), limits.capable)?;
    Ok(host(tree, wanted))
}

/// Tells of an NVLink fabric that nobody may set up: a warning for what cannot be as it is declared, or for half of one; a remark
/// where it could be somebody outside.
fn mention_nvlink(all: &HostTree, given: &[HostBdf], declared: Option<NvlinkMode>) {
    let Some(fabric) = nvswitch::judge(all, given, declared) else { return };
    let level = if fabric.severity() == Severity::Problem { log::Level::Warn } else { log::Level::Info };
    log::log!(level, "NVLink: {fabric}; --pcie nvlink=full, shared or off says who sets it up");
}

/// The host function that a device is; `None` for one that is none, or is written wrongly.
#[must_use]
pub fn address(device: &DeviceConfig) -> Option<HostBdf> {
    match &device.kind {
        DeviceKind::Vfio(vfio) => resolve(&vfio.path.to_string_lossy()).ok(),
        DeviceKind::Stub(_) | DeviceKind::Cdi(_) => None,
    }
}

/// The host functions that a configuration names, in its order. Whether they exist is not looked at.
pub fn wanted(config: &VmConfig) -> Result<Vec<Wanted>, HostError> {
    let mut wanted = Vec::new();
    for (name, device) in spec::names(config) {
        if let DeviceKind::Vfio(vfio) = &device.kind {
            let at = resolve(&vfio.path.to_string_lossy()).map_err(|source| HostError::Device { name: name.clone(), source })?;
            wanted.push(Wanted { name, at });
        }
    }
    Ok(wanted)
}

fn host(tree: HostTree, wanted: Vec<Wanted>) -> Host {
    let endpoints = wanted.iter().filter_map(|device| {
        let node = tree.get(device.at)?;
        Some((
            device.at,
            EndpointSpec { ids: node.ids, bars: node.bars, interrupt_pin: node.interrupt_pin, rom: node.rom, sriov: None },
        ))
    });
    let endpoints = endpoints.collect();
    let wanted = wanted.into_iter().map(|device| (device.name, device.at)).collect();
    Host { tree, wanted, endpoints, emulated: false }
}

/// A host that cannot give what is wanted.
#[derive(Debug, Error)]
pub enum HostError {
    /// A device that is written wrongly.
    #[error("device {name}")]
    Device {
        /// The device.
        name: String,
        /// Why.
        #[source]
        source: ScanError,
    },
    /// sysfs cannot be read.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// A device cannot be passed through.
    #[error(transparent)]
    Check(#[from] CheckError),
}
