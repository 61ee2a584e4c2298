//! `banyan demo`: boots the embedded guest on an emulated host and holds what it sees against the plan.
//!
//! | question | module |
//! |---|---|
//! | what must the guest report? | [`expected`] |
//! | what of it did it report? | [`compare`] |
//! | how is that told? | [`show`] |

pub mod compare;
pub mod expected;
pub mod show;

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::config::{Cf8, KernelConfig, MemoryConfig, Payload, PcieConfig, Size, TopologyConfig, TopologyFileError, VmConfig};
use pci::topology::Tree;
use rustix::fs::MemfdFlags;
use thiserror::Error;

use crate::cli::{DemoOptions, RunOptions};
use crate::groundwork::Groundwork;
use crate::kvm::{Vm, host_cpuid};
use crate::machine::Design;
use crate::outputs::Outputs;
use crate::plan::MachinePlan;
use crate::print;
use crate::resets::{self, Start};
use crate::run::{self, RunError, exit_code};
use crate::spec::{self, Host, Spec};

use compare::{Comparison, Side};
use expected::ExpectedError;
use show::{Findings, INTRODUCTION, Seen};

const PROBE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/probe.elf"));
const TOPOLOGY: &str = include_str!("../../resources/topologies/a100x.toml");
const RAM: u64 = 64 << 20;
/// How long the guest may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Runs the demonstration. Returns the exit code of the process: 0 if the guest sees what was planned, 1 if not.
pub fn run(options: &DemoOptions) -> Result<u8, DemoError> {
    run::start_log(&options.log)?;
    let kernel = memory_file("probe.elf", PROBE)?;
    let config = config(&kernel)?;
    let spec = spec::spec(&config, &Host::default()).map_err(RunError::from)?;
    let vm = Vm::new().map_err(RunError::from)?;
    let cpuid = host_cpuid().map_err(RunError::from)?;
    let plan = run::plan_machine(&config, &spec, cpuid.as_slice())?;
    let planned_tree = tree(&plan, &spec);
    let planned_report = expected::report(&plan, &spec, true)?.join("\n");
    print(&format!("{INTRODUCTION}\nplanned:\n{planned_tree}"))?;

    let (mut serial, mut debug) = (memory_file("serial", &[])?, memory_file("debug", &[])?);
    let outputs = Outputs::captured(same(&serial)?.into(), same(&debug)?.into())?;
    let boot = RunOptions { no_reboot: true, time_limit: Some(LIMIT), ..RunOptions::default() };
    let backends = Arc::default();
    let design = Design {
        config: &config,
        spec: &spec,
        plan: &plan,
        added: &[],
        extent: None,
        cpuid: &cpuid,
        backends: &backends,
        recorded: None,
        state: None,
    };
    let ground = Groundwork::open(vm, &run::needs(&config, &spec, &plan), None).map_err(RunError::from)?;
    let start = Start { ground, threads: None, saved: None };
    let end = resets::run(&outputs, &design, start, &boot, None).map(exit_code);
    outputs.close();
    let (seen, report) = (text(&mut serial)?, text(&mut debug)?);
    let seen = Seen(&seen);
    match end {
        Ok(exit_code::POWER_OFF) => {}
        Ok(signal) if signal > exit_code::SIGNAL => return Ok(signal),
        other => {
            // A machine that could not start printed nothing.
            if let Some(last) = report.lines().last() {
                print(&format!("\nseen by the guest:\n{seen}\nits report ends with:\n{last}\n"))?;
            }
            return Err(other.map_or_else(DemoError::from, |code| DemoError::Ended { code }));
        }
    }
    let seen_tree = seen.tree().collect::<Vec<_>>().join("\n");
    let planned = Side { tree: &planned_tree, report: &planned_report };
    let comparison = Comparison::new(planned, Side { tree: &seen_tree, report: &report });
    let findings = Findings { comparison: &comparison, verbose: options.verbose };
    print(&format!("\nseen by the guest:\n{seen}\n{findings}"))?;
    Ok(comparison.exit_code())
}

/// The machine: what the embedded topology has, and configuration access by both ways.
fn config(kernel: &File) -> Result<VmConfig, DemoError> {
    let kernel = KernelConfig { path: path(kernel), ..KernelConfig::default() };
    Ok(VmConfig {
        memory: MemoryConfig { size: Size(RAM), ..MemoryConfig::default() },
        payload: Some(Payload::Kernel(kernel)),
        // A guest that fails ends by it.
        debug_exit: true,
        pcie: PcieConfig { cf8: Cf8::On, ..PcieConfig::default() },
        topology: Some(TopologyConfig::parse("a100x.toml", TOPOLOGY)?),
        ..VmConfig::default()
    })
}

fn tree(plan: &MachinePlan, spec: &Spec) -> String {
    Tree { plan: &plan.pci, label: &|function| spec.label(function), verbose: false }.to_string()
}

/// A file in memory that holds `bytes`.
fn memory_file(name: &str, bytes: &[u8]) -> Result<File, DemoError> {
    let made = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).map_err(io::Error::from);
    let mut file = File::from(made.map_err(DemoError::MemoryFile)?);
    file.write_all(bytes).map_err(DemoError::MemoryFile)?;
    Ok(file)
}

/// Where others in this process open `file`.
fn path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}

fn same(file: &File) -> Result<File, DemoError> {
    file.try_clone().map_err(DemoError::MemoryFile)
}

/// All that was written to `file`.
fn text(file: &mut File) -> Result<String, DemoError> {
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).map_err(DemoError::MemoryFile)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn print(text: &str) -> Result<(), DemoError> {
    Ok(print::print(&mut io::stdout().lock(), text).map_err(RunError::Print)?)
}

/// A demonstration that cannot be given.
#[derive(Debug, Error)]
pub enum DemoError {
    /// The machine.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The embedded topology.
    #[error(transparent)]
    Topology(#[from] TopologyFileError),
    /// What the guest must report.
    #[error(transparent)]
    Expected(#[from] ExpectedError),
    /// Files in memory.
    #[error("cannot make a file in memory")]
    MemoryFile(#[source] io::Error),
    /// No power-off.
    #[error("the guest ended with exit code {code} instead of powering off; what it printed says why")]
    Ended {
        /// As `banyan run` would end.
        code: u8,
    },
}
