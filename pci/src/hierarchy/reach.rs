//! Which BARs are reachable, and where: keeps the set free of overlaps and tells what changed.
//!
//! A BAR that decodes at an address where it cannot be (nothing forwards to it, or another BAR is there) stays where it was.
//! A place that is held in this way is not held against one that belongs there, so guests may swap addresses in any order, and
//! each BAR goes to its address as soon as it can.

use std::collections::{BTreeMap, BTreeSet};

use crate::bar::{BarIndex, ROM};
use crate::effect::Effect;
use crate::function::FunctionId;

type Key = (FunctionId, BarIndex);

/// Base address registers of a function, its ROM included.
const BARS: BarIndex = ROM + 1;

/// What one endpoint decodes.
pub(super) struct Wanted {
    pub function: FunctionId,
    pub bars: Vec<WantedBar>,
    pub bus_master: bool,
}

/// A BAR that decodes.
pub(super) struct WantedBar {
    pub bar: BarIndex,
    pub size: u64,
    /// Its address; `None` while it has none.
    pub at: Option<u64>,
    /// How far requests for it come.
    pub way: Way,
    /// Whether requests for [`Reach::home`] come to it.
    pub home_is_forwarded: bool,
}

/// How far requests for an address come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// To the function.
    Open,
    /// A bridge does not forward them at this moment.
    Closed,
    /// The root complex has no such address.
    Outside,
}

struct Placed {
    at: u64,
    size: u64,
    /// It is where its register says.
    rightful: bool,
}

/// A move that cannot be made, and whether that was told.
struct Refused {
    at: u64,
    outside: bool,
    told: bool,
}

/// The reachable set.
#[derive(Default)]
pub(super) struct Reach {
    by_address: BTreeMap<u64, Key>,
    placed: BTreeMap<Key, Placed>,
    /// Where each was last, since its reset.
    homes: BTreeMap<Key, u64>,
    /// Addresses that wait for others to leave.
    pending: BTreeMap<Key, (u64, u64)>,
    refused: BTreeMap<Key, Refused>,
    masters: BTreeSet<FunctionId>,
    mirrors: BTreeSet<FunctionId>,
}

impl Reach {
    pub(super) fn iter(&self) -> impl Iterator<Item = (FunctionId, BarIndex, u64, u64)> + '_ {
        self.by_address.iter().filter_map(|(at, key)| Some((key.0, key.1, *at, self.placed.get(key)?.size)))
    }

    /// How many entries are held of any kind.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let places = self.by_address.len() + self.placed.len() + self.homes.len();
        places + self.pending.len() + self.refused.len() + self.masters.len() + self.mirrors.len()
    }

    /// Where a BAR is, or was last.
    pub(super) fn home(&self, function: FunctionId, bar: BarIndex) -> Option<u64> {
        self.homes.get(&(function, bar)).copied()
    }

    /// Where each BAR is, or was last.
    pub(super) fn homes(&self) -> impl Iterator<Item = (FunctionId, BarIndex, u64)> + '_ {
        self.homes.iter().map(|((function, bar), at)| (*function, *bar, *at))
    }

    /// Sets where a BAR was last.
    pub(super) fn set_home(&mut self, function: FunctionId, bar: BarIndex, at: u64) {
        if bar < BARS {
            self.homes.insert((function, bar), at);
        }
    }

    /// The function was reset, or leaves: where its BARs were means nothing any longer.
    pub(super) fn forget(&mut self, function: FunctionId) {
        for bar in 0..BARS {
            self.homes.remove(&(function, bar));
            self.refused.remove(&(function, bar));
        }
    }

    /// Brings the set to what the given endpoints want.
    pub(super) fn settle(&mut self, wanted: &[Wanted], effects: &mut Vec<Effect>) {
        for endpoint in wanted {
            for bar in 0..BARS {
                let key = (endpoint.function, bar);
                self.pending.remove(&key);
                match endpoint.bars.iter().find(|want| want.bar == bar) {
                    Some(want) => self.want(key, want, effects),
                    None => {
                        self.hide(key, effects);
                        self.drop_untold(key);
                    }
                }
            }
            let is_master = self.masters.contains(&endpoint.function);
            if endpoint.bus_master != is_master {
                if endpoint.bus_master {
                    self.masters.insert(endpoint.function);
                } else {
                    self.masters.remove(&endpoint.function);
                }
                effects.push(Effect::BusMaster { function: endpoint.function, on: endpoint.bus_master });
            }
        }
        self.place_pending(effects);
        for endpoint in wanted {
            for want in &endpoint.bars {
                self.return_home((endpoint.function, want.bar), want, effects);
                self.note((endpoint.function, want.bar), want);
            }
        }
    }

    /// Tells of moves that cannot be made and were not told before, but for those of `busy`, whose addresses the guest is at
    /// work on.
    pub(super) fn tell(&mut self, busy: Option<FunctionId>, effects: &mut Vec<Effect>) {
        let untold = |(key, refused): &(&Key, &Refused)| !refused.told && Some(key.0) != busy;
        while let Some((key, at, outside)) = self.refused.iter().find(untold).map(|(key, no)| (*key, no.at, no.outside)) {
            let kept = self.placed.get(&key).map(|placed| placed.at);
            let size = self.pending.get(&key).map_or(1, |(_, size)| *size);
            let taken = self.others(key, at, size).next().filter(|_| !outside);
            effects.push(Effect::Refused { function: key.0, bar: key.1, at, kept, taken });
            if let Some(refused) = self.refused.get_mut(&key) {
                refused.told = true;
            }
        }
    }

    /// Hides what cannot stay, and takes note of where the BAR is to go.
    fn want(&mut self, key: Key, want: &WantedBar, effects: &mut Vec<Effect>) {
        let goes_to = want.at.filter(|_| want.way == Way::Open);
        if let Some(placed) = self.placed.get_mut(&key) {
            placed.rightful = goes_to == Some(placed.at);
            if placed.rightful {
                // A reset that programs it anew at the same address forgot it.
                self.homes.insert(key, placed.at);
                return;
            }
            if !want.home_is_forwarded {
                self.hide(key, effects);
            }
        }
        if let Some(at) = goes_to {
            self.pending.insert(key, (at, want.size));
        }
    }

    /// Moves every BAR that can go to its address, those first that were there last.
    fn place_pending(&mut self, effects: &mut Vec<Effect>) {
        let mut candidates: Vec<(Key, (u64, u64))> = self.pending.iter().map(|(key, place)| (*key, *place)).collect();
        candidates.sort_by_key(|(key, (at, _))| self.homes.get(key) != Some(at));
        // Once is enough: what is hidden on the way was in nobody's way.
        for (key, (at, size)) in candidates {
            let rightful = |other: Key| self.placed.get(&other).is_some_and(|placed| placed.rightful);
            if self.others(key, at, size).any(rightful) {
                continue;
            }
            self.pending.remove(&key);
            let others: Vec<Key> = self.others(key, at, size).collect();
            for other in others {
                self.hide(other, effects);
                self.homes.remove(&other);
            }
            self.hide(key, effects);
            self.place(key, Placed { at, size, rightful: true }, effects);
        }
    }

    /// A BAR that cannot be at its address goes back to where it was, if nobody else is there.
    fn return_home(&mut self, key: Key, want: &WantedBar, effects: &mut Vec<Effect>) {
        if let (false, true, Some(at)) = (self.placed.contains_key(&key), want.home_is_forwarded, self.home(key.0, key.1))
            && self.others(key, at, want.size).next().is_none()
        {
            self.place(key, Placed { at, size: want.size, rightful: false }, effects);
        }
    }

    /// Takes note of a move that cannot be made.
    fn note(&mut self, key: Key, want: &WantedBar) {
        let outside = want.way == Way::Outside;
        match want.at.filter(|_| outside || self.pending.contains_key(&key)) {
            Some(at) if self.refused.get(&key).is_none_or(|refused| refused.at != at) => {
                self.refused.insert(key, Refused { at, outside, told: false });
            }
            Some(_) => {}
            None => self.drop_untold(key),
        }
    }

    /// A move that came to nothing before anybody was told. One that was told stays, to be told once.
    fn drop_untold(&mut self, key: Key) {
        self.refused.retain(|refused, no| *refused != key || no.told);
    }

    fn place(&mut self, key: Key, placed: Placed, effects: &mut Vec<Effect>) {
        if placed.rightful {
            self.drop_untold(key);
        }
        self.by_address.insert(placed.at, key);
        self.homes.insert(key, placed.at);
        effects.push(Effect::Map { function: key.0, bar: key.1, at: placed.at });
        self.placed.insert(key, placed);
    }

    fn hide(&mut self, key: Key, effects: &mut Vec<Effect>) {
        if let Some(placed) = self.placed.remove(&key) {
            self.by_address.remove(&placed.at);
            effects.push(Effect::Hide { function: key.0, bar: key.1 });
        }
    }

    /// BARs other than `key` in `size` bytes from `at`, the highest first.
    fn others(&self, key: Key, at: u64, size: u64) -> impl Iterator<Item = Key> + '_ {
        let below_end = self.by_address.range(..at.saturating_add(size)).rev().map(|(start, key)| (*start, *key));
        let reaches =
            move |(start, key): &(u64, Key)| self.placed.get(key).is_some_and(|placed| start.saturating_add(placed.size) > at);
        below_end.take_while(reaches).map(|(_, other)| other).filter(move |other| *other != key)
    }

    /// Takes note of which mirrors are in place; those that leave come first.
    pub(super) fn settle_mirrors(&mut self, in_place: &[(FunctionId, bool)], effects: &mut Vec<Effect>) {
        for wanted in [false, true] {
            for (function, on) in in_place.iter().filter(|(_, on)| *on == wanted) {
                let changed = if *on { self.mirrors.insert(*function) } else { self.mirrors.remove(function) };
                if changed {
                    effects.push(Effect::Mirror { function: *function, on: *on });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 0x1000;

    fn bar(at: u64, size: u64) -> WantedBar {
        WantedBar { bar: 0, size, at: Some(at), way: Way::Open, home_is_forwarded: true }
    }

    fn wants(function: u32, at: u64) -> Wanted {
        Wanted { function: FunctionId(function), bars: vec![bar(at, SIZE)], bus_master: false }
    }

    /// A BAR at an address to which nothing is forwarded.
    fn outside(function: u32, at: u64) -> Wanted {
        let bars = vec![WantedBar { way: Way::Outside, ..bar(at, SIZE) }];
        Wanted { function: FunctionId(function), bars, bus_master: false }
    }

    fn off(function: u32) -> Wanted {
        Wanted { function: FunctionId(function), bars: Vec::new(), bus_master: false }
    }

    fn settle(reach: &mut Reach, wanted: &[Wanted]) -> Vec<Effect> {
        let mut effects = Vec::new();
        reach.settle(wanted, &mut effects);
        effects
    }

    fn told(reach: &mut Reach, busy: Option<u32>) -> Vec<(u32, u64, Option<u64>, Option<u32>)> {
        let mut effects = Vec::new();
        reach.tell(busy.map(FunctionId), &mut effects);
        let one = |effect: &Effect| match effect {
            Effect::Refused { function, at, kept, taken, .. } => (function.0, *at, *kept, taken.map(|(function, _)| function.0)),
            other => panic!("{other:?}"),
        };
        effects.iter().map(one).collect()
    }

    fn places(reach: &Reach) -> Vec<(u32, u64)> {
        reach.iter().map(|(function, _, at, _)| (function.0, at)).collect()
    }

    #[test]
    fn an_unchanged_place_has_no_effect() {
        let mut reach = Reach::default();
        assert_eq!(settle(&mut reach, &[wants(1, 0x1000)]).len(), 1);
        assert_eq!(settle(&mut reach, &[wants(1, 0x1000)]), []);
    }

    #[test]
    fn case_a11_addresses_swapped_one_by_one_in_any_order_end_where_they_were_written() {
        let moves = [(1, 0x2000), (2, 0x3000), (3, 0x1000)];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut reach = Reach::default();
            settle(&mut reach, &[wants(1, 0x1000), wants(2, 0x2000), wants(3, 0x3000)]);
            for (function, at) in order.map(|index| moves[index]) {
                settle(&mut reach, &[wants(function, at)]);
                assert!(places(&reach).len() >= 2, "at most one waits: {:x?}", places(&reach));
            }
            assert_eq!(places(&reach), [(3, 0x1000), (1, 0x2000), (2, 0x3000)], "{order:?}");
            assert_eq!(told(&mut reach, None), [], "a passing overlap is no refusal");
        }
    }

    #[test]
    fn a_bar_that_moves_onto_another_keeps_its_place_until_the_other_leaves() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000), wants(2, 0x2000)]);
        assert_eq!(settle(&mut reach, &[wants(2, 0x1000)]), []);
        assert_eq!(told(&mut reach, None), [(2, 0x1000, Some(0x2000), Some(1))]);
        let effects = settle(&mut reach, &[off(1)]);
        let (one, two) = (FunctionId(1), FunctionId(2));
        let hide = |function| Effect::Hide { function, bar: 0 };
        assert_eq!(effects, [hide(one), hide(two), Effect::Map { function: two, bar: 0, at: 0x1000 }]);
    }

    #[test]
    fn of_two_that_come_back_to_one_place_the_one_that_was_there_has_it() {
        for (mover, there) in [(1, 2), (2, 1)] {
            let mut reach = Reach::default();
            settle(&mut reach, &[wants(mover, 0x1000), wants(there, 0x2000)]);
            settle(&mut reach, &[off(1), off(2)]);
            settle(&mut reach, &[wants(mover, 0x2000), wants(there, 0x2000)]);
            assert_eq!(places(&reach), [(mover, 0x1000), (there, 0x2000)]);
        }
    }

    #[test]
    fn a_bar_without_a_place_waits_hidden_for_the_one_that_it_covers() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000)]);
        assert_eq!(settle(&mut reach, &[wants(2, 0x1000)]), []);
        assert_eq!(told(&mut reach, None), [(2, 0x1000, None, Some(1))]);
        settle(&mut reach, &[off(1)]);
        assert_eq!(places(&reach), [(2, 0x1000)]);
    }

    #[test]
    fn case_a1_a_move_to_nowhere_keeps_the_old_place_and_is_told_once() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000)]);
        assert_eq!(settle(&mut reach, &[outside(1, 0x9000)]), []);
        assert_eq!(told(&mut reach, Some(1)), [], "the guest is still at work on it");
        assert_eq!(told(&mut reach, None), [(1, 0x9000, Some(0x1000), None)]);
        // Decode off and on again, many times.
        for _ in 0..10 {
            settle(&mut reach, &[off(1)]);
            settle(&mut reach, &[outside(1, 0x9000)]);
            assert_eq!((places(&reach), told(&mut reach, None)), (vec![(1, 0x1000)], vec![]));
        }
        settle(&mut reach, &[outside(1, 0xA000)]);
        assert_eq!(told(&mut reach, None), [(1, 0xA000, Some(0x1000), None)], "another address is another move");
        settle(&mut reach, &[wants(1, 0x2000)]);
        assert_eq!(places(&reach), [(1, 0x2000)]);
        settle(&mut reach, &[outside(1, 0xA000)]);
        assert_eq!(told(&mut reach, None), [], "the same move");
    }

    #[test]
    fn a_place_that_is_kept_yields_to_one_that_belongs_there() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000)]);
        settle(&mut reach, &[outside(1, 0x9000)]);
        settle(&mut reach, &[wants(2, 0x1000)]);
        assert_eq!(places(&reach), [(2, 0x1000)]);
        settle(&mut reach, &[off(2)]);
        assert_eq!(settle(&mut reach, &[outside(1, 0x9000)]), [], "it has lost that place");
    }

    #[test]
    fn a_place_that_is_forwarded_no_longer_is_not_kept() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000)]);
        let cut_off =
            || Wanted { bars: vec![WantedBar { way: Way::Closed, home_is_forwarded: false, ..bar(0x1000, SIZE) }], ..off(1) };
        assert_eq!(settle(&mut reach, &[cut_off()]), [Effect::Hide { function: FunctionId(1), bar: 0 }]);
        assert_eq!(told(&mut reach, None), [], "a window that is closed is no refusal");
        assert_eq!(settle(&mut reach, &[wants(1, 0x1000)]).len(), 1);
    }

    #[test]
    fn a_reset_forgets_where_a_bar_was() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000)]);
        reach.forget(FunctionId(1));
        settle(&mut reach, &[off(1)]);
        assert_eq!(settle(&mut reach, &[outside(1, 0x9000)]), []);
        settle(&mut reach, &[off(1)]);
        reach.forget(FunctionId(1));
        assert_eq!(reach.len(), 0);
    }

    #[test]
    fn an_overlap_from_below_or_inside_is_seen() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000)]);
        let wide = Wanted { bars: vec![bar(0, 0x10000)], ..off(2) };
        let inside = Wanted { bars: vec![bar(0x1800, 0x10)], ..off(3) };
        assert_eq!(settle(&mut reach, &[wide, inside]), []);
        assert_eq!(told(&mut reach, None), [(2, 0, None, Some(1)), (3, 0x1800, None, Some(1))]);
    }

    #[test]
    fn a_bar_may_move_within_its_own_place() {
        let mut reach = Reach::default();
        let wide = |at| Wanted { bars: vec![bar(at, 0x4000)], ..off(1) };
        settle(&mut reach, &[wide(0x4000)]);
        settle(&mut reach, &[wide(0x6000)]);
        assert_eq!(places(&reach), [(1, 0x6000)]);
    }
}
