//! Makes the endpoints of a machine and the hierarchy that they hang in, and maps what the plan makes reachable: all that has to
//! be there before the interrupt controller and the vCPUs.

use std::sync::Arc;

use api::config::{Cf8, Payload, VmConfig};
use devices::virtio::{Memory, console};

use super::{Assembly, MachineError};
use crate::address_space::AddressSpace;
use crate::cmdline::SwitchedOff;
use crate::effects::Mapper;
use crate::endpoints::{Factory, Listeners};
use crate::groundwork::Functions;
use crate::host_signals::HostSignals;
use crate::kvm::{Doorbells, Slots};
use crate::main_loop::End;
use crate::mirrors::Mirrors;
use crate::pci_bus::PciBus;
use crate::slot_events::SlotEvents;

/// The endpoints of a machine, and what holds and connects them.
pub(super) struct Endpoints {
    pub space: Arc<AddressSpace>,
    pub factory: Factory,
    pub signals: Arc<HostSignals>,
    pub console: Option<Arc<console::Input>>,
    pub slot_events: Arc<SlotEvents>,
    pub pci: Arc<PciBus>,
}

impl Endpoints {
    /// With `slots` that hold RAM, which is `memory`; `functions` are open and reach it.
    pub(super) fn make(
        assembly: &Assembly<'_>,
        memory: Memory,
        slots: Slots,
        functions: Functions,
    ) -> Result<Self, MachineError> {
        let Assembly { vm, design, surroundings, ending } = assembly;
        let (config, plan) = (design.config, design.plan);
        let space = AddressSpace::new(memory);
        let signals = Arc::new(HostSignals::new().map_err(MachineError::Event)?);
        let console = surroundings.console.as_ref().map(|output| {
            let resume = Arc::clone(&surroundings.resume);
            (Arc::clone(output), console::Input::new(Box::new(move || resume())))
        });
        let listeners = Listeners {
            console: console.clone(),
            expired: {
                let ending = Arc::clone(ending);
                Arc::new(move || ending.say(End::Watchdog))
            },
            failed: Arc::clone(&surroundings.failed),
            signals: Arc::clone(&signals),
        };
        let backends = Arc::clone(design.backends);
        let mut factory = Factory::new(Arc::clone(vm), Arc::clone(&space), functions, backends, listeners);
        let (mut hierarchy, endpoints) = factory.build(&plan.pci, design.spec)?;
        let doorbells = config.pcie.ioeventfd.then(|| Doorbells::new(vm.fd()));
        let mut mapper = Mapper::new(slots, doorbells, Arc::clone(&space));
        mapper.set_domain(factory.domain());
        let slot_events = Arc::new(SlotEvents::new().map_err(MachineError::Event)?);
        mapper.set_slot_events(Arc::clone(&slot_events));
        mapper.name_ports(hierarchy.ports().map(|port| (port.id, port.name.to_string())));
        for (id, endpoint) in endpoints {
            mapper.add(id, endpoint);
        }
        if config.pcie.root_hot_plug {
            hierarchy.open_root_bus(0);
        }
        if config.pcie.mirror && vm.has_read_only_memory() {
            let mirrors = Mirrors::new(plan.ecam_addresses(), plan.functions_to_come(&config.pcie))?;
            hierarchy.mirror(|id| mirrors.page(id));
            mapper.set_mirrors(mirrors);
        }
        let pci = Arc::new(PciBus::new(hierarchy, mapper, plan.map.ecam.clone(), wants_config_ports(config)));
        let console = console.map(|(_, input)| input);
        Ok(Self { space, factory, signals, console, slot_events, pci })
    }
}

/// Firmware needs the ports; Linux uses ECAM for everything when they stay silent, which costs fewer exits, unless its command
/// line takes ECAM away.
fn wants_config_ports(config: &VmConfig) -> bool {
    match (config.pcie.cf8, &config.payload) {
        (Cf8::On, _) => true,
        (Cf8::Off, _) => false,
        (Cf8::Auto, Some(Payload::Kernel(kernel))) => SwitchedOff::by(&kernel.cmdline).needs_ports(),
        (Cf8::Auto, _) => true,
    }
}
