//! Brings the direct parts of a BAR into this process, so that they can be mapped into the guest.

use pci::bar::{BarIndex, BarSpec};
use pci::function::{BarPiece, Pages};

use super::bar_map;
use super::host::{Area, HostDevice};
use super::mapping::{Mapping, PAGE};
use super::opened::HostFunction;

/// A BAR in this process.
pub struct Backing {
    /// What the guest finds where.
    pub pieces: Vec<BarPiece>,
    /// Holds the pages of direct pieces.
    _mapping: Option<Mapping>,
}

impl Backing {
    /// Maps the direct parts of BAR `bar` of `host`. One that cannot be mapped is trapped: slow, and out of peers' reach.
    pub fn new<D: HostDevice>(host: &HostFunction<D>, bar: BarIndex, spec: BarSpec) -> Self {
        let (name, device) = (&host.name, &host.device);
        let mappable = if spec.is_memory() { device.mappable(bar.into()) } else { Vec::new() };
        let registers = host.facts.msix.map(|msix| msix.areas(bar)).unwrap_or_default();
        let parts = bar_map::parts(spec.size, &mappable, &registers, PAGE);
        let mut mapping = None;
        if parts.iter().any(|part| part.direct) {
            match Mapping::reserve(spec.size) {
                Ok(reserved) => mapping = Some(reserved),
                Err(error) => log::error!("device {name}: no address space for BAR{bar} ({spec}): {error}"),
            }
        }
        let map = |Area { offset, len }| {
            let (file, start) = device.file(bar.into())?;
            match mapping.as_ref()?.map(file, start.checked_add(offset)?, offset, len) {
                Ok(host_address) => Some(host_address),
                Err(error) => {
                    log::error!("device {name}: BAR{bar} is slow, {len:#x} bytes at {offset:#x} cannot be mapped: {error}");
                    None
                }
            }
        };
        let pieces = parts.into_iter().map(|part| {
            let Area { offset, len } = part.area;
            match part.direct.then(|| map(part.area)).flatten() {
                Some(host_address) => BarPiece::Direct { offset, len, pages: Pages { host_address } },
                None => BarPiece::Trapped { offset, len },
            }
        });
        Self { pieces: pieces.collect(), _mapping: mapping }
    }
}
