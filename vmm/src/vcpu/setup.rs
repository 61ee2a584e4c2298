//! Creates vCPUs and gives them their first state: CPUID, model-specific registers, and the entry of the first one.

use std::io;
use std::sync::Arc;

use api::config::CpuList;
use arch::x86_64::cpuid::{self, VcpuIdentity};
use arch::x86_64::msrs;
use arch::x86_64::processors::Processors;
use arch::x86_64::regs::Entry;
use kvm_bindings::{CpuId, KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_mp_state};
use kvm_ioctls::VcpuFd;
use thiserror::Error;

use crate::kvm::{KvmError, Vm};
use crate::numa::GuestNuma;

/// A vCPU before its thread runs it.
pub struct Vcpu {
    /// Its number.
    pub id: u8,
    /// The kernel's side.
    pub fd: VcpuFd,
    /// The host processors that its thread keeps to; `None` for all.
    pub pinned: Option<CpuList>,
}

/// Makes vCPUs of one machine.
pub struct Maker {
    /// The machine.
    pub vm: Arc<Vm>,
    /// Where each is.
    pub processors: Processors,
    /// Which node's processors they keep to.
    pub numa: Option<GuestNuma>,
    /// CPUID of the host.
    pub host: CpuId,
    /// Whether guests find KVM's signature.
    pub kvm_signature: bool,
    /// Width of physical addresses.
    pub address_bits: u8,
}

impl Maker {
    /// Creates vCPU `id`. Number 0 starts at `entry`, or at the reset vector when there is none; others wait to be started by
    /// one that runs. Memory slots and the interrupt controller come before.
    pub fn make(&self, id: u8, entry: Option<&Entry>) -> Result<Vcpu, SetupError> {
        let place = *self.processors.placements().get(usize::from(id)).ok_or(SetupError::NoPlace { id })?;
        // KVM takes the number for the initial APIC id.
        let number = u8::try_from(place.apic_id).map_err(|_| SetupError::NoPlace { id })?;
        let fd = self.vm.create_vcpu(number)?;
        let identity = VcpuIdentity { place, physical_address_bits: Some(self.address_bits), tsc_deadline: true };
        let step = |what| move |error: kvm_ioctls::Error| SetupError::Step { id, what, source: error.into() };
        let leaves = if self.kvm_signature {
            cpuid::filter(self.host.as_slice(), &identity)
        } else {
            cpuid::filter(&cpuid::without_kvm_signature(self.host.as_slice()), &identity)
        };
        let shown = CpuId::from_entries(&leaves).map_err(|_| SetupError::Cpuid { id })?;
        fd.set_cpuid2(&shown).map_err(step("set its CPUID"))?;
        set_msrs(&fd, id)?;
        if let (0, Some(entry)) = (id, entry) {
            let mut sregs = fd.get_sregs().map_err(step("read its special registers"))?;
            entry.apply(&mut sregs);
            fd.set_sregs(&sregs).map_err(step("set its special registers"))?;
            fd.set_regs(&entry.regs).map_err(step("set its registers"))?;
        }
        let pinned = self.numa.as_ref().and_then(|numa| numa.pinned_to(id.into())).cloned();
        Ok(Vcpu { id, fd, pinned })
    }
}

impl Vcpu {
    /// Has KVM find it by its APIC id, for one that is made while others run: the map that messages to processors go by is
    /// made anew when the state of a local APIC is set, and not when a vCPU is created (linux: arch/x86/kvm/lapic.c).
    pub fn introduce(&self) -> Result<(), SetupError> {
        let step = |what| move |error: kvm_ioctls::Error| SetupError::Step { id: self.id, what, source: error.into() };
        let state = self.fd.get_lapic().map_err(step("read its local APIC"))?;
        self.fd.set_lapic(&state).map_err(step("set its local APIC"))
    }

    /// Makes one that ran wait to be started again, as one that is new.
    pub fn rest(&self) {
        let state = kvm_mp_state { mp_state: KVM_MP_STATE_UNINITIALIZED };
        if let Err(error) = self.fd.set_mp_state(state) {
            log::warn!("vCPU {} goes on where it stopped when it comes again: {error}", self.id);
        }
    }
}

/// Hosts differ in the registers that they let a guest have; one that is refused keeps its reset value.
fn set_msrs(fd: &VcpuFd, id: u8) -> Result<(), SetupError> {
    let entries = msrs::boot_entries();
    let mut rest = entries.as_slice();
    while !rest.is_empty() {
        let batch = Msrs::from_entries(rest).map_err(|_| SetupError::Msrs { id, count: rest.len() })?;
        // The kernel stops at the first that it refuses and says how many it took.
        let taken = fd.set_msrs(&batch).unwrap_or(0);
        if let Some(refused) = rest.get(taken) {
            log::debug!("vCPU {id}: the host keeps MSR {:#x} at its reset value", refused.index);
        }
        rest = rest.get(taken + 1..).unwrap_or_default();
    }
    Ok(())
}

/// A vCPU that cannot be prepared.
#[derive(Debug, Error)]
pub enum SetupError {
    /// It cannot be created.
    #[error(transparent)]
    Create(#[from] KvmError),
    /// A number that the machine has no place for.
    #[error("there is no place for vCPU {id}")]
    NoPlace {
        /// Its number.
        id: u8,
    },
    /// The host shows more leaves than KVM takes.
    #[error("the CPUID of vCPU {id} has too many leaves")]
    Cpuid {
        /// Its number.
        id: u8,
    },
    /// Too many registers.
    #[error("vCPU {id} has {count} model-specific registers to set, more than one call takes")]
    Msrs {
        /// Its number.
        id: u8,
        /// How many.
        count: usize,
    },
    /// A part of its state.
    #[error("vCPU {id}: cannot {what}")]
    Step {
        /// Its number.
        id: u8,
        /// The step.
        what: &'static str,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}
