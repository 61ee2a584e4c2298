//! Decides whether a device's BARs fit into the windows of its port, and where: as a guest lays them that finds the windows
//! programmed, largest first (linux: drivers/pci/setup-bus.c, `pbus_assign_resources_sorted`).

use std::cmp::Reverse;
use std::fmt;

use crate::bar::{BarKind, BarSpec, Size};
use crate::topology::{Free, Window, Windows};

/// No two BARs share a page, so that each can be mapped by itself.
const PAGE: u64 = 4096;

/// What a window lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// Whether it is the prefetchable window; else it is the memory window.
    pub prefetchable: bool,
    /// Bytes that the window would have to have, gaps for alignment included.
    pub needed: u64,
    /// Bytes that it has.
    pub there: u64,
}

/// Everything that is missing; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortfall(pub Vec<Missing>);

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, missing) in self.0.iter().enumerate() {
            let window = if missing.prefetchable { "prefetchable window" } else { "memory window" };
            let (needed, there) = (Size(missing.needed), Size(missing.there));
            let lack = Size(missing.needed.saturating_sub(missing.there));
            let comma = if index == 0 { "" } else { ", and " };
            write!(f, "{comma}its {window} lacks {lack} ({needed} needed, {there} there)")?;
        }
        Ok(())
    }
}

/// BARs of one function.
pub(super) type Specs = [Option<BarSpec>; 6];
/// Their addresses; I/O BARs have none below a port.
pub(super) type Places = [Option<u64>; 6];

/// One memory BAR: function, register, bytes, whether the prefetchable window is for it.
#[derive(Clone, Copy)]
struct Item {
    function: usize,
    bar: usize,
    size: u64,
    prefetchable: bool,
}

/// Lays the BARs of `functions` into `windows`. 64-bit prefetchable ones that find no room in their own window take the
/// memory window, as in Linux.
pub(super) fn place(windows: Windows, functions: &[Specs]) -> Result<Vec<Places>, Shortfall> {
    let items = items(functions);
    let mut memory = Free::new(windows.memory.into_iter().collect());
    let mut prefetchable = Free::new(windows.prefetchable.into_iter().collect());
    let mut places = vec![[None; 6]; functions.len()];
    for item in &items {
        let own = if item.prefetchable { prefetchable.take(item.size, item.size) } else { None };
        let Some(at) = own.or_else(|| memory.take(item.size, item.size)) else {
            return Err(shortfall(windows, &items));
        };
        if let Some(place) = places.get_mut(item.function).and_then(|bars| bars.get_mut(item.bar)) {
            *place = Some(at);
        }
    }
    Ok(places)
}

/// Memory BARs, the largest first.
fn items(functions: &[Specs]) -> Vec<Item> {
    let mut items = Vec::new();
    for (function, bars) in functions.iter().enumerate() {
        let memory = bars.iter().enumerate().filter_map(|(bar, spec)| Some((bar, spec.filter(|spec| spec.is_memory())?)));
        items.extend(memory.map(|(bar, spec)| Item {
            function,
            bar,
            size: spec.size.max(PAGE),
            prefetchable: spec.kind == BarKind::Memory64 && spec.prefetchable,
        }));
    }
    items.sort_by_key(|item| Reverse(item.size));
    items
}

/// Holds what each window should take against what it has.
fn shortfall(windows: Windows, items: &[Item]) -> Shortfall {
    let missing = [(false, windows.memory), (true, windows.prefetchable)].map(|(prefetchable, window)| {
        let base = window.map_or(0, |window| window.base);
        let there = window.map_or(0, Window::len);
        let mut open = Free::new(vec![Window { base, limit: u64::MAX }]);
        let of_window = items.iter().filter(|item| item.prefetchable == prefetchable);
        let ends = of_window.map(|item| open.take(item.size, item.size).and_then(|at| at.checked_add(item.size)));
        let needed = ends.map(|end| end.map_or(u64::MAX, |end| end - base)).max().unwrap_or(0);
        Missing { prefetchable, needed, there }
    });
    Shortfall(missing.into_iter().filter(|missing| missing.needed > missing.there).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    fn missing(windows: Windows, functions: &[Specs]) -> Vec<(bool, u64, u64)> {
        let Shortfall(missing) = place(windows, functions).unwrap_err();
        missing.iter().map(|missing| (missing.prefetchable, missing.needed / MIB, missing.there / MIB)).collect()
    }

    #[test]
    fn each_bar_goes_to_the_window_of_its_kind_with_the_largest_first() {
        let functions = [[mem32(MIB), mem64(32 * MIB), None, mem64(128 * MIB), None, None], [mem32(8 * MIB); 6]];
        let places = place(BOTH, &functions[..1]).unwrap();
        let pref = PREFETCHABLE.base;
        assert_eq!(places, [[Some(MEMORY.base), Some(pref + 128 * MIB), None, Some(pref), None, None]]);
        assert_eq!(missing(BOTH, &functions), [(false, 49, 16)]);
    }

    #[test]
    fn a_small_prefetchable_bar_takes_the_memory_window_where_its_own_is_full() {
        let functions = [[mem64(256 * MIB), None, mem64(16 * MIB), None, None, None]];
        assert_eq!(place(BOTH, &functions).unwrap()[0][2], Some(MEMORY.base));
        let low_only = Windows { prefetchable: None, ..BOTH };
        assert_eq!(missing(low_only, &functions), [(true, 272, 0)]);
    }

    #[test]
    fn case_b1_what_is_missing_is_told_for_each_window() {
        let gpu = [mem32(32 * MIB), mem64(256 * MIB), None, mem64(32 * MIB), None, None];
        let error = place(BOTH, &[gpu]).unwrap_err();
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
        assert_eq!(place(Windows::default(), &[[io, None, None, None, None, None]]), Ok(vec![[None; 6]]));
    }
}
