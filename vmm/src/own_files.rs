//! Decides whether files that a machine writes its output to are its own: none of what it starts from or keeps its data in,
//! and none twice. Follows links, since a name says nothing of the file behind it.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use api::config::{DiskSource, OutputConfig, Payload, VmConfig};
use thiserror::Error;

/// Whether all output of `config`, and a log at `log`, can be written without harm to other files of the machine. Opens nothing.
pub fn check(config: &VmConfig, log: Option<&Path>) -> Result<(), FilesError> {
    let outputs = outputs(config, log);
    let inputs = inputs(config);
    let inputs: Vec<_> = inputs.into_iter().filter_map(|(what, path)| Some((what, path, Identity::of(path)?))).collect();
    let mut before: Vec<(&str, &Path, Identity)> = Vec::new();
    for (flag, path) in outputs {
        let Some(identity) = Identity::of(path) else { continue };
        if let Some((what, other, _)) = inputs.iter().find(|(_, _, there)| *there == identity) {
            return Err(FilesError::Input { flag, path: path.into(), what, other: (*other).into() });
        }
        if let Some((first, ..)) = before.iter().find(|(_, _, there)| *there == identity) {
            return Err(FilesError::Twice { flag, path: path.into(), first: (*first).to_owned() });
        }
        before.push((flag, path, identity));
    }
    Ok(())
}

fn outputs<'a>(config: &'a VmConfig, log: Option<&'a Path>) -> Vec<(&'static str, &'a Path)> {
    let consoles = [
        ("--serial", Some(&config.serial)),
        ("--console", Some(&config.console)),
        ("--debug-console", config.debug_console.as_ref()),
    ];
    let files = consoles.into_iter().filter_map(|(flag, output)| match output {
        Some(OutputConfig::File(path)) => Some((flag, path.as_path())),
        _ => None,
    });
    files.chain(log.map(|path| ("--log", path))).collect()
}

fn inputs(config: &VmConfig) -> Vec<(&'static str, &Path)> {
    let payload = match &config.payload {
        Some(Payload::Kernel(kernel)) => {
            vec![Some(("kernel", kernel.path.as_path())), kernel.initramfs.as_deref().map(|path| ("initramfs", path))]
        }
        Some(Payload::Firmware(path)) => vec![Some(("firmware", path.as_path()))],
        None => Vec::new(),
    };
    let disks = config.disks.iter().filter_map(|disk| match &disk.source {
        DiskSource::Image(path) => Some(("disk", path.as_path())),
        DiskSource::Server(_) => None,
    });
    payload.into_iter().flatten().chain(disks).collect()
}

/// What tells one place for data from another.
#[derive(Debug, PartialEq, Eq)]
enum Identity {
    /// A file, by file system and number.
    File(u64, u64),
    /// A block device, whatever node leads to it.
    Block(u64),
    /// A file that would be made here.
    New(PathBuf),
}

impl Identity {
    /// `None` for what keeps no data, such as terminals and pipes, and for what cannot be reached: its use fails by itself.
    fn of(path: &Path) -> Option<Self> {
        let Ok(there) = fs::metadata(path) else { return Self::new(path) };
        let kind = there.file_type();
        if kind.is_block_device() {
            return Some(Self::Block(there.rdev()));
        }
        kind.is_file().then(|| Self::File(there.dev(), there.ino()))
    }

    fn new(path: &Path) -> Option<Self> {
        // A link that leads to nothing makes the file that it names.
        let target = fs::read_link(path).map_or_else(|_| path.into(), |to| path.parent().unwrap_or(Path::new("")).join(to));
        let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(Self::New(fs::canonicalize(parent).ok()?.join(target.file_name()?)))
    }
}

/// Output that would destroy something.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FilesError {
    /// Onto what the machine uses.
    #[error("{flag} would write to {}, which is the {what} {}: give {flag} a file of its own", path.display(), other.display())]
    Input {
        /// Which output.
        flag: &'static str,
        /// Its file.
        path: PathBuf,
        /// What the file is.
        what: &'static str,
        /// As it is named there.
        other: PathBuf,
    },
    /// Two into one.
    #[error("{flag} and {first} would both write to {}: give each a file of its own", path.display())]
    Twice {
        /// The second output.
        flag: &'static str,
        /// The first one.
        first: String,
        /// The file.
        path: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use api::config::KernelConfig;

    use super::*;

    #[test]
    fn output_never_goes_to_a_file_that_the_machine_uses_or_twice_to_one() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["kernel", "initramfs", "firmware", "disk"] {
            fs::write(at(name), name).unwrap();
            symlink(at(name), at(&format!("{name}-link"))).unwrap();
            fs::hard_link(at(name), at(&format!("{name}-hard"))).unwrap();
        }
        symlink("new", at("new-link")).unwrap();
        let kernel =
            KernelConfig { path: at("kernel"), initramfs: Some(at("initramfs")), cmdline: String::new(), load_address: None };
        let kernel = VmConfig {
            payload: Some(Payload::Kernel(kernel)),
            disks: vec![format!("path={}", at("disk").display()).parse().unwrap()],
            ..VmConfig::default()
        };
        let firmware = VmConfig { payload: Some(Payload::Firmware(at("firmware"))), ..VmConfig::default() };
        let file = |name: &str| OutputConfig::File(at(name));
        for (base, what) in [(&kernel, "kernel"), (&kernel, "initramfs"), (&kernel, "disk"), (&firmware, "firmware")] {
            for name in [what.to_owned(), format!("{what}-link"), format!("{what}-hard")] {
                let outputs = [
                    ("--serial", VmConfig { serial: file(&name), ..base.clone() }, None),
                    ("--console", VmConfig { console: file(&name), ..base.clone() }, None),
                    ("--debug-console", VmConfig { debug_console: Some(file(&name)), ..base.clone() }, None),
                    ("--log", base.clone(), Some(at(&name))),
                ];
                for (flag, config, log) in outputs {
                    let error = check(&config, log.as_deref()).unwrap_err().to_string();
                    assert!(
                        error.starts_with(flag) && error.contains(&format!("is the {what} {}", at(what).display())),
                        "{error}"
                    );
                }
            }
            assert_eq!(fs::read_to_string(at(what)).unwrap(), what);
        }
        let both = |one: &str, other: &str| check(&VmConfig { serial: file(one), console: file(other), ..kernel.clone() }, None);
        for (one, other) in [("new", "new"), ("new", "new-link"), ("firmware", "firmware-hard")] {
            let error = both(one, other).unwrap_err().to_string();
            assert!(error.starts_with("--console and --serial would both write to"), "{error}");
        }
        assert_eq!(both("new", "newer"), Ok(()));
        let null = || OutputConfig::File("/dev/null".into());
        assert_eq!(check(&VmConfig { serial: null(), console: null(), ..kernel }, Some(Path::new("/dev/null"))), Ok(()));
    }
}
