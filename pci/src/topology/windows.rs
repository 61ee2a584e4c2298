//! Decides where windows and BARs lie: root complexes share the apertures, then top-down by the offsets that sizing gave.

use std::cmp::Reverse;

use super::apertures::{Apertures, Asks, Pool, Shortage};
use super::outline::Outline;
use super::plan::{Window, Windows};
use super::planner::PlanError;
use super::reserve::Classes;
use super::sizing::{self, Free, Item, Needs, Rule, STEP, What};
use super::spec::{Need, Resource};
use crate::bar::{BarIndex, BarKind};

/// Step of a root complex's I/O range.
const IO_STEP: u64 = 256;

/// Every address.
#[derive(Debug)]
pub(super) struct Addresses {
    /// Which BARs went where.
    pub(super) rule: Rule,
    /// What hot-plug ports keep.
    pub(super) classes: Classes,
    /// By node.
    pub(super) bars: Vec<Placed>,
    /// By node.
    pub(super) windows: Vec<Windows>,
    /// Ranges of each root complex, by root complex.
    pub(super) mem32: Vec<Vec<Window>>,
    /// Likewise.
    pub(super) mem64: Vec<Vec<Window>>,
    /// Likewise; at most one window each.
    pub(super) io: Vec<Vec<Window>>,
}

/// Addresses of one endpoint.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Placed {
    pub(super) bars: [Option<u64>; 6],
    pub(super) rom: Option<u64>,
    pub(super) vf_bars: [Option<u64>; 6],
}

impl Placed {
    fn set(&mut self, what: Resource, at: u64) {
        let register = |bars: &mut [Option<u64>; 6], bar: BarIndex| {
            if let Some(address) = bars.get_mut(usize::from(bar)) {
                *address = Some(at);
            }
        };
        match what {
            Resource::Bar(bar) => register(&mut self.bars, bar),
            Resource::Rom => self.rom = Some(at),
            Resource::VfBar(bar) => register(&mut self.vf_bars, bar),
        }
    }
}

/// Gives every window and BAR its address.
///
/// The plain rule comes first, with less and less kept for hot-plug where the sizes are left to the planner. Where that does
/// not fit, 64-bit prefetchable BARs move below 4 GiB, the smallest sizes first, until it does or the space below 4 GiB runs
/// out. The error is then that of the try that misses least.
pub(super) fn assign(outline: &Outline<'_>, space: &Apertures) -> Result<Addresses, PlanError> {
    let mut classes = Classes::LARGEST;
    let mut best = match shrinking(outline, space, Rule { low_up_to: 0 }, &mut classes) {
        Ok(addresses) => return Ok(addresses),
        Err(shortage) => shortage,
    };
    let movable = if best.pool == Pool::Memory64 { movable_sizes(outline) } else { Vec::new() };
    for low_up_to in movable {
        match shrinking(outline, space, Rule { low_up_to }, &mut classes) {
            Ok(addresses) => return Ok(addresses),
            Err(shortage) if shortage.pool != Pool::Memory64 => break,
            Err(shortage) if shortage.missing() < best.missing() => best = shortage,
            Err(_) => {}
        }
    }
    Err(PlanError::Space(best))
}

/// Tries `rule` with smaller and smaller `classes`.
fn shrinking(outline: &Outline<'_>, space: &Apertures, rule: Rule, classes: &mut Classes) -> Result<Addresses, Box<Shortage>> {
    loop {
        match attempt(outline, space, rule, *classes) {
            Err(shortage) => match classes.smaller(shortage.pool, outline) {
                Some(smaller) => *classes = smaller,
                None => return Err(shortage),
            },
            fits => return fits,
        }
    }
}

/// Sizes of the 64-bit prefetchable BARs that could lie below 4 GiB, ascending.
fn movable_sizes(outline: &Outline<'_>) -> Vec<u64> {
    let needs = outline.entries.iter().flat_map(|entry| entry.needs());
    let movable = |need: Need| {
        let kind = need.each.kind == BarKind::Memory64 && need.each.prefetchable;
        need.size().filter(|size| kind && *size < 1 << 32)
    };
    let mut sizes: Vec<u64> = needs.filter_map(|(_, need)| movable(need)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn attempt(outline: &Outline<'_>, space: &Apertures, rule: Rule, classes: Classes) -> Result<Addresses, Box<Shortage>> {
    let needs = sizing::needs(outline, rule, classes);
    let shared = |pool| {
        let share = Share::new(&space.usable(pool), &needs, pool);
        let fits = share.left.is_empty() && !(pool == Pool::Memory64 && classes.too_generous(outline, share.end));
        if fits { Ok(share) } else { Err(Box::new(shortage(outline, space, &needs, pool, &share))) }
    };
    let (mem32, io, mem64) = (shared(Pool::Memory32)?, shared(Pool::Io)?, shared(Pool::Memory64)?);
    let mut addresses = Addresses {
        rule,
        classes,
        bars: vec![Placed::default(); outline.entries.len()],
        windows: vec![Windows::default(); outline.entries.len()],
        mem32: mem32.roots,
        mem64: mem64.roots,
        io: io.roots,
    };
    for (pool, placed) in [(Pool::Memory32, mem32.placed), (Pool::Memory64, mem64.placed), (Pool::Io, io.placed)] {
        for (what, at) in placed {
            addresses.settle(&needs, pool, what, at);
        }
    }
    Ok(addresses)
}

impl Addresses {
    /// Puts `what` at `at`, and what a window holds at its offsets.
    fn settle(&mut self, needs: &Needs, pool: Pool, what: What, at: u64) {
        let node = match what {
            What::Bar { node, bar } => {
                if let Some(placed) = self.bars.get_mut(node) {
                    placed.set(bar, at);
                }
                return;
            }
            What::Window { node } => node,
        };
        let Some(content) = needs.window(pool, node) else { return };
        let window = Some(Window { base: at, limit: at + (content.size - 1) });
        match pool {
            Pool::Memory64 => self.windows[node].prefetchable = window,
            Pool::Memory32 | Pool::Io => self.windows[node].memory = window,
        }
        for (inner, offset) in &content.items {
            self.settle(needs, pool, *inner, at + offset);
        }
    }
}

/// One pool, divided among the root complexes.
#[derive(Debug)]
struct Share {
    placed: Vec<(What, u64)>,
    /// Windows by root complex.
    roots: Vec<Vec<Window>>,
    /// What found no place.
    left: Vec<What>,
    /// First address above everything placed.
    end: u64,
}

impl Share {
    /// Root complexes with small alignments come first: what they need lies in the gap before the first multiple of a
    /// large one. Each takes what it needs; the last in that order gets all memory that is left.
    fn new(windows: &[Window], needs: &Needs, pool: Pool) -> Self {
        let step = if pool == Pool::Io { IO_STEP } else { STEP };
        let mut order: Vec<usize> = (0..needs.roots.len()).collect();
        let align = |root: &usize| needs.roots[*root].pool(pool).iter().map(|item| item.align).max().unwrap_or(0);
        order.sort_by_key(align);
        let mut share = Self { placed: Vec::new(), roots: vec![Vec::new(); needs.roots.len()], left: Vec::new(), end: 0 };
        let mut rest = windows.to_vec();
        for root in &order {
            let used = share.place(&rest, needs.roots[*root].pool(pool));
            let border = if order.last() == Some(root) && pool != Pool::Io {
                u64::MAX
            } else {
                used.checked_next_multiple_of(step).unwrap_or(u64::MAX)
            };
            (share.roots[*root], rest) = cut(&rest, border);
            share.end = share.end.max(used);
        }
        share
    }

    /// Places `items` in `windows`; returns the first address above them, 0 when there are none.
    fn place(&mut self, windows: &[Window], items: &[Item]) -> u64 {
        let mut items = items.to_vec();
        sizing::sort(&mut items);
        // Address 0 in a BAR means that it has none.
        let usable = windows.iter().map(|window| Window { base: window.base.max(1), limit: window.limit });
        let mut free = Free::new(usable.filter(|window| window.base <= window.limit).collect());
        let mut end = 0;
        for item in items {
            match free.take(item.size, item.align) {
                Some(at) => {
                    self.placed.push((item.what, at));
                    end = end.max(at.saturating_add(item.size));
                }
                None => self.left.push(item.what),
            }
        }
        end
    }
}

/// Divides `windows` into what lies below `border` and the rest. `u64::MAX` is above everything.
fn cut(windows: &[Window], border: u64) -> (Vec<Window>, Vec<Window>) {
    let (mut below, mut above) = (Vec::new(), Vec::new());
    for window in windows.iter().copied() {
        if border == u64::MAX || window.limit < border {
            below.push(window);
        } else if window.base >= border {
            above.push(window);
        } else {
            below.push(Window { base: window.base, limit: border - 1 });
            above.push(Window { base: border, limit: window.limit });
        }
    }
    // A root complex that needs nothing takes nothing.
    if border == 0 { (Vec::new(), windows.to_vec()) } else { (below, above) }
}

fn shortage(outline: &Outline<'_>, space: &Apertures, needs: &Needs, pool: Pool, share: &Share) -> Shortage {
    let boundless = Share::new(&space.unlimited(pool), needs, pool);
    let end = boundless.end;
    let there = space.usable(pool).iter().fold(0u64, |sum, window| sum.saturating_add(window.len()));
    let start = space.unlimited(pool).last().map_or(0, |last| last.base);
    let above = space.usable(pool).last().map_or(start, |last| last.limit.saturating_add(1));
    // Below 4 GiB nothing can be added behind the aperture, so that its place and the gap before it do not count.
    let all = || needs.roots.iter().flat_map(|root| root.pool(pool)).copied();
    let needed = if boundless.left.is_empty() {
        (pool == Pool::Memory32).then(|| sizing::packed(all()))
    } else {
        // No address space has room for it: gaps make no difference.
        Some(all().fold(0, |sum: u64, item| sum.saturating_add(item.size)))
    };
    let mut wishes = Vec::new();
    for what in &share.left {
        collect(outline, needs, pool, *what, &mut wishes);
    }
    let mut order = vec![0; outline.entries.len()];
    for (place, node) in outline.depth_first.iter().enumerate() {
        order[*node] = place;
    }
    // The largest wish of whoever comes first stands for all.
    wishes.sort_by_key(|(node, asks)| (order[*node], Reverse(asks.size())));
    let (node, asks) = wishes.first().copied().unwrap_or((0, Asks::Reserve { size: STEP }));
    let name = |node: usize| outline.entries[node].spec.name.clone();
    wishes.dedup_by_key(|(node, _)| *node);
    Shortage {
        pool,
        name: name(node),
        asks,
        needed: needed.filter(|needed| *needed > there).unwrap_or(there.saturating_add(end.saturating_sub(above))),
        there,
        left_over: wishes.iter().map(|(node, _)| name(*node)).collect(),
        address_bits: space.address_bits,
        enough_bits: space.enough_bits(pool, end).filter(|_| boundless.left.is_empty()),
    }
}

/// Who asks for what in `what`, at any depth.
fn collect(outline: &Outline<'_>, needs: &Needs, pool: Pool, what: What, wishes: &mut Vec<(usize, Asks)>) {
    match what {
        What::Bar { node, bar } => {
            let need = outline.entries[node].needs().find(|(what, _)| *what == bar);
            wishes.extend(need.map(|(bar, need)| (node, Asks::Bar { bar, need })));
        }
        What::Window { node } => {
            let Some(content) = needs.window(pool, node) else { return };
            wishes.extend(content.reserve.map(|size| (node, Asks::Reserve { size })));
            for (inner, _) in &content.items {
                collect(outline, needs, pool, *inner, wishes);
            }
        }
    }
}
