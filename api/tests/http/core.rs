//! A core without a machine, behind a real server, and a client that sees every byte.

use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use api::channel::{Inbox, channel};
use api::command::{Added, Command, Resize};
use api::config::{DeviceKind, Size, VmConfig};
use api::error::{ApiError, ErrorKind};
use api::http::{Limits, Server};
use api::info::{DeviceClass, DeviceInfo, Gauge, Listing, PciAddress, Phase, PortInfo, Progress, Published, Step, VmInfo};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;

/// How the core behaves.
#[derive(Clone, Copy, Default)]
pub struct Knobs {
    /// Time that vm.boot takes.
    pub boot: Duration,
    /// Limits of the server.
    pub limits: Limits,
}

/// What the core has seen.
#[derive(Default)]
pub struct Seen {
    /// Commands, by name.
    pub commands: Vec<&'static str>,
    /// Machines that were asked for.
    pub configs: Vec<VmConfig>,
    /// Descriptors that came with interfaces.
    pub taps: Vec<OwnedFd>,
    /// Devices that were asked for.
    pub devices: Vec<api::config::DeviceConfig>,
}

/// A server with a core behind it.
pub struct Vmm {
    folder: tempfile::TempDir,
    pub seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<()>>,
}

impl Vmm {
    pub fn start() -> Self {
        Self::with(Knobs::default())
    }

    pub fn with(knobs: Knobs) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let published = Published::new();
        let (controller, inbox) = channel().unwrap();
        let path = folder.path().join("api.sock");
        let server = Server::start(&path, controller, published.clone(), VmConfig::default(), knobs.limits).unwrap();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let core = Core { published, knobs, seen: seen.clone(), added: 0 };
        let thread = thread::spawn(move || core.run(inbox, server));
        Self { folder, seen, thread: Some(thread) }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("api.sock")
    }

    pub fn connect(&self) -> Client {
        Client::connect(&self.path())
    }

    /// Waits until the core has ended, as the process would.
    pub fn ended(mut self) {
        self.thread.take().unwrap().join().unwrap();
        assert!(!self.path().exists(), "the socket is left behind");
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            if let Some(mut client) = Client::try_connect(&self.path()) {
                let _ = client.try_call("PUT", "vmm.shutdown", "");
            }
            let _ = thread.join();
        }
    }
}

struct Core {
    published: Published,
    knobs: Knobs,
    seen: Arc<Mutex<Seen>>,
    added: u8,
}

impl Core {
    fn run(mut self, inbox: Inbox, server: Server) {
        while let Some(command) = inbox.wait() {
            self.seen.lock().unwrap().commands.push(command.name());
            if let Command::VmmShutdown { reply } = command {
                reply.send(Ok(()));
                break;
            }
            self.obey(command);
        }
        // What waits in it is answered by that.
        drop(inbox);
        server.close(Duration::from_secs(5));
    }

    fn obey(&mut self, command: Command) {
        let phase = self.published.get().map(|info| info.phase);
        match (command, phase) {
            (Command::Create { config, reply }, None) => {
                self.seen.lock().unwrap().configs.push(VmConfig::clone(&config));
                let memory = config.memory.size.bytes();
                let mut config = *config;
                for (disk, n) in config.disks.iter_mut().zip(0..) {
                    disk.id.get_or_insert_with(|| format!("disk{n}"));
                }
                let (phase, balloon) = (Phase::Created, Gauge::default());
                self.published.set(Some(VmInfo { config, phase, progress: None, memory, balloon, devices: Vec::new() }));
                reply.send(Ok(()));
            }
            (Command::Create { reply, .. }, Some(phase)) => reply.send(Err(ApiError::wrong_state("vm.create", &phase))),
            (command, None) => command.refuse(ApiError::no_vm()),
            (Command::Boot { reply }, Some(Phase::Created | Phase::Stopped)) => {
                self.published.update(|info| {
                    info.phase = Phase::Starting;
                    info.progress = Some(Progress { step: Step::Prefault, done: 1 << 30, total: 4 << 30 });
                });
                thread::sleep(self.knobs.boot);
                self.published.update(|info| {
                    info.phase = Phase::Running;
                    info.progress = None;
                });
                reply.send(Ok(()));
            }
            (Command::Pause { reply }, Some(Phase::Running)) => self.turn(Phase::Paused, reply),
            (Command::Resume { reply }, Some(Phase::Paused)) => self.turn(Phase::Running, reply),
            (Command::Shutdown { reply }, Some(Phase::Running | Phase::Paused)) => self.turn(Phase::Stopped, reply),
            (Command::Delete { reply }, _) => {
                self.published.set(None);
                reply.send(Ok(()));
            }
            (Command::Reboot { reply } | Command::PowerButton { reply }, Some(Phase::Running)) => reply.send(Ok(())),
            (Command::Resize { to: Resize { cpus, ram, .. }, reply }, Some(Phase::Running)) => {
                self.published.update(|info| {
                    info.config.cpus.count = cpus.unwrap_or(info.config.cpus.count);
                    info.memory = ram.unwrap_or(info.memory);
                    info.config.memory.size = Size(info.memory);
                });
                reply.send(Ok(()));
            }
            (Command::AddDevice { functions, reply }, Some(phase)) => {
                let config = functions.first().unwrap();
                self.seen.lock().unwrap().devices.push(config.clone());
                reply.send(match &config.kind {
                    DeviceKind::Vfio(vfio) if vfio.path == Path::new("/sys/bus/pci/devices/ffff:00:00.0") => {
                        Err(ApiError::new(ErrorKind::NotFound, "host function ffff:00:00.0 does not exist")
                            .within("the device cannot be added"))
                    }
                    DeviceKind::Vfio(vfio) => {
                        let host = vfio.path.display().to_string();
                        Ok(self.add(phase, config.id.as_deref(), DeviceClass::Vfio, Some(host)))
                    }
                    DeviceKind::Stub(_) | DeviceKind::Cdi(_) => {
                        Ok(self.add(phase, config.id.as_deref(), DeviceClass::Stub, None))
                    }
                });
            }
            (Command::AddDisk { config, reply }, Some(phase)) => {
                let id = config.id.clone();
                self.published.update(|info| info.config.disks.push(*config));
                reply.send(Ok(self.add(phase, id.as_deref(), DeviceClass::Disk, None)));
            }
            (Command::AddNet { config, taps, reply }, Some(phase)) => {
                self.seen.lock().unwrap().taps.extend(taps);
                self.published.update(|info| info.config.nets.push(*config));
                reply.send(Ok(self.add(phase, None, DeviceClass::Net, None)));
            }
            (Command::RemoveDevice { id, reply }, Some(_)) => {
                let there = self.published.get().is_some_and(|info| info.devices.iter().any(|device| device.id == id));
                self.published.update(|info| info.devices.retain(|device| device.id != id));
                let missing = || ApiError::new(ErrorKind::NotFound, format!("there is no device `{id}`"));
                reply.send(if there { Ok(()) } else { Err(missing()) });
            }
            (Command::ListDevices { reply }, Some(_)) => {
                let devices = self.published.get().map(|info| info.devices.clone()).unwrap_or_default();
                let port = PortInfo {
                    name: "rp0".into(),
                    kind: "root-port".into(),
                    bdf: PciAddress { segment: 0, bus: 0, device: 4, function: 0 },
                    hot_plug: true,
                    devices: Vec::new(),
                    memory: 2 << 20,
                    prefetchable: 1 << 30,
                    access_control: None,
                };
                reply.send(Ok(Listing { devices, ports: vec![port], root_complexes: Vec::new(), functions: Vec::new() }));
            }
            (Command::Counters { reply }, Some(_)) => {
                reply.send(Ok([("vcpu0".to_owned(), [("mmio".to_owned(), 3)].into())].into()));
            }
            (command @ (Command::AddFs { .. } | Command::AddVsock { .. }), _) => {
                command.refuse_unsupported();
            }
            (command, Some(phase)) => {
                let error = ApiError::wrong_state(command.name(), &phase);
                command.refuse(error);
            }
        }
    }

    fn turn(&self, phase: Phase, reply: api::command::Reply<()>) {
        self.published.update(|info| info.phase = phase);
        reply.send(Ok(()));
    }

    fn add(&mut self, phase: Phase, id: Option<&str>, kind: DeviceClass, host: Option<String>) -> Added {
        let device = 5 + self.added;
        self.added += 1;
        let info = DeviceInfo {
            id: id.map_or_else(|| format!("_{kind}{device}"), str::to_owned),
            kind,
            bdf: PciAddress { segment: 0, bus: 0, device, function: 0 },
            path: format!("{device:02x}"),
            port: None,
            host,
            clique: None,
            bars: Vec::new(),
            label: "f\u{fc}r Tests".into(),
        };
        self.published.update(|state| state.devices.push(info.clone()));
        (phase != Phase::Created).then_some(info)
    }
}

/// A reply, byte for byte and taken apart.
#[derive(Debug, Clone)]
pub struct Got {
    pub status_line: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Got {
    pub fn status(&self) -> u16 {
        self.status_line.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&self.body)))
    }
}

/// A connection that reads replies as the strictest client does: by the literal spelling of what it needs.
pub struct Client {
    stream: UnixStream,
}

impl Client {
    pub fn connect(path: &Path) -> Self {
        Self::try_connect(path).unwrap()
    }

    fn try_connect(path: &Path) -> Option<Self> {
        let stream = UnixStream::connect(path).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
        Some(Self { stream })
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends all that can be sent; whether the other side took it all.
    pub fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    pub fn send_with(&mut self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        assert!(self.try_send_with(bytes, descriptors));
    }

    pub fn try_send_with(&mut self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).is_ok_and(|sent| sent == bytes.len())
    }

    /// The next reply; `None` when the other side has closed the connection before its first byte.
    pub fn receive(&mut self) -> Option<Got> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(1) => head.extend(byte),
                Ok(_) if head.is_empty() => return None,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset && head.is_empty() => return None,
                other => panic!("the reply breaks off ({other:?}) after {:?}", String::from_utf8_lossy(&head)),
            }
        }
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.trim_end_matches("\r\n").split("\r\n");
        let status_line = lines.next().unwrap().to_owned();
        let headers: Vec<_> =
            lines.map(|line| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned())).unwrap()).collect();
        let length = headers.iter().find(|(name, _)| name == "Content-Length").map_or(0, |(_, value)| value.parse().unwrap());
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).unwrap();
        Some(Got { status_line, headers, body })
    }

    /// Whether there is something to read, or the connection has ended, within `time`.
    pub fn has_something(&mut self, time: Duration) -> bool {
        self.stream.set_read_timeout(Some(time)).unwrap();
        let peeked = rustix::net::recv(&self.stream, &mut [0u8], rustix::net::RecvFlags::PEEK);
        self.stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        peeked.is_ok()
    }

    /// Whether the other side closes the connection without another byte.
    pub fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    pub fn call(&mut self, verb: &str, name: &str, body: &str) -> Got {
        self.try_call(verb, name, body).unwrap_or_else(|| panic!("{name} is not answered"))
    }

    pub fn try_call(&mut self, verb: &str, name: &str, body: &str) -> Option<Got> {
        let length = if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let request = format!("{verb} /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n{body}");
        if !self.try_send(request.as_bytes()) {
            return None;
        }
        self.receive()
    }

    pub fn status(&mut self, verb: &str, name: &str, body: &str) -> u16 {
        self.call(verb, name, body).status()
    }

    pub fn close_writing(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Write).unwrap();
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The smallest machine.
pub const MACHINE: &str = r#"{"payload":{"kernel":"/k"},"cpus":{"boot_vcpus":1,"max_vcpus":4},"memory":{"size":1073741824}}"#;

impl Read for Client {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(buffer)
    }
}
