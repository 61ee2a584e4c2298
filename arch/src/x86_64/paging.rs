//! Builds the page tables of the 64-bit entry: the first 4 GiB mapped to themselves in pages of 2 MiB.

/// Size of one table.
const TABLE: usize = 4096;
/// How many GiB are mapped; each takes one page directory.
const MAPPED_GIB: usize = 4;
/// Size of all tables in bytes: one PML4, one directory pointer table, the directories.
pub const SIZE: usize = (2 + MAPPED_GIB) * TABLE;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;

/// The tables for a base of `at`, which the processor takes as CR3. `at` is a multiple of 4096.
///
/// 2 MiB pages serve every processor; 1 GiB pages are optional.
#[must_use]
pub fn tables(at: u64) -> Vec<u8> {
    let table = |index: usize| (at + (index * TABLE) as u64) | PRESENT | WRITABLE;
    let mut bytes = Vec::with_capacity(SIZE);
    let mut push_table = |entries: &mut dyn Iterator<Item = u64>| {
        let end = bytes.len() + TABLE;
        for entry in entries {
            bytes.extend_from_slice(&entry.to_le_bytes());
        }
        bytes.resize(end, 0);
    };
    push_table(&mut core::iter::once(table(1)));
    push_table(&mut (0..MAPPED_GIB).map(|gib| table(2 + gib)));
    for gib in 0..MAPPED_GIB as u64 {
        push_table(&mut (0..512).map(|page| gib << 30 | page << 21 | PRESENT | WRITABLE | LARGE));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Translates as a processor does, with the tables at `at`.
    fn translate(bytes: &[u8], at: u64, address: u64) -> Option<u64> {
        let entry = |table: u64, index: u64| {
            let offset = usize::try_from(table - at + index * 8).unwrap();
            let entry = u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap());
            (entry & PRESENT != 0).then_some(entry)
        };
        let base = |entry: u64| entry & !0xFFF;
        let pml4e = entry(at, address >> 39 & 511)?;
        let pdpte = entry(base(pml4e), address >> 30 & 511)?;
        let pde = entry(base(pdpte), address >> 21 & 511)?;
        assert_ne!(pde & LARGE, 0);
        Some((pde & !0x1F_FFFF) + (address & 0x1F_FFFF))
    }

    #[test]
    fn every_address_below_4_gib_maps_to_itself() {
        let at = 0x9000;
        let bytes = tables(at);
        assert_eq!(bytes.len(), SIZE);
        for address in [0, 0x7000, 0x10_0000, 0x3FFF_FFFF, 0x4000_0000, 0x8765_4321, 0xFEE0_0000, 0xFFFF_FFFF] {
            assert_eq!(translate(&bytes, at, address), Some(address), "{address:#x}");
        }
        assert_eq!(translate(&bytes, at, 1 << 32), None);
    }
}
