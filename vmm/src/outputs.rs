//! Runs a guest with its consoles from the start to the end, through resets.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::config::{OutputConfig, VmConfig};
use api::events::Event;
use api::http::Listening;
use api::info::Phase;
use devices::complaints::FailureSink;
use devices::eventfd;
use devices::legacy::console::Discard;
use devices::legacy::{Console, ConsoleSink, InputLine, Line, Panic, PanicSink, PowerEvent};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::stdio::{stdin, stdout};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use crate::between;
use crate::changes::Changes;
use crate::cli::RunOptions;
use crate::groundwork::Groundwork;
use crate::host_signals::Lookout;
use crate::hotplug;
use crate::kvm::Vm;
use crate::logger;
use crate::machine::{Design, Machine, Surroundings};
use crate::main_loop::{Attendant, End, Input, MainLoop, Sources};
use crate::run::{RunError, needs};
use crate::session::{Service, Session};
use crate::signals::Signals;
use crate::snapshot::Saved;
use crate::spare::Spare;
use crate::terminal::RawTerminal;
use crate::vcpu::Named;

/// How long a host that reads slowly may hold up the end of the process while output waits for it.
const DRAIN: Duration = Duration::from_secs(5);

/// Tells those who listen what happens.
type Tell = Arc<dyn Fn(Event) + Send + Sync>;

/// The consoles of a machine, which outlive its resets.
pub struct Outputs {
    consoles: Vec<Arc<Console>>,
    /// With the device that is typed into, if one is.
    lines: Vec<(Option<Device>, Arc<Line>)>,
    serial: Arc<dyn ConsoleSink>,
    console: Option<Arc<dyn ConsoleSink>>,
    debug: Option<Arc<dyn ConsoleSink>>,
    /// Which device gets standard input.
    interactive: Option<Device>,
    /// Their files go last.
    _sockets: Vec<Listening>,
}

/// A device that characters are typed into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Device {
    Serial,
    Console,
}

impl Outputs {
    /// Opens what the configuration names, and puts the paths of new terminals into it.
    pub fn open(config: &mut VmConfig) -> Result<Self, RunError> {
        let mut opener = Opener::default();
        let serial = opener.open("--serial", &mut config.serial, Some(Device::Serial))?;
        let console = match &mut config.console {
            OutputConfig::Off => None,
            output => Some(opener.open("--console", output, Some(Device::Console))?),
        };
        let debug = config.debug_console.as_mut().map(|output| opener.open("--debug-console", output, None)).transpose()?;
        let interactive = match (&config.serial, &config.console) {
            (OutputConfig::Stdio, _) => Some(Device::Serial),
            (_, OutputConfig::Stdio) => Some(Device::Console),
            _ => None,
        };
        let Opener { consoles, lines, sockets, .. } = opener;
        Ok(Self { consoles, lines, serial, console, debug, interactive, _sockets: sockets })
    }

    /// Whether what the configuration names can be opened, as far as that shows without opening it.
    pub fn look(config: &VmConfig) -> Result<(), RunError> {
        let outputs = [
            ("--serial", Some(&config.serial)),
            ("--console", Some(&config.console)),
            ("--debug-console", config.debug_console.as_ref()),
        ];
        for (flag, output) in outputs {
            match output {
                Some(OutputConfig::Socket(path)) => Listening::check(path)?,
                Some(OutputConfig::Stdio) => printable()?,
                Some(OutputConfig::File(path)) => {
                    let refused = |error: Errno| failed(flag, path, error.into());
                    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
                    let folder = fs::metadata(parent).map_err(|error| failed(flag, path, error))?;
                    if !folder.is_dir() {
                        return Err(refused(Errno::NOTDIR));
                    }
                    if path.is_dir() {
                        return Err(refused(Errno::ISDIR));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Consoles that write to given descriptors; no input.
    pub fn captured(serial: OwnedFd, debug: OwnedFd) -> Result<Self, RunError> {
        let (serial, debug) = (Arc::new(Console::new(serial)?), Arc::new(Console::new(debug)?));
        Ok(Self {
            consoles: vec![serial.clone(), debug.clone()],
            lines: Vec::new(),
            serial,
            console: None,
            debug: Some(debug),
            interactive: None,
            _sockets: Vec::new(),
        })
    }

    /// Runs the machine until its end, from the start or, held, from where a saved one was; devices that came and went stay so
    /// through resets. Commands of `service` are answered meanwhile.
    pub fn run(
        &self,
        ground: Groundwork,
        mut named: Option<Named>,
        design: &Design<'_>,
        options: &RunOptions,
        mut service: Option<&mut Service<'_>>,
        mut saved: Option<&Saved>,
    ) -> Result<End, RunError> {
        let resume = Arc::new(eventfd::new().map_err(RunError::Event)?);
        let events = service.as_ref().map(|service| service.published.events().clone());
        let tell: Tell = Arc::new(move |event| {
            if let Some(events) = &events {
                events.tell(event);
            }
        });
        let surroundings = self.surroundings(&resume, options, &tell);
        let mut ground = Some(ground);
        let mut ram: Option<GuestMemoryMmap> = None;
        let mut terminal = None;
        let mut spare = Spare::default();
        let mut changes = saved.map_or_else(Changes::default, |saved| saved.changes.clone());
        loop {
            let plan = changes.plan(design.plan);
            let extent = changes.extent(design.config);
            let design = Design { plan: &plan, added: changes.added(), extent: Some(&extent), ..*design };
            let restored = saved.take();
            let design = Design { state: restored.map(|saved| saved.state.as_slice()), ..design };
            let next = match ground.take() {
                Some(ground) => ground,
                None => match lay_again(&design, &changes, ram.take(), service.as_deref_mut())? {
                    Some(ground) => ground,
                    None => return Ok(End::Command),
                },
            };
            let mut machine = Machine::start(next, named.take(), &design, &surroundings)?;
            // Until here a signal ends the process at once, which a start that takes minutes must allow.
            let signals = Signals::handle().map_err(RunError::Event)?;
            for (device, line) in &self.lines {
                if let Some(input) = device.and_then(|device| input_of(&machine, device)) {
                    line.connect(input);
                }
            }
            if self.interactive.is_some() && terminal.is_none() {
                terminal = RawTerminal::enter().map_err(RunError::Standard)?;
            }
            let input = self.input(&machine, terminal.is_some(), &resume)?;
            let ending = Arc::clone(&machine.ending);
            let sources = Sources { signals, consoles: self.consoles.clone(), input, limit: options.time_limit };
            let mut next_changes = changes.clone();
            let end = match &mut service {
                None => {
                    let signals = Arc::clone(machine.host_signals());
                    let mut lookout = Lookout { signals, backends: Arc::clone(design.backends) };
                    let end = MainLoop::new(&ending, sources, lookout.descriptors())?.run(Some(&mut lookout))?;
                    next_changes.remove(&hotplug::wanted_back(&machine));
                    end
                }
                Some(service) => {
                    let published = service.published;
                    let mut session = Session::new(service, &mut machine, &design, changes.clone()).map_err(RunError::Event)?;
                    // Whoever hears that the machine runs can count on it.
                    let mut main_loop = MainLoop::new(&ending, sources, session.descriptors())?;
                    spare.keep();
                    session.started(if restored.is_some() { Phase::Paused } else { Phase::Running });
                    let end = main_loop.run(Some(&mut session))?;
                    spare.give(published.door());
                    next_changes = session.changes();
                    end
                }
            };
            let left = machine.stop();
            if options.counters {
                logger::say(&machine.counters().to_string());
            }
            let by_guest = matches!(end, End::Power(PowerEvent::Reset) | End::Watchdog) && !options.no_reboot;
            if by_guest && end == End::Watchdog {
                log::warn!("the guest did not serve its watchdog in time, which resets it");
            }
            if by_guest || end == End::Reboot {
                log::info!("the machine resets");
                tell(Event::Reset(end.to_string()));
                ram = Some(left);
                changes = next_changes;
                continue;
            }
            return Ok(end);
        }
    }

    /// What every machine of this run has, the one after a reset as well.
    fn surroundings(&self, resume: &Arc<EventFd>, options: &RunOptions, tell: &Tell) -> Surroundings {
        let (tells_panic, tells_failure) = (Arc::clone(tell), Arc::clone(tell));
        let panicked: PanicSink = Arc::new(move |panic| {
            let why = match panic {
                Panic::Panicked => "the guest's kernel panicked",
                Panic::CrashKernel => "the guest's kernel panicked, and another one saves what is left",
            };
            log::error!("{why}");
            tells_panic(Event::GuestPanic(why.to_owned()));
        });
        let failed: FailureSink =
            Arc::new(move |id, why| tells_failure(Event::DeviceFailed { id: id.to_owned(), why: why.to_owned() }));
        Surroundings {
            serial: self.serial.clone(),
            console: self.console.clone(),
            debug_console: self.debug.clone(),
            resume: self.resume(resume),
            panicked,
            ends_at_panic: options.no_reboot,
            failed,
        }
    }

    fn input(&self, machine: &Machine, raw: bool, resume: &Arc<EventFd>) -> Result<Option<Input>, RunError> {
        let Some(line) = self.interactive.and_then(|device| input_of(machine, device)) else { return Ok(None) };
        // As it is: a second descriptor might not be there after a reset.
        match rustix::io::fcntl_getfd(stdin()) {
            Ok(_) => Ok(Some(Input { line, from: stdin(), escape: raw, resume: Arc::clone(resume) })),
            // A closed standard input is an empty one.
            Err(Errno::BADF) => Ok(None),
            Err(error) => Err(unusable(error)),
        }
    }

    /// Tells everybody who may wait for it that there is room for input.
    fn resume(&self, standard_input: &Arc<EventFd>) -> Arc<dyn Fn() + Send + Sync> {
        let (standard_input, lines) = (Arc::clone(standard_input), self.lines.clone());
        Arc::new(move || {
            // A full counter is readable already.
            let _ = standard_input.write(1);
            lines.iter().for_each(|(_, line)| line.resume());
        })
    }

    /// Writes what is left; returns how many bytes nobody took.
    pub fn close(&self) -> u64 {
        let deadline = Instant::now() + DRAIN;
        let lines: u64 = self.lines.iter().map(|(_, line)| line.drain_on_exit(deadline)).sum();
        lines + self.consoles.iter().map(|console| console.drain_on_exit(deadline)).sum::<u64>()
    }
}

/// What the machine stands on after a reset, around the `ram` that it had. `None` if a client ended the machine meanwhile.
fn lay_again(
    design: &Design<'_>,
    changes: &Changes,
    ram: Option<GuestMemoryMmap>,
    service: Option<&mut Service<'_>>,
) -> Result<Option<Groundwork>, RunError> {
    let mut needs = needs(design.config, design.spec, design.plan);
    changes.add_to(&mut needs, design.spec);
    let ground = Groundwork::open(Vm::new()?, &needs, ram)?;
    match service {
        Some(service) => Ok(between::lay(ground, service)?),
        None => {
            ground.lay(&ground.work())?;
            Ok(Some(ground))
        }
    }
}

fn failed(flag: &'static str, path: &Path, source: io::Error) -> RunError {
    RunError::Output { flag, path: path.display().to_string(), source }
}

/// A standard stream that cannot be had.
fn unusable(error: Errno) -> RunError {
    match error {
        // Another output would be no better off.
        Errno::MFILE | Errno::NFILE => RunError::Event(error.into()),
        _ => RunError::Standard(error.into()),
    }
}

/// Whether standard output is one. The language's start opens a null device in place of one that is closed.
fn printable() -> Result<(), RunError> {
    let flags = rustix::fs::fcntl_getfl(stdout()).map_err(|error| RunError::Standard(error.into()))?;
    let reads = flags & OFlags::RWMODE == OFlags::RDONLY;
    if reads { Err(RunError::Standard(Errno::BADF.into())) } else { Ok(()) }
}

fn input_of(machine: &Machine, device: Device) -> Option<Arc<dyn InputLine>> {
    match device {
        Device::Serial => Some(machine.serial.clone()),
        Device::Console => machine.console.clone().map(|console| console as _),
    }
}

/// Opens consoles; several of them may share the terminal.
#[derive(Default)]
struct Opener {
    consoles: Vec<Arc<Console>>,
    /// With the device that is typed into, if one is.
    lines: Vec<(Option<Device>, Arc<Line>)>,
    sockets: Vec<Listening>,
    terminal: Option<Arc<Console>>,
}

impl Opener {
    fn open(
        &mut self,
        flag: &'static str,
        output: &mut OutputConfig,
        device: Option<Device>,
    ) -> Result<Arc<dyn ConsoleSink>, RunError> {
        let failed = |path: &Path, source| failed(flag, path, source);
        let name = flag.trim_start_matches('-');
        let line = match output {
            OutputConfig::Off => return Ok(Arc::new(Discard)),
            OutputConfig::Stdio => return Ok(self.terminal()?),
            OutputConfig::File(path) => {
                let file = File::create(&*path).map_err(|source| failed(path, source))?;
                let console = Arc::new(Console::new(file.into())?);
                self.consoles.push(console.clone());
                return Ok(console);
            }
            OutputConfig::Pty(path) => {
                let line = Line::pty(name).map_err(|source| failed(Path::new("a new terminal"), source))?;
                *path = line.path().map(Path::to_owned);
                if let Some(path) = path {
                    log::info!("{flag}: the terminal is {}", path.display());
                }
                line
            }
            OutputConfig::Socket(path) => {
                let socket = Listening::at(path)?;
                let listener = socket.listener().map_err(|source| failed(path, source))?;
                let line = Line::socket(name, listener).map_err(|source| failed(path, source))?;
                self.sockets.push(socket);
                line
            }
        };
        let line = Arc::new(line);
        self.lines.push((device, line.clone()));
        Ok(line)
    }

    fn terminal(&mut self) -> Result<Arc<Console>, RunError> {
        if let Some(console) = &self.terminal {
            return Ok(console.clone());
        }
        printable()?;
        let output = rustix::io::fcntl_dupfd_cloexec(stdout(), 0).map_err(unusable)?;
        let console = Arc::new(Console::new(output)?);
        self.consoles.push(console.clone());
        self.terminal = Some(console.clone());
        Ok(console)
    }
}
