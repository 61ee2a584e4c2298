//! Decides which policy holds for the machines that API clients create: that of a file, or the built-in one.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use api::config::{HostNodes, Policy, PolicyError, VmConfig};
use thiserror::Error;

use crate::cli::ConfigCommand;
use crate::files;
use crate::host::{SYSFS, memory_nodes};
use crate::numa::{self, SpreadError};
use crate::print::print;
use crate::run::{self, RunError};

/// Where the file is, if nobody says otherwise.
pub const FILE: &str = "/etc/banyan/config.toml";
/// Names another file. It must exist.
pub const VARIABLE: &str = "BANYAN_CONFIG";

/// Bytes of a file: a table for each function of a large host fits.
const LARGEST: u64 = 1 << 20;

/// A policy and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// What it says.
    pub policy: Policy,
    /// The file; `None` if there is none.
    pub file: Option<PathBuf>,
}

/// The policy of this process: the file that [`VARIABLE`] names, else [`FILE`] if it exists, else built-in values.
pub fn load() -> Result<Source, LoadError> {
    choose(std::env::var_os(VARIABLE).filter(|path| !path.is_empty()), Path::new(FILE))
}

fn choose(named: Option<OsString>, usual: &Path) -> Result<Source, LoadError> {
    match named {
        Some(path) => read(Path::new(&path)),
        None => match read(usual) {
            Err(LoadError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(Source { policy: Policy::default(), file: None })
            }
            done => done,
        },
    }
}

/// Reads a file.
pub fn read(path: &Path) -> Result<Source, LoadError> {
    let failed = |source| LoadError::Read { path: path.to_owned(), source };
    let text = files::text(path, LARGEST).map_err(failed)?;
    let policy = Policy::parse(&path.display().to_string(), &text)?;
    Ok(Source { policy, file: Some(path.to_owned()) })
}

/// `banyan config`.
pub fn run(command: &ConfigCommand, out: &mut dyn Write) -> Result<(), LoadError> {
    let found = |file: &Option<PathBuf>| file.as_deref().map_or_else(load, read);
    let name = |file: &Option<PathBuf>| file.as_ref().map_or_else(|| "built-in values".to_owned(), |at| at.display().to_string());
    let text = match command {
        ConfigCommand::Check { file } => {
            let Source { policy, file } = found(file)?;
            let refused = |source| LoadError::Machine { file: name(&file), source: Box::new(source) };
            let base = policy.base();
            run::plan_without_devices(&base).map_err(refused)?;
            check_nodes(&policy.numa, &base).map_err(|source| LoadError::Nodes { file: name(&file), source })?;
            format!("{}: fine\n", name(&file))
        }
        ConfigCommand::Show { file } => {
            let Source { policy, file } = found(file)?;
            format!("{:<26} {}\n{policy}", "file", name(&file))
        }
    };
    print(out, &text).map_err(LoadError::Print)
}

/// Whether the host has the nodes, and any machine can.
fn check_nodes(nodes: &HostNodes, base: &VmConfig) -> Result<(), SpreadError> {
    if nodes.nodes.is_empty() {
        return Ok(());
    }
    let config = numa::smallest(nodes, base).unwrap_or_else(|| base.clone());
    numa::spread(nodes, &config, &memory_nodes::scan(Path::new(SYSFS))).map(|_| ())
}

/// A policy that is not known.
#[derive(Debug, Error)]
pub enum LoadError {
    /// No file, or one that cannot be read.
    #[error("the configuration {} cannot be read: make it readable, or correct {VARIABLE}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// What it says.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A machine of which no device is known cannot be.
    #[error("{file}: no machine can be as it says")]
    Machine {
        /// The file.
        file: String,
        /// Why.
        #[source]
        source: Box<RunError>,
    },
    /// Memory nodes that no machine can have on this host.
    #[error("{file}: no machine can have its memory nodes")]
    Nodes {
        /// The file.
        file: String,
        /// Why.
        #[source]
        source: SpreadError,
    },
    /// Standard output.
    #[error("cannot write to standard output")]
    Print(#[source] io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_file_may_be_absent_and_a_named_one_must_exist() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        assert_eq!(choose(None, &file).unwrap(), Source { policy: Policy::default(), file: None });
        let error = choose(Some(file.clone().into()), Path::new("/nonexistent")).unwrap_err();
        assert!(error.to_string().contains("config.toml cannot be read"), "{error}");
        std::fs::write(&file, "[guest]\nreset = \"exit\"\n").unwrap();
        for source in [choose(None, &file), choose(Some(file.clone().into()), Path::new("/nonexistent"))] {
            let source = source.unwrap();
            assert_eq!((source.policy.reset, source.file.as_ref()), (api::config::ResetPolicy::Exit, Some(&file)));
        }
        std::fs::write(&file, "[guest]\nreset = 1\n").unwrap();
        assert!(matches!(choose(None, &file), Err(LoadError::Policy(_))));
    }

    #[test]
    fn what_is_no_file_or_too_large_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(read(folder.path()), Err(LoadError::Read { .. })));
        let file = folder.path().join("f");
        std::fs::write(&file, "#".repeat((1 << 20) + 1)).unwrap();
        assert!(matches!(read(&file), Err(LoadError::Read { .. })));
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        assert!(matches!(choose(Some(fifo.into()), &file), Err(LoadError::Read { .. })));
    }
}
