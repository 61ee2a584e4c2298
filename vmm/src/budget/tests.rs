use api::config::{NumaConfig, TopologyConfig, VmConfig};
use pci::topology::PlannedKind;

use super::*;
use crate::plan::{self, Limits};
use crate::spec::{self, Host};

const LIMITS: Limits = Limits { ram: 1 << 30, growth: 0, address_bits: 46, amd: false, firmware: 0 };

fn config(pcie: &str, topology: Option<&str>) -> VmConfig {
    let topology = topology.map(|text| TopologyConfig::parse("f", text).unwrap());
    let pcie = if pcie.is_empty() { PcieConfig::default() } else { pcie.parse().unwrap() };
    VmConfig { pcie, topology, ..VmConfig::default() }
}

/// Where each port is, how many buses are below it, and what it keeps above 4 GiB in GiB.
fn hot_ports(config: &VmConfig) -> Vec<String> {
    let spec = spec::spec(config, &Host::default()).unwrap();
    let plan = plan::plan(&spec.topology, &LIMITS).unwrap();
    let ports = plan.pci.functions.iter().filter_map(|function| match &function.kind {
        PlannedKind::Port(port) => {
            let hotplug = port.spec.hotplug?;
            let kept = port.reserved?.prefetchable >> 30;
            Some(format!("{} {} {} {kept}G {}", function.name, function.at, port.buses, hotplug.removal.noun()))
        }
        PlannedKind::Endpoint(_) => None,
    });
    ports.collect()
}

const TREE: &str = r#"
[[root-complex]]
name = "rc0"

[[root-complex]]
name = "rc1"
segment = 1

[[port]]
name = "rp"
kind = "root-port"
on = "rc1"

[[port]]
name = "up"
kind = "upstream-port"
on = "rp"

[[port]]
name = "down"
kind = "downstream-port"
on = "up"
hotplug = true
mem = "128G"
buses = 3
removal = "orderly"

[[port]]
name = "near"
kind = "root-port"
on = "rc0"
hotplug = true
"#;

#[test]
fn ports_of_a_file_take_devices_in_any_segment_and_below_any_switch() {
    assert_eq!(
        hot_ports(&config("hotplug-mem=8G,hotplug-buses=2,removal=button", Some(TREE))),
        ["near 0000:00:00.0 01-02 8G button", "down 0001:02:00.0 03-05 128G orderly"]
    );
}

#[test]
fn an_upstream_port_and_too_many_bridges_of_a_file_take_no_devices() {
    let upstream = TREE.replace("on = \"rp\"", "on = \"rp\"\nhotplug = true");
    let config = config("", Some(&upstream));
    let spec = spec::spec(&config, &Host::default()).unwrap();
    let refused = plan::plan(&spec.topology, &LIMITS).unwrap_err().to_string();
    assert!(refused.contains("upstream port `up` cannot be hot-pluggable"), "{refused}");
    let mut file = config.topology.unwrap();
    let bridge = PortConfig { kind: PortKindConfig::PciBridge, ..file.ports[2].clone() };
    file.ports = vec![bridge; usize::from(MOST_BRIDGES)];
    assert_eq!(check_file(&PcieConfig::default(), &file), Ok(()));
    let with_one = PcieConfig { bridges: Some(1), ..PcieConfig::default() };
    assert_eq!(check_file(&with_one, &file), Err(BudgetError::Bridges { bridges: MOST_BRIDGES + 1, most: MOST_BRIDGES }));
}

#[test]
fn ports_are_on_all_root_complexes_in_turn_and_at_least_one_for_each_memory_node() {
    let mut config = config("root-ports=3,ports-on=all,hotplug-mem=1G", None);
    config.cpus = "2".parse().unwrap();
    config.numa = NumaConfig::new([0, 1].map(|cpu| format!("{cpu},cpus={cpu},memory=256M").parse().unwrap()).to_vec()).unwrap();
    let spec = spec::spec(&config, &Host::default()).unwrap();
    let of = |name: &str| {
        let port = spec.topology.nodes.iter().find(|node| node.name.0 == name).unwrap();
        let root = spec.topology.root_complexes.iter().find(|root| root.name == port.on).unwrap();
        (root.node, port.place.function)
    };
    assert_eq!(["port0", "port1", "port2"].map(of), [(Some(0), 0), (Some(1), 0), (Some(0), 1)]);
    plan::plan(&spec.topology, &LIMITS).unwrap();
}
