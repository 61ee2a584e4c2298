//! Lets the virtual functions of a physical function come and go as its registers say (PCIe 6.0 9.2.1): each is a function of
//! its own on the same bus, or on one behind it that no bridge leads to.

use super::{Hierarchy, Node, What};
use crate::address::Devfn;
use crate::effect::Effect;
use crate::function::{FunctionId, Programming, Shared};
use crate::sync::lock;
use crate::topology::{Name, Parent};

/// Ids below this one are for virtual functions too: a guest that enables them over and over leaves the others to devices.
const LAST_ID: u32 = u32::MAX / 2;

/// A function that came by a register.
pub struct Appeared {
    /// Which.
    pub id: FunctionId,
    /// Its physical function's name and its number.
    pub name: Name,
    /// The function.
    pub function: Shared,
}

impl Hierarchy {
    /// Functions that came since the last call: the machine must know of them before it carries out effects.
    pub fn take_appeared(&mut self) -> Vec<Appeared> {
        std::mem::take(&mut self.appeared)
    }

    /// Functions that went since the last call: the machine forgets them when it has carried out all effects.
    pub fn take_vanished(&mut self) -> Vec<FunctionId> {
        std::mem::take(&mut self.vanished)
    }

    /// Brings the virtual functions of `id` to what its registers say.
    pub(super) fn follow_virtual_functions(&mut self, id: FunctionId, effects: &mut Vec<Effect>) {
        let Some(physical) = self.endpoint(id).map(Shared::clone) else { return };
        let Some(enabled) = lock(&physical).virtual_functions() else { return };
        let there = self.virtual_functions.get(&id).map_or(0, Vec::len);
        if there != usize::from(enabled.count) {
            self.remove_virtual_functions(id, effects);
            let Some(node) = self.nodes.get(&id) else { return };
            let (on, at, segment, name) = (node.on, node.devfn, node.planned_at, node.name.clone());
            let ids = enabled.spec.routing_ids(at);
            let mut made = Vec::new();
            for (index, routing_id) in (0..enabled.count).zip(ids) {
                let [further, devfn] = match u16::try_from(routing_id) {
                    Ok(routing_id) => routing_id.to_be_bytes(),
                    Err(_) => break,
                };
                if self.next >= LAST_ID {
                    break;
                }
                let Some(function) = lock(&physical).make_virtual(index) else { break };
                let (id, name) = (self.next_id(), Name(format!("{name}-vf{index}")));
                self.appeared.push(Appeared { id, name: name.clone(), function: Shared::clone(&function) });
                let node = Node {
                    name,
                    on,
                    devfn: Devfn::from_byte(devfn),
                    further,
                    is_virtual: true,
                    planned_at: segment,
                    mirrored: false,
                    programming: Programming::default(),
                    what: What::Endpoint(function),
                    children: Vec::new(),
                };
                self.nodes.insert(id, node);
                made.push(id);
            }
            if let Some(children) = self.children_mut(on) {
                children.extend(&made);
            }
            if !made.is_empty() {
                self.virtual_functions.insert(id, made);
            }
        }
        let functions = self.virtual_functions.get(&id).cloned().unwrap_or_default();
        for (index, function) in (0..).zip(&functions) {
            let bars = enabled.bars_of(index);
            let programming = Programming { bars, memory: bars.iter().any(Option::is_some), ..Programming::default() };
            if let Some(function) = self.endpoint(*function) {
                lock(function).program(&programming);
            }
        }
        self.settle(&functions, effects);
    }

    /// As [`Hierarchy::follow_virtual_functions`], for those of `ids` that have some.
    pub(super) fn follow_all_virtual_functions(&mut self, ids: &[FunctionId], effects: &mut Vec<Effect>) {
        let physical: Vec<FunctionId> = self.virtual_functions.keys().copied().filter(|id| ids.contains(id)).collect();
        physical.into_iter().for_each(|id| self.follow_virtual_functions(id, effects));
    }

    fn remove_virtual_functions(&mut self, id: FunctionId, effects: &mut Vec<Effect>) {
        let functions = self.virtual_functions.remove(&id).unwrap_or_default();
        let Some(on) = functions.first().and_then(|first| self.nodes.get(first)).map(|node| node.on) else { return };
        let gone = self.take_out(on, &functions, effects);
        self.vanished.extend(gone.into_iter().map(|(id, _)| id));
    }

    /// The functions on the bus on `on` that are there for themselves.
    pub(super) fn physical_children(&self, on: Parent) -> impl Iterator<Item = (FunctionId, &Node)> + '_ {
        let nodes = self.children(on).iter().filter_map(|id| Some((*id, self.nodes.get(id)?)));
        nodes.filter(|(_, node)| !node.is_virtual)
    }
}

#[cfg(test)]
mod tests;
