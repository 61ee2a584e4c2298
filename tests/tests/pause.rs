//! What stands still while a machine is paused, and goes on afterwards.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use tests::busy::{self, STUB};
use tests::server::Server;

const RAM: usize = 64 << 20;

fn start() -> (Server, tempfile::TempDir) {
    busy::start(&["--memory", "64M,shared=on", "--device", STUB])
}

/// All of RAM, which is a file of the process.
fn memory(server: &Server) -> Vec<u8> {
    let files = fs::read_dir(format!("/proc/{}/fd", server.process.id())).into_iter().flatten().flatten();
    let is_ram = |path: &fs::DirEntry| fs::read_link(path.path()).is_ok_and(|name| name.to_string_lossy().contains("banyan-ram"));
    let path = files.into_iter().find(is_ram).expect("RAM is a file").path();
    let mut bytes = vec![0; RAM];
    File::open(path).and_then(|file| file.read_exact_at(&mut bytes, 0)).expect("RAM can be read");
    bytes
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn nothing_changes_memory_while_the_machine_is_paused() {
    let (mut server, _folder) = start();
    for _ in 0..5 {
        let before = busy::count(&mut server);
        server.expect("PUT vm.pause", "", 204);
        let still = memory(&server);
        thread::sleep(Duration::from_millis(30));
        assert!(memory(&server) == still, "memory changed");
        server.expect("PUT vm.pause", "", 405);
        server.expect("PUT vm.resume", "", 204);
        let after = busy::count(&mut server);
        assert!(after > before, "{after} follows {before}");
        assert!(memory(&server) != still, "nothing is busy");
    }
    busy::passes(server);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_paused_machine_can_be_reset_and_ended() {
    let (mut server, _folder) = start();
    server.expect("PUT vm.pause", "", 204);
    server.expect("PUT vm.reboot", "", 204);
    server.process.expect("ready");
    assert!(busy::count(&mut server) > 0);
    server.expect("PUT vm.pause", "", 204);
    server.shuts_down();
}
