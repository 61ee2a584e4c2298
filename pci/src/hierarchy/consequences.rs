//! What follows in the tree from a write: which BARs become reachable or stop to be, who may send requests, which mirrors are in
//! place, and what a reset takes with it.

use super::reach::{self, Way};
use super::{Hierarchy, Node, What};
use crate::bar::{BarSpec, PORTS};
use crate::effect::Effect;
use crate::function::{Changes, FunctionId, ResetKind};
use crate::sync::lock;

impl Hierarchy {
    /// Carries through the tree what a configuration write of `id` changed.
    pub(super) fn follow(&mut self, id: FunctionId, changes: Changes, effects: &mut Vec<Effect>) {
        let below = self.below(id);
        if changes.contains(Changes::RESET) {
            self.note_reset(id);
            self.reach.forget(id);
        }
        if changes.intersects(Changes::VIRTUAL_FUNCTIONS | Changes::RESET) {
            self.follow_virtual_functions(id, effects);
        }
        if changes.contains(Changes::WINDOWS) {
            self.strays.changed(id);
        }
        if changes.contains(Changes::RESET_BELOW) {
            self.reset_functions(below.get(1..).unwrap_or_default(), ResetKind::Hot, effects);
        }
        if changes.contains(Changes::SLOT) {
            self.tell(id, effects);
        }
        if !changes.difference(Changes::BUS_RANGE | Changes::SLOT | Changes::LIVE).is_empty() {
            self.settle(&below, effects);
        }
        if changes.intersects(Changes::BUS_RANGE | Changes::RESET_BELOW | Changes::LINK | Changes::LIVE) {
            self.settle_mirrors(effects);
        }
    }

    /// Resets the functions in `ids`: where their BARs were is forgotten, and virtual functions follow.
    pub(super) fn reset_functions(&mut self, ids: &[FunctionId], kind: ResetKind, effects: &mut Vec<Effect>) {
        for id in ids {
            if let Some(node) = self.nodes.get_mut(id) {
                node.reset(kind);
            }
            self.note_reset(*id);
            self.reach.forget(*id);
            self.tell(*id, effects);
        }
        self.follow_all_virtual_functions(ids, effects);
    }

    /// Passes on what the guest told by a port's slot.
    pub(super) fn tell(&mut self, id: FunctionId, effects: &mut Vec<Effect>) {
        if let Some(What::Port(port)) = self.nodes.get_mut(&id).map(|node| &mut node.what) {
            effects.extend(port.take_events().into_iter().map(|event| Effect::Slot { port: id, event }));
        }
    }

    /// Recomputes what is reachable of the endpoints in `ids` and what they may send.
    pub(super) fn settle(&mut self, ids: &[FunctionId], effects: &mut Vec<Effect>) {
        let wanted: Vec<_> = ids.iter().filter_map(|id| self.wanted(*id)).collect();
        self.reach.settle(&wanted, effects);
    }

    /// Tells which mirrors lie where configuration reads reach their functions, and show what those give. Looks at all: one
    /// bridge that moves can take another's place.
    pub(super) fn settle_mirrors(&mut self, effects: &mut Vec<Effect>) {
        // Neighbours are on one bus, so the way there is looked up once for all of them.
        let mut looked_up = None;
        let in_place = self.nodes.iter().filter(|(_, node)| node.mirrored).map(|(id, node)| {
            let bus = (node.planned_at.segment, node.planned_at.bdf.bus());
            let (_, leads_to) = match looked_up {
                Some(found @ (of, _)) if of == bus => found,
                _ => *looked_up.insert((bus, self.leads_to(bus.0, bus.1))),
            };
            let is_true = || !matches!(&node.what, What::Endpoint(shared) if lock(shared).is_live());
            (*id, leads_to == Some((node.on, 0)) && self.forwards_to(node.on, node.devfn) && is_true())
        });
        let in_place: Vec<(FunctionId, bool)> = in_place.collect();
        self.reach.settle_mirrors(&in_place, effects);
    }

    /// What an endpoint decodes, and which of it is forwarded; `None` for ports.
    pub(super) fn wanted(&self, id: FunctionId) -> Option<reach::Wanted> {
        let function = lock(self.endpoint(id)?);
        let (ports, root) = self.above(id);
        // I/O ports have addresses from PORTS on, and so may memory whatever a guest writes: neither is the other's place.
        let leads = |memory: bool, at: u64, size: u64| {
            root.is_some_and(|root| {
                root.windows.iter().any(|window| (window.base < PORTS) == memory && window.contains(at, size))
            })
        };
        let way = |memory: bool, at: u64, size: u64| match memory {
            _ if !leads(memory, at, size) => Way::Outside,
            true if ports.iter().all(|port| port.forwards(at, size)) => Way::Open,
            // Bridges have no I/O window.
            false if ports.is_empty() => Way::Open,
            _ => Way::Closed,
        };
        let bars = function.bars().decoding().map(|decoding| {
            let memory = function.bars().spec(decoding.bar).is_none_or(BarSpec::is_memory);
            let home = self.reach.home(id, decoding.bar);
            reach::WantedBar {
                bar: decoding.bar,
                size: decoding.size,
                at: decoding.at,
                way: decoding.at.map_or(Way::Closed, |at| way(memory, at, decoding.size)),
                home_is_forwarded: home.is_some_and(|home| way(memory, home, decoding.size) == Way::Open),
            }
        });
        Some(reach::Wanted {
            function: id,
            bars: bars.collect(),
            bus_master: function.bus_master() && ports.iter().all(|port| port.bus_master()),
        })
    }
}

impl Node {
    fn reset(&mut self, kind: ResetKind) {
        match &mut self.what {
            What::Port(port) => port.reset(kind),
            What::Endpoint(shared) => lock(shared).reset(kind),
        }
    }
}
