//! Talks to the executable by its API socket, in requests of bytes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::executable;
use crate::guest::Guest;
use crate::process::{LIMIT, Session, until};

/// A process with a socket, and the folder that the socket is in.
#[derive(Debug)]
pub struct Server {
    /// The process.
    pub process: Session,
    folder: TempDir,
}

/// Nobody answered: the process has ended, or does not listen yet.
pub const NOBODY: u16 = 0;

impl Server {
    /// `banyan run` for a guest.
    #[must_use]
    pub fn run(guest: &Guest) -> Self {
        let folder = folder();
        let process = guest.clone().with(&["--api-socket", &folder.path().join("s").display().to_string()]).start();
        Self { process, folder }
    }

    /// `banyan --api-socket`: no machine.
    #[must_use]
    pub fn empty() -> Self {
        let folder = folder();
        let process = Session::start(&["--api-socket", &folder.path().join("s").display().to_string()]);
        let server = Self { process, folder };
        listens(&server.socket());
        server
    }

    /// `banyan --api-socket` with these variables and an empty standard input.
    #[must_use]
    pub fn with_environment(variables: &[(&str, &str)]) -> Self {
        let folder = folder();
        let mut command = Command::new(executable::path());
        command.arg("--api-socket").arg(folder.path().join("s")).envs(variables.iter().copied());
        let server = Self { process: Session::spawn(command, LIMIT), folder };
        listens(&server.socket());
        server
    }

    /// `banyan --api-socket` for which the operator's file says this.
    #[must_use]
    pub fn with_policy(text: &str) -> Self {
        let policy = folder();
        let file = policy.path().join("config.toml");
        std::fs::write(&file, text).unwrap_or_else(|error| panic!("the policy cannot be written: {error}"));
        // It is read at the start only.
        Self::with_environment(&[("BANYAN_CONFIG", &file.display().to_string())])
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    /// Status and body of the reply to `what`, such as `PUT vm.boot`.
    #[must_use]
    pub fn call(&self, what: &str, body: &str) -> (u16, String) {
        call(&self.socket(), what, body)
    }

    /// The reply to a call that must have this status.
    #[track_caller]
    pub fn expect(&self, what: &str, body: &str, status: u16) -> String {
        let (found, reply) = self.call(what, body);
        assert_eq!(found, status, "{what} {body}: {reply}");
        reply
    }

    /// Repeats a call until it is answered in this way.
    #[track_caller]
    pub fn until(&self, what: &str, body: &str, status: u16) -> String {
        until(&format!("{status} for {what} {body}"), || self.call(what, body), |(found, _)| *found == status).1
    }

    /// vm.create with this kernel, 64 MiB, and `more` of the body, with a comma in front.
    #[must_use]
    pub fn create(&self, kernel: &str, more: &str) -> (u16, String) {
        self.call("PUT vm.create", &machine(kernel, r#""size":67108864"#, more))
    }

    /// vm.add-device, with a device as for `--device`.
    #[must_use]
    pub fn add(&self, device: &str) -> (u16, String) {
        self.call("PUT vm.add-device", &format!(r#"{{"banyan":"{device}"}}"#))
    }

    /// Adds a device while the guest runs; panics unless it comes. What vm.add-device says of it.
    #[track_caller]
    pub fn adds(&self, device: &str) -> String {
        let (status, reply) = self.add(device);
        assert_eq!(status, 200, "{device}: {reply}");
        reply
    }

    /// Panics unless the device is refused with this status and these words.
    #[track_caller]
    pub fn refuses(&self, device: &str, status: u16, parts: &[&str]) {
        let (found, reply) = self.add(device);
        assert_eq!(found, status, "{device}: {reply}");
        for part in parts {
            assert!(reply.contains(part), "{device}: `{part}` is not in {reply}");
        }
    }

    /// Status of vm.remove-device.
    #[must_use]
    pub fn remove(&self, id: &str) -> u16 {
        self.call("PUT vm.remove-device", &format!(r#"{{"id":"{id}"}}"#)).0
    }

    /// The reply to vm.devices.
    #[must_use]
    pub fn devices_json(&self) -> String {
        self.expect("GET vm.devices", "", 200)
    }

    /// Names of all devices with their ports: `a@port0 b@port1`.
    #[must_use]
    pub fn devices(&self) -> String {
        let reply = self.expect("GET vm.devices", "", 200);
        let (devices, _) = reply.split_once(r#""ports":"#).unwrap_or_else(|| panic!("no ports: {reply}"));
        let value = |entry: &str, key: &str| {
            let found = entry.split_once(&format!(r#""{key}":""#)).and_then(|(_, rest)| rest.split('"').next());
            found.unwrap_or_else(|| panic!("no {key}: {entry}")).to_owned()
        };
        let entries = devices.split('}').filter(|entry| entry.contains(r#""id":"#));
        entries.map(|entry| format!("{}@{}", value(entry, "id"), value(entry, "port"))).collect::<Vec<_>>().join(" ")
    }

    /// Ends the process by vmm.shutdown, which it does with exit code 0.
    #[track_caller]
    pub fn shuts_down(self) {
        self.expect("PUT vmm.shutdown", "", 204);
        self.ends(0);
    }

    /// Waits for the end, which must come with this exit code and without the socket's file.
    #[track_caller]
    pub fn ends(self, code: i32) {
        let Self { process, folder } = self;
        process.wait().expect_code(code);
        assert!(!folder.path().join("s").exists(), "the socket's file stayed");
    }
}

/// The body of vm.create for this kernel, with the keys of `memory`, and `more` of the body, with a comma in front.
#[must_use]
pub fn machine(kernel: &str, memory: &str, more: &str) -> String {
    machine_told(kernel, "", memory, more)
}

/// The same for a kernel that is told `cmdline`.
#[must_use]
pub fn machine_told(kernel: &str, cmdline: &str, memory: &str, more: &str) -> String {
    format!(r#"{{"payload":{{"kernel":"{kernel}","cmdline":"{cmdline}"}},"memory":{{{memory}}}{more}}}"#)
}

/// One request on a connection of its own: status and body of the reply.
#[must_use]
pub fn call(socket: &Path, what: &str, body: &str) -> (u16, String) {
    let (verb, name) = what.split_once(' ').unwrap_or_else(|| panic!("no verb: {what}"));
    let Ok(mut stream) = UnixStream::connect(socket) else { return (NOBODY, String::new()) };
    // Never fails for a time that is not zero.
    let _ = stream.set_read_timeout(Some(LIMIT));
    let length = body.len();
    let request = format!("{verb} /api/v1/{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
    let mut reply = Vec::new();
    let done = stream.write_all((request + body).as_bytes()).and_then(|()| stream.read_to_end(&mut reply));
    let reply = String::from_utf8_lossy(&reply).into_owned();
    // A connection that was never accepted ends without a reply.
    let Some((head, body)) = reply.split_once("\r\n\r\n") else {
        assert!(done.is_err() || reply.is_empty(), "half a reply: {reply}");
        return (NOBODY, reply);
    };
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("no status: {head}")), body.to_owned())
}

/// Waits until somebody answers at this socket.
#[track_caller]
pub fn listens(socket: &Path) {
    until("somebody who listens", || call(socket, "GET vmm.ping", ""), |(status, _)| *status == 200);
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap_or_else(|error| panic!("no folder for the socket: {error}"))
}
