//! Counts what configuration writes of ports come to: how many of them a guest could have spared.

use std::ops::Add;

use crate::access::Lanes;
use crate::config::RegDef;

/// Dwords that guests wrote, by what came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteCounts {
    /// No bit of what was written can be changed, such as base addresses that the port does not have.
    pub hard_wired: u64,
    /// Only bits that a written 1 clears, and none of them went.
    pub nothing_to_clear: u64,
    /// It showed the same before.
    pub same_value: u64,
    /// It shows something else.
    pub changed: u64,
}

impl WriteCounts {
    /// One more: a write of `lanes` of a dword like `def`, after which the register shows something else or not.
    pub(super) const fn count(&mut self, def: RegDef, lanes: Lanes, changed: bool) {
        let count = match (changed, lanes.touch(def.writable), lanes.touch(def.clear_on_one)) {
            (true, ..) => &mut self.changed,
            (false, true, _) => &mut self.same_value,
            (false, false, true) => &mut self.nothing_to_clear,
            (false, false, false) => &mut self.hard_wired,
        };
        *count = count.saturating_add(1);
    }
}

impl Add for WriteCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            hard_wired: self.hard_wired.saturating_add(other.hard_wired),
            nothing_to_clear: self.nothing_to_clear.saturating_add(other.nothing_to_clear),
            same_value: self.same_value.saturating_add(other.same_value),
            changed: self.changed.saturating_add(other.changed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_counted_by_the_bits_that_it_carries() {
        let def = RegDef { reset: 0, writable: 0x0000_00FF, clear_on_one: 0xFF00_0000, sticky: 0 };
        let mut counts = WriteCounts::default();
        for (first, len, changed) in [(0, 4, true), (0, 4, false), (0, 1, false), (3, 1, false), (1, 2, false), (2, 2, false)] {
            counts.count(def, Lanes::new(first, len), changed);
        }
        assert_eq!(counts, WriteCounts { hard_wired: 1, nothing_to_clear: 2, same_value: 2, changed: 1 });
        assert_eq!(counts + counts, WriteCounts { hard_wired: 2, nothing_to_clear: 4, same_value: 4, changed: 2 });
    }
}
