//! Makes every endpoint of a plan and the hierarchy that holds them.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use api::config::DiskConfig;
use devices::stub::{StubError, StubFunction};
use devices::vfio::iommu::DomainError;
use devices::vfio::{Domain, Hardware, HostFunction, Placement, VfioError, VfioFunction, VfioOptions};
use devices::virtio::block::{BlockError, BlockFunction, BlockSpec, SERIAL_LEN};
use pci::address::HostBdf;
use pci::function::{FunctionId, Shared};
use pci::hierarchy::{BuildError, Hierarchy};
use pci::intx;
use pci::seams::MsiPort;
use pci::topology::{Parent, Plan, PlannedEndpoint, PlannedFunction, PlannedKind};
use thiserror::Error;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use crate::address_space::{AddressSpace, BusMaster};
use crate::effects::Endpoint;
use crate::host;
use crate::kvm::{GsiTable, KvmError, SharedIntx, SignalMsi, Vm};
use crate::memory;
use crate::plan::MachinePlan;
use crate::spec::{self, Spec};

/// The endpoints of a machine.
pub struct Made {
    /// The tree that holds them, programmed as planned.
    pub hierarchy: Hierarchy,
    /// What effects need to know.
    pub endpoints: BTreeMap<FunctionId, Endpoint>,
    /// INTx wires that are in use.
    pub wires: Vec<Arc<SharedIntx>>,
    /// DMA maps, if a host function is among them.
    pub domain: Option<Arc<Domain>>,
}

/// Whether any endpoint is a function of the host.
#[must_use]
pub fn passes_through(spec: &Spec) -> bool {
    spec.endpoints.values().any(|endpoint| matches!(endpoint, spec::Endpoint::Vfio { .. }))
}

struct Maker<'a> {
    spec: &'a Spec,
    ram: GuestMemoryAtomic<GuestMemoryMmap>,
    space: &'a Arc<AddressSpace>,
    msi: Arc<dyn MsiPort>,
    vm: &'a Vm,
    routes: &'a GsiTable,
    plan: &'a Plan,
    domain: Option<Arc<Domain>>,
    wires: BTreeMap<u32, Arc<SharedIntx>>,
    endpoints: BTreeMap<FunctionId, Endpoint>,
}

/// Makes all of `plan`'s functions.
pub fn make(
    vm: &Vm,
    spec: &Spec,
    plan: &MachinePlan,
    ram: &GuestMemoryMmap,
    space: &Arc<AddressSpace>,
    routes: &GsiTable,
) -> Result<Made, EndpointError> {
    let msi: Arc<dyn MsiPort> = Arc::new(SignalMsi(vm.fd()));
    let domain = if passes_through(spec) { Some(Arc::new(Domain::new(Some(vm.create_vfio_device()?))?)) } else { None };
    let mut maker = Maker {
        spec,
        ram: GuestMemoryAtomic::new(ram.clone()),
        space,
        msi: Arc::clone(&msi),
        vm,
        routes,
        plan: &plan.pci,
        domain: domain.clone(),
        wires: BTreeMap::new(),
        endpoints: BTreeMap::new(),
    };
    let hierarchy = Hierarchy::build(&plan.pci, &msi, |planned| maker.function(planned)).map_err(Box::new)?;
    Ok(Made { hierarchy, endpoints: maker.endpoints, wires: maker.wires.into_values().collect(), domain })
}

impl Maker<'_> {
    fn function(&mut self, planned: &PlannedFunction) -> Result<Shared, FunctionError> {
        let (Some(endpoint), PlannedKind::Endpoint(numbers)) = (self.spec.endpoints.get(&planned.name), &planned.kind) else {
            return Err(FunctionError::Unknown);
        };
        let bus_master = Arc::new(AtomicBool::new(false));
        let function: Shared = match endpoint {
            spec::Endpoint::Stub(stub) => {
                let dma = Arc::new(BusMaster::new(Arc::clone(self.space), Arc::clone(&bus_master)));
                let line = self.wire(numbers).map(|wire| wire.line());
                Arc::new(Mutex::new(StubFunction::new(&planned.name.0, stub, Arc::clone(&self.msi), line, dma)?))
            }
            spec::Endpoint::Disk(disk) => Arc::new(Mutex::new(self.disk(&planned.name.0, disk)?)),
            spec::Endpoint::Vfio { at, clique, clique_any_vendor } => {
                let options =
                    VfioOptions { clique: *clique, clique_any_vendor: *clique_any_vendor, placement: self.placement(planned) };
                Arc::new(Mutex::new(self.host_function(planned, numbers, *at, &options)?))
            }
        };
        let hardware = matches!(endpoint, spec::Endpoint::Vfio { .. });
        self.register(planned, numbers, &function, bus_master, hardware);
        Ok(function)
    }

    fn register(
        &mut self,
        planned: &PlannedFunction,
        numbers: &PlannedEndpoint,
        function: &Shared,
        bus_master: Arc<AtomicBool>,
        hardware: bool,
    ) {
        let made = function.lock().unwrap_or_else(PoisonError::into_inner);
        let bars =
            (0u8..).zip(&numbers.spec.bars).filter_map(|(bar, spec)| Some((bar, (spec.as_ref()?.size, made.bar_layout(bar)))));
        let bars = bars.collect();
        drop(made);
        let name = planned.name.to_string();
        self.endpoints.insert(planned.id, Endpoint { name, function: Arc::clone(function), bus_master, hardware, bars });
    }

    fn wire(&mut self, numbers: &PlannedEndpoint) -> Option<&Arc<SharedIntx>> {
        let gsi = intx::gsi(numbers.intx?);
        Some(self.wires.entry(gsi).or_insert_with(|| SharedIntx::new(self.vm.fd(), gsi)))
    }

    fn host_function(
        &mut self,
        planned: &PlannedFunction,
        numbers: &PlannedEndpoint,
        at: HostBdf,
        options: &VfioOptions,
    ) -> Result<VfioFunction<Hardware>, FunctionError> {
        let domain = self.domain.as_ref().ok_or(FunctionError::Unknown)?;
        let path = host::scan::directory(Path::new(host::SYSFS), at);
        let host = HostFunction::open(&planned.name.0, &path, domain)?;
        if host.bars() != numbers.spec.bars {
            return Err(FunctionError::Changed { at });
        }
        let events = self.wire(numbers).map(SharedIntx::events).transpose().map_err(FunctionError::Event)?;
        Ok(VfioFunction::new(host, options, Arc::new(self.routes.clone()), events, planned.id)?)
    }

    /// Where the guest finds a function: below a port, with that port's link, or on a root bus.
    fn placement(&self, planned: &PlannedFunction) -> Placement {
        let port = match planned.on {
            Parent::Port(id) => self.plan.functions.iter().find(|function| function.id == id),
            Parent::RootComplex(_) => None,
        };
        match port.map(|port| &port.kind) {
            Some(PlannedKind::Port(port)) => Placement::BelowPort(port.spec.link),
            _ => Placement::RootBus,
        }
    }

    fn disk(&self, name: &str, disk: &DiskConfig) -> Result<BlockFunction, FunctionError> {
        let file = OpenOptions::new().read(true).write(!disk.readonly).open(&disk.path);
        let file = file.map_err(|source| FunctionError::Disk { path: disk.path.clone(), readonly: disk.readonly, source })?;
        let serial = disk.serial.clone().unwrap_or_else(|| name.chars().take(SERIAL_LEN).collect());
        let spec = BlockSpec { file, readonly: disk.readonly, serial };
        Ok(BlockFunction::new(name, spec, self.ram.clone(), Arc::clone(&self.msi))?)
    }
}

/// Lets passed-through devices reach all of RAM. Open them before.
pub fn map_ram(domain: &Domain, ram: &GuestMemoryMmap) -> Result<(), EndpointError> {
    for region in memory::regions(ram) {
        // SAFETY: the machine keeps RAM mapped until its DMA domain has ended.
        unsafe { domain.map(region.at, region.len, region.host, "RAM") }.map_err(EndpointError::Ram)?;
    }
    Ok(())
}

/// Endpoints that cannot be made.
#[derive(Debug, Error)]
pub enum EndpointError {
    /// The DMA domain.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// KVM's side of it.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// RAM cannot be mapped for DMA.
    #[error("cannot let the passed-through devices reach RAM")]
    Ram(#[source] DomainError),
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
    /// A disk image.
    #[error("cannot open the disk {}{}", path.display(), if *readonly { "" } else { " for writing: add readonly=on, or allow it" })]
    Disk {
        /// The image.
        path: PathBuf,
        /// How it was to be opened.
        readonly: bool,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A host function.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// VFIO shows other BARs than sysfs did when the machine was planned.
    #[error("the BARs of {at} changed while the machine was planned: start again")]
    Changed {
        /// The function.
        at: HostBdf,
    },
    /// Event descriptors of its interrupt wire.
    #[error("cannot make an event descriptor: the limit of open files is reached (ulimit -n)")]
    Event(#[source] io::Error),
    /// A disk.
    #[error(transparent)]
    Block(#[from] BlockError),
}
