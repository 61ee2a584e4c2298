//! Holds how a machine differs from the one that was started: devices, processors, memory. A reset keeps it: what was
//! added is there again, what left stays away.

use std::borrow::Cow;
use std::collections::BTreeSet;

use api::config::VmConfig;
use arch::memory_map::Range;
use pci::address::HostBdf;
use pci::topology::{EndpointSpec, Name, Parent, PlannedKind};

use crate::effects::BarAccess;
use crate::groundwork::Needs;
use crate::plan::MachinePlan;
use crate::resize::{self, Extent};
use crate::spec::{Endpoint, Spec};

/// A device that came while the guest ran.
#[derive(Debug, Clone)]
pub struct Added {
    /// Its functions.
    pub functions: Vec<AddedFunction>,
    /// The port or root complex that it hangs on.
    pub port: Name,
    /// Its device number on a bus with several; `None` for one that hangs on a port with a link.
    pub number: Option<u8>,
}

/// One function of it.
#[derive(Debug, Clone)]
pub struct AddedFunction {
    /// Its name.
    pub name: Name,
    /// What it is.
    pub endpoint: Endpoint,
    /// What must be known to place it.
    pub spec: EndpointSpec,
    /// Who reaches its BARs.
    pub access: BarAccess,
    /// Its number, 0 to 7.
    pub number: u8,
    /// The function of a host that is data for which it stands.
    pub stands_for: Option<HostBdf>,
}

/// Devices that came and planned ones that left.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    added: Vec<Added>,
    left: BTreeSet<Name>,
    extent: Option<Extent>,
}

impl Changes {
    /// What came and is still there, in this order.
    #[must_use]
    pub fn added(&self) -> &[Added] {
        &self.added
    }

    /// Planned devices that left.
    pub fn left(&self) -> impl Iterator<Item = &Name> {
        self.left.iter()
    }

    /// Whether the planned device `name` has left.
    #[must_use]
    pub fn has_left(&self, name: &Name) -> bool {
        self.left.contains(name)
    }

    /// Processors and added memory of the machine that is started next.
    #[must_use]
    pub fn extent(&self, config: &VmConfig) -> Extent {
        self.extent.clone().unwrap_or_else(|| Extent::at_start(config))
    }

    /// Processors and added memory changed.
    pub fn resize(&mut self, extent: Extent) {
        self.extent = Some(extent);
    }

    /// What the machine that is started next stands on beside what its plan says.
    pub fn add_to(&self, needs: &mut Needs, spec: &Spec) {
        if let Some(extent) = &self.extent {
            needs.ranges.extend(extent.memory.iter().map(|device| Range::sized(device.base, device.len)));
            needs.bindings.extend(resize::bindings(spec.numa.as_ref(), &extent.memory));
        }
        for function in self.added.iter().flat_map(|added| &added.functions) {
            if let Endpoint::Vfio { at, .. } = &function.endpoint {
                needs.functions.insert(*at, function.name.0.clone());
            }
        }
    }

    /// A device came.
    pub fn add(&mut self, added: Added) {
        self.added.push(added);
    }

    /// Devices with these functions left.
    pub fn remove(&mut self, names: &[Name]) {
        let came = |name: &Name| self.added.iter().any(|added| added.functions.iter().any(|function| function.name == *name));
        let planned: Vec<Name> = names.iter().filter(|name| !came(name)).cloned().collect();
        self.added.retain(|added| added.functions.iter().all(|function| !names.contains(&function.name)));
        self.left.extend(planned);
    }

    /// `plan` without the devices that have left. Ports, windows and bus numbers stay as they are.
    #[must_use]
    pub fn plan<'a>(&self, plan: &'a MachinePlan) -> Cow<'a, MachinePlan> {
        if self.left.is_empty() {
            return Cow::Borrowed(plan);
        }
        let mut plan = plan.clone();
        let functions = &mut plan.pci.functions;
        functions.retain(|function| !matches!(function.kind, PlannedKind::Endpoint(_)) || !self.left.contains(&function.name));
        let taken: BTreeSet<Parent> = functions.iter().map(|function| function.on).collect();
        for function in functions {
            if let PlannedKind::Port(port) = &mut function.kind {
                port.occupied = taken.contains(&Parent::Port(function.id));
            }
        }
        Cow::Owned(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{self, Limits};
    use crate::spec::{self, Host};

    fn two_devices_on_hot_plug_ports() -> (Spec, MachinePlan) {
        let config = VmConfig {
            pcie: "root-ports=2".parse().unwrap(),
            devices: vec!["stub,id=a,on=port0".parse().unwrap(), "stub,id=b,on=port1".parse().unwrap()],
            ..Default::default()
        };
        let spec = spec::spec(&config, &Host::default()).unwrap();
        let limits = Limits { ram: 64 << 20, growth: 0, address_bits: 40, amd: false, firmware: 0 };
        let plan = plan::plan(&spec.topology, &limits).unwrap();
        (spec, plan)
    }

    #[test]
    fn a_device_that_left_leaves_its_port_empty_and_everything_else_in_place() {
        let (_, whole) = two_devices_on_hot_plug_ports();
        let mut changes = Changes::default();
        assert!(matches!(changes.plan(&whole), Cow::Borrowed(_)));
        changes.remove(&[Name::from("a")]);
        let rest = changes.plan(&whole);
        let ports = |plan: &MachinePlan| {
            let ports = plan.pci.functions.iter().filter_map(|function| match &function.kind {
                PlannedKind::Port(port) => Some((function.name.to_string(), function.at, port.windows, port.occupied)),
                PlannedKind::Endpoint(_) => None,
            });
            ports.collect::<Vec<_>>()
        };
        assert_eq!(rest.pci.by_name("a"), None);
        assert_eq!(rest.pci.by_name("b"), whole.pci.by_name("b"));
        let expected = ports(&whole).into_iter().map(|(name, at, windows, there)| {
            let there = there && name != "port0";
            (name, at, windows, there)
        });
        assert_eq!(ports(&rest), expected.collect::<Vec<_>>());
    }

    #[test]
    fn what_came_and_went_again_is_no_change() {
        let (spec, plan) = two_devices_on_hot_plug_ports();
        let endpoint = spec.endpoints[&Name::from("a")].clone();
        let Some(PlannedKind::Endpoint(planned)) = plan.pci.by_name("a").map(|function| &function.kind) else { panic!() };
        let mut changes = Changes::default();
        let functions = [("x", 0), ("y", 1)].map(|(name, number)| {
            let (endpoint, spec) = (endpoint.clone(), planned.spec.clone());
            AddedFunction { name: Name::from(name), endpoint, spec, access: BarAccess::default(), number, stands_for: None }
        });
        changes.add(Added { functions: functions.into(), port: Name::from("port0"), number: None });
        changes.remove(&[Name::from("x"), Name::from("y")]);
        assert!(changes.added().is_empty() && ["x", "y"].iter().all(|name| !changes.has_left(&Name::from(*name))));
    }
}
