//! How much memory the guest is asked to give back, and what it may do of its own accord.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

use super::flags::{Flag, FlagError, Pairs};
use super::size::Size;

/// `--balloon`: a device by which the guest gives memory back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct BalloonConfig {
    /// Bytes that the guest is asked to give back at first.
    pub size: Size,
    /// The guest may take memory back before it kills a process.
    pub deflate_on_oom: bool,
    /// The guest tells which pages it does not use.
    pub free_page_reporting: bool,
}

impl FromStr for BalloonConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--balloon", first: "size" }.parse(text)
    }
}

impl fmt::Display for BalloonConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        pairs.pair("size", &self.size)?;
        pairs.switch("deflate-on-oom", self.deflate_on_oom, false)?;
        pairs.switch("free-page-reporting", self.free_page_reporting, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_reads_back() {
        for text in ["0", "size=512M,deflate_on_oom=on", "free-page-reporting=on"] {
            let config: BalloonConfig = text.parse().unwrap();
            assert_eq!(config.to_string().parse(), Ok(config), "{text}");
        }
    }
}
