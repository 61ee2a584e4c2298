//! Which virtio devices a machine has beside its disks. Asked for by the HTTP API; whether the machine can make one is said
//! where it is made.

use std::path::PathBuf;

/// A network interface. Its queues come as descriptors beside it, or by the name of a tap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetConfig {
    /// Name of the device; by default `net0`, `net1`, ...
    pub id: Option<String>,
    /// The guest's address; by default one that is made up.
    pub mac: Option<MacAddress>,
    /// A tap of the host, opened by its name.
    pub tap: Option<String>,
    /// Queues, receive and transmit counted each: an even number, at least 2.
    pub queues: u16,
    /// Entries of a queue, a power of two.
    pub queue_size: u16,
    /// Largest packet, announced to the guest.
    pub mtu: Option<u16>,
    /// Checksums may be left to the other side.
    pub offload_checksum: bool,
    /// TCP packets may be larger than the link allows.
    pub offload_tcp: bool,
    /// So may UDP packets.
    pub offload_udp: bool,
    /// How much may pass.
    pub rate_limit: RateLimit,
}

impl Default for NetConfig {
    /// One pair of queues of 256 entries, every offload.
    fn default() -> Self {
        Self {
            id: None,
            mac: None,
            tap: None,
            queues: 2,
            queue_size: 256,
            mtu: None,
            offload_checksum: true,
            offload_tcp: true,
            offload_udp: true,
            rate_limit: RateLimit::default(),
        }
    }
}

/// Six bytes, written `02:00:00:00:00:01`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl std::fmt::Display for MacAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl std::str::FromStr for MacAddress {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Self, MacError> {
        let wrong = || MacError { text: text.to_owned() };
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit()));
            *byte = part.and_then(|part| u8::from_str_radix(part, 16).ok()).ok_or_else(wrong)?;
        }
        if parts.next().is_some() { Err(wrong()) } else { Ok(Self(bytes)) }
    }
}

/// How fast a disk or a network interface may be. Nothing is limited by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateLimit {
    /// Bytes.
    pub bandwidth: Option<TokenBucket>,
    /// Requests.
    pub operations: Option<TokenBucket>,
}

/// So many at once, and so fast again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    /// What the bucket holds.
    pub size: u64,
    /// What may pass once, before the bucket counts.
    pub one_time_burst: Option<u64>,
    /// Milliseconds in which an empty bucket fills.
    pub refill_ms: u64,
}

/// A shared folder, served by a vhost-user process.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// No hardware address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no hardware address; write six bytes as 02:00:00:00:00:01")]
pub struct MacError {
    text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hardware_address_has_exactly_six_bytes() {
        assert_eq!("02:00:00:00:00:0A".parse(), Ok(MacAddress([2, 0, 0, 0, 0, 10])));
        assert_eq!(MacAddress([2, 0, 0, 0, 0, 10]).to_string(), "02:00:00:00:00:0a");
        for text in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:01:02",
            "2:0:0:0:0:1",
            "02-00-00-00-00-01",
            "0g:00:00:00:00:01",
            "+2:00:00:00:00:01",
        ] {
            assert!(text.parse::<MacAddress>().is_err(), "{text}");
        }
    }
}
