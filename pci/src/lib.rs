//! What PCI Express says, as data and functions: no kernel, no files, no threads, no clocks.
//!
//! | question | module |
//! |---|---|
//! | how is a function named, and what ids does it carry? | [`address`], [`ids`] |
//! | which function and register does an address or port name? | [`ecam`], [`cf8`] |
//! | which bytes of which dword does an access touch? | [`access`] |
//! | what does a register keep of a write? | [`config`] |
//! | which capabilities are there, where, and what do they show? | [`caps`], [`ext_caps`], [`regs`] |
//! | where does a BAR decode? | [`bar`] |
//! | what does a bridge forward, and what does a port show? | [`bridge`], [`port`], [`link`] |
//! | what does an error leave, and who hears of it? | [`errors`] |
//! | what does a hot-plug slot show, and what does the guest tell by it? | [`slot`] |
//! | what do emulated endpoints have in common? | [`emulated`] |
//! | what do virtual functions take? | [`sriov`] |
//! | which message does an interrupt become? | [`interrupts`], [`msi`], [`msix_table`] |
//! | what must every function be able to do? | [`function`] |
//! | what must the machine change after a write? | [`effect`] |
//! | how does a function reach interrupts and memory? | [`seams`] |
//! | what may a guest read without an exit? | [`mirror`] |
//! | how is the state of functions written down? | [`state`] |
//! | what does a lock show whose holder panicked? | [`sync`] |
//! | where does an INTx pin arrive? | [`intx`] |
//! | what hangs on what, and at which numbers? | [`topology`] |
//! | who answers a configuration cycle? | [`hierarchy`] |
//! | what does a guest find when it looks? | `enumerator` (feature `testing`) |
//! | what holds whatever guests and users do? | `fuzz` (feature `testing`) |
//!
//! A register write returns what it changed ([`function::Changes`]); [`hierarchy`] turns that into [`effect::Effect`]s
//! over the whole tree; the virtual machine monitor alone carries effects out.
#![forbid(unsafe_code)]

pub mod access;
pub mod address;
pub mod bar;
pub mod bridge;
pub mod caps;
pub mod cf8;
pub mod config;
pub mod ecam;
pub mod effect;
pub mod emulated;
#[cfg(any(test, feature = "testing"))]
pub mod enumerator;
pub mod errors;
pub mod ext_caps;
pub mod function;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
pub mod hierarchy;
pub mod ids;
pub mod interrupts;
pub mod intx;
pub mod link;
pub mod mirror;
pub mod msi;
pub mod msix_table;
pub mod port;
pub mod regs;
pub mod seams;
pub mod slot;
pub mod sriov;
pub mod state;
pub mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod topology;
