//! What stands still while a machine is paused, and goes on afterwards.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use tests::Guest;
use tests::server::Server;

const RAM: usize = 64 << 20;

/// Counts, with disks, random numbers and stubs busy.
fn keep() -> (Server, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = folder.path().join("disk");
    File::create(&disk).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    let disk = disk.display().to_string();
    let guest = Guest::new("keep").with(&["--memory", "64M,shared=on", "--disk", &disk, "--rng=/dev/urandom"]);
    let mut server = Server::run(&guest.devices(&["stub,id=a,bar0=64K:mem32,msix=4,dma=on"]));
    server.process.expect("ready");
    (server, folder)
}

/// How many rounds the guest has made.
fn count(server: &mut Server) -> u64 {
    server.process.send("c");
    server.process.expect("count ");
    let text = server.process.expect(" disks 1 random 1 stubs 1");
    text.split(' ').next().and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("no count: {text}"))
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
    let (mut server, _folder) = keep();
    for _ in 0..5 {
        let before = count(&mut server);
        server.expect("PUT vm.pause", "", 204);
        let still = memory(&server);
        thread::sleep(Duration::from_millis(30));
        assert!(memory(&server) == still, "memory changed");
        server.expect("PUT vm.pause", "", 204);
        server.expect("PUT vm.resume", "", 204);
        let after = count(&mut server);
        assert!(after > before, "{after} follows {before}");
        assert!(memory(&server) != still, "nothing is busy");
    }
    server.process.send("q");
    server.process.finish().expect_code(1).expect_output(&["PASS"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_paused_machine_can_be_reset_and_ended() {
    let (mut server, _folder) = keep();
    server.expect("PUT vm.pause", "", 204);
    server.expect("PUT vm.reboot", "", 204);
    server.process.expect("ready");
    assert!(count(&mut server) > 0);
    server.expect("PUT vm.pause", "", 204);
    server.expect("PUT vmm.shutdown", "", 204);
    server.ends(0);
}
