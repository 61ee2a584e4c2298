//! Judges each pair of devices, and the ports between them. Pure.

use std::collections::BTreeMap;

use pci::address::HostBdf;

use super::acs::{self, AcsError};
use super::devices::{is_nic, is_peer};
use super::reach::{self, Reason, Verdict, Way};
use super::report::{Finding, Pair, Port, Severity};
use super::silence::Silence;
use crate::host::check::Wanted;
use crate::host::tree::{HostNode, HostTree};

/// Each pair of devices that exchange data, in the order in which they were given.
#[must_use]
pub fn pairs(tree: &HostTree, wanted: &[Wanted]) -> Vec<Pair> {
    both(tree, wanted).map(|(a, b)| pair(tree, a, b)).collect()
}

type Named<'a> = (&'a Wanted, &'a HostNode);

fn both<'a>(tree: &'a HostTree, wanted: &'a [Wanted]) -> impl Iterator<Item = (Named<'a>, Named<'a>)> {
    let node = |wanted: &'a Wanted| Some((wanted, tree.get(wanted.at).filter(|node| is_peer(node))?));
    let peers: Vec<Named<'a>> = wanted.iter().filter_map(node).collect();
    let later = peers.clone();
    peers.into_iter().enumerate().flat_map(move |(index, a)| {
        let rest: Vec<Named<'a>> = later.iter().skip(index + 1).filter(|b| b.0.at != a.0.at).copied().collect();
        rest.into_iter().map(move |b| (a, b))
    })
}

/// The way that counts: that of the network card, which reads and writes the memory of its peer, or the worse of both.
#[must_use]
pub fn way(tree: &HostTree, a: &HostNode, b: &HostNode) -> Way {
    let (there, back) = (reach::way(tree, a, b), reach::way(tree, b, a));
    match (is_nic(a), is_nic(b)) {
        (true, false) => there,
        (false, true) => back,
        _ if back.verdict() > there.verdict() => back,
        _ => there,
    }
}

fn pair(tree: &HostTree, (a, a_node): Named<'_>, (b, b_node): Named<'_>) -> Pair {
    let way = way(tree, a_node, b_node);
    let ports = between(tree, a_node, b_node);
    let faults = ports.iter().filter_map(|port| Some((port.at, acs::judge(port).err()?)));
    Pair {
        a: a.name.clone(),
        b: b.name.clone(),
        way: way.verdict(),
        why: way.to_string(),
        ports: faults.map(|(at, error)| port(at, &error)).collect(),
    }
}

fn between<'a>(tree: &'a HostTree, a: &'a HostNode, b: &'a HostNode) -> Vec<&'a HostNode> {
    match reach::way(tree, a, b).reason {
        Reason::OneDevice | Reason::OneBus { .. } => Vec::new(),
        _ => {
            let mut ports = reach::ports(tree, a, b);
            ports.extend(reach::ports(tree, b, a).into_iter().rev());
            let mut seen = Vec::new();
            ports.retain(|port| {
                !seen.contains(&port.at) && {
                    seen.push(port.at);
                    true
                }
            });
            ports
        }
    }
}

fn port(at: HostBdf, error: &AcsError) -> Port {
    let (control, off, on) = match error {
        AcsError::Fault(fault) => {
            (Some(fault.acs.control), fault.off().names().chain(fault.absent().names()).collect(), fault.on().names().collect())
        }
        AcsError::Absent | AcsError::NotReadable => (None, Vec::new(), Vec::new()),
    };
    Port { at: at.to_string(), control, fault: error.to_string(), off, on }
}

/// What is to be said of the ports between devices, once for each port. It matters most where a switch turns requests.
#[must_use]
pub fn findings(tree: &HostTree, wanted: &[Wanted], silence: Silence) -> Vec<Finding> {
    let mut judged: BTreeMap<HostBdf, (Result<(), AcsError>, bool)> = BTreeMap::new();
    for ((_, a), (_, b)) in both(tree, wanted) {
        let turns = !matches!(reach::way(tree, a, b).reason, Reason::NoSwitch { .. } | Reason::TwoRoots);
        for port in between(tree, a, b) {
            judged.entry(port.at).or_insert((acs::judge(port), false)).1 |= turns;
        }
    }
    let mut findings = Vec::new();
    let good: Vec<String> = judged.iter().filter(|(_, (result, _))| result.is_ok()).map(|(at, _)| at.to_string()).collect();
    if !good.is_empty() {
        let text = format!("access control is as recommended ({:#04x})", acs::RECOMMENDED);
        findings.push(Finding::new(Severity::Ok, "acs", good.join(", "), text));
    }
    for (at, (result, turns)) in &judged {
        let Err(error) = result else { continue };
        if silence.of_registers && *error == AcsError::NotReadable {
            continue;
        }
        let severity = if *turns { Severity::Warning } else { Severity::Note };
        let remedy = match error {
            AcsError::Fault(fault) => fault.command(),
            AcsError::NotReadable => Some("run this as root; a recorded host has to be recorded by root".to_owned()),
            AcsError::Absent => None,
        };
        findings.push(Finding::new(severity, "acs", format_args!("port {at}"), error).remedy(remedy));
    }
    findings.extend(both(tree, wanted).filter_map(|((a, a_node), (b, b_node))| {
        let way = way(tree, a_node, b_node);
        let severity = match way.verdict() {
            Verdict::Direct if matches!(way.reason, Reason::Untranslated { .. }) => Severity::Warning,
            Verdict::Impossible => Severity::Problem,
            _ => return None,
        };
        Some(Finding::new(severity, "way", format_args!("{} and {}", a.name, b.name), way))
    }));
    findings
}
