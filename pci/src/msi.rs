//! Decides which message an MSI interrupt becomes: the registers of the capability (PCIe 6.0 7.7.1), masks and pending bits.
//! Knows nothing of who sends.

use thiserror::Error;

use crate::access::{Lanes, halves};
use crate::seams::MsiMessage;
use crate::state::{Reader, StateError, Writer};

/// MSI state of one function: 64-bit addresses, 1 to 32 vectors, with or without per-vector masks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Msi {
    /// Logarithm of the number of vectors, 0 to 5.
    capable: u8,
    maskable: bool,
    enabled: bool,
    /// Multiple message enable as written, 0 to 7.
    granted: u8,
    message: MsiMessage,
    mask: u32,
    pending: u32,
}

/// Message control bits, in the dword that they share with the capability's header.
const ENABLE: u32 = 1 << 16;
const WIDE: u32 = 1 << 23;
const MASKABLE: u32 = 1 << 24;

impl Msi {
    /// Dword index of message control.
    pub const CONTROL: u8 = 0;
    /// Dword index of the mask bits, if there are any.
    pub const MASK: u8 = 4;

    /// MSI with `vectors` vectors: 1, 2, 4, 8, 16 or 32. Disabled.
    pub fn new(vectors: u8, maskable: bool) -> Result<Self, MsiVectorsError> {
        if !vectors.is_power_of_two() || vectors > 32 {
            return Err(MsiVectorsError { vectors });
        }
        let capable = vectors.trailing_zeros().to_le_bytes()[0];
        Ok(Self { capable, maskable, enabled: false, granted: 0, message: MsiMessage::default(), mask: 0, pending: 0 })
    }

    /// Bytes of the capability, a multiple of 4.
    #[must_use]
    pub const fn len(&self) -> u8 {
        if self.maskable { 24 } else { 16 }
    }

    /// Never: a capability has registers.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Whether the guest has enabled MSI.
    #[must_use]
    pub const fn enabled(&self) -> bool {
        self.enabled
    }

    /// How many vectors the guest has granted, 1 to 32, at most those that the function has.
    #[must_use]
    pub const fn vectors(&self) -> u16 {
        1 << if self.granted < self.capable { self.granted } else { self.capable }
    }

    /// Reads dword `index` of the capability. The low half of dword 0, id and next pointer, is 0 here.
    #[must_use]
    pub fn read(&self, index: u8) -> u32 {
        match index {
            Self::CONTROL => {
                let enable = if self.enabled { ENABLE } else { 0 };
                let maskable = if self.maskable { MASKABLE } else { 0 };
                enable | u32::from(self.capable) << 17 | u32::from(self.granted) << 20 | WIDE | maskable
            }
            1 => halves(self.message.address).0,
            2 => halves(self.message.address).1,
            3 => self.message.data,
            Self::MASK if self.maskable => self.mask,
            5 if self.maskable => self.pending,
            _ => 0,
        }
    }

    /// The bits of dword `index` that guests can write.
    #[must_use]
    pub const fn writable(&self, index: u8) -> u32 {
        match index {
            Self::CONTROL => ENABLE | 7 << 20,
            1 => !3,
            2 => u32::MAX,
            3 => 0xFFFF,
            Self::MASK if self.maskable => self.implemented(),
            _ => 0,
        }
    }

    /// Writes the carried bytes of dword `index`. A pending vector may have become deliverable: see [`Msi::deliver`].
    pub fn write(&mut self, index: u8, lanes: Lanes, value: u32) {
        let carried = lanes.mask();
        let merge = |old: u32| (old & !carried) | (value & carried);
        match index {
            Self::CONTROL => {
                let new = merge(self.read(Self::CONTROL));
                self.enabled = new & ENABLE != 0;
                self.granted = ((new >> 20) & 7).to_le_bytes()[0];
            }
            1 => self.message.address = (self.message.address & !0xFFFF_FFFF) | u64::from(merge(self.read(1)) & !3),
            2 => self.message.address = (self.message.address & 0xFFFF_FFFF) | u64::from(merge(self.read(2))) << 32,
            3 => self.message.data = merge(self.message.data) & 0xFFFF,
            Self::MASK if self.maskable => self.mask = merge(self.mask) & self.implemented(),
            _ => {}
        }
    }

    /// The message of `vector` and whether it is masked; `None` for a vector that is not granted.
    #[must_use]
    pub fn entry(&self, vector: u16) -> Option<(MsiMessage, bool)> {
        if vector >= self.vectors() {
            return None;
        }
        // The low bits of the data tell the vectors apart.
        let data = (self.message.data & !(u32::from(self.vectors()) - 1)) | u32::from(vector);
        Some((MsiMessage { data, ..self.message }, self.mask & (1 << vector) != 0))
    }

    /// The function wants `vector` to fire: gives the message to send, or notes it as pending while it is masked. Vectors
    /// above those granted share the granted ones (PCIe 6.0 6.1.4.2). `None` as well while MSI is disabled and for vectors
    /// that the function does not have.
    pub fn raise(&mut self, vector: u16) -> Option<MsiMessage> {
        if !self.enabled || vector >= 1 << self.capable {
            return None;
        }
        let vector = vector & (self.vectors() - 1);
        let (message, masked) = self.entry(vector)?;
        if masked {
            self.pending |= 1 << vector;
            return None;
        }
        Some(message)
    }

    /// Sends what is pending and not masked any more. Call after each write.
    pub fn deliver(&mut self, send: &mut dyn FnMut(u16, MsiMessage)) {
        if !self.enabled || self.pending & !self.mask == 0 {
            return;
        }
        for vector in 0..self.vectors() {
            let bit = 1 << vector;
            if self.pending & !self.mask & bit == 0 {
                continue;
            }
            self.pending &= !bit;
            if let Some((message, _)) = self.entry(vector) {
                send(vector, message);
            }
        }
    }

    /// Sets what the pending register shows of `vector`, for functions whose interrupts wait elsewhere.
    pub fn set_pending(&mut self, vector: u16, pending: bool) {
        if vector < self.vectors() {
            self.pending = (self.pending & !(1 << vector)) | u32::from(pending) << vector;
        }
    }

    /// Back to the reset state: disabled, nothing masked or pending.
    pub fn reset(&mut self) {
        let (capable, maskable) = (self.capable, self.maskable);
        *self = Self { capable, maskable, enabled: false, granted: 0, message: MsiMessage::default(), mask: 0, pending: 0 };
    }

    /// Writes the registers.
    pub fn save(&self, writer: &mut Writer) {
        writer.bool(self.enabled);
        writer.u8(self.granted);
        writer.u64(self.message.address);
        writer.u32(self.message.data);
        writer.u32(self.mask);
        writer.u32(self.pending);
    }

    /// Takes what a function with as many vectors saved.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        self.enabled = reader.bool()?;
        self.granted = reader.u8()? & 7;
        self.message = MsiMessage { address: reader.u64()? & !3, data: reader.u32()? & 0xFFFF };
        self.mask = reader.u32()? & self.implemented();
        self.pending = reader.u32()? & self.implemented();
        Ok(())
    }

    /// One bit for each vector that the function has.
    const fn implemented(&self) -> u32 {
        u32::MAX >> (32 - (1u32 << self.capable))
    }
}

/// A number of vectors that MSI cannot have.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("MSI cannot have {vectors} vectors: take 1, 2, 4, 8, 16 or 32")]
pub struct MsiVectorsError {
    vectors: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enabled(vectors: u8, maskable: bool, granted: u32) -> Msi {
        let mut msi = Msi::new(vectors, maskable).unwrap();
        msi.write(1, Lanes::ALL, 0xFEE0_1003);
        msi.write(2, Lanes::ALL, 1);
        msi.write(3, Lanes::ALL, 0xFFFF_4560);
        msi.write(Msi::CONTROL, Lanes::ALL, ENABLE | granted << 20);
        msi
    }

    #[test]
    fn case_d1_each_granted_vector_has_its_own_data() {
        for vectors in [1u8, 4, 32] {
            for maskable in [false, true] {
                let mut msi = enabled(vectors, maskable, u32::from(vectors).trailing_zeros());
                for vector in 0..u16::from(vectors) {
                    let sent = msi.raise(vector).unwrap();
                    assert_eq!(sent, MsiMessage { address: 0x1_FEE0_1000, data: 0x4560 | u32::from(vector) });
                }
                assert_eq!(msi.raise(vectors.into()), None);
            }
        }
    }

    #[test]
    fn vectors_that_were_not_granted_share_the_granted_ones() {
        let mut msi = enabled(32, true, 1);
        let data: Vec<u32> = (0..4).map(|vector| msi.raise(vector).unwrap().data).collect();
        assert_eq!(data, [0x4560, 0x4561, 0x4560, 0x4561]);
        // More than the function has: all of its own.
        assert_eq!(enabled(4, true, 7).vectors(), 4);
    }

    #[test]
    fn a_masked_vector_waits_and_is_sent_once_at_unmask() {
        let mut msi = enabled(4, true, 2);
        msi.write(Msi::MASK, Lanes::ALL, 0xFFFF_FFFF);
        assert_eq!(msi.read(Msi::MASK), 0xF);
        assert_eq!((msi.raise(2), msi.raise(2), msi.read(5)), (None, None, 4));
        let mut sent = Vec::new();
        msi.write(Msi::MASK, Lanes::ALL, 0xB);
        msi.deliver(&mut |vector, message| sent.push((vector, message.data)));
        msi.deliver(&mut |vector, message| sent.push((vector, message.data)));
        assert_eq!((sent, msi.read(5)), (vec![(2, 0x4562)], 0));
    }

    #[test]
    fn only_the_defined_bits_are_kept() {
        let mut msi = Msi::new(1, false).unwrap();
        for index in 0..8 {
            msi.write(index, Lanes::ALL, 0xFFFF_FFFF);
        }
        let read: Vec<u32> = (0..6).map(|index| msi.read(index)).collect();
        assert_eq!(read, [0x00F1_0000, 0xFFFF_FFFC, 0xFFFF_FFFF, 0xFFFF, 0, 0]);
        msi.reset();
        assert_eq!(msi, Msi::new(1, false).unwrap());
    }

    #[test]
    fn numbers_of_vectors_that_are_no_power_of_two_are_refused() {
        for vectors in [0, 3, 33, 64, 255] {
            assert_eq!(Msi::new(vectors, true), Err(MsiVectorsError { vectors }));
        }
    }
}
