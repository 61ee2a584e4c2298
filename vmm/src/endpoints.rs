//! Makes endpoints and the hierarchy that holds them, at the start of a machine and later.

mod reach;
mod virtio;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use api::error::ErrorKind;
use devices::complaints::{FailureSink, Listener};
use devices::legacy::ConsoleSink;
use devices::stub::{StubError, StubFunction};
use devices::vfio::iommu::DomainError;
use devices::vfio::{Domain, Hardware, HostFunction, Placement, VfioError, VfioFunction, VfioOptions};
use devices::virtio::balloon::BalloonControl;
use devices::virtio::net::NetError;
use devices::virtio::vhost_user::RemoteError;
use devices::virtio::{BlockError, Memory, VirtioError, console};
use devices::watchdog::WatchdogFunction;
use pci::address::HostBdf;
use pci::bar::{BarSpec, ROM};
use pci::emulated::EmulatedError;
use pci::function::{FunctionId, Shared};
use pci::hierarchy::{BuildError, Hierarchy, UnfinishedReset, finish_resets};
use pci::intx;
use pci::seams::MsiPort;
use pci::sync::lock;
use pci::topology::{Parent, Plan, PlannedFunction, PlannedKind, PortKind};
use thiserror::Error;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};

use crate::address_space::{AddressSpace, BusMaster};
use crate::backends::{BackendError, Backends};
use crate::effects::{BarAccess, Endpoint};
use crate::groundwork::{Functions, GroundworkError};
use crate::host;
use crate::host_signals::HostSignals;
use crate::kvm::{GsiTable, KvmError, SharedIntx, SignalMsi, Vm};
use crate::spec::{self, Spec};
use reach::DomainReach;
pub use reach::Reaching;

/// What endpoints of one machine are made with.
pub struct Factory {
    vm: Arc<Vm>,
    /// RAM as virtio devices hold it.
    memory: Memory,
    backends: Arc<Backends>,
    listeners: Listeners,
    space: Arc<AddressSpace>,
    routes: GsiTable,
    msi: Arc<dyn MsiPort>,
    domain: Option<Arc<Domain>>,
    /// Host functions that were opened before the machine was made.
    open: BTreeMap<HostBdf, HostFunction<Hardware>>,
    wires: BTreeMap<u32, Arc<SharedIntx>>,
}

/// Who hears what devices say that is not for the guest.
pub struct Listeners {
    /// Where a virtio console prints, and what is typed into it; `None` in a machine without one.
    pub console: Option<(Arc<dyn ConsoleSink>, Arc<console::Input>)>,
    /// Called when a watchdog was not served in time.
    pub expired: Arc<dyn Fn() + Send + Sync>,
    /// What devices can no longer do.
    pub failed: FailureSink,
    /// What the host says of its functions.
    pub signals: Arc<HostSignals>,
}

/// An endpoint to make.
pub struct Order<'a> {
    /// For messages and threads.
    pub name: &'a str,
    /// Its id in the hierarchy.
    pub id: FunctionId,
    /// What it is.
    pub endpoint: &'a spec::Endpoint,
    /// Who reaches its BARs.
    pub access: BarAccess,
    /// BARs that its place was planned for.
    pub bars: [Option<BarSpec>; 6],
    /// The interrupt controller's input for its INTx pin.
    pub gsi: Option<u32>,
    /// Where it hangs.
    pub placement: Placement,
}

impl Factory {
    /// For the machine `vm` with the RAM of `space`; virtio devices use `backends`. `functions` are open and reach RAM.
    #[must_use]
    pub fn new(
        vm: Arc<Vm>,
        space: Arc<AddressSpace>,
        functions: Functions,
        backends: Arc<Backends>,
        listeners: Listeners,
    ) -> Self {
        let (memory, routes) = (space.ram().clone(), GsiTable::new(vm.fd()));
        let msi: Arc<dyn MsiPort> = Arc::new(SignalMsi(vm.fd()));
        let Functions { domain, open } = functions;
        let wires = BTreeMap::new();
        let factory = Self { vm, memory, backends, listeners, space, routes, msi, domain, open, wires };
        if let Some(domain) = &factory.domain {
            factory.pin_balloon();
            for region in factory.backends.memory_regions() {
                region.reach_from_start(Arc::new(DomainReach(Arc::clone(domain))));
            }
        }
        factory
    }

    /// Interrupt routes.
    #[must_use]
    pub const fn routes(&self) -> &GsiTable {
        &self.routes
    }

    /// Who hears what devices can no longer do.
    #[must_use]
    pub fn failed(&self) -> FailureSink {
        Arc::clone(&self.listeners.failed)
    }

    /// Who hears what the device `name` can no longer do.
    fn listener(&self, name: &str) -> Listener {
        let (failed, name) = (self.failed(), name.to_owned());
        Arc::new(move |why| failed(&name, why))
    }

    /// From here on devices of the host may write to any page: one that the guest had given back would be another page for
    /// the guest than for the device.
    fn pin_balloon(&self) {
        if let Some(balloon) = self.backends.balloon().filter(|balloon| !balloon.pinned()) {
            if balloon.wanted() > 0 {
                log::warn!("the balloon is emptied: devices of the host need all of the guest's memory in its place");
            }
            balloon.pin();
        }
    }

    /// The balloon, if there is one.
    #[must_use]
    pub fn balloon(&self) -> Option<Arc<BalloonControl>> {
        self.backends.balloon()
    }

    /// Makes all of `plan`'s functions and the tree that holds them, programmed as planned.
    pub fn build(&mut self, plan: &Plan, spec: &Spec) -> Result<(Hierarchy, BTreeMap<FunctionId, Endpoint>), EndpointError> {
        let mut endpoints = BTreeMap::new();
        let msi = Arc::clone(&self.msi);
        let hierarchy = Hierarchy::build(plan, &msi, |planned| -> Result<Shared, FunctionError> {
            let endpoint = self.planned(plan, spec, planned)?;
            let function = Arc::clone(&endpoint.function);
            endpoints.insert(planned.id, endpoint);
            Ok(function)
        });
        let hierarchy = hierarchy.map_err(Box::new)?;
        self.reset_with_their_bus(endpoints.values());
        self.connect_ports(plan, &hierarchy);
        Ok((hierarchy, endpoints))
    }

    /// Gives every port its interrupt wire, for guests that use no messages.
    fn connect_ports(&mut self, plan: &Plan, hierarchy: &Hierarchy) {
        for planned in &plan.functions {
            if let PlannedKind::Port(port) = &planned.kind
                && let Some(wire) = self.wire(port.intx.map(intx::gsi))
            {
                hierarchy.connect(planned.id, wire.line());
            }
        }
    }

    fn planned(&mut self, plan: &Plan, spec: &Spec, planned: &PlannedFunction) -> Result<Endpoint, FunctionError> {
        let (Some(endpoint), PlannedKind::Endpoint(numbers)) = (spec.endpoints.get(&planned.name), &planned.kind) else {
            return Err(FunctionError::Unknown);
        };
        self.make(&Order {
            name: &planned.name.0,
            id: planned.id,
            endpoint,
            access: spec.access.get(&planned.name).copied().unwrap_or_default(),
            bars: numbers.spec.bars,
            gsi: numbers.intx.map(intx::gsi),
            placement: placement(plan, planned),
        })
    }

    /// Makes one endpoint. A host function that is the only one lets the DMA domain reach RAM.
    pub fn make(&mut self, order: &Order<'_>) -> Result<Endpoint, FunctionError> {
        let bus_master = Arc::new(AtomicBool::new(false));
        let function: Shared = match order.endpoint {
            spec::Endpoint::Stub(stub) => {
                let dma = Arc::new(BusMaster::new(Arc::clone(&self.space), Arc::clone(&bus_master)));
                let line = self.wire(order.gsi).map(|wire| wire.line());
                Arc::new(Mutex::new(StubFunction::new(order.name, stub, Arc::clone(&self.msi), line, dma)?))
            }
            spec::Endpoint::Virtio(device) => self.virtio(order, device)?,
            spec::Endpoint::Watchdog => {
                let expired = Arc::clone(&self.listeners.expired);
                Arc::new(Mutex::new(WatchdogFunction::new(Arc::clone(&self.msi), Box::new(move || expired()))?))
            }
            spec::Endpoint::Vfio { at, clique, clique_any_vendor } => {
                let options = VfioOptions { clique: *clique, clique_any_vendor: *clique_any_vendor, placement: order.placement };
                Arc::new(Mutex::new(self.host_function(order, *at, &options)?))
            }
        };
        let made = lock(&function);
        let bars = (0u8..).zip(&order.bars);
        let mut bars: BTreeMap<_, _> =
            bars.filter_map(|(bar, spec)| Some((bar, (spec.as_ref()?.size, made.bar_layout(bar))))).collect();
        let doorbells = bars.keys().map(|bar| (*bar, made.doorbells(*bar))).collect();
        bars.extend(made.bars().spec(ROM).map(|spec| (ROM, (spec.size, made.bar_layout(ROM)))));
        drop(made);
        let hardware = matches!(order.endpoint, spec::Endpoint::Vfio { .. });
        let name = order.name.to_owned();
        Ok(Endpoint { name, function, bus_master, hardware, access: order.access, bars, doorbells })
    }

    /// What virtio devices use of the host.
    #[must_use]
    pub fn backends(&self) -> &Backends {
        &self.backends
    }

    /// The DMA domain, once a host function has been made.
    #[must_use]
    pub fn domain(&self) -> Option<Arc<Domain>> {
        self.domain.clone()
    }

    /// Lets devices of this process reach `memory`, which is RAM from now on.
    pub fn set_memory(&self, memory: GuestMemoryMmap) {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).replace(memory);
    }

    /// Connects interrupt wires of host functions. The interrupt controller must exist.
    pub fn attach_wires(&self) -> io::Result<()> {
        self.wires.values().try_for_each(|wire| wire.attach())
    }

    fn wire(&mut self, gsi: Option<u32>) -> Option<&Arc<SharedIntx>> {
        let gsi = gsi?;
        Some(self.wires.entry(gsi).or_insert_with(|| SharedIntx::new(self.vm.fd(), gsi)))
    }

    fn host_function(
        &mut self,
        order: &Order<'_>,
        at: HostBdf,
        options: &VfioOptions,
    ) -> Result<VfioFunction<Hardware>, FunctionError> {
        let host = match self.open.remove(&at) {
            Some(host) => host,
            None => self.open_late(order.name, at)?,
        };
        if host.bars() != order.bars {
            return Err(FunctionError::Changed { at });
        }
        let events = self.wire(order.gsi).map(SharedIntx::events).transpose().map_err(FunctionError::Event)?;
        let mut function = VfioFunction::new(host, options, Arc::new(self.routes.clone()), events, order.id)?;
        function.report_to(self.listener(order.name));
        function.hear(self.listeners.signals.hear(order.name, at).map_err(FunctionError::Event)?);
        Ok(function)
    }

    /// Opens a host function that nobody expected when the machine was made.
    fn open_late(&mut self, name: &str, at: HostBdf) -> Result<HostFunction<Hardware>, FunctionError> {
        let reached = self.is_reached();
        self.open_ahead(name, at)?;
        if !reached {
            let reaching = self.reaching()?;
            reaching.run(&reaching.work())?;
        }
        self.open.remove(&at).ok_or(FunctionError::Unknown)
    }

    /// Whether a function of the host that comes finds memory mapped. The kernel forgets all maps when the last one leaves.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.domain.as_ref().is_some_and(|domain| !domain.is_empty())
    }

    /// Opens a host function before it is made. If it is the first, memory is mapped by [`Factory::reaching`] first.
    pub fn open_ahead(&mut self, name: &str, at: HostBdf) -> Result<(), FunctionError> {
        let path = host::scan::directory(Path::new(host::SYSFS), at);
        let domain = match &self.domain {
            Some(domain) => Arc::clone(domain),
            None => Arc::new(Domain::new(Box::new(self.vm.vfio_groups()?))?),
        };
        self.pin_balloon();
        if domain.is_empty() {
            self.backends.memory_regions().iter().for_each(|region| region.forget_reach());
        }
        let host = HostFunction::open(name, &path, &domain)?;
        self.domain = Some(domain);
        self.open.insert(at, host);
        Ok(())
    }

    /// Has functions reset that are `made` and were not reset when they were opened: the host does it for all of a bus at once. The
    /// guest can use what is made when this returns; what is open and not made yet has been reset with it where it has to be.
    pub fn reset_with_their_bus<'a>(&self, made: impl Iterator<Item = &'a Endpoint>) {
        let made = made.filter(|endpoint| endpoint.hardware);
        finish_resets(&made.filter_map(|endpoint| UnfinishedReset::of(&endpoint.function)).collect::<Vec<_>>());
        if let Some(domain) = &self.domain {
            domain.hand_over(&self.open.keys().copied().collect());
        }
    }

    /// Closes a host function that was opened and is not made.
    pub fn close_ahead(&mut self, at: HostBdf) {
        self.open.remove(&at);
    }

    /// What lets functions of the host reach all of memory.
    pub fn reaching(&self) -> Result<Reaching, FunctionError> {
        let domain = self.domain.clone().ok_or(FunctionError::Unknown)?;
        Ok(Reaching { domain, memory: GuestMemoryMmap::clone(&self.memory.memory()), blocks: self.backends.memory_regions() })
    }
}

/// Where the guest finds a function: below a port, with that port's link, on a conventional bus, or on a root bus.
fn placement(plan: &Plan, planned: &PlannedFunction) -> Placement {
    let port = match planned.on {
        Parent::Port(id) => plan.functions.iter().find(|function| function.id == id),
        Parent::RootComplex(_) => None,
    };
    match port.map(|port| &port.kind) {
        Some(PlannedKind::Port(port)) if port.spec.kind == PortKind::PciBridge => Placement::Conventional,
        Some(PlannedKind::Port(port)) => Placement::BelowPort(port.spec.link),
        _ => Placement::RootBus,
    }
}

impl EndpointError {
    /// Whose fault it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Build(error) => match &**error {
                BuildError::Endpoint { source, .. } => source.kind(),
                BuildError::Port { .. } | BuildError::Order { .. } => ErrorKind::Internal,
            },
        }
    }
}

impl FunctionError {
    /// Whose fault it is: files, taps and servers are named by who asks for a device.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Backend(_) | Self::Block(_) | Self::Net(_) | Self::Remote(_) => ErrorKind::BadRequest,
            _ => ErrorKind::Internal,
        }
    }
}

/// Endpoints that cannot be made.
#[derive(Debug, Error)]
pub enum EndpointError {
    /// One of them, or a port.
    #[error(transparent)]
    Build(#[from] Box<BuildError<FunctionError>>),
}

/// An endpoint that cannot be made.
#[derive(Debug, Error)]
pub enum FunctionError {
    /// The plan has it and the specification does not.
    #[error("nothing is known of it")]
    Unknown,
    /// A stub.
    #[error(transparent)]
    Stub(#[from] StubError),
    /// The host's side of a virtio device.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The DMA domain.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// KVM's side of it.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// RAM cannot be mapped for DMA.
    #[error(transparent)]
    Ram(#[from] GroundworkError),
    /// A host function.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// VFIO shows other BARs than sysfs did when the machine was planned.
    #[error("the BARs of {at} changed while the machine was planned: start again")]
    Changed {
        /// The function.
        at: HostBdf,
    },
    /// Event descriptors of its interrupt wire, or for what the host says.
    #[error("cannot make an event descriptor: the limit of open files is reached (ulimit -n)")]
    Event(#[source] io::Error),
    /// A watchdog.
    #[error(transparent)]
    Watchdog(#[from] EmulatedError),
    /// A virtio function.
    #[error(transparent)]
    Function(#[from] VirtioError),
    /// What a virtio device needs.
    #[error("cannot make a virtio device: the limit of open files may be reached (ulimit -n)")]
    Virtio {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// A disk.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// A network interface.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A device that another process serves.
    #[error(transparent)]
    Remote(#[from] RemoteError),
}
