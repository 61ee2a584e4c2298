//! A network interface over a tap of the host (virtio 1.2 5.1): one pair of queues for each queue of the tap, and a control
//! queue.
//!
//! | question | module |
//! |---|---|
//! | how is a tap opened and set? | [`tap`] |
//! | when do packets move, and what is waited for? | `lane` |
//! | how do packets reach the guest? | `receive` |
//! | how do packets leave it? | `transmit` |
//! | what may the driver change while it runs? | `control` |

pub(in crate::virtio) mod control;
mod lane;
mod receive;
pub mod tap;
#[cfg(test)]
mod tests;
mod transmit;

use std::borrow::Cow;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pci::state::{Reader, StateError, Writer};
use pci::sync::lock;
use thiserror::Error;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU,
    VIRTIO_NET_F_STATUS,
};

use super::function::{Device, Seat, Start, VirtioError, VirtioFunction};
use super::kind::Kind;
use super::limit::{Limit, LimitSpec};
use super::ring::Ring;
use super::worker::{Stop, Worker};
use crate::complaints::{Complaints, Listener};
use control::{Control, Setting};
use lane::Lane;
use receive::Receiver;
use tap::{Offloads, Tap};

/// Bytes of the header before each packet: `struct virtio_net_hdr` with the number of buffers.
pub const HEADER: usize = 12;
/// Bytes of the largest packet with its header: what a segment of large TCP may have, and the link layer's own.
const LARGEST: usize = HEADER + 14 + 4 + 65_535;
/// Bytes of a packet's link layer: addresses, type, one VLAN tag.
const LINK_LAYER: usize = 18;
/// Bytes of a packet, unless the interface says otherwise.
const MTU: u16 = 1500;
/// Entries of the control queue.
pub(in crate::virtio) const CONTROL_QUEUE: u16 = 64;
/// Most pairs of queues: what vectors and doorbells have room for, with the control queue.
const MAX_PAIRS: usize = 16;

/// An interface to make.
#[derive(Debug, Clone)]
pub struct NetSpec {
    /// One queue of the tap for each pair of queues, 1 to [`MAX_PAIRS`].
    pub taps: Vec<Arc<Tap>>,
    /// The guest's address.
    pub mac: [u8; 6],
    /// Largest packet, announced to the guest.
    pub mtu: Option<u16>,
    /// Entries of each queue, a power of two.
    pub queue_size: u16,
    /// What may be left to the other side, in both directions.
    pub offloads: Offloads,
    /// How much may pass, in each direction and queue.
    pub limit: LimitSpec,
}

/// An interface as a PCI function.
pub type NetFunction = VirtioFunction<Net>;

impl NetFunction {
    /// The interface `name` (for its threads and messages).
    pub fn new(name: &str, spec: NetSpec, seat: Seat) -> Result<Self, NetError> {
        let net = Net::new(name, spec)?;
        Self::with_device(net, seat).map_err(|source| NetError::Function { name: name.to_owned(), source })
    }
}

/// What is particular to a network interface.
pub struct Net {
    name: String,
    spec: NetSpec,
    sizes: Vec<u16>,
    config: Vec<u8>,
    complaints: Arc<Mutex<Complaints>>,
    /// What the driver has set, from its start to the reset.
    setting: Arc<Mutex<Option<Setting>>>,
}

impl Net {
    fn new(name: &str, spec: NetSpec) -> Result<Self, NetError> {
        let pairs = spec.taps.len();
        let count = u16::try_from(pairs).ok().filter(|_| (1..=MAX_PAIRS).contains(&pairs));
        let count = count.ok_or_else(|| NetError::Pairs { name: name.to_owned(), pairs })?;
        let mut sizes = vec![spec.queue_size; 2 * pairs];
        sizes.push(CONTROL_QUEUE);
        // `struct virtio_net_config`: address, status with the link up, pairs, MTU.
        let mtu = spec.mtu.unwrap_or(MTU);
        let config = [spec.mac.as_slice(), &[1, 0], &count.to_le_bytes(), &mtu.to_le_bytes()].concat();
        Ok(Self { name: name.to_owned(), spec, sizes, config, complaints: Arc::default(), setting: Arc::default() })
    }

    /// Bytes that a packet may have, with its header.
    fn largest(&self, features: u64) -> usize {
        let large = [VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO];
        if large.into_iter().any(|bit| features & 1 << bit != 0) {
            LARGEST
        } else {
            HEADER + LINK_LAYER + usize::from(self.spec.mtu.unwrap_or(MTU))
        }
    }
}

impl Device for Net {
    fn kind(&self) -> Kind {
        Kind::Net
    }

    fn features(&self) -> u64 {
        let checksum = self.spec.offloads.checksum;
        let offered = [
            (true, VIRTIO_NET_F_MAC),
            (true, VIRTIO_NET_F_STATUS),
            (true, VIRTIO_NET_F_MRG_RXBUF),
            (true, VIRTIO_NET_F_CTRL_VQ),
            (self.spec.taps.len() > 1, VIRTIO_NET_F_MQ),
            (self.spec.mtu.is_some(), VIRTIO_NET_F_MTU),
            (checksum, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS),
        ];
        bits(&offered) | offload_features(self.spec.offloads)
    }

    fn report_to(&mut self, listener: Listener) {
        lock(&self.complaints).report_to(listener);
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.sizes
    }

    fn config(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.config)
    }

    fn start(&mut self, mut start: Start) -> io::Result<Vec<Worker>> {
        let features = start.features;
        let all = self.spec.taps.len();
        // Without the feature there is one pair, and the control queue follows it (virtio 1.2 5.1.2).
        let pairs = if features & 1 << VIRTIO_NET_F_MQ == 0 { 1 } else { all };
        let first = Setting { pairs: 1, offloads: features };
        let control = Control { setting: self.setting.clone(), taps: self.spec.taps.clone(), pairs };
        let setting = lock(&self.setting).get_or_insert(first).to_owned();
        control.set_offloads(setting.offloads);
        control.set_pairs(setting.pairs)?;
        let receiver = Receiver { mergeable: features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0, largest: self.largest(features) };
        let mut workers = Vec::new();
        for (pair, tap) in self.spec.taps.iter().take(pairs).enumerate() {
            let lane = |ring: Ring| {
                let limit = Limit::new(self.spec.limit, Instant::now());
                let bells = vec![ring.bell().clone()];
                (bells, Lane { name: self.name.clone(), tap: tap.clone(), ring, limit, complaints: self.complaints.clone() })
            };
            if let Some((bells, lane)) = start.ring(2 * pair).map(lane) {
                let name = format!("rx{pair}-{}", self.name);
                workers.push(Worker::start(name, &start.crew, bells, move |stop| receiver.run(lane, stop))?);
            }
            if let Some((bells, lane)) = start.ring(2 * pair + 1).map(lane) {
                let name = format!("tx{pair}-{}", self.name);
                workers.push(Worker::start(name, &start.crew, bells, move |stop| transmit::run(lane, stop))?);
            }
        }
        if let Some(ring) = start.ring(2 * pairs) {
            let bells = vec![ring.bell().clone()];
            let name = format!("ctl-{}", self.name);
            workers.push(Worker::start(name, &start.crew, bells, move |stop| control_queue(ring, stop, &control))?);
        }
        Ok(workers)
    }

    fn save(&self, writer: &mut Writer) -> Result<(), StateError> {
        let setting = *lock(&self.setting);
        writer.bool(setting.is_some());
        if let Some(setting) = setting {
            writer.count(setting.pairs);
            writer.u64(setting.offloads);
        }
        Ok(())
    }

    fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), StateError> {
        let setting = if reader.bool()? {
            let pairs = reader.u32()?;
            let known = usize::try_from(pairs).ok().filter(|pairs| (1..=self.spec.taps.len()).contains(pairs));
            let known = known.ok_or_else(|| reader.wrong("a number of pairs that the interface has", pairs))?;
            Some(Setting { pairs: known, offloads: reader.u64()? })
        } else {
            None
        };
        *lock(&self.setting) = setting;
        Ok(())
    }

    fn reset(&mut self) {
        *lock(&self.setting) = None;
    }
}

fn control_queue(ring: Ring, stop: &Stop, control: &Control) {
    ring.run(stop, |chain, memory| control::serve(chain, memory, |command| control.obey(command)));
}

/// Features of these offloads, in both directions. Without checksums there are none (virtio 1.2 5.1.3.1).
pub(in crate::virtio) fn offload_features(offloads: Offloads) -> u64 {
    let Offloads { checksum, tcp4, tcp6, ecn, udp } = offloads;
    let tcp = checksum && (tcp4 || tcp6);
    bits(&[
        (checksum, VIRTIO_NET_F_CSUM),
        (checksum, VIRTIO_NET_F_GUEST_CSUM),
        (checksum && tcp4, VIRTIO_NET_F_HOST_TSO4),
        (checksum && tcp4, VIRTIO_NET_F_GUEST_TSO4),
        (checksum && tcp6, VIRTIO_NET_F_HOST_TSO6),
        (checksum && tcp6, VIRTIO_NET_F_GUEST_TSO6),
        (tcp && ecn, VIRTIO_NET_F_HOST_ECN),
        (tcp && ecn, VIRTIO_NET_F_GUEST_ECN),
        (checksum && udp, VIRTIO_NET_F_HOST_UFO),
        (checksum && udp, VIRTIO_NET_F_GUEST_UFO),
    ])
}

fn bits(features: &[(bool, u32)]) -> u64 {
    features.iter().filter(|(on, _)| *on).fold(0, |features, (_, bit)| features | 1 << bit)
}

/// An interface that cannot be made.
#[derive(Debug, Error)]
pub enum NetError {
    /// Too many queues.
    #[error("{name} has {pairs} pairs of queues; 1 to {MAX_PAIRS} are possible")]
    Pairs {
        /// The interface.
        name: String,
        /// Asked for.
        pairs: usize,
    },
    /// The function.
    #[error("cannot make the interface {name}")]
    Function {
        /// The interface.
        name: String,
        /// Why.
        #[source]
        source: VirtioError,
    },
}
