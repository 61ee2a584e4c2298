//! How much a disk or a network interface may pass in a time.

/// How fast a disk or a network interface may be. Nothing is limited by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateLimit {
    /// Bytes.
    pub bandwidth: Option<TokenBucket>,
    /// Requests.
    pub operations: Option<TokenBucket>,
}

/// So many at once, and so fast again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    /// What the bucket holds.
    pub size: u64,
    /// What may pass once, before the bucket counts.
    pub one_time_burst: Option<u64>,
    /// Milliseconds in which an empty bucket fills.
    pub refill_ms: u64,
}
