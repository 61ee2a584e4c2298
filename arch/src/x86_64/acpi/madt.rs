//! Builds MADT: the processors' local APICs and the I/O APIC (ACPI 6.5 5.2.12).

use acpi_tables::sdt::Sdt;

use crate::memory_map::{IO_APIC, LOCAL_APIC};

use super::Cpu;

const REVISION: u8 = 5;
/// APIC ids from here on do not fit the short structure; 255 itself is the broadcast address.
const FIRST_LONG_ID: u32 = 255;
pub(super) const ENABLED: u32 = 1;
/// It can come later (ACPI 6.5 table 5.23).
const ONLINE_CAPABLE: u32 = 1 << 1;
/// The only I/O APIC; ids of local and I/O APICs are apart on every processor since the Pentium 4.
const IO_APIC_ID: u8 = 0;

/// The table. A processor's UID is its place in the list. It says nothing of an 8259 and overrides no ISA interrupt: ISA
/// interrupt N is GSI N, edge-triggered and active high.
pub(super) fn madt(cpus: &[Cpu]) -> Sdt {
    let mut body = Vec::with_capacity(8 * cpus.len() + 64);
    body.extend(low_dword(LOCAL_APIC.start));
    body.extend(0u32.to_le_bytes()); // no 8259
    for (uid, cpu) in (0u32..).zip(cpus) {
        body.extend(processor(uid, cpu.apic_id, if cpu.present { ENABLED } else { ONLINE_CAPABLE }));
    }
    body.extend([1, 12, IO_APIC_ID, 0]);
    body.extend(low_dword(IO_APIC.start));
    body.extend(0u32.to_le_bytes()); // first GSI
    body.extend([4, 6, 0xFF, 0, 0, 1]); // every processor: NMI on LINT1, polarity and trigger of the bus
    super::table(*b"APIC", REVISION, &body)
}

/// One processor's entry.
pub(super) fn processor(uid: u32, apic_id: u32, flags: u32) -> Vec<u8> {
    let mut entry = Vec::with_capacity(16);
    match (u8::try_from(apic_id), u8::try_from(uid)) {
        (Ok(short), Ok(uid)) if apic_id < FIRST_LONG_ID => {
            entry.extend([0, 8, uid, short]);
            entry.extend(flags.to_le_bytes());
        }
        _ => {
            entry.extend([9, 16, 0, 0]);
            for field in [apic_id, flags, uid] {
                entry.extend(field.to_le_bytes());
            }
        }
    }
    entry
}

fn low_dword(address: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = address.to_le_bytes();
    [a, b, c, d]
}
