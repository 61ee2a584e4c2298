//! Makes the parts of a machine that are neither its hierarchy nor what it boots: memory slots for RAM, registers of the event
//! devices, vCPUs and what they share.

use std::sync::Arc;

use devices::acpi::HotPlugRegisters;
use devices::gate::Gate;
use vm_device::device_manager::IoManager;
use vm_memory::GuestMemoryMmap;

use super::{Design, Surroundings};
use crate::address_space::AddressSpace;
use crate::bus_slots::{BusSlots, Hears, Slot};
use crate::ejected::Ejected;
use crate::kvm::{EdgeLine, SlotError, Slots, Vm};
use crate::main_loop::{End, Ending};
use crate::memory;
use crate::pci_bus::PciBus;
use crate::resize::{Extent, Room};
use crate::slot_events::SlotEvents;
use crate::vcpu::{Maker, Runner};

/// What every part of a machine is made for.
pub struct Assembly<'a> {
    /// The VM.
    pub vm: Arc<Vm>,
    /// What the machine is to be.
    pub design: Design<'a>,
    /// What was there before it.
    pub surroundings: &'a Surroundings,
    /// Where its end is announced.
    pub ending: Arc<Ending>,
}

impl Assembly<'_> {
    /// Memory slots for RAM, which the machine keeps mapped.
    pub(super) fn ram_slots(&self, ram: &GuestMemoryMmap) -> Result<Slots, SlotError> {
        let mut slots = Slots::new(self.vm.fd(), self.vm.max_slots());
        for region in memory::regions(ram) {
            // SAFETY: the machine holds `ram` and drops it after its vCPUs have ended. One that fails before has none that ran.
            unsafe { slots.add(region.at, region.len, region.host) }?;
        }
        Ok(slots)
    }

    /// Puts the regions of virtio-mem where the plan has them. Of RAM that was `used` the blocks that came since stay.
    pub(super) fn place_blocks(&self, ram: &GuestMemoryMmap, used: bool) {
        let Design { config, spec, plan, backends, .. } = self.design;
        let room = Room::new(config, spec.numa.as_ref(), &plan.map.hot_plug);
        for (control, (_, region)) in backends.memory_regions().iter().zip(&room.regions) {
            if used { control.restart(ram) } else { control.place(*region) }
        }
    }

    /// The registers of buses whose devices come and go by ACPI, if there are any, with what is there from the start.
    pub(super) fn bus_slots(&self, pci: &PciBus, events: &Arc<SlotEvents>) -> Option<Arc<BusSlots>> {
        let buses = self.design.plan.slot_buses(&self.design.config.pcie);
        if buses.is_empty() {
            return None;
        }
        let line = EdgeLine::new(self.vm.fd(), arch::ports::BUS_SLOTS_GSI);
        let slots = BusSlots::new(&buses, line, Arc::clone(events));
        pci.change(|tree| {
            for planned in &buses {
                let mut there = tree.hierarchy.devices_on(planned.on);
                there.retain(|number, _| planned.bus.slots.iter().any(|slot| slot.number == *number));
                for (number, functions) in there {
                    slots.put(Slot { on: planned.on, number }, functions, Hears::Nobody);
                }
            }
        });
        Some(Arc::new(slots))
    }

    /// The registers through which the guest learns of processors and memory that come and go.
    pub(super) fn hot_plug_registers(&self, extent: &Extent, ejected: &Arc<Ejected>) -> Arc<HotPlugRegisters> {
        let interrupt = EdgeLine::new(self.vm.fd(), arch::ports::EVENT_GSI).sink("the event device");
        let ejected = Arc::clone(ejected);
        let tell = move |number| ejected.tell(number);
        HotPlugRegisters::new(extent.cpus.clone(), extent.memory.clone(), interrupt, Box::new(tell))
    }

    /// What vCPUs are made with, at the start and later.
    pub(super) fn maker(&self) -> Maker {
        let Design { config, spec, plan, cpuid, .. } = self.design;
        Maker {
            vm: Arc::clone(&self.vm),
            processors: spec.processors.clone(),
            numa: spec.numa.clone(),
            host: cpuid.clone(),
            kvm_signature: config.cpus.kvm_signature,
            address_bits: plan.map.physical_address_bits,
        }
    }

    /// What vCPUs share.
    pub(super) fn runner(&self, ports: IoManager, pci: &Arc<PciBus>, space: Arc<AddressSpace>, gate: Gate) -> Arc<Runner> {
        let ending = Arc::clone(&self.ending);
        Arc::new(Runner {
            ports,
            pci: Arc::clone(pci),
            space,
            stop: Arc::clone(&ending.stop),
            gate: Arc::new(gate),
            ended: Box::new(move |ended| ending.say(End::Vcpu(ended))),
        })
    }
}
