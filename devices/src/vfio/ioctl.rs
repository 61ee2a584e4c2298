//! VFIO's calls for groups and devices (linux: include/uapi/linux/vfio.h). The vfio-ioctls crate has those for containers; its
//! devices share no group, and keep the kernel's errors to themselves.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use pci::address::{Bdf, Devfn, HostBdf};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_GROUP_FLAGS_VIABLE, VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_NORESIZE, VFIO_IRQ_SET_ACTION_TRIGGER,
    VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_ERR_IRQ_INDEX,
    VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX, VFIO_TYPE,
    VFIO_TYPE1v2_IOMMU, vfio_device_info, vfio_group_status, vfio_irq_info,
};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref, ioctl_with_val};
use vmm_sys_util::ioctl_io_nr;

use super::host::{IrqKind, Irqs};
use super::info::Info;
use super::neighbours::{Affected, NotReset};
use super::signals::Signal;

ioctl_io_nr!(VFIO_SET_IOMMU, u32::from(VFIO_TYPE), VFIO_BASE + 2);
ioctl_io_nr!(VFIO_GROUP_GET_STATUS, u32::from(VFIO_TYPE), VFIO_BASE + 3);
ioctl_io_nr!(VFIO_GROUP_SET_CONTAINER, u32::from(VFIO_TYPE), VFIO_BASE + 4);
ioctl_io_nr!(VFIO_GROUP_UNSET_CONTAINER, u32::from(VFIO_TYPE), VFIO_BASE + 5);
ioctl_io_nr!(VFIO_GROUP_GET_DEVICE_FD, u32::from(VFIO_TYPE), VFIO_BASE + 6);
ioctl_io_nr!(VFIO_DEVICE_GET_INFO, u32::from(VFIO_TYPE), VFIO_BASE + 7);
ioctl_io_nr!(VFIO_DEVICE_GET_REGION_INFO, u32::from(VFIO_TYPE), VFIO_BASE + 8);
ioctl_io_nr!(VFIO_DEVICE_GET_IRQ_INFO, u32::from(VFIO_TYPE), VFIO_BASE + 9);
ioctl_io_nr!(VFIO_DEVICE_SET_IRQS, u32::from(VFIO_TYPE), VFIO_BASE + 10);
ioctl_io_nr!(VFIO_DEVICE_RESET, u32::from(VFIO_TYPE), VFIO_BASE + 11);
ioctl_io_nr!(VFIO_DEVICE_GET_PCI_HOT_RESET_INFO, u32::from(VFIO_TYPE), VFIO_BASE + 12);
ioctl_io_nr!(VFIO_DEVICE_PCI_HOT_RESET, u32::from(VFIO_TYPE), VFIO_BASE + 13);
// Of containers, by the same number as one of devices.
ioctl_io_nr!(VFIO_IOMMU_GET_INFO, u32::from(VFIO_TYPE), VFIO_BASE + 12);

/// Whether all members of a group are bound to drivers that leave them alone.
pub fn is_viable(group: BorrowedFd<'_>) -> io::Result<bool> {
    let mut status = vfio_group_status { argsz: size(size_of::<vfio_group_status>()), flags: 0 };
    // SAFETY: `argsz` is the size of `status`, which outlives the call; the kernel writes no further.
    done(unsafe { ioctl_with_mut_ref(&group, VFIO_GROUP_GET_STATUS(), &mut status) })?;
    Ok(status.flags & VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// Puts a group into a container.
pub fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the kernel reads one descriptor, of which it checks the kind.
    done(unsafe { ioctl_with_ref(&group, VFIO_GROUP_SET_CONTAINER(), &container.as_raw_fd()) })
}

/// Takes a group out of its container; it must have no device that is open.
pub fn unset_container(group: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: VFIO_GROUP_UNSET_CONTAINER takes no argument.
    done(unsafe { ioctl(&group, VFIO_GROUP_UNSET_CONTAINER()) })
}

/// Makes a container, which has a group, a domain of type 1, version 2.
pub fn set_iommu(container: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: VFIO_SET_IOMMU takes a number.
    done(unsafe { ioctl_with_val(&container, VFIO_SET_IOMMU(), VFIO_TYPE1v2_IOMMU.into()) })
}

/// Opens the device of a group that sysfs calls `address`.
pub fn device(group: BorrowedFd<'_>, address: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: `address` ends in a zero byte and outlives the call; the kernel only reads it.
    let opened = unsafe { ioctl_with_ptr(&group, VFIO_GROUP_GET_DEVICE_FD(), address.as_ptr()) };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

/// What the kernel tells of a region: struct vfio_region_info and its capabilities.
pub fn region_info(device: BorrowedFd<'_>, index: u32) -> io::Result<Info> {
    const WORDS: usize = 4;
    const LIMIT: usize = 1 << 16;
    let mut words = vec![0u64; WORDS];
    // Again when the kernel has more to say than there was room for.
    for _ in 0..2 {
        let bytes = words.len() * 8;
        words.fill(0);
        // The low halves of the first words are argsz and index.
        words.iter_mut().zip([size(bytes), index]).for_each(|(word, value)| *word = value.into());
        // SAFETY: `argsz` in the first word is the length of `words`, which outlive the call; the kernel writes no further.
        done(unsafe { ioctl_with_mut_ptr(&device, VFIO_DEVICE_GET_REGION_INFO(), words.as_mut_ptr()) })?;
        let info = Info::new(&words);
        let wanted = info.dword(0).and_then(|argsz| usize::try_from(argsz).ok()).unwrap_or(0).min(LIMIT);
        if wanted <= bytes {
            return Ok(info);
        }
        words = vec![0; wanted.div_ceil(8)];
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "a region's capabilities grow while they are read"))
}

/// What interrupts of `kind` the device has; none when the kernel cannot signal them.
pub fn irqs(device: BorrowedFd<'_>, kind: IrqKind) -> Irqs {
    irqs_at(device, irq_index(kind))
}

fn irqs_at(device: BorrowedFd<'_>, index: u32) -> Irqs {
    let argsz = size(size_of::<vfio_irq_info>());
    let mut info = vfio_irq_info { argsz, flags: 0, index, count: 0 };
    // SAFETY: `argsz` is the size of `info`, which outlives the call; the kernel writes no further.
    let told = unsafe { ioctl_with_mut_ref(&device, VFIO_DEVICE_GET_IRQ_INFO(), &mut info) };
    if told != 0 || info.flags & VFIO_IRQ_INFO_EVENTFD == 0 {
        return Irqs::default();
    }
    Irqs { count: u16::try_from(info.count).unwrap_or(u16::MAX), growable: info.flags & VFIO_IRQ_INFO_NORESIZE == 0 }
}

/// The number of an interrupt kind (linux: include/uapi/linux/vfio.h).
const fn irq_index(kind: IrqKind) -> u32 {
    match kind {
        IrqKind::Intx => VFIO_PCI_INTX_IRQ_INDEX,
        IrqKind::Msi => VFIO_PCI_MSI_IRQ_INDEX,
        IrqKind::Msix => VFIO_PCI_MSIX_IRQ_INDEX,
    }
}

/// Has `event` signalled with `signal` of the host; `false` if the kernel gives none for this device.
pub fn hear(device: BorrowedFd<'_>, signal: Signal, event: BorrowedFd<'_>) -> io::Result<bool> {
    let index = match signal {
        Signal::Error => VFIO_PCI_ERR_IRQ_INDEX,
        Signal::Request => VFIO_PCI_REQ_IRQ_INDEX,
    };
    if irqs_at(device, index).count == 0 {
        return Ok(false);
    }
    set_irqs(device, VFIO_IRQ_SET_ACTION_TRIGGER | VFIO_IRQ_SET_DATA_EVENTFD, index, 0, &[Some(event)]).map(|()| true)
}

/// Has vectors from `start` on signal `events`; `None` detaches one.
pub fn set_triggers(device: BorrowedFd<'_>, kind: IrqKind, start: u16, events: &[Option<BorrowedFd<'_>>]) -> io::Result<()> {
    set_irqs(device, VFIO_IRQ_SET_ACTION_TRIGGER | VFIO_IRQ_SET_DATA_EVENTFD, irq_index(kind), start, events)
}

/// Has `event` unmask interrupt 0.
pub fn set_unmask(device: BorrowedFd<'_>, kind: IrqKind, event: BorrowedFd<'_>) -> io::Result<()> {
    set_irqs(device, VFIO_IRQ_SET_ACTION_UNMASK | VFIO_IRQ_SET_DATA_EVENTFD, irq_index(kind), 0, &[Some(event)])
}

/// Switches all interrupts of a kind off.
pub fn disable(device: BorrowedFd<'_>, kind: IrqKind) -> io::Result<()> {
    set_irqs(device, VFIO_IRQ_SET_ACTION_TRIGGER | VFIO_IRQ_SET_DATA_NONE, irq_index(kind), 0, &[])
}

/// The device's flags; 0 when the kernel does not tell them.
pub fn flags(device: BorrowedFd<'_>) -> u32 {
    let mut info = vfio_device_info { argsz: size(size_of::<vfio_device_info>()), ..Default::default() };
    // SAFETY: `argsz` is the size of `info`, which outlives the call; the kernel writes no further.
    match unsafe { ioctl_with_mut_ref(&device.as_raw_fd(), VFIO_DEVICE_GET_INFO(), &mut info) } {
        0 => info.flags,
        _ => 0,
    }
}

/// What the kernel tells of a container's IOMMU: struct vfio_iommu_type1_info and its capabilities. Zeros where it tells
/// nothing.
pub fn iommu_info(container: &impl AsRawFd) -> Info {
    let mut words = [0; 512];
    // The low half of the first word is `argsz`.
    words[0] = 8 * 512;
    // SAFETY: `argsz` is the size of `words`, which outlive the call; the kernel writes no further.
    match unsafe { ioctl_with_mut_ref(container, VFIO_IOMMU_GET_INFO(), &mut words) } {
        0 => Info::new(&words),
        _ => Info::new(&[0; 512]),
    }
}

/// Resets the function.
pub fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: VFIO_DEVICE_RESET takes no argument; the descriptor is open for the life of `device`.
    done(unsafe { ioctl(&device.as_raw_fd(), VFIO_DEVICE_RESET()) })
}

/// What a reset of the function's bus, or of its slot, would hit, the function among them: struct vfio_pci_hot_reset_info.
pub fn affected(device: BorrowedFd<'_>) -> Result<Vec<Affected>, NotReset> {
    told_affected(|words| {
        // SAFETY: `argsz` in the first word is the length of `words`, which outlive the call; the kernel writes no further.
        done(unsafe { ioctl_with_mut_ptr(&device, VFIO_DEVICE_GET_PCI_HOT_RESET_INFO(), words.as_mut_ptr()) })
    })
}

/// What `ask` fills in: argsz, flags, count, then two words for each function.
fn told_affected(mut ask: impl FnMut(&mut [u32]) -> io::Result<()>) -> Result<Vec<Affected>, NotReset> {
    const HEAD: usize = 3;
    // As many as a bus has; below a bridge there may be more buses.
    let mut room = 256;
    loop {
        let mut words = vec![0; HEAD + 2 * room];
        let bytes = size(size_of_val(words.as_slice()));
        words.splice(..1, [bytes]);
        let asked = ask(&mut words);
        let count = words.get(2).and_then(|count| usize::try_from(*count).ok()).unwrap_or(0);
        match asked.map_err(|error| (Errno::from_io_error(&error), error)) {
            Ok(()) => {
                let (devices, _) = words.get(HEAD..).unwrap_or_default().as_chunks::<2>();
                let affected = devices.iter().take(count).map(|[group, place]| Affected { at: place_of(*place), group: *group });
                return Ok(affected.collect());
            }
            // The kernel tells how many there are (linux: drivers/vfio/pci/vfio_pci_core.c). A segment has no more than this.
            Err((Some(Errno::NOSPC), _)) if count > room && count <= 1 << 16 => room = count,
            // It has no bus that could be reset, or something on it is in no group.
            Err((Some(Errno::NODEV | Errno::PERM), _)) => return Err(NotReset::NoWay),
            // Nothing was reset yet.
            Err((_, source)) => return Err(NotReset::Untold { source }),
        }
    }
}

/// The second word of struct vfio_pci_dependent_device: segment, bus, device and function.
fn place_of(word: u32) -> HostBdf {
    let [low, high, bus, devfn] = word.to_le_bytes();
    HostBdf { domain: u16::from_le_bytes([low, high]).into(), bdf: Bdf::new(bus, Devfn::from_byte(devfn)) }
}

/// Resets the function's bus, or its slot. `groups` are those of all that it hits.
pub fn reset_bus(device: BorrowedFd<'_>, groups: &[OwnedFd]) -> io::Result<()> {
    let count = u32::try_from(groups.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // struct vfio_pci_hot_reset: argsz, flags, count, then a descriptor for each group.
    let mut words = vec![12 + 4 * count, 0, count];
    words.extend(groups.iter().map(|group| group.as_raw_fd().cast_unsigned()));
    // SAFETY: `argsz` in the first word is the length of `words`, which outlive the call; the kernel reads no further.
    done(unsafe { ioctl_with_ptr(&device, VFIO_DEVICE_PCI_HOT_RESET(), words.as_ptr()) })
}

fn set_irqs(device: BorrowedFd<'_>, flags: u32, index: u32, start: u16, events: &[Option<BorrowedFd<'_>>]) -> io::Result<()> {
    let count = u32::try_from(events.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // struct vfio_irq_set: argsz, flags, index, start, count, then one 32-bit descriptor for each interrupt.
    let mut words = vec![20 + 4 * count, flags, index, start.into(), count];
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

fn size(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

fn done(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_that_hits_more_than_a_bus_has_is_told_whole() {
        for all in [1usize, 256, 257, 5000] {
            let mut asked = 0;
            let told = told_affected(|words| {
                asked += 1;
                assert_eq!(usize::try_from(words[0]).unwrap(), 4 * words.len());
                words[2] = u32::try_from(all).unwrap();
                if words.len() < 3 + 2 * all {
                    return Err(Errno::NOSPC.into());
                }
                (0..all).for_each(|index| words[4 + 2 * index] = 0x0800_0000 + u32::try_from(index % 3).unwrap());
                Ok(())
            });
            let told = told.unwrap();
            assert_eq!((told.len(), told[0].at.bdf.bus(), asked), (all, 0, if all > 256 { 2 } else { 1 }));
        }
    }

    #[test]
    fn a_kernel_that_never_has_enough_room_or_fails_is_told_of_without_a_loop() {
        for count in [0, 256, u32::MAX] {
            let refused = told_affected(|words| {
                words[2] = count;
                Err(Errno::NOSPC.into())
            });
            assert!(matches!(refused, Err(NotReset::Untold { .. })));
        }
        let mut more = 256;
        let refused = told_affected(|words| {
            more += 20_000;
            words[2] = more;
            Err(Errno::NOSPC.into())
        });
        assert!(matches!(refused, Err(NotReset::Untold { .. })), "it ends with a segment");
        assert!(matches!(told_affected(|_| Err(Errno::NODEV.into())), Err(NotReset::NoWay)));
        assert!(matches!(told_affected(|_| Err(Errno::NOMEM.into())), Err(NotReset::Untold { .. })));
    }

    #[test]
    fn the_place_of_what_a_reset_hits_is_read_as_the_kernel_writes_it() {
        // segment 0x0001, bus 0x3b, device 0x1f, function 7
        assert_eq!(place_of(0xFF3B_0001).to_string(), "0001:3b:1f.7");
    }
}
