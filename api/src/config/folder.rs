//! Which process serves a shared folder.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Flag, FlagError, Pairs};

/// `--fs`: a shared folder, which a vhost-user process serves, on the root bus.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Fields")]
pub struct FsConfig {
    /// Name of the device; by default `fs0`, `fs1`, ...
    pub id: Option<String>,
    /// What the guest mounts.
    pub tag: String,
    /// The server's socket.
    pub socket: PathBuf,
    /// Request queues.
    pub queues: u16,
    /// Entries of a queue.
    pub queue_size: u16,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Fields {
    socket: PathBuf,
    tag: String,
    id: Option<String>,
    queues: Option<u16>,
    queue_size: Option<u16>,
}

impl TryFrom<Fields> for FsConfig {
    type Error = FsError;

    fn try_from(fields: Fields) -> Result<Self, FsError> {
        let Fields { socket, tag, id, queues, queue_size } = fields;
        let folder = Self { id, tag, socket, queues: queues.unwrap_or(1), queue_size: queue_size.unwrap_or(1024) };
        folder.check().map(|()| folder)
    }
}

impl FsConfig {
    /// Whether the device can show what is asked for.
    pub(crate) fn check(&self) -> Result<(), FsError> {
        if !(1..=36).contains(&self.tag.len()) {
            return Err(FsError::Tag { tag: self.tag.clone() });
        }
        if !(1..=64).contains(&self.queues) {
            return Err(FsError::Queues { queues: self.queues });
        }
        if !self.queue_size.is_power_of_two() || self.queue_size > 32_768 {
            return Err(FsError::QueueSize { queue_size: self.queue_size });
        }
        Ok(())
    }
}

impl FromStr for FsConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--fs", first: "socket" }.parse(text)
    }
}

impl fmt::Display for FsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        pairs.pair("socket", &self.socket.display())?;
        pairs.pair("tag", &self.tag)?;
        pairs.optional("id", self.id.as_ref().map(|id| id as _))?;
        if self.queues != 1 {
            pairs.pair("queues", &self.queues)?;
        }
        if self.queue_size != 1024 {
            pairs.pair("queue-size", &self.queue_size)?;
        }
        Ok(())
    }
}

/// Keys of `--fs` that cannot be.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum FsError {
    /// A tag that does not fit.
    #[error("the tag `{tag}` does not fit; give 1 to 36 bytes")]
    Tag {
        /// What was given.
        tag: String,
    },
    /// No number of queues.
    #[error("{queues} request queues are not possible; 1 to 64 are")]
    Queues {
        /// What was given.
        queues: u16,
    },
    /// No size of a ring.
    #[error("a queue of {queue_size} entries is not possible; give a power of two up to 32768")]
    QueueSize {
        /// What was given.
        queue_size: u16,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_reads_back() {
        for text in ["/run/fs.sock,tag=home", "socket=\"a,b\",tag=x,id=shared,queues=4,queue-size=64"] {
            let config: FsConfig = text.parse().unwrap();
            assert_eq!(config.to_string().parse(), Ok(config), "{text}");
        }
    }

    #[test]
    fn what_a_folder_cannot_have_is_refused_with_the_limit() {
        let long = "t".repeat(37);
        for (text, expected) in [
            (format!("s,tag={long}"), "1 to 36 bytes"),
            ("s,tag=t,queues=0".into(), "1 to 64"),
            ("s,tag=t,queue-size=1000".into(), "power of two"),
            ("s".into(), "`tag` is missing"),
        ] {
            let text = text.parse::<FsConfig>().unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
        }
    }
}
