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

pub mod additions;
pub mod address_space;
pub mod arrivals;
pub mod backends;
pub mod between;
pub mod boot;
pub mod budget;
pub mod bus_slots;
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
pub mod effects;
pub mod ejected;
pub mod endpoints;
pub mod files;
pub mod groundwork;
pub mod host;
pub mod host_signals;
pub mod hotplug;
mod inject;
pub mod kvm;
pub mod lines;
pub mod listing;
pub mod logger;
pub mod machine;
pub mod main_loop;
pub mod memory;
pub mod mirrors;
pub mod numa;
pub mod outputs;
pub mod own_files;
pub mod pci_bus;
pub mod plan;
pub mod policy;
pub mod ports;
pub mod print;
pub mod processors;
pub mod replicate;
pub mod resets;
pub mod resize;
pub mod run;
pub mod serve;
pub mod session;
pub mod signals;
pub mod slot_events;
pub mod snapshot;
pub mod spare;
pub mod spec;
pub mod table;
pub mod terminal;
pub mod topology;
pub mod vcpu;
mod waiting;
mod working_set;
