//! All that a vCPU is at a moment at which it does not run: taken out of KVM, written down, put back.

use std::io;

use kvm_bindings::{
    KVM_MAX_MSR_ENTRIES, Msrs, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use pci::state::{Reader, StateError, Writer};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

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
        })
    }

    /// Puts it into a vCPU that has not run. The interrupt controller has its state.
    pub fn put(&self, fd: &VcpuFd, id: u8) -> Result<(), VcpuStateError> {
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
        fd.set_mp_state(self.mp_state).map_err(failed("set whether it runs"))?;
        fd.set_regs(&self.regs).map_err(failed("set its registers"))?;
        fd.set_sregs(&self.sregs).map_err(failed("set its special registers"))?;
        let xsave = kvm_xsave { region: self.xsave, ..Default::default() };
        // SAFETY: this process asks for no state component that would need more room (arch_prctl), so KVM reads the region alone.
        unsafe { fd.set_xsave(&xsave) }.map_err(failed("set its extended state"))?;
        fd.set_xcrs(&self.xcrs).map_err(failed("set its extended control registers"))?;
        fd.set_debug_regs(&self.debug).map_err(failed("set its debug registers"))?;
        fd.set_lapic(&self.lapic).map_err(failed("set its local APIC"))?;
        let (last, others): (Vec<_>, Vec<_>) = self.msrs.iter().copied().partition(|msr| msr.index == TSC_DEADLINE);
        write_msrs(fd, id, &others);
        write_msrs(fd, id, &last);
        fd.set_vcpu_events(&self.events).map_err(failed("set its pending events"))?;
        // Guests without KVM's clock have nothing to be told.
        let _ = fd.kvmclock_ctrl();
        Ok(())
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
        Ok(Self { mp_state, regs, sregs, xsave, xcrs, debug, lapic, events, msrs, tsc_khz: reader.u32()? })
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

fn write_msrs(fd: &VcpuFd, id: u8, entries: &[kvm_msr_entry]) {
    let mut rest = entries;
    while !rest.is_empty() {
        let batch = rest.get(..rest.len().min(KVM_MAX_MSR_ENTRIES)).unwrap_or_default();
        let Ok(msrs) = Msrs::from_entries(batch) else { break };
        let taken = fd.set_msrs(&msrs).unwrap_or(0);
        if let Some(refused) = batch.get(taken) {
            log::debug!("vCPU {id}: the host does not take {:#x} for MSR {:#x}", refused.data, refused.index);
        }
        rest = rest.get(taken + usize::from(taken < batch.len())..).unwrap_or_default();
    }
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
