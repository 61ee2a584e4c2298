//! Decides which descriptors a machine has for its reset, where a process has few: those that it had, and some more.
//!
//! A start has more open for a moment than a machine that runs. And clients that wait to be let in take what is free.

use std::fs;
use std::os::fd::OwnedFd;

use api::door::{Door, Shut};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};
use rustix::stdio::stdin;

/// How many more.
const MORE: usize = 8;

/// Descriptors that are kept for a reset.
#[derive(Default)]
pub struct Spare {
    kept: Vec<OwnedFd>,
    shut: Option<Shut>,
}

impl Spare {
    /// The machine has what it needs. As many are kept as there are; then others may have the rest.
    pub fn keep(&mut self) {
        let more = (self.kept.len()..MORE).map_while(|_| fcntl_dupfd_cloexec(stdin(), 0).ok());
        self.kept.extend(more);
        self.shut = None;
    }

    /// The machine is about to close what it has. If descriptors are few, nobody comes through `door` until it has them again.
    pub fn give(&mut self, door: &Door) {
        if are_few() {
            self.shut = Some(door.shut());
            self.kept.clear();
        }
    }
}

/// Whether half of the descriptors that this process may have are open, or more. Nobody knows where it cannot be seen.
fn are_few() -> bool {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let open = fs::read_dir("/proc/self/fd").ok().and_then(|open| u64::try_from(open.count()).ok());
    open.is_none_or(|open| open >= most / 2)
}
