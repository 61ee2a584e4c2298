//! Where BARs may lie, and what is missing when they do not fit.

use std::fmt;

use super::plan::Window;
use super::spec::{Name, Need, Resource};
use crate::bar::Size;

/// Guest-physical addresses that are free for BARs. All root complexes share them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Apertures {
    /// Below 4 GiB; what lies above is not used.
    pub mem32: Vec<Window>,
    /// For 64-bit prefetchable BARs. May be empty: what fits below 4 GiB is then placed there.
    pub mem64: Vec<Window>,
    /// Guest-physical address width. Nothing is placed at 2 to the power of this or above.
    pub address_bits: u8,
}

/// Lowest I/O port of a BAR; the machine's own are below.
pub const FIRST_PORT: u16 = 0xC000;

/// Kinds of address space that BARs come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pool {
    /// Memory below 4 GiB.
    Memory32,
    /// Memory at any address, 64-bit prefetchable.
    Memory64,
    /// I/O ports 0xC000 to 0xFFFF, for devices on a root bus.
    Io,
}

impl Apertures {
    /// First address that the width does not reach.
    fn end(&self) -> u64 {
        1u64.checked_shl(self.address_bits.into()).unwrap_or(u64::MAX)
    }

    /// The windows of `pool` in ascending order, cut to where it may lie, without overlaps.
    pub(super) fn usable(&self, pool: Pool) -> Vec<Window> {
        let (given, most) = match pool {
            Pool::Memory32 => (self.mem32.clone(), (self.end() - 1).min(0xFFFF_FFFF)),
            Pool::Memory64 => (self.mem64.clone(), self.end() - 1),
            Pool::Io => (vec![Window { base: FIRST_PORT.into(), limit: 0xFFFF }], 0xFFFF),
        };
        let mut sorted = given;
        sorted.sort_by_key(|window| (window.base, window.limit));
        let mut usable: Vec<Window> = Vec::new();
        for window in sorted {
            let after = usable.last().map_or(0, |last| last.limit.saturating_add(1));
            let cut = Window { base: window.base.max(after), limit: window.limit.min(most) };
            if cut.base <= cut.limit && window.base <= window.limit {
                usable.push(cut);
            }
        }
        usable
    }

    /// The usable windows with the last one open upwards: shows how much would be enough.
    pub(super) fn unlimited(&self, pool: Pool) -> Vec<Window> {
        let mut windows = self.usable(pool);
        match windows.last_mut() {
            Some(last) => last.limit = u64::MAX,
            None => windows.push(Window { base: self.start(pool), limit: u64::MAX }),
        }
        windows
    }

    fn start(&self, pool: Pool) -> u64 {
        let given = match pool {
            Pool::Memory32 | Pool::Io => self.mem32.iter().map(|window| window.base).min(),
            Pool::Memory64 => self.mem64.iter().map(|window| window.base).min(),
        };
        given.unwrap_or_else(|| self.end().max(1 << 32))
    }

    /// Address bits that reach up to `end` (exclusive), if it is the width that ends `pool`.
    pub(super) fn enough_bits(&self, pool: Pool, end: u64) -> Option<u8> {
        let usable = self.usable(pool);
        let ended_by_width = usable.last().is_none_or(|last| last.limit == self.end() - 1);
        let bits = u8::try_from(64 - end.saturating_sub(1).leading_zeros()).unwrap_or(64);
        (pool == Pool::Memory64 && ended_by_width && bits > self.address_bits).then_some(bits)
    }
}

/// What is missing in an aperture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortage {
    /// Which aperture.
    pub pool: Pool,
    /// The first device or hot-plug port that finds no place.
    pub name: Name,
    /// The largest thing that it asks for.
    pub asks: Asks,
    /// Bytes that the aperture would have to have for all devices, gaps for alignment and hot-plug included.
    pub needed: u64,
    /// Bytes that it has.
    pub there: u64,
    /// Everybody who finds no place, in bus order.
    pub left_over: Vec<Name>,
    /// Guest-physical address width.
    pub address_bits: u8,
    /// A width that would be enough, where it is the width that ends the aperture.
    pub enough_bits: Option<u8>,
}

/// Something that finds no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asks {
    /// A device's BAR or ROM.
    Bar {
        /// Which.
        bar: Resource,
        /// What it asks for.
        need: Need,
    },
    /// What a hot-plug port keeps for devices to come.
    Reserve {
        /// Bytes.
        size: u64,
    },
}

impl Asks {
    /// Bytes.
    #[must_use]
    pub fn size(self) -> u64 {
        match self {
            Self::Bar { need, .. } => need.size().unwrap_or(u64::MAX),
            Self::Reserve { size } => size,
        }
    }
}

impl Shortage {
    /// Bytes that are missing.
    #[must_use]
    pub const fn missing(&self) -> u64 {
        self.needed.saturating_sub(self.there)
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        let aperture = match self.pool {
            Pool::Memory32 => "the memory aperture below 4 GiB",
            Pool::Memory64 => "the 64-bit memory aperture",
            Pool::Io => "the I/O ports from 0xc000",
        };
        let (needed, there, missing) = (Size(self.needed), Size(self.there), Size(self.missing()));
        match self.asks {
            Asks::Bar { bar, need } => write!(f, "{bar} of `{name}` ({need})")?,
            Asks::Reserve { size } => write!(f, "what `{name}` keeps for hot-plug ({})", Size(size))?,
        }
        write!(f, " does not fit into {aperture}: ")?;
        write!(f, "all devices and ports need {needed} there, it has {there}, {missing} are missing; ")?;
        let count = self.left_over.len();
        match count {
            1 => f.write_str("one of them finds no place: ")?,
            _ => write!(f, "{count} of them find no place: ")?,
        }
        for (index, name) in self.left_over.iter().take(SHOWN).enumerate() {
            write!(f, "{}`{name}`", if index == 0 { "" } else { ", " })?;
        }
        if count > SHOWN {
            write!(f, " and {} more", count - SHOWN)?;
        }
        match (self.enough_bits, self.pool) {
            (Some(bits), _) => {
                write!(f, "; {bits} guest-physical address bits would be enough, the guest has {}", self.address_bits)
            }
            (None, Pool::Io) => write!(f, "; put fewer devices with I/O BARs on root buses: below ports theirs take nothing"),
            (None, Pool::Memory32) if self.asks.size() > self.there && matches!(self.asks, Asks::Reserve { .. }) => {
                write!(f, "; keep at most {there} for hot-plug below 4 GiB: large BARs lie above it")
            }
            (None, Pool::Memory32) if self.asks.size() > self.there => {
                write!(f, "; only 64-bit prefetchable BARs can lie above 4 GiB: leave the device out")
            }
            (None, _) if matches!(self.asks, Asks::Reserve { .. }) && self.asks.size() > self.there => {
                write!(f, "; keep less for hot-plug, at most {there} for all ports")
            }
            (None, _) if matches!(self.asks, Asks::Reserve { .. }) => {
                write!(f, "; make the aperture larger, keep less for hot-plug or leave devices out")
            }
            (None, _) => write!(f, "; make the aperture larger or leave devices out"),
        }
    }
}

/// Names that a message lists.
const SHOWN: usize = 8;
