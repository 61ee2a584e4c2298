//! One stream between a port of the guest and a socket of the host: credit in both directions, half-close, the end.
//!
//! Decides what a packet or an event of the socket changes and which packet comes next. Knows no queue and no other stream.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use bitflags::bitflags;
use rustix::net::SendFlags;
use vm_memory::{Bytes, ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile};

use super::greeting;
use super::packet::{HEADER, Header, MAX_DATA, Ports, op, shutdown};
use crate::virtio::buffers::{scatter, skip, total};

/// Bytes that wait for a host that does not take them, at most: what the guest may send ahead.
pub(super) const BUFFER: u32 = 64 << 10;
/// The guest hears of room in the buffer when this much has been freed.
const NEWS: u32 = BUFFER / 4;

/// Whether a stream goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(super) enum Fate {
    /// It does.
    Stays,
    /// It is over and the guest must be told.
    Reset,
    /// It is over and the guest knows.
    Gone,
}

/// What [`Stream::fill`] put into a buffer of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filled {
    /// A packet of so many bytes.
    Packet(u32),
    /// There was nothing to tell.
    Nothing,
    /// The buffer has no room for a header.
    Malformed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// A client of the host waits for the guest's answer.
    Dialing {
        /// The guest has been asked.
        asked: bool,
    },
    Open,
}

bitflags! {
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Ended: u8 {
        /// The host's process will send nothing more.
        const HOST_SEND = 1;
        /// It takes nothing more.
        const HOST_RECEIVE = 2;
        const GUEST_SEND = 4;
        const GUEST_RECEIVE = 8;
    }
}

/// What an event of the socket says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SocketEvent {
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) hung_up: bool,
}

/// A stream.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) ports: Ports,
    /// It is in the list of those who have something for the guest.
    pub(super) queued: bool,
    /// The guest has forgotten it; the host gets what it was sent.
    pub(super) orphan: bool,
    socket: UnixStream,
    phase: Phase,
    ended: Ended,
    /// [`Ended::HOST_SEND`] and [`Ended::HOST_RECEIVE`] as the guest knows them.
    told_ended: Ended,
    /// The socket may have something.
    readable: bool,
    hung_up: bool,
    answer_due: bool,
    update_due: bool,
    /// The guest was asked for credit and has not answered.
    credit_asked: bool,
    /// Data of the guest that the host has not taken.
    waiting: VecDeque<u8>,
    /// Bytes from the guest, modulo 2^32; those that the host took; those that the guest knows it took.
    received: u32,
    forwarded: u32,
    told_forwarded: u32,
    /// Bytes to the guest, and what the guest said of its buffer.
    sent: u32,
    guest_buffer: u32,
    guest_forwarded: u32,
}

impl Stream {
    /// A client of the host that wants a port of the guest.
    pub(super) fn dialing(socket: UnixStream, ports: Ports) -> Self {
        Self {
            ports,
            queued: false,
            orphan: false,
            socket,
            phase: Phase::Dialing { asked: false },
            ended: Ended::empty(),
            told_ended: Ended::empty(),
            readable: false,
            hung_up: false,
            answer_due: false,
            update_due: false,
            credit_asked: false,
            waiting: VecDeque::new(),
            received: 0,
            forwarded: 0,
            told_forwarded: 0,
            sent: 0,
            guest_buffer: 0,
            guest_forwarded: 0,
        }
    }

    /// A stream that the guest asked for and that a process of the host listens for.
    pub(super) fn accepted(socket: UnixStream, request: &Header) -> Self {
        Self {
            phase: Phase::Open,
            readable: true,
            answer_due: true,
            guest_buffer: request.buffer,
            guest_forwarded: request.forwarded,
            ..Self::dialing(socket, request.ports())
        }
    }

    /// A packet from the guest.
    pub(super) fn packet(&mut self, header: &Header, data: &[VolatileSlice<'_>]) -> Fate {
        self.guest_buffer = header.buffer;
        self.guest_forwarded = header.forwarded;
        self.credit_asked = false;
        match (header.op, self.phase) {
            (op::RESET, _) => {
                self.orphan = !self.waiting.is_empty() && self.ended.contains(Ended::GUEST_SEND);
                if self.orphan { Fate::Stays } else { Fate::Gone }
            }
            (op::RESPONSE, Phase::Dialing { asked: true }) => {
                if greeting::confirm(&self.socket, self.ports.host).is_err() {
                    return Fate::Reset;
                }
                self.phase = Phase::Open;
                self.readable = true;
                Fate::Stays
            }
            (op::DATA, Phase::Open) => self.deliver(data),
            (op::CREDIT_UPDATE, Phase::Open) => Fate::Stays,
            (op::CREDIT_REQUEST, Phase::Open) => {
                self.update_due = true;
                Fate::Stays
            }
            (op::SHUTDOWN, Phase::Open) => {
                if header.flags & shutdown::SEND != 0 {
                    self.ended |= Ended::GUEST_SEND;
                }
                if header.flags & shutdown::RECEIVE != 0 {
                    self.ended |= Ended::GUEST_RECEIVE;
                    // Fails only if the other side is gone.
                    let _ = self.socket.shutdown(std::net::Shutdown::Read);
                }
                self.finish()
            }
            _ => Fate::Reset,
        }
    }

    /// The socket has something, or room, or is closed on the other side.
    pub(super) fn event(&mut self, event: SocketEvent) -> Fate {
        self.readable |= event.readable;
        self.hung_up |= event.hung_up;
        if let (Phase::Dialing { asked }, true) = (self.phase, self.hung_up) {
            return if asked { Fate::Reset } else { Fate::Gone };
        }
        if event.writable || event.hung_up { self.flush() } else { Fate::Stays }
    }

    /// Whether there is a packet for the guest.
    pub(super) fn has_output(&self) -> bool {
        !self.orphan
            && match self.phase {
                Phase::Dialing { asked } => !asked,
                Phase::Open => self.answer_due || self.update_due() || self.news_of_end() || (self.may_read() && !self.starved()),
            }
    }

    /// Puts the next packet for guest `cid` into `buffer`.
    pub(super) fn fill(&mut self, cid: u64, buffer: &[VolatileSlice<'_>]) -> (Filled, Fate) {
        if self.orphan {
            return (Filled::Nothing, Fate::Stays);
        }
        let mut data = buffer.to_vec();
        if skip(&mut data, HEADER).is_none() {
            return (Filled::Malformed, Fate::Stays);
        }
        let Some((op, len, flags)) = self.next(&data) else { return (Filled::Nothing, Fate::Stays) };
        let header = Header { len, flags, buffer: BUFFER, forwarded: self.forwarded, ..Header::to_guest(cid, self.ports, op) };
        self.told_forwarded = self.forwarded;
        self.update_due = false;
        if scatter(&header.to_bytes(), buffer).is_none() {
            return (Filled::Malformed, Fate::Stays);
        }
        let over = self.told_ended.contains(Ended::HOST_SEND | Ended::HOST_RECEIVE);
        let bytes = u32::try_from(HEADER).unwrap_or(0).saturating_add(len);
        (Filled::Packet(bytes), if over { Fate::Gone } else { Fate::Stays })
    }

    /// Operation, bytes of data, flags.
    fn next(&mut self, data: &[VolatileSlice<'_>]) -> Option<(u16, u32, u32)> {
        match self.phase {
            Phase::Dialing { asked: true } => return None,
            Phase::Dialing { asked: false } => {
                self.phase = Phase::Dialing { asked: true };
                return Some((op::REQUEST, 0, 0));
            }
            Phase::Open => {}
        }
        if std::mem::take(&mut self.answer_due) {
            return Some((op::RESPONSE, 0, 0));
        }
        if self.may_read() {
            match self.room() {
                0 if self.credit_asked => {}
                0 => {
                    self.credit_asked = true;
                    return Some((op::CREDIT_REQUEST, 0, 0));
                }
                room => {
                    if let Some(len) = self.read(data, room) {
                        self.sent = self.sent.wrapping_add(len);
                        return Some((op::DATA, len, 0));
                    }
                }
            }
        }
        if self.news_of_end() {
            self.told_ended = self.host_ended();
            let send = u32::from(self.told_ended.contains(Ended::HOST_SEND)) * shutdown::SEND;
            let receive = u32::from(self.told_ended.contains(Ended::HOST_RECEIVE)) * shutdown::RECEIVE;
            return Some((op::SHUTDOWN, 0, send | receive));
        }
        self.update_due().then_some((op::CREDIT_UPDATE, 0, 0))
    }

    /// Reads what the host has into `data`, at most `room` bytes; `None` if there is nothing.
    fn read(&mut self, data: &[VolatileSlice<'_>], room: u32) -> Option<u32> {
        let room = usize::try_from(room.min(MAX_DATA)).unwrap_or(0);
        let mut done = 0;
        for slice in data {
            let part = slice.len().min(room - done);
            if part == 0 {
                break;
            }
            let Ok(mut part) = slice.subslice(0, part) else { break };
            match self.socket.read_volatile(&mut part) {
                Ok(0) => {
                    self.ended |= Ended::HOST_SEND;
                    self.readable = false;
                }
                Ok(count) => {
                    done += count;
                    if count == part.len() {
                        continue;
                    }
                }
                Err(VolatileMemoryError::IOError(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(VolatileMemoryError::IOError(error)) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(_) => {
                    // A connection that was reset: the process is gone with what it had not read.
                    self.ended |= Ended::HOST_SEND | Ended::HOST_RECEIVE;
                    self.readable = false;
                }
            }
            break;
        }
        u32::try_from(done).ok().filter(|done| *done > 0)
    }

    /// Gives data to the host, or keeps it until the host takes it.
    fn deliver(&mut self, data: &[VolatileSlice<'_>]) -> Fate {
        let len = total(data).and_then(|len| u32::try_from(len).ok()).unwrap_or(u32::MAX);
        let room = BUFFER.saturating_sub(self.received.wrapping_sub(self.forwarded));
        if len > room || self.ended.contains(Ended::GUEST_SEND) {
            // More than it was allowed, or after it said that there was no more.
            return Fate::Reset;
        }
        self.received = self.received.wrapping_add(len);
        let mut blocked = !self.waiting.is_empty();
        for slice in data {
            let mut rest = *slice;
            while !blocked && !rest.is_empty() && !self.ended.contains(Ended::HOST_RECEIVE) {
                match self.socket.write_volatile(&rest) {
                    Ok(count) => {
                        self.took(count);
                        let Ok(left) = rest.offset(count) else { return Fate::Reset };
                        rest = left;
                    }
                    Err(VolatileMemoryError::IOError(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(VolatileMemoryError::IOError(error)) if error.kind() == io::ErrorKind::WouldBlock => blocked = true,
                    Err(_) => self.ended |= Ended::HOST_RECEIVE,
                }
            }
            if self.ended.contains(Ended::HOST_RECEIVE) {
                self.took(rest.len());
            } else if !rest.is_empty() {
                let mut kept = vec![0; rest.len()];
                if rest.read_slice(&mut kept, 0).is_err() {
                    return Fate::Reset;
                }
                self.waiting.extend(kept);
            }
        }
        Fate::Stays
    }

    /// Writes what waits for the host.
    fn flush(&mut self) -> Fate {
        while !self.waiting.is_empty() {
            let (first, _) = self.waiting.as_slices();
            match rustix::net::send(&self.socket, first, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.waiting.drain(..count.min(self.waiting.len()));
                    self.took(count);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Fate::Stays,
                Err(_) => {
                    self.ended |= Ended::HOST_RECEIVE;
                    self.took(self.waiting.len());
                    self.waiting.clear();
                }
            }
        }
        self.finish()
    }

    fn took(&mut self, count: usize) {
        self.forwarded = self.forwarded.wrapping_add(u32::try_from(count).unwrap_or(0));
    }

    /// Carries out what the guest ended, once the host has all that came before.
    fn finish(&mut self) -> Fate {
        if !self.waiting.is_empty() {
            return Fate::Stays;
        }
        if self.orphan {
            return Fate::Gone;
        }
        if self.ended.contains(Ended::GUEST_SEND | Ended::GUEST_RECEIVE) {
            return Fate::Reset;
        }
        if self.ended.contains(Ended::GUEST_SEND) {
            // Fails only if the other side is gone.
            let _ = self.socket.shutdown(std::net::Shutdown::Write);
        }
        Fate::Stays
    }

    fn may_read(&self) -> bool {
        self.readable && !self.ended.intersects(Ended::HOST_SEND | Ended::GUEST_RECEIVE)
    }

    /// Bytes that the guest has room for. A guest that contradicts itself has none.
    fn room(&self) -> u32 {
        self.guest_buffer.saturating_sub(self.sent.wrapping_sub(self.guest_forwarded))
    }

    fn starved(&self) -> bool {
        self.credit_asked && self.room() == 0
    }

    fn update_due(&self) -> bool {
        self.update_due || self.forwarded.wrapping_sub(self.told_forwarded) >= NEWS
    }

    /// What the host's process does not do any more. It is gone when it hung up and all that it sent has been read.
    fn host_ended(&self) -> Ended {
        let read = self.ended.intersects(Ended::HOST_SEND | Ended::GUEST_RECEIVE);
        let gone = if self.hung_up && read { Ended::HOST_SEND | Ended::HOST_RECEIVE } else { Ended::empty() };
        (self.ended | gone) & (Ended::HOST_SEND | Ended::HOST_RECEIVE)
    }

    fn news_of_end(&self) -> bool {
        !self.told_ended.contains(self.host_ended())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
