//! Reads the bodies that are small: resize, removal, errors, shared folders, socket device.

use std::path::PathBuf;

use serde::Deserialize;

use super::json::{Notes, bad, read, refused};
use crate::command::Resize;
use crate::config::{FsConfig, FsError, VsockConfig};
use crate::error::ApiError;

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct ResizeBody {
    desired_vcpus: Option<u32>,
    desired_ram: Option<u64>,
    desired_balloon: Option<u64>,
}

/// The body of vm.resize.
pub fn resize(body: &[u8], notes: &Notes) -> Result<Resize, ApiError> {
    const WHAT: &str = "vm.resize";
    let ResizeBody { desired_vcpus, desired_ram: ram, desired_balloon: balloon } = read(WHAT, body, notes)?;
    let cpus = match desired_vcpus {
        None => None,
        Some(count) => match u8::try_from(count) {
            Ok(count @ 1..) => Some(count),
            _ => return Err(refused(WHAT, "desired_vcpus", &format!("{count} processors are not possible; 1 to 255 are"))),
        },
    };
    Ok(Resize { cpus, ram, balloon })
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct RemoveBody {
    id: String,
}

/// The body of vm.remove-device: the device's name.
pub fn remove_device(body: &[u8], notes: &Notes) -> Result<String, ApiError> {
    read("vm.remove-device", body, notes).map(|RemoveBody { id }| id)
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct SnapshotBody {
    destination_url: String,
}

/// The body of vm.snapshot: the folder.
pub fn snapshot(body: &[u8], notes: &Notes) -> Result<PathBuf, ApiError> {
    const WHAT: &str = "vm.snapshot";
    let SnapshotBody { destination_url } = read(WHAT, body, notes)?;
    folder(WHAT, "destination_url", &destination_url)
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct RestoreBody {
    source_url: String,
    prefault: Option<bool>,
    resume: Option<bool>,
    net_fds: Option<Vec<serde_json::Value>>,
    zone_updates: Option<Vec<serde_json::Value>>,
    // How memory comes from the files follows from what they are.
    #[serde(rename = "memory_restore_mode")]
    _memory_restore_mode: Option<String>,
}

/// What vm.restore asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restore {
    /// The folder.
    pub from: PathBuf,
    /// All memory is to be read before the reply.
    pub prefault: bool,
    /// The machine is to go on before the reply.
    pub resume: bool,
}

/// The body of vm.restore.
pub fn restore(body: &[u8], notes: &Notes) -> Result<Restore, ApiError> {
    const WHAT: &str = "vm.restore";
    let RestoreBody { source_url, prefault, resume, net_fds, zone_updates, .. } = read(WHAT, body, notes)?;
    if zone_updates.is_some_and(|zones| !zones.is_empty()) {
        return Err(refused(WHAT, "zone_updates", "it is not supported; edit `numa` in config.json"));
    }
    if net_fds.is_some_and(|fds| !fds.is_empty()) {
        return Err(refused(WHAT, "net_fds", "taps of a snapshot are opened by their names; add others after vm.restore"));
    }
    let from = folder(WHAT, "source_url", &source_url)?;
    Ok(Restore { from, prefault: prefault.unwrap_or_default(), resume: resume.unwrap_or_default() })
}

/// A folder of this machine, as a URL.
fn folder(what: &str, key: &str, url: &str) -> Result<PathBuf, ApiError> {
    let path = url.strip_prefix("file://").filter(|path| path.starts_with('/') && !path.contains('\0'));
    path.map(PathBuf::from).ok_or_else(|| refused(what, key, "write it as `file:///path/of/a/folder`"))
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct InjectBody {
    at: String,
    error: String,
}

/// The body of vm.inject-error: name of a device or port, name of an error.
pub fn inject_error(body: &[u8], notes: &Notes) -> Result<(String, String), ApiError> {
    read("vm.inject-error", body, notes).map(|InjectBody { at, error }| (at, error))
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct FsBody {
    id: Option<String>,
    tag: String,
    socket: PathBuf,
    num_queues: Option<u16>,
    queue_size: Option<u16>,
    pci_device_id: Option<u8>,
    #[serde(rename = "pci_segment")]
    _pci_segment: Option<u16>,
}

impl FsBody {
    pub(super) fn config(self, what: &str) -> Result<FsConfig, ApiError> {
        no_place(what, "pci_device_id", self.pci_device_id)?;
        let Self { id, tag, socket, num_queues, queue_size, .. } = self;
        let folder = FsConfig { id, tag, socket, queues: num_queues.unwrap_or(1), queue_size: queue_size.unwrap_or(1024) };
        folder.check().map_err(|error| {
            let key = match error {
                FsError::Tag { .. } => "tag",
                FsError::Queues { .. } => "num_queues",
                FsError::QueueSize { .. } => "queue_size",
            };
            refused(what, key, &error.to_string())
        })?;
        Ok(folder)
    }
}

/// The body of vm.add-fs.
pub fn add_fs(body: &[u8], notes: &Notes) -> Result<FsConfig, ApiError> {
    const WHAT: &str = "vm.add-fs";
    read::<FsBody>(WHAT, body, notes)?.config(WHAT)
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct VsockBody {
    id: Option<String>,
    cid: u64,
    socket: PathBuf,
    iommu: Option<bool>,
    pci_device_id: Option<u8>,
    #[serde(rename = "pci_segment")]
    _pci_segment: Option<u16>,
}

impl VsockBody {
    pub(super) fn config(self, what: &str) -> Result<VsockConfig, ApiError> {
        no_place(what, "vsock.pci_device_id", self.pci_device_id)?;
        no_iommu(what, "vsock.iommu", self.iommu)?;
        // 0 to 2 are the hypervisor's, a local one and the host's; the last one stands for any (virtio 1.2, 5.10.4).
        let cid = u32::try_from(self.cid).ok().filter(|cid| (3..u32::MAX).contains(cid));
        let cid = cid.ok_or_else(|| refused(what, "cid", &format!("{} is no guest's; 3 to 4294967294 are", self.cid)))?;
        Ok(VsockConfig { id: self.id, cid, socket: self.socket })
    }
}

/// The body of vm.add-vsock.
pub fn add_vsock(body: &[u8], notes: &Notes) -> Result<VsockConfig, ApiError> {
    const WHAT: &str = "vm.add-vsock";
    read::<VsockBody>(WHAT, body, notes)?.config(WHAT)
}

/// A device that would have to be behind an IOMMU of the guest is refused: without one it would see all of its memory.
pub(super) fn no_iommu(what: &str, key: &str, wanted: Option<bool>) -> Result<(), ApiError> {
    if wanted == Some(true) {
        return Err(refused(what, key, "Banyan has no IOMMU for the guest; turn it off (Kata: `enable_iommu = false`)"));
    }
    Ok(())
}

/// Which device number a device has follows from the order of all, and cannot be promised to one.
pub(super) fn no_place(what: &str, key: &str, number: Option<u8>) -> Result<(), ApiError> {
    match number {
        None => Ok(()),
        Some(_) => {
            let why = "a client cannot choose it; leave it out, and take the address from the reply or from vm.info";
            Err(refused(what, key, why))
        }
    }
}

/// Exactly one of several is there.
pub(super) fn missing(what: &str, key: &str) -> ApiError {
    bad(what, &format!("key `{key}` is missing"))
}
