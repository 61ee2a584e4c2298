//! Hears the servers of devices end, one place for all of a machine, whether or not it runs and a driver uses them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use devices::virtio::vhost_user::Server;
use rustix::event::{Timespec, epoll};

/// Most ends that are taken in at one time; those that are left are there the next time.
const AT_ONCE: usize = 32;

/// Where ends of conversations are heard. Nothing is opened before there is somebody to hear.
#[derive(Default)]
pub struct Ends(OnceLock<OwnedFd>);

impl Ends {
    /// Hears of `server` as long as that is there.
    pub fn hear(&self, server: &Server) -> io::Result<()> {
        // A server that has left and is kept by somebody must not be heard again and again.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(self.epoll()?, server, epoll::EventData::new_u64(0), flags)?)
    }

    /// Readable when a conversation has ended, also with servers that come later.
    pub fn event(&self) -> io::Result<BorrowedFd<'_>> {
        self.epoll().map(AsFd::as_fd)
    }

    /// The same, if there is a server.
    pub fn event_if_any(&self) -> Option<BorrowedFd<'_>> {
        self.0.get().map(AsFd::as_fd)
    }

    /// Whether a conversation has ended since the last call.
    pub fn take(&self) -> bool {
        let Some(epoll) = self.0.get() else { return false };
        let mut ready: Vec<epoll::Event> = Vec::with_capacity(AT_ONCE);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Interrupted: it is readable still.
        epoll::wait(epoll, rustix::buffer::spare_capacity(&mut ready), Some(&now)).is_ok_and(|ended| ended > 0)
    }

    fn epoll(&self) -> io::Result<&OwnedFd> {
        match self.0.get() {
            Some(epoll) => Ok(epoll),
            None => {
                let made = epoll::create(epoll::CreateFlags::CLOEXEC)?;
                // Another thread may have been first, whose is as good.
                Ok(self.0.get_or_init(|| made))
            }
        }
    }
}
