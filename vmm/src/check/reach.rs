//! Decides which way the requests of one device take to another: straight through a switch, through the root complex, or not
//! at all. Pure; looks at access control (ACS) and address translation (ATS) as the host has them set.
//!
//! A guest's device sends guest addresses, which only the IOMMU can translate, and the IOMMU is in the root complex. A switch
//! therefore sends peer requests up (request redirection) unless the device has asked for the translation before (ATS) and the
//! port lets translated requests pass (direct translated).

use std::fmt;

use pci::address::HostBdf;
use pci::topology::PortKind;
use serde::Serialize;

use crate::host::fabric::{Acs, Ats};
use crate::host::tree::{HostKind, HostNode, HostTree};

/// Which way requests take; better ones first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Within a device or a switch.
    Direct,
    /// Up to the root complex and down again: correct, and slower.
    RootComplex,
    /// What decides could not be read.
    Unknown,
    /// They are errors.
    Impossible,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Direct => "direct",
            Self::RootComplex => "root complex",
            Self::Unknown => "not known",
            Self::Impossible => "impossible",
        })
    }
}

/// A way and what makes it so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    /// Who sends the requests.
    pub from: HostBdf,
    /// What decides.
    pub reason: Reason,
}

impl Way {
    /// What the reason comes to.
    #[must_use]
    pub const fn verdict(&self) -> Verdict {
        match self.reason {
            Reason::OneDevice | Reason::OneBus { .. } | Reason::Translated { .. } | Reason::Untranslated { .. } => {
                Verdict::Direct
            }
            Reason::NoSwitch { .. } | Reason::TwoRoots | Reason::NotTranslated { .. } | Reason::NotPassed { .. } => {
                Verdict::RootComplex
            }
            Reason::NotReadable { .. } => Verdict::Unknown,
            Reason::TranslationBlocked { .. } | Reason::EgressControl { .. } => Verdict::Impossible,
        }
    }
}

/// What decides about a way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Both are functions of one device.
    OneDevice,
    /// Both are on one conventional bus.
    OneBus {
        /// The bridge above.
        bridge: HostBdf,
    },
    /// The sender uses ATS, and its port lets translated requests pass.
    Translated {
        /// The port.
        port: HostBdf,
    },
    /// The switch redirects nothing, so that it takes guest addresses for its own.
    Untranslated {
        /// The switch's upstream port.
        switch: HostBdf,
    },
    /// There is no switch above both.
    NoSwitch {
        /// Whether the root complex is asked to forward such requests is up to it.
        root_port: Option<HostBdf>,
    },
    /// They are below different root complexes.
    TwoRoots,
    /// The port redirects, and the sender uses no ATS.
    NotTranslated {
        /// The port.
        port: HostBdf,
    },
    /// The port redirects, and translated requests, too.
    NotPassed {
        /// The port.
        port: HostBdf,
    },
    /// The registers of the port could not be read.
    NotReadable {
        /// The port.
        port: HostBdf,
    },
    /// The sender uses ATS, and a port above takes translated requests for errors.
    TranslationBlocked {
        /// The port.
        port: HostBdf,
    },
    /// The port lets requests to its peers pass only as a table says.
    EgressControl {
        /// The port.
        port: HostBdf,
    },
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = self.from;
        match self.reason {
            Reason::OneDevice => write!(f, "functions of one device"),
            Reason::OneBus { bridge } => write!(f, "on one conventional bus below {bridge}"),
            Reason::Translated { port } => write!(f, "{from} uses ATS and {port} lets translated requests pass"),
            Reason::Untranslated { switch } => write!(
                f,
                "the switch {switch} redirects nothing: it takes addresses of the guest for its own, past the IOMMU, which is right \
                 only where they are the same"
            ),
            Reason::NoSwitch { root_port: Some(port) } => write!(f, "no switch is above both; {from} is below root port {port}"),
            Reason::NoSwitch { root_port: None } => write!(f, "no switch is above both; {from} is in the root complex"),
            Reason::TwoRoots => write!(f, "they are below different root complexes"),
            Reason::NotTranslated { port } => write!(f, "{port} redirects (ReqRedir) and {from} does not use ATS"),
            Reason::NotPassed { port } => {
                write!(f, "{from} uses ATS, but {port} redirects translated requests, too (ReqRedir without DirectTrans)")
            }
            Reason::NotReadable { port } => write!(f, "the access control of {port} could not be read"),
            Reason::TranslationBlocked { port } => {
                write!(f, "{from} uses ATS and {port} takes translated requests for errors (TransBlk)")
            }
            Reason::EgressControl { port } => write!(f, "{port} blocks requests to its peers by a table (EgressCtrl)"),
        }
    }
}

/// The way of requests that `from` sends to `to`.
#[must_use]
pub fn way(tree: &HostTree, from: &HostNode, to: &HostNode) -> Way {
    Way { from: from.at, reason: reason(tree, from, to) }
}

/// Ports, from the one directly above a device up to the one below which another device's path meets; all of them where they
/// do not meet below a switch. Upstream ports have no access control and are left out.
#[must_use]
pub fn ports<'a>(tree: &'a HostTree, of: &'a HostNode, to: &HostNode) -> Vec<&'a HostNode> {
    let to: Vec<HostBdf> = tree.above(to).iter().map(|node| node.at).collect();
    let above = tree.above(of);
    let turns = above.iter().any(|node| node.kind == HostKind::Port(PortKind::Upstream) && to.contains(&node.at));
    let has_control = |node: &&HostNode| matches!(node.kind, HostKind::Port(PortKind::Root | PortKind::Downstream));
    above.into_iter().rev().filter(|node| !turns || !to.contains(&node.at)).filter(has_control).collect()
}

fn reason(tree: &HostTree, from: &HostNode, to: &HostNode) -> Reason {
    if device(from) == device(to) {
        return Reason::OneDevice;
    }
    let (above, other) = (tree.above(from), tree.above(to));
    let common = above.iter().zip(&other).take_while(|(a, b)| a.at == b.at).map(|(node, _)| *node).last();
    match common.map(|node| (node, node.kind)) {
        None if tree.root_complex(from) != tree.root_complex(to) => Reason::TwoRoots,
        None => Reason::NoSwitch { root_port: above.first().map(|node| node.at) },
        Some((switch, HostKind::Port(PortKind::Upstream))) => {
            let below = |path: &[&'_ HostNode]| path.iter().skip_while(|node| node.at != switch.at).nth(1).map(|node| node.at);
            let (ingress, egress) = (below(&above), below(&other));
            let port = |at: Option<HostBdf>| at.and_then(|at| tree.get(at));
            in_switch(from, &above, switch, port(ingress), port(egress))
        }
        // Functions of one device may be spread over device numbers, as virtual functions are.
        Some((_, HostKind::Port(PortKind::Root | PortKind::Downstream))) => Reason::OneDevice,
        Some((bridge, _)) => Reason::OneBus { bridge: bridge.at },
    }
}

/// Requests that turn in a switch, from the port `ingress` to the port `egress`.
fn in_switch(
    from: &HostNode,
    above: &[&HostNode],
    switch: &HostNode,
    ingress: Option<&HostNode>,
    egress: Option<&HostNode>,
) -> Reason {
    let uses_ats = from.fabric.ats.is_some_and(Ats::is_enabled);
    let has = |node: &HostNode, bits: u16| node.fabric.acs.is_some_and(|acs| acs.has(bits));
    let hidden = |node: &&HostNode| node.fabric.acs.is_none() && !node.fabric.is_whole();
    if let Some(port) = ingress.filter(hidden).or_else(|| egress.filter(hidden)) {
        return Reason::NotReadable { port: port.at };
    }
    if let Some(port) = above.iter().find(|port| uses_ats && has(port, Acs::TRANSLATION_BLOCKING)) {
        return Reason::TranslationBlocked { port: port.at };
    }
    let redirects = |node: &HostNode| has(node, Acs::REQUEST_REDIRECT);
    if let Some(port) = ingress.filter(|port| has(port, Acs::EGRESS_CONTROL) && !redirects(port)) {
        return Reason::EgressControl { port: port.at };
    }
    // Completions are redirected where they enter the switch.
    let back = egress.filter(|port| has(port, Acs::COMPLETION_REDIRECT));
    match ingress.filter(|port| redirects(port)) {
        Some(port) if uses_ats && has(port, Acs::DIRECT_TRANSLATED) => Reason::Translated { port: port.at },
        Some(port) if uses_ats => Reason::NotPassed { port: port.at },
        Some(port) => Reason::NotTranslated { port: port.at },
        None => match back {
            Some(port) if !uses_ats => Reason::NotTranslated { port: port.at },
            _ => Reason::Untranslated { switch: switch.at },
        },
    }
}

/// What a function belongs to: bus and device, of the physical function for virtual ones.
fn device(node: &HostNode) -> (u32, u8, u8) {
    let at = node.physical_function.unwrap_or(node.at);
    (at.domain, at.bdf.bus(), at.bdf.devfn().device())
}
