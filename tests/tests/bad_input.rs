//! Input that cannot be used: the exit code, the words of the message, and that nothing is left behind.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process_group};
use tests::guest::image;
use tests::process::LIMIT;
use tests::{Outcome, Session, executable};

/// Runs `banyan ARGUMENTS` in an empty folder and a process group of its own; both must be empty afterwards. Nothing may be
/// printed but an error of a few lines.
#[track_caller]
fn refused<S: AsRef<str>>(arguments: &[S], code: i32, parts: &[&str]) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(executable::path());
    command.args(arguments.iter().map(AsRef::as_ref));
    command.current_dir(folder.path()).env("TMPDIR", folder.path()).process_group(0);
    let session = Session::spawn(command, LIMIT);
    let group = Pid::from_raw(session.id().try_into().unwrap()).unwrap();
    let outcome = session.finish();
    outcome.expect_code(code).expect_error(parts);
    assert_eq!(outcome.stdout, "", "{outcome}");
    assert!((1..=12).contains(&outcome.stderr.lines().count()) && !outcome.stderr.contains("panicked"), "{outcome}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "files are left behind\n{outcome}");
    assert_eq!(test_kill_process_group(group), Err(Errno::SRCH), "processes are left behind\n{outcome}");
    outcome
}

/// `banyan run` with a guest that would run.
#[track_caller]
fn refused_run(arguments: &[&str], parts: &[&str]) {
    refused(&[&["run", "--kernel", &image("hello.elf")], arguments].concat(), 1, parts);
}

/// A file in `folder` with the first bytes of another.
fn beginning(folder: &Path, of: &str, bytes: usize) -> String {
    let path = folder.join(format!("{bytes}-of-{of}"));
    fs::write(&path, &fs::read(image(of)).unwrap()[..bytes]).unwrap();
    path.display().to_string()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_file_that_cannot_be_booted_is_named_with_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let pipe = at.join("pipe").display().to_string();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let path = at.display().to_string();
    let cut = beginning(at, "bzImage", 2000);
    for (arguments, parts) in [
        (["--kernel", &path], vec![path.as_str(), "a folder"]),
        (["--kernel", &pipe], vec![pipe.as_str(), "a pipe"]),
        (["--kernel", "/dev/null"], vec!["/dev/null", "a device"]),
        (["--kernel", &cut], vec![cut.as_str(), "truncated", "2000 bytes"]),
        (["--kernel", &image("firmware.bin")], vec!["firmware.bin", "unknown kind", "bzImage"]),
        (["--firmware", &path], vec![path.as_str(), "a folder"]),
        (["--firmware", &pipe], vec![pipe.as_str(), "a pipe"]),
        (["--firmware", "/nowhere/rom"], vec!["/nowhere/rom", "No such file"]),
        (["--firmware", &image("hello.elf")], vec!["hello.elf", "multiple of 4096"]),
    ] {
        refused(&[&["run"], &arguments[..]].concat(), 1, &parts);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn an_initramfs_that_cannot_be_loaded_is_named_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("empty"), "").unwrap();
    fs::File::create(path("large")).unwrap().set_len(1 << 40).unwrap();
    let place = folder.path().display().to_string();
    for (initramfs, parts) in [
        ("/nowhere/initrd", vec!["/nowhere/initrd", "No such file"]),
        (&place, vec![place.as_str(), "a folder"]),
        (&path("empty"), vec!["empty", "is empty"]),
        (&path("large"), vec!["large", "1099511627776 bytes", "536870912 bytes of memory", "give more memory"]),
    ] {
        refused_run(&["--initramfs", initramfs], &parts);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_command_line_that_the_kernel_does_not_take_is_refused() {
    let text = "x".repeat(3000);
    refused(&["run", "--kernel", &image("bzImage"), "--cmdline", &text], 1, &["3000 bytes", "2047"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn memory_that_cannot_be_had_is_refused_with_the_limit() {
    for (memory, parts) in [
        ("0", ["0 bytes", "16M"]),
        ("1", ["1 bytes", "16M"]),
        ("15M", ["15728640 bytes", "16M"]),
        ("8000000T", ["physical address bits", "give at most"]),
        ("1T,hugepages=1G", ["1024 huge pages of 1024 MiB", "nr_hugepages"]),
    ] {
        refused_run(&["--memory", memory], &parts);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn devices_and_keys_that_do_not_exist_are_refused() {
    for (device, code, parts) in [
        ("ff:1f.7", 1, vec!["0000:ff:1f.7", "lspci"]),
        ("nonsense", 1, vec!["`nonsense`", "0000:03:00.0"]),
        ("/etc/passwd", 1, vec!["/etc/passwd", "/sys/bus/pci/devices"]),
        ("stub,clique=16", 2, vec!["clique 16", "0 to 15"]),
        ("stub,clique=3", 1, vec!["stub0", "1b36:10bd", "10de", "clique-any-vendor"]),
        ("stub,ids=10de:20b8,class=020000,clique=3", 1, vec!["class 020000", "03"]),
        ("stub,colour=red", 2, vec!["`colour`"]),
        ("stub,msi=2,msi=4", 2, vec!["`msi` is given twice"]),
        ("stub,msi=2,msix=4", 2, vec!["msi", "msix"]),
        ("stub,bar0=4K:mem64,bar1=4K:mem32", 1, vec!["BAR 1", "upper half"]),
        ("stub,id=x,bar0=2G:mem32", 1, vec!["BAR 0 of `x`", "below 4 GiB", "512M are missing"]),
        ("stub,id=x,on=here", 1, vec!["`x`", "`here`"]),
        ("stub,device=40", 1, vec!["device 40", "0 to 31"]),
        ("stub,device=3,function=1", 1, vec!["stub0", "function 0"]),
        ("kind=stub,path=03:00.0", 2, vec!["path"]),
    ] {
        let arguments = ["run", "--kernel", &image("hello.elf"), "--device", device];
        refused(&arguments, code, &parts);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_topology_that_is_no_tree_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.toml");
    let root = "[[root-complex]]\nname = \"rc0\"\n";
    let port = |name: &str, kind: &str, on: &str| format!("[[port]]\nname = \"{name}\"\nkind = \"{kind}\"\non = \"{on}\"\n");
    let stub = |name: &str, rest: &str| format!("[[device]]\nname = \"{name}\"\nkind = \"stub\"\n{rest}\n");
    for (text, parts) in [
        (
            format!("{root}{}{}", port("a", "upstream-port", "b"), port("b", "downstream-port", "a")),
            vec!["`a`", "`b`", "no root complex is above them"],
        ),
        (format!("{root}{}", port("a", "root-port", "a")), vec!["`a`"]),
        (format!("{root}{}", stub("d", "on = \"nowhere\"")), vec!["`d`", "`nowhere`"]),
        (format!("{root}{}", stub("d", "")), vec!["line 3", "`on`"]),
        (format!("{root}[[device]]\nkind = \"stub\"\non = \"rc0\"\n"), vec!["line 3", "name"]),
        (
            format!("{root}{}{}", stub("d", "on = \"rc0\"\ndevice = 3"), stub("e", "on = \"rc0\"\ndevice = 3")),
            vec!["`d`", "`e`", "03.0"],
        ),
        (format!("{root}{}", port("a", "upstream-port", "rc0")), vec!["`a`", "`rc0`"]),
        (String::new(), vec!["root-complex"]),
        ("[[".to_owned(), vec!["line 1"]),
    ] {
        fs::write(&path, text).unwrap();
        refused_run(&["--topology", path.to_str().unwrap()], &parts);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_refused_start_leaves_output_files_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (folder.path().join("old"), folder.path().join("new"));
    fs::write(&old, "what an earlier guest said").unwrap();
    for (arguments, parts) in [
        (vec!["--kernel", "/nowhere/kernel"], ["/nowhere/kernel", "No such file"]),
        (vec!["--firmware", "/nowhere/rom"], ["/nowhere/rom", "No such file"]),
        (vec!["--kernel", &image("hello.elf"), "--memory", "0"], ["0 bytes", "16M"]),
    ] {
        let (serial, console) = (format!("file={}", old.display()), format!("file={}", new.display()));
        refused(&[&["run", "--serial", &serial, "--debug-console", &console], &arguments[..]].concat(), 1, &parts);
        assert_eq!(fs::read_to_string(&old).unwrap(), "what an earlier guest said");
        assert!(!new.exists());
    }
}

#[test]
fn virtual_functions_that_no_guest_could_enable_are_refused() {
    for (pcie, device, on) in [
        ("cold-plug=no-port", "stub,id=nic,vfs=2", "rc0"),
        ("cold-plug=bridge-port", "stub,id=nic,vfs=2", "bridge0"),
        ("bridges=1", "stub,id=nic,vfs=2,on=bridge0", "bridge0"),
        ("bridges=1", "stub,id=nic,vfs=2,on=rc0", "rc0"),
    ] {
        let of = format!("virtual functions of nic could not be enabled on the bus of {on}");
        refused_run(&["--pcie", pcie, "--device", device], &[&of, "below a root port or a downstream port", "leave out `vfs`"]);
    }
}
