//! Builds the PCI root bridges of DSDT: one PNP0A08 device per root complex.
//!
//! Sources: ACPI 6.5 6.1 to 6.2, PCI Firmware 3.3 4.5; linux: `drivers/acpi/pci_root.c`.

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, CreateDWordField, Device, EISAName, Else, Equal, GreaterEqual, If, Local,
    Method, MethodCall, Name, NotEqual, ONE, Or, Package, PackageBuilder, Path, ResourceTemplate, Return, Store, Uuid, ZERO,
};
use acpi_tables::{Aml, AmlSink};

use crate::memory_map::Range;

use super::slots::Slots;
use super::{PrtEntry, Raw, RootBridge, numbered};

/// `_OSC` of a PCI host bridge.
const OSC_UUID: &str = "33db4d5b-1ff7-401c-9657-7441c03dd766";
/// Control bits granted to the operating system (PCI Firmware 3.3 table 4-6): native hot-plug, PME, AER, the capability
/// structure, LTR, DPC. Not granted: SHPC hot-plug (bit 1), which no bridge here has.
pub(super) const OSC_GRANTED: u32 = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 7;
/// Status bits of the first dword (ACPI 6.5 6.2.12).
const OSC_FAILED: u8 = 1 << 1;
const OSC_BAD_UUID: u8 = 1 << 2;
const OSC_BAD_REVISION: u8 = 1 << 3;
const OSC_MASKED: u8 = 1 << 4;

/// All root bridges, and what they share: `\_SB.POSC`, the body of each `_OSC`, and the interrupt tables `\_SB.Innn`, of
/// which equal ones exist once.
pub(super) struct RootBridges<'a>(pub &'a [RootBridge]);

impl Aml for RootBridges<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        if self.0.is_empty() {
            return;
        }
        osc(sink);
        let mut tables: Vec<&[PrtEntry]> = Vec::new();
        for (index, bridge) in self.0.iter().enumerate() {
            let prt = (!bridge.prt.is_empty()).then(|| {
                tables.iter().position(|table| *table == bridge.prt).unwrap_or_else(|| {
                    tables.push(&bridge.prt);
                    interrupt_table(sink, tables.len() - 1, &bridge.prt);
                    tables.len() - 1
                })
            });
            root_bridge(sink, index, bridge, prt);
        }
    }
}

/// One root bridge. `prt` is the number of its interrupt table.
fn root_bridge(sink: &mut dyn AmlSink, index: usize, bridge: &RootBridge, prt: Option<usize>) {
    let hid = Name::new(Path::new("_HID"), &EISAName::new("PNP0A08"));
    let cid = Name::new(Path::new("_CID"), &EISAName::new("PNP0A03"));
    let uid = Name::new(Path::new("_UID"), &bridge.uid);
    let segment = Name::new(Path::new("_SEG"), &bridge.segment);
    let first_bus = Name::new(Path::new("_BBN"), bridge.buses.start());
    let resources = resources(bridge);
    let call = MethodCall::new(Path::new("\\_SB_.POSC"), vec![&Arg(0), &Arg(1), &Arg(2), &Arg(3)]);
    let call = Return::new(&call);
    let osc = Method::new(Path::new("_OSC"), 4, true, vec![&call]);
    let proximity = bridge.proximity.map(|proximity| Name::new(Path::new("_PXM"), &proximity));
    let prt = prt.map(|table| {
        let path = format!("\\_SB_.{}", numbered('I', table));
        let mut bytes = Vec::new();
        let path = Path::new(&path);
        Method::new(Path::new("_PRT"), 0, false, vec![&Return::new(&path)]).to_aml_bytes(&mut bytes);
        Raw(bytes)
    });

    let mut children: Vec<&dyn Aml> = vec![&hid, &cid, &uid, &segment, &first_bus, &resources, &osc];
    children.extend(proximity.as_ref().map(|proximity| proximity as &dyn Aml));
    children.extend(prt.as_ref().map(|prt| prt as &dyn Aml));
    let slots = Slots(bridge);
    children.push(&slots);
    Device::new(Path::new(&numbered('P', index)), children).to_aml_bytes(sink);
}

/// `_CRS`: buses and windows. No window is marked prefetchable: Linux would keep BARs that are not prefetchable out.
fn resources(bridge: &RootBridge) -> Name {
    let buses = AddressSpace::new_bus_number(u16::from(*bridge.buses.start()), u16::from(*bridge.buses.end()));
    let windows: Vec<Window> = bridge
        .io
        .iter()
        .map(|range| Window::Io(*range))
        .chain(bridge.mem32.iter().chain(&bridge.mem64).map(|range| Window::Memory(*range)))
        .collect();
    let mut children: Vec<&dyn Aml> = vec![&buses];
    children.extend(windows.iter().map(|window| window as &dyn Aml));
    Name::new(Path::new("_CRS"), &ResourceTemplate::new(children))
}

/// A window that the root bridge produces; nothing if it is empty.
enum Window {
    Io(Range),
    Memory(Range),
}

impl Aml for Window {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let (Window::Io(range) | Window::Memory(range)) = self;
        if range.is_empty() {
            return;
        }
        let dwords = u32::try_from(range.start).ok().zip(u32::try_from(range.last()).ok());
        let not_cacheable = AddressSpaceCacheable::NotCacheable;
        match (self, dwords) {
            (Window::Io(_), Some((first, last))) => {
                AddressSpace::new_io(first, last, None).to_aml_bytes(sink);
            }
            (Window::Memory(_), Some((first, last))) => {
                AddressSpace::new_memory(not_cacheable, true, first, last, None).to_aml_bytes(sink);
            }
            (Window::Memory(_), None) => {
                AddressSpace::new_memory(not_cacheable, true, range.start, range.last(), None).to_aml_bytes(sink);
            }
            (Window::Io(_), None) => {} // x86 has 64 KiB of I/O space
        }
    }
}

/// `\_SB.Innn`: rows of `_PRT` (ACPI 6.5 6.2.13). The interrupts are level-triggered and active low as on any PCI bus.
fn interrupt_table(sink: &mut dyn AmlSink, table: usize, rows: &[PrtEntry]) {
    let mut package = PackageBuilder::new();
    for row in rows {
        let address = u32::from(row.device) << 16 | 0xFFFF;
        package.add_element(&Package::new(vec![&address, &row.pin, &ZERO, &row.gsi]));
    }
    Name::new(Path::new(&numbered('I', table)), &package).to_aml_bytes(sink);
}

/// `\_SB.POSC(uuid, revision, count, capabilities)`: which features the operating system may control.
///
/// The answer does not depend on whether it is a query, and nothing is remembered: all that is granted is granted always.
fn osc(sink: &mut dyn AmlSink) {
    let status = Path::new("CDW1");
    let control = Path::new("CDW3");
    let answer = Return::new(&Arg(3));
    let set = |bit: &'static u8| Or::new(&status, &status, bit);

    let (bad_uuid, failed, bad_revision, masked) =
        (set(&OSC_BAD_UUID), set(&OSC_FAILED), set(&OSC_BAD_REVISION), set(&OSC_MASKED));
    let unknown_revision = NotEqual::new(&Arg(1), &ONE);
    let check_revision = If::new(&unknown_revision, vec![&bad_revision]);
    let has_control = GreaterEqual::new(&Arg(2), &3u8);
    let control_field = CreateDWordField::new(&control, &Arg(3), &8u8);
    let asked = Store::new(&Local(0), &control);
    let grant = And::new(&control, &control, &OSC_GRANTED);
    let not_all = NotEqual::new(&Local(0), &control);
    let say_masked = If::new(&not_all, vec![&masked]);
    let answer_control = If::new(&has_control, vec![&control_field, &asked, &grant, &say_masked]);
    let too_short = Else::new(vec![&failed]);
    let uuid = Uuid::new(OSC_UUID);
    let is_ours = Equal::new(&Arg(0), &uuid);
    let ours = If::new(&is_ours, vec![&check_revision, &answer_control, &too_short]);
    let not_ours = Else::new(vec![&bad_uuid]);
    let status_field = CreateDWordField::new(&status, &Arg(3), &ZERO);
    Method::new(Path::new("POSC"), 4, true, vec![&status_field, &ours, &not_ours, &answer]).to_aml_bytes(sink);
}
