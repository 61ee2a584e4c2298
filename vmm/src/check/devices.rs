//! Judges each device: is it free, does its link run, can it ask for translations. Pure.

use super::reach::{self, Reason};
use super::report::{Device, Finding, Severity};
use super::silence::Silence;
use crate::host::check::{CheckError, CheckWarning, Wanted, faults, warnings};
use crate::host::fabric::Ats;
use crate::host::tree::{HostNode, HostTree};
use crate::topology::view::View;

/// The devices, for the table.
#[must_use]
pub fn listing(tree: &HostTree, wanted: &[Wanted]) -> Vec<Device> {
    let view = View::of_host(tree);
    let noun = |at: &str| view.nodes.iter().find(|node| node.at == at).map_or("-", |node| node.noun());
    let device = |wanted: &Wanted| {
        let node = tree.get(wanted.at);
        let at = wanted.at.to_string();
        Device {
            name: wanted.name.clone(),
            what: noun(&at).to_owned(),
            at,
            ids: node.map_or_else(|| "-".to_owned(), |node| format!("{:04x}:{:04x}", node.ids.vendor, node.ids.device)),
            driver: node.and_then(|node| node.driver.clone()),
            group: node.and_then(|node| node.group),
            node: node.and_then(|node| node.numa_node),
        }
    };
    wanted.iter().map(device).collect()
}

/// Whether a device is one of those that exchange data: network, storage, display, coprocessor, accelerator.
#[must_use]
pub fn is_peer(node: &HostNode) -> bool {
    matches!(node.ids.class.base(), 0x02 | 0x03 | 0x12) || matches!(node.ids.class.base_and_sub(), 0x0108 | 0x0B40)
}

/// A network card.
#[must_use]
pub fn is_nic(node: &HostNode) -> bool {
    node.ids.class.base() == 0x02
}

/// What is to be said of each device, as far as the host is not silent.
#[must_use]
pub fn findings(tree: &HostTree, wanted: &[Wanted], silence: Silence) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut faults = faults(tree, wanted);
    faults.retain(|fault| !(silence.of_use && matches!(fault, CheckError::NoGroup { .. })));
    findings.extend(faults.iter().map(fault));
    findings.extend(warnings(tree, wanted, &[]).iter().map(|warning| {
        let CheckWarning::PartialGroup { name, .. } = warning;
        let text = warning.to_string();
        Finding::new(Severity::Note, "group", name, text.strip_prefix(&format!("device {name} is ")).unwrap_or(&text))
    }));
    if faults.is_empty() && !silence.of_use {
        findings.push(Finding::new(Severity::Ok, "driver", "all devices", "bound to vfio-pci, their IOMMU groups are viable"));
    }
    for device in wanted {
        let Some(node) = tree.get(device.at).filter(|node| is_peer(node)) else { continue };
        findings.extend(link(node).map(|text| Finding::new(Severity::Note, "link", &device.name, text)));
        if node.numa_node.is_none() && tree.memory_nodes.len() > 1 {
            findings.push(Finding::new(Severity::Note, "node", &device.name, "the host does not tell its memory node"));
        }
        if !silence.of_registers {
            findings.extend(ats(tree, wanted, device, node));
        }
    }
    findings
}

fn fault(error: &CheckError) -> Finding {
    let (topic, about) = match error {
        CheckError::Absent { name, .. } | CheckError::Bridge { name, .. } => ("device", name),
        CheckError::Twice { second, .. } => ("device", second),
        CheckError::NoGroup { name, .. } => ("iommu", name),
        CheckError::Driver { name, .. } => ("driver", name),
        CheckError::GroupNotViable { name, .. } => ("group", name),
        CheckError::Memlock { .. } => return Finding::new(Severity::Problem, "memlock", "host", error),
    };
    let text = error.to_string();
    // The line begins with the device already.
    let text = text.strip_prefix(&format!("device {about}: ")).unwrap_or(&text);
    Finding::new(Severity::Problem, topic, about, text)
}

fn link(node: &HostNode) -> Option<String> {
    let link = node.link.filter(|link| link.current != link.max)?;
    Some(format!(
        "its link runs at {} of {}; idle GPUs slow theirs down, and a slot may be narrower than the card",
        link.current, link.max
    ))
}

/// Network cards reach their peers below a switch directly with address translation alone.
fn ats(tree: &HostTree, wanted: &[Wanted], device: &Wanted, node: &HostNode) -> Option<Finding> {
    let others = wanted.iter().filter(|other| other.at != device.at).filter_map(|other| tree.get(other.at));
    let in_switch = |other: &HostNode| {
        let outside = matches!(
            reach::way(tree, node, other).reason,
            Reason::OneDevice | Reason::OneBus { .. } | Reason::NoSwitch { .. } | Reason::TwoRoots
        );
        is_peer(other) && !outside
    };
    if !is_nic(node) || !others.into_iter().any(in_switch) {
        return None;
    }
    let finding = |severity, text: &str| Finding::new(severity, "ats", &device.name, text);
    Some(match node.fabric.ats {
        Some(ats) if ats.is_enabled() => finding(Severity::Ok, "address translation (ATS) is on"),
        Some(Ats { control, .. }) => finding(
            Severity::Warning,
            &format!(
                "address translation (ATS) is off (control {control:#06x}): where a switch redirects, its requests go through the root complex"
            ),
        )
        .remedy(Some(
            "switch the IOMMU on; the kernel enables ATS for devices behind an IOMMU that has it too (`lspci -vv`: ATSCtl)",
        )),
        None if node.fabric.is_whole() => {
            finding(Severity::Warning, "it has no address translation (ATS): where a switch redirects, its requests go through the root complex")
                .remedy(Some("for ConnectX cards: mlxconfig -d ADDRESS set ATS_ENABLED=true, then restart the host"))
        }
        None => finding(Severity::Warning, "whether it has address translation (ATS) could not be read")
            .remedy(Some("run this as root; a recorded host has to be recorded by root")),
    })
}
