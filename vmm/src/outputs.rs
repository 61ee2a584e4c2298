//! Opens a machine's consoles as configured, and says where its output goes and where input comes from. They outlive resets.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::config::{OutputConfig, VmConfig};
use api::events::Event;
use api::http::Listening;
use devices::complaints::FailureSink;
use devices::legacy::console::Discard;
use devices::legacy::{Console, ConsoleSink, InputLine, Line, Panic, PanicSink};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::stdio::{stdin, stdout};
use vmm_sys_util::eventfd::EventFd;

use crate::cli::RunOptions;
use crate::machine::{Machine, Surroundings};
use crate::main_loop::Input;
use crate::run::RunError;

/// How long a host that reads slowly may hold up the end of the process while output waits for it.
const DRAIN: Duration = Duration::from_secs(5);

/// Tells those who listen what happens.
pub type Tell = Arc<dyn Fn(Event) + Send + Sync>;

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

    /// Whether standard input goes to one of them.
    pub fn is_interactive(&self) -> bool {
        self.interactive.is_some()
    }

    /// Those that the main loop has to drain.
    pub fn consoles(&self) -> &[Arc<Console>] {
        &self.consoles
    }

    /// Has what clients type go to the devices of `machine`.
    pub fn connect(&self, machine: &Machine) {
        for (device, line) in &self.lines {
            if let Some(input) = device.and_then(|device| input_of(machine, device)) {
                line.connect(input);
            }
        }
    }

    /// What every machine of a run has, the one after a reset as well.
    pub fn surroundings(&self, resume: &Arc<EventFd>, options: &RunOptions, tell: &Tell) -> Surroundings {
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

    /// Where the machine's input comes from, if it is standard input. With `escape`, Ctrl-A is one.
    pub fn input(&self, machine: &Machine, escape: bool, resume: &Arc<EventFd>) -> Result<Option<Input>, RunError> {
        let Some(line) = self.interactive.and_then(|device| input_of(machine, device)) else { return Ok(None) };
        // As it is: a second descriptor might not be there after a reset.
        match rustix::io::fcntl_getfd(stdin()) {
            Ok(_) => Ok(Some(Input { line, from: stdin(), escape, resume: Arc::clone(resume) })),
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
        Device::Serial => Some(Arc::clone(machine.serial()) as _),
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
