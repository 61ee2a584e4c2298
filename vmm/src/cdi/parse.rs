//! Reads one CDI file: which devices it names, by which device nodes, with which annotations. Pure.
//!
//! Versions 0.3 to 1.0 of the specification. What a container would be given beside device nodes is checked for its keys
//! only. Annotations are read whatever the version, although only 0.6 and later know them: the published examples for
//! virtual machines say 0.4.

use std::fmt;
use std::path::{Path, PathBuf};

use api::config::{CdiName, CdiNameError, CliqueId};
use pci::address::HostBdf;
use thiserror::Error;

use super::yaml::{self, Node, Refusal, Value};

/// A device of a CDI file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: CdiName,
    /// Where it stands.
    pub source: Source,
    /// The function that `bdf` names, whatever is wrong with other annotations.
    pub bdf: Option<HostBdf>,
    /// The VFIO device nodes among those that it gives a container.
    pub nodes: Vec<VfioNode>,
    /// What it says of the place in a virtual machine, or why that is not understood.
    pub annotations: Result<Annotations, CdiFileError>,
}

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: usize,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// A device node of VFIO.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VfioNode {
    /// `/dev/vfio/N`: IOMMU group N.
    Group(u32),
    /// `/dev/vfio/devices/vfioN`: one function.
    Device(String),
}

impl VfioNode {
    /// The node with this path; `None` for other device nodes, also for `/dev/vfio/vfio`.
    #[must_use]
    pub fn from_path(path: &str) -> Option<Self> {
        let rest = path.strip_prefix("/dev/vfio/")?;
        match rest.strip_prefix("devices/") {
            Some(name) if name.starts_with("vfio") => Some(Self::Device(name.to_owned())),
            Some(_) => None,
            None => rest.parse().ok().map(Self::Group),
        }
    }
}

impl fmt::Display for VfioNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Group(group) => write!(f, "/dev/vfio/{group}"),
            Self::Device(name) => write!(f, "/dev/vfio/devices/{name}"),
        }
    }
}

/// A function as texts name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VfioName {
    /// By its address.
    Address(HostBdf),
    /// By its device node.
    Node(VfioNode),
}

/// The functions that a text names, wherever in it. For one that cannot be understood: what it says of them is not known.
#[must_use]
pub fn mentioned(text: &str) -> Vec<VfioName> {
    let words = text.split(|char: char| !char.is_ascii_alphanumeric() && !":./".contains(char));
    let name = |word: &str| {
        let node = VfioNode::from_path(word).map(VfioName::Node);
        node.or_else(|| word.parse().ok().map(VfioName::Address))
    };
    words.filter_map(name).collect()
}

/// The annotations that mean something to a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Annotations {
    /// `bdf`: the function.
    pub bdf: Option<HostBdf>,
    /// `clique-id`: NVIDIA peer-to-peer clique.
    pub clique: Option<CliqueId>,
    /// `attach-pci`: whether it goes on a conventional bus.
    pub attach_pci: Option<bool>,
}

/// The devices that the file says it has.
pub fn parse(file: &Path, text: &str) -> Result<Vec<Entry>, CdiFileError> {
    let root = yaml::read(text).map_err(|Refusal { line, why }| problem(file, line, Problem::Text { why }))?;
    let spec = Map::of(file, &root, "the file")?;
    spec.knows(&["cdiVersion", "kind", "annotations", "devices", "containerEdits"])?;
    let version = spec.text("cdiVersion")?;
    if !is_known(&version.value) {
        return Err(spec.problem(version.line, Problem::Version { version: version.value }));
    }
    let kind = spec.text("kind")?;
    let common_nodes = nodes(&spec)?;
    let common = annotations(&spec)?;
    let mut entries: Vec<Entry> = Vec::new();
    for device in spec.list("devices")? {
        let map = Map::of(file, device, "devices")?;
        map.knows(&["name", "annotations", "containerEdits"])?;
        let name = map.text("name")?;
        let named = CdiName::new(&kind.value, &name.value);
        let qualified = named.map_err(|why| map.problem(name.line, Problem::Name { why }))?;
        if let Some(earlier) = entries.iter().find(|entry| entry.name == qualified) {
            return Err(map.problem(name.line, Problem::Twice { name: qualified, earlier: earlier.source.line }));
        }
        let own = annotations(&map)?;
        let both = common.iter().filter(|default| own.iter().all(|own| own.key != default.key)).chain(&own);
        let bdf = both.clone().find(|annotation| annotation.key == "bdf").and_then(|bdf| bdf.value.value.parse().ok());
        let annotations = both.cloned().try_fold(Annotations::default(), |known, annotation| known.with(file, annotation));
        let nodes = common_nodes.iter().cloned().chain(nodes(&map)?).collect();
        let source = Source { file: file.to_owned(), line: name.line };
        entries.push(Entry { name: qualified, source, bdf, nodes, annotations });
    }
    Ok(entries)
}

/// 0.3 to 0.8 and 1.0, with any patch level.
fn is_known(version: &str) -> bool {
    let mut parts = version.split('.').map(str::parse::<u16>);
    let (major, minor, patch, end) = (parts.next(), parts.next(), parts.next(), parts.next());
    matches!((major, minor), (Some(Ok(0)), Some(Ok(3..=8))) | (Some(Ok(1)), Some(Ok(0))))
        && matches!(patch, Some(Ok(_)))
        && end.is_none()
}

/// One annotation as it is written.
#[derive(Debug, Clone)]
struct Annotation {
    key: String,
    value: Text,
}

fn annotations(map: &Map<'_>) -> Result<Vec<Annotation>, CdiFileError> {
    let Some(node) = map.get("annotations") else { return Ok(Vec::new()) };
    let map = Map::of(map.file, node, "annotations")?;
    let texts = map.entries.iter().map(|(key, ..)| Ok(Annotation { key: key.clone(), value: map.text(key)? }));
    texts.collect()
}

const KEYS: [&str; 3] = ["bdf", "clique-id", "attach-pci"];

impl Annotations {
    fn with(mut self, file: &Path, annotation: Annotation) -> Result<Self, CdiFileError> {
        let Annotation { key, value: Text { value, line } } = annotation;
        let bad = |must: &'static str| problem(file, line, Problem::Annotation { key: key.clone(), value: value.clone(), must });
        match key.as_str() {
            "bdf" => {
                let bdf = value.parse().map_err(|_| bad("an address such as 0000:41:00.0 or 41:00.0"))?;
                self.bdf = Some(bdf);
            }
            "clique-id" => {
                let number = value.parse::<u8>().ok().and_then(|number| CliqueId::try_from(number).ok());
                self.clique = Some(number.ok_or_else(|| bad("a whole number from 0 to 15"))?);
            }
            "attach-pci" => {
                self.attach_pci = Some(value.parse().map_err(|_| bad("true or false"))?);
            }
            other => {
                if let Some(meant) = KEYS.into_iter().find(|key| bare(key) == bare(other)) {
                    return Err(problem(file, line, Problem::Spelling { key: other.to_owned(), meant }));
                }
            }
        }
        Ok(self)
    }
}

/// A key without what people write differently.
fn bare(key: &str) -> String {
    key.chars().filter(char::is_ascii_alphanumeric).map(|char| char.to_ascii_lowercase()).collect()
}

/// The VFIO nodes below `containerEdits`. The node on the host counts, which `hostPath` names if it differs.
fn nodes(map: &Map<'_>) -> Result<Vec<VfioNode>, CdiFileError> {
    let Some(edits) = map.get("containerEdits") else { return Ok(Vec::new()) };
    let edits = Map::of(map.file, edits, "containerEdits")?;
    edits.knows(&["env", "deviceNodes", "netDevices", "hooks", "mounts", "intelRdt", "additionalGids", "additionalGIDs"])?;
    let mut found = Vec::new();
    for node in edits.list("deviceNodes")? {
        let node = Map::of(map.file, node, "deviceNodes")?;
        node.knows(&["path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"])?;
        let path = node.text("path")?;
        let on_host = node.get("hostPath").map(|_| node.text("hostPath")).transpose()?;
        found.extend(VfioNode::from_path(&on_host.unwrap_or(path).value));
    }
    Ok(found)
}

/// A scalar without blanks and without typographic quotes around it.
#[derive(Debug, Clone)]
struct Text {
    value: String,
    line: usize,
}

/// A mapping of a file.
#[derive(Debug, Clone, Copy)]
struct Map<'a> {
    file: &'a Path,
    line: usize,
    entries: &'a [(String, usize, Node)],
}

impl<'a> Map<'a> {
    fn of(file: &'a Path, node: &'a Node, what: &'static str) -> Result<Self, CdiFileError> {
        match &node.value {
            Value::Map(entries) => Ok(Self { file, line: node.line, entries }),
            _ => Err(problem(file, node.line, Problem::Shape { key: what.to_owned(), must: "hold keys with values" })),
        }
    }

    fn problem(&self, line: usize, what: Problem) -> CdiFileError {
        problem(self.file, line, what)
    }

    fn knows(&self, keys: &[&str]) -> Result<(), CdiFileError> {
        match self.entries.iter().find(|(key, ..)| !keys.contains(&key.as_str())) {
            Some((key, line, _)) => Err(self.problem(*line, Problem::Key { key: key.clone(), known: keys.join(", ") })),
            None => Ok(()),
        }
    }

    fn get(&self, key: &str) -> Option<&'a Node> {
        self.entries.iter().find(|(name, ..)| name == key).map(|(_, _, node)| node)
    }

    fn text(&self, key: &str) -> Result<Text, CdiFileError> {
        let node = self.get(key).ok_or_else(|| self.problem(self.line, Problem::Missing { key: key.to_owned() }))?;
        match &node.value {
            Value::Text(text) => {
                let value = text.trim_matches(|char: char| {
                    char.is_whitespace() || "\"'\u{201C}\u{201D}\u{201E}\u{2018}\u{2019}".contains(char)
                });
                Ok(Text { value: value.to_owned(), line: node.line })
            }
            _ => Err(self.problem(node.line, Problem::Shape { key: key.to_owned(), must: "be a text" })),
        }
    }

    fn list(&self, key: &str) -> Result<&'a [Node], CdiFileError> {
        match self.get(key).map(|node| (node.line, &node.value)) {
            None => Ok(&[]),
            Some((_, Value::List(items))) => Ok(items),
            Some((line, _)) => Err(self.problem(line, Problem::Shape { key: key.to_owned(), must: "be a list" })),
        }
    }
}

fn problem(file: &Path, line: usize, problem: Problem) -> CdiFileError {
    CdiFileError { at: Source { file: file.to_owned(), line }, problem }
}

/// A CDI file that says something that cannot be.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("CDI file {at}: {problem}")]
pub struct CdiFileError {
    /// Where.
    pub at: Source,
    /// What.
    pub problem: Problem,
}

/// What is wrong with a CDI file.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum Problem {
    /// Neither YAML nor JSON.
    #[error("it is neither YAML nor JSON that can be read: {why}")]
    Text {
        /// The parser's reason.
        why: String,
    },
    /// Another version.
    #[error("key `cdiVersion`: version `{version}` is not known; known are 0.3.0 to 0.8.0 and 1.0.0")]
    Version {
        /// What it says.
        version: String,
    },
    /// A key is missing.
    #[error("key `{key}` is missing")]
    Missing {
        /// Which.
        key: String,
    },
    /// A key that the specification does not have.
    #[error("key `{key}` is unknown; known here: {known}")]
    Key {
        /// Which.
        key: String,
        /// Those that there are.
        known: String,
    },
    /// A value of the wrong kind.
    #[error("`{key}` must {must}")]
    Shape {
        /// Its key.
        key: String,
        /// What it should be.
        must: &'static str,
    },
    /// A kind or name that cannot be.
    #[error("keys `kind` and `name`: {why}")]
    Name {
        /// Why.
        why: CdiNameError,
    },
    /// One name for two devices.
    #[error("device {name} stands in line {earlier} already; give it another name")]
    Twice {
        /// The name.
        name: CdiName,
        /// Line of the first.
        earlier: usize,
    },
    /// An annotation with a value that means nothing.
    #[error("annotation `{key}` is `{value}`, and must be {must}")]
    Annotation {
        /// Which.
        key: String,
        /// What it says.
        value: String,
        /// What it could say.
        must: &'static str,
    },
    /// An annotation that is nearly one that is known.
    #[error("annotation `{key}` has no effect; write `{meant}`")]
    Spelling {
        /// What it says.
        key: String,
        /// What is meant.
        meant: &'static str,
    },
}

#[cfg(test)]
mod tests;
