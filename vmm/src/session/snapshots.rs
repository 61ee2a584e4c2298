//! Writes a paused machine down while its commands wait.

use std::path::Path;
use std::sync::Arc;

use api::command::Reply;
use api::error::{ApiError, ErrorKind};
use arch::memory_map::Range;

use super::Session;
use crate::groundwork::GroundworkError;
use crate::memory;
use crate::snapshot::state::{StateFile, shape};
use crate::snapshot::write::check_folder;
use crate::snapshot::{SnapshotError, Written, devices};

impl Session<'_, '_> {
    /// Begins to write the machine down.
    pub(super) fn snapshot(&mut self, folder: &Path, reply: Reply<()>) {
        if !self.is_paused() {
            return reply.send(Err(ApiError::new(ErrorKind::WrongState, "the virtual machine runs: pause it first (vm.pause)")));
        }
        match self.write(folder) {
            Ok(written) => self.writing = Some((written, reply)),
            Err(error) => {
                let kind = if let GroundworkError::Snapshot(error) = &error { error.kind() } else { ErrorKind::Internal };
                reply.send(Err(ApiError::from_error(kind, &error)));
            }
        }
    }

    fn write(&self, folder: &Path) -> Result<Written, GroundworkError> {
        let settled = self.resizer.is_settled(&self.machine.cpus());
        if self.hotplug.leaving().next().is_some() || !settled || !self.promises.is_empty() {
            return Err(SnapshotError::Busy.into());
        }
        let mut changes = self.hotplug.changes_so_far().clone();
        changes.resize(self.resizer.extent().clone());
        let shown = self.service.published.get().map_or_else(|| self.config.clone(), |info| info.config.clone());
        devices::check(self.config, self.spec, &changes)?;
        check_folder(folder)?;
        let machine = devices::describe(self.config, &shown, &changes, |name| self.machine.backends().address(name))?;
        let ram = self.machine.ram();
        let kept = if self.config.memory.keeps() { self.plan.map.ram.clone() } else { Vec::new() };
        let state = StateFile {
            shape: shape(&changes.plan(self.plan)),
            ranges: memory::regions(&ram).iter().map(|region| Range::sized(region.at, region.len)).collect(),
            named: !kept.is_empty(),
            extent: self.resizer.extent().clone(),
            machine: self.machine.save().map_err(SnapshotError::from)?,
        };
        let config = format!("{:#}\n", machine.to_json());
        Written::start(folder, config.as_bytes(), &state.to_bytes(), (ram, kept), Arc::clone(&self.written))
    }

    /// Follows a snapshot under way to its end.
    pub(super) fn follow_writing(&mut self) {
        let _ = self.written.read();
        let Some((written, _)) = &self.writing else { return };
        if !written.is_done() {
            return;
        }
        if let Some((written, reply)) = self.writing.take() {
            let last = written.progress();
            let ended = written.finish();
            self.stands |= ended.is_ok() && self.config.memory.keeps();
            self.service.published.set_progress(last);
            self.service.published.set_progress(None);
            reply.send(ended.map_err(|error| ApiError::from_error(ErrorKind::Internal, &error)));
        }
    }
}
