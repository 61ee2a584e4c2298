//! Random configuration cycles, hot-plug and errors over random hierarchies.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pci::fuzz::cycles(bytes));
