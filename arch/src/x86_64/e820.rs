//! Decides what the firmware memory map says: which addresses a kernel may use as memory and which it must not touch.

use crate::memory_map::{MemoryMap, Range};

use super::layout;

/// Kind of an entry, by its number in the table (ACPI 6.5 table 15.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Free memory.
    Ram = 1,
    /// Not memory, or not free.
    Reserved = 2,
    /// Memory that holds ACPI tables.
    Acpi = 3,
}

impl Kind {
    /// The number in the table.
    #[must_use]
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct E820Entry {
    /// The addresses.
    pub range: Range,
    /// What they are.
    pub kind: Kind,
}

/// The table, in order of address, without overlaps.
///
/// ECAM is reserved here as well as in ACPI: without the ports 0xCF8 and 0xCFC Linux accepts it only so. Windows for
/// BARs never appear, or Linux would refuse to place BARs in them (linux: `arch/x86/pci/mmconfig-shared.c`,
/// `arch/x86/kernel/resource.c`).
#[must_use]
pub fn table(map: &MemoryMap) -> Vec<E820Entry> {
    let mut entries = Vec::with_capacity(map.ram.len() + map.ecam.len() + 4);
    let mut push = |start: u64, end: u64, kind: Kind| {
        let range = Range { start, end };
        entries.push(E820Entry { range, kind });
    };

    let low = map.low_ram();
    push(0, low.end.min(layout::CONVENTIONAL_END), Kind::Ram);
    push(layout::ACPI_TABLES.start, layout::HIGH_MEMORY, Kind::Reserved);
    if low.end > layout::HIGH_MEMORY {
        push(layout::HIGH_MEMORY, low.end, Kind::Ram);
    }
    for ram in map.ram.iter().skip(1) {
        push(ram.start, ram.end, Kind::Ram);
    }
    for ecam in &map.ecam {
        push(ecam.range.start, ecam.range.end, Kind::Reserved);
    }
    if let Some(firmware) = map.firmware {
        push(firmware.start, firmware.end, Kind::Reserved);
    }
    entries.sort_by_key(|entry| entry.range.start);
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_map::{GIB, MIB, MemoryMapRequest, SegmentBuses};

    fn map(ram: u64) -> MemoryMap {
        let segments = [(0, 3), (1, 255)];
        MemoryMap::new(&MemoryMapRequest {
            ram,
            hot_plug: 0,
            physical_address_bits: 40,
            reserved: Vec::new(),
            firmware_size: 64 << 10,
            segments: segments.map(|(segment, last_bus)| SegmentBuses { segment, last_bus }).to_vec(),
        })
        .unwrap()
    }

    #[test]
    fn ram_ecam_and_firmware_are_listed_in_order() {
        let table: Vec<_> = table(&map(3 * GIB)).iter().map(|entry| (entry.range.start, entry.range.end, entry.kind)).collect();
        assert_eq!(
            table,
            [
                (0, 0xA_0000, Kind::Ram),
                (0xC_0000, 0x10_0000, Kind::Reserved),
                (0x10_0000, 2 * GIB, Kind::Ram),
                (0xE000_0000, 0xE040_0000, Kind::Reserved),
                (0xFFFF_0000, 4 * GIB, Kind::Reserved),
                (4 * GIB, 5 * GIB, Kind::Ram),
                (5 * GIB, 5 * GIB + 256 * MIB, Kind::Reserved),
            ]
        );
    }

    #[test]
    fn windows_for_bars_are_never_listed() {
        for ram in [16 * MIB, 2 * GIB, 8 * GIB] {
            let map = map(ram);
            for entry in table(&map) {
                assert!(!entry.range.overlaps(&map.mmio32), "{}", entry.range);
                assert!(map.mmio64.iter().all(|window| !entry.range.overlaps(window)), "{}", entry.range);
            }
        }
    }

    #[test]
    fn tables_and_boot_structures_lie_as_the_map_says() {
        let table = table(&map(16 * MIB));
        let kind = |range: Range| table.iter().find(|entry| entry.range.contains_range(&range)).map(|entry| entry.kind);
        assert_eq!(kind(layout::ACPI_TABLES), Some(Kind::Reserved));
        assert_eq!(kind(Range::sized(layout::RSDP, 36)), Some(Kind::Reserved));
        assert_eq!(kind(layout::SMBIOS), Some(Kind::Reserved));
        assert_eq!(kind(layout::CMDLINE), Some(Kind::Ram));
        assert_eq!(kind(layout::PVH_START_INFO), Some(Kind::Ram));
    }
}
