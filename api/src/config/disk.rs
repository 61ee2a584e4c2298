//! Which file is a disk, or which process serves one.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Flag, FlagError, Pairs, choice};
use super::rate_limit::RateLimit;

/// `--disk`: an image, a block device, or a disk that a vhost-user process serves, shown as a virtio-blk device on the root bus.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Fields")]
pub struct DiskConfig {
    /// Where its contents are.
    pub source: DiskSource,
    /// Name of the device in trees and messages; by default `disk0`, `disk1`, ...
    pub id: Option<String>,
    /// Opened read-only, and shown so.
    pub readonly: bool,
    /// What the guest reads as the serial number: 1 to 20 printable ASCII characters (virtio 1.2, 5.2.6.1).
    pub serial: Option<String>,
    /// How it is read and written. Rate limits are not on the command line.
    pub io: DiskIo,
}

/// Where a disk's contents are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskSource {
    /// In an image or block device that this process reads and writes.
    Image(PathBuf),
    /// With another process, which listens at this socket. It decides what the disk is and whether it can be written: of the
    /// other keys only those for the name and the queues are for such a disk.
    Server(PathBuf),
}

/// How a disk's image is read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskIo {
    /// What the image is. Never found out by looking: a guest could write what is looked for.
    pub format: ImageFormat,
    /// Around the host's page cache.
    pub direct: bool,
    /// How requests are carried out.
    pub engine: IoEngine,
    /// Request queues.
    pub queues: u16,
    /// Entries of a queue, a power of two.
    pub queue_size: u16,
    /// How much may pass.
    pub rate_limit: RateLimit,
}

impl Default for DiskIo {
    /// A raw image by way of the page cache, one queue of 256 entries.
    fn default() -> Self {
        Self {
            format: ImageFormat::Raw,
            direct: false,
            engine: IoEngine::default(),
            queues: 1,
            queue_size: 256,
            rate_limit: RateLimit::default(),
        }
    }
}

/// What a disk image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageFormat {
    /// The disk's bytes.
    Raw,
    /// QEMU's format.
    Qcow2,
    /// Fixed VHD.
    FixedVhd,
    /// VHDX.
    Vhdx,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Fields {
    path: Option<PathBuf>,
    vhost_user: Option<PathBuf>,
    id: Option<String>,
    #[serde(default)]
    readonly: bool,
    serial: Option<String>,
    format: Option<Format>,
    #[serde(default)]
    direct: bool,
    #[serde(default)]
    io: IoEngine,
    queues: Option<u16>,
    queue_size: Option<u16>,
}

choice!(
    /// `io=`.
    #[derive(Default)]
    IoEngine {
        /// By io_uring for raw images, where this process may use it.
        #[default]
        Auto = "auto",
        /// By io_uring, or the disk is refused.
        Uring = "uring",
        /// By one system call after another.
        Sync = "sync",
    }
);

choice!(
    /// `format=`.
    Format { Raw = "raw", Qcow2 = "qcow2" }
);

impl TryFrom<Fields> for DiskConfig {
    type Error = DiskError;

    fn try_from(fields: Fields) -> Result<Self, DiskError> {
        let Fields { path, vhost_user, id, readonly, serial, format, direct, io: engine, queues, queue_size } = fields;
        let source = match (path, vhost_user) {
            (Some(path), None) => DiskSource::Image(path),
            (None, Some(socket)) => DiskSource::Server(socket),
            (None, None) => return Err(DiskError::Nowhere),
            (Some(_), Some(_)) => return Err(DiskError::Twice),
        };
        let standard = DiskIo::default();
        let io = DiskIo {
            format: match format {
                None | Some(Format::Raw) => ImageFormat::Raw,
                Some(Format::Qcow2) => ImageFormat::Qcow2,
            },
            direct,
            engine,
            queues: queues.unwrap_or(standard.queues),
            queue_size: queue_size.unwrap_or(standard.queue_size),
            rate_limit: standard.rate_limit,
        };
        let disk = Self { source, id, readonly, serial, io };
        disk.check().map(|()| disk)
    }
}

impl DiskConfig {
    /// Whether the device can show what is asked for.
    pub(crate) fn check(&self) -> Result<(), DiskError> {
        if matches!(self.source, DiskSource::Server(_)) {
            let DiskIo { queues, queue_size, .. } = self.io;
            let plain = DiskIo { queues, queue_size, ..DiskIo::default() };
            let own = [
                ("readonly", self.readonly),
                ("serial", self.serial.is_some()),
                ("format, direct, io or a rate limit", self.io != plain),
            ];
            if let Some((key, _)) = own.into_iter().find(|(_, given)| *given) {
                return Err(DiskError::Served { key });
            }
        }
        if self.io.engine == IoEngine::Uring && self.io.format != ImageFormat::Raw {
            return Err(DiskError::UringFormat);
        }
        match &self.serial {
            Some(serial) if serial.is_empty() || serial.len() > 20 || !serial.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Err(DiskError::Serial { serial: serial.clone() })
            }
            _ if !(1..=64).contains(&self.io.queues) => Err(DiskError::Queues { queues: self.io.queues }),
            _ if !(4..=32_768).contains(&self.io.queue_size) || !self.io.queue_size.is_power_of_two() => {
                Err(DiskError::QueueSize { queue_size: self.io.queue_size })
            }
            _ => Ok(()),
        }
    }
}

impl FromStr for DiskConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--disk", first: "path" }.parse(text)
    }
}

impl fmt::Display for DiskConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        match &self.source {
            DiskSource::Image(path) => pairs.pair("path", &path.display())?,
            DiskSource::Server(socket) => pairs.pair("vhost-user", &socket.display())?,
        }
        pairs.optional("id", self.id.as_ref().map(|id| id as _))?;
        pairs.switch("readonly", self.readonly, false)?;
        pairs.optional("serial", self.serial.as_ref().map(|serial| serial as _))?;
        if self.io.format == ImageFormat::Qcow2 {
            pairs.pair("format", &Format::Qcow2)?;
        }
        pairs.switch("direct", self.io.direct, false)?;
        if self.io.engine != IoEngine::default() {
            pairs.pair("io", &self.io.engine)?;
        }
        let standard = DiskIo::default();
        if self.io.queues != standard.queues {
            pairs.pair("queues", &self.io.queues)?;
        }
        if self.io.queue_size != standard.queue_size {
            pairs.pair("queue-size", &self.io.queue_size)?;
        }
        Ok(())
    }
}

/// Keys of `--disk` that cannot be.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum DiskError {
    /// No contents.
    #[error("key `path` is missing; add `path=...`, or `vhost-user=...` for a disk that another process serves")]
    Nowhere,
    /// Two places.
    #[error("`path` and `vhost-user` are two disks; keep one")]
    Twice,
    /// What is for images.
    #[error("{key}: the process at `vhost-user` decides that; leave it out")]
    Served {
        /// Which keys.
        key: &'static str,
    },
    /// What raw images alone can.
    #[error("io=uring is for raw images; leave it out")]
    UringFormat,
    /// No number of queues.
    #[error("{queues} queues are not possible; give 1 to 64")]
    Queues {
        /// What was given.
        queues: u16,
    },
    /// No size of a ring.
    #[error("a queue of {queue_size} entries is not possible; give a power of two from 4 to 32768")]
    QueueSize {
        /// What was given.
        queue_size: u16,
    },
    /// Too long for the device, or not printable.
    #[error("serial `{serial}` does not fit; give 1 to 20 printable ASCII characters without spaces")]
    Serial {
        /// What was given.
        serial: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_path_is_enough() {
        let config: DiskConfig = "/images/root.raw".parse().unwrap();
        assert_eq!(
            config,
            DiskConfig {
                source: DiskSource::Image("/images/root.raw".into()),
                id: None,
                readonly: false,
                serial: None,
                io: DiskIo::default()
            }
        );
    }

    #[test]
    fn what_is_printed_reads_back() {
        for text in [
            "a.img",
            "path=\"a,b.img\",readonly=on,id=root,serial=BNYN-1",
            "path=\"a\"\"b,\"",
            "d.qcow2,format=qcow2,direct=on,queues=4,queue-size=64",
            "vhost-user=/run/blk.sock,id=root,queues=4,queue-size=64",
            "a.img,io=uring",
            "d.qcow2,format=qcow2,io=sync",
        ] {
            let config: DiskConfig = text.parse().unwrap();
            assert_eq!(config.to_string().parse(), Ok(config), "{text}");
        }
    }

    #[test]
    fn a_serial_number_that_the_device_cannot_hold_is_refused() {
        for serial in ["123456789012345678901", "\"a b\"", "\"\"", "é"] {
            let error = format!("a.img,serial={serial}").parse::<DiskConfig>().unwrap_err().to_string();
            assert!(error.contains("1 to 20 printable"), "{error}");
        }
    }

    #[test]
    fn a_disk_is_an_image_or_served_by_another_process_which_knows_the_rest() {
        for (text, expected) in [
            ("readonly=on", "--disk: key `path` is missing; add `path=...`, or `vhost-user=...`"),
            ("a.img,vhost-user=/s", "two disks"),
            ("vhost-user=/s,readonly=on", "readonly: the process at `vhost-user` decides"),
            ("vhost-user=/s,serial=x", "serial: the process"),
            ("vhost-user=/s,direct=on", "format, direct"),
            ("vhost-user=/s,io=sync", "format, direct, io"),
            ("a.qcow2,format=qcow2,io=uring", "for raw images"),
            ("vhost-user=/s,queues=0", "1 to 64"),
        ] {
            let error = text.parse::<DiskConfig>().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
