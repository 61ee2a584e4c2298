//! How many processors, and how they are arranged.

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Flag, FlagError, Pairs};

/// `--cpus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Fields")]
pub struct CpuConfig {
    /// Virtual processors at the start, 1 to 255.
    pub count: u8,
    /// Processors at most, more than at the start; `None` means that none come later.
    pub max: Option<u8>,
    /// How they are arranged; by default one thread in a core and one package, or one for each memory node.
    pub topology: Option<CpuTopology>,
    /// Whether guests find KVM's signature in CPUID.
    pub kvm_signature: bool,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self { count: 1, max: None, topology: None, kvm_signature: true }
    }
}

/// Threads, cores, dies and packages. Their product is the largest number of processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTopology {
    /// Threads in a core.
    pub threads_per_core: NonZeroU16,
    /// Cores in a die.
    pub cores_per_die: NonZeroU16,
    /// Dies in a package.
    pub dies_per_package: NonZeroU16,
    /// Packages.
    pub packages: NonZeroU16,
}

impl CpuTopology {
    /// Processors that it has room for.
    #[must_use]
    pub fn processors(&self) -> u64 {
        [self.threads_per_core, self.cores_per_die, self.dies_per_package, self.packages]
            .into_iter()
            .fold(1, |product, factor| product * u64::from(factor.get()))
    }
}

impl FromStr for CpuTopology {
    type Err = CpuError;

    /// Reads `2:8:1:2`.
    fn from_str(text: &str) -> Result<Self, CpuError> {
        let bad = || CpuError::Topology { text: text.to_owned() };
        let counts = text.split(':').map(|count| count.parse().map_err(|_| bad())).collect::<Result<Vec<NonZeroU16>, _>>()?;
        let [threads_per_core, cores_per_die, dies_per_package, packages] = counts.try_into().map_err(|_| bad())?;
        Ok(Self { threads_per_core, cores_per_die, dies_per_package, packages })
    }
}

impl fmt::Display for CpuTopology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{}", self.threads_per_core, self.cores_per_die, self.dies_per_package, self.packages)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    #[serde(default = "one")]
    boot: String,
    max: Option<String>,
    topology: Option<String>,
    #[serde(rename = "kvm-signature", default = "shown")]
    kvm_signature: bool,
}

fn one() -> String {
    CpuConfig::default().count.to_string()
}

const fn shown() -> bool {
    true
}

impl TryFrom<Fields> for CpuConfig {
    type Error = CpuError;

    fn try_from(fields: Fields) -> Result<Self, CpuError> {
        let count = |text: &str| match text.parse() {
            Ok(count @ 1..) => Ok(count),
            _ => Err(CpuError::Count { text: text.to_owned() }),
        };
        let (started, max) = (count(&fields.boot)?, fields.max.as_deref().map(count).transpose()?);
        let most = max.unwrap_or(started);
        if most < started {
            return Err(CpuError::MaxBelow { max: most, count: started });
        }
        let topology: Option<CpuTopology> = fields.topology.as_deref().map(str::parse).transpose()?;
        match topology.map(|topology| topology.processors()) {
            Some(room) if room < u64::from(most) => Err(CpuError::Room { room, most }),
            _ => {
                Ok(Self { count: started, max: max.filter(|max| *max > started), topology, kvm_signature: fields.kvm_signature })
            }
        }
    }
}

impl FromStr for CpuConfig {
    type Err = FlagError;

    /// Reads `4`, and `boot=2,max=8,topology=2:2:1:2`.
    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--cpus", first: "boot" }.parse(text)
    }
}

impl fmt::Display for CpuConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == (Self { count: self.count, ..Self::default() }) {
            return write!(f, "{}", self.count);
        }
        let mut pairs = Pairs::new(f);
        pairs.pair("boot", &self.count)?;
        pairs.optional("max", self.max.as_ref().map(|max| max as _))?;
        pairs.optional("topology", self.topology.as_ref().map(|topology| topology as _))?;
        pairs.switch("kvm-signature", self.kvm_signature, true)
    }
}

/// Not processors that a machine can have.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum CpuError {
    /// Not a number of processors.
    #[error("`{text}` is no number of processors; give a whole number from 1 to 255")]
    Count {
        /// What was given.
        text: String,
    },
    /// Fewer at most than at the start.
    #[error("max={max} is less than boot={count}; raise it, or leave it out if no processors come later")]
    MaxBelow {
        /// At most.
        max: u8,
        /// At the start.
        count: u8,
    },
    /// Not an arrangement.
    #[error(
        "`{text}` is no arrangement; write threads of a core, cores of a die, dies of a package and packages as 2:8:1:2, each from 1 to 65535"
    )]
    Topology {
        /// What was given.
        text: String,
    },
    /// An arrangement that is too small.
    #[error("the topology has room for {room} processors, there may be {most}; raise one of its numbers")]
    Room {
        /// Its room.
        room: u64,
        /// What is needed.
        most: u8,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_of_kvm_can_be_hidden() {
        let hidden: CpuConfig = "2,kvm_signature=off".parse().unwrap();
        assert!(!hidden.kvm_signature && "2".parse::<CpuConfig>().unwrap().kvm_signature);
        assert_eq!(hidden.to_string(), "boot=2,kvm-signature=off");
        assert_eq!(hidden.to_string().parse(), Ok(hidden));
        assert_eq!("kvm-signature=off".parse(), Ok(CpuConfig { kvm_signature: false, ..CpuConfig::default() }));
    }

    #[test]
    fn one_to_255_processors_can_be_asked_for_and_more_that_come_later() {
        let of = |count, max| CpuConfig { count, max, ..CpuConfig::default() };
        for (text, config) in [
            ("1", of(1, None)),
            ("boot=255", of(255, None)),
            ("2,max=8", of(2, Some(8))),
            ("boot=2,max=2", of(2, None)),
            ("max=4", of(1, Some(4))),
        ] {
            assert_eq!(text.parse(), Ok(config), "{text}");
        }
        for (text, part) in [
            ("0", "from 1 to 255"),
            ("256", "from 1 to 255"),
            ("-1", "from 1 to 255"),
            ("two", "from 1 to 255"),
            ("1,max=256", "from 1 to 255"),
            ("4,max=2", "max=2 is less than boot=4"),
            ("4,topology=2:2", "no arrangement"),
            ("4,topology=0:2:2:2", "no arrangement"),
            ("2,max=9,topology=2:2:1:2", "room for 8 processors, there may be 9"),
            ("", "nothing is given"),
            ("1,mx=2", "did you mean `max`"),
        ] {
            let error = text.parse::<CpuConfig>().unwrap_err().to_string();
            assert!(error.starts_with("--cpus: ") && error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_printed_reads_back() {
        for text in ["4", "boot=2,max=8", "boot=8,topology=2:2:1:2", "boot=1,max=255,topology=1:255:1:1"] {
            let config: CpuConfig = text.parse().unwrap();
            assert_eq!((config.to_string(), config.to_string().parse()), (text.to_owned(), Ok(config)));
        }
    }
}
