//! Looks at what a device that comes is: a stub, or a function of the host, and where that is.

use std::path::Path;

use api::config::{DeviceConfig, HostPorts, PcieConfig, VmConfig};
use pci::address::HostBdf;
use pci::caps::clique::Clique;
use pci::topology::{EndpointSpec, Name};

use super::nearness::HostPlace;
use super::{HotPlug, HotPlugError};
use crate::changes::AddedFunction;
use crate::cliques::{self, Member};
use crate::host::scan::scan;
use crate::host::{self, HostError, SYSFS};
use crate::spec::{self, Endpoint, Host, SpecError};

/// What one function of a device is.
pub(super) struct Looked {
    pub(super) endpoint: Endpoint,
    pub(super) spec: EndpointSpec,
    /// Where it is on the host.
    pub(super) from: Option<HostPlace>,
    /// The function of a host that is data for which it stands.
    pub(super) stands_for: Option<HostBdf>,
}

impl HotPlug {
    /// What a function is, checked against the host and against those that are there or come before it. Functions of the host
    /// that come in the same step are `with` it.
    pub(super) fn look(
        &self,
        config: &VmConfig,
        device: &DeviceConfig,
        name: &Name,
        before: &[AddedFunction],
        with: &[HostBdf],
    ) -> Result<Looked, HotPlugError> {
        let (devices, memory) = (vec![device.clone()], config.memory.clone());
        // Ports are there already.
        let pcie = PcieConfig { host_ports: HostPorts::Used, ..config.pcie };
        let mut alone = VmConfig { devices, memory, pcie, ..VmConfig::default() };
        if let Some(device) = alone.devices.first_mut() {
            device.id = Some(name.0.clone());
            device.on = None;
        }
        let there = || self.endpoints.iter().chain(before.iter().map(|function| (&function.name, &function.endpoint)));
        let stands_for = |name: &Name| {
            let before = before.iter().find(|function| function.name == *name);
            self.stand_ins.get(name).copied().or_else(|| before?.stands_for)
        };
        let members = || there().filter_map(|(name, endpoint)| Some((name, member(endpoint, stands_for(name))?)));
        let host = match &self.recorded {
            Some(recorded) => Host { emulated: true, ..host::look_in(&recorded.tree, &alone)? },
            None => {
                let beside = self.endpoints.values().filter_map(|endpoint| member(endpoint, None)).map(|member| member.at);
                host::look_beside(&alone, &beside.chain(with.iter().copied()).collect::<Vec<_>>())?
            }
        };
        let at = host.wanted.get(&name.0).copied();
        if let Some((there, _)) = members().find(|(_, member)| Some(member.at) == at) {
            let (name, there) = (name.clone(), there.clone());
            return Err(if self.leaves(&there) {
                HotPlugError::StillHas { name, there }
            } else {
                HotPlugError::Twice { name, there }
            });
        }
        let automatic = match at {
            Some(at) if device.clique.is_none() => {
                self.clique_of(config, at, &host, &members().map(|(_, member)| member).collect::<Vec<_>>())?
            }
            _ => None,
        };
        let from = at.and_then(|at| HostPlace::of(at, &host.tree, self.numa.as_ref()));
        let (endpoint, spec) = spec::single(&alone, &host, automatic).map_err(HotPlugError::Spec)?;
        Ok(Looked { endpoint, spec, from, stands_for: at.filter(|_| host.emulated) })
    }

    /// The clique of a host function that nobody gave one, beside those that are `there`.
    fn clique_of(&self, config: &VmConfig, at: HostBdf, host: &Host, there: &[Member]) -> Result<Option<Clique>, HotPlugError> {
        if !host.tree.get(at).is_some_and(cliques::takes_part) {
            return Ok(None);
        }
        let all: Vec<HostBdf> = there.iter().map(|member| member.at).chain([at]).collect();
        let tree = match &self.recorded {
            Some(recorded) => recorded.tree.clone(),
            None => scan(Path::new(SYSFS), &all).map_err(HostError::from)?,
        };
        let found = spec::peers::newcomer(config.pcie.cliques, &tree, there, at).map_err(SpecError::from);
        let (clique, notes) = found.map_err(HotPlugError::Spec)?;
        notes.iter().for_each(|note| log::warn!("{note}"));
        Ok(clique)
    }
}

/// The function of the host that an endpoint is or stands for, with the clique that it shows.
fn member(endpoint: &Endpoint, stands_for: Option<HostBdf>) -> Option<Member> {
    match endpoint {
        Endpoint::Vfio { at, clique, .. } => Some(Member { at: *at, given: *clique }),
        Endpoint::Stub(stub) => Some(Member { at: stands_for?, given: stub.clique }),
        _ => None,
    }
}
