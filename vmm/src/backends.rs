//! What virtio devices use of the host: opened once, before the machine, and kept through its resets.
//!
//! A reset makes the devices anew, while files stay open and locked, and sockets stay where clients find them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use api::config::{DiskConfig, FsConfig, MacAddress, NetConfig};
use api::http::{ListenError, Listening};
use devices::virtio::net::tap::{Tap, TapError};
use devices::virtio::vhost_user::{Connection, ConnectionError, RemoteSpec, Served};
use pci::topology::Name;
use thiserror::Error;

use crate::spec::{Endpoint, Spec, Virtio};

/// The host's side of one device.
pub enum Backend {
    /// A disk's image.
    Image(File),
    /// A socket that clients of the guest connect to.
    Listening(Arc<Listening>),
    /// A source of random numbers.
    Random(File),
    /// Queues of a tap, and the address that the guest has.
    Taps(Vec<Arc<Tap>>, MacAddress),
    /// A process that serves the device.
    Server(Arc<Connection>),
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
        backends.open_all(spec)?;
        Ok(backends)
    }

    /// Opens what the devices of `spec` need beside what is open.
    pub fn open_all(&self, spec: &Spec) -> Result<(), BackendError> {
        for (name, endpoint) in &spec.endpoints {
            if let Endpoint::Virtio(device) = endpoint {
                self.get(&name.0, device)?;
            }
        }
        Ok(())
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

    /// Takes over the side of a device `name` that is to come: `taps`, queues of a tap that another process opened.
    pub fn take_taps(&self, name: &Name, net: &NetConfig, taps: Vec<OwnedFd>) -> Result<(), BackendError> {
        let taps = taps.into_iter().map(|fd| Tap::from_descriptor(fd).map(Arc::new)).collect::<Result<_, _>>()?;
        let backend = Backend::Taps(taps, address(net)?);
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), backend);
        Ok(())
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
            Virtio::Vsock(vsock) => Ok(Self::Listening(Arc::new(Listening::at(&vsock.socket)?))),
            Virtio::Rng(rng) => open_random(&rng.source).map(Self::Random),
            Virtio::Net(net) => {
                let name = net.tap.as_deref().ok_or(BackendError::NoTap)?;
                let taps = Tap::open(name, usize::from(net.queues / 2))?;
                Ok(Self::Taps(taps.into_iter().map(Arc::new).collect(), address(net)?))
            }
            Virtio::Folder(folder) => {
                let connection = Connection::open(&folder.socket, folder_spec(folder).all_queues())?;
                Ok(Self::Server(Arc::new(connection)))
            }
        }
    }

    /// The same side for another holder.
    fn share(&self) -> Result<Self, BackendError> {
        match self {
            Self::Image(file) => file.try_clone().map(Self::Image).map_err(BackendError::Descriptor),
            Self::Listening(socket) => Ok(Self::Listening(Arc::clone(socket))),
            Self::Random(file) => file.try_clone().map(Self::Random).map_err(BackendError::Descriptor),
            Self::Taps(taps, mac) => Ok(Self::Taps(taps.clone(), *mac)),
            Self::Server(connection) => Ok(Self::Server(Arc::clone(connection))),
        }
    }
}

/// What is served of a shared folder.
pub(crate) fn folder_spec(folder: &FsConfig) -> RemoteSpec {
    RemoteSpec { served: Served::Folder { tag: folder.tag.clone() }, queues: folder.queues, queue_size: folder.queue_size }
}

/// The address of an interface: that of its configuration, or a random one that is locally administered.
fn address(net: &NetConfig) -> Result<MacAddress, BackendError> {
    if let Some(mac) = net.mac {
        return Ok(mac);
    }
    let mut random = [0; 5];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| BackendError::Address(error.into()))?;
    let [a, b, c, d, e] = random;
    Ok(MacAddress([0x02, a, b, c, d, e]))
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

/// Opens a source of random numbers so that reads do not wait.
fn open_random(path: &Path) -> Result<File, BackendError> {
    let open = || {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let device = file.metadata()?.file_type().is_char_device();
        if device { Ok(file) } else { Err(io::Error::other("it is no character device")) }
    };
    open().map_err(|source| BackendError::Random { path: path.to_owned(), source })
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
    /// A socket.
    #[error(transparent)]
    Socket(#[from] ListenError),
    /// A source of random numbers.
    #[error("cannot read random numbers from {}: give --rng a device such as /dev/urandom", path.display())]
    Random {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A tap.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// Neither a name nor descriptors.
    #[error("a network interface needs a tap: give its name")]
    NoTap,
    /// A server.
    #[error(transparent)]
    Server(#[from] ConnectionError),
    /// No random address.
    #[error("cannot make up a hardware address: give one")]
    Address(#[source] io::Error),
    /// No descriptor.
    #[error("cannot keep a file open: the limit of open files is reached (ulimit -n)")]
    Descriptor(#[source] io::Error),
}
