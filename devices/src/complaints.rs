//! Bounds what a guest can make the log grow by: of the failures that it can cause at will, the first few are logged.

use std::error::Error;
use std::fmt::{self, Write as _};

use log::Level;

/// The failures of one device.
#[derive(Debug, Default)]
pub struct Complaints {
    made: u8,
}

impl Complaints {
    /// How many are logged.
    pub const MOST: u8 = 8;

    /// Logs `text` at `level`, unless there were too many before. The last one says that it is the last.
    pub fn add(&mut self, level: Level, text: fmt::Arguments<'_>) {
        if self.made >= Self::MOST {
            return;
        }
        self.made += 1;
        let last = if self.made == Self::MOST { "; further failures of this device are not logged" } else { "" };
        log::log!(level, "{text}{last}");
    }

    /// As [`Complaints::add`], with `error` and its causes behind `text`.
    pub fn add_error(&mut self, level: Level, text: fmt::Arguments<'_>, error: &dyn Error) {
        self.add(level, format_args!("{text}: {}", chain(error)));
    }

    /// How many were logged so far.
    #[must_use]
    pub const fn made(&self) -> u8 {
        self.made
    }
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
    fn causes_are_part_of_the_line() {
        #[derive(Debug, thiserror::Error)]
        #[error("no vector")]
        struct NoVector(#[source] io::Error);
        assert_eq!(chain(&NoVector(io::Error::other("none left"))), "no vector: none left");
    }
}
