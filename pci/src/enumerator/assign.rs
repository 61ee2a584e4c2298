//! Assigns everything as firmware does that finds cleared registers: bus numbers while it goes down, then windows and
//! addresses, as tightly as they go.

use std::cmp::Reverse;

use thiserror::Error;

mod lay;

use lay::{lay, tightly};

use super::FoundBar;
use super::{Cycles, Enumerator, Found, reg};
use crate::access::halves;
use crate::address::{BusRange, Sbdf};
use crate::bar::BarKind;
use crate::topology::{PlannedRootComplex, Window, Windows};

/// Gives every bridge buses and windows and every BAR below `root` an address from the root complex's ranges, then switches
/// decoding and bus mastering on. I/O BARs below bridges stay without. Returns what was found while it went down, with the
/// values of that moment.
pub fn assign(cycles: &mut dyn Cycles, root: &PlannedRootComplex) -> Result<Vec<Found>, AssignError> {
    let mut enumerator = Enumerator { cycles, segment: root.segment };
    let mut found = Vec::new();
    let mut last = root.buses.secondary;
    let bus = enumerator.number(root.buses.secondary, None, &mut last, root.buses.subordinate, &mut found)?;
    let spaces = [
        (Space::Memory, root.mem32.iter().map(|window| (window.base.max(1), window.limit)).collect::<Vec<_>>()),
        (Space::Prefetchable, root.mem64.iter().map(|window| (window.base.max(1), window.limit)).collect()),
        (Space::Io, root.io.iter().map(|(first, last)| (u64::from(*first), u64::from(*last))).collect()),
    ];
    for (space, ranges) in spaces {
        let parts = bus.parts(space);
        let places = lay(&parts, &ranges)
            .ok_or_else(|| AssignError::Space { space: space.noun(), size: parts.iter().map(|part| part.size).sum() })?;
        enumerator.give(&parts, &places, space, 0);
    }
    enumerator.enable(&bus);
    Ok(found)
}

/// Gives the BARs of what was added on `bus`, which is the link of `port`, places in the windows of its bridge, which stay as
/// they are, and switches decoding and bus mastering on. Returns the functions with what was written.
pub fn added(cycles: &mut dyn Cycles, port: Sbdf, bus: u8, windows: Windows) -> Result<Vec<Found>, AssignError> {
    let mut enumerator = Enumerator { cycles, segment: port.segment };
    let found = enumerator.scan_bus(bus, Some(port));
    let mut devices = Bus { devices: found.iter().map(|one| Device { at: one.at, bars: wants(one), below: None }).collect() };
    let range = |window: Option<Window>| window.map(|window| (window.base, window.limit)).into_iter().collect::<Vec<_>>();
    if lay(&devices.parts(Space::Prefetchable), &range(windows.prefetchable)).is_none() {
        // Prefetchable BARs may lie in the other window.
        let all = devices.devices.iter_mut().flat_map(|device| &mut device.bars);
        all.filter(|want| want.space == Space::Prefetchable).for_each(|want| want.space = Space::Memory);
    }
    for (space, window) in [(Space::Memory, windows.memory), (Space::Prefetchable, windows.prefetchable)] {
        let parts = devices.parts(space);
        let places = lay(&parts, &range(window))
            .ok_or_else(|| AssignError::Space { space: space.noun(), size: parts.iter().map(|part| part.size).sum() })?;
        enumerator.give(&parts, &places, space, 0);
    }
    enumerator.enable(&devices);
    Ok(enumerator.scan_bus(bus, Some(port)))
}

/// Takes every number away again, from the leaves up: what [`assign`] starts from.
pub fn clear(cycles: &mut dyn Cycles, root: &PlannedRootComplex) {
    let found = super::walk(cycles, root.segment, root.buses.secondary);
    let mut enumerator = Enumerator { cycles, segment: root.segment };
    for function in found.iter().rev() {
        enumerator.write16(function.at, reg::COMMAND, 0);
        for register in 0..if function.bridge.is_some() { 2 } else { 6 } {
            enumerator.write32(function.at, reg::BARS + 4 * register, 0);
        }
        let more: Vec<u16> = wants(function).iter().map(|want| want.register).filter(|at| *at >= reg::ROM).collect();
        for register in more {
            enumerator.write32(function.at, register, 0);
        }
        if function.bridge.is_some() {
            enumerator.close(function.at);
            enumerator.write32(function.at, reg::BUSES, 0);
        }
    }
}

/// Step of a bridge's memory windows.
const STEP: u64 = 1 << 20;

/// What windows tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Space {
    Memory,
    Prefetchable,
    Io,
}

impl Space {
    const fn noun(self) -> &'static str {
        match self {
            Self::Memory => "memory below 4 GiB",
            Self::Prefetchable => "prefetchable memory",
            Self::Io => "I/O ports",
        }
    }
}

/// A bus with its functions.
struct Bus {
    devices: Vec<Device>,
}

struct Device {
    at: Sbdf,
    bars: Vec<Want>,
    below: Option<Bus>,
}

#[derive(Clone, Copy)]
struct Want {
    /// Offset of its first register.
    register: u16,
    space: Space,
    size: u64,
    align: u64,
    wide: bool,
}

/// Something that lies in a bus's part of a space.
struct Part {
    size: u64,
    align: u64,
    what: What,
}

enum What {
    Bar(Sbdf, Want),
    /// A bridge, what lies below it and at which offsets.
    Window(Sbdf, Vec<Part>, Vec<u64>),
}

impl Bus {
    /// Everything in `space` with its size and alignment, the largest alignment first.
    fn parts(&self, space: Space) -> Vec<Part> {
        let mut parts = Vec::new();
        for device in &self.devices {
            let bars = device.bars.iter().filter(|want| want.space == space);
            parts.extend(bars.map(|want| Part { size: want.size, align: want.align, what: What::Bar(device.at, *want) }));
            let Some(below) = device.below.as_ref().filter(|_| space != Space::Io) else { continue };
            let inner = below.parts(space);
            let offsets = tightly(&inner, STEP);
            let end = inner.iter().zip(&offsets).map(|(part, offset)| offset + part.size).max();
            if let Some(end) = end {
                let align = inner.iter().map(|part| part.align).fold(STEP, u64::max);
                parts.push(Part { size: end.next_multiple_of(STEP), align, what: What::Window(device.at, inner, offsets) });
            }
        }
        parts.sort_by_key(|part| (Reverse(part.align), Reverse(part.size)));
        parts
    }
}

fn wants(function: &Found) -> Vec<Want> {
    let want = |bar: &FoundBar, register: u16, count: u16| Want {
        register,
        space: match (bar.spec.kind, bar.spec.prefetchable) {
            (BarKind::Io, _) => Space::Io,
            (BarKind::Memory64, true) => Space::Prefetchable,
            _ => Space::Memory,
        },
        size: bar.spec.size * u64::from(count),
        align: bar.spec.size,
        wide: bar.spec.kind == BarKind::Memory64,
    };
    let mut wants: Vec<Want> = function.bars.iter().map(|bar| want(bar, reg::BARS + 4 * u16::from(bar.bar), 1)).collect();
    wants.extend(function.rom.iter().map(|rom| want(rom, reg::ROM, 1)));
    if let Some(vfs) = &function.virtual_functions {
        wants.extend(vfs.bars.iter().map(|bar| want(bar, vfs.offset + 0x24 + 4 * u16::from(bar.bar), vfs.total)));
    }
    wants
}

impl Enumerator<'_> {
    /// Goes down from `bus`, numbering what is below; `last` is the highest bus number given, `most` the highest there is.
    fn number(
        &mut self,
        bus: u8,
        link: Option<Sbdf>,
        last: &mut u8,
        most: u8,
        found: &mut Vec<Found>,
    ) -> Result<Bus, AssignError> {
        let mut devices = Vec::new();
        let here = self.scan_bus(bus, link);
        // Virtual functions have the numbers right behind their bus.
        let more = here.iter().filter_map(|function| Some(function.virtual_functions.as_ref()?.more_buses)).max().unwrap_or(0);
        *last = last.saturating_add(more);
        for function in here {
            let at = function.at;
            let bars = wants(&function);
            let bridge = function.bridge;
            found.push(function);
            let below = match bridge {
                None => None,
                Some(bridge) => {
                    self.close(at);
                    let secondary = last.checked_add(1).filter(|next| *next <= most).ok_or(AssignError::Buses { at, most })?;
                    *last = secondary;
                    // Everything above goes down this way while it is not known how far that is.
                    self.write_buses(at, bus, BusRange { secondary, subordinate: most });
                    let below = self.number(secondary, bridge.link.then_some(at), last, most, found)?;
                    self.write_buses(at, bus, BusRange { secondary, subordinate: *last });
                    Some(below)
                }
            };
            devices.push(Device { at, bars, below });
        }
        Ok(Bus { devices })
    }

    fn write_buses(&mut self, at: Sbdf, primary: u8, buses: BusRange) {
        self.write32(at, reg::BUSES, u32::from_le_bytes([primary, buses.secondary, buses.subordinate, 0]));
    }

    /// Writes the places of `parts`, relative to `start`.
    fn give(&mut self, parts: &[Part], places: &[u64], space: Space, start: u64) {
        for (part, place) in parts.iter().zip(places) {
            let at = start + place;
            match &part.what {
                What::Bar(function, want) => self.write_bar(*function, *want, at),
                What::Window(function, inner, offsets) => {
                    self.write_window(*function, space, at, at + (part.size - 1));
                    self.give(inner, offsets, space, at);
                }
            }
        }
    }

    fn write_bar(&mut self, function: Sbdf, want: Want, at: u64) {
        let (low, high) = halves(at);
        self.write32(function, want.register, low);
        if want.wide {
            self.write32(function, want.register + 4, high);
        }
    }

    fn write_window(&mut self, function: Sbdf, space: Space, base: u64, limit: u64) {
        let (base, base_upper) = halves(base);
        let (limit, limit_upper) = halves(limit);
        let pair = (base >> 16) & 0xFFF0 | limit & 0xFFF0_0000;
        if space == Space::Prefetchable {
            self.write32(function, reg::PREFETCHABLE, pair);
            self.write32(function, reg::PREFETCHABLE_BASE_UPPER, base_upper);
            self.write32(function, reg::PREFETCHABLE_LIMIT_UPPER, limit_upper);
        } else {
            self.write32(function, reg::MEMORY, pair);
        }
    }

    /// Closes both memory windows: base above limit.
    fn close(&mut self, at: Sbdf) {
        self.write32(at, reg::MEMORY, 0x0000_FFF0);
        self.write32(at, reg::PREFETCHABLE, 0x0000_FFF0);
        self.write32(at, reg::PREFETCHABLE_BASE_UPPER, 0xFFFF_FFFF);
        self.write32(at, reg::PREFETCHABLE_LIMIT_UPPER, 0);
    }

    /// Memory space, bus mastering and, where it has I/O BARs, I/O space.
    fn enable(&mut self, bus: &Bus) {
        for device in &bus.devices {
            let command = self.read16(device.at, reg::COMMAND);
            self.write16(device.at, reg::COMMAND, command | 7);
            if let Some(below) = &device.below {
                self.enable(below);
            }
        }
    }
}

/// A hierarchy that cannot be assigned.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AssignError {
    /// The root complex has no more buses.
    #[error("no bus number is left for the bridge {at}: the root complex ends at bus {most:#04x}")]
    Buses {
        /// Which bridge.
        at: Sbdf,
        /// Highest bus.
        most: u8,
    },
    /// The root complex's ranges do not hold everything.
    #[error("the root complex has no room for {size:#x} bytes of {space}")]
    Space {
        /// Which kind.
        space: &'static str,
        /// Bytes, without gaps for alignment.
        size: u64,
    },
}
