//! Makes every endpoint of a plan and the hierarchy that holds them.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use api::config::DiskConfig;
use devices::stub::{StubError, StubFunction};
use devices::virtio::block::{BlockError, BlockFunction, BlockSpec, SERIAL_LEN};
use pci::function::{FunctionId, Shared};
use pci::hierarchy::{BuildError, Hierarchy};
use pci::intx;
use pci::seams::MsiPort;
use pci::topology::{PlannedEndpoint, PlannedFunction, PlannedKind};
use thiserror::Error;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use crate::address_space::{AddressSpace, BusMaster};
use crate::effects::{DmaDomain, Endpoint};
use crate::kvm::{GsiTable, SharedIntx, SignalMsi, Vm};
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
    pub domain: Option<Box<dyn DmaDomain>>,
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
    _routes: &GsiTable,
) -> Result<Made, EndpointError> {
    let msi: Arc<dyn MsiPort> = Arc::new(SignalMsi(vm.fd()));
    let mut maker = Maker {
        spec,
        ram: GuestMemoryAtomic::new(ram.clone()),
        space,
        msi: Arc::clone(&msi),
        vm,
        wires: BTreeMap::new(),
        endpoints: BTreeMap::new(),
    };
    let hierarchy = Hierarchy::build(&plan.pci, &msi, |planned| maker.function(planned)).map_err(Box::new)?;
    Ok(Made { hierarchy, endpoints: maker.endpoints, wires: maker.wires.into_values().collect(), domain: None })
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
            spec::Endpoint::Vfio { .. } => return Err(FunctionError::Unknown),
        };
        self.register(planned, numbers, &function, bus_master, false);
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

    fn disk(&self, name: &str, disk: &DiskConfig) -> Result<BlockFunction, FunctionError> {
        let file = OpenOptions::new().read(true).write(!disk.readonly).open(&disk.path);
        let file = file.map_err(|source| FunctionError::Disk { path: disk.path.clone(), readonly: disk.readonly, source })?;
        let serial = disk.serial.clone().unwrap_or_else(|| name.chars().take(SERIAL_LEN).collect());
        let spec = BlockSpec { file, readonly: disk.readonly, serial };
        Ok(BlockFunction::new(name, spec, self.ram.clone(), Arc::clone(&self.msi))?)
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
    /// A disk.
    #[error(transparent)]
    Block(#[from] BlockError),
}
