//! Decides, bit by bit, what the guest sees of a function's configuration space instead of the device's own registers, and
//! which of its writes reach the device. Pure; knows nothing of what the bits mean.
//!
//! Bits that nobody has laid anything over stay the device's, so live status bits stay live.

use std::collections::BTreeMap;

use pci::access::{Access, Reg};
use pci::config::{Change, ConfigSpace, RegDef};
use pci::function::ResetKind;

/// What happens to the bits of one dword. In neither mask: read from the device, written to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Rule {
    /// Read from the store.
    shown: u32,
    /// Writes do not reach the device.
    kept: u32,
}

/// A layer over the device's registers.
#[derive(Debug, Clone, Default)]
pub struct Overlay {
    store: ConfigSpace,
    rules: BTreeMap<Reg, Rule>,
}

impl Overlay {
    /// Shows `value` in the bits of `mask`, whatever is written.
    pub fn replace(&mut self, offset: u16, mask: u32, value: u32) {
        self.lay(offset, Rule { shown: mask, kept: mask }, value & mask, 0);
    }

    /// Keeps the bits of `mask` here: they start at `value`, take what the guest writes, and never reach the device.
    pub fn emulate(&mut self, offset: u16, mask: u32, value: u32) {
        self.lay(offset, Rule { shown: mask, kept: mask }, value & mask, mask);
    }

    /// Like [`Overlay::emulate`], but writes reach the device as well.
    pub fn copy(&mut self, offset: u16, mask: u32) {
        self.lay(offset, Rule { shown: mask, kept: 0 }, 0, mask);
    }

    /// Shows the device's bits of `mask` and drops writes to them.
    pub fn protect(&mut self, offset: u16, mask: u32) {
        self.lay(offset, Rule { shown: 0, kept: mask }, 0, 0);
    }

    fn lay(&mut self, offset: u16, new: Rule, value: u32, writable: u32) {
        let reg = Reg::containing(offset);
        let rule = self.rules.entry(reg).or_default();
        rule.shown |= new.shown;
        rule.kept = (rule.kept & !new.shown) | new.kept;
        let old = self.store.definition(reg);
        let reset = (old.reset & !new.shown) | value;
        self.store.define(reg, RegDef::writable(reset, (old.writable & !new.shown) | writable));
    }

    /// What the guest reads where the device has `device`.
    #[must_use]
    pub fn read(&self, reg: Reg, device: u32) -> u32 {
        let shown = self.rule(reg).shown;
        (device & !shown) | (self.store.read(reg) & shown)
    }

    /// The bits that are kept here.
    #[must_use]
    pub fn value(&self, offset: u16) -> u32 {
        self.store.read(Reg::containing(offset))
    }

    /// Takes the guest's write into the bits that are kept here.
    pub fn write(&mut self, access: Access, value: u32) -> Change {
        self.store.write(access, value)
    }

    /// Changes bits that are kept here, whatever the guest may write.
    pub fn set(&mut self, offset: u16, mask: u32, value: u32) {
        self.store.set(Reg::containing(offset), mask, value);
    }

    /// The bits of a write that reach the device.
    #[must_use]
    pub fn forwarded(&self, access: Access) -> u32 {
        access.lanes.mask() & !self.rule(access.reg).kept
    }

    /// Bits that are kept here go back to where they started.
    pub fn reset(&mut self, kind: ResetKind) {
        self.store.reset(kind);
    }

    fn rule(&self, reg: Reg) -> Rule {
        self.rules.get(&reg).copied().unwrap_or_default()
    }
}

/// Splits a write of the `mask` bits of `value` into runs of bytes, offset in the dword first. Bits outside `mask` of a byte
/// that is written take the device's own value, `current`.
pub fn byte_runs(mask: u32, value: u32, current: u32) -> impl Iterator<Item = (u16, Vec<u8>)> {
    let bytes = ((value & mask) | (current & !mask)).to_le_bytes();
    let mut runs: Vec<(u16, Vec<u8>)> = Vec::new();
    for ((offset, byte), carried) in (0u16..).zip(bytes).zip(mask.to_le_bytes()) {
        if carried == 0 {
            continue;
        }
        match runs.last_mut() {
            Some((start, run)) if usize::from(offset - *start) == run.len() => run.push(byte),
            _ => runs.push((offset, vec![byte])),
        }
    }
    runs.into_iter()
}

/// Whether a write of `mask` needs to know the device's own value: it carries a byte in part.
#[must_use]
pub fn is_partial(mask: u32) -> bool {
    mask.to_le_bytes().into_iter().any(|byte| byte != 0 && byte != 0xFF)
}

#[cfg(test)]
mod tests {
    use pci::access::{self, Lanes};

    use super::*;

    fn overlay() -> Overlay {
        let mut overlay = Overlay::default();
        overlay.replace(0x60, 0x0000_FF00, 0x0000_C800);
        overlay.emulate(0x64, 0x0000_0003, 0x0000_0001);
        overlay.copy(0x64, 0x0000_0004);
        overlay.protect(0x68, 0xFFFF_0000);
        overlay
    }

    const DEVICE: u32 = 0xDDCC_BBAA;

    #[test]
    fn bits_that_nobody_replaced_stay_the_device_s() {
        let overlay = overlay();
        assert_eq!(overlay.read(Reg::containing(0x60), DEVICE), 0xDDCC_C8AA);
        assert_eq!(overlay.read(Reg::containing(0x64), DEVICE), 0xDDCC_BBA9);
        assert_eq!(overlay.read(Reg::containing(0x68), DEVICE), DEVICE);
        assert_eq!(overlay.read(Reg::containing(0x6C), DEVICE), DEVICE);
    }

    #[test]
    fn replaced_bytes_are_right_at_every_offset_and_size() {
        let overlay = overlay();
        let expected = [0xAA, 0xC8, 0xCC, 0xDD, 0xA9, 0xBB, 0xCC, 0xDD];
        for offset in 0..8 {
            for len in 1..=8 - offset {
                let mut data = vec![0; len];
                access::read(0x60 + u16::try_from(offset).unwrap(), 0x1000, &mut data, |reg| overlay.read(reg, DEVICE));
                assert_eq!(data, expected[offset..offset + len], "{offset} {len}");
            }
        }
    }

    #[test]
    fn writes_reach_the_device_only_where_nothing_is_kept() {
        let overlay = overlay();
        assert_eq!(overlay.forwarded(Access::dword(0x60)), 0xFFFF_00FF);
        assert_eq!(overlay.forwarded(Access::dword(0x64)), 0xFFFF_FFFC);
        assert_eq!(overlay.forwarded(Access { reg: Reg::containing(0x68), lanes: Lanes::new(2, 2) }), 0);
        assert_eq!(overlay.forwarded(Access::dword(0x70)), 0xFFFF_FFFF);
    }

    #[test]
    fn kept_bits_take_writes_and_reset() {
        let mut overlay = overlay();
        let change = overlay.write(Access::dword(0x64), 0xFFFF_FFFF);
        assert_eq!((change.old, change.new), (1, 7));
        overlay.write(Access::dword(0x60), 0);
        assert_eq!(overlay.value(0x60), 0xC800);
        overlay.reset(ResetKind::Function);
        assert_eq!(overlay.value(0x64), 1);
    }

    #[test]
    fn a_later_layer_wins() {
        let mut overlay = overlay();
        overlay.replace(0x64, 1, 0);
        overlay.write(Access::dword(0x64), 0xFFFF_FFFF);
        assert_eq!(overlay.value(0x64), 6);
    }

    #[test]
    fn writes_are_split_into_runs_of_whole_bytes() {
        let runs = |mask| byte_runs(mask, 0x1122_3344, DEVICE).collect::<Vec<_>>();
        assert_eq!(runs(0xFFFF_FFFF), [(0, vec![0x44, 0x33, 0x22, 0x11])]);
        assert_eq!(runs(0xFF00_00FF), [(0, vec![0x44]), (3, vec![0x11])]);
        assert_eq!(runs(0x0000_000C), [(0, vec![(0xAA & !0x0C) | (0x44 & 0x0C)])]);
        assert_eq!(runs(0), []);
        assert!(is_partial(0xC) && !is_partial(0xFF00_00FF) && !is_partial(0));
    }
}
