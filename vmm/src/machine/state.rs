//! What a held machine is, without its RAM: written down, and put into a machine that was built like it.
//!
//! Order counts when it is put back: devices first, whose wires and messages the interrupt controller then forgets; then the
//! controller; then vCPUs, whose local APICs know what they had to serve.

use std::collections::BTreeSet;
use std::sync::Arc;

use pci::state::{Reader, StateError, Writer};
use thiserror::Error;

use super::Machine;
use crate::kvm::{KvmError, KvmStateError, Vm};
use crate::pci_bus::PciBus;
use crate::ports::Legacy;
use crate::vcpu::{Vcpu, VcpuState, VcpuStateError};

impl Machine {
    /// Writes its state. It is held ([`Machine::pause`]).
    pub fn save(&self) -> Result<Vec<u8>, SaveError> {
        let vm = &self.maker.vm;
        let mut writer = Writer::new();
        let states = self.threads.states(&vm.state_msrs()?);
        writer.section("functions", |writer| self.pci.change(|tree| tree.hierarchy.save(writer)))?;
        writer.section("legacy", |writer| {
            self.legacy.save(writer, &self.pci);
            Ok::<(), SaveError>(())
        })?;
        writer.section("kvm", |writer| vm.save(writer).map_err(SaveError::from))?;
        writer.section("vcpus", |writer| {
            writer.count(states.len());
            for (id, state) in states {
                writer.u8(id);
                state.map_err(|source| SaveError::Vcpu { id, source })?.save(writer);
            }
            Ok::<(), SaveError>(())
        })?;
        Ok(writer.into_bytes())
    }
}

/// Puts `state` into a machine whose vCPUs have not run.
pub(super) fn restore(state: &[u8], vm: &Vm, pci: &Arc<PciBus>, legacy: &Legacy, vcpus: &[Vcpu]) -> Result<(), RestoreError> {
    let mut reader = Reader::new(state, "state");
    // Workers that start wait for the machine to go on.
    let workers = pci.change(|tree| tree.hierarchy.workers());
    workers.iter().for_each(|workers| workers.hold());
    reader.section("functions", |reader| pci.change(|tree| tree.hierarchy.restore(reader, &mut tree.effects)))?;
    reader.section("legacy", |reader| legacy.restore(reader, pci))?;
    let (_, mut inside) = reader.any_section()?;
    vm.restore(&mut inside)?;
    inside.end()?;
    let saved = reader.section("vcpus", |reader| {
        reader.same_count("vCPUs", vcpus.len())?;
        vcpus.iter().map(|_| Ok((reader.u8()?, VcpuState::read(reader)?))).collect::<Result<Vec<_>, StateError>>()
    })?;
    reader.end()?;
    let mut lost = BTreeSet::new();
    for (vcpu, (id, state)) in vcpus.iter().zip(saved) {
        if vcpu.id != id {
            return Err(RestoreError::Number { saved: id, here: vcpu.id });
        }
        lost.extend(state.put(&vcpu.fd, id).map_err(|source| RestoreError::Vcpu { id, source })?);
    }
    if !lost.is_empty() {
        let list = lost.iter().map(|msr| format!("{msr:#x}")).collect::<Vec<_>>().join(", ");
        log::warn!("this host does not let these model-specific registers have the values that were saved: {list}");
    }
    // Input comes whether or not the machine is held, and local APICs are saved before the line.
    legacy.serial.remind();
    Ok(())
}

impl Legacy {
    fn save(&self, writer: &mut Writer, pci: &PciBus) {
        self.serial.save(writer);
        self.reset.save(writer);
        self.hot_plug.save(writer);
        if let Some(panic) = &self.panic {
            panic.save(writer);
        }
        if let Some(slots) = &self.bus_slots {
            slots.save(writer);
        }
        if let Some(latch) = pci.latch() {
            writer.u32(latch.read());
        }
    }

    fn restore(&self, reader: &mut Reader<'_>, pci: &PciBus) -> Result<(), StateError> {
        self.serial.restore(reader)?;
        self.reset.restore(reader)?;
        self.hot_plug.restore(reader)?;
        self.panic.as_ref().map_or(Ok(()), |panic| panic.restore(reader))?;
        self.bus_slots.as_ref().map_or(Ok(()), |slots| slots.restore(reader))?;
        if let Some(latch) = pci.latch() {
            latch.write(reader.u32()?);
        }
        Ok(())
    }
}

/// State that cannot be had.
#[derive(Debug, Error)]
pub enum SaveError {
    /// Of a device.
    #[error(transparent)]
    State(#[from] StateError),
    /// Of KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Of a vCPU.
    #[error("vCPU {id}")]
    Vcpu {
        /// Its number.
        id: u8,
        /// Why.
        #[source]
        source: VcpuStateError,
    },
}

/// State that this machine does not take.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// Of a device, or no state at all.
    #[error(transparent)]
    State(#[from] StateError),
    /// Of KVM.
    #[error(transparent)]
    Kvm(#[from] KvmStateError),
    /// Another vCPU.
    #[error("the state has vCPU {saved} where this machine has {here}")]
    Number {
        /// As saved.
        saved: u8,
        /// In this machine.
        here: u8,
    },
    /// Of a vCPU.
    #[error("vCPU {id}")]
    Vcpu {
        /// Its number.
        id: u8,
        /// Why.
        #[source]
        source: VcpuStateError,
    },
}
