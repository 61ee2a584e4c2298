//! Builds MADT: the processors' local APICs and the I/O APIC (ACPI 6.5 5.2.12).

use acpi_tables::sdt::Sdt;

use crate::memory_map::{IO_APIC, LOCAL_APIC};

const REVISION: u8 = 5;
/// APIC ids from here on do not fit the short structure; 255 itself is the broadcast address.
const FIRST_LONG_ID: u32 = 255;
const ENABLED: u32 = 1;
/// The only I/O APIC; ids of local and I/O APICs are apart on every processor since the Pentium 4.
const IO_APIC_ID: u8 = 0;

/// The table for APIC ids `0..cpus`, which are the processors' UIDs as well. It says nothing of an 8259 and overrides no
/// ISA interrupt: ISA interrupt N is GSI N, edge-triggered and active high.
pub(super) fn madt(cpus: u32) -> Sdt {
    let mut body = Vec::with_capacity(8 * (cpus as usize) + 64);
    body.extend(low_dword(LOCAL_APIC.start));
    body.extend(0u32.to_le_bytes()); // no 8259
    for id in 0..cpus {
        match u8::try_from(id) {
            Ok(short) if id < FIRST_LONG_ID => {
                body.extend([0, 8, short, short]);
                body.extend(ENABLED.to_le_bytes());
            }
            _ => {
                body.extend([9, 16, 0, 0]);
                body.extend(id.to_le_bytes());
                body.extend(ENABLED.to_le_bytes());
                body.extend(id.to_le_bytes());
            }
        }
    }
    body.extend([1, 12, IO_APIC_ID, 0]);
    body.extend(low_dword(IO_APIC.start));
    body.extend(0u32.to_le_bytes()); // first GSI
    body.extend([4, 6, 0xFF, 0, 0, 1]); // every processor: NMI on LINT1, polarity and trigger of the bus
    super::table(*b"APIC", REVISION, &body)
}

fn low_dword(address: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = address.to_le_bytes();
    [a, b, c, d]
}
