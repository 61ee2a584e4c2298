//! Decides how much each hot-plug port keeps free: what was asked for, else the largest size class with which everything
//! fits.

use super::apertures::Pool;
use super::outline::Outline;
use super::plan::Reserved;
use super::sizing::{self, Item, Rule, STEP, What};
use super::spec::{EndpointSpec, Reserve};

/// Sizes of memory windows that nobody chose: enough for an accelerator's registers, down to what one NVMe drive needs.
const MEMORY: [u64; 5] = [32 << 20, 16 << 20, 4 << 20, 2 << 20, 1 << 20];

/// Sizes of prefetchable windows that nobody chose: an accelerator with 512 GiB in one BAR and small ones beside it, down to
/// none at all, where small BARs find room in the memory window.
const PREFETCHABLE: [u64; 9] = [1 << 40, 512 << 30, 256 << 30, 64 << 30, 8 << 30, 512 << 20, 64 << 20, 2 << 20, 0];

/// Windows that nobody chose and that are larger than this are there only while everything ends below [`REACHED`].
const GENEROUS: u64 = 64 << 30;

/// Guests make memory of other devices known to drivers (peer-to-peer) below this address alone (linux: x86
/// `MAX_PHYSMEM_BITS` with four levels of page tables).
const REACHED: u64 = 1 << 46;

/// Which class those ports have whose size nobody chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Classes {
    memory: &'static [u64],
    prefetchable: &'static [u64],
}

impl Classes {
    pub(super) const LARGEST: Self = Self { memory: &MEMORY, prefetchable: &PREFETCHABLE };

    /// Takes the next smaller class of `pool`; `None` when there is none, or when no port has a size by class.
    pub(super) fn smaller(self, pool: Pool, outline: &Outline<'_>) -> Option<Self> {
        let rest = |classes: &'static [u64]| classes.get(1..).filter(|rest| !rest.is_empty());
        match pool {
            Pool::Memory32 if by_class(outline, |reserve| reserve.memory.is_none()) => {
                Some(Self { memory: rest(self.memory)?, ..self })
            }
            Pool::Memory64 if by_class(outline, |reserve| reserve.prefetchable.is_none()) => {
                Some(Self { prefetchable: rest(self.prefetchable)?, ..self })
            }
            _ => None,
        }
    }

    /// Whether windows by class make the prefetchable space end, at `end`, where it would not have to.
    pub(super) fn too_generous(self, outline: &Outline<'_>, end: u64) -> bool {
        let largest = self.prefetchable.first().copied().unwrap_or(0);
        end > REACHED && largest > GENEROUS && by_class(outline, |reserve| reserve.prefetchable.is_none())
    }

    /// What node `node` keeps; `None` unless it is a hot-plug port. What exceeds the address space is cut to sizes that fit
    /// nowhere.
    pub(super) fn of(self, outline: &Outline<'_>, node: usize) -> Option<Reserved> {
        let reserve = outline.entries.get(node)?.port()?.hotplug?.reserve;
        let size = |asked: Option<u64>, classes: &[u64]| {
            let size = asked.or(classes.first().copied()).unwrap_or(0);
            size.checked_next_multiple_of(STEP).unwrap_or(u64::MAX)
        };
        Some(Reserved {
            memory: size(reserve.memory, self.memory),
            prefetchable: size(reserve.prefetchable, self.prefetchable),
            buses: reserve.buses.max(1),
        })
    }
}

impl Reserve {
    /// The least that holds a device with these `functions`, at an address that suits.
    #[must_use]
    pub fn for_device(functions: &[EndpointSpec]) -> Self {
        let rule = Rule { low_up_to: 0 };
        let needs = || functions.iter().flat_map(EndpointSpec::needs).filter(|(_, need)| need.each.is_memory());
        let size = |pool| {
            let items = needs().filter(|(_, need)| rule.pool(*need) == pool);
            sizing::packed(items.map(|(bar, need)| Item::new(What::Bar { node: 0, bar }, need)))
        };
        Self { memory: Some(size(Pool::Memory32)), prefetchable: Some(size(Pool::Memory64)), buses: 1 }
    }
}

/// Whether a hot-plug port has a size by class.
fn by_class(outline: &Outline<'_>, none: fn(&Reserve) -> bool) -> bool {
    let ports = outline.entries.iter().filter_map(|entry| entry.port()?.hotplug);
    ports.map(|hotplug| hotplug.reserve).any(|reserve| none(&reserve))
}

/// Alignment of a window of `size` bytes, above 0: that of the largest BAR that it could hold.
pub(super) const fn alignment(size: u64) -> u64 {
    1 << (63 - size.leading_zeros())
}
