//! What shape the PCIe hierarchy has where no topology file says it.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

use super::flags::{Flag, FlagError, Pairs, choice};

/// `--pcie`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PcieConfig {
    /// Where given devices hang.
    pub topology: TopologyPolicy,
    /// Whether the ports 0xCF8 and 0xCFC answer.
    pub cf8: Cf8,
    /// Whether the guest reads the configuration space of emulated functions from memory, without an exit.
    pub mirror: bool,
}

impl Default for PcieConfig {
    /// A root port for each device, silent ports for kernels, configuration reads from memory.
    fn default() -> Self {
        Self { topology: TopologyPolicy::default(), cf8: Cf8::default(), mirror: true }
    }
}

choice!(
    /// `topology=`.
    #[derive(Default)]
    TopologyPolicy {
        /// Each device behind a root port of its own.
        #[default]
        RootPorts = "root-ports",
        /// The host's root ports and switches above the devices, as far as they lead to one.
        Host = "host",
        /// All devices on the root bus.
        Flat = "flat",
    }
);

choice!(
    /// `cf8=`.
    #[derive(Default)]
    Cf8 {
        /// On for firmware, which needs it; off for a kernel, which then uses ECAM alone and starts with fewer exits.
        #[default]
        Auto = "auto",
        /// They answer.
        On = "on" | "true",
        /// Nothing is at these ports.
        Off = "off" | "false",
    }
);

impl FromStr for PcieConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--pcie", first: "topology" }.parse(text)
    }
}

impl fmt::Display for PcieConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        pairs.pair("topology", &self.topology)?;
        pairs.pair("cf8", &self.cf8)?;
        pairs.switch("mirror", self.mirror, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_ports_are_the_default_and_the_host_can_be_copied() {
        assert_eq!("cf8=off".parse(), Ok(PcieConfig { topology: TopologyPolicy::RootPorts, cf8: Cf8::Off, mirror: true }));
        for text in ["topology=host", "host", "topology=root-ports,cf8=on", "flat"] {
            let config: PcieConfig = text.parse().unwrap();
            assert_eq!(config.to_string().parse(), Ok(config), "{text}");
        }
    }

    #[test]
    fn a_misspelt_policy_is_answered_with_the_nearest() {
        let error = "topology=hots".parse::<PcieConfig>().unwrap_err().to_string();
        assert_eq!(error, "--pcie: key `topology`: `hots` is not known; did you mean `host`? Known: root-ports, host, flat");
    }
}
