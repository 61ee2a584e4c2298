//! Which context id the guest has, and which socket of the host its streams come and go by.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Flag, FlagError, Pairs};

/// `--vsock`: a socket device; the host's side are unix sockets.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Fields")]
pub struct VsockConfig {
    /// Name of the device; by default `vsock0`.
    pub id: Option<String>,
    /// The guest's context id, 3 or more.
    pub cid: u32,
    /// Where the host connects; the guest's own connections go to this path, an underscore and the port.
    pub socket: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    cid: u32,
    socket: PathBuf,
    id: Option<String>,
}

impl TryFrom<Fields> for VsockConfig {
    type Error = VsockError;

    fn try_from(Fields { cid, socket, id }: Fields) -> Result<Self, VsockError> {
        // 0 to 2 are the hypervisor's, a local one and the host's; the last one stands for any (virtio 1.2 5.10.4).
        if (3..u32::MAX).contains(&cid) { Ok(Self { id, cid, socket }) } else { Err(VsockError::Cid { cid }) }
    }
}

impl FromStr for VsockConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--vsock", first: "socket" }.parse(text)
    }
}

impl fmt::Display for VsockConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        pairs.pair("cid", &self.cid)?;
        pairs.pair("socket", &self.socket.display())?;
        pairs.optional("id", self.id.as_ref().map(|id| id as _))
    }
}

/// Keys of `--vsock` that cannot be.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum VsockError {
    /// Not a guest's.
    #[error("context id {cid} is no guest's; 3 to 4294967294 are")]
    Cid {
        /// What was given.
        cid: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_reads_back_and_impossible_ids_are_refused() {
        for text in ["cid=3,socket=/run/v.sock", "/run/v.sock,cid=99,id=link"] {
            let config: VsockConfig = text.parse().unwrap();
            assert_eq!(config.to_string().parse(), Ok(config), "{text}");
        }
        for (text, part) in [
            ("cid=2,socket=a", "context id 2 is no guest's"),
            ("cid=4294967295,socket=a", "is no guest's"),
            ("cid=3", "`socket` is missing"),
            ("socket=a", "`cid` is missing"),
        ] {
            let error = text.parse::<VsockConfig>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
