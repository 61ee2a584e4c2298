//! Writes a snapshot: what is small at once, RAM by a thread of its own, which has all of it on the disk before it is done.
//! Whatever fails, no file stays.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::info::{Progress, Step};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::{CONFIG, MEMORY, STATE, SnapshotError, memory};
use crate::groundwork::{GroundworkError, Preparation, Work};

/// A snapshot that is being written. Dropping it breaks it off and removes what is there of it.
pub struct Written {
    thread: Option<Preparation<Files>>,
}

/// Files that go unless they are kept.
struct Files {
    made: Vec<PathBuf>,
}

impl Drop for Files {
    fn drop(&mut self) {
        for path in &self.made {
            if let Err(error) = fs::remove_file(path) {
                log::warn!("cannot remove {}: {error}", path.display());
            }
        }
    }
}

impl Files {
    fn make(&mut self, folder: &Path, name: &str) -> Result<(File, PathBuf), SnapshotError> {
        let path = folder.join(name);
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = made.map_err(|source| SnapshotError::Write { path: path.clone(), source })?;
        self.made.push(path.clone());
        Ok((file, path))
    }

    fn put(&mut self, folder: &Path, name: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
        let (mut file, path) = self.make(folder, name)?;
        file.write_all(bytes).map_err(|source| SnapshotError::Write { path, source })
    }

    /// Has the files and their names on the disk, as far as the file system of `folder` keeps anything there.
    fn sync(&self, folder: &Path) -> Result<(), SnapshotError> {
        for path in self.made.iter().map(PathBuf::as_path).chain([folder]) {
            let synced = File::open(path).and_then(|file| file.sync_all());
            synced.map_err(|source| SnapshotError::Write { path: path.to_owned(), source })?;
        }
        Ok(())
    }
}

/// Whether a snapshot can go there.
pub fn check_folder(folder: &Path) -> Result<(), SnapshotError> {
    let failed = |source| SnapshotError::Folder { path: folder.to_owned(), source };
    match fs::read_dir(folder).map_err(failed)?.next() {
        None => Ok(()),
        Some(_) => Err(SnapshotError::NotEmpty { path: folder.to_owned() }),
    }
}

impl Written {
    /// Begins: `config` and `state` are there when this returns, RAM follows. `done` becomes readable at the end.
    pub fn start(
        folder: &Path,
        config: &[u8],
        state: &[u8],
        ram: GuestMemoryMmap,
        done: Arc<EventFd>,
    ) -> Result<Self, GroundworkError> {
        check_folder(folder)?;
        let mut files = Files { made: Vec::new() };
        files.put(folder, CONFIG, config)?;
        files.put(folder, STATE, state)?;
        let (file, path) = files.make(folder, MEMORY)?;
        let work = Work::step(Step::Snapshot, ram.iter().map(|region| region.len()).sum());
        let folder = folder.to_owned();
        let run = move |work: &Work| match memory::write(&ram, &file, work) {
            Ok(true) => files.sync(&folder).map(|()| files).map_err(GroundworkError::from),
            Ok(false) => Err(SnapshotError::Stopped.into()),
            Err(source) => Err(SnapshotError::Write { path, source }.into()),
        };
        Ok(Self { thread: Some(Preparation::start_with(work, done, run)?) })
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        self.thread.as_ref().map(Preparation::progress)
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(Preparation::is_done)
    }

    /// Waits for its end. The files stay if all is written.
    pub fn finish(mut self) -> Result<(), GroundworkError> {
        let Some(thread) = self.thread.take() else { return Err(SnapshotError::Stopped.into()) };
        let mut files = thread.finish()?;
        files.made.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::memory::{Backing, create};
    use arch::memory_map::Range;

    fn done() -> Arc<EventFd> {
        Arc::new(crate::groundwork::event().unwrap())
    }

    fn ram() -> GuestMemoryMmap {
        create(&[Range { start: 0, end: 16 << 20 }], Backing::default()).unwrap()
    }

    #[test]
    fn only_an_empty_folder_takes_a_snapshot_and_only_its_owner_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        assert!(Written::start(&missing, b"c", b"s", ram(), done()).is_err());
        Written::start(folder.path(), b"c", b"s", ram(), done()).unwrap().finish().unwrap();
        for name in [CONFIG, STATE, MEMORY] {
            let metadata = fs::metadata(folder.path().join(name)).unwrap();
            assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{name}");
        }
        let error = Written::start(folder.path(), b"c", b"s", ram(), done()).err().unwrap().to_string();
        assert!(error.contains("not empty"), "{error}");
        assert_eq!(fs::read(folder.path().join(CONFIG)).unwrap(), b"c", "the first one stays");
    }

    #[test]
    fn nothing_stays_of_a_snapshot_that_is_broken_off() {
        let folder = tempfile::tempdir().unwrap();
        drop(Written::start(folder.path(), b"c", b"s", ram(), done()).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
