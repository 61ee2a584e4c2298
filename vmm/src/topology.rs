//! Carries out `banyan topology`: a host, what a guest of it would see, or a guest that runs, as text or picture.

pub mod diff;
pub mod live;
pub mod matrix;
pub mod nccl;
pub mod picture;
pub mod text;
pub mod view;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use api::config::{DeviceConfig, PcieConfig, TopologyPolicy, VmConfig};
use pci::topology::Tree;
use thiserror::Error;

use crate::cli::{DiffFormat, Format, GuestArguments, TopologyCommand, TopologyOptions};
use crate::host::recorded::{RecordedError, RecordedHost};
use crate::host::scan::{ScanError, scan_all};
use crate::host::tree::HostTree;
use crate::host::{self, HostError, SYSFS};
use crate::plan::MachinePlan;
use crate::print::print;
use crate::run::{self, RunError};
use crate::spec::{self, Spec, SpecError};
use diff::{Diff, Sides};
use live::LiveError;
use matrix::{LEGEND, Matrix, Named, usual_devices};
use nccl::NcclError;
use view::View;

/// `banyan topology`.
pub fn run(options: &TopologyOptions, out: &mut dyn Write) -> Result<(), TopologyCommandError> {
    let text = match &options.command {
        TopologyCommand::Record => this_host()?.to_json()?,
        TopologyCommand::Show { format, host, api_socket } => {
            let view = match api_socket {
                Some(socket) => live::view(socket)?,
                None => View::of_host(&not_empty(host_of(host.as_ref())?, host.as_deref())?.tree),
            };
            drawn(&view, *format)?
        }
        TopologyCommand::Plan { format, guest, devices } => {
            let host = host_of(guest.host.as_ref())?;
            let planned = Planned::new(&host, &all(guest, devices), guest.pcie.as_ref())?;
            if *format == Format::Tree { planned.tree() } else { drawn(&planned.view(), *format)? }
        }
        TopologyCommand::Diff { format, guest, devices } => {
            let host = host_of(guest.host.as_ref())?;
            let diff = Planned::new(&host, &all(guest, devices), guest.pcie.as_ref())?.diff(&host.tree);
            match format {
                DiffFormat::Text => diff.text(),
                DiffFormat::Json => format!("{:#}\n", diff.json()),
            }
        }
        TopologyCommand::Matrix { guest, devices } => {
            let host = host_of(guest.host.as_ref())?;
            let table = if devices.is_empty() && guest.given.is_empty() {
                let view = View::of_host(&not_empty(host, guest.host.as_deref())?.tree);
                Matrix::of(&view, &usual_devices(&view)).to_string()
            } else {
                Planned::new(&host, &all(guest, devices), guest.pcie.as_ref())?.beside_host(&host.tree)
            };
            format!("{table}\n{LEGEND}")
        }
    };
    print(out, &text).map_err(TopologyCommandError::Print)
}

fn all(guest: &GuestArguments, devices: &[DeviceConfig]) -> Vec<DeviceConfig> {
    guest.given.iter().chain(devices).cloned().collect()
}

fn host_of(file: Option<&PathBuf>) -> Result<RecordedHost, TopologyCommandError> {
    match file {
        Some(path) => Ok(RecordedHost::read(path)?),
        None => Ok(this_host()?),
    }
}

/// A host of which there is something to be shown.
fn not_empty(host: RecordedHost, from: Option<&Path>) -> Result<RecordedHost, TopologyCommandError> {
    if host.tree.functions.is_empty() {
        let path = from.unwrap_or(Path::new(SYSFS)).to_owned();
        let what = if path.is_dir() {
            format!("a folder such as 0000:00:00.0 in {}/bus/pci/devices", path.display())
        } else {
            "one under the key `functions`".to_owned()
        };
        return Err(TopologyCommandError::Empty { path, what });
    }
    Ok(host)
}

fn this_host() -> Result<RecordedHost, ScanError> {
    Ok(RecordedHost { tree: scan_all(Path::new(SYSFS))?, address_bits: run::address_bits() })
}

fn drawn(view: &View, format: Format) -> Result<String, NcclError> {
    Ok(match format {
        Format::Tree => text::tree(view),
        Format::Json => format!("{:#}\n", text::json(view)),
        Format::Dot => picture::dot(view),
        Format::Svg => picture::svg(view),
        Format::Nccl => nccl::nccl(view)?,
    })
}

/// A guest that is not started.
struct Planned {
    host: spec::Host,
    spec: Spec,
    plan: MachinePlan,
}

impl Planned {
    fn new(host: &RecordedHost, devices: &[DeviceConfig], pcie: Option<&PcieConfig>) -> Result<Self, TopologyCommandError> {
        let as_on_host = PcieConfig { topology: TopologyPolicy::Host, ..PcieConfig::default() };
        let pcie = pcie.cloned().unwrap_or(as_on_host);
        let config = VmConfig { devices: devices.to_vec(), pcie, ..VmConfig::default() };
        let found = host::look_in(&host.tree, &config)?;
        let spec = spec::spec(&config, &found)?;
        let plan = run::plan_only(&config, &spec, Some(host.address_bits)).map_err(Box::new)?;
        Ok(Self { host: found, spec, plan })
    }

    fn view(&self) -> View {
        View::of_plan(&self.plan.pci, &self.spec, &self.host.tree)
    }

    fn tree(&self) -> String {
        let tree = Tree { plan: &self.plan.pci, label: &|function| self.spec.label(function), verbose: false };
        let notes: String = run::notes(&self.spec, &self.plan).map(|note| format!("note: {note}\n")).collect();
        format!("{tree}{notes}")
    }

    /// Addresses and names of the devices that are functions of the host: there, and in the guest.
    fn devices(&self) -> (Vec<Named>, Vec<Named>) {
        let planned = self.host.wanted.iter().filter_map(|(name, at)| Some((name, at, self.plan.pci.by_name(name)?)));
        planned.map(|(name, at, function)| ((at.to_string(), name.clone()), (function.at.to_string(), name.clone()))).unzip()
    }

    fn diff(&self, tree: &HostTree) -> Diff {
        let (on_host, in_guest) = self.devices();
        let stands_for = self.spec.stands_for.iter().map(|(name, at)| (name.to_string(), *at));
        let stands_for = stands_for.chain(self.host.wanted.iter().map(|(name, at)| (name.clone(), *at))).collect();
        let levels = (Matrix::of(&View::of_host(tree), &on_host), Matrix::of(&self.view(), &in_guest));
        let (host, guest) = &levels;
        diff::diff(&Sides { tree, plan: &self.plan.pci, stands_for: &stands_for, levels: (host, guest) })
    }

    fn beside_host(&self, tree: &HostTree) -> String {
        let (on_host, in_guest) = self.devices();
        Matrix::of(&View::of_host(tree), &on_host).beside(&Matrix::of(&self.view(), &in_guest))
    }
}

/// A question about a hierarchy that has no answer.
#[derive(Debug, Error)]
pub enum TopologyCommandError {
    /// This host.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// A recorded host.
    #[error(transparent)]
    Recorded(#[from] RecordedError),
    /// A host without functions.
    #[error("{} has no PCI function to be shown: {what} was looked for", path.display())]
    Empty {
        /// The file or directory.
        path: PathBuf,
        /// What was looked for.
        what: String,
    },
    /// The devices.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The guest.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Its places.
    #[error(transparent)]
    Plan(#[from] Box<RunError>),
    /// A guest that runs.
    #[error(transparent)]
    Live(#[from] LiveError),
    /// A file for NCCL.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// Standard output.
    #[error("cannot write to standard output")]
    Print(#[source] io::Error),
}

#[cfg(test)]
mod tests;
