//! Who serves a device: the process that listens at a socket, or the one that listens there after it died.
//!
//! What a guest was told of the device stays as it was: a process that comes back must offer the same.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use log::Level;
use pci::sync::lock;
use rustix::event::{Timespec, epoll};
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

use super::connection::{Connection, ConnectionError};
use super::{RemoteSpec, Served};
use crate::complaints::Complaints;

/// Bytes of a disk's configuration, up to the last that a feature here is about (virtio 1.2 5.2.4).
const BLOCK_CONFIG: u16 = 60;

/// The other side of one device, for as long as the device is there.
pub struct Server {
    path: PathBuf,
    queues: u16,
    config_len: u16,
    /// What was offered first.
    features: u64,
    /// Of the three locks here one is held at a time, and none while the server is spoken to.
    connection: Mutex<Arc<Connection>>,
    /// The device's configuration as the server last told it; nothing if it is not asked for.
    config: Mutex<Vec<u8>>,
    /// Readable when a conversation has ended.
    ends: OwnedFd,
    /// Of all ends: a guest may know how to bring its servers down.
    complaints: Mutex<Complaints>,
}

impl Server {
    /// Connects to the process at `path`, for a device such as `spec`.
    pub fn open(path: &Path, spec: &RemoteSpec) -> Result<Self, ServerError> {
        let config_len = if spec.served == Served::Disk { BLOCK_CONFIG } else { 0 };
        let ends = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(descriptor)?;
        let (connection, config) = meet(path, spec.all_queues(), config_len)?;
        watch(&ends, &connection)?;
        Ok(Self {
            path: path.into(),
            queues: spec.all_queues(),
            config_len,
            features: connection.features(),
            connection: Mutex::new(Arc::new(connection)),
            config: Mutex::new(config),
            ends,
            complaints: Mutex::default(),
        })
    }

    /// Logs that the conversation has ended, whether or not a driver uses the device called `name`, once for each. What was
    /// logged; nothing if there is nothing new, or if too much was told of this device before.
    pub fn take_end(&self, name: &str) -> Option<String> {
        let mut ended: Vec<epoll::Event> = Vec::with_capacity(4);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Which one it was is no matter: one that is not in use any more has been followed by another one.
        epoll::wait(&self.ends, rustix::buffer::spare_capacity(&mut ended), Some(&now)).ok()?;
        let text = format!("{name}: {}", self.current().take_end()?);
        lock(&self.complaints).add(Level::Error, format_args!("{text}")).then_some(text)
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device features that it offers.
    #[must_use]
    pub const fn features(&self) -> u64 {
        self.features
    }

    /// The device's configuration as it was last told.
    pub(super) fn config(&self) -> Vec<u8> {
        lock(&self.config).clone()
    }

    /// Asks for the configuration again. Whether it is another one.
    pub(super) fn read_config(&self) -> Result<bool, ConnectionError> {
        if self.config_len == 0 {
            return Ok(false);
        }
        let read = self.current().config(self.config_len)?;
        let mut config = lock(&self.config);
        let changed = *config != read;
        *config = read;
        Ok(changed)
    }

    /// The conversation, which may have ended.
    pub(super) fn current(&self) -> Arc<Connection> {
        Arc::clone(&lock(&self.connection))
    }

    /// A conversation that goes on: the one that there is, or one with the process that listens there by now.
    pub(super) fn connection(&self) -> Result<Arc<Connection>, ServerError> {
        let current = self.current();
        if current.lives() {
            return Ok(current);
        }
        current.close();
        let (connection, config) = meet(&self.path, self.queues, self.config_len)?;
        let missing = self.features & !connection.features();
        if missing != 0 {
            return Err(ServerError::Less { path: self.path.clone(), missing });
        }
        watch(&self.ends, &connection)?;
        let connection = Arc::new(connection);
        *lock(&self.config) = config;
        *lock(&self.connection) = Arc::clone(&connection);
        Ok(connection)
    }

    /// Tells a server that has rings of memory that came; others learn of it when they get theirs. Memory that was there
    /// stays. A server that does not follow is done with, and its device gives up. Takes as long as the server needs, or until
    /// it is `unwanted`.
    pub fn memory_grew(&self, memory: &GuestMemoryMmap, unwanted: impl Fn() -> bool + Clone + Send + 'static) {
        self.current().memory_grew(memory, unwanted);
    }

    /// Most regions of memory with which it can be started.
    pub(super) fn most_regions_at_start(&self) -> usize {
        self.current().most_regions_at_start()
    }

    /// Most regions of memory that it says it can map.
    #[must_use]
    pub fn most_regions(&self) -> usize {
        self.current().most_regions()
    }
}

impl AsFd for Server {
    /// Readable when [`Server::take_end`] may have something to tell.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ends.as_fd()
    }
}

/// Has `ends` become readable, once, when the conversation ends.
fn watch(ends: &OwnedFd, connection: &Connection) -> Result<(), ServerError> {
    let flags = epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
    epoll::add(ends, connection, epoll::EventData::new_u64(0), flags).map_err(descriptor)
}

fn descriptor(error: rustix::io::Errno) -> ServerError {
    ConnectionError::Descriptor(error.into()).into()
}

fn meet(path: &Path, queues: u16, config_len: u16) -> Result<(Connection, Vec<u8>), ServerError> {
    let connection = Connection::open(path, queues)?;
    let config = if config_len == 0 { Vec::new() } else { connection.config(config_len)? };
    Ok((connection, config))
}

/// A server that is not there, or not as it was.
#[derive(Debug, Error)]
pub enum ServerError {
    /// The conversation.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// It ended while it was handed the rings, which is told with its end.
    #[error("the conversation with the server has ended")]
    Ended,
    /// Another one than before.
    #[error(
        "the server that listens at {} lacks the features {missing:#x}, which the one before it had and the guest was told of",
        path.display()
    )]
    Less {
        /// The socket.
        path: PathBuf,
        /// Feature bits.
        missing: u64,
    },
}
