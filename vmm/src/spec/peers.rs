//! Decides which devices show a clique that nobody gave them, and what a user should know of cliques.

use std::collections::BTreeMap;

use api::config::{CliquePolicy, DeviceConfig, VmConfig};
use pci::address::HostBdf;
use pci::caps::clique::{self, Clique};

use super::{Endpoint, Host, Spec};
use crate::cliques::{self, CliqueError, Member, Policy};
use crate::host::tree::HostTree;

/// Cliques by name of the device.
#[derive(Debug, Default)]
pub(super) struct Automatic {
    of: BTreeMap<String, Clique>,
    pub(super) notes: Vec<String>,
}

impl Automatic {
    /// That of the device `name`.
    pub(super) fn of(&self, name: &str) -> Option<Clique> {
        self.of.get(name).copied()
    }
}

/// Cliques of the host functions among `devices`, by the host's topology. What is given stands.
pub(super) fn automatic(config: &VmConfig, devices: &[(String, &DeviceConfig)], host: &Host) -> Result<Automatic, CliqueError> {
    let policy = rule(config.pcie.cliques);
    let given = |device: &DeviceConfig| device.clique.and_then(|id| Clique::new(id.get()).ok());
    let members: Vec<(&String, Member)> = devices
        .iter()
        .filter_map(|(name, device)| Some((name, Member { at: *host.wanted.get(name)?, given: given(device) })))
        .collect();
    let found = cliques::cliques(&host.tree, &members.iter().map(|(_, member)| *member).collect::<Vec<_>>(), policy)?;
    let of = members.iter().filter_map(|(name, member)| Some(((*name).clone(), *found.of.get(&member.at)?)));
    // GPUs without one are told for all devices together, by name.
    let split = found.notes.iter().filter(|note| matches!(note, cliques::Note::Split { .. }));
    Ok(Automatic { of: of.collect(), notes: split.map(ToString::to_string).collect() })
}

const fn rule(policy: CliquePolicy) -> Policy {
    match policy {
        CliquePolicy::Auto => Policy::Switch,
        CliquePolicy::RootComplex => Policy::RootComplex,
        CliquePolicy::Off => Policy::Off,
    }
}

/// The clique of the host function `at`, which comes to those that are `there` and keep what they show; and what a user should
/// know of it.
pub(crate) fn newcomer(
    policy: CliquePolicy,
    tree: &HostTree,
    there: &[Member],
    at: HostBdf,
) -> Result<(Option<Clique>, Vec<String>), CliqueError> {
    let all: Vec<Member> = there.iter().copied().chain([Member { at, given: None }]).collect();
    let clique = cliques::cliques(tree, &all, rule(policy))?.of.get(&at).copied();
    // Those that show none cannot get one any more.
    let shown: Vec<Member> = there.iter().copied().chain([Member { at, given: clique }]).collect();
    let notes = cliques::cliques(tree, &shown, Policy::Off)?.notes;
    Ok((clique, notes.iter().map(ToString::to_string).collect()))
}

/// NVIDIA's driver approves peer-to-peer for a set of GPUs only if every one of them has a clique, and looks for cliques only
/// where it finds KVM's signature.
pub(super) fn warnings(config: &VmConfig, spec: &Spec, host: &Host) -> Vec<String> {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for (name, endpoint) in &spec.endpoints {
        let (ids, clique) = match endpoint {
            Endpoint::Stub(stub) => (Some(stub.ids), stub.clique),
            Endpoint::Vfio { at, clique, .. } => (host.endpoints.get(at).map(|endpoint| endpoint.ids), *clique),
            Endpoint::Virtio(_) | Endpoint::Watchdog => (None, None),
        };
        if ids.is_some_and(|ids| clique::check(&ids, false).is_ok()) {
            if clique.is_some() { &mut with } else { &mut without }.push(name.to_string());
        }
    }
    let mut warnings = Vec::new();
    if !with.is_empty() && !without.is_empty() {
        warnings.push(format!(
            "{} have a clique and {} have none: NVIDIA's driver then refuses peer-to-peer between all of them",
            with.join(", "),
            without.join(", ")
        ));
    }
    if !with.is_empty() && !config.cpus.kvm_signature {
        warnings.push(format!(
            "the cliques of {} are without effect: NVIDIA's driver reads them only where it finds KVM's signature, which --cpus \
             kvm-signature=off hides",
            with.join(", ")
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use api::config::PcieConfig;

    use super::*;
    use crate::host::{self, recorded::RecordedHost};
    use crate::spec::{SpecError, spec};

    fn planned(file: &str, pcie: &str, devices: &[&str]) -> Result<Spec, SpecError> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
        let tree = RecordedHost::read(&path).unwrap().tree;
        let devices = devices.iter().map(|device| device.parse().unwrap()).collect();
        let pcie: PcieConfig = pcie.parse().unwrap();
        let config = VmConfig { devices, pcie, ..VmConfig::default() };
        spec(&config, &host::look_in(&tree, &config).unwrap())
    }

    fn cliques(spec: &Spec) -> Vec<(String, Option<u8>)> {
        let clique = |endpoint: &Endpoint| match endpoint {
            Endpoint::Vfio { clique, .. } => clique.map(Clique::id),
            _ => None,
        };
        spec.endpoints.iter().map(|(name, endpoint)| (name.to_string(), clique(endpoint))).collect()
    }

    const DPU: &str = "tests/topologies/a100x-dpu.json";
    const P4D: &str = "tests/topologies/aws-p4d.json";

    #[test]
    fn case_h3_cliques_come_from_the_host_s_topology_by_default() {
        let devices = ["0000:10:1c.0,id=a", "0000:10:1d.0,id=b", "0000:20:1c.0,id=c", "0000:10:1b.0,id=nic"];
        let of = |pcie: &str| cliques(&planned(P4D, pcie, &devices).unwrap()).into_iter().map(|(_, id)| id).collect::<Vec<_>>();
        for topology in ["host", "root-ports", "switch", "flat"] {
            assert_eq!(of(&format!("topology={topology}")), [Some(0), Some(0), Some(1), None], "{topology}");
        }
        assert_eq!(of("cliques=root-complex"), [Some(0), Some(0), Some(0), None]);
        assert_eq!(of("cliques=off"), [None; 4]);
    }

    #[test]
    fn case_h3_a_gpu_that_comes_later_shows_what_it_would_have_shown_from_the_start() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(P4D);
        let tree = RecordedHost::read(&path).unwrap().tree;
        let at = |text: &str| text.parse::<HostBdf>().unwrap();
        let id = |id| Clique::new(id).ok();
        let member = |text: &str, given: Option<u8>| Member { at: at(text), given: given.and_then(id) };
        let comes = |policy, there: &[Member], text: &str| newcomer(policy, &tree, there, at(text)).unwrap();
        let (auto, off) = (CliquePolicy::Auto, CliquePolicy::Off);
        let one = [member("0000:10:1c.0", Some(3))];
        assert_eq!(comes(auto, &[], "0000:10:1c.0"), (id(0), vec![]));
        assert_eq!(comes(auto, &one, "0000:10:1d.0"), (id(3), vec![]), "the same switch");
        assert_eq!(comes(auto, &one, "0000:20:1c.0"), (id(0), vec![]), "another switch");
        assert_eq!(comes(CliquePolicy::RootComplex, &one, "0000:20:1c.0"), (id(3), vec![]));
        assert_eq!(comes(auto, &one, "0000:10:1b.0"), (None, vec![]), "a network card");
        for (policy, there, text) in [(off, &one, "0000:10:1d.0"), (auto, &[member("0000:10:1c.0", None)], "0000:10:1d.0")] {
            let (_, notes) = comes(policy, there, text);
            assert!(notes.iter().any(|note| note.contains("refuses peer-to-peer")), "{policy} {notes:?}");
        }
    }

    #[test]
    fn what_is_given_stands_and_the_rest_of_its_set_joins_it() {
        let spec = planned(DPU, "host", &["0000:41:00.0,id=a,clique=7", "0000:de:00.0,id=b"]).unwrap();
        assert_eq!(cliques(&spec), [("a".to_owned(), Some(7)), ("b".to_owned(), Some(0))]);
        let spec = planned(P4D, "host", &["0000:10:1c.0,id=a,clique=7", "0000:10:1d.0,id=b"]).unwrap();
        assert_eq!(cliques(&spec), [("a".to_owned(), Some(7)), ("b".to_owned(), Some(7))]);
        assert_eq!(spec.notes, Vec::<String>::new());
    }

    #[test]
    fn a_set_that_is_split_or_covered_in_part_is_a_warning() {
        let split = planned(P4D, "host", &["0000:10:1c.0,id=a,clique=1", "0000:10:1d.0,id=b,clique=2"]).unwrap();
        assert!(split.notes.iter().any(|note| note.contains("in different cliques")), "{:?}", split.notes);
        let part = planned(P4D, "host,cliques=off", &["0000:10:1c.0,id=a,clique=1", "0000:10:1d.0,id=b"]).unwrap();
        assert!(part.notes.iter().any(|note| note.contains("a have a clique and b have none")), "{:?}", part.notes);
    }

    #[test]
    fn case_h4_a_clique_with_a_hidden_signature_is_a_warning() {
        let config = |cpus: &str, devices: [&str; 2]| VmConfig {
            devices: devices.map(|device| device.parse().unwrap()).to_vec(),
            cpus: cpus.parse().unwrap(),
            ..VmConfig::default()
        };
        let gpu = |id: &str, clique: &str| format!("stub,id={id},ids=10de:2330,class=030200{clique}");
        let notes = |cpus: &str, clique: &str| {
            let config = config(cpus, [&gpu("a", clique), &gpu("b", clique)]);
            spec(&config, &Host::default()).unwrap().notes
        };
        assert_eq!(notes("1", ",clique=2"), Vec::<String>::new());
        assert_eq!(notes("1,kvm-signature=off", ""), Vec::<String>::new());
        let told = notes("1,kvm-signature=off", ",clique=2");
        assert!(told.len() == 1 && told[0].contains("the cliques of a, b are without effect"), "{told:?}");
    }

    #[test]
    fn a_nic_shows_a_clique_only_when_that_is_said() {
        let error = planned(DPU, "host", &["0000:3d:00.0,id=nic,clique=0"]).unwrap_err();
        assert!(matches!(error, SpecError::Clique { .. }), "{error}");
        let spec = planned(DPU, "host", &["0000:3d:00.0,id=nic,clique=0,clique-any-vendor=on"]).unwrap();
        assert_eq!(cliques(&spec), [("nic".to_owned(), Some(0))]);
    }
}
