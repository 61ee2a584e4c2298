//! Where a character device's output goes, and whether it reads the terminal.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Flag, FlagError, FlagProblem, Pairs};

/// `--serial`, `--console` and `--debug-console`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputConfig {
    /// Standard input and output.
    Stdio,
    /// Output to a file that is created or emptied; no input.
    File(PathBuf),
    /// A new pseudo-terminal. Its path is known when the machine is prepared.
    Pty(Option<PathBuf>),
    /// A unix socket that one client at a time connects to.
    Socket(PathBuf),
    /// What the device is given is dropped. There is no virtio console then.
    Off,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    file: Option<PathBuf>,
    socket: Option<PathBuf>,
}

impl OutputConfig {
    /// Reads the text of `flag`: `stdio` (or `tty`), `file=PATH`, `pty`, `socket=PATH`, `off`
    /// (or `null`).
    pub fn parse(flag: &'static str, text: &str) -> Result<Self, FlagError> {
        match text {
            "stdio" | "tty" => Ok(Self::Stdio),
            "off" | "null" => Ok(Self::Off),
            "pty" => Ok(Self::Pty(None)),
            _ if !text.contains('=') => {
                let what = OutputError { text: text.to_owned() }.to_string();
                Err(FlagError { flag, problem: FlagProblem::Rule { what } })
            }
            _ => match (Flag { name: flag, first: "file" }).parse(text)? {
                Fields { file: Some(file), socket: None } => Ok(Self::File(file)),
                Fields { file: None, socket: Some(socket) } => Ok(Self::Socket(socket)),
                _ => {
                    let what = OutputError { text: text.to_owned() }.to_string();
                    Err(FlagError { flag, problem: FlagProblem::Rule { what } })
                }
            },
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
            Self::Pty(_) => f.write_str("pty"),
            Self::Socket(path) => Pairs::new(f).pair("socket", &path.display()),
        }
    }
}

/// No place that is known.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("`{text}` is no place for output; give stdio, off, pty, file=PATH or socket=PATH")]
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
            ("pty", OutputConfig::Pty(None)),
            ("socket=/tmp/a", OutputConfig::Socket("/tmp/a".into())),
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
            ("pts", "`pts` is no place for output; give stdio, off, pty, file=PATH or socket=PATH"),
            ("file=a,socket=b", "is no place for output"),
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
