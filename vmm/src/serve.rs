//! Serves the API: waits for commands while no machine runs, and runs one when it is asked to.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::channel::{Inbox, channel};
use api::command::{Command, Reply};
use api::config::{NumaConfig, Policy, ResetPolicy, VmConfig};
use api::error::{ApiError, ErrorKind};
use api::events::Event;
use api::http::{Limits, ServeError as ServerError, Server};
use api::info::{Gauge, Phase, Published, VmInfo};
use devices::eventfd;
use pci::topology::Name;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

use crate::additions::{self, Taken};
use crate::arrivals::Arrivals;
use crate::cli::RunOptions;
use crate::groundwork::{GroundworkError, TICK};
use crate::host::{SYSFS, memory_nodes};
use crate::hotplug::HotPlugError;
use crate::listing;
use crate::logger;
use crate::machine;
use crate::main_loop::End;
use crate::memory::MemoryError;
use crate::numa;
use crate::own_files::{self, Beside};
use crate::policy;
use crate::resets::Start;
use crate::run::{self, Beginning, Guest, RunError, exit_code};
use crate::session::{After, Service};
use crate::signals::Signals;
use crate::snapshot::Snapshot;
use crate::spec::SpecError;
use crate::vcpu::WaitingThreads;
use crate::waiting::{Boot, Waiting};
use crate::working_set;

/// How long clients may take to read their last reply when the process ends.
const LAST_WORD: Duration = Duration::from_secs(2);

/// Listens at `socket`, and starts `config` at once if it is given. Returns the exit code of the process: when a guest ended by
/// itself, or a command or signal asked for it.
pub fn serve(config: Option<VmConfig>, options: &RunOptions, socket: &Path) -> Result<u8, ServeError> {
    if let Some(config) = &config {
        own_files::check(config, Beside::of(options)).map_err(RunError::from)?;
    }
    run::start_log(&options.log)?;
    let (controller, inbox) = channel().map_err(ServeError::Channel)?;
    // From here on a signal ends the process by this thread, which removes the socket.
    let signals = Signals::handle().map_err(ServeError::Channel)?;
    let published = Published::new();
    let policy = policy::load().map(|source| source.policy).map_err(|error| {
        let why = ApiError::from_error(ErrorKind::BadRequest, &error);
        log::error!("{why}; vm.create will be refused");
        why
    });
    let base = policy.as_ref().map(Policy::base).unwrap_or_default();
    let mut options = RunOptions { api_socket: Some(socket.to_owned()), ..options.clone() };
    options.no_reboot |= policy.as_ref().is_ok_and(|policy| config.is_none() && policy.reset == ResetPolicy::Exit);
    if let Some(config) = &config {
        // A client that is there before the machine finds it on its way.
        publish(&published, config, Phase::Starting);
    }
    logger::prepare();
    let server = Server::start(socket, controller, published.clone(), base, Limits::default())?;
    let mut state = State { inbox: &inbox, published: &published, signals, policy, options: &options, vm: None };
    let code = state.run(config);
    drop(state);
    drop(inbox);
    server.close(LAST_WORD);
    code
}

struct State<'a> {
    inbox: &'a Inbox,
    published: &'a Published,
    signals: Signals,
    /// For machines that clients create, or why there are none.
    policy: Result<Policy, ApiError>,
    options: &'a RunOptions,
    /// The machine, while it does not run.
    vm: Option<Waiting>,
}

impl State<'_> {
    /// Waits for commands, memory and signals while no machine runs. Returns the exit code when the process is to end.
    fn run(&mut self, config: Option<VmConfig>) -> Result<u8, ServeError> {
        if let Some(config) = config {
            let mut vm = Waiting::new(config, self.options.host.as_deref(), Instant::now())?;
            vm.boot = Some(Boot { starter: None, promised: None });
            self.vm = Some(vm);
        }
        working_set::trim();
        loop {
            if let Some(code) = self.go_on()? {
                return Ok(code);
            }
            while let Some(command) = self.inbox.next() {
                if let Some(code) = self.obey(command) {
                    return Ok(code);
                }
            }
            if self.vm.as_ref().is_some_and(Waiting::can_go_on) {
                continue;
            }
            self.wait()?;
            if let Some(vm) = &self.vm {
                vm.backends.tell_ends(Some(self.published.events()), |_| false);
            }
            if let Some(signal) = self.signals.take() {
                self.leave();
                return Ok(exit_code(End::Signal(signal)));
            }
        }
    }

    /// Waits until something happens, or a moment while memory is on its way.
    fn wait(&self) -> Result<(), ServeError> {
        let signal = eventfd::borrow(self.signals.event());
        let event = self.vm.as_ref().and_then(Waiting::event).map(eventfd::borrow);
        let mut waited = vec![PollFd::new(self.inbox, PollFlags::IN), PollFd::from_borrowed_fd(signal, PollFlags::IN)];
        waited.extend(event.map(|event| PollFd::from_borrowed_fd(event, PollFlags::IN)));
        let ends = self.vm.as_ref().and_then(|vm| vm.backends.ends_if_any());
        waited.extend(ends.map(|ends| PollFd::from_borrowed_fd(ends, PollFlags::IN)));
        let limit = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
        match poll(&mut waited, event.map(|_| &limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ServeError::Channel(error.into())),
        }
    }

    /// Follows the preparation of memory and starts a machine that waited for it. Returns the exit code when the process is
    /// to end.
    fn go_on(&mut self) -> Result<Option<u8>, ServeError> {
        let Some(vm) = &mut self.vm else { return Ok(None) };
        if let Some(last) = vm.follow() {
            self.published.set_progress(Some(last));
        }
        if vm.can_go_on() {
            return self.start();
        }
        self.published.set_progress(vm.progress());
        let after = self.policy.as_ref().map_or_else(|_| Policy::default().answer_after, |policy| policy.answer_after);
        if vm.answer_at(after).is_some_and(|at| at <= Instant::now()) {
            self.promise();
        }
        Ok(None)
    }

    /// Answers a start before memory is there.
    fn promise(&mut self) {
        let Some(vm) = &mut self.vm else { return };
        let Some(boot) = &mut vm.boot else { return };
        match WaitingThreads::start(0..vm.blueprint.config.cpus.count) {
            Ok(threads) => {
                threads.wait();
                boot.promised = Some(threads);
                let starter = boot.starter.take();
                log::info!("vm.boot is answered; the guest starts when its memory is prepared");
                self.publish(Phase::Running);
                answer(starter, Ok(()));
            }
            Err(error) => {
                let starter = boot.starter.take();
                vm.boot = None;
                vm.release();
                self.publish(Phase::Created);
                answer(starter, Err(ApiError::from_error(ErrorKind::Internal, &error)));
            }
        }
    }

    /// Runs the machine to its end. Returns the exit code when the process is to end.
    fn start(&mut self) -> Result<Option<u8>, ServeError> {
        let Some(mut vm) = self.vm.take() else { return Ok(None) };
        let Some(Boot { starter, promised }) = vm.boot.take() else { return Ok(None) };
        let by_command = starter.is_some();
        let ground = vm.take_ground();
        let Waiting { config, blueprint, backends, shown, .. } = vm;
        let beginning = if shown.is_some() { Beginning::Snapshot } else { Beginning::Boot };
        let arrivals = Arrivals::new().map_err(ServeError::Channel)?;
        let mut service = Service {
            inbox: self.inbox,
            published: self.published,
            policy: self.policy.as_ref().ok(),
            beside: Beside::of(self.options),
            starter,
            arrivals,
            enders: Vec::new(),
            after: After::Nothing,
        };
        let again = Waiting::again(config, Arc::clone(&blueprint), Arc::clone(&backends), Instant::now());
        let ended = ground
            .map_err(RunError::from)
            .and_then(|laid| Ok((laid, Guest::open(blueprint, backends, beginning)?)))
            .and_then(|((ground, saved), guest)| {
                let start = Start { ground, threads: promised, saved: saved.as_ref() };
                guest.run(start, self.options, Some(&mut service))
            });
        let Service { starter, enders, after, .. } = service;
        let code = match ended {
            Ok(end) => {
                self.tell_end(end);
                match after {
                    After::Nothing => Some(exit_code(end)),
                    After::Exit => Some(exit_code::POWER_OFF),
                    After::Created => {
                        again.backends.close_others(&again.blueprint.spec);
                        self.vm = Some(again);
                        self.publish(Phase::Created);
                        None
                    }
                    After::Absent => {
                        self.published.set(None);
                        None
                    }
                }
            }
            Err(error) => {
                let asked = by_command && starter.is_some();
                self.not_started(error, starter, asked, (beginning == Beginning::Boot).then_some(again))?
            }
        };
        enders.into_iter().for_each(|reply| reply.send(Ok(())));
        Ok(code)
    }

    /// A machine cannot be started. If a client `asked` for the start it hears why, and what can be started `again` is there still.
    /// Returns the exit code when the process is to end.
    fn not_started(
        &mut self,
        error: RunError,
        starter: Option<Reply<()>>,
        asked: bool,
        again: Option<Waiting>,
    ) -> Result<Option<u8>, ServeError> {
        let signal = self.signals.take();
        match again {
            Some(again) if asked => {
                self.vm = Some(again);
                self.publish(Phase::Created);
            }
            None if asked => self.published.set(None),
            _ => {}
        }
        if let Some(signal) = signal {
            let why = format!("signal {signal} ended the process");
            answer(starter, Err(ApiError::new(ErrorKind::Internal, why)));
            return Ok(Some(exit_code(End::Signal(signal))));
        }
        let why = ApiError::from_error(kind(&error), &error);
        if asked {
            answer(starter, Err(why));
            return Ok(None);
        }
        log::error!("the guest cannot start: {why}");
        answer(starter, Err(why));
        Err(error.into())
    }

    /// Tells those who listen why the guest ended.
    fn tell_end(&self, end: End) {
        let why = end.to_string();
        if matches!(end, End::Vcpu(_)) {
            self.published.events().tell(Event::GuestPanic(why.clone()));
        }
        self.published.events().tell(Event::Ended(why));
    }

    fn obey(&mut self, command: Command) -> Option<u8> {
        match command {
            Command::Create { config, reply } => reply.send(self.create(*config)),
            Command::Restore { from, prefault, reply } => self.restore(&from, prefault, reply),
            Command::Boot { reply } => self.boot(reply),
            Command::Delete { reply } => {
                self.end_start("vm.delete");
                self.vm = None;
                self.published.set(None);
                reply.send(Ok(()));
            }
            Command::Shutdown { reply } if self.is_starting() => {
                self.end_start("vm.shutdown");
                self.publish(Phase::Created);
                reply.send(Ok(()));
            }
            Command::VmmShutdown { reply } => {
                reply.send(Ok(()));
                self.leave();
                return Some(exit_code::POWER_OFF);
            }
            Command::RemoveDevice { id, reply } if self.vm.is_some() && !self.is_starting() => reply.send(self.remove(&id)),
            other => self.add_or_refuse(other),
        }
        None
    }

    /// Takes a device out of a machine that was not started.
    fn remove(&mut self, id: &str) -> Result<(), ApiError> {
        let Some(vm) = &mut self.vm else { return Err(ApiError::no_vm()) };
        let name = Name::from(id);
        let config = additions::without(&vm.config, &vm.blueprint.config, &vm.blueprint.plan, id).ok_or_else(|| {
            match vm.blueprint.spec.endpoints.get(&name) {
                Some(_) => HotPlugError::Kept { name: name.clone() }.for_client(),
                None => HotPlugError::Unknown { name: name.clone() }.for_client(),
            }
        })?;
        let before = Arc::clone(&vm.blueprint);
        vm.change(config).map_err(|error| ApiError::from_error(kind(&error), &error))?;
        // Those of its functions, too.
        let gone = before.spec.endpoints.keys().filter(|name| !vm.blueprint.spec.endpoints.contains_key(*name));
        gone.for_each(|name| vm.backends.close(name));
        self.publish(Phase::Created);
        Ok(())
    }

    /// Adds a device to a machine that was not started, or says why the command cannot be carried out.
    fn add_or_refuse(&mut self, command: Command) {
        let starting = self.is_starting();
        let refusal = match &self.vm {
            None => ApiError::no_vm(),
            Some(_) if starting => ApiError::new(
                ErrorKind::WrongState,
                "the virtual machine's memory is being prepared: wait until vm.info shows no progress any more",
            ),
            Some(vm) => match (
                additions::check(&command, &vm.config),
                additions::apply(&command, &vm.config, Taken::of(&vm.blueprint.config, &vm.blueprint.spec)),
            ) {
                (Err(error), _) => ApiError::from_error(error.kind(), &error),
                (Ok(()), Some(config)) => match self.check_beside(&config) {
                    Ok(()) => return self.add(command, config),
                    Err(error) => error,
                },
                (Ok(()), None) => ApiError::new(ErrorKind::WrongState, "the virtual machine does not run: boot it first"),
            },
        };
        let name = command.name();
        command.refuse(refusal.within(name));
    }

    fn add(&mut self, mut command: Command, mut config: VmConfig) {
        if let Ok(policy) = &self.policy {
            config.devices.iter_mut().for_each(|device| policy.complete(device));
        }
        let Some(vm) = &mut self.vm else { return };
        let changed = additions::take_taps(&mut command, &mut config, &vm.backends).map_err(RunError::from);
        let name = changed.as_ref().ok().cloned().flatten();
        match changed.and_then(|_| vm.change(config)) {
            Ok(()) => {
                self.publish(Phase::Created);
                additions::done(command);
            }
            Err(error) => {
                if let Some(name) = name {
                    vm.backends.close(&name);
                }
                command.refuse(ApiError::from_error(kind(&error), &error));
            }
        }
    }

    /// Whether it goes together with what the process uses itself.
    fn check_beside(&self, config: &VmConfig) -> Result<(), ApiError> {
        own_files::check(config, Beside::of(self.options)).map_err(|error| ApiError::from_error(ErrorKind::BadRequest, &error))
    }

    fn create(&mut self, mut config: VmConfig) -> Result<(), ApiError> {
        if self.vm.is_some() {
            return Err(ApiError::wrong_state("vm.create", &"there already; delete it first"));
        }
        let policy = self.policy.as_ref().map_err(Clone::clone)?;
        self.check_beside(&config)?;
        config.devices.iter_mut().for_each(|device| policy.complete(device));
        let spread = config.numa == NumaConfig::Off && !policy.numa.nodes.is_empty();
        if spread {
            let known = memory_nodes::scan(Path::new(SYSFS));
            config.numa = numa::spread(&policy.numa, &config, &known)
                .map_err(|error| ApiError::from_error(ErrorKind::BadRequest, &error))?;
        }
        let vm = Waiting::new(config, None, Instant::now()).map_err(|error| {
            let why = ApiError::from_error(kind(&error), &error);
            match error {
                RunError::Spec(SpecError::Numa(_)) if spread => why.within(numa::SPREAD),
                _ => why,
            }
        })?;
        self.vm = Some(vm);
        self.publish(Phase::Created);
        Ok(())
    }

    /// Begins to make a machine from a snapshot.
    fn restore(&mut self, from: &Path, prefault: bool, reply: Reply<()>) {
        if self.vm.is_some() {
            return reply.send(Err(ApiError::wrong_state("vm.restore", &"there already; delete it first")));
        }
        match self.read(from, prefault) {
            Ok(mut vm) => {
                vm.boot = Some(Boot { starter: Some(reply), promised: None });
                self.vm = Some(vm);
                self.publish(Phase::Starting);
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    /// Looks at a snapshot, with the same checks as a machine that is created, and begins to read it.
    fn read(&self, from: &Path, prefault: bool) -> Result<Waiting, ApiError> {
        let base = self.policy.as_ref().map_err(Clone::clone)?.base();
        let snapshot = Snapshot::open(from, prefault, &base).map_err(|error| ApiError::from_error(error.kind(), &error))?;
        self.check_beside(&snapshot.in_use())?;
        Waiting::restored(snapshot, Instant::now()).map_err(|error| ApiError::from_error(kind(&error), &error))
    }

    fn boot(&mut self, reply: Reply<()>) {
        let starting = self.is_starting();
        let Some(vm) = &mut self.vm else {
            return reply.send(Err(ApiError::no_vm()));
        };
        if starting {
            return reply.send(Err(ApiError::new(ErrorKind::WrongState, "the virtual machine starts already")));
        }
        // Before memory is prepared for it.
        let payload = machine::check_payload(&vm.config).map_err(RunError::from);
        match payload.and_then(|()| vm.begin(Instant::now())) {
            Ok(()) => {
                vm.boot = Some(Boot { starter: Some(reply), promised: None });
                self.publish(Phase::Starting);
            }
            Err(error) => reply.send(Err(ApiError::from_error(kind(&error), &error))),
        }
    }

    fn is_starting(&self) -> bool {
        self.vm.as_ref().is_some_and(|vm| vm.boot.is_some())
    }

    /// Breaks off a start, and the preparation of memory with it.
    fn end_start(&mut self, by: &str) {
        let Some(vm) = &mut self.vm else { return };
        vm.release();
        if let Some(boot) = vm.boot.take() {
            answer(boot.starter, Err(ApiError::new(ErrorKind::WrongState, format!("{by} came before the start"))));
        }
    }

    /// The process ends; the kernel takes memory back faster than it could be given back piece by piece.
    fn leave(&mut self) {
        if let Some(vm) = self.vm.take() {
            vm.abandon();
        }
    }

    fn publish(&self, phase: Phase) {
        let Some(vm) = &self.vm else { return };
        let mut config = vm.shown.as_ref().unwrap_or(&vm.config).clone();
        // As they are called in the listing, and by who wants to remove one.
        additions::name_all(&mut config, Some(&vm.blueprint.config).filter(|_| vm.shown.is_none()));
        self.published.set(Some(VmInfo {
            memory: config.memory.size.bytes(),
            config,
            phase,
            progress: vm.progress(),
            balloon: Gauge::default(),
            devices: listing::planned(&vm.blueprint),
        }));
    }
}

fn publish(published: &Published, config: &VmConfig, phase: Phase) {
    let memory = config.memory.size.bytes();
    let (mut config, balloon) = (config.clone(), Gauge::default());
    additions::name_all(&mut config, None);
    published.set(Some(VmInfo { memory, config, phase, progress: None, balloon, devices: Vec::new() }));
}

/// Whose fault a configuration is that cannot be.
fn kind(error: &RunError) -> ErrorKind {
    match error {
        RunError::Groundwork(GroundworkError::Snapshot(error)) => error.kind(),
        RunError::Groundwork(GroundworkError::Memory(MemoryError::File(_))) => ErrorKind::BadRequest,
        RunError::Machine(error) => error.kind(),
        RunError::Kvm(_)
        | RunError::Groundwork(_)
        | RunError::MainLoop(_)
        | RunError::Console(_)
        | RunError::Cpuid
        | RunError::Print(_)
        | RunError::Event(_) => ErrorKind::Internal,
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
