//! Adds functions to a root bus of a live tree and takes them out. A root bus has no slot registers: how the guest learns of
//! it is somebody else's business (ACPI).

use super::hotplug::{Newcomer, PlugError};
use super::{Hierarchy, Node, What, lock, reach};
use crate::access::Reg;
use crate::address::{Bdf, Sbdf};
use crate::effect::Effect;
use crate::function::{FunctionId, Programming, Shared};
use crate::intx::{self, IntxRoute};
use crate::regs::header;
use crate::topology::{Name, Parent};

impl Hierarchy {
    /// Device numbers, 0 to 31, that nobody has on the bus of root complex `root`, in ascending order.
    #[must_use]
    pub fn free_root_numbers(&self, root: usize) -> Vec<u8> {
        let taken =
            |number: u8| self.nodes.values().any(|node| node.on == Parent::RootComplex(root) && node.devfn.device() == number);
        (0..32).filter(|number| self.roots.len() > root && !taken(*number)).collect()
    }

    /// Name, segment and bus number of root complex `root`.
    #[must_use]
    pub fn root_bus(&self, root: usize) -> Option<(Name, u16, u8)> {
        self.roots.get(root).map(|root| (root.name.clone(), root.segment, root.buses.secondary))
    }

    /// Adds a function to the bus of root complex `root`, with nothing assigned: neither now nor after a reset.
    pub fn plug_root(&mut self, root: usize, newcomer: Newcomer, effects: &mut Vec<Effect>) -> Result<(), PlugError> {
        let Newcomer { id, name, at, function, .. } = newcomer;
        let Some(bus) = self.roots.get(root).map(|root| Sbdf { segment: root.segment, bdf: Bdf::new(root.buses.secondary, at) })
        else {
            return Err(PlugError::NoRoot { root });
        };
        if !self.free_root_numbers(root).contains(&at.device()) {
            return Err(PlugError::RootTaken { function: name, at });
        }
        if id.0 >= self.next || self.nodes.contains_key(&id) {
            return Err(PlugError::Id { function: name, id: id.0 });
        }
        let [_, pin, ..] = lock(&function).config_read(Reg::containing(header::INTERRUPT)).to_le_bytes();
        let route = pin.checked_sub(1).filter(|pin| *pin < 4);
        let route = route.map(|pin| IntxRoute { root_complex: root, device: at.device(), pin });
        let line = route.and_then(|route| u8::try_from(intx::gsi(route)).ok());
        let programming = Programming { interrupt_line: line.unwrap_or(0xFF), number: at, ..Programming::default() };
        lock(&function).program(&programming);
        let node = Node {
            name,
            on: Parent::RootComplex(root),
            devfn: at,
            planned_at: bus,
            mirrored: false,
            programming,
            what: What::Endpoint(function),
            children: Vec::new(),
        };
        self.nodes.insert(id, node);
        if let Some(root) = self.roots.get_mut(root) {
            root.children.push(id);
        }
        self.settle(&[id], effects);
        Ok(())
    }

    /// Takes a function that was added by [`Hierarchy::plug_root`] out at once: it reads all ones from here on and never comes
    /// back. Returns it, or `None` if it is not there.
    pub fn unplug_root(&mut self, id: FunctionId, effects: &mut Vec<Effect>) -> Option<Shared> {
        let node = self.nodes.get(&id)?;
        let (Parent::RootComplex(root), What::Endpoint(shared)) = (node.on, &node.what) else { return None };
        let shared = Shared::clone(shared);
        lock(&shared).detach();
        self.reach.settle(&[reach::Wanted { function: id, bars: Vec::new(), bus_master: false }], effects);
        self.reach.forget(id);
        self.nodes.remove(&id);
        if let Some(root) = self.roots.get_mut(root) {
            root.children.retain(|child| *child != id);
        }
        Some(shared)
    }
}
