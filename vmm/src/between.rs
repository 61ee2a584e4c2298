//! Answers commands between two machines: one was reset, and the next one waits until functions of the host can reach memory.

use api::command::{Command, Reply};
use api::error::{ApiError, ErrorKind};
use devices::eventfd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::groundwork::{Groundwork, GroundworkError, Preparation, TICK};
use crate::session::{After, Service};

/// Lays `ground` on a thread of its own. `None` when a client ended the machine first.
pub fn lay(ground: Groundwork, service: &mut Service<'_>) -> Result<Option<Groundwork>, GroundworkError> {
    if ground.is_laid() {
        return Ok(Some(ground));
    }
    let laying = ground.start()?;
    while !laying.is_done() {
        service.published.set_progress(Some(laying.progress()));
        while let Some(command) = service.inbox.next() {
            if obey(command, service) {
                return Ok(None);
            }
        }
        wait(&laying, service)?;
    }
    service.published.set_progress(Some(laying.progress()));
    service.published.set_progress(None);
    laying.finish().map(Some)
}

fn wait(laying: &Preparation<Groundwork>, service: &Service<'_>) -> Result<(), GroundworkError> {
    let event = eventfd::borrow(laying.event());
    let mut waited = [PollFd::new(service.inbox, PollFlags::IN), PollFd::from_borrowed_fd(event, PollFlags::IN)];
    // A signal breaks the work off, and with it the wait.
    let limit = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
    match poll(&mut waited, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(GroundworkError::Thread(error.into())),
    }
}

/// Whether the command ends the machine.
fn obey(command: Command, service: &mut Service<'_>) -> bool {
    let mut end = |after: After, reply: Reply<()>| {
        service.after = after;
        service.enders.push(reply);
        true
    };
    match command {
        Command::Delete { reply } => end(After::Absent, reply),
        Command::Shutdown { reply } => end(After::Created, reply),
        Command::VmmShutdown { reply } => end(After::Exit, reply),
        other => {
            let why =
                "the virtual machine was reset, and its memory is being prepared: wait until vm.info shows no progress any more";
            let name = other.name();
            other.refuse(ApiError::new(ErrorKind::WrongState, why).within(name));
            false
        }
    }
}
