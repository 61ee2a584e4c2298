//! The serial port and the debug console: what is written comes out, what is typed goes in.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use tests::guest::{PASSED, image};
use tests::process::{LIMIT, until};
use tests::{Guest, Session, in_shell};

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_typed_line_reaches_the_guest_by_polling_and_by_interrupt() {
    for way in ["by=polling", "by=interrupt"] {
        let mut session = Guest::new("echo").options(way).start();
        session.expect("ready");
        session.send("good morning\n");
        session.expect("echo: good morning");
        session.finish().expect_code(PASSED);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_line_that_is_longer_than_the_ports_buffer_is_taken_in_whole() {
    let text = "0123456789".repeat(20);
    let mut session = Guest::new("echo").options("by=polling").start();
    session.expect("ready");
    session.send(&format!("{text}\n"));
    session.expect(&format!("echo: {text}"));
    session.finish().expect_code(PASSED);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_serial_port_writes_to_a_file_and_to_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serial");
    fs::write(&path, "what was there before, longer than what comes").unwrap();
    let outcome = Guest::new("hello").with(&["--serial", &format!("file={}", path.display())]).run();
    assert_eq!(outcome.expect_code(0).stdout, "");
    assert_eq!(fs::read_to_string(&path).unwrap(), "X\n");
    assert_eq!(Guest::new("hello").with(&["--serial", "off"]).run().expect_code(0).stdout, "");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_file_that_cannot_be_made_is_refused() {
    for flag in ["--serial", "--debug-console"] {
        let outcome = Guest::new("hello").with(&[flag, "file=/nowhere/serial"]).run();
        outcome.expect_code(1).expect_error(&["/nowhere/serial", "No such file"]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn output_is_complete_even_if_the_reader_sleeps_first() {
    // The probe's report is longer than a pipe's worth of a page; the reader starts after the guest has ended.
    let topology = concat!(env!("CARGO_MANIFEST_DIR"), "/../resources/topologies/a100x.toml");
    let fast = Guest::new("probe").with(&["--topology", topology, "--debug-console", "stdio", "--serial", "off"]).run();
    let lines = fast.expect_code(0).stdout.lines().count();
    assert!(lines > 100 && fast.stdout.ends_with('\n'), "{lines} lines\n{fast}");
    let mut command = Command::new("bash");
    let banyan = tests::executable::path();
    command.arg("-c").arg(format!(
        "'{}' run --kernel '{}' --topology '{topology}' --debug-console stdio --serial off | (sleep 2; cat)",
        banyan.display(),
        image("probe.elf")
    ));
    let slow = Session::spawn(command, Duration::from_secs(60)).finish();
    assert_eq!(slow.stdout, fast.stdout);
}

/// Waits until the file at `path` is `text`.
fn wait_for(path: &Path, text: &str) {
    until(&format!("`{text}` in {}", path.display()), || fs::read_to_string(path).unwrap_or_default(), |found| found == text);
}

/// `flood` with its output in a pipe that nobody reads, when it has ended; it prints twice what a pipe holds.
fn flooded() -> Child {
    let folder = tempfile::tempdir().unwrap();
    let over = folder.path().join("over");
    let mut command = Command::new(tests::executable::path());
    command.args(["run", "--debug-exit", "--kernel", &image("flood.elf"), "--debug-console"]);
    command.arg(format!("file={}", over.display())).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    wait_for(&over, "flood over\n");
    child
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_guest_never_waits_for_the_reader_who_gets_everything_later() {
    let outcome = flooded().wait_with_output().unwrap();
    assert_eq!(outcome.status.code(), Some(PASSED));
    let lines: String = (0..2048).map(|n| format!("{:<63}\n", format!("line {n:08}"))).collect();
    assert!(String::from_utf8_lossy(&outcome.stdout) == lines + "PASS\n", "{} bytes", outcome.stdout.len());
    assert_eq!(String::from_utf8_lossy(&outcome.stderr), "");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_reader_that_never_comes_is_not_waited_for_and_what_it_missed_is_counted() {
    let mut child = flooded();
    let status = child.wait().unwrap();
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(status.code(), Some(PASSED));
    let lost = 2048 * 64 + "PASS\n".len() - out.len();
    assert!(lost > 0 && err.contains(&format!("{lost} bytes of console output were lost")), "{lost}: {err}");
}

/// Runs `echo` with its standard input redirected as the shell writes it.
fn echo_from(redirection: &str) -> Session {
    Session::spawn(in_shell(&format!("exec \"$0\" \"$@\" {redirection}"), Guest::new("echo").arguments()), LIMIT)
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn input_comes_from_a_file_a_pipe_or_a_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("typed");
    let text = "long input ".repeat(20);
    fs::write(&path, format!("{text}\n{}", "more than anybody reads\n".repeat(1000))).unwrap();
    for redirection in [format!("< {}", path.display()), format!("< <(cat {})", path.display())] {
        echo_from(&redirection).finish().expect_code(PASSED).expect_output(&[&format!("echo: {text}\n")]);
    }
    // A guest that has read enough, from a device that never ends.
    echo_from("< /dev/zero").finish().expect_code(PASSED).expect_output(&["echo: \n"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn without_input_a_guest_runs_on() {
    for redirection in ["<&-", "< /dev/null", "< /"] {
        let mut session = echo_from(redirection);
        session.expect("ready");
        thread::sleep(Duration::from_millis(200));
        assert!(session.is_running(), "{redirection}");
        let busy = session.processor_time();
        session.signal(Signal::TERM);
        session.finish().expect_code(143);
        // The guest polls; the main thread must not.
        assert!(busy < Duration::from_millis(100), "{redirection}: the main thread was busy for {busy:?}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn without_output_a_guest_runs_to_its_end() {
    for redirection in [">&-", "<&- >&- 2>&-", "> /dev/full"] {
        let command = in_shell(&format!("exec \"$0\" \"$@\" {redirection}"), Guest::new("exit").options("code=5").arguments());
        Session::spawn(command, LIMIT).finish().expect_code(11);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_reader_that_leaves_does_not_stop_the_guest() {
    let mut command = Command::new("bash");
    let banyan = tests::executable::path();
    let folder = tempfile::tempdir().unwrap();
    let code = folder.path().join("code");
    command.arg("-c").arg(format!(
        "('{}' run --debug-exit --kernel '{}' --cmdline cpus=2 --cpus 2; echo $? > '{}') | true",
        banyan.display(),
        image("cpus.elf"),
        code.display()
    ));
    let _ = Session::spawn(command, Duration::from_secs(60)).finish();
    assert_eq!(fs::read_to_string(&code).unwrap().trim(), PASSED.to_string());
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_full_disk_loses_output_with_a_warning_and_does_not_stop_the_guest() {
    let outcome = Guest::new("hello").with(&["--serial", "file=/dev/full", "--counters"]).run();
    outcome.expect_code(0).expect_error(&["No space left", "2 bytes of console output were lost"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn closed_and_full_standard_streams_are_no_crash() {
    for (redirection, code) in [("<&- >&- 2>&-", 0), ("2>/dev/full", 0), ("2>&-", 0)] {
        let arguments = ["run", "--counters", "--kernel", &image("hello.elf")];
        let command = in_shell(&format!("exec \"$0\" \"$@\" {redirection}"), &arguments);
        Session::spawn(command, LIMIT).finish().expect_code(code);
    }
    let command = in_shell("exec \"$0\" run --dry-run >/dev/full", &[""; 0]);
    Session::spawn(command, LIMIT).finish().expect_code(1).expect_error(&["standard output", "No space left"]);
}
