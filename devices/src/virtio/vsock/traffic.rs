//! All streams of a guest: which packet belongs to which, who comes next, who may enter. Runs on the device's thread.
//!
//! Everything is bounded: streams, clients that have not said what they want, answers to packets that belong to no stream.
//! While the guest takes no answers, nothing more is read from it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use vm_memory::GuestMemoryMmap;

use super::greeting::{self, Greeting};
use super::packet::{HEADER, HOST_CID, Header, MAX_DATA, Ports, STREAM, op};
use super::stream::{Fate, Filled, SocketEvent, Stream};
use crate::virtio::buffers::{Buffers, cut, scatter, take, total};
use crate::virtio::ring::{Chain, Corrupt, Ring, Served};
use crate::virtio::worker::Stop;

/// Most streams at a time.
pub(super) const MAX_STREAMS: usize = 1024;
/// Most clients that have not named a port. The oldest gives way to a new one.
pub(super) const MAX_GREETINGS: usize = 256;
/// Answers that wait for room; beyond, the guest is not listened to.
const MAX_RESETS: usize = 64;
/// Packets in one direction before the other has its turn.
const TURN: usize = 256;
/// First port of the host's side for clients of the host.
const FIRST_PORT: u32 = 1 << 30;

const RECEIVE_BELL: u64 = 0;
const TRANSMIT_BELL: u64 = 1;
const EVENT_BELL: u64 = 2;
const LISTENER: u64 = 3;
const FIRST_TOKEN: u64 = 16;
/// The event that says that all connections have ended.
const TRANSPORT_RESET: u32 = 0;

/// What the device is connected to.
pub(super) struct Host {
    pub(super) cid: u64,
    /// The guest's connections go to this path, an underscore and the port.
    pub(super) path: PathBuf,
    /// Where clients of the host come.
    pub(super) listener: UnixListener,
}

/// The device at work.
pub(super) struct Traffic {
    receive: Ring,
    transmit: Ring,
    /// Where the driver hears that its connections are lost.
    event: Option<Ring>,
    /// It has yet to hear that.
    lost: bool,
    streams: Streams,
    /// The guest's queue may hold something.
    unread: bool,
}

struct Streams {
    host: Host,
    epoll: OwnedFd,
    by_token: BTreeMap<u64, Stream>,
    by_ports: HashMap<Ports, u64>,
    /// By age.
    greetings: BTreeMap<u64, UnixStream>,
    /// Streams that have something for the guest, each once.
    ready: VecDeque<u64>,
    resets: VecDeque<Header>,
    next_token: u64,
    next_port: u32,
    /// There were no descriptors for another client.
    listener_rests: bool,
    turn: usize,
}

impl Traffic {
    /// For the queues that the driver set up.
    pub(super) fn new(host: Host, receive: Ring, transmit: Ring, event: Option<Ring>, lost: bool) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let add = |fd: &dyn AsFd, token| epoll::add(&epoll, fd.as_fd(), epoll::EventData::new_u64(token), epoll::EventFlags::IN);
        add(receive.bell().as_ref(), RECEIVE_BELL)?;
        add(transmit.bell().as_ref(), TRANSMIT_BELL)?;
        if let Some(event) = &event {
            add(event.bell().as_ref(), EVENT_BELL)?;
        }
        add(&host.listener, LISTENER)?;
        let streams = Streams {
            host,
            epoll,
            by_token: BTreeMap::new(),
            by_ports: HashMap::new(),
            greetings: BTreeMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            next_token: FIRST_TOKEN,
            next_port: FIRST_PORT,
            listener_rests: false,
            turn: 0,
        };
        Ok(Self { receive, transmit, event, lost, streams, unread: true })
    }

    /// Works until `stop` says so or a ring is corrupt.
    pub(super) fn run(mut self, stop: &Stop) {
        if self.work(stop).is_err() {
            self.receive.give_up();
        }
    }

    fn work(&mut self, stop: &Stop) -> Result<(), Corrupt> {
        let mut events = Vec::with_capacity(64);
        let mut more = true;
        while !stop.ends() {
            let soon = more || (self.unread && self.streams.resets.len() < MAX_RESETS);
            let limit = match (soon, self.streams.listener_rests) {
                (true, _) => Some(Timespec { tv_sec: 0, tv_nsec: 0 }),
                (false, true) => Some(Timespec { tv_sec: 1, tv_nsec: 0 }),
                (false, false) => None,
            };
            events.clear();
            match epoll::wait(&self.streams.epoll, rustix::buffer::spare_capacity(&mut events), limit.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return Err(Corrupt),
            }
            if stop.ends() {
                break;
            }
            self.streams.wake_listener();
            for event in &events {
                match event.data.u64() {
                    RECEIVE_BELL => self.receive.bell().take(),
                    TRANSMIT_BELL => {
                        self.transmit.bell().take();
                        self.unread = true;
                    }
                    EVENT_BELL => self.event.iter().for_each(|ring| ring.bell().take()),
                    LISTENER => self.streams.accept(),
                    token => self.streams.event(token, event.flags),
                }
            }
            self.tell_lost()?;
            if self.unread {
                self.streams.turn = 0;
                let streams = &mut self.streams;
                self.transmit.drain(stop, |chain, memory| streams.take_packet(chain, memory))?;
                self.unread = self.streams.turn >= TURN || self.streams.resets.len() >= MAX_RESETS;
            }
            more = self.feed_guest(stop)?;
        }
        Ok(())
    }

    /// Tells the driver that its connections have ended (virtio 1.2 5.10.6.7, `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`), as soon as
    /// it has a buffer for it.
    fn tell_lost(&mut self) -> Result<(), Corrupt> {
        let Some(ring) = self.event.as_mut().filter(|_| self.lost) else { return Ok(()) };
        let memory = ring.memory();
        let chain = loop {
            match ring.pop(&memory)? {
                Some(chain) => break chain,
                // One that came meanwhile may not have rung.
                None if ring.listen(&memory)? => {}
                None => return Ok(()),
            }
        };
        let head = chain.head_index();
        let buffers = Buffers::of(chain, &memory).filter(|buffers| buffers.whole && buffers.readable.is_empty());
        let event = buffers.and_then(|buffers| scatter(&TRANSPORT_RESET.to_le_bytes(), &buffers.writable)).ok_or(Corrupt)?;
        ring.push(&memory, head, event)?;
        ring.tell(&memory)?;
        self.lost = false;
        Ok(())
    }

    /// Fills the guest's buffers. Whether there is more to do although there are buffers.
    fn feed_guest(&mut self, stop: &Stop) -> Result<bool, Corrupt> {
        if !self.streams.has_output() {
            return Ok(false);
        }
        let memory = self.receive.memory();
        let (mut filled, mut more) = (0, true);
        self.receive.hush(&memory)?;
        while filled < TURN && !stop.ends() && self.streams.has_output() {
            let Some(chain) = self.receive.pop(&memory)? else {
                if self.receive.listen(&memory)? {
                    self.receive.hush(&memory)?;
                    continue;
                }
                more = false;
                break;
            };
            let head = chain.head_index();
            let buffers = Buffers::of(chain, &memory).filter(|buffers| buffers.whole && buffers.readable.is_empty());
            let buffers = buffers.ok_or(Corrupt)?;
            match self.streams.fill(&buffers) {
                Filled::Packet(len) => {
                    self.receive.push(&memory, head, len)?;
                    filled += 1;
                }
                Filled::Nothing => self.receive.put_back(),
                Filled::Malformed => return Err(Corrupt),
            }
        }
        if filled > 0 {
            self.receive.tell(&memory)?;
        }
        Ok(more && self.streams.has_output())
    }
}

impl Streams {
    fn has_output(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Puts one packet of the next stream into `buffers`.
    fn fill(&mut self, buffers: &Buffers<'_>) -> Filled {
        if let Some(header) = self.resets.pop_front() {
            return match scatter(&header.to_bytes(), &buffers.writable) {
                Some(len) => Filled::Packet(len),
                None => Filled::Malformed,
            };
        }
        let Some(token) = self.ready.pop_front() else { return Filled::Nothing };
        let Some(stream) = self.by_token.get_mut(&token) else { return Filled::Nothing };
        stream.queued = false;
        let (filled, fate) = stream.fill(self.host.cid, &buffers.writable);
        self.settle(token, fate);
        filled
    }

    /// A packet from the guest.
    fn take_packet(&mut self, chain: Chain<'_>, memory: &GuestMemoryMmap) -> Served {
        if self.turn >= TURN || self.resets.len() >= MAX_RESETS {
            return Served::Later;
        }
        self.turn += 1;
        let Some(Buffers { mut readable, writable, whole: true }) = Buffers::of(chain, memory) else { return Served::Malformed };
        let Some(header) = take::<HEADER>(&mut readable).filter(|_| writable.is_empty()) else { return Served::Malformed };
        let header = Header::from_bytes(&header);
        let len = total(&readable).unwrap_or(usize::MAX);
        if header.source_cid != self.host.cid || header.target_cid != HOST_CID {
            // Another guest's, or for nobody: lost, as a packet to an address that does not exist.
            return Served::Used(0);
        }
        let wanted = usize::try_from(header.len).unwrap_or(usize::MAX);
        if header.len > MAX_DATA || wanted > len {
            return Served::Malformed;
        }
        cut(&mut readable, wanted);
        let ports = header.ports();
        match self.by_ports.get(&ports).copied() {
            Some(token) if header.kind == STREAM && header.op != op::REQUEST => {
                let Some(stream) = self.by_token.get_mut(&token) else { return Served::Used(0) };
                let fate = stream.packet(&header, &readable);
                if stream.orphan {
                    self.by_ports.remove(&ports);
                }
                self.settle(token, fate);
            }
            Some(token) => self.settle(token, Fate::Reset),
            // What crossed the end of the stream on its way.
            None if matches!(header.op, op::RESET | op::CREDIT_UPDATE) => {}
            None if header.kind == STREAM && header.op == op::REQUEST => {
                if self.connect(&header).is_none() {
                    self.reset(ports);
                }
            }
            // Of a type that is not offered, too: a reset is the answer to it (virtio 1.2 5.10.6).
            None => self.reset_as(ports, header.kind),
        }
        Served::Used(0)
    }

    /// Connects to the process that listens for the guest's request, if there is one.
    fn connect(&mut self, request: &Header) -> Option<()> {
        if self.by_token.len() >= MAX_STREAMS {
            return None;
        }
        let address = SocketAddrUnix::new(port_path(&self.host.path, request.target_port)).ok()?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
        // A listener whose queue is full is none: waiting for it would hold up all other streams.
        connect(&socket, &address).ok()?;
        self.enter(Stream::accepted(socket.into(), request))
    }

    fn enter(&mut self, stream: Stream) -> Option<()> {
        let token = self.token();
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(token), flags).ok()?;
        self.by_ports.insert(stream.ports, token);
        self.by_token.insert(token, stream);
        self.settle(token, Fate::Stays);
        Some(())
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    /// Takes clients of the host.
    fn accept(&mut self) {
        for _ in 0..TURN {
            match self.host.listener.accept() {
                Ok((client, _)) => self.greet(client),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) if self.greetings.pop_first().is_none() => {
                        // Woken when a stream ends, or after a while.
                        self.listener_rests = epoll::delete(&self.epoll, &self.host.listener).is_ok();
                        return;
                    }
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::INTR | Errno::CONNABORTED) => {}
                    _ => return,
                },
            }
        }
    }

    fn wake_listener(&mut self) {
        if self.listener_rests {
            let data = epoll::EventData::new_u64(LISTENER);
            self.listener_rests = epoll::add(&self.epoll, &self.host.listener, data, epoll::EventFlags::IN).is_err();
        }
    }

    fn greet(&mut self, client: UnixStream) {
        while self.greetings.len() >= MAX_GREETINGS {
            // It may have said everything meanwhile.
            let Some((_, oldest)) = self.greetings.pop_first() else { break };
            if let Greeting::Port(port) = greeting::read(&oldest) {
                self.dial(oldest, port);
            }
        }
        let token = self.token();
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let watched = epoll::add(&self.epoll, &client, epoll::EventData::new_u64(token), flags);
        if client.set_nonblocking(true).is_ok() && watched.is_ok() {
            self.greetings.insert(token, client);
        }
    }

    /// Something about a client or a stream. Tokens of those that are gone mean nothing.
    fn event(&mut self, token: u64, flags: epoll::EventFlags) {
        if let Some(client) = self.greetings.get(&token) {
            match greeting::read(client) {
                Greeting::Unfinished if !flags.intersects(epoll::EventFlags::RDHUP | epoll::EventFlags::HUP) => {}
                Greeting::Port(port) => {
                    if let Some(client) = self.greetings.remove(&token) {
                        self.dial(client, port);
                    }
                }
                _ => drop(self.greetings.remove(&token)),
            }
        } else if let Some(stream) = self.by_token.get_mut(&token) {
            let fate = stream.event(SocketEvent {
                readable: flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::HUP),
                writable: flags.contains(epoll::EventFlags::OUT),
                hung_up: flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR),
            });
            self.settle(token, fate);
        }
    }

    /// A client wants a port of the guest.
    fn dial(&mut self, client: UnixStream, guest: u32) {
        if self.by_token.len() >= MAX_STREAMS || epoll::delete(&self.epoll, &client).is_err() {
            return;
        }
        let mut ports = Ports { host: self.next_port, guest };
        while self.by_ports.contains_key(&ports) {
            ports.host = next_port(ports.host);
        }
        self.next_port = next_port(ports.host);
        // Without a place in the epoll set the client is turned away.
        let _ = self.enter(Stream::dialing(client, ports));
    }

    /// Draws the consequences of what happened to a stream.
    fn settle(&mut self, token: u64, fate: Fate) {
        let Some(stream) = self.by_token.get_mut(&token) else { return };
        match fate {
            Fate::Stays => {
                if stream.has_output() && !std::mem::replace(&mut stream.queued, true) {
                    self.ready.push_back(token);
                }
            }
            Fate::Reset | Fate::Gone => {
                let (ports, orphan, queued) = (stream.ports, stream.orphan, stream.queued);
                self.by_token.remove(&token);
                if queued {
                    self.ready.retain(|other| *other != token);
                }
                if !orphan {
                    self.by_ports.remove(&ports);
                    if fate == Fate::Reset {
                        self.reset(ports);
                    }
                }
            }
        }
    }

    fn reset(&mut self, ports: Ports) {
        self.reset_as(ports, STREAM);
    }

    fn reset_as(&mut self, ports: Ports, kind: u16) {
        self.resets.push_back(Header { kind, ..Header::to_guest(self.host.cid, ports, op::RESET) });
    }
}

fn next_port(port: u32) -> u32 {
    port.checked_add(1).unwrap_or(FIRST_PORT)
}

/// The path of the process that takes the guest's connections to `port`.
fn port_path(path: &Path, port: u32) -> OsString {
    let mut name = path.as_os_str().to_owned();
    name.push(format!("_{port}"));
    name
}
