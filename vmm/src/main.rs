//! The executable: reads the command line, runs what it asks for, prints what went wrong.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use vmm::cli::{self, Action, CliError};
use vmm::{cdi, check, ctl, demo, policy, run, serve, topology};

fn main() -> ExitCode {
    let done = match cli::parse(std::env::args_os()) {
        Ok(action) => act(action),
        Err(CliError::Usage(error)) => error.exit(),
        Err(error) => Err(error.into()),
    };
    done.unwrap_or_else(|error| {
        report(error.as_ref());
        ExitCode::FAILURE
    })
}

fn act(action: Action) -> Result<ExitCode, Box<dyn Error>> {
    match action {
        Action::Completions(shell) => {
            cli::write_completions(shell, &mut io::stdout().lock()).map_err(run::RunError::Print)?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Run { config, options } => match &options.api_socket {
            Some(socket) if !options.dry_run => Ok(serve::serve(Some(*config), &options, socket)?.into()),
            _ => Ok(run::run(&config, &options)?.into()),
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

/// Prints an error and its causes. Nothing can be done about a standard error that is closed.
fn report(error: &dyn Error) {
    let mut err = io::stderr().lock();
    let _ = writeln!(err, "banyan: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        let _ = writeln!(err, "  because: {error}");
        cause = error.source();
    }
}
