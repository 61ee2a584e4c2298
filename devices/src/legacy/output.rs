//! Writes to the host's side of a console, or to a log, without waiting, whatever the descriptor is.
//!
//! Setting `O_NONBLOCK` on standard output would change it for every process that shares it, the user's shell among
//! them. So terminals and pipes are opened a second time, which gives a description of our own.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;

/// Bytes that a pipe takes at once when it says it is writable (`PIPE_BUF`).
const AT_ONCE: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Our own description in non-blocking mode.
    NonBlocking,
    /// A socket: each write asks not to wait.
    Socket,
    /// A regular file or a device that takes everything.
    Immediate,
    /// A terminal or pipe that could not be opened again: ask first, write little.
    Shared,
}

/// Where output goes.
#[derive(Debug)]
pub struct Output {
    fd: Descriptor,
    manner: Manner,
}

#[derive(Debug)]
enum Descriptor {
    Own(OwnedFd),
    /// One of the standard streams.
    Standing(BorrowedFd<'static>),
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(fd) => fd.as_fd(),
            Self::Standing(fd) => fd.as_fd(),
        }
    }
}

impl Output {
    /// Finds out how to write to `fd` without waiting.
    pub fn new(fd: OwnedFd) -> Result<Self, Errno> {
        Self::on(Descriptor::Own(fd))
    }

    /// The same for a descriptor that is always open. It is opened a second time where that is needed, and else used as it is.
    pub fn standing(fd: BorrowedFd<'static>) -> Result<Self, Errno> {
        Self::on(Descriptor::Standing(fd))
    }

    fn on(fd: Descriptor) -> Result<Self, Errno> {
        let manner = match FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) {
            FileType::Socket => Manner::Socket,
            FileType::Fifo => Manner::Shared,
            FileType::CharacterDevice if rustix::termios::isatty(&fd) => Manner::Shared,
            _ => Manner::Immediate,
        };
        if manner == Manner::Shared
            && let Ok(own) = reopen(fd.as_fd())
        {
            return Ok(Self { fd: Descriptor::Own(own), manner: Manner::NonBlocking });
        }
        Ok(Self { fd, manner })
    }

    /// Whether [`Output::write`] is safe to call from a thread that must not wait.
    #[must_use]
    pub fn never_waits(&self) -> bool {
        self.manner != Manner::Shared
    }

    /// Writes what fits; [`io::ErrorKind::WouldBlock`] when nothing does.
    pub fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let written = match self.manner {
                Manner::Socket => rustix::net::send(&self.fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
                Manner::NonBlocking | Manner::Immediate => rustix::io::write(&self.fd, bytes),
                Manner::Shared if self.wait(Some(Instant::now()))? => {
                    rustix::io::write(&self.fd, bytes.get(..AT_ONCE).unwrap_or(bytes))
                }
                Manner::Shared => Err(Errno::AGAIN),
            };
            match written {
                Err(Errno::INTR) => {}
                other => return other.map_err(io::Error::from),
            }
        }
    }

    /// Waits until something can be written, at most until `deadline`; whether it can.
    pub fn wait(&self, deadline: Option<Instant>) -> io::Result<bool> {
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut [PollFd::new(&self.fd, PollFlags::OUT)], left.as_ref()) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(ready) => return Ok(ready != 0),
            }
        }
    }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn reopen(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    fn fill(output: &Output) -> usize {
        let mut total = 0;
        loop {
            match output.write(&[b'x'; 1000]) {
                Ok(n) => total += n,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    return total;
                }
            }
        }
    }

    #[test]
    fn a_full_pipe_is_reported_and_the_original_stays_blocking() {
        let (mut reader, writer) = io::pipe().unwrap();
        let kept = writer.try_clone().unwrap();
        let output = Output::new(writer.into()).unwrap();
        assert_eq!(output.manner, Manner::NonBlocking);
        assert!(fill(&output) >= AT_ONCE);
        let flags = rustix::fs::fcntl_getfl(&kept).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK));
        reader.read_exact(&mut [0; 8192]).unwrap();
        assert!(output.write(b"y").is_ok());
    }

    #[test]
    fn a_pipe_that_cannot_be_opened_again_is_asked_first() {
        let (_reader, writer) = io::pipe().unwrap();
        let output = Output { fd: Descriptor::Own(writer.into()), manner: Manner::Shared };
        assert!(fill(&output) >= AT_ONCE);
        assert!(!output.never_waits());
    }

    #[test]
    fn a_full_socket_is_reported() {
        let (left, _right) = UnixStream::pair().unwrap();
        let output = Output::new(left.into()).unwrap();
        assert_eq!(output.manner, Manner::Socket);
        assert!(fill(&output) > 0);
    }

    #[test]
    fn a_closed_reader_is_an_error_and_no_signal() {
        let (left, right) = UnixStream::pair().unwrap();
        drop(right);
        let error = Output::new(left.into()).unwrap().write(b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
