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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Reg;
    use crate::caps::Vendor;
    use crate::config::{ConfigBuilder, Type0};
    use crate::ids::ClassCode;

    /// A list with a capability of `len` bytes at each offset, the clique placed and linked behind them.
    fn with_clique(list: &[(u8, usize)], clique: Clique) -> (Option<u8>, Option<u8>) {
        let header = Type0 { ids: &Ids::default(), interrupt_pin: 0, multifunction: false, memory: true, io: false };
        let mut builder = ConfigBuilder::type0(&header);
        for (at, len) in list {
            builder.capability_at(*at, &Vendor(vec![0x50; len - 3])).unwrap();
        }
        let at = place(builder.extents());
        if let Some(at) = at {
            builder.capability_at(at, &clique).unwrap();
        }
        let space = builder.build();
        (at, decode(|at| space.read(Reg::containing(at.into()))))
    }

    #[test]
    fn the_driver_finds_the_clique_wherever_there_is_room() {
        for (what, list, expected) in [
            ("an empty list", vec![], Some(0xC8)),
            ("MSI-X at 0xC8", vec![(0xC8, 12)], Some(0xD4)),
            ("a capability that reaches into 0xC8", vec![(0xC0, 12)], Some(0xD4)),
            ("both preferred places taken", vec![(0xC8, 12), (0xD4, 8)], Some(0x40)),
            ("both taken by one capability, and the start as well", vec![(0xC0, 0x40), (0x40, 0x44)], Some(0x84)),
            ("a list that ends at 0xFC", vec![(0x40, 0x88), (0xFC, 4)], Some(0xC8)),
            ("room for four bytes only", vec![(0x40, 0xBC)], None),
        ] {
            for id in 0..16 {
                let clique = Clique::new(id).unwrap();
                assert_eq!(with_clique(&list, clique), (expected, expected.map(|_| id)), "{what}");
            }
        }
    }

    #[test]
    fn the_capability_has_the_documented_bytes() {
        assert_eq!(Clique::new(0).unwrap().dwords(), [0x5008_0009, 0x0000_5032]);
        assert_eq!(Clique::new(15).unwrap().dwords(), [0x5008_0009, 0x0078_5032]);
    }

    #[test]
    fn a_list_that_loops_or_has_another_version_gives_no_clique() {
        assert_eq!(decode(|at| if at == 0x34 { 0x40 } else { 0x4009 }), None);
        assert_eq!(decode(|at| if at == 0x34 { 0x40 } else { 0xFFFF_FFFF }), None);
        let versioned = |at| match at {
            0x34 => 0x40,
            0x40 => DWORD_0,
            _ => SIGNATURE | 1 << 16,
        };
        assert_eq!(decode(versioned), None);
    }

    #[test]
    fn an_id_above_15_is_refused_with_the_limit() {
        let error = Clique::new(16).unwrap_err();
        assert_eq!(error.to_string(), "clique 16 is out of range: the field has 4 bits, take 0 to 15");
    }

    #[test]
    fn only_nvidia_gpus_have_a_clique_unless_any_vendor_may() {
        let ids = |vendor, class| Ids { vendor, class: ClassCode::new(class), ..Ids::default() };
        for (ids, gpu) in [
            (ids(0x10DE, 0x03_0200), true),
            (ids(0x10DE, 0x03_0000), true),
            (ids(0x10DE, 0x06_8000), false),
            (ids(0x15B3, 0x02_0000), false),
            (ids(0x1002, 0x03_0000), false),
        ] {
            assert_eq!(check(&ids, false).is_ok(), gpu, "{ids:?}");
            assert_eq!(check(&ids, true), Ok(()));
        }
    }
}
