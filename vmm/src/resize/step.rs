//! Decides what a change of a machine's processors and memory is made of. Pure.

use api::command::Resize;
use api::config::Size;
use api::error::{ApiError, ErrorKind};
use arch::ports::MEMORY_DEVICES;
use devices::acpi::MemoryDevice;
use thiserror::Error;

use super::room::{Extent, Room};
use crate::groundwork::GroundworkError;
use crate::machine::MachineError;

/// What a change consists of.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Step {
    /// Processors that come.
    pub come: Vec<u8>,
    /// Processors that are asked for.
    pub go: Vec<u8>,
    /// Memory devices that come.
    pub memory: Vec<MemoryDevice>,
    /// What the guest is to have of each region of blocks, if that changes.
    pub blocks: Option<Vec<u64>>,
}

/// Parts of RAM, which the process that serves a device maps one by one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Regions {
    /// The device whose server takes the fewest.
    pub device: String,
    /// How many there are.
    pub has: usize,
    /// How many it takes.
    pub most: usize,
}

/// Decides the change from `extent` to `to`.
pub(super) fn step(room: &Room, extent: &Extent, to: &Resize) -> Result<Step, ResizeError> {
    let mut step = Step::default();
    if let Some(wanted) = to.cpus {
        if wanted == 0 || wanted > room.most_cpus {
            return Err(ResizeError::Cpus { wanted, most: room.most_cpus });
        }
        let (wanted, has) = (usize::from(wanted), extent.cpus.len());
        let absent = (0..room.most_cpus).filter(|number| !extent.cpus.contains(number));
        step.come = absent.take(wanted.saturating_sub(has)).collect();
        step.go = extent.cpus.iter().rev().copied().take(has.saturating_sub(wanted)).collect();
    }
    if let Some(wanted) = to.ram {
        let (has, most) = (room.memory + extent.added(), room.memory.saturating_add(room.growth()));
        if wanted > most {
            return Err(ResizeError::Memory { wanted: Size(wanted), most: Size(most) });
        }
        // Blocks go as they come, down to the memory of the start.
        let least = if room.regions.is_empty() { has } else { room.memory };
        let more = wanted.checked_sub(least).ok_or(ResizeError::Shrink { wanted: Size(wanted), least: Size(least) })?;
        let unit = room.unit();
        if !more.is_multiple_of(unit) {
            return Err(ResizeError::Block { more: Size(more), unit: Size(unit) });
        }
        if !room.regions.is_empty() {
            step.blocks = Some(room.share(more, &extent.blocks)).filter(|blocks| *blocks != extent.blocks);
            return Ok(step);
        }
        step.memory = room.place(more, extent);
        if extent.memory.len() + step.memory.len() > usize::from(MEMORY_DEVICES) {
            return Err(ResizeError::Devices);
        }
    }
    Ok(step)
}

/// A change that cannot be made.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// Processors.
    #[error("{wanted} processors are not possible: 1 to {most} are; start the machine with a larger --cpus max")]
    Cpus {
        /// Asked for.
        wanted: u8,
        /// At most.
        most: u8,
    },
    /// Too much memory.
    #[error("{wanted} of memory is more than the {most} that this machine can have; start it with a larger --memory hotplug")]
    Memory {
        /// Asked for.
        wanted: Size,
        /// At most.
        most: Size,
    },
    /// Less memory.
    #[error(
        "memory does not shrink below {least}, {wanted} is less: use a balloon, or start the machine with less --memory and \
         hotplug-method=virtio-mem"
    )]
    Shrink {
        /// Asked for.
        wanted: Size,
        /// What stays.
        least: Size,
    },
    /// Part of a block.
    #[error("memory comes in multiples of {unit}, {more} more is none; round it")]
    Block {
        /// How much more was asked for.
        more: Size,
        /// Of which it is no multiple.
        unit: Size,
    },
    /// Too often.
    #[error(
        "memory came {MEMORY_DEVICES} times already, the most that this machine can tell its guest; reboot it with more memory"
    )]
    Devices,
    /// Too often for a server.
    #[error("the server of {device} maps at most {most} regions of memory, and more would be there; reboot with more memory")]
    Regions {
        /// The device.
        device: String,
        /// How many it takes.
        most: usize,
    },
    /// A processor.
    #[error("processor {number} cannot be added")]
    Machine {
        /// Which.
        number: u8,
        /// Why.
        #[source]
        source: MachineError,
    },
    /// A thread.
    #[error(transparent)]
    Thread(#[from] GroundworkError),
}

impl ResizeError {
    /// As a client is told.
    #[must_use]
    pub fn for_client(&self) -> ApiError {
        let kind = match self {
            Self::Machine { .. } | Self::Thread(_) => ErrorKind::Internal,
            _ => ErrorKind::BadRequest,
        };
        ApiError::from_error(kind, self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    use api::config::VmConfig;
    use arch::memory_map::Range;

    use super::super::room::BLOCK;
    use crate::numa::GuestNuma;

    fn room(config: &VmConfig, numa: Option<&GuestNuma>, growth: u64) -> Room {
        Room::new(config, numa, &[Range::sized(16 * GIB, growth)])
    }

    fn machine(cpus: &str, memory: &str) -> VmConfig {
        VmConfig { cpus: cpus.parse().unwrap(), memory: memory.parse().unwrap(), ..VmConfig::default() }
    }

    fn cpus(count: u8) -> Resize {
        Resize { cpus: Some(count), ..Resize::default() }
    }

    fn ram(bytes: u64) -> Resize {
        Resize { ram: Some(bytes), ..Resize::default() }
    }

    #[test]
    fn the_lowest_processors_come_and_the_highest_go() {
        let config = machine("boot=2,max=6", "1G");
        let (room, mut extent) = (room(&config, None, 0), Extent::at_start(&config));
        assert_eq!(step(&room, &extent, &cpus(4)).unwrap(), Step { come: vec![2, 3], ..Step::default() });
        extent.cpus = [0, 1, 4, 5].into();
        assert_eq!(step(&room, &extent, &cpus(5)).unwrap().come, [2]);
        assert_eq!(step(&room, &extent, &cpus(1)).unwrap().go, [5, 4, 1]);
        assert_eq!(step(&room, &extent, &cpus(4)).unwrap(), Step::default());
        for count in [0, 7, 255] {
            assert!(step(&room, &extent, &cpus(count)).unwrap_err().to_string().contains("1 to 6 are"));
        }
    }

    #[test]
    fn memory_grows_by_blocks_up_to_its_limit_and_never_shrinks() {
        let config = machine("1", "1G,hotplug=4G");
        let room = room(&config, None, 4 * GIB);
        let mut extent = Extent::at_start(&config);
        for (base, total) in [(16, 2), (17, 5)] {
            let step = step(&room, &extent, &ram(total * GIB)).unwrap();
            let len = (total * GIB) - GIB - extent.added();
            assert_eq!(step.memory, [MemoryDevice { base: base * GIB, len, node: 0 }]);
            extent.memory.extend(step.memory);
        }
        assert_eq!(step(&room, &extent, &ram(5 * GIB)).unwrap(), Step::default());
        let refused = |bytes| step(&room, &extent, &ram(bytes)).unwrap_err().to_string();
        assert!(refused(6 * GIB).contains("more than the 5G"));
        assert!(refused(u64::MAX).contains("more than the 5G"));
        assert!(refused(4 * GIB).contains("does not shrink"));
        let odd = step(&room, &Extent::at_start(&config), &ram(GIB + BLOCK / 2)).unwrap_err();
        assert!(odd.to_string().contains("in multiples of 128M, 64M more is none"));
        extent.memory = (0..48).map(|n| MemoryDevice { base: 16 * GIB + n * BLOCK / 4, len: BLOCK / 4, node: 0 }).collect();
        assert!(step(&room, &extent, &ram(4 * GIB)).unwrap_err().to_string().contains("came 48 times already"));
    }

    #[test]
    fn memory_goes_to_the_node_that_has_the_least_and_then_to_the_next() {
        let mut config = machine("2", "3G,hotplug=4G");
        let nodes = ["0,cpus=0,memory=2G", "1,cpus=1,memory=1G"].map(|text| text.parse().unwrap());
        config.numa = api::config::NumaConfig::new(nodes.to_vec()).unwrap();
        let numa = crate::numa::resolve(&config, &crate::spec::Host::default()).unwrap().unwrap();
        let room = room(&config, Some(&numa), 4 * GIB);
        assert_eq!(room.ranges, [(0, Range::sized(16 * GIB, 2 * GIB)), (1, Range::sized(18 * GIB, 2 * GIB))]);
        let placed = step(&room, &Extent::at_start(&config), &ram(6 * GIB)).unwrap().memory;
        let device = |base, len, node| MemoryDevice { base: base * GIB, len: len * GIB, node };
        assert_eq!(placed, [device(18, 2, 1), device(16, 1, 0)]);
    }

    #[test]
    fn blocks_come_and_go_between_the_memory_of_the_start_and_the_most() {
        let config = machine("1", "1G,hotplug=4G,hotplug-method=virtio-mem");
        let room = room(&config, None, 4 * GIB);
        let mut extent = Extent::at_start(&config);
        for total in [3 * GIB, 5 * GIB, GIB + (2 << 20), GIB] {
            let step = step(&room, &extent, &ram(total)).unwrap();
            assert_eq!((step.memory, step.blocks.clone()), (Vec::new(), Some(vec![total - GIB])));
            extent.blocks = step.blocks.unwrap();
            assert_eq!(extent.added(), total - GIB);
        }
        assert_eq!(step(&room, &extent, &ram(GIB)).unwrap(), Step::default());
        let refused = |bytes| step(&room, &extent, &ram(bytes)).unwrap_err().to_string();
        assert!(refused(GIB - (2 << 20)).contains("does not shrink below 1G"));
        assert!(refused(GIB + (1 << 20)).contains("in multiples of 2M, 1M more"));
        assert!(refused(6 * GIB).contains("more than the 5G"));
    }
}
