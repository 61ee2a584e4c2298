//! Decides whether what a machine uses of the host goes together: none of its output onto what it starts from or keeps its data
//! in, and nothing that is for one user twice. Follows links, since a name says nothing of the file behind it. Opens nothing.

use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use api::config::{DiskConfig, DiskSource, NetConfig, NetSource, OutputConfig, Payload, VmConfig};
use pci::topology::Name;
use thiserror::Error;

use crate::cli::RunOptions;
use crate::spec::{Virtio, devices};

/// Bytes of a socket's path, at most (`struct sockaddr_un`, with the zero at its end).
const SOCKET_PATH: usize = 107;

/// What the process uses beside its machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Beside<'a> {
    /// The log.
    pub log: Option<&'a Path>,
    /// Where the API is served.
    pub api_socket: Option<&'a Path>,
    /// A recorded host.
    pub host: Option<&'a Path>,
}

impl<'a> Beside<'a> {
    /// As the command line says.
    #[must_use]
    pub fn of(options: &'a RunOptions) -> Self {
        let path = |path: &'a Option<PathBuf>| path.as_deref();
        Self { log: path(&options.log.file), api_socket: path(&options.api_socket), host: path(&options.host) }
    }
}

/// Whether all that `config` names can be used together, and with what is beside it.
pub fn check(config: &VmConfig, beside: Beside<'_>) -> Result<(), FilesError> {
    let uses = uses(config, beside);
    for (one, path) in uses.iter().filter(|(one, _)| matches!(one.how, How::Listen | How::Connect)) {
        let bytes = path.as_os_str().len();
        if bytes > SOCKET_PATH {
            return Err(FilesError::Length { user: one.clone(), path: path.clone(), bytes });
        }
    }
    let mut before: Vec<(&User, &Path, Identity)> = Vec::new();
    for (user, path) in &uses {
        let Some(identity) = Identity::of(path) else { continue };
        let same = before.iter().filter(|(_, _, there)| *there == identity);
        if let Some(error) = same.into_iter().find_map(|(first, other, _)| conflict((user, path), (first, other))) {
            return Err(error);
        }
        before.push((user, path, identity));
    }
    one_tap_each(config)
}

/// Why two users of one file do not go together.
fn conflict((user, path): (&User, &Path), (first, other): (&User, &Path)) -> Option<FilesError> {
    let (path, other) = (path.to_owned(), other.to_owned());
    let twice = |first: &User| FilesError::Twice { first: first.clone(), user: user.clone(), path: path.clone() };
    match (first.how, user.how) {
        // One virtual machine may read a file as often as it likes.
        (How::Read | How::ReadDisk, How::Read | How::ReadDisk) => None,
        // A guest may write to what Banyan only reads: that is known to whoever gave it such a disk.
        (How::Read, How::Disk) | (How::Disk, How::Read) => None,
        (How::Disk | How::ReadDisk, How::Disk | How::ReadDisk) => {
            Some(FilesError::Disk { user: user.clone(), path, first: first.clone(), other })
        }
        (How::Write, How::Write) => Some(twice(first)),
        (How::Write, _) => Some(FilesError::Input { flag: first.clone(), path: other, what: user.clone(), other: path }),
        (_, How::Write) => Some(FilesError::Input { flag: user.clone(), path, what: first.clone(), other }),
        (How::Memory, _) => Some(FilesError::Memory { path: other, what: user.clone() }),
        (_, How::Memory) => Some(FilesError::Memory { path, what: first.clone() }),
        _ => Some(FilesError::Socket { first: first.clone(), user: user.clone(), path }),
    }
}

/// A tap belongs to one device.
fn one_tap_each(config: &VmConfig) -> Result<(), FilesError> {
    let mut before: Vec<(String, String)> = Vec::new();
    for (name, device) in devices(config) {
        let Virtio::Net(NetConfig { source: NetSource::Tap(tap), .. }) = device else { continue };
        if let Some((_, first)) = before.iter().find(|(there, _)| *there == tap) {
            return Err(FilesError::Tap { tap, first: first.clone(), name: name.0 });
        }
        before.push((tap, name.0));
    }
    Ok(())
}

/// Who uses what, outputs last, so that messages name them first.
fn uses(config: &VmConfig, beside: Beside<'_>) -> Vec<(User, PathBuf)> {
    let mut uses = Vec::new();
    let mut add = |what: &str, how, path: &Path| uses.push((User::new(what, how, None), path.to_owned()));
    if let Some(path) = &config.memory.file {
        add("the guest's memory", if config.memory.shared { How::Memory } else { How::Read }, path);
    }
    match &config.payload {
        Some(Payload::Kernel(kernel)) => {
            add("the kernel", How::Read, &kernel.path);
            kernel.initramfs.iter().for_each(|path| add("the initramfs", How::Read, path));
        }
        Some(Payload::Firmware(path)) => add("the firmware", How::Read, path),
        None => {}
    }
    beside.host.iter().for_each(|path| add("--host", How::Read, path));
    for (name, device) in devices(config) {
        let mut add = |what: String, how, path: &Path| uses.push((User::new(&what, how, Some(&name)), path.to_owned()));
        if let Some(socket) = device.server() {
            add(format!("the server of {name}"), How::Connect, socket);
        }
        match device {
            Virtio::Disk(DiskConfig { source: DiskSource::Image(path), readonly, .. }) => {
                add(format!("the disk {name}"), if readonly { How::ReadDisk } else { How::Disk }, &path);
            }
            Virtio::Vsock(vsock) => add("--vsock".to_owned(), How::Listen, &vsock.socket),
            _ => {}
        }
    }
    let mut add = |what: &str, how, path: &Path| uses.push((User::new(what, how, None), path.to_owned()));
    beside.api_socket.iter().for_each(|path| add("--api-socket", How::Listen, path));
    let consoles = [
        ("--serial", Some(&config.serial)),
        ("--console", Some(&config.console)),
        ("--debug-console", config.debug_console.as_ref()),
    ];
    for (flag, output) in consoles {
        match output {
            Some(OutputConfig::File(path)) => add(flag, How::Write, path),
            Some(OutputConfig::Socket(path)) => add(flag, How::Listen, path),
            _ => {}
        }
    }
    beside.log.iter().for_each(|path| add("--log", How::Write, path));
    uses
}

/// Who uses a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    names: Box<Names>,
    how: How,
}

/// What a user is called.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Names {
    what: String,
    /// The device, if it is one that can be removed.
    device: Option<String>,
}

impl User {
    fn new(what: &str, how: How, device: Option<&Name>) -> Self {
        let (what, device) = (what.to_owned(), device.map(|name| name.0.clone()));
        Self { names: Box::new(Names { what, device }), how }
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names.what)
    }
}

/// What is done with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// Read by Banyan.
    Read,
    /// Emptied or appended to.
    Write,
    /// What the guest has in memory is written there.
    Memory,
    /// Read by the guest.
    ReadDisk,
    /// Written by the guest.
    Disk,
    /// A socket that is made.
    Listen,
    /// A socket of another process, which serves one.
    Connect,
}

/// What tells one place for data from another.
#[derive(Debug, PartialEq, Eq)]
enum Identity {
    /// A file or socket, by file system and number.
    File(u64, u64),
    /// A block device, whatever node leads to it.
    Block(u64),
    /// A file that would be made here.
    New(PathBuf),
}

impl Identity {
    /// `None` for what keeps no data, such as terminals and pipes, and for what cannot be reached: its use fails by itself.
    fn of(path: &Path) -> Option<Self> {
        let Ok(there) = fs::metadata(path) else { return Self::new(path) };
        let kind = there.file_type();
        if kind.is_block_device() {
            return Some(Self::Block(there.rdev()));
        }
        (kind.is_file() || kind.is_socket()).then(|| Self::File(there.dev(), there.ino()))
    }

    fn new(path: &Path) -> Option<Self> {
        // A link that leads to nothing makes the file that it names.
        let target = fs::read_link(path).map_or_else(|_| path.into(), |to| path.parent().unwrap_or(Path::new("")).join(to));
        let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(Self::New(fs::canonicalize(parent).ok()?.join(target.file_name()?)))
    }
}

/// What would destroy or disturb something else of the same machine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FilesError {
    /// Output onto what the machine uses.
    #[error("{flag} would write to {}, which is {what} {}: give {flag} a file of its own", path.display(), other.display())]
    Input {
        /// Which output.
        flag: User,
        /// Its file.
        path: PathBuf,
        /// What the file is.
        what: User,
        /// As it is named there.
        other: PathBuf,
    },
    /// Two outputs into one.
    #[error("{user} and {first} would both write to {}: give each a file of its own", path.display())]
    Twice {
        /// The second output.
        user: User,
        /// The first one.
        first: User,
        /// The file.
        path: PathBuf,
    },
    /// A disk that is written, and another way to it.
    #[error(
        "{user} ({}) and {first} ({}) are the same, and the guest would write to it: remove {first} first, or add readonly=on to both",
        path.display(),
        other.display()
    )]
    Disk {
        /// The second one.
        user: User,
        /// Its image.
        path: PathBuf,
        /// The first one.
        first: User,
        /// Its image.
        other: PathBuf,
    },
    /// Memory over something else.
    #[error("the guest's memory would be written to {}, which is {what}: give it a file of its own", path.display())]
    Memory {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: User,
    },
    /// A socket for one, and another user of it.
    #[error(
        "{user} and {first} both name {}, and a socket is for one of them: give {user} another path{}",
        path.display(),
        first.names.device.as_ref().map_or_else(String::new, |device| format!(", or remove {device} first"))
    )]
    Socket {
        /// The second user.
        user: User,
        /// The first one.
        first: User,
        /// The path.
        path: PathBuf,
    },
    /// A path that no socket has.
    #[error("{user}: the path {} has {bytes} bytes, and that of a socket has at most {SOCKET_PATH}", path.display())]
    Length {
        /// Who.
        user: User,
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// A tap for two devices.
    #[error(
        "the network interfaces {first} and {name} are both on the tap {tap}: give {name} another one, or remove {first} first"
    )]
    Tap {
        /// The tap.
        tap: String,
        /// The first interface.
        first: String,
        /// The second one.
        name: String,
    },
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use api::config::KernelConfig;

    use super::*;

    fn with_log(log: Option<&Path>) -> Beside<'_> {
        Beside { log, ..Beside::default() }
    }

    #[test]
    fn output_never_goes_to_a_file_that_the_machine_uses_or_twice_to_one() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let names = ["kernel", "initramfs", "firmware", "disk", "read", "host", "memory"];
        for name in names {
            fs::write(at(name), name).unwrap();
            symlink(at(name), at(&format!("{name}-link"))).unwrap();
            fs::hard_link(at(name), at(&format!("{name}-hard"))).unwrap();
        }
        symlink("new", at("new-link")).unwrap();
        let kernel =
            KernelConfig { path: at("kernel"), initramfs: Some(at("initramfs")), cmdline: String::new(), load_address: None };
        let disk = |name: &str, rest: &str| format!("path={}{rest}", at(name).display()).parse().unwrap();
        let kernel = VmConfig {
            payload: Some(Payload::Kernel(kernel)),
            disks: vec![disk("disk", ""), disk("read", ",readonly=on")],
            ..VmConfig::default()
        };
        let firmware = VmConfig { payload: Some(Payload::Firmware(at("firmware"))), ..VmConfig::default() };
        let named = |shared: &str| VmConfig {
            memory: format!("64M,file={},shared={shared}", at("memory").display()).parse().unwrap(),
            ..firmware.clone()
        };
        let file = |name: &str| OutputConfig::File(at(name));
        for (base, what, called) in [
            (&kernel, "kernel", "the kernel"),
            (&kernel, "initramfs", "the initramfs"),
            (&kernel, "disk", "the disk disk0"),
            (&kernel, "read", "the disk disk1"),
            (&firmware, "firmware", "the firmware"),
            (&firmware, "host", "--host"),
            (&named("on"), "memory", "the guest's memory"),
            (&named("off"), "memory", "the guest's memory"),
        ] {
            for name in [what.to_owned(), format!("{what}-link"), format!("{what}-hard")] {
                let outputs = [
                    ("--serial", VmConfig { serial: file(&name), ..base.clone() }, None),
                    ("--console", VmConfig { console: file(&name), ..base.clone() }, None),
                    ("--debug-console", VmConfig { debug_console: Some(file(&name)), ..base.clone() }, None),
                    ("--log", base.clone(), Some(at(&name))),
                ];
                for (flag, config, log) in outputs {
                    let beside = Beside { host: Some(&at("host")), ..with_log(log.as_deref()) };
                    let error = check(&config, beside).unwrap_err().to_string();
                    let expected = format!("is {called} {}", at(what).display());
                    assert!(error.starts_with(flag) && error.contains(&expected), "{error}");
                }
            }
            assert_eq!(fs::read_to_string(at(what)).unwrap(), what);
        }
        for (name, what) in [("kernel", "the kernel"), ("disk-hard", "the disk"), ("read-link", "the disk")] {
            let memory = format!("64M,shared=on,file={}", at(name).display()).parse().unwrap();
            let error = check(&VmConfig { memory, ..kernel.clone() }, Beside::default()).unwrap_err().to_string();
            assert!(error.starts_with("the guest's memory would be written to") && error.contains(what), "{error}");
        }
        let both = |one: &str, other: &str| {
            check(&VmConfig { serial: file(one), console: file(other), ..kernel.clone() }, Beside::default())
        };
        for (one, other) in [("new", "new"), ("new", "new-link"), ("firmware", "firmware-hard")] {
            let error = both(one, other).unwrap_err().to_string();
            assert!(error.starts_with("--console and --serial would both write to"), "{error}");
        }
        assert_eq!(both("new", "newer"), Ok(()));
        let null = || OutputConfig::File("/dev/null".into());
        let quiet = VmConfig { serial: null(), console: null(), ..kernel };
        assert_eq!(check(&quiet, with_log(Some(Path::new("/dev/null")))), Ok(()));
    }

    #[test]
    fn a_disk_that_is_written_is_there_once_and_one_that_is_read_as_often_as_is_liked() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("a.img");
        fs::write(&image, "").unwrap();
        symlink("a.img", dir.path().join("b.img")).unwrap();
        let disks = |texts: [&str; 2]| {
            let disks = texts.map(|text| format!("{}/{text}", dir.path().display()).parse().unwrap()).into();
            check(&VmConfig { disks, ..VmConfig::default() }, Beside::default())
        };
        for texts in [["a.img", "a.img"], ["a.img", "b.img"], ["a.img,readonly=on", "b.img"], ["b.img", "a.img,readonly=on"]] {
            let error = disks(texts).unwrap_err().to_string();
            assert!(
                error.contains("are the same") && error.ends_with("remove the disk disk0 first, or add readonly=on to both"),
                "{error}"
            );
        }
        assert_eq!(disks(["a.img,readonly=on", "b.img,readonly=on"]), Ok(()));
        assert_eq!(disks(["a.img", "c.img"]), Ok(()));
    }

    #[test]
    fn a_socket_has_one_user_and_a_path_that_fits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let socket = || OutputConfig::Socket(path.clone());
        let fs = |id: &str| format!("{},tag={id},id={id}", path.display()).parse().unwrap();
        let vsock = || Some(format!("cid=3,socket={}", path.display()).parse().unwrap());
        let api = Beside { api_socket: Some(&path), ..Beside::default() };
        let base = VmConfig::default();
        let cases = [
            ("--console and --serial", VmConfig { serial: socket(), console: socket(), ..base.clone() }, Beside::default()),
            ("--serial and --api-socket", VmConfig { serial: socket(), ..base.clone() }, api),
            ("--api-socket and --vsock", VmConfig { vsock: vsock(), ..base.clone() }, api),
            (
                "--debug-console and --vsock",
                VmConfig { vsock: vsock(), debug_console: Some(socket()), ..base.clone() },
                Beside::default(),
            ),
            ("--api-socket and the server of a", VmConfig { filesystems: vec![fs("a")], ..base.clone() }, api),
            (
                "the server of b and the server of a",
                VmConfig { filesystems: vec![fs("a"), fs("b")], ..base.clone() },
                Beside::default(),
            ),
        ];
        for there in [false, true] {
            let _listener = there.then(|| UnixListener::bind(&path).unwrap());
            for (users, config, beside) in &cases {
                let error = check(config, *beside).unwrap_err().to_string();
                assert!(error.starts_with(&format!("{users} both name {}", path.display())), "{error}");
                assert_eq!(error.ends_with("another path, or remove a first"), users.ends_with("the server of a"), "{error}");
            }
        }
        let written = VmConfig { serial: OutputConfig::File(path.clone()), vsock: vsock(), ..base.clone() };
        let error = check(&written, Beside::default()).unwrap_err().to_string();
        assert!(error.starts_with("--serial would write to") && error.contains("which is --vsock"), "{error}");
        let long = dir.path().join("x".repeat(108));
        for (config, beside, user) in [
            (VmConfig { serial: OutputConfig::Socket(long.clone()), ..base.clone() }, Beside::default(), "--serial"),
            (base.clone(), Beside { api_socket: Some(&long), ..Beside::default() }, "--api-socket"),
            (
                VmConfig { vsock: Some(format!("cid=3,socket={}", long.display()).parse().unwrap()), ..base.clone() },
                Beside::default(),
                "--vsock",
            ),
            (
                VmConfig { filesystems: vec![format!("{},tag=a,id=a", long.display()).parse().unwrap()], ..base.clone() },
                Beside::default(),
                "the server of a",
            ),
        ] {
            let error = check(&config, beside).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{user}: the path ")) && error.ends_with("at most 107"), "{error}");
        }
    }

    #[test]
    fn a_tap_is_for_one_interface() {
        let nets = |texts: [&str; 2]| {
            let nets = texts.map(|text| text.parse().unwrap()).into();
            check(&VmConfig { nets, ..VmConfig::default() }, Beside::default())
        };
        let error = nets(["t0", "t0,id=eth"]).unwrap_err().to_string();
        assert!(error.contains("net0 and eth are both on the tap t0: give eth another one, or remove net0 first"), "{error}");
        assert_eq!(nets(["t0", "t1"]), Ok(()));
    }
}
