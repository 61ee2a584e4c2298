//! Judges, before anything is opened, whether the wanted devices can be passed through. Pure: looks at a [`HostTree`].

use std::fmt;
use std::fmt::Write as _;

use pci::address::HostBdf;
use thiserror::Error;

use super::tree::{HostKind, HostNode, HostTree};

/// A device as somebody asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// The function on the host.
    pub at: HostBdf,
}

/// Something that does not stop the start but that the user should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckWarning {
    /// Other endpoints of the device's IOMMU group stay on the host, unused.
    PartialGroup {
        /// The device.
        name: String,
        /// Its group.
        group: u32,
        /// The members that were not asked for, with their drivers.
        others: Members,
    },
}

impl fmt::Display for CheckWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PartialGroup { name, group, others } => write!(
                f,
                "device {name} is passed through without the rest of its IOMMU group {group}, which nobody else can use \
                 meanwhile: {others}"
            ),
        }
    }
}

/// Checks that `wanted` are different endpoints that the host has.
pub fn check_present(tree: &HostTree, wanted: &[Wanted]) -> Result<(), CheckError> {
    wanted.iter().enumerate().try_for_each(|(index, device)| is_new(wanted, index, device))?;
    wanted.iter().try_for_each(|device| endpoint(tree, device).map(drop))
}

/// Checks whether the host can give `wanted` to a guest that has the functions `beside`, or gets them with these; returns what
/// is worth a warning.
pub fn check_beside(tree: &HostTree, wanted: &[Wanted], beside: &[HostBdf]) -> Result<Vec<CheckWarning>, CheckError> {
    check_present(tree, wanted)?;
    wanted.iter().try_for_each(|device| check_free(tree, device))?;
    Ok(warnings(tree, wanted, beside))
}

/// Everything that keeps the host from giving `wanted` to a guest, at most one reason for each device.
#[must_use]
pub fn faults(tree: &HostTree, wanted: &[Wanted]) -> Vec<CheckError> {
    let all = wanted.iter().enumerate();
    all.filter_map(|(index, device)| is_new(wanted, index, device).and_then(|()| check_free(tree, device)).err()).collect()
}

/// What is worth a warning for a guest that has the functions `beside` as well, once for each group.
#[must_use]
pub fn warnings(tree: &HostTree, wanted: &[Wanted], beside: &[HostBdf]) -> Vec<CheckWarning> {
    let mut warnings = Vec::new();
    for device in wanted {
        let Some(group) = tree.get(device.at).and_then(|node| node.group) else { continue };
        let is_wanted = |member: &&HostNode| beside.contains(&member.at) || wanted.iter().any(|device| device.at == member.at);
        let others = Members::of(tree.group(group).filter(|member| !is_bridge(member) && !is_wanted(member)));
        let told = warnings.iter().any(|CheckWarning::PartialGroup { group: told, .. }| *told == group);
        if !others.is_empty() && !told {
            warnings.push(CheckWarning::PartialGroup { name: device.name.clone(), group, others });
        }
    }
    warnings
}

fn is_new(wanted: &[Wanted], index: usize, device: &Wanted) -> Result<(), CheckError> {
    match wanted.iter().take(index).find(|other| other.at == device.at) {
        Some(first) => Err(CheckError::Twice { first: first.name.clone(), second: device.name.clone(), at: device.at }),
        None => Ok(()),
    }
}

fn endpoint<'a>(tree: &'a HostTree, device: &Wanted) -> Result<&'a HostNode, CheckError> {
    let (name, at) = (device.name.clone(), device.at);
    match tree.get(at) {
        None => Err(CheckError::Absent { name, at }),
        Some(node) if node.kind != HostKind::Endpoint || node.ids.class.is_topology_bridge() => {
            Err(CheckError::Bridge { name, at })
        }
        Some(node) => Ok(node),
    }
}

/// Whether VFIO has the device and its group.
fn check_free(tree: &HostTree, device: &Wanted) -> Result<(), CheckError> {
    let node = endpoint(tree, device)?;
    let (name, at) = (device.name.clone(), device.at);
    let Some(group) = node.group else {
        return Err(CheckError::NoGroup { name, at });
    };
    if !node.driver.as_deref().is_some_and(is_vfio) {
        return Err(CheckError::Driver { name, at, driver: node.driver.clone() });
    }
    let offenders = Members::of(tree.group(group).filter(|member| !leaves_group_viable(member)));
    if offenders.is_empty() { Ok(()) } else { Err(CheckError::GroupNotViable { name, group, offenders }) }
}

/// Whether `needed` bytes can be locked. A process with CAP_IPC_LOCK (`capable`) has no limit.
pub fn check_memlock(limit: Option<u64>, needed: u64, capable: bool) -> Result<(), CheckError> {
    match limit {
        Some(limit) if !capable && needed > limit => Err(CheckError::Memlock { limit, needed }),
        _ => Ok(()),
    }
}

/// Whether this is vfio-pci or a variant for certain devices, such as mlx5_vfio_pci and nvgrace-gpu-vfio-pci.
#[must_use]
pub fn is_vfio(driver: &str) -> bool {
    driver.ends_with("vfio-pci") || driver.ends_with("vfio_pci")
}

fn is_bridge(node: &HostNode) -> bool {
    node.ids.class.is_topology_bridge() || matches!(node.kind, HostKind::Port(_))
}

/// The kernel lets a group be used when no driver outside VFIO does DMA in it; the drivers of ports do none
/// (linux: drivers/iommu/iommu.c `iommu_device_use_default_domain` and `driver_managed_dma`).
fn leaves_group_viable(node: &HostNode) -> bool {
    match node.driver.as_deref() {
        None | Some("pci-stub" | "pcieport") => true,
        Some(driver) => is_vfio(driver) || is_bridge(node),
    }
}

/// Functions and their drivers, printed as `0000:03:00.1 (snd_hda_intel), 0000:03:00.2 (no driver)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Members(pub Vec<(HostBdf, Option<String>)>);

impl Members {
    fn of<'a>(nodes: impl Iterator<Item = &'a HostNode>) -> Self {
        Self(nodes.map(|node| (node.at, node.driver.clone())).collect())
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (at, driver)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{at} ({})", driver.as_deref().unwrap_or("no driver"))?;
        }
        Ok(())
    }
}

/// The shell commands that give functions to vfio-pci.
fn bind_commands(members: &[(HostBdf, Option<String>)]) -> String {
    let mut text = String::from("modprobe vfio-pci");
    for (at, driver) in members {
        let directory = format!("/sys/bus/pci/devices/{at}");
        // Writing to a string cannot fail.
        let _ = write!(text, "; echo vfio-pci > {directory}/driver_override");
        if driver.is_some() {
            let _ = write!(text, "; echo {at} > {directory}/driver/unbind");
        }
        let _ = write!(text, "; echo {at} > /sys/bus/pci/drivers_probe");
    }
    text
}

/// A device that cannot be passed through.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CheckError {
    /// No such function.
    #[error(
        "device {name}: there is no PCI function {at}; `lspci -D` lists those of this host, `banyan topology show --host FILE` \
         those of a recorded one"
    )]
    Absent {
        /// The device.
        name: String,
        /// Where it was looked for.
        at: HostBdf,
    },
    /// A bridge or port.
    #[error("device {name}: {at} is a bridge, and bridges are not passed through; give the devices below it")]
    Bridge {
        /// The device.
        name: String,
        /// Where.
        at: HostBdf,
    },
    /// No IOMMU.
    #[error(
        "device {name}: {at} is in no IOMMU group; switch the IOMMU on in the firmware set-up and, with a processor of Intel, \
         on the host kernel's command line (intel_iommu=on)"
    )]
    NoGroup {
        /// The device.
        name: String,
        /// Where.
        at: HostBdf,
    },
    /// Another driver has it.
    #[error(
        "device {name}: {at} is bound to {bound}, not to vfio-pci; as root run: {commands}",
        bound = driver.as_deref().unwrap_or("no driver"),
        commands = bind_commands(&[(*at, driver.clone())])
    )]
    Driver {
        /// The device.
        name: String,
        /// Where.
        at: HostBdf,
        /// The driver bound to it.
        driver: Option<String>,
    },
    /// Other members are used by host drivers.
    #[error(
        "device {name}: its IOMMU group {group} is not viable, host drivers use other members: {offenders}; as root run: \
         {commands}",
        commands = bind_commands(&offenders.0)
    )]
    GroupNotViable {
        /// The device.
        name: String,
        /// Its group.
        group: u32,
        /// The members in the way.
        offenders: Members,
    },
    /// One function for two devices.
    #[error("devices {first} and {second} are the same PCI function {at}; remove one")]
    Twice {
        /// The device given first.
        first: String,
        /// The device given later.
        second: String,
        /// Where.
        at: HostBdf,
    },
    /// The limit on locked memory is too low.
    #[error(
        "devices that are passed through need {needed} bytes of locked memory (all guest RAM), the limit is {limit} bytes; \
         raise it (ulimit -l {kib}, or LimitMEMLOCK= in a systemd unit) or run with CAP_IPC_LOCK",
        kib = needed.div_ceil(1024)
    )]
    Memlock {
        /// RLIMIT_MEMLOCK.
        limit: u64,
        /// Bytes to lock.
        needed: u64,
    },
}
