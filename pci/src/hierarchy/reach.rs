//! Which BARs are reachable, and where: keeps the set free of overlaps and tells what changed.
//!
//! A BAR that would cover a reachable one stays hidden until the other leaves, so guests may swap addresses in any order.

use std::collections::{BTreeMap, BTreeSet};

use crate::bar::BarIndex;
use crate::effect::Effect;
use crate::function::FunctionId;

type Key = (FunctionId, BarIndex);

/// What one endpoint decodes behind bridges that forward to it.
pub(super) struct Wanted {
    pub function: FunctionId,
    /// BAR, address, bytes.
    pub bars: Vec<(BarIndex, u64, u64)>,
    pub bus_master: bool,
}

/// The reachable set.
#[derive(Default)]
pub(super) struct Reach {
    by_address: BTreeMap<u64, (Key, u64)>,
    placed: BTreeMap<Key, u64>,
    blocked: BTreeMap<Key, (u64, u64)>,
    masters: BTreeSet<FunctionId>,
    mirrors: BTreeSet<FunctionId>,
}

impl Reach {
    pub(super) fn iter(&self) -> impl Iterator<Item = (FunctionId, BarIndex, u64, u64)> + '_ {
        self.by_address.iter().map(|(at, ((function, bar), size))| (*function, *bar, *at, *size))
    }

    /// How many entries are held of any kind.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_address.len() + self.placed.len() + self.blocked.len() + self.masters.len() + self.mirrors.len()
    }

    /// Brings the set to what the given endpoints want. First everything that leaves is hidden, then everything that
    /// fits is mapped, those that waited for room included.
    pub(super) fn settle(&mut self, wanted: &[Wanted], effects: &mut Vec<Effect>) {
        let mut candidates: BTreeMap<Key, (u64, u64)> = BTreeMap::new();
        for endpoint in wanted {
            let wants: BTreeMap<Key, (u64, u64)> =
                endpoint.bars.iter().map(|(bar, at, size)| ((endpoint.function, *bar), (*at, *size))).collect();
            for bar in 0..6 {
                let key = (endpoint.function, bar);
                self.blocked.remove(&key);
                let place = self.placed.get(&key).copied();
                match (place, wants.get(&key)) {
                    (Some(at), Some((wanted_at, _))) if at == *wanted_at => {}
                    (place, wish) => {
                        if let Some(at) = place {
                            self.placed.remove(&key);
                            self.by_address.remove(&at);
                            effects.push(Effect::Hide { function: endpoint.function, bar });
                        }
                        if let Some(wish) = wish {
                            candidates.insert(key, *wish);
                        }
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
        candidates.append(&mut self.blocked);
        for (key, (at, size)) in candidates {
            if self.is_free(at, size) {
                self.by_address.insert(at, (key, size));
                self.placed.insert(key, at);
                effects.push(Effect::Map { function: key.0, bar: key.1, at });
            } else {
                self.blocked.insert(key, (at, size));
            }
        }
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

    fn is_free(&self, at: u64, size: u64) -> bool {
        let before = self.by_address.range(..at.saturating_add(size)).next_back();
        before.is_none_or(|(start, (_, len))| start.saturating_add(*len) <= at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wants(function: u32, at: u64) -> Wanted {
        Wanted { function: FunctionId(function), bars: vec![(0, at, 0x1000)], bus_master: false }
    }

    fn settle(reach: &mut Reach, wanted: &[Wanted]) -> Vec<Effect> {
        let mut effects = Vec::new();
        reach.settle(wanted, &mut effects);
        effects
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
    fn case_a11_addresses_swapped_one_by_one_end_where_they_were_written() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000), wants(2, 0x2000), wants(3, 0x3000)]);
        for (function, at) in [(1, 0x2000), (2, 0x3000), (3, 0x1000)] {
            settle(&mut reach, &[wants(function, at)]);
        }
        assert_eq!(places(&reach), [(3, 0x1000), (1, 0x2000), (2, 0x3000)]);
    }

    #[test]
    fn the_later_of_two_overlapping_bars_is_hidden_until_the_other_leaves() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000)]);
        assert_eq!(settle(&mut reach, &[wants(2, 0x1000)]), []);
        let gone = Wanted { function: FunctionId(1), bars: Vec::new(), bus_master: false };
        let effects = settle(&mut reach, &[gone]);
        assert_eq!(effects.len(), 2);
        assert_eq!(places(&reach), [(2, 0x1000)]);
    }

    #[test]
    fn an_overlap_from_below_or_inside_is_seen() {
        let mut reach = Reach::default();
        settle(&mut reach, &[wants(1, 0x1000)]);
        let wide = Wanted { function: FunctionId(2), bars: vec![(0, 0, 0x10000)], bus_master: false };
        let inside = Wanted { function: FunctionId(3), bars: vec![(0, 0x1800, 0x10)], bus_master: false };
        assert_eq!(settle(&mut reach, &[wide, inside]), []);
    }
}
