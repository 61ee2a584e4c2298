//! The capability with which NVIDIA's driver learns that a hypervisor approves peer-to-peer transfers between GPUs: all
//! GPUs with the same id, the clique, reach each other (nvidia open driver: chipset_pcie.c).

use thiserror::Error;

use super::{Capability, Extent, id};
use crate::config::RegDef;
use crate::ids::Ids;

/// Vendor-specific id, length 8, and the first letter of the signature "P2P"; the next pointer is left open.
const DWORD_0: u32 = 0x5008_0009;
/// The other two letters of the signature.
const SIGNATURE: u32 = 0x5032;
/// Bytes of the capability.
const LEN: u16 = 8;
/// Where GPUs have room for it, in order of preference.
const PREFERRED: [u8; 2] = [0xC8, 0xD4];

/// A clique id, 0 to 15.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Clique(u8);

impl Clique {
    /// Checks the id.
    pub fn new(id: u8) -> Result<Self, CliqueError> {
        if id < 16 { Ok(Self(id)) } else { Err(CliqueError::Id { id }) }
    }

    /// The id.
    #[must_use]
    pub const fn id(self) -> u8 {
        self.0
    }

    /// Both dwords of the capability; the next pointer in bits 15:8 of the first is 0: it is the last of the list.
    #[must_use]
    pub const fn dwords(self) -> [u32; 2] {
        [DWORD_0, (self.0 as u32) << 19 | SIGNATURE]
    }
}

impl Capability for Clique {
    fn id(&self) -> u8 {
        id::VENDOR
    }

    fn layout(&self) -> Vec<RegDef> {
        let [first, second] = self.dwords();
        vec![RegDef::read_only(first & 0xFFFF_0000), RegDef::read_only(second)]
    }
}

/// Where the eight bytes go between `capabilities`: 0xC8, else 0xD4, else the first free multiple of 4 from 0x40; `None`
/// if there is no room.
#[must_use]
pub fn place(capabilities: &[Extent]) -> Option<u8> {
    let free = |at: &u8| !capabilities.iter().any(|other| other.overlaps((*at).into(), LEN));
    PREFERRED.into_iter().chain((0x40..=0xF8).step_by(4)).find(free)
}

/// The clique id that NVIDIA's driver finds in a configuration space: it walks the list from 0x34, passes other
/// vendor-specific capabilities, and checks signature and version. `read` gives the dword at an offset. A list that loops
/// ends the search.
pub fn decode(read: impl Fn(u8) -> u32) -> Option<u8> {
    const VERSION: u32 = 7 << 16;
    let [mut at, ..] = read(0x34).to_le_bytes();
    for _ in 0..48 {
        at &= 0xFC;
        if at == 0 {
            break;
        }
        let first = read(at);
        let [capability, next, _, letter] = first.to_le_bytes();
        let second = at.checked_add(4).map_or(0xFFFF_FFFF, &read);
        if capability == id::VENDOR && letter == b'P' && second & 0xFFFF == SIGNATURE && second & VERSION == 0 {
            return Some(((second >> 19) & 0xF).to_le_bytes()[0]);
        }
        at = next;
    }
    None
}

/// Whether a function with these ids, as the guest will see them, can have a clique: an NVIDIA display controller, or any
/// function with `any_vendor`.
pub fn check(ids: &Ids, any_vendor: bool) -> Result<(), CliqueError> {
    const NVIDIA: u16 = 0x10DE;
    const DISPLAY: u8 = 0x03;
    if any_vendor || (ids.vendor == NVIDIA && ids.class.base() == DISPLAY) {
        Ok(())
    } else {
        Err(CliqueError::NoGpu { vendor: ids.vendor, device: ids.device, class: ids.class.value() })
    }
}

/// A clique that cannot be given.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CliqueError {
    /// The field has four bits.
    #[error("clique {id} is out of range: the field has 4 bits, take 0 to 15")]
    Id {
        /// Asked for.
        id: u8,
    },
    /// Nobody would read it.
    #[error(
        "{vendor:04x}:{device:04x} with class {class:06x} is no NVIDIA GPU (vendor 10de, class 03xxxx): leave the clique out, or \
         set clique-any-vendor to show it all the same"
    )]
    NoGpu {
        /// Vendor id.
        vendor: u16,
        /// Device id.
        device: u16,
        /// Class code.
        class: u32,
    },
}
