//! How commands reach the core: a queue, and a descriptor that becomes readable when there is something in it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use rustix::event::{EventfdFlags, eventfd};

use crate::command::Command;

/// A queue of commands, both ends.
pub fn channel() -> io::Result<(Controller, Inbox)> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, receiver) = mpsc::channel();
    Ok((Controller { sender, wake: Arc::clone(&wake) }, Inbox { receiver, wake }))
}

/// The clients' end.
#[derive(Debug, Clone)]
pub struct Controller {
    sender: Sender<Command>,
    wake: Arc<OwnedFd>,
}

impl Controller {
    /// Puts a command into the queue; never waits. When the core is gone the command is dropped, and its reply says so.
    pub fn send(&self, command: Command) {
        if self.sender.send(command).is_ok() {
            // A counter that is full is readable already.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

/// The core's end.
#[derive(Debug)]
pub struct Inbox {
    receiver: Receiver<Command>,
    wake: Arc<OwnedFd>,
}

impl Inbox {
    /// The next command, if there is one. Once it has returned `None`, the descriptor is readable only after another has come.
    pub fn next(&self) -> Option<Command> {
        self.receiver.try_recv().ok().or_else(|| {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.wake, &mut count);
            // One that came before the descriptor was cleared would wake nobody.
            self.receiver.try_recv().ok()
        })
    }

    /// Waits for the next command; `None` when every [`Controller`] is gone.
    #[must_use]
    pub fn wait(&self) -> Option<Command> {
        self.receiver.recv().ok()
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl AsRawFd for Inbox {
    fn as_raw_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::command::Reply;

    fn readable(inbox: &Inbox) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(inbox, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn the_descriptor_is_readable_while_commands_wait() {
        let (controller, inbox) = channel().unwrap();
        assert!(!readable(&inbox));
        for _ in 0..2 {
            controller.send(Command::Pause { reply: Reply::new().0 });
        }
        assert!(readable(&inbox));
        assert!(inbox.next().is_some() && inbox.next().is_some());
        assert!(inbox.next().is_none());
        assert!(!readable(&inbox));
        controller.send(Command::Pause { reply: Reply::new().0 });
        assert!(readable(&inbox));
    }

    #[test]
    fn a_command_to_a_core_that_is_gone_is_answered() {
        let (controller, inbox) = channel().unwrap();
        drop(inbox);
        let (reply, answer) = Reply::new();
        controller.send(Command::Boot { reply });
        assert!(answer.wait().is_err());
    }
}
