//! A raw firmware image that ends at 4 GiB, where the reset vector is.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::file::open_regular;

/// An image of whole pages.
pub struct Firmware {
    /// Its content.
    pub bytes: Vec<u8>,
}

/// Multiple of which an image must be.
const PAGE: u64 = 4096;
/// Largest image: what lies between the local APICs and 4 GiB.
pub const LARGEST: u64 = 16 << 20;

impl Firmware {
    /// Reads the file at `path`.
    pub fn read(path: &Path) -> Result<Self, FirmwareError> {
        let named = path.to_path_buf();
        let unreadable = |source| FirmwareError::Open { path: named.clone(), source };
        let (file, _) = open_regular(path).map_err(unreadable)?;
        let mut bytes = Vec::new();
        file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        let len = bytes.len() as u64;
        if len == 0 || len > LARGEST || !len.is_multiple_of(PAGE) {
            return Err(FirmwareError::Size { path: named, len });
        }
        Ok(Self { bytes })
    }
}

/// A file that is no firmware image.
#[derive(Debug, Error)]
pub enum FirmwareError {
    /// It cannot be read.
    #[error("cannot read the firmware {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// Not whole pages, nothing, or too much.
    #[error(
        "the firmware {} has {len} bytes; a raw image has a multiple of 4096, at least one page and at most 16 MiB",
        path.display()
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Bytes, at most one more than the limit.
        len: u64,
    },
}
