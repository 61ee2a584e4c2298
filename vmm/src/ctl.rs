//! Carries out `banyan ctl`: one call of the HTTP API, its reply as a table or as JSON.

mod show;

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use api::client::{Client, ClientError, Verb};
use api::dialect;
use serde_json::{Value, json};
use thiserror::Error;

use crate::cli::{CtlCommand, CtlOptions};
use crate::print::{print, printable};

/// Exit codes beside 0 and 1.
pub mod exit_code {
    /// Nobody answers at the socket.
    pub const NO_ANSWER: u8 = 3;
}

/// Largest body that the API reads.
const LARGEST: u64 = 4 << 20;
/// In place of a file.
const STANDARD_INPUT: &str = "-";

/// `banyan ctl`.
pub fn run(options: &CtlOptions, out: &mut dyn Write) -> Result<(), CtlError> {
    if options.command == CtlCommand::Events {
        return events(options, out);
    }
    if options.command == CtlCommand::Openapi {
        return print(out, api::http::DOCUMENT).map_err(CtlError::Print);
    }
    let (verb, name, body) = call(&options.command)?;
    let reply = Client::connect(&options.api_socket)?.call(verb, name, body.as_ref())?;
    let text = match reply {
        None => return Ok(()),
        Some(reply) if options.json => format!("{reply:#}\n"),
        Some(reply) => show::reply(name, &reply),
    };
    print(out, &text).map_err(CtlError::Print)
}

/// Prints events as they happen.
fn events(options: &CtlOptions, out: &mut dyn Write) -> Result<(), CtlError> {
    let mut printed = Ok(());
    Client::connect(&options.api_socket)?.listen("vm.events", |event| {
        let line = if options.json { format!("{event}\n") } else { show::event(&event) };
        let done = out.write_all(printable(&line).as_bytes()).and_then(|()| out.flush());
        let go_on = done.is_ok();
        printed = match done {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(CtlError::Print(error)),
            _ => Ok(()),
        };
        go_on
    })?;
    printed
}

/// The call that a command stands for.
fn call(command: &CtlCommand) -> Result<(Verb, &'static str, Option<Value>), CtlError> {
    Ok(match command {
        CtlCommand::Ping => (Verb::Get, "vmm.ping", None),
        CtlCommand::Info => (Verb::Get, "vm.info", None),
        CtlCommand::List => (Verb::Get, "vm.devices", None),
        CtlCommand::Counters => (Verb::Get, "vm.counters", None),
        CtlCommand::Create { file } => (Verb::Put, "vm.create", Some(read(file)?)),
        CtlCommand::Boot => (Verb::Put, "vm.boot", None),
        CtlCommand::Pause => (Verb::Put, "vm.pause", None),
        CtlCommand::Resume => (Verb::Put, "vm.resume", None),
        CtlCommand::Snapshot { folder } => (Verb::Put, "vm.snapshot", Some(json!({ "destination_url": url(folder)? }))),
        CtlCommand::Restore { folder, prefault, resume } => {
            let body = json!({ "source_url": url(folder)?, "prefault": prefault, "resume": resume });
            (Verb::Put, "vm.restore", Some(body))
        }
        CtlCommand::Reboot => (Verb::Put, "vm.reboot", None),
        CtlCommand::PowerButton => (Verb::Put, "vm.power-button", None),
        CtlCommand::Stop => (Verb::Put, "vm.shutdown", None),
        CtlCommand::Delete => (Verb::Put, "vm.delete", None),
        CtlCommand::Shutdown => (Verb::Put, "vmm.shutdown", None),
        CtlCommand::AddDevice { functions } => (Verb::Put, "vm.add-device", Some(dialect::device_body(functions))),
        CtlCommand::AddDisk { disk } => (Verb::Put, "vm.add-disk", Some(dialect::disk_body(disk))),
        CtlCommand::AddNet { net } => (Verb::Put, "vm.add-net", Some(dialect::net_body(net))),
        CtlCommand::AddFs { fs } => (Verb::Put, "vm.add-fs", Some(dialect::fs_body(fs))),
        CtlCommand::AddVsock { vsock } => (Verb::Put, "vm.add-vsock", Some(dialect::vsock_body(vsock))),
        CtlCommand::Events => (Verb::Get, "vm.events", None),
        CtlCommand::Openapi => (Verb::Get, "openapi.yaml", None),
        CtlCommand::RemoveDevice { id } => (Verb::Put, "vm.remove-device", Some(json!({ "id": id }))),
        CtlCommand::InjectError { at, error } => {
            (Verb::Put, "vm.inject-error", Some(json!({ "at": at, "error": error.to_string() })))
        }
        CtlCommand::Resize { cpus, memory, balloon } => {
            let body = json!({
                "desired_vcpus": cpus,
                "desired_ram": memory.map(|memory| memory.bytes()),
                "desired_balloon": balloon.map(|balloon| balloon.bytes()),
            });
            (Verb::Put, "vm.resize", Some(body))
        }
    })
}

/// A folder as the API names it.
fn url(folder: &Path) -> Result<String, CtlError> {
    let path = std::path::absolute(folder).map_err(|source| CtlError::Read { path: folder.to_owned(), source })?;
    Ok(format!("file://{}", path.display()))
}

/// What a person calls the file; `-` is standard input.
fn source_name(path: &Path) -> String {
    if path == Path::new(STANDARD_INPUT) { "standard input".to_owned() } else { path.display().to_string() }
}

/// A body from a file.
fn read(path: &Path) -> Result<Value, CtlError> {
    let failed = |source| CtlError::Read { path: path.to_owned(), source };
    let mut text = Vec::new();
    if path == Path::new(STANDARD_INPUT) {
        io::stdin().take(LARGEST).read_to_end(&mut text).map_err(failed)?;
    } else {
        File::open(path).and_then(|file| file.take(LARGEST).read_to_end(&mut text)).map_err(failed)?;
    }
    serde_json::from_slice(&text).map_err(|source| CtlError::Json { path: path.to_owned(), source })
}

/// A command that was not carried out.
#[derive(Debug, Error)]
pub enum CtlError {
    /// By the other side, or there is none.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// No body.
    #[error("{} cannot be read", source_name(path))]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A body that is none.
    #[error("{} is no JSON; it must hold one body of vm.create", source_name(path))]
    Json {
        /// The file.
        path: PathBuf,
        /// Where.
        #[source]
        source: serde_json::Error,
    },
    /// Standard output.
    #[error("cannot write to standard output")]
    Print(#[source] io::Error),
}

impl CtlError {
    /// Exit code of the process.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Client(ClientError::Connect { .. } | ClientError::Lost { .. } | ClientError::Silent { .. }) => {
                exit_code::NO_ANSWER
            }
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests;
