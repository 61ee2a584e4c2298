//! Hears what the host says of the functions that a machine has of it, one place for all of them, and bounds what is told.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Instant;

use devices::complaints::Complaints;
use devices::vfio::{Signal, Signals};
use log::Level;
use pci::address::HostBdf;
use pci::sync::lock;
use pci::topology::Name;
use rustix::event::{Timespec, epoll};

use crate::backends::Backends;
use crate::main_loop::{Attendant, End};

/// What is known of an error.
pub const ERROR: &str = "the host reported an uncorrectable error of its hardware; the host's kernel log tells which. The guest goes \
     on with it and was not told: vm.inject-error does that";

/// The functions that the host may say something of.
pub struct HostSignals {
    /// Readable when one of them has something to tell.
    epoll: OwnedFd,
    heard: Mutex<Heard>,
}

#[derive(Default)]
struct Heard {
    next: u64,
    /// By number. Those that are gone are forgotten when another one comes.
    functions: BTreeMap<u64, Function>,
}

struct Function {
    name: String,
    at: HostBdf,
    signals: Weak<Signals>,
    complaints: Complaints,
    errors: u64,
    requests: u64,
}

/// Something that the host said, that shall be told or followed.
#[derive(Debug, PartialEq, Eq)]
pub struct Said {
    /// The function's name.
    pub name: String,
    /// Its address on the host.
    pub at: HostBdf,
    /// What was said.
    pub what: What,
}

/// What was said.
#[derive(Debug, PartialEq, Eq)]
pub enum What {
    /// Hardware reported an error, which is in the log.
    Error,
    /// The host wants the function back.
    Request {
        /// It did not say so before. It says so time and again.
        first: bool,
    },
}

impl HostSignals {
    /// Of no function yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, heard: Mutex::default() })
    }

    /// Hears what the host says of function `at`, called `name`, as long as the result is kept.
    pub fn hear(&self, name: &str, at: HostBdf) -> io::Result<Arc<Signals>> {
        let signals = Arc::new(Signals::new()?);
        let mut heard = self.heard();
        heard.functions.retain(|_, function| function.is_there());
        let number = heard.next;
        for (signal, data) in Signal::ALL.into_iter().zip(2 * number..) {
            epoll::add(&self.epoll, signals.event(signal), epoll::EventData::new_u64(data), epoll::EventFlags::IN)?;
        }
        heard.next += 1;
        let function = Function {
            name: name.to_owned(),
            at,
            signals: Arc::downgrade(&signals),
            complaints: Complaints::default(),
            errors: 0,
            requests: 0,
        };
        heard.functions.insert(number, function);
        Ok(signals)
    }

    /// Takes what the host has said since the last call. Errors are logged here, some of each function.
    pub fn take(&self) -> Vec<Said> {
        let mut ready: Vec<epoll::Event> = Vec::with_capacity(32);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut ready), Some(&now)).is_err() {
            // Interrupted: it is readable still.
            return Vec::new();
        }
        let mut heard = self.heard();
        let numbers: BTreeSet<u64> = ready.iter().map(|event| event.data.u64() / 2).collect();
        let mut all = Vec::new();
        for number in numbers {
            all.extend(heard.functions.get_mut(&number).map(Function::take).unwrap_or_default());
        }
        all
    }

    /// Functions that the host wants back, of those that are there.
    pub fn wanted(&self) -> Vec<Name> {
        let heard = self.heard();
        let wanted = heard.functions.values().filter(|function| function.is_there() && function.requests != 0);
        wanted.map(|function| Name::from(function.name.as_str())).collect()
    }

    /// How many errors and requests there were, by the name of the function.
    pub fn counts(&self) -> Vec<(String, Vec<(&'static str, u64)>)> {
        let heard = self.heard();
        let there = heard.functions.values().filter(|function| function.is_there());
        let counts = |function: &Function| vec![("host_errors", function.errors), ("host_requests", function.requests)];
        there.map(|function| (function.name.clone(), counts(function))).collect()
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        lock(&self.heard)
    }
}

impl Said {
    /// Logs what becomes of a function that the host wants back, the first time that the host says so. Whether this was it.
    pub fn answer(&self, answer: &str) -> bool {
        let first = self.what == What::Request { first: true };
        if first {
            log::warn!("the host wants {} ({}) back: {answer}", self.name, self.at);
        }
        first
    }
}

impl Function {
    fn is_there(&self) -> bool {
        self.signals.strong_count() != 0
    }

    fn take(&mut self) -> Vec<Said> {
        let Some(signals) = self.signals.upgrade() else { return Vec::new() };
        let said = |what| Said { name: self.name.clone(), at: self.at, what };
        let mut all = Vec::new();
        let errors = signals.take(Signal::Error);
        if errors != 0 {
            self.errors = self.errors.saturating_add(errors);
            if self.complaints.add(Level::Error, format_args!("device {} ({}): {ERROR}", self.name, self.at)) {
                all.push(said(What::Error));
            }
        }
        let requests = signals.take(Signal::Request);
        if requests != 0 {
            all.push(said(What::Request { first: self.requests == 0 }));
            self.requests = self.requests.saturating_add(requests);
        }
        all
    }
}

impl AsRawFd for HostSignals {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

/// Hears the host and the servers of devices for a machine without clients, whose devices do not leave while the guest runs.
pub struct Lookout {
    /// What the host says.
    pub signals: Arc<HostSignals>,
    /// The servers.
    pub backends: Arc<Backends>,
}

impl Attendant for Lookout {
    fn descriptors(&self) -> Vec<i32> {
        let ends = self.backends.ends_if_any().map(|ends| ends.as_raw_fd());
        [self.signals.as_raw_fd()].into_iter().chain(ends).collect()
    }

    fn attend(&mut self) -> Option<End> {
        self.backends.tell_ends(None, |_| false);
        for said in self.signals.take() {
            said.answer(
                "it leaves when the guest resets or ends; it can leave a guest that runs if the machine is started with \
                 --api-socket",
            );
        }
        None
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> HostBdf {
        text.parse().unwrap()
    }

    fn give(signals: &Signals, signal: Signal) {
        rustix::io::write(signals.event(signal), &1_u64.to_ne_bytes()).unwrap();
    }

    fn is_readable(host: &HostSignals) -> bool {
        let mut fds = [rustix::event::PollFd::new(&host.epoll, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    #[test]
    fn a_request_is_first_once_and_goes_on_being_followed() {
        let host = HostSignals::new().unwrap();
        let gpu = host.hear("gpu", at("0000:17:00.0")).unwrap();
        let _nic = host.hear("nic", at("0000:18:00.0")).unwrap();
        assert!(!is_readable(&host) && host.take().is_empty());
        for first in [true, false, false] {
            give(&gpu, Signal::Request);
            assert!(is_readable(&host));
            let said = Said { name: "gpu".to_owned(), at: at("0000:17:00.0"), what: What::Request { first } };
            assert_eq!(host.take(), [said]);
            assert!(!is_readable(&host));
        }
        let counts = |errors, requests| vec![("host_errors", errors), ("host_requests", requests)];
        assert_eq!(host.counts(), [("gpu".to_owned(), counts(0, 3)), ("nic".to_owned(), counts(0, 0))]);
    }

    #[test]
    fn errors_without_end_are_all_counted_and_told_a_few_times() {
        let host = HostSignals::new().unwrap();
        let gpu = host.hear("gpu", at("0000:17:00.0")).unwrap();
        let told = (0..1000).map(|_| {
            give(&gpu, Signal::Error);
            host.take().len()
        });
        assert_eq!(told.sum::<usize>(), usize::from(Complaints::MOST));
        assert_eq!(host.counts()[0].1[0], ("host_errors", 1000));
    }

    #[test]
    fn of_a_function_that_is_gone_nothing_is_left() {
        let host = HostSignals::new().unwrap();
        for _ in 0..100 {
            let signals = host.hear("gpu", at("0000:17:00.0")).unwrap();
            give(&signals, Signal::Request);
            drop(signals);
            assert!(!is_readable(&host) && host.take().is_empty() && host.counts().is_empty());
        }
        assert_eq!(host.heard().functions.len(), 1);
    }

    #[test]
    fn what_the_host_wants_is_known_as_long_as_it_is_there() {
        let host = Arc::new(HostSignals::new().unwrap());
        let gpu = host.hear("gpu", at("0000:17:00.0")).unwrap();
        let nic = host.hear("nic", at("0000:18:00.0")).unwrap();
        let mut lookout = Lookout { signals: Arc::clone(&host), backends: Arc::default() };
        for _ in 0..3 {
            give(&gpu, Signal::Request);
            give(&nic, Signal::Error);
            assert_eq!(lookout.attend(), None);
            assert_eq!(host.wanted(), [Name::from("gpu")]);
        }
        drop(gpu);
        assert_eq!(host.wanted(), []);
    }

    #[test]
    fn a_request_is_answered_the_first_time() {
        let said = |what| Said { name: "gpu".to_owned(), at: at("0000:17:00.0"), what };
        let answered =
            [What::Request { first: true }, What::Request { first: false }, What::Error].map(|what| said(what).answer("no"));
        assert_eq!(answered, [true, false, false]);
    }
}
