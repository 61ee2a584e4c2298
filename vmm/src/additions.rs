//! Devices that a client adds to a machine before its start: the same as if vm.create had named them.

use api::command::Command;
use api::config::VmConfig;

/// The configuration with the device that `command` adds; `None` if it adds none.
#[must_use]
pub fn apply(command: &Command, config: &VmConfig) -> Option<VmConfig> {
    let mut config = config.clone();
    match command {
        Command::AddDevice { functions, .. } => config.devices.extend(functions.iter().cloned()),
        Command::AddDisk { config: disk, .. } => config.disks.push((**disk).clone()),
        Command::AddNet { config: net, .. } => config.nets.push((**net).clone()),
        Command::AddFs { config: fs, .. } => config.filesystems.push((**fs).clone()),
        Command::AddVsock { config: vsock, .. } => config.vsock = Some((**vsock).clone()),
        _ => return None,
    }
    Some(config)
}

/// Tells the client that the machine will have it.
pub fn done(command: Command) {
    match command {
        Command::AddDevice { reply, .. }
        | Command::AddDisk { reply, .. }
        | Command::AddNet { reply, .. }
        | Command::AddFs { reply, .. }
        | Command::AddVsock { reply, .. } => reply.send(Ok(None)),
        other => other.refuse_unsupported(),
    }
}
