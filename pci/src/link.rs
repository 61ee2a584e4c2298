//! What a link can do and does: speed, width, payload size. Set from the host or by default.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Transfer rate of a lane, as LNKCAP encodes it (PCIe 6.0 7.5.3.6): 1 is 2.5 GT/s, 6 is 64 GT/s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkSpeed(u8);

const RATES: [&str; 6] = ["2.5GT/s", "5GT/s", "8GT/s", "16GT/s", "32GT/s", "64GT/s"];

impl LinkSpeed {
    /// 32 GT/s.
    pub const GEN5: Self = Self(5);

    /// From the register encoding, 1 to 6.
    #[must_use]
    pub const fn from_encoding(value: u8) -> Option<Self> {
        if value >= 1 && value <= 6 { Some(Self(value)) } else { None }
    }

    /// The register encoding, 1 to 6.
    #[must_use]
    pub const fn encoding(self) -> u8 {
        self.0
    }

    /// LNKCAP2's supported speeds vector, bits 7:1: every rate up to this one.
    #[must_use]
    pub const fn supported_vector(self) -> u32 {
        ((1u32 << self.0) - 1) << 1
    }
}

impl fmt::Display for LinkSpeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(RATES.get(usize::from(self.0) - 1).copied().unwrap_or("?"))
    }
}

/// Lanes of a link: 1, 2, 4, 8, 16 or 32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkWidth(u8);

impl LinkWidth {
    /// 16 lanes.
    pub const X16: Self = Self(16);

    /// Checks the number of lanes. 12 exists in the encoding and is accepted.
    #[must_use]
    pub const fn new(lanes: u8) -> Option<Self> {
        if matches!(lanes, 1 | 2 | 4 | 8 | 12 | 16 | 32) { Some(Self(lanes)) } else { None }
    }

    /// Number of lanes.
    #[must_use]
    pub const fn lanes(self) -> u8 {
        self.0
    }
}

impl fmt::Display for LinkWidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "x{}", self.0)
    }
}

/// A rate and a width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinkRate {
    /// Per lane.
    pub speed: LinkSpeed,
    /// Lanes.
    pub width: LinkWidth,
}

impl LinkRate {
    /// What a link between two ends comes to, each of which does this much at most.
    #[must_use]
    pub fn between(self, other: Self) -> Self {
        Self { speed: self.speed.min(other.speed), width: self.width.min(other.width) }
    }
}

impl fmt::Display for LinkRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.speed, self.width)
    }
}

impl FromStr for LinkRate {
    type Err = LinkError;

    /// Reads `32GT/s x16`; a space before the unit is accepted, as sysfs writes it (`32.0 GT/s PCIe`, without a width, is
    /// for [`LinkSpeed::from_sysfs`]).
    fn from_str(text: &str) -> Result<Self, LinkError> {
        let error = || LinkError { text: text.to_owned() };
        let (speed, width) = text.trim().rsplit_once('x').ok_or_else(error)?;
        let width = width.parse().ok().and_then(LinkWidth::new).ok_or_else(error)?;
        let speed = LinkSpeed::from_sysfs(speed).ok_or_else(error)?;
        Ok(Self { speed, width })
    }
}

impl LinkSpeed {
    /// Reads a rate as sysfs and people write it: `32.0 GT/s PCIe`, `16GT/s`, `2.5 GT/s`.
    #[must_use]
    pub fn from_sysfs(text: &str) -> Option<Self> {
        let (number, _) = text.split_once("GT/s")?;
        let number = number.trim();
        let number = number.strip_suffix(".0").unwrap_or(number);
        let at = RATES.iter().position(|rate| rate.strip_suffix("GT/s") == Some(number))?;
        u8::try_from(at + 1).ok().map(Self)
    }
}

/// What a port or emulated endpoint shows of its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Link {
    /// LNKCAP: the most it can do.
    pub max: LinkRate,
    /// LNKSTA: what it does.
    pub current: LinkRate,
    /// DEVCAP's supported payload, as encoded (0 is 128 bytes, 5 is 4096).
    pub max_payload_supported: u8,
    /// DEVCTL's payload, as encoded.
    pub max_payload: u8,
}

impl Link {
    /// A link that runs at its maximum `rate`, with 512-byte payloads.
    #[must_use]
    pub const fn at(rate: LinkRate) -> Self {
        Self { max: rate, current: rate, max_payload_supported: 2, max_payload: 2 }
    }
}

impl Default for Link {
    /// 32 GT/s x16: what a port shows when no host tells it better.
    fn default() -> Self {
        Self::at(LinkRate { speed: LinkSpeed::GEN5, width: LinkWidth::X16 })
    }
}

/// A text that is no link rate.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "`{text}` is no link: write speed and width as `32GT/s x16` (speeds 2.5, 5, 8, 16, 32, 64; widths 1, 2, 4, 8, 12, 16, 32)"
)]
pub struct LinkError {
    text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_people_and_sysfs_write_them() {
        for (text, shown) in [("32GT/s x16", "32GT/s x16"), ("2.5 GT/s x1", "2.5GT/s x1"), ("16.0 GT/s PCIe x8", "16GT/s x8")] {
            assert_eq!(text.parse::<LinkRate>().unwrap().to_string(), shown);
        }
        for text in ["", "x16", "32GT/s", "32GT/s x3", "33GT/s x16", "GT/s x1"] {
            assert!(text.parse::<LinkRate>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_link_is_as_fast_and_as_wide_as_both_ends_can() {
        let rate = |text: &str| text.parse::<LinkRate>().unwrap();
        assert_eq!(rate("32GT/s x4").between(rate("8GT/s x16")), rate("8GT/s x4"));
        assert_eq!(rate("8GT/s x4").between(rate("32GT/s x16")), rate("8GT/s x4"));
    }

    #[test]
    fn a_gen5_port_supports_all_rates_up_to_it() {
        assert_eq!(LinkSpeed::GEN5.supported_vector(), 0x3E);
    }
}
