//! Gives every part of a machine its place: RAM, ECAM, windows, buses, BARs. Pure.

use std::collections::BTreeMap;

use arch::memory_map::{AMD_HYPERTRANSPORT, MemoryMap, MemoryMapError, MemoryMapRequest, Range, SegmentBuses};
use arch::x86_64::acpi::{PrtEntry, RootBridge, SlotBus};

use pci::address::Devfn;
use pci::function::FunctionId;
use pci::topology::{Apertures, Parent, Plan, PlanError, PlannedFunction, PlannedKind, PlannedRootComplex, Topology, Window};
use thiserror::Error;

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
}

/// A bus whose devices come and go by ACPI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSlotBus {
    /// What it hangs on.
    pub on: Parent,
    /// The root complex that it is of, or below.
    pub root_complex: usize,
    /// As ACPI shows it.
    pub bus: SlotBus,
}

/// Plans a machine.
pub fn plan(topology: &Topology, limits: &Limits) -> Result<MachinePlan, MachinePlanError> {
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
    let pci = topology.plan(&space)?;
    // Guests probe every bus that is announced, so announce those that exist.
    for segment in segments {
        let buses = pci.root_complexes.iter().filter(|root| root.segment == segment).map(|root| root.buses.subordinate);
        map.trim_buses(segment, buses.max().unwrap_or(0));
    }
    Ok(MachinePlan { map, pci })
}

/// Plans a machine with functions of the host whose IOMMU translates addresses of `iommu_bits`, if that is known and less than
/// the guest has. Memory beyond them is refused. BARs go below, and beyond them only if they do not fit: then peers do not
/// reach those.
pub fn plan_within(topology: &Topology, limits: &Limits, iommu_bits: Option<u8>) -> Result<MachinePlan, MachinePlanError> {
    let Some(bits) = iommu_bits.filter(|bits| *bits < limits.address_bits) else { return plan(topology, limits) };
    let refused = match plan(topology, &Limits { address_bits: bits, ..*limits }) {
        Ok(plan) => return Ok(plan),
        Err(error) => error,
    };
    let plan = plan(topology, limits)?;
    let mut memory = plan.map.ram.iter().chain(&plan.map.hot_plug);
    if memory.any(|range| range.last().checked_shr(bits.into()).unwrap_or(0) != 0) {
        return Err(MachinePlanError::Iommu { bits, source: Box::new(refused) });
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
    /// first root bus, `with_root`, and the conventional buses that take devices.
    #[must_use]
    pub fn slot_buses(&self, with_root: bool) -> Vec<PlannedSlotBus> {
        let root = with_root.then(|| PlannedSlotBus {
            on: Parent::RootComplex(0),
            root_complex: 0,
            bus: SlotBus { index: 0, way: Vec::new(), numbers: self.free_root_numbers() },
        });
        let conventional = self.pci.functions.iter().filter_map(|function| match &function.kind {
            PlannedKind::Port(port) if port.spec.bus_slots() > 0 => {
                let (way, root_complex) = self.way(function)?;
                let bus = SlotBus { index: 0, way, numbers: (0..port.spec.bus_slots()).collect() };
                Some(PlannedSlotBus { on: Parent::Port(function.id), root_complex, bus })
            }
            _ => None,
        });
        let mut buses: Vec<PlannedSlotBus> = root.into_iter().chain(conventional).collect();
        buses.iter_mut().zip(0..).for_each(|(bus, index)| bus.bus.index = index);
        buses
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

    /// How many ports with a link below take devices while the guest runs.
    #[must_use]
    pub fn hot_plug_ports(&self) -> usize {
        let hot = |function: &&PlannedFunction| matches!(&function.kind, PlannedKind::Port(port) if port.spec.slot().is_some());
        self.pci.functions.iter().filter(hot).count()
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

/// A machine that has no place for everything.
#[derive(Debug, Error)]
pub enum MachinePlanError {
    /// Memory.
    #[error(transparent)]
    Memory(#[from] MemoryMapError),
    /// Buses, windows or BARs.
    #[error(transparent)]
    Pci(#[from] PlanError),
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
