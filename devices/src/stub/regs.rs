//! The stub's control registers: what each keeps of a write, and what a write asks for. Moves no data itself.
//!
//! The first page of BAR 0 of a stub with a copy engine, little endian:
//!
//! | offset | bits | access | what |
//! |---|---|---|---|
//! | 0x00 | 32 | RO | [`MAGIC`] |
//! | 0x04 | 32 | RO | [`VERSION`] |
//! | 0x08 | 32 | RW | scratch |
//! | 0x0C | 32 | WO | doorbell: raises the interrupt vector of this number; reads 0 |
//! | 0x10 | 32 | RO | copies completed |
//! | 0x14 | 32 | RO | doorbells rung |
//! | 0x20 | 64 | RW | copy: source address |
//! | 0x28 | 64 | RW | copy: destination address |
//! | 0x30 | 32 | RW | copy: bytes, 1 to [`COPY_LIMIT`] |
//! | 0x34 | 32 | RW | copy: vector raised at its end, also at a failed one |
//! | 0x38 | 32 | | copy: written bit 0 starts; read bit 0 busy, bit 1 done, bit 2 error |
//!
//! A copy is refused, with the error bit and without an interrupt, while bus mastering is off or if its length is out of
//! range. A start while another copy runs is dropped. Everything else in the page reads 0 and keeps nothing.

use pci::access::{self, Access, Reg};
use pci::state::{Reader, StateError, Writer};

/// "BNYN".
pub const MAGIC: u32 = 0x4E59_4E42;
/// Of this register layout.
pub const VERSION: u32 = 1;
/// Bytes that the registers take.
pub const PAGE: u16 = 0x1000;
/// Longest copy, bytes.
const COPY_LIMIT: u32 = 1 << 20;

const START: u32 = 1;
const BUSY: u32 = 1;
const DONE: u32 = 1 << 1;
const ERROR: u32 = 1 << 2;

/// A copy that the guest started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// First guest-physical address to read.
    pub source: u64,
    /// First guest-physical address to write.
    pub destination: u64,
    /// Bytes, 1 to [`COPY_LIMIT`].
    pub length: u32,
    /// Vector to raise at the end.
    pub vector: u32,
    /// Which life of the registers it belongs to; a reset starts the next one.
    pub life: u64,
}

/// What a register write asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Raise this vector.
    Doorbell(u32),
    /// Copy, then call [`ControlRegs::finish`].
    Copy(Copy),
}

/// The registers.
#[derive(Debug, Clone, Default)]
pub struct ControlRegs {
    scratch: u32,
    completed: u32,
    doorbells: u32,
    source: [u32; 2],
    destination: [u32; 2],
    length: u32,
    vector: u32,
    status: u32,
    life: u64,
}

impl ControlRegs {
    /// Reads `data.len()` bytes at `offset` of the page; all ones past its end.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        access::read(offset, PAGE, data, |reg| self.dword(reg));
    }

    /// Writes `data` at `offset` of the page. `bus_master` tells whether the function may send requests.
    pub fn write(&mut self, offset: u16, data: &[u8], bus_master: bool) -> Vec<Request> {
        let mut requests = Vec::new();
        access::write(offset, PAGE, data, |access, value| requests.extend(self.write_dword(access, value, bus_master)));
        requests
    }

    /// A copy has ended. Returns whether it still belonged to these registers; a reset since its start cuts it off.
    pub fn finish(&mut self, copy: &Copy, ok: bool) -> bool {
        let ours = self.runs(copy);
        if ours {
            self.status = if ok { DONE } else { ERROR };
            self.completed = self.completed.wrapping_add(u32::from(ok));
        }
        ours
    }

    /// Whether `copy` was started since the last reset and has not ended.
    #[must_use]
    pub fn runs(&self, copy: &Copy) -> bool {
        self.life == copy.life && self.status & BUSY != 0
    }

    /// All registers to their reset values; a copy that runs is cut off.
    pub fn reset(&mut self) {
        *self = Self { life: self.life + 1, ..Self::default() };
    }

    /// Writes the registers. No copy is under way.
    pub fn save(&self, writer: &mut Writer) {
        let ([source, source_high], [destination, destination_high]) = (self.source, self.destination);
        let all = [self.scratch, self.completed, self.doorbells, source, source_high, destination, destination_high];
        all.into_iter().chain([self.length, self.vector, self.status]).for_each(|register| writer.u32(register));
    }

    /// Takes what other registers saved.
    pub fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        (self.scratch, self.completed, self.doorbells) = (reader.u32()?, reader.u32()?, reader.u32()?);
        self.source = [reader.u32()?, reader.u32()?];
        self.destination = [reader.u32()?, reader.u32()?];
        (self.length, self.vector) = (reader.u32()?, reader.u32()?);
        self.status = reader.u32()? & (DONE | ERROR);
        Ok(())
    }

    fn dword(&self, reg: Reg) -> u32 {
        let ([source, source_high], [destination, destination_high]) = (self.source, self.destination);
        match reg.offset() {
            0x00 => MAGIC,
            0x04 => VERSION,
            0x08 => self.scratch,
            0x10 => self.completed,
            0x14 => self.doorbells,
            0x20 => source,
            0x24 => source_high,
            0x28 => destination,
            0x2C => destination_high,
            0x30 => self.length,
            0x34 => self.vector,
            0x38 => self.status,
            _ => 0,
        }
    }

    fn write_dword(&mut self, access: Access, value: u32, bus_master: bool) -> Option<Request> {
        let ([source, source_high], [destination, destination_high]) = (&mut self.source, &mut self.destination);
        let register = match access.reg.offset() {
            0x08 => &mut self.scratch,
            0x20 => source,
            0x24 => source_high,
            0x28 => destination,
            0x2C => destination_high,
            0x30 => &mut self.length,
            0x34 => &mut self.vector,
            0x0C => {
                self.doorbells = self.doorbells.wrapping_add(1);
                return Some(Request::Doorbell(access.merge(0, value)));
            }
            0x38 if access.merge(0, value) & START != 0 => return self.start(bus_master),
            _ => return None,
        };
        *register = access.merge(*register, value);
        None
    }

    fn start(&mut self, bus_master: bool) -> Option<Request> {
        if self.status & BUSY != 0 {
            return None;
        }
        if !bus_master || !(1..=COPY_LIMIT).contains(&self.length) {
            self.status = ERROR;
            return None;
        }
        self.status = BUSY;
        let address = |[low, high]: [u32; 2]| u64::from(high) << 32 | u64::from(low);
        Some(Request::Copy(Copy {
            source: address(self.source),
            destination: address(self.destination),
            length: self.length,
            vector: self.vector,
            life: self.life,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(regs: &ControlRegs, offset: u16) -> u32 {
        let mut data = [0; 4];
        regs.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(regs: &mut ControlRegs, offset: u16, value: u32) -> Vec<Request> {
        regs.write(offset, &value.to_le_bytes(), true)
    }

    fn prepared(length: u32) -> ControlRegs {
        let mut regs = ControlRegs::default();
        regs.write(0x20, &0x12_3456_7000_u64.to_le_bytes(), true);
        regs.write(0x28, &0x45_0000_0000_u64.to_le_bytes(), true);
        write(&mut regs, 0x30, length);
        write(&mut regs, 0x34, 3);
        regs
    }

    #[test]
    fn the_stub_says_who_it_is() {
        let regs = ControlRegs::default();
        let mut data = [0; 8];
        regs.read(0, &mut data);
        assert_eq!(&data, b"BNYN\x01\0\0\0");
    }

    #[test]
    fn read_only_registers_and_the_rest_of_the_page_keep_nothing() {
        let mut regs = ControlRegs::default();
        for offset in (0..PAGE).step_by(4).filter(|at| !matches!(at, 0x08 | 0x0C | 0x20..=0x34 | 0x38)) {
            let before = read(&regs, offset);
            write(&mut regs, offset, 0xFFFF_FFFF);
            assert_eq!(read(&regs, offset), before, "{offset:#x}");
        }
    }

    #[test]
    fn registers_take_single_bytes() {
        let mut regs = ControlRegs::default();
        write(&mut regs, 0x08, 0x1122_3344);
        regs.write(0x0A, &[0xAA], true);
        assert_eq!(read(&regs, 0x08), 0x11AA_3344);
    }

    #[test]
    fn a_doorbell_asks_for_its_vector_and_is_counted() {
        let mut regs = ControlRegs::default();
        assert_eq!(write(&mut regs, 0x0C, 7), [Request::Doorbell(7)]);
        assert_eq!((read(&regs, 0x14), read(&regs, 0x0C)), (1, 0));
    }

    #[test]
    fn a_copy_is_busy_until_it_is_finished() {
        let mut regs = prepared(4096);
        let copy = Copy { source: 0x12_3456_7000, destination: 0x45_0000_0000, length: 4096, vector: 3, life: 0 };
        assert_eq!(write(&mut regs, 0x38, 1), [Request::Copy(copy)]);
        assert_eq!(read(&regs, 0x38), BUSY);
        assert_eq!(write(&mut regs, 0x38, 1), [], "a second start is dropped");
        assert!(regs.finish(&copy, true));
        assert_eq!((read(&regs, 0x38), read(&regs, 0x10)), (DONE, 1));
    }

    #[test]
    fn a_failed_copy_is_an_error_and_not_counted() {
        let mut regs = prepared(1);
        let requests = write(&mut regs, 0x38, 1);
        let [Request::Copy(copy)] = requests.as_slice() else { panic!("{requests:?}") };
        assert!(regs.finish(copy, false));
        assert_eq!((read(&regs, 0x38), read(&regs, 0x10)), (ERROR, 0));
    }

    #[test]
    fn copies_of_impossible_length_are_refused() {
        for (length, refused) in [(0, true), (1, false), (COPY_LIMIT, false), (COPY_LIMIT + 1, true), (u32::MAX, true)] {
            let mut regs = prepared(length);
            assert_eq!(write(&mut regs, 0x38, 1).is_empty(), refused, "{length}");
            assert_eq!(read(&regs, 0x38), if refused { ERROR } else { BUSY });
        }
    }

    #[test]
    fn a_copy_without_bus_mastering_is_refused() {
        let mut regs = prepared(64);
        assert_eq!(regs.write(0x38, &[1], false), []);
        assert_eq!(read(&regs, 0x38), ERROR);
    }

    #[test]
    fn a_reset_cuts_off_a_running_copy() {
        let mut regs = prepared(64);
        let requests = write(&mut regs, 0x38, 1);
        let [Request::Copy(copy)] = requests.as_slice() else { panic!("{requests:?}") };
        regs.reset();
        assert!(!regs.runs(copy));
        assert!(!regs.finish(copy, true));
        assert_eq!((read(&regs, 0x38), read(&regs, 0x10), read(&regs, 0x30)), (0, 0, 0));
    }
}
