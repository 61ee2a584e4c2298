//! Sockets between guest and host (virtio 1.2 5.10): the guest's side is AF_VSOCK, the host's side are unix sockets.
//!
//! | question | module |
//! |---|---|
//! | what is in a packet? | `packet` |
//! | which port does a client of the host want? | `greeting` |
//! | what happens to one stream? | `stream` |
//! | who is connected to whom, and whose turn is it? | `traffic` |
//!
//! A client of the host connects to the device's socket, writes `CONNECT <port>` and a newline, and reads `OK <port>` when
//! the guest has accepted. It is turned away when nobody in the guest listens; while the guest has no driver it waits. A
//! connection of the guest to port N goes to the socket of the same path with `_N` behind.

mod greeting;
mod packet;
mod stream;
#[cfg(test)]
mod tests;
mod traffic;

use std::borrow::Cow;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use pci::state::{Reader, StateError, Writer};

use super::function::{Device, Start};
use super::kind::Kind;
use super::worker::Worker;
use traffic::{Host, Traffic};

const QUEUE_SIZES: [u16; 3] = [256; 3];
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;
/// Streams are offered (virtio 1.2 5.10.3).
const F_STREAM: u64 = 1;

/// A socket device to make.
#[derive(Debug)]
pub struct VsockSpec {
    /// The guest's context id, 3 or more.
    pub cid: u32,
    /// Path of the socket, to which the paths for the guest's connections are related.
    pub path: PathBuf,
    /// The socket, listening. It is the caller's and outlives the device.
    pub listener: UnixListener,
}

/// What is particular to a socket device.
pub struct Vsock {
    thread_name: String,
    spec: VsockSpec,
    config: [u8; 8],
    /// The driver has yet to hear that all its connections have ended.
    lost: bool,
}

impl Vsock {
    /// The device `name`.
    pub fn new(name: &str, spec: VsockSpec) -> io::Result<Self> {
        spec.listener.set_nonblocking(true)?;
        Ok(Self { thread_name: format!("vsock-{name}"), config: u64::from(spec.cid).to_le_bytes(), spec, lost: false })
    }
}

impl Device for Vsock {
    fn kind(&self) -> Kind {
        Kind::Socket
    }

    fn features(&self) -> u64 {
        F_STREAM
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.config)
    }

    /// Streams are not kept: both sides find them ended.
    fn save(&self, _: &mut Writer) -> Result<(), StateError> {
        Ok(())
    }

    fn restore(&mut self, _: &mut Reader<'_>) -> Result<(), StateError> {
        self.lost = true;
        Ok(())
    }

    fn reset(&mut self) {
        self.lost = false;
    }

    fn start(&mut self, mut start: Start) -> io::Result<Vec<Worker>> {
        let (Some(receive), Some(transmit)) = (start.ring(RECEIVE), start.ring(TRANSMIT)) else {
            return Err(io::Error::other("the driver set up only a part of the queues"));
        };
        let bells = vec![receive.bell().clone()];
        let listener = self.spec.listener.try_clone()?;
        let host = Host { cid: self.spec.cid.into(), path: self.spec.path.clone(), listener };
        let traffic = Traffic::new(host, receive, transmit, start.ring(EVENT), std::mem::take(&mut self.lost))?;
        Ok(vec![Worker::start(self.thread_name.clone(), &start.crew, bells, move |stop| traffic.run(stop))?])
    }
}
