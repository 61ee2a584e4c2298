//! MSI-X of hardware: the guest programs a table that is kept here, and each vector that it opens is had from the host at
//! that moment. Masking keeps everything and only holds events back; disabling gives everything back.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use pci::access::Access;
use pci::msix_table::{MsixTable, MsixVectorsError};
use pci::seams::MsiVector;

use super::facts::MsixFact;
use super::host::{Area, IrqKind, Irqs};
use super::vectors::{Held, Lender, VectorError};

/// State of one function's MSI-X.
pub struct Msix {
    fact: MsixFact,
    table: MsixTable,
    held: BTreeMap<u16, Held>,
    /// Vectors that the host has enabled, from 0 on; 0 while MSI-X is off there.
    enabled: u16,
    irqs: Irqs,
}

impl Msix {
    /// Off, with as many vectors as `fact` says; `irqs` are the host's.
    pub fn new(fact: MsixFact, irqs: Irqs) -> Result<Self, MsixVectorsError> {
        Ok(Self { fact, table: MsixTable::new(fact.vectors)?, held: BTreeMap::new(), enabled: 0, irqs })
    }

    /// Whether `access` touches message control.
    #[must_use]
    pub fn is_control(&self, access: Access) -> bool {
        access.reg.offset() == u16::from(self.fact.offset) && access.lanes.touch(0xFFFF_0000)
    }

    /// The capability's first dword, with message control in place of the device's.
    #[must_use]
    pub fn first_dword(&self, device: u32) -> u32 {
        (device & 0xFFFF) | u32::from(self.table.control()) << 16
    }

    /// Offset of the capability.
    #[must_use]
    pub const fn offset(&self) -> u8 {
        self.fact.offset
    }

    /// Whether the guest has enabled MSI-X.
    #[must_use]
    pub const fn enabled(&self) -> bool {
        self.table.enabled()
    }

    /// Takes a write of the capability's first dword. Call [`Msix::follow`] afterwards.
    pub fn write_control(&mut self, access: Access, value: u32) {
        let [_, _, low, high] = access.merge(self.first_dword(0), value).to_le_bytes();
        self.table.set_control(u16::from_le_bytes([low, high]));
    }

    /// Brings host and routes to what message control says: vectors that are open are had, others are masked, and all are
    /// given back when MSI-X is off.
    pub fn follow(&mut self, lender: &mut Lender<'_>) -> Result<(), VectorError> {
        if !self.table.enabled() {
            return self.release(lender);
        }
        let vectors: Vec<u16> = (0..self.table.vectors()).collect();
        let result = self.sync(&vectors, lender);
        if self.enabled == 0 {
            // Nothing is open yet. The device must be in MSI-X mode all the same: it would raise INTx instead of noting
            // what is pending.
            self.enable_one(lender)?;
        }
        result
    }

    /// Gives every vector back.
    pub fn release(&mut self, lender: &mut Lender<'_>) -> Result<(), VectorError> {
        let was = std::mem::take(&mut self.enabled);
        let result = if was == 0 { Ok(()) } else { disable(lender) };
        self.held.clear();
        result
    }

    /// Disabled, all masked.
    pub fn reset(&mut self, lender: &mut Lender<'_>) -> Result<(), VectorError> {
        self.table.reset();
        self.release(lender)
    }

    /// How an access to `len` bytes at `offset` of BAR `bar` falls on table and pending bits.
    #[must_use]
    pub fn claim(&self, bar: u8, offset: u64, len: u64) -> Claim {
        let access = Area { offset, len };
        let at = |area: Area| offset.checked_sub(area.offset).unwrap_or(u64::MAX);
        let (table, pending) = (self.fact.table_area(), self.fact.pending_area());
        if self.fact.table.bar == bar && table.overlaps(access) {
            Claim::Table(at(table))
        } else if self.fact.pending.bar == bar && pending.overlaps(access) {
            Claim::Pending(at(pending))
        } else {
            Claim::None
        }
    }

    /// Reads the table at byte `offset`.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        self.table.read_table(offset, data);
    }

    /// Writes the table at byte `offset`.
    pub fn write_table(&mut self, offset: u64, data: &[u8], lender: &mut Lender<'_>) -> Result<(), VectorError> {
        match self.table.write_table(offset, data) {
            Some(vector) if self.table.enabled() => self.sync(&[vector], lender),
            _ => Ok(()),
        }
    }

    /// Adds events that wait behind a mask here to the pending bits of hardware: `data` holds what the device says of the
    /// bytes from `offset` on.
    pub fn add_pending(&self, offset: u64, data: &mut [u8]) {
        for (vector, held) in &self.held {
            let byte = u64::from(vector / 8).checked_sub(offset).and_then(|at| usize::try_from(at).ok());
            if let Some(byte) = byte.and_then(|at| data.get_mut(at))
                && held.vector.pending()
            {
                *byte |= 1 << (vector % 8);
            }
        }
    }

    /// Brings `vectors` to what the table says, and has those that the guest opened for the first time.
    fn sync(&mut self, vectors: &[u16], lender: &mut Lender<'_>) -> Result<(), VectorError> {
        let mut fresh = Vec::new();
        let mut result = Ok(());
        for vector in vectors {
            let Some((message, _)) = self.table.entry(*vector) else { continue };
            let open = self.table.open(*vector);
            let done = match self.held.get_mut(vector) {
                Some(held) => held.update(message, !open),
                None if open => Held::new(lender, message, false).map(|held| {
                    self.held.insert(*vector, held);
                    fresh.push(*vector);
                }),
                None => Ok(()),
            };
            result = result.and(done);
        }
        let attached = self.attach(&fresh, lender);
        if attached.is_err() {
            // Without the host they would never fire; the next unmask tries again.
            for vector in &fresh {
                self.held.remove(vector);
            }
        }
        result.and(attached)
    }

    /// Has the host signal vectors that were just had.
    fn attach(&mut self, fresh: &[u16], lender: &mut Lender<'_>) -> Result<(), VectorError> {
        let Some(needed) = fresh.iter().max().map(|last| last + 1) else { return Ok(()) };
        if self.irqs.growable {
            if self.enabled == 0 {
                self.enable_one(lender)?;
            }
        } else if needed > self.enabled {
            // The set cannot grow while it is enabled. Doubling it keeps the gaps few.
            if self.enabled != 0 {
                self.enabled = 0;
                disable(lender)?;
            }
            let count = needed.checked_next_power_of_two().unwrap_or(needed).min(self.irqs.count);
            let events: Vec<Option<BorrowedFd<'_>>> = (0..count).map(|vector| self.event(vector)).collect();
            self.trigger(0, &events, lender)?;
            self.enabled = count;
            return Ok(());
        }
        for vector in fresh {
            self.trigger(*vector, &[self.event(*vector)], lender)?;
        }
        Ok(())
    }

    /// The first call enables as many vectors as it spans, so it spans one, which signals nobody yet.
    fn enable_one(&mut self, lender: &mut Lender<'_>) -> Result<(), VectorError> {
        self.trigger(0, &[None], lender)?;
        self.enabled = 1;
        Ok(())
    }

    fn event(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.held.get(&vector).map(|held| MsiVector::event(held.vector.as_ref()))
    }

    fn trigger(&self, start: u16, events: &[Option<BorrowedFd<'_>>], lender: &mut Lender<'_>) -> Result<(), VectorError> {
        let kind = IrqKind::Msix;
        lender.device.set_triggers(kind, start, events).map_err(|source| VectorError::Host { what: "enable", kind, source })
    }
}

fn disable(lender: &mut Lender<'_>) -> Result<(), VectorError> {
    let kind = IrqKind::Msix;
    lender.device.disable(kind).map_err(|source| VectorError::Host { what: "disable", kind, source })
}

/// Which register file an access falls on. The offset is `u64::MAX` for an access that begins before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// None.
    None,
    /// The vector table, at this byte.
    Table(u64),
    /// The pending bits, at this byte.
    Pending(u64),
}

#[cfg(test)]
mod tests;
