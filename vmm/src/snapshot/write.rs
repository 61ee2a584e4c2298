//! Writes a snapshot: what is small at once, RAM by a thread of its own, which has all of it on the disk before it is done.
//! Whatever fails, no file stays.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::info::{Progress, Step};
use arch::memory_map::Range;
use rustix::fs::{AtFlags, Mode, OFlags, open, openat, unlinkat};
use vm_memory::{GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::{CONFIG, MEMORY, STATE, SnapshotError, memory};
use crate::groundwork::{GroundworkError, Preparation, Work};

/// A snapshot that is being written. Dropping it breaks it off and removes what is there of it.
pub struct Written {
    thread: Option<Preparation<Files>>,
}

/// Files in a folder that go unless they are kept. They are reached by the folder's descriptor, whatever is at its path
/// meanwhile.
struct Files {
    folder: File,
    path: PathBuf,
    made: Vec<(&'static str, File)>,
}

impl Drop for Files {
    fn drop(&mut self) {
        for (name, _) in &self.made {
            if let Err(error) = unlinkat(&self.folder, *name, AtFlags::empty()) {
                log::warn!("cannot remove {}: {error}", self.path.join(name).display());
            }
        }
    }
}

impl Files {
    fn new(folder: &Path) -> Result<Self, SnapshotError> {
        let opened = open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let opened = opened.map_err(|source| SnapshotError::Folder { path: folder.to_owned(), source: source.into() })?;
        Ok(Self { folder: opened.into(), path: folder.to_owned(), made: Vec::new() })
    }

    fn make(&mut self, name: &'static str) -> Result<File, SnapshotError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = openat(&self.folder, name, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(made.map_err(|source| self.failed(name, source.into()))?);
        let ours = file.try_clone();
        self.made.push((name, file));
        ours.map_err(|source| self.failed(name, source))
    }

    fn put(&mut self, name: &'static str, bytes: &[u8]) -> Result<(), SnapshotError> {
        let written = self.make(name)?.write_all(bytes);
        written.map_err(|source| self.failed(name, source))
    }

    /// Has the files and their names on the disk, as far as the file system keeps anything there. Who asked finds them where they
    /// were asked for.
    fn settle(&self) -> Result<(), SnapshotError> {
        for (name, file) in &self.made {
            let settled = file.sync_all().and_then(|()| is_at(file, &self.path.join(name)));
            settled.map_err(|source| self.failed(name, source))?;
        }
        let synced = self.folder.sync_all();
        synced.map_err(|source| SnapshotError::Folder { path: self.path.clone(), source })
    }

    fn failed(&self, name: &str, source: io::Error) -> SnapshotError {
        SnapshotError::Write { path: self.path.join(name), source }
    }
}

/// Whether `path` leads to `file`.
fn is_at(file: &File, path: &Path) -> io::Result<()> {
    let (here, there) = (file.metadata()?, fs::symlink_metadata(path)?);
    if (here.dev(), here.ino()) == (there.dev(), there.ino()) {
        return Ok(());
    }
    Err(io::Error::other("somebody put another file in its place"))
}

/// Whether a snapshot can go there. Files of other names stay: RAM may be in one of them, and sockets.
pub fn check_folder(folder: &Path) -> Result<(), SnapshotError> {
    let failed = |source| SnapshotError::Folder { path: folder.to_owned(), source };
    fs::read_dir(folder).map_err(failed)?;
    let mut taken = [CONFIG, STATE, MEMORY].into_iter().map(|name| folder.join(name));
    match taken.find(|path| fs::symlink_metadata(path).is_ok()) {
        None => Ok(()),
        Some(path) => Err(SnapshotError::Taken { path }),
    }
}

impl Written {
    /// Begins: `config` and `state` are there when this returns, RAM follows but for what is `kept` in a file already. `done`
    /// becomes readable at the end.
    pub fn start(
        folder: &Path,
        config: &[u8],
        state: &[u8],
        (ram, kept): (GuestMemoryMmap, Vec<Range>),
        done: Arc<EventFd>,
    ) -> Result<Self, GroundworkError> {
        check_folder(folder)?;
        let mut files = Files::new(folder)?;
        files.put(CONFIG, config)?;
        files.put(STATE, state)?;
        let total = memory::apart(&ram, &kept).map(GuestMemoryRegion::len).sum();
        let file = if total > 0 { Some(files.make(MEMORY)?) } else { None };
        let work = Work::step(Step::Snapshot, total);
        let run = move |work: &Work| {
            memory::settle(&ram, &kept).map_err(SnapshotError::Kept)?;
            match file.map_or(Ok(true), |file| memory::write(&ram, &kept, &file, work)) {
                Ok(true) => files.settle().map(|()| files).map_err(GroundworkError::from),
                Ok(false) => Err(SnapshotError::Stopped.into()),
                Err(source) => Err(files.failed(MEMORY, source).into()),
            }
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

    fn done() -> Arc<EventFd> {
        Arc::new(devices::eventfd::new().unwrap())
    }

    fn ram() -> (GuestMemoryMmap, Vec<Range>) {
        (create(&[Range { start: 0, end: 16 << 20 }], Backing::default()).unwrap(), Vec::new())
    }

    #[test]
    fn a_folder_takes_one_snapshot_beside_other_files_and_only_its_owner_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("memory"), b"m").unwrap();
        let missing = folder.path().join("missing");
        assert!(Written::start(&missing, b"c", b"s", ram(), done()).is_err());
        Written::start(folder.path(), b"c", b"s", ram(), done()).unwrap().finish().unwrap();
        for name in [CONFIG, STATE, MEMORY] {
            let metadata = fs::metadata(folder.path().join(name)).unwrap();
            assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{name}");
        }
        let error = Written::start(folder.path(), b"c", b"s", ram(), done()).err().unwrap().to_string();
        assert!(error.contains("there is a snapshot already"), "{error}");
        assert_eq!(fs::read(folder.path().join(CONFIG)).unwrap(), b"c", "the first one stays");
        let other = tempfile::tempdir().unwrap();
        let (ram, kept) = (ram().0, vec![Range { start: 0, end: 16 << 20 }]);
        Written::start(other.path(), b"c", b"s", (ram, kept), done()).unwrap().finish().unwrap();
        assert!(!other.path().join(MEMORY).exists(), "all of it is in a file already");
    }

    #[test]
    fn nothing_stays_of_a_snapshot_that_is_broken_off() {
        let folder = tempfile::tempdir().unwrap();
        drop(Written::start(folder.path(), b"c", b"s", ram(), done()).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_is_put_in_the_place_of_another_loses_nothing_and_the_snapshot_fails() {
        let work = tempfile::tempdir().unwrap();
        let (folder, moved) = (work.path().join("folder"), work.path().join("moved"));
        fs::create_dir(&folder).unwrap();
        let mut files = Files::new(&folder).unwrap();
        files.put(CONFIG, b"c").unwrap();
        files.settle().unwrap();
        fs::rename(&folder, &moved).unwrap();
        assert!(files.settle().is_err(), "it is somewhere else");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(CONFIG), b"another's").unwrap();
        assert!(files.settle().is_err(), "it is another one");
        drop(files);
        assert_eq!(fs::read(folder.join(CONFIG)).unwrap(), b"another's");
        assert_eq!(fs::read_dir(&moved).unwrap().count(), 0);
        let mut files = Files::new(&moved).unwrap();
        files.put(STATE, b"s").unwrap();
        fs::remove_dir_all(&moved).unwrap();
        assert!(files.settle().is_err(), "it is nowhere");
    }
}
