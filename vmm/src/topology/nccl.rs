//! Writes a hierarchy as a topology file that NCCL reads (`NCCL_TOPO_FILE`), as NCCL itself would find it by its walk through
//! sysfs (nccl: src/graph/xml.cc): processors by memory node, below them switches and devices, no root or downstream ports.
//!
//! NCCL's reader is its own: no XML declaration, no line break within a tag, lower-case addresses, at most 256 elements.

use std::fmt::Write as _;

use pci::link::{Link, LinkRate, LinkSpeed};
use pci::topology::PortKind;
use thiserror::Error;

use super::view::{Node, On, View};
use crate::host::tree::HostKind;

/// Elements that NCCL has room for.
const ELEMENTS: usize = 256;

/// The file: GPUs, accelerators and network devices, with the switches above them.
///
/// # Errors
/// If NCCL has no room for it.
pub fn nccl(view: &View) -> Result<String, NcclError> {
    let mut writer = Writer { view, text: "<system version=\"1\">\n".to_owned(), elements: 1 };
    let mut nodes: Vec<Option<u32>> = Vec::new();
    for index in 0..view.roots.len() {
        let has_devices = view.below(On::Root(index)).any(|(index, _)| writer.leads_to_device(index));
        let node = view.roots.get(index).and_then(|root| root.numa_node);
        if has_devices && !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    nodes.sort_unstable();
    for node in nodes {
        writer.processor(node);
    }
    if writer.elements > ELEMENTS {
        return Err(NcclError { elements: writer.elements });
    }
    Ok(writer.text + "</system>\n")
}

struct Writer<'a> {
    view: &'a View,
    text: String,
    elements: usize,
}

impl Writer<'_> {
    fn processor(&mut self, node: Option<u32>) {
        self.elements += 1;
        let number = node.map_or("-1".to_owned(), |node| node.to_string());
        let _ = writeln!(self.text, "  <cpu numaid=\"{number}\">");
        for (index, _) in self.view.roots.iter().enumerate().filter(|(_, root)| root.numa_node == node) {
            self.below(On::Root(index), None, 2);
        }
        self.text.push_str("  </cpu>\n");
    }

    /// What is on `on`; `above` is the link of the port that leads there.
    fn below(&mut self, on: On, above: Option<Link>, depth: usize) {
        for (index, node) in self.view.below(on) {
            match node.kind {
                HostKind::Port(PortKind::Upstream) if self.leads_to_device(index) => {
                    self.element(node, above, depth, false);
                    self.below(On::Node(index), None, depth + 1);
                    let _ = writeln!(self.text, "{}</pci>", "  ".repeat(depth));
                }
                HostKind::Endpoint if is_device(node) => self.element(node, above, depth, true),
                HostKind::Port(PortKind::Upstream) | HostKind::Endpoint => {}
                HostKind::Port(_) | HostKind::OtherBridge => self.below(On::Node(index), node.link, depth),
            }
        }
    }

    fn element(&mut self, node: &Node, above: Option<Link>, depth: usize, is_leaf: bool) {
        self.elements += 1;
        let ids = node.ids;
        let _ = write!(
            self.text,
            "{}<pci busid=\"{}\" class=\"0x{}\" vendor=\"0x{:04x}\" device=\"0x{:04x}\" subsystem_vendor=\"0x{:04x}\" subsystem_device=\"0x{:04x}\"",
            "  ".repeat(depth),
            node.at,
            ids.class,
            ids.vendor,
            ids.device,
            ids.subsystem_vendor,
            ids.subsystem
        );
        if let Some(rate) = rate(node.link, above) {
            let _ = write!(self.text, " link_speed=\"{}\" link_width=\"{}\"", as_sysfs(rate.speed), rate.width.lanes());
        }
        self.text.push_str(if is_leaf { "/>\n" } else { ">\n" });
    }

    fn leads_to_device(&self, index: usize) -> bool {
        self.view.nodes.get(index).is_some_and(is_device)
            || self.view.below(On::Node(index)).any(|(index, _)| self.leads_to_device(index))
    }
}

/// GPUs, accelerators and network devices. NCCL looks a network device up by function 0 of its device.
fn is_device(node: &Node) -> bool {
    let [base, _] = node.ids.class.base_and_sub().to_be_bytes();
    node.kind == HostKind::Endpoint && (matches!(base, 0x03 | 0x12) || (base == 0x02 && node.at.ends_with(".0")))
}

/// The slower and the narrower of a function's own maximum and that of the port above.
fn rate(own: Option<Link>, above: Option<Link>) -> Option<LinkRate> {
    let rates = own.into_iter().chain(above).map(|link| link.max);
    rates.reduce(|a, b| LinkRate { speed: a.speed.min(b.speed), width: a.width.min(b.width) })
}

/// `32.0 GT/s PCIe`.
fn as_sysfs(speed: LinkSpeed) -> String {
    let text = speed.to_string();
    let number = text.trim_end_matches("GT/s");
    if number.contains('.') { format!("{number} GT/s PCIe") } else { format!("{number}.0 GT/s PCIe") }
}

/// A hierarchy that NCCL cannot read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the file would have {elements} elements, and NCCL reads at most {ELEMENTS}: name fewer devices")]
pub struct NcclError {
    elements: usize,
}

#[cfg(test)]
mod tests {
    use super::super::tests::{host_file, plan_of, plan_of_gpu_and_nic};
    use super::*;

    #[test]
    fn a_plan_becomes_the_file_that_nccl_would_write_in_the_guest() {
        assert_eq!(
            nccl(&plan_of_gpu_and_nic()).unwrap(),
            "\
<system version=\"1\">
  <cpu numaid=\"0\">
    <pci busid=\"0000:01:00.0\" class=\"0x060400\" vendor=\"0x1000\" device=\"0xc030\" subsystem_vendor=\"0x1000\" subsystem_device=\"0x0100\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\">
      <pci busid=\"0000:03:00.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"0x20b5\" subsystem_vendor=\"0x10de\" subsystem_device=\"0x1533\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\"/>
      <pci busid=\"0000:04:00.0\" class=\"0x020000\" vendor=\"0x15b3\" device=\"0x1021\" subsystem_vendor=\"0x15b3\" subsystem_device=\"0x0023\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"/>
    </pci>
  </cpu>
</system>
"
        );
    }

    #[test]
    fn files_of_host_and_guest_differ_in_addresses_alone() {
        for file in ["one-switch", "nested-switches", "two-nodes", "hgx-8gpu"] {
            let host = View::of_host(&host_file(file).tree);
            let devices = host.nodes.iter().filter(|node| is_device(node)).map(|node| (node.at.clone(), node.at.clone()));
            let mut devices: Vec<_> = devices.collect();
            devices.sort();
            let (guest, _) = plan_of(file, &devices);
            let plain = |view: &View| {
                let text = nccl(view).unwrap();
                let lines = text.lines().map(|line| match line.split_once("busid=\"") {
                    Some((start, rest)) => format!("{start}{}", rest.split_once('"').unwrap().1),
                    None => line.to_owned(),
                });
                lines.collect::<Vec<_>>().join("\n")
            };
            assert_eq!(plain(&guest), plain(&host), "{file}");
            assert!(nccl(&host).unwrap().matches("<pci").count() >= 4, "{file}");
        }
    }

    #[test]
    fn tags_keep_to_what_nccl_s_reader_takes() {
        let text = nccl(&View::of_host(&host_file("hgx-8gpu").tree)).unwrap();
        assert!(text.starts_with("<system version=\"1\">") && !text.contains('\t') && text.is_ascii());
        for line in text.lines() {
            assert!(
                line.matches('<').count() == 1 && line.matches('>').count() == 1 && line.matches('=').count() <= 16,
                "{line}"
            );
            assert!(!line.contains("<pci") || line.contains(" class=\"0x"), "{line}");
        }
        // Switches of NVSwitches and the switch above them lead to no device that NCCL asks for.
        assert!(!text.contains("10b5") && text.matches("<cpu").count() == 2);
    }

    #[test]
    fn more_elements_than_nccl_has_room_for_are_refused() {
        let mut view = View::of_host(&host_file("one-switch").tree);
        let gpu = view.nodes.iter().find(|node| is_device(node)).unwrap().clone();
        view.nodes.extend(std::iter::repeat_n(gpu, 300));
        assert!(nccl(&view).unwrap_err().to_string().contains("at most 256"));
    }
}
