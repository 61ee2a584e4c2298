//! Which devices the guest has: functions of the host by VFIO, and emulated stubs.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::bar_choice::BarChoice;
use super::cdi::{self, CdiName};
use super::flags::{Flag, FlagError, Pairs, choice};
use super::size::Size;
use super::stub::{self, BarConfig, ClassCode, HexId, IdPair, IntxPin, StubConfig, StubError, VirtualFunctionsConfig};

/// `--device`, and `[[device]]` in a topology file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Fields")]
pub struct DeviceConfig {
    /// Its name in trees and messages; always there in a topology file.
    pub id: Option<String>,
    /// The port or root complex of the topology file that it hangs on; by default `--pcie` decides.
    pub on: Option<String>,
    /// Device number on that bus, 0 to 31; by default the next free one.
    pub device: Option<u8>,
    /// Function number, 0 to 7, below a port to 255. Without `on`, one above 0 is a function of the device before.
    pub function: u8,
    /// Which kind of bus it sits on where nothing says its place; by default `--pcie` decides.
    pub attach: Option<Attach>,
    /// NVIDIA peer-to-peer clique.
    pub clique: Option<CliqueId>,
    /// The clique is shown on a device that is no NVIDIA display controller, too.
    pub clique_any_vendor: bool,
    /// BARs whose memory the guest reaches without exits.
    pub direct: BarChoice,
    /// BARs whose memory other host functions of the machine reach by DMA.
    pub p2p: BarChoice,
    /// What it is.
    pub kind: DeviceKind,
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceKind {
    /// A function of the host.
    Vfio(VfioConfig),
    /// An emulated endpoint.
    Stub(Box<StubConfig>),
    /// Functions of the host by the name that a CDI file gives them.
    Cdi(CdiName),
}

/// A host function that vfio-pci holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VfioConfig {
    /// Its folder in sysfs, or its address: `0000:03:00.0` or `03:00.0`. As given; not looked at here.
    pub path: PathBuf,
}

/// Number of a clique, 0 to 15: GPUs and NICs with the same number may reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "u8")]
pub struct CliqueId(u8);

impl CliqueId {
    /// The number.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for CliqueId {
    type Error = DeviceError;

    fn try_from(number: u8) -> Result<Self, DeviceError> {
        if number <= 15 { Ok(Self(number)) } else { Err(DeviceError::Clique { number }) }
    }
}

choice!(
    /// `kind=`.
    Kind { Vfio = "vfio", Stub = "stub" }
);

choice!(
    /// `attach=`.
    Attach {
        /// A PCI Express link or root bus.
        Pcie = "pcie",
        /// A conventional bus behind a PCIe-to-PCI bridge, which is made for all such devices.
        Pci = "pci",
    }
);

/// The keys, as they are written.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Fields {
    path: Option<PathBuf>,
    kind: Option<Kind>,
    #[serde(alias = "name")]
    id: Option<String>,
    cdi: Option<CdiName>,
    on: Option<String>,
    device: Option<u8>,
    function: Option<u8>,
    attach: Option<Attach>,
    clique: Option<CliqueId>,
    clique_any_vendor: bool,
    direct: BarChoice,
    p2p: BarChoice,
    ids: Option<IdPair>,
    class: Option<ClassCode>,
    subsystem: Option<IdPair>,
    link: Option<String>,
    bars: Vec<stub::IndexedBar>,
    bar0: Option<BarConfig>,
    bar1: Option<BarConfig>,
    bar2: Option<BarConfig>,
    bar3: Option<BarConfig>,
    bar4: Option<BarConfig>,
    bar5: Option<BarConfig>,
    rom: Option<Size>,
    vfs: Option<u16>,
    vf_offset: Option<u16>,
    vf_stride: Option<u16>,
    vf_device: Option<HexId>,
    vf_bars: Vec<stub::IndexedBar>,
    msix: Option<u16>,
    msi: Option<u8>,
    intx: Option<IntxPin>,
    flr: Option<bool>,
    dma: Option<bool>,
}

impl TryFrom<Fields> for DeviceConfig {
    type Error = DeviceError;

    fn try_from(mut fields: Fields) -> Result<Self, DeviceError> {
        let cdi = fields.cdi.take();
        let named = match (&cdi, &fields.path, fields.kind) {
            (Some(_), Some(_), _) => return Err(DeviceError::CdiWith { other: "path" }),
            (Some(_), None, Some(Kind::Stub)) => return Err(DeviceError::CdiWith { other: "stub" }),
            _ => cdi.as_ref().map(ToString::to_string).map(PathBuf::from),
        };
        let kind = match (fields.kind, named.or(fields.path.take())) {
            (Some(Kind::Stub), Some(_)) => return Err(DeviceError::StubWithPath),
            (Some(Kind::Stub), None) => DeviceKind::Stub(Box::new(fields.stub()?)),
            (_, Some(path)) if path.as_os_str().is_empty() => return Err(DeviceError::NoDevice),
            (_, Some(path)) => match fields.stub_key() {
                Some(key) => return Err(DeviceError::KeyOfStub { key, path }),
                None => cdi.map_or(DeviceKind::Vfio(VfioConfig { path }), DeviceKind::Cdi),
            },
            (_, None) => return Err(DeviceError::NoDevice),
        };
        if let (Some(on), Some(attach)) = (&fields.on, fields.attach) {
            return Err(DeviceError::OnAndAttach { on: on.clone(), attach });
        }
        if matches!(kind, DeviceKind::Stub(_)) && fields.p2p != BarChoice::ALL {
            return Err(DeviceError::PeerToPeerOfStub);
        }
        if fields.clique.is_none() && fields.clique_any_vendor {
            return Err(DeviceError::AnyVendorWithoutClique);
        }
        Ok(Self {
            id: fields.id,
            on: fields.on,
            device: fields.device,
            function: fields.function.unwrap_or_default(),
            attach: fields.attach,
            clique: fields.clique,
            clique_any_vendor: fields.clique_any_vendor,
            direct: fields.direct,
            p2p: fields.p2p,
            kind,
        })
    }
}

impl Fields {
    /// A key that is there and means nothing for a host function.
    fn stub_key(&self) -> Option<&'static str> {
        let bars = [&self.bar0, &self.bar1, &self.bar2, &self.bar3, &self.bar4, &self.bar5];
        [
            (self.ids.is_some(), "ids"),
            (self.class.is_some(), "class"),
            (self.subsystem.is_some(), "subsystem"),
            (self.link.is_some(), "link"),
            (!self.bars.is_empty(), "bars"),
            (bars.iter().any(|bar| bar.is_some()), "bar0 to bar5"),
            (self.rom.is_some(), "rom"),
            (self.vfs.is_some(), "vfs"),
            (self.vf_offset.is_some(), "vf-offset"),
            (self.vf_stride.is_some(), "vf-stride"),
            (self.vf_device.is_some(), "vf-device"),
            (!self.vf_bars.is_empty(), "vf-bars"),
            (self.msix.is_some(), "msix"),
            (self.msi.is_some(), "msi"),
            (self.intx.is_some(), "intx"),
            (self.flr.is_some(), "flr"),
            (self.dma.is_some(), "dma"),
        ]
        .into_iter()
        .find_map(|(there, key)| there.then_some(key))
    }

    fn stub(&mut self) -> Result<StubConfig, StubError> {
        let single = [self.bar0, self.bar1, self.bar2, self.bar3, self.bar4, self.bar5];
        Ok(StubConfig {
            ids: self.ids,
            class: self.class,
            subsystem: self.subsystem,
            link: self.link.take(),
            bars: stub::merge_bars(single, &self.bars)?,
            rom: self.rom,
            virtual_functions: VirtualFunctionsConfig::of(
                self.vfs,
                [self.vf_offset, self.vf_stride],
                self.vf_device,
                &self.vf_bars,
            )?,
            interrupt: stub::one_interrupt(self.msix, self.msi, self.intx)?,
            flr: self.flr.unwrap_or(true),
            dma: self.dma.unwrap_or(false),
        })
    }
}

impl FromStr for DeviceConfig {
    type Err = FlagError;

    /// The first value may be the path or address of a host function, the CDI name of one, or the word `stub`.
    fn from_str(text: &str) -> Result<Self, FlagError> {
        if cdi::starts_with_name(text) {
            return Flag { name: "--device", first: "cdi" }.parse(&format!("cdi={text}"));
        }
        let first = if text == "stub" || text.starts_with("stub,") { "kind" } else { "path" };
        Flag { name: "--device", first }.parse(text)
    }
}

impl fmt::Display for DeviceConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        match &self.kind {
            DeviceKind::Vfio(vfio) => pairs.pair("path", &vfio.path.display())?,
            DeviceKind::Stub(_) => pairs.pair("kind", &Kind::Stub)?,
            DeviceKind::Cdi(name) => pairs.pair("cdi", name)?,
        }
        pairs.optional("id", self.id.as_ref().map(|id| id as _))?;
        pairs.optional("on", self.on.as_ref().map(|on| on as _))?;
        pairs.optional("device", self.device.as_ref().map(|device| device as _))?;
        if self.function != 0 {
            pairs.pair("function", &self.function)?;
        }
        pairs.optional("attach", self.attach.as_ref().map(|attach| attach as _))?;
        pairs.optional("clique", self.clique.map(CliqueId::get).as_ref().map(|clique| clique as _))?;
        pairs.switch("clique-any-vendor", self.clique_any_vendor, false)?;
        for (key, choice) in [("direct", &self.direct), ("p2p", &self.p2p)] {
            if *choice != BarChoice::ALL {
                pairs.pair(key, choice)?;
            }
        }
        match &self.kind {
            DeviceKind::Vfio(_) | DeviceKind::Cdi(_) => Ok(()),
            DeviceKind::Stub(stub) => stub.print(&mut pairs),
        }
    }
}

/// Keys of a device that do not go together.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum DeviceError {
    /// Neither path nor stub.
    #[error("no device is named; give `path=` with a host function's address or sysfs folder, or `stub` for an emulated one")]
    NoDevice,
    /// A path for a device that is on no host.
    #[error("a stub has no `path`; leave out one of the two")]
    StubWithPath,
    /// A CDI name beside something else.
    #[error("a device with a CDI name has no `{other}`; leave out one of the two")]
    CdiWith {
        /// What else.
        other: &'static str,
    },
    /// A key that only stubs have.
    #[error("key `{key}` is for stubs; the host function {path} shows its own", path = path.display())]
    KeyOfStub {
        /// The key.
        key: &'static str,
        /// The function.
        path: PathBuf,
    },
    /// Two places.
    #[error("`on={on}` says where the device hangs, so that `attach={attach}` has no say; leave out one of the two")]
    OnAndAttach {
        /// What it hangs on.
        on: String,
        /// Which kind of bus.
        attach: Attach,
    },
    /// Nothing to switch off.
    #[error("`p2p` is for functions of the host; none of them reaches the memory of a stub, leave it out")]
    PeerToPeerOfStub,
    /// 16 and above.
    #[error("clique {number} does not exist; cliques are 0 to 15")]
    Clique {
        /// What was given.
        number: u8,
    },
    /// Nothing to show.
    #[error("`clique-any-vendor` has no effect without `clique=`; add it")]
    AnyVendorWithoutClique,
    /// In what describes the stub.
    #[error(transparent)]
    Stub(#[from] StubError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{InterruptConfig, Size};

    fn parsed(text: &str) -> DeviceConfig {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_bare_address_is_a_host_function() {
        let DeviceKind::Vfio(vfio) = parsed("0000:03:00.0").kind else { panic!("no host function") };
        assert_eq!(vfio.path, PathBuf::from("0000:03:00.0"));
    }

    #[test]
    fn a_host_function_has_a_name_and_a_clique() {
        let device = parsed("path=/sys/bus/pci/devices/0000:03:00.0,id=gpu0,clique=0");
        assert_eq!((device.id.as_deref(), device.clique.map(CliqueId::get)), (Some("gpu0"), Some(0)));
    }

    #[test]
    fn a_cdi_name_is_known_by_its_slash_and_equals_sign() {
        let device = parsed("nvidia.com/gpu=gpu0,id=a,clique=1");
        let DeviceKind::Cdi(name) = &device.kind else { panic!("{device:?}") };
        assert_eq!((name.kind(), name.name(), device.id.as_deref()), ("nvidia.com/gpu", "gpu0", Some("a")));
        let sysfs = parsed("path=/sys/bus/pci/devices/0000:03:00.0,id=a");
        assert!(matches!(sysfs.kind, DeviceKind::Vfio(_)));
    }

    #[test]
    fn a_stub_is_described_in_full() {
        let text = "stub,id=gpu0,ids=10de:20b8,class=030200,subsystem=10de:1463,bar0=16M:mem32,bar1=128G:mem64:prefetchable,\
                    msix=8,dma=on,clique=0,link=16GT/s x16";
        let DeviceKind::Stub(stub) = parsed(text).kind else { panic!("no stub") };
        assert_eq!(stub.ids, Some(IdPair { vendor: 0x10DE, device: 0x20B8 }));
        assert_eq!(stub.class.map(ClassCode::value), Some(0x03_0200));
        assert_eq!(stub.bars[1].map(|bar| bar.size), Some(Size(128 << 30)));
        assert_eq!(stub.interrupt, InterruptConfig::MsiX(8));
        assert!(stub.dma && stub.flr);
    }

    #[test]
    fn bars_can_be_a_list() {
        let list = parsed("stub,bars=[0:16M:mem32,1:128G:mem64:prefetchable]");
        assert_eq!(list, parsed("stub,bar0=16M:mem32,bar1=128G:mem64:prefetchable"));
    }

    #[test]
    fn what_is_printed_reads_back() {
        for text in [
            "0000:03:00.0",
            "nvidia.com/gpu=gpu0",
            "cdi=nvidia.com/gpu=0,id=x,clique=3",
            "path=\"/a,b\",id=x,on=dsp0,device=3,function=1,clique=15,clique-any-vendor=on",
            "stub",
            "stub,bar0=4K:mem32,bar2=32:io,intx=B,flr=off",
            "0000:03:00.0,attach=pci,clique=3",
            "stub,rom=64K,vfs=16,vf-offset=2,vf-stride=4,vf-device=101a,vf-bars=[0:256M:mem64:prefetchable,2:16K:mem32]",
            "stub,vfs=1,function=200",
            "stub,ids=1b36:0010,class=010802,subsystem=1af4:1100,link=32GT/s x16,bar0=16K:mem64,msi=4,dma=on",
        ] {
            let device = parsed(text);
            assert_eq!(device.to_string().parse(), Ok(device.clone()), "{device}");
        }
    }

    #[test]
    fn keys_that_contradict_each_other_are_refused() {
        for (text, part) in [
            ("id=gpu0", "no device is named"),
            ("nvidia.com/gpu=gpu0,path=0000:03:00.0", "a device with a CDI name has no `path`"),
            ("nvidia.com/gpu=gpu0,kind=stub", "a device with a CDI name has no `stub`"),
            ("nvidia.com/gpu=gpu0,msix=8", "key `msix` is for stubs; the host function nvidia.com/gpu=gpu0"),
            ("nvidia.com/gpu=", "key `cdi`: `nvidia.com/gpu=` is no CDI name"),
            ("nvidia.com/gpu=gpu 0", "is no CDI name"),
            ("kind=vfio", "no device is named"),
            ("path=\"\"", "no device is named"),
            ("stub,path=0000:03:00.0", "a stub has no `path`"),
            ("0000:03:00.0,msix=8", "key `msix` is for stubs; the host function 0000:03:00.0"),
            ("0000:03:00.0,bar3=4K:mem32", "key `bar0 to bar5` is for stubs"),
            ("0000:03:00.0,clique=16", "key `clique`: clique 16 does not exist; cliques are 0 to 15"),
            ("0000:03:00.0,clique=256", "key `clique`: `256` is no whole number"),
            ("0000:03:00.0,clique-any-vendor=on", "without `clique=`"),
            ("0000:03:00.0,clique=1,clique=2", "key `clique` is given twice"),
            ("0000:03:00.0,clique-any-vendor=on,clique_any_vendor=on", "given twice"),
            ("stub,on=rp0,attach=pci", "`on=rp0` says where the device hangs, so that `attach=pci` has no say"),
            ("stub,vf-stride=2", "`vf-stride` has no effect without `vfs=`"),
            ("stub,vfs=2,vf-device=12", "`12` is no id"),
            ("stub,vfs=257", "vfs=257 is not possible; a stub has at most 256 virtual functions"),
            ("0000:03:00.0,rom=64K", "key `rom` is for stubs"),
            ("stub,id=a,name=b", "key `id` is given twice"),
            ("0000:03:00.0,cliqeu=1", "key `cliqeu` is unknown; did you mean `clique`? Known: path, kind, id"),
        ] {
            let error = text.parse::<DeviceConfig>().unwrap_err().to_string();
            assert!(error.starts_with("--device: ") && error.contains(part), "{text}: {error}");
        }
    }
}
