//! Carries out `banyan topology`: a host, or what a guest of it would see, as text.

use std::io::{self, Write};
use std::path::Path;

use thiserror::Error;

use crate::cli::{TopologyCommand, TopologyOptions};
use crate::host::SYSFS;
use crate::host::recorded::{RecordedError, RecordedHost};
use crate::host::scan::{ScanError, scan_all};
use crate::run;

/// `banyan topology`.
pub fn run(options: &TopologyOptions, out: &mut dyn Write) -> Result<(), TopologyCommandError> {
    let text = match &options.command {
        TopologyCommand::Record => this_host()?.to_json()?,
    };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // A reader such as head(1) that has seen enough is no error.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(TopologyCommandError::Print(error)),
        _ => Ok(()),
    }
}

fn this_host() -> Result<RecordedHost, ScanError> {
    Ok(RecordedHost { tree: scan_all(Path::new(SYSFS))?, address_bits: run::address_bits() })
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
    /// Standard output.
    #[error("cannot write to standard output")]
    Print(#[source] io::Error),
}
