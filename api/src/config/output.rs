//! Where a character device's output goes, and whether it reads the terminal.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Flag, FlagError, FlagProblem, Pairs};

/// `--serial` and `--debug-console`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputConfig {
    /// Standard input and output.
    Stdio,
    /// Output to a file that is created or emptied; no input.
    File(PathBuf),
    /// The device is there; what it is given is dropped.
    Off,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    file: PathBuf,
}

impl OutputConfig {
    /// Reads the text of `flag`: `stdio` (or `tty`), `file=PATH`, `off` (or `null`).
    pub fn parse(flag: &'static str, text: &str) -> Result<Self, FlagError> {
        match text {
            "stdio" | "tty" => Ok(Self::Stdio),
            "off" | "null" => Ok(Self::Off),
            _ if !text.contains('=') => {
                let what = OutputError { text: text.to_owned() }.to_string();
                Err(FlagError { flag, problem: FlagProblem::Rule { what } })
            }
            _ => Flag { name: flag, first: "file" }.parse(text).map(|Fields { file }| Self::File(file)),
        }
    }
}

impl FromStr for OutputConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Self::parse("--serial", text)
    }
}

impl fmt::Display for OutputConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdio => f.write_str("stdio"),
            Self::Off => f.write_str("off"),
            Self::File(path) => Pairs::new(f).pair("file", &path.display()),
        }
    }
}

/// No place that is known.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("`{text}` is no place for output; give stdio, off, or file=PATH")]
struct OutputError {
    text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_named_by_a_word_or_a_path() {
        for (text, place) in [
            ("stdio", OutputConfig::Stdio),
            ("tty", OutputConfig::Stdio),
            ("off", OutputConfig::Off),
            ("null", OutputConfig::Off),
            ("file=/tmp/a", OutputConfig::File("/tmp/a".into())),
            ("file=\"a,b\"", OutputConfig::File("a,b".into())),
        ] {
            assert_eq!(text.parse(), Ok(place.clone()), "{text}");
            assert_eq!(place.to_string().parse(), Ok(place));
        }
    }

    #[test]
    fn no_place_two_places_and_unknown_words_are_refused() {
        for (text, part) in [
            ("", "`` is no place"),
            ("pty", "`pty` is no place for output; give stdio, off, or file=PATH"),
            ("/tmp/a", "file=PATH"),
            ("off,file=/tmp/a", "given twice"),
            ("file=", "`file` has no value"),
            ("path=/tmp/a", "key `path` is unknown"),
        ] {
            let error = text.parse::<OutputConfig>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
