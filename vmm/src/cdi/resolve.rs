//! Decides which functions of the host a device stands for, and what CDI files say of their place. Pure.
//!
//! A function takes what the entry says by which it was asked for, and what all other entries say that name it. What a user
//! says stands above both; entries that contradict each other are refused.

use std::fmt;

use api::config::{Attach, CdiName, CliqueId, DeviceConfig, DeviceKind, VfioConfig};
use pci::address::HostBdf;
use thiserror::Error;

use super::load::{HostFunction, Library};
use super::parse::{CdiFileError, Entry, Source, VfioName, VfioNode};

/// What CDI files say, and the host that they speak of.
#[derive(Debug)]
pub struct Resolver<'a> {
    /// The files.
    pub library: &'a Library,
    /// All functions of the host.
    pub host: &'a [HostFunction],
}

/// A value and the entry that says so.
type Said<'a, T> = Option<(T, &'a Entry)>;

impl Resolver<'_> {
    /// The host functions that `device` stands for, in the order of the device nodes. `at` is its address if it names one
    /// itself.
    pub fn resolve(&self, device: &DeviceConfig, at: Option<HostBdf>) -> Result<Vec<DeviceConfig>, ResolveError> {
        let (functions, asked) = match &device.kind {
            DeviceKind::Cdi(name) => {
                let entry = self.entry(name)?;
                (self.functions(entry)?, Some(entry))
            }
            DeviceKind::Vfio(vfio) => match vfio.path.to_str().and_then(VfioNode::from_path) {
                Some(node) => (self.behind(&node)?, None),
                None => (at.into_iter().collect(), None),
            },
            DeviceKind::Stub(_) => (Vec::new(), None),
        };
        if functions.is_empty() {
            return Ok(vec![device.clone()]);
        }
        if functions.len() > 1 && (device.on.is_some() || device.device.is_some() || device.function != 0) {
            return Err(ResolveError::OnePlace { device: device.to_string(), functions: Addresses(functions) });
        }
        let several = functions.len() > 1;
        let mut resolved = Vec::new();
        for (at, number) in functions.into_iter().zip(1u32..) {
            let id = device.id.as_ref().map(|id| if number == 1 { id.clone() } else { format!("{id}-{number}") });
            let (clique, attach) = self.said(at, asked, device.clique.is_none())?;
            // A place that the user gives stands above the files. Of a whole card, the GPU keeps its PCI Express port.
            let own_port = device.on.is_some() || (several && self.is_gpu(at));
            let attach = attach.filter(|(conventional, _)| *conventional && !own_port).map(|_| Attach::Pci);
            // A file can put a NIC into a clique, which a user has to confirm.
            let any_vendor = device.clique_any_vendor || clique.is_some();
            // With a clique of the user's own, it is for those functions that can have one.
            let own = device.clique.filter(|_| number == 1 || self.is_peer(at));
            resolved.push(DeviceConfig {
                id,
                attach: device.attach.or(attach),
                clique: own.or(clique.map(|(clique, _)| clique)),
                clique_any_vendor: any_vendor && (own.is_some() || clique.is_some()),
                kind: DeviceKind::Vfio(VfioConfig { path: at.to_string().into() }),
                ..device.clone()
            });
        }
        Ok(resolved)
    }

    /// What the files say of a function: `asked` and all entries that name it.
    fn said<'b>(
        &'b self,
        at: HostBdf,
        asked: Option<&'b Entry>,
        wants_clique: bool,
    ) -> Result<(Said<'b, CliqueId>, Said<'b, bool>), ResolveError> {
        if let Some(file) = self.library.claims.iter().find(|file| file.functions.iter().any(|name| self.names(name, at))) {
            return Err(ResolveError::Claimed { at, why: file.why.clone() });
        }
        let (mut clique, mut attach) = (None, None);
        let others = self.library.speaking().filter(|entry| asked.is_none_or(|asked| !std::ptr::eq(asked, *entry)));
        for entry in asked.into_iter().chain(others) {
            let asked_for = asked.is_some_and(|asked| std::ptr::eq(asked, entry));
            let functions = match &entry.annotations {
                // Whatever is wrong with it: it speaks of its address, if that is none of it, and of its nodes.
                Err(_) => entry.nodes.iter().flat_map(|node| self.at_node(node)).chain(entry.bdf).collect(),
                Ok(_) if asked_for => self.functions(entry)?,
                Ok(annotations) if annotations.bdf == Some(at) => self.functions(entry)?,
                // A device that is not there cannot be this one.
                Ok(_) => self.functions(entry).unwrap_or_default(),
            };
            if !functions.contains(&at) {
                continue;
            }
            let annotations = entry.annotations.as_ref().map_err(|error| ResolveError::File(error.clone()))?;
            if wants_clique && (functions.len() == 1 || self.is_peer(at)) {
                agree(at, "clique-id", &mut clique, annotations.clique, entry)?;
            }
            agree(at, "attach-pci", &mut attach, annotations.attach_pci, entry)?;
        }
        Ok((clique, attach))
    }

    fn entry(&self, name: &CdiName) -> Result<&Entry, ResolveError> {
        let mut named = self.library.entries.iter().filter(|entry| entry.name == *name);
        match (named.next(), named.next()) {
            (Some(entry), None) => Ok(entry),
            (Some(first), Some(second)) => {
                Err(ResolveError::Twice { name: name.clone(), first: first.source.clone(), second: second.source.clone() })
            }
            (None, _) => {
                let known: Vec<String> = self.library.entries.iter().map(|entry| entry.name.to_string()).take(20).collect();
                let unread = self.library.unread.iter().map(ToString::to_string).collect();
                Err(ResolveError::Unknown { name: name.clone(), known: known.join(", "), unread: Unread(unread) })
            }
        }
    }

    /// The functions that an entry stands for: that of its address, and for the nodes of other groups all of them.
    fn functions(&self, entry: &Entry) -> Result<Vec<HostBdf>, ResolveError> {
        let annotations = entry.annotations.as_ref().map_err(|error| ResolveError::File(error.clone()))?;
        let in_entry = |error| ResolveError::Entry { name: entry.name.clone(), at: entry.source.clone(), why: Box::new(error) };
        let mut found = Vec::new();
        for node in &entry.nodes {
            let behind = self.behind(node).map_err(in_entry)?;
            match annotations.bdf.filter(|bdf| behind.contains(bdf)) {
                Some(bdf) => found.push(bdf),
                None => found.extend(behind),
            }
        }
        match annotations.bdf {
            Some(at) if self.host.iter().all(|function| function.at != at) => Err(in_entry(ResolveError::Absent { at })),
            Some(at) if entry.nodes.is_empty() => Ok(vec![at]),
            Some(at) if !found.contains(&at) => {
                Err(in_entry(ResolveError::OtherGroup { at, group: self.group(at), nodes: Nodes(entry.nodes.clone()) }))
            }
            None if entry.nodes.is_empty() => Err(in_entry(ResolveError::NoVfio)),
            _ => {
                let mut distinct: Vec<HostBdf> = Vec::new();
                for at in found {
                    if !distinct.contains(&at) {
                        distinct.push(at);
                    }
                }
                Ok(distinct)
            }
        }
    }

    /// The functions that a device node gives, of which there must be one.
    fn behind(&self, node: &VfioNode) -> Result<Vec<HostBdf>, ResolveError> {
        let found: Vec<HostBdf> = self.at_node(node).collect();
        if found.is_empty() { Err(ResolveError::NoNode { node: node.clone() }) } else { Ok(found) }
    }

    fn at_node(&self, node: &VfioNode) -> impl Iterator<Item = HostBdf> {
        let of_node = |function: &&HostFunction| match node {
            VfioNode::Group(group) => function.group == Some(*group) && !function.class.is_topology_bridge(),
            VfioNode::Device(name) => function.node.as_ref() == Some(name),
        };
        self.host.iter().filter(of_node).map(|function| function.at)
    }

    fn names(&self, name: &VfioName, at: HostBdf) -> bool {
        match name {
            VfioName::Address(address) => *address == at,
            VfioName::Node(node) => self.at_node(node).any(|function| function == at),
        }
    }

    fn group(&self, at: HostBdf) -> Option<u32> {
        self.host.iter().find(|function| function.at == at)?.group
    }

    fn is_gpu(&self, at: HostBdf) -> bool {
        self.host.iter().any(|function| function.at == at && matches!(function.class.base(), 0x03 | 0x12))
    }

    /// Whether a function is one that others exchange data with: network, display, coprocessor, accelerator. The audio and
    /// USB functions of a graphics card are in no clique.
    fn is_peer(&self, at: HostBdf) -> bool {
        let class = self.host.iter().find(|function| function.at == at).map(|function| function.class);
        class.is_some_and(|class| matches!(class.base(), 0x02 | 0x03 | 0x12) || class.base_and_sub() == 0x0B40)
    }
}

/// Takes over what an entry says, if no other says something else.
fn agree<'a, T: PartialEq>(
    at: HostBdf,
    key: &'static str,
    known: &mut Said<'a, T>,
    new: Option<T>,
    entry: &'a Entry,
) -> Result<(), ResolveError> {
    match (&known, new) {
        (_, None) => Ok(()),
        (None, Some(new)) => {
            *known = Some((new, entry));
            Ok(())
        }
        (Some((value, _)), Some(new)) if *value == new => Ok(()),
        (Some((_, first)), Some(_)) => {
            Err(ResolveError::Disagree { at, key, first: first.source.clone(), second: entry.source.clone() })
        }
    }
}

/// Addresses with commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addresses(pub Vec<HostBdf>);

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join(", "))
    }
}

/// Device nodes with commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes(pub Vec<VfioNode>);

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join(", "))
    }
}

/// Files that say nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unread(pub Vec<String>);

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|file| write!(f, "; not read: {file}"))
    }
}

/// A device that cannot be told.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum ResolveError {
    /// No file has it.
    #[error("no CDI file names the device {name}; named are: {}{unread}", if known.is_empty() { "none" } else { known })]
    Unknown {
        /// What was asked for.
        name: CdiName,
        /// What there is.
        known: String,
        /// Files that could have it.
        unread: Unread,
    },
    /// Files of one directory have it.
    #[error("two CDI files name the device {name}: {first} and {second}; remove one")]
    Twice {
        /// The name.
        name: CdiName,
        /// One place.
        first: Source,
        /// The other.
        second: Source,
    },
    /// A file with a mistake in what it says of the device.
    #[error(transparent)]
    File(CdiFileError),
    /// A file that cannot be understood and speaks of the device.
    #[error("{why}; the file names {at}, whose clique and place it may say: correct the file or remove it")]
    Claimed {
        /// The function.
        at: HostBdf,
        /// What is wrong with the file.
        why: CdiFileError,
    },
    /// An entry that leads nowhere.
    #[error("CDI device {name} of {at}: {why}")]
    Entry {
        /// Its name.
        name: CdiName,
        /// Where it stands.
        at: Source,
        /// Why.
        why: Box<ResolveError>,
    },
    /// No such function.
    #[error(
        "there is no PCI function {at}, which `bdf` names; `lspci -D` lists those of this host, `banyan topology show --host FILE` \
         those of a recorded one"
    )]
    Absent {
        /// Which.
        at: HostBdf,
    },
    /// Address and device nodes contradict each other.
    #[error("`bdf` names {at} of {}, and its device nodes are {nodes}; correct one of them", group_text(*group))]
    OtherGroup {
        /// The address.
        at: HostBdf,
        /// Its group.
        group: Option<u32>,
        /// The nodes.
        nodes: Nodes,
    },
    /// Neither address nor node.
    #[error("it names no VFIO device; add an annotation `bdf` or a device node /dev/vfio/N")]
    NoVfio,
    /// No function behind a node.
    #[error("no PCI function of this host is behind {node}; `ls -l /sys/bus/pci/devices/*/iommu_group` shows the groups")]
    NoNode {
        /// The node.
        node: VfioNode,
    },
    /// Several functions and one place.
    #[error("--device {device} stands for {functions}, which do not fit in one place; leave out `on`, `device` and `function`")]
    OnePlace {
        /// As given.
        device: String,
        /// What it is.
        functions: Addresses,
    },
    /// Two entries say different things.
    #[error("CDI files disagree on `{key}` of {at}: {first} and {second}; correct one, or give it with --device")]
    Disagree {
        /// The function.
        at: HostBdf,
        /// The annotation.
        key: &'static str,
        /// One.
        first: Source,
        /// The other.
        second: Source,
    },
}

fn group_text(group: Option<u32>) -> String {
    group.map_or("no IOMMU group".to_owned(), |group| format!("IOMMU group {group}"))
}

#[cfg(test)]
mod tests;
