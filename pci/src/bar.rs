//! Base address registers: what a function asks for, what sizing reads, where it decodes.

mod state;

use std::fmt;

use thiserror::Error;

use crate::access::{Lanes, halves};
use crate::regs::{header, type0};

/// Number of a base address register, 0 to 5. The upper half of a 64-bit BAR has no number of its own.
pub type BarIndex = u8;

/// The expansion ROM, where BARs are counted: a memory BAR with an enable bit of its own.
pub const ROM: BarIndex = 6;

/// Address space and width of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BarKind {
    /// Memory, 32-bit address.
    Memory32,
    /// Memory, 64-bit address; takes two registers.
    Memory64,
    /// I/O ports.
    Io,
}

/// Where I/O ports lie among addresses that can be either: port 0 is here, where no guest-physical address reaches.
pub const PORTS: u64 = 1 << 63;

/// What a BAR asks for (PCIe 6.0 7.5.1.2.1). Guests see exactly these flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BarSpec {
    /// Address space and width.
    pub kind: BarKind,
    /// The prefetchable bit (memory only).
    pub prefetchable: bool,
    /// Bytes, a power of two: 16 or more for memory, 4 to 256 for I/O.
    pub size: u64,
}

impl BarSpec {
    /// Largest size of a memory BAR, 512 GiB here by policy; 64-bit only above 2 GiB.
    pub const LARGEST: u64 = 512 << 30;

    /// The flag bits in the low nibble of the register.
    #[must_use]
    pub const fn flags(self) -> u32 {
        match self.kind {
            BarKind::Io => 1,
            BarKind::Memory32 => (self.prefetchable as u32) << 3,
            BarKind::Memory64 => 4 | (self.prefetchable as u32) << 3,
        }
    }

    /// An expansion ROM of `size` bytes: 2 KiB to 16 MiB, a power of two (PCIe 6.0 7.5.1.2.4).
    #[must_use]
    pub const fn rom(size: u64) -> Self {
        Self { kind: BarKind::Memory32, prefetchable: false, size }
    }

    /// Whether the register decodes memory.
    #[must_use]
    pub const fn is_memory(self) -> bool {
        !matches!(self.kind, BarKind::Io)
    }

    fn check(self, bar: usize) -> Result<(), BarError> {
        let (least, most) = match self.kind {
            BarKind::Io => (4, 256),
            BarKind::Memory32 => (16, 2 << 30),
            BarKind::Memory64 => (16, Self::LARGEST),
        };
        if !self.size.is_power_of_two() || self.size < least || self.size > most {
            return Err(BarError::Size { bar, size: self.size, least, most });
        }
        Ok(())
    }
}

impl fmt::Display for BarSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            BarKind::Memory32 => "mem32",
            BarKind::Memory64 => "mem64",
            BarKind::Io => "io",
        };
        write!(f, "{kind} {}{}", Size(self.size), if self.prefetchable { " pref" } else { "" })
    }
}

/// Bytes, shown in the largest unit that divides them: `16M`, `128G`, `256`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Empty,
    Low { spec: BarSpec, address: u64, sizing: Halves },
    Upper,
}

/// Halves of an address in which a value for sizing was written while the BAR decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Halves {
    low: bool,
    high: bool,
}

impl Halves {
    const NONE: Self = Self { low: false, high: false };
}

/// An expansion ROM's base address register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rom {
    size: u32,
    address: u32,
    enabled: bool,
}

/// Sizes of expansion ROMs.
const ROM_SIZES: [u32; 2] = [2 << 10, 16 << 20];

/// The six base address registers of a function, that of its ROM, and its decode enables. Bridges use the first two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bars {
    slots: [Slot; 6],
    rom: Option<Rom>,
    /// Memory space enable, command bit 1.
    pub memory_enabled: bool,
    /// I/O space enable, command bit 0.
    pub io_enabled: bool,
}

/// A memory BAR whose function has memory space enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decoding {
    /// Which register.
    pub bar: BarIndex,
    /// First guest-physical address; `None` while the register holds none: a value for sizing, 0, or one from which the BAR
    /// would run past the address space.
    pub at: Option<u64>,
    /// Bytes.
    pub size: u64,
}

impl Default for Bars {
    fn default() -> Self {
        Self { slots: [Slot::Empty; 6], rom: None, memory_enabled: false, io_enabled: false }
    }
}

impl Bars {
    /// Registers for `specs`, addresses 0, decode off. Fails on a bad size or on a 64-bit BAR whose upper half is taken.
    pub fn new(specs: &[Option<BarSpec>; 6]) -> Result<Self, BarError> {
        let mut bars = Self::default();
        let mut upper = false;
        for (bar, (slot, spec)) in bars.slots.iter_mut().zip(specs).enumerate() {
            *slot = match (*spec, upper) {
                (Some(_), true) => return Err(BarError::Overlap { bar }),
                (None, true) => Slot::Upper,
                (None, false) => Slot::Empty,
                (Some(spec), false) => {
                    spec.check(bar)?;
                    Slot::Low { spec, address: 0, sizing: Halves::NONE }
                }
            };
            upper = !upper && matches!(spec, Some(BarSpec { kind: BarKind::Memory64, .. }));
        }
        if upper { Err(BarError::Overlap { bar: 6 }) } else { Ok(bars) }
    }

    /// The same with an expansion ROM of `size` bytes, if it is one that can be.
    pub fn with_rom(mut self, size: u64) -> Result<Self, BarError> {
        let [least, most] = ROM_SIZES;
        let fits = u32::try_from(size).ok().filter(|size| size.is_power_of_two() && (least..=most).contains(size));
        let size = fits.ok_or(BarError::Rom { size, least, most })?;
        self.rom = Some(Rom { size, address: 0, enabled: false });
        Ok(self)
    }

    /// Which of the registers, 0 to 5, the dword at `offset` of configuration space is.
    #[must_use]
    pub fn register_at(offset: u16) -> Option<usize> {
        (header::BAR0..=type0::BAR5).contains(&offset).then(|| usize::from((offset - header::BAR0) / 4))
    }

    /// What BAR `bar`, or the ROM, asks for; `None` for an empty register or an upper half.
    #[must_use]
    pub fn spec(&self, bar: BarIndex) -> Option<BarSpec> {
        if bar == ROM {
            return self.rom.map(|rom| BarSpec::rom(rom.size.into()));
        }
        match self.slots.get(usize::from(bar)) {
            Some(Slot::Low { spec, .. }) => Some(*spec),
            _ => None,
        }
    }

    /// All BARs, without the ROM, with their number and what they ask for.
    pub fn specs(&self) -> impl Iterator<Item = (BarIndex, BarSpec)> + '_ {
        (0..6).filter_map(|bar| Some((bar, self.spec(bar)?)))
    }

    /// The address in the register, whether or not it decodes.
    #[must_use]
    pub fn address(&self, bar: BarIndex) -> Option<u64> {
        if bar == ROM {
            return self.rom.map(|rom| rom.address.into());
        }
        match self.slots.get(usize::from(bar)) {
            Some(Slot::Low { address, .. }) => Some(*address),
            _ => None,
        }
    }

    /// Programs an address, as firmware would; low bits below the size are dropped. Empty registers keep nothing.
    pub fn set_address(&mut self, bar: BarIndex, at: u64) {
        if let Some(rom) = self.rom.as_mut().filter(|_| bar == ROM) {
            rom.address = halves(at).0 & !(rom.size - 1);
        }
        if let Some(Slot::Low { spec, address, sizing }) = self.slots.get_mut(usize::from(bar)) {
            *sizing = Halves::NONE;
            *address = at & !(spec.size - 1) & if spec.kind == BarKind::Memory64 { u64::MAX } else { 0xFFFF_FFFF };
        }
    }

    /// Reads register `register` (0 to 5): the address with the flag bits. Empty registers read 0.
    #[must_use]
    pub fn read(&self, register: usize) -> u32 {
        match self.slots.get(register) {
            Some(Slot::Low { spec, address, .. }) => halves(*address).0 | spec.flags(),
            Some(Slot::Upper) => match register.checked_sub(1).and_then(|below| self.slots.get(below)) {
                Some(Slot::Low { address, .. }) => halves(*address).1,
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Writes register `register`: bits below the size and flag bits keep nothing, so an all-ones write sizes the BAR.
    /// Returns whether what the register holds changed.
    pub fn write(&mut self, register: usize, lanes: Lanes, value: u32) -> bool {
        let mask = lanes.mask();
        let (low, upper) = match self.slots.get(register) {
            Some(Slot::Low { .. }) => (register, false),
            Some(Slot::Upper) => (register.saturating_sub(1), true),
            _ => return false,
        };
        let decodes = self.memory_enabled;
        let Some(Slot::Low { spec, address, sizing }) = self.slots.get_mut(low) else { return false };
        let merge = |old: u32| (old & !mask) | (value & mask);
        let (below_4_gib, above) = halves(*address);
        let (below_4_gib, above) = if upper { (below_4_gib, merge(above)) } else { (merge(below_4_gib), above) };
        let new = u64::from(above) << 32 | u64::from(below_4_gib);
        let writable = !(spec.size - 1);
        let mut now_sizing = *sizing;
        // A value for sizing has ones where no address has any; of a write of single bytes the lowest ones are not known.
        let (half, all, kept) = if upper {
            (&mut now_sizing.high, halves(writable).1, halves(new & writable).1)
        } else {
            (&mut now_sizing.low, halves(writable).0, halves(new & writable).0)
        };
        let below = if upper { u32::MAX } else { halves(spec.size - 1).0 & !0xF };
        let ones = value & below != 0 || below == 0 || lanes != Lanes::ALL;
        *half = decodes && all != 0 && kept == all && ones;
        let new = new & writable;
        let changed = new != *address || now_sizing != *sizing;
        (*address, *sizing) = (new, now_sizing);
        changed
    }

    /// Reads the ROM's register: the address with the enable bit. 0 without a ROM.
    #[must_use]
    pub fn read_rom(&self) -> u32 {
        self.rom.map_or(0, |rom| rom.address | u32::from(rom.enabled))
    }

    /// Writes the ROM's register; bits below the size but the enable bit keep nothing. Returns whether anything changed.
    pub fn write_rom(&mut self, lanes: Lanes, value: u32) -> bool {
        let before = self.read_rom();
        if let Some(rom) = &mut self.rom {
            let new = (before & !lanes.mask()) | (value & lanes.mask());
            (rom.address, rom.enabled) = (new & !(rom.size - 1), new & 1 != 0);
        }
        self.read_rom() != before
    }

    /// Memory BARs, if memory space is enabled, and the ROM, if its own bit is set too; I/O BARs, if I/O space is enabled, with
    /// addresses from [`PORTS`] on.
    pub fn decoding(&self) -> impl Iterator<Item = Decoding> + '_ {
        let rom = self.rom.filter(|rom| self.memory_enabled && rom.enabled).map(|rom| {
            // All ones are a value for sizing.
            let is_address = rom.address != 0 && rom.address != !(rom.size - 1);
            Decoding { bar: ROM, at: is_address.then_some(rom.address.into()), size: rom.size.into() }
        });
        let bars = self.slots.iter().zip(0u8..).filter_map(|(slot, bar)| match slot {
            Slot::Low { spec, address, sizing } if self.memory_enabled && spec.is_memory() => {
                let is_address = *sizing == Halves::NONE && *address != 0 && address.checked_add(spec.size).is_some();
                Some(Decoding { bar, at: is_address.then_some(*address), size: spec.size })
            }
            Slot::Low { spec, address, .. } if self.io_enabled && !spec.is_memory() => {
                let is_address = *address != 0 && address.saturating_add(spec.size) <= 1 << 16;
                Some(Decoding { bar, at: is_address.then_some(PORTS | address), size: spec.size })
            }
            _ => None,
        });
        bars.chain(rom)
    }

    /// Addresses to 0 and decode off, as after a reset.
    pub fn reset(&mut self) {
        self.memory_enabled = false;
        self.io_enabled = false;
        if let Some(rom) = &mut self.rom {
            (rom.address, rom.enabled) = (0, false);
        }
        for slot in &mut self.slots {
            if let Slot::Low { address, sizing, .. } = slot {
                (*address, *sizing) = (0, Halves::NONE);
            }
        }
    }
}

/// A set of BARs that no function can have.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BarError {
    /// The size is no power of two or out of range.
    #[error("BAR {bar} has size {size:#x}: it must be a power of two from {least:#x} to {most:#x}")]
    Size {
        /// Register.
        bar: usize,
        /// Asked for.
        size: u64,
        /// Least possible.
        least: u64,
        /// Most possible.
        most: u64,
    },
    /// A ROM of a size that none has.
    #[error("an expansion ROM of {size:#x} bytes: its size must be a power of two from {least:#x} to {most:#x}")]
    Rom {
        /// Asked for.
        size: u64,
        /// Least possible.
        least: u32,
        /// Most possible.
        most: u32,
    },
    /// A register is the upper half of a 64-bit BAR and also used by itself, or the pair runs past register 5.
    #[error("BAR {bar} is needed for the upper half of the 64-bit BAR before it")]
    Overlap {
        /// Register.
        bar: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mem64(size: u64) -> Option<BarSpec> {
        Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size })
    }

    fn bars() -> Bars {
        let small = Some(BarSpec { kind: BarKind::Memory32, prefetchable: false, size: 16 << 20 });
        Bars::new(&[small, mem64(128 << 30), None, None, None, None]).unwrap()
    }

    #[test]
    fn sizing_reads_give_the_size_and_the_flags() {
        let mut bars = bars();
        for register in 0..6 {
            bars.write(register, Lanes::ALL, 0xFFFF_FFFF);
        }
        let read: Vec<u32> = (0..6).map(|n| bars.read(n)).collect();
        assert_eq!(read, [0xFF00_0000, 0x0000_000C, 0xFFFF_FFE0, 0, 0, 0]);
    }

    #[test]
    fn case_a2_width_and_prefetch_bits_are_the_device_s_own() {
        let specs = [
            (BarKind::Memory32, false, 0),
            (BarKind::Memory32, true, 8),
            (BarKind::Memory64, false, 4),
            (BarKind::Memory64, true, 12),
        ];
        for (kind, prefetchable, flags) in specs {
            let spec = BarSpec { kind, prefetchable, size: 4096 };
            let bars = Bars::new(&[Some(spec), None, None, None, None, None]).unwrap();
            assert_eq!(bars.read(0) & 0xF, flags);
        }
    }

    #[test]
    fn case_c13_odd_layouts_are_shown_as_they_are() {
        let wide = Some(BarSpec { kind: BarKind::Memory64, prefetchable: false, size: 0x4000 });
        let mut bars = Bars::new(&[None, None, wide, None, wide, None]).unwrap();
        for register in 0..6 {
            bars.write(register, Lanes::ALL, 0xFFFF_FFFF);
        }
        let read: Vec<u32> = (0..6).map(|n| bars.read(n)).collect();
        assert_eq!(read, [0, 0, 0xFFFF_C004, 0xFFFF_FFFF, 0xFFFF_C004, 0xFFFF_FFFF]);
    }

    #[test]
    fn case_a1_a_value_for_sizing_is_no_address() {
        let at = |bars: &Bars| bars.decoding().map(|decoding| decoding.at).collect::<Vec<_>>();
        let small = mem64(1 << 20);
        let mut bars = Bars::new(&[small, None, small, None, None, None]).unwrap();
        bars.set_address(0, 0x80_0010_0000);
        bars.set_address(2, 0x80_FFF0_0000);
        assert_eq!(at(&bars), [], "memory space is disabled");
        bars.memory_enabled = true;
        assert_eq!(at(&bars), [Some(0x80_0010_0000), Some(0x80_FFF0_0000)]);
        bars.write(0, Lanes::ALL, 0xFFFF_FFFF);
        assert_eq!(at(&bars)[0], None, "0x80_FFF0_0000 was not meant");
        bars.write(1, Lanes::ALL, 0xFFFF_FFFF);
        bars.write(0, Lanes::ALL, 0x0010_0000);
        assert_eq!(at(&bars)[0], None);
        bars.write(1, Lanes::ALL, 0x80);
        assert_eq!(at(&bars)[0], Some(0x80_0010_0000));
        bars.write(0, Lanes::ALL, 0xFFFF_FFF0);
        assert_eq!(at(&bars)[0], None, "as some guests do it");
        bars.write(0, Lanes::ALL, 0xFFF0_0000);
        assert_eq!(at(&bars)[0], Some(0x80_FFF0_0000), "an address that ends in ones as far as the BAR lets it");
        for lane in 0..4 {
            bars.write(0, Lanes::new(lane, 1), 0xFFFF_FFFF);
        }
        assert_eq!(at(&bars)[0], None, "byte by byte");
        bars.write(0, Lanes::ALL, 0);
        bars.write(1, Lanes::ALL, 0);
        assert_eq!(at(&bars)[0], None, "0 is no address either");
    }

    #[test]
    fn what_runs_past_the_address_space_is_no_address() {
        let mut bars = bars();
        bars.write(1, Lanes::ALL, 0xFFFF_FFFF);
        bars.write(2, Lanes::ALL, 0xFFFF_FFFF);
        bars.memory_enabled = true;
        assert_eq!(bars.decoding().map(|decoding| decoding.at).collect::<Vec<_>>(), [None, None]);
    }

    #[test]
    fn io_bars_decode_ports_with_io_space() {
        let io = Some(BarSpec { kind: BarKind::Io, prefetchable: false, size: 32 });
        let mut bars = Bars::new(&[io, None, None, None, None, None]).unwrap();
        let at = |bars: &Bars| bars.decoding().map(|decoding| (decoding.at, decoding.size)).collect::<Vec<_>>();
        bars.memory_enabled = true;
        assert_eq!(at(&bars), []);
        bars.io_enabled = true;
        for (address, expected) in
            [(0u32, None), (0xC000, Some(PORTS | 0xC000)), (0xFFE0, Some(PORTS | 0xFFE0)), (0xFFFF_FFFF, None), (0x1_0000, None)]
        {
            bars.write(0, Lanes::ALL, address);
            assert_eq!(at(&bars), [(expected, 32)], "{address:#x}");
        }
    }

    #[test]
    fn a_rom_decodes_only_with_its_own_bit_and_memory_space() {
        let mut bars = bars().with_rom(64 << 10).unwrap();
        bars.write_rom(Lanes::ALL, 0xFFFF_F800);
        assert_eq!(bars.read_rom(), 0xFFFF_0000);
        bars.set_address(ROM, 0xE012_3000);
        assert_eq!((bars.read_rom(), bars.address(ROM)), (0xE012_0000, Some(0xE012_0000)));
        let decoded = |bars: &Bars| bars.decoding().any(|decoding| decoding.bar == ROM && decoding.at == Some(0xE012_0000));
        for (memory, enable, expected) in [(false, 0, false), (true, 0, false), (false, 1, false), (true, 1, true)] {
            bars.memory_enabled = memory;
            bars.write_rom(Lanes::new(0, 1), enable);
            assert_eq!(decoded(&bars), expected, "{memory} {enable}");
        }
        bars.reset();
        assert_eq!(bars.read_rom(), 0);
        for size in [0, 1 << 10, 3 << 10, 32 << 20, u64::MAX] {
            assert!(Bars::default().with_rom(size).is_err(), "{size:#x}");
        }
    }

    #[test]
    fn a_pair_needs_both_registers() {
        assert_eq!(Bars::new(&[mem64(64), mem64(64), None, None, None, None]), Err(BarError::Overlap { bar: 1 }));
        assert_eq!(Bars::new(&[None, None, None, None, None, mem64(64)]), Err(BarError::Overlap { bar: 6 }));
        assert!(Bars::new(&[mem64(48), None, None, None, None, None]).is_err());
    }
}
