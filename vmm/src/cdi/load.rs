//! Reads what resolving depends on: the CDI files of some directories, and the host's functions with their VFIO nodes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use pci::address::HostBdf;
use pci::ids::ClassCode;
use thiserror::Error;

use crate::host::tree::{HostNode, HostTree};

use super::parse::{self, CdiFileError, Entry};

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
}

impl Library {
    /// Reads `directories`. One that is not there has no files, if `must_exist` does not say otherwise.
    pub fn load(directories: &[PathBuf], must_exist: bool) -> Result<Self, LoadError> {
        let mut library = Self::default();
        for directory in directories {
            let files = match files(directory) {
                Ok(files) => files,
                Err(source) if source.kind() == io::ErrorKind::NotFound && !must_exist => continue,
                Err(source) => return Err(LoadError::Directory { path: directory.clone(), source }),
            };
            let mut added = Vec::new();
            for file in files {
                match read(&file) {
                    Ok(entries) => added.extend(entries),
                    Err(error) => library.unread.push(error),
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
        let unread = self.unread.iter().map(|error| format!("{error}; the devices of this file are not known"));
        let faulty = self.entries.iter().filter_map(|entry| {
            let error = entry.annotations.as_ref().err()?;
            Some(format!("{error}; the device {} cannot be used", entry.name))
        });
        let twice = self.entries.iter().enumerate().filter_map(|(index, entry)| {
            let first = self.entries.iter().take(index).find(|earlier| earlier.name == entry.name)?;
            Some(format!("two CDI files name the device {}: {} and {}", entry.name, first.source, entry.source))
        });
        unread.chain(faulty).chain(twice).collect()
    }
}

/// The files of a directory whose names end as those of CDI files do, by name. Directories below it are not looked into.
fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
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

fn read(path: &Path) -> Result<Vec<Entry>, LoadError> {
    let text = text(path).map_err(|why| LoadError::File { path: path.to_owned(), why })?;
    Ok(parse::parse(path, &text)?)
}

fn text(path: &Path) -> io::Result<String> {
    // A FIFO would make the reader wait.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    File::open(path)?.take(LARGEST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LARGEST {
        return Err(io::Error::other(format!("it has more than {} KiB", LARGEST >> 10)));
    }
    Ok(text)
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
    let unreadable = |source| LoadError::Directory { path: directory.clone(), source };
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
    let class = fs::read_to_string(path.join("class")).ok()?;
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
    /// A directory.
    #[error("cannot read the directory {path}: give --cdi-dir one that can be read", path = path.display())]
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
