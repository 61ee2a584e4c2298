//! Memory that comes and goes in blocks while the guest runs (virtio 1.2 5.15): the device tells how much the guest is to
//! have, and the driver plugs and unplugs blocks of its region until it has it.
//!
//! There is memory behind the usable part of a region only, and that part grows with what the guest was ever to have: a guest
//! that touches blocks which it has not plugged reaches no more than it could have had. Blocks that the guest gives back lose
//! their pages. A reset of the device changes no block (5.15.6.2), a reset of the machine unplugs them all.

mod control;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use pci::state::{StateError, Writer};
use vm_memory::GuestMemoryMmap;

use super::buffers::{self, Buffers};
use super::function::{Device, Start};
use super::kind::Kind;
use super::ring::{Chain, Ring, Served};
use super::worker::{Stop, Worker};
use crate::complaints::Listener;

pub use control::{MemControl, MemError, Reach, Region, Sizes};
use control::{Outcome, Plugged};

/// `node_id` is valid.
const F_ACPI_PXM: u64 = 1 << 0;
/// The driver leaves blocks alone that are not plugged.
const F_UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;
const QUEUE_SIZES: [u16; 1] = [128];
/// Bytes of a request: type, then address and number of blocks, with padding.
const REQUEST: usize = 24;

/// Types of requests.
mod request {
    pub(super) const PLUG: u16 = 0;
    pub(super) const UNPLUG: u16 = 1;
    pub(super) const UNPLUG_ALL: u16 = 2;
    pub(super) const STATE: u16 = 3;
}

/// What is particular to a memory device.
pub struct Mem {
    thread_name: String,
    control: Arc<MemControl>,
}

impl Mem {
    /// The device `name` of the region that `control` knows.
    #[must_use]
    pub fn new(name: &str, control: Arc<MemControl>) -> Self {
        Self { thread_name: format!("mem-{name}"), control }
    }
}

impl Device for Mem {
    fn kind(&self) -> Kind {
        Kind::Memory
    }

    fn features(&self) -> u64 {
        F_ACPI_PXM | F_UNPLUGGED_INACCESSIBLE
    }

    fn report_to(&mut self, listener: Listener) {
        self.control.report_to(listener);
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config(&self) -> Cow<'_, [u8]> {
        let (region, sizes) = (self.control.region(), self.control.sizes());
        let mut config = Vec::with_capacity(56);
        config.extend(region.block.to_le_bytes());
        config.extend(self.control.node().to_le_bytes());
        config.extend([0; 6]);
        for value in [region.at, region.len, sizes.usable, sizes.plugged, sizes.requested] {
            config.extend(value.to_le_bytes());
        }
        Cow::Owned(config)
    }

    fn save(&self, _: &mut Writer) -> Result<(), StateError> {
        Err(StateError::NotKept { why: "memory that comes in blocks is not kept" })
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let worker = |ring: Ring| {
            let control = Arc::clone(&self.control);
            Worker::start(self.thread_name.clone(), &start.crew, vec![ring.bell().clone()], move |stop| {
                ring.run(stop, |chain, memory| serve(chain, memory, &control, stop));
            })
        };
        start.rings.into_iter().map(worker).collect()
    }
}

/// What to answer in place of going on with a request.
fn broken_off(stop: &Stop) -> Option<Outcome> {
    match () {
        () if stop.stopped() => Some(Outcome::Stopped),
        () if stop.held() => Some(Outcome::Busy),
        () => None,
    }
}

/// Carries out one request.
fn serve(chain: Chain<'_>, memory: &GuestMemoryMmap, control: &MemControl, stop: &Stop) -> Served {
    let Some(Buffers { mut readable, writable, .. }) = Buffers::of(chain, memory).filter(|buffers| buffers.whole) else {
        return Served::Malformed;
    };
    let Some(request) = buffers::take::<REQUEST>(&mut readable) else { return Served::Malformed };
    let [a, b, _, _, _, _, _, _, at @ .., c, d, _, _, _, _, _, _] = request;
    let (at, count) = (u64::from_le_bytes(at), u64::from(u16::from_le_bytes([c, d])));
    let (outcome, state) = match u16::from_le_bytes([a, b]) {
        // One who has to stand still asks the driver to try again; the blocks may be many.
        request::PLUG => (control.plug(at, count, memory, &|| broken_off(stop)), 0),
        request::UNPLUG => (control.unplug(at, count, memory), 0),
        request::UNPLUG_ALL => (control.unplug_all(memory), 0),
        request::STATE => match control.state(at, count) {
            Ok(Plugged::All) => (Outcome::Ack, 0_u16),
            Ok(Plugged::None) => (Outcome::Ack, 1),
            Ok(Plugged::Some) => (Outcome::Ack, 2),
            Err(outcome) => (outcome, 0),
        },
        _ => (Outcome::Error, 0),
    };
    let answer: u16 = match outcome {
        Outcome::Ack => 0,
        Outcome::Nack => 1,
        Outcome::Busy => 2,
        Outcome::Error => 3,
        Outcome::Stopped => return Served::Stopped,
    };
    let mut response = [0; 10];
    let (head, tail) = response.split_at_mut(8);
    head.iter_mut().zip(answer.to_le_bytes()).for_each(|(to, from)| *to = from);
    tail.copy_from_slice(&state.to_le_bytes());
    buffers::scatter(&response, &writable).map_or(Served::Malformed, Served::Used)
}
