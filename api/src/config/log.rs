//! What is logged, and where to.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;

use super::flags::{Flag, FlagError, Pairs, choice};

/// `--log`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Messages of this level and those more urgent.
    pub level: LogLevel,
    /// A file to append to; by default standard error.
    pub file: Option<PathBuf>,
}

choice!(
    /// How much is logged.
    #[derive(Default, PartialOrd, Ord)]
    LogLevel {
        /// Nothing.
        Off = "off",
        /// What fails.
        Error = "error",
        /// What works in a way that may surprise.
        #[default]
        Warn = "warn",
        /// The milestones of a machine's life.
        Info = "info",
        /// What explains a decision.
        Debug = "debug",
        /// Everything.
        Trace = "trace",
    }
);

impl FromStr for LogConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--log", first: "level" }.parse(text)
    }
}

impl fmt::Display for LogConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        pairs.pair("level", &self.level)?;
        pairs.optional("file", self.file.as_ref().map(|path| path.display()).as_ref().map(|path| path as _))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_a_file_or_both_can_be_given() {
        for (text, level, file) in [
            ("debug", LogLevel::Debug, None),
            ("file=/tmp/log", LogLevel::Warn, Some("/tmp/log")),
            ("level=trace,file=/tmp/log", LogLevel::Trace, Some("/tmp/log")),
        ] {
            let config: LogConfig = text.parse().unwrap();
            assert_eq!(config, LogConfig { level, file: file.map(PathBuf::from) });
            assert_eq!(config.to_string().parse(), Ok(config));
        }
        assert!("verbose".parse::<LogConfig>().unwrap_err().to_string().contains("off, error, warn, info, debug, trace"));
    }
}
