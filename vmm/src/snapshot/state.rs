//! What is in the file `state.json`: a head that says that all of it is there, the shape of the machine, and the machine's own state.

use arch::memory_map::Range;
use devices::acpi::MemoryDevice;
use devices::stub::pages::MOST_SAVED;
use pci::state::{Reader, StateError, Writer};
use pci::topology::EndpointSpec;

use super::StateFileError;
use crate::plan::MachinePlan;
use crate::resize::Extent;

const MAGIC: [u8; 8] = *b"BNYNSNAP";
/// Of the file and everything in it.
const VERSION: u32 = 2;
/// Bytes of magic, version, length of what follows, checksum of what follows.
pub const HEAD: usize = 8 + 4 + 8 + 8;
/// What a vCPU, a function without its BARs and everything else have at most, with much room: registers, tables and queues.
const OF_VCPU: u64 = 256 << 10;
const OF_FUNCTION: u64 = 1 << 20;
const OF_REST: u64 = 4 << 20;
/// Lengths in it have 32 bits.
const LENGTHS: u64 = 4 << 30;

/// How many bytes the file can have for a machine of `vcpus` processors and as many functions as `ports` and `endpoints` are, the
/// pages of whose BARs it may keep.
pub fn most<'a>(vcpus: u8, ports: usize, endpoints: impl Iterator<Item = &'a EndpointSpec>) -> u64 {
    // Each page comes with its number.
    let kept = |bars: u64| bars.min(MOST_SAVED as u64) / 128 * 129;
    let of = |endpoint: &EndpointSpec| {
        let bars = endpoint.bars.iter().flatten().map(|bar| bar.size).fold(0, u64::saturating_add);
        let of_one = OF_FUNCTION + kept(bars);
        let virtual_functions = endpoint.sriov.as_ref().map_or(0, |sriov| {
            let bars = sriov.bars.iter().flatten().map(|bar| bar.size).fold(0, u64::saturating_add);
            u64::from(sriov.total_vfs).saturating_mul(OF_FUNCTION + kept(bars))
        });
        of_one.saturating_add(virtual_functions)
    };
    let endpoints = endpoints.map(of).fold(0, u64::saturating_add);
    let others = OF_REST + u64::from(vcpus) * OF_VCPU + OF_FUNCTION.saturating_mul(ports as u64);
    endpoints.saturating_add(others).min(LENGTHS)
}

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateFile {
    /// Stands for the plan.
    pub shape: u64,
    /// Where RAM is, in the order of the memory file.
    pub ranges: Vec<Range>,
    /// RAM of the start is in a file that the configuration names, and not in the memory file.
    pub named: bool,
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
        writer.bool(self.named);
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

    /// Reads what follows the head, of which [`Head::check`] found that it is whole.
    pub fn from_body(body: &[u8]) -> Result<Self, StateFileError> {
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
        let named = reader.bool()?;
        let mut extent = Extent::default();
        for _ in 0..reader.count()? {
            extent.cpus.insert(reader.u8()?);
        }
        for _ in 0..reader.count()? {
            extent.memory.push(MemoryDevice { base: reader.u64()?, len: reader.u64()?, node: reader.u32()? });
        }
        let machine = reader.bytes()?.to_vec();
        reader.end()?;
        Ok(Self { shape, ranges, named, extent, machine })
    }
}

/// Stands for everything that a plan says: two machines with the same are built alike. After a reset a plan is without what has
/// left ([`crate::changes::Changes::plan`]), so it is that one that counts, always.
#[must_use]
pub fn shape(plan: &MachinePlan) -> u64 {
    checksum(format!("{} {:?} {:?}", env!("CARGO_PKG_VERSION"), plan.map, plan.pci).as_bytes())
}

/// What the head says of the bytes behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// How many there are.
    pub length: u64,
    sum: u64,
}

impl Head {
    /// Reads the first bytes of a file, [`HEAD`] of them unless it is shorter.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StateFileError> {
        let rest = bytes.strip_prefix(MAGIC.as_slice()).filter(|_| bytes.len() == HEAD).ok_or(StateFileError::Magic)?;
        let mut head = Reader::new(rest, "head");
        let found = head.u32()?;
        if found != VERSION {
            return Err(StateFileError::Version { found, known: VERSION });
        }
        Ok(Self { length: head.u64()?, sum: head.u64()? })
    }

    /// Whether these are the bytes that were written.
    pub fn check(&self, length: u64, sum: Checksum) -> Result<(), StateFileError> {
        if (self.length, self.sum) == (length, sum.0) { Ok(()) } else { Err(StateFileError::Damaged) }
    }
}

/// FNV-1a (Fowler, Noll, Vo), 64 bits: for accidents, not against intent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum(u64);

impl Default for Checksum {
    /// Of no bytes.
    fn default() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }
}

impl Checksum {
    /// Of these bytes after the ones before.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3));
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Checksum::default();
    sum.add(bytes);
    sum.0
}

#[cfg(test)]
mod tests {
    use pci::bar::{BarKind, BarSpec};

    use super::*;

    fn file() -> StateFile {
        StateFile {
            shape: 7,
            ranges: vec![Range { start: 0, end: 64 << 20 }, Range { start: 4 << 30, end: 5 << 30 }],
            named: true,
            extent: Extent {
                cpus: [0, 2].into(),
                memory: vec![MemoryDevice { base: 4 << 30, len: 1 << 30, node: 0 }],
                ..Extent::default()
            },
            machine: vec![1, 2, 3],
        }
    }

    fn from_bytes(bytes: &[u8]) -> Result<StateFile, StateFileError> {
        let (head, body) = bytes.split_at(HEAD.min(bytes.len()));
        let head = Head::from_bytes(head)?;
        let mut sum = Checksum::default();
        body.chunks(7).for_each(|piece| sum.add(piece));
        head.check(body.len() as u64, sum)?;
        StateFile::from_body(body)
    }

    #[test]
    fn a_file_is_read_as_it_was_written_and_no_other_is() {
        let bytes = file().to_bytes();
        assert_eq!(from_bytes(&bytes), Ok(file()));
        for len in 0..bytes.len() {
            assert!(from_bytes(&bytes[..len]).is_err(), "{len}");
        }
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 0x10;
            assert!(from_bytes(&other).is_err(), "{at}");
        }
        let mut newer = bytes;
        newer[8] = 9;
        assert_eq!(from_bytes(&newer), Err(StateFileError::Version { found: 9, known: 2 }));
    }

    #[test]
    fn a_file_is_as_long_as_what_the_machine_has_may_make_it() {
        let bar = |size| Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size });
        let with = |size| EndpointSpec { bars: [bar(size), None, None, None, None, None], ..EndpointSpec::default() };
        let (small, large, huge) = (with(4096), with(64 << 20), with(1 << 40));
        let most_of = |endpoint| most(1, 2, [endpoint].into_iter());
        assert!(most_of(&small) < 16 << 20, "{}", most_of(&small));
        assert!((64 << 20..128 << 20).contains(&most_of(&large)), "{}", most_of(&large));
        assert!((256 << 20..512 << 20).contains(&most_of(&huge)), "{}", most_of(&huge));
        assert_eq!(most(1, 2, [&small, &small].into_iter()), 2 * most_of(&small) - most(1, 2, [].into_iter()));
    }
}
