//! What an emulated endpoint shows.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Pairs, choice};
use super::size::Size;

/// An emulated endpoint. What is `None` is Banyan's own choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StubConfig {
    /// Vendor and device.
    pub ids: Option<IdPair>,
    /// Class.
    pub class: Option<ClassCode>,
    /// Subsystem vendor and subsystem.
    pub subsystem: Option<IdPair>,
    /// Speed and width, as `16GT/s x16`. As given; read where links are known.
    pub link: Option<String>,
    /// BARs. Sizes and kinds are checked where BARs are known.
    pub bars: [Option<BarConfig>; 6],
    /// Bytes of its expansion ROM.
    pub rom: Option<Size>,
    /// Virtual functions that it shows.
    pub virtual_functions: Option<VirtualFunctionsConfig>,
    /// How it interrupts.
    pub interrupt: InterruptConfig,
    /// It can be reset by itself (function-level reset).
    pub flr: bool,
    /// The first page of BAR 0 holds registers of a copy engine and a doorbell; that of VF BAR 0 as well, if it has room.
    pub dma: bool,
}

/// What an SR-IOV capability tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualFunctionsConfig {
    /// How many there are.
    pub total: u16,
    /// From the function's number to that of the first virtual one.
    pub first_offset: u16,
    /// From one to the next.
    pub stride: u16,
    /// Device id; by default that of the function.
    pub device: Option<HexId>,
    /// BARs of each.
    pub bars: [Option<BarConfig>; 6],
}

/// A 16-bit id, written as four hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct HexId(pub u16);

/// Two 16-bit ids, written `10de:20b8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct IdPair {
    /// Vendor, or subsystem vendor.
    pub vendor: u16,
    /// Device, or subsystem.
    pub device: u16,
}

/// Base class, subclass and interface, written as six hexadecimal digits: `030200`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct ClassCode(u32);

impl ClassCode {
    /// `base << 16 | sub << 8 | interface`.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }
}

/// A base address register, written `128G:mem64:prefetchable`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct BarConfig {
    /// Bytes.
    pub size: Size,
    /// Address space and width.
    pub kind: BarKind,
    /// The prefetchable bit.
    pub prefetchable: bool,
}

choice!(
    /// Address space and width of a BAR.
    BarKind {
        /// Memory, 32-bit address.
        Mem32 = "mem32",
        /// Memory, 64-bit address; takes the next register, too.
        Mem64 = "mem64",
        /// I/O ports.
        Io = "io",
    }
);

/// How a stub interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterruptConfig {
    /// Not at all.
    None,
    /// By a wire.
    Intx(IntxPin),
    /// By MSI, with so many vectors: 1, 2, 4, 8, 16 or 32.
    Msi(u8),
    /// By MSI-X, with so many vectors: 1 to 2048.
    MsiX(u16),
}

choice!(
    /// Interrupt pin.
    IntxPin {
        /// INTA.
        A = "A" | "a",
        /// INTB.
        B = "B" | "b",
        /// INTC.
        C = "C" | "c",
        /// INTD.
        D = "D" | "d",
    }
);

impl IntxPin {
    /// As the interrupt pin register has it: 1 is INTA, 4 is INTD (PCIe 6.0 7.5.1.1.13).
    #[must_use]
    pub const fn register(self) -> u8 {
        match self {
            Self::A => 1,
            Self::B => 2,
            Self::C => 3,
            Self::D => 4,
        }
    }
}

/// An element of `bars`: a register's number and what it holds, written `1:128G:mem64:prefetchable`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct IndexedBar {
    index: usize,
    bar: BarConfig,
}

/// One table of `bar0=` to `bar5=` and the elements of `bars=`.
pub(super) fn merge_bars(single: [Option<BarConfig>; 6], list: &[IndexedBar]) -> Result<[Option<BarConfig>; 6], StubError> {
    let mut bars = single;
    for IndexedBar { index, bar } in list {
        match bars.get_mut(*index) {
            Some(slot @ None) => *slot = Some(*bar),
            Some(Some(_)) => return Err(StubError::BarTwice { index: *index }),
            None => return Err(StubError::BarIndex { index: index.to_string() }),
        }
    }
    Ok(bars)
}

/// At most one of the three.
pub(super) fn one_interrupt(msix: Option<u16>, msi: Option<u8>, intx: Option<IntxPin>) -> Result<InterruptConfig, StubError> {
    match (msix, msi, intx) {
        (None, None, None) => Ok(InterruptConfig::None),
        (Some(vectors @ 1..=2048), None, None) => Ok(InterruptConfig::MsiX(vectors)),
        (Some(vectors), None, None) => Err(StubError::MsiXVectors { vectors }),
        (None, Some(vectors @ (1 | 2 | 4 | 8 | 16 | 32)), None) => Ok(InterruptConfig::Msi(vectors)),
        (None, Some(vectors), None) => Err(StubError::MsiVectors { vectors }),
        (None, None, Some(pin)) => Ok(InterruptConfig::Intx(pin)),
        _ => Err(StubError::Interrupts),
    }
}

impl StubConfig {
    pub(super) fn print(&self, pairs: &mut Pairs<'_, '_>) -> fmt::Result {
        pairs.optional("ids", self.ids.as_ref().map(|ids| ids as _))?;
        pairs.optional("class", self.class.as_ref().map(|class| class as _))?;
        pairs.optional("subsystem", self.subsystem.as_ref().map(|ids| ids as _))?;
        pairs.optional("link", self.link.as_ref().map(|link| link as _))?;
        for (index, bar) in self.bars.iter().enumerate() {
            pairs.optional(&format!("bar{index}"), bar.as_ref().map(|bar| bar as _))?;
        }
        pairs.optional("rom", self.rom.as_ref().map(|size| size as _))?;
        if let Some(functions) = &self.virtual_functions {
            functions.print(pairs)?;
        }
        match self.interrupt {
            InterruptConfig::None => {}
            InterruptConfig::Intx(pin) => pairs.pair("intx", &pin)?,
            InterruptConfig::Msi(vectors) => pairs.pair("msi", &vectors)?,
            InterruptConfig::MsiX(vectors) => pairs.pair("msix", &vectors)?,
        }
        pairs.switch("flr", self.flr, true)?;
        pairs.switch("dma", self.dma, false)
    }
}

/// The first virtual function follows the eight functions that a device has without alternative routing ids.
const VF_OFFSET: u16 = 8;
/// Each takes a mapping of memory, and comes and goes by one write of the guest's.
const VFS_MAX: u16 = 256;

impl VirtualFunctionsConfig {
    /// From the keys `vfs`, `vf-offset`, `vf-stride`, `vf-device` and `vf-bars`; the others need the first.
    pub(super) fn of(
        total: Option<u16>,
        [first_offset, stride]: [Option<u16>; 2],
        device: Option<HexId>,
        bars: &[IndexedBar],
    ) -> Result<Option<Self>, StubError> {
        let Some(total) = total else {
            let others = [
                (first_offset.is_some(), "vf-offset"),
                (stride.is_some(), "vf-stride"),
                (device.is_some(), "vf-device"),
                (!bars.is_empty(), "vf-bars"),
            ];
            return match others.into_iter().find(|(there, _)| *there) {
                Some((_, key)) => Err(StubError::WithoutVfs { key }),
                None => Ok(None),
            };
        };
        if total > VFS_MAX {
            return Err(StubError::TooManyVfs { total });
        }
        let (first_offset, stride) = (first_offset.unwrap_or(VF_OFFSET), stride.unwrap_or(1));
        Ok(Some(Self { total, first_offset, stride, device, bars: merge_bars([None; 6], bars)? }))
    }

    fn print(&self, pairs: &mut Pairs<'_, '_>) -> fmt::Result {
        pairs.pair("vfs", &self.total)?;
        pairs.pair("vf-offset", &self.first_offset)?;
        pairs.pair("vf-stride", &self.stride)?;
        pairs.optional("vf-device", self.device.as_ref().map(|device| device as _))?;
        let bars = self.bars.iter().enumerate().filter_map(|(index, bar)| Some(format!("{index}:{}", (*bar)?)));
        let bars: Vec<String> = bars.collect();
        if bars.is_empty() { Ok(()) } else { pairs.list("vf-bars", &bars) }
    }
}

impl FromStr for HexId {
    type Err = StubError;

    fn from_str(text: &str) -> Result<Self, StubError> {
        let id = hex(text, 4).and_then(|id| u16::try_from(id).ok());
        id.map(Self).ok_or_else(|| StubError::Id { text: text.to_owned() })
    }
}

impl fmt::Display for HexId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0)
    }
}

/// Exactly `digits` hexadecimal digits.
fn hex(text: &str, digits: usize) -> Option<u32> {
    let all = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    all.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl FromStr for IdPair {
    type Err = StubError;

    fn from_str(text: &str) -> Result<Self, StubError> {
        let half = |text| hex(text, 4).and_then(|id| u16::try_from(id).ok());
        text.split_once(':')
            .and_then(|(vendor, device)| Some(Self { vendor: half(vendor)?, device: half(device)? }))
            .ok_or_else(|| StubError::Ids { text: text.to_owned() })
    }
}

impl fmt::Display for IdPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:04x}", self.vendor, self.device)
    }
}

impl FromStr for ClassCode {
    type Err = StubError;

    fn from_str(text: &str) -> Result<Self, StubError> {
        hex(text, 6).map(Self).ok_or_else(|| StubError::Class { text: text.to_owned() })
    }
}

impl fmt::Display for ClassCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:06x}", self.0)
    }
}

impl FromStr for BarConfig {
    type Err = StubError;

    fn from_str(text: &str) -> Result<Self, StubError> {
        let error = || StubError::Bar { text: text.to_owned() };
        let mut parts = text.split(':');
        let size = parts.next().and_then(|size| size.parse().ok()).ok_or_else(error)?;
        let kind = match parts.next() {
            Some("mem32") => BarKind::Mem32,
            Some("mem64") => BarKind::Mem64,
            Some("io") => BarKind::Io,
            _ => return Err(error()),
        };
        let prefetchable = match (parts.next(), kind) {
            (None, _) => false,
            (Some("prefetchable"), BarKind::Mem32 | BarKind::Mem64) => true,
            _ => return Err(error()),
        };
        if parts.next().is_some() { Err(error()) } else { Ok(Self { size, kind, prefetchable }) }
    }
}

impl fmt::Display for BarConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}{}", self.size, self.kind, if self.prefetchable { ":prefetchable" } else { "" })
    }
}

impl FromStr for IndexedBar {
    type Err = StubError;

    fn from_str(text: &str) -> Result<Self, StubError> {
        let (index, bar) = text.split_once(':').ok_or_else(|| StubError::Bar { text: text.to_owned() })?;
        match index.parse() {
            Ok(index @ 0..=5) => Ok(Self { index, bar: bar.parse()? }),
            _ => Err(StubError::BarIndex { index: index.to_owned() }),
        }
    }
}

/// serde reads these as text.
macro_rules! from_text {
    ($($type:ident),+) => { $(
        impl TryFrom<String> for $type {
            type Error = StubError;

            fn try_from(text: String) -> Result<Self, StubError> {
                text.parse()
            }
        }
    )+ };
}
from_text!(IdPair, HexId, ClassCode, BarConfig, IndexedBar);

/// A description that no stub can have.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum StubError {
    /// Not two ids.
    #[error("`{text}` is no pair of ids; write vendor and device as four hexadecimal digits each, such as 10de:20b8")]
    Ids {
        /// What was given.
        text: String,
    },
    /// Not an id.
    #[error("`{text}` is no id; write four hexadecimal digits, such as 101a")]
    Id {
        /// What was given.
        text: String,
    },
    /// Virtual functions without their number.
    #[error("`{key}` has no effect without `vfs=`, the number of virtual functions; add it")]
    WithoutVfs {
        /// What was given.
        key: &'static str,
    },
    /// More than a stub has.
    #[error("vfs={total} is not possible; a stub has at most {VFS_MAX} virtual functions")]
    TooManyVfs {
        /// What was given.
        total: u16,
    },
    /// Not a class.
    #[error("`{text}` is no class; write base class, subclass and interface as six hexadecimal digits, such as 030200")]
    Class {
        /// What was given.
        text: String,
    },
    /// Not a BAR.
    #[error(
        "`{text}` is no BAR; write SIZE:KIND with KIND mem32, mem64 or io, and `:prefetchable` behind memory that is, such as \
         128G:mem64:prefetchable"
    )]
    Bar {
        /// What was given.
        text: String,
    },
    /// Not a register.
    #[error("`{index}` is no BAR number; write NUMBER:SIZE:KIND with a number from 0 to 5")]
    BarIndex {
        /// What was given.
        index: String,
    },
    /// One register, two contents.
    #[error("BAR {index} is given twice; keep one of them")]
    BarTwice {
        /// Which.
        index: usize,
    },
    /// Beyond MSI-X's table.
    #[error("msix={vectors} is not possible; MSI-X has 1 to 2048 vectors")]
    MsiXVectors {
        /// What was given.
        vectors: u16,
    },
    /// Not a number of vectors that MSI can say.
    #[error("msi={vectors} is not possible; MSI has 1, 2, 4, 8, 16 or 32 vectors")]
    MsiVectors {
        /// What was given.
        vectors: u8,
    },
    /// Several ways to interrupt.
    #[error("`msix`, `msi` and `intx` exclude each other; keep one of them")]
    Interrupts,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ids_and_classes_have_all_their_digits() {
        assert_eq!("10de:20b8".parse(), Ok(IdPair { vendor: 0x10DE, device: 0x20B8 }));
        assert_eq!("030200".parse(), Ok(ClassCode(0x03_0200)));
        for text in ["", "10de", "10de:", "10de:20b", "010de:20b8", "10de:20b8:1", "+0de:20b8", "0x10:20b8", "zzzz:0000"] {
            assert!(matches!(text.parse::<IdPair>(), Err(StubError::Ids { .. })), "{text}");
        }
        for text in ["", "0302", "0x0302", "0302000", "+30200"] {
            assert!(matches!(text.parse::<ClassCode>(), Err(StubError::Class { .. })), "{text}");
        }
    }

    #[test]
    fn a_bar_has_size_and_kind() {
        let bar = BarConfig { size: Size(128 << 30), kind: BarKind::Mem64, prefetchable: true };
        assert_eq!("128G:mem64:prefetchable".parse(), Ok(bar));
        for text in
            ["", "16M", "16M:", "mem32", ":mem32", "16M:mem16", "32:io:prefetchable", "16M:mem32:pref", "4K:mem32:prefetchable:x"]
        {
            assert!(matches!(text.parse::<BarConfig>(), Err(StubError::Bar { .. })), "{text}");
        }
    }

    #[test]
    fn a_bar_number_is_0_to_5_and_used_once() {
        assert!(matches!("6:4K:mem32".parse::<IndexedBar>(), Err(StubError::BarIndex { .. })));
        let bar = "0:4K:mem32".parse().unwrap();
        assert_eq!(merge_bars([None; 6], &[bar, bar]), Err(StubError::BarTwice { index: 0 }));
    }

    #[test]
    fn there_is_one_way_to_interrupt_with_a_possible_number_of_vectors() {
        assert_eq!(one_interrupt(Some(2048), None, None), Ok(InterruptConfig::MsiX(2048)));
        assert_eq!(one_interrupt(Some(2049), None, None), Err(StubError::MsiXVectors { vectors: 2049 }));
        assert_eq!(one_interrupt(Some(0), None, None), Err(StubError::MsiXVectors { vectors: 0 }));
        assert_eq!(one_interrupt(None, Some(3), None), Err(StubError::MsiVectors { vectors: 3 }));
        assert_eq!(one_interrupt(Some(1), None, Some(IntxPin::A)), Err(StubError::Interrupts));
    }

    proptest! {
        #[test]
        fn any_text_gives_an_answer(text in "[0-9a-fGMmenio:]{0,24}|.*") {
            let _ = (text.parse::<IdPair>(), text.parse::<ClassCode>(), text.parse::<BarConfig>(), text.parse::<IndexedBar>());
        }
    }
}
