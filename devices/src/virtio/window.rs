//! The window through which firmware reaches the BAR by configuration cycles, before it has assigned any address (virtio 1.2
//! 4.1.4.9): registers for BAR, offset and length, and a data register. Decides what an access means and does not do it.

use pci::access::{Access, Reg};
use pci::state::{Reader, StateError, Writer};

use super::layout::BAR;

/// The registers of the window.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Offset of its capability in configuration space.
    at: u8,
    bar: u8,
    offset: u32,
    len: u32,
}

/// A register of the window was read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// A register with this value.
    Register(u32),
    /// The data register: an access of the BAR.
    Data(Target),
    /// The data register, but the other registers make no sense.
    Nowhere,
}

/// An access of the BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Offset in the BAR, a multiple of `len`.
    pub offset: u64,
    /// 1, 2 or 4.
    pub len: usize,
}

impl Window {
    /// The window whose capability lies at `at`.
    #[must_use]
    pub fn new(at: u8) -> Self {
        Self { at, bar: 0, offset: 0, len: 0 }
    }

    /// The same window after a reset.
    #[must_use]
    pub fn reset(&self) -> Self {
        Self::new(self.at)
    }

    /// Whether a register is other than after a reset, as which the capability shows all of them.
    #[must_use]
    pub const fn is_used(&self) -> bool {
        self.bar != 0 || self.offset != 0 || self.len != 0
    }

    /// What a read of `reg` touches; `None` if it is none of the window's registers. The capability's first dword is not.
    #[must_use]
    pub fn read(&self, reg: Reg) -> Option<Touch> {
        match reg.offset().checked_sub(self.at.into())? {
            4 => Some(Touch::Register(self.bar.into())),
            8 => Some(Touch::Register(self.offset)),
            12 => Some(Touch::Register(self.len)),
            16 => Some(self.target().map_or(Touch::Nowhere, Touch::Data)),
            _ => None,
        }
    }

    /// Takes a write; what it touches, as for [`Window::read`].
    pub fn write(&mut self, access: Access, value: u32) -> Option<Touch> {
        let touch = self.read(access.reg)?;
        let Touch::Register(old) = touch else { return Some(touch) };
        let new = access.merge(old, value);
        match access.reg.offset() - u16::from(self.at) {
            4 => [self.bar, ..] = new.to_le_bytes(),
            8 => self.offset = new,
            _ => self.len = new,
        }
        Some(Touch::Register(new))
    }

    /// Writes the registers.
    pub fn save(&self, writer: &mut Writer) {
        writer.u8(self.bar);
        writer.u32(self.offset);
        writer.u32(self.len);
    }

    /// Takes what another window saved.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        (self.bar, self.offset, self.len) = (reader.u8()?, reader.u32()?, reader.u32()?);
        Ok(())
    }

    fn target(&self) -> Option<Target> {
        let possible = self.bar == BAR && matches!(self.len, 1 | 2 | 4) && self.offset.is_multiple_of(self.len);
        let len = usize::try_from(self.len).ok()?;
        possible.then_some(Target { offset: self.offset.into(), len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_register_reaches_what_the_others_say() {
        let mut window = Window::new(0x80);
        assert_eq!(window.read(Reg::containing(0x90)), Some(Touch::Nowhere), "length 0");
        window.write(Access::dword(0x88), 0x14);
        window.write(Access::dword(0x8C), 2);
        let target = Touch::Data(Target { offset: 0x14, len: 2 });
        assert_eq!((window.read(Reg::containing(0x90)), window.write(Access::dword(0x90), 1)), (Some(target), Some(target)));
    }

    #[test]
    fn impossible_targets_lead_nowhere() {
        for (bar, offset, len) in [(1, 0, 4), (0, 2, 4), (0, 0, 3), (0, 0, 8), (0, 1, 2)] {
            let mut window = Window::new(0x80);
            window.write(Access::dword(0x84), bar);
            window.write(Access::dword(0x88), offset);
            window.write(Access::dword(0x8C), len);
            assert_eq!(window.read(Reg::containing(0x90)), Some(Touch::Nowhere));
        }
    }

    #[test]
    fn any_register_but_that_of_data_makes_it_used_and_a_reset_ends_that() {
        for (at, value, used) in [(0x84, 1, true), (0x88, 4, true), (0x8C, 1, true), (0x84, 0xFF00, false), (0x90, 1, false)] {
            let mut window = Window::new(0x80);
            window.write(Access::dword(at), value);
            assert_eq!(window.is_used(), used, "{at:#x}");
            assert!(!window.reset().is_used());
        }
    }

    #[test]
    fn other_registers_are_not_the_window_s() {
        let window = Window::new(0x80);
        assert!([0x40, 0x80, 0x94].iter().all(|at| window.read(Reg::containing(*at)).is_none()));
    }
}
