//! Reads a connection's bytes, and with them the descriptors that a client passes (`SCM_RIGHTS`, unix(7)) and the time that
//! a request takes.
//!
//! A client may pass descriptors with any byte of a request: with all of it in one message, or with the first of several.
//! They are kept until the request is complete; what nobody takes is closed. Of requests that follow each other without a wait, each
//! has its own. A request that has begun must be complete within a limit. Between requests a connection may be silent for ever. What
//! hyper says by itself of a head that it cannot read is not sent.
//!
//! A client may end its side (shutdown(2), `SHUT_WR`) when its request is complete: it still gets the reply. One that is gone
//! altogether is not waited for.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::{Duration, Instant, Sleep, sleep_until};

use super::framing::{Framing, HeadError};
use super::passed::{Passed, UnderWay, close};

/// Descriptors that a request may bring.
pub(super) const MAX_DESCRIPTORS: usize = 64;

/// Bytes that are read at a time.
const CHUNK: usize = 8192;

/// What hyper reads in place of a head that is refused, and cannot take for one: no method begins so (RFC 9110 5.6.2).
const NO_HEAD: u8 = 0;

/// How long it may take until what a client said last is seen to be a request, after it has ended its side.
const GRACE: Duration = Duration::from_millis(20);

/// How soon it is noticed that a client is gone that ended its side before.
const LOOK: Duration = Duration::from_millis(250);

/// What a connection's transport and the handler of its requests share.
#[derive(Debug)]
pub(super) struct Incoming {
    /// What came with each request that has begun and is not complete; the first one is read first.
    brought: RefCell<VecDeque<Brought>>,
    phase: Cell<Phase>,
    /// Since when.
    since: Cell<Instant>,
    limit: Duration,
    under_way: UnderWay,
    spoke: Cell<bool>,
    unread: Cell<bool>,
    refused: Cell<Option<HeadError>>,
    lingers: Cell<bool>,
}

/// Descriptors of one request.
#[derive(Debug, Default)]
struct Brought {
    descriptors: Passed,
    too_many: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nothing of a request has come.
    Between,
    /// Some of it has come, and all of it must by then.
    Unfinished(Instant),
    /// All of it has come; the reply is owed.
    Complete,
}

impl Incoming {
    /// A connection whose requests may take `limit` each, of a server with descriptors `under_way`.
    pub(super) fn new(limit: Duration, under_way: UnderWay) -> Rc<Self> {
        Rc::new(Self {
            brought: RefCell::default(),
            phase: Cell::new(Phase::Between),
            since: Cell::new(Instant::now()),
            limit,
            under_way,
            spoke: Cell::new(false),
            unread: Cell::new(false),
            refused: Cell::new(None),
            lingers: Cell::new(false),
        })
    }

    /// Whether the client has sent anything since it connected.
    pub(super) fn spoke(&self) -> bool {
        self.spoke.get()
    }

    /// Whether the head of a request could not be read, and nothing was sent for it.
    pub(super) fn is_unread(&self) -> bool {
        self.unread.get()
    }

    /// Why, unless hyper says it.
    pub(super) fn refused(&self) -> Option<HeadError> {
        self.refused.get()
    }

    /// A refusal ends the connection while its client may still be sending.
    pub(super) fn linger(&self) {
        self.lingers.set(true);
    }

    /// Whether what a client still sends is to be read.
    pub(super) fn lingers(&self) -> bool {
        self.lingers.get()
    }

    /// Some bytes of a request are there.
    pub(super) fn begun(&self) {
        self.spoke.set(true);
        if self.phase.get() == Phase::Between {
            self.go_to(Phase::Unfinished(Instant::now() + self.limit));
        }
    }

    /// All of it is there. Returns its descriptors, or `None` if there were more than [`MAX_DESCRIPTORS`], or too many under way.
    pub(super) fn complete(&self) -> Option<Passed> {
        self.go_to(Phase::Complete);
        let brought = self.brought.borrow_mut().pop_front().unwrap_or_default();
        (!brought.too_many).then_some(brought.descriptors)
    }

    /// It is answered.
    fn answered(&self) {
        self.go_to(Phase::Between);
    }

    fn go_to(&self, phase: Phase) {
        self.phase.set(phase);
        self.since.set(Instant::now());
    }

    /// Until when at least a client can expect something that said at `ended` that it says nothing more.
    fn owed_until(&self, ended: Instant) -> Instant {
        match self.phase.get() {
            Phase::Complete => Instant::now() + LOOK,
            // A request that came before may not have been looked at.
            Phase::Between | Phase::Unfinished(_) => ended.max(self.since.get()) + GRACE,
        }
    }

    /// So many requests have begun, and `brought` came with the last byte.
    fn note(&self, begun: usize, brought: Brought) {
        let mut requests = self.brought.borrow_mut();
        requests.extend((0..begun).map(|_| Brought::none(&self.under_way)));
        // What comes between two requests is for none.
        if let Some(last) = requests.back_mut() {
            last.too_many |= brought.too_many;
            last.keep(brought.descriptors.take());
        }
    }
}

impl Brought {
    fn none(under_way: &UnderWay) -> Self {
        Self { descriptors: Passed::new(under_way), too_many: false }
    }

    fn keep(&mut self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        let mut more = Vec::new();
        for descriptor in descriptors {
            let room = self.descriptors.len() < MAX_DESCRIPTORS;
            let kept = if room { self.descriptors.push(descriptor) } else { Err(descriptor) };
            more.extend(kept.err());
        }
        self.too_many |= !more.is_empty();
        close(more);
    }
}

/// A reply that a client has not got yet. Dropped when all of it was taken to be sent.
#[derive(Debug)]
pub(super) struct Owed(Rc<Incoming>);

impl Owed {
    /// To the client of this connection.
    pub(super) fn to(incoming: Rc<Incoming>) -> Self {
        Self(incoming)
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.0.answered();
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Transport {
    stream: Rc<UnixStream>,
    incoming: Rc<Incoming>,
    framing: Framing,
    /// What has come and may be read.
    readable: Vec<u8>,
    timer: Option<Pin<Box<Sleep>>>,
    /// What comes next goes on with what was sent in part.
    cut: bool,
    /// When the client said that it says nothing more.
    ended: Option<Instant>,
    /// What is sent waits until the client reads.
    waits_to_send: bool,
}

impl Transport {
    pub(super) fn new(stream: Rc<UnixStream>, incoming: Rc<Incoming>) -> Self {
        let (framing, readable) = (Framing::default(), Vec::new());
        Self { stream, incoming, framing, readable, timer: None, cut: false, ended: None, waits_to_send: false }
    }

    /// Ready when the connection has ended for a client that says nothing more: nothing is owed to it, or it is gone.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let ended = *self.ended.get_or_insert_with(Instant::now);
        loop {
            let now = Instant::now();
            let until = if self.waits_to_send { now + LOOK } else { self.incoming.owed_until(ended) };
            if until <= now || self.is_gone() {
                return Poll::Ready(());
            }
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(until)));
            timer.as_mut().reset(until);
            ready!(timer.as_mut().poll(context));
        }
    }

    /// Whether the client can neither say nor hear anything any more.
    fn is_gone(&self) -> bool {
        let mut waited = [PollFd::new(&*self.stream, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let looked = poll(&mut waited, Some(&now)).is_ok();
        looked && waited.iter().any(|watched| watched.revents().intersects(PollFlags::HUP | PollFlags::ERR))
    }

    /// Takes what has come; `false` if the client says nothing more.
    fn receive(&mut self) -> io::Result<bool> {
        let mut buffer = [0; CHUNK];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(&*self.stream, &mut [IoSliceMut::new(&mut buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let mut brought = Brought::none(&self.incoming.under_way);
        brought.too_many = got.flags.contains(ReturnFlags::CTRUNC);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                brought.keep(descriptors);
            }
        }
        let bytes = buffer.get(..got.bytes).unwrap_or_default();
        if let Err(error) = self.framing.pass(bytes, &mut self.readable) {
            self.incoming.refused.set(Some(error));
            self.readable.push(NO_HEAD);
        }
        self.incoming.note(self.framing.take_begun(), brought);
        Ok(got.bytes > 0)
    }

    /// Gives what may be read to who reads.
    fn give(&mut self, into: &mut ReadBufCursor<'_>) {
        let count = into.remaining().min(self.readable.len());
        into.put_slice(self.readable.get(..count).unwrap_or_default());
        self.readable.drain(..count);
        if self.readable.is_empty() {
            // A connection may be silent for long.
            self.readable = Vec::new();
        }
    }

    /// Ready when the request under way has taken too long.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Phase::Unfinished(until) = self.incoming.phase.get() else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(until)));
        if timer.deadline() != until {
            timer.as_mut().reset(until);
        }
        timer.as_mut().poll(context)
    }
}

impl Read for Transport {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, mut into: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.readable.is_empty() || this.framing.is_within_head() {
                this.incoming.begun();
            }
            if !this.readable.is_empty() {
                this.give(&mut into);
                return Poll::Ready(Ok(()));
            }
            if this.poll_late(context).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            ready!(this.stream.poll_read_ready(context))?;
            let stream = this.stream.clone();
            match stream.try_io(Interest::READABLE, || this.receive()) {
                Ok(true) => {}
                Ok(false) => return this.poll_end(context).map(Ok),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl Write for Transport {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if !this.cut && is_refusal(bytes) {
            this.incoming.unread.set(true);
            this.incoming.linger();
            return Poll::Ready(Ok(bytes.len()));
        }
        loop {
            this.waits_to_send = true;
            ready!(this.stream.poll_write_ready(context))?;
            match this.stream.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    this.cut = done.as_ref().is_ok_and(|count| *count < bytes.len());
                    this.waits_to_send = false;
                    return Poll::Ready(done);
                }
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.incoming.is_unread() {
            // The reply to it comes first.
            return Poll::Ready(Ok(()));
        }
        let how = rustix::net::Shutdown::Write;
        Poll::Ready(rustix::net::shutdown(&*this.stream, how).map_err(io::Error::from))
    }
}

/// Whether a reply begins here that hyper made by itself, for a head that it cannot read: it has a code of the client's mistakes
/// and a reason phrase, which no reply of ours has. It is not sent; ours takes its place.
fn is_refusal(bytes: &[u8]) -> bool {
    match bytes.strip_prefix(b"HTTP/1.") {
        Some([_, b' ', b'4', _, _, b' ', phrase, ..]) => *phrase != b'\r',
        _ => false,
    }
}
