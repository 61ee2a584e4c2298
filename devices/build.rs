//! Finds out which tests cannot run here.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(without_io_uring)");
    if let Err(error) = io_uring::IoUring::new(1) {
        println!("cargo::warning=io_uring: {error}: the tests that need it are left out, and one is counted as ignored");
        println!("cargo::rustc-cfg=without_io_uring");
    }
}
