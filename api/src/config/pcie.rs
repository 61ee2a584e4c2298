//! What shape the PCIe hierarchy has where no topology file says it.

use std::fmt;
use std::num::NonZeroU8;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Flag, FlagError, Pairs, choice};
use super::size::Size;

/// `--pcie`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct PcieConfig {
    /// Where given devices hang.
    pub topology: TopologyPolicy,
    /// With the host's topology: which order of GPUs is right.
    pub gpu_order: GpuOrder,
    /// With the host's topology: which ports of the host have a copy that takes devices while the guest runs.
    pub host_ports: HostPorts,
    /// Which GPUs of the host show a clique that nobody gave them.
    pub cliques: CliquePolicy,
    /// Who sets up NVLink on a host with NVSwitches; `None` if nobody says.
    pub nvlink: Option<NvlinkMode>,
    /// Whether the ports 0xCF8 and 0xCFC answer.
    pub cf8: Cf8,
    /// Whether the guest reads the configuration space of emulated functions from memory, without an exit.
    pub mirror: bool,
    /// Whether doorbells of virtio devices cost the guest no exit to this process.
    pub ioeventfd: bool,
    /// Root ports beside those that devices hang on at the start.
    pub root_ports: u16,
    /// Switches with free downstream ports, each below a root port of its own; with `switch_ports` alone one.
    pub switches: Option<u16>,
    /// Downstream ports of each of these switches.
    pub switch_ports: u16,
    /// PCIe-to-PCI bridges, each below a root port of its own; with `hot-plug=bridge-port` alone one.
    pub bridges: Option<u16>,
    /// Device numbers, 1 to 32, of each of their conventional buses that take devices; by default 30.
    pub bridge_slots: Option<u8>,
    /// Which of these ports take devices while the guest runs.
    pub hot_plug: HotPlugPorts,
    /// What devices without a place of their own hang on at the start; by default `topology` decides.
    pub cold_plug: Option<ColdPlugPort>,
    /// Bytes of 64-bit prefetchable memory that each hot-plug port keeps for a device; by default what there is room for.
    pub hotplug_mem: Option<Size>,
    /// Bytes of memory below 4 GiB that each hot-plug port keeps for a device; by default what there is room for.
    pub hotplug_mem32: Option<Size>,
    /// Bus numbers that each hot-plug port keeps, that of the link below it included; by default 1.
    pub hotplug_buses: Option<NonZeroU8>,
    /// Which root complexes have `root_ports` and the switches of `switch_ports`.
    pub ports_on: PortsOn,
    /// How devices leave hot-plug ports.
    pub removal: Removal,
    /// Devices that name no port can come to free device numbers of the first root bus while the guest runs, by ACPI.
    pub root_hot_plug: bool,
    /// Devices that are there from the start and hang on no hot-plug port can leave, by ACPI.
    pub cold_removal: bool,
    /// Device numbers of the first root bus that stay free at the start, for such devices: root ports share numbers if need be.
    pub bus0_free: Option<u8>,
    /// Where virtio devices of the start hang.
    pub virtio: VirtioPlace,
}

impl Default for PcieConfig {
    /// A root port for each device, silent ports for kernels, configuration reads from memory, no further ports.
    fn default() -> Self {
        Self {
            topology: TopologyPolicy::default(),
            gpu_order: GpuOrder::default(),
            host_ports: HostPorts::default(),
            cliques: CliquePolicy::default(),
            nvlink: None,
            cf8: Cf8::default(),
            mirror: true,
            ioeventfd: true,
            root_ports: 0,
            switches: None,
            switch_ports: 0,
            bridges: None,
            bridge_slots: None,
            hot_plug: HotPlugPorts::default(),
            cold_plug: None,
            hotplug_mem: None,
            hotplug_mem32: None,
            hotplug_buses: None,
            ports_on: PortsOn::default(),
            removal: Removal::default(),
            root_hot_plug: false,
            cold_removal: false,
            bus0_free: None,
            virtio: VirtioPlace::default(),
        }
    }
}

choice!(
    /// `hot-plug=`.
    #[derive(Default)]
    HotPlugPorts {
        /// All of `root-ports`, `switch-ports` and `bridges`.
        #[default]
        Auto = "auto",
        /// Those of `root-ports`.
        RootPort = "root-port",
        /// Those of `switch-ports`.
        SwitchPort = "switch-port",
        /// The conventional buses of `bridges`, where ACPI tells of what comes.
        BridgePort = "bridge-port",
        /// None.
        NoPort = "no-port",
    }
);

choice!(
    /// `cold-plug=`.
    ColdPlugPort {
        /// A root port each.
        RootPort = "root-port",
        /// A downstream port each of the switches of `switch-ports`, or of one that is made for them.
        SwitchPort = "switch-port",
        /// A conventional bus behind a PCIe-to-PCI bridge, all together.
        BridgePort = "bridge-port",
        /// The root bus.
        NoPort = "no-port",
    }
);

choice!(
    /// `virtio=`.
    #[derive(Default)]
    VirtioPlace {
        /// Device numbers of the first root bus, before all others.
        #[default]
        Bus0 = "bus0",
        /// A root port each, in the same order.
        Ports = "ports",
    }
);

choice!(
    /// `ports-on=`.
    #[derive(Default)]
    PortsOn {
        /// The first one.
        #[default]
        First = "first",
        /// All in turn, at least one for each memory node.
        All = "all",
    }
);

choice!(
    /// `removal=`.
    #[derive(Default)]
    Removal {
        /// At once; the guest learns of it afterwards.
        #[default]
        Surprise = "surprise",
        /// When software in the guest has switched the slot off (`/sys/bus/pci/slots/N/power`).
        Orderly = "orderly",
        /// By an attention button, which makes Linux switch the slot off after five seconds.
        Button = "button",
    }
);

choice!(
    /// `topology=`.
    #[derive(Default)]
    TopologyPolicy {
        /// Each device behind a root port of its own.
        #[default]
        RootPorts = "root-ports",
        /// The host's root ports and switches above the devices, as far as they lead to one.
        Host = "host",
        /// Each device behind a downstream port of a switch.
        Switch = "switch",
        /// All devices on the root bus.
        Flat = "flat",
    }
);

choice!(
    /// `gpu-order=`.
    #[derive(Default)]
    GpuOrder {
        /// The one in which they were given; a machine whose tree does not allow it is refused.
        #[default]
        Request = "request",
        /// Any that the tree allows.
        Topology = "topology",
    }
);

choice!(
    /// `host-ports=`.
    #[derive(Default)]
    HostPorts {
        /// None: the copy has the ports that lead to the devices of the start, without slots.
        #[default]
        Used = "used",
        /// Those of the switches above the devices of the start.
        Switches = "switches",
        /// All.
        All = "all",
    }
);

choice!(
    /// `cliques=`.
    #[derive(Default)]
    CliquePolicy {
        /// Those below one switch of the host share one.
        #[default]
        Auto = "auto",
        /// Those below one root complex of the host share one: for hosts whose root complexes forward between ports.
        RootComplex = "root-complex",
        /// None.
        Off = "off",
    }
);

choice!(
    /// `nvlink=`.
    NvlinkMode {
        /// The guest, which has all GPUs and all NVSwitches, by its own Fabric Manager.
        Full = "full",
        /// The host or a service VM, which keeps the NVSwitches.
        Shared = "shared",
        /// Nobody: the guest's driver is told not to use NVLink.
        Off = "off",
    }
);

impl FromStr for NvlinkMode {
    type Err = NvlinkError;

    fn from_str(text: &str) -> Result<Self, NvlinkError> {
        let modes = [Self::Full, Self::Shared, Self::Off];
        modes.into_iter().find(|mode| mode.to_string() == text).ok_or_else(|| NvlinkError { text: text.to_owned() })
    }
}

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

const FLAG: Flag = Flag { name: "--pcie", first: "topology" };

impl FromStr for PcieConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        FLAG.parse(text)
    }
}

impl PcieConfig {
    /// This, but for what `text` says, which has the form of the flag.
    pub fn with(&self, text: &str) -> Result<Self, FlagError> {
        FLAG.parse_over(text, &self.to_string())
    }
}

impl fmt::Display for PcieConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        pairs.pair("topology", &self.topology)?;
        if self.gpu_order != GpuOrder::default() {
            pairs.pair("gpu-order", &self.gpu_order)?;
        }
        if self.host_ports != HostPorts::default() {
            pairs.pair("host-ports", &self.host_ports)?;
        }
        if self.cliques != CliquePolicy::default() {
            pairs.pair("cliques", &self.cliques)?;
        }
        pairs.optional("nvlink", self.nvlink.as_ref().map(|mode| mode as _))?;
        pairs.pair("cf8", &self.cf8)?;
        pairs.switch("mirror", self.mirror, true)?;
        pairs.switch("ioeventfd", self.ioeventfd, true)?;
        if self.root_ports != 0 {
            pairs.pair("root-ports", &self.root_ports)?;
        }
        pairs.optional("switches", self.switches.as_ref().map(|switches| switches as _))?;
        if self.switch_ports != 0 {
            pairs.pair("switch-ports", &self.switch_ports)?;
        }
        pairs.optional("bridges", self.bridges.as_ref().map(|bridges| bridges as _))?;
        pairs.optional("bridge-slots", self.bridge_slots.as_ref().map(|slots| slots as _))?;
        if self.hot_plug != HotPlugPorts::default() {
            pairs.pair("hot-plug", &self.hot_plug)?;
        }
        pairs.optional("cold-plug", self.cold_plug.as_ref().map(|port| port as _))?;
        pairs.optional("hotplug-mem", self.hotplug_mem.as_ref().map(|size| size as _))?;
        pairs.optional("hotplug-mem32", self.hotplug_mem32.as_ref().map(|size| size as _))?;
        pairs.optional("hotplug-buses", self.hotplug_buses.as_ref().map(|buses| buses as _))?;
        if self.ports_on != PortsOn::default() {
            pairs.pair("ports-on", &self.ports_on)?;
        }
        if self.removal != Removal::default() {
            pairs.pair("removal", &self.removal)?;
        }
        pairs.switch("root-hot-plug", self.root_hot_plug, false)?;
        pairs.switch("cold-removal", self.cold_removal, false)?;
        pairs.optional("bus0-free", self.bus0_free.as_ref().map(|count| count as _))?;
        if self.virtio != VirtioPlace::default() {
            pairs.pair("virtio", &self.virtio)?;
        }
        Ok(())
    }
}

/// Nobody who could set up NVLink.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{text}` is not known; give full, shared or off")]
pub struct NvlinkError {
    /// What was given.
    text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_ports_are_the_default_and_the_host_can_be_copied() {
        assert_eq!("cf8=off".parse(), Ok(PcieConfig { cf8: Cf8::Off, ..PcieConfig::default() }));
        for text in [
            "topology=host",
            "host",
            "topology=root-ports,cf8=on",
            "flat",
            "mirror=off,ioeventfd=off,root-ports=200,switches=8,switch-ports=16,hot-plug=switch-port,hotplug-mem=256G,hotplug-mem32=64M,hotplug-buses=8,ports-on=all",
            "root_ports=4,hot-plug=no-port,removal=orderly,root-hot-plug=on",
            "switch,switches=2,switch-ports=2",
            "cold-plug=bridge-port,hot-plug=bridge-port",
            "bridges=3,bridge-slots=32",
            "cold_plug=no-port",
            "root-hot-plug=on,bus0-free=16",
            "cold-removal=on",
            "virtio=ports",
            "host,gpu-order=topology,host-ports=switches,cliques=root-complex",
            "host,host-ports=all",
            "nvlink=shared",
        ] {
            let config: PcieConfig = text.parse().unwrap();
            assert_eq!(config.to_string().parse(), Ok(config), "{text}");
        }
    }

    #[test]
    fn what_a_text_does_not_say_is_kept() {
        let base: PcieConfig = "host,root-ports=4,root-hot-plug=on,cold-removal=on,bus0-free=16,mirror=off".parse().unwrap();
        for (text, whole) in [
            ("flat", "flat,root-ports=4,root-hot-plug=on,cold-removal=on,bus0-free=16,mirror=off"),
            ("root_ports=0,cold-removal=off,mirror=on", "host,root-hot-plug=on,bus0-free=16"),
            (
                "switches=2,switch-ports=3",
                "host,root-ports=4,switches=2,switch-ports=3,root-hot-plug=on,cold-removal=on,bus0-free=16,mirror=off",
            ),
        ] {
            assert_eq!(base.with(text), whole.parse(), "{text}");
        }
        assert!(base.with("").is_err() && base.with("root-ports=1,root_ports=2").is_err());
    }

    #[test]
    fn a_misspelt_policy_is_answered_with_the_nearest() {
        let error = "topology=hots".parse::<PcieConfig>().unwrap_err().to_string();
        assert_eq!(
            error,
            "--pcie: key `topology`: `hots` is not known; did you mean `host`? Known: root-ports, host, switch, flat"
        );
    }
}
