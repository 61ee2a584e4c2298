//! Turns SIGINT, SIGTERM and SIGHUP into an event of the main loop.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::register_signal_handler;

static EVENT: OnceLock<EventFd> = OnceLock::new();
static RECEIVED: AtomicI32 = AtomicI32::new(0);

/// Ending signals: what they mean is the main loop's business.
pub struct Signals(&'static EventFd);

impl Signals {
    /// Handles the three signals from this point on.
    pub fn handle() -> io::Result<Self> {
        let event = match EVENT.get() {
            Some(event) => event,
            None => {
                let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
                EVENT.get_or_init(|| event)
            }
        };
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            register_signal_handler(signal, note)?;
        }
        Ok(Self(event))
    }

    /// Readable when a signal came.
    #[must_use]
    pub const fn event(&self) -> &'static EventFd {
        self.0
    }

    /// The signal that came.
    #[must_use]
    pub fn take(&self) -> Option<i32> {
        let _ = self.0.read();
        match RECEIVED.swap(0, Ordering::Relaxed) {
            0 => None,
            signal => Some(signal),
        }
    }
}

extern "C" fn note(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    RECEIVED.store(signal, Ordering::Relaxed);
    if let Some(event) = EVENT.get() {
        let one = 1u64;
        // SAFETY: write(2) is async-signal-safe, the descriptor is never closed, and `one` has the 8 bytes that it reads.
        unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    }
}
