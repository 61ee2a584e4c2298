//! Carries effects out: opens and closes windows, sets memory slots, doorbells and DMA maps. The only place that does.
//!
//! A hidden BAR often comes back to the same place (guests switch decoding off to size it), so its memory slots, doorbells
//! and DMA maps stay until it moves, another BAR takes the place, or it leaves. Guests that read it meanwhile see stale
//! memory of their own device, nothing else; who rings wakes a worker that has nothing to do.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use api::config::{BarChoice, DeviceConfig};
use api::info::BarInfo;
use devices::complaints::{Complaints, chain};
use devices::vfio::Domain;
use devices::vfio::iommu::{DomainError, PeerError};
use log::Level;
use pci::bar::{BarIndex, PORTS, ROM, Size};
use pci::effect::Effect;
use pci::function::{BarPiece, Doorbell, FunctionId, Shared};
use pci::mirror::Mirror;
use pci::sync::lock;
use pci::topology::Window;

use crate::address_space::{Accesses, AddressSpace, Trapped};
use crate::kvm::{Doorbells, Slots};
use crate::mirrors::Mirrors;
use crate::slot_events::SlotEvents;

/// What effects need to know of an endpoint.
pub struct Endpoint {
    /// For messages.
    pub name: String,
    /// The function.
    pub function: Shared,
    /// What its DMA port looks at.
    pub bus_master: Arc<AtomicBool>,
    /// Whether its BAR memory is a host device's and goes into the DMA domain.
    pub hardware: bool,
    /// Who reaches its BARs.
    pub access: BarAccess,
    /// Size and pieces of each BAR.
    pub bars: BTreeMap<BarIndex, (u64, Vec<BarPiece>)>,
    /// Registers of each BAR that only wake somebody.
    pub doorbells: BTreeMap<BarIndex, Vec<Doorbell>>,
}

impl Endpoint {
    /// `at`, for people: an address of memory, whatever it is, or the number of a port, as BAR `bar` is.
    fn place(&self, bar: BarIndex, at: u64) -> String {
        match lock(&self.function).bars().spec(bar) {
            Some(spec) if !spec.is_memory() => format!("port {:#x}", at & !PORTS),
            _ => format!("{at:#x}"),
        }
    }

    /// A function that emulated registers made, with memory of this process alone.
    #[must_use]
    pub fn made_by_registers(name: String, function: Shared) -> Self {
        let made = lock(&function);
        let bars = made.bars().specs().map(|(bar, spec)| (bar, (spec.size, made.bar_layout(bar)))).collect();
        drop(made);
        let (bus_master, access) = (Arc::default(), BarAccess::default());
        Self { name, function, bus_master, hardware: false, access, bars, doorbells: BTreeMap::new() }
    }
}

/// Who reaches the BARs of a device, apart from its own driver. The two are independent: memory that the guest reaches by
/// exits can be a target of DMA, and the other way round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BarAccess {
    /// The guest without exits.
    pub direct: BarChoice,
    /// Other host functions by DMA.
    pub p2p: BarChoice,
}

impl BarAccess {
    /// As configured.
    #[must_use]
    pub const fn of(device: &DeviceConfig) -> Self {
        Self { direct: device.direct, p2p: device.p2p }
    }
}

/// Where BARs of host functions are mapped, so that others reach them by DMA: the DMA domain.
trait PeerMaps: Send + Sync {
    /// As [`Domain::map_bar`].
    ///
    /// # Safety
    ///
    /// As [`Domain::map_bar`].
    unsafe fn map_bar(&self, owner: &str, bar: BarIndex, at: u64, pieces: &[BarPiece]) -> Result<(), PeerError>;
    /// As [`Domain::unmap_bar`].
    fn unmap_bar(&self, at: u64, pieces: &[BarPiece]) -> Result<(), DomainError>;
}

impl PeerMaps for Domain {
    unsafe fn map_bar(&self, owner: &str, bar: BarIndex, at: u64, pieces: &[BarPiece]) -> Result<(), PeerError> {
        // SAFETY: the caller promises it.
        unsafe { self.map_bar(owner, bar, at, pieces) }
    }

    fn unmap_bar(&self, at: u64, pieces: &[BarPiece]) -> Result<(), DomainError> {
        self.unmap_bar(at, pieces)
    }
}

struct Mapped {
    at: u64,
    size: u64,
    reachable: bool,
    slots: Vec<u32>,
    /// Those that KVM took.
    doorbells: Vec<Doorbell>,
    /// Whether the DMA domain has it.
    dma: bool,
}

/// What a BAR cost since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MapCounts {
    /// Memory slots of BARs that were set.
    pub slots: u64,
    /// DMA maps of BARs that were made.
    pub dma: u64,
    /// Doorbells without exits at this moment.
    pub doorbells: u64,
    /// Reads that its function answered.
    pub reads: u64,
    /// Writes that came to its function.
    pub writes: u64,
}

/// Emulated memory above this is served by exits. KVM keeps up to 8 bytes for each page of a slot on hosts without
/// two-dimensional paging (linux: arch/x86/kvm/x86.c, kvm_alloc_memslot_metadata): a sparse BAR of 128 GiB would cost
/// 256 MiB and a tenth of a second at start-up.
const EMULATED_SLOT_MAX: u64 = 1 << 30;

/// Where each BAR is mapped, and the means to change it.
pub struct Mapper {
    slots: Slots,
    /// `None`: they exit.
    doorbells: Option<Doorbells>,
    space: Arc<AddressSpace>,
    domain: Option<Arc<dyn PeerMaps>>,
    endpoints: BTreeMap<FunctionId, Endpoint>,
    mapped: BTreeMap<(FunctionId, BarIndex), Mapped>,
    counts: BTreeMap<(FunctionId, BarIndex), MapCounts>,
    accesses: BTreeMap<(FunctionId, BarIndex), Arc<Accesses>>,
    mirrors: Option<Mirrors>,
    slot_events: Option<Arc<SlotEvents>>,
    /// A guest moves BARs as often as it likes.
    complaints: BTreeMap<FunctionId, Complaints>,
    /// Names of the ports, for messages.
    ports: BTreeMap<FunctionId, String>,
}

impl Mapper {
    /// Nothing mapped. Without `doorbells` the registers that only wake somebody exit as all others.
    #[must_use]
    pub const fn new(slots: Slots, doorbells: Option<Doorbells>, space: Arc<AddressSpace>) -> Self {
        Self {
            slots,
            doorbells,
            space,
            domain: None,
            endpoints: BTreeMap::new(),
            mapped: BTreeMap::new(),
            counts: BTreeMap::new(),
            accesses: BTreeMap::new(),
            mirrors: None,
            slot_events: None,
            complaints: BTreeMap::new(),
            ports: BTreeMap::new(),
        }
    }

    /// Where BARs of host functions are mapped for DMA. Set before the first of them is added.
    pub fn set_domain(&mut self, domain: Option<Arc<Domain>>) {
        self.domain = domain.map(|domain| domain as _);
    }

    /// Shows mirrors of configuration space to the guest.
    pub fn set_mirrors(&mut self, mirrors: Mirrors) {
        self.mirrors = Some(mirrors);
    }

    /// Where events of slots are told.
    pub fn set_slot_events(&mut self, slot_events: Arc<SlotEvents>) {
        self.slot_events = Some(slot_events);
    }

    /// Makes the names of ports known, for messages.
    pub fn name_ports(&mut self, ports: impl Iterator<Item = (FunctionId, String)>) {
        self.ports = ports.collect();
    }

    /// Makes an endpoint known, before any effect names it.
    pub fn add(&mut self, id: FunctionId, endpoint: Endpoint) {
        if endpoint.access != BarAccess::default() {
            let list = |choice: BarChoice| {
                let without: Vec<String> =
                    endpoint.bars.keys().filter(|bar| !choice.has(**bar)).map(ToString::to_string).collect();
                if without.is_empty() { "none".to_owned() } else { without.join(", ") }
            };
            let (trapped, unmapped) = (list(endpoint.access.direct), list(endpoint.access.p2p));
            let name = &endpoint.name;
            log::warn!(
                "{name}: BARs that the guest reaches by exits: {trapped}; that no other device reaches by DMA: {unmapped}"
            );
        }
        self.endpoints.insert(id, endpoint);
    }

    /// The mirror of a function that comes to `at` in ECAM, if there are mirrors and one to spare.
    pub fn mirror(&mut self, at: u64, id: FunctionId) -> Option<Arc<dyn Mirror>> {
        self.mirrors.as_mut()?.add(at, id)
    }

    /// Forgets an endpoint and everything that is mapped of it.
    pub fn remove(&mut self, id: FunctionId) {
        if let Some(mirrors) = &mut self.mirrors {
            mirrors.remove(id, &mut self.slots);
        }
        for bar in 0..=ROM {
            self.unmap((id, bar));
            self.counts.remove(&(id, bar));
            self.accesses.remove(&(id, bar));
        }
        self.endpoints.remove(&id);
        self.complaints.remove(&id);
    }

    /// The memory BARs of an endpoint and who reaches them at this moment.
    #[must_use]
    pub fn bars(&self, id: FunctionId) -> Vec<BarInfo> {
        let Some(endpoint) = self.endpoints.get(&id) else { return Vec::new() };
        let bars = endpoint.bars.iter().map(|(bar, (size, _))| {
            let mapped = self.mapped.get(&(id, *bar)).filter(|mapped| mapped.reachable);
            BarInfo {
                bar: *bar,
                address: mapped.map(|mapped| mapped.at),
                size: *size,
                guest: match mapped {
                    None => "hidden",
                    Some(mapped) if mapped.slots.is_empty() => "exits",
                    Some(_) => "direct",
                },
                dma: match mapped {
                    _ if !endpoint.hardware => "emulated",
                    _ if !endpoint.access.p2p.has(*bar) => "off",
                    None => "unmapped",
                    Some(mapped) if mapped.dma => "mapped",
                    Some(_) => "failed",
                },
            }
        });
        bars.collect()
    }

    /// The memory slots, for RAM.
    pub const fn slots(&mut self) -> &mut Slots {
        &mut self.slots
    }

    /// What each BAR cost.
    pub fn counts(&self) -> impl Iterator<Item = (&str, BarIndex, MapCounts)> + '_ {
        self.counts.iter().filter_map(|(key, counts)| {
            let (mapped, accesses) = (self.mapped.get(key), self.accesses.get(key));
            let counts = MapCounts {
                doorbells: mapped.map_or(0, |mapped| mapped.doorbells.len() as u64),
                reads: accesses.map_or(0, |accesses| accesses.reads()),
                writes: accesses.map_or(0, |accesses| accesses.writes()),
                ..*counts
            };
            Some((self.endpoints.get(&key.0)?.name.as_str(), key.1, counts))
        })
    }

    /// How many doorbells do without exits.
    #[must_use]
    pub fn doorbells(&self) -> u32 {
        self.doorbells.as_ref().map_or(0, Doorbells::in_use)
    }

    /// Carries out the effects of one write. Call with the hierarchy's lock held, so that writes take effect in order.
    pub fn apply(&mut self, effects: &[Effect]) {
        self.place_mirrors(effects);
        for effect in effects {
            match *effect {
                Effect::Map { function, bar, at } => self.map((function, bar), at),
                Effect::Hide { function, bar } => self.hide((function, bar)),
                Effect::Refused { function, bar, at, kept, taken } => self.complain((function, bar), at, kept, taken),
                Effect::Stray { port, prefetchable, window } => self.complain_of_window(port, prefetchable, window),
                Effect::Slot { port, event } => {
                    if let Some(slot_events) = &self.slot_events {
                        slot_events.tell(port, event);
                    }
                }
                Effect::Mirror { .. } => {}
                Effect::BusMaster { function, on } => {
                    if let Some(endpoint) = self.endpoints.get(&function) {
                        endpoint.bus_master.store(on, Ordering::Release);
                    }
                }
            }
        }
    }

    /// Before all else: a slot that is set behind a doorbell waits until KVM has done away with what it kept of the doorbells
    /// before, which takes milliseconds at a start. Mirrors and BARs are never at one place.
    fn place_mirrors(&mut self, effects: &[Effect]) {
        let Some(mirrors) = &mut self.mirrors else { return };
        let mut changed = false;
        for effect in effects {
            if let Effect::Mirror { function, on } = *effect {
                mirrors.place(function, on);
                changed = true;
            }
        }
        if changed {
            mirrors.settle(&mut self.slots);
        }
    }

    /// Closes every window for good, before the functions behind them end. No vCPU runs any more.
    pub fn close(&self) {
        self.space.end();
    }

    /// Takes every BAR out of the DMA domain, once no guest runs. Memory slots end with the VM.
    pub fn release_dma(&mut self) {
        let keys: Vec<_> = self.mapped.iter().filter(|(_, mapped)| mapped.dma).map(|(key, _)| *key).collect();
        for key in keys {
            self.unmap_dma(key);
        }
    }

    fn map(&mut self, key: (FunctionId, BarIndex), at: u64) {
        if self.mapped.get(&key).is_some_and(|mapped| mapped.at != at) {
            self.unmap(key);
        }
        if !self.mapped.contains_key(&key) {
            self.make_room(key, at);
            self.set(key, at);
        }
        if self.mapped.get_mut(&key).is_some_and(|mapped| !std::mem::replace(&mut mapped.reachable, true)) {
            self.open(key, at);
            self.tell_moved();
        }
    }

    fn hide(&mut self, key: (FunctionId, BarIndex)) {
        if let Some(mapped) = self.mapped.get_mut(&key)
            && std::mem::replace(&mut mapped.reachable, false)
        {
            let at = mapped.at;
            for piece in self.pieces(key) {
                self.space.close(at + piece.offset());
            }
            self.tell_moved();
        }
    }

    /// What [`Mapper::bars`] says has changed.
    fn tell_moved(&self) {
        if let Some(slot_events) = &self.slot_events {
            slot_events.tell_moved();
        }
    }

    /// Logs a move that the hierarchy refused.
    fn complain(&mut self, (id, bar): (FunctionId, BarIndex), at: u64, kept: Option<u64>, taken: Option<(FunctionId, BarIndex)>) {
        let Some(endpoint) = self.endpoints.get(&id) else { return };
        let other = taken.and_then(|(other, bar)| Some((self.endpoints.get(&other)?.name.as_str(), bar)));
        let why = match other {
            Some((name, bar)) => format!("where BAR {bar} of {name} is"),
            None => "where its root complex has no BARs".to_owned(),
        };
        let place = |at| endpoint.place(bar, at);
        let at = place(at);
        let result = kept.map_or_else(|| "it is unreachable".to_owned(), |kept| format!("it stays at {}", place(kept)));
        let text = format_args!("{} BAR {bar}: the guest moved it to {at}, {why}; {result}", endpoint.name);
        self.complaints.entry(id).or_default().add(Level::Warn, text);
    }

    /// Logs a bridge window that leads nowhere.
    fn complain_of_window(&mut self, port: FunctionId, prefetchable: bool, window: Window) {
        let Some(name) = self.ports.get(&port) else { return };
        let which = if prefetchable { "prefetchable" } else { "memory" };
        let text = format_args!(
            "{name}: the guest moved its {which} window to {window}, where its root complex has no addresses; nothing is reachable through it"
        );
        self.complaints.entry(port).or_default().add(Level::Warn, text);
    }

    /// Drops what hidden BARs still hold where `key` shall go.
    fn make_room(&mut self, key: (FunctionId, BarIndex), at: u64) {
        let Some((size, _)) = self.endpoints.get(&key.0).and_then(|endpoint| endpoint.bars.get(&key.1)) else { return };
        let end = at.saturating_add(*size);
        let overlaps = |mapped: &Mapped| !mapped.reachable && mapped.at < end && at < mapped.at.saturating_add(mapped.size);
        let stale: Vec<_> = self.mapped.iter().filter(|(_, mapped)| overlaps(mapped)).map(|(key, _)| *key).collect();
        for key in stale {
            self.unmap(key);
        }
    }

    /// Gives a BAR at `at` its slots, its place in the DMA domain and its doorbells. It is not reachable by exits yet.
    fn set(&mut self, key: (FunctionId, BarIndex), at: u64) {
        let Some((size, _)) = self.endpoints.get(&key.0).and_then(|endpoint| endpoint.bars.get(&key.1)) else { return };
        let size = *size;
        let (slots, dma, doorbells) = (self.set_slots(key, at), self.set_dma(key, at), self.set_doorbells(key, at));
        let counts = self.counts.entry(key).or_default();
        counts.slots += slots.len() as u64;
        counts.dma += u64::from(dma);
        self.mapped.insert(key, Mapped { at, size, reachable: false, slots, doorbells, dma });
    }

    /// Lets the guest reach the direct pieces without exits. Those that KVM refuses exit.
    fn set_slots(&mut self, key: (FunctionId, BarIndex), at: u64) -> Vec<u32> {
        let mut slots = Vec::new();
        let Some(endpoint) = self.endpoints.get(&key.0).filter(|endpoint| endpoint.access.direct.has(key.1)) else {
            return slots;
        };
        for piece in endpoint.bars.get(&key.1).into_iter().flat_map(|(_, pieces)| pieces) {
            let BarPiece::Direct { offset, len, pages } = *piece else { continue };
            if !endpoint.hardware && len > EMULATED_SLOT_MAX {
                continue;
            }
            // SAFETY: a function keeps the memory of its direct pieces mapped as long as it lives. `Endpoint::function` holds it
            // until `unmap` has removed the slot, or until the machine, which ends its vCPU threads before, lets go of all.
            match unsafe { self.slots.add(at + offset, len, pages.host_address) } {
                Ok(slot) => slots.push(slot),
                Err(error) => {
                    let text = format_args!(
                        "{} BAR {} at {:#x}: its {} leave the guest one access at a time",
                        endpoint.name,
                        key.1,
                        at + offset,
                        Size(len)
                    );
                    self.complaints.entry(key.0).or_default().add_error(Level::Error, text, &error);
                }
            }
        }
        slots
    }

    /// Lets other host functions reach the BAR of one. Whether they do.
    fn set_dma(&mut self, key: (FunctionId, BarIndex), at: u64) -> bool {
        let (Some(endpoint), Some(domain)) = (self.endpoints.get(&key.0), &self.domain) else { return false };
        let Some((_, pieces)) = endpoint.bars.get(&key.1) else { return false };
        if !endpoint.hardware || !endpoint.access.p2p.has(key.1) {
            return false;
        }
        // SAFETY: a function keeps the memory of its direct pieces mapped as long as it lives. `Endpoint::function` holds it until
        // `unmap` has taken the BAR out of the domain, or until the machine, which ends its DMA domain before, lets go of all.
        match unsafe { domain.map_bar(&endpoint.name, key.1, at, pieces) } {
            Ok(()) => true,
            Err(error) => {
                self.complaints.entry(key.0).or_default().add(Level::Warn, format_args!("{}", chain(&error)));
                false
            }
        }
    }

    /// Has KVM signal doorbells in place of an exit. Those from the first on that it refuses exit.
    fn set_doorbells(&mut self, key: (FunctionId, BarIndex), at: u64) -> Vec<Doorbell> {
        let mut taken = Vec::new();
        let (Some(endpoint), Some(doorbells)) = (self.endpoints.get(&key.0), &mut self.doorbells) else { return taken };
        for doorbell in endpoint.doorbells.get(&key.1).into_iter().flatten() {
            match doorbells.add(at + doorbell.offset, doorbell.event.as_fd()) {
                Ok(()) => taken.push(doorbell.clone()),
                Err(error) => {
                    let text = format_args!("{} BAR {}: doorbells from here on cost the guest an exit", endpoint.name, key.1);
                    self.complaints.entry(key.0).or_default().add_error(Level::Warn, text, &error);
                    break;
                }
            }
        }
        taken
    }

    fn unmap(&mut self, key: (FunctionId, BarIndex)) {
        self.hide(key);
        self.unmap_dma(key);
        let Some(mapped) = self.mapped.remove(&key) else { return };
        for slot in mapped.slots {
            self.slots.remove(slot);
        }
        if let Some(doorbells) = &mut self.doorbells {
            mapped.doorbells.iter().for_each(|doorbell| doorbells.remove(mapped.at + doorbell.offset, doorbell.event.as_fd()));
        }
    }

    fn unmap_dma(&mut self, key: (FunctionId, BarIndex)) {
        let Some(mapped) = self.mapped.get_mut(&key).filter(|mapped| mapped.dma) else { return };
        mapped.dma = false;
        let pieces = self.endpoints.get(&key.0).and_then(|endpoint| endpoint.bars.get(&key.1));
        if let (Some(domain), Some((_, pieces))) = (&self.domain, pieces)
            && let Err(error) = domain.unmap_bar(mapped.at, pieces)
        {
            self.complaints.entry(key.0).or_default().add(Level::Error, format_args!("{}", chain(&error)));
        }
    }

    fn open(&mut self, key: (FunctionId, BarIndex), at: u64) {
        let accesses = Arc::clone(self.accesses.entry(key).or_default());
        let Some(endpoint) = self.endpoints.get(&key.0) else { return };
        for piece in self.pieces(key) {
            match *piece {
                BarPiece::Trapped { offset, len } => {
                    let (function, accesses) = (Arc::clone(&endpoint.function), Arc::clone(&accesses));
                    self.space.open(at + offset, len, Trapped { function, bar: key.1, offset, accesses });
                }
                // SAFETY: a function keeps the memory of its direct pieces mapped as long as it lives (`pci::function::Pages`).
                // `Endpoint::function` holds it until its windows are closed: by `unmap` when it leaves, by `close` when the
                // machine ends.
                BarPiece::Direct { offset, len, pages } => unsafe { self.space.open_memory(at + offset, len, pages) },
            }
        }
    }

    fn pieces(&self, key: (FunctionId, BarIndex)) -> &[BarPiece] {
        let bar = self.endpoints.get(&key.0).and_then(|endpoint| endpoint.bars.get(&key.1));
        bar.map_or(&[], |(_, pieces)| pieces)
    }
}

#[cfg(test)]
mod tests;
