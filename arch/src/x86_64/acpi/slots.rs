//! Builds what makes devices come and go on a root bus: an object for each device number that is free, and the event device
//! that tells the operating system to look at them.
//!
//! Sources: ACPI 6.5 5.6.9 (event device), 6.3.3 (`_EJ0`); linux: `drivers/acpi/evged.c`, `drivers/pci/hotplug/acpiphp_glue.c`.

use acpi_tables::aml::{
    And, Device, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Interrupt, Local, Method, MethodCall,
    Name, Notify, OpRegion, OpRegionSpace, Path, ResourceTemplate, Store,
};
use acpi_tables::{Aml, AmlSink};

use crate::ports;

use super::{Raw, RootBridge, numbered};

/// `Notify` values of devices (ACPI 6.5 table 5.161).
const DEVICE_CHECK: u8 = 1;
const EJECT_REQUEST: u8 = 3;

/// The registers, the method that reads them, and the event device; nothing if no root bridge has free numbers.
pub(super) struct RootSlots<'a>(pub &'a [RootBridge]);

impl Aml for RootSlots<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let slots: Vec<(String, u32)> = self
            .0
            .iter()
            .enumerate()
            .flat_map(|(index, bridge)| bridge.slots.iter().map(move |slot| (path(index, *slot), bit(*slot))))
            .collect();
        if slots.is_empty() {
            return;
        }
        let (first, len) = (ports::ROOT_SLOTS, ports::ROOT_SLOTS_LEN);
        OpRegion::new(Path::new("RSLT"), OpRegionSpace::SystemIO, &first, &len).to_aml_bytes(sink);
        let fields = [*b"RSUP", *b"RSDN", *b"RSEJ"].map(|name| FieldEntry::Named(name, 32));
        let (access, lock, rest) = (FieldAccessType::DWord, FieldLockRule::NoLock, FieldUpdateRule::WriteAsZeroes);
        Field::new(Path::new("RSLT"), access, lock, rest, fields.into()).to_aml_bytes(sink);
        look(sink, &slots);
        event_device(sink);
    }
}

/// `\_SB.RSEV`: reads which devices came and which are to leave, and tells of each.
fn look(sink: &mut dyn AmlSink, slots: &[(String, u32)]) {
    let (up, down) = (Path::new("RSUP"), Path::new("RSDN"));
    let (came, leaves) = (Store::new(&Local(0), &up), Store::new(&Local(1), &down));
    let mut body = Vec::new();
    came.to_aml_bytes(&mut body);
    leaves.to_aml_bytes(&mut body);
    for (path, bit) in slots {
        let path = Path::new(path);
        for (local, value) in [(0, DEVICE_CHECK), (1, EJECT_REQUEST)] {
            let notify = Notify::new(&path, &value);
            // And with nowhere to store its result is an expression.
            let local = Local(local);
            let nowhere = acpi_tables::aml::ZERO;
            let asked = And::new(&nowhere, &local, bit);
            If::new(&asked, vec![&notify]).to_aml_bytes(&mut body);
        }
    }
    let body = Raw(body);
    Method::new(Path::new("RSEV"), 0, true, vec![&body]).to_aml_bytes(sink);
}

fn event_device(sink: &mut dyn AmlSink) {
    let interrupt = Interrupt::new(true, true, false, false, ports::ROOT_SLOTS_GSI);
    let call = MethodCall::new(Path::new("\\_SB_.RSEV"), vec![]);
    Device::new(
        Path::new("RSGE"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &1u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&interrupt])),
            &Method::new(Path::new("_EVT"), 1, true, vec![&call]),
        ],
    )
    .to_aml_bytes(sink);
}

/// The objects of one root bridge's free numbers, to stand inside of it.
pub(super) struct Slots<'a>(pub &'a RootBridge);

impl Aml for Slots<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        for slot in &self.0.slots {
            let (register, bit) = (Path::new("\\_SB_.RSEJ"), bit(*slot));
            let eject = Store::new(&register, &bit);
            Device::new(
                Path::new(&name(*slot)),
                vec![
                    &Name::new(Path::new("_ADR"), &(u32::from(*slot) << 16)),
                    &Name::new(Path::new("_SUN"), &(ports::FIRST_ROOT_SLOT + u32::from(*slot))),
                    &Method::new(Path::new("_EJ0"), 1, true, vec![&eject]),
                ],
            )
            .to_aml_bytes(sink);
        }
    }
}

const fn bit(slot: u8) -> u32 {
    1 << (slot & 31)
}

fn name(slot: u8) -> String {
    numbered('S', slot.into())
}

fn path(bridge: usize, slot: u8) -> String {
    format!("\\_SB_.{}.{}", numbered('P', bridge), name(slot))
}
