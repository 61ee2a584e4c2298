//! Builds the SMBIOS entry point and tables: who made the machine, and that its firmware is recent.
//!
//! Linux reads the firmware date: before 2023 it lets the memory map cut windows for BARs, before 2010 it ignores ECAM
//! above 4 GiB, and without SMBIOS it takes a machine for older than all of that (linux: `arch/x86/pci/acpi.c`,
//! `arch/x86/pci/mmconfig-shared.c`). Source of the structures: SMBIOS 3.7 (DSP0134).

use super::bytes::{checksum, put};

const ENTRY_POINT_SIZE: usize = 24;
/// Where the structures begin, from the entry point on.
const TABLES_OFFSET: usize = 32;
const BIOS_DATE: &str = "01/01/2026";
const NAME: &str = "Banyan";

/// What can be set.
#[derive(Clone, Copy, Debug, Default)]
pub struct SmbiosInputs<'a> {
    /// Version of the program.
    pub version: &'a str,
    /// Serial number of the system, `None` for not specified.
    pub serial: Option<&'a str>,
    /// UUID of the system in the order it is printed, `None` for not present.
    pub uuid: Option<[u8; 16]>,
}

/// Entry point and tables, to be written at `at`, a multiple of 16 in 0xF0000 to 0xFFFFF. Strings are cut to 64 bytes.
#[must_use]
pub fn tables(at: u64, inputs: &SmbiosInputs<'_>) -> Vec<u8> {
    let mut structures = Vec::with_capacity(256);
    structures.extend(bios(inputs));
    structures.extend(system(inputs));
    structures.extend(structure(127, 2, &[], &[]));

    let mut bytes = vec![0; TABLES_OFFSET];
    put(&mut bytes, 0, b"_SM3_");
    put(&mut bytes, 6, &[24, 3, 7, 0, 1]); // length, version 3.7.0, entry point revision
    let len = u32::try_from(structures.len()).unwrap_or(u32::MAX);
    put(&mut bytes, 12, &len.to_le_bytes());
    put(&mut bytes, 16, &(at + TABLES_OFFSET as u64).to_le_bytes());
    let sum = checksum(&bytes[..ENTRY_POINT_SIZE]);
    put(&mut bytes, 5, &[sum]);
    bytes.extend(structures);
    bytes
}

/// Type 0: BIOS information (7.1).
fn bios(inputs: &SmbiosInputs<'_>) -> Vec<u8> {
    let mut body = [0; 22];
    put(&mut body, 0, &[1, 2]); // vendor, version
    put(&mut body, 2, &0xF000u16.to_le_bytes()); // starting segment
    put(&mut body, 4, &[3, 0]); // release date, ROM size of 64 KiB
    put(&mut body, 6, &(1u64 << 7).to_le_bytes()); // characteristics: PCI
    put(&mut body, 14, &[1, 1 << 4]); // ACPI; a virtual machine
    put(&mut body, 16, &[0xFF; 4]); // no BIOS or controller release number
    structure(0, 0, &body, &[NAME, inputs.version, BIOS_DATE])
}

/// Type 1: system information (7.2).
fn system(inputs: &SmbiosInputs<'_>) -> Vec<u8> {
    let mut body = [0; 23];
    let mut strings = vec![NAME, NAME, inputs.version];
    put(&mut body, 0, &[1, 2, 3]); // manufacturer, product, version
    if let Some(serial) = inputs.serial {
        strings.push(serial);
        put(&mut body, 3, &[4]);
    }
    if let Some(mut uuid) = inputs.uuid {
        uuid[0..4].reverse();
        uuid[4..6].reverse();
        uuid[6..8].reverse();
        put(&mut body, 4, &uuid);
    }
    put(&mut body, 20, &[6]); // woken by the power switch
    structure(1, 1, &body, &strings)
}

/// A structure with its strings, which are numbered from 1. An empty one, which would end the list, becomes a hyphen.
fn structure(kind: u8, handle: u16, body: &[u8], strings: &[&str]) -> Vec<u8> {
    let len = u8::try_from(4 + body.len()).unwrap_or(u8::MAX);
    let mut bytes = vec![kind, len];
    bytes.extend(handle.to_le_bytes());
    bytes.extend(body);
    for text in strings {
        let before = bytes.len();
        bytes.extend(text.bytes().filter(|byte| *byte != 0).take(64));
        if bytes.len() == before {
            bytes.push(b'-');
        }
        bytes.push(0);
    }
    if strings.is_empty() {
        bytes.push(0);
    }
    bytes.push(0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0xF_0000;

    /// The structures as a guest walks them: type, formatted part, strings.
    fn walk(bytes: &[u8]) -> Vec<(u8, Vec<u8>, Vec<String>)> {
        let mut rest = &bytes[32..];
        let mut found = Vec::new();
        while let [kind, len, ..] = *rest {
            let (formatted, mut strings) = rest.split_at(usize::from(len));
            let mut texts = Vec::new();
            while strings[0] != 0 {
                let end = strings.iter().position(|byte| *byte == 0).unwrap();
                texts.push(String::from_utf8(strings[..end].to_vec()).unwrap());
                strings = &strings[end + 1..];
            }
            rest = &strings[if texts.is_empty() { 2 } else { 1 }..];
            found.push((kind, formatted.to_vec(), texts));
        }
        found
    }

    #[test]
    fn the_entry_point_leads_to_the_structures() {
        let bytes = tables(AT, &SmbiosInputs::default());
        assert_eq!(&bytes[..5], b"_SM3_");
        assert_eq!(bytes[..24].iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_eq!(u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize, bytes.len() - 32);
        assert_eq!(u64::from_le_bytes(bytes[16..24].try_into().unwrap()), AT + 32);
    }

    #[test]
    fn the_firmware_date_is_2023_or_later_and_the_system_is_banyan() {
        let uuid = Some([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        let found = walk(&tables(AT, &SmbiosInputs { version: "1.2", serial: Some("S1"), uuid }));
        assert_eq!(found.iter().map(|(kind, ..)| *kind).collect::<Vec<_>>(), [0, 1, 127]);
        let (_, bios, strings) = &found[0];
        let date = &strings[usize::from(bios[8]) - 1];
        assert!(date[6..].parse::<u32>().unwrap() >= 2023, "{date}");
        assert_eq!((bios.len(), bios[0x13] & 0x10), (26, 0x10));
        let (_, system, strings) = &found[1];
        assert_eq!(strings, &["Banyan", "Banyan", "1.2", "S1"]);
        assert_eq!(system[4..8], [1, 2, 3, 4]);
        assert_eq!(system[8..24], [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(system.len(), 27);
    }

    #[test]
    fn strings_from_outside_cannot_break_the_structure() {
        let long = "x".repeat(500);
        for serial in ["", "\0\0", "a\0b", &long] {
            let found = walk(&tables(AT, &SmbiosInputs { version: "", serial: Some(serial), uuid: None }));
            assert_eq!(found.len(), 3, "{serial:?}");
            assert!(found[1].2.iter().all(|text| (1..=64).contains(&text.len())));
        }
    }
}
