//! The two ports of the PC's configuration mechanism (PCI 3.0 3.2.2.3.2): an address latch at 0xCF8, a data window at 0xCFC.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::address::{Bdf, Devfn};

/// The latch. Guests write it with one dword access; other widths go elsewhere (0xCF9 is a reset register).
#[derive(Debug, Default)]
pub struct AddressLatch(AtomicU32);

const ENABLE: u32 = 1 << 31;
const ADDRESS: u32 = 0x00FF_FFFC;

impl AddressLatch {
    /// The latch, as a dword read of 0xCF8 gives it.
    #[must_use]
    pub fn read(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// A dword write to 0xCF8; reserved bits keep 0.
    pub fn write(&self, value: u32) {
        self.0.store(value & (ENABLE | ADDRESS), Ordering::Relaxed);
    }

    /// Function and byte offset for an access at 0xCFC + `lane`; `None` while the enable bit is clear.
    #[must_use]
    pub fn target(&self, lane: u8) -> Option<(Bdf, u16)> {
        let [register, devfn, bus, enable] = self.read().to_le_bytes();
        let bdf = Bdf::new(bus, Devfn::from_byte(devfn));
        (enable & 0x80 != 0).then(|| (bdf, u16::from(register | (lane & 3))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latch_names_a_function_only_while_enabled() {
        let latch = AddressLatch::default();
        latch.write(0x0003_E0FF);
        assert_eq!(latch.target(0), None);
        latch.write(0xFF03_E8FF);
        assert_eq!(latch.read(), 0x8003_E8FC);
        let (bdf, register) = latch.target(2).unwrap();
        assert_eq!((bdf.to_string().as_str(), register), ("03:1d.0", 0xFE));
    }
}
