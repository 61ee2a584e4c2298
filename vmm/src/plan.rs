//! Gives every part of a machine its place: RAM, ECAM, windows, buses, BARs. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use api::config::{PcieConfig, Size};
use arch::memory_map::{AMD_HYPERTRANSPORT, MemoryMap, MemoryMapError, MemoryMapRequest, Range, SegmentBuses};
use arch::ports::SLOT_BUSES;
use arch::x86_64::acpi::{BusSlot, PrtEntry, RootBridge, SlotBus};
use pci::address::Devfn;
use pci::function::FunctionId;
use pci::topology::{
    Apertures, Parent, Plan, PlanError, PlannedFunction, PlannedKind, PlannedRootComplex, Relief, Topology, Window,
};
use thiserror::Error;

/// Functions that a device can have which comes while the guest runs.
const FUNCTIONS: usize = 8;

/// What planning depends on beside the topology.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// RAM in bytes.
    pub ram: u64,
    /// RAM that may come, in bytes.
    pub growth: u64,
    /// Guest-physical address width.
    pub address_bits: u8,
    /// Whether the host's IOMMU cannot map AMD's HyperTransport range.
    pub amd: bool,
    /// Bytes of the firmware image, 0 for none.
    pub firmware: u64,
}

/// Every number of a machine.
#[derive(Debug, Clone)]
pub struct MachinePlan {
    /// Addresses.
    pub map: MemoryMap,
    /// The hierarchy.
    pub pci: Plan,
    /// Where it has endpoints that no slot registers and no bus for those that come let leave. They are kept when such a device
    /// has left, so that what the guest was told of the others stays true.
    pub fixed: BTreeSet<(Parent, u8)>,
}

/// A bus whose devices come and go by ACPI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSlotBus {
    /// What it hangs on.
    pub on: Parent,
    /// The root complex that it is of, or below.
    pub root_complex: usize,
    /// Devices come to it; from others they leave only.
    pub hot: bool,
    /// As ACPI shows it.
    pub bus: SlotBus,
}

/// Plans a machine. Where hot-plug ports are in the way, the error says with how much less for them there is a plan.
pub fn plan(topology: &Topology, limits: &Limits) -> Result<MachinePlan, MachinePlanError> {
    attempt(topology, limits).map_err(|refused| refused.explained(topology))
}

fn attempt(topology: &Topology, limits: &Limits) -> Result<MachinePlan, Refused> {
    let mut segments: Vec<u16> = topology.root_complexes.iter().map(|root| root.segment).collect();
    segments.push(0);
    segments.sort_unstable();
    segments.dedup();
    let mut map = MemoryMap::new(&MemoryMapRequest {
        ram: limits.ram,
        hot_plug: limits.growth,
        physical_address_bits: limits.address_bits,
        reserved: if limits.amd { vec![AMD_HYPERTRANSPORT] } else { Vec::new() },
        firmware_size: limits.firmware,
        segments: segments.iter().map(|segment| SegmentBuses { segment: *segment, last_bus: u8::MAX }).collect(),
    })?;
    let window = |range: &Range| Window { base: range.start, limit: range.last() };
    let space = Apertures {
        mem32: vec![window(&map.mmio32)],
        mem64: map.mmio64.iter().map(window).collect(),
        address_bits: limits.address_bits,
    };
    let pci = topology.plan(&space).map_err(|source| Refused::Pci(Box::new((source, space))))?;
    // Guests probe every bus that is announced, so announce those that exist.
    for segment in segments {
        let buses = pci.root_complexes.iter().filter(|root| root.segment == segment).map(|root| root.buses.subordinate);
        map.trim_buses(segment, buses.max().unwrap_or(0));
    }
    let fixed = fixed(&pci);
    Ok(MachinePlan { map, pci, fixed })
}

/// A plan that there is not, before anybody has asked what would help.
enum Refused {
    Memory(MemoryMapError),
    Pci(Box<(PlanError, Apertures)>),
}

impl From<MemoryMapError> for Refused {
    fn from(error: MemoryMapError) -> Self {
        Self::Memory(error)
    }
}

impl Refused {
    fn explained(self, topology: &Topology) -> MachinePlanError {
        match self {
            Self::Memory(error) => MachinePlanError::Memory(error),
            Self::Pci(refused) => {
                let (source, space) = *refused;
                match topology.relief(&space, &source) {
                    Some(relief) => MachinePlanError::HotPlug { refused: Box::new(source), advice: Box::new(Advice(relief)) },
                    None => MachinePlanError::Pci(source),
                }
            }
        }
    }
}

/// Places of devices that hang neither on a port with a slot nor at a number of a bus to which devices come by ACPI.
fn fixed(pci: &Plan) -> BTreeSet<(Parent, u8)> {
    let place = |function: &PlannedFunction| (function.on, function.at.bdf.devfn().device());
    let covered = |(on, number): (Parent, u8)| match on {
        Parent::RootComplex(_) => false,
        Parent::Port(id) => pci.functions.iter().any(|function| match &function.kind {
            PlannedKind::Port(port) if function.id == id => port.spec.slot().is_some() || number < port.spec.bus_slots(),
            _ => false,
        }),
    };
    let is_endpoint = |function: &&PlannedFunction| matches!(function.kind, PlannedKind::Endpoint(_));
    let mut places: BTreeSet<_> = pci.functions.iter().filter(is_endpoint).map(place).collect();
    // A device whose other functions are ports stays.
    let ports: BTreeSet<_> = pci.functions.iter().filter(|function| !is_endpoint(function)).map(place).collect();
    places.retain(|place| !ports.contains(place) && !covered(*place));
    places
}

/// Plans a machine with functions of the host whose IOMMU translates addresses of `iommu_bits`, if that is known and less than
/// the guest has. Memory beyond them is refused. BARs go below, and beyond them only if they do not fit: then peers do not
/// reach those.
pub fn plan_within(topology: &Topology, limits: &Limits, iommu_bits: Option<u8>) -> Result<MachinePlan, MachinePlanError> {
    let Some(bits) = iommu_bits.filter(|bits| *bits < limits.address_bits) else { return plan(topology, limits) };
    let refused = match attempt(topology, &Limits { address_bits: bits, ..*limits }) {
        Ok(plan) => return Ok(plan),
        Err(refused) => refused,
    };
    let plan = plan(topology, limits)?;
    let mut memory = plan.map.ram.iter().chain(&plan.map.hot_plug);
    if memory.any(|range| range.last().checked_shr(bits.into()).unwrap_or(0) != 0) {
        return Err(MachinePlanError::Iommu { bits, source: Box::new(refused.explained(topology)) });
    }
    Ok(plan)
}

impl MachinePlan {
    /// The root complexes as ACPI shows them.
    #[must_use]
    pub fn root_bridges(&self) -> Vec<RootBridge> {
        let bridges = self.pci.root_complexes.iter().zip(0u32..).enumerate();
        bridges.map(|(index, (root, uid))| self.root_bridge(index, uid, root)).collect()
    }

    /// Buses whose devices come and go by ACPI, with the root complex that each is below, in the order of their registers: the
    /// first root bus, if devices come there, and the conventional buses that take devices. With `cold_removal` those follow
    /// from which devices only leave, as far as there are registers; they share them.
    #[must_use]
    pub fn slot_buses(&self, pcie: &PcieConfig) -> Vec<PlannedSlotBus> {
        let first = Parent::RootComplex(0);
        let leaving =
            |on| self.fixed.iter().filter(move |(there, _)| pcie.cold_removal && *there == on).map(|(_, number)| *number);
        let root = pcie.root_hot_plug.then(|| {
            let numbers: BTreeSet<u8> = self.free_root_numbers().into_iter().chain(leaving(first)).collect();
            let slots = numbers.into_iter().map(BusSlot::of_own).collect();
            PlannedSlotBus { on: first, root_complex: 0, hot: true, bus: SlotBus { index: 0, way: Vec::new(), slots } }
        });
        let conventional = self.pci.functions.iter().filter_map(|function| match &function.kind {
            PlannedKind::Port(port) if port.spec.bus_slots() > 0 => {
                let (way, root_complex) = self.way(function)?;
                let bus = SlotBus { index: 0, way, slots: (0..port.spec.bus_slots()).map(BusSlot::of_own).collect() };
                Some(PlannedSlotBus { on: Parent::Port(function.id), root_complex, hot: true, bus })
            }
            _ => None,
        });
        let mut buses: Vec<PlannedSlotBus> = root.into_iter().chain(conventional).collect();
        buses.iter_mut().zip(0..).for_each(|(bus, index)| bus.bus.index = index);
        let used = u8::try_from(buses.len()).unwrap_or(u8::MAX);
        let registers = (used..SLOT_BUSES).flat_map(|index| (0..32).map(move |bit| (index, bit)));
        let places = self.fixed.iter().filter(|(on, _)| pcie.cold_removal && !(pcie.root_hot_plug && *on == first));
        for ((on, number), (index, bit)) in places.zip(registers) {
            let slot = BusSlot { number: *number, bit };
            match buses.last_mut().filter(|last| !last.hot && last.on == *on && last.bus.index == index) {
                Some(last) => last.bus.slots.push(slot),
                None => {
                    let Some((way, root_complex)) = self.way_to(*on) else { continue };
                    let bus = SlotBus { index, way, slots: vec![slot] };
                    buses.push(PlannedSlotBus { on: *on, root_complex, hot: false, bus });
                }
            }
        }
        buses
    }

    /// Functions of the device of which the endpoint `name` is function 0, without that one: they leave with it.
    #[must_use]
    pub fn companions(&self, name: &str) -> BTreeSet<&str> {
        // Below a link there is one device, whose functions can have the numbers of several.
        let is_link = |on: Parent| match on {
            Parent::RootComplex(_) => false,
            Parent::Port(id) => self.pci.functions.iter().any(|function| match &function.kind {
                PlannedKind::Port(port) => function.id == id && port.spec.kind.has_link_below(),
                PlannedKind::Endpoint(_) => false,
            }),
        };
        let Some(first) = self.pci.by_name(name).filter(|first| matches!(first.kind, PlannedKind::Endpoint(_))) else {
            return BTreeSet::new();
        };
        let (is_link, number) = (is_link(first.on), first.at.bdf.devfn());
        if number.function() != 0 || (is_link && number.device() != 0) {
            return BTreeSet::new();
        }
        let belongs = |other: &&PlannedFunction| {
            let same = is_link || other.at.bdf.devfn().device() == number.device();
            same && other.on == first.on && other.id != first.id && matches!(other.kind, PlannedKind::Endpoint(_))
        };
        self.pci.functions.iter().filter(belongs).map(|function| function.name.0.as_str()).collect()
    }

    /// Numbers from the root bus down to the bus on `on`, and the root complex.
    fn way_to(&self, on: Parent) -> Option<(Vec<Devfn>, usize)> {
        match on {
            Parent::RootComplex(root) => Some((Vec::new(), root)),
            Parent::Port(id) => self.way(self.pci.functions.iter().find(|function| function.id == id)?),
        }
    }

    /// Numbers from the root bus down to a function, and the root complex.
    fn way(&self, function: &PlannedFunction) -> Option<(Vec<Devfn>, usize)> {
        let (mut way, mut on) = (vec![function.at.bdf.devfn()], function.on);
        loop {
            match on {
                Parent::RootComplex(root) => {
                    way.reverse();
                    return Some((way, root));
                }
                Parent::Port(id) => {
                    let port = self.pci.functions.iter().find(|function| function.id == id)?;
                    way.push(port.at.bdf.devfn());
                    on = port.on;
                }
            }
        }
    }

    /// Device numbers of the first root bus that nobody has. 0 is left alone: software takes it for the host bridge.
    fn free_root_numbers(&self) -> Vec<u8> {
        let taken = |number: u8| {
            let functions = self.pci.functions.iter().filter(|function| function.on == Parent::RootComplex(0));
            functions.map(|function| function.at.bdf.devfn().device()).any(|device| device == number)
        };
        (1..32).filter(|number| !taken(*number)).collect()
    }

    /// Where the configuration space of each function lies in ECAM.
    #[must_use]
    pub fn ecam_addresses(&self) -> BTreeMap<u64, FunctionId> {
        let address = |function: &PlannedFunction| {
            let window = self.map.ecam.iter().find(|window| window.segment == function.at.segment)?;
            Some((window.range.start + (u64::from(function.at.bdf.requester_id()) << 12), function.id))
        };
        self.pci.functions.iter().filter_map(address).collect()
    }

    /// How many functions can come while the guest runs, at most: each hot-plug port takes a device, and so does each
    /// device number of a bus where they come by ACPI ([`MachinePlan::slot_buses`]).
    #[must_use]
    pub fn functions_to_come(&self, pcie: &PcieConfig) -> usize {
        let hot = |function: &&PlannedFunction| matches!(&function.kind, PlannedKind::Port(port) if port.spec.slot().is_some());
        let ports = self.pci.functions.iter().filter(hot).count();
        let buses = self.slot_buses(pcie);
        let numbers: usize = buses.iter().filter(|planned| planned.hot).map(|planned| planned.bus.slots.len()).sum();
        (ports + numbers) * FUNCTIONS
    }

    fn root_bridge(&self, index: usize, uid: u32, root: &PlannedRootComplex) -> RootBridge {
        let ranges = |windows: &[Window]| windows.iter().map(|window| Range::sized(window.base, window.len())).collect();
        let mut devices: Vec<u8> = self
            .pci
            .functions
            .iter()
            .filter(|function| function.on == Parent::RootComplex(index))
            .map(|function| function.at.bdf.devfn().device())
            .collect();
        devices.dedup();
        RootBridge {
            uid,
            segment: root.segment,
            buses: root.buses.secondary..=root.buses.subordinate,
            mem32: ranges(&root.mem32),
            mem64: ranges(&root.mem64),
            io: root.io.map(|(first, last)| Range { start: u64::from(first), end: u64::from(last) + 1 }),
            proximity: root.node,
            slots: Vec::new(),
            prt: devices.iter().flat_map(|device| PrtEntry::of_device(*device)).collect(),
        }
    }
}

/// What a user can ask for in place of what does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advice(Relief);

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Relief { keep, ports, places } = self.0;
        let keep = keep.unwrap_or_default();
        let size = |bytes: Option<u64>| bytes.map(|bytes| Size(bytes).to_string());
        let buses = keep.buses.map(|buses| buses.to_string());
        let limits = [("mem", size(keep.prefetchable)), ("mem32", size(keep.memory)), ("buses", buses)];
        let keys: Vec<(&str, String)> = limits.into_iter().filter_map(|(key, most)| Some((key, most?))).collect();
        let mut ways = Vec::new();
        if !keys.is_empty() {
            let options: Vec<String> = keys.iter().map(|(key, most)| format!("hotplug-{key}={most}")).collect();
            let of_file: Vec<String> = keys.iter().map(|(key, _)| format!("`{key}`")).collect();
            let (options, of_file) = (options.join(","), of_file.join(" and "));
            ways.push(format!("--pcie {options} (and no more in {of_file} of a topology file's ports)"));
        }
        if let Some((stay, of)) = ports {
            ways.push(format!("{stay} of the {of} free hot-plug ports (root-ports, switch-ports, bridges)"));
        }
        if places {
            ways.push("--pcie host-ports=used".to_owned());
        }
        write!(f, "everything fits with {}", ways.join(", or with "))
    }
}

/// A machine that has no place for everything.
#[derive(Debug, Error)]
pub enum MachinePlanError {
    /// Memory.
    #[error(transparent)]
    Memory(#[from] MemoryMapError),
    /// Buses, windows or BARs.
    #[error(transparent)]
    Pci(PlanError),
    /// The same, and there is a plan with less for hot-plug.
    #[error("{refused}; {advice}")]
    HotPlug {
        /// What does not fit.
        refused: Box<PlanError>,
        /// What would.
        advice: Box<Advice>,
    },
    /// Memory that functions of the host cannot reach.
    #[error("the IOMMU of the host's functions translates {bits}-bit addresses, and memory of the guest lies beyond")]
    Iommu {
        /// How many it translates.
        bits: u8,
        /// What does not fit into them.
        #[source]
        source: Box<Self>,
    },
}

#[cfg(test)]
mod tests {
    use api::config::VmConfig;

    use super::*;
    use crate::spec;

    const GIB: u64 = 1 << 30;

    fn limits(ram: u64) -> Limits {
        Limits { ram, growth: 0, address_bits: 46, amd: false, firmware: 0 }
    }

    /// A machine with one device that has a prefetchable BAR of `bar`.
    fn with_bar(bar: &str) -> Topology {
        let device = format!("stub,id=gpu,bar0={bar}:mem64:prefetchable").parse().unwrap();
        let config = VmConfig { devices: vec![device], ..VmConfig::default() };
        spec::spec(&config, &spec::Host::default()).unwrap().topology
    }

    /// The last address that the root complex leads to.
    fn top(plan: &MachinePlan) -> u64 {
        plan.map.mmio64.iter().map(Range::last).max().unwrap()
    }

    #[test]
    fn bars_lie_where_the_iommu_of_host_functions_reaches_them() {
        let topology = with_bar("16G");
        for (iommu, bits) in [(None, 46), (Some(57), 46), (Some(46), 46), (Some(42), 42), (Some(39), 39)] {
            let plan = plan_within(&topology, &limits(4 * GIB), iommu).unwrap();
            assert_eq!((plan.map.physical_address_bits, top(&plan) >> (bits - 1)), (bits, 1), "{iommu:?}");
        }
    }

    #[test]
    fn bars_that_do_not_fit_below_the_iommu_s_limit_go_beyond_it() {
        let plan = plan_within(&with_bar("512G"), &limits(4 * GIB), Some(39)).unwrap();
        assert_eq!(plan.map.physical_address_bits, 46);
    }

    #[test]
    fn four_tib_of_memory_and_the_largest_bars_lie_beside_each_other() {
        const TIB: u64 = 1 << 40;
        let devices = (0..8).map(|n| format!("stub,id=gpu{n},bar0=512G:mem64:prefetchable").parse().unwrap()).collect();
        let topology = spec::spec(&VmConfig { devices, ..VmConfig::default() }, &spec::Host::default()).unwrap().topology;
        for (ram, amd) in [(GIB, false), (TIB, false), (4 * TIB, false), (4 * TIB - GIB, false), (4 * TIB, true)] {
            let plan = plan(&topology, &Limits { amd, ..limits(ram) }).unwrap();
            assert_eq!(plan.map.ram.iter().map(Range::len).sum::<u64>(), ram);
            let bars = plan.pci.functions.iter().filter_map(|function| match &function.kind {
                PlannedKind::Endpoint(endpoint) => endpoint.bars[0],
                PlannedKind::Port(_) => None,
            });
            let mut taken: Vec<Range> = bars.map(|at| Range::sized(at, 512 * GIB)).chain(plan.map.ram.clone()).collect();
            taken.sort_by_key(|range| range.start);
            assert_eq!(taken.len(), 8 + plan.map.ram.len());
            assert!(taken.windows(2).all(|two| two[0].end <= two[1].start), "{taken:x?}");
            assert!(taken.iter().all(|range| range.end <= 1 << 46));
        }
    }

    /// What is said of a machine with these flags.
    fn refused(pcie: &str, devices: &[&str], address_bits: u8) -> String {
        let devices = devices.iter().map(|device| device.parse().unwrap()).collect();
        let config = VmConfig { pcie: pcie.parse().unwrap(), devices, ..VmConfig::default() };
        let limits = Limits { address_bits, ..limits(GIB) };
        plan(&spec::spec(&config, &spec::Host::default()).unwrap().topology, &limits).unwrap_err().to_string()
    }

    #[test]
    fn case_b2_a_machine_without_room_for_hot_plug_is_told_the_options_that_fit() {
        for (pcie, parts) in [
            (
                "root-ports=8,hotplug-mem=16T",
                &["everything fits with --pcie hotplug-mem=", "or with 3 of the 8 free hot-plug ports"][..],
            ),
            ("root-ports=20,hotplug-mem32=1G", &["--pcie hotplug-mem32=", "or with 1 of the 20"]),
            (
                "root-ports=20,hotplug-buses=20",
                &["needs 402 bus numbers", "--pcie hotplug-buses=12 (and no more in `buses` of", "or with 12 of the 20"],
            ),
        ] {
            let told = refused(pcie, &["stub,bar0=16M:mem32,bar1=64G:mem64:prefetchable"], 46);
            for part in parts {
                assert!(told.contains(part), "{pcie}: {told} lacks {part}");
            }
        }
        // The device is left over, and what is kept is in its way.
        let told = refused("root-ports=1,hotplug-mem=512G", &["stub,id=gpu,bar0=512G:mem64:prefetchable"], 40);
        assert!(told.contains("--pcie hotplug-mem="), "{told}");
        // No port could do anything about that.
        let told =
            refused("root-ports=1,hotplug-mem=1G", &["stub,bar0=512G:mem64:prefetchable,bar2=512G:mem64:prefetchable"], 40);
        assert!(!told.contains("--pcie"), "{told}");
    }

    #[test]
    fn memory_beyond_the_iommu_s_limit_is_refused_with_both_numbers() {
        let error = plan_within(&with_bar("1M"), &limits(600 * GIB), Some(39)).unwrap_err();
        assert!(error.to_string().contains("39-bit"), "{error}");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("memory of 600G") && cause.contains("give at most 510G"), "{cause}");
        let error = plan_within(&with_bar("1M"), &Limits { growth: 600 * GIB, ..limits(GIB) }, Some(39)).unwrap_err();
        assert!(matches!(error, MachinePlanError::Iommu { bits: 39, .. }), "{error}");
        // What no address width of the guest holds is told as for any machine.
        assert!(matches!(plan_within(&with_bar("1M"), &limits(1 << 50), Some(39)), Err(MachinePlanError::Memory(_))));
    }
}
