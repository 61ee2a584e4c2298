//! What hangs on what (`spec`), and at which numbers (`plan`).
//!
//! [`Topology`] holds names and nesting, [`Plan`] every number: buses, windows, BAR addresses. Users and code name things;
//! numbers appear in the plan alone. On the way, `check` refuses what cannot exist, `outline` and `place` order each bus,
//! `buses` numbers them, `reserve` keeps room for hot-plug, `sizing` sizes the windows bottom-up, `windows` places them
//! top-down. Where that fails, `relief` says with how much less for hot-plug it would not.

mod apertures;
mod buses;
mod check;
mod outline;
mod place;
mod plan;
mod planner;
mod relief;
mod reserve;
mod sizing;
mod spec;
mod tree;
mod windows;

pub use apertures::{Apertures, Asks, FIRST_PORT, Pool, Shortage};
pub use check::TopologyError;
pub use plan::{
    Note, Parent, Plan, PlannedEndpoint, PlannedFunction, PlannedKind, PlannedPort, PlannedRootComplex, Reserved, Window, Windows,
};
pub use planner::PlanError;
pub use relief::{Limits, Relief};
pub(crate) use sizing::Free;
pub use spec::{
    EndpointSpec, HotPlug, Name, Need, NodeKind, NodeSpec, Place, PortKind, PortSpec, Removal, Reserve, Resource,
    RootComplexSpec, Topology,
};
pub use tree::Tree;

pub use crate::intx::IntxRoute;

#[cfg(test)]
pub(crate) mod tests;
