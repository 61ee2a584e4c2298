//! A blocking client of the HTTP API, for `banyan ctl` and for tests.
//!
//! One connection, one call at a time. A call may take as long as the other side needs: preparing memory or ending a guest
//! does. One that takes long is waited for as long as the process answers to `vmm.ping`, which needs next to no time.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::Value;
use thiserror::Error;

use crate::dialect::json::ascii;

/// Headers of a reply, at most.
const HEADERS: usize = 32;
/// Bytes of a reply's head, at most.
const HEAD: usize = 16 << 10;
/// Bytes of a reply's body, at most.
const BODY: usize = 64 << 20;

/// How long nothing may come before the other side is asked whether it is there, and how long it may take to say so.
const PATIENCE: Duration = Duration::from_secs(5);

/// How an endpoint is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// To be told something.
    Get,
    /// To have something done.
    Put,
}

/// A connection to a Banyan process.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    stream: UnixStream,
    /// Bytes that have been read beyond the last reply.
    rest: Vec<u8>,
    /// How long nothing may come.
    patience: Duration,
    /// What is done then.
    silence: Silence,
}

/// What a side that says nothing means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Silence {
    /// It is busy if it answers to a ping, else it is not there.
    Doubt,
    /// It is not there.
    Absence,
    /// There is nothing to tell.
    Peace,
}

impl Client {
    /// Connects to the socket at `path`.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        Self::with_patience(path, PATIENCE)
    }

    fn with_patience(path: &Path, patience: Duration) -> Result<Self, ClientError> {
        let failed = |source: io::Error| match source.kind() {
            // Its queue of connections is full, and stays so.
            io::ErrorKind::WouldBlock => ClientError::Silent { path: path.to_owned(), patience },
            _ => ClientError::Connect { path: path.to_owned(), source },
        };
        let address = SocketAddrUnix::new(path).map_err(|error| failed(error.into()))?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let stream = UnixStream::from(socket.map_err(|error| failed(error.into()))?);
        // Before the connection, for which it holds as well.
        stream.set_write_timeout(Some(patience)).map_err(failed)?;
        stream.set_read_timeout(Some(patience)).map_err(failed)?;
        connect(&stream, &address).map_err(|error| failed(error.into()))?;
        Ok(Self { path: path.to_owned(), stream, rest: Vec::new(), patience, silence: Silence::Doubt })
    }

    /// Whether to go on waiting for the other side, from which nothing came for a while.
    fn wait_on(&self) -> Result<(), ClientError> {
        let silent = || ClientError::Silent { path: self.path.clone(), patience: self.patience };
        match self.silence {
            Silence::Peace => Ok(()),
            Silence::Absence => Err(silent()),
            Silence::Doubt => {
                let mut other = Self::with_patience(&self.path, self.patience).map_err(|_| silent())?;
                other.silence = Silence::Absence;
                other.call(Verb::Get, "vmm.ping", None).map(drop).map_err(|_| silent())
            }
        }
    }

    fn send(&mut self, mut request: &[u8]) -> Result<(), ClientError> {
        let lost = |source| ClientError::Lost { path: self.path.clone(), source };
        while !request.is_empty() {
            match (&self.stream).write(request) {
                Ok(0) => return Err(lost(io::ErrorKind::WriteZero.into())),
                Ok(count) => request = request.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_on()?,
                Err(error) => return Err(lost(error)),
            }
        }
        Ok(())
    }

    /// Calls an endpoint by its name, such as `vm.info`. Returns the body of the reply, if it has one.
    pub fn call(&mut self, verb: Verb, name: &str, body: Option<&Value>) -> Result<Option<Value>, ClientError> {
        let verb = match verb {
            Verb::Get => "GET",
            Verb::Put => "PUT",
        };
        let body = body.map(ascii).unwrap_or_default();
        let head = format!("{verb} /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
        // A server that refuses a request before its end closes the connection; its reply says more than the error.
        let sent = self.send(&[head.as_bytes(), &body].concat());
        if let Err(error @ ClientError::Silent { .. }) = sent {
            return Err(error);
        }
        match (self.reply(name), sent) {
            (Err(ClientError::Lost { .. }), Err(error)) => Err(error),
            (reply, _) => reply,
        }
    }

    /// Listens to an endpoint that answers with lines of JSON for as long as both sides like. Each is given to `each`, which
    /// says whether to go on.
    pub fn listen(&mut self, name: &str, mut each: impl FnMut(Value) -> bool) -> Result<(), ClientError> {
        let path = self.path.clone();
        let unusable = |what: &str| ClientError::NoHttp { path: path.clone(), what: what.to_owned() };
        let request = format!("GET /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        self.send(request.as_bytes())?;
        let end = loop {
            if let Some(end) = find(&self.rest, b"\r\n\r\n") {
                break end + 4;
            }
            if self.rest.len() > HEAD {
                return Err(unusable("headers without an end"));
            }
            self.more()?;
        };
        let head = String::from_utf8_lossy(self.rest.get(..end).unwrap_or_default()).to_ascii_lowercase();
        if !head.starts_with("http/1.1 200 ") || !head.contains("transfer-encoding: chunked") {
            // A refusal, which is as long as it says.
            return self.reply(name).map(drop);
        }
        self.rest.drain(..end);
        // Nothing comes as long as nothing happens.
        self.silence = Silence::Peace;
        let mut text: Vec<u8> = Vec::new();
        loop {
            let (start, length) = match httparse::parse_chunk_size(&self.rest) {
                Ok(httparse::Status::Complete((start, length))) => (start, usize::try_from(length).unwrap_or(usize::MAX)),
                Ok(httparse::Status::Partial) if self.rest.len() <= HEAD => {
                    self.more()?;
                    continue;
                }
                _ => return Err(unusable("a piece without a length")),
            };
            if length == 0 {
                return Ok(());
            }
            if length > BODY || text.len() > BODY {
                return Err(unusable("a line without an end"));
            }
            // A line's end follows each piece.
            while self.rest.len() < start + length + 2 {
                self.more()?;
            }
            text.extend(self.rest.drain(..start + length + 2).skip(start).take(length));
            while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = text.drain(..=end).collect();
                let value = serde_json::from_slice(&line).map_err(|error| unusable(&error.to_string()))?;
                if !each(value) {
                    return Ok(());
                }
            }
        }
    }

    fn reply(&mut self, name: &str) -> Result<Option<Value>, ClientError> {
        let path = self.path.clone();
        let unusable = |what: &str| ClientError::NoHttp { path: path.clone(), what: what.to_owned() };
        let (status, length, start) = loop {
            let mut headers = [httparse::EMPTY_HEADER; HEADERS];
            let mut reply = httparse::Response::new(&mut headers);
            match reply.parse(&self.rest) {
                Ok(httparse::Status::Complete(start)) => {
                    let length = reply.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
                    let length = match length.map(|header| std::str::from_utf8(header.value).ok()?.parse().ok()) {
                        None => 0,
                        Some(Some(length)) if length <= BODY => length,
                        Some(_) => return Err(unusable("a length that makes no sense")),
                    };
                    break (reply.code.unwrap_or_default(), length, start);
                }
                Ok(httparse::Status::Partial) if self.rest.len() <= HEAD => {}
                Ok(httparse::Status::Partial) => return Err(unusable("headers without an end")),
                Err(error) => return Err(unusable(&error.to_string())),
            }
            self.more()?;
        };
        while self.rest.len() < start + length {
            self.more()?;
        }
        let body: Vec<u8> = self.rest.drain(..start + length).skip(start).collect();
        let value = (!body.is_empty()).then(|| serde_json::from_slice::<Value>(&body)).transpose();
        if (200..300).contains(&status) {
            return value.map_err(|error| unusable(&error.to_string()));
        }
        // Some causes open with the name themselves, for clients that show nothing else.
        let called = format!("{name}: ");
        let bare = |text: &Value| text.as_str().map(|text| text.strip_prefix(&called).unwrap_or(text).to_owned());
        let texts = |value: Value| Some(value.as_array()?.iter().filter_map(bare).filter(|text| text != name).collect());
        let causes = value.ok().flatten().and_then(texts).unwrap_or_default();
        Err(ClientError::Refused { name: name.to_owned(), status, causes: Causes(causes) })
    }

    fn more(&mut self) -> Result<(), ClientError> {
        let mut buffer = [0; 8192];
        let lost = |source| ClientError::Lost { path: self.path.clone(), source };
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    self.rest.extend_from_slice(buffer.get(..count).unwrap_or_default());
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_on()?,
                Err(error) => return Err(lost(error)),
            }
        }
    }
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// Causes of a refusal, outermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Causes(pub Vec<String>);

impl std::fmt::Display for Causes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "no reason is given" } else { "" })?;
        f.write_str(&self.0.join(": "))
    }
}

/// A call that was not met.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Nobody there.
    #[error("no Banyan process can be reached at {path}; check the path and that the process runs", path = path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Somebody who says nothing.
    #[error("what listens at {path} has not answered within {} s; it hangs, or is no Banyan process", patience.as_secs(), path = path.display())]
    Silent {
        /// The socket.
        path: PathBuf,
        /// How long it was waited for.
        patience: Duration,
    },
    /// Gone.
    #[error("the process at {path} ended before it answered", path = path.display())]
    Lost {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Somebody else.
    #[error("what listens at {path} is no Banyan process: its reply has {what}", path = path.display())]
    NoHttp {
        /// The socket.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The answer is no.
    #[error("{name}: {causes}")]
    Refused {
        /// What was called.
        name: String,
        /// HTTP status.
        status: u16,
        /// Why.
        causes: Causes,
    },
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// Calls something that answers with these bytes, piece by piece, and closes.
    fn answered_with(pieces: &'static [&'static str]) -> Result<Option<Value>, ClientError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let count = stream.read(&mut request).unwrap();
            for piece in pieces {
                stream.write_all(piece.as_bytes()).unwrap();
            }
            String::from_utf8(request[..count].to_vec()).unwrap()
        });
        let reply = Client::connect(&path).unwrap().call(Verb::Put, "vm.boot", None);
        assert!(server.join().unwrap().starts_with("PUT /api/v1/vm.boot HTTP/1.1\r\n"));
        reply
    }

    #[test]
    fn a_reply_is_read_whole_however_it_is_cut() {
        assert_eq!(answered_with(&["HTTP/1.1 204 \r\n\r\n"]).unwrap(), None);
        let pieces = &["HTTP/1.1 200", " \r\ncontent-len", "gth: 7\r\n\r\n{\"a\":", "1}"];
        assert_eq!(answered_with(pieces).unwrap(), Some(serde_json::json!({"a": 1})));
    }

    /// Accepts every connection, and gives it to `serve` with its number and what it asks for, on threads of their own.
    fn serving(path: &Path, serve: fn(usize, UnixStream)) {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            for (index, stream) in listener.incoming().enumerate() {
                thread::spawn(move || serve(index, stream.unwrap()));
            }
        });
    }

    const SHORT: Duration = Duration::from_millis(100);

    #[test]
    fn a_side_that_accepts_and_says_nothing_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        serving(&path, |_, stream| {
            thread::sleep(Duration::from_secs(600));
            drop(stream);
        });
        let started = std::time::Instant::now();
        let large = serde_json::json!("x".repeat(4 << 20));
        for body in [None, Some(&large)] {
            let mut client = Client::with_patience(&path, SHORT).unwrap();
            let error = client.call(Verb::Put, "vm.boot", body).unwrap_err();
            assert!(matches!(error, ClientError::Silent { .. }), "{error}");
        }
        let error = Client::with_patience(&path, SHORT).unwrap().listen("vm.events", |_| true).unwrap_err();
        assert!(matches!(error, ClientError::Silent { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_side_that_never_accepts_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        // As many as the kernel lets wait (net.core.somaxconn, 4096 by default).
        let mut waiting = Vec::new();
        let error = loop {
            match Client::with_patience(&path, SHORT) {
                Ok(client) if waiting.len() < 10_000 => waiting.push(client),
                other => break other.map(|_| ()),
            }
        };
        assert!(matches!(error, Err(ClientError::Silent { .. })), "{error:?}");
    }

    #[test]
    fn a_side_that_is_busy_and_answers_to_a_ping_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        serving(&path, |index, mut stream| {
            let mut request = [0; 1024];
            let count = stream.read(&mut request).unwrap();
            let is_ping = request[..count].starts_with(b"GET /api/v1/vmm.ping ");
            assert_eq!(is_ping, index > 0);
            if !is_ping {
                thread::sleep(8 * SHORT);
            }
            stream.write_all(b"HTTP/1.1 204 \r\n\r\n").unwrap();
        });
        let reply = Client::with_patience(&path, SHORT).unwrap().call(Verb::Put, "vm.boot", None);
        assert_eq!(reply.unwrap(), None);
    }

    #[test]
    fn a_refusal_carries_its_causes() {
        let error = answered_with(&["HTTP/1.1 405 \r\nContent-Length: 9\r\n\r\n[\"a\",\"b\"]"]).unwrap_err();
        assert!(matches!(&error, ClientError::Refused { status: 405, .. }));
        assert_eq!(error.to_string(), "vm.boot: a: b");
        let error = answered_with(&["HTTP/1.1 400 \r\nContent-Length: 15\r\n\r\n[\"vm.boot: no\"]"]).unwrap_err();
        assert_eq!(error.to_string(), "vm.boot: no", "the name is said once");
        let error = answered_with(&["HTTP/1.1 405 \r\nContent-Length: 16\r\n\r\n[\"vm.boot\",\"no\"]"]).unwrap_err();
        assert_eq!(error.to_string(), "vm.boot: no", "as a cause of its own, too");
        let error = answered_with(&["HTTP/1.1 500 \r\nContent-Length: 0\r\n\r\n"]).unwrap_err();
        assert_eq!(error.to_string(), "vm.boot: no reason is given");
    }

    #[test]
    fn a_reply_that_is_none_is_told_from_one_that_breaks_off() {
        for pieces in [
            &["SSH-2.0-x\r\n"][..],
            &["HTTP/1.1 200 \r\nContent-Length: -1\r\n\r\n"],
            &["HTTP/1.1 200 \r\nContent-Length: 1\r\n\r\n{"],
        ] {
            assert!(matches!(answered_with(pieces), Err(ClientError::NoHttp { .. })), "{pieces:?}");
        }
        for pieces in [&[][..], &["HTTP/1.1 2"], &["HTTP/1.1 200 \r\nContent-Length: 9\r\n\r\n{"]] {
            assert!(matches!(answered_with(pieces), Err(ClientError::Lost { .. })), "{pieces:?}");
        }
        let nowhere = Client::connect(Path::new("/nonexistent/s")).unwrap_err();
        assert!(matches!(nowhere, ClientError::Connect { .. }));
    }
}
