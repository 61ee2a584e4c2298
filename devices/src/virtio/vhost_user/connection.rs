//! The conversation with a process that serves a device over vhost-user: what is agreed on once, and how rings are handed
//! over and taken back. The process is no more trusted than a guest: it may be slow, lie, or die.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use pci::sync::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;
use vhost::vhost_user::message::{
    MAX_ATTACHED_FD_ENTRIES, VHOST_USER_CONFIG_OFFSET, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, FrontendReqHandler, HandlerResult, VhostUserFrontend, VhostUserFrontendReqHandler};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::ending::Ending;
use crate::complaints::chain;
use crate::virtio::ring::{Memory, Ring};
use crate::virtio::worker::Bell;

/// The longest that a conversation may take for which somebody waits.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest that a server may take for its rings, beside what it takes to map memory: nobody waits for that.
const START: Duration = Duration::from_secs(10);
/// The longest for each GiB of memory, which servers touch page by page before they answer.
const START_PER_GIB: Duration = Duration::from_secs(10);
/// How soon a server notices that nobody wants it any more.
const SLICE: Duration = Duration::from_millis(100);
/// Protocol features that are of use here.
const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);
/// Regions of memory that each server takes, all in one message (QEMU: docs/interop/vhost-user.rst, memory regions description).
const REGIONS: usize = 8;

/// What servers ask for on a channel of their own.
struct Requests {
    handler: Mutex<FrontendReqHandler<Asked>>,
    asked: Arc<Asked>,
    /// The handler's socket.
    socket: UnixStream,
}

/// What was asked for.
#[derive(Default)]
struct Asked {
    config: AtomicBool,
}

impl VhostUserFrontendReqHandler for Asked {
    fn handle_config_change(&self) -> HandlerResult<u64> {
        self.config.store(true, Ordering::Relaxed);
        Ok(0)
    }
}

impl Requests {
    fn new(answers: bool) -> io::Result<Self> {
        let asked = Arc::new(Asked::default());
        let mut handler = FrontendReqHandler::new(Arc::clone(&asked)).map_err(io::Error::other)?;
        handler.set_reply_ack_flag(answers);
        // SAFETY: the descriptor is open as long as the handler, which outlives the borrow.
        let socket = unsafe { BorrowedFd::borrow_raw(handler.as_raw_fd()) }.try_clone_to_owned()?;
        Ok(Self { handler: Mutex::new(handler), asked, socket: socket.into() })
    }
}

/// What a server is given of a device that starts.
#[derive(Clone, Copy)]
pub(super) struct Handed<'a> {
    /// Those that the driver took.
    pub(super) features: u64,
    /// The rings that the driver set up.
    pub(super) rings: &'a [Ring],
    /// Where the server tells that it used each of them.
    pub(super) calls: &'a [Arc<Bell>],
    /// How many rings are in use, from the first on.
    pub(super) enabled: &'a AtomicUsize,
}

/// A connection, which outlives resets of the device: many servers end with it.
pub struct Connection {
    path: PathBuf,
    frontend: Mutex<Frontend>,
    /// To see the other side hang up.
    socket: UnixStream,
    ending: Arc<Ending>,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    requests: Option<Requests>,
    /// Most regions of memory that the server says it can map.
    most_regions: usize,
    /// Guest addresses of those that it was told of; changed while the conversation is held.
    told: Mutex<Vec<u64>>,
    /// The server has rings; changed while the conversation is held.
    started: AtomicBool,
}

impl Connection {
    /// Connects to the server at `path` for a device of `queues` queues.
    pub fn open(path: &Path, queues: u16) -> Result<Self, ConnectionError> {
        let socket = connect(path).map_err(|source| ConnectionError::Connect { path: path.into(), source })?;
        let refused = |source| ConnectionError::Refused { path: path.into(), source };
        let clone = socket.try_clone().map_err(ConnectionError::Descriptor)?;
        let ending = Arc::default();
        let _deadline = Deadline::new(&socket, &ending).map_err(ConnectionError::Descriptor)?;
        let mut frontend = Frontend::from_stream(clone, queues.into());
        frontend.set_owner().map_err(refused)?;
        let features = frontend.get_features().map_err(refused)?;
        let mut protocol = VhostUserProtocolFeatures::empty();
        let mut most_queues = u64::from(queues);
        let mut most_regions = REGIONS;
        let mut requests = None;
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0 {
            // What is unknown here is not taken (case G7).
            protocol = frontend.get_protocol_features().map_err(refused)? & PROTOCOL;
            if !protocol.contains(VhostUserProtocolFeatures::CONFIG) {
                // There is nothing else that a server could ask for.
                protocol.remove(VhostUserProtocolFeatures::BACKEND_REQ);
            }
            frontend.set_protocol_features(protocol).map_err(refused)?;
            if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
                frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
            if protocol.contains(VhostUserProtocolFeatures::MQ) {
                most_queues = frontend.get_queue_num().map_err(refused)?;
            }
            if protocol.contains(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS) {
                most_regions = usize::try_from(frontend.get_max_mem_slots().map_err(refused)?).unwrap_or(usize::MAX);
            }
            if protocol.contains(VhostUserProtocolFeatures::BACKEND_REQ) {
                let answers = protocol.contains(VhostUserProtocolFeatures::REPLY_ACK);
                let made = Requests::new(answers).map_err(ConnectionError::Descriptor)?;
                let theirs = lock(&made.handler).get_tx_raw_fd();
                frontend.set_backend_request_fd(&theirs).map_err(refused)?;
                requests = Some(made);
            }
        }
        if u64::from(queues) > most_queues {
            return Err(ConnectionError::Queues { path: path.into(), wanted: queues, most: most_queues });
        }
        Ok(Self {
            path: path.into(),
            frontend: Mutex::new(frontend),
            socket,
            ending,
            features,
            protocol,
            requests,
            most_regions,
            told: Mutex::default(),
            started: AtomicBool::new(false),
        })
    }

    /// Where the server listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device features that the server offers.
    #[must_use]
    pub const fn features(&self) -> u64 {
        self.features
    }

    /// Most regions of memory that the server says it can map.
    #[must_use]
    pub const fn most_regions(&self) -> usize {
        self.most_regions
    }

    /// Most regions of memory with which it can be started. Many servers take more than they have to, and none says so: those
    /// that cannot say how many they map are told of as many as one message holds.
    #[must_use]
    pub fn most_regions_at_start(&self) -> usize {
        if self.has_slots() { self.most_regions } else { MAX_ATTACHED_FD_ENTRIES }
    }

    /// Whether the other side has not hung up.
    pub(super) fn lives(&self) -> bool {
        let mut waited = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut waited, Some(&now)), Ok(0) | Err(rustix::io::Errno::INTR))
    }

    /// Readable when the server asks for something, if it can.
    pub(super) fn requests(&self) -> Option<&UnixStream> {
        self.requests.as_ref().map(|requests| &requests.socket)
    }

    /// Takes in what the server asked for: whether its configuration is another one.
    pub(super) fn config_changed(&self) -> Result<bool, ConnectionError> {
        let Some(requests) = &self.requests else { return Ok(false) };
        let _deadline = Deadline::new(&requests.socket, &self.ending).map_err(ConnectionError::Descriptor)?;
        let taken = lock(&requests.handler).handle_request();
        let error =
            |source| ConnectionError::Refused { path: self.path.clone(), source: vhost::Error::VhostUserProtocol(source) };
        taken.map_err(error)?;
        Ok(requests.asked.config.swap(false, Ordering::Relaxed))
    }

    /// The first `len` bytes of the device's configuration, from the server.
    pub fn config(&self, len: u16) -> Result<Vec<u8>, ConnectionError> {
        let lacks = ConnectionError::Feature { path: self.path.clone(), feature: "CONFIG" };
        if !self.protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            return Err(lacks);
        }
        let _deadline = self.deadline()?;
        let room = vec![0; len.into()];
        let answer = self.frontend().get_config(VHOST_USER_CONFIG_OFFSET, len.into(), VhostUserConfigFlags::empty(), &room);
        answer.map(|(_, bytes)| bytes).map_err(|source| ConnectionError::Refused { path: self.path.clone(), source })
    }

    /// Hands rings over. RAM is looked at once the conversation is this one's alone, so that memory that comes is told either here or
    /// by [`Connection::memory_grew`]. Takes as long as the server needs to map memory, or until it is `unwanted`.
    pub(super) fn start(
        &self,
        memory: &Memory,
        handed: Handed<'_>,
        unwanted: impl Fn() -> bool + Send + 'static,
    ) -> Result<(), ConnectionError> {
        let deadline = Deadline::within(&self.socket, &self.ending, longest(&memory.memory()), unwanted);
        let mut frontend = self.frontend();
        self.ask("handed its rings", || {
            let _deadline = deadline.map_err(ConnectionError::Descriptor)?;
            self.hand_over(&mut frontend, &memory.memory(), handed)
        })
    }

    fn hand_over(&self, frontend: &mut Frontend, memory: &GuestMemoryMmap, handed: Handed<'_>) -> Result<(), ConnectionError> {
        let Handed { features, rings, calls, enabled } = handed;
        let refused = |source| ConnectionError::Refused { path: self.path.clone(), source };
        let kept = self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        frontend.set_features(features & self.features | kept).map_err(refused)?;
        self.tell_of(frontend, memory)?;
        self.started.store(true, Ordering::Relaxed);
        for (ring, call) in rings.iter().zip(calls) {
            let (index, queue) = (ring.index(), ring.queue());
            let address = |at: u64| {
                let host = memory.get_host_address(GuestAddress(at)).map_err(|_| ConnectionError::Ring { at })?;
                Ok(host.expose_provenance() as u64)
            };
            let addresses = VringConfigData {
                queue_max_size: queue.max_size(),
                queue_size: queue.size(),
                flags: 0,
                desc_table_addr: address(queue.desc_table())?,
                used_ring_addr: address(queue.used_ring())?,
                avail_ring_addr: address(queue.avail_ring())?,
                log_addr: None,
            };
            frontend.set_vring_num(index, queue.size()).map_err(refused)?;
            frontend.set_vring_addr(index, &addresses).map_err(refused)?;
            frontend.set_vring_base(index, queue.next_avail()).map_err(refused)?;
            frontend.set_vring_call(index, call.event()).map_err(refused)?;
            frontend.set_vring_kick(index, ring.bell().event()).map_err(refused)?;
        }
        if kept != 0 {
            let enabled = enabled.load(Ordering::Relaxed);
            for ring in rings.iter().filter(|ring| ring.index() < enabled) {
                frontend.set_vring_enable(ring.index(), true).map_err(refused)?;
            }
        }
        Ok(())
    }

    /// Uses the first `enabled` of all `rings`, numbered from 0, and no others. A server without rings learns of it when it
    /// gets them.
    pub(super) fn enable(&self, rings: usize, enabled: &AtomicUsize) -> Result<(), ConnectionError> {
        let refused = |source| ConnectionError::Refused { path: self.path.clone(), source };
        if self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            return Ok(());
        }
        // It may be getting its rings, for which it has longer.
        let mut frontend = self.frontend();
        let _deadline = self.deadline()?;
        if !self.started.load(Ordering::Relaxed) {
            return Ok(());
        }
        let enabled = enabled.load(Ordering::Relaxed);
        (0..rings).try_for_each(|ring| frontend.set_vring_enable(ring, ring < enabled)).map_err(refused)
    }

    /// Tells a server that has rings of memory that came; others learn of it when they get theirs. Memory that was there
    /// stays. Takes as long as the server needs to map it, or until it is `unwanted`: then it is not told, or gone. If it fails,
    /// the conversation has ended.
    pub fn memory_grew(&self, memory: &GuestMemoryMmap, unwanted: impl Fn() -> bool + Clone + Send + 'static) {
        // It may be getting its rings, which takes as long.
        let mut frontend = loop {
            match self.frontend.try_lock() {
                Ok(frontend) => break frontend,
                Err(TryLockError::Poisoned(frontend)) => break frontend.into_inner(),
                Err(TryLockError::WouldBlock) if unwanted() => return,
                Err(TryLockError::WouldBlock) => std::thread::sleep(SLICE),
            }
        };
        if !self.started.load(Ordering::Relaxed) {
            return;
        }
        // What comes of it is told with the end.
        let _ = self.ask("told of memory that came", || {
            let deadline = Deadline::within(&self.socket, &self.ending, longest(memory), unwanted);
            let _deadline = deadline.map_err(ConnectionError::Descriptor)?;
            if self.has_slots() { self.tell_of_more(&mut frontend, memory) } else { self.tell_of(&mut frontend, memory) }
        });
    }

    /// Has the server do something, which ends the conversation if it fails: `what`, as in "while it was told of memory".
    fn ask<T>(&self, what: &'static str, talk: impl FnOnce() -> Result<T, ConnectionError>) -> Result<T, ConnectionError> {
        self.ending.begin(what);
        talk().inspect(|_| self.ending.done()).inspect_err(|error| {
            // That it hung up is seen anyhow, and told as it is.
            if self.lives() {
                self.end(error);
            }
            self.close();
        })
    }

    fn has_slots(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    /// Tells of all memory, in place of what the server was told of before.
    fn tell_of(&self, frontend: &mut Frontend, memory: &GuestMemoryMmap) -> Result<(), ConnectionError> {
        let all = regions(memory)?;
        let most = self.most_regions_at_start();
        let one_message = if self.has_slots() { REGIONS } else { MAX_ATTACHED_FD_ENTRIES };
        if all.len() > most {
            return Err(ConnectionError::Regions { path: self.path.clone(), regions: all.len(), most });
        }
        let first = all.get(..one_message).unwrap_or(&all);
        let refused = |source| ConnectionError::Refused { path: self.path.clone(), source };
        frontend.set_mem_table(first).map_err(refused)?;
        *self.told() = first.iter().map(|region| region.guest_phys_addr).collect();
        self.tell_of_more(frontend, memory)
    }

    /// Tells of each region of which the server was not told.
    fn tell_of_more(&self, frontend: &mut Frontend, memory: &GuestMemoryMmap) -> Result<(), ConnectionError> {
        let (all, mut told) = (regions(memory)?, self.told());
        if all.len() > self.most_regions && all.len() > told.len() {
            return Err(ConnectionError::Regions { path: self.path.clone(), regions: all.len(), most: self.most_regions });
        }
        for region in &all {
            if told.contains(&region.guest_phys_addr) {
                continue;
            }
            let refused = |source| ConnectionError::Refused { path: self.path.clone(), source };
            frontend.add_mem_region(region).map_err(refused)?;
            told.push(region.guest_phys_addr);
        }
        Ok(())
    }

    fn told(&self) -> MutexGuard<'_, Vec<u64>> {
        lock(&self.told)
    }

    /// Takes rings back: when this returns, the server touches them no more, or is gone. Where each goes on in its available
    /// ring. Without an answer the server may still write to guest memory: it gets no more of it.
    pub(super) fn stop(&self, rings: &[Ring]) -> Result<Vec<u16>, ConnectionError> {
        let refused = |source| ConnectionError::Refused { path: self.path.clone(), source };
        let deadline = self.deadline();
        let mut frontend = self.frontend();
        self.started.store(false, Ordering::Relaxed);
        let position = |ring: &Ring| {
            if self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0 {
                frontend.set_vring_enable(ring.index(), false).map_err(refused)?;
            }
            // Of a split ring it is a number of 16 bits.
            let [a, b, ..] = frontend.get_vring_base(ring.index()).map_err(refused)?.to_le_bytes();
            Ok(u16::from_le_bytes([a, b]))
        };
        self.ask("to give its rings back", || {
            let _deadline = deadline?;
            rings.iter().map(position).collect()
        })
    }

    /// Ends the conversation for good, since `error`.
    pub(super) fn end(&self, error: &ConnectionError) {
        self.ending.since(chain(error));
        self.close();
    }

    /// What is to be told of the end, if it has ended and that was not told.
    pub(super) fn take_end(&self) -> Option<String> {
        if self.lives() { None } else { self.ending.take(&self.path.display().to_string()) }
    }

    /// Ends the conversation for good.
    pub(super) fn close(&self) {
        self.started.store(false, Ordering::Relaxed);
        // It may have ended already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn deadline(&self) -> Result<Deadline, ConnectionError> {
        Deadline::new(&self.socket, &self.ending).map_err(ConnectionError::Descriptor)
    }

    fn frontend(&self) -> MutexGuard<'_, Frontend> {
        lock(&self.frontend)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Ends a conversation that takes too long, unless it is dropped before: the other side's silence is then an end of file. A
/// time limit of the socket would not do, since the crate tries again.
struct Deadline(#[expect(dead_code, reason = "its end is what counts")] Sender<()>);

impl Deadline {
    fn new(socket: &UnixStream, ending: &Arc<Ending>) -> io::Result<Self> {
        Self::within(socket, ending, PATIENCE, || false)
    }

    /// After `longest`, and before that once it has become `unwanted` and [`PATIENCE`] has passed.
    fn within(
        socket: &UnixStream,
        ending: &Arc<Ending>,
        longest: Duration,
        unwanted: impl Fn() -> bool + Send + 'static,
    ) -> io::Result<Self> {
        let (socket, ending) = (socket.try_clone()?, Arc::clone(ending));
        let (held, dropped) = channel();
        let begun = Instant::now();
        std::thread::Builder::new().name("vu-deadline".into()).spawn(move || {
            let mut wait = PATIENCE.min(longest);
            while dropped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                if begun.elapsed() >= longest || unwanted() {
                    ending.since(format!("it did not answer within {:.1} s", begun.elapsed().as_secs_f32()));
                    // Fails when it has ended already.
                    let _ = socket.shutdown(Shutdown::Both);
                    return;
                }
                wait = SLICE;
            }
        })?;
        Ok(Self(held))
    }
}

/// Connects without waiting for a server that does not accept.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let socket = UnixStream::from(socket);
    socket.set_nonblocking(false)?;
    Ok(socket)
}

/// The longest that a server may take to map `memory`.
fn longest(memory: &GuestMemoryMmap) -> Duration {
    let size: u64 = memory.iter().map(GuestMemoryRegion::len).sum();
    START + START_PER_GIB * u32::try_from(size >> 30).unwrap_or(u32::MAX)
}

fn regions(memory: &GuestMemoryMmap) -> Result<Vec<VhostUserMemoryRegionInfo>, ConnectionError> {
    let regions = memory.iter().map(VhostUserMemoryRegionInfo::from_guest_region);
    regions.collect::<Result<_, _>>().map_err(|_| ConnectionError::Private)
}

/// A server that cannot be worked with.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// Nobody there.
    #[error("cannot connect to {}: is its server running?", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// It speaks another language, or hung up.
    #[error("the server at {} did not do what a vhost-user server does", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The reason.
        #[source]
        source: vhost::Error,
    },
    /// A feature that is needed.
    #[error("the server at {} lacks the protocol feature {feature}, which this device needs", path.display())]
    Feature {
        /// The socket.
        path: PathBuf,
        /// As the protocol spells it.
        feature: &'static str,
    },
    /// Too few queues.
    #[error("the server at {} has {most} queues; ask for at most so many (asked for: {wanted})", path.display())]
    Queues {
        /// The socket.
        path: PathBuf,
        /// Asked for.
        wanted: u16,
        /// There.
        most: u64,
    },
    /// RAM in too many parts.
    #[error("the server at {} maps at most {most} regions of memory, and there are {regions}", path.display())]
    Regions {
        /// The socket.
        path: PathBuf,
        /// Of RAM.
        regions: usize,
        /// At most.
        most: usize,
    },
    /// RAM that nobody else can map.
    #[error("a device that another process serves needs shared memory: give --memory shared=on")]
    Private,
    /// A ring that moved.
    #[error("there is no memory at {at:#x}, where a ring should be")]
    Ring {
        /// Guest-physical address.
        at: u64,
    },
    /// Descriptors.
    #[error("cannot make a descriptor: the limit of open files is reached (ulimit -n)")]
    Descriptor(#[source] io::Error),
}
