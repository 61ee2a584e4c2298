//! Cloud Hypervisor's bodies and replies, and what they mean for Banyan's own configuration.
//!
//! Reading is lenient where Kata Containers' drivers need it: null is absent, an unknown key is ignored and logged once, a
//! known key that only tunes what Banyan has not is ignored and logged once. What would leave a guest without something it
//! was promised is refused with the key's name.
//!
//! Banyan's own additions to a body are under one key, `banyan`. Its value is the command-line form of the same thing:
//! `--pcie` in vm.create, `--device` in vm.add-device, `--disk` in vm.add-disk.

mod create;
mod device;
mod disk;
mod info;
pub(crate) mod json;
pub mod machine;
mod net;
mod nodes;
mod reply;
mod small;
mod zone;

pub use create::create;
pub use device::{add_device, device_body};
pub use disk::{add_disk, disk_body};
pub use info::{fs_body, progress, vm_info, vsock_body};
pub use json::Notes;
pub use net::{add_net, net_body};
pub use reply::{added, counters, injection, listing, ping};
pub use small::{Restore, add_fs, add_vsock, inject_error, remove_device, resize, restore, snapshot};

#[cfg(test)]
mod tests;
