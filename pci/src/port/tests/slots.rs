//! Ports whose device comes and goes: link, presence, interrupts.

use super::*;
use crate::slot::{SlotError, SlotEvent};
use crate::testing::{FakeIntx, FakeMirror};
use crate::topology::Removal;

const HOT: [PortKind; 2] = [PortKind::Root, PortKind::Downstream];

/// A hot-plug port with interrupts enabled as pciehp does, and the messages that it sends.
fn hot(kind: PortKind, removal: Removal, occupied: bool) -> (Port, Arc<FakeMsi>) {
    let sent = Arc::default();
    let mut port = build_with(kind, None, Some(HotPlug { removal, ..HotPlug::default() }), occupied, &sent);
    port.program();
    write(&mut port, 0x84, 0xFEE0_0000);
    write(&mut port, 0x8C, 0x41);
    write(&mut port, 0x80, 0x0001_0000);
    let enables = if removal == Removal::Button { 0x1021 } else { 0x1028 };
    write(&mut port, 0x58, enables | if occupied { 0x100 } else { 0x300 });
    (port, sent)
}

#[test]
fn only_a_hot_plug_port_has_a_slot() {
    for kind in KINDS {
        let port = build(kind, None);
        assert_eq!((read(&port, 0x40) >> 24 & 1, read(&port, 0x54), read(&port, 0x58)), (0, 0, 0), "{kind:?}");
    }
    for kind in HOT {
        for (removal, slot) in [(Removal::Surprise, 0x60), (Removal::Orderly, 0x70), (Removal::Button, 0x71)] {
            let (port, _) = hot(kind, removal, false);
            let shown = (read(&port, 0x40) >> 24 & 1, read(&port, 0x54), read(&port, 0x3C) >> 8 & 0xFF);
            assert_eq!(shown, (1, 0x0004_0000 | slot | 0x103 << 19, 1), "{kind:?} {removal:?}");
        }
    }
}

#[test]
fn the_link_follows_what_is_in_the_slot() {
    // Speed, width, link active; equalization; presence.
    let shown = |port: &Port| (read(port, 0x50) & LINK_STATUS, read(port, 0x70) >> 16, read(port, 0x58) >> 22 & 1);
    let (empty, full) = ((1 << 16, 0, 0), (express::LINK_ACTIVE | 5 << 16 | 16 << 20, 0x1E, 1));
    for kind in HOT {
        let (mut port, _) = hot(kind, Removal::Surprise, false);
        assert_eq!(shown(&port), empty);
        port.insert().unwrap();
        assert_eq!(shown(&port), full);
        port.remove().unwrap();
        assert_eq!(shown(&port), empty, "presence and link go together");
        write(&mut port, 0x58, 0xFFFF_0000);
        port.insert().unwrap();
        port.reset(ResetKind::Cold);
        assert_eq!(shown(&port), full, "a reset takes nothing out");
    }
}

#[test]
fn each_change_of_a_slot_is_one_message() {
    for kind in HOT {
        let (mut port, sent) = hot(kind, Removal::Surprise, false);
        port.insert().unwrap();
        assert_eq!(sent.take().len(), 1);
        port.remove().unwrap();
        assert_eq!(sent.take().len(), 0, "the first is not cleared yet");
        assert_eq!(write(&mut port, 0x58, 0x0108_1028), Changes::SLOT);
        assert_eq!((port.take_events(), port.take_events()), (vec![SlotEvent::EventsCleared], vec![]));
        port.insert().unwrap();
        assert_eq!(sent.take().len(), 1);
    }
}

#[test]
fn a_masked_message_waits_for_its_unmask() {
    let (mut port, sent) = hot(PortKind::Root, Removal::Surprise, false);
    write(&mut port, 0x90, 1);
    port.insert().unwrap();
    assert_eq!(sent.take(), []);
    write(&mut port, 0x90, 0);
    assert_eq!(sent.take().len(), 1);
}

#[test]
fn without_messages_the_wire_is_high_until_the_events_are_cleared() {
    let (mut port, sent) = hot(PortKind::Downstream, Removal::Surprise, false);
    let wire = FakeIntx::default();
    port.connect(Box::new(wire.clone()));
    write(&mut port, 0x80, 0);
    port.insert().unwrap();
    assert!(wire.level());
    write(&mut port, 0x58, 0x0108_1028);
    assert_eq!((wire.level(), sent.take().len()), (false, 0));
}

#[test]
fn a_link_that_the_guest_disables_changes_its_state_and_not_presence() {
    let (mut port, sent) = hot(PortKind::Root, Removal::Surprise, true);
    write(&mut port, 0x50, express::LINK_DISABLE);
    assert_eq!((read(&port, 0x58) >> 16, sent.take().len()), (0x140, 1));
    write(&mut port, 0x58, 0x0100_1028);
    port.remove().unwrap();
    assert_eq!(read(&port, 0x58) >> 16, 8, "the link was down before");
    assert_eq!(sent.take().len(), 1);
    write(&mut port, 0x58, 0x0008_1028);
    write(&mut port, 0x50, 0);
    assert_eq!(read(&port, 0x58) >> 16, 0, "an empty slot has no link to bring up");
    let (mut port, _) = hot(PortKind::Root, Removal::Surprise, true);
    write(&mut port, 0x3C, 0x0040_0000);
    assert_eq!(read(&port, 0x58) >> 16, 0x40, "a bus reset does not flap anything");
}

#[test]
fn a_request_is_a_press_where_there_is_a_button() {
    let (mut port, sent) = hot(PortKind::Root, Removal::Button, true);
    port.request_removal().unwrap();
    assert_eq!((read(&port, 0x58) >> 16, sent.take().len()), (0x41, 1));
    let (mut port, sent) = hot(PortKind::Root, Removal::Orderly, true);
    port.request_removal().unwrap();
    assert_eq!((read(&port, 0x58) >> 16, sent.take().len()), (0x40, 0));
    assert_eq!(write(&mut port, 0x58, 0x1328), Changes::SLOT);
    assert_eq!(port.take_events(), [SlotEvent::Released]);
    assert_eq!(build(PortKind::Root, None).request_removal(), Err(SlotError::Absent));
}

#[test]
fn a_slot_keeps_exactly_its_control_bits() {
    for (removal, bits) in [(Removal::Surprise, 0x1028), (Removal::Orderly, 0x13E8), (Removal::Button, 0x13E9)] {
        let (mut port, _) = hot(PortKind::Downstream, removal, true);
        write(&mut port, 0x58, 0xFFFF_FFFF);
        assert_eq!(read(&port, 0x58) & 0xFFFF, bits);
        write(&mut port, 0x54, 0xFFFF_FFFF);
        assert_eq!(read(&port, 0x54) >> 19, 0x103);
    }
}

#[test]
fn the_mirror_shows_the_slot_before_the_guest_hears_of_it() {
    /// Holds the mirror against what a message is about when it is sent.
    struct Looks(Arc<FakeMirror>, std::sync::Mutex<Vec<(u32, u32)>>);
    impl MsiPort for Looks {
        fn send(&self, _: crate::seams::MsiMessage) {
            let shown = [0x58, 0x50].map(|at| self.0.read(Reg::containing(at)));
            self.1.lock().unwrap().push((shown[0] >> 16, shown[1] & LINK_STATUS));
        }
    }
    let mirror = Arc::new(FakeMirror::default());
    let looks = Arc::new(Looks(mirror.clone(), std::sync::Mutex::default()));
    let hotplug = Some(HotPlug { removal: Removal::Orderly, ..HotPlug::default() });
    let (planned, numbers) = planned(PortKind::Root, None, hotplug, false);
    let mut port = Port::new(&planned, &numbers, looks.clone()).unwrap();
    port.mirror(mirror.clone());
    port.program();
    write(&mut port, 0x80, 0x0001_0000);
    write(&mut port, 0x58, 0x1328);
    port.insert().unwrap();
    write(&mut port, 0x58, 0x0108_1328);
    port.remove().unwrap();
    let up = express::LINK_ACTIVE | 5 << 16 | 16 << 20;
    assert_eq!(*looks.1.lock().unwrap(), [(0x148, up), (0x108, 1 << 16)]);
    for kind in [ResetKind::Hot, ResetKind::Cold] {
        port.insert().unwrap_or(());
        port.reset(kind);
        assert!(Reg::all().all(|reg| mirror.read(reg) == port.config_read(reg)), "{kind:?}");
    }
}
