//! Random hierarchies that take the state of others, whole and garbled.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pci::fuzz::kept(bytes));
