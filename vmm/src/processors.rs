//! Decides how the guest's processors are arranged in packages. Pure.

use api::config::{CpuTopology, VmConfig};
use arch::x86_64::processors::{PackageShape, Processors, ProcessorsError};

use crate::numa::{GuestNuma, most_cpus};

/// Processors as configured. Without an arrangement there is one package of cores, or one for each memory node, as sockets
/// are on hardware; an arrangement of one package is taken for that of each node.
///
/// # Errors
/// If they do not fit the arrangement, or need an APIC id that is too large.
pub fn processors(config: &VmConfig, numa: Option<&GuestNuma>) -> Result<Processors, ProcessorsError> {
    let most = most_cpus(config);
    let given = config.cpus.topology;
    let by_node = packages_of_nodes(numa);
    match given {
        Some(topology) if by_node.len() <= 1 || topology.packages.get() > 1 => {
            let shape = shape(topology);
            let room = usize::try_from(shape.room()).unwrap_or(usize::MAX);
            let all: Vec<u32> = (0..most).collect();
            Processors::arrange(&all.chunks(room.max(1)).map(<[u32]>::to_vec).collect::<Vec<_>>(), shape)
        }
        _ if by_node.len() <= 1 => Ok(Processors::single(most)),
        _ => {
            let largest = by_node.iter().map(Vec::len).max().and_then(|len| u32::try_from(len).ok()).unwrap_or(1);
            let one = PackageShape::of_cores(largest);
            let shape = given.map(shape).map_or(one, |shape| PackageShape {
                cores: largest.div_ceil(shape.threads.saturating_mul(shape.dies).max(1)),
                ..shape
            });
            Processors::arrange(&by_node, shape)
        }
    }
}

fn shape(topology: CpuTopology) -> PackageShape {
    PackageShape {
        threads: topology.threads_per_core.get().into(),
        cores: topology.cores_per_die.get().into(),
        dies: topology.dies_per_package.get().into(),
    }
}

/// The vCPUs of each node that has some, the node of vCPU 0 first.
fn packages_of_nodes(numa: Option<&GuestNuma>) -> Vec<Vec<u32>> {
    let nodes = numa.map_or(&[][..], |numa| &numa.nodes);
    let mut packages: Vec<Vec<u32>> = nodes.iter().map(|node| node.cpus.iter().collect()).collect();
    packages.retain(|package| !package.is_empty());
    packages.sort();
    packages
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use api::config::CpuConfig;

    use super::*;
    use crate::numa;
    use crate::spec::Host;

    fn ids(config: &VmConfig) -> Vec<u32> {
        let numa = numa::resolve(config, &Host::default()).unwrap();
        let processors = processors(config, numa.as_ref()).unwrap();
        processors.placements().iter().map(|placement| placement.apic_id).collect()
    }

    fn machine(cpus: u8, nodes: &[&str]) -> VmConfig {
        let numa = nodes.iter().map(|text| text.parse().unwrap()).collect();
        VmConfig {
            cpus: cpus.to_string().parse().unwrap(),
            numa: api::config::NumaConfig::new(numa).unwrap(),
            ..VmConfig::default()
        }
    }

    fn topology([threads, cores, dies, packages]: [u16; 4]) -> Option<CpuTopology> {
        let [threads_per_core, cores_per_die, dies_per_package, packages] =
            [threads, cores, dies, packages].map(|count| NonZeroU16::new(count).unwrap());
        Some(CpuTopology { threads_per_core, cores_per_die, dies_per_package, packages })
    }

    #[test]
    fn each_node_with_vcpus_is_a_package() {
        assert_eq!(ids(&machine(4, &[])), [0, 1, 2, 3]);
        let three = ["0,cpus=[0-1,5],memory=256M", "1,cpus=2-4,memory=256M", "2"];
        assert_eq!(ids(&machine(6, &three)), [0, 1, 4, 5, 6, 2]);
        // vCPU 0 has APIC id 0 wherever it is.
        assert_eq!(ids(&machine(2, &["0,cpus=1,memory=256M", "1,cpus=0,memory=256M"])), [0, 1]);
    }

    #[test]
    fn an_arrangement_is_kept_and_one_of_a_single_package_is_that_of_each_node() {
        let two = ["0,cpus=0-3,memory=256M", "1,cpus=4-7,memory=256M"];
        let with = |nodes: &[&str], shape| VmConfig {
            cpus: CpuConfig { topology: topology(shape), ..machine(8, nodes).cpus },
            ..machine(8, nodes)
        };
        assert_eq!(ids(&with(&[], [2, 3, 1, 2])), [0, 1, 2, 3, 4, 5, 8, 9]);
        assert_eq!(ids(&with(&two, [1, 3, 1, 4])), [0, 1, 2, 4, 5, 6, 8, 9]);
        assert_eq!(ids(&with(&two, [2, 4, 1, 1])), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
