//! Decides what a command line asks for: which command, which machine, how it is run.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use api::config::flags::{FlagError, FlagProblem};
use api::config::{LogConfig, LogLevel, NumaFlagError, TopologyFileError, VmConfig};
use clap::{Args, CommandFactory, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use thiserror::Error;

mod cdi;
mod check;
mod config;
mod ctl;
mod deferred;
mod notes;
mod run;
mod topology;
mod virtio;

pub use cdi::{CdiCommand, CdiOptions, CliquesFlag, FileFormat, GenerateOptions, KindFlag, Naming, What};
pub use check::CheckOptions;
pub use config::{ConfigCommand, ConfigOptions};
pub use ctl::{CtlCommand, CtlOptions};
use deferred::Deferred;
use notes::{OVERVIEW, RUN_NOTES};
use run::RunArguments;
pub use topology::{DiffFormat, Format, GuestArguments, TopologyCommand, TopologyOptions};

/// What the user wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// `banyan run`.
    Run {
        /// The machine.
        config: Box<VmConfig>,
        /// What is done with it.
        options: RunOptions,
    },
    /// `banyan --api-socket`: no machine until a client creates one.
    Serve {
        /// Where the API is served.
        socket: PathBuf,
        /// How its machines are run.
        options: RunOptions,
    },
    /// `banyan ctl`.
    Ctl(Box<CtlOptions>),
    /// `banyan config`.
    Config(ConfigOptions),
    /// `banyan topology`.
    Topology(Box<TopologyOptions>),
    /// `banyan cdi`.
    Cdi(Box<CdiOptions>),
    /// `banyan check`.
    Check(Box<CheckOptions>),
    /// `banyan demo`.
    Demo(DemoOptions),
    /// `banyan completions`.
    Completions(Shell),
}

/// How a machine is run, beside what it is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RunOptions {
    /// Print the planned hierarchy and start nothing.
    pub dry_run: bool,
    /// With `dry_run`: buses, windows and addresses, too.
    pub verbose: bool,
    /// Print how many exits of each kind there were, at the end, on standard error.
    pub counters: bool,
    /// A reset ends the process with exit code 4 instead of starting the guest again.
    pub no_reboot: bool,
    /// Longest time from each start to its end.
    pub time_limit: Option<Duration>,
    /// Logging.
    pub log: LogConfig,
    /// Where the API is served.
    pub api_socket: Option<PathBuf>,
    /// A recorded host that stands for this one; its devices are emulated.
    pub host: Option<PathBuf>,
}

/// How the demonstration is run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DemoOptions {
    /// Print every fact that the guest reported, not only those that differ.
    pub verbose: bool,
    /// Logging.
    pub log: LogConfig,
}

/// Reads a command line; the first argument is the program's own name. Reads the topology file, if one is named.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Action, CliError> {
    let cli = Cli::try_parse_from(arguments)?;
    match (cli.command, cli.serve.api_socket) {
        (Some(Command::Run(run)), _) => run.0.action(),
        (Some(Command::Demo(Deferred(demo))), _) => {
            Ok(Action::Demo(DemoOptions { verbose: demo.verbose, log: demo.log.unwrap_or_default() }))
        }
        (Some(Command::Ctl(ctl)), _) => Ok(Action::Ctl(ctl.0)),
        (Some(Command::Config(config)), _) => Ok(Action::Config(*config.0)),
        (Some(Command::Topology(topology)), _) => Ok(Action::Topology(topology.0)),
        (Some(Command::Check(check)), _) => Ok(Action::Check(check.0)),
        (Some(Command::Cdi(cdi)), _) => Ok(Action::Cdi(cdi.0)),
        (Some(Command::Completions { shell }), _) => Ok(Action::Completions(shell)),
        (None, Some(socket)) => {
            let level = match cli.serve.verbose {
                0 => LogLevel::Warn,
                1 => LogLevel::Info,
                2 => LogLevel::Debug,
                _ => LogLevel::Trace,
            };
            let log = LogConfig { level, file: cli.serve.log_file };
            Ok(Action::Serve { socket, options: RunOptions { log, ..RunOptions::default() } })
        }
        // clap prints the help instead.
        (None, None) => Err(Cli::command().error(clap::error::ErrorKind::MissingSubcommand, "a command is missing").into()),
    }
}

/// Whether a command line starts a machine at once, by a glance at it: what begins before it is read, on the strength of this,
/// must be of no consequence.
#[must_use]
pub fn starts_a_machine(arguments: &[OsString]) -> bool {
    const NO_START: [&str; 4] = ["-h", "--help", "--dry-run", "--api-socket"];
    let name = |argument: &OsString| argument.to_string_lossy().split('=').next().unwrap_or_default().to_owned();
    arguments.get(1).is_some_and(|command| command == "run")
        && !arguments.iter().any(|argument| NO_START.contains(&&*name(argument)))
}

/// The completion script for `shell`.
#[must_use]
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "banyan", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// A KVM hypervisor for device passthrough that shows the guest the host's PCI Express topology.
#[derive(Debug, Parser)]
#[command(name = "banyan", version = concat!("v", env!("CARGO_PKG_VERSION")), arg_required_else_help = true, args_conflicts_with_subcommands = true, after_help = OVERVIEW)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: ServeArguments,
}

#[derive(Debug, Args)]
struct ServeArguments {
    /// Serve the HTTP API here and wait for a client to create a machine
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    api_socket: Option<PathBuf>,

    /// Log more: -v info, -vv debug, -vvv everything
    #[arg(short, long = "verbose", action = clap::ArgAction::Count, requires = "api_socket")]
    verbose: u8,

    /// Append the log to this file instead of standard error
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "api_socket")]
    log_file: Option<PathBuf>,

    /// Taken for callers of other hypervisors; without effect: no system call is filtered
    #[arg(long, value_name = "true|false|log", value_parser = ["true", "false", "log"], requires = "api_socket")]
    seccomp: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a virtual machine
    #[command(after_help = "See `banyan run --help` for keys, defaults, exit codes and examples.", after_long_help = RUN_NOTES)]
    Run(Deferred<RunArguments>),
    /// Ask something of a process that runs, or have it change its machine
    #[command(after_long_help = ctl::NOTES)]
    Ctl(Deferred<CtlOptions>),
    /// Check or show the file that holds for machines of API clients
    #[command(after_long_help = config::NOTES)]
    Config(Deferred<ConfigOptions>),
    /// Show a host's hierarchy, or what a guest of it would see
    #[command(after_long_help = topology::NOTES)]
    Topology(Deferred<TopologyOptions>),
    /// Say whether devices can be passed through, and which way they reach each other
    #[command(after_long_help = check::NOTES)]
    Check(Deferred<CheckOptions>),
    /// Write files of the Container Device Interface for the host's devices
    Cdi(Deferred<CdiOptions>),
    /// Show a replicated topology on any machine with /dev/kvm, and check it
    ///
    /// Boots a small built-in guest on an emulated host of two GPU and network cards behind nested switches. The guest finds
    /// the hierarchy by itself, copies data from device to device and takes the interrupt; Banyan prints what it saw beside
    /// what was planned. Exit code 0 means that they agree.
    Demo(Deferred<DemoArguments>),
    /// Print a completion script for a shell
    ///
    /// Example: banyan completions bash > ~/.local/share/bash-completion/completions/banyan
    Completions {
        /// bash, elvish, fish, powershell or zsh
        #[arg(value_name = "SHELL")]
        shell: Shell,
    },
}

#[derive(Debug, Args)]
struct DemoArguments {
    /// Print every fact that the guest reported
    #[arg(short, long)]
    verbose: bool,

    /// What is logged; keys: level, file [default: warn, to standard error]
    #[arg(long, value_name = "LEVEL", value_parser = keyed::<LogConfig>)]
    log: Option<LogConfig>,
}

/// Reads a `key=value` text. The flag's name is left to clap, which puts it in front of the problem.
fn keyed<T: FromStr<Err = FlagError>>(text: &str) -> Result<T, FlagProblem> {
    text.parse().map_err(|error: FlagError| error.problem)
}

/// A command line that asks for nothing that can be done.
#[derive(Debug, Error)]
pub enum CliError {
    /// Wrong usage, or a request for help or version. `clap::Error::exit` prints it and ends the process as fits.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// Memory nodes that do not go together.
    #[error("the memory nodes of --numa do not go together")]
    Numa(#[from] NumaFlagError),
    /// The topology file cannot be read.
    #[error("topology file {path} cannot be read; give the path of a readable TOML file", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The topology file says something that cannot be.
    #[error(transparent)]
    Topology(#[from] TopologyFileError),
}

#[cfg(test)]
mod tests;
