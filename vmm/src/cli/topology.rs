//! `banyan topology`: what a person can ask about a hierarchy that no guest has yet.

use clap::{Args, Subcommand};

/// `banyan topology`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct TopologyOptions {
    /// What to do.
    #[command(subcommand)]
    pub command: TopologyCommand,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum TopologyCommand {
    /// Print this host as a file that --host takes in place of a host
    ///
    /// JSON with each PCI function: address, bridge above, ids, BARs, link, NUMA node, IOMMU group, driver. Serial numbers are
    /// left out. Run it as root: other users cannot read all registers, and links then come from sysfs attributes.
    Record,
}

/// Text at the end of the long help.
pub(super) const NOTES: &str = "\
Examples:
  Take a host along, and plan for it elsewhere:
    banyan topology record > host.json
    banyan run --dry-run --host host.json --pcie topology=host \\
        --device 0000:03:00.0";
