//! Runs a guest with its consoles from the start to the end, through resets.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::config::{OutputConfig, VmConfig};
use devices::legacy::console::Discard;
use devices::legacy::{Console, ConsoleSink, PowerEvent};
use rustix::stdio::{stdin, stdout};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::changes::Changes;
use crate::cli::RunOptions;
use crate::driver::{self, End, Input, Sources};
use crate::groundwork::{Groundwork, Work};
use crate::kvm::Vm;
use crate::machine::{Design, Machine, Surroundings};
use crate::run::{RunError, needs};
use crate::session::{Service, Session};
use crate::signals::Signals;
use crate::terminal::RawTerminal;
use crate::vcpu::Named;

/// How long a host that reads slowly may hold up the end of the process while output waits for it.
const DRAIN: Duration = Duration::from_secs(5);

/// The consoles of a machine, which outlive its resets.
pub struct Outputs {
    consoles: Vec<Arc<Console>>,
    serial: Arc<dyn ConsoleSink>,
    debug: Option<Arc<dyn ConsoleSink>>,
    interactive: bool,
}

impl Outputs {
    /// Opens what the configuration names.
    pub fn open(config: &VmConfig) -> Result<Self, RunError> {
        let mut consoles = Vec::new();
        let mut terminal: Option<Arc<Console>> = None;
        let mut open = |flag, output: &OutputConfig| -> Result<Arc<dyn ConsoleSink>, RunError> {
            Ok(match output {
                OutputConfig::Off => Arc::new(Discard),
                OutputConfig::Stdio => match &terminal {
                    Some(console) => console.clone(),
                    None => {
                        let output =
                            rustix::io::fcntl_dupfd_cloexec(stdout(), 0).map_err(|error| RunError::Standard(error.into()))?;
                        let console = Arc::new(Console::new(output)?);
                        consoles.push(console.clone());
                        terminal.insert(console).clone()
                    }
                },
                OutputConfig::File(path) => {
                    let failed = |source| RunError::Output { flag, path: path.display().to_string(), source };
                    let file = File::create(path).map_err(failed)?;
                    let console = Arc::new(Console::new(file.into())?);
                    consoles.push(console.clone());
                    console
                }
            })
        };
        let serial = open("--serial", &config.serial)?;
        let debug = config.debug_console.as_ref().map(|output| open("--debug-console", output)).transpose()?;
        Ok(Self { consoles, serial, debug, interactive: config.serial == OutputConfig::Stdio })
    }

    /// Consoles that write to given descriptors; no input.
    pub fn captured(serial: OwnedFd, debug: OwnedFd) -> Result<Self, RunError> {
        let (serial, debug) = (Arc::new(Console::new(serial)?), Arc::new(Console::new(debug)?));
        Ok(Self { consoles: vec![serial.clone(), debug.clone()], serial, debug: Some(debug), interactive: false })
    }

    /// Runs the machine until its end; devices that came and went stay so through resets. Commands of `service` are answered meanwhile.
    pub fn run(
        &self,
        ground: Groundwork,
        mut named: Option<Named>,
        design: &Design<'_>,
        options: &RunOptions,
        mut service: Option<&mut Service<'_>>,
    ) -> Result<End, RunError> {
        let resume = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(RunError::Event)?);
        let surroundings =
            Surroundings { serial: self.serial.clone(), debug_console: self.debug.clone(), resume: resume.clone() };
        let mut ground = Some(ground);
        let mut ram: Option<GuestMemoryMmap> = None;
        let mut terminal = None;
        let mut changes = Changes::default();
        loop {
            let plan = changes.plan(design.plan);
            let extent = changes.extent(design.config);
            let design = Design { plan: &plan, added: changes.added(), extent: Some(&extent), ..*design };
            let next = match ground.take() {
                Some(ground) => ground,
                None => {
                    let needs = needs(design.config, design.spec, design.plan);
                    let ground = Groundwork::open(Vm::new()?, &needs, ram.take())?;
                    ground.lay(&Work::of(&ground))?;
                    ground
                }
            };
            let mut machine = Machine::start(next, named.take(), &design, &surroundings)?;
            // Until here a signal ends the process at once, which a start that takes minutes must allow.
            let signals = Signals::handle().map_err(RunError::Event)?;
            if self.interactive && terminal.is_none() {
                terminal = RawTerminal::enter().map_err(RunError::Standard)?;
            }
            let input = self.input(&machine, terminal.is_some(), &resume)?;
            let ending = Arc::clone(&machine.ending);
            let sources = Sources { signals, consoles: self.consoles.clone(), input, limit: options.time_limit };
            let mut next_changes = Changes::default();
            let end = match &mut service {
                None => driver::run(&ending, sources, None)?,
                Some(service) => {
                    let mut session = Session::new(service, &mut machine, &design, changes.clone()).map_err(RunError::Event)?;
                    session.started();
                    let end = driver::run(&ending, sources, Some(&mut session))?;
                    next_changes = session.changes();
                    end
                }
            };
            let left = machine.stop();
            if options.counters {
                // A standard error that is full or closed is no reason to end otherwise than the guest did.
                let _ = write!(io::stderr().lock(), "{}", machine.counters());
            }
            let by_guest = end == End::Power(PowerEvent::Reset) && !options.no_reboot;
            if by_guest || end == End::Reboot {
                log::info!("the machine resets");
                ram = Some(left);
                changes = next_changes;
                continue;
            }
            return Ok(end);
        }
    }

    fn input(&self, machine: &Machine, raw: bool, resume: &Arc<EventFd>) -> Result<Option<Input>, RunError> {
        if !self.interactive {
            return Ok(None);
        }
        match rustix::io::fcntl_dupfd_cloexec(stdin(), 0) {
            Ok(from) => {
                let serial = Arc::clone(&machine.serial);
                Ok(Some(Input { serial, from, escape: raw, resume: Arc::clone(resume) }))
            }
            // A closed standard input is an empty one.
            Err(rustix::io::Errno::BADF) => Ok(None),
            Err(error) => Err(RunError::Standard(error.into())),
        }
    }

    /// Writes what is left; returns how many bytes nobody took.
    pub fn close(&self) -> u64 {
        let deadline = Instant::now() + DRAIN;
        self.consoles.iter().map(|console| console.drain_on_exit(deadline)).sum()
    }
}
