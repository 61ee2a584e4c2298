//! Lets host functions reach memory: all of it when the first one comes, and blocks of memory devices as these come and go.

use std::error::Error;
use std::sync::Arc;

use api::info::Step;
use arch::memory_map::Range;
use devices::vfio::Domain;
use devices::virtio::mem::{MemControl, Reach};
use vm_memory::GuestMemoryMmap;

use crate::groundwork::{GroundworkError, Lay, Work, fixed, threads};
use crate::memory::RamRegion;

/// What has to be mapped for the first host function that comes while the guest runs.
pub struct Reaching {
    pub(super) domain: Arc<Domain>,
    pub(super) memory: GuestMemoryMmap,
    pub(super) blocks: Vec<Arc<MemControl>>,
}

impl Reaching {
    fn fixed(&self) -> Vec<RamRegion> {
        let blocks: Vec<Range> = self.blocks.iter().map(|block| Range::sized(block.region().at, block.region().len)).collect();
        fixed(&self.memory, &blocks)
    }

    /// How much it is.
    #[must_use]
    pub fn work(&self) -> Work {
        let blocks: u64 = self.blocks.iter().map(|block| block.sizes().plugged).sum();
        Work::step(Step::DmaMap, self.fixed().iter().map(|region| region.len).sum::<u64>() + blocks)
    }

    /// Maps it. What nobody has touched gets its pages from several threads. Nothing is mapped if it fails.
    pub fn run(&self, work: &Work) -> Result<(), GroundworkError> {
        let regions = self.fixed();
        Lay { regions: regions.clone(), threads: threads(), domain: Some(&self.domain), page: 0 }.run(work)?;
        let go_on = |bytes| {
            work.has_mapped(bytes);
            !work.is_stopped()
        };
        let reach = |block: &Arc<MemControl>| block.reach(Arc::new(DomainReach(Arc::clone(&self.domain))), &self.memory, &go_on);
        let reached = self.blocks.iter().try_for_each(reach);
        if reached.is_err() {
            self.blocks.iter().for_each(|block| block.unreach());
            for region in regions {
                if let Err(error) = self.domain.unmap(region.at, region.len) {
                    log::error!("{error}");
                }
            }
        }
        Ok(reached?)
    }
}

/// The DMA domain as memory devices know it. The kernel forgets all maps when the last function leaves it; whoever lets one
/// join again tells memory devices to map anew.
pub struct DomainReach(pub Arc<Domain>);

impl Reach for DomainReach {
    fn map(&self, at: u64, len: u64, host_address: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
        if self.0.is_empty() {
            return Ok(());
        }
        // SAFETY: guest memory stays mapped in this process until the domain has ended.
        unsafe { self.0.map(at, len, host_address, "a block of memory") }.map_err(Into::into)
    }

    fn unmap(&self, at: u64, len: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
        if self.0.is_empty() { Ok(()) } else { self.0.unmap(at, len).map_err(Into::into) }
    }
}
