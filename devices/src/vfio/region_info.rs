//! Decides which parts of a device's region can be mapped, from what the kernel tells of it. Pure.

use vfio_bindings::bindings::vfio::{VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP};

use super::host::Area;
use super::info::Info;

/// A region of a device's file. The default is one that the device does not have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Region {
    /// Bytes.
    pub size: u64,
    /// Where it starts in the file.
    pub at: u64,
    /// What can be mapped of it.
    pub mappable: Vec<Area>,
}

impl Region {
    /// Out of struct vfio_region_info and its capabilities (linux: include/uapi/linux/vfio.h).
    #[must_use]
    pub fn parse(info: &Info) -> Self {
        let flags = info.dword(4).unwrap_or(0);
        let (Some(size), Some(at)) = (info.qword(16), info.qword(24)) else { return Self::default() };
        let chain = info.dword(12).filter(|_| flags & VFIO_REGION_INFO_FLAG_CAPS != 0).unwrap_or(0);
        let sparse = u16::try_from(VFIO_REGION_INFO_CAP_SPARSE_MMAP).map(|id| info.capabilities(chain, id)).unwrap_or_default();
        let mappable = match sparse.first() {
            _ if flags & VFIO_REGION_INFO_FLAG_MMAP == 0 => Vec::new(),
            Some(capability) => {
                let count = info.dword(capability.saturating_add(8)).unwrap_or(0);
                info.pairs(capability.saturating_add(16), count).map(|(offset, len)| Area { offset, len }).collect()
            }
            None => vec![Area { offset: 0, len: size }],
        };
        Self { size, at, mappable }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MMAP: u32 = VFIO_REGION_INFO_FLAG_MMAP;
    const CAPS: u32 = VFIO_REGION_INFO_FLAG_CAPS;

    /// Region 1 of 64 KiB with a capability of another kind (MSI-X may be mapped), then two areas.
    fn sparse(flags: u32) -> Info {
        let head = [96, flags, 1, 32, 0x1_0000, 0, 0, 0x100];
        let capabilities = [0x0001_0003, 40, 0x0001_0001, 0, 2, 0];
        let areas = [0, 0, 0x2000, 0, 0x4000, 0, 0xC000, 0];
        Info::of_dwords(&[&head[..], &capabilities, &areas].concat())
    }

    #[test]
    fn sparse_areas_are_all_that_is_mapped() {
        let region = Region::parse(&sparse(MMAP | CAPS));
        assert_eq!((region.size, region.at), (0x1_0000, 0x100 << 32));
        assert_eq!(region.mappable, [Area { offset: 0, len: 0x2000 }, Area { offset: 0x4000, len: 0xC000 }]);
    }

    #[test]
    fn a_region_without_areas_is_mapped_whole_or_not_at_all() {
        assert_eq!(Region::parse(&sparse(MMAP)).mappable, [Area { offset: 0, len: 0x1_0000 }]);
        assert_eq!(Region::parse(&sparse(CAPS)).mappable, []);
    }

    #[test]
    fn a_structure_that_ends_early_is_no_region_or_has_fewer_areas() {
        for len in 0..88 {
            let region = Region::parse(&sparse(MMAP | CAPS).truncated(len));
            assert!(region.size == 0 || region.mappable.len() < 2 && len >= 32, "{len}");
        }
    }
}
