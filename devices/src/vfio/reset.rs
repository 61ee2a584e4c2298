//! Decides when a guest's write resets the function, and quiets and resets it on the host.
//!
//! The kernel resets a function that can be reset alone when it is opened and when it is closed, too. One that can be reset with its
//! whole bus only is reset so before the guest runs.

use std::io;
use std::sync::{Mutex, MutexGuard};

use pci::access::Access;
use pci::caps::express::reg as express;
use pci::function::HardwareReset;
use pci::regs::{command, header};
use pci::sync::lock;

use super::facts::Facts;
use super::host::{CONFIG, HostDevice, HostReset};
use super::neighbours::NotReset;

/// Advanced features control: initiate FLR, in the capability's second dword.
const ADVANCED_FLR: u32 = 1;

/// Whether the write asks the function to reset itself.
#[must_use]
pub fn is_asked_for(facts: &Facts, access: Access, value: u32) -> bool {
    let carried = value & access.lanes.mask();
    let at = access.reg.offset();
    let express = facts.express.filter(|express| express.flr);
    let by_express = express.is_some_and(|fact| at == u16::from(fact.offset) + u16::from(express::DEVICE_CONTROL));
    let by_advanced = facts.advanced_reset.is_some_and(|offset| at == u16::from(offset) + 4);
    (by_express && carried & express::INITIATE_FLR != 0) || (by_advanced && carried & ADVANCED_FLR != 0)
}

/// What became of a reset.
#[derive(Debug)]
pub enum Outcome {
    /// The function is as after power-on.
    Done,
    /// It is not reset.
    Not(NotReset),
    /// The function does not answer any more.
    Lost,
}

/// What became of a reset that the host answered with `done`.
pub fn outcome(device: &mut dyn HostDevice, done: Result<(), NotReset>) -> Outcome {
    if let Err(why) = done {
        return Outcome::Not(why);
    }
    let mut ids = [0; 4];
    match device.read(CONFIG, header::IDS.into(), &mut ids) {
        Ok(()) if ids != [0xFF; 4] => Outcome::Done,
        _ => Outcome::Lost,
    }
}

/// A reset that is carried out once, by whoever comes first, while nobody holds the function.
pub struct ResetOnce(Mutex<Progress>);

enum Progress {
    /// Not run, or run with what came of it.
    Begun(Box<dyn HostReset>, Option<Result<(), NotReset>>),
    /// What came of it was taken note of.
    Over,
}

impl ResetOnce {
    /// Not begun.
    #[must_use]
    pub fn new(reset: Box<dyn HostReset>) -> Self {
        Self(Mutex::new(Progress::Begun(reset, None)))
    }

    /// What the host answered, once somebody ran it; `None` if nobody did. The function is not under reset any more.
    pub fn end(&self) -> Option<Result<(), NotReset>> {
        match std::mem::replace(&mut *self.progress(), Progress::Over) {
            Progress::Begun(_, done) => done,
            Progress::Over => None,
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.0)
    }
}

impl HardwareReset for ResetOnce {
    fn run(&self) {
        if let Progress::Begun(reset, done @ None) = &mut *self.progress() {
            *done = Some(reset.run());
        }
    }
}

/// Has hardware decode memory and I/O (the enables of devices without such BARs keep nothing), with the `others` of the
/// command register's low half.
pub fn set_command(device: &mut dyn HostDevice, others: u16) -> io::Result<()> {
    let decode = u16::from((command::MEMORY | command::IO).to_le_bytes()[0]);
    let value = (decode | others).to_le_bytes();
    device.write(CONFIG, header::COMMAND_STATUS.into(), &value)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender};

    use pci::access::{Lanes, Reg};

    use super::*;
    use crate::vfio::facts::Snapshot;
    use crate::vfio::fake::{FakeDevice, Registers};

    #[test]
    fn only_the_reset_bit_of_a_function_that_can_is_a_request() {
        let facts = Facts::of(&Snapshot::new(&Registers::gpu().bytes));
        let control = u16::from(facts.express.unwrap().offset) + 8;
        let access = |offset, first, len| Access { reg: Reg::containing(offset), lanes: Lanes::new(first, len) };
        assert!(is_asked_for(&facts, access(control, 0, 2), 0x8000));
        assert!(is_asked_for(&facts, access(control, 1, 1), 0x8000));
        assert!(!is_asked_for(&facts, access(control, 0, 1), 0x8000));
        assert!(!is_asked_for(&facts, access(control, 0, 4), 0x7FFF));
        assert!(!is_asked_for(&facts, access(control + 4, 0, 4), 0x8000));
        let mut without = facts;
        without.express = without.express.map(|express| super::super::facts::ExpressFact { flr: false, ..express });
        assert!(!is_asked_for(&without, access(control, 0, 2), 0x8000));
    }

    /// Says when it begins, and goes on when it is told to.
    struct Slow(Sender<()>, Receiver<()>);

    impl HostReset for Slow {
        fn run(&mut self) -> Result<(), NotReset> {
            self.0.send(()).unwrap();
            self.1.recv().unwrap();
            Ok(())
        }
    }

    #[test]
    fn who_runs_a_reset_waits_while_it_is_under_way() {
        let (begun, begins) = std::sync::mpsc::channel();
        let (go, goes) = std::sync::mpsc::channel::<()>();
        let once = ResetOnce::new(Box::new(Slow(begun, goes)));
        std::thread::scope(|scope| {
            scope.spawn(|| once.run());
            begins.recv().unwrap();
            let second = scope.spawn(|| once.run());
            assert!(!second.is_finished());
            go.send(()).unwrap();
            second.join().unwrap();
            assert!(matches!(once.end(), Some(Ok(()))));
        });
        once.run();
        assert!(once.end().is_none());
    }

    #[test]
    fn case_c11_a_reset_that_fails_or_loses_the_device_is_told() {
        let mut device = FakeDevice::gpu();
        let reset = |device: &mut FakeDevice| {
            let done = device.begin_reset().unwrap().run();
            outcome(device, done)
        };
        assert!(matches!(reset(&mut device), Outcome::Done));
        device.state().held = true;
        assert!(matches!(reset(&mut device), Outcome::Not(NotReset::Held)));
        device.state().held = false;
        device.state().reset_fails = true;
        assert!(matches!(reset(&mut device), Outcome::Not(NotReset::Failed { .. })));
        device.state().reset_fails = false;
        device.state().lost_by_reset = true;
        assert!(matches!(reset(&mut device), Outcome::Lost));
    }
}
