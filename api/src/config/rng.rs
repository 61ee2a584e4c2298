//! Where the guest's random numbers come from.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;

use super::flags::{Flag, FlagError, Pairs};

/// `--rng`: a source of random numbers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RngConfig {
    /// Where they are read: a character device of the host.
    pub source: PathBuf,
}

impl Default for RngConfig {
    /// `/dev/urandom`.
    fn default() -> Self {
        Self { source: "/dev/urandom".into() }
    }
}

impl FromStr for RngConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--rng", first: "source" }.parse(text)
    }
}

impl fmt::Display for RngConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Pairs::new(f).pair("source", &self.source.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_reads_back() {
        let config: RngConfig = "/dev/hwrng".parse().unwrap();
        assert_eq!(config.source, PathBuf::from("/dev/hwrng"));
        assert_eq!(config.to_string().parse(), Ok(config));
        assert!("src=/dev/random".parse::<RngConfig>().unwrap_err().to_string().contains("key `src` is unknown"));
    }
}
