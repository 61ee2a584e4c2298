//! The main loop: waits for the guest's end, signals, and characters to pass between the host and the serial line.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use devices::eventfd;
use devices::legacy::{Console, Drained, InputLine, PowerEvent};
use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberId, SubscriberOps};
use pci::sync::lock;
use thiserror::Error;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

use crate::signals::Signals;
use crate::vcpu::Ended;
use crate::working_set;

/// Why the guest is to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The guest asked.
    Power(PowerEvent),
    /// The guest's kernel said that it panicked.
    Panic,
    /// The guest did not serve its watchdog.
    Watchdog,
    /// A vCPU cannot go on.
    Vcpu(Ended),
    /// A signal asked.
    Signal(i32),
    /// The user typed the escape.
    Escape,
    /// The API asked for the guest's end; what follows is its business.
    Command,
    /// The API asked for a reset.
    Reboot,
}

/// In a few words.
impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Power(PowerEvent::PowerOff) => f.write_str("the guest powered off"),
            Self::Power(PowerEvent::Reset) => f.write_str("the guest reset itself"),
            Self::Power(PowerEvent::Exit(value)) => write!(f, "the guest wrote {value} to the debug exit port"),
            Self::Panic => f.write_str("the guest's kernel panicked"),
            Self::Watchdog => f.write_str("the guest did not serve its watchdog in time"),
            Self::Vcpu(ended) => ended.fmt(f),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::Escape => f.write_str("it was ended from the terminal"),
            Self::Command | Self::Reboot => f.write_str("a client asked for it"),
        }
    }
}

/// Where vCPUs and devices say that the guest is to stop. The first word counts.
pub struct Ending {
    first: Mutex<Option<End>>,
    event: EventFd,
    /// vCPUs leave at their next exit.
    pub stop: Arc<AtomicBool>,
}

impl Ending {
    /// Nobody said anything yet.
    pub fn new() -> io::Result<Arc<Self>> {
        let event = eventfd::new()?;
        Ok(Arc::new(Self { first: Mutex::new(None), event, stop: Arc::default() }))
    }

    /// The guest is to stop. Returns at once; the vCPU that calls does not run another instruction.
    pub fn say(&self, end: End) {
        lock(&self.first).get_or_insert(end);
        self.stop.store(true, Ordering::Release);
        // A full counter is readable already.
        let _ = self.event.write(1);
    }

    fn get(&self) -> Option<End> {
        *lock(&self.first)
    }
}

/// A console connected to standard input.
pub struct Input {
    /// The line.
    pub line: Arc<dyn InputLine>,
    /// Where characters come from.
    pub from: BorrowedFd<'static>,
    /// Whether Ctrl-A is an escape: x ends the machine, a second Ctrl-A is passed on.
    pub escape: bool,
    /// Signalled when a full line has room again.
    pub resume: Arc<EventFd>,
}

/// What the main loop listens to beside the guest's end.
pub struct Sources {
    /// Signals that end the process.
    pub signals: Signals,
    /// Output of the guest.
    pub consoles: Vec<Arc<Console>>,
    /// Input for the guest.
    pub input: Option<Input>,
    /// How long the guest may take.
    pub limit: Option<Duration>,
}

/// Somebody with work for the main loop's thread: commands, devices that come and go.
pub trait Attendant {
    /// Descriptors that become readable when there is work.
    fn descriptors(&self) -> Vec<i32>;
    /// Does what there is to do. Says when the guest is to stop.
    fn attend(&mut self) -> Option<End>;
    /// When there is work even if no descriptor says so.
    fn deadline(&self) -> Option<Instant>;
}

struct Subscriber {
    ending: Arc<Ending>,
    signals: Signals,
    consoles: Vec<Arc<Console>>,
    input: Option<Input>,
    /// Input that cannot be waited for, such as a regular file: it is read whenever the line has room.
    always_ready: bool,
    attended: Vec<i32>,
    pending: Vec<u8>,
    escaped: bool,
    end: Option<End>,
}

const ENDING: u32 = 0;
const SIGNAL: u32 = 1;
const INPUT: u32 = 2;
const RESUME: u32 = 3;
const ATTENDANT: u32 = 4;
/// Console n wakes by data `WAKE + 2 n` and is writable by `WAKE + 2 n + 1`.
const WAKE: u32 = 16;

/// A main loop that has all that it needs of the host.
pub struct MainLoop {
    manager: EventManager<Subscriber>,
    subscriber: SubscriberId,
    /// How long the guest may take, and until when.
    deadline: Option<(Duration, Instant)>,
}

impl MainLoop {
    /// Waits for the guest's end, for `sources`, and for descriptors of an attendant.
    pub fn new(ending: &Arc<Ending>, sources: Sources, attended: Vec<i32>) -> Result<Self, MainLoopError> {
        let deadline = sources.limit.map(|limit| (limit, Instant::now() + limit));
        let mut manager = EventManager::new().map_err(MainLoopError::Loop)?;
        let subscriber = manager.add_subscriber(Subscriber {
            ending: Arc::clone(ending),
            signals: sources.signals,
            consoles: sources.consoles,
            input: sources.input,
            attended,
            always_ready: false,
            pending: Vec::new(),
            escaped: false,
            end: None,
        });
        Ok(Self { manager, subscriber, deadline })
    }

    /// Runs until the guest is to stop, or for as long as the sources allow.
    pub fn run(&mut self, attendant: &mut dyn Attendant) -> Result<End, MainLoopError> {
        let manager = &mut self.manager;
        working_set::trim();
        loop {
            // Before the first wait, too: there may be work from before.
            if let Some(end) = attendant.attend() {
                return Ok(end);
            }
            let next = attendant.deadline().into_iter().chain(self.deadline.map(|(_, at)| at)).min();
            // Rounded up, or the loop would spin through the last millisecond.
            let left = next.map(|at| at.saturating_duration_since(Instant::now()).as_millis().saturating_add(1));
            let left = left.map_or(-1, |left| i32::try_from(left).unwrap_or(i32::MAX));
            manager.run_with_timeout(left).map_err(MainLoopError::Loop)?;
            if let Some(end) = manager.subscriber_mut(self.subscriber).map_err(MainLoopError::Loop)?.end {
                return Ok(end);
            }
            if let Some((limit, _)) = self.deadline.filter(|(_, at)| Instant::now() >= *at) {
                return Err(MainLoopError::TimeLimit { limit });
            }
        }
    }
}

impl MutEventSubscriber for Subscriber {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        add(ops, &self.ending.event, ENDING, EventSet::IN);
        add(ops, self.signals.event(), SIGNAL, EventSet::IN);
        for (console, data) in self.consoles.iter().zip((WAKE..).step_by(2)) {
            add(ops, console.wake(), data, EventSet::IN);
        }
        for descriptor in &self.attended {
            add(ops, &Raw(*descriptor), ATTENDANT, EventSet::IN);
        }
        if let Some(input) = &self.input {
            add(ops, &*input.resume, RESUME, EventSet::IN);
            if ops.add(Events::with_data(&input.from, INPUT, EventSet::IN)).is_err() {
                self.always_ready = true;
                let _ = input.resume.write(1);
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            ENDING => self.end = self.ending.get(),
            SIGNAL => self.end = self.signals.take().map(End::Signal).or(self.end),
            INPUT => self.read(ops),
            RESUME => self.resume(ops),
            // The loop calls the attendant after every round.
            ATTENDANT => {}
            data => self.drain(data, ops),
        }
    }
}

impl Subscriber {
    fn drain(&self, data: u32, ops: &mut EventOps<'_>) {
        let index = usize::try_from((data - WAKE) / 2).unwrap_or(usize::MAX);
        let Some(console) = self.consoles.get(index) else { return };
        let output = Events::with_data(&raw_of(console.output()), data | 1, EventSet::OUT);
        let waits_for_output = data & 1 == 1;
        match (console.drain(), waits_for_output) {
            // What cannot be waited for is always writable: come back at once.
            (Drained::Waiting, false) if ops.add(output).is_err() => console.wake_up(),
            (Drained::Empty, true) => {
                let _ = ops.remove(output);
            }
            _ => {}
        }
    }

    fn read(&mut self, ops: &mut EventOps<'_>) {
        let Some(input) = &self.input else { return };
        let mut buffer = [0; 1024];
        let room = input.line.room().min(buffer.len());
        let Some(buffer) = buffer.get_mut(..room).filter(|buffer| !buffer.is_empty()) else {
            let _ = ops.remove(Events::with_data(&input.from, INPUT, EventSet::IN));
            return;
        };
        match rustix::io::read(input.from, &mut *buffer) {
            Ok(0) => {
                // The other side closed it. The guest goes on without input.
                let _ = ops.remove(Events::with_data(&input.from, INPUT, EventSet::IN));
                self.input = None;
            }
            Ok(count) => {
                let typed = buffer.get(..count).unwrap_or_default().to_vec();
                self.type_in(&typed);
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(error) => {
                log::warn!("cannot read standard input: {error}; the guest gets no more input");
                let _ = ops.remove(Events::with_data(&input.from, INPUT, EventSet::IN));
                self.input = None;
            }
        }
    }

    fn type_in(&mut self, typed: &[u8]) {
        let Some(input) = &self.input else { return };
        const CTRL_A: u8 = 1;
        for byte in typed {
            match (input.escape, self.escaped, *byte) {
                (true, false, CTRL_A) => self.escaped = true,
                (true, true, b'x') => self.end = Some(End::Escape),
                (true, true, byte) => {
                    self.escaped = false;
                    if byte != CTRL_A {
                        self.pending.push(CTRL_A);
                    }
                    self.pending.push(byte);
                }
                (_, _, byte) => self.pending.push(byte),
            }
        }
        let taken = input.line.enqueue(&self.pending);
        self.pending.drain(..taken.min(self.pending.len()));
    }

    fn resume(&mut self, ops: &mut EventOps<'_>) {
        self.type_in(&[]);
        let Some(input) = &self.input else { return };
        let _ = input.resume.read();
        if !self.always_ready {
            // It may be waited for already.
            let _ = ops.add(Events::with_data(&input.from, INPUT, EventSet::IN));
            return;
        }
        self.read(ops);
        if let Some(input) = self.input.as_ref().filter(|input| input.line.room() > 0) {
            let _ = input.resume.write(1);
        }
    }
}

struct Raw(i32);

impl AsRawFd for Raw {
    fn as_raw_fd(&self) -> i32 {
        self.0
    }
}

fn raw_of(fd: BorrowedFd<'_>) -> Raw {
    Raw(fd.as_raw_fd())
}

fn add(ops: &mut EventOps<'_>, fd: &dyn AsRawFd, data: u32, set: EventSet) {
    if let Err(error) = ops.add(Events::with_data(&Raw(fd.as_raw_fd()), data, set)) {
        log::error!("cannot wait for an event: {error:?}");
    }
}

/// A main loop that cannot run.
#[derive(Debug, Error)]
pub enum MainLoopError {
    /// epoll.
    #[error("cannot wait for events ({0:?}): the limit of open files may be reached (ulimit -n)")]
    Loop(event_manager::Error),
    /// Too slow.
    #[error("the guest did not end within {} s", limit.as_secs())]
    TimeLimit {
        /// What it had.
        limit: Duration,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nobody has work for the loop.
    struct Idle;

    impl Attendant for Idle {
        fn descriptors(&self) -> Vec<i32> {
            Vec::new()
        }

        fn attend(&mut self) -> Option<End> {
            None
        }

        fn deadline(&self) -> Option<Instant> {
            None
        }
    }

    #[test]
    fn a_guest_that_does_not_end_is_stopped_at_the_time_limit() {
        let limit = Duration::from_millis(20);
        let run = |ending: &Arc<Ending>| {
            let signals = Signals::handle().unwrap();
            let sources = Sources { signals, consoles: Vec::new(), input: None, limit: Some(limit) };
            MainLoop::new(ending, sources, Vec::new())?.run(&mut Idle)
        };
        let ending = Ending::new().unwrap();
        let start = Instant::now();
        assert!(matches!(run(&ending), Err(MainLoopError::TimeLimit { .. })));
        assert!(start.elapsed() >= limit);
        ending.say(End::Power(PowerEvent::PowerOff));
        assert_eq!(run(&ending).unwrap(), End::Power(PowerEvent::PowerOff));
    }
}
