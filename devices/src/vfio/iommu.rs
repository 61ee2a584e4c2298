//! Which memory passed-through functions can reach: one IOMMU domain for the whole machine, with guest addresses. RAM is
//! mapped once, not once for each device; BARs of devices are mapped so that other devices can reach them.
//!
//! The only user of the vfio-ioctls crate. Its containers are used, and groups and devices are not: a device of it holds no
//! reference to its group, so each of two functions of one group would take the group away from the other.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pci::address::HostBdf;
use pci::bar::BarIndex;
use pci::function::BarPiece;
use pci::sync::lock;
use thiserror::Error;
use vfio_ioctls::{VfioContainer, VfioError as CrateError};

use super::groups::{Groups, Kernel, Lease};
use super::host::HostReset;
use super::neighbours::{Neighbour, Neighbours, NotReset, UnderReset};
use super::{ioctl, iova_ranges};

/// Who wants to know which groups a machine uses: KVM, so that the guest's caches suit what devices write.
pub trait GroupWatcher: Send + Sync {
    /// The group whose file is `group` comes.
    fn joins(&self, group: BorrowedFd<'_>) -> io::Result<()>;
    /// It goes.
    fn leaves(&self, group: BorrowedFd<'_>) -> io::Result<()>;
}

/// The domain: a VFIO container of type 1, version 2.
pub struct Domain {
    groups: Arc<Groups<Container>>,
    /// Names of the devices in it.
    devices: Arc<Mutex<Vec<String>>>,
    neighbours: Arc<Neighbours>,
    maps: AtomicU64,
}

impl Domain {
    /// An empty domain of the machine that `watcher` knows. Memory can be mapped once a device has been opened.
    pub fn new(watcher: Box<dyn GroupWatcher>) -> Result<Self, DomainError> {
        let container = VfioContainer::new(None).map_err(|error| match error {
            CrateError::OpenContainer(source) => DomainError::Open { source },
            source => DomainError::Unsupported { source },
        })?;
        let groups = Arc::new(Groups::new(Container { container, watcher }));
        Ok(Self { groups, devices: Arc::default(), neighbours: Arc::default(), maps: AtomicU64::new(0) })
    }

    /// Opens the function whose sysfs directory is `path`; its group joins the domain if it has not yet. It belongs to the
    /// domain as long as the second value lives, which must go after the first.
    pub(super) fn attach(&self, name: &str, path: &Path) -> Result<(OwnedFd, Member), GroupError> {
        let fail = |source| GroupError::Step { step: "open it", source };
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let link = fs::read_link(path.join("iommu_group")).map_err(|source| GroupError::Absent { source })?;
        let group = link.file_name().and_then(|id| id.to_str()?.parse().ok());
        let group = group.ok_or_else(|| GroupError::Absent { source: invalid() })?;
        let address = path.file_name().and_then(|address| address.to_str()).ok_or_else(|| fail(invalid()))?;
        let at = address.parse().map_err(|_| fail(invalid()))?;
        let address = CString::new(address).map_err(|_| fail(invalid()))?;
        let lease = self.groups.take(group)?;
        let device = lease.with(|group| ioctl::device(group.as_fd(), &address));
        let device = device.unwrap_or_else(|| Err(invalid())).map_err(fail)?;
        lock(&self.devices).push(name.to_owned());
        let neighbour = self.neighbours.open(at, group);
        Ok((device, Member { name: name.to_owned(), devices: Arc::clone(&self.devices), neighbour, lease }))
    }

    /// The guest can use all functions that are open from here on, but for those that `wait` until they are made. Until then they
    /// lose nothing by the reset of a bus.
    pub fn hand_over(&self, wait: &BTreeSet<HostBdf>) {
        self.neighbours.hand_over(wait);
    }

    fn container(&self) -> &VfioContainer {
        &self.groups.kernel().container
    }

    /// Lets devices reach `size` bytes at `host_address` of this process by guest address `iova`. `what` is a name for
    /// messages. The pages are pinned.
    ///
    /// # Safety
    ///
    /// Devices read and write the memory at any time until it is unmapped: it must be mapped in this process that long, and
    /// nothing but raw or volatile accesses may touch it, as with guest memory.
    pub unsafe fn map(&self, iova: u64, size: u64, host_address: u64, what: &str) -> Result<(), DomainError> {
        let fail = |source| DomainError::Map { what: what.to_owned(), iova, size, source };
        let too_large = || fail(io::Error::from(io::ErrorKind::InvalidInput));
        let len = usize::try_from(size).map_err(|_| too_large())?;
        let address = usize::try_from(host_address).map_err(|_| too_large())?;
        let pointer = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the caller promises it.
        if let Err(error) = unsafe { self.container().vfio_dma_map(iova, len, pointer) } {
            // Asked only now, since the kernel's errno tells nothing of it.
            let usable = iova_ranges::of(self.container());
            if !usable.is_empty() && !usable.iter().any(|range| range.holds(iova, size)) {
                return Err(DomainError::Outside { what: what.to_owned(), iova, size, usable: iova_ranges::Shown(usable) });
            }
            return Err(fail(reason(error)));
        }
        self.maps.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Takes a mapping back. `iova` and `size` are those of one [`Domain::map`].
    pub fn unmap(&self, iova: u64, size: u64) -> Result<(), DomainError> {
        let fail = |source| DomainError::Unmap { iova, size, source };
        let len = usize::try_from(size).map_err(|_| fail(io::Error::from(io::ErrorKind::InvalidInput)))?;
        self.container().vfio_dma_unmap(iova, len).map_err(|error| fail(reason(error)))
    }

    /// Lets devices reach BAR `bar` of device `owner`, which the guest has at `at`: its direct pieces. All of them or none.
    /// A failure costs peer-to-peer transfers and nothing else: the error names who loses access to what, for a warning.
    ///
    /// # Safety
    ///
    /// The pieces' pages must stay mapped in this process until [`Domain::unmap_bar`].
    pub unsafe fn map_bar(&self, owner: &str, bar: BarIndex, at: u64, pieces: &[BarPiece]) -> Result<(), PeerError> {
        let mut done: Vec<(u64, u64)> = Vec::new();
        for (offset, len, host_address) in direct(pieces) {
            let what = format!("BAR{bar} of {owner}");
            let iova = at.saturating_add(offset);
            // SAFETY: the caller promises it; BAR pages are never referenced, only mapped.
            if let Err(source) = unsafe { self.map(iova, len, host_address, &what) } {
                for (iova, len) in done {
                    if let Err(error) = self.unmap(iova, len) {
                        log::error!("{error}");
                    }
                }
                let peers = lock(&self.devices).iter().filter(|name| *name != owner).cloned().collect();
                return Err(PeerError { owner: owner.to_owned(), bar, peers, source });
            }
            done.push((iova, len));
        }
        Ok(())
    }

    /// Takes back what [`Domain::map_bar`] mapped with the same place and pieces.
    pub fn unmap_bar(&self, at: u64, pieces: &[BarPiece]) -> Result<(), DomainError> {
        // Every piece is tried; the first failure is told.
        let mut result = Ok(());
        for (offset, len, _) in direct(pieces) {
            result = result.and(self.unmap(at.saturating_add(offset), len));
        }
        result
    }

    /// Whether no group is in it. The kernel drops all maps with the last one (`linux: drivers/vfio/container.c`).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// How many times memory has been mapped since the start.
    #[must_use]
    pub fn maps(&self) -> u64 {
        self.maps.load(Ordering::Relaxed)
    }
}

/// A device's place in a domain.
pub(super) struct Member {
    name: String,
    devices: Arc<Mutex<Vec<String>>>,
    neighbour: Neighbour,
    lease: Lease<Container>,
}

impl Member {
    /// Begins a reset of the device, whose file is `device`. With `alone` the host can reset it without its bus.
    pub(super) fn begin_reset(&self, device: OwnedFd, alone: bool) -> Box<dyn HostReset> {
        let groups = Arc::clone(self.lease.groups());
        Box::new(Reset { device, alone, groups, under_reset: self.neighbour.under_reset() })
    }
}

/// A device under reset.
struct Reset {
    device: OwnedFd,
    alone: bool,
    groups: Arc<Groups<Container>>,
    under_reset: UnderReset,
}

impl HostReset for Reset {
    fn run(&mut self) -> Result<(), NotReset> {
        let device = self.device.as_fd();
        if self.alone {
            return self.under_reset.reset(&[], |_| ioctl::reset(device));
        }
        let file = |id: &u32| {
            let file = self.groups.with(*id, |group| group.as_fd().try_clone_to_owned());
            file.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
        };
        self.under_reset.reset(&ioctl::affected(device)?, |groups| {
            let groups = groups.iter().map(file).collect::<io::Result<Vec<_>>>()?;
            ioctl::reset_bus(device, &groups)
        })
    }
}

/// The container, for groups that join it.
pub(super) struct Container {
    container: VfioContainer,
    watcher: Box<dyn GroupWatcher>,
}

impl Kernel for Container {
    type Group = File;
    type Error = GroupError;

    fn open(&self, id: u32) -> Result<File, GroupError> {
        let path = Path::new("/dev/vfio").join(id.to_string());
        let file = File::options().read(true).write(true).open(&path);
        let file = file.map_err(|source| GroupError::File { path, source })?;
        match ioctl::is_viable(file.as_fd()) {
            Ok(true) => Ok(file),
            Ok(false) => Err(GroupError::NotViable),
            Err(source) => Err(GroupError::Step { step: "tell the state of its IOMMU group", source }),
        }
    }

    fn join(&self, group: &File, first: bool) -> Result<(), GroupError> {
        // SAFETY: the container keeps its descriptor open for as long as it lives, and outlives the borrow.
        let container = unsafe { BorrowedFd::borrow_raw(self.container.as_raw_fd()) };
        let joined = ioctl::set_container(group.as_fd(), container);
        joined.map_err(|source| GroupError::Step { step: "put its IOMMU group into the machine's container", source })?;
        if first && let Err(source) = ioctl::set_iommu(container) {
            // Closed with this error, it leaves as well.
            let _ = self.leave(group);
            return Err(GroupError::Iommu { source });
        }
        Ok(())
    }

    fn leave(&self, group: &File) -> io::Result<()> {
        ioctl::unset_container(group.as_fd())
    }

    fn announce(&self, group: &File) -> Result<(), GroupError> {
        let told = self.watcher.joins(group.as_fd());
        told.map_err(|source| GroupError::Step { step: "tell KVM of its IOMMU group", source })
    }

    fn withdraw(&self, group: &File) -> io::Result<()> {
        self.watcher.leaves(group.as_fd())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut devices = lock(&self.devices);
        if let Some(index) = devices.iter().position(|name| *name == self.name) {
            devices.swap_remove(index);
        }
    }
}

fn direct(pieces: &[BarPiece]) -> impl Iterator<Item = (u64, u64, u64)> {
    pieces.iter().filter_map(|piece| match *piece {
        BarPiece::Direct { offset, len, pages } => Some((offset, len, pages.host_address)),
        BarPiece::Trapped { .. } => None,
    })
}

/// The kernel's reason out of the crate's error.
fn reason(error: CrateError) -> io::Error {
    match error {
        CrateError::IommuDmaMap(errno) | CrateError::IommuDmaUnmap(errno) => errno.into(),
        other => io::Error::other(other),
    }
}

/// Memory that devices cannot reach, or no domain at all.
#[derive(Debug, Error)]
pub enum DomainError {
    /// The container's file.
    #[error("cannot open /dev/vfio/vfio: load the modules vfio and vfio-pci, and give this user access to the file")]
    Open {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// No type 1 IOMMU, version 2.
    #[error("the kernel's VFIO has no type 1 IOMMU (version 2): load the module vfio_iommu_type1")]
    Unsupported {
        /// What is missing.
        #[source]
        source: CrateError,
    },
    /// A map was refused.
    #[error(
        "cannot map {what} for DMA: {size:#x} bytes at guest address {iova:#x}; check the limit on locked memory (ulimit -l) and \
         the IOMMU's address width in the kernel log"
    )]
    Map {
        /// Which memory.
        what: String,
        /// Guest address.
        iova: u64,
        /// Bytes.
        size: u64,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// The IOMMU has no such address.
    #[error(
        "cannot map {what} for DMA: the host's IOMMU takes the addresses {usable} only, and {size:#x} bytes at guest address \
         {iova:#x} are not among them; give the guest less memory or fewer and smaller BARs"
    )]
    Outside {
        /// Which memory.
        what: String,
        /// Guest address.
        iova: u64,
        /// Bytes.
        size: u64,
        /// What it takes.
        usable: iova_ranges::Shown,
    },
    /// An unmap was refused.
    #[error("cannot take back the DMA map of {size:#x} bytes at guest address {iova:#x}")]
    Unmap {
        /// Guest address.
        iova: u64,
        /// Bytes.
        size: u64,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

/// A group that cannot be used. Who opened a device says which one.
#[derive(Debug, Error)]
pub(super) enum GroupError {
    /// The function has none.
    #[error("no IOMMU group")]
    Absent {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Its file.
    #[error("cannot open {path}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Another member of it is in use.
    #[error("the group is not viable")]
    NotViable,
    /// The kernel makes no domain for it.
    #[error("no IOMMU domain")]
    Iommu {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Any other step.
    #[error("cannot {step}")]
    Step {
        /// Which.
        step: &'static str,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

/// A BAR that other devices cannot reach.
#[derive(Debug, Error)]
#[error("no peer-to-peer transfers to BAR{bar} of {owner} from {peers}", peers = peers.join(", "))]
pub struct PeerError {
    /// Whose BAR.
    pub owner: String,
    /// Which.
    pub bar: BarIndex,
    /// Who loses access.
    pub peers: Vec<String>,
    /// The map that failed.
    #[source]
    pub source: DomainError,
}
