//! Turns SIGINT, SIGTERM, SIGHUP and SIGQUIT into an event of the main loop.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use devices::eventfd;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::register_signal_handler;

static EVENT: OnceLock<EventFd> = OnceLock::new();
static RECEIVED: AtomicI32 = AtomicI32::new(0);

/// Ending signals: what they mean is the main loop's business.
pub struct Signals(&'static EventFd);

impl Signals {
    /// Handles the four signals from this point on. One that the caller of this process ignores stays ignored: `nohup`, and
    /// a shell that starts a job in the background.
    pub fn handle() -> io::Result<Self> {
        let event = match EVENT.get() {
            Some(event) => event,
            None => {
                let event = eventfd::new()?;
                EVENT.get_or_init(|| event)
            }
        };
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT].into_iter().filter(|signal| !is_ignored(*signal))
        {
            register_signal_handler(signal, note)?;
        }
        Ok(Self(event))
    }

    /// Readable when a signal came.
    #[must_use]
    pub const fn event(&self) -> &'static EventFd {
        self.0
    }

    /// Whether a signal came that nobody has taken. Never while signals are not handled.
    #[must_use]
    pub fn came() -> bool {
        RECEIVED.load(Ordering::Relaxed) != 0
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

/// Has a write past the limit of a file's size (`ulimit -f`) fail, as one to a full disk does, and not end the process: guests
/// decide how much is written to their consoles and disks.
pub fn fail_at_file_limit() {
    // SAFETY: no handler is set, and nobody waits for this signal.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn is_ignored(signal: i32) -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action the call only fills `now`; it is read only if the call filled it.
    unsafe { libc::sigaction(signal, ptr::null(), now.as_mut_ptr()) == 0 && now.assume_init().sa_sigaction == libc::SIG_IGN }
}

extern "C" fn note(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    RECEIVED.store(signal, Ordering::Relaxed);
    if let Some(event) = EVENT.get() {
        let one = 1u64;
        // SAFETY: write(2) is async-signal-safe, the descriptor is never closed, and `one` has the 8 bytes that it reads.
        unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_signal_is_told_from_the_others() {
        assert!(!is_ignored(libc::SIGUSR2));
        // SAFETY: no test uses this signal, and none is sent.
        unsafe { libc::signal(libc::SIGUSR2, libc::SIG_IGN) };
        assert!(is_ignored(libc::SIGUSR2));
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGUSR2, libc::SIG_DFL) };
    }
}
