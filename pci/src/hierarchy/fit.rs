//! Decides whether what a device needs fits into the windows and the bus numbers of its bus, and where: as a guest lays it that finds the windows
//! programmed, largest first (linux: drivers/pci/setup-bus.c, `pbus_assign_resources_sorted`).

use std::cmp::Reverse;
use std::fmt;

use crate::address::{BusRange, Devfn};
use crate::bar::{BarKind, BarSpec, Size};
use crate::topology::{EndpointSpec, Free, Need, Resource, Window, Windows};

/// No two BARs share a page, so that each can be mapped by itself.
const PAGE: u64 = 4096;

/// Where a device finds addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// The memory window of a bridge.
    Memory,
    /// The prefetchable window of a bridge.
    Prefetchable,
    /// What a root complex has below 4 GiB.
    Low,
    /// What a root complex has above 4 GiB.
    High,
    /// The bus numbers of a bridge, where virtual functions find routing ids.
    Numbers,
}

impl Space {
    const fn noun(self) -> &'static str {
        match self {
            Self::Memory => "memory window",
            Self::Prefetchable => "prefetchable window",
            Self::Low => "memory below 4 GiB",
            Self::High => "memory above 4 GiB",
            Self::Numbers => "bus number",
        }
    }
}

/// What a bus lacks, in bytes, or as many bus numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// Where.
    pub of: Space,
    /// What the window would have to have, gaps for alignment included.
    pub needed: u64,
    /// What it has, in one piece.
    pub there: u64,
    /// What would be enough at an address that suits.
    pub enough: u64,
}

/// Everything that is missing; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortfall(pub Vec<Missing>);

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, missing) in self.0.iter().enumerate() {
            let Missing { needed, there, .. } = *missing;
            let lack = needed.saturating_sub(there);
            let comma = if index == 0 { "" } else { ", and " };
            let space = missing.of.noun();
            if missing.of == Space::Numbers {
                let plural = if lack == 1 { "" } else { "s" };
                write!(f, "{comma}it lacks {lack} {space}{plural} ({needed} needed, {there} there)")?;
            } else {
                let [lack, needed, there] = [lack, needed, there].map(Size);
                write!(f, "{comma}its {space} lacks {lack} ({needed} needed, {there} there)")?;
            }
        }
        Ok(())
    }
}

/// What one function needs.
pub(super) type Needs = Vec<(Resource, Need)>;

/// What a function needs below a port with a link.
pub(super) fn needs(spec: &EndpointSpec) -> Needs {
    spec.needs().collect()
}

/// What a function needs on a conventional bus, where it shows no virtual functions.
pub(super) fn conventional_needs(spec: &EndpointSpec) -> Needs {
    spec.needs().filter(|(what, _)| !matches!(what, Resource::VfBar(_))).collect()
}

/// Where one function's resources are; I/O BARs have no place below a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Places {
    pub(super) bars: [Option<u64>; 6],
    pub(super) rom: Option<u64>,
    pub(super) vf_bars: [Option<u64>; 6],
}

impl Places {
    fn set(&mut self, what: Resource, at: u64) {
        let place = match what {
            Resource::Bar(bar) => self.bars.get_mut(usize::from(bar)),
            Resource::Rom => Some(&mut self.rom),
            Resource::VfBar(bar) => self.vf_bars.get_mut(usize::from(bar)),
        };
        if let Some(place) = place {
            *place = Some(at);
        }
    }
}

/// What takes memory: function, resource, bytes, whether it goes to the second of two spaces first.
#[derive(Clone, Copy)]
struct Item {
    function: usize,
    what: Resource,
    size: u64,
    align: u64,
    second: bool,
}

/// Lays what `functions` need into `windows`, beside what is `taken` there. 64-bit prefetchable BARs that find no room in their
/// own window take the memory window, as in Linux.
pub(super) fn place(windows: Windows, taken: &[Window], functions: &[Needs]) -> Result<Vec<Places>, Shortfall> {
    let items = items(functions, |bar| bar.kind == BarKind::Memory64 && bar.prefetchable);
    let (memory, prefetchable) = (gaps(windows.memory, taken), gaps(windows.prefetchable, taken));
    lay([(Space::Memory, memory), (Space::Prefetchable, prefetchable)], &items, functions.len())
}

/// Holds the bus numbers that the virtual functions of these functions take below a port, with that of its link, against those
/// that it has.
pub(super) fn numbers<'s>(
    buses: BusRange,
    functions: impl IntoIterator<Item = (Devfn, &'s EndpointSpec)>,
) -> Result<(), Missing> {
    let more = functions.into_iter().filter_map(|(at, spec)| spec.sriov.as_ref().map(|sriov| sriov.more_buses(at)));
    let needed = more.max().map_or(1, |more| u64::try_from(more).unwrap_or(u64::MAX).saturating_add(1));
    let there = u64::from(buses.subordinate.saturating_sub(buses.secondary)) + 1;
    if needed <= there { Ok(()) } else { Err(Missing { of: Space::Numbers, needed, there, enough: needed }) }
}

/// As [`place`], into `windows` of a root complex: memory, of which guests keep none for prefetchable BARs.
pub(super) fn place_on_root(windows: &[Window], taken: &[Window], functions: &[Needs]) -> Result<Vec<Places>, Shortfall> {
    let items = items(functions, |bar| bar.kind == BarKind::Memory64);
    let (low, high): (Vec<Window>, Vec<Window>) = windows.iter().partition(|window| window.limit <= u64::from(u32::MAX));
    let left = |windows: Vec<Window>| windows.into_iter().flat_map(|window| gaps(Some(window), taken)).collect();
    lay([(Space::Low, left(low)), (Space::High, left(high))], &items, functions.len())
}

fn lay(spaces: [(Space, Vec<Window>); 2], items: &[Item], functions: usize) -> Result<Vec<Places>, Shortfall> {
    let [mut first, mut second] = spaces.each_ref().map(|(_, gaps)| Free::new(gaps.clone()));
    let mut places = vec![Places::default(); functions];
    for item in items {
        let own = if item.second { second.take(item.size, item.align) } else { None };
        let Some(at) = own.or_else(|| first.take(item.size, item.align)) else {
            return Err(shortfall(&spaces, items));
        };
        if let Some(places) = places.get_mut(item.function) {
            places.set(item.what, at);
        }
    }
    Ok(places)
}

/// Memory, the largest alignment first.
fn items(functions: &[Needs], second: impl Fn(&BarSpec) -> bool) -> Vec<Item> {
    let mut items = Vec::new();
    for (function, needs) in functions.iter().enumerate() {
        let memory = needs.iter().filter(|(_, need)| need.each.is_memory());
        items.extend(memory.map(|(what, need)| Item {
            function,
            what: *what,
            // What 64 bits cannot say fits nowhere.
            size: need.size().map_or(u64::MAX, |size| size.max(PAGE)),
            align: need.each.size.max(PAGE),
            second: second(&need.each),
        }));
    }
    items.sort_by_key(|item| (Reverse(item.align), Reverse(item.size)));
    items
}

/// What is left of `window`, in ascending order.
fn gaps(window: Option<Window>, taken: &[Window]) -> Vec<Window> {
    let Some(window) = window else { return Vec::new() };
    let mut taken: Vec<&Window> = taken.iter().filter(|one| one.base <= window.limit && window.base <= one.limit).collect();
    taken.sort_by_key(|one| one.base);
    let (mut gaps, mut next) = (Vec::new(), Some(window.base));
    for one in taken {
        let Some(base) = next else { break };
        if one.base > base {
            gaps.push(Window { base, limit: one.base - 1 });
        }
        next = one.limit.checked_add(1).map(|end| end.max(base)).filter(|end| *end <= window.limit);
    }
    gaps.extend(next.map(|base| Window { base, limit: window.limit }));
    gaps
}

/// Holds what each space should take against the largest piece that it has.
fn shortfall(spaces: &[(Space, Vec<Window>); 2], items: &[Item]) -> Shortfall {
    let missing = [false, true].into_iter().zip(spaces).map(|(second, (of, gaps))| {
        let largest = gaps.iter().max_by_key(|gap| gap.len());
        let (base, there) = largest.map_or((0, 0), |gap| (gap.base, gap.len()));
        let from = |base: u64| {
            let mut open = Free::new(vec![Window { base, limit: u64::MAX }]);
            let of_window = items.iter().filter(|item| item.second == second);
            let ends = of_window.map(|item| open.take(item.size, item.align).and_then(|at| at.checked_add(item.size)));
            ends.map(|end| end.map_or(u64::MAX, |end| end - base)).max().unwrap_or(0)
        };
        Missing { of: *of, needed: from(base), there, enough: from(0) }
    });
    Shortfall(missing.filter(|missing| missing.needed > missing.there).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sriov::SriovSpec;

    const MIB: u64 = 1 << 20;
    const MEMORY: Window = Window { base: 0xE000_0000, limit: 0xE000_0000 + 16 * MIB - 1 };
    const PREFETCHABLE: Window = Window { base: 1 << 40, limit: (1 << 40) + 256 * MIB - 1 };
    const BOTH: Windows = Windows { memory: Some(MEMORY), prefetchable: Some(PREFETCHABLE) };

    fn mem32(size: u64) -> Option<BarSpec> {
        Some(BarSpec { kind: BarKind::Memory32, prefetchable: false, size })
    }

    fn mem64(size: u64) -> Option<BarSpec> {
        Some(BarSpec { kind: BarKind::Memory64, prefetchable: true, size })
    }

    fn bars(functions: &[[Option<BarSpec>; 6]]) -> Vec<Needs> {
        functions.iter().map(|bars| needs(&EndpointSpec { bars: *bars, ..EndpointSpec::default() })).collect()
    }

    fn missing(windows: Windows, functions: &[[Option<BarSpec>; 6]]) -> Vec<(bool, u64, u64)> {
        let Shortfall(missing) = place(windows, &[], &bars(functions)).unwrap_err();
        missing.iter().map(|missing| (missing.of == Space::Prefetchable, missing.needed / MIB, missing.there / MIB)).collect()
    }

    #[test]
    fn each_bar_goes_to_the_window_of_its_kind_with_the_largest_first() {
        let functions = [[mem32(MIB), mem64(32 * MIB), None, mem64(128 * MIB), None, None], [mem32(8 * MIB); 6]];
        let places = place(BOTH, &[], &bars(&functions[..1])).unwrap();
        let pref = PREFETCHABLE.base;
        assert_eq!(places[0].bars, [Some(MEMORY.base), Some(pref + 128 * MIB), None, Some(pref), None, None]);
        assert_eq!(missing(BOTH, &functions), [(false, 49, 16)]);
    }

    #[test]
    fn a_small_prefetchable_bar_takes_the_memory_window_where_its_own_is_full() {
        let functions = [[mem64(256 * MIB), None, mem64(16 * MIB), None, None, None]];
        assert_eq!(place(BOTH, &[], &bars(&functions)).unwrap()[0].bars[2], Some(MEMORY.base));
        let low_only = Windows { prefetchable: None, ..BOTH };
        assert_eq!(missing(low_only, &functions), [(true, 272, 0)]);
    }

    #[test]
    fn case_b1_what_is_missing_is_told_for_each_window() {
        let gpu = [mem32(32 * MIB), mem64(256 * MIB), None, mem64(32 * MIB), None, None];
        let error = place(BOTH, &[], &bars(&[gpu])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "its memory window lacks 16M (32M needed, 16M there), and its prefetchable window lacks 32M (288M needed, 256M there)"
        );
    }

    #[test]
    fn gaps_for_alignment_count_as_needed() {
        let odd = Window { base: 0xE010_0000, limit: 0xE010_0000 + 16 * MIB - 1 };
        let windows = Windows { memory: Some(odd), prefetchable: None };
        assert_eq!(missing(windows, &[[mem32(16 * MIB), None, None, None, None, None]]), [(false, 31, 16)]);
    }

    #[test]
    fn io_bars_and_empty_functions_need_nothing() {
        let io = Some(BarSpec { kind: BarKind::Io, prefetchable: false, size: 32 });
        let places = place(Windows::default(), &[], &bars(&[[io, None, None, None, None, None]]));
        assert_eq!(places, Ok(vec![Places::default()]));
    }

    /// A ROM of 16 MiB, and 8 MiB in each of 40 virtual functions.
    fn with_more() -> EndpointSpec {
        let vfs = SriovSpec {
            total_vfs: 40,
            first_offset: 1,
            stride: 1,
            vf_device: 1,
            bars: [mem64(8 * MIB), None, None, None, None, None],
        };
        EndpointSpec { rom: Some(16 * MIB), sriov: Some(Box::new(vfs)), ..EndpointSpec::default() }
    }

    #[test]
    fn the_rom_and_the_bars_of_virtual_functions_count() {
        let (needed, conventional) = ([needs(&with_more())], [conventional_needs(&with_more())]);
        let Shortfall(missing) = place(BOTH, &[], &needed).unwrap_err();
        assert_eq!(missing, [Missing { of: Space::Prefetchable, needed: 320 * MIB, there: 256 * MIB, enough: 320 * MIB }]);
        let places = place(BOTH, &[], &conventional).unwrap();
        assert_eq!(places, [Places { rom: Some(MEMORY.base), ..Places::default() }], "a conventional bus shows none of them");
        let large = Windows { prefetchable: Some(Window { base: 1 << 40, limit: (1 << 41) - 1 }), ..BOTH };
        assert_eq!(place(large, &[], &needed).unwrap()[0].vf_bars[0], Some(1 << 40));
    }

    #[test]
    fn what_neighbours_have_is_left_to_them() {
        let at =
            |offset: u64, size: u64| Window { base: MEMORY.base + offset * MIB, limit: MEMORY.base + (offset + size) * MIB - 1 };
        let one = [mem32(4 * MIB), None, None, None, None, None];
        let taken = [at(8, 1), at(0, 4), PREFETCHABLE];
        let places = place(BOTH, &taken, &bars(&[one, one])).unwrap();
        assert_eq!(places.iter().map(|place| place.bars[0]).collect::<Vec<_>>(), [Some(at(4, 4).base), Some(at(12, 4).base)]);
        let Shortfall(missing) = place(BOTH, &taken, &bars(&[[mem32(8 * MIB), None, None, None, None, None]])).unwrap_err();
        assert_eq!(
            missing,
            [Missing { of: Space::Memory, needed: 15 * MIB, there: 7 * MIB, enough: 8 * MIB }],
            "the largest gap starts at 9 MiB"
        );
        assert_eq!(gaps(Some(MEMORY), &[at(0, 16)]), []);
        assert_eq!(gaps(Some(MEMORY), &[at(15, 1), Window { base: 0, limit: at(1, 1).limit }]), [at(2, 13)]);
    }
}
