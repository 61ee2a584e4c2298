//! The serial port and the debug console: what is written comes out, what is typed goes in.

use std::fs;
use std::process::Command;
use std::time::Duration;

use tests::guest::{PASSED, image};
use tests::{Guest, Session};

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
fn a_terminal_is_as_before_after_every_way_out() {
    // `script` gives the command a terminal of its own.
    let banyan = tests::executable::path();
    for (guest, ending, code) in [
        ("hello", "", "0"),
        ("triple", "", "6"),
        ("echo", "(sleep 1; kill -TERM $child) &", "143"),
        ("echo", "(sleep 1; kill -HUP $child) &", "129"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        fs::write(
            &inner,
            format!(
                "stty -a > {at}/before\n\
                 (child=$BASHPID; {ending}\nexec '{banyan}' run --kernel '{kernel}')\n\
                 echo $? > {at}/code\n\
                 stty -a > {at}/after\n",
                at = folder.path().display(),
                banyan = banyan.display(),
                kernel = image(&format!("{guest}.elf")),
            ),
        )
        .unwrap();
        let mut command = Command::new("script");
        command.args(["-q", "-e", "-c", &format!("bash '{}'", inner.display()), "/dev/null"]);
        let outcome = Session::spawn(command, Duration::from_secs(60)).wait();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap_or_default();
        assert_eq!(read("code").trim(), code, "{guest} {ending}\n{outcome}");
        assert!(read("before").contains(" icanon"), "{}", read("before"));
        assert_eq!(read("before"), read("after"), "{guest} {ending}");
    }
}
