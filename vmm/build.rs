//! Builds the guest of `banyan demo`, which is embedded in the executable, and finds out which tests cannot run here.

use std::env;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitStatus};

const GUESTS: &str = "../resources/guests";

fn main() {
    let out = env::var("OUT_DIR").unwrap_or_else(|error| panic!("cargo sets OUT_DIR: {error}"));
    let guests = Path::new(GUESTS);
    for source in ["build", "probe.c", "lib"] {
        println!("cargo::rerun-if-changed={GUESTS}/{source}");
    }
    println!("cargo::rerun-if-env-changed=CC");
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    println!("cargo::rustc-check-cfg=cfg(without_kvm)");
    println!("cargo::rerun-if-changed=/dev/kvm");
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        println!("cargo::warning=/dev/kvm: {error}: the tests that need it are skipped and counted as ignored");
        println!("cargo::rustc-cfg=without_kvm");
    }
    println!("cargo::rustc-check-cfg=cfg(without_taps)");
    println!("cargo::rerun-if-changed=/dev/net/tun");
    // Whoever may make a network namespace may make interfaces.
    let may = Command::new("unshare").args(["-n", "true"]).output().is_ok_and(|output| output.status.success());
    if !may || File::options().read(true).write(true).open("/dev/net/tun").is_err() {
        println!("cargo::warning=no right to make taps: the tests that need it are skipped and counted as ignored");
        println!("cargo::rustc-cfg=without_taps");
    }
    // Nobody reads the symbols of an embedded image.
    let built = Command::new("sh").arg(guests.join("build")).args([&out, "probe"]).env("CC", format!("{compiler} -s")).status();
    assert!(
        built.as_ref().is_ok_and(ExitStatus::success),
        "resources/guests/build cannot make the guest of `banyan demo` ({built:?}). It needs `{compiler}`, a C compiler for \
         x86-64, and GNU ld: on Debian and Ubuntu install the packages gcc and binutils; CC names another compiler"
    );
}
