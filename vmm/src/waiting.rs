//! A machine that is created and does not run: what it is made of, how far the ground below it is laid, who waits for its start.
//!
//! Ground is laid from vm.create on, on threads of its own. Devices that are added before the start change the plan and not
//! the ground, unless they are functions of the host.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::command::Reply;
use api::config::VmConfig;
use api::info::Progress;
use devices::complaints::chain;
use vmm_sys_util::eventfd::EventFd;

use crate::backends::Backends;
use crate::groundwork::{Groundwork, GroundworkError, Preparation};
use crate::host::recorded::RecordedHost;
use crate::kvm::{CpuidAhead, Vm};
use crate::run::{Blueprint, RunError};
use crate::snapshot::{Saved, Snapshot};
use crate::vcpu::WaitingThreads;

/// A machine before its start, or after its end.
pub struct Waiting {
    /// As clients asked for it.
    pub config: VmConfig,
    /// What it is to be.
    pub blueprint: Arc<Blueprint>,
    /// What its devices use of the host.
    pub backends: Arc<Backends>,
    /// Who wants it to start.
    pub boot: Option<Boot>,
    /// If it comes from a snapshot: with the devices that came before that was written.
    pub shown: Option<VmConfig>,
    ground: Ground,
    /// When laying the ground began.
    since: Instant,
}

/// A start that somebody asked for.
pub struct Boot {
    /// Who asked, until there is an answer; `None` for the command line.
    pub starter: Option<Reply<()>>,
    /// The answer was given before memory was there. The threads have their names already.
    pub promised: Option<WaitingThreads>,
}

/// Ground that is laid, and what a machine from a snapshot goes on with.
pub type Laid = (Groundwork, Option<Saved>);

enum Ground {
    /// Nothing is begun.
    None,
    Laying(Preparation<Laid>),
    Laid(Box<Laid>),
    Failed(GroundworkError),
}

impl Waiting {
    /// Checks and plans a machine, opens what it uses, and begins to lay its ground. The devices of a host that is data, in
    /// the file or directory `host`, are emulated.
    pub fn new(config: VmConfig, host: Option<&Path>, now: Instant) -> Result<Self, RunError> {
        let recorded = host.map(RecordedHost::read).transpose()?.map(Arc::new);
        let (blueprint, vm) = Blueprint::new(&config, recorded, CpuidAhead::start())?;
        let backends = Arc::new(Backends::open(&blueprint.spec)?);
        let ground = lay(vm, &blueprint)?;
        Ok(Self { config, blueprint: Arc::new(blueprint), backends, boot: None, shown: None, ground, since: now })
    }

    /// A machine from a snapshot. Opens what it uses, and begins to read its state and RAM.
    pub fn restored(snapshot: Snapshot, now: Instant) -> Result<Self, RunError> {
        let (blueprint, vm) = Blueprint::new(&snapshot.config, None, CpuidAhead::start())?;
        let blueprint = Arc::new(blueprint);
        let (config, shown) = (snapshot.config.clone(), Some(snapshot.shown.clone()));
        snapshot.check(&blueprint).map_err(GroundworkError::from)?;
        let backends = Backends::default();
        backends.open_those(&blueprint.spec, |name| !snapshot.has_left(name))?;
        let ground = Ground::Laying(snapshot.start(vm, Arc::clone(&blueprint))?);
        Ok(Self { config, blueprint, backends: Arc::new(backends), boot: None, shown, ground, since: now })
    }

    /// A machine that ran, with what it keeps.
    #[must_use]
    pub const fn again(config: VmConfig, blueprint: Arc<Blueprint>, backends: Arc<Backends>, now: Instant) -> Self {
        Self { config, blueprint, backends, boot: None, shown: None, ground: Ground::None, since: now }
    }

    /// Changes what it is to be. Nothing changes if that cannot be.
    pub fn change(&mut self, config: VmConfig) -> Result<(), RunError> {
        let blueprint = self.blueprint.changed(&config)?;
        let outcome = match self.backends.open_all(&blueprint.spec) {
            Ok(()) => self.become_it(config, blueprint),
            Err(error) => Err(error.into()),
        };
        if outcome.is_err() {
            self.backends.close_others(&self.blueprint.spec);
        }
        outcome
    }

    fn become_it(&mut self, config: VmConfig, blueprint: Blueprint) -> Result<(), RunError> {
        let moved = blueprint.needs() != self.blueprint.needs();
        let config = std::mem::replace(&mut self.config, config);
        let blueprint = std::mem::replace(&mut self.blueprint, Arc::new(blueprint));
        if !moved {
            return Ok(());
        }
        // Host functions are open for one holder only.
        self.ground = Ground::None;
        let outcome = self.begin(Instant::now());
        if outcome.is_err() {
            (self.config, self.blueprint) = (config, blueprint);
            if let Err(error) = self.begin(Instant::now()) {
                // Which is tried again at the start.
                log::warn!("the ground of the machine is not laid again: {}", chain(&error));
            }
        }
        outcome
    }

    /// Begins to lay the ground if nobody has, or if that failed.
    pub fn begin(&mut self, now: Instant) -> Result<(), RunError> {
        if matches!(self.ground, Ground::None | Ground::Failed(_)) {
            // What failed is let go before it is tried again.
            self.ground = Ground::None;
            // The host may be another than when the machine was created.
            let recorded = self.blueprint.recorded.clone();
            let (blueprint, vm) = Blueprint::new(&self.config, recorded, CpuidAhead::start())?;
            self.ground = lay(vm, &blueprint)?;
            (self.blueprint, self.since) = (Arc::new(blueprint), now);
        }
        Ok(())
    }

    /// Notes that the ground is laid, or could not be. Returns how far it came if that is news.
    pub fn follow(&mut self) -> Option<Progress> {
        if !matches!(&self.ground, Ground::Laying(laying) if laying.is_done()) {
            return None;
        }
        let last = self.progress();
        if let Ground::Laying(laying) = std::mem::replace(&mut self.ground, Ground::None) {
            self.ground = match laying.finish() {
                Ok(laid) => Ground::Laid(Box::new(laid)),
                Err(error) => Ground::Failed(error),
            };
        }
        last
    }

    /// Readable when there may be news.
    #[must_use]
    pub fn event(&self) -> Option<&EventFd> {
        match &self.ground {
            Ground::Laying(laying) => Some(laying.event()),
            _ => None,
        }
    }

    /// How far the ground is laid.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        match &self.ground {
            Ground::Laying(laying) => Some(laying.progress()),
            _ => None,
        }
    }

    /// When a start is to be answered, whether or not memory is there: `after` vm.create.
    #[must_use]
    pub fn answer_at(&self, after: Duration) -> Option<Instant> {
        let waits = self.boot.as_ref().is_some_and(|boot| boot.starter.is_some() && boot.promised.is_none());
        // One that comes back is there when it is whole.
        (waits && self.shown.is_none()).then(|| self.since + after)
    }

    /// Whether a start can go on: the ground is laid, or will never be.
    #[must_use]
    pub const fn can_go_on(&self) -> bool {
        self.boot.is_some() && matches!(self.ground, Ground::Laid(_) | Ground::Failed(_))
    }

    /// The ground, for the start. Without one it has to be laid again.
    pub fn take_ground(&mut self) -> Result<Laid, GroundworkError> {
        match std::mem::replace(&mut self.ground, Ground::None) {
            Ground::Laid(laid) => Ok(*laid),
            Ground::Laying(laying) => laying.finish(),
            Ground::Failed(error) => Err(error),
            Ground::None => Err(GroundworkError::Stopped),
        }
    }

    /// Lets go of it for the end of the process: nothing is waited for or given back.
    pub fn abandon(mut self) {
        if let Ground::Laying(laying) = &self.ground {
            laying.stop();
        }
        std::mem::forget(std::mem::replace(&mut self.ground, Ground::None));
    }

    /// Breaks off what is under way and gives memory and host functions back.
    pub fn release(&mut self) {
        self.shown = None;
        self.ground = Ground::None;
    }
}

fn lay(vm: Vm, blueprint: &Blueprint) -> Result<Ground, RunError> {
    let ground = Groundwork::open(vm, &blueprint.needs(), None)?;
    if ground.is_laid() {
        return Ok(Ground::Laid(Box::new((ground, None))));
    }
    Ok(Ground::Laying(Preparation::start(ground.work(), move |work| ground.lay(work).map(|()| (ground, None)))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn a_change_for_which_no_ground_can_be_laid_leaves_the_machine_as_it_was() {
        let config = VmConfig { memory: "64M".parse().unwrap(), ..VmConfig::default() };
        let mut vm = Waiting::new(config.clone(), None, Instant::now()).unwrap();
        // As far as the plan goes it can be, and no host keeps so many pages ready.
        let more = VmConfig {
            memory: "size=32G,hugepages=1G".parse().unwrap(),
            devices: vec!["stub,id=new".parse().unwrap()],
            ..config.clone()
        };
        vm.blueprint.changed(&more).unwrap();
        vm.change(more).unwrap_err();
        assert_eq!(vm.config, config);
        assert!(!vm.blueprint.spec.endpoints.keys().any(|name| name.0 == "new"));
        assert!(matches!(vm.ground, Ground::Laid(_) | Ground::Laying(_)));
    }
}
