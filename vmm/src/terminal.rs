//! Raw mode for the terminal that the guest's serial line is connected to, undone on every way out.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic;
use std::sync::Mutex;

use pci::sync::lock;
use rustix::stdio::stdin;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use vmm_sys_util::signal::register_signal_handler;

/// Settings to go back to. A static, so that a panic and a signal find them.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Signals that end the process at once: nothing but their handler can put the terminal in order.
const FATAL: [i32; 8] =
    [libc::SIGABRT, libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM];

/// While it lives, standard input is in raw mode.
pub struct RawTerminal(());

impl RawTerminal {
    /// Switches standard input to raw mode if it is a terminal, and restores it when a panic or a signal ends the process.
    /// Output keeps turning line feeds into new lines, so that messages of this process stay readable.
    pub fn enter() -> io::Result<Option<Self>> {
        let input = stdin();
        if !isatty(input) {
            return Ok(None);
        }
        let before = tcgetattr(input)?;
        let mut raw = before.clone();
        raw.make_raw();
        raw.output_modes = before.output_modes;
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            restore(stdin());
            previous(info);
        }));
        *lock(&BEFORE) = Some(before);
        for signal in FATAL {
            register_signal_handler(signal, restore_and_end)?;
        }
        tcsetattr(input, OptionalActions::Now, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore(stdin());
    }
}

fn restore(input: BorrowedFd<'_>) {
    if let Some(before) = lock(&BEFORE).take() {
        // Nothing is left to try when it fails: the terminal is gone.
        let _ = tcsetattr(input.as_fd(), OptionalActions::Now, &before);
    }
}

extern "C" fn restore_and_end(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // Whoever holds the lock restores the terminal already.
    if let Ok(before) = BEFORE.try_lock()
        && let Some(before) = &*before
    {
        let _ = tcsetattr(stdin(), OptionalActions::Now, before);
    }
    // SAFETY: both calls are async-signal-safe. The signal is blocked until this handler returns; then its default action
    // ends the process as if there had been no handler.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}
