//! A guest's driver for each slot and a machine that adds and removes, with their steps in every order.

use proptest::prelude::*;

use super::*;
use crate::address::Sbdf;
use crate::enumerator::Cycles;
use crate::enumerator::pciehp::{Pciehp, State};

const SLOTS: [&str; 4] = ["rp0", "rp1", "dp0", "dp1"];
/// What each slot's messages carry.
const DATA: [u16; 4] = [0x40, 0x41, 0x42, 0x43];

impl Cycles for Rig {
    fn read(&mut self, at: Sbdf, offset: u16, data: &mut [u8]) {
        self.tree.read(at.segment, at.bdf, offset, data);
    }

    fn write(&mut self, at: Sbdf, offset: u16, data: &[u8]) {
        self.tree.write(at.segment, at.bdf, offset, data, &mut self.effects);
    }
}

/// One step of one side, at one slot.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// The machine adds a device.
    Add,
    /// The machine takes the device out.
    Remove,
    /// The machine asks for the device.
    Request,
    /// The guest looks what is there, before its driver is loaded.
    Boot,
    /// The driver discards stale events.
    Probe,
    /// The driver enables events and looks at presence.
    Listen,
    /// The handler runs if a message came.
    Interrupt,
    /// The thread does one thing.
    Work,
    /// The time after a press is over.
    Time,
    /// Software in the guest lets go of the device unasked, as far as it uses one.
    PowerOff,
    /// Software in the guest takes back what is there.
    PowerOn,
    /// The machine starts again.
    Reset,
}

fn any_step() -> impl Strategy<Value = (Step, usize)> {
    let step = prop_oneof![
        8 => Just(Step::Add),
        6 => Just(Step::Remove),
        3 => Just(Step::Request),
        3 => Just(Step::Boot),
        3 => Just(Step::Probe),
        3 => Just(Step::Listen),
        12 => Just(Step::Interrupt),
        16 => Just(Step::Work),
        2 => Just(Step::Time),
        2 => Just(Step::PowerOff),
        1 => Just(Step::PowerOn),
        1 => Just(Step::Reset),
    ];
    // Most steps meet at few slots, where the races are.
    (step, prop_oneof![6 => Just(0usize), 6 => Just(1), 6 => Just(2), 1 => Just(3)])
}

struct World {
    rig: Rig,
    drivers: [Option<Pciehp>; 4],
    /// Messages that no handler has taken yet.
    rung: [bool; 4],
    /// Device in each slot, by its number.
    there: [Option<u16>; 4],
    last: u16,
}

impl World {
    fn new() -> Self {
        Self { rig: Rig::new(), drivers: [const { None }; 4], rung: [false; 4], there: [None, None, None, Some(0xC01D)], last: 0 }
    }

    fn step(&mut self, step: Step, slot: usize) {
        match step {
            Step::Add => self.add(slot),
            Step::Remove => {
                let removed = self.rig.remove(SLOTS[slot]);
                assert_eq!(removed.is_ok(), self.there[slot].take().is_some(), "{removed:?}");
            }
            Step::Request => {
                let (port, info) = (self.rig.id(SLOTS[slot]), self.rig.info(SLOTS[slot]));
                let can = !info.occupants.is_empty() && !info.requested && info.removal != Some(Removal::Surprise);
                assert_eq!(self.rig.tree.request_removal(port, &mut self.rig.effects).is_ok(), can);
            }
            Step::Boot => {
                if self.drivers[slot].is_none() {
                    let at = self.rig.plan.by_name(SLOTS[slot]).unwrap().at;
                    self.drivers[slot] = Some(Pciehp::boot(&mut self.rig, at).unwrap());
                }
            }
            Step::Reset => {
                self.drivers = [const { None }; 4];
                self.rig.sent.take();
                self.rung = [false; 4];
                self.rig.tree.reset(&mut self.rig.effects);
            }
            of_driver => self.drive(of_driver, slot),
        }
        self.follow();
    }

    fn add(&mut self, slot: usize) {
        let free = self.rig.info(SLOTS[slot]).is_free();
        let added = self.rig.add(SLOTS[slot], self.last + 1, &[0]);
        assert_eq!(added.is_ok(), free, "{added:?}");
        if free {
            self.last += 1;
            self.there[slot] = Some(self.last);
        }
    }

    fn drive(&mut self, step: Step, slot: usize) {
        let Some(driver) = &mut self.drivers[slot] else { return };
        match step {
            Step::Probe => driver.probe(&mut self.rig, DATA[slot]),
            Step::Listen => driver.listen(&mut self.rig),
            Step::Interrupt if std::mem::take(&mut self.rung[slot]) => driver.interrupt(&mut self.rig),
            Step::Work if driver.listens() => drop(driver.work(&mut self.rig)),
            Step::Time => driver.time_is_over(),
            Step::PowerOff => drop(driver.power_off()),
            Step::PowerOn => drop(driver.power_on()),
            _ => {}
        }
    }

    /// What the machine does about messages and about what the guest told. A device leaves only if that was asked for.
    fn follow(&mut self) {
        for message in self.rig.sent.take() {
            let slot = DATA.iter().position(|data| u32::from(*data) == message.data).unwrap();
            self.rung[slot] = true;
        }
        for effect in std::mem::take(&mut self.rig.effects) {
            let Effect::Slot { port, event } = effect else { continue };
            let slot = SLOTS.iter().position(|name| self.rig.id(name) == port).unwrap();
            assert_ne!(event, SlotEvent::AddFailed, "every device that stays can be brought up");
            let info = self.rig.info(SLOTS[slot]);
            if event == SlotEvent::Released && info.requested {
                assert!(info.released, "the guest has done its part");
            }
            if event == SlotEvent::Released && (info.requested || self.drivers[slot].is_none()) {
                self.step(Step::Remove, slot);
            }
        }
    }

    /// Lets the guest finish everything that it has to do.
    fn finish(&mut self) {
        for slot in 0..SLOTS.len() {
            for step in [Step::Boot, Step::Probe, Step::Listen] {
                self.step(step, slot);
            }
        }
        for round in 0..32 {
            for (slot, name) in SLOTS.iter().enumerate() {
                for step in [Step::Interrupt, Step::Work, Step::Time, Step::Work, Step::Work] {
                    self.step(step, slot);
                }
                let info = self.rig.info(name);
                assert!(!info.requested || !info.released, "{name}: what was let go of and is asked for has left");
                let driver = self.drivers[slot].as_mut().unwrap();
                if info.requested && info.removal == Some(Removal::Orderly) {
                    driver.power_off();
                } else if round == 16 && self.there[slot].is_some() {
                    // What it let go of unasked and nobody wants.
                    driver.power_on();
                }
            }
        }
        for name in SLOTS {
            // A driver that never saw the device leaves its indicator alone: there the machine's deadline is what helps.
            let info = self.rig.info(name);
            assert!(!info.leaving || info.removal != Some(Removal::Surprise), "{name}");
            assert!(!info.requested, "{name}: the request was neither fulfilled nor dropped");
            self.rig.tree.expire(self.rig.id(name));
        }
    }

    /// The guest uses exactly what is there, at addresses that are reachable, and nothing is left over on either side.
    fn assert_consistent(&self) {
        // The device on the port that is no slot has one BAR.
        let mut bars = 1;
        for (slot, name) in SLOTS.iter().enumerate() {
            let driver = self.drivers[slot].as_ref().unwrap();
            let known: Vec<u16> = driver.known().iter().map(|found| found.device).collect();
            assert_eq!(known, Vec::from_iter(self.there[slot]), "{name}: {driver:?}");
            assert_eq!(driver.state(), if known.is_empty() { State::Off } else { State::On }, "{name}");
            let info = self.rig.info(name);
            assert_eq!((info.occupants.len(), info.leaving), (known.len(), false), "{name}");
            for bar in driver.known().iter().flat_map(|found| &found.bars) {
                let wanted = (bar.at, bar.spec.size);
                assert!(self.rig.tree.reachable().any(|(_, _, at, size)| (at, size) == wanted), "{name}: {bar:x?}");
                bars += 1;
            }
        }
        assert_eq!(self.rig.tree.reachable().count(), bars);
        let devices = self.there.iter().flatten().count();
        assert_eq!(self.rig.tree.nodes.len(), self.rig.plan.functions.len() - 1 + devices);
    }
}

#[test]
fn case_b4_a_device_added_at_any_moment_of_the_boot_is_there_at_the_end() {
    use Step::{Add, Boot, Interrupt, Listen, Probe, Work};
    let boot = [Boot, Probe, Listen, Interrupt, Work, Work, Work, Interrupt, Work];
    for slot in 0..3 {
        for moment in 0..=boot.len() {
            let mut world = World::new();
            for step in boot[..moment].iter().chain(&[Add]).chain(&boot[moment..]) {
                world.step(*step, slot);
            }
            world.finish();
            assert_eq!(world.there[slot], Some(1), "nobody asked to remove it");
            world.assert_consistent();
            assert_eq!(world.drivers[slot].as_ref().unwrap().failures(), 0);
        }
    }
}

#[test]
fn case_b5_a_device_removed_right_after_it_was_added_leaves_a_free_slot() {
    use Step::{Add, Interrupt, Remove, Request, Work};
    for (slot, leave) in [(0, Remove), (1, Remove), (1, Request), (2, Remove), (2, Request)] {
        let mut world = World::new();
        world.finish();
        for round in 0..100 {
            world.step(Add, slot);
            for step in [Interrupt, Work, Work, Work].iter().take(round % 5) {
                world.step(*step, slot);
            }
            world.step(leave, slot);
            world.finish();
            assert_eq!(world.there[slot], None, "{leave:?} from {}", SLOTS[slot]);
            world.assert_consistent();
        }
    }
}

#[test]
fn case_b5_a_device_that_the_guest_let_go_of_unasked_leaves_as_soon_as_it_is_asked_for() {
    use Step::{Add, Interrupt, PowerOff, PowerOn, Request, Work};
    for slot in [1, 2] {
        let mut world = World::new();
        world.finish();
        for round in 0..10 {
            for step in [Add, Interrupt, Work, Work, Work, PowerOff, Work] {
                world.step(step, slot);
            }
            assert!(world.there[slot].is_some(), "nobody asked for it");
            if round % 2 == 1 {
                for step in [PowerOn, Work, Work, Work] {
                    world.step(step, slot);
                }
                world.step(Request, slot);
                assert!(world.there[slot].is_some(), "it is used again");
                world.finish();
            } else {
                world.step(Request, slot);
            }
            assert_eq!(world.there[slot], None, "{}", SLOTS[slot]);
            world.finish();
            world.assert_consistent();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_steps_loses_or_invents_a_device(steps in prop::collection::vec(any_step(), 1..120)) {
        let mut world = World::new();
        for (step, slot) in steps {
            world.step(step, slot);
        }
        world.finish();
        world.assert_consistent();
    }
}
