//! Reads an ELF64 header, its program headers and notes: is it a kernel for this machine, is the file whole, what memory
//! does it take, where is it entered? Loading is linux-loader's business.

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
const NOTE: u32 = 4;
/// Kernels have a dozen; more is no kernel.
const PROGRAM_HEADERS: u16 = 256;
/// Notes take a few hundred bytes.
const NOTES: u64 = 64 << 10;
/// Note that holds the 32-bit entry point (Xen: public/elfnote.h, `XEN_ELFNOTE_PHYS32_ENTRY`).
const PVH_NOTE: (u32, &[u8]) = (18, b"Xen\0");

/// What a kernel's headers say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Memory that its segments take, zeroed parts included.
    pub memory: Range,
    /// The entry point of its PVH note, if it has one.
    pub pvh_entry: Option<u64>,
}

/// Whether a file that begins with `head` is an ELF file of any kind.
#[must_use]
pub fn is_elf(head: &[u8]) -> bool {
    head.starts_with(&MAGIC)
}

/// Reads the headers. Checks all that can be wrong with the file.
pub fn layout(file: &mut (impl Read + Seek)) -> Result<Layout, ElfError> {
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
    let mut pvh_entry = None;
    for index in 0..count {
        let at = table.checked_add(u64::from(index) * PROGRAM_HEADER as u64).ok_or(ElfError::Truncated {
            what: "program headers",
            needed: u64::MAX,
            len,
        })?;
        let segment = read::<PROGRAM_HEADER>(file, at, len, "program headers")?;
        let kind = u32::from_le_bytes(field(&segment, 0));
        if kind != LOAD && kind != NOTE {
            continue;
        }
        let number = |offset| u64::from_le_bytes(field(&segment, offset));
        let (offset, address, in_file, in_memory, align) = (number(8), number(24), number(32), number(40), number(48));
        let needed = offset.saturating_add(in_file);
        if needed > len {
            return Err(ElfError::Truncated { what: "segments", needed, len });
        }
        if kind == NOTE {
            let mut notes = Vec::new();
            file.seek(SeekFrom::Start(offset))?;
            file.take(in_file.min(NOTES)).read_to_end(&mut notes)?;
            pvh_entry = pvh_entry_in(&notes, if align == 8 { 8 } else { 4 })
                .map_err(|at| ElfError::Note { at: offset + at })?
                .or(pvh_entry);
            continue;
        }
        let end = address.checked_add(in_memory.max(in_file)).ok_or(ElfError::Address { address })?;
        memory =
            Some(memory.map_or(Range { start: address, end }, |range| Range {
                start: range.start.min(address),
                end: range.end.max(end),
            }));
    }
    let memory = memory.ok_or(ElfError::NoSegments { count })?;
    let entry = pvh_entry.unwrap_or_else(|| u64::from_le_bytes(field(&header, 24)));
    if !memory.contains(entry) {
        return Err(ElfError::Entry { entry, memory });
    }
    Ok(Layout { memory, pvh_entry })
}

/// The entry point in a segment of notes whose names and contents are aligned to `align`. `Err` tells where a note starts
/// that is damaged.
fn pvh_entry_in(notes: &[u8], align: usize) -> Result<Option<u64>, u64> {
    let mut at = 0;
    // Less than a header is padding.
    while let Some(note) = notes.get(at..).filter(|rest| rest.len() >= 12) {
        let damaged = u64::try_from(at).unwrap_or(u64::MAX);
        let word = |offset| note.get(offset..offset + 4).and_then(|word| word.try_into().ok()).map(u32::from_le_bytes);
        let size = |offset| word(offset).and_then(|size| usize::try_from(size).ok());
        let (Some(name_size), Some(size), Some(kind)) = (size(0), size(4), word(8)) else { return Err(damaged) };
        let name_end = 12usize.checked_add(name_size).ok_or(damaged)?;
        let start = name_end.checked_next_multiple_of(align).ok_or(damaged)?;
        let end = start.checked_add(size).ok_or(damaged)?;
        let (Some(name), Some(content)) = (note.get(12..name_end), note.get(start..end)) else { return Err(damaged) };
        if (kind, name) == PVH_NOTE {
            // Kernels store 4 or 8 bytes; the entry is below 4 GiB.
            let mut entry = [0; 8];
            let room = entry.get_mut(..content.len()).filter(|room| room.len() >= 4).ok_or(damaged)?;
            room.copy_from_slice(content);
            let entry = u64::from_le_bytes(entry);
            return u32::try_from(entry).map(|entry| Some(entry.into())).map_err(|_| damaged);
        }
        at = at.checked_add(end.checked_next_multiple_of(align).ok_or(damaged)?).ok_or(damaged)?;
    }
    Ok(None)
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
    /// A note that says something impossible.
    #[error("an ELF file with a damaged note at byte {at}, so where it is entered is unknown")]
    Note {
        /// Offset in the file.
        at: u64,
    },
    /// Nothing is loaded where it starts.
    #[error("an ELF file that is entered at {entry:#x}, but takes {memory}")]
    Entry {
        /// Entry point.
        entry: u64,
        /// Its memory.
        memory: Range,
    },
    /// The file cannot be read.
    #[error("an ELF file that cannot be read")]
    Read(#[from] io::Error),
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn note(kind: u32, name: &[u8], content: &[u8], align: usize) -> Vec<u8> {
        let sizes = [name.len(), content.len()].map(|len| u32::try_from(len).unwrap());
        let mut bytes: Vec<u8> = [sizes[0], sizes[1], kind].iter().flat_map(|word| word.to_le_bytes()).collect();
        for part in [name, content] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(align), 0);
        }
        bytes
    }

    fn entry_note(entry: u64, bytes: usize) -> Vec<u8> {
        note(18, b"Xen\0", &entry.to_le_bytes()[..bytes], 4)
    }

    /// A kernel of 4 KiB at 1 MiB that starts at its first byte, with these segments of notes and their alignments.
    fn kernel(notes: &[(Vec<u8>, u64)]) -> Cursor<Vec<u8>> {
        let count = 1 + u16::try_from(notes.len()).unwrap();
        let mut bytes = vec![0; 64];
        bytes[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
        bytes[18] = 62;
        bytes[24..32].copy_from_slice(&0x10_0000u64.to_le_bytes());
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56..58].copy_from_slice(&count.to_le_bytes());
        let mut header = |kind: u32, offset: usize, size: usize, align: u64| {
            let (offset, size) = (offset as u64, size as u64);
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0; 4]);
            bytes.extend([offset, 0, 0x10_0000, size, size.max(0x1000), align].iter().flat_map(|word| word.to_le_bytes()));
        };
        let mut at = 64 + 56 * usize::from(count);
        header(LOAD, at, 0, 4096);
        for (note, align) in notes {
            header(NOTE, at, note.len(), *align);
            at += note.len();
        }
        notes.iter().for_each(|(note, _)| bytes.extend(note));
        Cursor::new(bytes)
    }

    #[test]
    fn case_f3_the_pvh_entry_is_found_in_any_note_of_any_segment() {
        let build_id = note(3, b"GNU\0", &[7; 20], 4);
        let property = note(5, b"GNU\0", &[1; 16], 8);
        for notes in [
            vec![(entry_note(0x10_0010, 4), 4)],
            vec![(entry_note(0x10_0010, 8), 4)],
            vec![([build_id.clone(), entry_note(0x10_0010, 8), build_id.clone()].concat(), 4)],
            // The last segment does not hide what the first has.
            vec![(entry_note(0x10_0010, 4), 4), (property.clone(), 8)],
            vec![(property.clone(), 8), (build_id.clone(), 4), (entry_note(0x10_0010, 4), 4)],
            vec![([entry_note(0x10_0010, 4), vec![0; 8]].concat(), 4)],
        ] {
            assert_eq!(layout(&mut kernel(&notes)).unwrap().pvh_entry, Some(0x10_0010), "{notes:x?}");
        }
        for notes in [vec![], vec![(build_id.clone(), 4)], vec![(property, 8)], vec![(note(18, b"GNU\0", &[0; 4], 4), 4)]] {
            assert_eq!(layout(&mut kernel(&notes)).unwrap().pvh_entry, None, "{notes:x?}");
        }
    }

    #[test]
    fn case_f3_a_damaged_note_is_refused_with_its_place() {
        let build_id = note(3, b"GNU\0", &[7; 20], 4);
        let damage = |offset: usize, value: u32| {
            let mut bytes = entry_note(0x10_0010, 4);
            bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
            bytes
        };
        for bytes in [
            damage(0, u32::MAX),
            damage(0, 400),
            damage(4, u32::MAX),
            damage(4, 5),
            damage(4, 3),
            entry_note(1 << 32, 8),
            entry_note(0x10_0010, 2),
        ] {
            let mut file = kernel(&[([build_id.clone(), bytes.clone()].concat(), 4)]);
            let error = layout(&mut file).map(|layout| layout.pvh_entry).unwrap_err().to_string();
            let at = 64 + 2 * 56 + build_id.len();
            assert!(error.starts_with(&format!("an ELF file with a damaged note at byte {at},")), "{bytes:x?}: {error}");
        }
    }

    #[test]
    fn an_entry_point_outside_the_kernel_is_refused() {
        let error = layout(&mut kernel(&[(entry_note(0x10_1000, 4), 4)])).map(|layout| layout.pvh_entry).unwrap_err();
        assert_eq!(error.to_string(), "an ELF file that is entered at 0x101000, but takes 0x000000100000-0x000000100fff");
    }
}
