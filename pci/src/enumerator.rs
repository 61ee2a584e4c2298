//! What a guest finds: an enumerator that reads and writes configuration space alone, in the order in which Linux does. It
//! shares no code with the planner, the ports or the hierarchy, so that it can be held against them.
//!
//! [`walk`] follows the numbers that are programmed; [`assign`](assign::assign) starts from cleared registers;
//! [`pciehp`] follows devices that come and go.

pub mod assign;
pub mod pciehp;

use crate::address::{Bdf, BusRange, Devfn, Sbdf};
use crate::bar::{BarIndex, BarKind, BarSpec};
use crate::topology::{Window, Windows};

/// Configuration cycles of 1, 2 or 4 bytes, aligned.
pub trait Cycles {
    /// Fills `data` from `offset`; all ones where nobody answers.
    fn read(&mut self, at: Sbdf, offset: u16, data: &mut [u8]);
    /// Writes `data` at `offset`.
    fn write(&mut self, at: Sbdf, offset: u16, data: &[u8]);
}

/// A function that answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Where.
    pub at: Sbdf,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Base class, subclass and interface, 24 bits.
    pub class: u32,
    /// Header type bit 7.
    pub multifunction: bool,
    /// Memory space enable, as it was found.
    pub memory_enabled: bool,
    /// BARs with the addresses in them, as they were found.
    pub bars: Vec<FoundBar>,
    /// The expansion ROM of an endpoint, likewise.
    pub rom: Option<FoundBar>,
    /// Virtual functions.
    pub virtual_functions: Option<FoundVfs>,
    /// For bridges.
    pub bridge: Option<FoundBridge>,
}

/// A base address register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundBar {
    /// Number of its first register.
    pub bar: BarIndex,
    /// What sizing told.
    pub spec: BarSpec,
    /// The address in it.
    pub at: u64,
}

/// An SR-IOV capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundVfs {
    /// Where the capability starts.
    pub offset: u16,
    /// TotalVFs.
    pub total: u16,
    /// Buses behind its own that they reach.
    pub more_buses: u8,
    /// What each asks for, and where the first lies.
    pub bars: Vec<FoundBar>,
}

/// A Type 1 function's registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundBridge {
    /// The bus that it thinks it is on.
    pub primary: u8,
    /// Secondary and subordinate bus.
    pub buses: BusRange,
    /// Open windows.
    pub windows: Windows,
    /// Whether the I/O base and limit registers keep anything.
    pub io_window: bool,
    /// Whether the bus below is a link: a root or downstream port.
    pub link: bool,
}

mod reg {
    pub const IDS: u16 = 0x00;
    pub const COMMAND: u16 = 0x04;
    pub const STATUS: u16 = 0x06;
    pub const CLASS: u16 = 0x08;
    pub const HEADER: u16 = 0x0E;
    pub const BARS: u16 = 0x10;
    pub const BUSES: u16 = 0x18;
    pub const IO: u16 = 0x1C;
    pub const MEMORY: u16 = 0x20;
    pub const PREFETCHABLE: u16 = 0x24;
    pub const PREFETCHABLE_BASE_UPPER: u16 = 0x28;
    pub const PREFETCHABLE_LIMIT_UPPER: u16 = 0x2C;
    pub const ROM: u16 = 0x30;
    pub const CAPABILITIES: u16 = 0x34;
    pub const EXTENDED: u16 = 0x100;
}

/// Finds every function below `root_bus` by the bus numbers that the bridges have. Sizes BARs with decode off and restores
/// what it changed, but for ARI forwarding, which stays on above devices that are found by it. Functions come in the order in
/// which they are found: a bus first, then what is below its bridges.
pub fn walk(cycles: &mut dyn Cycles, segment: u16, root_bus: u8) -> Vec<Found> {
    let mut enumerator = Enumerator { cycles, segment };
    let mut found = Vec::new();
    enumerator.walk_bus(root_bus, None, &mut found);
    found
}

struct Enumerator<'a> {
    cycles: &'a mut dyn Cycles,
    segment: u16,
}

impl Enumerator<'_> {
    /// `link` is the port whose link the bus is.
    fn walk_bus(&mut self, bus: u8, link: Option<Sbdf>, found: &mut Vec<Found>) {
        let here = self.scan_bus(bus, link);
        let bridges: Vec<(Sbdf, FoundBridge)> =
            here.iter().filter_map(|function| Some((function.at, function.bridge?))).collect();
        found.extend(here);
        for (at, bridge) in bridges {
            // Only a bus number above its own can be entered, so that no register value makes this endless.
            if bridge.buses.secondary > bus && bridge.buses.secondary <= bridge.buses.subordinate {
                self.walk_bus(bridge.buses.secondary, bridge.link.then_some(at), found);
            }
        }
    }

    /// Asks every place on a bus; below a link only device 0.
    fn scan_bus(&mut self, bus: u8, link: Option<Sbdf>) -> Vec<Found> {
        let mut found = Vec::new();
        if let Some(chain) = link.and_then(|port| self.scan_chain(bus, port)) {
            return chain;
        }
        for device in 0..if link.is_some() { 1 } else { 32 } {
            for function in 0..8 {
                let at = Sbdf { segment: self.segment, bdf: Bdf::new(bus, Devfn::new(device, function)) };
                let Some(one) = self.identify(at) else {
                    // Nobody looks further where function 0 is absent.
                    if function == 0 {
                        break;
                    }
                    continue;
                };
                let only = function == 0 && !one.multifunction;
                found.push(one);
                if only {
                    break;
                }
            }
        }
        found
    }

    /// Follows alternative routing ids from function 0 of the device below the link of `port`; `None` if it has none.
    fn scan_chain(&mut self, bus: u8, port: Sbdf) -> Option<Vec<Found>> {
        let mut found = Vec::new();
        let first = Sbdf { segment: self.segment, bdf: Bdf::new(bus, Devfn::ZERO) };
        self.extended(first, 0x0E)?;
        let control = self.capability(port, 0x10)? + 0x28;
        let held = self.read32(port, control);
        self.write32(port, control, held | 1 << 5);
        let mut number = 0;
        loop {
            let at = Sbdf { segment: self.segment, bdf: Bdf::new(bus, Devfn::from_byte(number)) };
            let one = self.identify(at)?;
            let ari = self.extended(at, 0x0E)?;
            found.push(one);
            let next = self.read8(at, ari + 5);
            // Numbers only go up, so that no register value makes this endless.
            if next <= number {
                return Some(found);
            }
            number = next;
        }
    }

    /// Offset of the function's first extended capability `id`.
    fn extended(&mut self, at: Sbdf, id: u16) -> Option<u16> {
        self.capability(at, 0x10)?;
        let mut offset = reg::EXTENDED;
        // So many fill configuration space: a longer list is a loop.
        for _ in 0..960 {
            let header = self.read32(at, offset);
            if header == 0 || header == 0xFFFF_FFFF {
                return None;
            }
            if header & 0xFFFF == id.into() {
                return Some(offset);
            }
            offset = u16::try_from(header >> 20).ok()? & 0xFFC;
            if offset < reg::EXTENDED {
                return None;
            }
        }
        None
    }

    fn rom(&mut self, at: Sbdf) -> Option<FoundBar> {
        let held = self.read32(at, reg::ROM);
        self.write32(at, reg::ROM, 0xFFFF_F800);
        let mask = self.read32(at, reg::ROM) & 0xFFFF_F800;
        self.write32(at, reg::ROM, held);
        let size = u64::from(!mask) + 1;
        (mask != 0).then(|| FoundBar { bar: 6, spec: BarSpec::rom(size), at: u64::from(held & 0xFFFF_F800) })
    }

    fn virtual_functions(&mut self, at: Sbdf) -> Option<FoundVfs> {
        let offset = self.extended(at, 0x10)?;
        let total = self.read16(at, offset + 0x0E);
        let (first, stride) = (self.read16(at, offset + 0x14), self.read16(at, offset + 0x16));
        let last = u32::from(at.bdf.requester_id()) + u32::from(first) + u32::from(stride) * u32::from(total.saturating_sub(1));
        let more = (last >> 8).saturating_sub(at.bdf.bus().into());
        let bars = self.size_registers(at, offset + 0x24, 6);
        Some(FoundVfs { offset, total, more_buses: u8::try_from(more).unwrap_or(u8::MAX), bars })
    }

    fn identify(&mut self, at: Sbdf) -> Option<Found> {
        let ids = self.read32(at, reg::IDS);
        if ids & 0xFFFF == 0xFFFF || ids == 0 {
            return None;
        }
        let [vendor_low, vendor_high, device_low, device_high] = ids.to_le_bytes();
        let header = self.read8(at, reg::HEADER);
        let bridge = header & 0x7F == 1;
        Some(Found {
            at,
            vendor: u16::from_le_bytes([vendor_low, vendor_high]),
            device: u16::from_le_bytes([device_low, device_high]),
            class: self.read32(at, reg::CLASS) >> 8,
            multifunction: header & 0x80 != 0,
            memory_enabled: self.read16(at, reg::COMMAND) & 2 != 0,
            bars: self.size_bars(at, if bridge { 2 } else { 6 }),
            rom: if bridge { None } else { self.rom(at) },
            virtual_functions: if bridge { None } else { self.virtual_functions(at) },
            bridge: bridge.then(|| self.bridge(at)),
        })
    }

    fn bridge(&mut self, at: Sbdf) -> FoundBridge {
        let [primary, secondary, subordinate, _] = self.read32(at, reg::BUSES).to_le_bytes();
        let io = self.read16(at, reg::IO);
        self.write16(at, reg::IO, 0xE0F0);
        let io_window = self.read16(at, reg::IO) != 0;
        self.write16(at, reg::IO, io);
        FoundBridge {
            primary,
            buses: BusRange { secondary, subordinate },
            windows: self.windows(at),
            io_window,
            link: matches!(self.port_type(at), Some(4 | 6)),
        }
    }

    fn windows(&mut self, at: Sbdf) -> Windows {
        let memory = self.read32(at, reg::MEMORY);
        let prefetchable = self.read32(at, reg::PREFETCHABLE);
        let mut base_upper = 0;
        let mut limit_upper = 0;
        if prefetchable & 0xF == 1 {
            base_upper = u64::from(self.read32(at, reg::PREFETCHABLE_BASE_UPPER)) << 32;
            limit_upper = u64::from(self.read32(at, reg::PREFETCHABLE_LIMIT_UPPER)) << 32;
        }
        let window = |dword: u32, base_upper: u64, limit_upper: u64| {
            let base = base_upper + u64::from(dword & 0xFFF0) * 0x1_0000;
            let limit = limit_upper + u64::from(dword >> 20) * 0x10_0000 + 0xF_FFFF;
            (base <= limit).then_some(Window { base, limit })
        };
        Windows { memory: window(memory, 0, 0), prefetchable: window(prefetchable, base_upper, limit_upper) }
    }

    /// Type of the function's PCI Express capability.
    fn port_type(&mut self, at: Sbdf) -> Option<u8> {
        let express = self.capability(at, 0x10)?;
        Some(self.read8(at, express + 2) >> 4)
    }

    /// Offset of the function's first capability `id`.
    fn capability(&mut self, at: Sbdf, id: u8) -> Option<u16> {
        if self.read16(at, reg::STATUS) & 0x10 == 0 {
            return None;
        }
        let mut pointer = self.read8(at, reg::CAPABILITIES) & 0xFC;
        // 48 capabilities fill configuration space: a longer list is a loop.
        for _ in 0..48 {
            if pointer < 0x40 {
                return None;
            }
            let offset = u16::from(pointer);
            if self.read8(at, offset) == id {
                return Some(offset);
            }
            pointer = self.read8(at, offset + 1) & 0xFC;
        }
        None
    }

    fn buses(&mut self, at: Sbdf) -> BusRange {
        let [_, secondary, subordinate, _] = self.read32(at, reg::BUSES).to_le_bytes();
        BusRange { secondary, subordinate }
    }

    fn size_bars(&mut self, at: Sbdf, registers: u16) -> Vec<FoundBar> {
        let command = self.read16(at, reg::COMMAND);
        self.write16(at, reg::COMMAND, command & !3);
        let bars = self.size_registers(at, reg::BARS, registers);
        self.write16(at, reg::COMMAND, command);
        bars
    }

    fn size_registers(&mut self, at: Sbdf, first: u16, registers: u16) -> Vec<FoundBar> {
        let mut bars = Vec::new();
        let mut register = 0;
        while register < registers {
            let offset = first + 4 * register;
            let (low, low_mask) = self.probe(at, offset);
            let io = low_mask & 1 == 1;
            let wide = !io && low_mask & 6 == 4;
            let (mut address, mut mask) = (u64::from(low), u64::from(low_mask) | 0xFFFF_FFFF_0000_0000);
            if wide {
                let (high, high_mask) = self.probe(at, offset + 4);
                address |= u64::from(high) << 32;
                mask = mask & 0xFFFF_FFFF | u64::from(high_mask) << 32;
            }
            let kind = match (io, wide) {
                (true, _) => BarKind::Io,
                (false, true) => BarKind::Memory64,
                (false, false) => BarKind::Memory32,
            };
            let flags = if io { 3 } else { 0xF };
            if low_mask != 0 {
                let spec = BarSpec { kind, prefetchable: !io && low_mask & 8 != 0, size: (!(mask & !flags)).wrapping_add(1) };
                bars.push(FoundBar { bar: register.to_le_bytes()[0], spec, at: address & !flags });
            }
            register += if wide { 2 } else { 1 };
        }
        bars
    }

    /// What a register holds, and what it keeps of all ones.
    fn probe(&mut self, at: Sbdf, offset: u16) -> (u32, u32) {
        let held = self.read32(at, offset);
        self.write32(at, offset, 0xFFFF_FFFF);
        let mask = self.read32(at, offset);
        self.write32(at, offset, held);
        (held, mask)
    }

    fn read8(&mut self, at: Sbdf, offset: u16) -> u8 {
        let mut data = [0; 1];
        self.cycles.read(at, offset, &mut data);
        data[0]
    }

    fn read16(&mut self, at: Sbdf, offset: u16) -> u16 {
        let mut data = [0; 2];
        self.cycles.read(at, offset, &mut data);
        u16::from_le_bytes(data)
    }

    fn read32(&mut self, at: Sbdf, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.cycles.read(at, offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write16(&mut self, at: Sbdf, offset: u16, value: u16) {
        self.cycles.write(at, offset, &value.to_le_bytes());
    }

    fn write32(&mut self, at: Sbdf, offset: u16, value: u32) {
        self.cycles.write(at, offset, &value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests;
