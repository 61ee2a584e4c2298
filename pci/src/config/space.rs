//! A store of dwords with, for each bit, what a write does to it. Knows nothing of what the bits mean.

use std::fmt;
use std::sync::Arc;

use crate::access::{Access, Lanes, Reg};
use crate::function::ResetKind;
use crate::mirror::Mirror;
use crate::state::{Reader, StateError, Writer};

/// How one dword behaves. A bit is in at most one of `writable` and `clear_on_one`; in neither it is read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegDef {
    /// Value after reset.
    pub reset: u32,
    /// Bits that take the written value.
    pub writable: u32,
    /// Bits that a written 1 clears and a written 0 leaves (RW1C).
    pub clear_on_one: u32,
    /// Bits that survive function-level and hot reset (PCIe 6.0 7.4, ROS/RWS/RW1CS).
    pub sticky: u32,
}

impl RegDef {
    /// A dword that no write changes.
    #[must_use]
    pub const fn read_only(value: u32) -> Self {
        Self { reset: value, writable: 0, clear_on_one: 0, sticky: 0 }
    }

    /// A dword that starts at `reset` and whose `writable` bits take what is written.
    #[must_use]
    pub const fn writable(reset: u32, writable: u32) -> Self {
        Self { reset, writable, clear_on_one: 0, sticky: 0 }
    }
}

/// The value of a dword before and after a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Before.
    pub old: u32,
    /// After.
    pub new: u32,
}

impl Change {
    /// Bits that differ.
    #[must_use]
    pub const fn flipped(self) -> u32 {
        self.old ^ self.new
    }

    /// Bits that went from 0 to 1.
    #[must_use]
    pub const fn risen(self) -> u32 {
        self.new & !self.old
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Dword {
    value: u32,
    def: RegDef,
}

/// A function's registers, up to 4 KiB. Dwords that nobody defined read 0 and keep nothing.
#[derive(Clone, Default)]
pub struct ConfigSpace {
    dwords: Vec<Dword>,
    mirror: Option<Shown>,
}

impl fmt::Debug for ConfigSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.dwords).finish()
    }
}

/// Where the registers are shown, and the bytes that somebody else shows.
#[derive(Clone)]
struct Shown {
    mirror: Arc<dyn Mirror>,
    foreign: Vec<(Reg, Lanes)>,
}

impl Shown {
    fn store(&self, reg: Reg, value: u32) {
        let foreign = self.foreign.iter().find(|(other, _)| *other == reg);
        let lanes = foreign.map_or(Lanes::ALL, |(_, lanes)| Lanes::ALL.without(*lanes));
        if !lanes.is_empty() {
            self.mirror.store(reg, lanes, value);
        }
    }
}

impl ConfigSpace {
    /// No definitions yet; memory is there for those below `end`.
    #[must_use]
    pub fn with_room(end: u16) -> Self {
        Self { dwords: Vec::with_capacity(usize::from(end / 4)), mirror: None }
    }

    /// Defines one dword and sets it to its reset value. A later definition replaces an earlier one.
    pub fn define(&mut self, reg: Reg, def: RegDef) {
        debug_assert_eq!(def.writable & def.clear_on_one, 0, "a bit is either writable or cleared by 1");
        let index = reg.index();
        if index >= self.dwords.len() {
            self.dwords.resize(index + 1, Dword::default());
        }
        if let Some(dword) = self.dwords.get_mut(index) {
            let change = Change { old: dword.value, new: def.reset };
            *dword = Dword { value: def.reset, def };
            self.show(reg, change);
        }
    }

    /// Gives back memory that no definition needs.
    pub fn trim(&mut self) {
        self.dwords.shrink_to_fit();
    }

    /// How a dword is defined.
    #[must_use]
    pub fn definition(&self, reg: Reg) -> RegDef {
        self.dwords.get(reg.index()).map_or_else(RegDef::default, |dword| dword.def)
    }

    /// The dword's value; 0 where nothing is defined.
    #[must_use]
    pub fn read(&self, reg: Reg) -> u32 {
        self.dwords.get(reg.index()).map_or(0, |dword| dword.value)
    }

    /// A guest's write: writable bits take it, RW1C bits are cleared by ones, the rest stays.
    pub fn write(&mut self, access: Access, value: u32) -> Change {
        let Some(dword) = self.dwords.get_mut(access.reg.index()) else {
            return Change { old: 0, new: 0 };
        };
        let (old, lanes) = (dword.value, access.lanes.mask());
        let take = dword.def.writable & lanes;
        let clear = dword.def.clear_on_one & lanes & value;
        dword.value = ((old & !take) | (value & take)) & !clear;
        let change = Change { old, new: dword.value };
        self.show(access.reg, change);
        change
    }

    /// The device's own change of `mask` bits, whatever a guest may write. Undefined dwords stay 0.
    pub fn set(&mut self, reg: Reg, mask: u32, value: u32) -> Change {
        let Some(dword) = self.dwords.get_mut(reg.index()) else {
            return Change { old: 0, new: 0 };
        };
        let old = dword.value;
        dword.value = (old & !mask) | (value & mask);
        let change = Change { old, new: dword.value };
        self.show(reg, change);
        change
    }

    /// Shows every register in `mirror` from this point on, but for the bytes in `foreign`, which somebody else owns.
    pub fn mirror(&mut self, mirror: Arc<dyn Mirror>, foreign: Vec<(Reg, Lanes)>) {
        let shown = Shown { mirror, foreign };
        let registers = Reg::all().zip(&self.dwords).filter(|(_, dword)| dword.value != 0);
        registers.for_each(|(reg, dword)| shown.store(reg, dword.value));
        self.mirror = Some(shown);
    }

    /// Shows ones in every byte, whoever owns it, and nothing that changes later.
    pub fn blank_mirror(&mut self) {
        if let Some(shown) = self.mirror.take() {
            Reg::all().for_each(|reg| shown.mirror.store(reg, Lanes::ALL, u32::MAX));
        }
    }

    fn show(&self, reg: Reg, change: Change) {
        if let (Some(shown), true) = (&self.mirror, change.flipped() != 0) {
            shown.store(reg, change.new);
        }
    }

    fn show_all(&self) {
        if let Some(shown) = &self.mirror {
            Reg::all().zip(&self.dwords).for_each(|(reg, dword)| shown.store(reg, dword.value));
        }
    }

    /// Writes every register.
    pub fn save(&self, writer: &mut Writer) {
        writer.count(self.dwords.len());
        self.dwords.iter().for_each(|dword| writer.u32(dword.value));
    }

    /// Takes what a function with the same definitions saved, as far as guests and errors can change it. The rest is the owner's
    /// to set again.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        reader.same_count("registers", self.dwords.len())?;
        for dword in &mut self.dwords {
            let kept = dword.def.writable | dword.def.clear_on_one | dword.def.sticky;
            dword.value = (dword.value & !kept) | (reader.u32()? & kept);
        }
        self.show_all();
        Ok(())
    }

    /// Puts every bit to its reset value; sticky bits survive anything but a cold reset.
    pub fn reset(&mut self, kind: ResetKind) {
        for dword in &mut self.dwords {
            let keep = if kind == ResetKind::Cold { 0 } else { dword.def.sticky };
            dword.value = (dword.value & keep) | (dword.def.reset & !keep);
        }
        self.show_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Lanes;

    const AT: Reg = Reg::containing(0x44);

    fn space() -> ConfigSpace {
        let mut space = ConfigSpace::default();
        space.define(AT, RegDef { reset: 0xAA00_0011, writable: 0xFF, clear_on_one: 0xFF00_0000, sticky: 0x8000_000F });
        space
    }

    #[test]
    fn each_bit_obeys_its_mask() {
        let mut space = space();
        let change = space.write(Access::dword(0x44), 0x2200_FF55);
        assert_eq!(space.read(AT), 0x8800_0055);
        assert_eq!((change.flipped() & 0xFF00_0000, change.risen() & 0xFF00_0000), (0x2200_0000, 0));
    }

    #[test]
    fn lanes_that_are_not_carried_stay() {
        let mut space = space();
        space.write(Access { reg: AT, lanes: Lanes::new(1, 3) }, 0);
        assert_eq!(space.read(AT), 0xAA00_0011);
    }

    #[test]
    fn sticky_bits_survive_all_but_a_cold_reset() {
        let mut space = space();
        space.write(Access::dword(0x44), 0x8000_000C);
        space.reset(ResetKind::Function);
        assert_eq!(space.read(AT), 0x2A00_001C);
        space.reset(ResetKind::Cold);
        assert_eq!(space.read(AT), 0xAA00_0011);
    }
}
