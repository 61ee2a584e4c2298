//! Decides how a host is written to a file and what a file must hold to stand for a host: JSON with one object for each
//! function and memory node. Serial numbers are in no field.

mod function;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use api::json::{self, JsonError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::scan::{ScanError, scan_all};
use super::tree::{HostMemoryNode, HostTree, NestingError};
use crate::files;
use function::Function;
pub use function::Problem;

/// A host as data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedHost {
    /// Its functions.
    pub tree: HostTree,
    /// Width of its physical addresses in bits, 32 to 64.
    pub address_bits: u8,
}

impl RecordedHost {
    /// The text of the file, the same for the same host.
    pub fn to_json(&self) -> Result<String, RecordedError> {
        let functions = self.tree.functions.values().map(Function::of).collect();
        let memory_nodes = self.tree.memory_nodes.iter().map(|(id, node)| MemoryNode::of(*id, node)).collect();
        let file = Document { version: VERSION, address_bits: self.address_bits, memory_nodes, functions };
        serde_json::to_string_pretty(&file).map(|text| text + "\n").map_err(|source| RecordedError::Write { source })
    }

    /// Reads what [`RecordedHost::to_json`] writes.
    pub fn from_json(text: &str) -> Result<Self, RecordedError> {
        let file: Document = json::read(text.as_bytes(), &mut |_| {}).map_err(|source| RecordedError::Json { source })?;
        if !(1..=VERSION).contains(&file.version) {
            return Err(RecordedError::Version { version: file.version });
        }
        if !(32..=64).contains(&file.address_bits) {
            return Err(RecordedError::AddressBits { bits: file.address_bits });
        }
        let mut tree = HostTree::default();
        for function in file.functions {
            let at = function.at.clone();
            let node = function.node().map_err(|problem| RecordedError::Function { at: at.clone(), problem })?;
            if tree.functions.insert(node.at, node).is_some() {
                return Err(RecordedError::Twice { at });
            }
        }
        for node in file.memory_nodes {
            let id = node.id;
            let node = node.node().map_err(|problem| RecordedError::MemoryNode { id, problem })?;
            if tree.memory_nodes.insert(id, node).is_some() {
                return Err(RecordedError::MemoryNodeTwice { id });
            }
        }
        tree.check_nesting()?;
        Ok(Self { tree, address_bits: file.address_bits })
    }

    /// Reads a file, or a directory with the shape of `/sys`; the latter does not tell the width of addresses.
    pub fn read(path: &Path) -> Result<Self, RecordedError> {
        if path.is_dir() {
            let tree = scan_all(path).map_err(|source| RecordedError::Sysfs { path: path.to_owned(), source })?;
            return Ok(Self { tree, address_bits: SYSFS_BITS });
        }
        let unreadable = |source| RecordedError::Read { path: path.to_owned(), source };
        let text = files::text(path, LARGEST).map_err(unreadable)?;
        Self::from_json(&text).map_err(|source| RecordedError::File { path: path.to_owned(), source: Box::new(source) })
    }
}

/// Address width of hosts that are directories: that of servers with GPUs.
const SYSFS_BITS: u8 = 52;

/// A host with thousands of virtual functions fits.
const LARGEST: u64 = 16 << 20;
/// What is written. Version 1 tells less of functions.
const VERSION: u32 = 2;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "an object")]
struct Document {
    #[serde(rename = "banyan-host")]
    version: u32,
    address_bits: u8,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    memory_nodes: Vec<MemoryNode>,
    functions: Vec<Function>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct MemoryNode {
    id: u32,
    cpus: String,
    /// Bytes.
    memory: u64,
    distances: BTreeMap<u32, u8>,
}

impl MemoryNode {
    fn of(id: u32, node: &HostMemoryNode) -> Self {
        Self { id, cpus: node.cpus.to_string(), memory: node.memory, distances: node.distances.clone() }
    }

    fn node(self) -> Result<HostMemoryNode, Problem> {
        Ok(HostMemoryNode { cpus: self.cpus.parse()?, memory: self.memory, distances: self.distances })
    }
}

/// A file that stands for no host.
#[derive(Debug, Error)]
pub enum RecordedError {
    /// It cannot be read.
    #[error("recorded host {path} cannot be read; give a file that `banyan topology record` wrote", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A directory that is no sysfs.
    #[error("recorded host {path} cannot be used; give a file that `banyan topology record` wrote, or a copy of /sys", path = path.display())]
    Sysfs {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: ScanError,
    },
    /// It was read and makes no sense.
    #[error("recorded host {path} cannot be used", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<RecordedError>,
    },
    /// Not this JSON.
    #[error("this is no recorded host: write one with `banyan topology record`")]
    Json {
        /// What, with line and column.
        #[source]
        source: JsonError,
    },
    /// Not made into JSON.
    #[error("the host cannot be written down")]
    Write {
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// Another version.
    #[error("banyan-host is {version}; this program reads versions 1 to {VERSION}: record the host again")]
    Version {
        /// What the file says.
        version: u32,
    },
    /// No address width.
    #[error("address-bits is {bits}: physical addresses have 32 to 64 bits")]
    AddressBits {
        /// What the file says.
        bits: u8,
    },
    /// A function's field.
    #[error("function {at}")]
    Function {
        /// As written.
        at: String,
        /// What is wrong.
        #[source]
        problem: Problem,
    },
    /// One address for two functions.
    #[error("function {at} is there twice: remove one")]
    Twice {
        /// Which.
        at: String,
    },
    /// A memory node's field.
    #[error("memory node {id}")]
    MemoryNode {
        /// Its number.
        id: u32,
        /// What is wrong.
        #[source]
        problem: Problem,
    },
    /// One number for two memory nodes.
    #[error("memory node {id} is there twice: remove one")]
    MemoryNodeTwice {
        /// Its number.
        id: u32,
    },
    /// Functions that hang on nothing.
    #[error(transparent)]
    Nesting(#[from] NestingError),
}

#[cfg(test)]
mod tests;
