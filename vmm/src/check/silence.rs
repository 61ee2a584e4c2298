//! Decides of what a recorded host says nothing: of hosts that were put together from descriptions, as `lspci -t` or NCCL give
//! them, files have no drivers, groups, registers or BARs. What is not there is not judged. Pure.

use super::report::{Finding, Severity};
use crate::host::tree::{HostNode, HostTree};

/// What the tree of a recorded host leaves out for all of its functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Silence {
    /// Drivers and IOMMU groups. A host that was recorded has drivers at its ports, with or without an IOMMU.
    pub of_use: bool,
    /// Configuration registers.
    pub of_registers: bool,
    /// BARs.
    pub of_bars: bool,
}

impl Silence {
    /// That of a file.
    #[must_use]
    pub fn of(tree: &HostTree) -> Self {
        let none = |has: fn(&HostNode) -> bool| !tree.functions.values().any(has);
        let of_use = none(|node| node.driver.is_some() || node.group.is_some());
        Self {
            of_use,
            // Recorded by a user who is not root: those can be recorded again.
            of_registers: of_use && none(|node| node.fabric.is_whole()),
            of_bars: none(|node| node.bars.iter().any(Option::is_some)),
        }
    }

    /// What was not judged.
    #[must_use]
    pub fn finding(self) -> Finding {
        let parts = [
            (true, "kernel"),
            (true, "limits"),
            (true, "huge pages"),
            (self.of_use, "drivers"),
            (self.of_use, "IOMMU groups"),
            (self.of_registers, "registers (access control, ATS)"),
            (self.of_bars, "BARs"),
        ];
        let parts: Vec<&str> = parts.into_iter().filter(|(silent, _)| *silent).map(|(_, part)| part).collect();
        let text = format!("{} and device nodes are not in the file and were not judged", parts.join(", "));
        Finding::new(Severity::Note, "host", "recorded host", text)
    }
}
