//! A function that the kernel's vfio-pci holds, by the legacy group interface. One of the two users of the vfio-ioctls crate;
//! register accesses and interrupts go past it, since it keeps their errors to itself.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::io::{pread, pwrite};
use thiserror::Error;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_NORESIZE, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_REGION_INFO_FLAG_MMAP,
};
use vfio_ioctls::{VfioDevice, VfioError as CrateError, VfioRegionInfoCap};

use super::host::{Area, CONFIG, HostDevice, IrqKind, Irqs, RegionIndex, Resetter};
use super::ioctl;
use super::iommu::{Domain, Member};

const _: () = assert!(CONFIG == VFIO_PCI_CONFIG_REGION_INDEX);

/// Log target of the vfio-ioctls crate, which warns of interrupts that a device rightly lacks. What matters comes back as an
/// error.
pub const CHATTY_LOG_TARGET: &str = "vfio_ioctls";

/// A function opened through its IOMMU group.
pub struct Hardware {
    device: VfioDevice,
    can_reset: bool,
    _member: Member,
}

impl Hardware {
    /// Opens the function whose sysfs directory is `path` (it ends in the address) for `name`, in `domain`. Functions of one
    /// group share it. The kernel resets the function if it can.
    pub fn open(name: &str, path: &Path, domain: &Domain) -> Result<Self, OpenError> {
        let (device, member) = domain.attach(name, path).map_err(|error| OpenError::new(name, error))?;
        let can_reset = ioctl::flags(borrow(&device)) & VFIO_DEVICE_FLAGS_RESET != 0;
        Ok(Self { device, can_reset, _member: member })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        borrow(&self.device)
    }

    /// Where `len` bytes at `offset` of a region lie in the device's file.
    fn position(&self, index: RegionIndex, offset: u64, len: usize) -> io::Result<u64> {
        let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
        if end.is_none_or(|end| end > self.size(index)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "past the end of the region"));
        }
        Ok(self.device.get_region_offset(index) + offset)
    }
}

fn borrow(device: &VfioDevice) -> BorrowedFd<'_> {
    // SAFETY: the device keeps its descriptor open for as long as it lives, and the result borrows it.
    unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) }
}

impl HostDevice for Hardware {
    fn size(&self, index: RegionIndex) -> u64 {
        if index > CONFIG { 0 } else { self.device.get_region_size(index) }
    }

    fn mappable(&self, index: RegionIndex) -> Vec<Area> {
        if index > CONFIG || self.device.get_region_flags(index) & VFIO_REGION_INFO_FLAG_MMAP == 0 {
            return Vec::new();
        }
        let sparse = self.device.get_region_caps(index).into_iter().find_map(|capability| match capability {
            VfioRegionInfoCap::SparseMmap(sparse) => Some(sparse.areas),
            _ => None,
        });
        match sparse {
            Some(areas) => areas.iter().map(|area| Area { offset: area.offset, len: area.size }).collect(),
            None => vec![Area { offset: 0, len: self.size(index) }],
        }
    }

    fn read(&mut self, index: RegionIndex, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let at = self.position(index, offset, data.len())?;
        match pread(self.fd(), &mut *data, at)? {
            n if n == data.len() => Ok(()),
            n => Err(short("read", n, data.len())),
        }
    }

    fn write(&mut self, index: RegionIndex, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = self.position(index, offset, data.len())?;
        match pwrite(self.fd(), data, at)? {
            n if n == data.len() => Ok(()),
            n => Err(short("written", n, data.len())),
        }
    }

    fn file(&self, index: RegionIndex) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.fd(), self.device.get_region_offset(index)))
    }

    fn irqs(&self, kind: IrqKind) -> Irqs {
        let info = self.device.get_irq_info(ioctl::irq_index(kind)).filter(|info| info.flags & VFIO_IRQ_INFO_EVENTFD != 0);
        info.map_or_else(Irqs::default, |info| Irqs {
            count: u16::try_from(info.count).unwrap_or(u16::MAX),
            growable: info.flags & VFIO_IRQ_INFO_NORESIZE == 0,
        })
    }

    fn set_triggers(&mut self, kind: IrqKind, start: u16, events: &[Option<BorrowedFd<'_>>]) -> io::Result<()> {
        ioctl::set_triggers(self.fd(), kind, start, events)
    }

    fn set_resample(&mut self, event: BorrowedFd<'_>) -> io::Result<()> {
        ioctl::set_unmask(self.fd(), IrqKind::Intx, event)
    }

    fn disable(&mut self, kind: IrqKind) -> io::Result<()> {
        ioctl::disable(self.fd(), kind)
    }

    fn can_reset(&self) -> bool {
        self.can_reset
    }

    fn resetter(&self) -> io::Result<Resetter> {
        let file = self.fd().try_clone_to_owned()?;
        Ok(Box::new(move || ioctl::reset(file.as_fd())))
    }
}

fn short(done: &str, n: usize, of: usize) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("{n} of {of} bytes {done}"))
}

/// A function that the kernel does not hand out.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The group's file.
    #[error("device {name}: cannot open {path}: {advice}", path = path.display())]
    Group {
        /// The device.
        name: String,
        /// The file.
        path: PathBuf,
        /// What to do.
        advice: &'static str,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Another member of the group is in use.
    #[error("device {name}: its IOMMU group is not viable; bind all its members to vfio-pci")]
    NotViable {
        /// The device.
        name: String,
    },
    /// The IOMMU.
    #[error(
        "device {name}: the kernel refuses an IOMMU domain for its group; without interrupt remapping the module \
         vfio_iommu_type1 needs allow_unsafe_interrupts=1, see the kernel log"
    )]
    Iommu {
        /// The device.
        name: String,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Any other step.
    #[error("device {name}: cannot be opened by VFIO; see the kernel log")]
    Kernel {
        /// The device.
        name: String,
        /// The step and the kernel's reason.
        #[source]
        source: CrateError,
    },
}

impl OpenError {
    fn new(name: &str, error: CrateError) -> Self {
        let name = name.to_owned();
        match error {
            CrateError::OpenGroup(source, group) => {
                let advice = match source.kind() {
                    io::ErrorKind::PermissionDenied => "give this user read and write access to it (chown, or a udev rule)",
                    io::ErrorKind::NotFound => "load the module vfio-pci and bind the group's devices to it",
                    io::ErrorKind::ResourceBusy => "another process uses the group; end it",
                    _ => "see the kernel log",
                };
                Self::Group { name, path: Path::new("/dev/vfio").join(group), advice, source }
            }
            CrateError::GroupViable => Self::NotViable { name },
            CrateError::ContainerSetIOMMU(source) => Self::Iommu { name, source: source.into() },
            source => Self::Kernel { name, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn a_group_that_cannot_be_opened_is_named_with_the_reason_and_what_to_do() {
        for (errno, advice) in
            [(libc::EACCES, "read and write access"), (libc::ENOENT, "vfio-pci"), (libc::EBUSY, "another process")]
        {
            let source = io::Error::from_raw_os_error(errno);
            let error = OpenError::new("gpu0", CrateError::OpenGroup(source, "26".into()));
            let text = error.to_string();
            assert!(text.contains("gpu0") && text.contains("/dev/vfio/26") && text.contains(advice), "{text}");
            assert!(error.source().unwrap().to_string().contains(&format!("os error {errno}")));
        }
    }
}
