//! Answers commands while a machine runs, and follows devices that come and go.

mod snapshots;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::channel::Inbox;
use api::command::{Added, Command, Reply, Resize};
use api::config::{DeviceConfig, Policy, Size, VmConfig};
use api::error::{ApiError, ErrorKind};
use api::events::Event;
use api::info::{DeviceInfo, Gauge, Phase, Published, VmInfo};

use devices::complaints::chain;
use devices::eventfd;
use devices::virtio::balloon::BalloonControl;
use pci::topology::Name;
use vmm_sys_util::eventfd::EventFd;

use crate::additions;
use crate::arrivals::{Arrival, Arrivals};
use crate::backends::Backend;
use crate::changes::Changes;
use crate::groundwork::{Preparation, TICK};
use crate::hotplug::{Coming, HotPlug, HotPlugError};
use crate::inject;
use crate::listing;
use crate::machine::{Design, Machine};
use crate::main_loop::{Attendant, End};
use crate::own_files::{self, Beside};
use crate::plan::MachinePlan;
use crate::resize::Resizer;
use crate::snapshot::Written;
use crate::spec::{self, Spec, Virtio};

/// What shall follow the end of a guest that a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum After {
    /// Nothing was asked: the guest ended by itself.
    #[default]
    Nothing,
    /// The machine is configured and does not run.
    Created,
    /// There is no machine.
    Absent,
    /// The process ends.
    Exit,
}

/// The commands' side of a running machine, for as long as the process lives.
pub struct Service<'a> {
    /// Where commands come from.
    pub inbox: &'a Inbox,
    /// Where the machine's state is made known.
    pub published: &'a Published,
    /// What the operator has decided.
    pub policy: Option<&'a Policy>,
    /// What the process uses beside its machine.
    pub beside: Beside<'a>,
    /// Who asked for the start or the reset, until it has happened.
    pub starter: Option<Reply<()>>,
    /// Devices whose servers are being met.
    pub arrivals: Arrivals,
    /// Who asked for the end; answered when the machine is gone.
    pub enders: Vec<Reply<()>>,
    /// What shall follow.
    pub after: After,
}

/// One machine's commands.
pub struct Session<'a, 's> {
    service: &'a mut Service<'s>,
    machine: &'a mut Machine,
    config: &'a VmConfig,
    spec: &'a Spec,
    plan: &'a MachinePlan,
    hotplug: HotPlug,
    resizer: Resizer,
    promises: Vec<Promise>,
    /// Touches memory for devices that may come.
    _touching: Option<Preparation<()>>,
    /// A snapshot under way, and who asked for it.
    writing: Option<(Written, Reply<()>)>,
    /// Readable when it has ended.
    written: Arc<EventFd>,
    /// A snapshot was written that needs the guest's memory as it is.
    stands: bool,
    /// Readable when the server of a device has ended; the machine keeps it.
    ends: RawFd,
}

/// Somebody who waits for a device that was accepted.
struct Promise {
    /// Its first function.
    name: Name,
    /// `None` once there was an answer.
    reply: Option<Reply<Added>>,
    /// When there is an answer, whether or not the device is there.
    answer_at: Instant,
}

/// How long a client waits for a device that needs all of memory mapped. Kata Containers gives a request five seconds, and its
/// agent three more from the answer on, so that the guest has seven to find it.
const PATIENCE: Duration = Duration::from_secs(4);

impl<'a, 's> Session<'a, 's> {
    /// For a machine that has just been started.
    pub fn new(
        service: &'a mut Service<'s>,
        machine: &'a mut Machine,
        design: &Design<'a>,
        changes: Changes,
    ) -> io::Result<Self> {
        let (config, spec) = (design.config, design.spec);
        let extent = changes.extent(config);
        let blocks = machine.backends().memory_regions();
        let resizer = Resizer::new(config, spec.numa.as_ref(), &design.plan.map.hot_plug, extent, blocks)?;
        let hotplug = HotPlug::new(spec, config.pcie, changes, design.recorded.cloned())?;
        let premap = service.policy.is_some_and(|policy| policy.premap);
        let touching = if premap { machine.touch_memory() } else { Ok(None) };
        let touching = touching.unwrap_or_else(|error| {
            log::warn!("memory is not touched ahead of devices that may come: {}", chain(&error));
            None
        });
        let (written, ends) = (Arc::new(eventfd::new()?), machine.backends().ends()?.as_raw_fd());
        let (promises, plan) = (Vec::new(), design.plan);
        Ok(Self {
            service,
            machine,
            config,
            spec,
            plan,
            hotplug,
            resizer,
            promises,
            _touching: touching,
            writing: None,
            written,
            stands: false,
            ends,
        })
    }

    /// Tells that the machine runs, or that it is held until it is resumed.
    pub fn started(&mut self, phase: Phase) {
        if phase == Phase::Paused {
            self.hotplug.pause(Instant::now());
        }
        self.publish(phase);
        if phase == Phase::Running {
            self.service.published.events().tell(Event::KernelEntered);
        }
        // Of what was on its way out at a reset nothing is left.
        self.forget();
        if let Some(reply) = self.service.starter.take() {
            reply.send(Ok(()));
        }
    }

    /// How the devices differ from those at the first start. A removal under way counts as done.
    #[must_use]
    pub fn changes(mut self) -> Changes {
        for promise in std::mem::take(&mut self.promises) {
            let Some(reply) = promise.reply else { continue };
            // After a reset the device is there.
            let device = self.hotplug.coming().device(&promise.name).and_then(|added| listing::promised(self.machine, added));
            reply.send(if self.service.after == After::Nothing { Ok(device) } else { Err(HotPlugError::Ended.for_client()) });
        }
        // A device of the same name that comes later has another side of the host's.
        for name in self.hotplug.leaving() {
            self.machine.backends().close(name);
        }
        let mut changes = self.hotplug.changes(self.machine);
        changes.resize(self.resizer.extent().clone());
        changes
    }

    fn publish(&self, phase: Phase) {
        let (cpus, memory, actual) = (self.resizer.cpus(), self.resizer.memory(), self.resizer.actual());
        let devices = self.devices();
        // What came and went since the start is in what was told before.
        let mut config = self.service.published.get().map_or_else(|| self.config.clone(), |info| info.config.clone());
        config.cpus.count = cpus;
        config.memory.size = Size(memory);
        // Terminals that were made for it have their paths since it runs.
        (config.serial, config.console) = (self.config.serial.clone(), self.config.console.clone());
        config.debug_console.clone_from(&self.config.debug_console);
        let balloon = self.machine.balloon().map(|balloon| Gauge::of(balloon.gauge())).unwrap_or_default();
        self.service.published.set(Some(VmInfo { config, phase, progress: None, memory: actual, balloon, devices }));
    }

    /// Clients take the numbers of processors and bytes of the configuration for those of the moment.
    fn publish_size(&self) {
        let (cpus, memory, actual) = (self.resizer.cpus(), self.resizer.memory(), self.resizer.actual());
        self.service.published.update(|info| {
            info.config.cpus.count = cpus;
            info.config.memory.size = Size(memory);
            info.memory = actual;
        });
    }

    fn end(&mut self, after: After, reply: Reply<()>) -> Option<End> {
        self.service.after = after;
        self.service.enders.push(reply);
        Some(End::Command)
    }

    fn obey(&mut self, command: Command) -> Option<End> {
        let name = command.name();
        if let Some(why) = self.refusal(&command) {
            command.refuse(why);
            return None;
        }
        match command {
            Command::Create { reply, .. } | Command::Restore { reply, .. } => {
                reply.send(Err(ApiError::wrong_state(name, &"there already; delete it first")));
            }
            // In the dialect a machine that is held is started by going on.
            Command::Boot { reply } | Command::Resume { reply } => self.resume(reply),
            Command::Delete { reply } => return self.end(After::Absent, reply),
            Command::Shutdown { reply } => return self.end(After::Created, reply),
            Command::VmmShutdown { reply } => return self.end(After::Exit, reply),
            Command::Reboot { reply } => {
                self.service.starter = Some(reply);
                return Some(End::Reboot);
            }
            Command::Pause { reply } => {
                self.machine.pause();
                self.hotplug.pause(Instant::now());
                self.publish(Phase::Paused);
                reply.send(Ok(()));
            }
            Command::Snapshot { to, reply } => self.snapshot(&to, reply),
            Command::Resize { to, reply } => reply.send(self.resize(to)),
            Command::PowerButton { reply } => {
                self.machine.press_power_button();
                reply.send(Ok(()));
            }
            Command::AddDevice { functions, reply } => self.add_device(functions, reply),
            Command::AddDisk { config, reply } => self.add_virtio(Virtio::Disk(*config), reply),
            Command::AddNet { config, taps, reply } if !taps.is_empty() => {
                let side = Backend::of_taps(&config, taps).map_err(HotPlugError::Backend);
                self.put_arrived(Virtio::Net(*config), side, reply);
            }
            Command::AddNet { config, reply, .. } => self.add_virtio(Virtio::Net(*config), reply),
            Command::AddFs { config, reply } => self.add_virtio(Virtio::Folder(*config), reply),
            Command::AddVsock { config, reply } => self.add_virtio(Virtio::Vsock(*config), reply),
            Command::RemoveDevice { id, reply } => {
                let removed = self.hotplug.remove(self.machine, &id, Instant::now());
                self.removed(removed.is_ok());
                reply.send(removed.map_err(|error| error.for_client()));
            }
            Command::ListDevices { reply } => reply.send(Ok(listing::listing(self.machine, &self.hotplug))),
            Command::InjectError { at, error, reply } => reply.send(inject::inject(self.machine.pci(), &at, &error)),
            Command::Counters { reply } => reply.send(Ok(self.machine.counters().for_client())),
        }
        None
    }

    /// Why the machine cannot do this in the state that it is in.
    fn refusal(&self, command: &Command) -> Option<ApiError> {
        let ends_or_looks = matches!(
            command,
            Command::Delete { .. }
                | Command::Shutdown { .. }
                | Command::VmmShutdown { .. }
                | Command::Pause { .. }
                | Command::ListDevices { .. }
                | Command::Counters { .. }
        );
        if self.writing.is_some() && !ends_or_looks {
            let why = "a snapshot is being written: wait until vm.info shows no progress any more";
            return Some(ApiError::new(ErrorKind::WrongState, why));
        }
        let state = match command {
            Command::Boot { .. } if !self.is_paused() => {
                return Some(ApiError::new(ErrorKind::WrongState, "the virtual machine runs already"));
            }
            Command::Pause { .. } if self.is_paused() => "paused already",
            Command::Resume { .. } if !self.is_paused() => "running: it is not paused",
            _ => return None,
        };
        Some(ApiError::wrong_state(command.name(), &state))
    }

    fn is_paused(&self) -> bool {
        self.service.published.get().is_some_and(|info| info.phase == Phase::Paused)
    }

    /// Lets a machine go on that is held.
    fn resume(&mut self, reply: Reply<()>) {
        if std::mem::take(&mut self.stands) {
            log::warn!(
                "the guest goes on in the memory with which it was written down: that snapshot cannot be restored any more"
            );
        }
        self.hotplug.resume(Instant::now());
        self.machine.resume();
        self.publish(Phase::Running);
        reply.send(Ok(()));
    }

    /// Adds the functions of a device, and answers when they are there or [`PATIENCE`] is over.
    fn add_device(&mut self, mut functions: Vec<DeviceConfig>, reply: Reply<Added>) {
        if let Some(policy) = self.service.policy {
            functions.iter_mut().for_each(|function| policy.complete(function));
        }
        // All that the guest has counts against the limit of locked memory.
        let mut with = self.config.clone();
        with.memory.size = Size(self.resizer.actual());
        let added = self.hotplug.add(self.machine, &with, &functions);
        if let (Ok(Coming::There(name) | Coming::Waits(name)), [only]) = (&added, functions.as_slice()) {
            let device = DeviceConfig { id: Some(name.0.clone()), ..only.clone() };
            self.service.published.update(|info| info.config.devices.push(device));
        }
        match added {
            Ok(Coming::Waits(name)) => {
                self.promises.push(Promise { name, reply: Some(reply), answer_at: Instant::now() + PATIENCE });
            }
            Ok(Coming::There(name)) => {
                self.publish_devices();
                reply.send(Ok(listing::device(self.machine, &self.hotplug, &name)));
            }
            Err(error) => reply.send(Err(error.for_client())),
        }
    }

    /// Adds a device, once its server has answered if it has one.
    fn add_virtio(&mut self, device: Virtio, reply: Reply<Added>) {
        // What is on its way will use what it names, too.
        let there = self.hotplug.virtio().chain(self.service.arrivals.on_their_way());
        let with = additions::beside(self.config, there, &device);
        if let Err(error) = own_files::check(&with, self.service.beside) {
            return reply.send(Err(ApiError::from_error(ErrorKind::BadRequest, &error)));
        }
        if device.server().is_none() {
            return self.put_virtio(device, None, reply);
        }
        match spec::beside::reaches(self.config, &device) {
            Ok(()) => self.service.arrivals.meet(device, reply),
            Err(error) => reply.send(Err(ApiError::from_error(error.kind(), &error))),
        }
    }

    /// Puts a device in whose side of the host is open, or says why it is not.
    fn put_arrived(&mut self, device: Virtio, side: Result<Backend, HotPlugError>, reply: Reply<Added>) {
        match side {
            Ok(side) => self.put_virtio(device, Some(side), reply),
            Err(error) => reply.send(Err(error.for_client())),
        }
    }

    fn put_virtio(&mut self, device: Virtio, side: Option<Backend>, reply: Reply<Added>) {
        let id = device.id().map(str::to_owned);
        let added = self.hotplug.add_virtio(self.machine, device.clone(), id.as_deref(), side);
        if let Ok(name) = &added {
            self.service.published.update(|info| additions::note(&mut info.config, device, name));
        }
        self.publish_devices();
        reply.send(added.map(|id| listing::device(self.machine, &self.hotplug, &id)).map_err(|error| error.for_client()));
    }

    /// Makes known what devices there are. Comes before the answer to who changed that: vm.info is asked for next.
    fn publish_devices(&self) {
        self.service.published.update(|info| info.devices = self.devices());
    }

    /// The devices, with the places that their BARs have at this moment.
    fn devices(&self) -> Vec<DeviceInfo> {
        self.machine.slot_events().look();
        listing::devices(self.machine, &self.hotplug)
    }

    /// Forgets what was told of devices that are not there any more.
    fn forget(&self) {
        let there = |id: &str| self.hotplug.endpoint(&Name::from(id)).is_some();
        self.service.published.update(|info| additions::forget(&mut info.config, there));
    }

    /// Makes known what a removal changes that has begun, or was refused.
    fn removed(&self, began: bool) {
        if began {
            // Names by place would be others' when it has left.
            self.service.published.update(|info| additions::name_all(&mut info.config, None));
        }
        self.forget();
        self.publish_devices();
    }

    /// Puts in devices whose memory is ready, and answers who has waited long enough.
    fn keep_promises(&mut self) {
        let outcomes = self.hotplug.follow_coming(self.machine, self.resizer.is_busy());
        let ended = [self.resizer.take_last(), self.hotplug.take_last()];
        ended.into_iter().flatten().for_each(|last| self.service.published.set_progress(Some(last)));
        if !outcomes.is_empty() {
            self.forget();
            self.publish_devices();
        }
        for (name, outcome) in outcomes {
            let promise = self.promises.extract_if(.., |promise| promise.name == name).next();
            match (promise.and_then(|promise| promise.reply), outcome) {
                (None, Ok(())) => {}
                (Some(reply), Ok(())) => reply.send(Ok(listing::device(self.machine, &self.hotplug, &name))),
                (Some(reply), Err(error)) => reply.send(Err(error.for_client())),
                (None, Err(error)) => {
                    let why = chain(&error);
                    log::error!("{name} was accepted and does not come: {why}");
                    self.service.published.events().tell(Event::DeviceFailed { id: name.to_string(), why });
                }
            }
        }
        let now = Instant::now();
        for promise in &mut self.promises {
            let device = || self.hotplug.coming().device(&promise.name).and_then(|added| listing::promised(self.machine, added));
            let there = self.hotplug.endpoint(&promise.name).is_some();
            match (there, promise.reply.take_if(|_| !there || promise.answer_at <= now)) {
                (true, Some(reply)) => {
                    log::info!("{} is promised; it comes when memory is mapped for it", promise.name);
                    reply.send(Ok(device()));
                }
                (false, Some(reply)) => reply.send(Err(HotPlugError::Unknown { name: promise.name.clone() }.for_client())),
                (_, None) => {}
            }
        }
        self.promises.retain(|promise| self.hotplug.endpoint(&promise.name).is_some());
        let written = self.writing.as_ref().and_then(|(written, _)| written.progress());
        let progress = written.or_else(|| self.hotplug.coming().progress()).or_else(|| self.resizer.progress());
        self.service.published.set_progress(progress);
    }

    /// All or nothing of what is asked for.
    fn resize(&mut self, to: Resize) -> Result<(), ApiError> {
        self.resizer.check(self.machine, &to).map_err(|error| error.for_client())?;
        let memory = to.ram.unwrap_or_else(|| self.resizer.memory());
        // Memory does not shrink below the balloon either.
        let kept = || self.machine.balloon().map(|balloon| balloon.wanted()).filter(|_| to.ram.is_some());
        let balloon = to.balloon.or_else(kept).map(|bytes| self.check_balloon(bytes, memory)).transpose()?.flatten();
        let done = self.resizer.resize(self.machine, &to).map_err(|error| error.for_client());
        self.publish_size();
        done?;
        if let Some((balloon, bytes)) = balloon.filter(|_| to.balloon.is_some()) {
            balloon.ask(bytes);
            self.service.published.update(|info| {
                if let Some(balloon) = &mut info.config.balloon {
                    balloon.size = Size(bytes);
                }
            });
        }
        Ok(())
    }
}

/// Balloons.
impl Session<'_, '_> {
    /// Whether the guest can be asked for a balloon of this size, with `memory` in all; whom to ask. It fills at the guest's own
    /// pace.
    fn check_balloon(&self, bytes: u64, memory: u64) -> Result<Option<(Arc<BalloonControl>, u64)>, ApiError> {
        let refuse = |kind, why: &str| Err(ApiError::new(kind, format!("the balloon: {why}")));
        match self.machine.balloon() {
            None if bytes == 0 => Ok(None),
            None => refuse(ErrorKind::Unsupported, "this machine has none; start it with --balloon 0"),
            Some(balloon) if balloon.pinned() && bytes > 0 => {
                refuse(ErrorKind::Unsupported, "devices of the host need all of the guest's memory in its place")
            }
            Some(_) if bytes > memory => refuse(ErrorKind::BadRequest, "it cannot be larger than the guest's memory"),
            Some(_) if !bytes.is_multiple_of(4096) => {
                refuse(ErrorKind::BadRequest, &format!("{bytes} bytes are not whole pages; give a multiple of 4096"))
            }
            Some(balloon) => Ok(Some((balloon, bytes))),
        }
    }
}

impl Attendant for Session<'_, '_> {
    fn descriptors(&self) -> Vec<i32> {
        vec![
            self.service.inbox.as_raw_fd(),
            self.machine.slot_events().as_raw_fd(),
            self.machine.ejected().as_raw_fd(),
            self.resizer.as_raw_fd(),
            self.hotplug.coming().as_raw_fd(),
            self.machine.host_signals().as_raw_fd(),
            self.service.arrivals.as_raw_fd(),
            self.written.as_raw_fd(),
            self.ends,
        ]
    }

    fn attend(&mut self) -> Option<End> {
        self.follow_writing();
        if self.resizer.follow(self.machine) {
            self.publish_size();
        }
        let now = Instant::now();
        if self.hotplug.follow_host(self.machine, now) {
            self.removed(true);
        }
        let left = self.hotplug.follow(self.machine, now);
        if left {
            self.forget();
        }
        if left || self.machine.slot_events().look_at().is_some_and(|at| at <= now) {
            self.publish_devices();
        }
        let leaving = |name: &Name| self.hotplug.leaving().any(|leaving| leaving == name);
        self.machine.backends().tell_ends(Some(self.service.published.events()), leaving);
        for failure in self.hotplug.take_failures() {
            self.service.published.events().tell(failure);
        }
        while let Some(Arrival { device, side, reply, .. }) = self.service.arrivals.arrived() {
            self.put_arrived(device, side.map_err(HotPlugError::Backend), reply);
        }
        while let Some(command) = self.service.inbox.next() {
            if let Some(end) = self.obey(command) {
                return Some(end);
            }
        }
        // Memory grows, or is mapped for functions of the host that come: not both at one time.
        self.keep_promises();
        if !self.hotplug.coming().is_busy() && self.resizer.go_on(self.machine) {
            self.publish_size();
        }
        None
    }

    fn deadline(&self) -> Option<Instant> {
        let progress = self.hotplug.coming().progress().or_else(|| self.resizer.progress());
        let tick = (progress.is_some() || self.writing.is_some()).then(|| Instant::now() + TICK);
        let answers = self.promises.iter().filter(|promise| promise.reply.is_some()).map(|promise| promise.answer_at);
        let look = self.machine.slot_events().look_at();
        self.hotplug.deadline().into_iter().chain(tick).chain(answers).chain(look).min()
    }
}
