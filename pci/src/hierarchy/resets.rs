//! Keeps what resets leave to do until nobody waits for it: hardware takes 100 ms and more for one.

use std::sync::Arc;

use super::Hierarchy;
use crate::function::{FunctionId, HardwareReset, Shared};
use crate::sync::lock;

/// A function whose registers were reset, or which has left, and whose hardware is to follow.
pub struct UnfinishedReset {
    function: Shared,
    hardware: Arc<dyn HardwareReset>,
}

impl UnfinishedReset {
    /// What a reset of `function` leaves to do, if there is one.
    #[must_use]
    pub fn of(function: &Shared) -> Option<Self> {
        let hardware = lock(function).take_reset()?;
        Some(Self { function: Shared::clone(function), hardware })
    }
}

/// Has the hardware of functions that are under reset together reset, for as long as that takes, and lets them answer again then,
/// unless they have left. Only when all are done: hardware may have them reset as one. The caller holds no lock.
pub fn finish_resets(unfinished: &[UnfinishedReset]) {
    for reset in unfinished {
        reset.hardware.run();
    }
    for reset in unfinished {
        lock(&reset.function).end_reset(&reset.hardware);
    }
}

impl Hierarchy {
    /// Resets that began since the last call. They are to be [finished](finish_resets) together once the hierarchy's own lock is given
    /// back, before who asked for them goes on.
    pub fn take_unfinished_resets(&mut self) -> Vec<UnfinishedReset> {
        std::mem::take(&mut self.unfinished_resets)
    }

    pub(super) fn note_reset(&mut self, id: FunctionId) {
        let unfinished = self.endpoint(id).and_then(UnfinishedReset::of);
        self.unfinished_resets.extend(unfinished);
    }

    /// Ends the life of endpoint `id` in the machine. Returns it.
    pub(super) fn end_life(&mut self, id: FunctionId) -> Option<Shared> {
        let function = self.endpoint(id).map(Shared::clone)?;
        lock(&function).detach();
        self.note_reset(id);
        Some(function)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::caps;
    use crate::emulated::{Attachment, EmulatedError, EmulatedSpec};
    use crate::ids::Ids;
    use crate::link::Link;
    use crate::seams::MsiPort;
    use crate::testing::{FakeEndpoint, FakeMsi, dword};
    use crate::topology::tests::{endpoint, hot, kept, roomy, root_port, topology};
    use crate::topology::{Plan, Removal};

    #[test]
    fn hardware_of_what_leaves_is_reset_when_nobody_waits() {
        let (mut tree, plan) = tree();
        let mut effects = Vec::new();
        tree.start(&mut effects);
        let a = plan.by_name("a").unwrap();
        assert_eq!(tree.unplug(plan.by_name("rp0").unwrap().id, &mut effects).unwrap().len(), 1);
        let unfinished = tree.take_unfinished_resets();
        assert_eq!((unfinished.len(), dword(&mut tree, a.at.bdf, 0)), (1, u32::MAX));
        finish_resets(&unfinished);
        tree.detach();
        assert_eq!(tree.take_unfinished_resets().len(), 1, "`b`, with the machine");
    }

    fn tree() -> (Hierarchy, Plan) {
        let hot_port = hot(root_port("rp0", "rc0"), kept(1 << 20, 1 << 20, 1), Removal::Surprise);
        let nodes = vec![hot_port, endpoint("a", "rp0", &[]), root_port("rp1", "rc0"), endpoint("b", "rp1", &[])];
        let plan = topology(nodes).plan(&roomy()).unwrap();
        let ids = Ids { vendor: 0x1234, device: 1, ..Ids::default() };
        let spec = EmulatedSpec { ids, on: Attachment::Link(Link::default()), flr: true, ..EmulatedSpec::default() };
        let msi: Arc<dyn MsiPort> = Arc::new(FakeMsi::default());
        let make =
            |_: &_| -> Result<Shared, EmulatedError> { Ok(Arc::new(Mutex::new(FakeEndpoint::new(&spec)?.with_hardware()))) };
        (Hierarchy::build(&plan, &msi, make).unwrap(), plan)
    }

    #[test]
    fn hardware_under_reset_answers_nothing_and_keeps_nobody_waiting() {
        let (mut tree, plan) = tree();
        let mut effects = Vec::new();
        tree.start(&mut effects);
        let [a, b, port] = ["a", "b", "rp0"].map(|name| plan.by_name(name).unwrap().at.bdf);
        for control in [0x40, 0] {
            tree.write(0, port, 0x3E, &[control, 0], &mut effects);
        }
        let unfinished = tree.take_unfinished_resets();
        assert_eq!((dword(&mut tree, a, 0), dword(&mut tree, b, 0)), (u32::MAX, 0x0001_1234));
        finish_resets(&unfinished);
        assert_eq!(dword(&mut tree, a, 0), 0x0001_1234);
        // By its own register.
        let bytes = tree.config_bytes(plan.by_name("b").unwrap().id, 0x100);
        let extents = caps::walk(|at| u32::from_le_bytes(bytes[usize::from(at)..][..4].try_into().unwrap()));
        let express = extents.iter().find(|extent| extent.id == caps::id::EXPRESS).unwrap();
        tree.write(0, b, u16::from(express.offset) + 8, &[0, 0x80], &mut effects);
        assert_eq!(dword(&mut tree, b, 0), u32::MAX);
        finish_resets(&tree.take_unfinished_resets());
        assert_eq!((dword(&mut tree, b, 0), tree.take_unfinished_resets().len()), (0x0001_1234, 0));
    }
}
