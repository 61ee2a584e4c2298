//! Decides what the devices of a configuration are by the files of the Container Device Interface: names become functions of
//! the host, and what files say of a function's clique and place is added.
//!
//! Text to entries is [`parse`], files and host are read by [`load`], everything is decided in [`resolve`]. The other way round,
//! [`generate`] decides what files say of a host, and [`mod@write`] writes them.

pub mod generate;
pub mod load;
pub mod parse;
pub mod resolve;
pub mod write;
pub mod yaml;

use std::path::{Path, PathBuf};

use api::config::{DeviceConfig, DeviceKind, VmConfig};
use thiserror::Error;

use crate::host::tree::HostTree;
use crate::host::{self, SYSFS};
use load::{HostFunction, Library, LoadError};
use parse::VfioNode;
use resolve::{ResolveError, Resolver};

/// What the user should know beside the configuration.
pub type Notes = Vec<String>;

/// `config` with host functions in place of CDI names. Nothing is read when it has no host function.
pub fn apply(config: &VmConfig) -> Result<(VmConfig, Notes), CdiError> {
    apply_below(Path::new(SYSFS), config)
}

/// The same for a recorded host. The default directories speak of this host and are not read.
pub fn apply_in(tree: &HostTree, config: &VmConfig) -> Result<(VmConfig, Notes), CdiError> {
    let library = Library::load(&config.cdi_dirs, true, config.cdi_mistakes)?;
    apply_library(&library, &load::recorded(tree), config)
}

/// Whether a device can stand for several: those of a CDI name, and of the node of an IOMMU group.
#[must_use]
pub fn may_be_several(kind: &DeviceKind) -> bool {
    match kind {
        DeviceKind::Cdi(_) => true,
        DeviceKind::Vfio(vfio) => vfio.path.to_str().and_then(VfioNode::from_path).is_some(),
        DeviceKind::Stub(_) => false,
    }
}

fn apply_below(sysfs: &Path, config: &VmConfig) -> Result<(VmConfig, Notes), CdiError> {
    let in_file = config.topology.iter().flat_map(|file| &file.devices);
    if in_file.chain(&config.devices).all(|device| matches!(device.kind, DeviceKind::Stub(_))) {
        return Ok((config.clone(), Notes::new()));
    }
    let named = !config.cdi_dirs.is_empty();
    let usual = load::DIRECTORIES.map(PathBuf::from);
    let directories = if named { &config.cdi_dirs[..] } else { &usual };
    let library = Library::load(directories, named, config.cdi_mistakes)?;
    apply_library(&library, &load::functions(sysfs)?, config)
}

fn apply_library(library: &Library, host: &[HostFunction], config: &VmConfig) -> Result<(VmConfig, Notes), CdiError> {
    let mut config = config.clone();
    let resolver = Resolver { library, host };
    let notes = library.notes();
    if let Some(file) = &mut config.topology {
        file.devices = expand(&resolver, &file.devices)?;
    }
    config.devices = expand(&resolver, &config.devices)?;
    Ok((config, notes))
}

fn expand(resolver: &Resolver<'_>, devices: &[DeviceConfig]) -> Result<Vec<DeviceConfig>, CdiError> {
    let mut expanded = Vec::new();
    for device in devices {
        let at = match &device.kind {
            // A path that leads nowhere is refused where the host is looked at.
            DeviceKind::Vfio(vfio) => host::scan::resolve(&vfio.path.to_string_lossy()).ok(),
            _ => None,
        };
        expanded.extend(resolver.resolve(device, at)?);
    }
    Ok(expanded)
}

/// A configuration that CDI files do not make clear.
#[derive(Debug, Error)]
pub enum CdiError {
    /// Files, directories, sysfs.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// What they say.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
}

#[cfg(test)]
mod tests;
