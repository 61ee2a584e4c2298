//! A function that the kernel's vfio-pci holds, by the legacy group interface.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::io::{pread, pwrite};
use thiserror::Error;
use vfio_bindings::bindings::vfio::{VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_CONFIG_REGION_INDEX};

use super::host::{Area, CONFIG, HostDevice, HostReset, IrqKind, Irqs, RegionIndex};
use super::ioctl;
use super::iommu::{Domain, GroupError, Member};
use super::region_info::Region;
use super::signals::Signal;

const _: () = assert!(CONFIG == VFIO_PCI_CONFIG_REGION_INDEX);

/// A function opened through its IOMMU group.
pub struct Hardware {
    /// Closed before the function leaves its group.
    file: OwnedFd,
    /// From region 0 to the configuration space.
    regions: Vec<Region>,
    can_reset: bool,
    member: Member,
}

impl Hardware {
    /// Opens the function whose sysfs directory is `path` (it ends in the address) for `name`, in `domain`. Functions of one
    /// group share it. The kernel resets the function if it can.
    pub fn open(name: &str, path: &Path, domain: &Domain) -> Result<Self, OpenError> {
        let (file, member) = domain.attach(name, path).map_err(|error| OpenError::new(name, error))?;
        let fd = file.as_fd();
        let can_reset = ioctl::flags(fd) & VFIO_DEVICE_FLAGS_RESET != 0;
        // A region that the kernel does not tell of is one that the device does not have.
        let region = |index| ioctl::region_info(fd, index).map(|info| Region::parse(&info)).unwrap_or_default();
        let regions = (0..=CONFIG).map(region).collect();
        Ok(Self { file, regions, can_reset, member })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn region(&self, index: RegionIndex) -> Option<&Region> {
        usize::try_from(index).ok().and_then(|index| self.regions.get(index))
    }

    /// Where `len` bytes at `offset` of a region lie in the device's file.
    fn position(&self, index: RegionIndex, offset: u64, len: usize) -> io::Result<u64> {
        let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
        let region = self.region(index).filter(|region| end.is_some_and(|end| end <= region.size));
        let at = region.and_then(|region| region.at.checked_add(offset));
        at.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "past the end of the region"))
    }
}

impl HostDevice for Hardware {
    fn size(&self, index: RegionIndex) -> u64 {
        self.region(index).map_or(0, |region| region.size)
    }

    fn mappable(&self, index: RegionIndex) -> Vec<Area> {
        self.region(index).map_or_else(Vec::new, |region| region.mappable.clone())
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
        Some((self.fd(), self.region(index)?.at))
    }

    fn irqs(&self, kind: IrqKind) -> Irqs {
        ioctl::irqs(self.fd(), kind)
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

    fn hear(&mut self, signal: Signal, event: BorrowedFd<'_>) -> io::Result<bool> {
        ioctl::hear(self.fd(), signal, event)
    }

    fn can_reset(&self) -> bool {
        self.can_reset
    }

    fn begin_reset(&self) -> io::Result<Box<dyn HostReset>> {
        Ok(self.member.begin_reset(self.fd().try_clone_to_owned()?, self.can_reset))
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
    /// It has no group.
    #[error("device {name}: it is in no IOMMU group; switch the IOMMU on in the host's firmware and kernel")]
    NoGroup {
        /// The device.
        name: String,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Any other step.
    #[error("device {name}: VFIO cannot {step}; see the kernel log")]
    Kernel {
        /// The device.
        name: String,
        /// What it cannot do.
        step: &'static str,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

impl OpenError {
    fn new(name: &str, error: GroupError) -> Self {
        let name = name.to_owned();
        match error {
            GroupError::File { path, source } => {
                let advice = match source.kind() {
                    io::ErrorKind::PermissionDenied => "give this user read and write access to it (chown, or a udev rule)",
                    io::ErrorKind::NotFound => "load the module vfio-pci and bind the group's devices to it",
                    io::ErrorKind::ResourceBusy => "another process uses the group; end it",
                    _ => "see the kernel log",
                };
                Self::Group { name, path, advice, source }
            }
            GroupError::Absent { source } => Self::NoGroup { name, source },
            GroupError::NotViable => Self::NotViable { name },
            GroupError::Iommu { source } => Self::Iommu { name, source },
            GroupError::Step { step, source } => Self::Kernel { name, step, source },
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
            let error = OpenError::new("gpu0", GroupError::File { path: "/dev/vfio/26".into(), source });
            let text = error.to_string();
            assert!(text.contains("gpu0") && text.contains("/dev/vfio/26") && text.contains(advice), "{text}");
            assert!(error.source().unwrap().to_string().contains(&format!("os error {errno}")));
        }
    }
}
