//! Builds the bare-metal guests, and finds out which tests cannot run here.

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
    needs("kvm", File::options().read(true).write(true).open("/dev/kvm").map(drop).map_err(|error| format!("/dev/kvm: {error}")));
    let unshared = Command::new("unshare").args(["-rm", "true"]).output();
    needs(
        "namespaces",
        match unshared {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Err(format!("unshare: {error}")),
        },
    );
}

/// Sets `cfg(without_WHAT)` where `there` is an error.
fn needs(what: &str, there: Result<(), String>) {
    println!("cargo::rustc-check-cfg=cfg(without_{what})");
    if let Err(why) = there {
        println!("cargo::warning={why}: the tests that need it are skipped and counted as ignored");
        println!("cargo::rustc-cfg=without_{what}");
    }
}
