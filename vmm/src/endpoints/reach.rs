//! Lets host functions reach blocks of memory devices, which come and go while they run.

use std::error::Error;
use std::sync::Arc;

use devices::vfio::Domain;
use devices::virtio::mem::Reach;

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
