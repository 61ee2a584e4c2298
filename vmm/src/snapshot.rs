//! A machine in a folder: written while it is paused, and made again from there by another process.
//!
//! | file | what |
//! |---|---|
//! | `config.json` | the machine as in vm.create, with what came and left since its start; may be edited |
//! | `state.json` | registers of processors, interrupt controllers and devices. The name is the one that is copied by who makes
//! machines of templates; it is no JSON |
//! | `memory-ranges` | RAM, one range after the other; pages that nobody touched are holes. Without what is in a file of its own,
//! and not there if that is all |
//!
//! | question | module |
//! |---|---|
//! | what is in `state.json` around the machine's own? | [`state`] |
//! | which pages are written, and how does RAM come back? | [`memory`] |
//! | how are devices written that came while the guest ran? | [`devices`] |
//! | in which order are files made, and who removes them? | [`mod@write`] |
//! | what is checked before a machine is made, and what is read by which thread? | [`read`] |

pub mod devices;
pub mod memory;
pub mod read;
pub mod state;
pub mod write;

use std::io;
use std::path::PathBuf;

use api::error::ErrorKind;
use pci::state::StateError;
use thiserror::Error;

pub use read::{Saved, Snapshot};
pub use write::Written;

use crate::machine::SaveError;
use crate::memory::MemoryError;

/// The machine.
pub const CONFIG: &str = "config.json";
/// Registers.
pub const STATE: &str = "state.json";
/// RAM.
pub const MEMORY: &str = "memory-ranges";

/// A snapshot that cannot be written or read.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// No folder.
    #[error("cannot use the folder {}; create it, or name one that this process may use", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Files of another snapshot.
    #[error("there is a snapshot already, {} is of it: give it a folder of its own", path.display())]
    Taken {
        /// The file.
        path: PathBuf,
    },
    /// A file for RAM that was taken out of the configuration.
    #[error("the memory of this machine is in a file of its own: config.json has to name it, as `file` of its zone of memory")]
    NoFile,
    /// A file for RAM that the snapshot's would be written over.
    #[error(
        "the memory of this machine is in {MEMORY} of the snapshot, and would be written over {}: leave `shared` false in config.json",
        path.display()
    )]
    Over {
        /// The file.
        path: PathBuf,
    },
    /// A file that cannot be written.
    #[error("cannot write {}: is there room?", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Memory that a file system does not take.
    #[error("the memory of the machine cannot be kept in its file: is there room?")]
    Kept(#[source] io::Error),
    /// A file that cannot be read.
    #[error("cannot read {}: is the folder that of a snapshot?", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file of another size.
    #[error("{} has {found} bytes where {wanted} belong", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Bytes.
        found: u64,
        /// Expected.
        wanted: u64,
    },
    /// A file that is longer than anything that was written.
    #[error("{} has {found} bytes, and what belongs there has at most {most}", path.display())]
    Long {
        /// The file.
        path: PathBuf,
        /// Bytes.
        found: u64,
        /// At most.
        most: u64,
    },
    /// The configuration.
    #[error("{} cannot be used", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: api::error::ApiError,
    },
    /// The state.
    #[error("{} cannot be used", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: StateFileError,
    },
    /// Another machine.
    #[error(
        "config.json describes another machine than the one that was saved, or this host gives it another shape ({what}): restore it \
         with the same devices, memory and processors, by the same version of Banyan, on a host with the same address width"
    )]
    Shape {
        /// What differs.
        what: &'static str,
    },
    /// A device whose state is somewhere else.
    #[error("a machine with {name} cannot be written down: {why}; remove it first")]
    Device {
        /// Its name.
        name: String,
        /// Why.
        why: &'static str,
    },
    /// Something is under way.
    #[error(
        "a device or processor is being removed, or memory is being added: resume the machine and wait for the guest, or try again"
    )]
    Busy,
    /// The machine's own state.
    #[error("the state of the machine cannot be had")]
    Save(#[from] SaveError),
    /// Devices that came.
    #[error("the device {name}, which was added, cannot be made again")]
    Added {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A function number that no device has.
    #[error("the device {name}, which was added, cannot be function {number}: functions have the numbers 0 to 7")]
    Function {
        /// Its name.
        name: String,
        /// The number.
        number: u8,
    },
    /// RAM.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// It is not wanted any more.
    #[error("it was broken off")]
    Stopped,
}

impl SnapshotError {
    /// Whose fault it is.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Folder { .. }
            | Self::Taken { .. }
            | Self::NoFile
            | Self::Over { .. }
            | Self::Memory(MemoryError::File(_))
            | Self::Read { .. }
            | Self::Size { .. }
            | Self::Long { .. }
            | Self::Config { .. }
            | Self::State { .. }
            | Self::Shape { .. }
            | Self::Function { .. }
            | Self::Added { .. } => ErrorKind::BadRequest,
            Self::Device { .. } => ErrorKind::Unsupported,
            Self::Busy => ErrorKind::Conflict,
            Self::Save(SaveError::State(_)) => ErrorKind::Unsupported,
            Self::Write { .. } | Self::Kept(_) | Self::Save(_) | Self::Memory(_) | Self::Stopped => ErrorKind::Internal,
        }
    }
}

/// A file that is no state.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum StateFileError {
    /// Something else.
    #[error("it is no state of a machine")]
    Magic,
    /// Another version.
    #[error("it is of version {found}, this Banyan reads version {known}: restore it with the Banyan that wrote it")]
    Version {
        /// In the file.
        found: u32,
        /// Known here.
        known: u32,
    },
    /// Cut off or damaged.
    #[error("it is damaged: its length or checksum is wrong")]
    Damaged,
    /// Content.
    #[error(transparent)]
    State(#[from] StateError),
}
