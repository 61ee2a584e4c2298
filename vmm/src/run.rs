//! Runs a machine from its configuration to its end: looks at the host, plans, starts, starts again after a reset.

use std::fs::OpenOptions;
use std::io;
use std::sync::Arc;

use api::config::{HotPlugMethod, LogLevel, VmConfig};
use api::http::{ListenError, Listening};
use arch::x86_64::cpuid;
use devices::legacy::{ConsoleError, PowerEvent};
use kvm_bindings::CpuId;
use log::LevelFilter;
use pci::topology::{Name, Tree};
use thiserror::Error;

use crate::backends::{BackendError, Backends};
use crate::boot::{Firmware, FirmwareError};
use crate::cdi::{self, CdiError};
use crate::cli::RunOptions;
use crate::groundwork::{Groundwork, GroundworkError, Needs};
use crate::host::recorded::{RecordedError, RecordedHost};
use crate::host::{self, HostError};
use crate::kvm::{CpuidAhead, KvmError, Vm, host_cpuid};
use crate::logger;
use crate::machine::{self, Design, MachineError};
use crate::main_loop::{End, MainLoopError};
use crate::memory::{self, MemoryError};
use crate::outputs::Outputs;
use crate::own_files::{self, Beside, FilesError};
use crate::plan::{self, Limits, MachinePlan, MachinePlanError};
use crate::print::print;
use crate::resets::{self, Start};
use crate::session::Service;
use crate::spec::{self, Endpoint, Spec, SpecError};
use crate::vcpu::{Ended, WaitingThreads};

/// Exit codes of the process. Even ones are Banyan's; odd ones above 1 come from the guest's debug exit port.
pub mod exit_code {
    /// The guest powered off.
    pub const POWER_OFF: u8 = 0;
    /// The guest reset itself and was not to start again.
    pub const RESET: u8 = 4;
    /// Triple fault.
    pub const TRIPLE_FAULT: u8 = 6;
    /// The guest's kernel said that it panicked, and was not to start again.
    pub const PANIC: u8 = 10;
    /// KVM could not go on.
    pub const BROKEN: u8 = 8;
    /// Added to the number of a signal.
    pub const SIGNAL: u8 = 128;
}

/// `banyan run`. CPUID may have been asked for. Returns the exit code of the process.
pub fn run(config: &VmConfig, options: &RunOptions, ahead: Option<CpuidAhead>) -> Result<u8, RunError> {
    own_files::check(config, Beside::of(options))?;
    start_log(&options.log)?;
    if options.dry_run {
        return dry_run(config, options);
    }
    let recorded = options.host.as_deref().map(RecordedHost::read).transpose()?.map(Arc::new);
    let ahead = ahead.unwrap_or_else(CpuidAhead::start);
    // They start while the machine is planned and built.
    let asker = ahead.clone();
    let threads = WaitingThreads::start_with(0..config.cpus.count, move || asker.ask()).map_err(MachineError::from)?;
    let (blueprint, vm) = Blueprint::new(config, recorded, ahead)?;
    let backends = Arc::new(Backends::open(&blueprint.spec)?);
    let guest = Guest::open(Arc::new(blueprint), backends, Beginning::Boot)?;
    let ground = Groundwork::open(vm, &guest.blueprint.needs(), None)?;
    ground.lay(&ground.work())?;
    let start = Start { ground, threads: Some(threads), saved: None };
    Ok(exit_code(guest.run(start, options, None)?))
}

/// A machine that is decided, with nothing made of it.
#[derive(Clone)]
pub struct Blueprint {
    /// As configured, with what CDI files say.
    pub config: VmConfig,
    /// By name.
    pub spec: Spec,
    /// By number.
    pub plan: MachinePlan,
    cpuid: CpuId,
    /// A host that is data, in place of this one.
    pub recorded: Option<Arc<RecordedHost>>,
}

impl Blueprint {
    /// Reads CDI files, looks at the host, plans. The VM that comes with it is for its first machine. The devices of a host
    /// that is data are emulated.
    pub fn new(config: &VmConfig, recorded: Option<Arc<RecordedHost>>, ahead: CpuidAhead) -> Result<(Self, Vm), RunError> {
        let (config, spec) = decide(config, recorded.as_deref())?;
        let vm = Vm::new()?;
        let cpuid = ahead.get()?;
        let plan = plan_machine(&config, &spec, cpuid.as_slice())?;
        Ok((Self { config, spec, plan, cpuid, recorded }, vm))
    }

    /// The same machine with another configuration.
    pub fn changed(&self, config: &VmConfig) -> Result<Self, RunError> {
        let (config, spec) = decide(config, self.recorded.as_deref())?;
        let plan = plan_machine(&config, &spec, self.cpuid.as_slice())?;
        Ok(Self { config, spec, plan, cpuid: self.cpuid.clone(), recorded: self.recorded.clone() })
    }

    /// What it stands on.
    #[must_use]
    pub fn needs(&self) -> Needs {
        needs(&self.config, &self.spec, &self.plan)
    }
}

/// Names and nests.
fn decide(config: &VmConfig, recorded: Option<&RecordedHost>) -> Result<(VmConfig, Spec), RunError> {
    own_files::check(config, Beside::default())?;
    let (config, mut cdi_notes, host) = look(config, recorded)?;
    let host = spec::Host { emulated: recorded.is_some(), ..host };
    let mut spec = spec::spec(&config, &host)?;
    spec.notes.append(&mut cdi_notes);
    Ok((config, spec))
}

/// What a machine stands on. Functions that have left are not in the plan.
#[must_use]
pub fn needs(config: &VmConfig, spec: &Spec, plan: &MachinePlan) -> Needs {
    let function = |(name, endpoint): (&Name, &Endpoint)| match endpoint {
        Endpoint::Vfio { at, .. } if plan.pci.by_name(&name.0).is_some() => Some((*at, name.0.clone())),
        _ => None,
    };
    Needs {
        memory: config.memory.clone(),
        ranges: plan.map.ram.clone(),
        named: if config.memory.file.is_some() { plan.map.ram.clone() } else { Vec::new() },
        blocks: if config.memory.method == HotPlugMethod::VirtioMem { plan.map.hot_plug.clone() } else { Vec::new() },
        bindings: spec.numa.as_ref().map_or_else(Vec::new, |numa| numa.bindings(&plan.map)),
        functions: spec.endpoints.iter().filter_map(function).collect(),
    }
}

/// Where a guest begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beginning {
    /// With its kernel or firmware.
    Boot,
    /// In the middle: what runs is in the RAM of a snapshot.
    Snapshot,
}

/// A guest that has everything but a machine.
pub struct Guest {
    blueprint: Arc<Blueprint>,
    outputs: Outputs,
    backends: Arc<Backends>,
}

impl Guest {
    /// Looks at what shall run, opens outputs, says what a user should know.
    pub fn open(blueprint: Arc<Blueprint>, backends: Arc<Backends>, beginning: Beginning) -> Result<Self, RunError> {
        for note in notes(&blueprint.spec, &blueprint.plan) {
            log::warn!("{note}");
        }
        for remark in &blueprint.spec.remarks {
            log::info!("{remark}");
        }
        if beginning == Beginning::Boot {
            machine::check_payload(&blueprint.config)?;
        }
        let mut config = blueprint.config.clone();
        let outputs = Outputs::open(&mut config)?;
        // With the paths of new terminals.
        let blueprint =
            if config == blueprint.config { blueprint } else { Arc::new(Blueprint { config, ..(*blueprint).clone() }) };
        Ok(Self { blueprint, outputs, backends })
    }

    /// Runs it to its end and writes out its consoles.
    pub fn run(&self, start: Start<'_>, options: &RunOptions, service: Option<&mut Service<'_>>) -> Result<End, RunError> {
        let Blueprint { config, spec, plan, cpuid, recorded } = &*self.blueprint;
        let (backends, recorded) = (&self.backends, recorded.as_ref());
        let design = Design { config, spec, plan, cpuid, added: &[], extent: None, backends, recorded, state: None };
        let end = resets::run(&self.outputs, &design, start, options, service);
        let lost = self.outputs.close();
        if lost > 0 {
            log::warn!("{lost} bytes of console output were lost: the output failed or was too slow");
        }
        end
    }
}

/// Reads CDI files and looks at the host, or at one that is data. Returns the configuration with what CDI files add to it, and
/// what is to be said of them.
fn look(config: &VmConfig, recorded: Option<&RecordedHost>) -> Result<(VmConfig, Vec<String>, spec::Host), RunError> {
    let (config, notes) = match recorded {
        Some(recorded) => cdi::apply_in(&recorded.tree, config)?,
        None => cdi::apply(config)?,
    };
    let host = match recorded {
        Some(recorded) => host::look_in(&recorded.tree, &config)?,
        None => host::look(&config)?,
    };
    Ok((config, notes, host))
}

/// Plans without a machine, for physical addresses of `address_bits`, by default this processor's.
pub fn plan_only(config: &VmConfig, spec: &Spec, address_bits: Option<u8>) -> Result<MachinePlan, RunError> {
    let host = match host_cpuid() {
        Ok(cpuid) => cpuid,
        // A plan needs the address width only, which the processor tells as well.
        Err(_) => CpuId::from_entries(&host_leaves()).map_err(|_| RunError::Cpuid)?,
    };
    let mut limits = limits(config, host.as_slice())?;
    if let Some(bits) = address_bits {
        limits.address_bits = bits.min(config.max_physical_bits.unwrap_or(u8::MAX));
    }
    Ok(plan::plan_within(&spec.topology, &limits, spec.iommu_bits)?)
}

/// Plans a machine before anybody has given it a device.
pub fn plan_without_devices(config: &VmConfig) -> Result<MachinePlan, RunError> {
    plan_only(config, &spec::spec(config, &spec::Host::default())?, None)
}

/// Width of this processor's physical addresses.
#[must_use]
pub fn address_bits() -> u8 {
    cpuid::physical_address_bits(&host_leaves())
}

/// Whether the host has what a start would open. Without a kernel or firmware there is none to look at.
fn would_start(config: &VmConfig, spec: &Spec, options: &RunOptions) -> Result<(), RunError> {
    Backends::look(spec)?;
    if config.payload.is_some() {
        machine::check_payload(config)?;
    }
    Outputs::look(config)?;
    if let Some(path) = &config.memory.file {
        memory::file::look(path).map_err(MemoryError::from).map_err(GroundworkError::from)?;
    }
    Ok(options.api_socket.as_deref().map_or(Ok(()), Listening::check)?)
}

/// Prints the planned hierarchy.
fn dry_run(config: &VmConfig, options: &RunOptions) -> Result<u8, RunError> {
    let recorded = options.host.as_deref().map(RecordedHost::read).transpose()?;
    // What a recorded host would give is shown, not what stands for it.
    let (config, mut cdi_notes, host) = look(config, recorded.as_ref())?;
    let config = &config;
    let mut spec = spec::spec(config, &host)?;
    spec.notes.append(&mut cdi_notes);
    let spec = &spec;
    let plan = plan_only(config, spec, recorded.map(|recorded| recorded.address_bits))?;
    would_start(config, spec, options)?;
    let verbose = options.verbose;
    let tree = Tree { plan: &plan.pci, label: &|function| spec.label(function), verbose };
    let memory = if verbose { format!("{}\n", plan.map) } else { String::new() };
    let nodes = spec.numa.as_ref().filter(|_| verbose).map_or_else(String::new, |numa| format!("{numa}\n"));
    let text = format!("{memory}{nodes}{tree}");
    let notes: String = notes(spec, &plan).chain(spec.remarks.iter().cloned()).map(|note| format!("note: {note}\n")).collect();
    print(&mut io::stdout().lock(), &format!("{}\n{notes}", text.trim_end())).map_err(RunError::Print)?;
    Ok(exit_code::POWER_OFF)
}

/// What a user should know of a plan.
pub fn notes(spec: &Spec, plan: &MachinePlan) -> impl Iterator<Item = String> {
    let (bits, iommu) = (plan.map.physical_address_bits, spec.iommu_bits);
    let beyond = iommu.filter(|iommu| *iommu < bits).map(|iommu| {
        format!(
            "the IOMMU translates {iommu}-bit addresses, and BARs need up to {bits} bits: other devices do not reach those beyond; \
             give fewer or smaller BARs or less room for hot-plug"
        )
    });
    spec.notes.iter().cloned().chain(plan.pci.notes.iter().map(ToString::to_string)).chain(beyond)
}

/// Plans with the host's address width.
pub fn plan_machine(config: &VmConfig, spec: &Spec, host: &[kvm_bindings::kvm_cpuid_entry2]) -> Result<MachinePlan, RunError> {
    Ok(plan::plan_within(&spec.topology, &limits(config, host)?, spec.iommu_bits)?)
}

fn limits(config: &VmConfig, host: &[kvm_bindings::kvm_cpuid_entry2]) -> Result<Limits, RunError> {
    let firmware = match &config.payload {
        Some(api::config::Payload::Firmware(path)) => Firmware::read(path)?.bytes.len() as u64,
        _ => 0,
    };
    Ok(Limits {
        ram: config.memory.size.bytes(),
        growth: config.memory.growth.bytes(),
        address_bits: cpuid::physical_address_bits(host).min(config.max_physical_bits.unwrap_or(u8::MAX)),
        amd: host.iter().any(|leaf| leaf.function == 0 && leaf.ecx == u32::from_le_bytes(*b"cAMD")),
        firmware,
    })
}

fn host_leaves() -> Vec<kvm_bindings::kvm_cpuid_entry2> {
    [0, 0x8000_0000, 0x8000_0008]
        .map(|function| {
            let leaf = std::arch::x86_64::__cpuid(function);
            kvm_bindings::kvm_cpuid_entry2 {
                function,
                eax: leaf.eax,
                ebx: leaf.ebx,
                ecx: leaf.ecx,
                edx: leaf.edx,
                ..Default::default()
            }
        })
        .to_vec()
}

/// Starts logging as configured.
pub fn start_log(config: &api::config::LogConfig) -> Result<(), RunError> {
    let level = match config.level {
        LogLevel::Off => LevelFilter::Off,
        LogLevel::Error => LevelFilter::Error,
        LogLevel::Warn => LevelFilter::Warn,
        LogLevel::Info => LevelFilter::Info,
        LogLevel::Debug => LevelFilter::Debug,
        LogLevel::Trace => LevelFilter::Trace,
    };
    let refused = |source| {
        let path = config.file.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        RunError::Output { flag: "--log", path, source }
    };
    let file = config.file.as_ref().map(|path| OpenOptions::new().append(true).create(true).open(path));
    let file = file.transpose().map_err(refused)?;
    logger::start(level, file).map_err(|error| refused(error.into()))
}

/// The exit code that tells how a guest ended.
#[must_use]
pub fn exit_code(end: End) -> u8 {
    match end {
        End::Power(PowerEvent::PowerOff) => {
            log::info!("the guest powered off");
            exit_code::POWER_OFF
        }
        End::Escape | End::Command => exit_code::POWER_OFF,
        End::Power(PowerEvent::Reset) | End::Reboot => {
            log::info!("the guest reset itself, which ends the process");
            exit_code::RESET
        }
        End::Watchdog => {
            log::error!("the guest did not serve its watchdog in time, which ends the process");
            exit_code::RESET
        }
        End::Panic => {
            log::error!("the guest's kernel panicked, which ends the process");
            exit_code::PANIC
        }
        // As a process status keeps it: the low eight bits.
        End::Power(PowerEvent::Exit(value)) => value.wrapping_shl(1) | 1,
        End::Vcpu(ended) => {
            log::error!("{ended}");
            if ended == Ended::TripleFault { exit_code::TRIPLE_FAULT } else { exit_code::BROKEN }
        }
        End::Signal(signal) => exit_code::SIGNAL.saturating_add(u8::try_from(signal).unwrap_or(0)),
    }
}

/// A machine that cannot be run.
#[derive(Debug, Error)]
pub enum RunError {
    /// Files for output.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// CDI files.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// The host's devices.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A host from a file.
    #[error(transparent)]
    Recorded(#[from] RecordedError),
    /// The configuration.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The firmware file.
    #[error(transparent)]
    Firmware(#[from] FirmwareError),
    /// Places.
    #[error(transparent)]
    Plan(#[from] MachinePlanError),
    /// KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Memory and host functions.
    #[error(transparent)]
    Groundwork(#[from] GroundworkError),
    /// Building.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The host's side of virtio devices.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The main loop.
    #[error(transparent)]
    MainLoop(#[from] MainLoopError),
    /// Consoles.
    #[error(transparent)]
    Console(#[from] ConsoleError),
    /// CPUID.
    #[error("this processor does not tell its address width")]
    Cpuid,
    /// A file for output.
    #[error("cannot open {path} for output: give {flag} a file that can be created and written")]
    Output {
        /// What named it.
        flag: &'static str,
        /// The file.
        path: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A socket for a console.
    #[error(transparent)]
    Socket(#[from] ListenError),
    /// Standard input or output.
    #[error("cannot use standard input and output for the serial port: give --serial file=PATH or --serial off")]
    Standard(#[source] io::Error),
    /// Standard output.
    #[error("cannot write to standard output")]
    Print(#[source] io::Error),
    /// Event descriptors and signals.
    #[error("cannot make an event descriptor: the limit of open files is reached (ulimit -n)")]
    Event(#[source] io::Error),
}
