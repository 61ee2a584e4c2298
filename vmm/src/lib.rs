//! The virtual machine monitor.
//!
//! Lock order, left to right: hierarchy with the mapper ([`pci_bus`]) -> one function -> windows ([`address_space`]) ->
//! interrupt routes ([`kvm`], a leaf). No two functions are locked together.

pub mod additions;
pub mod address_space;
pub mod arrivals;
pub mod backends;
pub mod boot;
pub mod budget;
pub mod cdi;
pub mod changes;
pub mod check;
pub mod cli;
pub mod cliques;
pub mod cmdline;
pub mod cold_plug;
pub mod counters;
pub mod ctl;
pub mod demo;
pub mod driver;
pub mod effects;
pub mod ejected;
pub mod endpoints;
pub mod files;
pub mod groundwork;
pub mod host;
pub mod hotplug;
mod inject;
pub mod kvm;
pub mod listing;
pub mod logger;
pub mod machine;
pub mod memory;
pub mod mirrors;
pub mod numa;
pub mod outputs;
pub mod own_files;
pub mod pci_bus;
pub mod plan;
pub mod policy;
pub mod ports;
pub mod processors;
pub mod replicate;
pub mod resize;
pub mod root_slots;
pub mod run;
pub mod serve;
pub mod session;
pub mod signals;
pub mod slot_events;
pub mod spec;
pub mod table;
pub mod terminal;
pub mod topology;
pub mod vcpu;
mod waiting;
mod working_set;
