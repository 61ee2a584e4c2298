//! Builds the bare-metal guests, and finds out whether tests that need KVM can run here.

use std::env;
use std::fs::File;
use std::path::Path;
use std::process::Command;

fn main() {
    let out = env::var("OUT_DIR").unwrap_or_else(|error| panic!("cargo sets OUT_DIR: {error}"));
    let guests = Path::new("../resources/guests");
    println!("cargo::rerun-if-changed={}", guests.display());
    let built = Command::new("sh").arg(guests.join("build")).arg(&out).status();
    assert!(
        built.as_ref().is_ok_and(std::process::ExitStatus::success),
        "resources/guests/build failed ({built:?}); it needs a C compiler and GNU ld"
    );
    println!("cargo::rustc-env=BANYAN_GUESTS={out}");

    println!("cargo::rerun-if-changed=/dev/kvm");
    println!("cargo::rustc-check-cfg=cfg(without_kvm)");
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        println!("cargo::warning=/dev/kvm: {error}: the tests that need it are skipped and counted as ignored");
        println!("cargo::rustc-cfg=without_kvm");
    }
}
