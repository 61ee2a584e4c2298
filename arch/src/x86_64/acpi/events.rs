//! Builds the generic event device of DSDT (ACPI 6.5 5.6.9) and what it tells of: processors and memory that come and go
//! while the machine runs, and the power button.
//!
//! Registers are I/O ports, [`crate::ports`] names them. A device reads and writes ports of its own only, so methods need
//! no lock between them.

use acpi_tables::aml::{
    Add, AddressSpace, AddressSpaceCacheable, And, Arg, BufferData, CreateQWordField, Device, EISAName, Equal, Field,
    FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Local, Method, MethodCall, Name, NotEqual, Notify, ONE,
    OpRegion, OpRegionSpace, Path, ResourceTemplate, Return, ShiftRight, Store, Subtract, While, ZERO,
};
use acpi_tables::{Aml, AmlSink};

use crate::ports::{self, event};

use super::{AcpiInputs, Raw, edge, madt};

/// Present, enabled, shown and working (ACPI 6.5 6.3.7).
const STA_PRESENT: u8 = 0xF;
/// `Notify` code of a pressed button (ACPI 6.5 4.8.3.1.1.2).
const BUTTON_PRESSED: u8 = 0x80;

/// The device and those that it tells of.
pub(super) struct Events<'a>(pub &'a AcpiInputs<'a>);

impl Aml for Events<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let Self(inputs) = self;
        let processors = usize::from(ports::CPU_STATES).min(inputs.cpus.len());
        registers(sink);
        power_button(sink);
        let mut handled: Vec<(u32, Raw)> = vec![(event::POWER_BUTTON, notify("\\_SB_.PWRB", BUTTON_PRESSED))];
        if inputs.hot_plug_cpus {
            for (number, cpu) in (0u16..).zip(inputs.cpus.iter().take(processors)) {
                let node = inputs.nodes.iter().find(|node| node.cpus.contains(&cpu.apic_id)).map(|node| node.proximity);
                processor(sink, number, cpu.apic_id, node.filter(|_| !inputs.nodes.is_empty()));
            }
            dispatch(sink, "CTFY", (0u16..).take(processors).map(processor_name));
            scan(sink, "CSCN", "CNXT", "CTFY");
            handled.push((event::CPU, call("\\_SB_.CSCN")));
        }
        let memory = inputs.memory_devices.min(ports::MEMORY_DEVICES);
        if memory > 0 {
            memory_resources(sink);
            (0..memory).for_each(|number| memory_device(sink, number, !inputs.nodes.is_empty()));
            dispatch(sink, "MTFY", (0..memory).map(memory_name));
            scan(sink, "MSCN", "MNXT", "MTFY");
            handled.push((event::MEMORY, call("\\_SB_.MSCN")));
        }
        event_device(sink, &handled);
    }
}

fn field(region: &str, access: FieldAccessType, entries: Vec<FieldEntry>) -> Field {
    Field::new(Path::new(region), access, FieldLockRule::NoLock, FieldUpdateRule::WriteAsZeroes, entries)
}

/// `\_SB.EVNT`, `\_SB.CNXT`, `\_SB.MNXT`: registers that reading empties.
fn registers(sink: &mut dyn AmlSink) {
    let (at, len) = (ports::HOT_PLUG_EVENTS, ports::HOT_PLUG_EVENTS_LEN);
    OpRegion::new(Path::new("EVRG"), OpRegionSpace::SystemIO, &at, &len).to_aml_bytes(sink);
    let named = [*b"EVNT", *b"CNXT", *b"MNXT"].map(|name| FieldEntry::Named(name, 32));
    field("EVRG", FieldAccessType::DWord, named.to_vec()).to_aml_bytes(sink);
}

/// `\_SB.GED`, with a method that does what each pending event needs.
fn event_device(sink: &mut dyn AmlSink, handled: &[(u32, Raw)]) {
    let pending = Local(0);
    let register = Path::new("\\_SB_.EVNT");
    let take = Store::new(&pending, &register);
    let tests: Vec<Vec<u8>> = handled
        .iter()
        .map(|(bit, act)| {
            let mut bytes = Vec::new();
            let masked = And::new(&ZERO, &pending, bit);
            If::new(&masked, vec![act]).to_aml_bytes(&mut bytes);
            bytes
        })
        .collect();
    let tests: Vec<Raw> = tests.into_iter().map(Raw).collect();
    let mut body: Vec<&dyn Aml> = vec![&take];
    body.extend(tests.iter().map(|test| test as &dyn Aml));
    Device::new(
        Path::new("GED_"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &ZERO),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&edge(ports::EVENT_GSI)])),
            &Method::new(Path::new("_EVT"), 1, true, body),
        ],
    )
    .to_aml_bytes(sink);
}

/// `\_SB.PWRB`: the power button as a device (ACPI 6.5 4.8.3.1.1.2).
fn power_button(sink: &mut dyn AmlSink) {
    Device::new(
        Path::new("PWRB"),
        vec![&Name::new(Path::new("_HID"), &EISAName::new("PNP0C0C")), &Name::new(Path::new("_UID"), &ZERO)],
    )
    .to_aml_bytes(sink);
}

/// A method without arguments that tells each change: it takes one after the other from the register `next`.
fn scan(sink: &mut dyn AmlSink, name: &str, next: &str, tell: &str) {
    let (taken, next) = (Local(0), Path::new(next));
    let take = Store::new(&taken, &next);
    let some = NotEqual::new(&taken, &ports::NOTHING_NEXT);
    let number = And::new(&ZERO, &taken, &0xFFFFu16);
    let code = ShiftRight::new(&ZERO, &taken, &16u8);
    let tell = MethodCall::new(Path::new(tell), vec![&number, &code]);
    let each = While::new(&some, vec![&tell, &take]);
    Method::new(Path::new(name), 0, true, vec![&take, &each]).to_aml_bytes(sink);
}

/// A method that notifies device number `Arg0` of `Arg1`.
fn dispatch(sink: &mut dyn AmlSink, name: &str, devices: impl Iterator<Item = String>) {
    let arms: Vec<Raw> = (0u16..)
        .zip(devices)
        .map(|(number, device)| {
            let mut bytes = Vec::new();
            let device = Path::new(&device);
            If::new(&Equal::new(&Arg(0), &number), vec![&Notify::new(&device, &Arg(1))]).to_aml_bytes(&mut bytes);
            Raw(bytes)
        })
        .collect();
    Method::new(Path::new(name), 2, true, arms.iter().map(|arm| arm as &dyn Aml).collect()).to_aml_bytes(sink);
}

/// `\_SB.Cnnn`: a processor. Its MADT entry says that it is enabled, also when the one of the table says that it may come.
fn processor(sink: &mut dyn AmlSink, number: u16, apic_id: u32, node: Option<u32>) {
    let port = ports::CPU_STATE + number;
    let region = OpRegion::new(Path::new("REGS"), OpRegionSpace::SystemIO, &port, &ONE);
    let state = field("REGS", FieldAccessType::Byte, vec![FieldEntry::Named(*b"STAT", 8)]);
    let hid = Name::new(Path::new("_HID"), &"ACPI0007");
    let uid = Name::new(Path::new("_UID"), &number);
    let status = status("STAT");
    let entry = BufferData::new(madt::processor(number.into(), apic_id, madt::ENABLED));
    let entry = Name::new(Path::new("_MAT"), &entry);
    let node = node.map(|node| Name::new(Path::new("_PXM"), &node));
    let target = Path::new("STAT");
    let go = Store::new(&target, &ports::CPU_EJECT);
    let eject = Method::new(Path::new("_EJ0"), 1, false, vec![&go]);
    let mut children: Vec<&dyn Aml> = vec![&hid, &uid, &region, &state, &status, &entry];
    children.extend(node.as_ref().map(|node| node as &dyn Aml));
    // The processor that starts the machine stays.
    if number > 0 {
        children.push(&eject);
    }
    Device::new(Path::new(&processor_name(number)), children).to_aml_bytes(sink);
}

/// `_STA` of a device whose register `state` tells with bit 0 that it is there.
fn status(state: &str) -> Raw {
    let mut bytes = Vec::new();
    let state = Path::new(state);
    let there = And::new(&ZERO, &state, &ONE);
    let (yes, no) = (Return::new(&STA_PRESENT), Return::new(&ZERO));
    Method::new(Path::new("_STA"), 0, false, vec![&If::new(&there, vec![&yes]), &no]).to_aml_bytes(&mut bytes);
    Raw(bytes)
}

/// `\_SB.Mnnn`: a range of memory that came, or may come.
fn memory_device(sink: &mut dyn AmlSink, number: u16, nodes: bool) {
    let (port, len) = (ports::MEMORY_DEVICE + number * ports::MEMORY_DEVICE_LEN, ports::MEMORY_DEVICE_LEN);
    let region = OpRegion::new(Path::new("REGS"), OpRegionSpace::SystemIO, &port, &len);
    let named = [(*b"BASE", 64), (*b"LENG", 64), (*b"NODE", 32), (*b"STAT", 32)];
    let named = named.map(|(name, bits)| FieldEntry::Named(name, bits));
    let fields = field("REGS", FieldAccessType::DWord, named.to_vec());
    let hid = Name::new(Path::new("_HID"), &EISAName::new("PNP0C80"));
    let uid = Name::new(Path::new("_UID"), &number);
    let status = status("STAT");
    let (base, length, node) = (Path::new("BASE"), Path::new("LENG"), Path::new("NODE"));
    let made = MethodCall::new(Path::new("\\_SB_.MCRS"), vec![&base, &length]);
    let made = Return::new(&made);
    let resources = Method::new(Path::new("_CRS"), 0, true, vec![&made]);
    let node = Return::new(&node);
    let proximity = Method::new(Path::new("_PXM"), 0, false, vec![&node]);
    let mut children: Vec<&dyn Aml> = vec![&hid, &uid, &region, &fields, &status, &resources];
    if nodes {
        children.push(&proximity);
    }
    Device::new(Path::new(&memory_name(number)), children).to_aml_bytes(sink);
}

/// `\_SB.MCRS(base, length)`: a resource template with one range of memory.
fn memory_resources(sink: &mut dyn AmlSink) {
    // Offsets in a QWord address space descriptor (ACPI 6.5 6.4.3.5.1).
    const MINIMUM: u8 = 14;
    const MAXIMUM: u8 = 22;
    const LENGTH: u8 = 38;
    let range = AddressSpace::new_memory(AddressSpaceCacheable::Cacheable, true, 0u64, u64::MAX - 1, None);
    let template = ResourceTemplate::new(vec![&range]);
    let (buffer, first, last, size) = (Path::new("RBUF"), Path::new("FIRS"), Path::new("LAST"), Path::new("SIZE"));
    let name = Name::new(Path::new("RBUF"), &template);
    let first_field = CreateQWordField::new(&first, &buffer, &MINIMUM);
    let last_field = CreateQWordField::new(&last, &buffer, &MAXIMUM);
    let size_field = CreateQWordField::new(&size, &buffer, &LENGTH);
    let set_first = Store::new(&first, &Arg(0));
    let set_size = Store::new(&size, &Arg(1));
    let end = Add::new(&Local(0), &Arg(0), &Arg(1));
    let end = Subtract::new(&last, &end, &ONE);
    let answer = Return::new(&buffer);
    let body: Vec<&dyn Aml> = vec![&name, &first_field, &last_field, &size_field, &set_first, &set_size, &end, &answer];
    Method::new(Path::new("MCRS"), 2, true, body).to_aml_bytes(sink);
}

fn notify(device: &str, code: u8) -> Raw {
    let mut bytes = Vec::new();
    let device = Path::new(device);
    Notify::new(&device, &code).to_aml_bytes(&mut bytes);
    Raw(bytes)
}

fn call(method: &str) -> Raw {
    let mut bytes = Vec::new();
    MethodCall::new(Path::new(method), vec![]).to_aml_bytes(&mut bytes);
    Raw(bytes)
}

fn processor_name(number: u16) -> String {
    super::numbered('C', number.into())
}

fn memory_name(number: u16) -> String {
    super::numbered('M', number.into())
}
