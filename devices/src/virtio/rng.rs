//! Random numbers for the guest (virtio 1.2 5.4): each buffer that the driver offers is filled from a device of the host.
//!
//! Reading never waits: what the source does not have at once comes from the kernel's generator, `/dev/urandom`.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::sync::Arc;

use vm_memory::{GuestMemoryMmap, ReadVolatile, VolatileMemoryError, VolatileSlice};

use super::buffers::Buffers;
use super::function::{Device, Start};
use super::kind::Kind;
use super::ring::{Chain, Ring, Served};
use super::worker::Worker;

/// Where bytes come from that a source does not have.
pub(crate) const KERNEL: &str = "/dev/urandom";
/// Most bytes that one buffer gets, so that a stop does not wait for a large one.
const MOST: usize = 64 << 10;
const QUEUE_SIZES: [u16; 1] = [256];

/// What is particular to a source of random numbers.
pub struct Rng {
    thread_name: String,
    source: Arc<Source>,
}

#[derive(Debug)]
struct Source {
    /// Reads of it do not wait.
    first: File,
    kernel: File,
}

impl Rng {
    /// The device `name` that reads `source`, which must be open so that reads do not wait (`O_NONBLOCK`).
    pub fn new(name: &str, source: File) -> io::Result<Self> {
        let source = Source { first: source, kernel: File::open(KERNEL)? };
        Ok(Self { thread_name: format!("rng-{name}"), source: Arc::new(source) })
    }
}

impl Device for Rng {
    fn kind(&self) -> Kind {
        Kind::Entropy
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&[])
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let crew = start.crew;
        let worker = |ring: Ring| {
            let source = self.source.clone();
            Worker::start(self.thread_name.clone(), &crew, vec![ring.bell().clone()], move |stop| {
                ring.run(stop, |chain, memory| source.serve(chain, memory));
            })
        };
        start.rings.into_iter().map(worker).collect()
    }
}

impl Source {
    fn serve(&self, chain: Chain<'_>, memory: &GuestMemoryMmap) -> Served {
        let buffers = Buffers::of(chain, memory).filter(|buffers| buffers.whole && buffers.readable.is_empty());
        let Some(Buffers { writable, .. }) = buffers else { return Served::Malformed };
        let mut left = MOST;
        for slice in &writable {
            let Ok(part) = slice.subslice(0, slice.len().min(left)) else { break };
            if self.fill(part).is_none() {
                break;
            }
            left -= part.len();
        }
        Served::Used(u32::try_from(MOST - left).unwrap_or(0))
    }

    fn fill(&self, mut slice: VolatileSlice<'_>) -> Option<()> {
        let mut files = [&self.first, &self.kernel].into_iter();
        let mut file = files.next()?;
        while !slice.is_empty() {
            match (&mut &*file).read_volatile(&mut slice) {
                Ok(count @ 1..) => slice = slice.offset(count).ok()?,
                Err(VolatileMemoryError::IOError(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => file = files.next()?,
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::{DATA, Driver, WRITE, survives_hostile_rings};

    fn kernel() -> Rng {
        Rng::new("rng0", File::open(KERNEL).unwrap()).unwrap()
    }

    #[test]
    fn every_part_of_a_buffer_is_filled() {
        let mut driver = Driver::started(kernel());
        driver.send(0, &[(DATA, 100, WRITE), (DATA + 0x1000, 3000, WRITE)]);
        assert_eq!(driver.answer(0).len, 3100);
        driver.wait("an interrupt", |driver| driver.sent() == [0x41]);
        let bytes = [driver.bytes(DATA, 100), driver.bytes(DATA + 0x1000, 3000)].concat();
        let different: std::collections::BTreeSet<u8> = bytes.iter().copied().collect();
        assert!(different.len() > 200, "{}", different.len());
        assert_eq!(driver.bytes(DATA + 100, 16), [0; 16], "and nothing else");
    }

    #[test]
    fn a_large_buffer_is_filled_in_part() {
        let mut driver = Driver::started(kernel());
        driver.send(0, &[(DATA, 1 << 20, WRITE)]);
        assert_eq!(driver.answer(0).len, 64 << 10);
    }

    #[test]
    fn a_source_that_has_nothing_is_replaced() {
        let (reader, _writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        for source in [File::open("/dev/null").unwrap(), File::from(std::os::fd::OwnedFd::from(reader))] {
            let mut driver = Driver::started(Rng::new("rng0", source).unwrap());
            driver.send(0, &[(DATA, 64, WRITE)]);
            assert_eq!(driver.answer(0).len, 64);
            assert_ne!(driver.bytes(DATA, 64), [0; 64]);
        }
    }

    #[test]
    fn a_buffer_that_the_device_cannot_write_needs_a_reset() {
        let mut driver = Driver::started(kernel());
        driver.send(0, &[(DATA, 64, 0)]);
        driver.wait("giving up", Driver::gave_up);
    }

    #[test]
    fn hostile_rings_neither_panic_nor_hang() {
        survives_hostile_rings(kernel);
    }
}
