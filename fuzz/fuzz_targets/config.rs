//! Everything that users and clients write: flags, files, bodies of requests.
#![no_main]

#[path = "../../api/tests/texts/texts.rs"]
mod texts;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| texts::read(bytes));
