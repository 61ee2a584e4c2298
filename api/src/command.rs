//! What can be asked of the core, each with the type of its answer.

use std::fmt;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use crate::config::{DeviceConfig, DiskConfig, FsConfig, NetConfig, VmConfig, VsockConfig};
use crate::error::{ApiError, ErrorKind};
use crate::info::{Counters, DeviceInfo, Injection, Listing};

/// What became of a device that was asked for: where the guest finds it, or `None` if the machine has not been booted and
/// will have it when it is.
pub type Added = Option<DeviceInfo>;

/// A request to the core. Which are possible in which phase is the core's to decide; it answers the others with
/// [`ErrorKind::WrongState`], and all but `Create`, `Restore` and `VmmShutdown` with [`ApiError::no_vm`] while there is no
/// machine.
#[derive(Debug)]
pub enum Command {
    /// Check, plan and prepare a machine; start preparing memory.
    Create {
        /// The machine.
        config: Box<VmConfig>,
        /// Answered when all is checked, not when memory is ready.
        reply: Reply<()>,
    },
    /// Forget the machine, whatever its phase.
    Delete {
        /// Answered when nothing is left of it.
        reply: Reply<()>,
    },
    /// Start it.
    Boot {
        /// Answered when its processors exist.
        reply: Reply<()>,
    },
    /// End its processors and keep the rest, to be booted again.
    Shutdown {
        /// Answered when they have ended.
        reply: Reply<()>,
    },
    /// Reset it.
    Reboot {
        /// Answered when the reset is done.
        reply: Reply<()>,
    },
    /// Press the power button.
    PowerButton {
        /// Answered when it is pressed; what the guest makes of it is the guest's.
        reply: Reply<()>,
    },
    /// Hold its processors.
    Pause {
        /// Answered when they are held.
        reply: Reply<()>,
    },
    /// Let them go on.
    Resume {
        /// Answered when they go on.
        reply: Reply<()>,
    },
    /// Write a paused machine down.
    Snapshot {
        /// An empty folder.
        to: PathBuf,
        /// Answered when all of it is written.
        reply: Reply<()>,
    },
    /// Make a machine that was written down, paused.
    Restore {
        /// The folder.
        from: PathBuf,
        /// All memory is read before it is answered.
        prefault: bool,
        /// Answered when it can be resumed.
        reply: Reply<()>,
    },
    /// Change how much it has. What is `None` stays as it is; equal is no work.
    Resize {
        /// Totals.
        to: Resize,
        /// Answered when the new numbers are known to vm.info, whatever the guest has done so far.
        reply: Reply<()>,
    },
    /// Add a device.
    AddDevice {
        /// Its functions, 1 to 8; most devices have one.
        functions: Vec<DeviceConfig>,
        /// Answered with the first of them when the guest can find all.
        reply: Reply<Added>,
    },
    /// Add a disk.
    AddDisk {
        /// The disk.
        config: Box<DiskConfig>,
        /// As for a device.
        reply: Reply<Added>,
    },
    /// Add a network interface. One whose address is there already is answered with the one that is there.
    AddNet {
        /// The interface.
        config: Box<NetConfig>,
        /// Its queue pairs, `config.queues / 2` of them, or none if it has a tap's name.
        taps: Vec<OwnedFd>,
        /// As for a device.
        reply: Reply<Added>,
    },
    /// Add a shared folder.
    AddFs {
        /// The folder.
        config: Box<FsConfig>,
        /// As for a device.
        reply: Reply<Added>,
    },
    /// Add the socket device.
    AddVsock {
        /// The device.
        config: Box<VsockConfig>,
        /// As for a device.
        reply: Reply<Added>,
    },
    /// Remove a device of any kind.
    RemoveDevice {
        /// Its name.
        id: String,
        /// Answered when the guest has been told; a second request for the same device is an error.
        reply: Reply<()>,
    },
    /// Devices and ports, as the guest numbers them.
    ListDevices {
        /// Answered at once.
        reply: Reply<Listing>,
    },
    /// Let an error happen at a function.
    InjectError {
        /// Name of the device or port.
        at: String,
        /// Name of the error, such as `completion-timeout`.
        error: String,
        /// Answered when the registers show it and the interrupt, if one follows, is raised.
        reply: Reply<Injection>,
    },
    /// What was counted.
    Counters {
        /// Answered at once.
        reply: Reply<Counters>,
    },
    /// End the process: processors stopped, disks flushed, backends closed.
    VmmShutdown {
        /// Answered when all that is done. The core then closes the server, which sends the answer, and ends the process.
        reply: Reply<()>,
    },
}

/// New totals; what is `None` stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resize {
    /// Processors.
    pub cpus: Option<u8>,
    /// Bytes of memory.
    pub ram: Option<u64>,
    /// Bytes that the guest is asked to give back.
    pub balloon: Option<u64>,
}

impl Command {
    /// Its name in the API.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Create { .. } => "vm.create",
            Self::Delete { .. } => "vm.delete",
            Self::Boot { .. } => "vm.boot",
            Self::Shutdown { .. } => "vm.shutdown",
            Self::Reboot { .. } => "vm.reboot",
            Self::PowerButton { .. } => "vm.power-button",
            Self::Pause { .. } => "vm.pause",
            Self::Resume { .. } => "vm.resume",
            Self::Snapshot { .. } => "vm.snapshot",
            Self::Restore { .. } => "vm.restore",
            Self::Resize { .. } => "vm.resize",
            Self::AddDevice { .. } => "vm.add-device",
            Self::AddDisk { .. } => "vm.add-disk",
            Self::AddNet { .. } => "vm.add-net",
            Self::AddFs { .. } => "vm.add-fs",
            Self::AddVsock { .. } => "vm.add-vsock",
            Self::RemoveDevice { .. } => "vm.remove-device",
            Self::ListDevices { .. } => "vm.devices",
            Self::InjectError { .. } => "vm.inject-error",
            Self::Counters { .. } => "vm.counters",
            Self::VmmShutdown { .. } => "vmm.shutdown",
        }
    }

    /// Answers it with an error, whatever it is.
    pub fn refuse(self, error: ApiError) {
        match self {
            Self::Create { reply, .. }
            | Self::Delete { reply }
            | Self::Boot { reply }
            | Self::Shutdown { reply }
            | Self::Reboot { reply }
            | Self::PowerButton { reply }
            | Self::Pause { reply }
            | Self::Resume { reply }
            | Self::Snapshot { reply, .. }
            | Self::Restore { reply, .. }
            | Self::Resize { reply, .. }
            | Self::RemoveDevice { reply, .. }
            | Self::VmmShutdown { reply } => reply.send(Err(error)),
            Self::AddDevice { reply, .. }
            | Self::AddDisk { reply, .. }
            | Self::AddNet { reply, .. }
            | Self::AddFs { reply, .. }
            | Self::AddVsock { reply, .. } => reply.send(Err(error)),
            Self::ListDevices { reply } => reply.send(Err(error)),
            Self::InjectError { reply, .. } => reply.send(Err(error)),
            Self::Counters { reply } => reply.send(Err(error)),
        }
    }

    /// Says that this machine cannot do it.
    pub fn refuse_unsupported(self) {
        let error = ApiError::unsupported(self.name());
        self.refuse(error);
    }
}

/// Where a command is answered, once and from any thread. Dropped without an answer it tells the client that the machine
/// ended before there was one.
pub struct Reply<T>(oneshot::Sender<Result<T, ApiError>>);

impl<T> Reply<T> {
    /// A reply and where its answer arrives.
    #[must_use]
    pub fn new() -> (Self, Answer<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self(sender), Answer(receiver))
    }

    /// Answers. Never waits; a client that is gone is no error.
    pub fn send(self, answer: Result<T, ApiError>) {
        let _ = self.0.send(answer);
    }
}

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}

/// An answer to come.
#[derive(Debug)]
pub struct Answer<T>(oneshot::Receiver<Result<T, ApiError>>);

impl<T> Answer<T> {
    /// For commands whose aim is the end of what they are sent to: an end without an answer has met them.
    pub async fn or_end(self) -> Result<T, ApiError>
    where
        T: Default,
    {
        self.await.or_else(|error| if error == unanswered() { Ok(T::default()) } else { Err(error) })
    }

    /// Waits for it. Not for the thread that serves the API.
    pub fn wait(self) -> Result<T, ApiError> {
        self.0.blocking_recv().unwrap_or_else(|_| Err(unanswered()))
    }
}

impl<T> Future for Answer<T> {
    type Output = Result<T, ApiError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|answer| answer.unwrap_or_else(|_| Err(unanswered())))
    }
}

fn unanswered() -> ApiError {
    ApiError::new(ErrorKind::Internal, "the virtual machine ended before it answered")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_that_is_dropped_is_an_answer_too() {
        let (reply, answer) = Reply::<()>::new();
        drop(reply);
        assert!(answer.wait().unwrap_err().to_string().contains("ended before it answered"));
    }

    #[test]
    fn any_command_can_be_refused() {
        let (reply, answer) = Reply::new();
        Command::ListDevices { reply }.refuse_unsupported();
        let error = answer.wait().unwrap_err();
        assert_eq!((error.kind, error.chain[0].contains("vm.devices")), (ErrorKind::Unsupported, true));
        let (reply, answer) = Reply::new();
        Command::RemoveDevice { id: "gpu0".into(), reply }.refuse(ApiError::no_vm());
        assert_eq!(answer.wait(), Err(ApiError::no_vm()));
    }
}
