//! Decides in what a plan differs from its host, register by register. The guest's side is read from the registers of the
//! ports themselves, as a scan reads a host's, so that a value that is planned and not shown is found.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use pci::access::Reg;
use pci::address::{HostBdf, Sbdf};
use pci::link::Link;
use pci::port::Port;
use pci::seams::{MsiMessage, MsiPort};
use pci::topology::{Parent, Plan, PlannedFunction, PlannedKind, PortKind};
use serde_json::{Value, json};

use super::matrix::Matrix;
use crate::host::fabric::Fabric;
use crate::host::registers::Registers;
use crate::host::tree::{HostKind, HostNode, HostTree};

/// What is compared.
pub struct Sides<'a> {
    /// The host.
    pub tree: &'a HostTree,
    /// The guest.
    pub plan: &'a Plan,
    /// The host functions that functions of the guest stand for, by name.
    pub stands_for: &'a BTreeMap<String, HostBdf>,
    /// How close the devices are, here and there, in the same order.
    pub levels: (&'a Matrix, &'a Matrix),
}

/// All that was compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diff {
    functions: Vec<Compared>,
    pairs: Vec<[String; 4]>,
    pair_count: usize,
}

/// A function of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Compared {
    name: String,
    guest: Sbdf,
    noun: &'static str,
    /// `None` for a port that stands for none of the host.
    host: Option<HostBdf>,
    rows: Vec<Row>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    register: &'static str,
    host: String,
    guest: String,
    verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Same,
    /// They differ, and should.
    Meant(&'static str),
    Different,
}

const OWN_IDS: &str = "root ports carry Banyan's ids: drivers look for the chipset around the host's";
const UNKNOWN: &str = "the host does not tell";

/// Compares.
#[must_use]
pub fn diff(sides: &Sides<'_>) -> Diff {
    let nodes = Nodes::new(sides);
    let functions = sides.plan.functions.iter().map(|function| compare(sides, &nodes, function)).collect();
    let (host, guest) = sides.levels;
    let name = |index: usize| host.names.get(index).cloned().unwrap_or_default();
    let pairs = host.pairs().zip(guest.pairs()).filter(|(host, guest)| host.2 != guest.2);
    let pairs = pairs.map(|((a, b, host), (_, _, guest))| [name(a), name(b), host.to_string(), guest.to_string()]);
    Diff { functions, pairs: pairs.collect(), pair_count: host.pairs().count() }
}

/// Guest nodes by the host's, where one stands for the other throughout.
struct Nodes(BTreeMap<Option<u32>, Option<Option<u32>>>);

impl Nodes {
    fn new(sides: &Sides<'_>) -> Self {
        let mut nodes = BTreeMap::new();
        for function in &sides.plan.functions {
            let Some(host) = sides.stands_for.get(&function.name.0).and_then(|at| sides.tree.get(*at)) else { continue };
            let guest = guest_node(sides.plan, function);
            let known = nodes.entry(host.numa_node).or_insert(Some(guest));
            if *known != Some(guest) {
                *known = None;
            }
        }
        Self(nodes)
    }

    fn verdict(&self, host: Option<u32>, guest: Option<u32>) -> Verdict {
        let others = self.0.iter().filter(|(_, other)| **other == Some(guest)).count();
        match self.0.get(&host) {
            Some(Some(_)) if others == 1 && host == guest => Verdict::Same,
            Some(Some(_)) if others == 1 && host.is_some() == guest.is_some() => {
                Verdict::Meant("nodes of the guest are numbered from 0")
            }
            _ => Verdict::Different,
        }
    }
}

fn guest_node(plan: &Plan, function: &PlannedFunction) -> Option<u32> {
    let mut on = function.on;
    for _ in 0..=plan.functions.len() {
        match on {
            Parent::RootComplex(index) => return plan.root_complexes.get(index)?.node,
            Parent::Port(id) => on = plan.functions.iter().find(|other| other.id == id)?.on,
        }
    }
    None
}

fn compare(sides: &Sides<'_>, nodes: &Nodes, function: &PlannedFunction) -> Compared {
    let host = sides.stands_for.get(&function.name.0).and_then(|at| sides.tree.get(*at));
    let (noun, mut rows) = match &function.kind {
        PlannedKind::Port(port) => {
            let shown = Port::new(function, port, Arc::new(Silent)).ok().map(|port| registers(&port));
            let rows = host.zip(shown).map(|(host, shown)| port_rows(port.spec.kind, host, &shown)).unwrap_or_default();
            (port.spec.kind.noun(), rows)
        }
        PlannedKind::Endpoint(_) => ("endpoint", host.map(|host| endpoint_rows(sides, host, function)).unwrap_or_default()),
    };
    if let Some(host) = host {
        let guest = guest_node(sides.plan, function);
        let verdict = nodes.verdict(host.numa_node, guest);
        rows.push(Row { register: "memory node", host: number(host.numa_node), guest: number(guest), verdict });
    }
    Compared { name: function.name.to_string(), guest: function.at, noun, host: host.map(|host| host.at), rows }
}

/// A port without a machine sends nothing.
struct Silent;

impl MsiPort for Silent {
    fn send(&self, _message: MsiMessage) {}
}

fn registers(port: &Port) -> Vec<u8> {
    (0u16..1024).flat_map(|index| port.config_read(Reg::containing(index * 4)).to_le_bytes()).collect()
}

fn port_rows(kind: PortKind, host: &HostNode, shown: &[u8]) -> Vec<Row> {
    let shown = Registers(shown);
    let word = |at| shown.word(at).unwrap_or(0);
    let (ids, root) = (host.ids, kind == PortKind::Root);
    let express = shown.express();
    let (mut rows, own) = (Vec::new(), if root { Verdict::Meant(OWN_IDS) } else { Verdict::Different });
    let mut row = |register, host: String, guest: String, otherwise| {
        let verdict = if host == guest { Verdict::Same } else { otherwise };
        rows.push(Row { register, host, guest, verdict });
    };
    let pair = |vendor: u16, device: u16| format!("{vendor:04x}:{device:04x}");
    row("vendor:device", pair(ids.vendor, ids.device), pair(word(0), word(2)), own);
    row("revision", format!("{:02x}", ids.revision), format!("{:02x}", word(8).to_le_bytes()[0]), own);
    row("class", ids.class.to_string(), format!("{:06x}", shown.class().unwrap_or(0)), Verdict::Different);
    let subsystem = shown.subsystem_of_bridge().unwrap_or((0, 0));
    row("subsystem", pair(ids.subsystem_vendor, ids.subsystem), pair(subsystem.0, subsystem.1), own);
    let kind_of = |kind| match kind {
        PortKind::Root => 4,
        PortKind::Upstream => 5,
        PortKind::Downstream => 6,
        PortKind::PciBridge => 7,
    };
    let shown_type = express.map_or(0, |express| express.port_type());
    row("port type", kind_of(kind).to_string(), shown_type.to_string(), Verdict::Different);
    let told = if host.link.is_some() { Verdict::Different } else { Verdict::Meant(UNKNOWN) };
    let (links, shown_link) = (host.link, express.and_then(|express| express.link()));
    let mut link = |register, value: fn(Link) -> String| {
        row(register, links.map_or("-".to_owned(), value), shown_link.map_or("-".to_owned(), value), told);
    };
    link("LNKCAP", |link| link.max.to_string());
    link("LNKSTA", |link| link.current.to_string());
    link("DEVCAP payload", |link| payload(link.max_payload_supported));
    link("DEVCTL payload", |link| payload(link.max_payload));
    let fabric = shown.fabric();
    if root {
        let widths = express.map_or(0, |express| express.atomic_completers());
        let fewer = Verdict::Meant("no way to the devices below routes more");
        let verdict = if widths & !host.atomic_completers == 0 { fewer } else { Verdict::Different };
        row("AtomicOp completers", completers(host.atomic_completers), completers(widths), verdict);
    } else if host.fabric.config_bytes > 64 {
        let routing = |fabric: &Fabric| if fabric.atomics.routing { "yes" } else { "no" }.to_owned();
        let meant = Verdict::Meant("the root port completes none where the host routes none");
        row("AtomicOp routing", routing(&host.fabric), routing(&fabric), meant);
    }
    if host.fabric.is_whole() {
        let capability = |fabric: &Fabric| fabric.acs.map_or("-".to_owned(), |acs| format!("{:02x}", acs.capability));
        let control = |fabric: &Fabric| fabric.acs.map_or("-".to_owned(), |acs| format!("{:02x}", acs.control));
        let every = Verdict::Meant("all of Banyan's ports with a link below have the same");
        row("ACS capability", capability(&host.fabric), capability(&fabric), every);
        let off = Verdict::Meant("off until the guest wants it: the guest's own peer-to-peer goes the direct way");
        row("ACS control", control(&host.fabric), control(&fabric), off);
    }
    rows
}

fn endpoint_rows(sides: &Sides<'_>, host: &HostNode, function: &PlannedFunction) -> Vec<Row> {
    let (there, here) = (host.at.bdf.devfn(), function.at.bdf.devfn());
    let verdict = match host.physical_function {
        _ if there.function() == here.function() => Verdict::Same,
        Some(_) => Verdict::Meant("a virtual function is a device by itself"),
        None if here.function() == 0 => Verdict::Meant("function 0 of the host's device is not passed through"),
        None => Verdict::Different,
    };
    let number = Row { register: "function", host: there.function().to_string(), guest: here.function().to_string(), verdict };
    // What a driver takes for the bandwidth of the way up.
    let anchor = host.physical_function.and_then(|at| sides.tree.get(at)).unwrap_or(host);
    let above = sides.tree.above(anchor).into_iter().filter(|port| matches!(port.kind, HostKind::Port(_)));
    let slowest = |links: &mut dyn Iterator<Item = Link>| {
        let rates = links.map(|link| (link.current.speed, link.current.width));
        let least = rates.reduce(|a, b| (a.0.min(b.0), a.1.min(b.1)));
        least.map_or("-".to_owned(), |(speed, width)| format!("{speed} {width}"))
    };
    let on_host = slowest(&mut above.filter_map(|port| port.link));
    let in_guest = slowest(&mut ports_above(sides.plan, function).into_iter());
    let verdict = match on_host.as_str() {
        same if same == in_guest => Verdict::Same,
        "-" => Verdict::Meant(UNKNOWN),
        _ => Verdict::Different,
    };
    vec![number, Row { register: "slowest link above", host: on_host, guest: in_guest, verdict }]
}

fn ports_above(plan: &Plan, function: &PlannedFunction) -> Vec<Link> {
    let mut links = Vec::new();
    let mut on = function.on;
    while let Parent::Port(id) = on {
        let Some(port) = plan.functions.iter().find(|other| other.id == id).filter(|_| links.len() < 256) else { break };
        if let PlannedKind::Port(planned) = &port.kind {
            links.push(planned.spec.link);
        }
        on = port.on;
    }
    links
}

fn payload(encoded: u8) -> String {
    (128u32 << encoded.min(7)).to_string()
}

fn completers(widths: u8) -> String {
    let names = [(1, "32"), (2, "64"), (4, "128")];
    let names: Vec<&str> = names.iter().filter(|(bit, _)| widths & bit != 0).map(|(_, name)| *name).collect();
    if names.is_empty() { "none".to_owned() } else { names.join("+") }
}

fn number(node: Option<u32>) -> String {
    node.map_or("none".to_owned(), |node| node.to_string())
}

impl Diff {
    fn count(&self, of: impl Fn(Verdict) -> bool) -> usize {
        self.functions.iter().flat_map(|function| &function.rows).filter(|row| of(row.verdict)).count()
    }

    /// For people: what differs, function by function, and why if it should.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for function in &self.functions {
            let host = function.host.map_or("Banyan's own".to_owned(), |at| format!("{at} on the host"));
            let _ = writeln!(text, "{} {}: {}, {host}", function.guest, function.name, function.noun);
            for row in function.rows.iter().filter(|row| row.verdict != Verdict::Same) {
                let (mark, why) = match row.verdict {
                    Verdict::Meant(why) => (' ', format!("  {why}")),
                    _ => ('!', String::new()),
                };
                let (register, host, guest) = (row.register, &row.host, &row.guest);
                let _ = writeln!(text, "  {mark} {register:<19} {host:<11} -> {guest:<11}{why}").map(|()| ());
            }
        }
        text.push('\n');
        for [a, b, host, guest] in &self.pairs {
            let _ = writeln!(text, "! {a} and {b}: {host} on the host, {guest} in the guest");
        }
        let same = self.count(|verdict| verdict == Verdict::Same);
        let meant = self.count(|verdict| matches!(verdict, Verdict::Meant(_)));
        let different = self.count(|verdict| verdict == Verdict::Different);
        let _ = writeln!(text, "registers: {same} the same, {meant} different as meant, {different} different (!)");
        let _ = writeln!(text, "pairs: {} as close as on the host, {} not", self.pair_count - self.pairs.len(), self.pairs.len());
        text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }

    /// All of it.
    #[must_use]
    pub fn json(&self) -> Value {
        let row = |row: &Row| {
            let (verdict, why) = match row.verdict {
                Verdict::Same => ("same", None),
                Verdict::Meant(why) => ("meant", Some(why)),
                Verdict::Different => ("different", None),
            };
            json!({ "register": row.register, "host": row.host, "guest": row.guest, "verdict": verdict, "why": why })
        };
        let function = |function: &Compared| {
            json!({
                "name": function.name,
                "guest": function.guest.to_string(),
                "host": function.host.map(|at| at.to_string()),
                "kind": function.noun.replace(' ', "-"),
                "registers": function.rows.iter().map(row).collect::<Vec<_>>(),
            })
        };
        let pair = |[a, b, host, guest]: &[String; 4]| json!({ "devices": [a, b], "host": host, "guest": guest });
        json!({
            "functions": self.functions.iter().map(function).collect::<Vec<_>>(),
            "pairs": { "compared": self.pair_count, "different": self.pairs.iter().map(pair).collect::<Vec<_>>() },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{host_file, planned_as};
    use super::*;

    #[test]
    fn a_copy_differs_from_its_host_only_where_it_is_meant_to() {
        for (file, devices) in [
            ("one-switch", vec!["0000:03:00.0,id=gpu0", "0000:05:00.0,id=nic0"]),
            ("two-nodes", vec!["0000:83:00.0,id=gpu0", "0000:04:00.0,id=nic0"]),
            ("hgx-8gpu", vec!["0000:18:00.0,id=gpu0", "0000:19:00.0,id=nic0", "0000:5c:00.0,id=gpu1"]),
        ] {
            let diff = planned_as(file, &devices, "topology=host").diff(&host_file(file).tree);
            assert_eq!(diff.count(|verdict| verdict == Verdict::Different), 0, "{file}\n{}", diff.text());
            assert_eq!(diff.pairs, Vec::<[String; 4]>::new());
            assert!(diff.count(|verdict| verdict == Verdict::Same) > 20, "{file}\n{}", diff.text());
        }
    }

    #[test]
    fn the_text_names_what_differs_and_why() {
        let diff = planned_as("one-switch", &["0000:03:00.0,id=gpu0"], "topology=host").diff(&host_file("one-switch").tree);
        assert_eq!(
            diff.text(),
            "\
0000:00:00.0 root-0000-00-01.0: root port, 0000:00:01.0 on the host
    vendor:device       8086:352a   -> 1b36:10ba    root ports carry Banyan's ids: drivers look for the chipset around the host's
    subsystem           0000:0000   -> 1af4:1100    root ports carry Banyan's ids: drivers look for the chipset around the host's
0000:01:00.0 up-0000-01-00.0: upstream port, 0000:01:00.0 on the host
0000:02:00.0 down-0000-02-00.0: downstream port, 0000:02:00.0 on the host
0000:03:00.0 gpu0: endpoint, 0000:03:00.0 on the host

registers: 32 the same, 2 different as meant, 0 different (!)
pairs: 0 as close as on the host, 0 not
"
        );
    }

    #[test]
    fn a_flat_guest_is_told_pair_by_pair() {
        let devices = ["0000:03:00.0,id=gpu0", "0000:05:00.0,id=nic0"];
        let diff = planned_as("one-switch", &devices, "topology=root-ports").diff(&host_file("one-switch").tree);
        assert_eq!(diff.pairs, [["gpu0", "nic0", "PIX", "PHB"].map(str::to_owned)]);
        assert!(diff.text().contains("gpu0-port: root port, Banyan's own"), "{}", diff.text());
        let json = diff.json();
        assert_eq!(json["pairs"]["different"][0]["guest"], "PHB");
        assert_eq!(json["functions"][1]["registers"][0]["register"], "function");
    }
}
