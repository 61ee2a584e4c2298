//! Turns a configuration into a checked topology and, by name, what each endpoint of it is. Pure: the host has been looked
//! at before.

pub mod beside;
mod links;
pub(crate) mod peers;
mod translate;
mod virtio;

use std::collections::{BTreeMap, BTreeSet};

use api::config::{
    Attach, ColdPlugPort, DeviceConfig, DeviceKind, GpuOrder as GpuOrderConfig, HostPorts, NumaConfig, PcieConfig,
    TopologyConfig, TopologyPolicy, VirtioPlace, VmConfig,
};
use arch::x86_64::processors::{Processors, ProcessorsError};
use devices::stub::StubSpec;
use devices::vfio::Placement;
use devices::watchdog;
use pci::address::HostBdf;
use pci::caps::clique::{self, Clique, CliqueError};
use pci::emulated::Attachment;
use pci::link::LinkError;
use pci::topology::{EndpointSpec, Name, NodeKind, NodeSpec, Place, PlannedFunction, PortKind, RootComplexSpec, Topology};
use thiserror::Error;

use crate::budget::{self, BudgetError};
use crate::cliques;
use crate::cmdline;
use crate::cold_plug::{self, ColdPlugError, Loose, Own};
use crate::effects::BarAccess;
use crate::host::tree::HostTree;
use crate::numa::{self, GuestNuma, Near, NumaError, Roots};
use crate::processors;
use crate::replicate::{GpuOrder, HostRoot, ReplicaError, Requested, Wishes, replicate};
use crate::resize::Room;

pub use beside::BesideError;
use links::Known;
use translate::{port_spec, stand_in, stub_spec};
use virtio::memory_devices;
pub use virtio::{Virtio, devices};

/// What the host has for this guest.
#[derive(Debug, Clone, Default)]
pub struct Host {
    /// The wanted devices and what is above them.
    pub tree: HostTree,
    /// The wanted devices' addresses, by the name that [`names`] gives them.
    pub wanted: BTreeMap<String, HostBdf>,
    /// What the planner must know of each.
    pub endpoints: BTreeMap<HostBdf, EndpointSpec>,
    /// Whether stubs stand for the devices, since the host is data.
    pub emulated: bool,
}

impl Host {
    /// How wide addresses are that the IOMMU translates for all wanted devices, where that is known.
    #[must_use]
    pub fn iommu_bits(&self) -> Option<u8> {
        self.wanted.values().filter_map(|at| self.tree.get(*at)?.fabric.iommu_bits).min()
    }
}

/// What an endpoint is.
#[derive(Debug, Clone)]
pub enum Endpoint {
    /// Emulated, for tests and demonstrations.
    Stub(StubSpec),
    /// A virtio device.
    Virtio(Virtio),
    /// A watchdog.
    Watchdog,
    /// A function of the host.
    Vfio {
        /// Which.
        at: HostBdf,
        /// Clique that it shows.
        clique: Option<Clique>,
        /// Whether the clique is for any device.
        clique_any_vendor: bool,
    },
}

impl Endpoint {
    /// Whether it can leave a machine that runs: disks, interfaces, folders, sockets, and devices that a user gave. What
    /// the machine itself works with stays.
    #[must_use]
    pub const fn can_leave(&self) -> bool {
        match self {
            Self::Stub(_) | Self::Vfio { .. } => true,
            Self::Virtio(Virtio::Disk(_) | Virtio::Vsock(_) | Virtio::Net(_) | Virtio::Folder(_)) => true,
            Self::Virtio(Virtio::Rng(_) | Virtio::Console(_) | Virtio::Balloon(_) | Virtio::Memory { .. }) | Self::Watchdog => {
                false
            }
        }
    }

    /// As it is where a device that comes is put.
    #[must_use]
    pub fn placed(&self, placement: Placement) -> Self {
        let mut placed = self.clone();
        if let Self::Stub(stub) = &mut placed {
            // Virtual ones are beyond device 0.
            stub.ari |= stub.sriov.is_some();
            stub.on = match placement {
                Placement::BelowPort(link) if stub.follows => Attachment::Link(link),
                Placement::BelowPort(_) => stub.on,
                Placement::RootBus => Attachment::RootBus,
                Placement::Conventional => Attachment::Conventional,
            };
        }
        placed
    }
}

/// A topology and its endpoints.
#[derive(Debug, Clone, Default)]
pub struct Spec {
    /// Names and nesting.
    pub topology: Topology,
    /// What each endpoint is.
    pub endpoints: BTreeMap<Name, Endpoint>,
    /// Who reaches the BARs of those where it is not everybody.
    pub access: BTreeMap<Name, BarAccess>,
    /// The host functions that ports and endpoints stand for, where they stand for one.
    pub stands_for: BTreeMap<Name, HostBdf>,
    /// The root complexes of the host that those of the guest stand for, where they stand for one.
    pub host_roots: BTreeMap<Name, HostRoot>,
    /// Hot-plug ports that stand for one of the host which has a device below.
    pub homes: BTreeSet<Name>,
    /// The functions of a host that is data for which stubs stand.
    pub stand_ins: BTreeMap<Name, HostBdf>,
    /// Memory nodes, if the guest is to know of any.
    pub numa: Option<GuestNuma>,
    /// Processors, those that may come later among them.
    pub processors: Processors,
    /// How wide addresses are that the IOMMU translates for all functions of the host, where that is known.
    pub iommu_bits: Option<u8>,
    /// What a user should know and did not ask for.
    pub notes: Vec<String>,
    /// What is as usual, and to be known when it is looked for.
    pub remarks: Vec<String>,
}

/// The devices of a configuration with their names, those of the topology file first. Unnamed ones are called `vfio0`,
/// `stub0`, ... by their place in the list.
#[must_use]
pub fn names(config: &VmConfig) -> Vec<(String, &DeviceConfig)> {
    let in_file = config.topology.iter().flat_map(|file| &file.devices);
    let devices = in_file.chain(&config.devices).enumerate();
    devices
        .map(|(index, device)| {
            let kind = if matches!(device.kind, DeviceKind::Vfio(_)) { "vfio" } else { "stub" };
            (device.id.clone().unwrap_or_else(|| format!("{kind}{index}")), device)
        })
        .collect()
}

/// Makes the specification.
pub fn spec(config: &VmConfig, host: &Host) -> Result<Spec, SpecError> {
    beside::check(config)?;
    let mut spec = Spec { iommu_bits: host.iommu_bits(), ..Spec::default() };
    let file = config.topology.as_ref();
    if file.is_some() && config.pcie.topology == TopologyPolicy::Host {
        return Err(SpecError::FileAndHost);
    }
    if config.pcie.host_ports != HostPorts::Used && config.pcie.topology != TopologyPolicy::Host {
        return Err(SpecError::HostPorts { host_ports: config.pcie.host_ports, topology: config.pcie.topology });
    }
    budget::check(&config.pcie)?;
    let cold = cold_port(&config.pcie)?;
    let named = names(config);
    let mut before = BTreeSet::new();
    if let Some((name, _)) = named.iter().find(|(name, _)| !before.insert(name)) {
        return Err(SpecError::SameName { name: name.clone() });
    }
    let mut automatic = peers::automatic(config, &named, host)?;
    spec.notes.append(&mut automatic.notes);
    let mut functions = Vec::new();
    for (name, device) in &named {
        functions.push((Name(name.clone()), *device, spec.endpoint(name, device, automatic.of(name), host)?));
    }
    let (mut free, mut known) = (Vec::new(), Known::default());
    if let Some(file) = file {
        budget::check_file(&config.pcie, file)?;
        spec.add_file(file, &config.pcie, &mut known)?;
    }
    for (name, device, endpoint) in functions {
        if let Some(link) = links::of(spec.endpoints.get(&name), &name, device, host) {
            known.device(name.clone(), link);
        }
        let node = |on: &str| NodeSpec {
            name: name.clone(),
            on: Name::from(on),
            place: Place { device: device.device, function: device.function },
            kind: NodeKind::Endpoint(endpoint.clone()),
        };
        match &device.on {
            Some(on) => spec.topology.nodes.push(node(on)),
            None => free.push((name, device, endpoint)),
        }
    }
    spec.place(free, config, cold, host, &mut known)?;
    known.join(&mut spec.topology, &mut spec.endpoints);
    spec.topology.spare_numbers = config.pcie.bus0_free.unwrap_or(0);
    spec.numa = numa::resolve(config, host)?;
    let own = own_devices(config, spec.numa.as_ref().map_or(1, |numa| numa.nodes.len()));
    spec.add_own(own, config.pcie.virtio);
    spec.attach_stubs()?;
    spec.place_in_nodes(config, host)?;
    let nodes = spec.numa.as_ref().filter(|_| roots(config) == Roots::MayBeAdded).map_or(0, |numa| numa.nodes.len());
    budget::spread(&mut spec.topology, &config.pcie, nodes);
    let warnings = peers::warnings(config, &spec, host);
    spec.notes.extend(warnings);
    spec.notes.extend(cmdline::notes(config));
    spec.remarks.extend(Room::note(config, spec.numa.as_ref()));
    Ok(spec)
}

/// virtio devices, memory among them, then the watchdog: function 0 of a device each.
fn own_devices(config: &VmConfig, nodes: usize) -> Vec<(Name, Endpoint, EndpointSpec)> {
    let virtio = devices(config).into_iter().chain(memory_devices(config, nodes));
    let virtio = virtio.map(|(name, device)| (name, Endpoint::Virtio(device.clone()), device.endpoint()));
    let planned = EndpointSpec { ids: watchdog::IDS, bars: watchdog::bars(), interrupt_pin: 0, rom: None, sriov: None };
    let watchdog = config.watchdog.then(|| (Name::from("watchdog0"), Endpoint::Watchdog, planned));
    virtio.chain(watchdog).collect()
}

/// What the only device of `config` is, and what must be planned for it. It shows the clique `automatic` if it is given none.
pub fn single(config: &VmConfig, host: &Host, automatic: Option<Clique>) -> Result<(Endpoint, EndpointSpec), SpecError> {
    let mut alone = Spec::default();
    let mut made = None;
    for (name, device) in names(config) {
        let planned = alone.endpoint(&name, device, automatic, host)?;
        made = alone.endpoints.remove(&Name(name)).map(|endpoint| (endpoint, planned));
    }
    made.ok_or_else(|| SpecError::Unknown { path: String::new() })
}

impl Spec {
    /// What trees say of a function beside its name and ids.
    #[must_use]
    pub fn label(&self, function: &PlannedFunction) -> String {
        match self.endpoints.get(&function.name) {
            Some(Endpoint::Stub(StubSpec { clique: Some(clique), .. }) | Endpoint::Vfio { clique: Some(clique), .. }) => {
                format!("clique {}", clique.id())
            }
            Some(Endpoint::Virtio(device)) => device.label(),
            _ => String::new(),
        }
    }

    /// Records what a device is and returns what the planner must know.
    fn endpoint(
        &mut self,
        name: &str,
        device: &DeviceConfig,
        automatic: Option<Clique>,
        host: &Host,
    ) -> Result<EndpointSpec, SpecError> {
        let in_clique = |source| SpecError::Clique { name: name.to_owned(), source };
        let clique = device.clique.map(|id| Clique::new(id.get())).transpose().map_err(in_clique)?.or(automatic);
        let (endpoint, planned) = match &device.kind {
            DeviceKind::Stub(stub) => {
                let stub = stub_spec(stub, clique, device.clique_any_vendor)
                    .map_err(|source| SpecError::Link { name: name.to_owned(), source })?;
                let bad = |source| SpecError::Stub { name: name.to_owned(), source: Box::new(source) };
                stub.layout().map_err(bad)?;
                let planned = stub.planned();
                (Endpoint::Stub(stub), planned)
            }
            DeviceKind::Cdi(name) => return Err(SpecError::CdiName { name: name.to_string() }),
            DeviceKind::Vfio(vfio) => {
                let found = host.wanted.get(name).and_then(|at| Some((*at, host.endpoints.get(at)?.clone())));
                let (at, planned) = found.ok_or_else(|| SpecError::Unknown { path: vfio.path.display().to_string() })?;
                if clique.is_some() {
                    clique::check(&planned.ids, device.clique_any_vendor).map_err(in_clique)?;
                }
                match host.tree.get(at).filter(|_| host.emulated) {
                    Some(node) => {
                        self.stand_ins.insert(Name(name.to_owned()), at);
                        let stub = stand_in(node, clique, device.clique_any_vendor);
                        let planned = EndpointSpec { interrupt_pin: stub.interrupt_pin(), ..planned };
                        (Endpoint::Stub(stub), planned)
                    }
                    None => (Endpoint::Vfio { at, clique, clique_any_vendor: device.clique_any_vendor }, planned),
                }
            }
        };
        if BarAccess::of(device) != BarAccess::default() {
            self.access.insert(Name(name.to_owned()), BarAccess::of(device));
        }
        self.endpoints.insert(Name(name.to_owned()), endpoint);
        Ok(planned)
    }

    fn add_file(&mut self, file: &TopologyConfig, pcie: &PcieConfig, known: &mut Known) -> Result<(), SpecError> {
        for root in &file.root_complexes {
            self.topology.root_complexes.push(RootComplexSpec {
                name: Name(root.name.clone()),
                segment: root.segment,
                node: root.node,
                first_bus: root.bus,
            });
        }
        for port in &file.ports {
            let kind = NodeKind::Port(port_spec(port, pcie)?);
            if port.link.is_some() {
                known.port(Name(port.name.clone()));
            }
            self.topology.nodes.push(NodeSpec {
                name: Name(port.name.clone()),
                on: Name(port.on.clone()),
                place: Place { device: port.device, function: port.function },
                kind,
            });
        }
        Ok(())
    }

    /// Places the devices that no file places, and the ports that are asked for beside.
    fn place(
        &mut self,
        devices: Vec<(Name, &DeviceConfig, EndpointSpec)>,
        config: &VmConfig,
        cold: ColdPlugPort,
        host: &Host,
        known: &mut Known,
    ) -> Result<(), SpecError> {
        let (mut requested, mut others) = (Vec::new(), Vec::new());
        for (name, device, endpoint) in devices {
            match host.wanted.get(&name.0) {
                Some(at) if config.pcie.topology == TopologyPolicy::Host && device.attach != Some(Attach::Pci) => {
                    requested.push(Requested { name, at: *at, endpoint });
                }
                _ => others.push((name, device, endpoint)),
            }
        }
        let pcie = &config.pcie;
        let may_come = pcie.topology == TopologyPolicy::Host && pcie.host_ports == HostPorts::All;
        if !requested.is_empty() || may_come {
            let replica = replicate(&host.tree, &requested, &wishes(config))?;
            self.topology.root_complexes.extend(replica.topology.root_complexes);
            replica.topology.nodes.iter().for_each(|node| known.port(node.name.clone()));
            self.topology.nodes.extend(replica.topology.nodes);
            self.stands_for.extend(replica.stands_for);
            self.notes.extend(replica.notes.iter().map(ToString::to_string));
            self.host_roots = replica.host_roots;
            self.homes = replica.homes;
        }
        let host_roots = self.host_roots.clone();
        let root = self.root();
        let mut loose = Vec::new();
        for (name, device, endpoint) in others {
            let node = host.wanted.get(&name.0).and_then(|at| host.tree.get(*at));
            let above = node.map(|node| host.tree.above(node)).unwrap_or_default();
            let own_root = node.and_then(|node| {
                let name = host.tree.root_complex(node)?;
                host_roots.iter().find(|(_, root)| root.name == name).map(|(root, _)| root)
            });
            loose.push(Loose {
                link: links::of(self.endpoints.get(&name), &name, device, host),
                // A virtual function is a device by itself.
                host: node.filter(|node| node.physical_function.is_none()).map(|node| node.at),
                name,
                endpoint,
                atomic_completers: above.first().map_or(0, |port| port.atomic_completers),
                device: device.device,
                function: device.function,
                port: match (device.attach, cold) {
                    (Some(Attach::Pci), _) => ColdPlugPort::BridgePort,
                    (Some(Attach::Pcie), ColdPlugPort::BridgePort) => ColdPlugPort::RootPort,
                    _ => cold,
                },
                root: own_root.unwrap_or(&root).clone(),
            });
        }
        self.notes.extend(cold_plug::place(&mut self.topology, &root, &config.pcie, loose)?);
        Ok(())
    }

    fn first_root(&self) -> Option<&Name> {
        self.topology.root_complexes.first().map(|root| &root.name)
    }

    /// The first root complex; makes one when there is none.
    fn root(&mut self) -> Name {
        if self.topology.root_complexes.is_empty() {
            let root = RootComplexSpec { name: Name::from("rc0"), segment: 0, node: None, first_bus: None };
            self.topology.root_complexes.push(root);
        }
        self.first_root().cloned().unwrap_or_else(|| Name::from("rc0"))
    }

    /// Banyan's own devices come first on the root bus, in their order; virtio ones on ports of their own, if so wished.
    fn add_own(&mut self, devices: Vec<(Name, Endpoint, EndpointSpec)>, place: VirtioPlace) {
        let root = self.root();
        let mut own = Vec::new();
        for (name, device, endpoint) in devices {
            let on_port = place == VirtioPlace::Ports && matches!(device, Endpoint::Virtio(_));
            own.push(Own { name: name.clone(), endpoint, on_port });
            self.endpoints.insert(name, device);
        }
        cold_plug::place_own(&mut self.topology, &root, own);
    }

    /// What stubs show of their place: a link below a port, none on a root bus, nothing of PCI Express on a conventional bus.
    /// Virtual functions are for the first of these.
    fn attach_stubs(&mut self) -> Result<(), SpecError> {
        let kinds: BTreeMap<&Name, PortKind> = self
            .topology
            .nodes
            .iter()
            .filter_map(|node| if let NodeKind::Port(port) = &node.kind { Some((&node.name, port.kind)) } else { None })
            .collect();
        // Functions beyond 7, and virtual ones, need all functions of their device to take part.
        let needs_ari = |node: &&NodeSpec| match &node.kind {
            NodeKind::Endpoint(endpoint) => node.place.function > 7 || endpoint.sriov.is_some(),
            NodeKind::Port(_) => false,
        };
        let with_ari: BTreeSet<&Name> = self.topology.nodes.iter().filter(needs_ari).map(|node| &node.on).collect();
        for node in &self.topology.nodes {
            let Some(Endpoint::Stub(stub)) = self.endpoints.get_mut(&node.name) else { continue };
            let above = kinds.get(&node.on);
            if stub.sriov.is_some() && matches!(above, None | Some(PortKind::PciBridge)) {
                return Err(SpecError::VirtualFunctions { name: node.name.clone(), on: node.on.clone() });
            }
            match above {
                Some(PortKind::PciBridge) => stub.on = Attachment::Conventional,
                Some(_) => stub.ari = with_ari.contains(&node.on),
                None => stub.on = Attachment::RootBus,
            }
        }
        Ok(())
    }

    /// Memory nodes and processors; root complexes get the nodes of their devices.
    fn place_in_nodes(&mut self, config: &VmConfig, host: &Host) -> Result<(), SpecError> {
        self.processors = processors::processors(config, self.numa.as_ref())?;
        match &self.numa {
            Some(numa) => {
                let devices = host.wanted.iter().map(|(name, at)| (Name(name.clone()), *at));
                let near = Near { devices: &devices.collect(), roots: &self.host_roots };
                let notes = numa::place_roots(&mut self.topology, numa, &host.tree, &near, roots(config))?;
                self.notes.extend(notes);
                // This host gives none of what one that is data would.
                let nodes = self.numa.iter_mut().flat_map(|numa| &mut numa.nodes);
                nodes.filter(|_| host.emulated).for_each(|node| node.host = None);
            }
            None if config.numa != NumaConfig::Off => {
                self.notes.push("--numa host: no device tells its memory node, so the guest gets none".to_owned());
            }
            None => self.notes.extend(numa::gaps(&self.topology)),
        }
        Ok(())
    }
}

/// Whether somebody says which root complexes there are.
fn roots(config: &VmConfig) -> Roots {
    match (&config.topology, config.pcie.topology) {
        (None, TopologyPolicy::RootPorts | TopologyPolicy::Switch | TopologyPolicy::Flat) => Roots::MayBeAdded,
        _ => Roots::AreGiven,
    }
}

/// What devices hang on where neither file nor flag says it.
fn cold_port(config: &PcieConfig) -> Result<ColdPlugPort, SpecError> {
    let by_topology = match config.topology {
        TopologyPolicy::RootPorts | TopologyPolicy::Host => None,
        TopologyPolicy::Switch => Some(ColdPlugPort::SwitchPort),
        TopologyPolicy::Flat => Some(ColdPlugPort::NoPort),
    };
    match (by_topology, config.cold_plug) {
        (Some(one), Some(other)) if one != other => Err(SpecError::TwoPlaces { topology: config.topology, cold_plug: other }),
        (one, other) => Ok(one.or(other).unwrap_or(ColdPlugPort::RootPort)),
    }
}

fn wishes(config: &VmConfig) -> Wishes {
    Wishes {
        order: match config.pcie.gpu_order {
            GpuOrderConfig::Request => GpuOrder::Request,
            GpuOrderConfig::Topology => GpuOrder::Topology,
        },
        leave_nodes: config.numa != NumaConfig::Off,
        host_ports: config.pcie.host_ports,
        hot_plug: budget::hot_plug(&config.pcie),
    }
}

/// A configuration that makes no machine.
#[derive(Debug, Error)]
pub enum SpecError {
    /// Virtio devices.
    #[error(transparent)]
    Beside(#[from] BesideError),
    /// Memory nodes.
    #[error(transparent)]
    Numa(#[from] NumaError),
    /// Processors.
    #[error(transparent)]
    Processors(#[from] ProcessorsError),
    /// Two sources for one thing.
    #[error("--topology gives the hierarchy and --pcie topology=host asks for the host's: leave one of them out")]
    FileAndHost,
    /// Copies of ports where nothing is copied.
    #[error(
        "--pcie host-ports={host_ports} is for topology=host, and topology={topology} copies no ports of the host: leave it out"
    )]
    HostPorts {
        /// Which ports.
        host_ports: HostPorts,
        /// Asked for beside.
        topology: TopologyPolicy,
    },
    /// Two answers to one question.
    #[error("--pcie topology={topology} and cold-plug={cold_plug} say different things of where devices hang: leave one out")]
    TwoPlaces {
        /// One.
        topology: TopologyPolicy,
        /// The other.
        cold_plug: ColdPlugPort,
    },
    /// Bridges for devices that come.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// A place that a device cannot have.
    #[error(transparent)]
    ColdPlug(#[from] ColdPlugError),
    /// One name for two devices.
    #[error("two devices are named `{name}`: give another id, or remove the one that is there first")]
    SameName {
        /// The name.
        name: String,
    },
    /// A clique that the device cannot show.
    #[error("device {name}")]
    Clique {
        /// The device.
        name: String,
        /// Why.
        #[source]
        source: CliqueError,
    },
    /// Cliques that the host's topology asks for and the capability has no room for.
    #[error(transparent)]
    Cliques(#[from] cliques::CliqueError),
    /// No link.
    #[error("link of {name}")]
    Link {
        /// Device or port.
        name: String,
        /// Why.
        #[source]
        source: LinkError,
    },
    /// An impossible stub.
    #[error("stub {name}")]
    Stub {
        /// The device.
        name: String,
        /// Why.
        #[source]
        source: Box<devices::stub::SpecError>,
    },
    /// Virtual functions that no guest could enable.
    #[error(
        "virtual functions of {name} could not be enabled on the bus of {on}: put it below a root port or a downstream port (`on=`), or leave out `vfs`"
    )]
    VirtualFunctions {
        /// The device.
        name: Name,
        /// The root complex or bridge.
        on: Name,
    },
    /// A name that nobody has looked up.
    #[error("{name} is a name from CDI files, which `banyan run` reads and this command does not; give the device's address")]
    CdiName {
        /// The name.
        name: String,
    },
    /// Devices that a copy of the host cannot have so.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The host was not asked about the device.
    #[error("device {path} was not looked at on this host")]
    Unknown {
        /// As given.
        path: String,
    },
}
