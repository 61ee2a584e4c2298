//! Decides how large each bridge window is and how its content lies in it: bottom-up, largest alignment first.
//!
//! Which window a BAR goes to: 64-bit prefetchable BARs to the prefetchable one, all others to the memory window, which
//! lies below 4 GiB. [`Rule::low_up_to`] moves small 64-bit prefetchable BARs to the memory window too. Software accepts
//! that (linux: drivers/pci/pci.c, `pci_find_parent_resource`), and large BARs then pack at their own stride: 128 GiB and
//! 32 MiB in one window take 256 GiB, since the next window starts at a multiple of 128 GiB.

use std::cmp::Reverse;

use super::apertures::Pool;
use super::outline::{On, Outline};
use super::plan::Window;
use super::reserve::{self, Classes};
use super::spec::{Need, Resource};
use crate::bar::{BarKind, BarSpec};

/// Step of a bridge's memory windows (PCIe 6.0 7.5.1.3.8).
pub(super) const STEP: u64 = 1 << 20;

/// No two memory BARs share a page, so that each can be mapped by itself.
const PAGE: u64 = 4096;

/// Which window each BAR goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rule {
    /// 64-bit prefetchable BARs of at most this size go below 4 GiB; 0 for none.
    pub(super) low_up_to: u64,
}

impl Rule {
    pub(super) fn pool(self, need: Need) -> Pool {
        let BarSpec { kind, prefetchable, .. } = need.each;
        match kind {
            BarKind::Io => Pool::Io,
            BarKind::Memory64 if prefetchable && need.size().is_none_or(|size| size > self.low_up_to) => Pool::Memory64,
            BarKind::Memory64 | BarKind::Memory32 => Pool::Memory32,
        }
    }

    /// Whether a 64-bit prefetchable BAR goes below 4 GiB.
    pub(super) fn moves(self, need: Need) -> bool {
        need.each.kind == BarKind::Memory64 && need.each.prefetchable && self.pool(need) == Pool::Memory32
    }
}

/// What takes part of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Bar { node: usize, bar: Resource },
    Window { node: usize },
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) what: What,
    pub(super) size: u64,
    pub(super) align: u64,
}

impl Item {
    /// What a resource takes.
    pub(super) fn new(what: What, need: Need) -> Self {
        let least = if need.each.is_memory() { PAGE } else { need.each.size };
        // What 64 bits cannot say fits nowhere.
        let size = need.size().map_or(u64::MAX, |size| size.max(least));
        Self { what, size, align: need.each.size.max(least) }
    }
}

/// Addresses that are free, in ascending order.
#[derive(Debug, Clone)]
pub(crate) struct Free {
    spans: Vec<Window>,
}

impl Free {
    pub(crate) const fn new(spans: Vec<Window>) -> Self {
        Self { spans }
    }

    /// Takes the lowest `size` bytes at a multiple of `align`, a power of two.
    pub(crate) fn take(&mut self, size: u64, align: u64) -> Option<u64> {
        for index in 0..self.spans.len() {
            let span = self.spans[index];
            let Some(at) = span.base.checked_next_multiple_of(align) else { continue };
            if !span.contains(at, size) {
                continue;
            }
            let last = at + (size - 1);
            let before = (at > span.base).then(|| Window { base: span.base, limit: at - 1 });
            let after = (last < span.limit).then(|| Window { base: last + 1, limit: span.limit });
            self.spans.splice(index..=index, before.into_iter().chain(after));
            return Some(at);
        }
        None
    }
}

/// Largest alignment first, then largest size: what is left between large items is filled by small ones.
pub(super) fn sort(items: &mut [Item]) {
    items.sort_by_key(|item| (Reverse(item.align), Reverse(item.size)));
}

/// A bridge window and how its content lies in it.
#[derive(Debug, Clone)]
pub(super) struct Content {
    /// Bytes, a multiple of [`STEP`].
    pub(super) size: u64,
    /// Power of two, at least [`STEP`].
    pub(super) align: u64,
    /// Offsets from the window's base.
    pub(super) items: Vec<(What, u64)>,
    /// Bytes kept for hot-plug, where they and not the items make the window as large as it is.
    pub(super) reserve: Option<u64>,
}

/// Everything's size, before anything has an address.
#[derive(Debug)]
pub(super) struct Needs {
    /// Memory windows by node.
    pub(super) memory: Vec<Option<Content>>,
    /// Prefetchable windows by node.
    pub(super) prefetchable: Vec<Option<Content>>,
    /// What lies directly on each root bus.
    pub(super) roots: Vec<BusNeeds>,
}

/// What lies directly on a bus.
#[derive(Debug, Clone, Default)]
pub(super) struct BusNeeds {
    pub(super) memory32: Vec<Item>,
    pub(super) memory64: Vec<Item>,
    pub(super) io: Vec<Item>,
}

impl BusNeeds {
    /// Undoes that items were collected from the last to the first.
    fn in_bus_order(mut self) -> Self {
        for items in [&mut self.memory32, &mut self.memory64, &mut self.io] {
            items.reverse();
        }
        self
    }

    pub(super) fn pool(&self, pool: Pool) -> &[Item] {
        match pool {
            Pool::Memory32 => &self.memory32,
            Pool::Memory64 => &self.memory64,
            Pool::Io => &self.io,
        }
    }
}

impl Needs {
    pub(super) fn window(&self, pool: Pool, node: usize) -> Option<&Content> {
        match pool {
            Pool::Memory32 => self.memory.get(node)?.as_ref(),
            Pool::Memory64 => self.prefetchable.get(node)?.as_ref(),
            Pool::Io => None,
        }
    }
}

/// Sizes every window under `rule`, with what hot-plug ports keep by `classes`.
pub(super) fn needs(outline: &Outline<'_>, rule: Rule, classes: Classes) -> Needs {
    let count = outline.entries.len();
    let mut needs = Needs {
        memory: vec![None; count],
        prefetchable: vec![None; count],
        roots: vec![BusNeeds::default(); outline.root_buses.len()],
    };
    // What lies directly below each port. Children come before parents, so that it is complete when the port is reached.
    let mut below: Vec<BusNeeds> = vec![BusNeeds::default(); count];
    for node in outline.depth_first.iter().rev().copied() {
        let entry = &outline.entries[node];
        let own = std::mem::take(&mut below[node]).in_bus_order();
        let kept = classes.of(outline, node).unwrap_or_default();
        needs.memory[node] = keep(pack(own.memory32), kept.memory);
        needs.prefetchable[node] = keep(pack(own.memory64), kept.prefetchable);
        let bus = match entry.on {
            On::RootComplex(root) => &mut needs.roots[root],
            On::Node(parent) => &mut below[parent],
        };
        let window = |content: &Content| Item { what: What::Window { node }, size: content.size, align: content.align };
        bus.memory32.extend(needs.memory[node].as_ref().map(window));
        bus.memory64.extend(needs.prefetchable[node].as_ref().map(window));
        let own: Vec<(Resource, Need)> = entry.needs().collect();
        for (bar, need) in own.into_iter().rev() {
            let items = match rule.pool(need) {
                Pool::Memory32 => &mut bus.memory32,
                Pool::Memory64 => &mut bus.memory64,
                Pool::Io => &mut bus.io,
            };
            items.push(Item::new(What::Bar { node, bar }, need));
        }
    }
    needs.roots = needs.roots.into_iter().map(BusNeeds::in_bus_order).collect();
    needs
}

/// Lays `items` into a window of their own. A window that no address space can hold gets a size that nothing can hold.
fn pack(mut items: Vec<Item>) -> Option<Content> {
    sort(&mut items);
    let align = items.first()?.align.max(STEP);
    let mut free = Free::new(vec![Window { base: 0, limit: u64::MAX }]);
    let mut size = Some(0u64);
    let mut placed = Vec::with_capacity(items.len());
    for item in &items {
        let at = free.take(item.size, item.align);
        let end = at.and_then(|at| at.checked_add(item.size));
        size = size.zip(end).map(|(size, end)| size.max(end));
        placed.push((item.what, at.unwrap_or(0)));
    }
    let size = size.and_then(|size| size.checked_next_multiple_of(STEP)).unwrap_or(u64::MAX);
    Some(Content { size, align, items: placed, reserve: None })
}

/// Bytes of a window that holds `items`, at an address that suits them.
pub(super) fn packed(items: impl Iterator<Item = Item>) -> u64 {
    pack(items.collect()).map_or(0, |content| content.size)
}

/// Makes a window at least `reserve` bytes large, a multiple of [`STEP`].
fn keep(content: Option<Content>, reserve: u64) -> Option<Content> {
    if reserve == 0 {
        return content;
    }
    let align = reserve::alignment(reserve);
    let own = content.unwrap_or(Content { size: 0, align: STEP, items: Vec::new(), reserve: None });
    let grows = reserve > own.size || align > own.align;
    Some(Content {
        size: own.size.max(reserve),
        align: own.align.max(align),
        items: own.items,
        reserve: grows.then_some(reserve),
    })
}
