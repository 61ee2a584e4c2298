//! Which processors and how much memory each of the guest's memory nodes has, and which node of the host gives them.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::cpu_list::CpuList;
use super::flags::{Flag, FlagError, Pairs, choice};
use super::size::Size;

/// The guest's memory nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum NumaConfig {
    /// The guest is told nothing, but what a topology file says of its root complexes.
    #[default]
    Off,
    /// A guest node for each host node that a device is near to.
    Host(NumaPlacement),
    /// These.
    Nodes(Vec<NumaNode>),
}

/// How a guest node uses its host node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumaPlacement {
    /// What happens when the host node has no memory left.
    pub policy: MemoryPolicy,
    /// Whether the node's vCPUs run on the host node's processors alone.
    pub pin: bool,
}

impl Default for NumaPlacement {
    /// Memory from the host node alone, vCPUs on it.
    fn default() -> Self {
        Self { policy: MemoryPolicy::default(), pin: true }
    }
}

choice!(
    /// `policy=`.
    #[derive(Default)]
    MemoryPolicy {
        /// Memory comes from the host node or not at all.
        #[default]
        Bind = "bind",
        /// When the host node has none left, memory comes from others.
        Preferred = "preferred",
    }
);

/// One memory node of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Its vCPUs.
    pub cpus: CpuList,
    /// Bytes of its memory.
    pub memory: Size,
    /// The host node that gives memory and processors; `None` leaves both to the host.
    pub host: Option<(u32, NumaPlacement)>,
    /// How far other nodes are, by their numbers.
    pub distances: Vec<Distance>,
    /// The zones of memory that it was made of, if it was given in such (see [`super::MemoryConfig::zones`]).
    pub zones: Option<Vec<String>>,
}

/// How far a node is, in the unit of ACPI: 10 is within a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Distance {
    /// The other node.
    pub to: u32,
    /// 11 to 254.
    pub value: u8,
}

/// One `--numa`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Fields")]
pub enum NumaFlag {
    /// `--numa host`.
    Host(NumaPlacement),
    /// `--numa id=0,...`.
    Node(NumaNode),
}

impl NumaConfig {
    /// All that was given, in any order.
    ///
    /// # Errors
    /// If `host` stands beside nodes, or two nodes have one number.
    pub fn new(flags: Vec<NumaFlag>) -> Result<Self, NumaFlagError> {
        let mut nodes: Vec<NumaNode> = Vec::new();
        let (count, mut host) = (flags.len(), None);
        for flag in flags {
            match flag {
                NumaFlag::Host(placement) => host = Some(placement),
                NumaFlag::Node(node) if nodes.iter().any(|other| other.id == node.id) => {
                    return Err(NumaFlagError::Twice { id: node.id });
                }
                NumaFlag::Node(node) => nodes.push(node),
            }
        }
        match host {
            Some(_) if count > 1 => Err(NumaFlagError::HostAndMore),
            Some(placement) => Ok(Self::Host(placement)),
            None if nodes.is_empty() => Ok(Self::Off),
            None => Ok(Self::Nodes(nodes)),
        }
    }

    /// The texts that [`NumaConfig::new`] makes the same of.
    #[must_use]
    pub fn texts(&self) -> Vec<String> {
        match self {
            Self::Off => Vec::new(),
            Self::Host(placement) => vec![NumaFlag::Host(*placement).to_string()],
            Self::Nodes(nodes) => nodes.iter().map(|node| NumaFlag::Node(node.clone()).to_string()).collect(),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Fields {
    id: String,
    #[serde(default)]
    cpus: Vec<String>,
    memory: Option<Size>,
    host_node: Option<u32>,
    policy: Option<MemoryPolicy>,
    pin: Option<bool>,
    #[serde(default)]
    distance: Vec<String>,
}

impl TryFrom<Fields> for NumaFlag {
    type Error = NumaFlagError;

    fn try_from(fields: Fields) -> Result<Self, NumaFlagError> {
        let placement = NumaPlacement { policy: fields.policy.unwrap_or_default(), pin: fields.pin.unwrap_or(true) };
        if fields.id == "host" {
            let alone = fields.cpus.is_empty() && fields.memory.is_none() && fields.distance.is_empty();
            return if alone && fields.host_node.is_none() {
                Ok(Self::Host(placement))
            } else {
                Err(NumaFlagError::HostWithKeys)
            };
        }
        let id = fields.id.parse().map_err(|_| NumaFlagError::Id { text: fields.id.clone() })?;
        if fields.host_node.is_none() && (fields.policy.is_some() || fields.pin.is_some()) {
            return Err(NumaFlagError::NoHostNode { id });
        }
        let cpus: CpuList = fields.cpus.join(",").parse().map_err(|_| NumaFlagError::Cpus { id })?;
        let distances = fields.distance.iter().map(|text| distance(text)).collect::<Result<Vec<_>, _>>()?;
        for (index, distance) in distances.iter().enumerate() {
            let to = distance.to;
            if to == id || distances.iter().take(index).any(|other| other.to == to) {
                return Err(NumaFlagError::DistanceTwice { id, to });
            }
        }
        let host = fields.host_node.map(|node| (node, placement));
        let memory = fields.memory.unwrap_or(Size(0));
        Ok(Self::Node(NumaNode { id, cpus, memory, host, distances, zones: None }))
    }
}

/// Reads `1:20`.
fn distance(text: &str) -> Result<Distance, NumaFlagError> {
    let bad = || NumaFlagError::Distance { text: text.to_owned() };
    let (to, value) = text.split_once(':').ok_or_else(bad)?;
    match (to.parse(), value.parse()) {
        (Ok(to), Ok(value @ 11..=254)) => Ok(Distance { to, value }),
        _ => Err(bad()),
    }
}

impl FromStr for NumaFlag {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--numa", first: "id" }.parse(text)
    }
}

impl fmt::Display for NumaFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        let host = match self {
            Self::Host(placement) => {
                pairs.pair("id", &"host")?;
                Some(*placement)
            }
            Self::Node(node) => {
                pairs.pair("id", &node.id)?;
                if !node.cpus.is_empty() {
                    pairs.pair("cpus", &node.cpus)?;
                }
                if node.memory != Size(0) {
                    pairs.pair("memory", &node.memory)?;
                }
                pairs.optional("host-node", node.host.as_ref().map(|(host, _)| host as _))?;
                node.host.map(|(_, placement)| placement)
            }
        };
        if let Some(placement) = host {
            if placement.policy != MemoryPolicy::Bind {
                pairs.pair("policy", &placement.policy)?;
            }
            pairs.switch("pin", placement.pin, true)?;
        }
        if let Self::Node(node) = self
            && !node.distances.is_empty()
        {
            let all: Vec<String> = node.distances.iter().map(|far| format!("{}:{}", far.to, far.value)).collect();
            pairs.list("distance", &all)?;
        }
        Ok(())
    }
}

/// Memory nodes that cannot be meant so.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum NumaFlagError {
    /// `id=x`.
    #[error("`{text}` is no number of a memory node; give 0, 1, ..., or `host` for nodes as on the host")]
    Id {
        /// What was given.
        text: String,
    },
    /// `host,cpus=...`.
    #[error("`host` takes processors, memory and distances from the host; leave them out, `policy` and `pin` may stay")]
    HostWithKeys,
    /// `policy` without `host-node`.
    #[error("`policy` and `pin` of node {id} have no effect without `host-node`; add it")]
    NoHostNode {
        /// The node.
        id: u32,
    },
    /// `cpus=x`.
    #[error("`cpus` of node {id} is no list of processors; write it as cpus=0-3 or cpus=[0-3,8]")]
    Cpus {
        /// The node.
        id: u32,
    },
    /// `distance=x`.
    #[error("`{text}` is no distance; write NODE:DISTANCE such as 1:20, with a distance from 11 to 254")]
    Distance {
        /// What was given.
        text: String,
    },
    /// Two distances to one node, or one to itself.
    #[error("node {id} gives its distance to node {to}, which is itself or was named before; leave it out")]
    DistanceTwice {
        /// The node.
        id: u32,
        /// The other.
        to: u32,
    },
    /// Two nodes with one number.
    #[error("memory node {id} is given twice; give one of them another id")]
    Twice {
        /// The number.
        id: u32,
    },
    /// `--numa host --numa id=0`.
    #[error("`host` makes all memory nodes; give it alone")]
    HostAndMore,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(text: &str) -> NumaNode {
        match text.parse() {
            Ok(NumaFlag::Node(node)) => node,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_node_has_processors_memory_a_host_node_and_distances() {
        let read = node("id=1,cpus=[0-2,8],memory=2G,host_node=3,policy=preferred,pin=off,distance=[0:20,2:32]");
        assert_eq!((read.id, read.cpus.iter().collect::<Vec<_>>(), read.memory), (1, vec![0, 1, 2, 8], Size(2 << 30)));
        assert_eq!(read.host, Some((3, NumaPlacement { policy: MemoryPolicy::Preferred, pin: false })));
        assert_eq!(read.distances, [Distance { to: 0, value: 20 }, Distance { to: 2, value: 32 }]);
        assert_eq!(node("0,cpus=4").distances, []);
        assert_eq!("host".parse(), Ok(NumaFlag::Host(NumaPlacement::default())));
    }

    #[test]
    fn what_is_printed_reads_back() {
        for text in [
            "host",
            "host,policy=preferred,pin=off",
            "0",
            "id=0,cpus=0-3,memory=2G,host-node=0,distance=1:20",
            "id=1,cpus=[1,3,5],distance=[0:20,2:254],host-node=1,policy=preferred",
        ] {
            let flag: NumaFlag = text.parse().unwrap();
            assert_eq!(flag.to_string().parse(), Ok(flag.clone()), "{flag}");
            let config = NumaConfig::new(vec![flag]).unwrap();
            let again = config.texts().iter().map(|text| text.parse().unwrap()).collect();
            assert_eq!(NumaConfig::new(again), Ok(config));
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_what_to_write() {
        for (text, part) in [
            ("id=x", "no number of a memory node"),
            ("host,cpus=1", "leave them out"),
            ("0,policy=bind", "without `host-node`"),
            ("0,cpus=3-1", "no list of processors"),
            ("0,cpus=0-99999999999", "no list of processors"),
            ("0,distance=1:10", "from 11 to 254"),
            ("0,distance=1:255", "from 11 to 254"),
            ("0,distance=0:20", "itself"),
            ("0,distance=[1:20,1:30]", "named before"),
            ("0,memory=-1", "memory"),
            ("memory=1G", "`id` is missing"),
            ("0,polic=bind", "did you mean `policy`"),
        ] {
            let error = text.parse::<NumaFlag>().unwrap_err().to_string();
            assert!(error.starts_with("--numa: ") && error.contains(part), "{text}: {error}");
        }
        let flags = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(NumaConfig::new(flags(&["0", "0"])), Err(NumaFlagError::Twice { id: 0 }));
        assert_eq!(NumaConfig::new(flags(&["0", "host"])), Err(NumaFlagError::HostAndMore));
        assert_eq!(NumaConfig::new(Vec::new()), Ok(NumaConfig::Off));
    }
}
