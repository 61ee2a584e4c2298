//! Reads what resolving depends on: the CDI files of some directories, and the host's functions with their VFIO nodes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use api::config::CdiMistakes;
use pci::address::HostBdf;
use pci::ids::ClassCode;
use thiserror::Error;

use crate::files;
use crate::host::tree::{HostNode, HostTree};

use super::parse::{self, CdiFileError, Entry, VfioName};

/// Where CDI files are by default; those in the later directory win.
pub const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Largest file that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// What all CDI files say.
#[derive(Debug, Default)]
pub struct Library {
    /// Devices in the order of directories and names of files. A name can be there twice only within one directory.
    pub entries: Vec<Entry>,
    /// Files that say nothing because they cannot be read or understood.
    pub unread: Vec<LoadError>,
    /// Of those that cannot be understood, what they would speak of; none where mistakes cost a warning.
    pub claims: Vec<Claims>,
    /// What mistakes cost.
    pub mistakes: CdiMistakes,
}

/// What a file that cannot be understood would speak of.
#[derive(Debug, Clone)]
pub struct Claims {
    /// The addresses and device nodes in its text.
    pub functions: Vec<VfioName>,
    /// Why it cannot be understood.
    pub why: CdiFileError,
}

impl Library {
    /// Reads `directories`. One that is not there has no files, unless somebody has `named` it and mistakes are refused.
    pub fn load(directories: &[PathBuf], named: bool, mistakes: CdiMistakes) -> Result<Self, LoadError> {
        let mut library = Self { mistakes, ..Self::default() };
        let (warn, must_exist) = (mistakes == CdiMistakes::Warn, named && mistakes == CdiMistakes::Refuse);
        for directory in directories {
            let found = match in_directory(directory) {
                Ok(found) => found,
                Err(source) if source.kind() == io::ErrorKind::NotFound && !must_exist => continue,
                Err(source) => {
                    let error = LoadError::Directory { path: directory.clone(), source };
                    if !warn {
                        return Err(error);
                    }
                    library.unread.push(error);
                    continue;
                }
            };
            let mut added = Vec::new();
            for file in found {
                match files::text(&file, LARGEST) {
                    Ok(text) => match parse::parse(&file, &text) {
                        Ok(entries) => added.extend(entries),
                        Err(why) => {
                            if !warn {
                                library.claims.push(Claims { functions: parse::mentioned(&text), why: why.clone() });
                            }
                            library.unread.push(why.into());
                        }
                    },
                    Err(why) => library.unread.push(LoadError::File { path: file, why }),
                }
            }
            library.entries.retain(|earlier| added.iter().all(|entry| entry.name != earlier.name));
            library.entries.extend(added);
        }
        Ok(library)
    }

    /// What is wrong with files and entries, for a user who may miss them.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let unread = self.unread.iter().map(|error| match error {
            LoadError::Directory { .. } => format!("{error}; its devices are not known"),
            _ => format!("{error}; the devices of this file are not known"),
        });
        let faulty = self.entries.iter().filter_map(|entry| {
            let error = entry.annotations.as_ref().err()?;
            Some(format!("{error}; the device {} cannot be used", entry.name))
        });
        let twice = self.entries.iter().enumerate().filter_map(|(index, entry)| {
            let first = self.entries.iter().take(index).find(|earlier| earlier.name == entry.name)?;
            let cost = if self.mistakes == CdiMistakes::Warn { "; what they say is not followed" } else { "" };
            Some(format!("two CDI files name the device {}: {} and {}{cost}", entry.name, first.source, entry.source))
        });
        unread.chain(faulty).chain(twice).collect()
    }

    /// Entries that say something of the devices that they name: where mistakes cost a warning, none whose name is there twice.
    pub fn speaking(&self) -> impl Iterator<Item = &Entry> {
        let named = |entry: &Entry| self.entries.iter().filter(|other| other.name == entry.name).count();
        self.entries.iter().filter(move |entry| self.mistakes == CdiMistakes::Refuse || named(entry) == 1)
    }
}

/// The files of a directory whose names end as those of CDI files do, by name. Directories below it are not looked into.
fn in_directory(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "json" || extension == "yaml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// A PCI function as VFIO's device nodes name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFunction {
    /// Where.
    pub at: HostBdf,
    /// Class code.
    pub class: ClassCode,
    /// IOMMU group, which is the number of its node in `/dev/vfio`.
    pub group: Option<u32>,
    /// Name of its own node in `/dev/vfio/devices`.
    pub node: Option<String>,
}

/// All PCI functions of the host, by address. Those that vanish meanwhile are left out.
pub fn functions(sysfs: &Path) -> Result<Vec<HostFunction>, LoadError> {
    let directory = sysfs.join("bus/pci/devices");
    let unreadable = |source| LoadError::Sysfs { path: directory.clone(), source };
    let mut functions = Vec::new();
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        // A machine without PCI.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(functions),
        Err(source) => return Err(unreadable(source)),
    };
    for entry in entries {
        let path = entry.map_err(unreadable)?.path();
        functions.extend(function(&path));
    }
    functions.sort_by_key(|function| function.at);
    Ok(functions)
}

/// The functions of a recorded host, which has no device nodes but those of groups.
#[must_use]
pub fn recorded(tree: &HostTree) -> Vec<HostFunction> {
    let function = |node: &HostNode| HostFunction { at: node.at, class: node.ids.class, group: node.group, node: None };
    tree.functions.values().map(function).collect()
}

fn function(path: &Path) -> Option<HostFunction> {
    let at = path.file_name()?.to_str()?.parse().ok()?;
    let class = files::text(&path.join("class"), files::ATTRIBUTE).ok()?;
    let class = u32::from_str_radix(class.trim().trim_start_matches("0x"), 16).ok()?;
    let group = fs::read_link(path.join("iommu_group")).ok();
    let group = group.and_then(|link| link.file_name()?.to_str()?.parse().ok());
    let node = fs::read_dir(path.join("vfio-dev")).ok().and_then(|mut entries| entries.next()?.ok());
    let node = node.and_then(|entry| entry.file_name().into_string().ok());
    Some(HostFunction { at, class: ClassCode::new(class), group, node })
}

/// CDI files or a host that cannot be read.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The host's functions.
    #[error("cannot read {path}: is sysfs mounted, and may this user read it?", path = path.display())]
    Sysfs {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A directory.
    #[error("cannot read the directory {path}: name one with CDI files that can be read", path = path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file.
    #[error("CDI file {path} cannot be read: {why}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        why: io::Error,
    },
    /// What a file says.
    #[error(transparent)]
    Content(#[from] CdiFileError),
}
