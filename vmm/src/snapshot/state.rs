//! What is in the file `state`: a head that says that all of it is there, the shape of the machine, and the machine's own state.

use arch::memory_map::Range;
use devices::acpi::MemoryDevice;
use pci::state::{Reader, StateError, Writer};

use super::StateFileError;
use crate::plan::MachinePlan;
use crate::resize::Extent;

const MAGIC: [u8; 8] = *b"BNYNSNAP";
/// Of the file and everything in it.
const VERSION: u32 = 1;
/// Magic, version, length of what follows, checksum of what follows.
const HEAD: usize = 8 + 4 + 8 + 8;
/// Longest file that is read. BARs of stubs make it large.
pub const MOST: u64 = 4 << 30;

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateFile {
    /// Stands for the plan.
    pub shape: u64,
    /// Where RAM is, in the order of the memory file.
    pub ranges: Vec<Range>,
    /// Processors and memory that came.
    pub extent: Extent,
    /// For [`crate::machine::Machine`].
    pub machine: Vec<u8>,
}

impl StateFile {
    /// As bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.u64(self.shape);
        writer.count(self.ranges.len());
        for range in &self.ranges {
            writer.u64(range.start);
            writer.u64(range.end);
        }
        writer.count(self.extent.cpus.len());
        self.extent.cpus.iter().for_each(|cpu| writer.u8(*cpu));
        writer.count(self.extent.memory.len());
        for device in &self.extent.memory {
            writer.u64(device.base);
            writer.u64(device.len);
            writer.u32(device.node);
        }
        writer.bytes(&self.machine);
        let body = writer.into_bytes();
        let (version, length, sum) = (VERSION.to_le_bytes(), (body.len() as u64).to_le_bytes(), checksum(&body).to_le_bytes());
        [MAGIC.as_slice(), &version, &length, &sum, &body].concat()
    }

    /// Reads the bytes of a file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StateFileError> {
        let (head, body) = bytes.split_at_checked(HEAD).ok_or(StateFileError::Magic)?;
        let mut head = head.to_vec();
        let rest = head.split_off(MAGIC.len());
        if head != MAGIC {
            return Err(StateFileError::Magic);
        }
        let mut head = Reader::new(&rest, "head");
        let found = head.u32()?;
        if found != VERSION {
            return Err(StateFileError::Version { found, known: VERSION });
        }
        if head.u64()? != body.len() as u64 || head.u64()? != checksum(body) {
            return Err(StateFileError::Damaged);
        }
        Ok(Self::read(body)?)
    }

    fn read(body: &[u8]) -> Result<Self, StateError> {
        let mut reader = Reader::new(body, "state");
        let shape = reader.u64()?;
        let mut ranges = Vec::new();
        for _ in 0..reader.count()? {
            let (start, end) = (reader.u64()?, reader.u64()?);
            if start >= end {
                return Err(reader.wrong("an end of a range of memory", end));
            }
            ranges.push(Range { start, end });
        }
        let mut extent = Extent::default();
        for _ in 0..reader.count()? {
            extent.cpus.insert(reader.u8()?);
        }
        for _ in 0..reader.count()? {
            extent.memory.push(MemoryDevice { base: reader.u64()?, len: reader.u64()?, node: reader.u32()? });
        }
        let machine = reader.bytes()?.to_vec();
        reader.end()?;
        Ok(Self { shape, ranges, extent, machine })
    }
}

/// Stands for everything that a plan says: two machines with the same are built alike. After a reset a plan is without what has
/// left ([`crate::changes::Changes::plan`]), so it is that one that counts, always.
#[must_use]
pub fn shape(plan: &MachinePlan) -> u64 {
    checksum(format!("{} {:?} {:?}", env!("CARGO_PKG_VERSION"), plan.map, plan.pci).as_bytes())
}

/// FNV-1a (Fowler, Noll, Vo), 64 bits: for accidents, not against intent.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> StateFile {
        StateFile {
            shape: 7,
            ranges: vec![Range { start: 0, end: 64 << 20 }, Range { start: 4 << 30, end: 5 << 30 }],
            extent: Extent {
                cpus: [0, 2].into(),
                memory: vec![MemoryDevice { base: 4 << 30, len: 1 << 30, node: 0 }],
                ..Extent::default()
            },
            machine: vec![1, 2, 3],
        }
    }

    #[test]
    fn a_file_is_read_as_it_was_written_and_no_other_is() {
        let bytes = file().to_bytes();
        assert_eq!(StateFile::from_bytes(&bytes), Ok(file()));
        for len in 0..bytes.len() {
            assert!(StateFile::from_bytes(&bytes[..len]).is_err(), "{len}");
        }
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 0x10;
            assert!(StateFile::from_bytes(&other).is_err(), "{at}");
        }
        let mut newer = bytes;
        newer[8] = 9;
        assert_eq!(StateFile::from_bytes(&newer), Err(StateFileError::Version { found: 9, known: 1 }));
    }
}
