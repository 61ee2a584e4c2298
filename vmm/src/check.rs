//! Carries out `banyan check`: says before a guest is started whether the host can give it its devices, and which way these
//! reach each other. Reads, decides, prints; changes nothing.

pub mod acs;
pub mod devices;
pub mod machine;
pub mod nvswitch;
pub mod pairs;
pub mod reach;
pub mod report;
pub mod silence;
pub mod surroundings;

use std::io::{self, Write};
use std::path::Path;

use api::config::VmConfig;
use pci::address::HostBdf;
use thiserror::Error;

use crate::cdi::{self, CdiError};
use crate::cli::CheckOptions;
use crate::host::check::{Wanted, is_vfio};
use crate::host::recorded::{RecordedError, RecordedHost};
use crate::host::scan::{ScanError, scan_all};
use crate::host::tree::HostTree;
use crate::host::{self, HostError, SYSFS};
use crate::print::print;
use crate::run;
use crate::spec::{self, SpecError};
use machine::Tops;
use report::{Finding, Report, Severity};
use silence::Silence;
use surroundings::Surroundings;

/// Exit code when a device or a way is impossible, or nothing can be said.
pub const IMPOSSIBLE: u8 = 2;

/// `banyan check`. Returns the exit code of the process.
pub fn run(options: &CheckOptions, out: &mut dyn Write) -> Result<u8, CheckCommandError> {
    let recorded = match &options.host {
        Some(path) => RecordedHost::read(path)?,
        None => RecordedHost { tree: scan_all(Path::new(SYSFS))?, address_bits: run::address_bits() },
    };
    let config = VmConfig {
        devices: options.given.iter().chain(&options.devices).cloned().collect(),
        memory: options.memory.clone().unwrap_or_default(),
        pcie: options.pcie.unwrap_or_default(),
        cdi_dirs: options.cdi_dirs.clone(),
        ..VmConfig::default()
    };
    let (config, notes) = if options.host.is_some() { cdi::apply_in(&recorded.tree, &config)? } else { cdi::apply(&config)? };
    let wanted = host::wanted(&config)?;
    let surroundings = options.host.is_none().then(|| {
        let groups = groups(&recorded.tree, &wanted);
        Surroundings::read(Path::new(SYSFS), Path::new("/dev"), &groups)
    });
    let mut report = judge(&recorded.tree, &wanted, options, surroundings.as_ref());
    report.findings.extend(notes.iter().map(|note| Finding::new(Severity::Warning, "cdi", "files", note)));
    report.findings.extend(plan(&recorded, &config, &wanted)?);
    let text = if options.json { report.json() } else { report.to_string() };
    print(out, &text).map_err(CheckCommandError::Print)?;
    Ok(exit_code(report.severity()))
}

/// Everything but the plan.
fn judge(tree: &HostTree, wanted: &[Wanted], options: &CheckOptions, surroundings: Option<&Surroundings>) -> Report {
    let silence = if surroundings.is_some() { Silence::default() } else { Silence::of(tree) };
    let mut findings = devices::findings(tree, wanted, silence);
    findings.extend(pairs::findings(tree, wanted, silence));
    let given: Vec<HostBdf> = wanted.iter().map(|device| device.at).collect();
    findings.extend(
        nvswitch::judge(tree, &given, options.nvlink.or_else(|| options.pcie?.nvlink))
            .map(|fabric| Finding::new(fabric.severity(), "nvlink", "fabric", &fabric).remedy(fabric.remedy())),
    );
    findings.extend(machine::iommu(tree));
    match surroundings {
        Some(host) => findings.extend(machine::findings(tree, wanted, options.memory.as_ref(), host)),
        None => findings.push(silence.finding()),
    }
    Report { devices: devices::listing(tree, wanted), pairs: pairs::pairs(tree, wanted), findings }
}

/// Whether a guest with these devices has room for them. Devices that are not there have been told of already.
fn plan(host: &RecordedHost, config: &VmConfig, wanted: &[Wanted]) -> Result<Vec<Finding>, CheckCommandError> {
    if host::check::check_present(&host.tree, wanted).is_err() {
        return Ok(Vec::new());
    }
    let found = host::look_in(&host.tree, config)?;
    let spec = spec::spec(config, &found)?;
    let planned = run::plan_only(config, &spec, Some(host.address_bits)).map_err(|error| told(&error));
    let tops = planned.as_ref().map(Tops::of).map_err(String::as_str);
    let mut findings = machine::space(&host.tree, wanted, host.address_bits, tops);
    let notes = planned.iter().flat_map(|plan| run::notes(&spec, plan));
    findings.extend(notes.map(|note| Finding::new(Severity::Note, "plan", "guest", note)));
    Ok(findings)
}

/// An error with its causes.
fn told(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Groups that VFIO has device nodes for.
fn groups(tree: &HostTree, wanted: &[Wanted]) -> Vec<u32> {
    let nodes = wanted.iter().filter_map(|device| tree.get(device.at));
    let mut groups: Vec<u32> =
        nodes.filter(|node| node.driver.as_deref().is_some_and(is_vfio)).filter_map(|node| node.group).collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

const fn exit_code(severity: Severity) -> u8 {
    match severity {
        Severity::Ok | Severity::Note => 0,
        Severity::Warning => 1,
        Severity::Problem => IMPOSSIBLE,
    }
}

/// A question that has no answer.
#[derive(Debug, Error)]
pub enum CheckCommandError {
    /// This host.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// A recorded host.
    #[error(transparent)]
    Recorded(#[from] RecordedError),
    /// CDI files.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// The devices.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The guest.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Standard output.
    #[error("cannot write to standard output")]
    Print(#[source] io::Error),
}

#[cfg(test)]
mod tests;
