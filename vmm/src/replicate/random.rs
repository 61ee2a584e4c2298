//! Random hosts: in the copy all devices are as near to each other as on the host, whatever the host looks like.

use pci::bar::BarSpec;
use pci::ids::{ClassCode, Ids};
use pci::link::{Link, LinkRate};
use pci::topology::{Apertures, Plan, PlannedKind, PortKind, Window};
use proptest::prelude::*;

use super::*;
use crate::host::fabric::Fabric;
use crate::host::tree::{HostKind, HostNode, HostParent};
use crate::spec::Spec;
use crate::topology::matrix::Matrix;
use crate::topology::view::View;

const NIC: u32 = 0x02_0000;
const GPU: u32 = 0x03_0200;
const BRIDGE: u32 = 0x06_0400;

/// A host in the making; everything follows from the seed.
struct Maker {
    seed: u64,
    tree: HostTree,
    next_bus: u8,
    root: (String, Option<u32>),
}

impl Maker {
    fn host(seed: u64) -> HostTree {
        let mut maker = Self { seed, tree: HostTree::default(), next_bus: 0, root: (String::new(), None) };
        for _ in 0..=maker.below(3) {
            let bus = maker.bus();
            let node = [None, Some(0), Some(1), Some(5)][maker.below(4)];
            maker.root = (format!("pci0000:{bus:02x}"), node);
            for device in 0..=maker.below(3) {
                let device = u8::try_from(device).unwrap();
                let on = HostParent::RootComplex(maker.root.0.clone());
                if maker.below(5) == 0 {
                    maker.endpoint(bus, device, 0, &on, NIC, None);
                } else {
                    let port = maker.add(bus, device, 0, &on, HostKind::Port(PortKind::Root), BRIDGE, None);
                    maker.behind(port, 3);
                }
            }
        }
        maker.tree
    }

    fn below(&mut self, limit: usize) -> usize {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.seed >> 33).unwrap() % limit
    }

    fn bus(&mut self) -> u8 {
        self.next_bus = self.next_bus.wrapping_add(1);
        self.next_bus
    }

    /// Fills what is behind a link.
    fn behind(&mut self, port: HostBdf, depth: usize) {
        if self.next_bus > 200 || self.below(6) == 0 {
            return;
        }
        let (bus, on) = (self.bus(), HostParent::Bridge(port));
        if depth > 0 && self.below(2) == 0 {
            let upstream = self.add(bus, 0, 0, &on, HostKind::Port(PortKind::Upstream), BRIDGE, None);
            let inner = self.bus();
            for device in 0..=self.below(4) {
                let on = HostParent::Bridge(upstream);
                let device = u8::try_from(device).unwrap();
                let port = self.add(inner, device, 0, &on, HostKind::Port(PortKind::Downstream), BRIDGE, None);
                self.behind(port, depth - 1);
            }
            return;
        }
        let class = [GPU, NIC][self.below(2)];
        let physical = self.endpoint(bus, 0, 0, &on, class, None);
        match self.below(3) {
            0 => {}
            1 => {
                for function in 1..=self.below(3) {
                    self.endpoint(bus, 0, u8::try_from(function).unwrap(), &on, NIC, None);
                }
            }
            // Virtual functions, of the same device number and of others.
            _ => {
                for index in 1..=self.below(4) {
                    let index = u8::try_from(index).unwrap();
                    let (device, function) = if self.below(2) == 0 { (0, index) } else { (index, 0) };
                    let at = HostBdf { domain: 0, bdf: pci::address::Bdf::new(bus, pci::address::Devfn::new(device, function)) };
                    if self.tree.get(at).is_none() {
                        self.endpoint(bus, device, function, &on, NIC, Some(physical));
                    }
                }
            }
        }
    }

    fn endpoint(&mut self, bus: u8, device: u8, function: u8, on: &HostParent, class: u32, of: Option<HostBdf>) -> HostBdf {
        self.add(bus, device, function, on, HostKind::Endpoint, class, of)
    }

    #[expect(clippy::too_many_arguments, reason = "all that a function is")]
    fn add(
        &mut self,
        bus: u8,
        device: u8,
        function: u8,
        on: &HostParent,
        kind: HostKind,
        class: u32,
        physical_function: Option<HostBdf>,
    ) -> HostBdf {
        let at = HostBdf { domain: 0, bdf: pci::address::Bdf::new(bus, pci::address::Devfn::new(device, function)) };
        let ids = Ids { vendor: 0x10DE, device: 0x2330, class: ClassCode::new(class), ..Ids::default() };
        let rate: LinkRate = ["8GT/s x8", "16GT/s x16", "32GT/s x16"][self.below(3)].parse().unwrap();
        let node = HostNode {
            at,
            on: on.clone(),
            ids,
            kind,
            bars: [None::<BarSpec>; 6],
            rom: None,
            interrupt_pin: 0,
            link: Some(Link::at(rate)),
            atomic_completers: 0,
            numa_node: self.root.1,
            group: None,
            driver: None,
            physical_function,
            fabric: Fabric::default(),
        };
        self.tree.functions.insert(at, node);
        at
    }

    /// Some endpoints of `tree`, in any order.
    fn choose(tree: &HostTree, seed: u64) -> Vec<Requested> {
        let mut chooser = Self { seed, tree: HostTree::default(), next_bus: 0, root: (String::new(), None) };
        let mut left: Vec<&HostNode> = tree.functions.values().filter(|node| node.kind == HostKind::Endpoint).collect();
        let mut chosen = Vec::new();
        while !left.is_empty() && chosen.len() < 24 {
            let node = left.remove(chooser.below(left.len()));
            if chooser.below(4) != 0 {
                let endpoint = EndpointSpec { ids: node.ids, bars: node.bars, ..EndpointSpec::default() };
                chosen.push(Requested { name: Name(format!("d{}", chosen.len())), at: node.at, endpoint });
            }
        }
        chosen
    }
}

fn plan(replica: &Replica) -> Plan {
    let window = |base, limit| vec![Window { base, limit }];
    let apertures =
        Apertures { mem32: window(0x8000_0000, 0xDFFF_FFFF), mem64: window(1 << 32, (1 << 46) - 1), address_bits: 46 };
    replica.topology.plan(&apertures).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_pair_is_as_near_in_the_copy_as_on_the_host(seed in any::<u64>(), choice in any::<u64>()) {
        let tree = Maker::host(seed);
        let devices = Maker::choose(&tree, choice);
        let wishes = Wishes { order: GpuOrder::Topology, ..Wishes::default() };
        let replica = replicate(&tree, &devices, &wishes).unwrap();
        let plan = plan(&replica);
        let host = View::of_host(&tree);
        let guest = View::of_plan(&plan, &Spec { topology: replica.topology.clone(), ..Spec::default() }, &tree);
        let on_host: Vec<_> = devices.iter().map(|device| (device.at.to_string(), device.name.0.clone())).collect();
        let in_guest: Vec<_> = devices
            .iter()
            .map(|device| (plan.by_name(&device.name.0).unwrap().at.to_string(), device.name.0.clone()))
            .collect();
        let host_matrix = Matrix::of(&host, &on_host);
        let told = host_matrix.beside(&Matrix::of(&guest, &in_guest));
        prop_assert!(!told.contains("differ"), "{}\n{:#?}", told, replica.topology);
        // Function 0 of everything is device 0 on a bus of its own, and every port leads somewhere.
        for function in &plan.functions {
            match &function.kind {
                PlannedKind::Endpoint(_) => prop_assert_eq!(function.at.bdf.devfn().device(), 0),
                PlannedKind::Port(port) => prop_assert!(port.occupied, "{} leads nowhere", function.name),
            }
        }
    }

    #[test]
    fn gpus_ascend_in_the_order_given_or_are_refused(seed in any::<u64>(), choice in any::<u64>()) {
        let tree = Maker::host(seed);
        let devices = Maker::choose(&tree, choice);
        let ascending = |devices: &[Requested], wishes: &Wishes| {
            let replica = replicate(&tree, devices, wishes)?;
            let plan = plan(&replica);
            let gpus = devices.iter().filter(|device| group::is_gpu(device));
            let at: Vec<_> = gpus.map(|device| plan.by_name(&device.name.0).unwrap().at).collect();
            Ok::<_, ReplicaError>(at.is_sorted())
        };
        let wishes = Wishes::default();
        match ascending(&devices, &wishes) {
            Ok(sorted) => prop_assert!(sorted),
            // The order that the refusal names is accepted.
            Err(ReplicaError::Order { possible, .. }) => {
                let mut again = devices.clone();
                again.sort_by_key(|device| possible.iter().position(|name| *name == device.name));
                prop_assert_eq!(ascending(&again, &wishes), Ok(true));
            }
        }
    }
}
