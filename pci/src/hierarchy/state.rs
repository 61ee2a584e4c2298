//! The whole tree, written down: every function by its name, and where BARs are or were last.

use std::collections::BTreeSet;

use super::{Hierarchy, What, reach};
use crate::bar::BarIndex;
use crate::effect::Effect;
use crate::function::FunctionId;
use crate::state::{Reader, StateError, Writer};
use crate::sync::lock;
use crate::topology::Name;

impl Hierarchy {
    /// Writes the state of every function. Nobody may use them meanwhile. Fails with the name of one whose state is elsewhere.
    pub fn save(&mut self, writer: &mut Writer) -> Result<(), StateError> {
        // Virtual functions are there when their physical ones have taken their state.
        for are_virtual in [false, true] {
            let mut nodes: Vec<_> = self.nodes.values().filter(|node| node.is_virtual == are_virtual).collect();
            if are_virtual {
                // Their ids tell in which order the guest enabled them, which is nothing to keep.
                nodes.sort_by(|one, other| one.name.cmp(&other.name));
            }
            writer.count(nodes.len());
            for node in nodes {
                let name = &node.name;
                let saved = writer.section(&name.0, |writer| match &node.what {
                    What::Port(port) => {
                        port.save(writer);
                        Ok(())
                    }
                    What::Endpoint(shared) => lock(shared).save(writer),
                });
                saved.map_err(|source| StateError::Device { name: name.clone(), source: Box::new(source) })?;
            }
        }
        let reachable: BTreeSet<_> = self.reach.iter().map(|(function, bar, ..)| (function, bar)).collect();
        let mut homes: Vec<(&Name, BarIndex, u64, bool)> = self
            .reach
            .homes()
            .filter_map(|(function, bar, at)| {
                let is_there = reachable.contains(&(function, bar));
                self.nodes.get(&function).map(|node| (&node.name, bar, at, is_there))
            })
            .collect();
        homes.sort_unstable();
        writer.count(homes.len());
        for (name, bar, at, is_there) in homes {
            writer.bytes(name.0.as_bytes());
            writer.u8(bar);
            writer.u64(at);
            writer.bool(is_there);
        }
        Ok(())
    }

    /// Takes what a tree of the same functions saved. Workers of endpoints start in the state in which they are held, if they
    /// are. What follows for the machine is added to `effects`.
    pub fn restore(&mut self, reader: &mut Reader<'_>, effects: &mut Vec<Effect>) -> Result<(), StateError> {
        let all = self.ids();
        let nothing = all.iter().filter(|id| self.endpoint(**id).is_some());
        let nothing: Vec<_> = nothing.map(|id| reach::Wanted { function: *id, bars: Vec::new(), bus_master: false }).collect();
        self.reach.settle(&nothing, effects);
        self.restore_functions("functions", &all, reader)?;
        all.iter().for_each(|id| self.follow_virtual_functions(*id, effects));
        let functions: Vec<FunctionId> = self.virtual_functions.values().flatten().copied().collect();
        self.restore_functions("virtual functions", &functions, reader)?;
        let all = self.ids();
        all.iter().for_each(|id| self.reach.forget(*id));
        let mut reachable = BTreeSet::new();
        for _ in 0..reader.count()? {
            let name = String::from_utf8_lossy(reader.bytes()?).into_owned();
            let (bar, at, is_there) = (reader.u8()?, reader.u64()?, reader.bool()?);
            let id: FunctionId = self.named(&name).ok_or(StateError::Unknown { name })?;
            let spec = self.endpoint(id).and_then(|shared| lock(shared).bars().spec(bar));
            let size = spec.ok_or_else(|| reader.wrong("a base address register of this function", bar))?.size;
            if !at.is_multiple_of(size) || at.checked_add(size).is_none() {
                return Err(reader.wrong("an address that the base address register can have", at));
            }
            self.reach.set_home(id, bar, at);
            if is_there {
                reachable.insert((id, bar));
            }
        }
        // Of BARs that want one place, who had it keeps it: the others come after, and none of them goes back where it was.
        let wanted = |is_there_only: bool| {
            let mut wanted: Vec<_> = all.iter().filter_map(|id| self.wanted(*id)).collect();
            for endpoint in &mut wanted {
                endpoint.bars.retain(|want| !is_there_only || reachable.contains(&(endpoint.function, want.bar)));
                for want in &mut endpoint.bars {
                    want.home_is_forwarded &= reachable.contains(&(endpoint.function, want.bar));
                }
            }
            wanted
        };
        let (first, then) = (wanted(true), wanted(false));
        self.reach.settle(&first, effects);
        self.reach.settle(&then, effects);
        self.settle_mirrors(effects);
        Ok(())
    }

    /// Takes the state of each of `ids`, in any order.
    fn restore_functions(&mut self, what: &'static str, ids: &[FunctionId], reader: &mut Reader<'_>) -> Result<(), StateError> {
        reader.same_count(what, ids.len())?;
        let mut missing: BTreeSet<FunctionId> = ids.iter().copied().collect();
        for _ in ids {
            let (name, mut inside) = reader.any_section()?;
            let id = self.named(&name).filter(|id| missing.remove(id));
            let node = id.and_then(|id| self.nodes.get_mut(&id)).ok_or(StateError::Unknown { name })?;
            let taken = match &mut node.what {
                What::Port(port) => port.restore(&mut inside),
                What::Endpoint(shared) => lock(shared).restore(&mut inside),
            };
            let taken = taken.and_then(|()| inside.end());
            taken.map_err(|source| StateError::Device { name: node.name.clone(), source: Box::new(source) })?;
        }
        Ok(())
    }
}
