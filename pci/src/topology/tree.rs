//! Prints a plan: the tree as `lspci -tv` draws it, and on request every number of every function.

use std::fmt;

use super::plan::{Parent, Plan, PlannedEndpoint, PlannedFunction, PlannedKind, PlannedPort, PlannedRootComplex, Window};
use super::spec::{PortKind, PortSpec, Resource};
use crate::bar::Size;
use crate::function::FunctionId;
use crate::ids::own;
use crate::intx;

/// Displays `plan`. Lines end with a line break, the last one too. Notes are left to the caller.
///
/// ```text
/// -[0000:00]-+-00.0  console 1af4:1043
///            \-01.0-[01-04]----00.0-[02-04]--+-00.0-[03]----00.0  gpu0 10de:20b8, clique 0
///                                            \-01.0-[04]--
/// ```
pub struct Tree<'a> {
    /// What to print.
    pub plan: &'a Plan,
    /// What to say of a function beside its name and ids, for example its clique; empty for nothing. The short form asks
    /// for endpoints only.
    pub label: &'a dyn Fn(&PlannedFunction) -> String,
    /// Whether a list with buses, windows, BARs and links follows the tree.
    pub verbose: bool,
}

impl fmt::Display for Tree<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.drawing() {
            writeln!(f, "{line}")?;
        }
        if self.verbose {
            for (index, root) in self.plan.root_complexes.iter().enumerate() {
                writeln!(f)?;
                root_complex(f, root)?;
                for function in self.plan.functions.iter().filter(|function| self.root_of(function) == Some(index)) {
                    self.function(f, function)?;
                }
            }
        }
        Ok(())
    }
}

/// A line as far as it is drawn, and what stands in the same columns on the lines after it.
#[derive(Clone)]
struct Line {
    text: String,
    after: String,
}

impl Line {
    /// Adds `text`, with blanks below it.
    fn blank(&self, text: &str) -> Self {
        Self { text: format!("{}{text}", self.text), after: format!("{}{:width$}", self.after, "", width = text.len()) }
    }

    /// One line for each of `count` branches; the first goes on where this line ends.
    fn branches(&self, count: usize) -> impl Iterator<Item = Self> + '_ {
        (0..count).map(move |index| {
            let text = if index == 0 { &self.text } else { &self.after };
            let (corner, below) = if index + 1 == count { ("\\-", "  ") } else { ("+-", "| ") };
            Self { text: format!("{text}{corner}"), after: format!("{}{below}", self.after) }
        })
    }
}

impl Tree<'_> {
    fn drawing(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let start = Line { text: "-".to_owned(), after: " ".to_owned() };
        let roots = &self.plan.root_complexes;
        let starts: Vec<Line> = if roots.len() == 1 { vec![start] } else { start.branches(roots.len()).collect() };
        for (index, (root, start)) in roots.iter().zip(starts).enumerate() {
            let line = start.blank(&format!("[{:04x}:{:02x}]-", root.segment, root.buses.secondary));
            self.bus(Parent::RootComplex(index), &line, &mut lines);
        }
        lines
    }

    fn bus(&self, on: Parent, line: &Line, lines: &mut Vec<String>) {
        let functions: Vec<&PlannedFunction> = self.plan.functions.iter().filter(|function| function.on == on).collect();
        match functions.as_slice() {
            [] if self.plan.functions.is_empty() => lines.push(format!("{}  no devices", line.text)),
            [] => lines.push(line.text.clone()),
            [only] => self.draw(only, &line.blank("--"), lines),
            several => {
                for (function, branch) in several.iter().zip(line.branches(several.len())) {
                    self.draw(function, &branch, lines);
                }
            }
        }
    }

    fn draw(&self, function: &PlannedFunction, line: &Line, lines: &mut Vec<String>) {
        let devfn = function.at.bdf.devfn();
        match &function.kind {
            PlannedKind::Port(port) => {
                let line = line.blank(&format!("{devfn}-[{}]--", port.buses));
                self.bus(Parent::Port(function.id), &line, lines);
            }
            PlannedKind::Endpoint(endpoint) => {
                let ids = endpoint.spec.ids;
                let name = &function.name;
                let text = format!("{}{devfn}  {name} {:04x}:{:04x}", line.text, ids.vendor, ids.device);
                lines.push(text + &self.labelled(function));
            }
        }
    }

    fn labelled(&self, function: &PlannedFunction) -> String {
        let label = (self.label)(function);
        if label.is_empty() { label } else { format!(", {label}") }
    }

    fn root_of(&self, function: &PlannedFunction) -> Option<usize> {
        let mut on = function.on;
        // No function is deeper than there are functions.
        for _ in 0..=self.plan.functions.len() {
            match on {
                Parent::RootComplex(root) => return Some(root),
                Parent::Port(FunctionId(id)) => on = self.plan.functions.get(usize::try_from(id).ok()?)?.on,
            }
        }
        None
    }

    fn function(&self, f: &mut fmt::Formatter<'_>, function: &PlannedFunction) -> fmt::Result {
        write!(f, "{}  {}: ", function.at, function.name)?;
        match &function.kind {
            PlannedKind::Port(port) => self.port(f, function, port),
            PlannedKind::Endpoint(endpoint) => self.endpoint(f, function, endpoint),
        }
    }

    fn port(&self, f: &mut fmt::Formatter<'_>, function: &PlannedFunction, port: &PlannedPort) -> fmt::Result {
        let (vendor, device) = ids(&port.spec);
        write!(f, "{} {vendor:04x}:{device:04x}, buses {}", port.spec.kind.noun(), port.buses)?;
        if port.slot != 0 {
            write!(f, ", slot {}", port.slot)?;
        }
        write!(f, ", link {}", port.spec.link.current)?;
        if port.spec.link.max != port.spec.link.current {
            write!(f, " of {}", port.spec.link.max)?;
        }
        if let (Some(hotplug), Some(reserved)) = (port.spec.hotplug, port.reserved) {
            let (memory, prefetchable) = (Size(reserved.memory), Size(reserved.prefetchable));
            match port.spec.bus_slots() {
                0 => write!(f, ", hot-plug ({} removal)", hotplug.removal.noun())?,
                slots => write!(f, ", hot-plug ({slots} device numbers by ACPI)")?,
            }
            write!(f, " keeps {memory} memory, {prefetchable} prefetchable")?;
            write!(f, ", {} bus{}", reserved.buses, if reserved.buses == 1 { "" } else { "es" })?;
        }
        writeln!(f, "{}", self.labelled(function))?;
        windows(f, "memory", port.windows.memory.as_slice())?;
        windows(f, "prefetchable", port.windows.prefetchable.as_slice())
    }

    fn endpoint(&self, f: &mut fmt::Formatter<'_>, function: &PlannedFunction, endpoint: &PlannedEndpoint) -> fmt::Result {
        let ids = endpoint.spec.ids;
        write!(f, "endpoint {:04x}:{:04x} class {}", ids.vendor, ids.device, ids.class)?;
        if let Some(pin) = endpoint.spec.interrupt_pin.checked_sub(1) {
            write!(f, ", INT{}", char::from(b'A' + (pin & 3)))?;
        }
        if let Some(route) = endpoint.intx {
            write!(f, " on GSI {}", intx::gsi(route))?;
        }
        writeln!(f, "{}", self.labelled(function))?;
        for (bar, (spec, at)) in endpoint.spec.bars.iter().zip(endpoint.bars).enumerate() {
            match (spec, at) {
                (None, _) => {}
                (Some(spec), Some(at)) => {
                    let window = Window { base: at, limit: at.saturating_add(spec.size - 1) };
                    row(f, &format!("BAR {bar}"), window, &spec.to_string())?;
                }
                (Some(spec), None) => writeln!(f, "      {:<15}{:<27}{spec}", format!("BAR {bar}"), "none")?,
            }
        }
        for (what, need) in endpoint.spec.needs() {
            let at = match what {
                Resource::Bar(_) => None,
                Resource::Rom => endpoint.rom,
                Resource::VfBar(bar) => endpoint.vf_bars.get(usize::from(bar)).copied().flatten(),
            };
            if let (Some(at), Some(size)) = (at, need.size()) {
                row(f, &what.to_string(), Window { base: at, limit: at.saturating_add(size - 1) }, &need.to_string())?;
            }
        }
        Ok(())
    }
}

fn root_complex(f: &mut fmt::Formatter<'_>, root: &PlannedRootComplex) -> fmt::Result {
    write!(f, "{:04x}:{:02x}       {}: root complex, buses {}", root.segment, root.buses.secondary, root.name, root.buses)?;
    if let Some(node) = root.node {
        write!(f, ", NUMA node {node}")?;
    }
    writeln!(f)?;
    windows(f, "memory", &root.mem32)?;
    windows(f, "64-bit memory", &root.mem64)?;
    if let Some((first, last)) = root.io {
        let window = Window { base: first.into(), limit: last.into() };
        row(f, "I/O ports", window, &Size(window.len()).to_string())?;
    }
    Ok(())
}

fn windows(f: &mut fmt::Formatter<'_>, name: &str, windows: &[Window]) -> fmt::Result {
    windows.iter().try_for_each(|window| row(f, name, *window, &Size(window.len()).to_string()))
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, window: Window, what: &str) -> fmt::Result {
    writeln!(f, "      {name:<15}{:<27}{what}", window.to_string())
}

const fn ids(port: &PortSpec) -> (u16, u16) {
    match (port.ids, port.kind) {
        (Some(ids), _) => (ids.vendor, ids.device),
        (None, PortKind::Root) => (own::VENDOR, own::ROOT_PORT),
        (None, PortKind::Upstream) => (own::VENDOR, own::UPSTREAM_PORT),
        (None, PortKind::Downstream) => (own::VENDOR, own::DOWNSTREAM_PORT),
        (None, PortKind::PciBridge) => (own::VENDOR, own::PCI_BRIDGE),
    }
}
