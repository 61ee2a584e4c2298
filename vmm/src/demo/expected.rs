//! Decides what the built-in guest must report. Every line follows from the plan and the specification; the grammar is that
//! of `resources/guests/README.md`. Knows nothing of what a guest did report.

use devices::stub::{StubInterrupt, StubSpec};
use pci::bar::BarKind;
use pci::emulated::Attachment;
use pci::ids::{ClassCode, Ids};
use pci::link::LinkRate;
use pci::port::own_ids;
use pci::topology::{Name, Parent, PlannedEndpoint, PlannedFunction, PlannedKind, PlannedPort, PortKind, Window};
use thiserror::Error;

use crate::plan::MachinePlan;
use crate::spec::{Endpoint, Spec};

/// Where stubs show their clique: the rest of their list ends below.
const CLIQUE_AT: u8 = 0xC8;
/// Bytes of each copy.
const COPY_BYTES: u64 = 1024;
/// Smallest BAR that takes part in copies.
const SMALLEST_AREA: u64 = 16 << 10;

/// The lines in the order in which the guest prints them. `config_ports`: ports 0xCF8 and 0xCFC answer.
pub fn report(machine: &MachinePlan, spec: &Spec, config_ports: bool) -> Result<Vec<String>, ExpectedError> {
    let mut lines = vec!["banyan-probe 1".to_owned()];
    for ecam in &machine.map.ecam {
        lines.push(format!("segment {:04x} ecam={:x} buses=00-{:02x}", ecam.segment, ecam.range.start, ecam.last_bus));
    }
    lines.push(format!("ports answered={}", if config_ports { "yes agree=yes" } else { "no" }));
    let functions = walk(machine);
    lines.extend(roots(machine, &functions));
    let mut engines = Vec::new();
    for function in &functions {
        match &function.kind {
            PlannedKind::Port(port) => lines.extend(of_port(function, port)),
            PlannedKind::Endpoint(endpoint) => {
                let Some(Endpoint::Stub(stub)) = spec.endpoints.get(&function.name) else {
                    return Err(ExpectedError { name: function.name.clone() });
                };
                lines.extend(of_stub(function, endpoint, stub));
                engines.extend(Engine::of(function, endpoint, stub));
            }
        }
    }
    lines.extend(copies(&engines));
    lines.push(format!("end functions={}", functions.len()));
    Ok(lines)
}

/// Root buses that have functions, in walk order.
fn roots(machine: &MachinePlan, functions: &[&PlannedFunction]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for root in functions.iter().filter_map(|function| match function.on {
        Parent::RootComplex(index) => machine.pci.root_complexes.get(index),
        Parent::Port(_) => None,
    }) {
        let node = root.node.map_or("none".to_owned(), |node| node.to_string());
        let line = format!("root {:04x}:{:02x} node={node}", root.segment, root.buses.secondary);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

/// All functions in walk order: segments as MCFG lists them, root buses ascending, depth first.
fn walk(machine: &MachinePlan) -> Vec<&PlannedFunction> {
    let roots = &machine.pci.root_complexes;
    let mut found = Vec::new();
    for ecam in &machine.map.ecam {
        let mut here: Vec<usize> =
            (0..roots.len()).filter(|root| roots.get(*root).is_some_and(|r| r.segment == ecam.segment)).collect();
        here.sort_by_key(|root| roots.get(*root).map(|root| root.buses.secondary));
        for root in here {
            walk_bus(machine, Parent::RootComplex(root), &mut found);
        }
    }
    found
}

fn walk_bus<'a>(machine: &'a MachinePlan, on: Parent, found: &mut Vec<&'a PlannedFunction>) {
    let mut here: Vec<&PlannedFunction> = machine.pci.functions.iter().filter(|function| function.on == on).collect();
    here.sort_by_key(|function| function.at.bdf);
    for function in here {
        found.push(function);
        walk_bus(machine, Parent::Port(function.id), found);
    }
}

/// What a function shows beside windows and BARs.
struct Shown {
    ids: Ids,
    kind: &'static str,
    /// Maximum and current rate; `None` for link registers that are zero.
    link: Option<(LinkRate, Option<LinkRate>)>,
    standard: Vec<&'static str>,
    extended: Vec<&'static str>,
    msi: u16,
    msix: u16,
    /// Interrupt pin register.
    pin: u8,
}

impl Shown {
    fn identity(&self, function: &PlannedFunction) -> String {
        let Ids { vendor, device, class, subsystem_vendor, subsystem, .. } = self.ids;
        let subsystem = match (subsystem_vendor, subsystem) {
            (0, 0) => "none".to_owned(),
            (vendor, device) => format!("{vendor:04x}:{device:04x}"),
        };
        let (kind, several) = (self.kind, yes_no(function.multifunction));
        format!(
            "function {} id={vendor:04x}:{device:04x} subsystem={subsystem} class={class} type={kind} multi-function={several}",
            place(function)
        )
    }

    fn rest(&self, function: &PlannedFunction) -> Vec<String> {
        let at = place(function);
        let rate = |rate: LinkRate| format!("{},{}", rate.speed, rate.width);
        let (max, now) = match self.link {
            None => ("none,x0".to_owned(), "none,x0".to_owned()),
            // A link without a partner shows the lowest rate and no lanes.
            Some((max, now)) => (rate(max), now.map_or("2.5GT/s,x0".to_owned(), rate)),
        };
        let list = |names: &[&str]| if names.is_empty() { "none".to_owned() } else { names.join(",") };
        let link = self.standard.contains(&"express").then(|| format!("link {at} max={max} now={now}"));
        let mut lines: Vec<String> = link.into_iter().collect();
        lines.push(format!("capabilities {at} standard={} extended={}", list(&self.standard), list(&self.extended)));
        if (self.msi, self.msix, self.pin) != (0, 0, 0) {
            let pin = ["none", "A", "B", "C", "D"].get(usize::from(self.pin)).unwrap_or(&"none");
            lines.push(format!("interrupts {at} msi={} msix={} pin={pin}", self.msi, self.msix));
        }
        lines
    }
}

/// A port, by the table in [`pci::port`].
fn of_port(function: &PlannedFunction, port: &PlannedPort) -> Vec<String> {
    let kind = port.spec.kind;
    let (below, to_pci) = (kind.has_link_below(), kind == PortKind::PciBridge);
    let ids = Ids { class: ClassCode::BRIDGE, ..port.spec.ids.unwrap_or_else(|| own_ids(kind)) };
    let mut standard = vec!["express"];
    standard.extend(below.then_some("msi"));
    standard.extend(((ids.subsystem_vendor, ids.subsystem) != (0, 0)).then_some("subsystem"));
    standard.push("power");
    let link = port.spec.link;
    // The link of an upstream port or a PCIe-to-PCI bridge is the one above it.
    let up = !below || port.occupied;
    let shown = Shown {
        ids,
        kind: match kind {
            PortKind::Root => "root-port",
            PortKind::Upstream => "upstream-port",
            PortKind::Downstream => "downstream-port",
            PortKind::PciBridge => "pcie-pci-bridge",
        },
        link: Some((link.max, up.then_some(link.current))),
        standard,
        extended: if below {
            vec!["aer", "acs", "serial"]
        } else if to_pci {
            Vec::new()
        } else {
            vec!["aer", "serial"]
        },
        msi: u16::from(below),
        msix: 0,
        pin: port.spec.interrupt_pin(),
    };
    let range = |window: Option<Window>| window.map_or("none".to_owned(), |window| window.to_string());
    let bridge = format!(
        "bridge {} primary={:02x} secondary={:02x} subordinate={:02x} io=none memory={} prefetchable={}",
        place(function),
        function.at.bdf.bus(),
        port.buses.secondary,
        port.buses.subordinate,
        range(port.windows.memory),
        range(port.windows.prefetchable),
    );
    let mut lines = vec![shown.identity(function), bridge];
    lines.extend(shown.rest(function));
    lines
}

fn of_stub(function: &PlannedFunction, endpoint: &PlannedEndpoint, stub: &StubSpec) -> Vec<String> {
    let (msi, msix, pin, message) = match stub.interrupt {
        StubInterrupt::None => (0, 0, 0, None),
        StubInterrupt::Intx(pin) => (0, 0, pin, None),
        StubInterrupt::Msi { vectors, .. } => (vectors.into(), 0, 0, Some("msi")),
        StubInterrupt::MsiX { vectors } => (0, vectors, 0, Some("msix")),
    };
    let (kind, link) = match stub.on {
        Attachment::Link(link) | Attachment::Virtual(link) => ("endpoint", Some(link)),
        Attachment::RootBus => ("integrated-endpoint", None),
        Attachment::Conventional => ("conventional", None),
    };
    let mut extended = Vec::new();
    extended.extend(link.map(|_| "aer"));
    extended.extend(link.filter(|_| stub.ari).map(|_| "ari"));
    extended.extend(stub.sriov.filter(|_| stub.on != Attachment::Conventional).map(|_| "sriov"));
    let mut standard = Vec::new();
    standard.extend((stub.on != Attachment::Conventional).then_some("express"));
    standard.extend(message);
    standard.extend(stub.clique.map(|_| "clique"));
    let shown =
        Shown { ids: stub.ids, kind, link: link.map(|link| (link.max, Some(link.current))), standard, extended, msi, msix, pin };
    let at = place(function);
    let mut lines = vec![shown.identity(function)];
    for (number, (spec, base)) in stub.bars.iter().zip(endpoint.bars).enumerate() {
        let Some(spec) = spec else { continue };
        let kind = match spec.kind {
            BarKind::Memory32 => "mem32",
            BarKind::Memory64 => "mem64",
            BarKind::Io => "io",
        };
        let prefetchable = yes_no(spec.prefetchable);
        let (base, size) = (base.unwrap_or(0), spec.size);
        lines.push(format!("bar {at} {number} type={kind} prefetchable={prefetchable} base={base:x} size={size:x}"));
    }
    lines.extend(shown.rest(function));
    lines.extend(stub.clique.map(|clique| format!("clique {at} id={} at={CLIQUE_AT:02x}", clique.id())));
    lines
}

/// A stub that copies.
struct Engine {
    place: String,
    /// Middle of its largest memory BAR, the lowest one among equals.
    middle: u64,
    /// Kind and number of the interrupt at the end of a copy.
    interrupt: Option<(&'static str, u16)>,
}

impl Engine {
    fn of(function: &PlannedFunction, endpoint: &PlannedEndpoint, stub: &StubSpec) -> Option<Self> {
        let bars = stub.bars.iter().zip(endpoint.bars).filter_map(|(spec, base)| Some((spec.as_ref()?, base?)));
        let areas = bars.filter(|(spec, _)| spec.is_memory() && spec.size >= SMALLEST_AREA);
        // The last of equal maxima counts, so look from the end.
        let largest = areas.collect::<Vec<_>>().into_iter().rev().max_by_key(|(spec, _)| spec.size);
        let (spec, base) = largest.filter(|_| stub.dma)?;
        let interrupt = match stub.interrupt {
            StubInterrupt::MsiX { vectors } => Some(("msix", vectors.saturating_sub(1))),
            StubInterrupt::Msi { .. } => Some(("msi", 0)),
            StubInterrupt::Intx(_) | StubInterrupt::None => None,
        };
        Some(Self { place: place(function), middle: base.saturating_add(spec.size / 2), interrupt })
    }
}

/// Each engine copies to the next one, the last one to the first.
fn copies(engines: &[Engine]) -> Vec<String> {
    let mut lines = Vec::new();
    if engines.len() < 2 {
        return lines;
    }
    for (engine, peer) in engines.iter().zip(engines.iter().cycle().skip(1)) {
        let (at, from, to) = (&engine.place, engine.middle, peer.middle.saturating_add(0x1000));
        lines.push(format!("dma {at} from={from:x} to={to:x} bytes={COPY_BYTES} peer={} result=ok", peer.place));
        lines
            .extend(engine.interrupt.map(|(kind, vector)| format!("interrupt {at} kind={kind} vector={vector} result=received")));
    }
    lines
}

fn place(function: &PlannedFunction) -> String {
    if function.at.segment == 0 { function.at.bdf.to_string() } else { function.at.to_string() }
}

const fn yes_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

/// An endpoint of which nothing is expected.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("what a guest sees of {name} is not known: the demonstration is for stubs only")]
pub struct ExpectedError {
    name: Name,
}

#[cfg(test)]
mod tests;
