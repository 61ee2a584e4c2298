//! Decides which local APIC id each processor has, from how processors are arranged: threads in cores, cores in dies, dies
//! in packages (Intel SDM volume 3, 9.9.1).
//!
//! Each level takes a whole number of bits of the id, so ids have gaps where a level's size is no power of two.

/// The highest APIC id that an interrupt can be sent to without further support; 255 is the broadcast address.
const APIC_ID_MAX: u32 = 254;
/// Bits of such an id.
const APIC_ID_BITS: u32 = 8;

/// What a package consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackageShape {
    /// Threads in a core, at least 1.
    pub threads: u32,
    /// Cores in a die, at least 1.
    pub cores: u32,
    /// Dies in a package, at least 1.
    pub dies: u32,
}

impl PackageShape {
    /// One die of `cores` cores with one thread each.
    #[must_use]
    pub const fn of_cores(cores: u32) -> Self {
        Self { threads: 1, cores, dies: 1 }
    }

    /// Processors that it has room for.
    #[must_use]
    pub const fn room(self) -> u64 {
        self.threads as u64 * self.cores as u64 * self.dies as u64
    }
}

/// Where one processor is, and how ids are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its APIC id.
    pub apic_id: u32,
    /// Number of its package.
    pub package: u32,
    /// Processors in its package, those that come later among them.
    pub in_package: u32,
    /// Processors in a full core, and in a full die.
    pub in_core: u32,
    /// As said there.
    pub in_die: u32,
    /// Bits of the id that number the threads of a core.
    pub core_shift: u32,
    /// Bits that number the threads of a die.
    pub die_shift: u32,
    /// Bits that number the threads of a package.
    pub package_shift: u32,
}

/// All processors that a machine can have.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Processors(Vec<Placement>);

impl Processors {
    /// One package of `count` cores: ids 0 and up.
    #[must_use]
    pub fn single(count: u32) -> Self {
        let all = (0..count).collect();
        Self(place(&[all], PackageShape::of_cores(count.max(1))).into_iter().map(|(_, placement)| placement).collect())
    }

    /// Processors by their numbers, one list for each package. Together the lists hold each number from 0 on once. The
    /// package with processor 0 should come first, with it in front: the processor with id 0 starts the machine.
    ///
    /// # Errors
    /// If a package is larger than `shape`, an id is too large, or the lists do not hold each number once.
    pub fn arrange(packages: &[Vec<u32>], shape: PackageShape) -> Result<Self, ProcessorsError> {
        let needed = [shape.threads, shape.cores, shape.dies].map(bits).iter().sum();
        if needed > APIC_ID_BITS {
            return Err(ProcessorsError::Bits { shape, needed });
        }
        for (package, processors) in packages.iter().enumerate() {
            if processors.len() as u64 > shape.room() {
                return Err(ProcessorsError::Room { package, processors: processors.len(), room: shape.room() });
            }
        }
        let mut placed = place(packages, shape);
        placed.sort_by_key(|(number, _)| *number);
        if placed.iter().zip(0u32..).any(|((number, _), expected)| *number != expected) {
            return Err(ProcessorsError::Numbers);
        }
        match placed.iter().find(|(_, placement)| placement.apic_id > APIC_ID_MAX) {
            Some((number, placement)) => Err(ProcessorsError::ApicId { number: *number, id: placement.apic_id }),
            None => Ok(Self(placed.into_iter().map(|(_, placement)| placement).collect())),
        }
    }

    /// Each processor's place, by number.
    #[must_use]
    pub fn placements(&self) -> &[Placement] {
        &self.0
    }
}

/// Bits of an id that number `count` things.
fn bits(count: u32) -> u32 {
    u32::BITS - count.saturating_sub(1).leading_zeros()
}

fn place(packages: &[Vec<u32>], shape: PackageShape) -> Vec<(u32, Placement)> {
    let (threads, cores) = (shape.threads.max(1), shape.cores.max(1));
    let core_shift = bits(threads);
    let die_shift = core_shift + bits(cores);
    let package_shift = die_shift + bits(shape.dies);
    let mut placed = Vec::new();
    for (package, processors) in (0u32..).zip(packages) {
        let in_package = u32::try_from(processors.len()).unwrap_or(u32::MAX);
        for (index, number) in (0u32..).zip(processors) {
            let (thread, core, die) = (index % threads, index / threads % cores, index / threads / cores);
            let apic_id = package.checked_shl(package_shift).unwrap_or(u32::MAX) | die << die_shift | core << core_shift | thread;
            let in_die = threads.saturating_mul(cores).min(in_package);
            let in_core = threads.min(in_package);
            placed.push((
                *number,
                Placement { apic_id, package, in_package, in_core, in_die, core_shift, die_shift, package_shift },
            ));
        }
    }
    placed
}

/// Processors that cannot be arranged so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProcessorsError {
    /// A package with too many.
    #[error("{processors} processors do not fit package {package}, which has room for {room}: give it more cores")]
    Room {
        /// The package.
        package: usize,
        /// How many.
        processors: usize,
        /// Room.
        room: u64,
    },
    /// A package that ids cannot number.
    #[error(
        "packages of {} threads, {} cores and {} dies take {needed} bits of an APIC id, which has {APIC_ID_BITS}: give smaller numbers",
        shape.threads, shape.cores, shape.dies
    )]
    Bits {
        /// What a package consists of.
        shape: PackageShape,
        /// Bits that it takes.
        needed: u32,
    },
    /// An id beyond the limit.
    #[error(
        "processor {number} needs APIC id {id}, the largest is {APIC_ID_MAX}: use fewer processors, or packages, dies and cores whose numbers are powers of two"
    )]
    ApicId {
        /// The processor.
        number: u32,
        /// The id.
        id: u32,
    },
    /// Numbers that are missing or there twice.
    #[error("packages do not hold each processor once")]
    Numbers,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(processors: &Processors) -> Vec<u32> {
        processors.placements().iter().map(|placement| placement.apic_id).collect()
    }

    #[test]
    fn one_package_numbers_its_processors_from_0() {
        for count in [1, 2, 3, 255] {
            assert_eq!(ids(&Processors::single(count)), (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_package_starts_at_a_multiple_of_its_room_in_ids() {
        let two = Processors::arrange(&[vec![0, 1, 2], vec![3, 4, 5]], PackageShape::of_cores(3)).unwrap();
        assert_eq!(ids(&two), [0, 1, 2, 4, 5, 6]);
        let last = two.placements()[5];
        assert_eq!((last.package, last.in_package, last.core_shift, last.package_shift), (1, 3, 0, 2));
        let interleaved = Processors::arrange(&[vec![0, 2], vec![1, 3]], PackageShape::of_cores(2)).unwrap();
        assert_eq!(ids(&interleaved), [0, 2, 1, 3]);
    }

    #[test]
    fn threads_cores_and_dies_have_bits_of_their_own() {
        let shape = PackageShape { threads: 2, cores: 3, dies: 2 };
        let all = Processors::arrange(&[(0..12).collect(), (12..24).collect()], shape).unwrap();
        assert_eq!(ids(&all)[..13], [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 16]);
        let first = all.placements()[0];
        assert_eq!((first.core_shift, first.die_shift, first.package_shift), (1, 3, 4));
        assert_eq!((first.in_core, first.in_die, first.in_package), (2, 6, 12));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_limit() {
        let refused =
            |packages: &[Vec<u32>], cores| Processors::arrange(packages, PackageShape::of_cores(cores)).unwrap_err().to_string();
        assert!(refused(&[vec![0, 1, 2]], 2).contains("room for 2"));
        let three: Vec<Vec<u32>> = (0..3).map(|package| (package * 70..package * 70 + 70).collect()).collect();
        assert!(refused(&three, 70).contains("processor 140 needs APIC id 256, the largest is 254"));
        for numbers in [[u32::MAX, 1, 1], [65_535; 3], [2, 2, 65], [1, 1, 257]] {
            let [threads, cores, dies] = numbers;
            let error = Processors::arrange(&[vec![0]], PackageShape { threads, cores, dies }).unwrap_err().to_string();
            assert!(error.contains("bits of an APIC id, which has 8"), "{numbers:?}: {error}");
        }
        for packages in [&[vec![0, 2]][..], &[vec![0], vec![0]], &[vec![1]]] {
            assert_eq!(Processors::arrange(packages, PackageShape::of_cores(2)), Err(ProcessorsError::Numbers));
        }
    }
}
