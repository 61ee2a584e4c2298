//! Reads an ELF64 header and its program headers: is it a kernel for this machine, is the file whole, what memory does it
//! take? Loading is linux-loader's business.

use std::io::{self, Read, Seek, SeekFrom};

use arch::memory_map::Range;
use thiserror::Error;

const MAGIC: [u8; 4] = *b"\x7fELF";
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const X86_64: u16 = 62;
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const LOAD: u32 = 1;
/// Kernels have a dozen; more is no kernel.
const PROGRAM_HEADERS: u16 = 256;

/// Whether a file that begins with `head` is an ELF file of any kind.
#[must_use]
pub fn is_elf(head: &[u8]) -> bool {
    head.starts_with(&MAGIC)
}

/// The memory that the file's segments take, zeroed parts included. Checks all that can be wrong with the file.
pub fn footprint(file: &mut (impl Read + Seek)) -> Result<Range, ElfError> {
    let len = file.seek(SeekFrom::End(0))?;
    let header = read::<HEADER>(file, 0, len, "header")?;
    let [.., class, data, _, _] = field::<8>(&header, 0);
    if class != CLASS_64 {
        return Err(ElfError::Class);
    }
    let machine = u16::from_le_bytes(field(&header, 18));
    if data != LITTLE_ENDIAN || machine != X86_64 {
        let number = if data == LITTLE_ENDIAN { machine } else { machine.swap_bytes() };
        return Err(ElfError::Machine { name: machine_name(number), number });
    }
    let (table, size, count) =
        (u64::from_le_bytes(field(&header, 32)), u16::from_le_bytes(field(&header, 54)), u16::from_le_bytes(field(&header, 56)));
    if usize::from(size) != PROGRAM_HEADER || count == 0 || count > PROGRAM_HEADERS {
        return Err(ElfError::NoSegments { count });
    }
    let mut memory: Option<Range> = None;
    for index in 0..count {
        let at = table.checked_add(u64::from(index) * PROGRAM_HEADER as u64).ok_or(ElfError::Truncated {
            what: "program headers",
            needed: u64::MAX,
            len,
        })?;
        let segment = read::<PROGRAM_HEADER>(file, at, len, "program headers")?;
        if u32::from_le_bytes(field(&segment, 0)) != LOAD {
            continue;
        }
        let number = |offset| u64::from_le_bytes(field(&segment, offset));
        let (offset, address, in_file, in_memory) = (number(8), number(24), number(32), number(40));
        let needed = offset.saturating_add(in_file);
        if needed > len {
            return Err(ElfError::Truncated { what: "a segment", needed, len });
        }
        let end = address.checked_add(in_memory.max(in_file)).ok_or(ElfError::Address { address })?;
        memory =
            Some(memory.map_or(Range { start: address, end }, |range| Range {
                start: range.start.min(address),
                end: range.end.max(end),
            }));
    }
    memory.ok_or(ElfError::NoSegments { count })
}

fn read<const N: usize>(file: &mut (impl Read + Seek), at: u64, len: u64, what: &'static str) -> Result<[u8; N], ElfError> {
    let needed = at.saturating_add(N as u64);
    if needed > len {
        return Err(ElfError::Truncated { what, needed, len });
    }
    let mut bytes = [0; N];
    file.seek(SeekFrom::Start(at))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// `N` bytes at `offset` of a header that is long enough.
fn field<const N: usize>(header: &[u8], offset: usize) -> [u8; N] {
    header.get(offset..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

fn machine_name(number: u16) -> &'static str {
    match number {
        3 => "32-bit x86",
        40 => "32-bit ARM",
        183 => "64-bit ARM",
        243 => "RISC-V",
        21 => "64-bit PowerPC",
        22 => "S/390",
        _ => "another machine",
    }
}

/// A file that is ELF and no kernel for this machine.
#[derive(Debug, Error)]
pub enum ElfError {
    /// 32-bit.
    #[error("an ELF file for 32-bit machines; a 64-bit one is needed")]
    Class,
    /// Another processor.
    #[error("an ELF file for {name} (machine {number}); one for x86-64 (machine 62) is needed")]
    Machine {
        /// What it is for.
        name: &'static str,
        /// As in the file.
        number: u16,
    },
    /// Nothing to load.
    #[error("an ELF file without loadable segments ({count} program headers): an object or library, not a kernel")]
    NoSegments {
        /// Program headers.
        count: u16,
    },
    /// The end is missing.
    #[error("a truncated ELF file: {what} reach to byte {needed}, the file has {len}")]
    Truncated {
        /// What is cut.
        what: &'static str,
        /// Bytes needed.
        needed: u64,
        /// Bytes there.
        len: u64,
    },
    /// Past the address space.
    #[error("an ELF file with a segment at {address:#x} that goes past the end of the address space")]
    Address {
        /// First address.
        address: u64,
    },
    /// The file cannot be read.
    #[error("an ELF file that cannot be read")]
    Read(#[from] io::Error),
}
