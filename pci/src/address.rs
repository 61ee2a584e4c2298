//! Names of places: a function on a bus, in a segment, on the host; a range of buses.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Device number (0 to 31) and function number (0 to 7) on a bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Devfn(u8);

impl Devfn {
    /// Device 0, function 0.
    pub const ZERO: Self = Self(0);

    /// Combines a device number (low 5 bits are used) and a function number (low 3 bits are used).
    #[must_use]
    pub const fn new(device: u8, function: u8) -> Self {
        Self((device & 0x1F) << 3 | (function & 7))
    }

    /// From the byte in which configuration cycles carry it: device in bits 7:3, function in bits 2:0.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Self {
        Self(byte)
    }

    /// Device number, 0 to 31.
    #[must_use]
    pub const fn device(self) -> u8 {
        self.0 >> 3
    }

    /// Function number, 0 to 7.
    #[must_use]
    pub const fn function(self) -> u8 {
        self.0 & 7
    }

    /// Device in bits 7:3, function in bits 2:0.
    #[must_use]
    pub const fn byte(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Devfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}.{}", self.device(), self.function())
    }
}

/// Bus, device and function as the guest numbers them at this moment, inside one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Bdf(u16);

impl Bdf {
    /// Function `devfn` on bus `bus`.
    #[must_use]
    pub const fn new(bus: u8, devfn: Devfn) -> Self {
        Self((bus as u16) << 8 | devfn.0 as u16)
    }

    /// Bus number.
    #[must_use]
    pub const fn bus(self) -> u8 {
        self.0.to_be_bytes()[0]
    }

    /// Device and function number.
    #[must_use]
    pub const fn devfn(self) -> Devfn {
        Devfn(self.0.to_be_bytes()[1])
    }

    /// As a requester id: bus in bits 15:8, device in 7:3, function in 2:0.
    #[must_use]
    pub const fn requester_id(self) -> u16 {
        self.0
    }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}:{}", self.bus(), self.devfn())
    }
}

/// Segment (PCI domain as ACPI's `_SEG` numbers it) and address in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Sbdf {
    /// PCI segment group.
    pub segment: u16,
    /// Address inside the segment.
    pub bdf: Bdf,
}

impl fmt::Display for Sbdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{}", self.segment, self.bdf)
    }
}

/// A function of the host, as Linux names it. Domains can exceed 16 bits (Intel VMD).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostBdf {
    /// PCI domain.
    pub domain: u32,
    /// Address inside the domain.
    pub bdf: Bdf,
}

impl fmt::Display for HostBdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{}", self.domain, self.bdf)
    }
}

impl FromStr for HostBdf {
    type Err = AddressError;

    /// Reads `[DDDD:]BB:DD.F`, hexadecimal, the function 0 to 7.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = || AddressError::Syntax { text: text.to_owned() };
        let hex = |digits: &str, most: usize| {
            let plain = !digits.is_empty() && digits.len() <= most && digits.bytes().all(|b| b.is_ascii_hexdigit());
            if plain { u32::from_str_radix(digits, 16).ok() } else { None }
        };
        let (front, devfn) = text.rsplit_once(':').ok_or_else(error)?;
        let (domain, bus) = front.rsplit_once(':').unwrap_or(("0000", front));
        let (device, function) = devfn.split_once('.').ok_or_else(error)?;
        let domain = hex(domain, 8).ok_or_else(error)?;
        let bus = hex(bus, 2).and_then(|n| u8::try_from(n).ok()).ok_or_else(error)?;
        let device = hex(device, 2).and_then(|n| u8::try_from(n).ok()).ok_or_else(error)?;
        let function = hex(function, 1).and_then(|n| u8::try_from(n).ok()).ok_or_else(error)?;
        if device > 31 || function > 7 {
            return Err(error());
        }
        Ok(Self { domain, bdf: Bdf::new(bus, Devfn::new(device, function)) })
    }
}

/// Buses that a bridge forwards configuration cycles to. Empty (nothing forwarded) when `secondary > subordinate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BusRange {
    /// The bus directly below.
    pub secondary: u8,
    /// The highest bus below.
    pub subordinate: u8,
}

impl BusRange {
    /// Whether `bus` lies in the range.
    #[must_use]
    pub const fn contains(self, bus: u8) -> bool {
        self.secondary <= bus && bus <= self.subordinate
    }
}

impl fmt::Display for BusRange {
    /// As `lspci -tv` writes it: `03` or `02-04`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.secondary == self.subordinate {
            write!(f, "{:02x}", self.secondary)
        } else {
            write!(f, "{:02x}-{:02x}", self.secondary, self.subordinate)
        }
    }
}

/// A text that is no PCI address.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AddressError {
    /// Not of the form.
    #[error("`{text}` is no PCI address: write it as DDDD:BB:DD.F, for example 0000:03:00.0")]
    Syntax {
        /// What was given.
        text: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_addresses_are_read_with_and_without_a_domain() {
        for (text, shown) in [("0000:03:00.0", "0000:03:00.0"), ("3d:1f.7", "0000:3d:1f.7"), ("10000:e1:00.0", "10000:e1:00.0")] {
            let parsed: HostBdf = text.parse().unwrap();
            assert_eq!(parsed.to_string(), shown);
        }
    }

    #[test]
    fn texts_that_are_no_address_are_refused() {
        for text in ["", "03", "03:00", "03:00.8", "03:20.0", "0000:03:00.0 ", "+3:00.0", "x:03:00.0", "123:00.0", "03:00.00"] {
            assert!(text.parse::<HostBdf>().is_err(), "{text}");
        }
    }
}
