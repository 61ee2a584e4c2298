//! Tells KVM which VFIO groups a VM uses (linux: Documentation/virt/kvm/devices/vfio.rst): devices may then write past the
//! guest's caches where their IOMMU lets them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use devices::vfio::GroupWatcher;
use kvm_bindings::{KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_DEV_VFIO_FILE_DEL, kvm_device_attr};
use kvm_ioctls::DeviceFd;

/// KVM's list of groups. A VM has one.
pub struct VfioGroups(pub(super) Arc<DeviceFd>);

impl VfioGroups {
    fn set(&self, attribute: u32, group: BorrowedFd<'_>) -> io::Result<()> {
        let descriptor = group.as_raw_fd();
        // KVM reads the descriptor from this address, before the call returns.
        let addr = u64::try_from((&raw const descriptor).expose_provenance()).unwrap_or(0);
        let attribute = kvm_device_attr { flags: 0, group: KVM_DEV_VFIO_FILE, attr: attribute.into(), addr };
        Ok(self.0.set_device_attr(&attribute)?)
    }
}

impl GroupWatcher for VfioGroups {
    fn joins(&self, group: BorrowedFd<'_>) -> io::Result<()> {
        self.set(KVM_DEV_VFIO_FILE_ADD, group)
    }

    fn leaves(&self, group: BorrowedFd<'_>) -> io::Result<()> {
        self.set(KVM_DEV_VFIO_FILE_DEL, group)
    }
}
