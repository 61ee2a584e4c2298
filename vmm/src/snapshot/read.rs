//! Reads a snapshot and makes what a machine stands on from it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use api::config::VmConfig;
use api::dialect::Notes;
use api::dialect::machine::Machine;
use api::info::Step;

use super::state::{self, StateFile};
use super::{CONFIG, MEMORY, STATE, SnapshotError, devices, memory};
use crate::additions;
use crate::changes::Changes;
use crate::groundwork::{self, Groundwork, GroundworkError, Needs, Preparation, Work};
use crate::kvm::Vm;
use crate::memory as ram;
use crate::resize::Room;
use crate::run::{Blueprint, needs};

/// Longest config.json that is read.
const LONGEST_CONFIG: u64 = 4 << 20;

/// A snapshot that was read and checked as far as that is possible without a machine.
pub struct Saved {
    /// As the machine was started.
    pub config: VmConfig,
    /// With what came since.
    pub shown: VmConfig,
    /// What came and left.
    pub changes: Changes,
    /// The state of the machine.
    pub state: StateFile,
    memory: File,
    path: PathBuf,
    prefault: bool,
}

impl Saved {
    /// Reads the files in `folder`, but for RAM. What they do not say is as in `base`. `prefault`: all of RAM is read before the
    /// machine is there.
    pub fn read(folder: &Path, prefault: bool, base: &VmConfig) -> Result<Self, SnapshotError> {
        let (path, bytes) = read(folder, CONFIG, LONGEST_CONFIG)?;
        let machine = Machine::from_json(&bytes, base, &Notes::default());
        let machine = machine.map_err(|source| SnapshotError::Config { path, source })?;
        let (path, bytes) = read(folder, STATE, state::MOST)?;
        let state = StateFile::from_bytes(&bytes).map_err(|source| SnapshotError::State { path, source })?;
        let (mut changes, shown) = devices::changes(&machine)?;
        changes.resize(state.extent.clone());
        let path = folder.join(MEMORY);
        let memory = open(&path).map_err(|source| SnapshotError::Read { path: path.clone(), source })?;
        let found = memory.metadata().map_err(|source| SnapshotError::Read { path: path.clone(), source })?.len();
        let wanted = state.ranges.iter().map(|range| range.len()).fold(0, u64::saturating_add);
        if found != wanted {
            return Err(SnapshotError::Size { path, found, wanted });
        }
        Ok(Self { config: machine.config, shown, changes, state, memory, path, prefault })
    }

    /// A configuration of what the machine uses of the host.
    #[must_use]
    pub fn in_use(&self) -> VmConfig {
        let there = devices::virtio(&self.config, &self.changes);
        additions::holding(&self.config, there.iter().map(|(name, device)| (name, device)))
    }

    /// Makes the ground of the machine that `blueprint` is. Either it is laid, or it is on its way.
    pub fn ground(&self, vm: Vm, blueprint: &Blueprint) -> Result<Restoring, GroundworkError> {
        devices::check(&blueprint.config, &blueprint.spec, &self.changes)?;
        devices::check_names(&blueprint.plan, &self.changes)?;
        if state::shape(&self.changes.plan(&blueprint.plan)) != self.state.shape {
            return Err(SnapshotError::Shape { what: "places of devices or memory" }.into());
        }
        let room = Room::new(&blueprint.config, blueprint.spec.numa.as_ref(), &blueprint.plan.map.hot_plug);
        if !room.holds(&self.state.extent) {
            return Err(SnapshotError::Shape { what: "processors or memory that came" }.into());
        }
        let mut needs: Needs = needs(&blueprint.config, &blueprint.spec, &blueprint.plan);
        self.changes.add_to(&mut needs, &blueprint.spec);
        let mut wanted = needs.ranges.clone();
        wanted.sort_by_key(|range| range.start);
        if wanted != self.state.ranges {
            return Err(SnapshotError::Shape { what: "memory" }.into());
        }
        let copies = needs.memory.shared || needs.memory.hugepages.is_some();
        let total = wanted.iter().map(|range| range.len()).sum();
        if !copies {
            let ram = memory::map(&self.memory, &wanted)?;
            ram::bind(&ram, &needs.bindings, None)?;
            let ground = Groundwork::open(vm, &needs, Some(ram))?;
            if !self.prefault && !needs.memory.prefault {
                return Ok(Restoring::Done(Box::new(ground)));
            }
            return Ok(Restoring::Working(Preparation::start(Work::step(Step::Restore, total), move |work| {
                for region in ram::regions(&ground.ram) {
                    let progress = |bytes| {
                        work.has_touched(bytes);
                        !work.is_stopped()
                    };
                    ram::populate(region.host, region.len, &progress).map_err(|source| {
                        if work.is_stopped() {
                            return GroundworkError::Stopped;
                        }
                        ram::MemoryError::Prefault { at: region.at, len: region.len, source }.into()
                    })?;
                }
                Ok(ground)
            })?));
        }
        let backing = groundwork::backing(&needs.memory, false);
        let ram = ram::create(&wanted, backing)?;
        ram::bind(&ram, &needs.bindings, backing.huge_page)?;
        let ground = Groundwork::open(vm, &needs, Some(ram))?;
        let (file, path) = (self.memory.try_clone().map_err(GroundworkError::Thread)?, self.path.clone());
        Ok(Restoring::Working(Preparation::start(Work::step(Step::Restore, total), move |work| {
            match memory::fill(&ground.ram, &file, work) {
                Ok(true) => Ok(ground),
                Ok(false) => Err(GroundworkError::Stopped),
                Err(source) => Err(SnapshotError::Read { path, source }.into()),
            }
        })?))
    }
}

/// The ground of a machine from a snapshot.
pub enum Restoring {
    /// It is laid.
    Done(Box<Groundwork>),
    /// RAM is being read.
    Working(Preparation<Groundwork>),
}

/// Never waits, as opening a FIFO would.
fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
}

fn read(folder: &Path, name: &str, most: u64) -> Result<(PathBuf, Vec<u8>), SnapshotError> {
    let path = folder.join(name);
    let failed = |source| SnapshotError::Read { path: path.clone(), source };
    let file = open(&path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?.len();
    if found > most {
        return Err(SnapshotError::Size { path, found, wanted: most });
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes).map_err(failed)?;
    Ok((path, bytes))
}
