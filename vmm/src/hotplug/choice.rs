//! Decides which free port a device goes to that names none. Pure.
//!
//! Of the ports with room for it: the nearest to where it is on the host; of those, one that is not another device's place
//! there; of those, the one that keeps least, so that large windows are left to those who need them; of those, the first.

use std::fmt;

use pci::hierarchy::{Missing, Shortfall};
use pci::topology::Name;

use super::nearness::Far;

/// A port that is free.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Its name.
    pub name: Name,
    /// How near it is to where the device is on the host.
    pub far: Far,
    /// Another device belongs here.
    pub is_of_other: bool,
    /// Bytes of its prefetchable window.
    pub prefetchable: u64,
    /// Bytes of its memory window.
    pub memory: u64,
    /// Why it does not do; `None` if the device fits.
    pub unfit: Option<Unfit>,
}

/// Why a free port does not do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unfit {
    /// The device does not fit.
    Room(Shortfall),
    /// Another device will come there.
    Promised(Name),
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Room(missing) => write!(f, "{missing}"),
            Self::Promised(by) => write!(f, "it is promised to device {by}, which waits until it can reach memory"),
        }
    }
}

/// The place in `free` of the port for the device, or why none does.
pub fn choose(free: &[Candidate]) -> Result<usize, Refusals> {
    let fits = free.iter().enumerate().filter(|(_, port)| port.unfit.is_none());
    let best = fits.min_by_key(|(_, port)| (port.far, port.is_of_other, port.prefetchable, port.memory));
    best.map(|(index, _)| index).ok_or_else(|| {
        let refused = free.iter().filter_map(|port| Some((port.name.clone(), port.unfit.clone()?)));
        Refusals(refused.collect())
    })
}

/// Why none of the free ports does, in their order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Refusals(pub Vec<(Name, Unfit)>);

/// Reasons that a message lists, and ports of each.
const SHOWN: usize = 4;

impl Refusals {
    /// Everything that is missing somewhere, once for each window.
    pub fn missing(&self) -> Shortfall {
        let mut all: Vec<Missing> = Vec::new();
        for (_, unfit) in &self.0 {
            let Unfit::Room(Shortfall(missing)) = unfit else { continue };
            for missing in missing {
                match all.iter_mut().find(|one| one.of == missing.of) {
                    Some(one) => one.enough = one.enough.max(missing.enough),
                    None => all.push(*missing),
                }
            }
        }
        Shortfall(all)
    }
}

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut reasons: Vec<(String, Vec<&Name>)> = Vec::new();
        for (name, unfit) in &self.0 {
            let reason = unfit.to_string();
            match reasons.iter_mut().find(|(same, _)| *same == reason) {
                Some((_, names)) => names.push(name),
                None => reasons.push((reason, vec![name])),
            }
        }
        for (index, (reason, names)) in reasons.iter().take(SHOWN).enumerate() {
            f.write_str(if index == 0 { "" } else { "; " })?;
            for (index, name) in names.iter().take(SHOWN).enumerate() {
                write!(f, "{}`{name}`", if index == 0 { "" } else { ", " })?;
            }
            if let Some(more) = names.len().checked_sub(SHOWN).filter(|more| *more > 0) {
                write!(f, " and {more} more")?;
            }
            write!(f, ": {reason}")?;
        }
        let rest: usize = reasons.iter().skip(SHOWN).map(|(_, names)| names.len()).sum();
        if rest > 0 { write!(f, "; {rest} more in a like way") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
