//! Which place does each part of a range get? The lowest free one in turn, as most software does it; where that leaves no room,
//! in another order.
//!
//! The planner may keep more for a port than what is there takes, at a larger alignment, and so come to another order than
//! somebody who sees the devices alone. Each of these has a place inside of what was kept, so that an order exists that fits.

use super::Part;

/// Orders that are looked into, by the parts put in their places: ranges that are nearly full have few.
const STEPS: u32 = 20_000;

/// A place for each part; `None` when none was found for all. `ranges` are inclusive and ascending, the parts with the largest
/// alignment come first.
pub(super) fn lay(parts: &[Part], ranges: &[(u64, u64)]) -> Option<Vec<u64>> {
    in_turn(parts, ranges).or_else(|| in_any_order(parts, ranges))
}

/// Offsets in a window of their own, which becomes as small as can be in multiples of `step`.
pub(super) fn tightly(parts: &[Part], step: u64) -> Vec<u64> {
    let mut offsets = in_turn(parts, &[(0, u64::MAX)]).unwrap_or_default();
    loop {
        let end = parts.iter().zip(&offsets).map(|(part, offset)| offset + part.size).max().unwrap_or(0);
        let less = (end.div_ceil(step)).saturating_sub(1) * step;
        let Some(limit) = less.checked_sub(1) else { return offsets };
        match in_any_order(parts, &[(0, limit)]) {
            Some(better) => offsets = better,
            None => return offsets,
        }
    }
}

/// The lowest free place for each part in turn.
fn in_turn(parts: &[Part], ranges: &[(u64, u64)]) -> Option<Vec<u64>> {
    let mut places: Vec<u64> = Vec::with_capacity(parts.len());
    for part in parts {
        let ends = parts.iter().zip(&places).map(|(placed, at)| at + placed.size);
        let starts = ranges.iter().map(|(base, _)| *base).chain(ends).filter_map(|at| at.checked_next_multiple_of(part.align));
        let free = |at: &u64| {
            let Some(last) = at.checked_add(part.size - 1) else { return false };
            ranges.iter().any(|(base, limit)| base <= at && last <= *limit)
                && parts.iter().zip(&places).all(|(placed, other)| last < *other || *at > other + (placed.size - 1))
        };
        places.push(starts.filter(free).min()?);
    }
    Some(places)
}

/// Every layout can be pushed down until each part begins right behind another one but for its alignment. So it is enough to
/// ask which part comes next.
fn in_any_order(parts: &[Part], ranges: &[(u64, u64)]) -> Option<Vec<u64>> {
    let mut search = Search { parts, ranges, places: vec![None; parts.len()], steps: 0 };
    let size = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.size))?;
    (search.fits(0, size) && search.go_on(0, size)).then(|| search.places.into_iter().flatten().collect())
}

struct Search<'a> {
    parts: &'a [Part],
    ranges: &'a [(u64, u64)],
    places: Vec<Option<u64>>,
    steps: u32,
}

impl Search<'_> {
    /// Whether the ranges from `at` on have `size` bytes.
    fn fits(&self, at: u64, size: u64) -> bool {
        let left = self.ranges.iter().filter(|(_, limit)| *limit >= at);
        left.fold(0u64, |sum, (base, limit)| sum.saturating_add((limit - at.max(*base)).saturating_add(1))) >= size
    }

    /// The lowest place for a part from `at` on.
    fn next_place(&self, part: &Part, at: u64) -> Option<u64> {
        self.ranges.iter().find_map(|(base, limit)| {
            let place = at.max(*base).checked_next_multiple_of(part.align)?;
            (place.checked_add(part.size - 1)? <= *limit).then_some(place)
        })
    }

    /// Places all parts that have no place, `size` bytes in all, from `at` on.
    fn go_on(&mut self, at: u64, size: u64) -> bool {
        let open = self.parts.iter().zip(&self.places).enumerate().filter(|(_, (_, place))| place.is_none());
        // The smallest gap first, and of those that leave the same one the first; equal parts are the same.
        let mut next: Vec<(u64, usize)> = Vec::new();
        for (index, (part, _)) in open {
            let Some(place) = self.next_place(part, at) else { return false };
            let same = |(_, other): &(u64, usize)| {
                self.parts.get(*other).is_some_and(|other| (other.size, other.align) == (part.size, part.align))
            };
            if !next.iter().any(same) {
                next.push((place, index));
            }
        }
        if next.is_empty() {
            return true;
        }
        next.sort_unstable();
        for (place, index) in next {
            self.steps += 1;
            if self.steps > STEPS {
                return false;
            }
            let (Some(part), Some(slot)) = (self.parts.get(index), self.places.get_mut(index)) else { return false };
            *slot = Some(place);
            let (after, rest) = (place + part.size, size - part.size);
            if self.fits(after, rest) && self.go_on(after, rest) {
                return true;
            }
            if let Some(slot) = self.places.get_mut(index) {
                *slot = None;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Space, Want, What};
    use super::*;
    use crate::address::{Bdf, Devfn, Sbdf};

    const MIB: u64 = 1 << 20;

    fn parts(wanted: &[(u64, u64)]) -> Vec<Part> {
        let at = Sbdf { segment: 0, bdf: Bdf::new(0, Devfn::ZERO) };
        let part = |(size, align): &(u64, u64)| {
            let (size, align) = (size * MIB, align * MIB);
            let want = Want { register: 0x10, space: Space::Memory, size, align, wide: false };
            Part { size, align, what: What::Bar(at, want) }
        };
        wanted.iter().map(part).collect()
    }

    /// Each part at its alignment, in a range, over no other one.
    fn assert_laid(parts: &[Part], places: &[u64], ranges: &[(u64, u64)]) {
        assert_eq!(parts.len(), places.len());
        let mut spans: Vec<(u64, u64)> = Vec::new();
        for (part, at) in parts.iter().zip(places) {
            let last = at + (part.size - 1);
            assert_eq!(at % part.align, 0);
            assert!(ranges.iter().any(|(base, limit)| base <= at && last <= *limit), "{at:#x}");
            assert!(spans.iter().all(|(base, limit)| last < *base || at > limit), "{at:#x}");
            spans.push((*at, last));
        }
    }

    #[test]
    fn what_a_hot_plug_port_keeps_makes_no_order_that_others_cannot_find() {
        // The second window is 5 MiB of BARs of 2 MiB, in a port that keeps 5 MiB at 4 MiB.
        let wanted = parts(&[(5, 4), (5, 2), (2, 2)]);
        let range = [(0x8030_0000, 0x810F_FFFF)];
        assert_eq!(in_turn(&wanted, &range), None);
        assert_laid(&wanted, &lay(&wanted, &range).unwrap(), &range);
        let wanted = parts(&[(33, 16), (17, 8), (1, 1)]);
        let range = [(0x8010_0000, 0x840F_FFFF)];
        assert_eq!(in_turn(&wanted, &range), None);
        assert_laid(&wanted, &lay(&wanted, &range).unwrap(), &range);
    }

    #[test]
    fn several_ranges_are_filled_to_the_last_byte_and_no_more_is_found() {
        let ranges = [(MIB, 4 * MIB - 1), (8 * MIB, 12 * MIB - 1)];
        let full = parts(&[(4, 4), (1, 1), (1, 1), (1, 1)]);
        assert_laid(&full, &lay(&full, &ranges).unwrap(), &ranges);
        assert_eq!(lay(&parts(&[(4, 4), (2, 2), (1, 1), (1, 1)]), &ranges), None);
        assert_eq!(lay(&parts(&[(4, 4), (3, 2)]), &ranges), None, "there is room, but at no such multiple");
        assert_eq!(lay(&parts(&[(3, 2), (2, 2), (2, 2)]), &ranges), None);
        assert_eq!(lay(&[], &[]), Some(Vec::new()));
    }

    #[test]
    fn a_window_is_as_small_as_another_order_makes_it() {
        let wanted = parts(&[(5, 4), (5, 2), (2, 2)]);
        let size = |places: Vec<u64>| wanted.iter().zip(places).map(|(part, at)| at + part.size).max().unwrap() / MIB;
        assert_eq!(size(in_turn(&wanted, &[(0, u64::MAX)]).unwrap()), 14);
        assert_eq!(size(tightly(&wanted, MIB)), 13);
    }
}
