//! Makes virtio devices around what they use of the host.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::config::{IoEngine, RateLimit, TokenBucket};
use devices::virtio::balloon::{Balloon, BalloonSpec};
use devices::virtio::block::{BlockFunction, BlockSpec, Engine, SERIAL_LEN};
use devices::virtio::console::Console;
use devices::virtio::limit::{BucketSpec, LimitSpec};
use devices::virtio::mem::Mem;
use devices::virtio::net::{NetFunction, NetSpec};
use devices::virtio::rng::Rng;
use devices::virtio::vhost_user::RemoteFunction;
use devices::virtio::vsock::{Vsock, VsockSpec};
use devices::virtio::{Device, Seat, VirtioFunction};
use pci::function::Shared;

use super::{Factory, FunctionError, Order};
use crate::backends::{Backend, offloads};
use crate::kvm::RoutedMsi;
use crate::spec::Virtio;

impl Factory {
    /// The device `name`, for which the host's side is open or can be opened.
    pub(super) fn virtio(&self, order: &Order<'_>, device: &Virtio) -> Result<Shared, FunctionError> {
        let name = order.name;
        let mut seat = Seat { memory: self.memory.clone(), msi: Arc::clone(&self.msi), on: order.placement.into() };
        let backend = self.backends.get(name, device)?;
        let failed = |source| FunctionError::Virtio { source };
        Ok(match (device, backend) {
            (Virtio::Disk(disk), Backend::Image(image)) => {
                let serial = disk.serial.clone().unwrap_or_else(|| name.chars().take(SERIAL_LEN).collect());
                let (queues, queue_size) = (disk.io.queues, disk.io.queue_size);
                let spec = BlockSpec {
                    image,
                    serial,
                    queues,
                    queue_size,
                    limit: limit(&disk.io.rate_limit),
                    engine: engine(disk.io.engine),
                };
                self.share(name, BlockFunction::new(name, spec, seat)?)
            }
            (Virtio::Vsock(vsock), Backend::Listening(socket)) => {
                let listener = socket.listener().map_err(failed)?;
                let spec = VsockSpec { cid: vsock.cid, path: vsock.socket.clone(), listener };
                self.share(name, VirtioFunction::with_device(Vsock::new(name, spec).map_err(failed)?, seat)?)
            }
            (Virtio::Rng(_), Backend::Random(file)) => {
                self.share(name, VirtioFunction::with_device(Rng::new(name, file).map_err(failed)?, seat)?)
            }
            (Virtio::Net(net), Backend::Taps(taps, mac)) => {
                let spec = NetSpec {
                    taps,
                    mac: mac.0,
                    mtu: net.mtu,
                    queue_size: net.queue_size,
                    offloads: offloads(net),
                    limit: limit(&net.rate_limit),
                };
                self.share(name, NetFunction::new(name, spec, seat)?)
            }
            (Virtio::Disk(_) | Virtio::Net(_) | Virtio::Folder(_), Backend::Server(server, spec)) => {
                seat.msi = Arc::new(RoutedMsi::new(self.vm.fd(), self.routes.clone(), order.id, name));
                self.share(name, RemoteFunction::new(name, &spec, server, seat)?)
            }
            (Virtio::Console(_), _) => {
                let (output, input) = self.listeners.console.clone().ok_or(FunctionError::Unknown)?;
                self.share(name, VirtioFunction::with_device(Console::new(name, output, input), seat)?)
            }
            (Virtio::Balloon(balloon), Backend::Balloon(control)) => {
                let spec =
                    BalloonSpec { deflate_on_oom: balloon.deflate_on_oom, free_page_reporting: balloon.free_page_reporting };
                let made = VirtioFunction::with_device(Balloon::new(name, spec, Arc::clone(&control)), seat)?;
                control.connect(made.signals());
                self.share(name, made)
            }
            (Virtio::Memory { .. }, Backend::Memory(control)) => {
                let made = VirtioFunction::with_device(Mem::new(name, Arc::clone(&control)), seat)?;
                control.connect(made.signals());
                self.share(name, made)
            }
            _ => return Err(FunctionError::Unknown),
        })
    }

    fn share<D: Device + 'static>(&self, name: &str, mut function: VirtioFunction<D>) -> Shared {
        function.report_to(self.listener(name));
        Arc::new(Mutex::new(function))
    }
}

fn engine(config: IoEngine) -> Engine {
    match config {
        IoEngine::Auto => Engine::Auto,
        IoEngine::Uring => Engine::Uring,
        IoEngine::Sync => Engine::Sync,
    }
}

fn limit(config: &RateLimit) -> LimitSpec {
    let bucket = |bucket: TokenBucket| BucketSpec {
        size: bucket.size,
        burst: bucket.one_time_burst.unwrap_or(0),
        refill: Duration::from_millis(bucket.refill_ms),
    };
    LimitSpec { bytes: config.bandwidth.map(bucket), requests: config.operations.map(bucket) }
}
