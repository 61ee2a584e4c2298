//! Decides whether a path may be listened at, and leaves nothing behind that is not its own.
//!
//! A socket file outlives a process that was killed. It may be replaced if nobody listens at it, which only a connection
//! tells. Looking, removing and binding are one step under a lock on the directory, so that of two processes that start at
//! the same time one wins and the other sees it.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use thiserror::Error;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// How often, and how far apart, a lock that another process holds is tried.
const LOCK_TRIES: u32 = 250;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A socket that is listened at. Removes its file when dropped, if it is still the same file.
#[derive(Debug)]
pub struct Listening {
    listener: UnixListener,
    path: PathBuf,
    file: (u64, u64),
}

impl Listening {
    /// Listens at `path`. Its file is readable and writable for its owner alone (mode 0600).
    pub fn at(path: &Path) -> Result<Self, ListenError> {
        let failed = |source: io::Error| ListenError::Socket { path: path.to_owned(), source };
        let address = SocketAddrUnix::new(path).map_err(|_| ListenError::Length { path: path.to_owned() })?;
        let _lock = lock(path)?;
        make_way(path, &address)?;
        let socket = stream_socket().map_err(failed)?;
        // The file gets the mode of the socket (less the umask): it is at no time open to others.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
        bind(&socket, &address).map_err(|error| failed(error.into()))?;
        // At once: who sees the file will try to connect.
        listen(&socket, BACKLOG).map_err(|error| failed(error.into()))?;
        let metadata = fs::symlink_metadata(path).map_err(failed)?;
        let listener = UnixListener::from(socket);
        Ok(Self { listener, path: path.to_owned(), file: (metadata.dev(), metadata.ino()) })
    }

    /// Whether `path` can be listened at. Makes and removes nothing.
    pub fn check(path: &Path) -> Result<(), ListenError> {
        let address = SocketAddrUnix::new(path).map_err(|_| ListenError::Length { path: path.to_owned() })?;
        let parent = parent(path);
        let folder = |source| ListenError::Directory { directory: parent.to_owned(), source };
        if !fs::metadata(parent).map_err(folder)?.is_dir() {
            return Err(folder(io::ErrorKind::NotADirectory.into()));
        }
        is_left_behind(path, &address).map(drop)
    }

    /// The socket itself.
    pub fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let same = fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.file);
        if same {
            // Nothing is lost by a file that stays.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn stream_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// A lock on the directory that `path` is in; ends when it is dropped.
fn lock(path: &Path) -> Result<File, ListenError> {
    let parent = parent(path);
    let failed = |source: io::Error| ListenError::Directory { directory: parent.to_owned(), source };
    let directory = File::open(parent).map_err(failed)?;
    for _ in 0..LOCK_TRIES {
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(directory),
            Err(Errno::WOULDBLOCK | Errno::INTR) => thread::sleep(LOCK_PAUSE),
            Err(error) => return Err(failed(error.into())),
        }
    }
    Err(failed(Errno::WOULDBLOCK.into()))
}

/// The directory that `path` is in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Removes a socket file that nobody listens at.
fn make_way(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenError> {
    if is_left_behind(path, address)? {
        log::info!("replacing {}, which a process that ended left behind", path.display());
        fs::remove_file(path).map_err(|source| ListenError::Socket { path: path.to_owned(), source })?;
    }
    Ok(())
}

/// Whether there is a socket file that nobody listens at; `false` if there is nothing.
fn is_left_behind(path: &Path, address: &SocketAddrUnix) -> Result<bool, ListenError> {
    let there = match fs::symlink_metadata(path) {
        Ok(there) => there,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(ListenError::Socket { path: path.to_owned(), source }),
    };
    if !there.file_type().is_socket() {
        return Err(ListenError::NoSocket { path: path.to_owned() });
    }
    let failed = |source: io::Error| ListenError::Socket { path: path.to_owned(), source };
    let probe = stream_socket().map_err(failed)?;
    match connect(&probe, address) {
        // Somebody whose queue of connections is full listens as well.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse { path: path.to_owned() }),
        Err(Errno::CONNREFUSED) => Ok(true),
        Err(error) => Err(failed(error.into())),
    }
}

/// A path that cannot be listened at.
#[derive(Debug, Error)]
pub enum ListenError {
    /// More than the kernel's address can hold.
    #[error("the path {path} is too long for a socket; give one of at most 107 bytes", path = path.display())]
    Length {
        /// The path.
        path: PathBuf,
    },
    /// A live one.
    #[error("another process listens at {path}; end it or give another path", path = path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// A file that is not ours to remove.
    #[error("{path} exists and is no socket; remove it or give another path", path = path.display())]
    NoSocket {
        /// The path.
        path: PathBuf,
    },
    /// The folder.
    #[error("the directory {directory} cannot be locked; it must exist and be readable", directory = directory.display())]
    Directory {
        /// The folder.
        directory: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Anything else.
    #[error("cannot listen at {path}", path = path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_the_owner_may_connect_and_the_file_goes_with_the_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listening = Listening::at(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(listening);
        assert!(!path.exists());
    }

    #[test]
    fn case_e6_a_socket_left_behind_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        Listening::check(&path).unwrap();
        assert!(path.exists(), "nobody removed the file");
        let _listening = Listening::at(&path).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn case_e6_a_live_socket_is_left_alone_by_the_second_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = Listening::at(&path).unwrap();
        for _ in 0..2 {
            for error in [Listening::at(&path).unwrap_err(), Listening::check(&path).unwrap_err()] {
                assert!(matches!(error, ListenError::InUse { .. }), "{error}");
            }
            UnixStream::connect(&path).unwrap();
        }
        drop(first);
    }

    #[test]
    fn case_e6_of_many_that_start_together_one_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let threads: Vec<_> = (0..16)
            .map(|_| {
                let path = path.clone();
                thread::spawn(move || Listening::at(&path))
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
    }

    #[test]
    fn a_file_that_is_no_socket_a_long_path_and_no_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f");
        fs::write(&file, "precious").unwrap();
        assert!(matches!(Listening::at(&file), Err(ListenError::NoSocket { .. })));
        assert_eq!(fs::read(&file).unwrap(), b"precious");
        let long = folder.path().join("x".repeat(108));
        assert!(matches!(Listening::at(&long), Err(ListenError::Length { .. })));
        let nowhere = folder.path().join("none/s");
        assert!(matches!(Listening::at(&nowhere), Err(ListenError::Directory { .. })));
        assert!(matches!(Listening::check(&file), Err(ListenError::NoSocket { .. })));
        assert!(matches!(Listening::check(&long), Err(ListenError::Length { .. })));
        for nowhere in [nowhere, file.join("s")] {
            assert!(matches!(Listening::check(&nowhere), Err(ListenError::Directory { .. })));
        }
        let free = folder.path().join("free");
        Listening::check(&free).unwrap();
        assert!(!free.exists());
    }

    #[test]
    fn a_listener_whose_file_was_replaced_leaves_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = Listening::at(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _second = Listening::at(&path).unwrap();
        drop(first);
        UnixStream::connect(&path).unwrap();
    }
}
