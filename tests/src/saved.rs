//! Machines that are written down in a folder and go on in another process.

use std::path::{Path, PathBuf};

use crate::busy;
use crate::server::Server;

/// The body of vm.snapshot (`destination`) or vm.restore (`source`).
#[must_use]
pub fn url(key: &str, folder: &Path) -> String {
    format!(r#"{{"{key}_url":"file://{}"}}"#, folder.display())
}

/// Pauses the machine, writes it down in a folder and ends the process.
#[track_caller]
pub fn write_down(server: Server, folder: &Path) {
    server.expect("PUT vm.pause", "", 204);
    server.expect("PUT vm.snapshot", &url("destination", folder), 204);
    server.shuts_down();
}

/// The same in a new folder `saved` of `folder`. Where that is.
#[track_caller]
pub fn put_away(server: Server, folder: &Path) -> PathBuf {
    let saved = folder.join("saved");
    std::fs::create_dir(&saved).expect("a folder");
    write_down(server, &saved);
    saved
}

/// The machine, paused, in a process of its own.
#[must_use]
#[track_caller]
pub fn restored(folder: &Path) -> Server {
    let server = Server::empty();
    server.expect("PUT vm.restore", &url("source", folder), 204);
    let info = server.expect("GET vm.info", "", 200);
    assert!(info.contains(r#""state":"Paused""#), "{info}");
    server
}

/// Lets a machine that counts go on, which must make more rounds than `before`. How many it has made.
#[track_caller]
pub fn resume(server: &mut Server, before: u64) -> u64 {
    server.expect("PUT vm.resume", "", 204);
    let rounds = busy::count(server);
    assert!(rounds > before, "{rounds} follows {before}");
    rounds
}

/// The machine of a folder is resumed, counted and ended: it has made more rounds than `before`.
#[track_caller]
pub fn goes_on(folder: &Path, before: u64) {
    let mut server = restored(folder);
    resume(&mut server, before);
    server.shuts_down();
}
