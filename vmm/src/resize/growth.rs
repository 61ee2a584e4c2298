//! Makes memory that comes: reserved, from the host node that is meant, touched and mapped for host functions if need be. Then
//! tells processes that serve devices.

use std::sync::Arc;

use arch::memory_map::Range;
use devices::acpi::MemoryDevice;
use devices::vfio::Domain;
use devices::virtio::vhost_user::Server;
use thiserror::Error;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use crate::groundwork::{GroundworkError, Lay, Preparation, Work, threads};
use crate::machine::MachineError;
use crate::memory::{self, Backing};
use crate::numa::{Binding, GuestNuma};

/// Memory to be made.
pub(super) struct Growth {
    pub ranges: Vec<Range>,
    pub bindings: Vec<Binding>,
    pub backing: Backing,
    pub prefault: bool,
    pub domain: Option<Arc<Domain>>,
}

/// Which host nodes the memory of `devices` comes from.
#[must_use]
pub fn bindings(numa: Option<&GuestNuma>, devices: &[MemoryDevice]) -> Vec<Binding> {
    let binding = |device: &MemoryDevice| {
        let node = numa?.nodes.get(usize::try_from(device.node).ok()?)?.host.as_ref()?;
        Some(Binding { range: Range::sized(device.base, device.len), node: node.node, policy: node.placement.policy })
    };
    devices.iter().filter_map(binding).collect()
}

impl Growth {
    fn touches(&self) -> bool {
        self.prefault || self.domain.is_some()
    }

    /// What making it is; without bytes if it takes no time.
    pub fn work(&self) -> Work {
        let bytes = if self.touches() { self.ranges.iter().map(Range::len).sum() } else { 0 };
        Work::new(self.touches(), self.domain.is_some(), bytes)
    }

    /// Makes it. Nothing is mapped if it cannot be had.
    pub fn run(&self, work: &Work) -> Result<GuestMemoryMmap, GroundworkError> {
        let memory = memory::create(&self.ranges, self.backing)?;
        memory::bind(&memory, &self.bindings, self.backing.huge_page)?;
        let lay = Lay {
            regions: memory::regions(&memory),
            threads: if self.touches() { threads() } else { 0 },
            domain: self.domain.as_deref(),
            page: self.backing.huge_page.unwrap_or(0),
        };
        lay.run(work)?;
        Ok(memory)
    }
}

/// A thread that tells servers of devices of memory that came. Dropping it waits for a conversation that goes on, 2 s at most.
pub(super) struct Telling {
    /// Ends before the thread is waited for.
    _wanted: Arc<()>,
    thread: Preparation<()>,
}

impl Telling {
    /// Tells `servers` that RAM is `memory` from now on; `done` becomes readable at the end. One that does not follow is done
    /// with: its device gives up, and the guest goes on.
    pub fn start(servers: Vec<Arc<Server>>, memory: GuestMemoryMmap, done: Arc<EventFd>) -> Result<Self, GroundworkError> {
        let wanted = Arc::new(());
        let theirs = Arc::downgrade(&wanted);
        let thread = Preparation::start_with(Work::default(), done, move |_| {
            for server in servers {
                let wanted = theirs.clone();
                server.memory_grew(&memory, move || wanted.strong_count() == 0);
            }
            Ok(())
        })?;
        Ok(Self { _wanted: wanted, thread })
    }

    /// Whether all were told.
    pub fn is_done(&self) -> bool {
        self.thread.is_done()
    }

    /// Waits for the end.
    pub fn finish(self) -> Result<(), GroundworkError> {
        self.thread.finish()
    }
}

/// Memory that cannot be added after it was promised.
#[derive(Debug, Error)]
pub(super) enum GrowthError {
    /// Making it.
    #[error(transparent)]
    Ground(#[from] GroundworkError),
    /// The machine.
    #[error(transparent)]
    Machine(Box<MachineError>),
}
