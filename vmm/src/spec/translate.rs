//! Turns what a configuration says of one port or one stub into what the planner and the devices take. Pure.

use api::config::{
    BarConfig, BarKind as BarKindConfig, IdPair, InterruptConfig, PcieConfig, PortConfig, PortKind as PortKindConfig, StubConfig,
};
use devices::stub::{StubInterrupt, StubSpec};
use pci::bar::{BarKind, BarSpec};
use pci::caps::clique::Clique;
use pci::emulated::Attachment;
use pci::ids::{ClassCode, Ids, own};
use pci::link::{Link, LinkError, LinkRate};
use pci::sriov::SriovSpec;
use pci::topology::{PortKind, PortSpec};

use super::SpecError;
use crate::budget;
use crate::host::tree::HostNode;

fn link(text: Option<&String>) -> Result<Link, LinkError> {
    text.map_or(Ok(Link::default()), |text| text.parse::<LinkRate>().map(Link::at))
}

/// A port of a topology file, beside what `pcie` says of all hot-plug ports.
pub(super) fn port_spec(port: &PortConfig, pcie: &PcieConfig) -> Result<PortSpec, SpecError> {
    let ids = port.ids.map(|ids| Ids {
        vendor: ids.vendor,
        device: ids.device,
        class: ClassCode::BRIDGE,
        revision: 0,
        subsystem_vendor: port.subsystem.map_or(0, |pair| pair.vendor),
        subsystem: port.subsystem.map_or(0, |pair| pair.device),
    });
    Ok(PortSpec {
        kind: match port.kind {
            PortKindConfig::RootPort => PortKind::Root,
            PortKindConfig::UpstreamPort => PortKind::Upstream,
            PortKindConfig::DownstreamPort => PortKind::Downstream,
            PortKindConfig::PciBridge => PortKind::PciBridge,
        },
        ids,
        link: link(port.link.as_ref()).map_err(|source| SpecError::Link { name: port.name.clone(), source })?,
        atomic_completers: 0,
        hotplug: port.hotplug.then(|| budget::hot_plug_of(port, pcie)),
    })
}

/// What stands for a function of a host that is data: its ids, BARs and link, one interrupt vector.
pub(super) fn stand_in(node: &HostNode, clique: Option<Clique>, any_vendor: bool) -> StubSpec {
    StubSpec {
        ids: node.ids,
        bars: node.bars,
        rom: node.rom,
        sriov: None,
        ari: false,
        on: Attachment::Link(node.link.unwrap_or_default()),
        follows: node.link.is_none(),
        interrupt: StubInterrupt::Msi { vectors: 1, maskable: true },
        clique,
        clique_any_vendor: any_vendor,
        flr: true,
        dma: false,
    }
}

/// A stub as it is below a port, with a clique that somebody decided on.
pub(super) fn stub_spec(stub: &StubConfig, clique: Option<Clique>, any_vendor: bool) -> Result<StubSpec, LinkError> {
    let ids = stub.ids.unwrap_or(IdPair { vendor: own::VENDOR, device: own::STUB });
    let subsystem = stub.subsystem.unwrap_or(IdPair { vendor: own::SUBSYSTEM.0, device: own::SUBSYSTEM.1 });
    let bar = |bar: BarConfig| BarSpec {
        kind: match bar.kind {
            BarKindConfig::Mem32 => BarKind::Memory32,
            BarKindConfig::Mem64 => BarKind::Memory64,
            BarKindConfig::Io => BarKind::Io,
        },
        prefetchable: bar.prefetchable,
        size: bar.size.bytes(),
    };
    Ok(StubSpec {
        ids: Ids {
            vendor: ids.vendor,
            device: ids.device,
            class: stub.class.map_or(ClassCode::new(0x08_8000), |class| ClassCode::new(class.value())),
            revision: 0,
            subsystem_vendor: subsystem.vendor,
            subsystem: subsystem.device,
        },
        bars: stub.bars.map(|slot| slot.map(bar)),
        rom: stub.rom.map(|size| size.bytes()),
        sriov: stub.virtual_functions.as_ref().map(|functions| SriovSpec {
            total_vfs: functions.total,
            first_offset: functions.first_offset,
            stride: functions.stride,
            vf_device: functions.device.map_or(ids.device, |device| device.0),
            bars: functions.bars.map(|slot| slot.map(bar)),
        }),
        ari: false,
        on: Attachment::Link(link(stub.link.as_ref())?),
        follows: stub.link.is_none(),
        interrupt: match stub.interrupt {
            InterruptConfig::None => StubInterrupt::None,
            InterruptConfig::Intx(pin) => StubInterrupt::Intx(pin.register()),
            InterruptConfig::Msi(vectors) => StubInterrupt::Msi { vectors, maskable: true },
            InterruptConfig::MsiX(vectors) => StubInterrupt::MsiX { vectors },
        },
        clique,
        clique_any_vendor: any_vendor,
        flr: stub.flr,
        dma: stub.dma,
    })
}
