//! MSI of hardware: the guest programs registers that are kept here, in the shape that the device has, and all vectors that
//! it grants are enabled in one call.

use std::os::fd::BorrowedFd;

use pci::access::Access;
use pci::msi::{Msi as Registers, MsiVectorsError};

use super::facts::MsiFact;
use super::host::IrqKind;
use super::vectors::{Held, Lender, VectorError};

/// Message control: 64-bit addresses.
const WIDE: u32 = 1 << 23;

/// State of one function's MSI.
pub struct Msi {
    fact: MsiFact,
    registers: Registers,
    held: Vec<Held>,
    /// How many vectors the host has; it may have fewer than the capability says.
    most: u16,
}

impl Msi {
    /// Off, in the shape that `fact` says; the host has `most` vectors.
    pub fn new(fact: MsiFact, most: u16) -> Result<Self, MsiVectorsError> {
        let vectors = if most == 0 { 1 } else { 1 << most.min(fact.vectors.into()).ilog2() };
        let registers = Registers::new(vectors, fact.maskable)?;
        Ok(Self { fact, registers, held: Vec::new(), most })
    }

    /// Whether the guest has enabled MSI.
    #[must_use]
    pub const fn enabled(&self) -> bool {
        self.registers.enabled()
    }

    /// What the guest reads at dword `offset`, `None` outside the capability; `device` is the device's own value there.
    pub fn read(&mut self, offset: u16, device: u32) -> Option<u32> {
        let index = self.index(offset)?;
        for (vector, held) in (0..).zip(&self.held) {
            self.registers.set_pending(vector, held.vector.pending());
        }
        let value = self.registers.read(index);
        if index != Registers::CONTROL {
            return Some(value);
        }
        let wide = if self.fact.wide { WIDE } else { 0 };
        Some((device & 0xFFFF) | (value & 0xFFFF_0000 & !WIDE) | wide)
    }

    /// Takes a write; whether it lies in the capability. Call [`Msi::follow`] afterwards if it does.
    pub fn write(&mut self, access: Access, value: u32) -> bool {
        let Some(index) = self.index(access.reg.offset()) else { return false };
        self.registers.write(index, access.lanes, value);
        true
    }

    /// Brings host and routes to what the registers say.
    pub fn follow(&mut self, lender: &mut Lender<'_>) -> Result<(), VectorError> {
        if !self.registers.enabled() {
            return self.release(lender);
        }
        let granted = usize::from(self.registers.vectors().min(self.most));
        if self.held.len() != granted {
            self.release(lender)?;
            return self.enable(lender);
        }
        let mut result = Ok(());
        for (vector, held) in (0..).zip(&mut self.held) {
            if let Some((message, masked)) = self.registers.entry(vector) {
                result = result.and(held.update(message, masked));
            }
        }
        result
    }

    fn enable(&mut self, lender: &mut Lender<'_>) -> Result<(), VectorError> {
        let kind = IrqKind::Msi;
        let vectors = (0..self.registers.vectors().min(self.most)).filter_map(|vector| self.registers.entry(vector));
        let held: Vec<Held> = vectors.map(|(message, masked)| Held::new(lender, message, masked)).collect::<Result<_, _>>()?;
        let events: Vec<Option<BorrowedFd<'_>>> = held.iter().map(|held| Some(held.vector.event())).collect();
        if !events.is_empty() {
            let enabled = lender.device.set_triggers(kind, 0, &events);
            enabled.map_err(|source| VectorError::Host { what: "enable", kind, source })?;
        }
        self.held = held;
        Ok(())
    }

    /// Gives every vector back.
    pub fn release(&mut self, lender: &mut Lender<'_>) -> Result<(), VectorError> {
        if self.held.is_empty() {
            return Ok(());
        }
        let kind = IrqKind::Msi;
        let result = lender.device.disable(kind).map_err(|source| VectorError::Host { what: "disable", kind, source });
        self.held.clear();
        result
    }

    /// Disabled, nothing masked.
    pub fn reset(&mut self, lender: &mut Lender<'_>) -> Result<(), VectorError> {
        self.registers.reset();
        self.release(lender)
    }

    /// The register behind dword `offset`. Without 64-bit addresses everything behind the address is one dword earlier.
    fn index(&self, offset: u16) -> Option<u8> {
        let index = u8::try_from(offset.checked_sub(self.fact.offset.into())? / 4).ok()?;
        let index = if self.fact.wide || index < 2 { index } else { index + 1 };
        (index < if self.fact.maskable { 6 } else { 4 }).then_some(index)
    }
}

#[cfg(test)]
mod tests;
