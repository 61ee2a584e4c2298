//! Decides what a guest must not see of the device's configuration space as it is. Pure.
//!
//! | registers | guest |
//! |---|---|
//! | memory and I/O enable | kept here: decoding stays on in hardware, or the kernel would tear every mapping down |
//! | bus master | kept here and written through |
//! | BARs | kept by [`pci::bar::Bars`] |
//! | expansion ROM | address kept by [`pci::bar::Bars`], content read from the device once |
//! | header type, multi-function bit | the guest topology's |
//! | interrupt line | kept here |
//! | MSI, MSI-X control, address, data | kept here, see [`super::msi`] and [`super::msix`] |
//! | power state | kept here: in D3hot the kernel would tear every mapping down. Nothing is reset on the way back, and the guest sees that (no soft reset) |
//! | PCI Express type and link | changed only where the guest's place asks for it; on a conventional bus the whole capability is hidden |
//! | SR-IOV, ARI, resizable BARs | hidden: guests cannot make functions, number them, or resize |
//! | PRI, PASID | hidden: both need an IOMMU of the guest |
//! | ATS | visible, control read-only: the host's IOMMU driver decides |
//! | everything else | the device's |

use pci::caps::clique::{self, Clique, CliqueError, place};
use pci::caps::express::reg as express;
use pci::caps::power;
use pci::emulated::Attachment;
use pci::ext_caps::{ExtendedExtent, id as extended};
use pci::link::{Link, LinkRate};
use pci::regs::{command, header, status, type0};
use thiserror::Error;

use super::facts::{ExpressFact, Facts, Snapshot};
use super::overlay::Overlay;

/// Extended capability ids that no emulated function has (PCI Code and ID Assignment 1.16, 3).
mod id {
    pub const ATS: u16 = 0x000F;
    pub const PRI: u16 = 0x0013;
    pub const PASID: u16 = 0x001B;
    pub const VF_REBAR: u16 = 0x0024;
}

/// Device/port types of functions.
const ENDPOINT: u8 = 0;
const LEGACY_ENDPOINT: u8 = 1;
const INTEGRATED: u8 = 9;

/// Where the guest finds the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Below a port with this link.
    BelowPort(Link),
    /// On a root bus.
    RootBus,
    /// On a conventional bus: no guest expects the PCI Express capability there, and none reaches the extended ones (the
    /// first 256 bytes are all that such a bus carries).
    Conventional,
}

impl From<Placement> for Attachment {
    fn from(placement: Placement) -> Self {
        match placement {
            Placement::BelowPort(link) => Self::Link(link),
            Placement::RootBus => Self::RootBus,
            Placement::Conventional => Self::Conventional,
        }
    }
}

/// What a user can ask for.
#[derive(Debug, Clone, Copy)]
pub struct VfioOptions {
    /// NVIDIA peer-to-peer approval.
    pub clique: Option<Clique>,
    /// The clique is shown on a function that is no NVIDIA display controller, too.
    pub clique_any_vendor: bool,
    /// Where the guest finds the function.
    pub placement: Placement,
}

/// The layer over the registers of a function with these `facts`.
pub fn overlay(facts: &Facts, config: &Snapshot, options: &VfioOptions) -> Result<Overlay, PatchError> {
    let mut overlay = Overlay::default();
    overlay.emulate(header::COMMAND_STATUS, command::MEMORY | command::IO, 0);
    overlay.copy(header::COMMAND_STATUS, command::BUS_MASTER);
    overlay.replace(header::HEADER_TYPE, header::MULTI_FUNCTION, 0);
    for offset in (header::BAR0..).step_by(4).take(6) {
        overlay.protect(offset, u32::MAX);
    }
    overlay.protect(type0::ROM, u32::MAX);
    overlay.emulate(header::INTERRUPT, 0xFF, 0xFF);
    if let Some((offset, _)) = facts.power {
        overlay.emulate(power::control_of(offset), power::STATE, 0);
        overlay.replace(power::control_of(offset), power::NO_SOFT_RESET, power::NO_SOFT_RESET);
    }
    if let Some(msi) = facts.msi {
        let dwords = 3 + u16::from(msi.wide) + 2 * u16::from(msi.maskable);
        for index in 0..dwords {
            overlay.protect(u16::from(msi.offset) + 4 * index, u32::MAX);
        }
    }
    if let Some(msix) = facts.msix {
        overlay.protect(msix.offset.into(), u32::MAX);
    }
    if let Some(express) = facts.express {
        place_express(&mut overlay, facts, express, options.placement);
    }
    for capability in &facts.extended {
        patch_extended(&mut overlay, config, capability);
    }
    if let Some(clique) = options.clique {
        clique::check(&facts.ids, options.clique_any_vendor).map_err(|source| PatchError::Clique { source })?;
        link_clique(&mut overlay, facts, clique)?;
    }
    Ok(overlay)
}

/// A function has the type and the link registers that its place allows (PCIe 6.0 7.5.3.2).
fn place_express(overlay: &mut Overlay, facts: &Facts, fact: ExpressFact, placement: Placement) {
    const TYPE: u32 = 0xF << 20;
    /// Speed and width of link capabilities, and in the upper half of link control those of link status.
    const RATE: u32 = 0x3FF;
    let at = |register: u8| u16::from(fact.offset) + u16::from(register);
    let len = facts.capabilities.iter().find(|extent| extent.offset == fact.offset).map_or(0, |extent| extent.len);
    let has = |register: u8| len >= u16::from(register) + 4;
    match placement {
        Placement::BelowPort(link) if fact.kind == INTEGRATED && has(express::LINK_CONTROL) => {
            let rate = |rate: LinkRate| u32::from(rate.speed.encoding()) | u32::from(rate.width.lanes()) << 4;
            overlay.replace(at(0), TYPE, u32::from(ENDPOINT) << 20);
            overlay.replace(at(express::LINK_CAPABILITIES), RATE, rate(link.max));
            overlay.replace(at(express::LINK_CONTROL), RATE << 16, rate(link.current) << 16);
            if has(express::LINK_CAPABILITIES_2) {
                overlay.replace(at(express::LINK_CAPABILITIES_2), 0xFE, link.max.speed.supported_vector());
            }
        }
        Placement::Conventional => {
            // An entry with id 0 keeps the chain and is nobody's. What follows it reads 0.
            overlay.replace(fact.offset.into(), 0xFFFF_00FF, 0);
            for offset in (at(4)..u16::from(fact.offset) + len).step_by(4) {
                overlay.replace(offset, u32::MAX, 0);
            }
        }
        Placement::RootBus if matches!(fact.kind, ENDPOINT | LEGACY_ENDPOINT) => {
            overlay.replace(at(0), TYPE, u32::from(INTEGRATED) << 20);
            let second = express::LINK_CAPABILITIES_2;
            for register in [express::LINK_CAPABILITIES, express::LINK_CONTROL, second, second + 4] {
                if has(register) {
                    overlay.replace(at(register), u32::MAX, 0);
                }
            }
        }
        _ => {}
    }
}

fn patch_extended(overlay: &mut Overlay, config: &Snapshot, capability: &ExtendedExtent) {
    let len = match capability.id {
        extended::SRIOV => 0x40,
        extended::ARI | id::PASID => 8,
        id::PRI => 0x10,
        // Two dwords for each BAR; the first control register counts them.
        extended::REBAR | id::VF_REBAR => {
            let control = config.dword(capability.offset.saturating_add(8));
            4 + 8 * u16::from((control >> 5).to_le_bytes()[0] & 7)
        }
        id::ATS => {
            overlay.protect(capability.offset.saturating_add(4), 0xFFFF_0000);
            return;
        }
        _ => return,
    };
    // An entry with id 0 keeps the chain and is nobody's.
    overlay.replace(capability.offset, 0xFFFF, u32::from(extended::NULL));
    let end = capability.offset.saturating_add(len).min(0x1000);
    for offset in (capability.offset..end).step_by(4) {
        overlay.protect(offset, u32::MAX);
    }
}

/// Puts the capability where there is room and makes it the last of the list.
fn link_clique(overlay: &mut Overlay, facts: &Facts, clique: Clique) -> Result<(), PatchError> {
    let at = place(&facts.capabilities).ok_or(PatchError::NoRoom)?;
    let [first, second] = clique.dwords();
    overlay.replace(at.into(), u32::MAX, first);
    overlay.replace(u16::from(at) + 4, u32::MAX, second);
    match facts.capabilities.last() {
        Some(last) => overlay.replace(last.offset.into(), 0xFF00, u32::from(at) << 8),
        None => {
            overlay.replace(header::CAPABILITIES, 0xFF, at.into());
            overlay.replace(header::COMMAND_STATUS, status::CAPABILITIES, status::CAPABILITIES);
        }
    }
    Ok(())
}

/// A change that cannot be made.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PatchError {
    /// The clique suits no such device.
    #[error("the device cannot have a clique")]
    Clique {
        /// Why.
        #[source]
        source: CliqueError,
    },
    /// The device's capabilities fill its configuration space.
    #[error("no 8 bytes are free between the capabilities at 0x40 to 0xff for the clique: leave the clique out")]
    NoRoom,
}

#[cfg(test)]
mod tests;
