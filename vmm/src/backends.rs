//! What virtio devices use of the host: opened once, before the machine, and kept through its resets.
//!
//! A reset makes the devices anew, while files stay open and locked, and sockets stay where clients find them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use api::config::DiskConfig;
use pci::topology::Name;
use thiserror::Error;

use crate::spec::{Endpoint, Spec, Virtio};

/// The host's side of one device.
pub enum Backend {
    /// A disk's image.
    Image(File),
}

/// The host's sides of all devices, by name.
#[derive(Default)]
pub struct Backends {
    open: Mutex<BTreeMap<Name, Backend>>,
}

impl Backends {
    /// Opens what the devices of `spec` need.
    pub fn open(spec: &Spec) -> Result<Self, BackendError> {
        let backends = Self::default();
        for (name, endpoint) in &spec.endpoints {
            if let Endpoint::Virtio(device) = endpoint {
                backends.get(&name.0, device)?;
            }
        }
        Ok(backends)
    }

    /// The side of device `name`, which is opened if it is not open.
    pub fn get(&self, name: &str, device: &Virtio) -> Result<Backend, BackendError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backend) = open.get(&Name::from(name)) {
            return backend.share();
        }
        let backend = Backend::open(device)?;
        let shared = backend.share()?;
        open.insert(Name::from(name), backend);
        Ok(shared)
    }

    /// Closes the side of a device that has left for good.
    pub fn close(&self, name: &Name) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

impl Backend {
    fn open(device: &Virtio) -> Result<Self, BackendError> {
        match device {
            Virtio::Disk(disk) => open_disk(disk).map(Self::Image),
        }
    }

    /// The same side for another holder.
    fn share(&self) -> Result<Self, BackendError> {
        match self {
            Self::Image(file) => file.try_clone().map(Self::Image).map_err(BackendError::Descriptor),
        }
    }
}

/// Opens the image of a disk. Never waits, as opening a FIFO would.
fn open_disk(disk: &DiskConfig) -> Result<File, BackendError> {
    let open = |path: &Path| {
        let kind = fs::metadata(path)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::other("it is no regular file or block device"));
        }
        OpenOptions::new().read(true).write(!disk.readonly).open(path)
    };
    open(&disk.path).map_err(|source| BackendError::Disk { path: disk.path.clone(), readonly: disk.readonly, source })
}

/// What helps against the refusal of a disk.
fn advice(readonly: bool, source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if !readonly => {
            " for writing: add readonly=on, or allow it"
        }
        _ => "",
    }
}

/// Something of the host that a device cannot have.
#[derive(Debug, Error)]
pub enum BackendError {
    /// A disk image.
    #[error("cannot open the disk {}{}", path.display(), advice(*readonly, source))]
    Disk {
        /// The image.
        path: PathBuf,
        /// How it was to be opened.
        readonly: bool,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// No descriptor.
    #[error("cannot keep a file open: the limit of open files is reached (ulimit -n)")]
    Descriptor(#[source] io::Error),
}
