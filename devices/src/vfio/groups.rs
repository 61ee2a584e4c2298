//! Which IOMMU groups a machine has open, and how many functions use each. A group joins the machine's container with its
//! first function and leaves it after its last one, as functions of one group may come and go on their own.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use pci::sync::lock;
use rustix::io::Errno;

/// What the kernel does with groups; tests have a fake.
pub trait Kernel: Send + Sync {
    /// A group that is open.
    type Group: Send;
    /// Why one cannot be used.
    type Error;

    /// Opens group `id`, which nobody else may have open.
    fn open(&self, id: u32) -> Result<Self::Group, Self::Error>;
    /// Puts it into the container. With the `first` group the container becomes an IOMMU domain, without any maps.
    fn join(&self, group: &Self::Group, first: bool) -> Result<(), Self::Error>;
    /// Takes it out; the kernel drops all maps with the last one. Fails while a function of it is open.
    fn leave(&self, group: &Self::Group) -> io::Result<()>;
    /// Has the virtual machine know that its functions are used.
    fn announce(&self, group: &Self::Group) -> Result<(), Self::Error>;
    /// Takes that back.
    fn withdraw(&self, group: &Self::Group) -> io::Result<()>;
}

/// The groups of one machine.
pub struct Groups<K: Kernel> {
    kernel: K,
    /// By number.
    open: Mutex<BTreeMap<u32, Used<K::Group>>>,
}

/// A group in the container. Nobody uses one that the kernel would not let go; it stays, and so do the maps.
struct Used<G> {
    group: G,
    users: usize,
}

impl<K: Kernel> Groups<K> {
    /// None yet.
    pub fn new(kernel: K) -> Self {
        Self { kernel, open: Mutex::default() }
    }

    /// What the kernel does with them.
    pub const fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Has group `id` in the container as long as the result lives.
    pub fn take(self: &Arc<Self>, id: u32) -> Result<Lease<K>, K::Error> {
        let mut open = self.lock();
        if let Some(used) = open.get_mut(&id) {
            if used.users == 0 {
                self.kernel.announce(&used.group)?;
            }
            used.users = used.users.saturating_add(1);
        } else {
            let group = self.kernel.open(id)?;
            self.kernel.join(&group, open.is_empty())?;
            if let Err(error) = self.kernel.announce(&group) {
                // Closed with this error, it leaves as well.
                let _ = self.kernel.leave(&group);
                return Err(error);
            }
            open.insert(id, Used { group, users: 1 });
        }
        Ok(Lease { groups: Arc::clone(self), id })
    }

    /// Whether none is in the container, so that it has no maps. Those that would not go are asked once more.
    pub fn is_empty(&self) -> bool {
        let mut open = self.lock();
        open.retain(|_, used| used.users != 0 || self.leave(&used.group).is_err());
        open.is_empty()
    }

    /// Does something with group `id`; `None` if it is not open.
    pub fn with<T>(&self, id: u32, act: impl FnOnce(&K::Group) -> T) -> Option<T> {
        self.lock().get(&id).map(|used| act(&used.group))
    }

    fn put(&self, id: u32) {
        let mut open = self.lock();
        let Some(used) = open.get_mut(&id) else { return };
        used.users = used.users.saturating_sub(1);
        if used.users != 0 {
            return;
        }
        if let Err(error) = self.kernel.withdraw(&used.group) {
            log::error!("KVM keeps IOMMU group {id}: {error}");
        }
        match self.leave(&used.group) {
            Ok(()) => drop(open.remove(&id)),
            Err(error) => log::warn!("IOMMU group {id} cannot leave yet: {error}"),
        }
    }

    /// Takes `group` out of the container. One that is in none is out: the kernel does that by itself when the host takes the last
    /// function back (linux: drivers/vfio/group.c, `vfio_device_remove_group`), and such a group opens no function ever again.
    fn leave(&self, group: &K::Group) -> io::Result<()> {
        match self.kernel.leave(group) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => Ok(()),
            left => left,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Used<K::Group>>> {
        lock(&self.open)
    }
}

/// One function's use of a group. Close the function before this goes.
pub struct Lease<K: Kernel> {
    groups: Arc<Groups<K>>,
    id: u32,
}

impl<K: Kernel> Lease<K> {
    /// All groups of the machine.
    pub const fn groups(&self) -> &Arc<Groups<K>> {
        &self.groups
    }

    /// Does something with the group. `None` is not seen: the group stays as long as the lease.
    pub fn with<T>(&self, act: impl FnOnce(&K::Group) -> T) -> Option<T> {
        self.groups.with(self.id, act)
    }
}

impl<K: Kernel> Drop for Lease<K> {
    fn drop(&mut self) {
        self.groups.put(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes what is called, and answers as the kernel does.
    #[derive(Default)]
    struct Fake {
        calls: Mutex<Vec<String>>,
        /// Groups with a function that is open.
        busy: Mutex<Vec<u32>>,
        /// Groups that the host took back.
        gone: Mutex<Vec<u32>>,
        refuses: Mutex<Option<&'static str>>,
    }

    impl Fake {
        fn call(&self, what: &'static str, group: u32) -> io::Result<()> {
            self.calls.lock().unwrap().push(format!("{what} {group}"));
            let busy = what == "leave" && self.busy.lock().unwrap().contains(&group);
            let gone = what == "leave" && self.gone.lock().unwrap().contains(&group);
            match *self.refuses.lock().unwrap() {
                Some(refused) if refused == what => Err(io::Error::from(io::ErrorKind::InvalidInput)),
                _ if gone => Err(Errno::INVAL.into()),
                _ if busy => Err(io::Error::from(io::ErrorKind::ResourceBusy)),
                _ => Ok(()),
            }
        }
    }

    impl Kernel for Fake {
        type Group = u32;
        type Error = io::Error;

        fn open(&self, id: u32) -> io::Result<u32> {
            self.call("open", id).map(|()| id)
        }

        fn join(&self, group: &u32, first: bool) -> io::Result<()> {
            self.call(if first { "join first" } else { "join" }, *group)
        }

        fn leave(&self, group: &u32) -> io::Result<()> {
            self.call("leave", *group)
        }

        fn announce(&self, group: &u32) -> io::Result<()> {
            self.call("announce", *group)
        }

        fn withdraw(&self, group: &u32) -> io::Result<()> {
            self.call("withdraw", *group)
        }
    }

    fn calls(groups: &Groups<Fake>) -> Vec<String> {
        std::mem::take(&mut *groups.kernel.calls.lock().unwrap())
    }

    #[test]
    fn a_group_joins_with_its_first_function_and_leaves_after_its_last() {
        let groups = Arc::new(Groups::new(Fake::default()));
        // Twice, as nothing may be left of the first time.
        for _ in 0..2 {
            let gpu = groups.take(5).unwrap();
            let audio = groups.take(5).unwrap();
            assert_eq!(calls(&groups), ["open 5", "join first 5", "announce 5"]);
            drop(gpu);
            assert_eq!(calls(&groups), [""; 0], "the other function keeps it");
            assert!(!groups.is_empty());
            drop(audio);
            assert_eq!(calls(&groups), ["withdraw 5", "leave 5"]);
            assert!(groups.is_empty());
        }
    }

    #[test]
    fn the_domain_is_made_with_the_first_group_and_again_when_all_have_left() {
        let groups = Arc::new(Groups::new(Fake::default()));
        let (gpu, nic) = (groups.take(5).unwrap(), groups.take(7).unwrap());
        drop(gpu);
        let again = groups.take(5).unwrap();
        assert_eq!(
            calls(&groups),
            ["open 5", "join first 5", "announce 5", "open 7", "join 7", "announce 7", "withdraw 5", "leave 5"]
                .into_iter()
                .chain(["open 5", "join 5", "announce 5"])
                .collect::<Vec<_>>()
        );
        drop((nic, again));
        assert!(groups.is_empty());
        calls(&groups);
        let _nic = groups.take(7).unwrap();
        assert_eq!(calls(&groups), ["open 7", "join first 7", "announce 7"]);
    }

    #[test]
    fn a_group_that_cannot_leave_keeps_the_maps_until_it_can() {
        let groups = Arc::new(Groups::new(Fake::default()));
        groups.kernel.busy.lock().unwrap().push(5);
        drop(groups.take(5).unwrap());
        assert!(!groups.is_empty(), "its maps are there");
        calls(&groups);
        drop(groups.take(5).unwrap());
        assert_eq!(calls(&groups), ["announce 5", "withdraw 5", "leave 5"], "it is used as it is");
        let _nic = groups.take(7).unwrap();
        assert_eq!(calls(&groups), ["open 7", "join 7", "announce 7"]);
        groups.kernel.busy.lock().unwrap().clear();
        assert!(!groups.is_empty(), "another one is in use");
        assert_eq!(calls(&groups), ["leave 5"]);
    }

    #[test]
    fn a_group_that_the_host_took_back_is_opened_anew_when_it_comes_again() {
        let groups = Arc::new(Groups::new(Fake::default()));
        let lease = groups.take(5).unwrap();
        groups.kernel.gone.lock().unwrap().push(5);
        drop(lease);
        calls(&groups);
        assert!(groups.is_empty(), "it has no maps");
        groups.kernel.gone.lock().unwrap().clear();
        let _again = groups.take(5).unwrap();
        assert_eq!(calls(&groups), ["open 5", "join first 5", "announce 5"]);
    }

    #[test]
    fn what_is_refused_leaves_nothing_behind() {
        for refused in ["open", "join first", "announce"] {
            let groups = Arc::new(Groups::new(Fake::default()));
            *groups.kernel.refuses.lock().unwrap() = Some(refused);
            assert!(groups.take(5).is_err());
            assert!(groups.is_empty(), "{refused}");
            *groups.kernel.refuses.lock().unwrap() = None;
            calls(&groups);
            let lease = groups.take(5).unwrap();
            assert_eq!(calls(&groups), ["open 5", "join first 5", "announce 5"]);
            assert_eq!(lease.with(|group| *group), Some(5));
        }
    }
}
