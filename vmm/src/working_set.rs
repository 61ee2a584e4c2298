//! Keeps of the executable in memory what a running machine uses: the start goes through much of the code once.
//!
//! Unmapped pages are the file's, and are back at their next use in about a microsecond each. Mapped ones count as resident, and
//! the host holds on to them longer than to pages of files that nobody maps.

use std::ffi::c_char;

use rustix::mm::{Advice, madvise};

unsafe extern "C" {
    // The first byte of the executable in memory, and the end of its code, as linkers define them.
    static __executable_start: c_char;
    static etext: c_char;
}

const PAGE: usize = 4096;

/// Unmaps the executable's constants and code. Whoever needs a page of them gets it back.
pub fn trim() {
    // A debugger's breakpoints would go with them: it writes those into pages that are the process's own.
    if cfg!(debug_assertions) {
        return;
    }
    let start = &raw const __executable_start;
    let len = (&raw const etext).addr().saturating_sub(start.addr()).next_multiple_of(PAGE);
    // SAFETY: between the two lie segments of the file that are mapped privately, read-only or executable, and never written,
    // so a page that comes back has the same content. Segments that are written start on pages behind. Where there is a hole
    // between segments, the call does its work and ends with an error.
    let trimmed = unsafe { madvise(start.cast_mut().cast(), len, Advice::LinuxDontNeed) };
    if let Err(error) = trimmed {
        log::debug!("the executable's pages: {error}");
    }
}
