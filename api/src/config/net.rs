//! Which tap is a network interface, or which process serves one.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Flag, FlagError, Pairs};
use super::rate_limit::RateLimit;

/// `--net`: a virtio-net device on the root bus.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Fields")]
pub struct NetConfig {
    /// Name of the device; by default `net0`, `net1`, ...
    pub id: Option<String>,
    /// The guest's address; by default one that is made up.
    pub mac: Option<MacAddress>,
    /// Where its packets come from and go to.
    pub source: NetSource,
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
            source: NetSource::Descriptors,
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

/// Where packets come from and go to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetSource {
    /// A tap that somebody else opened, whose descriptors come with the request (HTTP API).
    Descriptors,
    /// A tap of the host, opened by its name.
    Tap(String),
    /// Another process, which listens at this socket and serves the queues over vhost-user.
    Server(PathBuf),
}

/// Six bytes, written `02:00:00:00:00:01`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Fields {
    tap: Option<String>,
    vhost_user: Option<PathBuf>,
    id: Option<String>,
    mac: Option<String>,
    queues: Option<u16>,
    queue_size: Option<u16>,
    mtu: Option<u16>,
    offload: Option<bool>,
}

impl TryFrom<Fields> for NetConfig {
    type Error = NetError;

    fn try_from(fields: Fields) -> Result<Self, NetError> {
        let standard = Self::default();
        let source = match (fields.tap, fields.vhost_user) {
            (Some(tap), None) => NetSource::Tap(tap),
            (None, Some(socket)) => NetSource::Server(socket),
            (None, None) => return Err(NetError::Nowhere),
            (Some(_), Some(_)) => return Err(NetError::Twice),
        };
        let mac = fields.mac.map(|mac| mac.parse()).transpose()?;
        let offload = fields.offload.unwrap_or(true);
        let net = Self {
            id: fields.id,
            mac,
            source,
            queues: fields.queues.unwrap_or(standard.queues),
            queue_size: fields.queue_size.unwrap_or(standard.queue_size),
            mtu: fields.mtu,
            offload_checksum: offload,
            offload_tcp: offload,
            offload_udp: offload,
            rate_limit: RateLimit::default(),
        };
        net.check().map(|()| net)
    }
}

impl NetConfig {
    /// Whether the device can show what is asked for.
    pub(crate) fn check(&self) -> Result<(), NetError> {
        let Self { queues, queue_size, .. } = *self;
        if !(2..=32).contains(&queues) || !queues.is_multiple_of(2) {
            return Err(NetError::Queues { queues });
        }
        // Split queues have a power of two of entries, 32768 at most (virtio 1.2, 2.7).
        if !(2..=32_768).contains(&queue_size) || !queue_size.is_power_of_two() {
            return Err(NetError::QueueSize { queue_size });
        }
        // linux: net/core/dev.c, dev_valid_name; `%d` would be replaced by a number.
        let fits = |tap: &str| {
            (1..16).contains(&tap.len())
                && !matches!(tap, "." | "..")
                && !tap.contains(|letter: char| letter.is_whitespace() || letter.is_control() || "/:%".contains(letter))
        };
        if let NetSource::Tap(tap) = &self.source
            && !fits(tap)
        {
            return Err(NetError::Tap { tap: tap.escape_debug().to_string() });
        }
        // As small as IPv4 allows (RFC 791).
        if matches!(self.source, NetSource::Server(_)) && self.rate_limit != RateLimit::default() {
            return Err(NetError::Served);
        }
        if let Some(mtu @ ..68) = self.mtu {
            return Err(NetError::Mtu { mtu });
        }
        match self.mac {
            // The lowest bit of the first byte tells that it is a group's (IEEE 802).
            Some(mac) if mac.0[0] & 1 == 1 => Err(NetError::Group { mac }),
            Some(mac) if mac.0 == [0; 6] => Err(NetError::Nobody),
            _ => Ok(()),
        }
    }
}

impl FromStr for NetConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--net", first: "tap" }.parse(text)
    }
}

impl fmt::Display for NetConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let standard = Self::default();
        let mut pairs = Pairs::new(f);
        match &self.source {
            NetSource::Descriptors => {}
            NetSource::Tap(tap) => pairs.pair("tap", tap)?,
            NetSource::Server(socket) => pairs.pair("vhost-user", &socket.display())?,
        }
        pairs.optional("id", self.id.as_ref().map(|id| id as _))?;
        pairs.optional("mac", self.mac.as_ref().map(|mac| mac as _))?;
        if self.queues != standard.queues {
            pairs.pair("queues", &self.queues)?;
        }
        if self.queue_size != standard.queue_size {
            pairs.pair("queue-size", &self.queue_size)?;
        }
        pairs.optional("mtu", self.mtu.as_ref().map(|mtu| mtu as _))?;
        pairs.switch("offload", self.offload_checksum, true)
    }
}

/// Keys of `--net` that cannot be.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum NetError {
    /// No packets.
    #[error("key `tap` is missing; add `tap=...`, or `vhost-user=...` for an interface that another process serves")]
    Nowhere,
    /// Two places.
    #[error("`tap` and `vhost-user` are two interfaces; keep one")]
    Twice,
    /// What is for taps.
    #[error("the process that serves the interface decides how much may pass; leave the rate limit out")]
    Served,
    /// No address.
    #[error(transparent)]
    Mac(#[from] MacError),
    /// No pairs.
    #[error("{queues} queues are not possible; receive and transmit count each, so give an even number from 2 to 32")]
    Queues {
        /// What was given.
        queues: u16,
    },
    /// No size of a ring.
    #[error("a queue of {queue_size} entries is not possible; give a power of two from 2 to 32768")]
    QueueSize {
        /// What was given.
        queue_size: u16,
    },
    /// A group's address.
    #[error("{mac} is the address of a group; give one whose first byte is even, such as 02:00:00:00:00:01")]
    Group {
        /// What was given.
        mac: MacAddress,
    },
    /// All zero.
    #[error("00:00:00:00:00:00 is nobody's address; give another such as 02:00:00:00:00:01, or none for one that is made up")]
    Nobody,
    /// No name of an interface.
    #[error("`{tap}` is no name of a tap; give 1 to 15 bytes without spaces, `/`, `:` and `%`, such as tap0")]
    Tap {
        /// What was given.
        tap: String,
    },
    /// Too small.
    #[error("an MTU of {mtu} is not possible; the smallest is 68")]
    Mtu {
        /// What was given.
        mtu: u16,
    },
}

/// No hardware address.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
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

    #[test]
    fn what_is_printed_reads_back() {
        for text in [
            "tap0",
            "tap=t1,id=eth,mac=02:00:00:00:00:01,queues=8,queue-size=512,mtu=9000,offload=off",
            "vhost-user=/run/net.sock,mac=02:00:00:00:00:01,queues=4",
        ] {
            let config: NetConfig = text.parse().unwrap();
            assert_eq!(config.to_string().parse(), Ok(config), "{text}");
        }
    }

    #[test]
    fn what_an_interface_cannot_have_is_refused_with_the_limit() {
        let cases = [
            ("tap0,queues=3", "even number from 2 to 32"),
            ("tap0,queues=34", "even number from 2 to 32"),
            ("tap0,queue-size=300", "power of two"),
            ("tap0,queue-size=1", "from 2 to 32768"),
            ("tap0,mtu=67", "smallest is 68"),
            ("tap0,mac=01:00:5e:00:00:01", "address of a group"),
            ("tap0,mac=ff:ff:ff:ff:ff:ff", "address of a group"),
            ("tap0,mac=00:00:00:00:00:00", "nobody's address"),
            ("tap0,mac=zz", "six bytes"),
            ("mac=02:00:00:00:00:01", "`tap` is missing"),
            ("tap0,vhost-user=/s", "two interfaces"),
        ];
        for (text, expected) in cases {
            let error = text.parse::<NetConfig>().unwrap_err();
            let text = format!("{error}");
            assert!(text.contains(expected), "{text}");
        }
    }
}
