//! Serves the API: waits for commands while there is no machine, and runs one when it is asked to.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use api::channel::{Inbox, channel};
use api::command::{Command, Reply};
use api::config::{Policy, ResetPolicy, VmConfig};
use api::error::{ApiError, ErrorKind};
use api::http::{Limits, ServeError as ServerError, Server};
use api::info::{Phase, Published, VmInfo};
use rustix::event::{PollFd, PollFlags, poll};
use thiserror::Error;

use crate::cli::RunOptions;
use crate::driver::End;
use crate::policy;
use crate::run::{self, Guest, RunError, exit_code};
use crate::session::{After, Service};
use crate::signals::Signals;
use crate::spec::SpecError;

/// How long clients may take to read their last reply when the process ends.
const LAST_WORD: Duration = Duration::from_secs(2);

/// Listens at `socket`, and starts `config` at once if it is given. Returns the exit code of the process: when a guest ended by
/// itself, or a command or signal asked for it.
pub fn serve(config: Option<VmConfig>, options: &RunOptions, socket: &Path) -> Result<u8, ServeError> {
    run::start_log(&options.log)?;
    let (controller, inbox) = channel().map_err(ServeError::Channel)?;
    // From here on a signal ends the process by this thread, which removes the socket.
    let signals = Signals::handle().map_err(ServeError::Channel)?;
    let published = Published::new();
    let started_by_flags = config.is_some();
    let policy = policy::load().map(|source| source.policy).map_err(|error| {
        let why = ApiError::from_error(ErrorKind::BadRequest, &error);
        log::error!("{why}; vm.create will be refused");
        why
    });
    let base = policy.as_ref().map(Policy::base).unwrap_or_default();
    let mut options = options.clone();
    options.no_reboot |= policy.as_ref().is_ok_and(|policy| config.is_none() && policy.reset == ResetPolicy::Exit);
    let options = &options;
    let mut state = State { config, inbox: &inbox, published: &published, signals, policy };
    if started_by_flags {
        // A client that is there before the machine finds it on its way.
        state.publish(Phase::Starting);
    }
    let server = Server::start(socket, controller, published.clone(), base, Limits::default())?;
    let done = if started_by_flags { state.boot(options, None) } else { Ok(None) };
    let code = match done {
        Ok(Some(code)) => Ok(code),
        Ok(None) => state.idle(options),
        Err(error) => Err(error),
    };
    drop(inbox);
    server.close(LAST_WORD);
    code
}

struct State<'a> {
    config: Option<VmConfig>,
    inbox: &'a Inbox,
    published: &'a Published,
    signals: Signals,
    /// For machines that clients create, or why there are none.
    policy: Result<Policy, ApiError>,
}

impl State<'_> {
    /// Runs the configured machine. Returns the exit code when the process is to end.
    fn boot(&mut self, options: &RunOptions, starter: Option<Reply<()>>) -> Result<Option<u8>, ServeError> {
        let Some(config) = self.config.clone() else {
            answer(starter, Err(ApiError::new(ErrorKind::NotFound, "there is no virtual machine: create one first")));
            return Ok(None);
        };
        self.publish(Phase::Starting);
        let by_command = starter.is_some();
        let mut service =
            Service { inbox: self.inbox, published: self.published, starter, enders: Vec::new(), after: After::Nothing };
        let ended = Guest::prepare(&config, options).and_then(|(guest, vm)| guest.run(vm, options, Some(&mut service)));
        let Service { starter, enders, after, .. } = service;
        let code = match ended {
            Ok(end) => self.follow(end, after),
            Err(error) => {
                let signal = self.signals.take();
                let told = by_command && starter.is_some();
                if told {
                    // A machine that could not be started is still there to be started again.
                    self.publish(Phase::Created);
                }
                let why = match signal {
                    Some(signal) => ApiError::new(ErrorKind::Internal, format!("signal {signal} ended the process")),
                    None => ApiError::from_error(ErrorKind::Internal, &error),
                };
                answer(starter, Err(why));
                match signal {
                    Some(signal) => Some(exit_code(End::Signal(signal))),
                    None if told => None,
                    None => return Err(error.into()),
                }
            }
        };
        enders.into_iter().for_each(|reply| reply.send(Ok(())));
        Ok(code)
    }

    fn follow(&mut self, end: End, after: After) -> Option<u8> {
        match after {
            After::Nothing => Some(exit_code(end)),
            After::Exit => Some(exit_code::POWER_OFF),
            After::Created => {
                self.publish(Phase::Created);
                None
            }
            After::Absent => {
                self.config = None;
                self.published.set(None);
                None
            }
        }
    }

    /// Waits for commands while there is no machine.
    fn idle(&mut self, options: &RunOptions) -> Result<u8, ServeError> {
        loop {
            while let Some(command) = self.inbox.next() {
                if let Some(code) = self.obey(command, options)? {
                    return Ok(code);
                }
            }
            // SAFETY: the descriptor of the signals' event is never closed.
            let signal = unsafe { BorrowedFd::borrow_raw(self.signals.event().as_raw_fd()) };
            let mut waited = [PollFd::new(self.inbox, PollFlags::IN), PollFd::from_borrowed_fd(signal, PollFlags::IN)];
            match poll(&mut waited, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(ServeError::Channel(error.into())),
            }
            if let Some(signal) = self.signals.take() {
                return Ok(exit_code(End::Signal(signal)));
            }
        }
    }

    fn obey(&mut self, command: Command, options: &RunOptions) -> Result<Option<u8>, ServeError> {
        match command {
            Command::Create { config, reply } => {
                let created = self.create(*config);
                reply.send(created);
            }
            Command::Boot { reply } => return self.boot(options, Some(reply)),
            Command::Delete { reply } => {
                self.config = None;
                self.published.set(None);
                reply.send(Ok(()));
            }
            Command::VmmShutdown { reply } => {
                reply.send(Ok(()));
                return Ok(Some(exit_code::POWER_OFF));
            }
            other => {
                let (kind, what) = match &self.config {
                    None => (ErrorKind::NotFound, "there is no virtual machine: create one first"),
                    Some(_) => (ErrorKind::WrongState, "the virtual machine does not run: boot it first"),
                };
                let what = format!("{}: {what}", other.name());
                other.refuse(ApiError::new(kind, what));
            }
        }
        Ok(None)
    }

    fn create(&mut self, mut config: VmConfig) -> Result<(), ApiError> {
        if self.config.is_some() {
            return Err(ApiError::wrong_state("vm.create", &"there already; delete it first"));
        }
        let policy = self.policy.as_ref().map_err(Clone::clone)?;
        config.devices.iter_mut().for_each(|device| policy.complete(device));
        run::check(&config).map_err(|error| ApiError::from_error(kind(&error), &error))?;
        self.config = Some(config);
        self.publish(Phase::Created);
        Ok(())
    }

    fn publish(&self, phase: Phase) {
        self.published.set(self.config.clone().map(|config| VmInfo {
            memory: config.memory.size.bytes(),
            config,
            phase,
            progress: None,
            devices: Vec::new(),
        }));
    }
}

/// Whose fault a configuration is that cannot be.
const fn kind(error: &RunError) -> ErrorKind {
    match error {
        RunError::Spec(SpecError::NoDevice { .. }) => ErrorKind::Unsupported,
        _ => ErrorKind::BadRequest,
    }
}

fn answer(reply: Option<Reply<()>>, with: Result<(), ApiError>) {
    if let Some(reply) = reply {
        reply.send(with);
    }
}

/// An API that cannot be served.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The socket.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// A machine.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Descriptors.
    #[error("cannot make an event descriptor: the limit of open files is reached (ulimit -n)")]
    Channel(#[source] io::Error),
}
