//! The SR-IOV registers of an emulated physical function: which virtual functions are enabled, and where their BARs are
//! (PCIe 6.0 9.3.3).

use crate::access::{Access, Reg};
use crate::bar::Bars;
use crate::config::ConfigSpace;
use crate::ext_caps::sriov::{CONTROL, NUM_VFS, VF_BAR0, control};
use crate::sriov::{EnabledFunctions, SriovError, SriovSpec};
use crate::state::{Reader, StateError, Writer};

/// The capability of one function.
pub(super) struct VirtualFunctions {
    spec: SriovSpec,
    /// Its offset in configuration space.
    at: u16,
    bars: Bars,
}

impl VirtualFunctions {
    /// Of a capability at `at`.
    pub(super) fn new(spec: SriovSpec, at: u16) -> Result<Self, SriovError> {
        Ok(Self { spec, at, bars: Bars::new(&spec.bars)? })
    }

    /// Programs the VF BARs, as firmware would.
    pub(super) fn program(&mut self, places: [Option<u64>; 6]) {
        for (bar, address) in (0..).zip(places) {
            self.bars.set_address(bar, address.unwrap_or(0));
        }
    }

    /// Offset of the dword with the function dependency link.
    pub(super) const fn dependency(&self) -> u16 {
        self.at + NUM_VFS
    }

    /// Offset of the first VF BAR.
    pub(super) const fn first_bar(&self) -> u16 {
        self.at + VF_BAR0
    }

    /// What a dword reads, if it is a VF BAR.
    pub(super) fn read(&self, offset: u16) -> Option<u32> {
        Some(self.bars.read(self.register(offset)?))
    }

    /// Takes a write to a VF BAR: whether it was one, and whether that moves functions that are enabled.
    pub(super) fn write(&mut self, access: Access, value: u32) -> Option<bool> {
        let register = self.register(access.reg.offset())?;
        let changed = self.bars.write(register, access.lanes, value);
        Some(changed && self.bars.memory_enabled)
    }

    /// Whether a write is for the number of virtual functions, which stays as it is while they are enabled.
    pub(super) fn is_fixed(&self, space: &ConfigSpace, access: Access) -> bool {
        access.reg.offset() == self.dependency() && self.control(space) & control::ENABLE != 0
    }

    /// Takes note of the registers after a write to the dword `reg`. Returns whether that may change which functions there are.
    pub(super) fn follow(&mut self, space: &ConfigSpace, reg: Reg, flipped: u32) -> bool {
        let looked_at = u32::from(control::ENABLE | control::MEMORY);
        let changed = reg.offset() == self.at + CONTROL && flipped & looked_at != 0;
        if changed {
            self.decode(space);
        }
        changed
    }

    fn decode(&mut self, space: &ConfigSpace) {
        let control = self.control(space);
        self.bars.memory_enabled = control & control::ENABLE != 0 && control & control::MEMORY != 0;
    }

    /// Writes the VF BARs; the other registers are the configuration space's.
    pub(super) fn save(&self, writer: &mut Writer) {
        self.bars.save(writer);
    }

    /// Takes what a capability of the same kind saved, beside `space`.
    pub(super) fn restore(&mut self, space: &ConfigSpace, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.bars.restore(reader)?;
        self.decode(space);
        Ok(())
    }

    /// Which functions are enabled.
    pub(super) fn enabled(&self, space: &ConfigSpace) -> EnabledFunctions {
        let [low, high, ..] = space.read(Reg::containing(self.dependency())).to_le_bytes();
        let asked = u16::from_le_bytes([low, high]);
        let enabled = self.control(space) & control::ENABLE != 0 && asked <= self.spec.total_vfs;
        let mut bars = [None; 6];
        for decoding in self.bars.decoding() {
            if let Some(place) = bars.get_mut(usize::from(decoding.bar)) {
                *place = decoding.at;
            }
        }
        EnabledFunctions { count: if enabled { asked } else { 0 }, spec: self.spec, bars }
    }

    /// The registers are reset.
    pub(super) fn reset(&mut self) {
        self.bars.reset();
    }

    fn control(&self, space: &ConfigSpace) -> u16 {
        let [low, high, ..] = space.read(Reg::containing(self.at + CONTROL)).to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    fn register(&self, offset: u16) -> Option<usize> {
        let inside = offset.checked_sub(self.first_bar())?;
        (inside < 24).then(|| usize::from(inside / 4))
    }
}
