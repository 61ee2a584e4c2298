//! What a guest sees of a slot, and every race between it and the machine.

use super::*;

const ABP: u32 = 1 << 16;
const PDC: u32 = 8 << 16;
const PDS: u32 = 0x40 << 16;
const DLLSC: u32 = 0x100 << 16;
const ALL_EVENTS: u32 = ABP | PDC | DLLSC;
/// What pciehp enables: link and presence or button, and the interrupt.
const LISTEN: u32 = 0x1028;
const LISTEN_BUTTON: u32 = 0x1021;

const POWER_ON: u32 = 1 << 8;
const POWER_BLINK: u32 = 2 << 8;
const POWER_OFF: u32 = 3 << 8;

fn control(slot: &mut Slot, value: u32) -> Outcome {
    slot.write(Lanes::new(0, 2), value)
}

/// Writes ones to what a read showed, as a handler does.
fn acknowledge(slot: &mut Slot) -> Outcome {
    let shown = slot.read() & ALL_EVENTS;
    slot.write(Lanes::new(2, 2), shown)
}

fn silent(outcome: &Outcome) -> bool {
    *outcome == Outcome::default()
}

fn listening(occupied: bool) -> Slot {
    let mut slot = Slot::new(Removal::Surprise, 3, occupied);
    control(&mut slot, LISTEN);
    slot
}

/// A slot of kind `removal` with a guest that uses the device in it.
fn in_use(removal: Removal) -> Slot {
    let mut slot = Slot::new(removal, 3, true);
    control(&mut slot, POWER_ON | if removal == Removal::Button { LISTEN_BUTTON } else { LISTEN });
    slot
}

/// The power indicator takes a value, everything else in slot control stays.
fn light(slot: &mut Slot, power: u32) -> Vec<SlotEvent> {
    let kept = slot.read() & 0xFFFF & !POWER_OFF;
    control(slot, kept | power).events
}

#[test]
fn capabilities_are_those_that_make_no_guest_wait() {
    for (removal, own) in [(Removal::Surprise, 0), (Removal::Orderly, 0x10), (Removal::Button, 0x11)] {
        for number in [1u16, 3, 0x1FFF] {
            assert_eq!(Slot::new(removal, number, false).capabilities(), 0x0004_0060 | own | u32::from(number) << 19);
        }
    }
}

#[test]
fn a_slot_starts_with_its_state_and_without_events() {
    for (removal, empty, full) in [(Removal::Surprise, 0, 0), (Removal::Orderly, 0x3C0, 0x1C0), (Removal::Button, 0x3C0, 0x1C0)] {
        assert_eq!((Slot::new(removal, 1, false).read(), Slot::new(removal, 1, true).read()), (empty, full | PDS));
    }
}

#[test]
fn writes_keep_what_the_slot_has_and_nothing_else() {
    for (removal, kept) in [(Removal::Surprise, 0x1028), (Removal::Orderly, 0x13E8), (Removal::Button, 0x13E9)] {
        let mut slot = Slot::new(removal, 1, true);
        slot.write(Lanes::ALL, 0xFFFF_FFFF);
        assert_eq!(slot.read(), kept | PDS, "{removal:?}");
        slot.write(Lanes::new(1, 1), 0);
        assert_eq!(slot.read(), kept & 0xFF | PDS, "a byte write changes its byte");
    }
}

#[test]
fn an_insertion_shows_presence_and_both_changes_with_one_interrupt() {
    let mut slot = listening(false);
    assert_eq!(slot.insert(true).unwrap().interrupt, Some(true));
    assert_eq!(slot.read() & !0xFFFF, PDS | PDC | DLLSC);
    let cleared = acknowledge(&mut slot);
    assert_eq!((cleared.interrupt, cleared.events), (Some(false), vec![SlotEvent::EventsCleared]));
    assert_eq!(slot.read() & !0xFFFF, PDS);
}

#[test]
fn a_removal_takes_presence_away_and_tells_both_changes() {
    let mut slot = listening(true);
    assert_eq!(slot.remove(true).unwrap().interrupt, Some(true));
    assert_eq!(slot.read() & !0xFFFF, PDC | DLLSC);
    assert!(!slot.occupied() && slot.leaving());
}

#[test]
fn a_second_event_before_the_first_is_cleared_sends_nothing() {
    let mut slot = listening(false);
    slot.insert(true).unwrap();
    assert_eq!(slot.remove(true).unwrap().interrupt, None);
    assert_eq!(acknowledge(&mut slot).interrupt, Some(false));
    assert_eq!(slot.insert(true).unwrap().interrupt, Some(true), "the next rise is a new message");
}

#[test]
fn clearing_some_events_keeps_the_interrupt_up() {
    let mut slot = listening(false);
    slot.insert(true).unwrap();
    assert!(silent(&slot.write(Lanes::new(2, 2), PDC)));
    let last = slot.write(Lanes::new(3, 1), DLLSC);
    assert_eq!((last.interrupt, last.events), (Some(false), vec![SlotEvent::EventsCleared]));
}

#[test]
fn an_event_that_comes_between_read_and_clear_is_not_lost() {
    let mut slot = listening(false);
    slot.insert(false).unwrap();
    let shown = slot.read() & ALL_EVENTS;
    assert_eq!(slot.link_changed().interrupt, None);
    assert!(silent(&slot.write(Lanes::new(2, 2), shown)), "the interrupt stays up");
    assert_eq!(slot.read() & ALL_EVENTS, DLLSC, "the handler finds it when it reads again");
}

#[test]
fn an_enable_that_turns_on_over_a_pending_event_interrupts() {
    let mut slot = Slot::new(Removal::Surprise, 1, false);
    assert_eq!(slot.insert(true).unwrap().interrupt, None, "nobody listens");
    assert_eq!(control(&mut slot, 0x1008).interrupt, None, "events without the interrupt enable");
    assert_eq!(control(&mut slot, 0x1028).interrupt, Some(true));
    assert_eq!(control(&mut slot, 0x0028).interrupt, None, "presence alone keeps it up");
    assert_eq!(control(&mut slot, 0x0020).interrupt, Some(false));
    assert_eq!(control(&mut slot, 0x1020).interrupt, Some(true));
}

#[test]
fn an_event_that_is_not_enabled_does_not_interrupt() {
    let mut slot = Slot::new(Removal::Button, 1, false);
    control(&mut slot, 0x0021);
    assert_eq!(slot.insert(true).unwrap().interrupt, None);
    control(&mut slot, 0);
    assert_eq!(control(&mut slot, LISTEN_BUTTON).interrupt, Some(true), "the link does");
}

#[test]
fn case_b4_a_guest_that_takes_the_slot_over_late_finds_the_device_by_its_state() {
    let mut slot = Slot::new(Removal::Surprise, 1, false);
    slot.insert(true).unwrap();
    // Stale events are discarded first, then the events are enabled, then presence is looked at.
    slot.write(Lanes::ALL, 0xFFFF_0000);
    assert!(silent(&control(&mut slot, LISTEN)));
    assert_eq!(slot.read() & !0xFFFF, PDS);
}

#[test]
fn a_replacement_waits_until_the_guest_has_seen_the_removal() {
    let mut slot = listening(true);
    slot.remove(true).unwrap();
    assert_eq!(slot.insert(true), Err(SlotError::Leaving));
    slot.write(Lanes::new(2, 2), PDC);
    assert_eq!(slot.insert(true), Err(SlotError::Leaving), "half of it is not enough");
    assert_eq!(slot.write(Lanes::new(2, 2), DLLSC).events, [SlotEvent::EventsCleared]);
    assert_eq!(slot.insert(true).unwrap().interrupt, Some(true));
}

#[test]
fn case_b5_a_removal_right_after_an_insertion_is_carried_out() {
    let mut slot = listening(false);
    slot.insert(true).unwrap();
    slot.remove(true).unwrap();
    acknowledge(&mut slot);
    assert_eq!((slot.read() & PDS, slot.leaving()), (0, false));
    slot.insert(true).unwrap();
}

#[test]
fn case_b6_a_second_removal_is_an_error() {
    let mut slot = listening(true);
    slot.remove(true).unwrap();
    assert_eq!(slot.remove(true), Err(SlotError::Empty));
    let mut slot = in_use(Removal::Orderly);
    slot.request().unwrap();
    assert_eq!(slot.request(), Err(SlotError::Requested));
    assert_eq!(in_use(Removal::Surprise).request(), Err(SlotError::NoRelease));
    assert_eq!(Slot::new(Removal::Orderly, 1, false).request(), Err(SlotError::Empty));
}

#[test]
fn a_slot_holds_one_device() {
    assert_eq!(listening(true).insert(true), Err(SlotError::Occupied));
}

#[test]
fn without_an_answer_the_slot_is_free_again_after_its_time() {
    let mut slot = Slot::new(Removal::Surprise, 1, true);
    slot.remove(true).unwrap();
    slot.expire();
    slot.insert(true).unwrap();
    let mut slot = in_use(Removal::Button);
    slot.request().unwrap();
    acknowledge(&mut slot);
    slot.expire();
    assert_eq!((slot.request().is_ok(), slot.read() & ABP), (true, ABP), "asked once more");
}

#[test]
fn orderly_removal_ends_when_the_power_indicator_goes_out() {
    for removal in [Removal::Orderly, Removal::Button] {
        let mut slot = in_use(removal);
        slot.request().unwrap();
        assert_eq!(light(&mut slot, POWER_BLINK), [] as [SlotEvent; 0]);
        assert_eq!(light(&mut slot, POWER_OFF), [SlotEvent::Released], "{removal:?}");
        assert!(slot.occupied(), "the device stays until it is taken out");
        assert_eq!(light(&mut slot, POWER_OFF), [] as [SlotEvent; 0], "and is released once");
    }
}

#[test]
fn an_added_device_goes_from_dark_over_blinking_to_lit() {
    let mut slot = Slot::new(Removal::Orderly, 1, false);
    control(&mut slot, LISTEN | POWER_OFF);
    slot.insert(true).unwrap();
    for power in [POWER_BLINK, POWER_ON] {
        assert_eq!(light(&mut slot, power), [] as [SlotEvent; 0]);
    }
    assert_eq!(light(&mut slot, POWER_OFF), [SlotEvent::Released]);
}

#[test]
fn a_device_that_the_guest_gives_up_on_is_told_as_failed() {
    let mut slot = Slot::new(Removal::Orderly, 1, false);
    control(&mut slot, LISTEN | POWER_OFF);
    slot.insert(true).unwrap();
    light(&mut slot, POWER_BLINK);
    assert_eq!(light(&mut slot, POWER_OFF), [SlotEvent::AddFailed], "it never was on");
    let mut slot = in_use(Removal::Orderly);
    let attention_on = 1 << 6;
    assert_eq!(control(&mut slot, LISTEN | attention_on | POWER_OFF).events, [SlotEvent::AddFailed], "attention is on");
}

#[test]
fn a_replacement_waits_until_the_indicator_of_the_device_before_is_out() {
    for removal in [Removal::Orderly, Removal::Button] {
        for busy in [POWER_ON, POWER_BLINK] {
            let mut slot = in_use(removal);
            light(&mut slot, busy);
            slot.remove(true).unwrap();
            // The handler clears the events at once; its thread comes later.
            acknowledge(&mut slot);
            assert_eq!(slot.insert(true), Err(SlotError::Leaving));
            assert_eq!(light(&mut slot, POWER_OFF), [] as [SlotEvent; 0], "nothing is there to be released");
            slot.insert(true).unwrap();
            for power in [POWER_BLINK, POWER_ON] {
                assert_eq!(light(&mut slot, power), [] as [SlotEvent; 0]);
            }
            assert_eq!(light(&mut slot, POWER_OFF), [SlotEvent::Released]);
        }
        let mut slot = in_use(removal);
        light(&mut slot, POWER_OFF);
        slot.remove(true).unwrap();
        acknowledge(&mut slot);
        slot.insert(true).unwrap();
    }
}

#[test]
fn an_indicator_that_is_out_and_is_switched_off_once_more_counts() {
    let mut slot = Slot::new(Removal::Orderly, 1, true);
    control(&mut slot, LISTEN | POWER_ON);
    slot.remove(true).unwrap();
    acknowledge(&mut slot);
    slot.write(Lanes::new(0, 1), 0x28);
    assert!(slot.leaving(), "a write to another byte says nothing");
    control(&mut slot, LISTEN | POWER_OFF);
    assert!(!slot.leaving());
}

#[test]
fn an_indicator_of_an_empty_slot_tells_nothing() {
    let mut slot = in_use(Removal::Orderly);
    slot.remove(true).unwrap();
    for power in [POWER_OFF, POWER_BLINK, POWER_ON, POWER_OFF] {
        assert_eq!(light(&mut slot, power), [] as [SlotEvent; 0]);
    }
}

#[test]
fn a_press_interrupts_a_guest_that_uses_the_device() {
    let mut slot = in_use(Removal::Button);
    assert_eq!((slot.request().unwrap().interrupt, slot.read() & ALL_EVENTS), (Some(true), ABP));
}

#[test]
fn case_b5_a_press_waits_until_the_device_is_up() {
    let mut slot = Slot::new(Removal::Button, 1, false);
    control(&mut slot, LISTEN_BUTTON | POWER_OFF);
    slot.insert(true).unwrap();
    acknowledge(&mut slot);
    assert_eq!(slot.request().unwrap().interrupt, None);
    light(&mut slot, POWER_BLINK);
    assert_eq!(slot.read() & ABP, 0, "a press while it blinks would take the insertion back");
    let up = control(&mut slot, LISTEN_BUTTON | POWER_ON);
    assert_eq!((up.interrupt, slot.read() & ABP), (Some(true), ABP));
}

#[test]
fn a_press_waits_for_a_guest_that_listens() {
    let mut slot = Slot::new(Removal::Button, 1, true);
    assert_eq!(slot.request().unwrap().interrupt, None);
    slot.write(Lanes::ALL, 0xFFFF_0000 | POWER_ON);
    assert_eq!(slot.read() & ABP, 0, "it would be discarded as stale");
    assert_eq!(control(&mut slot, LISTEN_BUTTON | POWER_ON).interrupt, Some(true));
}

#[test]
fn a_device_that_a_guest_finds_at_its_boot_can_be_released() {
    for removal in [Removal::Orderly, Removal::Button] {
        let mut slot = Slot::new(removal, 1, false);
        slot.insert(true).unwrap();
        assert_eq!(slot.read() & POWER_OFF, POWER_ON, "as firmware would have left it");
        // The driver clears stale events and enables its own; it has nothing to bring up.
        slot.write(Lanes::ALL, 0xFFFF_0000 | POWER_ON);
        control(&mut slot, LISTEN | POWER_ON);
        assert_eq!(light(&mut slot, POWER_OFF), [SlotEvent::Released]);
        let mut slot = Slot::new(removal, 1, true);
        slot.remove(true).unwrap();
        assert_eq!(slot.read() & POWER_OFF, POWER_OFF);
    }
}

#[test]
fn a_press_that_the_guest_took_for_something_else_is_repeated() {
    let mut slot = in_use(Removal::Button);
    slot.request().unwrap();
    acknowledge(&mut slot);
    light(&mut slot, POWER_BLINK);
    assert_eq!(slot.read() & ABP, 0);
    light(&mut slot, POWER_ON);
    assert_eq!((slot.read() & ABP, slot.requested()), (ABP, true));
}

#[test]
fn surprise_comes_before_an_open_request() {
    let mut slot = in_use(Removal::Button);
    slot.request().unwrap();
    slot.remove(true).unwrap();
    assert!(!slot.requested());
    acknowledge(&mut slot);
    light(&mut slot, POWER_OFF);
    slot.insert(true).unwrap();
    light(&mut slot, POWER_BLINK);
    light(&mut slot, POWER_ON);
    assert_eq!(slot.read() & ABP, 0, "the request was for the device before");
}

#[test]
fn a_reset_of_the_machine_restores_the_slot_and_ends_what_waited_for_the_guest() {
    for removal in [Removal::Surprise, Removal::Orderly, Removal::Button] {
        for occupied in [false, true] {
            let mut slot = Slot::new(removal, 9, occupied);
            control(&mut slot, 0xFFFF);
            if occupied {
                slot.remove(true).unwrap()
            } else {
                slot.insert(true).unwrap()
            };
            assert_eq!(slot.reset(ResetKind::Cold), [SlotEvent::EventsCleared]);
            assert_eq!(slot, Slot::new(removal, 9, !occupied));
        }
    }
    let mut slot = in_use(Removal::Orderly);
    slot.request().unwrap();
    assert_eq!(slot.reset(ResetKind::Cold), [SlotEvent::Released]);
    assert!(!slot.requested());
}

#[test]
fn a_reset_from_above_keeps_a_request() {
    let mut slot = in_use(Removal::Button);
    slot.request().unwrap();
    assert_eq!(slot.reset(ResetKind::Hot), [SlotEvent::EventsCleared]);
    assert_eq!((slot.requested(), slot.read() & ABP), (true, 0));
    control(&mut slot, LISTEN_BUTTON | POWER_ON);
    assert_eq!(slot.read() & ABP, ABP, "pressed again for the guest that starts again");
}

#[test]
fn a_device_that_was_let_go_of_unasked_is_released_as_soon_as_it_is_asked_for() {
    for removal in [Removal::Orderly, Removal::Button] {
        let mut slot = in_use(removal);
        assert_eq!(light(&mut slot, POWER_OFF), [SlotEvent::Released]);
        assert!(slot.occupied() && !slot.released(), "nobody asked for it");
        let asked = slot.request().unwrap();
        assert_eq!(asked, Outcome { interrupt: None, events: vec![SlotEvent::Released] }, "{removal:?}");
        assert_eq!((slot.requested(), slot.released(), slot.read() & ABP), (true, true, 0), "nobody is asked by the button");
        light(&mut slot, POWER_BLINK);
        light(&mut slot, POWER_ON);
        assert!(slot.released() && slot.read() & ABP == 0, "and who takes it back is late");
        assert_eq!(slot.request(), Err(SlotError::Requested));
        slot.remove(true).unwrap();
        assert!(!slot.released());
    }
}

#[test]
fn a_device_that_could_not_be_brought_up_is_released_as_soon_as_it_is_asked_for() {
    for removal in [Removal::Orderly, Removal::Button] {
        for asked_first in [false, true] {
            let mut slot = Slot::new(removal, 1, false);
            control(&mut slot, LISTEN_BUTTON | POWER_OFF);
            slot.insert(true).unwrap();
            light(&mut slot, POWER_BLINK);
            if asked_first {
                assert_eq!(slot.request().unwrap().events, []);
            }
            assert_eq!(light(&mut slot, POWER_OFF), [SlotEvent::AddFailed]);
            if !asked_first {
                assert_eq!(slot.request().unwrap().events, [SlotEvent::Released]);
            }
            assert!(slot.released(), "{removal:?}");
        }
    }
}

#[test]
fn a_device_that_the_guest_has_yet_to_bring_up_or_uses_again_is_not_released() {
    for removal in [Removal::Orderly, Removal::Button] {
        let mut slot = Slot::new(removal, 1, false);
        control(&mut slot, LISTEN_BUTTON | POWER_OFF);
        slot.insert(true).unwrap();
        assert_eq!((slot.request().unwrap().events, slot.released()), (vec![], false), "its driver comes to it");
        let mut slot = in_use(removal);
        light(&mut slot, POWER_OFF);
        light(&mut slot, POWER_BLINK);
        light(&mut slot, POWER_ON);
        assert_eq!((slot.request().unwrap().events, slot.released()), (vec![], false), "it was brought up once more");
        let mut slot = in_use(removal);
        light(&mut slot, POWER_OFF);
        control(&mut slot, POWER_OFF);
        control(&mut slot, LISTEN_BUTTON | POWER_OFF);
        assert_eq!((slot.request().unwrap().events, slot.released()), (vec![], false), "another driver has taken the slot over");
    }
}

#[test]
fn what_stood_behind_a_device_is_kept_until_the_events_of_its_own_removal_are_cleared() {
    let mut slot = listening(false);
    slot.insert(true).unwrap();
    assert_eq!(acknowledge(&mut slot).events, [SlotEvent::EventsCleared]);
    assert!(!slot.has_news(), "an insertion holds nothing back");
    slot.remove(true).unwrap();
    assert!(slot.has_news(), "whatever was told of the insertion");
    acknowledge(&mut slot);
    assert!(!slot.has_news());
    let mut slot = in_use(Removal::Orderly);
    slot.remove(true).unwrap();
    acknowledge(&mut slot);
    assert_eq!((slot.has_news(), slot.leaving()), (false, true), "a replacement waits for the indicator as well");
}
