//! Decides which hierarchy bytes are: kinds of ports, what hangs where, BARs, what is kept for hot-plug.

use crate::bar::{BarKind, BarSpec};
use crate::emulated::{Attachment, EmulatedSpec, InterruptSpec};
use crate::ids::{ClassCode, Ids};
use crate::link::Link;
use crate::sriov::SriovSpec;
use crate::topology::{
    Apertures, EndpointSpec, HotPlug, Name, NodeKind, NodeSpec, Place, PortKind, PortSpec, Removal, Reserve, RootComplexSpec,
    Topology, Window,
};

/// Nodes of a tree, at most.
const NODES: u8 = 24;
pub(super) const IDS: Ids =
    Ids { vendor: 0x1234, device: 1, class: ClassCode::new(0x08_8000), revision: 0, subsystem_vendor: 0, subsystem: 0 };

/// Numbers from bytes; zeros when they have run out.
pub(super) struct Source<'a>(pub(super) &'a [u8]);

impl Source<'_> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(super) fn below(&mut self, limit: u8) -> u8 {
        self.byte() % limit.max(1)
    }

    pub(super) fn dword(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    pub(super) fn pick<'t, T>(&mut self, of: &'t [T]) -> Option<&'t T> {
        let index = usize::from(self.byte()).checked_rem(of.len())?;
        of.get(index)
    }
}

pub(super) fn apertures() -> Apertures {
    Apertures {
        mem32: vec![Window { base: 0x8000_0000, limit: 0xDFFF_FFFF }],
        mem64: vec![Window { base: 1 << 32, limit: (1 << 40) - 1 }],
        address_bits: 40,
    }
}

pub(super) fn topology(source: &mut Source<'_>) -> Topology {
    let mut topology = Topology::default();
    // What can hang there, by name: ports on root complexes, devices on links, downstream ports on upstream ones.
    let mut parents: Vec<(Name, Option<PortKind>)> = Vec::new();
    for index in 0..=source.below(3) {
        let (name, segment) = (Name(format!("rc{index}")), source.below(2).into());
        topology.root_complexes.push(RootComplexSpec { name: name.clone(), segment, node: None, first_bus: None });
        parents.push((name, None));
    }
    for index in 0..1 + source.below(NODES) {
        let Some((on, above)) = source.pick(&parents).cloned() else { break };
        // There is one device below a link.
        if above.is_some_and(PortKind::has_link_below) {
            parents.retain(|(name, _)| *name != on);
        }
        let wants_port = source.byte() & 3 != 0;
        let kind = match (above, wants_port) {
            (None, true) => Some(PortKind::Root),
            (Some(PortKind::Upstream), _) => Some(PortKind::Downstream),
            (Some(PortKind::Root | PortKind::Downstream), true) => {
                Some(if source.byte() & 3 == 0 { PortKind::PciBridge } else { PortKind::Upstream })
            }
            _ => None,
        };
        let name = Name(format!("n{index}"));
        let node = match kind {
            Some(kind) => {
                parents.push((name.clone(), Some(kind)));
                NodeKind::Port(port(source, kind))
            }
            None => {
                let bars = bars(source);
                NodeKind::Endpoint(EndpointSpec {
                    ids: IDS,
                    bars,
                    interrupt_pin: source.below(5),
                    rom: rom(source),
                    sriov: sriov(source).map(Box::new),
                })
            }
        };
        // Another function of a device below a link; those above 7 take alternative routing-IDs.
        if let (NodeKind::Endpoint(spec), true, 0) = (&node, above.is_some_and(PortKind::has_link_below), source.byte() & 3) {
            let function = source.pick(&[1, 7, 9, 255]).copied().unwrap_or(1);
            let (name, kind) = (Name(format!("{name}-more")), NodeKind::Endpoint(spec.clone()));
            topology.nodes.push(NodeSpec { name, on: on.clone(), place: Place { device: Some(0), function }, kind });
        }
        topology.nodes.push(NodeSpec { name, on, place: Place::default(), kind: node });
    }
    topology
}

fn port(source: &mut Source<'_>, kind: PortKind) -> PortSpec {
    let removal = [None, Some(Removal::Surprise), Some(Removal::Orderly), Some(Removal::Button)];
    let removal = source.pick(&removal).copied().flatten().filter(|_| kind != PortKind::Upstream);
    let hotplug = removal.map(|removal| {
        let reserve = Reserve { buses: source.below(4), ..Reserve::default() };
        HotPlug { reserve, own: None, removal, numbers: source.below(34) }
    });
    PortSpec { kind, ids: None, link: Link::default(), atomic_completers: 0, hotplug }
}

/// Mostly none: virtual functions at routing ids of their own.
pub(super) fn sriov(source: &mut Source<'_>) -> Option<SriovSpec> {
    if source.byte() % 4 != 1 {
        return None;
    }
    let bar = BarSpec { kind: BarKind::Memory32, prefetchable: false, size: 4096 << source.below(4) };
    let (first_offset, stride) = (16 + u16::from(source.byte()), 8 + u16::from(source.below(4)));
    Some(SriovSpec {
        total_vfs: 1 + u16::from(source.below(8)),
        first_offset,
        stride,
        vf_device: 2,
        bars: [Some(bar), None, None, None, None, None],
    })
}

pub(super) fn bars(source: &mut Source<'_>) -> [Option<BarSpec>; 6] {
    let mut bars = [None; 6];
    let mut upper = false;
    for bar in &mut bars {
        let (kind, shift) = (source.byte(), source.byte());
        *bar = match kind % 4 {
            _ if upper => None,
            0 => Some(BarSpec { kind: BarKind::Memory32, prefetchable: kind & 4 != 0, size: 16 << (shift % 20) }),
            1 => Some(BarSpec { kind: BarKind::Memory64, prefetchable: kind & 4 != 0, size: 4096 << (shift % 24) }),
            2 if kind & 0xC == 0 => Some(BarSpec { kind: BarKind::Io, prefetchable: false, size: 4 << (shift % 7) }),
            _ => None,
        };
        upper = !upper && bar.is_some_and(|bar: BarSpec| bar.kind == BarKind::Memory64);
    }
    if upper && let Some(last) = bars.last_mut() {
        *last = None;
    }
    bars
}

fn rom(source: &mut Source<'_>) -> Option<u64> {
    (source.byte() & 7 == 0).then(|| 2048 << source.below(8))
}

pub(super) fn emulated(spec: &EndpointSpec, on: Attachment) -> EmulatedSpec {
    let interrupt = match spec.interrupt_pin {
        0 => InterruptSpec::Msi { vectors: 1, maskable: true },
        pin => InterruptSpec::Intx(pin),
    };
    EmulatedSpec {
        ids: IDS,
        bars: spec.bars,
        rom: spec.rom,
        sriov: spec.sriov.as_deref().copied(),
        ari: spec.sriov.is_some(),
        on,
        interrupt,
        flr: true,
        ..EmulatedSpec::default()
    }
}
