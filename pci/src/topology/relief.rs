//! Decides how much less hot-plug ports would have to keep, or how many fewer of them there would have to be, for a topology to
//! get a plan. For messages: the answer is found by planning again with other values.

use std::collections::BTreeSet;

use super::apertures::{Apertures, Pool};
use super::planner::PlanError;
use super::sizing::STEP;
use super::spec::{HotPlug, NodeKind, NodeSpec, Reserve, Topology};

/// Ways to a plan, each of which is enough by itself. Every value is one that fits where the next larger one does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Relief {
    /// What each hot-plug port may keep at most; the limits are meant together.
    pub keep: Option<Limits>,
    /// How many of the free hot-plug ports may stay, the first ones, and of how many. Those that are the place of a certain device
    /// all stay.
    pub ports: Option<(usize, usize)>,
    /// It is enough if no port is kept as the place of a certain device: those that are free go, and all others keep nothing.
    pub places: bool,
}

/// Most that a hot-plug port keeps, where that has to be less than was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Bytes of its memory window.
    pub memory: Option<u64>,
    /// Bytes of its prefetchable window.
    pub prefetchable: Option<u64>,
    /// Bus numbers.
    pub buses: Option<u8>,
}

/// What runs out, as far as hot-plug ports take part in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scarce {
    Buses,
    Memory,
    Prefetchable,
}

impl Scarce {
    /// What `refused` is about. Hot-plug ports keep no I/O ports.
    const fn of(refused: &PlanError) -> Option<Self> {
        match refused {
            PlanError::Buses { .. }
            | PlanError::RootBusTooHigh { .. }
            | PlanError::RootBusTaken { .. }
            | PlanError::NoRun { .. } => Some(Self::Buses),
            PlanError::Space(shortage) => match shortage.pool {
                Pool::Memory32 => Some(Self::Memory),
                Pool::Memory64 => Some(Self::Prefetchable),
                Pool::Io => None,
            },
            PlanError::Topology(_) | PlanError::Slots { .. } | PlanError::Functions => None,
        }
    }

    /// What a port keeps of it, in bus numbers or in steps of [`STEP`]; `None` where the planner decides.
    fn kept(self, reserve: &Reserve) -> Option<u64> {
        match self {
            Self::Buses => Some(reserve.buses.into()),
            Self::Memory => reserve.memory.map(|size| size.div_ceil(STEP)),
            Self::Prefetchable => reserve.prefetchable.map(|size| size.div_ceil(STEP)),
        }
    }

    /// `limits` with one of it.
    fn limited(self, steps: u64, limits: Limits) -> Limits {
        match self {
            Self::Buses => Limits { buses: Some(u8::try_from(steps).unwrap_or(u8::MAX)), ..limits },
            Self::Memory => Limits { memory: Some(steps.saturating_mul(STEP)), ..limits },
            Self::Prefetchable => Limits { prefetchable: Some(steps.saturating_mul(STEP)), ..limits },
        }
    }

    /// The least that a port can keep, in steps.
    const fn least(self) -> u64 {
        if matches!(self, Self::Buses) { 1 } else { 0 }
    }
}

impl Limits {
    /// `topology` with ports that keep no more.
    fn apply(self, topology: &Topology) -> Topology {
        let mut limited = topology.clone();
        let ports = limited.nodes.iter_mut().filter_map(|node| match &mut node.kind {
            NodeKind::Port(port) => port.hotplug.as_mut(),
            NodeKind::Endpoint(_) => None,
        });
        for HotPlug { reserve, own, .. } in ports {
            let cut = |kept: &mut Option<u64>, most: Option<u64>, least: Option<u64>| {
                if let (Some(kept), Some(most)) = (kept.as_mut(), most) {
                    *kept = (*kept).min(most.max(least.unwrap_or(0)));
                }
            };
            let least = own.unwrap_or_default();
            cut(&mut reserve.memory, self.memory, least.memory);
            cut(&mut reserve.prefetchable, self.prefetchable, least.prefetchable);
            reserve.buses = self.buses.map_or(reserve.buses, |most| reserve.buses.min(most));
        }
        limited
    }
}

impl Topology {
    /// What would make room in `space`, where [`Topology::plan`] `refused` this topology. `None` if hot-plug ports are not what
    /// is in the way.
    #[must_use]
    pub fn relief(&self, space: &Apertures, refused: &PlanError) -> Option<Relief> {
        let scarce = Scarce::of(refused)?;
        let relief = Relief {
            keep: self.keep_less(space, scarce),
            ports: self.fewer_ports(space),
            places: self.fits_without_places(space),
        };
        (relief != Relief::default()).then_some(relief)
    }

    /// Limits with which there is a plan. One after the other, since a plan is refused for the first thing that runs out.
    fn keep_less(&self, space: &Apertures, mut scarce: Scarce) -> Option<Limits> {
        let mut limits = Limits::default();
        for _ in [Scarce::Buses, Scarce::Memory, Scarce::Prefetchable] {
            let kept = hot_plugs(self).filter_map(|hotplug| scarce.kept(&hotplug.reserve)).max()?;
            let limited = |steps: u64| scarce.limited(steps, limits);
            let refused = |limits: Limits| limits.apply(self).plan(space).err();
            let other = |error: &PlanError| Scarce::of(error).is_some_and(|other| other != scarce);
            let most = largest(scarce.least(), kept, |steps| refused(limited(steps)).as_ref().is_none_or(other))?;
            limits = limited(most);
            match refused(limits) {
                None => return Some(limits),
                Some(error) => scarce = Scarce::of(&error)?,
            }
        }
        None
    }

    /// How many of the ports that are free at the start may stay. At least one, or no advice.
    fn fewer_ports(&self, space: &Apertures) -> Option<(usize, usize)> {
        let free = self.free_ports(|hotplug| hotplug.own.is_none());
        let count = u64::try_from(free.len()).ok()?;
        let fits = |stay: u64| {
            let leave = free.iter().skip(usize::try_from(stay).unwrap_or(usize::MAX)).copied().collect();
            self.without(&leave).plan(space).is_ok()
        };
        let stay = usize::try_from(largest(0, count, fits)?).ok()?;
        (stay > 0).then_some((stay, free.len()))
    }

    /// Whether there is a plan without ports that are the place of a certain device.
    fn fits_without_places(&self, space: &Apertures) -> bool {
        if hot_plugs(self).all(|hotplug| hotplug.own.is_none()) {
            return false;
        }
        let mut fewer = self.without(&self.free_ports(|hotplug| hotplug.own.is_some()).into_iter().collect());
        for node in &mut fewer.nodes {
            if let NodeKind::Port(port) = &mut node.kind {
                port.hotplug = port.hotplug.filter(|hotplug| hotplug.own.is_none());
            }
        }
        fewer.plan(space).is_ok()
    }

    /// Which nodes are hot-plug ports of this kind on which nothing hangs.
    fn free_ports(&self, is_kind: impl Fn(&HotPlug) -> bool) -> Vec<usize> {
        let used: BTreeSet<_> = self.nodes.iter().map(|node| &node.on).collect();
        let is_free = |node: &NodeSpec| match &node.kind {
            NodeKind::Port(port) => port.hotplug.as_ref().is_some_and(&is_kind) && !used.contains(&node.name),
            NodeKind::Endpoint(_) => false,
        };
        (0..).zip(&self.nodes).filter(|(_, node)| is_free(node)).map(|(index, _)| index).collect()
    }

    /// The same without the nodes at these places.
    fn without(&self, leave: &BTreeSet<usize>) -> Self {
        let nodes = (0..).zip(&self.nodes).filter(|(index, _)| !leave.contains(index)).map(|(_, node)| node.clone());
        Self { nodes: nodes.collect(), ..self.clone() }
    }
}

/// A value from `least` on that fits, below `above`, where the next one does not; `None` if not even `least` does.
fn largest(least: u64, above: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    let (mut low, mut high) = (least, above);
    if low >= high || !fits(low) {
        return None;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    Some(low)
}

fn hot_plugs(topology: &Topology) -> impl Iterator<Item = &HotPlug> {
    topology.nodes.iter().filter_map(|node| match &node.kind {
        NodeKind::Port(port) => port.hotplug.as_ref(),
        NodeKind::Endpoint(_) => None,
    })
}
