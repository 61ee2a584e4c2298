//! What hangs on what (`spec`), and at which numbers (`plan`).
//!
//! [`Topology`] holds names and nesting, [`Plan`] every number: buses, windows, BAR addresses. Users and code name
//! things; numbers appear in the plan alone.

mod plan;
mod spec;

pub use plan::{
    IntxRoute, Parent, Plan, PlannedEndpoint, PlannedFunction, PlannedKind, PlannedPort, PlannedRootComplex, Window, Windows,
};
pub use spec::{EndpointSpec, Name, NodeKind, NodeSpec, Place, PortKind, PortSpec, RootComplexSpec, Topology};
