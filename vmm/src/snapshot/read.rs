//! Reads a snapshot and makes what a machine stands on from it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::devices::populate::populate;
use api::config::VmConfig;
use api::dialect::Notes;
use api::dialect::machine::Machine;
use api::info::Step;
use arch::memory_map::Range;
use pci::topology::{Name, PlannedKind};

use super::state::{self, Checksum, Head, StateFile};
use super::{CONFIG, MEMORY, STATE, SnapshotError, StateFileError, devices, memory};
use crate::additions;
use crate::changes::Changes;
use crate::groundwork::{self, Groundwork, GroundworkError, Needs, Preparation, Work};
use crate::kvm::Vm;
use crate::memory as ram;
use crate::resize::Room;
use crate::run::{Blueprint, needs};

/// Longest config.json that is read.
const LONGEST_CONFIG: u64 = 4 << 20;
/// What is read at a time of the state.
const PIECE: u64 = 1 << 20;

/// A snapshot of which is known what its machine is. The state and RAM are still to be read.
pub struct Snapshot {
    /// As the machine was started.
    pub config: VmConfig,
    /// With what came since.
    pub shown: VmConfig,
    changes: Changes,
    state: Part,
    /// Where it should be, if it is not there: RAM may be elsewhere.
    memory: Result<Part, SnapshotError>,
    prefault: bool,
}

/// What a machine goes on with, beside RAM.
pub struct Saved {
    /// What came and left before it was written down.
    pub changes: Changes,
    /// For [`crate::machine::Machine`].
    pub state: Vec<u8>,
}

/// A file of a snapshot.
struct Part {
    file: File,
    path: PathBuf,
    len: u64,
}

impl Snapshot {
    /// Opens the files in `folder` and reads which machine it is. What they do not say is as in `base`. `prefault`: all of RAM is
    /// read before the machine is there.
    pub fn open(folder: &Path, prefault: bool, base: &VmConfig) -> Result<Self, SnapshotError> {
        let Part { file, path, len } = Part::open(folder, CONFIG)?;
        if len > LONGEST_CONFIG {
            return Err(SnapshotError::Long { path, found: len, most: LONGEST_CONFIG });
        }
        let mut bytes = Vec::new();
        let read = file.take(LONGEST_CONFIG).read_to_end(&mut bytes);
        read.map_err(|source| SnapshotError::Read { path: path.clone(), source })?;
        let machine = Machine::from_json(&bytes, base, &Notes::default());
        let machine = machine.map_err(|source| SnapshotError::Config { path, source })?;
        let (changes, shown) = devices::changes(&machine)?;
        let (state, memory) = (Part::open(folder, STATE)?, Part::open(folder, MEMORY));
        Ok(Self { config: machine.config, shown, changes, state, memory, prefault })
    }

    /// Whether a planned device left before it was written.
    #[must_use]
    pub fn has_left(&self, name: &Name) -> bool {
        self.changes.has_left(name)
    }

    /// A configuration of what the machine uses of the host.
    #[must_use]
    pub fn in_use(&self) -> VmConfig {
        let there = devices::virtio(&self.config, &self.changes);
        additions::holding(&self.config, there.iter().map(|(name, device)| (name, device)))
    }

    /// Whether the machine that `blueprint` is can have been written down, as far as that shows before its state is read.
    pub fn check(&self, blueprint: &Blueprint) -> Result<(), SnapshotError> {
        devices::check(&blueprint.config, &blueprint.spec, &self.changes)?;
        devices::check_names(&blueprint.plan, &self.changes)?;
        let plan = self.changes.plan(&blueprint.plan);
        let planned = || plan.pci.functions.iter().map(|function| &function.kind);
        let ports = planned().filter(|kind| matches!(kind, PlannedKind::Port(_))).count();
        let endpoints = planned().filter_map(|kind| match kind {
            PlannedKind::Endpoint(endpoint) => Some(&endpoint.spec),
            PlannedKind::Port(_) => None,
        });
        let added = self.changes.added().iter().flat_map(|added| &added.functions).map(|function| &function.spec);
        let cpus = blueprint.config.cpus.max.unwrap_or(blueprint.config.cpus.count);
        let most = state::most(cpus, ports, endpoints.chain(added));
        let Part { path, len, .. } = &self.state;
        if *len > most {
            return Err(SnapshotError::Long { path: path.clone(), found: *len, most });
        }
        Ok(())
    }

    /// Begins to read the state and RAM of the machine that `blueprint` is, on a thread of its own.
    pub fn start(self, vm: Vm, blueprint: Arc<Blueprint>) -> Result<Preparation<(Groundwork, Option<Saved>)>, GroundworkError> {
        let memory = &blueprint.config.memory;
        let reads_memory = memory.shared || memory.hugepages.is_some() || memory.prefault || self.prefault;
        let len = self.memory.as_ref().map_or(0, |memory| memory.len);
        let total = self.state.len.saturating_add(if reads_memory { len } else { 0 });
        Preparation::start(Work::step(Step::Restore, total), move |work| {
            let (prefault, memory) = (self.prefault, self.memory);
            let state = read_state(&self.state, &self.changes, &blueprint, work)?;
            let ground = Ram::find(&state, memory)?.ground(vm, &state.needs, prefault, work)?;
            Ok((ground, Some(Saved { changes: state.changes, state: state.machine })))
        })
    }
}

/// A state that was read, and what the machine stands on.
struct Known {
    changes: Changes,
    machine: Vec<u8>,
    needs: Needs,
    /// RAM of the start is in the file that the configuration names.
    named: bool,
}

/// Reads and checks the state; what the machine stands on follows from it.
fn read_state(part: &Part, changes: &Changes, blueprint: &Blueprint, work: &Work) -> Result<Known, GroundworkError> {
    let state = part.read(work)?;
    let mut changes = changes.clone();
    if state::shape(&changes.plan(&blueprint.plan)) != state.shape {
        return Err(SnapshotError::Shape { what: "places of devices or memory" }.into());
    }
    let room = Room::new(&blueprint.config, blueprint.spec.numa.as_ref(), &blueprint.plan.map.hot_plug);
    if !room.holds(&state.extent) {
        return Err(SnapshotError::Shape { what: "processors or memory that came" }.into());
    }
    changes.resize(state.extent);
    let mut needs: Needs = needs(&blueprint.config, &blueprint.spec, &blueprint.plan);
    changes.add_to(&mut needs, &blueprint.spec);
    needs.ranges.sort_by_key(|range| range.start);
    if needs.ranges != state.ranges {
        return Err(SnapshotError::Shape { what: "memory" }.into());
    }
    Ok(Known { changes, machine: state.machine, needs, named: state.named })
}

/// Where RAM is.
struct Ram {
    /// What of it is in a file that the configuration names.
    named: Vec<Range>,
    /// The rest, which is in the snapshot.
    rest: Vec<Range>,
    /// The snapshot's file, if there is a rest.
    part: Option<Part>,
}

impl Ram {
    fn find(known: &Known, memory: Result<Part, SnapshotError>) -> Result<Self, SnapshotError> {
        let needs = &known.needs;
        match &needs.memory.file {
            None if known.named => return Err(SnapshotError::NoFile),
            Some(path) if !known.named && needs.memory.shared => return Err(SnapshotError::Over { path: path.clone() }),
            _ => {}
        }
        let is_named = |range: &Range| known.named && needs.named.contains(range);
        let (named, rest): (Vec<Range>, Vec<Range>) = needs.ranges.iter().copied().partition(is_named);
        let wanted = rest.iter().map(Range::len).fold(0, u64::saturating_add);
        let part = if rest.is_empty() { None } else { Some(memory?) };
        match part {
            Some(Part { path, len, .. }) if len != wanted => Err(SnapshotError::Size { path, found: len, wanted }),
            part => Ok(Self { named, rest, part }),
        }
    }

    /// Makes what the machine stands on, with RAM as it was.
    fn ground(&self, vm: Vm, needs: &Needs, prefault: bool, work: &Work) -> Result<Groundwork, GroundworkError> {
        let named = needs.saved_ram(&self.named)?;
        let copied = needs.memory.shared || needs.memory.hugepages.is_some();
        let rest = match &self.part {
            None => None,
            Some(part) if copied => Some((ram::create(&self.rest, groundwork::backing(&needs.memory))?, part)),
            Some(part) => Some((ram::file::map(&part.file, &self.rest, false)?, part)),
        };
        let all = match (named, &rest) {
            (Some(named), Some((rest, _))) => ram::join(&named, rest)?,
            (Some(named), None) => named,
            (None, Some((rest, _))) => rest.clone(),
            // Ranges are never none.
            (None, None) => return Err(SnapshotError::Shape { what: "memory" }.into()),
        };
        ram::bind(&all, &needs.bindings, needs.memory.hugepages.map(|page| page.size().bytes()))?;
        let ground = Groundwork::open(vm, needs, Some(all))?;
        if let Some((rest, Part { file, path, .. })) = rest.filter(|_| copied) {
            return match memory::fill(&rest, file, work) {
                Ok(true) => Ok(ground),
                Ok(false) => Err(GroundworkError::Stopped),
                Err(source) => Err(SnapshotError::Read { path: path.clone(), source }.into()),
            };
        }
        if prefault || needs.memory.prefault {
            for region in ram::regions(&ground.ram) {
                let progress = |bytes| {
                    work.has_touched(bytes);
                    !work.is_stopped()
                };
                populate(region.host, region.len, &progress).map_err(|source| {
                    if work.is_stopped() {
                        return GroundworkError::Stopped;
                    }
                    ram::MemoryError::Prefault { at: region.at, len: region.len, source }.into()
                })?;
            }
        }
        Ok(ground)
    }
}

impl Part {
    /// Never waits, as opening a FIFO would.
    fn open(folder: &Path, name: &str) -> Result<Self, SnapshotError> {
        let path = folder.join(name);
        let open = || {
            let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path)?;
            let metadata = file.metadata()?;
            if metadata.is_file() { Ok((file, metadata.len())) } else { Err(io::Error::other("it is no regular file")) }
        };
        let (file, len) = open().map_err(|source| SnapshotError::Read { path: path.clone(), source })?;
        Ok(Self { file, path, len })
    }

    /// Reads the state of a machine. What is none is not read to its end.
    fn read(&self, work: &Work) -> Result<StateFile, GroundworkError> {
        let failed = |source| SnapshotError::Read { path: self.path.clone(), source };
        let unusable = |source| SnapshotError::State { path: self.path.clone(), source };
        let mut head = Vec::new();
        (&self.file).take(state::HEAD as u64).read_to_end(&mut head).map_err(failed)?;
        work.has_touched(head.len() as u64);
        let head = Head::from_bytes(&head).map_err(unusable)?;
        // It may become longer meanwhile.
        let mut rest = (&self.file).take(self.len.saturating_sub(state::HEAD as u64));
        if head.length != rest.limit() {
            return Err(unusable(StateFileError::Damaged).into());
        }
        let (mut body, mut sum) = (Vec::new(), Checksum::default());
        loop {
            if work.is_stopped() {
                return Err(GroundworkError::Stopped);
            }
            let before = body.len();
            let count = (&mut rest).take(PIECE).read_to_end(&mut body).map_err(failed)?;
            if count == 0 {
                break;
            }
            sum.add(body.get(before..).unwrap_or_default());
            work.has_touched(count as u64);
        }
        head.check(body.len() as u64, sum).map_err(unusable)?;
        Ok(StateFile::from_body(&body).map_err(unusable)?)
    }
}
