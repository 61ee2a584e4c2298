//! Builds what makes devices come and go on buses without slot registers, root buses and conventional ones: an object for each
//! device number where they may, inside of objects for the bridges that lead there, and the event device that tells the
//! operating system to look at them.
//!
//! Sources: ACPI 6.5 5.6.9 (event device), 6.3.3 (`_EJ0`); linux: `drivers/acpi/evged.c`, `drivers/pci/hotplug/acpiphp_glue.c`.

use acpi_tables::aml::{
    And, Device, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Local, Method, MethodCall, Name, Notify,
    OpRegion, OpRegionSpace, Path, ResourceTemplate, Store,
};
use acpi_tables::{Aml, AmlSink};
use pci::address::Devfn;

use crate::ports;

use super::{Raw, RootBridge, edge, numbered};

/// `Notify` values of devices (ACPI 6.5 table 5.161).
const DEVICE_CHECK: u8 = 1;
const EJECT_REQUEST: u8 = 3;

/// A bus whose devices come and go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotBus {
    /// Which registers it has: those from [`ports::BUS_SLOTS`] plus this many times [`ports::BUS_SLOTS_LEN`] on. Below
    /// [`ports::SLOT_BUSES`]. Buses may share registers if they have different bits of them.
    pub index: u8,
    /// The bridges from the root bus down to it, with their numbers; none for the root bus itself.
    pub way: Vec<Devfn>,
    /// Where devices may come and go.
    pub slots: Vec<BusSlot>,
}

/// A device number where devices may come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusSlot {
    /// The number, 0 to 31.
    pub number: u8,
    /// Its bit in the registers, 0 to 31.
    pub bit: u8,
}

impl BusSlot {
    /// A number of a bus that has registers of its own, where it is its bit as well.
    #[must_use]
    pub const fn of_own(number: u8) -> Self {
        Self { number, bit: number }
    }
}

/// The registers, the method that reads them, and the event device; nothing if there are no such buses.
pub(super) struct SlotEvents<'a>(pub &'a [RootBridge]);

impl Aml for SlotEvents<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let buses = || self.0.iter().enumerate().flat_map(|(root, bridge)| bridge.slots.iter().map(move |bus| (root, bus)));
        let Some(last) = buses().map(|(_, bus)| bus.index).max() else { return };
        let (first, len) = (ports::BUS_SLOTS, ports::BUS_SLOTS_LEN * (u16::from(last) + 1));
        OpRegion::new(Path::new("BSLT"), OpRegionSpace::SystemIO, &first, &len).to_aml_bytes(sink);
        let registers = |index| [CAME, LEAVES, EJECT].map(|letter| register(letter, index));
        let fields = (0..=last).flat_map(registers).map(|name| FieldEntry::Named(name, 32)).collect();
        let (access, lock, rest) = (FieldAccessType::DWord, FieldLockRule::NoLock, FieldUpdateRule::WriteAsZeroes);
        Field::new(Path::new("BSLT"), access, lock, rest, fields).to_aml_bytes(sink);
        let mut body = Vec::new();
        for index in 0..=last {
            let sharing: Vec<(usize, &SlotBus)> = buses().filter(|(_, bus)| bus.index == index).collect();
            look(&mut body, index, &sharing);
        }
        let body = Raw(body);
        Method::new(Path::new("BSEV"), 0, true, vec![&body]).to_aml_bytes(sink);
        event_device(sink);
    }
}

/// First letters of a bus's registers: which devices came, which are to leave, which were let go of.
const CAME: char = 'U';
const LEAVES: char = 'L';
const EJECT: char = 'E';

/// Name of a register.
fn register(letter: char, index: u8) -> [u8; 4] {
    numbered(letter, index.into()).as_bytes().try_into().unwrap_or_default()
}

/// Part of `\_SB.BSEV`: reads which devices of the buses that share registers came and which are to leave, and tells of each.
fn look(body: &mut Vec<u8>, index: u8, buses: &[(usize, &SlotBus)]) {
    let (up, down) = (numbered(CAME, index.into()), numbered(LEAVES, index.into()));
    let (up, down) = (Path::new(&up), Path::new(&down));
    Store::new(&Local(0), &up).to_aml_bytes(body);
    Store::new(&Local(1), &down).to_aml_bytes(body);
    for (root, bus) in buses {
        let way: String = bus.way.iter().map(|bridge| format!(".{}", bridge_name(*bridge))).collect();
        for slot in &bus.slots {
            let path = format!("\\_SB_.{}{way}.{}", numbered('P', *root), name(slot.number));
            let path = Path::new(&path);
            for (local, value) in [(0, DEVICE_CHECK), (1, EJECT_REQUEST)] {
                let notify = Notify::new(&path, &value);
                // And with nowhere to store its result is an expression.
                let (local, bit) = (Local(local), bit(slot.bit));
                let nowhere = acpi_tables::aml::ZERO;
                let asked = And::new(&nowhere, &local, &bit);
                If::new(&asked, vec![&notify]).to_aml_bytes(body);
            }
        }
    }
}

fn event_device(sink: &mut dyn AmlSink) {
    let interrupt = edge(ports::BUS_SLOTS_GSI);
    let call = MethodCall::new(Path::new("\\_SB_.BSEV"), vec![]);
    Device::new(
        Path::new("BSGE"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &1u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&interrupt])),
            &Method::new(Path::new("_EVT"), 1, true, vec![&call]),
        ],
    )
    .to_aml_bytes(sink);
}

/// The objects of one root bridge's buses, to stand inside of it.
pub(super) struct Slots<'a>(pub &'a RootBridge);

impl Aml for Slots<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let buses: Vec<(&[Devfn], &SlotBus)> = self.0.slots.iter().map(|bus| (bus.way.as_slice(), bus)).collect();
        objects(sink, &buses);
    }
}

/// Objects on one bus: its slots, if it is one of `buses`, and the bridges that lead to others, each once. What is left of the
/// way to each bus comes with it.
fn objects(sink: &mut dyn AmlSink, buses: &[(&[Devfn], &SlotBus)]) {
    let mut bridges: Vec<Devfn> = Vec::new();
    for (way, bus) in buses {
        match way.first() {
            None => bus.slots.iter().for_each(|one| slot(sink, bus.index, *one)),
            Some(bridge) if !bridges.contains(bridge) => bridges.push(*bridge),
            Some(_) => {}
        }
    }
    for bridge in bridges {
        let below: Vec<(&[Devfn], &SlotBus)> = buses
            .iter()
            .filter_map(|(way, bus)| way.split_first().filter(|(first, _)| **first == bridge).map(|(_, rest)| (rest, *bus)))
            .collect();
        let mut inside = Vec::new();
        objects(&mut inside, &below);
        let inside = Raw(inside);
        Device::new(Path::new(&bridge_name(bridge)), vec![&address(bridge), &inside]).to_aml_bytes(sink);
    }
}

/// The object of one device number. All functions of a device are behind that of function 0.
fn slot(sink: &mut dyn AmlSink, index: u8, slot: BusSlot) {
    let (register, eject) = (format!("\\_SB_.{}", numbered(EJECT, index.into())), bit(slot.bit));
    let register = Path::new(&register);
    let eject = Store::new(&register, &eject);
    let user_number = ports::FIRST_BUS_SLOT + u32::from(index) * 32 + u32::from(slot.bit);
    Device::new(
        Path::new(&name(slot.number)),
        vec![
            &address(Devfn::new(slot.number, 0)),
            &Name::new(Path::new("_SUN"), &user_number),
            &Method::new(Path::new("_EJ0"), 1, true, vec![&eject]),
        ],
    )
    .to_aml_bytes(sink);
}

/// `_ADR` of a function (ACPI 6.5 table 6.2).
fn address(at: Devfn) -> Name {
    Name::new(Path::new("_ADR"), &(u32::from(at.device()) << 16 | u32::from(at.function())))
}

const fn bit(number: u8) -> u32 {
    1 << (number & 31)
}

fn name(number: u8) -> String {
    numbered('S', number.into())
}

fn bridge_name(at: Devfn) -> String {
    numbered('D', at.byte().into())
}
