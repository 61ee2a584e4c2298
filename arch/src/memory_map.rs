//! Decides which guest-physical addresses are RAM, ECAM, windows for BARs, interrupt controllers and firmware.
//!
//! Knows nothing about what is put into RAM; that is [`crate::x86_64::layout`].

use core::fmt;
use std::collections::VecDeque;

use pci::ecam;

/// One KiB in bytes.
pub const KIB: u64 = 1 << 10;
/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;
/// First address that does not fit 32 bits.
pub const FOUR_GIB: u64 = 1 << 32;

/// RAM below 4 GiB ends here at the latest; between here and [`ECAM_BASE`] lies the 32-bit window for BARs.
pub const LOW_RAM_END: u64 = 0x8000_0000;
/// ECAM of segment 0: 256 buses of 1 MiB at most.
pub const ECAM_BASE: u64 = 0xE000_0000;
/// Space set aside for one segment's ECAM, whatever number of buses it uses.
const ECAM_SEGMENT_SIZE: u64 = 256 * ecam::BUS_SIZE;
/// The I/O APIC's registers.
pub const IO_APIC: Range = Range { start: 0xFEC0_0000, end: 0xFEC0_1000 };
/// The local APIC's registers, and the addresses that MSIs are written to.
pub const LOCAL_APIC: Range = Range { start: 0xFEE0_0000, end: 0xFEF0_0000 };
/// One page that KVM on Intel needs for itself (`KVM_SET_IDENTITY_MAP_ADDR`).
pub const KVM_IDENTITY_MAP: u64 = 0xFEFF_C000;
/// Three pages that KVM on Intel needs for itself (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS: usize = 0xFEFF_D000;
/// Lowest address of a firmware image, which always ends at 4 GiB.
const FIRMWARE_BASE: u64 = 0xFF00_0000;
/// The smallest amount of RAM a machine can have.
const RAM_MIN: u64 = 16 * MIB;
/// RAM is a multiple of this.
pub const PAGE: u64 = 4 * KIB;
/// RAM that comes starts at a multiple of this: the largest block in which Linux takes it (linux: arch/x86/mm/init_64.c).
const HOT_PLUG_ALIGNMENT: u64 = 2 * GIB;
/// AMD's `HyperTransport` hole. DMA cannot reach it on AMD hosts, so RAM and BARs must stay out of it there.
pub const AMD_HYPERTRANSPORT: Range = Range { start: 0xFD_0000_0000, end: 0x100_0000_0000 };

/// The narrowest and widest physical address the map can be made for.
const ADDRESS_BITS: core::ops::RangeInclusive<u8> = 32..=52;

/// A half-open range of addresses, `start..end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
}

impl Range {
    /// The range of `len` bytes from `start`; it ends at `u64::MAX` if it would go beyond.
    #[must_use]
    pub fn sized(start: u64, len: u64) -> Range {
        Range { start, end: start.saturating_add(len) }
    }

    /// Length in bytes; 0 if `end` is not above `start`.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether it holds no address.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `address` lies in it.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        self.start <= address && address < self.end
    }

    /// Whether `other` lies in it as a whole.
    #[must_use]
    pub fn contains_range(&self, other: &Range) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Whether the two share an address.
    #[must_use]
    pub fn overlaps(&self, other: &Range) -> bool {
        self.start.max(other.start) < self.end.min(other.end)
    }

    /// Last address. Meaningless for an empty range.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.end.saturating_sub(1)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#014x}-{:#014x}", self.start, self.last())
    }
}

/// How many buses one PCI segment has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentBuses {
    /// Segment number.
    pub segment: u16,
    /// Its highest bus number; buses `0..=last_bus` get ECAM.
    pub last_bus: u8,
}

/// What a map is made from.
#[derive(Clone, Debug)]
pub struct MemoryMapRequest {
    /// RAM in bytes: a multiple of [`PAGE`], at least [`RAM_MIN`].
    pub ram: u64,
    /// Bytes of RAM that may come while the machine runs: a multiple of [`PAGE`].
    pub hot_plug: u64,
    /// Width of the guest's physical addresses in bits, 32 to 52.
    pub physical_address_bits: u8,
    /// Addresses that RAM and BARs must avoid, such as [`AMD_HYPERTRANSPORT`]. In any order; they may overlap.
    pub reserved: Vec<Range>,
    /// Size of the firmware image in bytes, 0 for none. The image ends at 4 GiB.
    pub firmware_size: u64,
    /// PCI segments, one entry each.
    pub segments: Vec<SegmentBuses>,
}

/// The ECAM of one segment: 1 MiB per bus, bus 0 first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ecam {
    /// Segment number.
    pub segment: u16,
    /// Highest bus number with ECAM; the lowest is 0.
    pub last_bus: u8,
    /// The addresses: exactly 1 MiB per bus.
    pub range: Range,
}

/// Where everything lies. Ranges do not overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryMap {
    /// RAM, in order of address. The first range starts at 0 and ends at [`LOW_RAM_END`] or before.
    pub ram: Vec<Range>,
    /// Where RAM may come while the machine runs, in order of address; above all RAM.
    pub hot_plug: Vec<Range>,
    /// Where 32-bit BARs may lie.
    pub mmio32: Range,
    /// Where 64-bit BARs may lie, in order of address; empty if RAM fills the address width.
    pub mmio64: Vec<Range>,
    /// ECAM, in the order of the request.
    pub ecam: Vec<Ecam>,
    /// The firmware image, if there is one.
    pub firmware: Option<Range>,
    /// The guest's physical address width in bits.
    pub physical_address_bits: u8,
}

impl MemoryMap {
    /// Lays out a machine.
    ///
    /// RAM fills 0 to [`LOW_RAM_END`] and goes on at 4 GiB, around reserved ranges. ECAM of segment 0 lies at
    /// [`ECAM_BASE`], that of other segments above RAM; 64-bit BARs take what remains of the address width.
    ///
    /// # Errors
    /// If the RAM size is unusable, or something does not fit the address width or its fixed place.
    pub fn new(request: &MemoryMapRequest) -> Result<MemoryMap, MemoryMapError> {
        check(request)?;
        let limit = 1u64 << request.physical_address_bits;
        let reserved = merged(&request.reserved);
        let (ram, ram_end) = lay_ram(request, limit, &reserved)?;
        let window = Range { start: LOW_RAM_END, end: ECAM_BASE };
        let mmio32 = pieces(window, &reserved).into_iter().max_by_key(Range::len).ok_or(MemoryMapError::NoWindow { window })?;
        let (hot_plug, free) = lay_hot_plug(request, ram_end, limit, &reserved)?;
        let (ecam, free) = lay_ecam(request, free, limit, &reserved)?;
        Ok(MemoryMap {
            ram,
            hot_plug,
            mmio32,
            mmio64: pieces(Range { start: align_up(free, GIB), end: limit }, &reserved),
            ecam,
            firmware: (request.firmware_size > 0).then(|| Range { start: FOUR_GIB - request.firmware_size, end: FOUR_GIB }),
            physical_address_bits: request.physical_address_bits,
        })
    }

    /// RAM below 4 GiB: it starts at 0.
    #[must_use]
    pub fn low_ram(&self) -> Range {
        self.ram.first().copied().unwrap_or(Range { start: 0, end: 0 })
    }

    /// RAM in bytes.
    #[must_use]
    pub fn ram_size(&self) -> u64 {
        self.ram.iter().map(Range::len).sum()
    }

    /// Reduces a segment's ECAM to buses `0..=last_bus`, once the planner knows how many there are. Asking for more
    /// buses than the map was made with changes nothing, and so does an unknown segment.
    pub fn trim_buses(&mut self, segment: u16, last_bus: u8) {
        for ecam in self.ecam.iter_mut().filter(|ecam| ecam.segment == segment) {
            ecam.last_bus = ecam.last_bus.min(last_bus);
            ecam.range.end = ecam.range.start.saturating_add(ecam_len(ecam.last_bus));
        }
    }
}

/// RAM, from 0 to [`LOW_RAM_END`] and from 4 GiB on, and its end.
fn lay_ram(request: &MemoryMapRequest, limit: u64, reserved: &[Range]) -> Result<(Vec<Range>, u64), MemoryMapError> {
    let low = Range { start: 0, end: request.ram.min(LOW_RAM_END) };
    if let Some(hole) = reserved.iter().find(|hole| hole.overlaps(&low)) {
        return Err(MemoryMapError::ReservedInRam { hole: *hole });
    }
    let (high, end) = fill(request.ram - low.len(), FOUR_GIB, reserved);
    if end > limit && request.ram > LOW_RAM_END {
        return Err(MemoryMapError::RamTooLarge {
            ram: request.ram,
            bits: request.physical_address_bits,
            most: room(LOW_RAM_END, FOUR_GIB, limit, reserved),
        });
    }
    let mut ram = vec![low];
    ram.extend(high);
    Ok((ram, end))
}

/// Where memory may come behind RAM, which ends at `ram_end`, and what is free above.
fn lay_hot_plug(
    request: &MemoryMapRequest,
    ram_end: u64,
    limit: u64,
    reserved: &[Range],
) -> Result<(Vec<Range>, u64), MemoryMapError> {
    let above = ram_end.max(FOUR_GIB);
    let first = align_up(above, HOT_PLUG_ALIGNMENT);
    let (hot_plug, end) = fill(request.hot_plug, first, reserved);
    if request.hot_plug > 0 && end > limit {
        return Err(MemoryMapError::HotPlugTooLarge {
            hot_plug: request.hot_plug,
            bits: request.physical_address_bits,
            most: room(0, first, limit, reserved),
        });
    }
    Ok((hot_plug, if request.hot_plug > 0 { end } else { above }))
}

/// ECAM of each segment, that of segments other than 0 from `free` on, and what is free above.
fn lay_ecam(
    request: &MemoryMapRequest,
    mut free: u64,
    limit: u64,
    reserved: &[Range],
) -> Result<(Vec<Ecam>, u64), MemoryMapError> {
    let mut ecam = Vec::with_capacity(request.segments.len());
    for &SegmentBuses { segment, last_bus } in &request.segments {
        let start = if segment == 0 { ECAM_BASE } else { clear_of(free, ECAM_SEGMENT_SIZE, reserved) };
        if segment != 0 {
            free = start.saturating_add(ECAM_SEGMENT_SIZE);
            if free > limit {
                let (bits, needed) = (request.physical_address_bits, bits_for(free));
                return Err(MemoryMapError::EcamDoesNotFit { segment, bits, needed });
            }
        }
        ecam.push(Ecam { segment, last_bus, range: Range::sized(start, ecam_len(last_bus)) });
    }
    Ok((ecam, free))
}

impl fmt::Display for MemoryMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows: Vec<(Range, String)> = self.ram.iter().map(|&ram| (ram, "RAM".to_owned())).collect();
        rows.extend(self.hot_plug.iter().map(|&range| (range, "RAM that may come".to_owned())));
        rows.push((self.mmio32, "32-bit BARs".to_owned()));
        rows.extend(self.mmio64.iter().map(|&window| (window, "64-bit BARs".to_owned())));
        rows.extend(
            self.ecam
                .iter()
                .map(|ecam| (ecam.range, format!("ECAM segment {:04x} buses 00-{:02x}", ecam.segment, ecam.last_bus))),
        );
        rows.push((IO_APIC, "I/O APIC".to_owned()));
        rows.push((LOCAL_APIC, "local APIC, MSI".to_owned()));
        rows.extend(self.firmware.map(|firmware| (firmware, "firmware".to_owned())));
        rows.sort();
        for (range, what) in rows {
            writeln!(f, "{range} {:>10}  {what}", Size(range.len()).to_string())?;
        }
        Ok(())
    }
}

/// Bytes, printed in the largest unit that divides them.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes % GIB == 0 => write!(f, "{} GiB", bytes / GIB),
            bytes if bytes % MIB == 0 => write!(f, "{} MiB", bytes / MIB),
            bytes if bytes % KIB == 0 => write!(f, "{} KiB", bytes / KIB),
            bytes => write!(f, "{bytes} B"),
        }
    }
}

/// Bytes as a user gives them.
struct Given(u64);

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes % (KIB * GIB) == 0 => write!(f, "{}T", bytes / (KIB * GIB)),
            bytes if bytes % GIB == 0 => write!(f, "{}G", bytes / GIB),
            bytes if bytes % MIB == 0 => write!(f, "{}M", bytes / MIB),
            bytes => write!(f, "{bytes}"),
        }
    }
}

fn check(request: &MemoryMapRequest) -> Result<(), MemoryMapError> {
    let (ram, bits) = (request.ram, request.physical_address_bits);
    if !ADDRESS_BITS.contains(&bits) {
        return Err(MemoryMapError::AddressBits { bits });
    }
    if ram < RAM_MIN {
        return Err(MemoryMapError::RamTooSmall { ram });
    }
    if ram > 1u64 << bits {
        return Err(MemoryMapError::RamTooLarge {
            ram,
            bits,
            most: room(LOW_RAM_END, FOUR_GIB, 1 << bits, &merged(&request.reserved)),
        });
    }
    if !ram.is_multiple_of(PAGE) {
        return Err(MemoryMapError::RamNotPages { ram });
    }
    if !request.hot_plug.is_multiple_of(PAGE) {
        return Err(MemoryMapError::RamNotPages { ram: request.hot_plug });
    }
    if request.firmware_size > FOUR_GIB - FIRMWARE_BASE || !request.firmware_size.is_multiple_of(PAGE) {
        return Err(MemoryMapError::FirmwareSize { size: request.firmware_size });
    }
    for (index, buses) in request.segments.iter().enumerate() {
        if request.segments.iter().take(index).any(|other| other.segment == buses.segment) {
            return Err(MemoryMapError::SegmentTwice { segment: buses.segment });
        }
    }
    Ok(())
}

/// Takes `wanted` bytes off the front of `ranges`, or all if there are fewer.
#[must_use]
pub fn take(ranges: &mut VecDeque<Range>, mut wanted: u64) -> Vec<Range> {
    let mut taken = Vec::new();
    while wanted > 0
        && let Some(range) = ranges.pop_front()
    {
        let end = range.start + range.len().min(wanted);
        wanted -= end - range.start;
        taken.push(Range { start: range.start, end });
        if end < range.end {
            ranges.push_front(Range { start: end, end: range.end });
        }
    }
    taken
}

fn ecam_len(last_bus: u8) -> u64 {
    (u64::from(last_bus) + 1) * ecam::BUS_SIZE
}

/// Sorted, without empty ranges, overlapping ones joined.
fn merged(ranges: &[Range]) -> Vec<Range> {
    let mut sorted: Vec<Range> = ranges.iter().copied().filter(|range| !range.is_empty()).collect();
    sorted.sort();
    let mut joined: Vec<Range> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// The parts of `within` that no hole covers. `holes` are sorted and disjoint.
fn pieces(within: Range, holes: &[Range]) -> Vec<Range> {
    let mut free = Vec::new();
    let mut cursor = within.start;
    for hole in holes.iter().filter(|hole| hole.overlaps(&within)) {
        free.push(Range { start: cursor, end: hole.start });
        cursor = cursor.max(hole.end);
    }
    free.push(Range { start: cursor, end: within.end });
    free.retain(|range| !range.is_empty());
    free
}

/// Places `size` bytes from `start` on, around holes. Returns the ranges and the first address after them.
fn fill(size: u64, start: u64, holes: &[Range]) -> (Vec<Range>, u64) {
    let mut left = size;
    let mut end = start;
    let mut filled = Vec::new();
    for room in pieces(Range { start, end: u64::MAX }, holes) {
        if left == 0 {
            break;
        }
        let take = left.min(room.len());
        filled.push(Range::sized(room.start, take));
        end = room.start.saturating_add(take);
        left -= take;
    }
    (filled, if left == 0 { end } else { u64::MAX })
}

/// Bytes of RAM for which there is room: `low` below 4 GiB, and what `holes` leave from `start` to `limit`, in whole GiB where
/// it is one at least.
fn room(low: u64, start: u64, limit: u64, holes: &[Range]) -> u64 {
    let room = pieces(Range { start, end: limit.max(start) }, holes).iter().map(Range::len).sum::<u64>() + low;
    if room < GIB { room / PAGE * PAGE } else { room / GIB * GIB }
}

/// The lowest address from `from` on, aligned to `size`, where `size` bytes meet no hole.
fn clear_of(from: u64, size: u64, holes: &[Range]) -> u64 {
    let mut start = align_up(from, size);
    for hole in holes {
        if hole.overlaps(&Range::sized(start, size)) {
            start = align_up(hole.end, size);
        }
    }
    start
}

/// `address` rounded up to a multiple of `to`, a power of two; the highest multiple if there is none above.
fn align_up(address: u64, to: u64) -> u64 {
    address.checked_next_multiple_of(to).unwrap_or(u64::MAX - (to - 1))
}

/// How many bits an address below `end` needs.
fn bits_for(end: u64) -> u32 {
    u64::BITS - end.saturating_sub(1).leading_zeros()
}

/// Why a machine cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryMapError {
    /// RAM is below the minimum.
    #[error("memory of {ram} bytes is too small: give at least 16M")]
    RamTooSmall {
        /// Bytes asked for.
        ram: u64,
    },
    /// RAM is not a whole number of pages.
    #[error("memory of {ram} bytes is not a multiple of 4096 bytes: round it up to {}", ram.saturating_add(PAGE - 1) / PAGE * PAGE)]
    RamNotPages {
        /// Bytes asked for.
        ram: u64,
    },
    /// RAM does not fit the address width.
    #[error("memory of {} does not fit the guest's {bits} physical address bits: give at most {}", Given(*ram), Given(*most))]
    RamTooLarge {
        /// Bytes asked for.
        ram: u64,
        /// Address bits there are.
        bits: u8,
        /// Bytes that fit.
        most: u64,
    },
    /// RAM that may come does not fit the address width.
    #[error(
        "{} of memory that may come do not fit the guest's {bits} physical address bits: give --memory hotplug at most {}",
        Given(*hot_plug),
        Given(*most)
    )]
    HotPlugTooLarge {
        /// Bytes asked for.
        hot_plug: u64,
        /// Address bits there are.
        bits: u8,
        /// Bytes that fit.
        most: u64,
    },
    /// The address width is not one the machine can have.
    #[error("a physical address width of {bits} bits is not possible: it must be 32 to 52")]
    AddressBits {
        /// Bits asked for.
        bits: u8,
    },
    /// A reserved range lies where low RAM must be.
    #[error("reserved addresses {hole} lie in RAM below 2 GiB, which cannot move")]
    ReservedInRam {
        /// The range.
        hole: Range,
    },
    /// Reserved ranges cover the whole 32-bit window.
    #[error("reserved addresses leave no room for 32-bit BARs in {window}")]
    NoWindow {
        /// The window.
        window: Range,
    },
    /// A segment's ECAM does not fit the address width.
    #[error(
        "ECAM of PCI segment {segment} needs {needed} physical address bits, the guest has {bits}: give less memory or fewer segments"
    )]
    EcamDoesNotFit {
        /// The segment.
        segment: u16,
        /// Address bits there are.
        bits: u8,
        /// Address bits it takes.
        needed: u32,
    },
    /// A segment is listed more than once.
    #[error("PCI segment {segment} is listed twice")]
    SegmentTwice {
        /// The segment.
        segment: u16,
    },
    /// The firmware image does not fit below 4 GiB or is not a whole number of pages.
    #[error("a firmware image of {size} bytes is not possible: it must be a multiple of 4096 bytes and at most 16777216")]
    FirmwareSize {
        /// Bytes of the image.
        size: u64,
    },
}

#[cfg(test)]
mod tests;
