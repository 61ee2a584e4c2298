//! Reads a disk of the dialect and writes one.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::json::{Notes, bad, read, refused};
use super::small::{missing, no_iommu, no_place};
use crate::config::{DiskConfig, DiskIo, DiskSource, ImageFormat, IoEngine, RateLimit, TokenBucket};
use crate::error::ApiError;

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct DiskBody {
    path: Option<PathBuf>,
    id: Option<String>,
    serial: Option<String>,
    readonly: Option<bool>,
    direct: Option<bool>,
    image_type: Option<ImageType>,
    num_queues: Option<u16>,
    queue_size: Option<u16>,
    rate_limiter_config: Option<RateLimiter>,
    rate_limit_group: Option<String>,
    iommu: Option<bool>,
    pci_device_id: Option<u8>,
    vhost_user: Option<bool>,
    vhost_socket: Option<PathBuf>,
    banyan: Option<String>,
    disable_io_uring: Option<bool>,
    // Known; how a disk is served does not depend on them.
    #[serde(rename = "pci_segment")]
    _pci_segment: Option<u16>,
    #[serde(rename = "sparse")]
    _sparse: Option<bool>,
    #[serde(rename = "backing_files")]
    _backing_files: Option<bool>,
    #[serde(rename = "disable_aio")]
    _disable_aio: Option<bool>,
}

#[derive(Deserialize)]
enum ImageType {
    Raw,
    Qcow2,
    FixedVhd,
    Vhdx,
    Unknown,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct RateLimiter {
    bandwidth: Option<Bucket>,
    ops: Option<Bucket>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Bucket {
    size: u64,
    one_time_burst: Option<u64>,
    refill_time: u64,
}

impl From<Bucket> for TokenBucket {
    fn from(bucket: Bucket) -> Self {
        Self { size: bucket.size, one_time_burst: bucket.one_time_burst, refill_ms: bucket.refill_time }
    }
}

impl From<RateLimiter> for RateLimit {
    fn from(limiter: RateLimiter) -> Self {
        Self { bandwidth: limiter.bandwidth.map(Bucket::into), operations: limiter.ops.map(Bucket::into) }
    }
}

impl DiskBody {
    pub(super) fn config(self, what: &str) -> Result<DiskConfig, ApiError> {
        no_iommu(what, "iommu", self.iommu)?;
        no_place(what, "pci_device_id", self.pci_device_id)?;
        if self.rate_limit_group.is_some_and(|group| !group.is_empty()) {
            let why = "disks that share a limit are not supported; give each its own `rate_limiter_config`";
            return Err(refused(what, "rate_limit_group", why));
        }
        if let Some(flags) = self.banyan {
            if self.path.is_some() || self.vhost_socket.is_some() || self.id.is_some() {
                return Err(refused(what, "banyan", "it describes the whole disk; leave out `path`, `vhost_socket` and `id`"));
            }
            return flags.parse().map_err(|error: crate::config::flags::FlagError| bad(what, &error.to_string()));
        }
        let path = self.path.filter(|path| !path.as_os_str().is_empty());
        let source = match server(what, self.vhost_user, self.vhost_socket)? {
            Some(_) if path.is_some() => return Err(refused(what, "vhost_socket", "it and `path` are two disks; keep one")),
            Some(socket) => DiskSource::Server(socket),
            None => DiskSource::Image(path.ok_or_else(|| missing(what, "path"))?),
        };
        let io = DiskIo {
            format: match self.image_type.unwrap_or(ImageType::Raw) {
                // A format is never looked for in what a guest could have written.
                ImageType::Raw | ImageType::Unknown => ImageFormat::Raw,
                ImageType::Qcow2 => ImageFormat::Qcow2,
                ImageType::FixedVhd => ImageFormat::FixedVhd,
                ImageType::Vhdx => ImageFormat::Vhdx,
            },
            direct: self.direct.unwrap_or_default(),
            engine: if self.disable_io_uring == Some(true) { IoEngine::Sync } else { IoEngine::Auto },
            queues: self.num_queues.unwrap_or(1),
            queue_size: self.queue_size.unwrap_or(128),
            rate_limit: self.rate_limiter_config.map(RateLimit::from).unwrap_or_default(),
        };
        if io.queues == 0 {
            return Err(refused(what, "num_queues", "0 queues carry nothing; give 1 or more"));
        }
        queue_size(what, io.queue_size)?;
        let disk = DiskConfig { source, id: self.id, readonly: self.readonly.unwrap_or_default(), serial: self.serial, io };
        disk.check().map_err(|error| bad(what, &error.to_string()))?;
        Ok(disk)
    }
}

/// The socket of the process that serves a device, if one does.
pub(super) fn server(what: &str, served: Option<bool>, socket: Option<PathBuf>) -> Result<Option<PathBuf>, ApiError> {
    match (served.unwrap_or_default(), socket.filter(|socket| !socket.as_os_str().is_empty())) {
        (true, Some(socket)) => Ok(Some(socket)),
        (true, None) => Err(missing(what, "vhost_socket")),
        (false, Some(_)) => Err(refused(what, "vhost_socket", "it is for devices with `vhost_user` true")),
        (false, None) => Ok(None),
    }
}

/// Split queues have a power of two of entries, 32768 at most (virtio 1.2, 2.7).
pub(super) fn queue_size(what: &str, size: u16) -> Result<(), ApiError> {
    if size.is_power_of_two() {
        return Ok(());
    }
    Err(refused(what, "queue_size", &format!("{size} is no power of two from 1 to 32768")))
}

/// The body of vm.add-disk.
pub fn add_disk(body: &[u8], notes: &Notes) -> Result<DiskConfig, ApiError> {
    const WHAT: &str = "vm.add-disk";
    read::<DiskBody>(WHAT, body, notes)?.config(WHAT)
}

/// A body of vm.add-disk that means `disk`, as far as the command line can say it.
#[must_use]
pub fn disk_body(disk: &DiskConfig) -> Value {
    json!({ "banyan": disk.to_string() })
}

/// A disk in vm.info.
pub(super) fn write(disk: &DiskConfig) -> Value {
    let mut value = json!({
        "readonly": disk.readonly,
        "direct": disk.io.direct,
        "disable_io_uring": disk.io.engine == IoEngine::Sync,
        "num_queues": disk.io.queues,
        "queue_size": disk.io.queue_size,
        "vhost_user": matches!(disk.source, DiskSource::Server(_)),
        "image_type": match disk.io.format {
            ImageFormat::Raw => "Raw",
            ImageFormat::Qcow2 => "Qcow2",
            ImageFormat::FixedVhd => "FixedVhd",
            ImageFormat::Vhdx => "Vhdx",
        },
        "iommu": false,
        "pci_segment": 0,
        // Room that the guest gives up is given back, and no other file that an image names is opened.
        "sparse": true,
        "backing_files": false,
    });
    if let Some(map) = value.as_object_mut() {
        let (key, path) = match &disk.source {
            DiskSource::Image(path) => ("path", path),
            DiskSource::Server(socket) => ("vhost_socket", socket),
        };
        put(map, key, Some(path.to_string_lossy()));
        put(map, "id", disk.id.as_deref());
        put(map, "serial", disk.serial.as_deref());
        put(map, "rate_limiter_config", rate_limit(&disk.io.rate_limit));
    }
    value
}

/// A key that is there only with a value: clients do not take null for every type.
pub(super) fn put(map: &mut Map<String, Value>, key: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        map.insert(key.to_owned(), value.into());
    }
}

pub(super) fn rate_limit(limit: &RateLimit) -> Option<Value> {
    let bucket = |bucket: TokenBucket| {
        let mut map = Map::new();
        put(&mut map, "size", Some(bucket.size));
        put(&mut map, "one_time_burst", bucket.one_time_burst);
        put(&mut map, "refill_time", Some(bucket.refill_ms));
        map
    };
    let mut map = Map::new();
    put(&mut map, "bandwidth", limit.bandwidth.map(bucket));
    put(&mut map, "ops", limit.operations.map(bucket));
    (!map.is_empty()).then_some(map.into())
}
