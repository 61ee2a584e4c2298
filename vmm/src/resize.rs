//! Follows a change of a machine's processors and memory until the guest has what it was promised.
//!
//! A reply is sent when the new numbers are accounted. Processors that come are there at once; those that go are asked for,
//! and go when the guest gives them back. Memory is reserved, and pinned for host functions, by a thread of its own; then the
//! guest is told. Of a memory device's blocks the guest is told how many it is to have, as far as there is memory for them.

mod growth;
mod room;
mod step;

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use api::command::Resize;
use api::config::{Size, VmConfig};
use api::info::Progress;
use arch::memory_map::Range;
use devices::acpi::MemoryDevice;
use devices::complaints::chain;
use devices::eventfd;
use devices::virtio::mem::MemControl;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

pub use growth::bindings;
use growth::{Growth, GrowthError, Telling};
pub use room::{Extent, Room, region_count, share_out};
pub use step::ResizeError;
use step::{Regions, Step, step};

use crate::groundwork::{self, Preparation};
use crate::machine::Machine;
use crate::memory::Backing;
use crate::numa::GuestNuma;

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Coming {
    /// Memory devices of which the guest is told.
    Devices(Vec<MemoryDevice>),
    /// Memory behind blocks that the guest may plug.
    Blocks(Vec<MemoryDevice>),
}

impl Coming {
    fn devices(&self) -> &[MemoryDevice] {
        match self {
            Self::Devices(devices) | Self::Blocks(devices) => devices,
        }
    }
}

/// How far memory is that comes.
enum Stage {
    /// It is being made.
    Making(Preparation<GuestMemoryMmap>),
    /// Servers of devices are being told of it.
    Telling(Telling),
}

impl Stage {
    fn is_done(&self) -> bool {
        match self {
            Self::Making(preparation) => preparation.is_done(),
            Self::Telling(telling) => telling.is_done(),
        }
    }
}

/// One machine's changes.
pub struct Resizer {
    room: Room,
    /// How memory is backed.
    backing: Backing,
    numa: Option<GuestNuma>,
    prefault: bool,
    /// With what was promised.
    extent: Extent,
    /// Memory that is still to be prepared.
    waiting: VecDeque<Vec<MemoryDevice>>,
    /// Memory that a thread prepares; one at a time.
    growing: Option<(Coming, Stage)>,
    /// The regions of blocks.
    blocks: Vec<Arc<MemControl>>,
    /// What the guest had of them when it was last told.
    plugged: u64,
    /// How far memory was when its preparation ended, until that is told.
    last: Option<Progress>,
    /// Readable when a thread is done or the guest has other blocks.
    done: Arc<EventFd>,
}

impl Resizer {
    /// For a machine that has just been started with `extent`, with these regions of blocks.
    pub fn new(
        config: &VmConfig,
        numa: Option<&GuestNuma>,
        hot_plug: &[Range],
        mut extent: Extent,
        blocks: Vec<Arc<MemControl>>,
    ) -> io::Result<Self> {
        let done = Arc::new(eventfd::new()?);
        for control in &blocks {
            let done = Arc::clone(&done);
            control.on_change(Box::new(move || {
                // A full counter is readable already.
                let _ = done.write(1);
            }));
        }
        // A reset comes before what was promised has come.
        let _ = done.write(1);
        extent.blocks.resize(blocks.len(), 0);
        Ok(Self {
            room: Room::new(config, numa, hot_plug),
            backing: Backing { transparent_huge_pages: config.memory.prefault, ..groundwork::backing(&config.memory) },
            numa: numa.cloned(),
            prefault: config.memory.prefault,
            extent,
            waiting: VecDeque::new(),
            growing: None,
            blocks,
            plugged: 0,
            last: None,
            done,
        })
    }

    /// Whether `machine` can become `to`, with the reason if not.
    pub fn check(&self, machine: &Machine, to: &Resize) -> Result<(), ResizeError> {
        let most = machine.backends().servers().into_iter().map(|(name, server)| Regions {
            device: name.to_string(),
            has: machine.ram().num_regions(),
            most: server.most_regions(),
        });
        self.decide(to, most.min_by_key(|regions| regions.most).as_ref()).map(drop)
    }

    /// Decides the change to `to`, while servers of devices map all `regions` of RAM.
    fn decide(&self, to: &Resize, regions: Option<&Regions>) -> Result<Step, ResizeError> {
        let step = step(&self.room, &self.extent, to)?;
        let blocks = step.blocks.iter().flatten().zip(&self.blocks).enumerate();
        let blocks = blocks.filter(|(index, (wanted, control))| self.room.usable(*index, **wanted) > control.sizes().usable);
        let coming = step.memory.len() + blocks.count();
        let promised = self.waiting.iter().map(Vec::len).sum::<usize>()
            + self.growing.as_ref().map_or(0, |(coming, _)| coming.devices().len());
        match regions {
            Some(Regions { device, has, most }) if coming > 0 && has + promised + coming > *most => {
                Err(ResizeError::Regions { device: device.clone(), most: *most })
            }
            _ => Ok(step),
        }
    }

    /// Changes `machine`, or promises it. All or nothing of what is asked for is done.
    pub fn resize(&mut self, machine: &mut Machine, to: &Resize) -> Result<(), ResizeError> {
        let Step { come, go, memory, blocks } = step(&self.room, &self.extent, to)?;
        // First, since it can fail.
        let mut came = Vec::new();
        for number in come {
            if let Err(source) = machine.add_cpu(number) {
                came.into_iter().for_each(|number| machine.ask_for_cpu(number));
                return Err(ResizeError::Machine { number, source });
            }
            came.push(number);
        }
        self.extent.cpus.extend(came);
        for number in go {
            machine.ask_for_cpu(number);
            self.extent.cpus.remove(&number);
        }
        if !memory.is_empty() {
            self.extent.memory.extend(&memory);
            self.waiting.push_back(memory);
        }
        if let Some(blocks) = blocks {
            self.extent.blocks = blocks;
            self.request();
        }
        Ok(())
    }

    /// Tells the guest how many blocks it is to have, as far as there is memory behind them.
    fn request(&self) {
        for (control, wanted) in self.blocks.iter().zip(&self.extent.blocks) {
            let sizes = control.sizes();
            let possible = sizes.usable.min(*wanted);
            if possible != sizes.requested {
                control.request(0, possible);
            }
        }
    }

    /// Does what guests and threads have made possible. Says whether numbers changed that were told.
    pub fn follow(&mut self, machine: &mut Machine) -> bool {
        machine.take_ejected();
        let _ = self.done.read();
        let mut changed = false;
        if let Some((coming, stage)) = self.growing.take_if(|(_, stage)| stage.is_done()) {
            changed = match stage {
                Stage::Making(preparation) => {
                    self.last = Some(preparation.progress()).filter(|progress| progress.total > 0);
                    self.put(machine, coming, preparation.finish().map_err(GrowthError::from))
                }
                Stage::Telling(telling) => self.finish(machine, &coming, telling.finish().map_err(GrowthError::from)),
            };
        }
        let plugged = self.plugged();
        changed | (std::mem::replace(&mut self.plugged, plugged) != plugged)
    }

    /// Begins to prepare what was promised next, if nothing is being prepared. Says as [`Resizer::follow`].
    pub fn go_on(&mut self, machine: &mut Machine) -> bool {
        if self.growing.is_some() {
            return false;
        }
        let Some(coming) = self.next() else { return false };
        let devices = coming.devices();
        let growth = Growth {
            ranges: devices.iter().map(|device| Range::sized(device.base, device.len)).collect(),
            bindings: bindings(self.numa.as_ref(), devices),
            backing: self.backing,
            // Blocks are touched and mapped when the guest plugs them.
            prefault: self.prefault && matches!(coming, Coming::Devices(_)),
            domain: machine.domain().filter(|domain| matches!(coming, Coming::Devices(_)) && !domain.is_empty()),
        };
        match Preparation::start_with(growth.work(), Arc::clone(&self.done), move |work| growth.run(work)) {
            Ok(preparation) => {
                self.growing = Some((coming, Stage::Making(preparation)));
                false
            }
            Err(error) => self.finish(machine, &coming, Err(error.into())),
        }
    }

    fn next(&mut self) -> Option<Coming> {
        if let Some(devices) = self.waiting.pop_front() {
            return Some(Coming::Devices(devices));
        }
        Some(Coming::Blocks(self.blocks_to_come())).filter(|coming| !coming.devices().is_empty())
    }

    /// Memory that is missing behind blocks that the guest is to have.
    fn blocks_to_come(&self) -> Vec<MemoryDevice> {
        let wanted = self.blocks.iter().zip(&self.extent.blocks).zip(&self.room.regions).enumerate();
        let more = wanted.filter_map(|(index, ((control, wanted), (node, region)))| {
            let (from, to) = (control.sizes().usable, self.room.usable(index, *wanted));
            (to > from).then(|| MemoryDevice { base: region.at + from, len: to - from, node: *node })
        });
        more.collect()
    }

    /// Makes memory that was made part of RAM. Servers of devices are told of it before the guest is, by a thread: each may
    /// take as long as it likes. Says as [`Resizer::follow`].
    fn put(&mut self, machine: &mut Machine, coming: Coming, made: Result<GuestMemoryMmap, GrowthError>) -> bool {
        let added = made.and_then(|memory| machine.add_memory(&memory).map_err(|error| GrowthError::Machine(Box::new(error))));
        let servers: Vec<_> = machine.backends().servers().into_iter().map(|(_, server)| server).collect();
        if added.is_err() || servers.is_empty() {
            return self.finish(machine, &coming, added);
        }
        match Telling::start(servers, machine.ram(), Arc::clone(&self.done)) {
            Ok(telling) => {
                self.growing = Some((coming, Stage::Telling(telling)));
                false
            }
            Err(error) => self.finish(machine, &coming, Err(error.into())),
        }
    }

    /// Tells the guest of memory that it has now, or takes the promise back. Says as [`Resizer::follow`].
    fn finish(&mut self, machine: &mut Machine, coming: &Coming, added: Result<(), GrowthError>) -> bool {
        if let Err(error) = &added {
            let bytes = Size(coming.devices().iter().map(|device| device.len).sum());
            let why = format!("cannot add {bytes} of memory: {}", chain(error));
            log::error!("{why}");
            machine.failed()("memory", &why);
        }
        match (coming, &added) {
            (Coming::Devices(devices), Ok(())) => machine.show_memory(devices),
            (Coming::Devices(devices), Err(_)) => self.extent.memory.retain(|device| !devices.contains(device)),
            (Coming::Blocks(devices), Ok(())) => {
                for device in devices {
                    let control = self.blocks.iter().find(|control| control.region().holds(device.base));
                    if let Some(control) = control {
                        let usable = device.base + device.len - control.region().at;
                        control.request(usable, control.sizes().requested);
                    }
                }
                self.request();
            }
            (Coming::Blocks(_), Err(_)) => {
                // The guest keeps what there is memory for.
                for (control, wanted) in self.blocks.iter().zip(&mut self.extent.blocks) {
                    *wanted = control.sizes().usable.min(*wanted);
                }
            }
        }
        added.is_err()
    }

    /// Whether memory is being prepared.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.growing.is_some()
    }

    /// Whether all that was promised is there and all that was asked back has gone, processors and memory; `cpus` run.
    #[must_use]
    pub fn is_settled(&self, cpus: &BTreeSet<u8>) -> bool {
        let memory = self.growing.is_none() && self.waiting.is_empty() && self.blocks_to_come().is_empty();
        memory && *cpus == self.extent.cpus
    }

    /// How far memory is that is being prepared, if that takes long.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        let Some((_, Stage::Making(preparation))) = &self.growing else { return None };
        Some(preparation.progress()).filter(|progress| progress.total > 0)
    }

    /// How far memory was whose preparation ended since the last call.
    pub fn take_last(&mut self) -> Option<Progress> {
        self.last.take()
    }

    /// Processors and memory, with what was promised.
    #[must_use]
    pub fn extent(&self) -> &Extent {
        &self.extent
    }

    /// Bytes of memory in all, with what was promised.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.room.memory + self.extent.added()
    }

    /// Bytes of memory in all, of blocks those that the guest has.
    #[must_use]
    pub fn actual(&self) -> u64 {
        let blocks: u64 = self.extent.blocks.iter().sum();
        self.memory() - blocks + self.plugged()
    }

    fn plugged(&self) -> u64 {
        self.blocks.iter().map(|control| control.sizes().plugged).sum()
    }

    /// How many processors.
    #[must_use]
    pub fn cpus(&self) -> u8 {
        u8::try_from(self.extent.cpus.len()).unwrap_or(u8::MAX)
    }
}

impl AsRawFd for Resizer {
    fn as_raw_fd(&self) -> RawFd {
        self.done.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_change_is_settled_when_memory_has_come_and_processors_have_gone() {
        let config =
            VmConfig { memory: "1G,hotplug=4G".parse().unwrap(), cpus: "2,max=4".parse().unwrap(), ..VmConfig::default() };
        let hot_plug = [Range::sized(16 << 30, 4 << 30)];
        let mut resizer = Resizer::new(&config, None, &hot_plug, Extent::at_start(&config), Vec::new()).unwrap();
        assert!(resizer.is_settled(&[0, 1].into()));
        assert!(!resizer.is_settled(&[0].into()), "one ended by itself");
        resizer.extent.cpus.remove(&1);
        assert!(!resizer.is_settled(&[0, 1].into()), "the guest has it still");
        assert!(resizer.is_settled(&[0].into()));
        let device = MemoryDevice { base: 16 << 30, len: room::BLOCK, node: 0 };
        resizer.extent.memory.push(device);
        resizer.waiting.push_back(vec![device]);
        assert!(!resizer.is_settled(&[0].into()), "memory is promised");
    }

    #[test]
    fn memory_does_not_grow_beyond_what_servers_of_devices_map() {
        let config = VmConfig { memory: "1G,hotplug=4G".parse().unwrap(), ..VmConfig::default() };
        let hot_plug = [Range::sized(16 * GIB, 4 * GIB)];
        let mut resizer = Resizer::new(&config, None, &hot_plug, Extent::at_start(&config), Vec::new()).unwrap();
        let to = |ram| Resize { ram: Some(ram), ..Resize::default() };
        let regions = |has| Regions { device: "fs0".into(), has, most: 8 };
        assert!(resizer.decide(&to(2 * GIB), None).is_ok());
        assert!(resizer.decide(&to(2 * GIB), Some(&regions(7))).is_ok());
        let refused = resizer.decide(&to(2 * GIB), Some(&regions(8))).unwrap_err().to_string();
        assert!(refused.contains("the server of fs0 maps at most 8 regions"), "{refused}");
        assert!(resizer.decide(&to(GIB), Some(&regions(8))).is_ok(), "nothing comes");
        resizer.waiting.push_back(vec![MemoryDevice { base: 16 * GIB, len: GIB, node: 0 }]);
        assert!(resizer.decide(&to(2 * GIB), Some(&regions(7))).is_err(), "one was promised");
    }
}
