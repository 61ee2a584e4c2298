//! A tap device of the host: opened by its name or taken over as a descriptor, made ready to carry virtio's packet headers.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use thiserror::Error;
use vm_memory::VolatileSlice;

use super::HEADER;
use crate::virtio::Traffic;
use crate::virtio::vectored::{Call, vectored};

const DEVICE: &str = "/dev/net/tun";
const INTERFACES: &str = "/sys/class/net";

/// Offloads that the side behind a tap may use (`linux: include/uapi/linux/if_tun.h`, `TUN_F_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offloads {
    /// Packets may come without a checksum.
    pub checksum: bool,
    /// TCP over IPv4 may come in large segments.
    pub tcp4: bool,
    /// TCP over IPv6 may.
    pub tcp6: bool,
    /// With congestion marks.
    pub ecn: bool,
    /// UDP may come in fragments to be made.
    pub udp: bool,
}

impl Offloads {
    fn flags(self) -> libc::c_uint {
        // The others need checksums to be left out.
        let other = |on: bool, flag| if on && self.checksum { flag } else { 0 };
        other(true, libc::TUN_F_CSUM)
            | other(self.tcp4, libc::TUN_F_TSO4)
            | other(self.tcp6, libc::TUN_F_TSO6)
            | other(self.ecn && (self.tcp4 || self.tcp6), libc::TUN_F_TSO_ECN)
            | other(self.udp, libc::TUN_F_UFO)
    }
}

/// One queue of a tap. Packets begin with a `virtio_net_hdr_v1` of [`HEADER`] bytes.
#[derive(Debug)]
pub struct Tap {
    fd: OwnedFd,
    received: Traffic,
    sent: Traffic,
}

impl Tap {
    /// Opens `queues` queues of the tap `name`, which is made if it is not there.
    pub fn open(name: &str, queues: usize) -> Result<Vec<Self>, TapError> {
        let wanted = CString::new(name).ok().filter(|name| (1..libc::IFNAMSIZ).contains(&name.as_bytes().len()));
        let wanted = wanted.ok_or_else(|| TapError::Name { name: name.to_owned() })?;
        Self::check(name)?;
        let refused = |source| TapError::Open { name: name.to_owned(), source };
        let mut request = Request::new();
        request.flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if queues > 1 {
            request.flags |= libc::IFF_MULTI_QUEUE;
        }
        request.name.iter_mut().zip(wanted.as_bytes()).for_each(|(to, from)| *to = *from);
        let one = |_| {
            let open = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(DEVICE);
            let fd: OwnedFd = open.map_err(|source| TapError::Device { source })?.into();
            request.clone().call(fd.as_fd(), libc::TUNSETIFF).map_err(refused)?;
            Self::ready(fd).map_err(refused)
        };
        (0..queues).map(one).collect()
    }

    /// Whether an interface that is called `name` is a tap, or there is none. Opens nothing.
    pub fn check(name: &str) -> Result<(), TapError> {
        // linux: drivers/net/tun.c, `tun_flags`
        let interface = Path::new(INTERFACES).join(name);
        if interface.exists() && !interface.join("tun_flags").exists() {
            return Err(TapError::Other { name: name.to_owned() });
        }
        Ok(())
    }

    /// Takes over the queues of a tap that another process opened. Each has to be one of its own: packets for one that is there twice
    /// would go to either, and none would come once the guest leaves one of them unused, since that detaches both.
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> Result<Vec<Self>, TapError> {
        let taps = descriptors.into_iter().map(Self::from_descriptor).collect::<Result<Vec<_>, _>>()?;
        let Some(interface) = taps.first().and_then(Self::interface) else { return Ok(taps) };
        for (index, tap) in taps.iter().enumerate() {
            if let Some(other) = tap.interface().filter(|other| *other != interface) {
                return Err(TapError::Interfaces { first: interface.name, second: other.name });
            }
            if taps.iter().take(index).any(|before| is_same_file(before.as_fd(), tap.as_fd())) {
                return Err(TapError::SameQueue { name: interface.name });
            }
        }
        Ok(taps)
    }

    fn from_descriptor(fd: OwnedFd) -> Result<Self, TapError> {
        let mut request = Request::new();
        request.call(fd.as_fd(), libc::TUNGETIFF).map_err(|source| TapError::NoTap { source })?;
        if request.flags & libc::IFF_TAP == 0 || request.flags & libc::IFF_VNET_HDR == 0 {
            return Err(TapError::Kind { name: request.name() });
        }
        let refused = |source| TapError::Open { name: request.name(), source };
        rustix::io::ioctl_fionbio(&fd, true).map_err(|error| refused(error.into()))?;
        Self::ready(fd).map_err(refused)
    }

    /// The interface that this is a queue of; `None` for what the kernel says nothing of.
    #[must_use]
    pub fn interface(&self) -> Option<Interface> {
        let mut request = Request::new();
        request.call(self.fd.as_fd(), libc::TUNGETIFF).ok()?;
        let name = request.name();
        // Any address is better than none: one that cannot be read leaves the names to be compared.
        let address = Request::new().address(self.fd.as_fd()).unwrap_or_default();
        Some(Interface { name, address })
    }

    fn with(fd: OwnedFd) -> Self {
        Self { fd, received: Traffic::default(), sent: Traffic::default() }
    }

    /// Packets that guests have got, without their headers.
    #[must_use]
    pub const fn received(&self) -> &Traffic {
        &self.received
    }

    /// Packets of guests that the tap has taken, without their headers.
    #[must_use]
    pub const fn sent(&self) -> &Traffic {
        &self.sent
    }

    fn ready(fd: OwnedFd) -> io::Result<Self> {
        let len = libc::c_int::try_from(HEADER).map_err(io::Error::other)?;
        // SAFETY: the call reads one int.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const len) })?;
        Ok(Self::with(fd))
    }

    /// Sets what packets for the guest may leave to it. Holds for all queues of the tap.
    pub fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        // SAFETY: the call takes its argument by value.
        check(unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads.flags())) })
    }

    /// Attaches or detaches this queue: a detached one gets no packets. Only for taps of several queues.
    pub fn set_attached(&self, on: bool) -> io::Result<()> {
        let mut request = Request::new();
        request.flags = if on { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
        match request.call(self.fd.as_fd(), libc::TUNSETQUEUE) {
            // It is so already, or the device has no queues to choose from (as macvtap's).
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => Ok(()),
            done => done,
        }
    }

    /// Reads one packet into `slices`; what does not fit is lost.
    pub(super) fn receive(&self, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
        vectored(self.fd.as_fd(), Call::Read, slices)
    }

    /// Writes one packet.
    pub(super) fn send(&self, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
        vectored(self.fd.as_fd(), Call::Write, slices)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// What tells a tap's interface from the others of the host. Names are of one network namespace each, and a process can be
/// handed taps of several: the host's side of each has a hardware address, which the kernel draws.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name where it is.
    pub name: String,
    address: [u8; 6],
}

/// `struct ifreq` with `ifr_flags`.
#[repr(C)]
#[derive(Debug, Clone)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    short: libc::c_short,
    rest: [u8; 22],
    flags: libc::c_int,
}

impl Request {
    fn new() -> Self {
        Self { name: [0; libc::IFNAMSIZ], short: 0, rest: [0; 22], flags: 0 }
    }

    fn name(&self) -> String {
        self.name.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect()
    }

    /// The hardware address of the interface that `fd` is a queue of, behind its family (`struct sockaddr`).
    fn address(mut self, fd: BorrowedFd<'_>) -> io::Result<[u8; 6]> {
        self.call(fd, libc::SIOCGIFHWADDR)?;
        let [a, b, c, d, e, f, ..] = self.rest;
        Ok([a, b, c, d, e, f])
    }

    fn call(&mut self, fd: BorrowedFd<'_>, call: libc::Ioctl) -> io::Result<()> {
        let [low, high, ..] = self.flags.to_le_bytes();
        self.short = i16::from_le_bytes([low, high]);
        // SAFETY: the call reads and writes one `struct ifreq`, 40 bytes, which `self` begins with.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), call, std::ptr::from_mut(self)) })?;
        let [low, high] = self.short.to_le_bytes();
        self.flags = i32::from_le_bytes([low, high, 0, 0]);
        Ok(())
    }
}

/// Whether both are of one open file. `false` where the kernel does not say (built without `CONFIG_KCMP`, or a filter refuses the call).
fn is_same_file(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
    // linux: include/uapi/linux/kcmp.h
    const KCMP_FILE: libc::c_long = 0;
    let own = libc::c_long::from(rustix::process::getpid().as_raw_nonzero().get());
    let [a, b] = [a, b].map(|file| libc::c_long::from(file.as_raw_fd()));
    // SAFETY: the call takes numbers alone, and changes nothing.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, a, b) };
    order == 0
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A tap that cannot be used.
#[derive(Debug, Error)]
pub enum TapError {
    /// No such name can be.
    #[error("`{name}` is no name of an interface; 1 to {} bytes are", libc::IFNAMSIZ - 1)]
    Name {
        /// What was given.
        name: String,
    },
    /// No tun driver.
    #[error("cannot open {DEVICE}; load the module tun, and allow this user to open it")]
    Device {
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The kernel's refusal.
    #[error(
        "cannot use the tap {name}; is it in use, of another kind or another user's? (ip tuntap add {name} mode tap user ...)"
    )]
    Open {
        /// The tap.
        name: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// Another kind of interface.
    #[error("the interface {name} is no tap; name a tap, or one that is not there and is made (ip tuntap add NAME mode tap)")]
    Other {
        /// The interface.
        name: String,
    },
    /// Another kind of file.
    #[error("a descriptor that was passed is no tap's")]
    NoTap {
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// One queue, twice.
    #[error(
        "two descriptors that were passed are one queue of the tap {name}: open one for each pair of queues (IFF_MULTI_QUEUE)"
    )]
    SameQueue {
        /// The tap's interface.
        name: String,
    },
    /// Queues of two taps.
    #[error(
        "descriptors of the taps {first} and {second} were passed for one network interface: its queues are those of one tap"
    )]
    Interfaces {
        /// One interface.
        first: String,
        /// Another one.
        second: String,
    },
    /// A tap that speaks another format.
    #[error("the interface {name} that was passed is no tap with virtio headers; open it with IFF_TAP and IFF_VNET_HDR")]
    Kind {
        /// The interface.
        name: String,
    },
}

#[cfg(test)]
impl Tap {
    /// One end of a pair of sockets in place of a tap: packets and errors are the same, settings are refused.
    pub(super) fn stand_in(fd: OwnedFd) -> Self {
        Self::with(fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_interface_has_are_refused() {
        for name in ["", "a name of more than fifteen bytes", "a\0b"] {
            assert!(matches!(Tap::open(name, 1), Err(TapError::Name { .. })), "{name:?}");
        }
    }

    #[test]
    fn an_interface_of_another_kind_is_named_as_such() {
        assert!(matches!(Tap::open("lo", 1), Err(TapError::Other { .. })));
        assert!(Tap::check("none-such-tap").is_ok());
    }

    #[test]
    fn a_descriptor_that_is_no_tap_s_is_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(Tap::from_descriptors(vec![file.into()]), Err(TapError::NoTap { .. })));
    }

    #[test]
    fn a_descriptor_and_its_copy_are_one_open_file_and_two_of_one_path_are_not() {
        let open = || OpenOptions::new().read(true).open("/dev/null").unwrap();
        let (first, second) = (open(), open());
        let copy = first.try_clone().unwrap();
        assert!(is_same_file(first.as_fd(), copy.as_fd()));
        assert!(!is_same_file(first.as_fd(), second.as_fd()));
    }

    #[test]
    fn other_offloads_need_checksums() {
        let all = Offloads { checksum: true, tcp4: true, tcp6: true, ecn: true, udp: true };
        assert_eq!(all.flags(), 0x1F);
        assert_eq!(Offloads { checksum: false, ..all }.flags(), 0);
        assert_eq!(Offloads { tcp4: false, tcp6: false, ..all }.flags(), 0x11);
    }
}
