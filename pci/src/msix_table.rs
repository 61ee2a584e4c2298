//! Decides which message an MSI-X interrupt becomes: vector table, pending bits, masks (PCIe 6.0 7.7.2, 6.1.4). Knows
//! nothing of BARs and of who sends.

use thiserror::Error;

use crate::seams::MsiMessage;
use crate::state::{Reader, StateError, Writer};

/// Bytes of a table entry.
const ENTRY: u64 = 16;

/// The most vectors that the table size field can tell.
const MOST_VECTORS: u16 = 2048;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    message: MsiMessage,
    masked: bool,
}

const RESET: Entry = Entry { message: MsiMessage { address: 0, data: 0 }, masked: true };

/// Table, pending bits and message control of one function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MsixTable {
    entries: Vec<Entry>,
    /// One bit a vector, 64 vectors a word.
    pending: Vec<u64>,
    enabled: bool,
    function_masked: bool,
}

impl MsixTable {
    /// Message control: MSI-X enable.
    pub const ENABLE: u16 = 1 << 15;
    /// Message control: function mask.
    pub const FUNCTION_MASK: u16 = 1 << 14;

    /// A table of `vectors` entries, 1 to 2048: all masked, MSI-X disabled.
    pub fn new(vectors: u16) -> Result<Self, MsixVectorsError> {
        if vectors == 0 || vectors > MOST_VECTORS {
            return Err(MsixVectorsError { vectors });
        }
        let words = usize::from(vectors).div_ceil(64);
        Ok(Self { entries: vec![RESET; vectors.into()], pending: vec![0; words], enabled: false, function_masked: false })
    }

    /// Number of vectors.
    #[must_use]
    pub fn vectors(&self) -> u16 {
        u16::try_from(self.entries.len()).unwrap_or(MOST_VECTORS)
    }

    /// Bytes of the table.
    #[must_use]
    pub fn table_len(&self) -> u64 {
        u64::from(self.vectors()) * ENTRY
    }

    /// Bytes of the pending bit array.
    #[must_use]
    pub fn pending_len(&self) -> u64 {
        u64::from(self.vectors()).div_ceil(64) * 8
    }

    /// Message control, as the capability shows it.
    #[must_use]
    pub fn control(&self) -> u16 {
        let enable = if self.enabled { Self::ENABLE } else { 0 };
        let mask = if self.function_masked { Self::FUNCTION_MASK } else { 0 };
        (self.vectors() - 1) | enable | mask
    }

    /// Writes message control. Pending vectors may have become deliverable: see [`MsixTable::deliver_all`].
    pub fn set_control(&mut self, control: u16) {
        self.enabled = control & Self::ENABLE != 0;
        self.function_masked = control & Self::FUNCTION_MASK != 0;
    }

    /// Whether the guest has enabled MSI-X.
    #[must_use]
    pub const fn enabled(&self) -> bool {
        self.enabled
    }

    /// The message of `vector` and its own mask bit, whatever message control says; `None` past the table.
    #[must_use]
    pub fn entry(&self, vector: u16) -> Option<(MsiMessage, bool)> {
        self.entries.get(usize::from(vector)).map(|entry| (entry.message, entry.masked))
    }

    /// Whether `vector` may fire: it exists, MSI-X is enabled, and neither its own mask nor the function's is set.
    #[must_use]
    pub fn open(&self, vector: u16) -> bool {
        self.enabled && !self.function_masked && self.entry(vector).is_some_and(|(_, masked)| !masked)
    }

    /// Reads the table at byte `offset`. Accesses other than aligned 4- and 8-byte ones inside it give all ones.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        if !aligned(offset, data.len(), self.table_len()) {
            return;
        }
        for (at, dword) in (offset..).step_by(4).zip(data.chunks_exact_mut(4)) {
            if let Some(entry) = self.index(at).and_then(|index| self.entries.get(index)) {
                dword.copy_from_slice(&entry.read(at % ENTRY).to_le_bytes());
            }
        }
    }

    /// Writes the table at byte `offset` and returns the vector whose entry changed, if one did; it may have become
    /// deliverable: see [`MsixTable::deliver`]. Accesses other than aligned 4- and 8-byte ones inside it are dropped.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) -> Option<u16> {
        if !aligned(offset, data.len(), self.table_len()) {
            return None;
        }
        let index = self.index(offset)?;
        let entry = self.entries.get_mut(index)?;
        let old = *entry;
        for (at, dword) in (offset..).step_by(4).zip(data.chunks_exact(4)) {
            let bytes = dword.try_into().unwrap_or_default();
            entry.write(at % ENTRY, u32::from_le_bytes(bytes));
        }
        if *entry == old { None } else { u16::try_from(index).ok() }
    }

    /// Reads the pending bits at byte `offset`. Accesses other than aligned 4- and 8-byte ones inside it give all ones.
    /// Writes have no effect.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        if !aligned(offset, data.len(), self.pending_len()) {
            return;
        }
        let word = usize::try_from(offset / 8).ok().and_then(|index| self.pending.get(index)).copied().unwrap_or(0);
        let from = if offset.is_multiple_of(8) { 0 } else { 4 };
        for (byte, value) in data.iter_mut().zip(word.to_le_bytes().into_iter().skip(from)) {
            *byte = value;
        }
    }

    /// The function wants `vector` to fire: gives the message to send, or notes it as pending while it is masked. `None` as
    /// well while MSI-X is disabled and for vectors past the table.
    pub fn raise(&mut self, vector: u16) -> Option<MsiMessage> {
        if !self.enabled {
            return None;
        }
        if self.open(vector) {
            return self.entry(vector).map(|(message, _)| message);
        }
        self.set_pending(vector, true);
        None
    }

    /// Takes the pending bit of `vector` and gives its message, if it is pending and may fire.
    pub fn deliver(&mut self, vector: u16) -> Option<MsiMessage> {
        if !self.pending(vector) || !self.open(vector) {
            return None;
        }
        self.set_pending(vector, false);
        self.entry(vector).map(|(message, _)| message)
    }

    /// Sends all that is pending and may fire, in order of vectors. Call after [`MsixTable::set_control`].
    pub fn deliver_all(&mut self, send: &mut dyn FnMut(u16, MsiMessage)) {
        if self.pending.iter().all(|word| *word == 0) {
            return;
        }
        for vector in 0..self.vectors() {
            if let Some(message) = self.deliver(vector) {
                send(vector, message);
            }
        }
    }

    /// Whether `vector` has its pending bit set.
    #[must_use]
    pub fn pending(&self, vector: u16) -> bool {
        self.pending.get(usize::from(vector / 64)).is_some_and(|word| word & (1 << (vector % 64)) != 0)
    }

    /// Sets the pending bit of `vector`; for functions whose interrupts wait elsewhere. Past the table: nothing.
    pub fn set_pending(&mut self, vector: u16, pending: bool) {
        if vector >= self.vectors() {
            return;
        }
        if let Some(word) = self.pending.get_mut(usize::from(vector / 64)) {
            *word = (*word & !(1 << (vector % 64))) | u64::from(pending) << (vector % 64);
        }
    }

    /// Back to the reset state: all masked, nothing pending, disabled.
    pub fn reset(&mut self) {
        self.entries.fill(RESET);
        self.pending.fill(0);
        self.enabled = false;
        self.function_masked = false;
    }

    /// Writes table, pending bits and message control.
    pub fn save(&self, writer: &mut Writer) {
        writer.count(self.entries.len());
        for entry in &self.entries {
            writer.u64(entry.message.address);
            writer.u32(entry.message.data);
            writer.bool(entry.masked);
        }
        self.pending.iter().for_each(|word| writer.u64(*word));
        writer.bool(self.enabled);
        writer.bool(self.function_masked);
    }

    /// Takes what a table with as many vectors saved.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        reader.same_count("MSI-X vectors", self.entries.len())?;
        for entry in &mut self.entries {
            let message = MsiMessage { address: reader.u64()? & !3, data: reader.u32()? };
            *entry = Entry { message, masked: reader.bool()? };
        }
        let vectors = self.vectors();
        for (word, first) in self.pending.iter_mut().zip((0..vectors).step_by(64)) {
            let there = if vectors - first >= 64 { u64::MAX } else { (1 << (vectors - first)) - 1 };
            *word = reader.u64()? & there;
        }
        self.enabled = reader.bool()?;
        self.function_masked = reader.bool()?;
        Ok(())
    }

    fn index(&self, offset: u64) -> Option<usize> {
        usize::try_from(offset / ENTRY).ok()
    }
}

impl Entry {
    fn read(self, offset: u64) -> u32 {
        let [a, b, c, d, e, f, g, h] = self.message.address.to_le_bytes();
        match offset {
            0 => u32::from_le_bytes([a, b, c, d]),
            4 => u32::from_le_bytes([e, f, g, h]),
            8 => self.message.data,
            _ => u32::from(self.masked),
        }
    }

    fn write(&mut self, offset: u64, value: u32) {
        let address = self.message.address;
        match offset {
            // Bits 1:0 are reserved.
            0 => self.message.address = (address & !0xFFFF_FFFF) | u64::from(value & !3),
            4 => self.message.address = (address & 0xFFFF_FFFF) | u64::from(value) << 32,
            8 => self.message.data = value,
            _ => self.masked = value & 1 != 0,
        }
    }
}

/// Whether an access is one that the specification defines, inside `end` bytes.
fn aligned(offset: u64, len: usize, end: u64) -> bool {
    let len: u64 = match len {
        4 => 4,
        8 => 8,
        _ => return false,
    };
    offset.is_multiple_of(len) && offset.checked_add(len).is_some_and(|last| last <= end)
}

/// A number of vectors that MSI-X cannot have.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("MSI-X cannot have {vectors} vectors: take 1 to {MOST_VECTORS}")]
pub struct MsixVectorsError {
    vectors: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(vectors: u16) -> MsixTable {
        let mut table = MsixTable::new(vectors).unwrap();
        for vector in 0..vectors {
            let at = u64::from(vector) * ENTRY;
            table.write_table(at, &(0xFEE0_0000u64 | u64::from(vector) << 12).to_le_bytes());
            table.write_table(at + 8, &u32::from(vector).to_le_bytes());
        }
        table
    }

    fn unmask(table: &mut MsixTable, vector: u16) -> Option<u16> {
        table.write_table(u64::from(vector) * ENTRY + 12, &[0; 4])
    }

    fn read(table: &MsixTable, offset: u64) -> u32 {
        let mut data = [0; 4];
        table.read_table(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn a_vector_fires_only_when_nothing_masks_it() {
        let mut table = table(4);
        assert_eq!(table.raise(1), None);
        table.set_control(MsixTable::ENABLE);
        assert_eq!(unmask(&mut table, 1), Some(1));
        assert_eq!(table.raise(1), Some(MsiMessage { address: 0xFEE0_1000, data: 1 }));
        assert_eq!((table.raise(2), table.pending(2)), (None, true));
        assert_eq!((table.raise(4), table.pending(4)), (None, false));
        table.set_control(MsixTable::ENABLE | MsixTable::FUNCTION_MASK);
        assert_eq!((table.raise(1), table.pending(1)), (None, true));
        assert_eq!(table.entry(1).map(|(_, masked)| masked), Some(false));
    }

    #[test]
    fn a_pending_vector_is_delivered_once_at_unmask() {
        let mut table = table(130);
        table.set_control(MsixTable::ENABLE);
        table.raise(129);
        table.raise(129);
        let mut bits = [0; 8];
        table.read_pending(16, &mut bits);
        assert_eq!(bits, [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(table.deliver(129), None);
        assert_eq!(unmask(&mut table, 129), Some(129));
        assert_eq!(table.deliver(129).map(|message| message.data), Some(129));
        assert_eq!(table.deliver(129), None);
    }

    #[test]
    fn clearing_the_function_mask_delivers_what_waits() {
        let mut table = table(3);
        table.set_control(MsixTable::ENABLE | MsixTable::FUNCTION_MASK);
        for vector in [0, 2] {
            unmask(&mut table, vector);
        }
        for vector in 0..3 {
            table.raise(vector);
        }
        let mut sent = Vec::new();
        table.set_control(MsixTable::ENABLE);
        table.deliver_all(&mut |vector, _| sent.push(vector));
        assert_eq!((sent, table.pending(1)), (vec![0, 2], true));
    }

    #[test]
    fn accesses_that_the_specification_does_not_define_read_ones_and_are_dropped() {
        let mut table = table(2);
        let before = table.clone();
        for (offset, len) in [(0, 1), (0, 2), (2, 4), (4, 8), (8, 3), (28, 8), (32, 4), (u64::MAX, 8), (u64::MAX - 3, 4)] {
            let mut data = vec![0; len];
            table.read_table(offset, &mut data);
            assert_eq!(data, vec![0xFF; len], "{offset:#x} {len}");
            assert_eq!(table.write_table(offset, &vec![0x55; len]), None);
        }
        assert_eq!(table, before);
        let mut data = [0; 4];
        table.read_pending(8, &mut data);
        assert_eq!(data, [0xFF; 4]);
    }

    #[test]
    fn the_table_reads_back_what_the_bits_can_keep() {
        let mut table = MsixTable::new(1).unwrap();
        assert_eq!(read(&table, 12), 1);
        assert_eq!(table.write_table(0, &[0xFF; 8]), Some(0));
        assert_eq!(table.write_table(8, &[0xFE; 8]), Some(0));
        assert_eq!([0, 4, 8, 12].map(|at| read(&table, at)), [0xFFFF_FFFC, 0xFFFF_FFFF, 0xFEFE_FEFE, 0]);
        assert_eq!(table.write_table(0, &[0xFF; 8]), None, "nothing changed");
        table.reset();
        assert_eq!(table, MsixTable::new(1).unwrap());
    }

    #[test]
    fn message_control_tells_the_size() {
        for vectors in [1, 8, 2048] {
            let mut table = MsixTable::new(vectors).unwrap();
            table.set_control(0xFFFF);
            assert_eq!(table.control(), 0xC000 | (vectors - 1));
        }
        assert!(MsixTable::new(0).is_err());
        assert!(MsixTable::new(2049).is_err());
    }
}
