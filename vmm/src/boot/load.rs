//! Loads a kernel with its initial RAM disk, command line and tables.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use arch::memory_map::{MemoryMap, Range};
use arch::x86_64::boot_params::{self, BootParams, BootParamsError};
use arch::x86_64::bzimage::SetupHeader;
use arch::x86_64::initrd::{self, InitrdError};
use arch::x86_64::regs::{self, Entry};
use arch::x86_64::{e820, layout, pvh};
use linux_loader::loader::KernelLoader;
use linux_loader::loader::elf::Elf;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::file::open_regular;
use super::kernel::{Format, Kernel};

/// What a direct boot needs beside the kernel.
pub struct BootInputs<'a> {
    /// Where RAM is.
    pub map: &'a MemoryMap,
    /// Initial RAM disk.
    pub initramfs: Option<&'a Path>,
    /// Command line.
    pub cmdline: &'a str,
    /// RAM was used before: by the guest, until it reset the machine.
    pub used: bool,
}

/// Loads everything and returns how to enter the kernel.
pub fn load_kernel(memory: &GuestMemoryMmap, kernel: &mut Kernel, inputs: &BootInputs<'_>) -> Result<Entry, BootError> {
    let taken = kernel.memory();
    // Tables are below 1 MiB.
    if taken.start < layout::HIGH_MEMORY || !inputs.map.ram.iter().any(|ram| ram.contains_range(&taken)) {
        return Err(BootError::NoRoom { path: kernel.path.clone(), taken, ram: inputs.map.low_ram().end });
    }
    let unreadable = |source| BootError::Kernel { path: kernel.path.clone(), source };
    let memmap = e820::table(inputs.map);
    let (header, load, entry, pvh_entry) = match &kernel.format {
        Format::Elf { layout } => {
            if inputs.used {
                // What a segment has in memory beyond the file is zero (System V ABI, program loading).
                clear(memory, taken).map_err(unreadable)?;
            }
            let loaded = Elf::load(memory, None, &mut kernel.file, None)
                .map_err(|source| BootError::Loader { path: kernel.path.clone(), source })?;
            (SetupHeader::for_elf(), taken.start, loaded.kernel_load.0, layout.pvh_entry)
        }
        Format::BzImage { header, placement } => {
            let len = kernel.file.seek(SeekFrom::End(0)).map_err(unreadable)?.saturating_sub(placement.file_offset);
            kernel.file.seek(SeekFrom::Start(placement.file_offset)).map_err(unreadable)?;
            copy(memory, &mut kernel.file, placement.load, len).map_err(unreadable)?;
            (header.as_ref().clone(), placement.load, placement.entry, None)
        }
    };
    let limit = if pvh_entry.is_some() { u64::from(u32::MAX) } else { header.initrd_addr_max() };
    let initrd = inputs.initramfs.map(|path| load_initrd(memory, inputs.map, taken, path, limit)).transpose()?;
    let longest = pvh_entry.is_none().then(|| header.cmdline_max());
    put(memory, layout::CMDLINE.start, &boot_params::cmdline(inputs.cmdline, longest)?)?;
    let entry = match pvh_entry {
        Some(entry) => {
            let info = pvh::StartInfo { cmdline: layout::CMDLINE.start, rsdp: layout::RSDP, initrd, memmap: &memmap };
            put(memory, layout::PVH_START_INFO.start, &pvh::start_info(layout::PVH_START_INFO.start, &info))?;
            regs::pvh(entry, layout::PVH_START_INFO.start)
        }
        None => {
            let params =
                BootParams { header: &header, load, cmdline: layout::CMDLINE.start, initrd, rsdp: layout::RSDP, memmap: &memmap };
            put(memory, layout::ZERO_PAGE, &boot_params::zero_page(&params)?)?;
            regs::linux64(entry, layout::ZERO_PAGE)
        }
    };
    for (at, bytes) in entry.memory() {
        put(memory, at, &bytes)?;
    }
    Ok(entry)
}

/// Writes a table that belongs at `at`.
pub fn put(memory: &GuestMemoryMmap, at: u64, bytes: &[u8]) -> Result<(), BootError> {
    memory.write_slice(bytes, GuestAddress(at)).map_err(|_| BootError::Table { at, len: bytes.len() })
}

/// Whether there is a file that can be an initial RAM disk.
pub fn check_initramfs(path: &Path) -> Result<(), BootError> {
    open_initramfs(path).map(drop)
}

fn open_initramfs(path: &Path) -> Result<(File, u64), BootError> {
    match open_regular(path).map_err(|source| BootError::Initramfs { path: path.to_path_buf(), source })? {
        (_, 0) => Err(BootError::EmptyInitramfs { path: path.to_path_buf() }),
        opened => Ok(opened),
    }
}

fn load_initrd(memory: &GuestMemoryMmap, map: &MemoryMap, kernel: Range, path: &Path, limit: u64) -> Result<Range, BootError> {
    let (mut file, size) = open_initramfs(path)?;
    let unreadable = |source| BootError::Initramfs { path: path.to_path_buf(), source };
    let at = initrd::place(map, kernel, size, limit).map_err(|source| BootError::Place { path: path.to_path_buf(), source })?;
    copy(memory, &mut file, at, size).map_err(unreadable)?;
    Ok(Range { start: at, end: at + size })
}

fn copy(memory: &GuestMemoryMmap, file: &mut File, at: u64, len: u64) -> io::Result<()> {
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    memory.read_exact_volatile_from(GuestAddress(at), file, len).map_err(io::Error::other)
}

fn clear(memory: &GuestMemoryMmap, range: Range) -> io::Result<()> {
    const ZEROS: [u8; 4096] = [0; 4096];
    for at in (range.start..range.end).step_by(ZEROS.len()) {
        let len = usize::try_from(range.end - at).unwrap_or(usize::MAX);
        memory.write_slice(ZEROS.get(..len).unwrap_or(&ZEROS), GuestAddress(at)).map_err(io::Error::other)?;
    }
    Ok(())
}

/// A kernel that cannot be loaded.
#[derive(Debug, Error)]
pub enum BootError {
    /// It needs memory that is no RAM.
    #[error(
        "the kernel {} takes {taken}, which is no RAM: RAM from 1 MiB ends at {ram:#x}; raise --memory or give another --load-address",
        path.display()
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// What it needs.
        taken: Range,
        /// End of low RAM.
        ram: u64,
    },
    /// It cannot be read.
    #[error("cannot read the kernel {}", path.display())]
    Kernel {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The loader refuses it.
    #[error("cannot load the kernel {}", path.display())]
    Loader {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: linux_loader::loader::Error,
    },
    /// The initial RAM disk cannot be read.
    #[error("cannot read the initramfs {}", path.display())]
    Initramfs {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The initial RAM disk has no bytes.
    #[error("the initramfs {} is empty", path.display())]
    EmptyInitramfs {
        /// The file.
        path: PathBuf,
    },
    /// The initial RAM disk has no place.
    #[error("the initramfs {} has no place", path.display())]
    Place {
        /// The file.
        path: PathBuf,
        /// The sizes.
        #[source]
        source: InitrdError,
    },
    /// Command line or zero page.
    #[error(transparent)]
    Params(#[from] BootParamsError),
    /// RAM is missing where a table goes.
    #[error("there is no RAM for a table of {len} bytes at {at:#x}")]
    Table {
        /// Guest-physical address.
        at: u64,
        /// Bytes.
        len: usize,
    },
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use arch::memory_map::{MemoryMapRequest, SegmentBuses};

    use super::*;

    const RAM: u64 = 16 << 20;

    /// A kernel with 16 bytes of 0x90 at `address`, and zeros up to 12 KiB.
    fn kernel(address: u64) -> Kernel {
        let mut bytes = vec![0; 64 + 56];
        bytes.extend([0x90; 16]);
        bytes[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
        bytes[18] = 62;
        bytes[24..32].copy_from_slice(&address.to_le_bytes());
        bytes[32] = 64;
        bytes[54..58].copy_from_slice(&[56, 0, 1, 0]);
        bytes[64] = 1;
        for (offset, value) in [(72, 120), (88, address), (96, 16), (104, 12 << 10)] {
            bytes[offset..offset + 8].copy_from_slice(&u64::to_le_bytes(value));
        }
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&bytes).unwrap();
        Kernel::open(file.path(), None).unwrap()
    }

    fn load(memory: &GuestMemoryMmap, address: u64) -> Result<Entry, BootError> {
        let map = MemoryMap::new(&MemoryMapRequest {
            ram: RAM,
            hot_plug: 0,
            physical_address_bits: 40,
            reserved: Vec::new(),
            firmware_size: 0,
            segments: vec![SegmentBuses { segment: 0, last_bus: 0 }],
        });
        load_kernel(memory, &mut kernel(address), &BootInputs { map: &map.unwrap(), initramfs: None, cmdline: "", used: true })
    }

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), usize::try_from(RAM).unwrap())]).unwrap()
    }

    #[test]
    fn a_kernel_finds_zeros_where_the_one_before_the_reset_left_data() {
        let memory = memory();
        memory.write_slice(&[0xAA; 16 << 10], GuestAddress(2 << 20)).unwrap();
        load(&memory, 2 << 20).unwrap();
        let mut found = vec![1; 16 << 10];
        memory.read_slice(&mut found, GuestAddress(2 << 20)).unwrap();
        let expected = [[0x90; 16].as_slice(), &[0; (12 << 10) - 16], &[0xAA; 4 << 10]].concat();
        assert!(found == expected);
    }

    #[test]
    fn a_kernel_where_tables_go_is_refused() {
        for address in [0x7000, 0xF_F000] {
            let error = load(&memory(), address).unwrap_err();
            assert!(matches!(error, BootError::NoRoom { .. }), "{error}");
        }
        load(&memory(), 0x10_0000).unwrap();
    }
}
