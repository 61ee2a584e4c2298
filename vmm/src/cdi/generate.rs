//! Decides what CDI files say of a host's devices: one entry for each function, with its place in a guest, and one for each
//! GPU with a network card near it. Pure.

use std::collections::BTreeMap;

use api::config::{CdiName, CdiNameError};
use pci::address::HostBdf;
use pci::caps::clique::Clique;
use thiserror::Error;

use crate::check::devices::is_nic;
use crate::check::nvswitch::is_nvswitch;
use crate::cli::{KindFlag, Naming, What};
use crate::cliques::{self, CliqueError, Member, Policy};
use crate::host::tree::{HostKind, HostNode, HostParent, HostTree};

/// The version that annotations need.
pub const VERSION: &str = "0.6.0";

/// A function for which there is to be an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Where.
    pub at: HostBdf,
    /// Its name, if the user gives one.
    pub name: Option<String>,
    /// Its clique, if the user gives one.
    pub clique: Option<Clique>,
    /// Whether the user wants it on a conventional bus.
    pub conventional: bool,
}

/// How entries come about.
#[derive(Debug, Clone, Copy)]
pub struct Rules<'a> {
    /// Kinds that stand above the defaults; later ones win.
    pub kinds: &'a [KindFlag],
    /// Names of devices without one.
    pub names: Naming,
    /// Which GPUs are in one clique.
    pub cliques: Policy,
}

/// A file: the devices of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecFile {
    /// Vendor and class.
    pub kind: String,
    /// In the order in which they were chosen, pairs last.
    pub devices: Vec<SpecDevice>,
}

/// A device of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecDevice {
    /// Its qualified name.
    pub name: CdiName,
    /// Annotations, in the order in which they are written.
    pub annotations: Vec<(&'static str, String)>,
    /// Device nodes.
    pub nodes: Vec<String>,
}

/// Files and what the user should know.
pub type Generated = (Vec<SpecFile>, Vec<String>);

/// What the files say of `chosen`, by kind.
pub fn generate(tree: &HostTree, chosen: &[Chosen], rules: Rules<'_>) -> Result<Generated, GenerateError> {
    let members: Vec<Member> = chosen.iter().map(|chosen| Member { at: chosen.at, given: chosen.clique }).collect();
    let cliques = cliques::cliques(tree, &members, rules.cliques)?;
    let mut files: BTreeMap<String, Vec<SpecDevice>> = BTreeMap::new();
    let mut named: Vec<(&HostNode, What, String)> = Vec::new();
    for device in chosen {
        let node = tree.get(device.at).ok_or(GenerateError::Absent { at: device.at })?;
        let what = what(node);
        let index = named.iter().filter(|(_, other, _)| *other == what).count();
        let group = group(node)?;
        let name = device.name.clone().unwrap_or_else(|| match rules.names {
            Naming::Index => format!("{}{index}", word(what)),
            Naming::Address => node.at.to_string(),
            Naming::Group => group.to_string(),
        });
        let conventional = device.conventional || is_conventional(tree, node);
        let mut annotations = vec![("bdf", node.at.to_string())];
        annotations.extend(cliques.of.get(&node.at).map(|clique| ("clique-id", clique.id().to_string())));
        annotations.push(("attach-pci", conventional.to_string()));
        let entry = SpecDevice {
            name: CdiName::new(&kind(rules.kinds, what, node), &name)?,
            annotations,
            nodes: vec![format!("/dev/vfio/{group}")],
        };
        named.push((node, what, name));
        add(&mut files, entry)?;
    }
    for (gpu, nic) in pairs(tree, &named) {
        let mut nodes = vec![format!("/dev/vfio/{}", group(gpu.0)?), format!("/dev/vfio/{}", group(nic.0)?)];
        nodes.dedup();
        let name = CdiName::new(&kind(rules.kinds, What::Pair, gpu.0), &format!("{}-{}", gpu.2, nic.2))?;
        add(&mut files, SpecDevice { name, annotations: Vec::new(), nodes })?;
    }
    let files = files.into_iter().map(|(kind, devices)| SpecFile { kind, devices }).collect();
    Ok((files, cliques.notes.iter().map(ToString::to_string).collect()))
}

fn add(files: &mut BTreeMap<String, Vec<SpecDevice>>, entry: SpecDevice) -> Result<(), GenerateError> {
    let devices = files.entry(entry.name.kind().to_owned()).or_default();
    if devices.iter().any(|other| other.name == entry.name) {
        return Err(GenerateError::Twice { name: entry.name });
    }
    devices.push(entry);
    Ok(())
}

fn group(node: &HostNode) -> Result<u32, GenerateError> {
    node.group.ok_or(GenerateError::NoGroup { at: node.at })
}

fn what(node: &HostNode) -> What {
    match node.ids.class.base() {
        0x03 | 0x12 => What::Gpu,
        0x02 => What::Nic,
        _ if is_nvswitch(node) => What::Nvswitch,
        _ => What::Other,
    }
}

const fn word(what: What) -> &'static str {
    match what {
        What::Gpu => "gpu",
        What::Nic => "nic",
        What::Nvswitch => "nvswitch",
        What::Pair => "pair",
        What::Other => "device",
    }
}

/// The last flag for such devices or for all; by default the vendor's domain.
fn kind(flags: &[KindFlag], what: What, node: &HostNode) -> String {
    let flag = |for_what| flags.iter().rev().find(|flag| flag.what == for_what).map(|flag| flag.kind.clone());
    flag(Some(what)).or_else(|| flag(None)).unwrap_or_else(|| {
        let vendor = match node.ids.vendor {
            0x10DE => "nvidia.com",
            0x15B3 => "mellanox.com",
            0x1002 | 0x1022 => "amd.com",
            0x8086 => "intel.com",
            0x14E4 | 0x1000 => "broadcom.com",
            _ => "vfio.local",
        };
        let class = match what {
            What::Gpu => "pgpu",
            What::Nic => "nic",
            What::Nvswitch => "nvswitch",
            What::Pair => "pgpu-nic",
            What::Other => "device",
        };
        format!("{vendor}/{class}")
    })
}

/// What needs no PCI Express port: functions of a graphics card beside the GPU, and devices of a conventional bus.
fn is_conventional(tree: &HostTree, node: &HostNode) -> bool {
    let beside_gpu = || {
        let same_card = |other: &&HostNode| {
            other.at.domain == node.at.domain
                && other.at.bdf.bus() == node.at.bdf.bus()
                && other.at.bdf.devfn().device() == node.at.bdf.devfn().device()
        };
        let first = |other: &&HostNode| other.at.bdf.devfn().function() == 0;
        tree.functions.values().filter(same_card).find(first).is_some_and(|first| what(first) == What::Gpu)
    };
    let above = match node.on {
        HostParent::Bridge(at) => tree.get(at).map(|bridge| bridge.kind),
        HostParent::RootComplex(_) => None,
    };
    above == Some(HostKind::OtherBridge) || (what(node) == What::Other && node.at.bdf.devfn().function() != 0 && beside_gpu())
}

type Named<'a> = (&'a HostNode, What, String);

/// GPUs with the network cards that share the lowest switch with them: each GPU with its nearest cards, if for these no
/// other GPU is nearer.
fn pairs<'a>(tree: &'a HostTree, named: &'a [Named<'a>]) -> Vec<(&'a Named<'a>, &'a Named<'a>)> {
    let gpus = || named.iter().filter(|(_, what, _)| *what == What::Gpu);
    let nics = || named.iter().filter(|(node, ..)| is_nic(node));
    // How many bridges two devices have in common; more of them are nearer.
    let common = |a: &HostNode, b: &HostNode| {
        let (above, other) = (tree.above(a), tree.above(b));
        let shared: Vec<_> = above.iter().zip(&other).take_while(|(a, b)| a.at == b.at).collect();
        let in_switch = shared.iter().any(|(node, _)| node.kind == HostKind::Port(pci::topology::PortKind::Upstream));
        if in_switch { shared.len() } else { 0 }
    };
    let mut pairs = Vec::new();
    for gpu in gpus() {
        let nearest = nics().map(|nic| common(gpu.0, nic.0)).max().unwrap_or(0);
        for nic in nics().filter(|nic| nearest > 0 && common(gpu.0, nic.0) == nearest) {
            if gpus().all(|other| common(other.0, nic.0) <= nearest) {
                pairs.push((gpu, nic));
            }
        }
    }
    pairs
}

/// Entries that cannot be.
#[derive(Debug, Error)]
pub enum GenerateError {
    /// No such function.
    #[error(
        "there is no PCI function {at}; `lspci -D` lists those of this host, `banyan topology show --host FILE` those of a \
         recorded one"
    )]
    Absent {
        /// Which.
        at: HostBdf,
    },
    /// No node to name.
    #[error(
        "{at} is in no IOMMU group, so that there is no /dev/vfio/N for it; switch the IOMMU on in the firmware set-up and, with a \
         processor of Intel, on the host kernel's command line (intel_iommu=on)"
    )]
    NoGroup {
        /// Which.
        at: HostBdf,
    },
    /// A name or kind that CDI does not allow.
    #[error(transparent)]
    Name(#[from] CdiNameError),
    /// One name for two devices.
    #[error("two devices would be called {name}; give them different names with `id`, or take --names address")]
    Twice {
        /// The name.
        name: CdiName,
    },
    /// Cliques.
    #[error(transparent)]
    Cliques(#[from] CliqueError),
}
