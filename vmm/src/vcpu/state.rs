//! All that a vCPU is at a moment at which it does not run: taken out of KVM, written down, put back.

use std::io;
use std::ops::RangeInclusive;

use kvm_bindings::nested::KvmNestedStateBuffer;
use kvm_bindings::{
    KVM_MAX_MSR_ENTRIES, KVM_STATE_NESTED_FORMAT_VMX, KVM_STATE_NESTED_GIF_SET, Msrs, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_nested_state, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use pci::state::{Reader, StateError, Writer};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

/// Set before the state of nested virtualization, which is checked against them: IA32_FEATURE_CONTROL and the capabilities of
/// VMX, which a processor in VMX operation does not let be set (Intel SDM volume 4).
const FEATURE_CONTROL: u32 = 0x3A;
const VMX_CAPABILITIES: RangeInclusive<u32> = 0x480..=0x491;

/// Set after all others: it starts a timer of the local APIC (Intel SDM volume 4, IA32_TSC_DEADLINE).
const TSC_DEADLINE: u32 = 0x6E0;

/// A vCPU that does not run.
pub struct VcpuState {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: [u32; 1024],
    xcrs: kvm_xcrs,
    debug: kvm_debugregs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    msrs: Vec<kvm_msr_entry>,
    /// 0 if the host does not tell.
    tsc_khz: u32,
    /// Of a vCPU that is a hypervisor's itself.
    nested: Option<Box<KvmNestedStateBuffer>>,
}

impl VcpuState {
    /// Takes it out of KVM, with the values of those of `msrs` that the host lets be read.
    pub fn of(fd: &VcpuFd, msrs: &[u32]) -> Result<Self, VcpuStateError> {
        let failed = |what| move |error: kvm_ioctls::Error| VcpuStateError::Kvm { what, source: error.into() };
        // First: it takes in what waits for the local APIC.
        let mp_state = fd.get_mp_state().map_err(failed("read whether it runs"))?;
        Ok(Self {
            mp_state,
            regs: fd.get_regs().map_err(failed("read its registers"))?,
            sregs: fd.get_sregs().map_err(failed("read its special registers"))?,
            xsave: fd.get_xsave().map_err(failed("read its extended state"))?.region,
            xcrs: fd.get_xcrs().map_err(failed("read its extended control registers"))?,
            debug: fd.get_debug_regs().map_err(failed("read its debug registers"))?,
            lapic: fd.get_lapic().map_err(failed("read its local APIC"))?,
            events: fd.get_vcpu_events().map_err(failed("read its pending events"))?,
            msrs: read_msrs(fd, msrs),
            tsc_khz: fd.get_tsc_khz().unwrap_or(0),
            nested: read_nested(fd).map_err(failed("read its state of nested virtualization"))?,
        })
    }

    /// Puts it into a vCPU that has not run. The interrupt controller has its state. Returns the MSRs that this host does not
    /// let have their values.
    pub fn put(&self, fd: &VcpuFd, id: u8) -> Result<Vec<u32>, VcpuStateError> {
        let failed = |what| move |error: kvm_ioctls::Error| VcpuStateError::Kvm { what, source: error.into() };
        let khz = fd.get_tsc_khz().unwrap_or(0);
        if self.tsc_khz != 0
            && khz != self.tsc_khz
            && let Err(error) = fd.set_tsc_khz(self.tsc_khz)
        {
            let saved = self.tsc_khz;
            log::warn!(
                "vCPU {id}: its clock ran at {saved} kHz and runs at {khz} kHz here, which this host cannot change: {error}"
            );
        }
        let is_first = |msr: &kvm_msr_entry| msr.index == FEATURE_CONTROL || VMX_CAPABILITIES.contains(&msr.index);
        let (first, others): (Vec<_>, Vec<_>) = self.msrs.iter().copied().partition(is_first);
        let (last, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|msr| msr.index == TSC_DEADLINE);
        let mut refused = write_msrs(fd, &first);
        fd.set_mp_state(self.mp_state).map_err(failed("set whether it runs"))?;
        fd.set_sregs(&self.sregs).map_err(failed("set its special registers"))?;
        // What runs inside has registers of its own, so these come after it.
        if let Some(nested) = &self.nested {
            fd.set_nested_state(nested).map_err(failed("set its state of nested virtualization"))?;
        }
        fd.set_regs(&self.regs).map_err(failed("set its registers"))?;
        let xsave = kvm_xsave { region: self.xsave, ..Default::default() };
        // SAFETY: this process asks for no state component that would need more room (arch_prctl), so KVM reads the region alone.
        unsafe { fd.set_xsave(&xsave) }.map_err(failed("set its extended state"))?;
        fd.set_xcrs(&self.xcrs).map_err(failed("set its extended control registers"))?;
        fd.set_debug_regs(&self.debug).map_err(failed("set its debug registers"))?;
        fd.set_lapic(&self.lapic).map_err(failed("set its local APIC"))?;
        refused.extend(write_msrs(fd, &others));
        refused.extend(write_msrs(fd, &last));
        fd.set_vcpu_events(&self.events).map_err(failed("set its pending events"))?;
        // Guests without KVM's clock have nothing to be told.
        let _ = fd.kvmclock_ctrl();
        Ok(refused)
    }

    /// Writes it down.
    pub fn save(&self, writer: &mut Writer) {
        writer.bytes(self.mp_state.as_bytes());
        writer.bytes(self.regs.as_bytes());
        writer.bytes(self.sregs.as_bytes());
        writer.bytes(self.xsave.as_bytes());
        writer.bytes(self.xcrs.as_bytes());
        writer.bytes(self.debug.as_bytes());
        writer.bytes(self.lapic.as_bytes());
        writer.bytes(self.events.as_bytes());
        writer.bytes(self.msrs.as_bytes());
        writer.u32(self.tsc_khz);
        writer.bool(self.nested.is_some());
        if let Some(nested) = &self.nested {
            writer.bytes(nested.as_bytes());
        }
    }

    /// Reads what was written.
    pub fn read(reader: &mut Reader<'_>) -> Result<Self, StateError> {
        let (mp_state, regs, sregs) = (plain(reader)?, plain(reader)?, plain(reader)?);
        let (xsave, xcrs, debug) = (plain(reader)?, plain(reader)?, plain(reader)?);
        let (lapic, events) = (plain(reader)?, plain(reader)?);
        let bytes = reader.bytes()?;
        let entries = bytes.chunks(size_of::<kvm_msr_entry>()).map(|entry| {
            kvm_msr_entry::read_from_bytes(entry).map_err(|_| reader.wrong("a number of bytes of MSRs", bytes.len() as u64))
        });
        let msrs = entries.collect::<Result<_, _>>()?;
        let tsc_khz = reader.u32()?;
        let nested = if reader.bool()? { Some(Box::new(plain(reader)?)) } else { None };
        Ok(Self { mp_state, regs, sregs, xsave, xcrs, debug, lapic, events, msrs, tsc_khz, nested })
    }
}

/// A structure of the kernel's, of exactly its size.
pub(crate) fn plain<T: FromBytes>(reader: &mut Reader<'_>) -> Result<T, StateError> {
    let bytes = reader.bytes()?;
    T::read_from_bytes(bytes).map_err(|_| reader.wrong("a size of this structure", bytes.len() as u64))
}

fn read_msrs(fd: &VcpuFd, indices: &[u32]) -> Vec<kvm_msr_entry> {
    let mut found = Vec::new();
    let mut rest = indices;
    while !rest.is_empty() {
        let batch = rest.get(..rest.len().min(KVM_MAX_MSR_ENTRIES)).unwrap_or_default();
        let entries: Vec<_> = batch.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let Ok(mut msrs) = Msrs::from_entries(&entries) else { break };
        // The kernel stops at the first that it refuses and says how many it gave.
        let given = fd.get_msrs(&mut msrs).unwrap_or(0);
        found.extend(msrs.as_slice().iter().take(given));
        let refused = usize::from(given < batch.len());
        rest = rest.get(given + refused..).unwrap_or_default();
    }
    found
}

/// Returns those that the host refuses and that have other values here.
fn write_msrs(fd: &VcpuFd, entries: &[kvm_msr_entry]) -> Vec<u32> {
    let mut lost = Vec::new();
    let mut rest = entries;
    while !rest.is_empty() {
        let batch = rest.get(..rest.len().min(KVM_MAX_MSR_ENTRIES)).unwrap_or_default();
        let Ok(msrs) = Msrs::from_entries(batch) else { break };
        let taken = fd.set_msrs(&msrs).unwrap_or(0);
        if let Some(refused) = batch.get(taken)
            && !read_msrs(fd, &[refused.index]).iter().any(|here| here.data == refused.data)
        {
            lost.push(refused.index);
        }
        rest = rest.get(taken + usize::from(taken < batch.len())..).unwrap_or_default();
    }
    lost
}

/// `None` for a vCPU that does not use it, or on a host without it.
fn read_nested(fd: &VcpuFd) -> Result<Option<Box<KvmNestedStateBuffer>>, kvm_ioctls::Error> {
    let mut nested = Box::new(KvmNestedStateBuffer::empty());
    match fd.nested_state(&mut nested) {
        Ok(_) => Ok(Some(nested).filter(|nested| is_used(nested))),
        // KVM without it.
        Err(error) if matches!(error.errno(), libc::EINVAL | libc::ENOTTY) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether it says more than that of a vCPU that never ran (linux: Documentation/virt/kvm/api.rst, KVM_GET_NESTED_STATE).
fn is_used(nested: &KvmNestedStateBuffer) -> bool {
    let more_than_a_head = usize::try_from(nested.size).is_ok_and(|size| size > size_of::<kvm_nested_state>());
    let is_vmx = u32::from(nested.format) == KVM_STATE_NESTED_FORMAT_VMX;
    // The head begins with the address that VMXON was given, all ones if there was none.
    let in_vmx_operation = || nested.hdr.as_bytes().first_chunk() != Some(&[0xFF; 8]);
    let interrupts_held = || u32::from(nested.flags) != KVM_STATE_NESTED_GIF_SET;
    more_than_a_head || if is_vmx { in_vmx_operation() } else { interrupts_held() }
}

/// A vCPU whose state cannot be had or set.
#[derive(Debug, Error)]
pub enum VcpuStateError {
    /// A part of it.
    #[error("cannot {what}")]
    Kvm {
        /// The step.
        what: &'static str,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Its thread has ended.
    #[error("its thread has ended, so it has no state any more")]
    Gone,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nested(format: u16, flags: u16, size: u32, head: u8) -> KvmNestedStateBuffer {
        let mut bytes = vec![0; size_of::<KvmNestedStateBuffer>()];
        bytes[..2].copy_from_slice(&flags.to_le_bytes());
        bytes[2..4].copy_from_slice(&format.to_le_bytes());
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        bytes[8..16].fill(head);
        KvmNestedStateBuffer::read_from_bytes(&bytes).unwrap()
    }

    #[test]
    fn nested_virtualization_is_written_down_once_the_guest_uses_it() {
        let used = |format, flags, size, head| is_used(&nested(format, flags, size, head));
        assert!(!used(0, 0, 128, 0xFF), "VMX that is off");
        assert!(used(0, 0, 128, 0x11), "after VMXON");
        assert!(used(0, 1, 128 + 8192, 0x11), "inside");
        assert!(!used(1, 0x100, 128, 0), "SVM that is off");
        assert!(used(1, 0, 128, 0), "after CLGI");
        assert!(used(1, 0x101, 128 + 4096, 0), "inside");
    }

    #[test]
    fn a_vcpu_is_read_as_it_was_written() {
        for inside in [None, Some(Box::new(nested(0, 1, 128 + 8192, 0x11)))] {
            let state = VcpuState {
                mp_state: kvm_mp_state { mp_state: 3 },
                regs: kvm_regs { rip: 7, ..Default::default() },
                sregs: kvm_sregs::default(),
                xsave: [5; 1024],
                xcrs: kvm_xcrs::default(),
                debug: kvm_debugregs::default(),
                lapic: kvm_lapic_state::default(),
                events: kvm_vcpu_events::default(),
                msrs: vec![kvm_msr_entry { index: TSC_DEADLINE, data: 9, ..Default::default() }],
                tsc_khz: 1,
                nested: inside,
            };
            let written = |state: &VcpuState| {
                let mut writer = Writer::new();
                state.save(&mut writer);
                writer.into_bytes()
            };
            let bytes = written(&state);
            let mut reader = Reader::new(&bytes, "vcpu");
            let read = VcpuState::read(&mut reader).unwrap();
            assert_eq!(reader.end(), Ok(()));
            assert!(written(&read) == bytes);
            assert_eq!(read.nested.map(|nested| nested.size), state.nested.map(|nested| nested.size));
        }
    }
}
