//! Gives the executable a terminal, types into it, and looks at its settings.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, tcgetattr};

use crate::process::{LIMIT, Session};

/// A pseudo-terminal: what is typed into it is its user's, and so is what it shows.
#[derive(Debug)]
pub struct Terminal {
    user: OwnedFd,
    name: String,
}

impl Default for Terminal {
    fn default() -> Self {
        Self::new()
    }
}

impl Terminal {
    /// A terminal with the usual settings.
    #[must_use]
    pub fn new() -> Self {
        let make = || -> rustix::io::Result<Self> {
            let user = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
            grantpt(&user)?;
            unlockpt(&user)?;
            let name = ptsname(&user, Vec::new())?.to_string_lossy().into_owned();
            Ok(Self { user, name })
        };
        make().unwrap_or_else(|error| panic!("no pseudo-terminal: {error}"))
    }

    /// Runs `banyan ARGUMENTS` on it as its controlling terminal, in a session of its own.
    #[must_use]
    pub fn start<S: AsRef<str>>(&self, arguments: &[S]) -> Session {
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(crate::executable::path()).args(arguments.iter().map(AsRef::as_ref));
        let end = || {
            Stdio::from(
                File::options().read(true).write(true).open(&self.name).unwrap_or_else(|error| panic!("{}: {error}", self.name)),
            )
        };
        command.stdin(end()).stdout(end()).stderr(Stdio::piped());
        let user = || File::from(self.user.try_clone().unwrap_or_else(|error| panic!("no more descriptors: {error}")));
        Session::with_ends(command, LIMIT, Some((user(), user())))
    }

    /// All settings, in a form that can be compared.
    #[must_use]
    pub fn settings(&self) -> String {
        format!("{:?}", self.attributes())
    }

    /// Whether typed characters reach the reader at once, unseen and without a meaning of their own.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        !self.attributes().local_modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    fn attributes(&self) -> Termios {
        tcgetattr(&self.user).unwrap_or_else(|error| panic!("{} has no settings: {error}", self.name))
    }
}
