//! A guest that counts rounds in which all its devices work (`resources/guests/keep.c`): whether it goes on, and in order.

use std::fs::File;

use tempfile::TempDir;

use crate::guest::Guest;
use crate::server::Server;

/// A device of which the guest uses all that stubs have.
pub const STUB: &str = "stub,id=a,bar0=64K:mem32,msix=4,dma=on";

/// The guest with a disk, a source of random numbers and what `arguments` say, one stub among it, its first round made; and the
/// folder in which `disk` is.
#[must_use]
pub fn start(arguments: &[&str]) -> (Server, TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = folder.path().join("disk");
    File::create(&disk).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    let guest = Guest::new("keep").with(&["--disk", &disk.display().to_string(), "--rng=/dev/urandom"]);
    let mut server = Server::run(&guest.with(arguments));
    server.process.expect("ready");
    assert!(count(&mut server) > 0);
    (server, folder)
}

/// How many rounds the guest has made.
#[must_use]
pub fn count(server: &mut Server) -> u64 {
    server.process.send("c");
    server.process.expect("count ");
    let text = server.process.expect(" disks 1 random 1 stubs 1");
    text.split(' ').next().and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("no count: {text}"))
}

/// Ends the guest, which has seen nothing out of order.
pub fn passes(mut server: Server) {
    server.process.send("q");
    server.process.finish().expect_code(1).expect_output(&["PASS"]);
}
