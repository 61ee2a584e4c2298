//! Carries out `banyan cdi`: chooses functions of the host, and writes what [`super::generate`] says of them.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use api::config::{Attach, CdiMistakes, DeviceConfig, DeviceKind};
use pci::address::HostBdf;
use pci::caps::clique::Clique;
use serde_json::{Value, json};
use thiserror::Error;

use super::generate::{Chosen, GenerateError, Rules, SpecFile, VERSION, generate};
use super::load::{Library, LoadError};
use super::parse::Source;
use crate::cli::{CdiCommand, CdiOptions, FileFormat, GenerateOptions};
use crate::host::check::is_vfio;
use crate::host::recorded::{RecordedError, RecordedHost};
use crate::host::scan::{ScanError, resolve, scan_all};
use crate::host::tree::HostTree;
use crate::host::{SYSFS, check};
use crate::print::print;

/// `banyan cdi`. Remarks go to `notes`.
pub fn run(options: &CdiOptions, out: &mut dyn Write, notes: &mut dyn Write) -> Result<(), CdiCommandError> {
    let CdiCommand::Generate(options) = &options.command;
    let tree = match &options.host {
        Some(path) => RecordedHost::read(path)?.tree,
        None => scan_all(Path::new(SYSFS))?,
    };
    let devices: Vec<DeviceConfig> = options.given.iter().chain(&options.devices).cloned().collect();
    let chosen = chosen(&tree, &devices)?;
    let rules = Rules { kinds: &options.kinds, names: options.names, cliques: options.cliques.policy() };
    let (files, remarks) = generate(&tree, &chosen, rules)?;
    for remark in remarks {
        // Nothing can be done about a standard error that is closed.
        let _ = print(notes, &format!("note: {remark}\n"));
    }
    let text = if options.output == Path::new("-") { printed(&files, options.format) } else { written(&files, options)? };
    print(out, &text).map_err(CdiCommandError::Print)
}

/// The functions that are asked for, or all that VFIO has.
fn chosen(tree: &HostTree, devices: &[DeviceConfig]) -> Result<Vec<Chosen>, CdiCommandError> {
    if devices.is_empty() {
        let free = tree.functions.values().filter(|node| node.driver.as_deref().is_some_and(is_vfio));
        let chosen: Vec<Chosen> =
            free.map(|node| Chosen { at: node.at, name: None, clique: None, conventional: false }).collect();
        return if chosen.is_empty() { Err(CdiCommandError::NothingFree) } else { Ok(chosen) };
    }
    devices.iter().map(|device| one(tree, device)).collect()
}

fn one(tree: &HostTree, device: &DeviceConfig) -> Result<Chosen, CdiCommandError> {
    let DeviceKind::Vfio(vfio) = &device.kind else {
        return Err(CdiCommandError::NoFunction { device: device.to_string() });
    };
    let at: HostBdf = resolve(&vfio.path.to_string_lossy())?;
    let wanted = check::Wanted { name: device.id.clone().unwrap_or_else(|| at.to_string()), at };
    check::check_present(tree, &[wanted])?;
    Ok(Chosen {
        at,
        name: device.id.clone(),
        clique: device.clique.and_then(|clique| Clique::new(clique.get()).ok()),
        conventional: device.attach == Some(Attach::Pci),
    })
}

/// Everything for standard output.
fn printed(files: &[SpecFile], format: FileFormat) -> String {
    match (format, files) {
        (FileFormat::Json, [file]) => format!("{:#}\n", json(file)),
        (FileFormat::Json, _) => format!("{:#}\n", Value::Array(files.iter().map(json).collect())),
        (FileFormat::Yaml, _) => files.iter().map(yaml).collect::<Vec<_>>().join("---\n"),
    }
}

/// Writes each file and says so.
fn written(files: &[SpecFile], options: &GenerateOptions) -> Result<String, CdiCommandError> {
    let folder = &options.output;
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| CdiCommandError::Write { path, source }
    };
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let named = |file: &SpecFile, ending: &str| folder.join(format!("banyan-{}.{ending}", file.kind.replace('/', "-")));
    let (ending, other) = match options.format {
        FileFormat::Yaml => ("yaml", "json"),
        FileFormat::Json => ("json", "yaml"),
    };
    let replaced: Vec<PathBuf> = files.iter().flat_map(|file| [named(file, ending), named(file, other)]).collect();
    let library = Library::load(std::slice::from_ref(folder), true, CdiMistakes::Refuse)?;
    for entry in library.entries.iter().filter(|entry| !replaced.contains(&entry.source.file)) {
        if files.iter().flat_map(|file| &file.devices).any(|device| device.name == entry.name) {
            return Err(CdiCommandError::Taken { name: entry.name.to_string(), at: entry.source.clone() });
        }
    }
    let mut told = String::new();
    for file in files {
        let path = named(file, ending);
        let text = match options.format {
            FileFormat::Yaml => yaml(file),
            FileFormat::Json => format!("{:#}\n", json(file)),
        };
        // Readers look at names ending in .yaml and .json, so that they see the old file or the new one.
        let unfinished = path.with_extension("new");
        fs::write(&unfinished, text).map_err(failed(&unfinished))?;
        fs::rename(&unfinished, &path).map_err(failed(&path))?;
        match fs::remove_file(named(file, other)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&named(file, other))(error)),
            _ => {}
        }
        // Writing to a string does not fail.
        let _ = writeln!(told, "{}: {} devices", path.display(), file.devices.len());
    }
    Ok(told)
}

fn json(file: &SpecFile) -> Value {
    let devices = file.devices.iter().map(|device| {
        let nodes: Vec<Value> = device.nodes.iter().map(|path| json!({ "path": path })).collect();
        let mut value = json!({ "name": device.name.name(), "containerEdits": { "deviceNodes": nodes } });
        if let (Value::Object(map), false) = (&mut value, device.annotations.is_empty()) {
            let annotations = device.annotations.iter().map(|(key, text)| ((*key).to_owned(), Value::from(text.as_str())));
            map.insert("annotations".to_owned(), Value::Object(annotations.collect()));
        }
        value
    });
    json!({ "cdiVersion": VERSION, "kind": file.kind, "devices": devices.collect::<Vec<_>>() })
}

/// A string in double quotes is the same in YAML as in JSON.
fn yaml(file: &SpecFile) -> String {
    let quoted = |text: &str| Value::from(text).to_string();
    let mut text =
        format!("# By `banyan cdi generate`.\ncdiVersion: {}\nkind: {}\ndevices:\n", quoted(VERSION), quoted(&file.kind));
    for device in &file.devices {
        // Writing to a string does not fail.
        let _ = writeln!(text, "- name: {}", quoted(device.name.name()));
        if !device.annotations.is_empty() {
            text.push_str("  annotations:\n");
        }
        for (key, value) in &device.annotations {
            let _ = writeln!(text, "    {key}: {}", quoted(value));
        }
        text.push_str("  containerEdits:\n    deviceNodes:\n");
        for node in &device.nodes {
            let _ = writeln!(text, "    - path: {}", quoted(node));
        }
    }
    text
}

/// Files that are not written.
#[derive(Debug, Error)]
pub enum CdiCommandError {
    /// This host.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// A recorded host.
    #[error(transparent)]
    Recorded(#[from] RecordedError),
    /// A device.
    #[error(transparent)]
    Device(#[from] check::CheckError),
    /// A stub or a CDI name.
    #[error("`{device}` is no function of the host; give an address such as 0000:41:00.0")]
    NoFunction {
        /// As given.
        device: String,
    },
    /// Nothing is bound to VFIO.
    #[error("no function of this host is bound to vfio-pci; bind some, or name those that will be")]
    NothingFree,
    /// Entries.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// What the directory holds.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A name that another file has.
    #[error("{at} names the device {name} already; remove it there, or give another --kind or `id`")]
    Taken {
        /// The name.
        name: String,
        /// Where.
        at: Source,
    },
    /// A file or directory.
    #[error("cannot write {path}; give --output a directory that can be written", path = path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Standard output.
    #[error("cannot write to standard output")]
    Print(#[source] io::Error),
}

#[cfg(test)]
mod tests;
