//! Notices bridge windows that a guest has opened where its root complex has no addresses, so that nothing can come through, and
//! tells of each once.

use std::collections::{BTreeMap, BTreeSet};

use super::{Hierarchy, What};
use crate::effect::Effect;
use crate::function::FunctionId;
use crate::topology::Window;

/// What was written and has not been looked at, and what was told.
#[derive(Default)]
pub(super) struct Strays {
    changed: BTreeSet<FunctionId>,
    told: BTreeMap<(FunctionId, bool), Window>,
}

impl Strays {
    /// The windows of `port` changed.
    pub(super) fn changed(&mut self, port: FunctionId) {
        self.changed.insert(port);
    }
}

impl Hierarchy {
    /// Tells of windows that lead nowhere and were not told before, but for those of `busy`, at which the guest is at work: a
    /// window is written in parts.
    pub(super) fn tell_strays(&mut self, busy: Option<FunctionId>, effects: &mut Vec<Effect>) {
        while let Some(port) = self.strays.changed.iter().copied().find(|port| Some(*port) != busy) {
            self.strays.changed.remove(&port);
            for (prefetchable, window) in self.stray_windows(port) {
                let Some(window) = window else {
                    self.strays.told.remove(&(port, prefetchable));
                    continue;
                };
                if self.strays.told.insert((port, prefetchable), window) != Some(window) {
                    effects.push(Effect::Stray { port, prefetchable, window });
                }
            }
        }
    }

    /// The memory window and the prefetchable one, each where it is open and leads nowhere.
    fn stray_windows(&self, id: FunctionId) -> [(bool, Option<Window>); 2] {
        let Some(What::Port(port)) = self.nodes.get(&id).map(|node| &node.what) else { return [(false, None), (true, None)] };
        let (_, root) = self.above(id);
        let leads_nowhere = |window: &Window| {
            // 0 is what the registers have after a reset, and no address.
            window.base != 0
                && !root.is_some_and(|root| root.windows.iter().any(|there| there.contains(window.base, window.len())))
        };
        let windows = if port.decodes() { port.windows() } else { crate::topology::Windows::default() };
        [(false, windows.memory.filter(leads_nowhere)), (true, windows.prefetchable.filter(leads_nowhere))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hierarchy::tests::Rig;

    #[test]
    fn case_a1_a_window_that_leads_nowhere_is_told_once_when_the_guest_has_gone_on() {
        let mut rig = Rig::started();
        let (up, at, other) = (rig.id("up"), rig.at("up"), rig.at("down0"));
        let strays = |effects: Vec<Effect>| -> Vec<(bool, u64)> {
            let one = |effect: Effect| match effect {
                Effect::Stray { port, prefetchable, window } => Some((port == up, prefetchable, window.base)),
                _ => None,
            };
            effects
                .into_iter()
                .filter_map(one)
                .map(|(is_up, prefetchable, base)| {
                    assert!(is_up);
                    (prefetchable, base)
                })
                .collect()
        };
        let mut write = |at, offset, value: u32| strays(rig.write(at, offset, &value.to_le_bytes()));
        // 0xF0000000 lies behind the root complex's 32-bit window, 1 << 47 behind its 64-bit one.
        assert_eq!(write(at, 0x20, 0xF000_F000), [], "the guest is at work");
        assert_eq!(write(other, 0x3C, 0), [(false, 0xF000_0000)]);
        for _ in 0..10 {
            assert_eq!(write(at, 0x20, 0x0000_FFF0), []);
            assert_eq!(write(at, 0x20, 0xF000_F000), []);
            assert_eq!(write(other, 0x3C, 0), [], "the same window");
        }
        assert_eq!(write(at, 0x20, 0xF010_F010), []);
        assert_eq!(write(at, 0x28, 0x8000), [], "nor while the other window is written");
        assert_eq!(write(at, 0x2C, 0x8000), []);
        let [memory, prefetchable] = write(other, 0x3C, 0)[..] else { panic!("both lead nowhere") };
        assert_eq!((memory, prefetchable.0), ((false, 0xF010_0000), true));
        assert!(prefetchable.1 >> 46 != 0);
    }

    #[test]
    fn a_window_that_is_closed_unset_or_switched_off_is_no_stray() {
        let mut rig = Rig::started();
        let (at, other) = (rig.at("up"), rig.at("down0"));
        for (offset, value) in [(0x20u16, 0x0000_FFF0u32), (0x20, 0), (0x04, 0), (0x20, 0xF000_F000)] {
            let mut effects = rig.write(at, offset, &value.to_le_bytes());
            effects.extend(rig.write(other, 0x3C, &[0]));
            assert!(effects.iter().all(|effect| !matches!(effect, Effect::Stray { .. })), "{offset:#x} {value:#x}");
        }
        let mut effects = rig.write(at, 0x04, &[2, 0]);
        effects.extend(rig.write(other, 0x3C, &[0]));
        assert!(effects.iter().any(|effect| matches!(effect, Effect::Stray { .. })), "it decodes");
    }
}
