//! Builds SLIT: how far memory nodes are from each other (ACPI 6.5 5.2.17).

use acpi_tables::sdt::Sdt;

use super::Node;

const REVISION: u8 = 1;

/// The table, if every node knows its distances to all. Nodes are numbered 0 and up then, in this order.
pub(super) fn slit(nodes: &[Node]) -> Option<Sdt> {
    let known = nodes.iter().all(|node| node.distances.len() == nodes.len());
    if nodes.is_empty() || !known {
        return None;
    }
    let mut body = Vec::with_capacity(8 + nodes.len() * nodes.len());
    body.extend((nodes.len() as u64).to_le_bytes());
    for node in nodes {
        body.extend(&node.distances);
    }
    Some(super::table(*b"SLIT", REVISION, &body))
}
