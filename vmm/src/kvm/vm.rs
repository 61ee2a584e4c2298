//! Opens /dev/kvm and creates the VM: what the host offers, and the order in which parts of a VM come to exist.
//!
//! Memory slots are set before the interrupt controller and vCPUs exist: afterwards each change waits for an SRCU grace
//! period (milliseconds in place of microseconds). [`Vm::create_interrupt_controller`] marks that point.

use std::io;
use std::sync::{Arc, Mutex};

use arch::memory_map::{KVM_IDENTITY_MAP, KVM_TSS};
use kvm_bindings::{
    CpuId, KVM_API_VERSION, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MAX_CPUID_ENTRIES,
    kvm_clock_data, kvm_create_device, kvm_device_type_KVM_DEV_TYPE_VFIO, kvm_irqchip,
};
use kvm_ioctls::{Cap, DeviceFd, Kvm, VcpuFd, VmFd};
use pci::state::{Reader, StateError, Writer};
use pci::sync::lock;
use thiserror::Error;
use zerocopy::IntoBytes;

use super::groups::VfioGroups;

/// Interrupt controllers with a state of their own; local APICs are parts of vCPUs.
const CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// A KVM virtual machine.
pub struct Vm {
    kvm: Kvm,
    fd: Arc<VmFd>,
    /// Once somebody asked for it.
    vfio: Mutex<Option<Arc<DeviceFd>>>,
}

impl Vm {
    /// Creates an empty VM. Fails with what to do when /dev/kvm is absent, refused or too old.
    pub fn new() -> Result<Self, KvmError> {
        let kvm = open()?;
        let fd = kvm.create_vm().map_err(|error| KvmError::step("create a virtual machine", error))?;
        Ok(Self { kvm, fd: Arc::new(fd), vfio: Mutex::default() })
    }

    /// The VM's descriptor, for parts that inject interrupts or set memory slots.
    #[must_use]
    pub fn fd(&self) -> Arc<VmFd> {
        Arc::clone(&self.fd)
    }

    /// Memory slots that the host supports.
    #[must_use]
    pub fn max_slots(&self) -> u32 {
        u32::try_from(self.kvm.get_nr_memslots()).unwrap_or(u32::MAX)
    }

    /// Whether memory can be shown to the guest read-only.
    #[must_use]
    pub fn has_read_only_memory(&self) -> bool {
        self.kvm.check_extension(Cap::ReadonlyMem)
    }

    /// Creates local APICs, I/O APIC and PICs in the kernel. Set all memory slots before.
    pub fn create_interrupt_controller(&self) -> Result<(), KvmError> {
        self.fd.set_identity_map_address(KVM_IDENTITY_MAP).map_err(|error| KvmError::step("set the identity map", error))?;
        self.fd.set_tss_address(KVM_TSS).map_err(|error| KvmError::step("set the TSS address", error))?;
        self.fd.create_irq_chip().map_err(|error| KvmError::step("create the interrupt controller", error))
    }

    /// Model-specific registers that make up a vCPU's state on this host.
    pub fn state_msrs(&self) -> Result<Arc<[u32]>, KvmError> {
        let list = self.kvm.get_msr_index_list().map_err(|error| KvmError::step("list the model-specific registers", error))?;
        Ok(list.as_slice().into())
    }

    /// Writes the interrupt controllers and the guest's clock. No vCPU runs.
    pub fn save(&self, writer: &mut Writer) -> Result<(), KvmError> {
        for chip_id in CHIPS {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            self.fd.get_irqchip(&mut chip).map_err(|error| KvmError::step("read the interrupt controller", error))?;
            writer.bytes(chip.as_bytes());
        }
        let clock = self.fd.get_clock().map_err(|error| KvmError::step("read the guest's clock", error))?;
        writer.u64(clock.clock);
        Ok(())
    }

    /// Takes what another VM saved. All vCPUs exist and none has run; what devices raise is to come before.
    pub fn restore(&self, reader: &mut Reader<'_>) -> Result<(), KvmStateError> {
        for chip_id in CHIPS {
            let chip = kvm_irqchip { chip_id, ..crate::vcpu::plain(reader)? };
            self.fd.set_irqchip(&chip).map_err(|error| KvmError::step("set the interrupt controller", error))?;
        }
        let clock = kvm_clock_data { clock: reader.u64()?, ..Default::default() };
        self.fd.set_clock(&clock).map_err(|error| KvmError::step("set the guest's clock", error))?;
        Ok(())
    }

    /// Creates vCPU `id`.
    pub fn create_vcpu(&self, id: u8) -> Result<VcpuFd, KvmError> {
        self.fd.create_vcpu(u64::from(id)).map_err(|error| KvmError::Vcpu { id, source: error.into() })
    }

    /// The pseudo-device through which KVM learns of VFIO groups (device coherency). A VM has one, made when it is first asked for:
    /// KVM refuses a second, and may keep the first until the VM ends (linux: Documentation/virt/kvm/devices/vfio.rst).
    pub fn vfio_groups(&self) -> Result<VfioGroups, KvmError> {
        let mut made = lock(&self.vfio);
        let device = match &*made {
            Some(device) => Arc::clone(device),
            None => {
                let mut device = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
                let device = self.fd.create_device(&mut device);
                Arc::new(device.map_err(|error| KvmError::step("create the KVM VFIO device", error))?)
            }
        };
        Ok(VfioGroups(Arc::clone(made.insert(device))))
    }
}

/// Opens /dev/kvm, if it has what every VM here needs.
pub(super) fn open() -> Result<Kvm, KvmError> {
    let kvm = Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENXIO | libc::ENODEV => KvmError::Absent { source: error.into() },
        libc::EACCES | libc::EPERM => KvmError::Refused { source: error.into() },
        _ => KvmError::Open { source: error.into() },
    })?;
    let version = kvm.get_api_version();
    if version < 0 {
        return Err(KvmError::NotKvm);
    }
    if u32::try_from(version).ok() != Some(KVM_API_VERSION) {
        return Err(KvmError::Version { version, needed: KVM_API_VERSION });
    }
    let missing: Vec<&str> = [
        (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
        (Cap::Irqfd, "KVM_CAP_IRQFD"),
        (Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI"),
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    ]
    .into_iter()
    .filter_map(|(cap, name)| (!kvm.check_extension(cap)).then_some(name))
    .collect();
    if missing.is_empty() { Ok(kvm) } else { Err(KvmError::Missing { what: missing.join(", ") }) }
}

/// CPUID leaves that KVM can show a guest on this host.
pub(super) fn supported_cpuid(kvm: &Kvm) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(|error| KvmError::step("read the supported CPUID", error))
}

/// State that KVM does not take.
#[derive(Debug, Error)]
pub enum KvmStateError {
    /// KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// It is none.
    #[error(transparent)]
    State(#[from] StateError),
}

/// What /dev/kvm refuses.
#[derive(Debug, Error)]
pub enum KvmError {
    /// No device node or no module behind it.
    #[error("cannot open /dev/kvm: load the module kvm_intel or kvm_amd, and enable virtualization in the firmware")]
    Absent {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// No permission.
    #[error("cannot open /dev/kvm: add the user to the group kvm, or run as root")]
    Refused {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Another reason.
    #[error("cannot open /dev/kvm")]
    Open {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Another device or file at its path.
    #[error("/dev/kvm is not the KVM device (character device 10:232); remove what covers it, or load the module `kvm` again")]
    NotKvm,
    /// Not the API that all kernels since 2.6.22 have.
    #[error("/dev/kvm speaks API version {version}, {needed} is needed")]
    Version {
        /// Found.
        version: i32,
        /// Needed.
        needed: u32,
    },
    /// A feature is not there.
    #[error("this kernel's KVM lacks {what}: Linux 4.13 or newer is needed")]
    Missing {
        /// Capability names.
        what: String,
    },
    /// A vCPU.
    #[error("cannot create vCPU {id}")]
    Vcpu {
        /// Its number.
        id: u8,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// A step of the set-up.
    #[error("cannot {what}")]
    Step {
        /// The step.
        what: &'static str,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

impl KvmError {
    /// A failed ioctl, named by what it was for.
    #[must_use]
    pub fn step(what: &'static str, error: kvm_ioctls::Error) -> Self {
        Self::Step { what, source: error.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn a_host_function_after_one_that_could_not_be_opened_finds_the_list_of_groups() {
        let vm = Vm::new().unwrap();
        let first = vm.vfio_groups();
        let second = vm.vfio_groups();
        // Kernels without VFIO have none, for the second neither.
        assert_eq!(first.is_ok(), second.is_ok(), "{:?}", second.err());
    }
}
