//! Bounds what a guest can make the log grow by: of the failures that it can cause at will, the first few are logged. What a
//! device can no longer do is counted apart, so that nothing a guest does hides it, and told to whoever listens as well.

use std::error::Error;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use log::Level;

/// Hears what a device can no longer do. It is called by any thread, with locks held: it must not wait.
pub type Listener = Arc<dyn Fn(&str) + Send + Sync>;

/// The same for all devices of a machine, with the name of the device in front.
pub type FailureSink = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// The failures of one device.
#[derive(Default)]
pub struct Complaints {
    /// Logged of what guests cause.
    made: u8,
    /// Logged of what fails on the host's side.
    failed: u8,
    listener: Option<Listener>,
}

impl fmt::Debug for Complaints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Complaints").field("made", &self.made).field("failed", &self.failed).finish_non_exhaustive()
    }
}

impl Complaints {
    /// How many are logged of each kind.
    pub const MOST: u8 = 8;

    /// Tells `listener` of failures from now on, see [`Complaints::fail`].
    pub fn report_to(&mut self, listener: Listener) {
        self.listener = Some(listener);
    }

    /// Logs `text` at `level`, unless there were too many before. The last one says that it is the last. Whether it was logged.
    pub fn add(&mut self, level: Level, text: fmt::Arguments<'_>) -> bool {
        log(&mut self.made, level, text)
    }

    /// As [`Complaints::add`], with `error` and its causes behind `text`.
    pub fn add_error(&mut self, level: Level, text: fmt::Arguments<'_>, error: &dyn Error) {
        self.add(level, format_args!("{text}: {}", chain(error)));
    }

    /// As [`Complaints::add`], for what the device cannot do since the host's side of it failed: the listener hears of it. What
    /// was added before does not count.
    pub fn fail(&mut self, level: Level, text: fmt::Arguments<'_>) {
        if log(&mut self.failed, level, text)
            && let Some(listener) = &self.listener
        {
            listener(&text.to_string());
        }
    }

    /// As [`Complaints::fail`], with `error` and its causes behind `text`.
    pub fn fail_error(&mut self, level: Level, text: fmt::Arguments<'_>, error: &dyn Error) {
        self.fail(level, format_args!("{text}: {}", chain(error)));
    }

    /// How many of both kinds were logged so far.
    #[must_use]
    pub const fn made(&self) -> u8 {
        self.made.saturating_add(self.failed)
    }
}

/// Logs `text` unless `count` is at the limit.
fn log(count: &mut u8, level: Level, text: fmt::Arguments<'_>) -> bool {
    if *count >= Complaints::MOST {
        return false;
    }
    *count += 1;
    let last = if *count == Complaints::MOST { "; further failures of this device are not logged, if of this kind" } else { "" };
    log::log!(level, "{text}{last}");
    true
}

/// An error with its causes in one line.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Writing to a string cannot fail.
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn failures_past_the_limit_are_not_logged() {
        let mut complaints = Complaints::default();
        for n in 0..1000_u16 {
            complaints.add(Level::Warn, format_args!("failure {n}"));
            assert_eq!(u16::from(complaints.made()), (n + 1).min(8));
        }
    }

    #[test]
    fn failures_are_told_however_much_guests_did_before_and_what_they_do_is_not() {
        let (mut complaints, heard) = (Complaints::default(), Arc::new(Mutex::new(Vec::new())));
        let told = Arc::clone(&heard);
        complaints.report_to(Arc::new(move |why| told.lock().unwrap().push(why.to_owned())));
        for n in 0..1000 {
            complaints.add(Level::Warn, format_args!("the guest did something"));
            complaints.fail_error(Level::Warn, format_args!("request {n}"), &io::Error::other("no space"));
        }
        let heard = heard.lock().unwrap();
        assert_eq!((heard.len(), heard[0].as_str()), (8, "request 0: no space"));
    }

    #[test]
    fn causes_are_part_of_the_line() {
        #[derive(Debug, thiserror::Error)]
        #[error("no vector")]
        struct NoVector(#[source] io::Error);
        assert_eq!(chain(&NoVector(io::Error::other("none left"))), "no vector: none left");
    }
}
