//! Decides whether a bus of the host may be reset for a function that the host cannot reset alone: whatever else the reset would
//! hit must be this machine's, and under reset as well.
//!
//! A machine that starts or resets has all of its functions under reset at one time, and so has a guest that resets the bus below a
//! port. The functions of a device (a GPU and its audio, say) are then reset together, once.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};

use pci::address::HostBdf;
use pci::sync::lock;
use thiserror::Error;

/// Functions of the host that a machine has open.
#[derive(Debug, Default)]
pub struct Neighbours(Mutex<BTreeMap<HostBdf, Known>>);

/// One of them.
#[derive(Debug, Clone, Copy)]
struct Known {
    group: u32,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The guest can use it.
    InUse,
    /// Nothing reaches it, and its reset is owed.
    UnderReset,
    /// Nothing reaches it, and its bus was reset.
    Reset,
}

/// A function that a reset of the bus would hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Affected {
    /// Its address.
    pub at: HostBdf,
    /// Its IOMMU group.
    pub group: u32,
}

/// Why a function was not reset. It may have stopped sending requests, and keeps its state.
#[derive(Debug, Error)]
pub enum NotReset {
    /// Neither it nor its bus can be.
    #[error("the host has no way to reset it")]
    NoWay,
    /// The bus has what is not this machine's.
    #[error(
        "the host resets it together with {at} only, which this machine does not have: bind that to vfio-pci and give it as a device, too"
    )]
    NotOurs {
        /// What it has.
        at: HostBdf,
    },
    /// The bus has what the guest uses.
    #[error("the host resets it together with {at} only, which is in use")]
    InUse {
        /// What it has.
        at: HostBdf,
    },
    /// The host lets nobody reset it, as while it waits to have it back.
    #[error("the host has hold of it, as while it takes it back")]
    Held,
    /// The host failed to; the function may be in any state.
    #[error("the host failed to reset it")]
    Failed {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

impl From<io::Error> for NotReset {
    fn from(source: io::Error) -> Self {
        // linux: drivers/pci/pci.c, pci_try_reset_function and pci_reset_bus
        if source.kind() == io::ErrorKind::WouldBlock { Self::Held } else { Self::Failed { source } }
    }
}

impl Neighbours {
    /// Function `at` of IOMMU group `group` is open as long as the result lives.
    pub fn open(self: &Arc<Self>, at: HostBdf, group: u32) -> Neighbour {
        lock(&self.0).insert(at, Known { group, state: State::InUse });
        Neighbour { all: Arc::clone(self), at }
    }

    fn set(&self, at: HostBdf, state: State) {
        if let Some(known) = lock(&self.0).get_mut(&at) {
            known.state = state;
        }
    }
}

/// A function that is open.
#[derive(Debug)]
pub struct Neighbour {
    all: Arc<Neighbours>,
    at: HostBdf,
}

impl Neighbour {
    /// Nothing reaches the function as long as the result lives. There is one at a time.
    #[must_use]
    pub fn under_reset(&self) -> UnderReset {
        self.all.set(self.at, State::UnderReset);
        UnderReset { all: Arc::clone(&self.all), at: self.at }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        lock(&self.all.0).remove(&self.at);
    }
}

/// A function under reset.
#[derive(Debug)]
pub struct UnderReset {
    all: Arc<Neighbours>,
    at: HostBdf,
}

impl UnderReset {
    /// Has `reset`, which gets the IOMMU groups of all `affected`, reset the function's bus, unless that was done since its own
    /// reset began. Who ends the reset of another affected function waits meanwhile.
    pub fn reset_bus(&self, affected: &[Affected], reset: impl FnOnce(&BTreeSet<u32>) -> io::Result<()>) -> Result<(), NotReset> {
        let mut all = lock(&self.all.0);
        if all.get(&self.at).is_some_and(|own| own.state == State::Reset) {
            return Ok(());
        }
        let ours: BTreeSet<u32> = all.values().map(|known| known.group).collect();
        for &Affected { at, group } in affected {
            match all.get(&at) {
                Some(Known { state: State::InUse, .. }) => return Err(NotReset::InUse { at }),
                // One that nobody has opened loses nothing, and nobody else can open it.
                Some(_) => {}
                None if ours.contains(&group) => {}
                None => return Err(NotReset::NotOurs { at }),
            }
        }
        reset(&affected.iter().map(|affected| affected.group).collect())?;
        for affected in affected {
            if let Some(known) = all.get_mut(&affected.at) {
                known.state = State::Reset;
            }
        }
        Ok(())
    }
}

impl Drop for UnderReset {
    fn drop(&mut self) {
        self.all.set(self.at, State::InUse);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> HostBdf {
        text.parse().unwrap()
    }

    const GPU: &str = "0000:05:00.0";
    const AUDIO: &str = "0000:05:00.1";

    /// What a reset of either hits.
    fn both() -> [Affected; 2] {
        [Affected { at: at(GPU), group: 5 }, Affected { at: at(AUDIO), group: 6 }]
    }

    /// Groups of each reset of the bus.
    #[derive(Default)]
    struct Bus(Vec<Vec<u32>>);

    impl Bus {
        fn reset(&mut self, function: &UnderReset) -> Result<(), NotReset> {
            function.reset_bus(&both(), |groups| {
                self.0.push(groups.iter().copied().collect());
                Ok(())
            })
        }
    }

    #[test]
    fn case_c11_functions_of_a_bus_that_are_under_reset_together_are_reset_once() {
        let all = Arc::new(Neighbours::default());
        let (gpu, audio) = (all.open(at(GPU), 5), all.open(at(AUDIO), 6));
        let mut bus = Bus::default();
        for _ in 0..2 {
            let (gpu, audio) = (gpu.under_reset(), audio.under_reset());
            bus.reset(&gpu).unwrap();
            bus.reset(&audio).unwrap();
        }
        assert_eq!(bus.0, [[5, 6], [5, 6]]);
    }

    #[test]
    fn case_c11_a_neighbour_that_is_in_use_or_not_owned_keeps_a_bus_from_being_reset_and_is_named() {
        let all = Arc::new(Neighbours::default());
        let gpu = all.open(at(GPU), 5);
        let mut bus = Bus::default();
        let refused = bus.reset(&gpu.under_reset()).unwrap_err();
        assert!(matches!(refused, NotReset::NotOurs { at: other } if other == at(AUDIO)));
        let audio = all.open(at(AUDIO), 6);
        let refused = bus.reset(&gpu.under_reset()).unwrap_err();
        assert!(matches!(refused, NotReset::InUse { at: other } if other == at(AUDIO)));
        let (reset, ended) = (gpu.under_reset(), audio.under_reset());
        drop(ended);
        assert!(matches!(bus.reset(&reset), Err(NotReset::InUse { .. })), "its own reset is over");
        drop(audio);
        assert!(matches!(bus.reset(&reset), Err(NotReset::NotOurs { .. })), "it has left");
        assert_eq!(bus.0, [[0; 0]; 0]);
    }

    #[test]
    fn a_member_of_an_own_group_that_nobody_has_open_is_reset_too() {
        let all = Arc::new(Neighbours::default());
        let gpu = all.open(at(GPU), 5);
        let affected = both().map(|affected| Affected { group: 5, ..affected });
        gpu.under_reset().reset_bus(&affected, |_| Ok(())).unwrap();
    }

    #[test]
    fn what_the_host_says_is_told_and_the_next_one_may_try_again() {
        let all = Arc::new(Neighbours::default());
        let (gpu, audio) = (all.open(at(GPU), 5), all.open(at(AUDIO), 6));
        let (gpu, audio) = (gpu.under_reset(), audio.under_reset());
        let refused = gpu.reset_bus(&both(), |_| Err(io::ErrorKind::WouldBlock.into()));
        assert!(matches!(refused, Err(NotReset::Held)));
        let refused = gpu.reset_bus(&both(), |_| Err(io::ErrorKind::TimedOut.into()));
        assert!(matches!(refused, Err(NotReset::Failed { .. })));
        let mut bus = Bus::default();
        bus.reset(&audio).unwrap();
        bus.reset(&gpu).unwrap();
        assert_eq!(bus.0, [[5, 6]]);
    }
}
