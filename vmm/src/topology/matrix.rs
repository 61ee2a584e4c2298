//! Decides how close two devices are, from nothing but their directories in sysfs and their NUMA nodes, as NCCL and
//! `nvidia-smi topo -m` do (nccl: src/graph/xml.cc). It shares no code with the planner, so that it can prove it.

use std::fmt;
use std::fmt::Write as _;

use pci::address::HostBdf;

use super::view::View;
use crate::host::tree::HostKind;

/// How close two devices are; nearer ones first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Through one switch at most.
    Pix,
    /// Through several switches, not through a root complex.
    Pxb,
    /// Through one root complex.
    Phb,
    /// Through two root complexes of one NUMA node.
    Node,
    /// Between NUMA nodes.
    Sys,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        })
    }
}

/// Where a device's walk leads.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Walk {
    /// Domain, bus and device, without the function.
    device: String,
    /// Switches above, the nearest first.
    switches: Vec<String>,
    root: String,
    numa_node: Option<u32>,
}

impl Walk {
    /// Two components of the path at a time: from a device over the port above it to the switch, over the port above that
    /// to the next. The first component that is no function ends it. The NUMA node is that of the last function.
    fn along(path: &str, numa_node: impl Fn(&str) -> Option<u32>) -> Self {
        let components: Vec<&str> = path.split('/').collect();
        let is_function = |component: &&&str| component.parse::<HostBdf>().is_ok();
        let mut upwards = components.iter().rev();
        let start = upwards.next().copied().unwrap_or_default();
        let mut last = start;
        let mut switches = Vec::new();
        while let Some(switch) = upwards.next().filter(is_function).and_then(|_| upwards.next()).filter(is_function) {
            last = switch;
            switches.push((*switch).to_owned());
        }
        Self {
            device: start.rsplit_once('.').map_or(start, |(device, _)| device).to_owned(),
            switches,
            root: components.first().copied().unwrap_or_default().to_owned(),
            numa_node: numa_node(last),
        }
    }

    fn level(&self, other: &Self) -> Level {
        let common = self.switches.iter().find_map(|switch| Some((switch, other.switches.iter().position(|s| s == switch)?)));
        let here = |switch: &String| self.switches.iter().position(|s| s == switch);
        match common {
            _ if self.device == other.device => Level::Pix,
            Some((switch, 0)) if here(switch) == Some(0) => Level::Pix,
            Some(_) => Level::Pxb,
            None if self.numa_node != other.numa_node => Level::Sys,
            None if self.root == other.root => Level::Phb,
            None => Level::Node,
        }
    }
}

/// Address of a device in its view, and what to call it.
pub type Named = (String, String);

/// The pairwise levels of some devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matrix {
    /// What to call them.
    pub names: Vec<String>,
    walks: Vec<Walk>,
}

impl Matrix {
    /// For `devices`, in this order. Those that the view lacks are left out.
    #[must_use]
    pub fn of(view: &View, devices: &[Named]) -> Self {
        let numa_node = |at: &str| view.nodes.iter().find(|node| node.at == at).and_then(|node| node.numa_node);
        let found = devices.iter().filter_map(|(at, name)| {
            let node = view.nodes.iter().find(|node| node.at == *at)?;
            Some((name.clone(), Walk::along(&view.path(node), numa_node)))
        });
        let (names, walks) = found.unzip();
        Self { names, walks }
    }

    /// The level of devices `a` and `b`, by their place in the list; `None` when there is no such device.
    #[must_use]
    pub fn level(&self, a: usize, b: usize) -> Option<Level> {
        Some(self.walks.get(a)?.level(self.walks.get(b)?))
    }

    /// All pairs, the lower place first.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize, Level)> + '_ {
        let all = 0..self.walks.len();
        all.flat_map(move |a| (a + 1..self.walks.len()).filter_map(move |b| Some((a, b, self.level(a, b)?))))
    }

    /// Both tables side by side, and the pairs whose level differs. Both have the same devices.
    #[must_use]
    pub fn beside(&self, guest: &Self) -> String {
        let mut text = String::new();
        let (left, right) = (self.rows(), guest.rows());
        let width = left.iter().map(String::len).max().unwrap_or(0).max("host".len());
        let _ = writeln!(text, "{:width$}    guest", "host");
        for (left, right) in left.iter().zip(&right) {
            let _ = writeln!(text, "{left:width$}    {right}");
        }
        let mut differing = 0;
        let total = self.pairs().count();
        text.push('\n');
        for ((a, b, host), (_, _, guest)) in self.pairs().zip(guest.pairs()).filter(|(host, guest)| host.2 != guest.2) {
            differing += 1;
            let name = |at: usize| self.names.get(at).map_or("", String::as_str);
            let _ = writeln!(text, "{} and {}: {host} on the host, {guest} in the guest", name(a), name(b));
        }
        let _ = match (differing, total) {
            (_, 0) => writeln!(text, "no pairs: there are fewer than two devices"),
            (0, 1) => writeln!(text, "the one pair is the same"),
            (_, 1) => writeln!(text, "the one pair differs"),
            (0, _) => writeln!(text, "all {total} pairs are the same"),
            _ => writeln!(text, "{differing} of {total} pairs differ"),
        };
        text
    }

    fn rows(&self) -> Vec<String> {
        let width = self.names.iter().map(String::len).max().unwrap_or(0).max(4);
        let line = |name: &str, cells: Vec<String>| {
            let cells: String = cells.iter().map(|cell| format!("  {cell:width$}")).collect();
            format!("{name:width$}{cells}").trim_end().to_owned()
        };
        let mut rows = vec![line("", self.names.clone())];
        for (a, name) in self.names.iter().enumerate() {
            let cell = |b| if a == b { "X".to_owned() } else { self.level(a, b).map_or(String::new(), |l| l.to_string()) };
            rows.push(line(name, (0..self.names.len()).map(cell).collect()));
        }
        rows
    }
}

impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows().iter().try_for_each(|row| writeln!(f, "{row}"))
    }
}

/// What the letters say.
pub const LEGEND: &str = "\
PIX   through one switch at most
PXB   through several switches, not through a root complex
PHB   through one root complex
NODE  through two root complexes of one NUMA node
SYS   between NUMA nodes
";

/// The devices that people compare: GPUs and accelerators, network cards, NVMe drives; with their addresses for names.
#[must_use]
pub fn usual_devices(view: &View) -> Vec<Named> {
    let usual = |class: u16| matches!(class, 0x0108 | 0x0200..=0x02FF | 0x0300..=0x03FF | 0x1200..=0x12FF);
    let nodes = view.nodes.iter().filter(|node| node.kind == HostKind::Endpoint && usual(node.ids.class.base_and_sub()));
    let mut devices: Vec<_> = nodes.map(|node| (node.at.clone(), node.at.clone())).collect();
    devices.sort();
    devices
}

#[cfg(test)]
mod tests {
    use super::super::tests::{host_file, level_counts, plan_of};
    use super::*;

    fn walk(path: &str) -> Walk {
        Walk::along(path, |at| at.starts_with("0000:8").then_some(1))
    }

    #[test]
    fn the_walk_takes_two_components_a_step() {
        let walk = walk("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/0000:04:08.0/0000:05:00.1");
        assert_eq!(walk.switches, ["0000:03:00.0", "0000:01:00.0"]);
        assert_eq!((walk.device.as_str(), walk.root.as_str(), walk.numa_node), ("0000:05:00", "pci0000:00", None));
    }

    #[test]
    fn devices_without_a_switch_and_on_the_root_bus_end_at_the_root_complex() {
        assert_eq!(walk("pci0000:80/0000:80:01.0/0000:81:00.0").switches, [""; 0]);
        assert_eq!(walk("pci0000:80/0000:80:01.0/0000:81:00.0").numa_node, Some(1));
        assert_eq!(walk("pci0000:00/0000:00:1f.2").switches, [""; 0]);
    }

    #[test]
    fn a_device_on_an_upper_switch_and_one_on_a_lower_are_several_switches_apart() {
        let upper = walk("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0");
        let lower = walk("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/0000:05:00.0/0000:06:00.0");
        assert_eq!((upper.level(&lower), lower.level(&upper)), (Level::Pxb, Level::Pxb));
    }

    #[test]
    fn each_small_host_has_the_levels_of_its_shape() {
        for (file, pix, pxb, phb, node, sys) in [
            ("one-switch", 3, 0, 0, 0, 0),
            ("nested-switches", 2, 4, 0, 0, 0),
            ("two-root-complexes", 2, 0, 0, 4, 0),
            ("two-nodes", 2, 0, 4, 0, 9),
        ] {
            let view = View::of_host(&host_file(file).tree);
            let matrix = Matrix::of(&view, &usual_devices(&view));
            assert_eq!(level_counts(&matrix), [pix, pxb, phb, node, sys], "{file}\n{matrix}");
        }
    }

    #[test]
    fn a_replica_of_one_node_keeps_every_level() {
        for file in ["one-switch", "nested-switches", "two-root-complexes"] {
            let host = View::of_host(&host_file(file).tree);
            let devices = usual_devices(&host);
            let (guest, guest_devices) = plan_of(file, &devices);
            let told = Matrix::of(&host, &devices).beside(&Matrix::of(&guest, &guest_devices));
            assert!(told.ends_with("pairs are the same\n"), "{file}\n{told}");
        }
    }

    #[test]
    fn a_comparison_of_few_devices_is_told_in_the_singular() {
        let host = View::of_host(&host_file("one-switch").tree);
        let devices = usual_devices(&host);
        for (count, told) in
            [(0, "no pairs: "), (1, "no pairs: "), (2, "the one pair is the same"), (3, "all 3 pairs are the same")]
        {
            let matrix = Matrix::of(&host, &devices[..count]);
            assert!(matrix.beside(&matrix).lines().last().unwrap().starts_with(told), "{count}: {}", matrix.beside(&matrix));
        }
    }
}
