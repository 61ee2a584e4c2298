//! The virtual machine monitor: interprets a configuration on this host, with KVM, VFIO and threads.
//!
//! | question | module |
//! |---|---|
//! | what does a command line ask for? | [`cli`]; what a kernel takes from its own: [`cmdline`] |
//! | what hangs on what, and what is each device? | [`spec`], [`budget`], [`cold_plug`], [`cliques`], [`numa`], [`processors`] |
//! | how is the host's hierarchy copied? | [`replicate`] |
//! | where is each part of the machine? | [`plan`] |
//! | what does the host have, and may a guest have it? | [`host`], [`own_files`], [`policy`], [`cdi`], [`files`] |
//! | what takes long before a machine can start? | [`groundwork`], [`memory`], [`backends`] |
//! | what is a machine made of, and in which order? | [`machine`], [`endpoints`], [`ports`], [`boot`], [`vcpu`], [`kvm`] |
//! | who answers an access, and what follows from a write? | [`pci_bus`], [`address_space`], [`effects`], [`mirrors`] |
//! | how do devices come and go? | [`hotplug`], [`bus_slots`], [`slot_events`], [`host_signals`], [`arrivals`], [`additions`] |
//! | how do processors and memory come and go? | [`resize`], [`ejected`] |
//! | what stays through a reset? | [`changes`], [`spare`] |
//! | who runs a machine from its start to its end? | [`run`], [`resets`], [`outputs`], [`main_loop`], [`signals`], [`terminal`], `working_set` |
//! | who carries out what API clients ask for? | [`serve`], [`session`], [`between`], `waiting`, [`listing`], `inject` |
//! | how does a machine go on in another process? | [`snapshot`] |
//! | what do the other commands do? | [`ctl`], [`topology`], [`check`], [`cdi`], [`demo`] |
//! | what is said, and counted? | [`logger`], [`lines`], [`mod@print`], [`table`], [`counters`] |
//!
//! ARCHITECTURE.md says what each thread does, and in which order locks are taken.

// What the executable does not name is private, so that the compiler finds what nobody uses.
#![deny(clippy::missing_docs_in_private_items)]

mod additions;
mod address_space;
mod arrivals;
mod backends;
mod between;
mod boot;
mod budget;
mod bus_slots;
pub mod cdi;
mod changes;
pub mod check;
pub mod cli;
mod cliques;
mod cmdline;
mod cold_plug;
mod counters;
pub mod ctl;
pub mod demo;
mod effects;
mod ejected;
mod endpoints;
mod files;
mod groundwork;
mod host;
mod host_signals;
mod hotplug;
mod inject;
mod kvm;
mod lines;
mod listing;
pub mod logger;
mod machine;
mod main_loop;
mod memory;
mod mirrors;
mod numa;
mod outputs;
mod own_files;
mod pci_bus;
mod plan;
pub mod policy;
mod ports;
pub mod print;
mod processors;
mod replicate;
mod resets;
mod resize;
pub mod run;
pub mod serve;
mod session;
pub mod signals;
mod slot_events;
mod snapshot;
mod spare;
mod spec;
mod table;
mod terminal;
pub mod topology;
mod vcpu;
mod waiting;
mod working_set;

pub use kvm::CpuidAhead;
