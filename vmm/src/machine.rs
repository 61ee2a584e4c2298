//! A running machine: owns everything in the order in which it must end, and builds it in the order that KVM likes.
//!
//! All memory slots are set before the interrupt controller and the vCPUs exist (see [`crate::kvm::Vm`]), so endpoints are
//! made and everything that the plan makes reachable is mapped first.

mod assembly;
mod hierarchy;
mod load;
mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::config::VmConfig;
use api::error::ErrorKind;
use api::info::Step;
use arch::memory_map::Range;
use arch::x86_64::acpi::AcpiError;
use devices::acpi::MemoryDevice;
use devices::complaints::FailureSink;
use devices::gate::{Gate, Reason};
use devices::legacy::{ConsoleSink, PanicSink, Serial};
use devices::vfio::Domain;
use devices::virtio::balloon::BalloonControl;
use devices::virtio::{Memory, console};
use kvm_bindings::CpuId;
use pci::seams::Workers;
use pci::topology::Name;
use thiserror::Error;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};

use crate::backends::Backends;
use crate::boot::{BootError, FirmwareError, KernelError};
use crate::bus_slots::BusSlots;
use crate::changes::Added;
use crate::counters::Report;
use crate::ejected::Ejected;
use crate::endpoints::{EndpointError, Factory};
use crate::groundwork::{Groundwork, GroundworkError, Preparation, Work, fixed, touch_in_background};
use crate::host::recorded::RecordedHost;
use crate::host_signals::HostSignals;
use crate::hotplug::{self, HotPlugError};
use crate::kvm::{KvmError, SlotError};
use crate::main_loop::Ending;
use crate::memory::{self, MemoryError};
use crate::mirrors::MirrorsError;
use crate::pci_bus::PciBus;
use crate::plan::MachinePlan;
use crate::ports::{self, Legacy, PortsError};
use crate::resize::Extent;
use crate::slot_events::SlotEvents;
use crate::spec::Spec;
use crate::vcpu::{Maker, SetupError, ThreadError, Threads, Vcpu, WaitingThreads};

pub use assembly::Assembly;
use hierarchy::Endpoints;
pub use load::check_payload;
use load::{Image, load};
pub use state::{RestoreError, SaveError};

/// What is made before a machine and outlives it.
pub struct Surroundings {
    /// Where the serial line's output goes.
    pub serial: Arc<dyn ConsoleSink>,
    /// Where the debug console's output goes; `None` leaves its port empty.
    pub debug_console: Option<Arc<dyn ConsoleSink>>,
    /// Where a virtio console's output goes.
    pub console: Option<Arc<dyn ConsoleSink>>,
    /// Called when a console that was full has room for input again.
    pub resume: Arc<dyn Fn() + Send + Sync>,
    /// Hears when the guest's kernel says that it panicked.
    pub panicked: PanicSink,
    /// That ends the machine.
    pub ends_at_panic: bool,
    /// Hears what devices can no longer do.
    pub failed: FailureSink,
}

/// What a machine is made of, decided before it is made.
#[derive(Clone, Copy)]
pub struct Design<'a> {
    /// As configured.
    pub config: &'a VmConfig,
    /// By name.
    pub spec: &'a Spec,
    /// By number.
    pub plan: &'a MachinePlan,
    /// What came since the first start.
    pub added: &'a [Added],
    /// Processors and memory that were added; `None` for those of the first start.
    pub extent: Option<&'a Extent>,
    /// CPUID of the host.
    pub cpuid: &'a CpuId,
    /// What virtio devices use of the host.
    pub backends: &'a Arc<Backends>,
    /// A host that is data, in place of this one.
    pub recorded: Option<&'a Arc<RecordedHost>>,
    /// The state of a machine like this one, which this one goes on with, held. RAM is as that machine left it.
    pub state: Option<&'a [u8]>,
}

/// A machine whose vCPUs run.
pub struct Machine {
    threads: Threads,
    legacy: Legacy,
    /// The virtio console, for input.
    pub console: Option<Arc<console::Input>>,
    /// Where its end is announced.
    pub ending: Arc<Ending>,
    pci: Arc<PciBus>,
    ram: Memory,
    ejected: Arc<Ejected>,
    maker: Maker,
    /// vCPUs that the guest gave back, which KVM keeps.
    parked: BTreeMap<u8, Vcpu>,
    slot_events: Arc<SlotEvents>,
    signals: Arc<HostSignals>,
    _firmware: Option<GuestMemoryMmap>,
    factory: Factory,
}

impl Machine {
    /// Builds and starts a machine on `ground`, its vCPUs on `threads` if these are there already.
    pub fn start(
        ground: Groundwork,
        threads: Option<WaitingThreads>,
        design: &Design<'_>,
        surroundings: &Surroundings,
    ) -> Result<Self, MachineError> {
        let Groundwork { vm, ram, used, functions, .. } = ground;
        let image = Image::to_load(design)?;
        let ending = Ending::new().map_err(MachineError::Event)?;
        let assembly = Assembly { vm: Arc::new(vm), design: *design, surroundings, ending };
        let mut slots = assembly.ram_slots(&ram)?;
        let firmware = image.as_ref().map(|image| image.map(&mut slots, &ram, design)).transpose()?.flatten();
        let memory = Memory::new(ram.clone());
        assembly.place_blocks(&ram, used);
        let Endpoints { space, mut factory, signals, console, slot_events, pci } =
            Endpoints::make(&assembly, memory.clone(), slots, functions)?;
        assembly.vm.create_interrupt_controller()?;
        factory.attach_wires().map_err(MachineError::Event)?;
        let bus_slots = assembly.bus_slots(&pci, &slot_events);
        let again = hotplug::newcomer::restore(&pci, &mut factory, design.added, bus_slots.as_deref());
        again.map_err(|(device, source)| MachineError::added(device, source))?;
        let extent = design.extent.cloned().unwrap_or_else(|| Extent::at_start(design.config));
        let entry = match image.filter(|_| design.state.is_none()) {
            Some(image) => load(&ram, used, image, design, &extent)?,
            None => None,
        };
        let maker = assembly.maker();
        let vcpus: Vec<Vcpu> = extent.cpus.iter().map(|id| maker.make(*id, entry.as_ref())).collect::<Result<_, _>>()?;
        let ejected = Arc::new(Ejected::new().map_err(MachineError::Event)?);
        let registers = assembly.hot_plug_registers(&extent, &ejected);
        let (ports, legacy) = ports::wire(&assembly, &pci, registers, bus_slots)?;
        let gate = Gate::default();
        if let Some(state) = design.state {
            gate.close(Reason::Pause);
            state::restore(state, &assembly.vm, &pci, &legacy, &vcpus)?;
        }
        let threads = Threads::start(vcpus, threads, &assembly.runner(ports, &pci, space, gate))?;
        Ok(Self {
            threads,
            legacy,
            console,
            ending: assembly.ending,
            pci,
            ram: memory,
            ejected,
            maker,
            parked: BTreeMap::new(),
            slot_events,
            signals,
            _firmware: firmware,
            factory,
        })
    }

    /// Ends the vCPUs and the endpoints. Returns RAM as the guest left it.
    pub fn stop(&mut self) -> GuestMemoryMmap {
        self.threads.stop();
        // Those that take long to end do so together.
        self.workers().iter().for_each(|workers| workers.call());
        self.pci.detach();
        GuestMemoryMmap::clone(&self.ram.memory())
    }

    /// Gives the guest processor `number`, which it does not have or was asked to give back.
    pub fn add_cpu(&mut self, number: u8) -> Result<(), MachineError> {
        // It may have given it back since it was asked.
        if !self.legacy.hot_plug.keep_cpu(number) {
            self.take_ejected();
            let vcpu = match self.parked.remove(&number) {
                Some(vcpu) => vcpu,
                None => {
                    let vcpu = self.maker.make(number, None)?;
                    vcpu.introduce()?;
                    vcpu
                }
            };
            self.threads.add(vcpu)?;
        }
        self.legacy.hot_plug.add_cpu(number);
        Ok(())
    }

    /// Asks the guest to give processor `number` back.
    pub fn ask_for_cpu(&self, number: u8) {
        self.legacy.hot_plug.ask_for_cpu(number);
    }

    /// Ends the threads of processors that the guest gave back.
    pub fn take_ejected(&mut self) {
        for number in self.ejected.take() {
            if let Some(vcpu) = self.threads.remove(number) {
                vcpu.rest();
                self.parked.insert(number, vcpu);
            }
        }
    }

    /// Processors that run, those that the guest was asked to give back among them.
    #[must_use]
    pub fn cpus(&self) -> BTreeSet<u8> {
        self.threads.ids()
    }

    /// Tells of processors that the guest gave back.
    #[must_use]
    pub fn ejected(&self) -> &Ejected {
        &self.ejected
    }

    /// Makes `memory` part of RAM, before servers of devices and the guest are told. Host functions that are there can reach it
    /// already.
    pub fn add_memory(&self, memory: &GuestMemoryMmap) -> Result<(), MachineError> {
        // First, so that it is kept whatever fails below: host functions may reach it by now. It is the same that `self.ram` is.
        self.factory.set_memory(memory::join(&self.ram.memory(), memory)?);
        for region in memory::regions(memory) {
            // SAFETY: it is part of RAM, which the machine keeps until its vCPUs have ended.
            self.pci.change(|tree| unsafe { tree.mapper.slots().add(region.at, region.len, region.host) })?;
        }
        Ok(())
    }

    /// Tells the guest of memory that is part of RAM.
    pub fn show_memory(&self, devices: &[MemoryDevice]) {
        for device in devices {
            self.legacy.hot_plug.add_memory(*device);
        }
    }

    /// What virtio devices use of the host.
    #[must_use]
    pub fn backends(&self) -> &Backends {
        self.factory.backends()
    }

    /// Begins to touch all of RAM, in the background. There is nothing to do if host functions reach it: it is pinned.
    pub fn touch_memory(&mut self) -> Result<Option<Preparation<()>>, GroundworkError> {
        if self.factory.is_reached() {
            return Ok(None);
        }
        let (memory, blocks) = (GuestMemoryMmap::clone(&self.ram.memory()), self.factory.backends().memory_regions());
        let blocks: Vec<Range> = blocks.iter().map(|block| Range::sized(block.region().at, block.region().len)).collect();
        let touch = move |work: &Work| touch_in_background(&fixed(&memory, &blocks), work);
        Preparation::start(Work::step(Step::Prefault, 0), touch).map(Some)
    }

    /// What host functions reach memory through, once there is one.
    #[must_use]
    pub fn domain(&self) -> Option<Arc<Domain>> {
        self.factory.domain()
    }

    /// Presses the power button.
    pub fn press_power_button(&self) {
        self.legacy.hot_plug.press_power_button();
    }

    /// Keeps the guest from running. When this returns, no vCPU runs and no emulated device touches guest memory. Functions of
    /// the host go on with what they were told.
    pub fn pause(&self) {
        self.threads.pause();
        let workers = self.workers();
        workers.iter().for_each(|workers| workers.call());
        workers.iter().for_each(|workers| workers.hold());
    }

    /// Lets the guest go on.
    pub fn resume(&self) {
        self.workers().iter().for_each(|workers| workers.release());
        self.threads.resume();
    }

    fn workers(&self) -> Vec<Arc<dyn Workers>> {
        self.pci.change(|tree| tree.hierarchy.workers())
    }

    /// Who hears what devices can no longer do.
    #[must_use]
    pub fn failed(&self) -> FailureSink {
        self.factory.failed()
    }

    /// The serial line, for input.
    #[must_use]
    pub const fn serial(&self) -> &Arc<Serial> {
        &self.legacy.serial
    }

    /// The balloon, if there is one.
    #[must_use]
    pub fn balloon(&self) -> Option<Arc<BalloonControl>> {
        self.factory.balloon()
    }

    /// RAM.
    #[must_use]
    pub fn ram(&self) -> GuestMemoryMmap {
        GuestMemoryMmap::clone(&self.ram.memory())
    }

    /// The hierarchy and what is mapped of it.
    #[must_use]
    pub fn pci(&self) -> &PciBus {
        &self.pci
    }

    /// The hierarchy, and what endpoints are made with.
    pub fn parts(&mut self) -> (&PciBus, &mut Factory) {
        (&self.pci, &mut self.factory)
    }

    /// Where devices come and go by ACPI, if they can.
    #[must_use]
    pub fn bus_slots(&self) -> Option<&Arc<BusSlots>> {
        self.legacy.bus_slots.as_ref()
    }

    /// What guests told about devices that come and go.
    #[must_use]
    pub fn slot_events(&self) -> &SlotEvents {
        &self.slot_events
    }

    /// What the host says of its functions.
    #[must_use]
    pub const fn host_signals(&self) -> &Arc<HostSignals> {
        &self.signals
    }

    /// What the guest cost, for `--counters`.
    #[must_use]
    pub fn counters(&self) -> Report {
        let mut by_device = self.backends().traffic();
        by_device.extend(self.signals.counts());
        Report::new(&self.threads, &self.pci, self.factory.routes(), by_device)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop();
    }
}

impl MachineError {
    fn added(device: &Added, source: HotPlugError) -> Self {
        let name = device.functions.first().map_or_else(|| "without functions".to_owned(), |first| first.name.to_string());
        Self::Added { name, on: device.port.clone(), source: Box::new(source) }
    }

    /// Whose fault it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Boot(_) | Self::Firmware(_) | Self::Kernel(_) | Self::NothingToRun | Self::State(_) => ErrorKind::BadRequest,
            // Whoever asked named the place, if it is of a snapshot that was edited.
            Self::Added { source, .. } => match source.for_client().kind {
                ErrorKind::Internal => ErrorKind::Internal,
                _ => ErrorKind::BadRequest,
            },
            Self::Endpoint(error) => error.kind(),
            _ => ErrorKind::Internal,
        }
    }
}

/// A machine that cannot be built.
#[derive(Debug, Error)]
pub enum MachineError {
    /// No payload.
    #[error("there is nothing to run: give --kernel FILE or --firmware FILE")]
    NothingToRun,
    /// KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// RAM.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Configuration space pages.
    #[error(transparent)]
    Mirrors(#[from] MirrorsError),
    /// Memory slots.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The kernel file.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The firmware file.
    #[error(transparent)]
    Firmware(#[from] FirmwareError),
    /// Loading.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Devices.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// Devices that came before a reset or a snapshot.
    #[error("cannot make the device {name} again, which was added at {on}")]
    Added {
        /// Its first function.
        name: String,
        /// The port or root complex.
        on: Name,
        /// Why.
        #[source]
        source: Box<HotPlugError>,
    },
    /// vCPUs.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// Threads.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// Ports.
    #[error(transparent)]
    Ports(#[from] PortsError),
    /// Event descriptors.
    #[error("cannot make an event descriptor: the limit of open files is reached (ulimit -n)")]
    Event(#[source] std::io::Error),
    /// The state of another machine.
    #[error("the machine cannot go on where the saved one was")]
    State(#[from] RestoreError),
    /// ACPI tables.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
}
