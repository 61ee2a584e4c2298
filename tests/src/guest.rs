//! Runs a bare-metal guest of `resources/guests` in the executable.

use std::path::PathBuf;

use crate::process::{Outcome, Session};

/// Exit code of a guest that found everything right: it writes 0 to the debug exit port.
pub const PASSED: i32 = 1;

/// Path of a built guest image: `dma.elf`, `bzImage`, `firmware.bin`.
#[must_use]
pub fn image(file: &str) -> String {
    let path = PathBuf::from(env!("BANYAN_GUESTS")).join(file);
    assert!(path.is_file(), "resources/guests/build made no {}", path.display());
    path.display().to_string()
}

/// Path of `tests/topologies/NAME.toml`.
#[must_use]
pub fn topology(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("topologies").join(name).with_extension("toml");
    assert!(path.is_file(), "there is no {}", path.display());
    path.display().to_string()
}

/// A guest to run, and the machine that it gets: serial port on standard output, debug exit on.
#[derive(Debug, Clone)]
pub struct Guest {
    arguments: Vec<String>,
}

impl Guest {
    /// The ELF image `NAME.elf`.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self::from_arguments(&["--kernel", &image(&format!("{name}.elf"))])
    }

    /// Whatever `arguments` boot.
    #[must_use]
    pub fn from_arguments(arguments: &[&str]) -> Self {
        Self { arguments: vec!["run".to_owned(), "--debug-exit".to_owned()] }.with(arguments)
    }

    /// With these arguments, too.
    #[must_use]
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// With this kernel command line.
    #[must_use]
    pub fn options(self, text: &str) -> Self {
        self.with(&["--cmdline", text])
    }

    /// With these devices, each given as to `--device`.
    #[must_use]
    pub fn devices(self, devices: &[&str]) -> Self {
        devices.iter().fold(self, |guest, device| guest.with(&["--device", device]))
    }

    /// With the hierarchy of `tests/topologies/NAME.toml`.
    #[must_use]
    pub fn topology(self, name: &str) -> Self {
        self.with(&["--topology", &topology(name)])
    }

    /// What follows `banyan` on the command line.
    #[must_use]
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// Starts it.
    #[must_use]
    pub fn start(&self) -> Session {
        Session::start(&self.arguments)
    }

    /// Runs it to its end.
    #[must_use]
    pub fn run(&self) -> Outcome {
        self.start().finish()
    }

    /// Runs it; panics with all output unless it prints `PASS` and says so in its exit code.
    #[track_caller]
    pub fn passes(&self) -> Outcome {
        let outcome = self.run();
        outcome.expect_code(PASSED).expect_output(&["PASS"]);
        outcome
    }
}
