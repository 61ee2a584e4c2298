//! Reads structures that the kernel fills in: fields, and the chain of capabilities behind them
//! (linux: include/uapi/linux/vfio.h, struct vfio_info_cap_header). Pure.

/// A structure as bytes from its start. Nothing is assumed of what they say.
pub struct Info(Vec<u8>);

impl Info {
    /// Of 8-byte words as the kernel wrote them.
    #[must_use]
    pub fn new(words: &[u64]) -> Self {
        Self(words.iter().flat_map(|word| word.to_ne_bytes()).collect())
    }

    /// Four bytes at `at`; `None` past the end.
    #[must_use]
    pub fn dword(&self, at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(self.0.get(at..at.checked_add(4)?)?.try_into().ok()?))
    }

    /// Eight bytes at `at`; `None` past the end.
    #[must_use]
    pub fn qword(&self, at: usize) -> Option<u64> {
        Some(u64::from_ne_bytes(self.0.get(at..at.checked_add(8)?)?.try_into().ok()?))
    }

    /// Where capabilities with `id` start, in the chain that starts at `first` (0 for none).
    #[must_use]
    pub fn capabilities(&self, first: u32, id: u16) -> Vec<usize> {
        let mut found = Vec::new();
        let mut at = first;
        // More capabilities than fit mean a chain that loops.
        for _ in 0..64 {
            let Some(here) = usize::try_from(at).ok().filter(|here| *here != 0) else { break };
            let (Some(header), Some(next)) = (self.dword(here), self.dword(here.saturating_add(4))) else { break };
            if header & 0xFFFF == u32::from(id) {
                found.push(here);
            }
            at = next;
        }
        found
    }

    /// Pairs of 8-byte fields from `at` on, `count` of them or as many as there are.
    pub fn pairs(&self, at: usize, count: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        (at..).step_by(16).take(count).map_while(|pair| Some((self.qword(pair)?, self.qword(pair.checked_add(8)?)?)))
    }

    /// Of 4-byte words.
    #[cfg(test)]
    pub fn of_dwords(dwords: &[u32]) -> Self {
        Self(dwords.iter().flat_map(|dword| dword.to_ne_bytes()).collect())
    }

    /// Its first `len` bytes.
    #[cfg(test)]
    pub fn truncated(&self, len: usize) -> Self {
        Self(self.0.iter().copied().take(len).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_that_loops_or_leaves_the_structure_ends() {
        let looping = Info::of_dwords(&[0, 0, 0x0001_0001, 8]);
        assert_eq!(looping.capabilities(8, 1).len(), 64);
        assert!(looping.capabilities(8, 2).is_empty());
        assert!(looping.capabilities(0, 1).is_empty());
        assert!(looping.capabilities(12, 8).is_empty());
        assert!(looping.capabilities(u32::MAX, 1).is_empty());
    }

    #[test]
    fn a_count_that_is_too_large_ends_with_the_structure() {
        let info = Info::new(&[1, 2, 3, 4, 5]);
        assert_eq!(info.pairs(8, u32::MAX).collect::<Vec<_>>(), [(2, 3), (4, 5)]);
        assert_eq!(info.pairs(8, 1).count(), 1);
    }
}
