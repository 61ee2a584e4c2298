//! Decides which virtio devices cannot be in one machine, and which its memory does not bear.

use std::path::PathBuf;

use api::config::{MacAddress, Size, VmConfig};
use api::error::ErrorKind;
use pci::topology::Name;
use thiserror::Error;

use super::virtio::{Virtio, devices};

/// A page of a balloon (virtio 1.2, 5.5.6).
const BALLOON_PAGE: u64 = 4096;

/// Whether the virtio devices of a machine can be together, and its memory is enough for them.
pub(super) fn check(config: &VmConfig) -> Result<(), BesideError> {
    let devices = devices(config);
    for (index, (_, device)) in devices.iter().enumerate() {
        reaches(config, device)?;
        fits(devices.iter().take(index).map(|(name, there)| (name, there)), device)?;
    }
    let (size, memory) = (config.balloon.map_or(Size(0), |balloon| balloon.size), config.memory.size);
    if size > memory {
        return Err(BesideError::Balloon { size, memory });
    }
    if size.bytes().is_multiple_of(BALLOON_PAGE) { Ok(()) } else { Err(BesideError::BalloonPages { size }) }
}

/// Whether the process that serves `device`, if one does, can map the memory of a machine such as `config`.
pub fn reaches(config: &VmConfig, device: &Virtio) -> Result<(), BesideError> {
    match device.server() {
        Some(socket) if !config.memory.shared => Err(BesideError::PrivateMemory { socket: socket.into() }),
        _ => Ok(()),
    }
}

/// Whether `device` can be beside those that are there.
pub fn fits<'a>(there: impl IntoIterator<Item = (&'a Name, &'a Virtio)>, device: &Virtio) -> Result<(), BesideError> {
    for (name, there) in there {
        let there_is = || name.clone();
        match (there, device) {
            (Virtio::Vsock(_), Virtio::Vsock(_)) => return Err(BesideError::Vsock { there: there_is() }),
            (Virtio::Folder(one), Virtio::Folder(other)) if one.tag == other.tag => {
                return Err(BesideError::Tag { tag: other.tag.clone(), there: there_is() });
            }
            (Virtio::Net(one), Virtio::Net(other)) => {
                if let Some(mac) = other.mac.filter(|mac| one.mac == Some(*mac)) {
                    return Err(BesideError::Mac { mac, there: there_is() });
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Devices that cannot be together.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BesideError {
    /// A second socket device.
    #[error("a machine has one socket device, and `{there}` is there: use it, or remove it first")]
    Vsock {
        /// Which is there.
        there: Name,
    },
    /// Memory that a device's server could not map.
    #[error(
        "the device that is served at {} needs memory that its server can map: give --memory shared=on (`shared` in the API)",
        socket.display()
    )]
    PrivateMemory {
        /// Where the server listens.
        socket: PathBuf,
    },
    /// Two folders under one tag.
    #[error("the shared folder `{there}` has the tag `{}`: give another one, or remove `{there}` first", tag.escape_debug())]
    Tag {
        /// What the guest would mount.
        tag: String,
        /// Which has it.
        there: Name,
    },
    /// Two interfaces with one address.
    #[error("the interface `{there}` has the address {mac}: give another `mac` or none, or remove `{there}` first")]
    Mac {
        /// The address.
        mac: MacAddress,
        /// Which has it.
        there: Name,
    },
    /// More than there is.
    #[error("a balloon of {size} is larger than the guest's memory of {memory}: give at most as much")]
    Balloon {
        /// What was asked for.
        size: Size,
        /// What there is.
        memory: Size,
    },
    /// Parts of pages.
    #[error("a balloon of {size} is not made of whole pages: give a multiple of 4096 bytes")]
    BalloonPages {
        /// What was asked for.
        size: Size,
    },
}

impl BesideError {
    /// As the API tells it.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Vsock { .. } | Self::Tag { .. } | Self::Mac { .. } => ErrorKind::Conflict,
            Self::PrivateMemory { .. } | Self::Balloon { .. } | Self::BalloonPages { .. } => ErrorKind::BadRequest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_one_tag_and_one_socket_device_are_there_once() {
        let nets = |texts: [&str; 2]| VmConfig { nets: texts.map(|text| text.parse().unwrap()).into(), ..VmConfig::default() };
        let error = check(&nets(["t0,id=eth,mac=02:00:00:00:00:01", "t1,mac=02:00:00:00:00:01"])).unwrap_err().to_string();
        assert!(error.contains("`eth` has the address 02:00:00:00:00:01"), "{error}");
        assert!(error.ends_with("or remove `eth` first"), "{error}");
        assert_eq!(check(&nets(["t0,mac=02:00:00:00:00:01", "t1,mac=02:00:00:00:00:02"])), Ok(()));
        assert_eq!(check(&nets(["t0", "t1"])), Ok(()), "addresses that are made up differ");
        let folders = |tags: [&str; 2]| VmConfig {
            filesystems: tags.map(|tag| format!("/s,tag={tag}").parse().unwrap()).into(),
            memory: "64M,shared=on".parse().unwrap(),
            ..VmConfig::default()
        };
        let error = check(&folders(["home", "home"])).unwrap_err().to_string();
        assert!(error.contains("`fs0` has the tag `home`"), "{error}");
        assert!(error.ends_with("or remove `fs0` first"), "{error}");
        assert_eq!(check(&folders(["home", "data"])), Ok(()));
        let vsock = |cid| Virtio::Vsock(format!("cid={cid},socket=/s{cid}").parse().unwrap());
        let there = Name::from("vsock0");
        let error = fits([(&there, &vsock(3))], &vsock(4)).unwrap_err().to_string();
        assert!(error.contains("one socket device, and `vsock0`"), "{error}");
        assert_eq!(fits([], &vsock(4)), Ok(()));
    }

    #[test]
    fn what_another_process_serves_needs_memory_that_it_can_map() {
        let with = |memory: &str, disk: &str, net: &str| {
            let (disks, nets) = (vec![disk.parse().unwrap()], vec![net.parse().unwrap()]);
            check(&VmConfig { memory: memory.parse().unwrap(), disks, nets, ..VmConfig::default() })
        };
        assert_eq!(with("64M", "/a.img", "tap0"), Ok(()));
        assert_eq!(with("64M,shared=on", "vhost-user=/d", "vhost-user=/n"), Ok(()));
        for (disk, net) in [("vhost-user=/d", "tap0"), ("/a.img", "vhost-user=/d")] {
            let error = with("64M", disk, net).unwrap_err().to_string();
            assert!(error.contains("served at /d") && error.contains("--memory shared=on"), "{error}");
        }
    }

    #[test]
    fn a_balloon_is_made_of_pages_and_no_larger_than_memory() {
        let with = |balloon: &str| {
            let (memory, balloon) = ("512M".parse().unwrap(), Some(balloon.parse().unwrap()));
            check(&VmConfig { memory, balloon, ..VmConfig::default() })
        };
        assert_eq!(with("0"), Ok(()));
        assert_eq!(with("512M"), Ok(()));
        assert!(with("513M").unwrap_err().to_string().contains("memory of 512M"));
        assert!(with("4097").unwrap_err().to_string().contains("multiple of 4096"));
    }
}
