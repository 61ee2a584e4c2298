//! VFIO calls that the vfio-ioctls crate lacks or hides the result of: interrupts from any vector on, reset.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
    VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_TYPE, vfio_device_info,
};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_ptr};
use vmm_sys_util::ioctl_io_nr;

use super::host::IrqKind;

ioctl_io_nr!(VFIO_DEVICE_GET_INFO, u32::from(VFIO_TYPE), VFIO_BASE + 7);
ioctl_io_nr!(VFIO_IOMMU_GET_INFO, u32::from(VFIO_TYPE), VFIO_BASE + 12);
ioctl_io_nr!(VFIO_DEVICE_SET_IRQS, u32::from(VFIO_TYPE), VFIO_BASE + 10);
ioctl_io_nr!(VFIO_DEVICE_RESET, u32::from(VFIO_TYPE), VFIO_BASE + 11);

/// The number of an interrupt kind (linux: include/uapi/linux/vfio.h).
pub const fn irq_index(kind: IrqKind) -> u32 {
    match kind {
        IrqKind::Intx => VFIO_PCI_INTX_IRQ_INDEX,
        IrqKind::Msi => VFIO_PCI_MSI_IRQ_INDEX,
        IrqKind::Msix => VFIO_PCI_MSIX_IRQ_INDEX,
    }
}

/// Has vectors from `start` on signal `events`; `None` detaches one.
pub fn set_triggers(device: BorrowedFd<'_>, kind: IrqKind, start: u16, events: &[Option<BorrowedFd<'_>>]) -> io::Result<()> {
    set_irqs(device, VFIO_IRQ_SET_ACTION_TRIGGER | VFIO_IRQ_SET_DATA_EVENTFD, kind, start, events)
}

/// Has `event` unmask interrupt 0.
pub fn set_unmask(device: BorrowedFd<'_>, kind: IrqKind, event: BorrowedFd<'_>) -> io::Result<()> {
    set_irqs(device, VFIO_IRQ_SET_ACTION_UNMASK | VFIO_IRQ_SET_DATA_EVENTFD, kind, 0, &[Some(event)])
}

/// Switches all interrupts of a kind off.
pub fn disable(device: BorrowedFd<'_>, kind: IrqKind) -> io::Result<()> {
    set_irqs(device, VFIO_IRQ_SET_ACTION_TRIGGER | VFIO_IRQ_SET_DATA_NONE, kind, 0, &[])
}

/// The device's flags; 0 when the kernel does not tell them.
pub fn flags(device: BorrowedFd<'_>) -> u32 {
    let argsz = u32::try_from(size_of::<vfio_device_info>()).unwrap_or(0);
    let mut info = vfio_device_info { argsz, ..Default::default() };
    // SAFETY: `argsz` is the size of `info`, which outlives the call; the kernel writes no further.
    match unsafe { ioctl_with_mut_ref(&device.as_raw_fd(), VFIO_DEVICE_GET_INFO(), &mut info) } {
        0 => info.flags,
        _ => 0,
    }
}

/// What the kernel tells of a container's IOMMU: struct vfio_iommu_type1_info and its capabilities, in 8-byte words. Zeros
/// where it tells nothing.
pub fn iommu_info(container: &impl AsRawFd) -> [u64; 512] {
    let mut words = [0; 512];
    // The low half of the first word is `argsz`.
    words[0] = 8 * 512;
    // SAFETY: `argsz` is the size of `words`, which outlive the call; the kernel writes no further.
    match unsafe { ioctl_with_mut_ref(container, VFIO_IOMMU_GET_INFO(), &mut words) } {
        0 => words,
        _ => [0; 512],
    }
}

/// Resets the function.
pub fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: VFIO_DEVICE_RESET takes no argument; the descriptor is open for the life of `device`.
    match unsafe { ioctl(&device.as_raw_fd(), VFIO_DEVICE_RESET()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_irqs(device: BorrowedFd<'_>, flags: u32, kind: IrqKind, start: u16, events: &[Option<BorrowedFd<'_>>]) -> io::Result<()> {
    let count = u32::try_from(events.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // struct vfio_irq_set: argsz, flags, index, start, count, then one 32-bit descriptor for each interrupt.
    let mut words = vec![20 + 4 * count, flags, irq_index(kind), start.into(), count];
    words.extend(events.iter().map(|event| event.map_or(u32::MAX, |event| event.as_raw_fd().cast_unsigned())));
    // SAFETY: `argsz` in the first word is the length of `words`, which outlive the call; the kernel reads no further and
    // takes its own references to the descriptors.
    match unsafe { ioctl_with_ptr(&device.as_raw_fd(), VFIO_DEVICE_SET_IRQS(), words.as_ptr()) } {
        0 => Ok(()),
        // Fewer host vectors are left than were asked for; none is enabled.
        left if left > 0 => Err(io::Error::new(io::ErrorKind::QuotaExceeded, format!("the host has only {left} vectors left"))),
        _ => Err(io::Error::last_os_error()),
    }
}
