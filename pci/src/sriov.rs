//! What a physical function says of its virtual functions (PCIe 6.0 9.3.3), and which buses and addresses that takes.

use thiserror::Error;

use crate::address::Devfn;
use crate::bar::{BarError, BarSpec, Bars, Size};

/// The virtual functions of a physical function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SriovSpec {
    /// TotalVFs and InitialVFs, 1 or more.
    pub total_vfs: u16,
    /// From the physical function's routing id to that of the first virtual function, 1 or more.
    pub first_offset: u16,
    /// From one virtual function's routing id to the next; of no account with one of them.
    pub stride: u16,
    /// Device id of the virtual functions.
    pub vf_device: u16,
    /// BARs of each virtual function. Memory of at least a page; the space behind each is that of all virtual functions.
    pub bars: [Option<BarSpec>; 6],
}

/// Which virtual functions of a physical function are enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnabledFunctions {
    /// How many, those with the lowest routing ids.
    pub count: u16,
    /// What the physical function says of all.
    pub spec: SriovSpec,
    /// Where each BAR of the first one decodes; those of the others follow.
    pub bars: [Option<u64>; 6],
}

impl EnabledFunctions {
    /// Where the BARs of virtual function `index`, from 0 on, decode.
    #[must_use]
    pub fn bars_of(&self, index: u16) -> [Option<u64>; 6] {
        let place = |(at, spec): (&Option<u64>, &Option<BarSpec>)| {
            at.and_then(|at| at.checked_add(u64::from(index).checked_mul(spec.as_ref()?.size)?))
        };
        let mut bars = [None; 6];
        for (bar, found) in bars.iter_mut().zip(self.bars.iter().zip(&self.spec.bars).map(place)) {
            *bar = found;
        }
        bars
    }
}

/// Smallest VF BAR: the page size that the capability offers.
const PAGE: u64 = 4096;

/// Buses in a segment, as routing ids.
const ROUTING_IDS: u64 = 1 << 16;

impl SriovSpec {
    /// Whether a function can say this.
    pub fn check(&self) -> Result<(), SriovError> {
        if self.total_vfs == 0 {
            return Err(SriovError::None);
        }
        if self.first_offset == 0 || self.stride == 0 && self.total_vfs > 1 {
            return Err(SriovError::Steps { offset: self.first_offset, stride: self.stride });
        }
        Bars::new(&self.bars)?;
        for (bar, spec) in self.bars.iter().enumerate() {
            if let Some(spec) = spec.filter(|spec| !spec.is_memory() || spec.size < PAGE) {
                return Err(SriovError::Bar { bar, spec, least: Size(PAGE) });
            }
        }
        Ok(())
    }

    /// Routing ids of the virtual functions of the physical function `at`, relative to bus 0 of its own bus: 0x100 is the next
    /// bus. They may exceed 16 bits.
    pub fn routing_ids(&self, at: Devfn) -> impl Iterator<Item = u64> + use<> {
        let first = u64::from(at.byte()) + u64::from(self.first_offset);
        let (stride, total) = (u64::from(self.stride), u64::from(self.total_vfs));
        (0..total).map(move |index| first + index * stride)
    }

    /// Bus numbers that the virtual functions of `at` take beside its own, which they follow. 256 and above fit nowhere.
    #[must_use]
    pub fn more_buses(&self, at: Devfn) -> usize {
        let last = self.routing_ids(at).last().unwrap_or(0);
        usize::try_from(last.min(ROUTING_IDS) >> 8).unwrap_or(usize::MAX)
    }
}

/// Virtual functions that cannot be.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SriovError {
    /// None at all.
    #[error("SR-IOV with 0 virtual functions: give 1 to 65535, or leave it out")]
    None,
    /// Two at one place.
    #[error(
        "virtual functions start {offset} behind their physical function and are {stride} apart: both must be 1 or more, or two functions would have one number"
    )]
    Steps {
        /// First VF offset.
        offset: u16,
        /// VF stride.
        stride: u16,
    },
    /// A set of BARs that no function has.
    #[error("BARs of the virtual functions")]
    Bars(#[from] BarError),
    /// A BAR that virtual functions cannot have.
    #[error("VF BAR {bar} is {spec}: virtual functions have memory BARs of at least {least}")]
    Bar {
        /// Which.
        bar: usize,
        /// Asked for.
        spec: BarSpec,
        /// Smallest.
        least: Size,
    },
}
