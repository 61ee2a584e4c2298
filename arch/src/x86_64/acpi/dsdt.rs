//! Builds DSDT: the serial line, the generic event device, the reservation of ECAM, the root bridges, the soft-off state.

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Memory32Fixed, Name, Package, Path, ResourceTemplate, Scope, ZERO,
};
use acpi_tables::{Aml, AmlSink, sdt::Sdt};

use crate::memory_map::{MemoryMap, Range};
use crate::ports;

use super::{AcpiInputs, edge, events, pci_root, slots};

/// Revision 2 and later: integers have 64 bits.
const REVISION: u8 = 2;

/// The table.
pub(super) fn dsdt(inputs: &AcpiInputs<'_>) -> Sdt {
    let mut body = Vec::with_capacity(4 << 10);
    Scope::new(
        Path::new("_SB_"),
        vec![
            &Serial(inputs.serial),
            &PanicPort(inputs.panic_port),
            &events::Events(inputs),
            &EcamReservation(inputs.map),
            &pci_root::RootBridges(inputs.root_bridges),
            &slots::SlotEvents(inputs.root_bridges),
        ],
    )
    .to_aml_bytes(&mut body);
    Name::new(Path::new("_S5_"), &Package::new(vec![&ports::SLEEP_TYPE_S5, &ZERO, &ZERO, &ZERO])).to_aml_bytes(&mut body);
    super::table(*b"DSDT", REVISION, &body)
}

/// COM1, if it exists.
struct Serial(bool);

impl Aml for Serial {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        if !self.0 {
            return;
        }
        let interrupt = edge(ports::SERIAL_GSI);
        Device::new(
            Path::new("COM1"),
            vec![
                &Name::new(Path::new("_HID"), &EISAName::new("PNP0501")),
                &Name::new(Path::new("_UID"), &1u8),
                &Name::new(
                    Path::new("_CRS"),
                    &ResourceTemplate::new(vec![&IO::new(ports::SERIAL, ports::SERIAL, 1, 8), &interrupt]),
                ),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// The port at which kernels say that they panicked, by the name that Linux and Windows have a driver for.
struct PanicPort(bool);

impl Aml for PanicPort {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        if !self.0 {
            return;
        }
        Device::new(
            Path::new("PNIC"),
            vec![
                &Name::new(Path::new("_HID"), &"QEMU0001"),
                &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&IO::new(ports::PANIC, ports::PANIC, 1, 1)])),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// A motherboard resource that covers exactly the ECAM of every segment. Linux drops MCFG as a whole if one of its ranges
/// is not reserved so (linux: `arch/x86/pci/mmconfig-shared.c`).
struct EcamReservation<'a>(&'a MemoryMap);

impl Aml for EcamReservation<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        if self.0.ecam.is_empty() {
            return;
        }
        let ranges: Vec<Reserved> = self.0.ecam.iter().map(|ecam| Reserved(ecam.range)).collect();
        Device::new(
            Path::new("ECAM"),
            vec![
                &Name::new(Path::new("_HID"), &EISAName::new("PNP0C02")),
                &Name::new(Path::new("_UID"), &ZERO),
                &Name::new(Path::new("_CRS"), &ResourceTemplate::new(ranges.iter().map(|range| range as &dyn Aml).collect())),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// A fixed memory range.
struct Reserved(Range);

impl Aml for Reserved {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        match (u32::try_from(self.0.start), u32::try_from(self.0.len())) {
            (Ok(start), Ok(len)) => Memory32Fixed::new(true, start, len).to_aml_bytes(sink),
            _ => AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, self.0.start, self.0.last(), None)
                .to_aml_bytes(sink),
        }
    }
}
