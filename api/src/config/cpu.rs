//! How many processors.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// `--cpus N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuConfig {
    /// Virtual processors, 1 to 255.
    pub count: u8,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self { count: 1 }
    }
}

impl FromStr for CpuConfig {
    type Err = CpuError;

    /// Reads `4`; `boot=4`, as other programs write it, is accepted.
    fn from_str(text: &str) -> Result<Self, CpuError> {
        let number = text.strip_prefix("boot=").unwrap_or(text);
        match number.parse() {
            Ok(count @ 1..) => Ok(Self { count }),
            _ => Err(CpuError { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for CpuConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.count)
    }
}

/// Not a number of processors.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("`{text}` is no number of processors; give a whole number from 1 to 255")]
pub struct CpuError {
    text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_to_255_processors_can_be_asked_for() {
        assert_eq!("1".parse(), Ok(CpuConfig { count: 1 }));
        assert_eq!("boot=255".parse(), Ok(CpuConfig { count: 255 }));
        for text in ["", "0", "256", "-1", "two", "1,max=2"] {
            let error = text.parse::<CpuConfig>().unwrap_err().to_string();
            assert!(error.contains("from 1 to 255"), "{error}");
        }
    }
}
