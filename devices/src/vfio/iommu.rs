//! Which memory passed-through functions can reach: one IOMMU domain for the whole machine, with guest addresses. RAM is
//! mapped once, not once for each device; BARs of devices are mapped so that other devices can reach them.
//!
//! The only file that meets the KVM VFIO device: the kernel wants to know which groups a virtual machine uses.

use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pci::bar::BarIndex;
use pci::function::BarPiece;
use thiserror::Error;
use vfio_ioctls::{VfioContainer, VfioDevice, VfioDeviceFd, VfioError as CrateError};

use super::iova_ranges;

/// The domain: a VFIO container of type 1, version 2.
pub struct Domain {
    container: Arc<VfioContainer>,
    /// Names of the devices in it.
    devices: Arc<Mutex<Vec<String>>>,
    maps: AtomicU64,
}

impl Domain {
    /// An empty domain. `kvm_device` is a device of type KVM_DEV_TYPE_VFIO of the machine. Memory can be mapped once a
    /// device has been opened.
    pub fn new(kvm_device: Option<OwnedFd>) -> Result<Self, DomainError> {
        let handle = kvm_device.map(|device| {
            // SAFETY: the descriptor is owned and given away here; whoever passes another kind of file gets errors from the
            // kernel, nothing worse.
            Arc::new(VfioDeviceFd::new_from_kvm(unsafe { FromRawFd::from_raw_fd(device.into_raw_fd()) }))
        });
        let container = VfioContainer::new(handle).map_err(|error| match error {
            CrateError::OpenContainer(source) => DomainError::Open { source },
            source => DomainError::Unsupported { source },
        })?;
        Ok(Self { container: Arc::new(container), devices: Arc::default(), maps: AtomicU64::new(0) })
    }

    /// Opens the function whose sysfs directory is `path`; its group joins the domain if it has not yet. It belongs to the
    /// domain as long as the second value lives.
    pub(super) fn attach(&self, name: &str, path: &Path) -> Result<(VfioDevice, Member), CrateError> {
        let device = VfioDevice::new(path, self.container.clone(), false)?;
        lock(&self.devices).push(name.to_owned());
        Ok((device, Member { name: name.to_owned(), devices: Arc::clone(&self.devices) }))
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
        if let Err(error) = unsafe { self.container.vfio_dma_map(iova, len, pointer) } {
            // Asked only now, since the kernel's errno tells nothing of it.
            let usable = iova_ranges::of(self.container.as_ref());
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
        self.container.vfio_dma_unmap(iova, len).map_err(|error| fail(reason(error)))
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

    /// Whether no function is in it. The kernel drops all maps with the last one (`linux: drivers/vfio/container.c`).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        lock(&self.devices).is_empty()
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
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut devices = lock(&self.devices);
        if let Some(index) = devices.iter().position(|name| *name == self.name) {
            devices.swap_remove(index);
        }
    }
}

fn lock(devices: &Mutex<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    devices.lock().unwrap_or_else(PoisonError::into_inner)
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
