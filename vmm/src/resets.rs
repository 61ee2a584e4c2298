//! Runs a guest from its start to its end: through resets, one machine after the other around the same RAM and consoles.

use std::sync::Arc;

use api::events::Event;
use api::info::Phase;
use devices::eventfd;
use devices::legacy::PowerEvent;
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
use crate::main_loop::{Attendant, End, MainLoop, Sources};
use crate::outputs::{Outputs, Tell};
use crate::run::{RunError, needs};
use crate::session::{Service, Session};
use crate::signals::Signals;
use crate::snapshot::Saved;
use crate::spare::Spare;
use crate::terminal::RawTerminal;
use crate::vcpu::WaitingThreads;

/// What the first machine of a guest stands on.
pub struct Start<'a> {
    /// The VM, RAM and host functions.
    pub ground: Groundwork,
    /// Threads for its vCPUs, if they are there already.
    pub threads: Option<WaitingThreads>,
    /// The machine that it goes on from, held, if it comes from a snapshot.
    pub saved: Option<&'a Saved>,
}

/// Runs a guest to its end. Devices that came and went stay so through resets; commands of `service` are answered meanwhile.
pub fn run(
    outputs: &Outputs,
    design: &Design<'_>,
    start: Start<'_>,
    options: &RunOptions,
    mut service: Option<&mut Service<'_>>,
) -> Result<End, RunError> {
    let Start { ground, threads, saved } = start;
    let mut course = Course::new(outputs, options, service.as_deref())?;
    let mut changes = saved.map_or_else(Changes::default, |saved| saved.changes.clone());
    let mut state = saved.map(|saved| saved.state.as_slice());
    let mut base = Base::Laid(Box::new(ground), threads);
    loop {
        let (plan, extent) = (changes.plan(design.plan), changes.extent(design.config));
        let design = Design { plan: &plan, added: changes.added(), extent: Some(&extent), state: state.take(), ..*design };
        let (ground, threads) = match base {
            Base::Laid(ground, threads) => (*ground, threads),
            Base::Ram(ram) => match lay_again(&design, &changes, ram, service.as_deref_mut())? {
                Some(ground) => (ground, None),
                None => return Ok(End::Command),
            },
        };
        let mut machine = Machine::start(ground, threads, &design, &course.surroundings)?;
        let (end, next) = course.follow(&mut machine, &design, &changes, service.as_deref_mut())?;
        let ram = machine.stop();
        if options.counters {
            logger::say(&machine.counters().to_string());
        }
        if !course.goes_on(end) {
            return Ok(end);
        }
        (base, changes) = (Base::Ram(ram), next);
    }
}

/// What a machine is made on.
enum Base {
    /// The first one.
    Laid(Box<Groundwork>, Option<WaitingThreads>),
    /// One after a reset: RAM as the guest left it.
    Ram(GuestMemoryMmap),
}

/// What stays through resets.
struct Course<'a> {
    outputs: &'a Outputs,
    options: &'a RunOptions,
    surroundings: Surroundings,
    tell: Tell,
    /// Signalled when a console that was full has room for standard input.
    resume: Arc<EventFd>,
    terminal: Option<RawTerminal>,
    spare: Spare,
}

impl<'a> Course<'a> {
    fn new(outputs: &'a Outputs, options: &'a RunOptions, service: Option<&Service<'_>>) -> Result<Self, RunError> {
        let resume = Arc::new(eventfd::new().map_err(RunError::Event)?);
        let events = service.map(|service| service.published.events().clone());
        let tell: Tell = Arc::new(move |event| {
            if let Some(events) = &events {
                events.tell(event);
            }
        });
        let surroundings = outputs.surroundings(&resume, options, &tell);
        Ok(Self { outputs, options, surroundings, tell, resume, terminal: None, spare: Spare::default() })
    }

    /// Follows a machine that was just started to its end. Returns that, and how the devices of the next one differ from those
    /// of the first, as `changes` are for this one.
    fn follow(
        &mut self,
        machine: &mut Machine,
        design: &Design<'_>,
        changes: &Changes,
        service: Option<&mut Service<'_>>,
    ) -> Result<(End, Changes), RunError> {
        // Until here a signal ends the process at once, which a start that takes minutes must allow.
        let signals = Signals::handle().map_err(RunError::Event)?;
        self.outputs.connect(machine);
        if self.outputs.is_interactive() && self.terminal.is_none() {
            self.terminal = RawTerminal::enter().map_err(RunError::Standard)?;
        }
        let input = self.outputs.input(machine, self.terminal.is_some(), &self.resume)?;
        let sources = Sources { signals, consoles: self.outputs.consoles().to_vec(), input, limit: self.options.time_limit };
        let ending = Arc::clone(&machine.ending);
        let Some(service) = service else {
            let signals = Arc::clone(machine.host_signals());
            let mut lookout = Lookout { signals, backends: Arc::clone(design.backends) };
            let end = MainLoop::new(&ending, sources, lookout.descriptors())?.run(&mut lookout)?;
            let mut changes = changes.clone();
            changes.remove(&hotplug::wanted_back(machine));
            return Ok((end, changes));
        };
        let published = service.published;
        let mut session = Session::new(service, machine, design, changes.clone()).map_err(RunError::Event)?;
        // Whoever hears that the machine runs can count on it.
        let mut main_loop = MainLoop::new(&ending, sources, session.descriptors())?;
        self.spare.keep();
        session.started(if design.state.is_some() { Phase::Paused } else { Phase::Running });
        let end = main_loop.run(&mut session)?;
        self.spare.give(published.door());
        Ok((end, session.changes()))
    }

    /// Whether another machine follows the one that ended so, which is told.
    fn goes_on(&self, end: End) -> bool {
        let by_guest = matches!(end, End::Power(PowerEvent::Reset) | End::Watchdog) && !self.options.no_reboot;
        if !by_guest && end != End::Reboot {
            return false;
        }
        if end == End::Watchdog {
            log::warn!("the guest did not serve its watchdog in time, which resets it");
        }
        log::info!("the machine resets");
        (self.tell)(Event::Reset(end.to_string()));
        true
    }
}

/// What the machine stands on after a reset, around the `ram` that it had. `None` if a client ended the machine meanwhile.
fn lay_again(
    design: &Design<'_>,
    changes: &Changes,
    ram: GuestMemoryMmap,
    service: Option<&mut Service<'_>>,
) -> Result<Option<Groundwork>, RunError> {
    let mut needs = needs(design.config, design.spec, design.plan);
    changes.add_to(&mut needs, design.spec);
    let ground = Groundwork::open(Vm::new()?, &needs, Some(ram))?;
    match service {
        Some(service) => Ok(between::lay(ground, service)?),
        None => {
            ground.lay(&ground.work())?;
            Ok(Some(ground))
        }
    }
}
