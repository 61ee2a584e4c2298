//! Decides which parts of a BAR go straight into the guest and which are trapped. Pure.
//!
//! A part is direct where the host lets it be mapped, in whole pages, outside the pages that hold the MSI-X table and
//! pending bits. The host may allow those to be mapped too (`VFIO_REGION_INFO_CAP_MSIX_MAPPABLE`); they are trapped all the
//! same, since the guest's vectors are not the host's. A BAR smaller than a page is trapped whole: the guest may put it at
//! an address that is no multiple of the page size, which no memory slot can have.

use super::host::Area;

/// A part of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Where.
    pub area: Area,
    /// Whether it can be mapped.
    pub direct: bool,
}

/// Splits a memory BAR of `size` bytes into parts that cover it in order. `mappable` are the areas that the host lets be
/// mapped, `registers` the spans that must be trapped, `page` is the page size.
#[must_use]
pub fn parts(size: u64, mappable: &[Area], registers: &[Area], page: u64) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut from = 0;
    if size >= page && size.is_multiple_of(page) {
        for area in direct_areas(size, mappable, registers, page) {
            if area.offset > from {
                parts.push(Part { area: Area { offset: from, len: area.offset - from }, direct: false });
            }
            parts.push(Part { area, direct: true });
            from = area.end();
        }
    }
    if from < size {
        parts.push(Part { area: Area { offset: from, len: size - from }, direct: false });
    }
    parts
}

/// Whole pages of `mappable` without those of `registers`: in order, not touching each other's bytes.
fn direct_areas(size: u64, mappable: &[Area], registers: &[Area], page: u64) -> Vec<Area> {
    let mut holes: Vec<Area> = registers.iter().filter(|hole| hole.len != 0).map(|hole| outward(*hole, page)).collect();
    holes.sort_by_key(|hole| hole.offset);
    let mut areas: Vec<Area> = mappable.iter().filter_map(|area| inward(*area, size, page)).collect();
    areas.sort_by_key(|area| area.offset);
    let mut found = Vec::new();
    let mut from = 0;
    for area in areas {
        // Areas that overlap would be mapped twice.
        from = from.max(area.offset);
        for hole in &holes {
            if from < area.end() && hole.offset > from {
                let end = hole.offset.min(area.end());
                found.push(Area { offset: from, len: end - from });
                from = end;
            }
            if hole.offset <= from {
                from = from.max(hole.end());
            }
        }
        if from < area.end() {
            found.push(Area { offset: from, len: area.end() - from });
            from = area.end();
        }
    }
    found
}

/// The pages that hold a byte of `area`.
fn outward(area: Area, page: u64) -> Area {
    let offset = area.offset - area.offset % page;
    let end = area.end().checked_next_multiple_of(page).unwrap_or(u64::MAX);
    Area { offset, len: end - offset }
}

/// The pages that lie inside `area` and inside the BAR.
fn inward(area: Area, size: u64, page: u64) -> Option<Area> {
    let offset = area.offset.checked_next_multiple_of(page)?;
    let end = area.end().min(size);
    let end = end - end % page;
    (offset < end).then(|| Area { offset, len: end - offset })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    fn area(offset: u64, len: u64) -> Area {
        Area { offset, len }
    }

    /// `(offset, len)` of each part, direct ones with a plus.
    fn shown(size: u64, mappable: &[Area], registers: &[Area]) -> Vec<String> {
        let part = |part: &Part| format!("{}{:x}+{:x}", if part.direct { "+" } else { "" }, part.area.offset, part.area.len);
        parts(size, mappable, registers, PAGE).iter().map(part).collect()
    }

    #[test]
    fn a_bar_without_tables_is_one_direct_part() {
        assert_eq!(shown(0x10000, &[area(0, 0x10000)], &[]), ["+0+10000"]);
    }

    #[test]
    fn a_bar_that_the_host_does_not_map_is_trapped() {
        assert_eq!(shown(0x10000, &[], &[]), ["0+10000"]);
    }

    #[test]
    fn a_bar_smaller_than_a_page_is_trapped_even_if_the_host_would_map_it() {
        assert_eq!(shown(256, &[area(0, 256)], &[]), ["0+100"]);
        assert_eq!(shown(256, &[area(0, 4096)], &[]), ["0+100"]);
    }

    #[test]
    fn the_pages_of_table_and_pending_bits_are_trapped() {
        let registers = [area(0x3000, 0x80), area(0x2008, 8)];
        assert_eq!(shown(0x8000, &[area(0, 0x8000)], &registers), ["+0+2000", "2000+2000", "+4000+4000"]);
        assert_eq!(shown(0x4000, &[area(0, 0x4000)], &[area(0, 0x1010)]), ["0+2000", "+2000+2000"]);
        assert_eq!(shown(0x1000, &[area(0, 0x1000)], &[area(0, 16)]), ["0+1000"]);
        let last = [area(0x7FF0, 16)];
        assert_eq!(shown(0x8000, &[area(0, 0x8000)], &last), ["+0+7000", "7000+1000"]);
    }

    #[test]
    fn sparse_areas_are_used_as_given_in_whole_pages() {
        let sparse = [area(0x4000, 0x2000), area(0x0, 0x1800)];
        assert_eq!(shown(0x8000, &sparse, &[]), ["+0+1000", "1000+3000", "+4000+2000", "6000+2000"]);
        assert_eq!(shown(0x8000, &[area(0x800, 0x400)], &[]), ["0+8000"]);
    }

    #[test]
    fn areas_past_the_bar_are_cut_off() {
        assert_eq!(shown(0x2000, &[area(0x1000, u64::MAX)], &[area(u64::MAX - 4, 64)]), ["0+1000", "+1000+1000"]);
    }

    proptest! {
        #[test]
        fn parts_cover_the_bar_in_order_and_direct_ones_keep_the_rules(
            shift in 4u32..24,
            mappable in prop::collection::vec((0u64..0x20000, 0u64..0x20000), 0..4),
            registers in prop::collection::vec((0u64..0x20000, 0u64..0x3000), 0..3),
        ) {
            let size = 1 << shift;
            let mappable: Vec<Area> = mappable.into_iter().map(|(offset, len)| area(offset, len)).collect();
            let registers: Vec<Area> = registers.into_iter().map(|(offset, len)| area(offset, len)).collect();
            let mut from = 0;
            for Part { area: part, direct } in parts(size, &mappable, &registers, PAGE) {
                prop_assert_eq!(part.offset, from);
                prop_assert!(part.len > 0);
                from = part.end();
                if direct {
                    prop_assert_eq!((part.offset % PAGE, part.len % PAGE), (0, 0));
                    prop_assert!(registers.iter().all(|hole| hole.len == 0 || !hole.overlaps(part)));
                    for at in (part.offset..part.end()).step_by(4096) {
                        let page = area(at, PAGE);
                        let covered = (at..page.end()).step_by(512).all(|byte| {
                            mappable.iter().any(|area| area.offset <= byte && byte < area.end())
                        });
                        prop_assert!(covered);
                    }
                }
            }
            prop_assert_eq!(from, size);
        }
    }
}
