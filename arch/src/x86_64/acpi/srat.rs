//! Builds SRAT: which processors, memory and root bridges belong to which memory node (ACPI 6.5 5.2.16).

use acpi_tables::sdt::Sdt;

use crate::memory_map::Range;

use super::{Node, RootBridge};

const REVISION: u8 = 3;
const ENABLED: u32 = 1;
/// Memory that may come later (ACPI 6.5 table 5.60).
const HOT_PLUGGABLE: u32 = 1 << 1;
/// APIC ids from here on do not fit the short structure.
const FIRST_LONG_ID: u32 = 255;

/// The table. A node without processors and memory is kept alive by a generic initiator, its root bridge: otherwise
/// Linux drops the node, and devices near it get node -1.
pub(super) fn srat(nodes: &[Node], root_bridges: &[RootBridge]) -> Sdt {
    let mut body = Vec::with_capacity(1024);
    body.extend(1u32.to_le_bytes()); // reserved, reads 1
    body.extend(0u64.to_le_bytes());
    for node in nodes {
        for &cpu in &node.cpus {
            processor(&mut body, node.proximity, cpu);
        }
        for memory in &node.memory {
            self::memory(&mut body, node.proximity, memory, ENABLED);
        }
        for memory in &node.hot_plug {
            self::memory(&mut body, node.proximity, memory, ENABLED | HOT_PLUGGABLE);
        }
        if node.cpus.is_empty() && node.memory.is_empty() {
            let bridge = root_bridges.iter().find(|bridge| bridge.proximity == Some(node.proximity));
            if let Some(bridge) = bridge {
                generic_initiator(&mut body, node.proximity, bridge);
            }
        }
    }
    super::table(*b"SRAT", REVISION, &body)
}

fn processor(body: &mut Vec<u8>, proximity: u32, apic_id: u32) {
    match u8::try_from(apic_id) {
        Ok(short) if apic_id < FIRST_LONG_ID => {
            let [low, high @ ..] = proximity.to_le_bytes();
            body.extend([0, 16, low, short]);
            body.extend(ENABLED.to_le_bytes());
            body.push(0); // local SAPIC EID
            body.extend(high);
            body.extend(0u32.to_le_bytes()); // clock domain
        }
        _ => {
            body.extend([2, 24, 0, 0]);
            for field in [proximity, apic_id, ENABLED, 0, 0] {
                body.extend(field.to_le_bytes());
            }
        }
    }
}

fn memory(body: &mut Vec<u8>, proximity: u32, memory: &Range, flags: u32) {
    body.extend([1, 40]);
    body.extend(proximity.to_le_bytes());
    body.extend([0, 0]);
    body.extend(memory.start.to_le_bytes());
    body.extend(memory.len().to_le_bytes());
    body.extend(0u32.to_le_bytes());
    body.extend(flags.to_le_bytes());
    body.extend(0u64.to_le_bytes());
}

fn generic_initiator(body: &mut Vec<u8>, proximity: u32, bridge: &RootBridge) {
    const PCI_HANDLE: u8 = 1;
    body.extend([5, 32, 0, PCI_HANDLE]);
    body.extend(proximity.to_le_bytes());
    body.extend(bridge.segment.to_le_bytes());
    body.extend([*bridge.buses.start(), 0]); // bus, then device and function 0
    body.extend([0; 12]);
    body.extend(ENABLED.to_le_bytes());
    body.extend(0u32.to_le_bytes());
}
