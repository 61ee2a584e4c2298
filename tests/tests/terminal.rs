//! A guest on a terminal: what is typed reaches it unseen and whole, and the settings come back on every way out.

use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use tests::guest::{PASSED, image};
use tests::process::until;
use tests::{Guest, Outcome, Session, Terminal};

/// Starts `echo` and waits until it reads from a raw terminal.
fn start(terminal: &Terminal) -> Session {
    let mut session = terminal.start(Guest::new("echo").arguments());
    session.expect("ready");
    until("a terminal that is raw while the guest runs", || terminal.is_raw(), |is_raw| *is_raw);
    session
}

/// Runs `echo` on a terminal until `end` has its effect; the settings must be those of before.
#[track_caller]
fn restored(end: impl FnOnce(&mut Session)) -> Outcome {
    let terminal = Terminal::new();
    let before = terminal.settings();
    let mut session = start(&terminal);
    assert_ne!(terminal.settings(), before);
    end(&mut session);
    let outcome = session.wait();
    assert_eq!(terminal.settings(), before, "{outcome}");
    outcome
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn typed_characters_reach_the_guest_alone_and_have_no_meaning_for_the_host() {
    // Ctrl-C, Ctrl-Z, Ctrl-D, Ctrl-\ and the escape character itself, typed twice.
    let outcome = restored(|session| session.send("a\x03\x1a\x04\x1c\x01\x01b\r"));
    outcome.expect_code(PASSED).expect_output(&["echo: a\x03\x1a\x04\x1c\x01b\r\n"]);
    assert_eq!(
        outcome.stdout, "ready\r\necho: a\x03\x1a\x04\x1c\x01b\r\nPASS\r\n",
        "typed characters are shown by the guest alone"
    );
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn ctrl_a_x_ends_the_machine_with_exit_code_0() {
    restored(|session| session.send("text\x01x")).expect_code(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_signal_restores_the_terminal() {
    for (signal, code) in [
        (Signal::HUP, 129),
        (Signal::INT, 130),
        (Signal::QUIT, 131),
        (Signal::ABORT, 134),
        (Signal::USR1, 138),
        (Signal::TERM, 143),
    ] {
        restored(|session| session.signal(signal)).expect_code(code);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn every_end_of_a_guest_and_every_error_leaves_the_terminal_as_it_was() {
    let missing = ["run", "--kernel", "/nowhere/kernel"].map(str::to_owned).to_vec();
    for (arguments, code) in [
        (Guest::new("hello").arguments().to_vec(), 0),
        (Guest::new("triple").arguments().to_vec(), 6),
        (Guest::new("reset").options("boots=3").arguments().to_vec(), 0),
        (Guest::new("reset").with(&["--no-reboot"]).arguments().to_vec(), 4),
        (Guest::new("hello").with(&["--memory", "0"]).arguments().to_vec(), 1),
        (missing, 1),
    ] {
        let terminal = Terminal::new();
        let before = terminal.settings();
        terminal.start(&arguments).wait().expect_code(code);
        assert_eq!(terminal.settings(), before, "{arguments:?}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_terminal_that_is_not_the_serial_line_is_left_alone() {
    let terminal = Terminal::new();
    let before = terminal.settings();
    let session = terminal.start(&["run", "--kernel", &image("echo.elf"), "--serial", "off"]);
    thread::sleep(Duration::from_millis(300));
    assert_eq!(terminal.settings(), before);
    session.signal(Signal::TERM);
    session.wait().expect_code(143);
}
