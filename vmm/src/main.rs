//! The executable: reads the command line, runs what it asks for, prints what went wrong.

use std::error::Error;
use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

use vmm::cli::{self, Action, CliError};
use vmm::print::{one_line, print};
use vmm::{CpuidAhead, cdi, check, ctl, demo, logger, policy, run, serve, signals, topology};

fn main() -> ExitCode {
    signals::fail_at_file_limit();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let ahead = cli::starts_a_machine(&arguments).then(CpuidAhead::start);
    let done = match cli::parse(arguments) {
        Ok(action) => act(action, ahead),
        Err(CliError::Usage(error)) => return usage(&error),
        Err(error) => Err(error.into()),
    };
    let code = done.unwrap_or_else(|error| {
        report(error.as_ref());
        ExitCode::FAILURE
    });
    logger::finish();
    code
}

fn act(action: Action, ahead: Option<CpuidAhead>) -> Result<ExitCode, Box<dyn Error>> {
    match action {
        Action::Completions(shell) => {
            print(&mut io::stdout().lock(), &cli::completions(shell)).map_err(run::RunError::Print)?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Run { config, options } => match &options.api_socket {
            Some(socket) if !options.dry_run => Ok(serve::serve(Some(*config), &options, socket)?.into()),
            _ => Ok(run::run(&config, &options, ahead)?.into()),
        },
        Action::Serve { socket, options } => Ok(serve::serve(None, &options, &socket)?.into()),
        Action::Ctl(options) => match ctl::run(&options, &mut io::stdout().lock()) {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) => {
                report(&error);
                Ok(error.exit_code().into())
            }
        },
        Action::Config(options) => {
            policy::run(&options.command, &mut io::stdout().lock())?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Topology(options) => {
            topology::run(&options, &mut io::stdout().lock())?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Cdi(options) => {
            cdi::write::run(&options, &mut io::stdout().lock(), &mut io::stderr().lock())?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Check(options) => match check::run(&options, &mut io::stdout().lock()) {
            Ok(code) => Ok(code.into()),
            Err(error) => {
                report(&error);
                Ok(check::IMPOSSIBLE.into())
            }
        },
        Action::Demo(options) => Ok(demo::run(&options)?.into()),
    }
}

/// Prints help, the version, or what is wrong with the command line. Nothing can be done about an output that is closed.
fn usage(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    let _ = if error.use_stderr() { print(&mut io::stderr().lock(), &text) } else { print(&mut io::stdout().lock(), &text) };
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
}

/// Prints an error and its causes.
fn report(error: &dyn Error) {
    let mut text = format!("banyan: {}\n", one_line(&error.to_string()));
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!("  because: {}\n", one_line(&error.to_string()));
        cause = error.source();
    }
    logger::say(&text);
}
