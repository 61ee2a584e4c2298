//! Decides whether a bus of the host may be reset for a function that the host cannot reset alone: whatever else the reset would
//! hit must be this machine's, and under reset as well.
//!
//! A machine that starts or resets has all of its functions under reset at one time, and so has a guest that resets the bus below a
//! port. The functions of a device (a GPU and its audio, say) are then reset together, once.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use pci::address::HostBdf;
use pci::sync::{lock, wait};
use thiserror::Error;

/// Functions of the host that a machine has open.
#[derive(Debug, Default)]
pub struct Neighbours {
    table: Mutex<Table>,
    /// A reset of hardware is over.
    over: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    open: BTreeMap<HostBdf, Known>,
    /// Where a reset of hardware is under way. The lock is free meanwhile: it is no concern of other functions.
    hit: BTreeSet<HostBdf>,
}

/// One of them.
#[derive(Debug, Clone, Copy)]
struct Known {
    group: u32,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No guest has used it yet.
    Opened,
    /// Likewise, and since it was opened it was reset with its bus.
    Fresh,
    /// The guest can use it.
    InUse,
    /// Nothing reaches it, and its reset is owed.
    UnderReset,
    /// Nothing reaches it, and it was reset, alone or with its bus.
    Reset,
}

impl State {
    /// No guest has used it since it was opened.
    const fn is_unused(self) -> bool {
        matches!(self, Self::Opened | Self::Fresh)
    }

    /// What it is after a reset of hardware that hit it.
    const fn after(self, done: bool) -> Self {
        match (self, done) {
            (Self::Opened | Self::Fresh, true) => Self::Fresh,
            (Self::Opened | Self::Fresh, false) => Self::Opened,
            (Self::UnderReset | Self::Reset, true) => Self::Reset,
            // It may be in any state.
            (Self::UnderReset | Self::Reset, false) => Self::UnderReset,
            (Self::InUse, _) => Self::InUse,
        }
    }
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
    /// The host does not tell what else it would hit. Nothing was done.
    #[error("the host does not tell what would be reset with it")]
    Untold {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
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
        // Locks that are not to be had, before anything is reset (linux: drivers/pci/pci.c, pci_try_reset_function and
        // pci_reset_bus; drivers/vfio/pci/vfio_pci_core.c, vfio_pci_dev_set_hot_reset).
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy => Self::Held,
            _ => Self::Failed { source },
        }
    }
}

impl Neighbours {
    /// Function `at` of IOMMU group `group` is open as long as the result lives. Waits while a reset hits it.
    pub fn open(self: &Arc<Self>, at: HostBdf, group: u32) -> Neighbour {
        self.unhit(&BTreeSet::from([at])).open.insert(at, Known { group, state: State::Opened });
        Neighbour { all: Arc::clone(self), at }
    }

    /// The guest can use all that are open from here on, but for those that `wait` until they are made.
    pub fn hand_over(&self, wait: &BTreeSet<HostBdf>) {
        let mut table = lock(&self.table);
        let handed = table.open.iter_mut().filter(|(at, known)| known.state.is_unused() && !wait.contains(at));
        handed.for_each(|(_, known)| known.state = State::InUse);
    }

    /// The table, once no reset hits any of `these`.
    fn unhit(&self, these: &BTreeSet<HostBdf>) -> MutexGuard<'_, Table> {
        let mut table = lock(&self.table);
        while !table.hit.is_disjoint(these) {
            table = wait(&self.over, table);
        }
        table
    }
}

impl Table {
    fn set(&mut self, at: HostBdf, next: impl FnOnce(State) -> State) {
        if let Some(known) = self.open.get_mut(&at) {
            known.state = next(known.state);
        }
    }

    /// Whether all `affected` may be reset: they are this machine's, and no guest uses them.
    fn check(&self, affected: &[Affected]) -> Result<(), NotReset> {
        let ours: BTreeSet<u32> = self.open.values().map(|known| known.group).collect();
        for &Affected { at, group } in affected {
            match self.open.get(&at) {
                Some(Known { state: State::InUse, .. }) => return Err(NotReset::InUse { at }),
                // One that nobody has opened loses nothing, and nobody else can open it.
                Some(_) => {}
                None if ours.contains(&group) => {}
                None => return Err(NotReset::NotOurs { at }),
            }
        }
        Ok(())
    }
}

/// A function that is open.
#[derive(Debug)]
pub struct Neighbour {
    all: Arc<Neighbours>,
    at: HostBdf,
}

impl Neighbour {
    /// Nothing reaches the function as long as the result lives. There is one at a time. Its reset is owed, unless it was reset
    /// with its bus and nobody has used it since.
    #[must_use]
    pub fn under_reset(&self) -> UnderReset {
        lock(&self.all.table).set(self.at, |state| if state == State::Fresh { State::Reset } else { State::UnderReset });
        UnderReset { all: Arc::clone(&self.all), at: self.at }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        lock(&self.all.table).open.remove(&self.at);
    }
}

/// A function under reset.
#[derive(Debug)]
pub struct UnderReset {
    all: Arc<Neighbours>,
    at: HostBdf,
}

impl UnderReset {
    /// Has `reset`, which gets the IOMMU groups of all `affected`, reset the function, and them with it: none if it is reset alone.
    /// Nothing is done if it was reset since its own reset began. Waits while another reset hits any of them.
    pub fn reset(&self, affected: &[Affected], reset: impl FnOnce(&BTreeSet<u32>) -> io::Result<()>) -> Result<(), NotReset> {
        let hit: BTreeSet<HostBdf> = affected.iter().map(|affected| affected.at).chain([self.at]).collect();
        let mut table = self.all.unhit(&hit);
        if table.open.get(&self.at).is_some_and(|own| own.state == State::Reset) {
            return Ok(());
        }
        table.check(affected)?;
        table.hit.extend(&hit);
        drop(table);
        let done = reset(&affected.iter().map(|affected| affected.group).collect()).map_err(NotReset::from);
        let mut table = lock(&self.all.table);
        for at in hit {
            table.hit.remove(&at);
            // Of one that the host has hold of nothing was touched.
            if !matches!(done, Err(NotReset::Held)) {
                table.set(at, |state| state.after(done.is_ok()));
            }
        }
        drop(table);
        self.all.over.notify_all();
        done
    }
}

impl Drop for UnderReset {
    /// Waits while the reset of another function hits this one.
    fn drop(&mut self) {
        self.all.unhit(&BTreeSet::from([self.at])).set(self.at, |_| State::InUse);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

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
            function.reset(&both(), |groups| {
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
        all.hand_over(&BTreeSet::new());
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
        gpu.under_reset().reset(&affected, |_| Ok(())).unwrap();
    }

    #[test]
    fn what_the_host_says_is_told_and_the_next_one_may_try_again() {
        let all = Arc::new(Neighbours::default());
        let (gpu, audio) = (all.open(at(GPU), 5), all.open(at(AUDIO), 6));
        let (gpu, audio) = (gpu.under_reset(), audio.under_reset());
        let refused = gpu.reset(&both(), |_| Err(io::ErrorKind::WouldBlock.into()));
        assert!(matches!(refused, Err(NotReset::Held)));
        let refused = gpu.reset(&both(), |_| Err(io::ErrorKind::ResourceBusy.into()));
        assert!(matches!(refused, Err(NotReset::Held)));
        let refused = gpu.reset(&both(), |_| Err(io::ErrorKind::TimedOut.into()));
        assert!(matches!(refused, Err(NotReset::Failed { .. })));
        let mut bus = Bus::default();
        bus.reset(&audio).unwrap();
        bus.reset(&gpu).unwrap();
        assert_eq!(bus.0, [[5, 6]]);
    }

    #[test]
    fn case_c11_a_neighbour_that_no_guest_has_used_yet_is_reset_with_the_bus() {
        let all = Arc::new(Neighbours::default());
        let (_gpu, audio) = (all.open(at(GPU), 5), all.open(at(AUDIO), 6));
        let mut bus = Bus::default();
        // The host resets the GPU alone, and did when it was opened. It cannot do so with its audio.
        bus.reset(&audio.under_reset()).unwrap();
        assert_eq!(bus.0, [[5, 6]]);
        all.hand_over(&BTreeSet::new());
        assert!(matches!(bus.reset(&audio.under_reset()), Err(NotReset::InUse { at: other }) if other == at(GPU)));
    }

    #[test]
    fn case_c11_functions_of_a_bus_that_come_one_after_the_other_are_all_reset() {
        let all = Arc::new(Neighbours::default());
        let (gpu, audio) = (all.open(at(GPU), 5), all.open(at(AUDIO), 6));
        let mut bus = Bus::default();
        // Both wait until they can reach memory. One is made, and the guest has it.
        let first = gpu.under_reset();
        bus.reset(&first).unwrap();
        all.hand_over(&BTreeSet::from([at(AUDIO)]));
        drop(first);
        // Then the other one, which nobody has used since.
        let second = audio.under_reset();
        bus.reset(&second).unwrap();
        all.hand_over(&BTreeSet::new());
        drop(second);
        assert_eq!(bus.0, [[5, 6]]);
        // It is used from here on.
        assert!(matches!(bus.reset(&audio.under_reset()), Err(NotReset::InUse { at: other }) if other == at(GPU)));
    }

    #[test]
    fn case_c11_a_reset_that_failed_is_owed_to_those_that_it_hit() {
        let all = Arc::new(Neighbours::default());
        let (gpu, audio, other) = (all.open(at(GPU), 5), all.open(at(AUDIO), 6), all.open(at("0000:05:00.2"), 7));
        let mut bus = Bus::default();
        let gpu = gpu.under_reset();
        bus.reset(&gpu).unwrap();
        // The audio waits, and is fresh until this.
        let [_, hit] = both();
        assert!(other.under_reset().reset(&[hit], |_| Err(io::ErrorKind::TimedOut.into())).is_err());
        bus.reset(&audio.under_reset()).unwrap();
        bus.reset(&gpu).unwrap();
        assert_eq!(bus.0, [[5, 6], [5, 6]]);
    }

    #[test]
    fn case_c11_a_reset_that_the_host_refused_leaves_what_others_owe_as_it_was() {
        let all = Arc::new(Neighbours::default());
        let (gpu, audio, other) = (all.open(at(GPU), 5), all.open(at(AUDIO), 6), all.open(at("0000:05:00.2"), 7));
        let mut bus = Bus::default();
        let gpu = gpu.under_reset();
        bus.reset(&gpu).unwrap();
        // The GPU is reset, and the audio fresh.
        let refused = other.under_reset().reset(&both(), |_| Err(io::ErrorKind::WouldBlock.into()));
        assert!(matches!(refused, Err(NotReset::Held)));
        bus.reset(&gpu).unwrap();
        bus.reset(&audio.under_reset()).unwrap();
        assert_eq!(bus.0, [[5, 6]]);
    }

    #[test]
    fn what_was_reset_with_its_bus_is_not_reset_alone_as_well() {
        let all = Arc::new(Neighbours::default());
        let (gpu, audio) = (all.open(at(GPU), 5), all.open(at(AUDIO), 6));
        let (gpu, audio) = (gpu.under_reset(), audio.under_reset());
        let mut bus = Bus::default();
        bus.reset(&audio).unwrap();
        gpu.reset(&[], |_| Err(io::ErrorKind::TimedOut.into())).unwrap();
        assert_eq!(bus.0, [[5, 6]]);
    }

    #[test]
    fn functions_elsewhere_are_reset_and_opened_while_a_bus_is_reset() {
        let all = Arc::new(Neighbours::default());
        let (gpu, other) = (all.open(at(GPU), 5), all.open(at("0000:06:00.0"), 7));
        let (done, told) = channel();
        let reset = gpu.under_reset().reset(&[Affected { at: at(GPU), group: 5 }], |_| {
            let all = Arc::clone(&all);
            thread::spawn(move || {
                other.under_reset().reset(&[], |_| Ok(())).unwrap();
                drop((other, all.open(at("0000:07:00.0"), 8)));
                done.send(()).unwrap();
            });
            told.recv_timeout(Duration::from_secs(60)).map_err(io::Error::other)
        });
        reset.unwrap();
    }

    #[test]
    fn what_is_hit_is_neither_reset_again_nor_let_go_before_that_is_over() {
        let all = Arc::new(Neighbours::default());
        let (gpu, audio) = (all.open(at(GPU), 5), all.open(at(AUDIO), 6));
        let (gpu, audio) = (gpu.under_reset(), audio.under_reset());
        let (say, said) = channel();
        thread::scope(|scope| {
            let reset = gpu.reset(&both(), |_| {
                scope.spawn(move || {
                    audio.reset(&[], |_| Err(io::ErrorKind::TimedOut.into())).unwrap();
                    drop(audio);
                    say.send(()).unwrap();
                });
                // However long it takes here, nothing is said.
                assert!(said.recv_timeout(Duration::from_millis(20)).is_err());
                Ok(())
            });
            reset.unwrap();
            said.recv().unwrap();
        });
    }
}
