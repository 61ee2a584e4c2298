//! Decides where capabilities go in configuration space and links them: the standard list below 0x100, the extended one
//! from 0x100. Knows nothing of what a capability means.

use thiserror::Error;

use super::{ConfigSpace, RegDef, Type0, Type1};
use crate::access::Reg;
use crate::caps::{Capability, Extent};
use crate::ext_caps::{ExtendedCapability, header as extended_header};
use crate::regs::{header, status};

/// First byte of the extended list, and past the standard one.
const EXTENDED: u16 = 0x100;
const END: u16 = 0x1000;
/// Where the definitions of ports and emulated endpoints end; more is no fault, only slower.
const ROOM: u16 = 0x180;

/// Configuration space in the making. Capabilities are linked in the order in which they are added.
#[derive(Debug)]
pub struct ConfigBuilder {
    space: ConfigSpace,
    /// Standard capabilities so far.
    taken: Vec<Extent>,
    /// Offset of the last extended capability, and the first free byte behind it.
    extended: Option<(u16, u16)>,
}

impl ConfigBuilder {
    /// An endpoint's header.
    #[must_use]
    pub fn type0(header: &Type0<'_>) -> Self {
        Self::with(header.registers())
    }

    /// A bridge's header.
    #[must_use]
    pub fn type1(header: &Type1<'_>) -> Self {
        Self::with(header.registers())
    }

    fn with(registers: Vec<(u16, RegDef)>) -> Self {
        let mut space = ConfigSpace::with_room(ROOM);
        for (offset, def) in registers {
            space.define(Reg::containing(offset), def);
        }
        Self { space, taken: Vec::new(), extended: None }
    }

    /// Places a standard capability in the first room that is large enough and links it. Returns its offset.
    pub fn capability(&mut self, capability: &dyn Capability) -> Result<u8, BuildError> {
        let layout = capability.layout();
        let len = bytes(&layout);
        let at = first_free(&self.taken, len).ok_or(BuildError::NoRoom { id: capability.id(), len })?;
        self.place(at, capability.id(), layout)
    }

    /// Places a standard capability at `at` (a multiple of 4, 0x40 or more) and links it.
    pub fn capability_at(&mut self, at: u8, capability: &dyn Capability) -> Result<u8, BuildError> {
        self.place(at, capability.id(), capability.layout())
    }

    fn place(&mut self, at: u8, id: u8, mut layout: Vec<RegDef>) -> Result<u8, BuildError> {
        let len = bytes(&layout);
        let end = u16::from(at).saturating_add(len);
        if !at.is_multiple_of(4) || at < header::END || end > EXTENDED || layout.is_empty() {
            return Err(BuildError::Place { id: id.into(), at: at.into(), len });
        }
        if let Some(other) = self.taken.iter().find(|other| other.overlaps(at.into(), len)) {
            return Err(BuildError::Overlap { id, at, other: other.id, other_at: other.offset });
        }
        if let Some(first) = layout.first_mut() {
            if header_bits(*first) & 0xFFFF != 0 {
                return Err(BuildError::Header { id: id.into() });
            }
            first.reset |= u32::from(id);
        }
        let (link, shift) = match self.taken.last() {
            Some(last) => (u16::from(last.offset), 8),
            None => (header::CAPABILITIES, 0),
        };
        self.patch(link, u32::from(at) << shift);
        self.patch(header::COMMAND_STATUS, status::CAPABILITIES);
        self.define(at.into(), &layout);
        self.taken.push(Extent { id, offset: at, len });
        Ok(at)
    }

    /// Places an extended capability behind the last one and links it. Returns its offset; the first is at 0x100.
    pub fn extended(&mut self, capability: &dyn ExtendedCapability) -> Result<u16, BuildError> {
        let at = self.extended.map_or(EXTENDED, |(_, end)| end);
        self.extended_at(at, capability)
    }

    /// Places an extended capability at `at`, a multiple of 4 behind all earlier ones; the first must be at 0x100.
    pub fn extended_at(&mut self, at: u16, capability: &dyn ExtendedCapability) -> Result<u16, BuildError> {
        let (id, mut layout) = (capability.id(), capability.layout());
        let len = bytes(&layout);
        let fits = match self.extended {
            None => at == EXTENDED,
            Some((_, end)) => at >= end,
        };
        if !fits || !at.is_multiple_of(4) || len == 0 || at > END - len.min(END) {
            return Err(BuildError::Place { id, at, len });
        }
        if let Some(first) = layout.first_mut() {
            if header_bits(*first) != 0 {
                return Err(BuildError::Header { id });
            }
            first.reset = extended_header(id, capability.version(), 0);
        }
        if let Some((last, _)) = self.extended {
            self.patch(last, u32::from(at) << 20);
        }
        self.define(at, &layout);
        self.extended = Some((at, at + len));
        Ok(at)
    }

    /// The standard capabilities placed so far.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.taken
    }

    /// The finished registers, at their reset values.
    #[must_use]
    pub fn build(mut self) -> ConfigSpace {
        self.space.trim();
        self.space
    }

    fn define(&mut self, at: u16, layout: &[RegDef]) {
        for (offset, def) in (at..).step_by(4).zip(layout) {
            self.space.define(Reg::containing(offset), *def);
        }
    }

    fn patch(&mut self, offset: u16, bits: u32) {
        let reg = Reg::containing(offset);
        let def = self.space.definition(reg);
        self.space.define(reg, RegDef { reset: def.reset | bits, ..def });
    }
}

/// Bits of a dword that its layout defines.
const fn header_bits(def: RegDef) -> u32 {
    def.reset | def.writable | def.clear_on_one | def.sticky
}

fn bytes(layout: &[RegDef]) -> u16 {
    u16::try_from(layout.len().saturating_mul(4)).unwrap_or(u16::MAX)
}

/// First multiple of 4 from 0x40 at which `len` bytes lie free below 0x100.
pub(crate) fn first_free(taken: &[Extent], len: u16) -> Option<u8> {
    (header::END..=0xFC)
        .step_by(4)
        .find(|at| u16::from(*at).saturating_add(len) <= EXTENDED && !taken.iter().any(|other| other.overlaps((*at).into(), len)))
}

/// A layout that configuration space cannot have.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BuildError {
    /// The standard area is full.
    #[error("no room for capability {id:#04x}: it needs {len} bytes in one piece between 0x40 and 0x100")]
    NoRoom {
        /// Capability.
        id: u8,
        /// Its length.
        len: u16,
    },
    /// An offset outside its area, not a multiple of 4, or out of order.
    #[error("capability {id:#04x} of {len} bytes cannot be at {at:#05x}: take a multiple of 4 behind those before it, with room")]
    Place {
        /// Capability.
        id: u16,
        /// Offset asked for.
        at: u16,
        /// Its length.
        len: u16,
    },
    /// Two capabilities on the same bytes.
    #[error("capability {id:#04x} at {at:#04x} overlaps capability {other:#04x} at {other_at:#04x}")]
    Overlap {
        /// Capability.
        id: u8,
        /// Its offset.
        at: u8,
        /// The one that is there.
        other: u8,
        /// Where that starts.
        other_at: u8,
    },
    /// A layout that defines the id or the next pointer.
    #[error("capability {id:#04x} defines bits of its own header, which the builder fills")]
    Header {
        /// Capability.
        id: u16,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caps::{Vendor, id, walk};
    use crate::ext_caps::{Serial, walk_extended};
    use crate::ids::Ids;

    fn builder() -> ConfigBuilder {
        let header = Type0 { ids: &Ids::default(), interrupt_pin: 0, multifunction: false, memory: true, io: false };
        ConfigBuilder::type0(&header)
    }

    #[test]
    fn capabilities_are_found_in_the_order_in_which_they_were_added() {
        let mut builder = builder();
        assert_eq!(builder.capability_at(0xC8, &Vendor(vec![1, 2, 3])), Ok(0xC8));
        assert_eq!(builder.capability(&Vendor(vec![0; 13])), Ok(0x40));
        assert_eq!(builder.capability(&Vendor(vec![0; 1])), Ok(0x50));
        let space = builder.build();
        let found: Vec<(u8, u16)> = walk(|at| space.read(Reg::containing(at.into()))).iter().map(|c| (c.offset, c.len)).collect();
        assert_eq!(found, [(0xC8, 8), (0x40, 16), (0x50, 4)]);
    }

    #[test]
    fn a_header_without_capabilities_shows_no_list() {
        let space = builder().build();
        assert_eq!(space.read(Reg::containing(header::CAPABILITIES)), 0);
        assert_eq!(space.read(Reg::containing(header::COMMAND_STATUS)), 0);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut builder = builder();
        builder.capability_at(0x80, &Vendor(vec![0; 5])).unwrap();
        let overlap = BuildError::Overlap { id: id::VENDOR, at: 0x7C, other: id::VENDOR, other_at: 0x80 };
        assert_eq!(builder.capability_at(0x7C, &Vendor(vec![0; 5])), Err(overlap));
        for at in [0x3C, 0x42, 0xFC] {
            assert!(matches!(builder.capability_at(at, &Vendor(vec![0; 5])), Err(BuildError::Place { .. })), "{at:#x}");
        }
        assert_eq!(builder.capability(&Vendor(vec![0; 0x78])), Err(BuildError::NoRoom { id: id::VENDOR, len: 0x7C }));
    }

    #[test]
    fn extended_capabilities_form_a_chain_from_0x100() {
        let mut builder = builder();
        assert!(builder.extended_at(0x140, &Serial(1)).is_err());
        assert_eq!(builder.extended(&Serial(1)), Ok(0x100));
        assert_eq!(builder.extended_at(0x140, &Serial(2)), Ok(0x140));
        assert!(builder.extended_at(0x148, &Serial(2)).is_err());
        assert!(builder.extended_at(0xFF8, &Serial(2)).is_err());
        let space = builder.build();
        let found: Vec<u16> = walk_extended(|at| space.read(Reg::containing(at))).iter().map(|c| c.offset).collect();
        assert_eq!(found, [0x100, 0x140]);
    }
}
