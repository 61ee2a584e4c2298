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
    put(&mut body, 6, &(1u64 << 3 | 1 << 7).to_le_bytes()); // characteristics unknown; PCI
    put(&mut body, 14, &[1, 1 << 4]); // ACPI; a virtual machine
    put(&mut body, 16, &[0xFF; 4]); // no BIOS or controller release number
    structure(0, 0, &body, &[NAME, inputs.version, BIOS_DATE])
}

/// Type 1: system information (7.2).
fn system(inputs: &SmbiosInputs<'_>) -> Vec<u8> {
    let mut body = [0; 23];
    let serial = if inputs.serial.is_some() { 4 } else { 0 };
    put(&mut body, 0, &[1, 2, 3, serial]); // manufacturer, product, version, serial number
    if let Some(mut uuid) = inputs.uuid {
        uuid[0..4].reverse();
        uuid[4..6].reverse();
        uuid[6..8].reverse();
        put(&mut body, 4, &uuid);
    }
    put(&mut body, 20, &[6]); // woken by the power switch
    structure(
        1,
        1,
        &body,
        &[
            NAME,
            NAME,
            inputs.version,
            inputs.serial.unwrap_or_default(),
        ],
    )
}

/// A structure with its strings; empty ones at the end are left out, empty ones before become a hyphen.
fn structure(kind: u8, handle: u16, body: &[u8], strings: &[&str]) -> Vec<u8> {
    let len = u8::try_from(4 + body.len()).unwrap_or(u8::MAX);
    let mut bytes = vec![kind, len];
    bytes.extend(handle.to_le_bytes());
    bytes.extend(body);
    let used = strings
        .iter()
        .rposition(|text| !text.is_empty())
        .map_or(0, |last| last + 1);
    for text in strings.iter().take(used) {
        let text = if text.is_empty() { "-" } else { text };
        bytes.extend(text.bytes().filter(|byte| *byte != 0).take(64));
        bytes.push(0);
    }
    if used == 0 {
        bytes.push(0);
    }
    bytes.push(0);
    bytes
}
