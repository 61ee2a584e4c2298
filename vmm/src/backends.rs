//! What virtio devices use of the host: opened once, before the machine, and kept through its resets.
//!
//! A reset makes the devices anew, while files stay open and locked, and sockets stay where clients find them.

mod ends;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use api::config::{DiskConfig, DiskSource, ImageFormat, MacAddress, NetConfig, NetSource};
use api::events::{Event, Events};
use api::http::{ListenError, Listening};
use devices::virtio::balloon::BalloonControl;
use devices::virtio::block::{Format, Image, ImageError, Opened};
use devices::virtio::mem::MemControl;
use devices::virtio::net::tap::{Interface, Offloads, Tap, TapError};
use devices::virtio::vhost_user::{self, RemoteSpec, Served, ServerError};
use pci::sync::lock;
use pci::topology::Name;
use thiserror::Error;

use crate::spec::{Endpoint, Spec, Virtio};
use ends::Ends;

/// Most servers that are met at one time, each by a thread.
const MET_AT_ONCE: usize = 32;

/// The host's side of one device.
pub enum Backend {
    /// A disk's image.
    Image(Arc<Image>),
    /// A socket that clients of the guest connect to.
    Listening(Arc<Listening>),
    /// A source of random numbers.
    Random(File),
    /// Queues of a tap, and the address that the guest has.
    Taps(Vec<Arc<Tap>>, MacAddress),
    /// A process that serves the device, and how.
    Server(Arc<vhost_user::Server>, RemoteSpec),
    /// How large a balloon shall be.
    Balloon(Arc<BalloonControl>),
    /// A region of blocks.
    Memory(Arc<MemControl>),
    /// Nothing that would have to be opened.
    None,
}

/// The host's sides of all devices, by name.
#[derive(Default)]
pub struct Backends {
    open: Mutex<BTreeMap<Name, Backend>>,
    /// Of servers.
    ends: Ends,
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
        self.open_those(spec, |_| true)
    }

    /// Opens what those devices of `spec` need that are `wanted`, beside what is open. Servers are met last, all at the same
    /// time.
    pub fn open_those(&self, spec: &Spec, wanted: impl Fn(&Name) -> bool) -> Result<(), BackendError> {
        let devices = spec.endpoints.iter().filter(|(name, _)| wanted(name)).filter_map(|(name, endpoint)| match endpoint {
            Endpoint::Virtio(device) => Some((name, device)),
            _ => None,
        });
        let (served, others): (Vec<_>, Vec<_>) = devices.partition(|(_, device)| device.server().is_some());
        for (name, device) in others {
            self.get(&name.0, device)?;
        }
        let open = lock(&self.open);
        let missing: Vec<_> = served.into_iter().filter(|(name, _)| !open.contains_key(name)).collect();
        drop(open);
        self.meet(&missing)
    }

    /// Meets the servers of devices, so many at the same time: those that say nothing keep others waiting as long as one of them
    /// does. After the first failure no more are met.
    fn meet(&self, devices: &[(&Name, &Virtio)]) -> Result<(), BackendError> {
        let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
        let first_failure = || lock(&failed);
        let meet = || {
            while let Some((name, device)) = devices.get(next.fetch_add(1, Ordering::Relaxed)) {
                if first_failure().is_some() {
                    return;
                }
                match Backend::open(device).and_then(|side| self.put(name, side)) {
                    Ok(()) => {}
                    Err(source) => {
                        first_failure().get_or_insert(named(name, source));
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..devices.len().min(MET_AT_ONCE) {
                // This thread does what is left to it.
                let _ = thread::Builder::new().name("vu-meet".into()).spawn_scoped(scope, meet);
            }
            meet();
        });
        first_failure().take().map_or(Ok(()), Err)
    }

    /// Whether the host has what the devices of `spec` need, as far as that shows without disturbing anybody: servers of devices
    /// take one client in their life, so that their sockets are looked at alone, and taps are made when they are opened.
    pub fn look(spec: &Spec) -> Result<(), BackendError> {
        for (name, endpoint) in &spec.endpoints {
            let Endpoint::Virtio(device) = endpoint else { continue };
            let found = match device {
                Virtio::Disk(disk) => match &disk.source {
                    DiskSource::Image(path) => open_disk(disk, path).map(drop),
                    DiskSource::Server(socket) => look_for_server(socket),
                },
                Virtio::Rng(rng) => open_random(&rng.source).map(drop),
                Virtio::Vsock(vsock) => Listening::check(&vsock.socket).map_err(BackendError::from),
                Virtio::Net(net) => match &net.source {
                    NetSource::Descriptors => Err(BackendError::NoTap),
                    NetSource::Tap(tap) => Tap::check(tap).map_err(BackendError::from),
                    NetSource::Server(socket) => look_for_server(socket),
                },
                Virtio::Folder(folder) => look_for_server(&folder.socket),
                Virtio::Console(_) | Virtio::Balloon(_) | Virtio::Memory { .. } => Ok(()),
            };
            found.map_err(|source| named(name, source))?;
        }
        Ok(())
    }

    /// The side of device `name`, which is opened if it is not open.
    pub fn get(&self, name: &str, device: &Virtio) -> Result<Backend, BackendError> {
        let mut open = lock(&self.open);
        if let Some(backend) = open.get(&Name::from(name)) {
            return backend.share();
        }
        let name = Name::from(name);
        let backend = match Backend::open(device) {
            Ok(backend) => backend,
            Err(source) => {
                // Most taps are open once: who has this one says more than the kernel's refusal.
                let tap = match device {
                    Virtio::Net(NetConfig { source: NetSource::Tap(tap), .. }) => Some(tap),
                    _ => None,
                };
                tap.map_or(Ok(()), |tap| alone(&open, &name, |there| there.name == *tap))?;
                return Err(named(&name, source));
            }
        };
        backend.has_its_own_tap(&open, &name)?;
        self.hear(&backend)?;
        let shared = backend.share()?;
        open.insert(name, backend);
        Ok(shared)
    }

    /// Takes over the side of a device `name` that is to come, if it is on nobody else's tap.
    pub fn put(&self, name: &Name, side: Backend) -> Result<(), BackendError> {
        let mut open = lock(&self.open);
        side.has_its_own_tap(&open, name)?;
        self.hear(&side)?;
        open.insert(name.clone(), side);
        Ok(())
    }

    fn hear(&self, side: &Backend) -> Result<(), BackendError> {
        match side {
            Backend::Server(server, _) => self.ends.hear(server).map_err(BackendError::Descriptor),
            _ => Ok(()),
        }
    }

    /// Readable when a server has ended or failed, of those that are there or come.
    pub fn ends(&self) -> io::Result<BorrowedFd<'_>> {
        self.ends.event()
    }

    /// The same, unless no device has had a server so far.
    #[must_use]
    pub fn ends_if_any(&self) -> Option<BorrowedFd<'_>> {
        self.ends.event_if_any()
    }

    /// Logs which servers have ended or failed, and tells `events`: each once, whether or not a driver uses its device. Servers of
    /// devices that are `leaving` may end.
    pub fn tell_ends(&self, events: Option<&Events>, leaving: impl Fn(&Name) -> bool) {
        if !self.ends.take() {
            return;
        }
        for (name, server) in self.servers().into_iter().filter(|(name, _)| !leaving(name)) {
            if let (Some(why), Some(events)) = (server.take_end(&name.0), events) {
                events.tell(Event::DeviceFailed { id: name.0, why });
            }
        }
    }

    /// The servers of devices, by the devices' names.
    #[must_use]
    pub fn servers(&self) -> Vec<(Name, Arc<vhost_user::Server>)> {
        let open = lock(&self.open);
        let servers = open.iter().filter_map(|(name, backend)| match backend {
            Backend::Server(server, _) => Some((name.clone(), Arc::clone(server))),
            _ => None,
        });
        servers.collect()
    }

    /// Closes the sides of all devices but those of `spec`.
    pub fn close_others(&self, spec: &Spec) {
        lock(&self.open).retain(|name, _| spec.endpoints.contains_key(name));
    }

    /// What passed through disks and interfaces that this process serves, by their names, with the dialect's names of counters.
    #[must_use]
    pub fn traffic(&self) -> Vec<(String, Vec<(&'static str, u64)>)> {
        let open = lock(&self.open);
        let counters = |backend: &Backend| match backend {
            Backend::Image(image) => {
                let (read, written) = (image.read(), image.written());
                let bytes = [("read_bytes", read.bytes()), ("write_bytes", written.bytes())];
                Some([bytes, [("read_ops", read.count()), ("write_ops", written.count())]].concat())
            }
            Backend::Taps(taps, _) => {
                let sum = |of: fn(&Tap) -> u64| taps.iter().map(|tap| of(tap)).sum();
                Some(vec![
                    ("rx_bytes", sum(|tap| tap.received().bytes())),
                    ("rx_frames", sum(|tap| tap.received().count())),
                    ("tx_bytes", sum(|tap| tap.sent().bytes())),
                    ("tx_frames", sum(|tap| tap.sent().count())),
                ])
            }
            _ => None,
        };
        open.iter().filter_map(|(name, backend)| Some((name.to_string(), counters(backend)?))).collect()
    }

    /// The balloon, if there is one.
    #[must_use]
    pub fn balloon(&self) -> Option<Arc<BalloonControl>> {
        let open = lock(&self.open);
        open.values().find_map(|backend| match backend {
            Backend::Balloon(control) => Some(Arc::clone(control)),
            _ => None,
        })
    }

    /// The regions of blocks, by memory node.
    #[must_use]
    pub fn memory_regions(&self) -> Vec<Arc<MemControl>> {
        let open = lock(&self.open);
        let regions = open.values().filter_map(|backend| match backend {
            Backend::Memory(control) => Some(Arc::clone(control)),
            _ => None,
        });
        let mut regions: Vec<_> = regions.collect();
        regions.sort_by_key(|control| control.node());
        regions
    }

    /// The address of an interface on a tap.
    #[must_use]
    pub fn address(&self, name: &Name) -> Option<MacAddress> {
        match lock(&self.open).get(name) {
            Some(Backend::Taps(_, address)) => Some(*address),
            _ => None,
        }
    }

    /// Closes the side of a device that has left for good.
    pub fn close(&self, name: &Name) {
        lock(&self.open).remove(name);
    }
}

impl Backend {
    /// The side of an interface of which another process opened the tap's queues, `taps`.
    pub fn of_taps(net: &NetConfig, taps: Vec<OwnedFd>) -> Result<Self, BackendError> {
        let taps = Tap::from_descriptors(taps)?.into_iter().map(Arc::new).collect();
        Ok(Self::Taps(taps, address(net)?))
    }

    /// Opens what `device` needs. Waits for a server that serves it, for a few seconds at most.
    pub fn open(device: &Virtio) -> Result<Self, BackendError> {
        match device {
            Virtio::Disk(disk) => match &disk.source {
                DiskSource::Image(path) => open_disk(disk, path).map(|image| Self::Image(Arc::new(image))),
                DiskSource::Server(socket) => {
                    let (queues, queue_size) = (disk.io.queues, disk.io.queue_size);
                    Self::served(socket, RemoteSpec { served: Served::Disk, queues, queue_size })
                }
            },
            Virtio::Vsock(vsock) => Ok(Self::Listening(Arc::new(Listening::at(&vsock.socket)?))),
            Virtio::Rng(rng) => open_random(&rng.source).map(Self::Random),
            Virtio::Net(net) => match &net.source {
                NetSource::Descriptors => Err(BackendError::NoTap),
                NetSource::Tap(name) => {
                    let taps = Tap::open(name, usize::from(net.queues / 2))?;
                    Ok(Self::Taps(taps.into_iter().map(Arc::new).collect(), address(net)?))
                }
                NetSource::Server(socket) => {
                    let served = Served::Net { mac: address(net)?.0, mtu: net.mtu, offloads: offloads(net) };
                    Self::served(socket, RemoteSpec { served, queues: net.queues, queue_size: net.queue_size })
                }
            },
            Virtio::Folder(folder) => {
                let served = Served::Folder { tag: folder.tag.clone() };
                Self::served(&folder.socket, RemoteSpec { served, queues: folder.queues, queue_size: folder.queue_size })
            }
            Virtio::Balloon(balloon) => Ok(Self::Balloon(BalloonControl::new(balloon.size.bytes()))),
            Virtio::Memory { node, prefault } => Ok(Self::Memory(MemControl::new(*node, *prefault))),
            // Consoles are opened together: several may share the terminal.
            Virtio::Console(_) => Ok(Self::None),
        }
    }

    /// Whether no device of `open` but `name` is on the interface that this is of. Queues of one device share theirs.
    fn has_its_own_tap(&self, open: &BTreeMap<Name, Self>, name: &Name) -> Result<(), BackendError> {
        let Self::Taps(taps, _) = self else { return Ok(()) };
        let own: Vec<_> = taps.iter().filter_map(|tap| tap.interface()).collect();
        alone(open, name, |there| own.contains(there))
    }

    fn served(socket: &Path, spec: RemoteSpec) -> Result<Self, BackendError> {
        Ok(Self::Server(Arc::new(vhost_user::Server::open(socket, &spec)?), spec))
    }

    /// The same side for another holder.
    fn share(&self) -> Result<Self, BackendError> {
        match self {
            Self::Image(image) => Ok(Self::Image(Arc::clone(image))),
            Self::Listening(socket) => Ok(Self::Listening(Arc::clone(socket))),
            Self::Random(file) => file.try_clone().map(Self::Random).map_err(BackendError::Descriptor),
            Self::Taps(taps, mac) => Ok(Self::Taps(taps.clone(), *mac)),
            Self::Server(server, spec) => Ok(Self::Server(Arc::clone(server), spec.clone())),
            Self::Balloon(control) => Ok(Self::Balloon(Arc::clone(control))),
            Self::Memory(control) => Ok(Self::Memory(Arc::clone(control))),
            Self::None => Ok(Self::None),
        }
    }
}

/// Whether no device of `open` but `name` is on a tap that is the `same`.
fn alone(open: &BTreeMap<Name, Backend>, name: &Name, same: impl Fn(&Interface) -> bool) -> Result<(), BackendError> {
    for (first, side) in open.iter().filter(|(first, _)| *first != name) {
        let Backend::Taps(taps, _) = side else { continue };
        if let Some(tap) = taps.iter().filter_map(|tap| tap.interface()).find(&same) {
            return Err(BackendError::TapTwice { tap: tap.name, first: first.clone(), name: name.clone() });
        }
    }
    Ok(())
}

/// What an interface may leave to the other side.
pub(crate) fn offloads(net: &NetConfig) -> Offloads {
    let tcp = net.offload_tcp;
    Offloads { checksum: net.offload_checksum, tcp4: tcp, tcp6: tcp, ecn: tcp, udp: net.offload_udp }
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

/// Opens the image of a disk and keeps others from it: writers from all, readers from writers. Never waits, as opening a FIFO
/// would.
fn open_disk(disk: &DiskConfig, image: &Path) -> Result<Image, BackendError> {
    let direct = if disk.io.direct { libc::O_DIRECT } else { 0 };
    let open =
        |path: &Path| OpenOptions::new().read(true).write(!disk.readonly).custom_flags(libc::O_NONBLOCK | direct).open(path);
    let path = || image.to_owned();
    // A folder cannot be opened for writing, which says less.
    if fs::metadata(image).is_ok_and(|metadata| metadata.is_dir()) {
        return Err(BackendError::Image { path: path(), source: ImageError::Kind });
    }
    let file = open(image).map_err(|source| BackendError::Disk { path: path(), readonly: disk.readonly, source })?;
    let locked = if disk.readonly { file.try_lock_shared() } else { file.try_lock() };
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(BackendError::Busy { path: path(), readonly: disk.readonly }),
        // A file system without locks.
        Err(TryLockError::Error(error)) => log::debug!("{}: not locked: {error}", image.display()),
    }
    let format = match disk.io.format {
        ImageFormat::Raw => Format::Raw,
        ImageFormat::Qcow2 => Format::Qcow2,
        ImageFormat::FixedVhd => return Err(BackendError::Format { path: path(), format: "fixed VHD" }),
        ImageFormat::Vhdx => return Err(BackendError::Format { path: path(), format: "VHDX" }),
    };
    let opened = Opened { readonly: disk.readonly, direct: disk.io.direct };
    Image::new(file, format, opened).map_err(|source| BackendError::Image { path: path(), source })
}

/// Whether somebody may listen at `socket`. Nobody is asked: many servers end with their first client.
fn look_for_server(socket: &Path) -> Result<(), BackendError> {
    let missing = |source| BackendError::NoServer { path: socket.to_owned(), source };
    let is_socket = fs::metadata(socket).map_err(missing)?.file_type().is_socket();
    if is_socket { Ok(()) } else { Err(missing(io::Error::other("it is no socket"))) }
}

fn named(name: &Name, source: BackendError) -> BackendError {
    BackendError::Device { name: name.to_string(), source: Box::new(source) }
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
    /// Which device.
    #[error("device {name}")]
    Device {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: Box<BackendError>,
    },
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
    /// Somebody else has it.
    #[error(
        "the disk {} is in use by another process or disk{}: end or remove that first{}",
        path.display(),
        if *readonly { ", which writes" } else { "" },
        if *readonly { "" } else { "; readers can share it with readonly=on" }
    )]
    Busy {
        /// The image.
        path: PathBuf,
        /// How it was to be opened.
        readonly: bool,
    },
    /// A format that is not there.
    #[error("the disk {} is of the format {format}, which is not supported; convert it to raw or qcow2", path.display())]
    Format {
        /// The image.
        path: PathBuf,
        /// Which.
        format: &'static str,
    },
    /// Not what it should be.
    #[error("cannot use the disk {}", path.display())]
    Image {
        /// The image.
        path: PathBuf,
        /// Why.
        #[source]
        source: ImageError,
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
    /// A tap of another device.
    #[error(
        "the network interfaces {first} and {name} are both on the tap {tap}: give {name} another one, or remove {first} first"
    )]
    TapTwice {
        /// The tap's interface.
        tap: String,
        /// The device that has it.
        first: Name,
        /// The other one.
        name: Name,
    },
    /// Neither a name nor descriptors.
    #[error("a network interface needs a tap: give its name")]
    NoTap,
    /// A server.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// No server where one should be.
    #[error("no server of a device listens at {}: start it before the machine", path.display())]
    NoServer {
        /// The socket.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// No random address.
    #[error("cannot make up a hardware address: give one")]
    Address(#[source] io::Error),
    /// No descriptor.
    #[error("cannot keep a file open: the limit of open files is reached (ulimit -n)")]
    Descriptor(#[source] io::Error),
}

#[cfg(test)]
mod tests;
