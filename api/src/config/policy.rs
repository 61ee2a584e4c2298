//! Reads the file that says what an API client cannot: the shape of the hierarchy, where devices go that come later, what a
//! guest's reset means, and what is particular to single devices of the host.
//!
//! ```toml
//! [pcie]                          # the keys of --pcie
//! topology = "host"
//! root-ports = 4
//! bus0-free = 16
//!
//! [hot-plug]
//! place = "ports"                 # bus0 or ports
//!
//! [cdi]
//! dirs = ["/etc/cdi", "/var/run/cdi"]
//!
//! [memory]
//! hugepage-size = "1G"
//! prefault-threads = 8
//! premap = true
//!
//! [numa]
//! host-nodes = [0, 1]             # policy = "bind", pin = true
//!
//! [guest]
//! reset = "exit"                  # exit or reboot
//!
//! [boot]
//! answer-after = 6                # seconds from vm.create on
//!
//! [[device]]
//! host = "0000:41:00.0"
//! on = "port0"                    # clique = 0, clique-any-vendor = true
//! ```

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;

use super::cdi::CdiMistakes;
use super::device::{CliqueId, DeviceConfig, DeviceKind};
use super::flags::choice;
use super::memory::HugePageSize;
use super::numa::{MemoryPolicy, NumaPlacement};
use super::pcie::PcieConfig;
use super::topology::line;
use super::vm::VmConfig;
use crate::info::PciAddress;
use crate::json::plain;

/// What the operator of a host has decided for all machines that clients create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Shape of the hierarchy, where vm.create does not say it.
    pub pcie: PcieConfig,
    /// Where devices go that come while the guest runs and name no port.
    pub hot_plug: HotPlugPlace,
    /// Directories with CDI files; empty stands for the usual ones. One that is not there has no files.
    pub cdi_dirs: Vec<PathBuf>,
    /// Size of huge pages, for clients that ask for some and name no size.
    pub hugepage_size: Option<HugePageSize>,
    /// Threads that touch memory before the start.
    pub prefault_threads: Option<std::num::NonZeroU16>,
    /// Memory is touched from the start on, in the background, for devices of the host that may come later.
    pub premap: bool,
    /// Memory nodes of guests, where vm.create does not say them.
    pub numa: HostNodes,
    /// What follows a guest's reset.
    pub reset: ResetPolicy,
    /// When vm.boot is answered at the latest, counted from vm.create: memory may still be on its way to the guest then.
    pub answer_after: Duration,
    /// Single functions of the host.
    pub devices: Vec<DevicePolicy>,
}

impl Default for Policy {
    /// What holds where there is no file.
    fn default() -> Self {
        Self {
            pcie: PcieConfig::default(),
            hot_plug: HotPlugPlace::default(),
            cdi_dirs: Vec::new(),
            hugepage_size: None,
            prefault_threads: None,
            premap: false,
            numa: HostNodes::default(),
            reset: ResetPolicy::default(),
            answer_after: Duration::from_secs(ANSWER_AFTER),
            devices: Vec::new(),
        }
    }
}

/// Half of a bus: virtio devices have about eight numbers, each volume and device that comes has one.
const BUS0_FREE: u8 = 16;

/// Kata Containers gives vm.create and vm.boot ten seconds together.
const ANSWER_AFTER: u64 = 6;

choice!(
    /// `[hot-plug] place`.
    #[derive(Default)]
    HotPlugPlace {
        /// A free device number of the root bus: the only place that stock Kata Containers can name.
        #[default]
        Bus0 = "bus0",
        /// The first free hot-plug port with room.
        Ports = "ports",
    }
);

choice!(
    /// `[guest] reset`.
    #[derive(Default)]
    ResetPolicy {
        /// The guest starts again in the same process.
        Reboot = "reboot",
        /// The process ends, also when the guest's kernel says that it panicked: Kata Containers cannot follow a guest that
        /// starts again.
        #[default]
        Exit = "exit",
    }
);

/// `[numa]`: nodes of the host that each give a guest one memory node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostNodes {
    /// Their numbers, in the order of the guest's nodes and each once. Empty leaves guests without memory nodes.
    pub nodes: Vec<u32>,
    /// How each is used.
    pub placement: NumaPlacement,
}

/// What is particular to a function of the host. A request that says the same stands above it, a CDI file below.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DevicePolicy {
    /// Its address on the host.
    #[serde(deserialize_with = "address")]
    pub host: PciAddress,
    /// The port that it hangs on.
    pub on: Option<String>,
    /// Its peer-to-peer clique.
    pub clique: Option<CliqueId>,
    /// The clique is shown on a device that is no NVIDIA display controller, too.
    #[serde(default)]
    pub clique_any_vendor: bool,
}

fn address<'de, D: serde::Deserializer<'de>>(from: D) -> Result<PciAddress, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct File {
    pcie: PcieConfig,
    hot_plug: HotPlug,
    cdi: Cdi,
    memory: Memory,
    numa: Numa,
    guest: Guest,
    boot: Boot,
    device: Vec<DevicePolicy>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct HotPlug {
    place: HotPlugPlace,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Cdi {
    dirs: Vec<PathBuf>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Memory {
    hugepage_size: Option<Page>,
    prefault_threads: Option<std::num::NonZeroU16>,
    premap: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Numa {
    host_nodes: Vec<u32>,
    policy: Option<MemoryPolicy>,
    pin: Option<bool>,
}

choice!(
    /// `[memory] hugepage-size`.
    Page { TwoMib = "2M", OneGib = "1G" }
);

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Guest {
    reset: ResetPolicy,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Boot {
    answer_after: u64,
}

impl Default for Boot {
    fn default() -> Self {
        Self { answer_after: ANSWER_AFTER }
    }
}

/// Longest wait that makes sense: no client is known to be more patient.
const LONGEST: u64 = 3600;

impl Numa {
    /// What it says, or why it cannot be.
    fn read(self) -> Result<HostNodes, String> {
        let mut seen = BTreeSet::new();
        if let Some(node) = self.host_nodes.iter().find(|node| !seen.insert(**node)) {
            return Err(format!("[numa] host-nodes names node {node} twice; name each node of the host once"));
        }
        if self.host_nodes.is_empty() && (self.policy.is_some() || self.pin.is_some()) {
            return Err("[numa] policy and pin have no effect without host-nodes; add it".to_owned());
        }
        let placement = NumaPlacement { policy: self.policy.unwrap_or_default(), pin: self.pin.unwrap_or(true) };
        Ok(HostNodes { nodes: self.host_nodes, placement })
    }
}

impl Policy {
    /// Reads the text of the file `name`, which appears in errors only.
    pub fn parse(name: &str, text: &str) -> Result<Self, PolicyError> {
        let wrong = |line, what| PolicyError { file: name.to_owned(), line, what };
        let file: File = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(1, |span| line(text, span.start));
            wrong(at, plain(error.message()))
        })?;
        if file.boot.answer_after > LONGEST {
            return Err(wrong(1, format!("[boot] answer-after is {}; give 0 to {LONGEST} seconds", file.boot.answer_after)));
        }
        let numa = file.numa.read().map_err(|what| wrong(1, what))?;
        for (index, device) in file.device.iter().enumerate() {
            if file.device.iter().take(index).any(|earlier| earlier.host == device.host) {
                return Err(wrong(1, format!("two [[device]] tables are for {}; keep one", device.host)));
            }
        }
        Ok(Self {
            pcie: file.pcie,
            hot_plug: file.hot_plug.place,
            cdi_dirs: file.cdi.dirs,
            hugepage_size: file.memory.hugepage_size.map(|page| match page {
                Page::TwoMib => HugePageSize::TwoMib,
                Page::OneGib => HugePageSize::OneGib,
            }),
            prefault_threads: file.memory.prefault_threads,
            premap: file.memory.premap,
            numa,
            reset: file.guest.reset,
            answer_after: Duration::from_secs(file.boot.answer_after),
            devices: file.device,
        })
    }

    /// A machine of which a client has said nothing yet.
    #[must_use]
    pub fn base(&self) -> VmConfig {
        let mut base =
            VmConfig { pcie: self.pcie, cdi_dirs: self.cdi_dirs.clone(), cdi_mistakes: CdiMistakes::Warn, ..VmConfig::default() };
        // Clients name devices of vm.create in vm.remove-device.
        base.pcie.cold_removal = true;
        if self.hot_plug == HotPlugPlace::Bus0 {
            base.pcie.root_hot_plug = true;
            base.pcie.bus0_free.get_or_insert(BUS0_FREE);
        }
        base.memory.hugepages = self.hugepage_size;
        base.memory.prefault_threads = self.prefault_threads;
        base
    }

    /// Adds to a device of the host what is said of it here and not where it was asked for.
    pub fn complete(&self, device: &mut DeviceConfig) {
        let DeviceKind::Vfio(vfio) = &device.kind else { return };
        let at: Option<PciAddress> = vfio.path.file_name().and_then(|name| name.to_str()?.parse().ok());
        let Some(known) = self.devices.iter().find(|known| Some(known.host) == at) else { return };
        if device.on.is_none() {
            device.on.clone_from(&known.on);
        }
        if device.clique.is_none() && known.clique.is_some() {
            device.clique = known.clique;
            device.clique_any_vendor |= known.clique_any_vendor;
        }
    }
}

impl fmt::Display for HostNodes {
    /// `0, 1 (bind, vCPUs pinned)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nodes.is_empty() {
            return f.write_str("none");
        }
        let nodes = self.nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let pinned = if self.placement.pin { ", vCPUs pinned" } else { "" };
        write!(f, "{nodes} ({}{pinned})", self.placement.policy)
    }
}

impl fmt::Display for Policy {
    /// For people: one setting on a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dirs = self.cdi_dirs.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(", ");
        let dirs = if dirs.is_empty() { "/etc/cdi, /var/run/cdi".to_owned() } else { dirs };
        let huge = self.hugepage_size.map_or("2M".to_owned(), |page| page.size().to_string());
        let threads = self.prefault_threads.map_or("one for each processor, at most 16".to_owned(), |count| count.to_string());
        for (key, value) in [
            ("[pcie]", self.base().pcie.to_string()),
            ("[hot-plug] place", self.hot_plug.to_string()),
            ("[cdi] dirs", dirs),
            ("[memory] hugepage-size", huge),
            ("[memory] prefault-threads", threads),
            ("[memory] premap", self.premap.to_string()),
            ("[numa] host-nodes", self.numa.to_string()),
            ("[guest] reset", self.reset.to_string()),
            ("[boot] answer-after", format!("{} s", self.answer_after.as_secs())),
        ] {
            writeln!(f, "{key:<26} {value}")?;
        }
        for device in &self.devices {
            let mut text = String::new();
            if let Some(on) = &device.on {
                write!(text, " on {on}")?;
            }
            if let Some(clique) = device.clique {
                write!(text, " clique {}", clique.get())?;
            }
            writeln!(f, "[[device]] {:<15}{text}", device.host)?;
        }
        Ok(())
    }
}

/// A file that says what cannot be.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("{file}, line {line}: {what}")]
pub struct PolicyError {
    file: String,
    line: usize,
    what: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"
        [pcie]
        topology = "host"
        root-ports = 4
        bus0-free = 20
        hotplug-mem = "256G"
        [hot-plug]
        place = "ports"
        [cdi]
        dirs = ["/etc/cdi"]
        [memory]
        hugepage-size = "1G"
        prefault-threads = 8
        premap = true
        [numa]
        host-nodes = [1, 0]
        policy = "preferred"
        [guest]
        reset = "reboot"
        [boot]
        answer-after = 3
        [[device]]
        host = "41:00.0"
        on = "port0"
        clique = 2
    "#;

    #[test]
    fn a_whole_file_says_what_clients_cannot() {
        let policy = Policy::parse("c.toml", WHOLE).unwrap();
        assert_eq!((policy.hot_plug, policy.reset), (HotPlugPlace::Ports, ResetPolicy::Reboot));
        assert_eq!(policy.answer_after, Duration::from_secs(3));
        let base = policy.base();
        assert_eq!(base.pcie, "topology=host,root-ports=4,bus0-free=20,hotplug-mem=256G,cold-removal=on".parse().unwrap());
        assert_eq!(base.cdi_mistakes, CdiMistakes::Warn);
        assert_eq!((base.cdi_dirs, base.memory.hugepages), (vec!["/etc/cdi".into()], Some(HugePageSize::OneGib)));
        assert!(policy.premap && !Policy::default().premap);
        assert_eq!(policy.numa.nodes, [1, 0]);
        assert_eq!(policy.numa.placement, NumaPlacement { policy: MemoryPolicy::Preferred, pin: true });
        let shown = policy.to_string();
        for part in [
            "bus0-free=20",
            "cold-removal=on",
            "reset              reboot",
            "1G",
            "[[device]] 0000:41:00.0",
            "on port0 clique 2",
            "1, 0 (preferred, vCPUs pinned)",
        ] {
            assert!(shown.contains(part), "{shown}");
        }
    }

    #[test]
    fn an_empty_file_is_the_same_as_none() {
        assert_eq!(Policy::parse("c.toml", "").unwrap(), Policy::default());
        assert_eq!(Policy::default().reset, ResetPolicy::Exit, "Kata cannot follow a reboot");
        let base = Policy::default().base();
        assert_eq!((base.pcie.root_hot_plug, base.pcie.bus0_free), (true, Some(16)));
        let shown = Policy::default().to_string();
        assert!(shown.contains(&base.pcie.to_string()), "what machines have, not what the file says: {shown}");
    }

    #[test]
    fn what_a_request_says_of_a_device_stands_above_the_file() {
        let policy = Policy::parse("c.toml", WHOLE).unwrap();
        let completed = |text: &str| {
            let mut device: DeviceConfig = text.parse().unwrap();
            policy.complete(&mut device);
            (device.on, device.clique.map(CliqueId::get))
        };
        let (port0, port1) = (Some("port0".to_owned()), Some("port1".to_owned()));
        assert_eq!(completed("/sys/bus/pci/devices/0000:41:00.0"), (port0.clone(), Some(2)));
        assert_eq!(completed("0000:41:00.0,clique=5"), (port0, Some(5)));
        assert_eq!(completed("41:00.0,on=port1"), (port1, Some(2)));
        assert_eq!(completed("0000:42:00.0"), (None, None));
        assert_eq!(completed("stub"), (None, None));
    }

    #[test]
    fn a_wrong_file_is_answered_with_line_and_reason() {
        for (text, part) in [
            (
                "[pcie]\nroot-ports = 70000",
                "c.toml, line 2: invalid value: integer `70000`, expected a whole number from 0 to 65535",
            ),
            ("[pcie]\nmirror = 1", "c.toml, line 2: invalid type: integer `1`, expected true or false"),
            ("[pcie]\ntopology = \"hots\"", "c.toml, line 2: unknown variant `hots`"),
            ("[pcei]", "unknown field `pcei`"),
            ("\n[guest]\nreset = 1", "line 3"),
            ("[boot]\nanswer-after = -1", "line 2"),
            ("[boot]\nanswer-after = 86400", "give 0 to 3600 seconds"),
            ("[[device]]\nhost = \"gpu\"", "`gpu` is no address of a PCI function"),
            ("[[device]]\nhost = \"41:00.0\"\nclique = 16", "cliques are 0 to 15"),
            ("[[device]]\nhost = \"41:00.0\"\n[[device]]\nhost = \"0000:41:00.0\"", "two [[device]] tables are for 0000:41:00.0"),
            ("[memory]\nhugepage-size = \"4M\"", "line 2"),
            ("[numa]\nhost-nodes = [0, 1, 0]", "[numa] host-nodes names node 0 twice"),
            ("[numa]\nhost-nodes = [-1]", "line 2"),
            ("[numa]\nhost-nodes = 1", "line 2"),
            ("[numa]\npin = false", "no effect without host-nodes"),
            ("[numa]\nhost-nodes = [0]\npolicy = \"loose\"", "line 3"),
            ("= nothing", "line 1"),
        ] {
            let error = Policy::parse("c.toml", text).unwrap_err().to_string();
            assert!(error.starts_with("c.toml, line ") && error.contains(part), "{text}: {error}");
        }
    }
}
