//! Servers for tests: they know the messages of the protocol, and behave well or not.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;

pub(super) const PROTOCOL: u64 = 1 << 30;
/// Protocol features: several queues, answers to every request, configuration.
pub(super) const MQ: u64 = 1;
pub(super) const REPLY_ACK: u64 = 8;
pub(super) const CONFIG: u64 = 1 << 9;
pub(super) const BACKEND_REQ: u64 = 1 << 5;
pub(super) const SLOTS: u64 = 1 << 15;
/// One that nobody knows.
pub(super) const UNKNOWN: u64 = 1 << 40;

/// How a server behaves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Manners {
    pub(super) features: u64,
    pub(super) protocol: u64,
    pub(super) queues: u64,
    /// Request that is not answered: it hangs up.
    pub(super) dies_at: u32,
    /// Answers nothing and keeps the connection.
    pub(super) silent: bool,
    /// Says at the start of each queue that its configuration is another one, which each reading gives.
    pub(super) changes: bool,
    /// Takes so long to map memory.
    pub(super) slow: Duration,
    /// Takes rings of a queue's bell that came before the queue was enabled, and does nothing for them.
    pub(super) forgets: bool,
    /// What is wrong with the answer to a request.
    pub(super) twist: Option<(u32, Twist)>,
    /// Has the bells that it is given make their other end wait, and rings those of queues full.
    pub(super) blocks: bool,
}

/// What is wrong with an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Twist {
    /// Its last byte does not come.
    Short,
    /// It has eight bytes more than it should.
    Long,
    /// It has eight bytes more than it says.
    Trailing,
    /// It says to be of 4 GiB.
    Huge,
    /// It is one to another request.
    Other,
    /// It is marked as a request.
    NoReply,
    /// It is of another version of the protocol.
    Version,
    /// It says that the request failed.
    Refuses,
    /// Descriptors come with it.
    Descriptors,
    /// It comes a second later.
    Late,
}

pub(super) const GOOD: Manners = Manners {
    features: feature::TRANSPORT | PROTOCOL,
    protocol: MQ | REPLY_ACK | CONFIG | UNKNOWN,
    queues: 8,
    dies_at: u32::MAX,
    silent: false,
    changes: false,
    slow: Duration::ZERO,
    forgets: false,
    twist: None,
    blocks: false,
};

/// Where all servers of a folder listen.
pub(super) const SOCKET: &str = "s";

/// A server that knows the messages of the protocol and gives every request back unread.
pub(super) struct Process {
    pub(super) directory: tempfile::TempDir,
    pub(super) requests: Receiver<(u32, u64)>,
    pub(super) thread: JoinHandle<()>,
}

pub(super) fn serve(manners: Manners) -> Process {
    serve_in(tempfile::tempdir().unwrap(), manners)
}

/// The same in place of one that is gone.
pub(super) fn serve_in(directory: tempfile::TempDir, manners: Manners) -> Process {
    let _ = std::fs::remove_file(directory.path().join(SOCKET));
    let listener = UnixListener::bind(directory.path().join(SOCKET)).unwrap();
    let (told, requests) = channel();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        drop(listener);
        let mut calls = Vec::new();
        let mut kicks = Vec::new();
        let (mut acknowledges, mut asking, mut readings) = (false, None::<UnixStream>, 6);
        while let Some((request, flags, body, fd)) = message(&stream) {
            let value = body.get(..8).map_or(0, |body| u64::from_le_bytes(body.try_into().unwrap()));
            let _ = told.send((request, value));
            if request == manners.dies_at {
                return;
            }
            if manners.silent {
                continue;
            }
            if request == 5 {
                std::thread::sleep(manners.slow);
            }
            let number = |value: u64| value.to_le_bytes().to_vec();
            let answer = match request {
                1 => Some(number(manners.features)),
                15 => Some(number(manners.protocol)),
                17 => Some(number(manners.queues)),
                11 => Some(body),
                // As many regions of memory as queues.
                36 => Some(number(manners.queues)),
                24 => {
                    readings += u8::from(manners.changes || readings == 6);
                    Some([&body[..12], &[readings; 60]].concat())
                }
                21 => {
                    asking = fd.map(UnixStream::from);
                    (flags & 8 != 0).then(|| number(0))
                }
                16 => {
                    acknowledges = value & REPLY_ACK != 0;
                    None
                }
                12 => {
                    let kick = fd.unwrap();
                    if manners.blocks {
                        rustix::io::ioctl_fionbio(&kick, false).unwrap();
                        let _ = taken(&kick);
                        rustix::io::write(&kick, &(u64::MAX - 1).to_ne_bytes()).unwrap();
                        rustix::io::ioctl_fionbio(&kick, false).unwrap();
                    }
                    kicks.push((value & 0xFF, kick));
                    (flags & 8 != 0).then(|| number(0))
                }
                13 => {
                    let call = fd.unwrap();
                    rustix::io::ioctl_fionbio(&call, !manners.blocks).unwrap();
                    calls.push((value & 0xFF, call));
                    (flags & 8 != 0).then(|| number(0))
                }
                18 => {
                    if manners.forgets && value >> 32 != 0 {
                        for (_, kick) in &kicks {
                            taken(kick);
                        }
                    }
                    // It is told of used buffers whenever it was rung: here, once at the start.
                    for (_, call) in calls.iter().filter(|(queue, _)| *queue == value & 0xFFFF_FFFF) {
                        rustix::io::write(call, &1_u64.to_ne_bytes()).unwrap();
                    }
                    if let Some(asking) = asking.as_mut().filter(|_| manners.changes) {
                        asking.write_all(&[2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
                    }
                    (flags & 8 != 0).then(|| number(0))
                }
                _ => (acknowledges && flags & 8 != 0).then(|| number(0)),
            };
            let twist = manners.twist.filter(|(at, _)| *at == request).map(|(_, twist)| twist);
            if let Some(answer) = answer
                && !say(&mut stream, request, answer, twist)
            {
                return;
            }
        }
        // What a driver rings reaches the server by itself.
        for (queue, kick) in kicks {
            if let Some(rings) = taken(&kick) {
                let _ = told.send((1000 + u32::try_from(queue).unwrap(), rings));
            }
        }
    });
    Process { directory, requests, thread }
}

/// How often a bell was rung since it was looked at.
fn taken(kick: &OwnedFd) -> Option<u64> {
    let mut rings = [0; 8];
    rustix::io::ioctl_fionbio(kick, true).unwrap();
    rustix::io::read(kick, &mut rings).ok().map(|_| u64::from_ne_bytes(rings))
}

/// The next message: request, flags, body, and the descriptor that came with it.
fn message(mut stream: &UnixStream) -> Option<(u32, u32, Vec<u8>, Option<OwnedFd>)> {
    let mut header = [0; 12];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut header)], &mut control, RecvFlags::WAITALL).ok()?;
    if got.bytes < 12 {
        return None;
    }
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<_>>()),
        _ => None,
    });
    let fd = fds.flatten().next();
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let mut body = vec![0; usize::try_from(word(8)).unwrap()];
    stream.read_exact(&mut body).ok()?;
    Some((word(0), word(4), body, fd))
}

impl Process {
    pub(super) fn connect(&self, queues: u16) -> Result<Arc<Connection>, ConnectionError> {
        Connection::open(&self.directory.path().join(SOCKET), queues).map(Arc::new)
    }

    pub(super) fn meet(&self, spec: &RemoteSpec) -> Result<Arc<Server>, ServerError> {
        Server::open(&self.directory.path().join(SOCKET), spec).map(Arc::new)
    }

    pub(super) fn remote(&self, spec: &RemoteSpec) -> Remote {
        Remote::new("test", spec, self.meet(spec).unwrap()).unwrap()
    }

    /// Requests until the server ended.
    pub(super) fn end(self) -> Vec<(u32, u64)> {
        self.thread.join().unwrap();
        self.requests.try_iter().collect()
    }
}

/// Sends an answer, which may have a fault. False when nobody takes it.
fn say(stream: &mut UnixStream, request: u32, mut answer: Vec<u8>, twist: Option<Twist>) -> bool {
    let (mut number, mut flags, mut len) = (request, 5_u32, u32::try_from(answer.len()).unwrap());
    match twist {
        Some(Twist::Short) => drop(answer.pop()),
        Some(Twist::Long) => {
            answer.extend([0; 8]);
            len += 8;
        }
        Some(Twist::Trailing) => answer.extend([0; 8]),
        Some(Twist::Huge) => len = u32::MAX,
        Some(Twist::Other) => number = 99,
        Some(Twist::NoReply) => flags = 1,
        Some(Twist::Version) => flags = 4,
        Some(Twist::Refuses) => answer.fill(1),
        Some(Twist::Late) => std::thread::sleep(Duration::from_secs(1)),
        Some(Twist::Descriptors) | None => {}
    }
    let message = [&number.to_le_bytes()[..], &flags.to_le_bytes(), &len.to_le_bytes(), &answer].concat();
    if twist != Some(Twist::Descriptors) {
        return stream.write_all(&message).is_ok();
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [stream.as_fd(); 3];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let sent = rustix::net::sendmsg(&*stream, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL);
    sent.is_ok_and(|sent| sent == message.len())
}
