//! Serves a device over vhost-user as another process would: an honest server, or one with faults. It works on the rings by
//! reads and writes of the files that guest memory is in.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Feature bits that matter here.
const VERSION_1: u64 = 1 << 32;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const MQ: u64 = 1;
const REPLY_ACK: u64 = 1 << 3;
const CONFIG: u64 = 1 << 9;
/// Largest request of the protocol that is read here.
const LARGEST: usize = 4096;

/// What a server serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serves {
    /// A disk of so many sectors of 512 bytes.
    Disk(u64),
    /// An interface whose other side sends back what it gets.
    Echo,
    /// A folder, as far as a guest does not look into it.
    Folder,
}

/// How a server behaves.
#[derive(Debug, Clone, Copy, Default)]
pub struct Manners {
    /// Accepts, and never answers.
    pub silent: bool,
    /// Answers nothing once it is told of memory for the second time.
    pub overwhelmed: bool,
    /// Hangs up where it would be silent.
    pub leaves: bool,
    /// Hangs up after so many of the driver's requests, on the first connection.
    pub dies_after: Option<u64>,
    /// Hangs up when it has told its configuration, on the first connection.
    pub dies_early: bool,
}

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct VhostUser {
    path: PathBuf,
    events: Receiver<Event>,
    /// The connection that is served.
    current: Arc<Mutex<Option<UnixStream>>>,
    storage: Arc<Mutex<Vec<u8>>>,
}

/// What happens to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Somebody connected.
    Connected,
    /// A queue is served from now on.
    Started,
    /// It was told of more memory than it can take, and answers nothing from now on.
    Overwhelmed,
    /// The connection ended.
    Ended,
}

impl VhostUser {
    /// A server at `path`.
    #[must_use]
    pub fn start(path: &Path, serves: Serves, manners: Manners) -> Self {
        let listener = UnixListener::bind(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (sender, events) = channel();
        let current: Arc<Mutex<Option<UnixStream>>> = Arc::default();
        let sectors = if let Serves::Disk(sectors) = serves { sectors } else { 0 };
        let storage = Arc::new(Mutex::new(vec![0; usize::try_from(512 * sectors).unwrap_or(0)]));
        let (served, disk) = (Arc::clone(&current), Arc::clone(&storage));
        thread::spawn(move || {
            for (turn, stream) in listener.incoming().enumerate() {
                let Ok(stream) = stream else { return };
                *lock(&served) = stream.try_clone().ok();
                let manners = if turn == 0 { manners } else { Manners { silent: manners.silent, ..Manners::default() } };
                let mut conversation = Conversation::new(stream, serves, manners, Arc::clone(&disk));
                if sender.send(Event::Connected).is_err() {
                    return;
                }
                while let Some(happened) = conversation.step() {
                    if happened.is_some_and(|event| sender.send(event).is_err()) {
                        return;
                    }
                }
                *lock(&served) = None;
                drop(conversation);
                if sender.send(Event::Ended).is_err() {
                    return;
                }
            }
        });
        Self { path: path.to_owned(), events, current, storage }
    }

    /// Waits for the next time that this happens.
    #[track_caller]
    pub fn expect(&self, event: Event) {
        loop {
            match self.events.recv_timeout(crate::process::LIMIT) {
                Ok(found) if found == event => return,
                Ok(_) => {}
                Err(error) => panic!("{event:?} did not happen: {error}"),
            }
        }
    }

    /// Hangs up.
    pub fn hang_up(&self) {
        if let Some(stream) = &*lock(&self.current) {
            // The other side may have been first.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// What a disk holds.
    #[must_use]
    pub fn contents(&self) -> Vec<u8> {
        lock(&self.storage).clone()
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.hang_up();
        // Wakes the thread, whose receiver is gone.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Guest memory in a file.
struct Region {
    guest: u64,
    size: u64,
    /// Where the other process has it.
    theirs: u64,
    offset: u64,
    file: File,
}

#[derive(Default)]
struct Queue {
    size: u64,
    descriptors: u64,
    available: u64,
    used: u64,
    next: u16,
    given: u16,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
}

/// One part of a request in guest memory.
#[derive(Clone, Copy)]
struct Part {
    at: u64,
    len: u64,
    writable: bool,
}

struct Conversation {
    stream: UnixStream,
    serves: Serves,
    manners: Manners,
    storage: Arc<Mutex<Vec<u8>>>,
    regions: Vec<Region>,
    queues: Vec<Queue>,
    served: u64,
}

impl Conversation {
    fn new(stream: UnixStream, serves: Serves, manners: Manners, storage: Arc<Mutex<Vec<u8>>>) -> Self {
        Self { stream, serves, manners, storage, regions: Vec::new(), queues: Vec::new(), served: 0 }
    }

    /// Waits for a message or a ring and acts on it. `None` at the end, else what has happened to the server.
    fn step(&mut self) -> Option<Option<Event>> {
        let kicks: Vec<_> = (0..).zip(&self.queues).filter_map(|(n, queue)| Some((n, queue.kick.as_ref()?))).collect();
        let mut waited = vec![PollFd::new(&self.stream, PollFlags::IN)];
        waited.extend(kicks.iter().map(|(_, kick)| PollFd::new(*kick, PollFlags::IN)));
        poll(&mut waited, None).ok()?;
        let ready: Vec<bool> = waited.iter().map(|entry| !entry.revents().is_empty()).collect();
        let mut rung = Vec::new();
        for ((queue, kick), _) in kicks.iter().zip(ready.iter().skip(1)).filter(|(_, ready)| **ready) {
            let mut count = [0; 8];
            rustix::io::read(kick, &mut count).ok()?;
            rung.push(*queue);
        }
        for queue in rung {
            self.serve(queue)?;
        }
        if ready.first() == Some(&true) { self.obey() } else { Some(None) }
    }

    /// Reads a message and acts on it.
    fn obey(&mut self) -> Option<Option<Event>> {
        let (request, flags, body, mut fds) = self.message()?;
        let overwhelmed = self.manners.overwhelmed && request == 5 && !self.regions.is_empty();
        self.manners.silent |= overwhelmed;
        if self.manners.silent {
            return (!self.manners.leaves).then_some(overwhelmed.then_some(Event::Overwhelmed));
        }
        let number = |at: usize| Some(u64::from_le_bytes(body.get(at..at + 8)?.try_into().ok()?));
        let (index, state) = (number(0).map(|value| value & 0xFF), number(0).map(|value| value >> 32));
        let mut happened = None;
        let answer = match request {
            1 => Some((VERSION_1 | PROTOCOL_FEATURES).to_le_bytes().to_vec()),
            15 => Some((MQ | REPLY_ACK | CONFIG).to_le_bytes().to_vec()),
            17 => Some(8_u64.to_le_bytes().to_vec()),
            24 => {
                let mut config = lock(&self.storage).len().wrapping_div(512).to_le_bytes().to_vec();
                config.resize(body.len().checked_sub(12)?, 0);
                let answer = [body.get(..12)?, &config].concat();
                if self.manners.dies_early {
                    self.reply(request, &answer)?;
                    return None;
                }
                Some(answer)
            }
            5 => {
                let entry = |n: usize| 8 + 32 * n;
                let regions = fds.drain(..).enumerate().map(|(n, file)| {
                    let field = |at: usize| number(entry(n) + at);
                    Some(Region { guest: field(0)?, size: field(8)?, theirs: field(16)?, offset: field(24)?, file: file.into() })
                });
                self.regions = regions.collect::<Option<_>>()?;
                None
            }
            8 => {
                self.queue(index?).size = state?;
                None
            }
            9 => {
                let (descriptors, used, available) =
                    (self.of_theirs(number(8)?)?, self.of_theirs(number(16)?)?, self.of_theirs(number(24)?)?);
                let queue = self.queue(index?);
                (queue.descriptors, queue.used, queue.available) = (descriptors, used, available);
                None
            }
            10 => {
                let base = u16::try_from(state?).ok()?;
                let queue = self.queue(index?);
                (queue.next, queue.given) = (base, base);
                None
            }
            11 => {
                let queue = self.queue(index?);
                queue.kick = None;
                let mut answer = body.get(..4)?.to_vec();
                answer.extend(u32::from(queue.next).to_le_bytes());
                Some(answer)
            }
            12 => {
                self.queue(index?).kick = fds.pop();
                happened = Some(Event::Started);
                None
            }
            13 => {
                self.queue(index?).call = fds.pop();
                None
            }
            _ => None,
        };
        // Bit 3 asks for an answer where there is none by itself.
        match answer {
            Some(answer) => self.reply(request, &answer)?,
            None if flags & 8 != 0 => self.reply(request, &[0; 8])?,
            None => {}
        }
        Some(happened)
    }

    fn reply(&mut self, request: u32, answer: &[u8]) -> Option<()> {
        let len = u32::try_from(answer.len()).ok()?;
        let message = [&request.to_le_bytes()[..], &5_u32.to_le_bytes(), &len.to_le_bytes(), answer].concat();
        self.stream.write_all(&message).ok()
    }

    fn message(&mut self) -> Option<(u32, u32, Vec<u8>, Vec<OwnedFd>)> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(&self.stream, &mut [IoSliceMut::new(&mut header)], &mut control, RecvFlags::WAITALL).ok()?;
        if got.bytes < header.len() {
            return None;
        }
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds = fds.flatten().collect();
        let word = |at: usize| Some(u32::from_le_bytes(header.get(at..at + 4)?.try_into().ok()?));
        let mut body = vec![0; usize::try_from(word(8)?).ok().filter(|len| *len <= LARGEST)?];
        self.stream.read_exact(&mut body).ok()?;
        Some((word(0)?, word(4)?, body, fds))
    }

    fn queue(&mut self, index: u64) -> &mut Queue {
        let index = usize::try_from(index).unwrap_or(0);
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, Queue::default);
        }
        match self.queues.get_mut(index) {
            Some(queue) => queue,
            None => unreachable!("there are so many"),
        }
    }

    /// The guest's address of one of the other process.
    fn of_theirs(&self, at: u64) -> Option<u64> {
        let region = self.regions.iter().find(|region| at.checked_sub(region.theirs).is_some_and(|into| into < region.size))?;
        Some(at - region.theirs + region.guest)
    }

    fn place(&self, at: u64) -> Option<(&File, u64)> {
        let region = self.regions.iter().find(|region| at.checked_sub(region.guest).is_some_and(|into| into < region.size))?;
        Some((&region.file, at - region.guest + region.offset))
    }

    fn read<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let (file, offset) = self.place(at)?;
        file.read_exact_at(&mut bytes, offset).ok().map(|()| bytes)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Option<()> {
        let (file, offset) = self.place(at)?;
        file.write_all_at(bytes, offset).ok()
    }

    /// Serves what is in a queue.
    fn serve(&mut self, queue: usize) -> Option<()> {
        // An interface receives when somebody sends.
        if self.serves == Serves::Echo && queue.is_multiple_of(2) {
            return Some(());
        }
        while let Some((head, parts)) = self.pop(queue) {
            if self.manners.dies_after.is_some_and(|most| self.served >= most) {
                return None;
            }
            self.served += 1;
            let written = match self.serves {
                Serves::Disk(_) => self.disk(&parts)?,
                Serves::Echo => self.echo(queue - 1, &parts)?,
                Serves::Folder => 0,
            };
            self.push(queue, head, written)?;
        }
        Some(())
    }

    /// The next request of a queue.
    fn pop(&mut self, queue: usize) -> Option<(u16, Vec<Part>)> {
        let Queue { size, descriptors, available, next, .. } = *self.queues.get(queue)?;
        if u16::from_le_bytes(self.read(available + 2)?) == next {
            return None;
        }
        let head = u16::from_le_bytes(self.read(available + 4 + 2 * (u64::from(next) % size))?);
        let (mut parts, mut at) = (Vec::new(), head);
        for _ in 0..size {
            let descriptor: [u8; 16] = self.read(descriptors + 16 * u64::from(at))?;
            let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = descriptor;
            let flags = u16::from_le_bytes([m, n]);
            let (start, len) = (u64::from_le_bytes([a, b, c, d, e, f, g, h]), u32::from_le_bytes([i, j, k, l]).into());
            parts.push(Part { at: start, len, writable: flags & 2 != 0 });
            if flags & 1 == 0 {
                break;
            }
            at = u16::from_le_bytes([o, p]);
        }
        self.queues.get_mut(queue)?.next = next.wrapping_add(1);
        Some((head, parts))
    }

    /// Gives a request back and interrupts.
    fn push(&mut self, queue: usize, head: u16, written: u32) -> Option<()> {
        let Queue { size, used, given, .. } = *self.queues.get(queue)?;
        let entry = [u32::from(head).to_le_bytes(), written.to_le_bytes()].concat();
        self.write(used + 4 + 8 * (u64::from(given) % size), &entry)?;
        self.write(used + 2, &given.wrapping_add(1).to_le_bytes())?;
        let queue = self.queues.get_mut(queue)?;
        queue.given = given.wrapping_add(1);
        if let Some(call) = &queue.call {
            rustix::io::write(call, &1_u64.to_ne_bytes()).ok()?;
        }
        Some(())
    }

    fn gather(&self, parts: &[Part]) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for part in parts.iter().filter(|part| !part.writable) {
            let start = bytes.len();
            bytes.resize(start + usize::try_from(part.len).ok()?, 0);
            let (file, offset) = self.place(part.at)?;
            file.read_exact_at(bytes.get_mut(start..)?, offset).ok()?;
        }
        Some(bytes)
    }

    fn scatter(&self, parts: &[Part], mut bytes: &[u8]) -> Option<()> {
        for part in parts.iter().filter(|part| part.writable) {
            let (here, rest) = bytes.split_at(bytes.len().min(usize::try_from(part.len).ok()?));
            self.write(part.at, here)?;
            bytes = rest;
        }
        Some(())
    }

    fn disk(&self, parts: &[Part]) -> Option<u32> {
        let request = self.gather(parts)?;
        let kind = u32::from_le_bytes(request.get(..4)?.try_into().ok()?);
        let start = usize::try_from(512 * u64::from_le_bytes(request.get(8..16)?.try_into().ok()?)).ok()?;
        let room: u64 = parts.iter().filter(|part| part.writable).map(|part| part.len).sum();
        let wanted = usize::try_from(room.checked_sub(1)?).ok()?;
        let mut storage = lock(&self.storage);
        let data = request.get(16..)?;
        let (mut answer, status) = match kind {
            0 => (storage.get(start..start + wanted)?.to_vec(), 0),
            1 => {
                storage.get_mut(start..start + data.len())?.copy_from_slice(data);
                (Vec::new(), 0)
            }
            4 => (Vec::new(), 0),
            _ => (vec![0; wanted], 2),
        };
        answer.push(status);
        drop(storage);
        self.scatter(parts, &answer)?;
        u32::try_from(answer.len()).ok()
    }

    /// What the guest sends it receives; a packet for which there is no room is lost.
    fn echo(&mut self, receive: usize, parts: &[Part]) -> Option<u32> {
        let mut packet = self.gather(parts)?;
        // The number of buffers, behind the rest of the header.
        packet.get_mut(10..12)?.copy_from_slice(&1_u16.to_le_bytes());
        if let Some((head, room)) = self.pop(receive) {
            self.scatter(&room, &packet)?;
            self.push(receive, head, u32::try_from(packet.len()).ok()?)?;
        }
        Some(0)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
