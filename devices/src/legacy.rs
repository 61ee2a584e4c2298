//! What answers at the fixed I/O ports.
//!
//! | port | module |
//! |---|---|
//! | 0x3F8, a 16550 serial line | [`serial`], with [`console`] keeping its output |
//! | the same for clients that attach and leave | [`mod@line`] |
//! | 0xE9 debug console, 0xF4 debug exit | [`debug`] |
//! | 0x505 panics of the guest | [`mod@panic`] |
//! | 0x600 sleep control, 0xCF9 reset, 0x60/0x64 keyboard controller | [`pm`] |
//!
//! All registers are one byte wide. An access of several bytes is a string instruction (`rep outsb`, `rep insb`), whose
//! bytes all go to the same register.

pub mod console;
pub mod debug;
pub mod line;
pub mod output;
pub mod panic;
pub mod pm;
pub mod serial;

pub use console::{Console, ConsoleError, ConsoleSink, Drained, InputLine};
pub use debug::{DebugConsole, DebugExit};
pub use line::Line;
pub use output::Output;
pub use panic::{Panic, PanicPort, PanicSink};
pub use pm::{KeyboardController, PowerEvent, PowerSink, ResetControl, SleepControl};
pub use serial::Serial;

/// Something to call when an event happened: raise an interrupt, wake a loop. It must not wait.
pub type Notify = Box<dyn Fn() + Send + Sync>;

#[cfg(test)]
pub(crate) mod testing {
    use std::sync::Mutex;

    use super::ConsoleSink;

    /// Keeps what is printed.
    #[derive(Default)]
    pub(crate) struct Kept(pub(crate) Mutex<Vec<u8>>);

    impl ConsoleSink for Kept {
        fn push(&self, bytes: &[u8]) {
            self.0.lock().unwrap().extend(bytes);
        }
    }
}
