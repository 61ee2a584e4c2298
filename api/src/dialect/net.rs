//! Reads a network interface of the dialect and writes one.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use super::disk::{RateLimiter, put, rate_limit, server};
use super::json::{Notes, bad, read, refused};
use super::small::{no_iommu, no_place};
use crate::config::{MacError, NetConfig, NetError, NetSource, RateLimit};
use crate::error::ApiError;

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct NetBody {
    id: Option<String>,
    mac: Option<String>,
    tap: Option<String>,
    num_queues: Option<u16>,
    queue_size: Option<u16>,
    mtu: Option<u16>,
    offload_csum: Option<bool>,
    offload_tso: Option<bool>,
    offload_ufo: Option<bool>,
    rate_limiter_config: Option<RateLimiter>,
    iommu: Option<bool>,
    pci_device_id: Option<u8>,
    vhost_user: Option<bool>,
    vhost_socket: Option<PathBuf>,
    vhost_mode: Option<VhostMode>,
    // Known and without meaning here: a tap that is passed has its address, and numbers of another process's descriptors
    // say nothing.
    #[serde(rename = "ip")]
    _ip: Option<String>,
    #[serde(rename = "mask")]
    _mask: Option<String>,
    #[serde(rename = "host_mac")]
    _host_mac: Option<String>,
    #[serde(rename = "fds")]
    _fds: Option<Vec<i64>>,
    #[serde(rename = "pci_segment")]
    _pci_segment: Option<u16>,
}

/// Who of the two listens at the socket.
#[derive(Deserialize, PartialEq, Eq)]
enum VhostMode {
    /// The process that serves.
    Client,
    /// This one.
    Server,
}

impl NetBody {
    pub(super) fn config(self, what: &str) -> Result<NetConfig, ApiError> {
        no_iommu(what, "iommu", self.iommu)?;
        no_place(what, "pci_device_id", self.pci_device_id)?;
        let source = match (server(what, self.vhost_user, self.vhost_socket)?, self.tap) {
            (Some(_), Some(_)) => return Err(refused(what, "vhost_socket", "it and `tap` are two interfaces; keep one")),
            (Some(_), None) if self.vhost_mode == Some(VhostMode::Server) => {
                let why = "this side connects: have the process that serves the interface listen, and give \"Client\"";
                return Err(refused(what, "vhost_mode", why));
            }
            (Some(socket), None) => NetSource::Server(socket),
            (None, Some(tap)) => NetSource::Tap(tap),
            (None, None) => NetSource::Descriptors,
        };
        let mac = self.mac.map(|mac| mac.parse()).transpose();
        let mac = mac.map_err(|error: MacError| refused(what, "mac", &error.to_string()))?;
        let standard = NetConfig::default();
        let net = NetConfig {
            id: self.id,
            mac,
            source,
            queues: self.num_queues.unwrap_or(standard.queues),
            queue_size: self.queue_size.unwrap_or(standard.queue_size),
            mtu: self.mtu,
            offload_checksum: self.offload_csum.unwrap_or(true),
            offload_tcp: self.offload_tso.unwrap_or(true),
            offload_udp: self.offload_ufo.unwrap_or(true),
            rate_limit: self.rate_limiter_config.map(RateLimit::from).unwrap_or_default(),
        };
        net.check().map_err(|error| {
            let key = match error {
                NetError::Queues { .. } => "num_queues",
                NetError::QueueSize { .. } => "queue_size",
                NetError::Mtu { .. } => "mtu",
                NetError::Tap { .. } => "tap",
                NetError::Mac(_) | NetError::Group { .. } | NetError::Nobody => "mac",
                NetError::Served => "rate_limiter_config",
                NetError::Nowhere | NetError::Twice => "tap",
            };
            refused(what, key, &error.to_string())
        })?;
        Ok(net)
    }
}

/// The body of vm.add-net, with which `descriptors` came: one for each pair of queues, or none beside the name of a tap.
pub fn add_net(body: &[u8], descriptors: usize, notes: &Notes) -> Result<NetConfig, ApiError> {
    const WHAT: &str = "vm.add-net";
    let net = read::<NetBody>(WHAT, body, notes)?.config(WHAT)?;
    let pairs = usize::from(net.queues / 2);
    match (&net.source, descriptors) {
        (NetSource::Tap(tap), 1..) => {
            Err(refused(WHAT, "tap", &format!("{descriptors} descriptors came beside the name {tap}; keep one")))
        }
        (NetSource::Server(_), 1..) => {
            Err(refused(WHAT, "vhost_socket", &format!("{descriptors} descriptors came beside a socket; keep one")))
        }
        (NetSource::Descriptors, 0) => Err(bad(WHAT, "no descriptor of a tap came with the request, and no `tap` is named")),
        (NetSource::Descriptors, _) if descriptors != pairs => {
            let why = format!("{} queues are {pairs} pairs, but {descriptors} descriptors came", net.queues);
            Err(refused(WHAT, "num_queues", &why))
        }
        _ => Ok(net),
    }
}

/// A body of vm.add-net that means `net`, as far as the dialect can say it.
#[must_use]
pub fn net_body(net: &NetConfig) -> Value {
    let mut body = write(net);
    if let (Some(map), None) = (body.as_object_mut(), net.mac) {
        map.remove("mac");
    }
    body
}

/// An interface in vm.info.
pub(super) fn write(net: &NetConfig) -> Value {
    let mut value = json!({
        // Clients read both and use neither.
        "ip": "192.168.249.1",
        "mask": "255.255.255.0",
        "mac": net.mac.map_or_else(|| "00:00:00:00:00:00".to_owned(), |mac| mac.to_string()),
        "num_queues": net.queues,
        "queue_size": net.queue_size,
        "vhost_user": matches!(net.source, NetSource::Server(_)),
        "offload_csum": net.offload_checksum,
        "offload_tso": net.offload_tcp,
        "offload_ufo": net.offload_udp,
        "pci_segment": 0,
    });
    if let Some(map) = value.as_object_mut() {
        put(map, "id", net.id.as_deref());
        match &net.source {
            NetSource::Descriptors => {}
            NetSource::Tap(tap) => put(map, "tap", Some(tap.as_str())),
            NetSource::Server(socket) => {
                put(map, "vhost_socket", Some(socket.to_string_lossy()));
                put(map, "vhost_mode", Some("Client"));
            }
        }
        put(map, "mtu", net.mtu);
        put(map, "rate_limiter_config", rate_limit(&net.rate_limit));
    }
    value
}
