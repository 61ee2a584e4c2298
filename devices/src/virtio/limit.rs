//! Decides when a request may pass a rate limit: two token buckets, one of bytes and one of requests. Pure: the time is given.

use std::time::{Duration, Instant};

/// What a bucket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketSpec {
    /// Most tokens, at least 1.
    pub size: u64,
    /// Tokens that may be taken once, before the bucket counts.
    pub burst: u64,
    /// Time in which an empty bucket fills, more than 0.
    pub refill: Duration,
}

/// What may pass; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LimitSpec {
    /// Bytes.
    pub bytes: Option<BucketSpec>,
    /// Requests.
    pub requests: Option<BucketSpec>,
}

/// The state of a limit.
#[derive(Debug)]
pub struct Limit {
    bytes: Option<Bucket>,
    requests: Option<Bucket>,
}

impl Limit {
    /// A limit whose buckets are full at `now`. A bucket of size 0 or that fills at once is no limit.
    #[must_use]
    pub fn new(spec: LimitSpec, now: Instant) -> Self {
        let bucket = |spec: Option<BucketSpec>| {
            spec.filter(|spec| spec.size > 0 && !spec.refill.is_zero()).map(|spec| Bucket {
                spec,
                tokens: spec.size,
                burst: spec.burst,
                filled: now,
            })
        };
        Self { bytes: bucket(spec.bytes), requests: bucket(spec.requests) }
    }

    /// How long the next request has to wait at `now`; `None` if it may pass. A request that passes may be larger than a
    /// bucket: the debt is paid by those that follow.
    pub fn wait(&mut self, now: Instant) -> Option<Duration> {
        let buckets = [&mut self.bytes, &mut self.requests];
        buckets.into_iter().flatten().filter_map(|bucket| bucket.wait(now)).max()
    }

    /// A request of `bytes` passed.
    pub fn take(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.take(bytes);
        }
        if let Some(bucket) = &mut self.requests {
            bucket.take(1);
        }
    }
}

#[derive(Debug)]
struct Bucket {
    spec: BucketSpec,
    tokens: u64,
    burst: u64,
    /// The time up to which tokens are counted. In the future while there is a debt.
    filled: Instant,
}

impl Bucket {
    fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.fill(now);
        if self.tokens > 0 || self.burst > 0 {
            return None;
        }
        // The time of the next whole token.
        let one = self.time_of(1);
        Some((self.filled + one).saturating_duration_since(now).max(Duration::from_micros(1)))
    }

    fn take(&mut self, count: u64) {
        let burst = count.min(self.burst);
        self.burst -= burst;
        let count = count - burst;
        let paid = count.min(self.tokens);
        self.tokens -= paid;
        self.filled += self.time_of(count - paid);
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled);
        if passed >= self.spec.refill {
            (self.tokens, self.filled) = (self.spec.size, now);
            return;
        }
        let tokens = passed.as_nanos() * u128::from(self.spec.size) / self.spec.refill.as_nanos();
        let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
        if tokens > 0 {
            // What is left of a token stays to be counted the next time.
            self.filled += self.time_of(tokens);
            self.tokens = self.tokens.saturating_add(tokens).min(self.spec.size);
        }
    }

    fn time_of(&self, tokens: u64) -> Duration {
        let nanos = u128::from(tokens) * self.spec.refill.as_nanos() / u128::from(self.spec.size);
        // A debt of more than a day is one that nobody waits for.
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(Duration::from_hours(24))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limit(bytes: Option<BucketSpec>, requests: Option<BucketSpec>, now: Instant) -> Limit {
        Limit::new(LimitSpec { bytes, requests }, now)
    }

    fn bucket(size: u64) -> BucketSpec {
        BucketSpec { size, burst: 0, refill: SECOND }
    }

    #[test]
    fn without_buckets_everything_passes() {
        let now = Instant::now();
        let mut limit = limit(None, Some(BucketSpec { refill: Duration::ZERO, ..bucket(1) }), now);
        limit.take(u64::MAX);
        assert_eq!(limit.wait(now), None);
    }

    #[test]
    fn an_empty_bucket_fills_with_time() {
        let now = Instant::now();
        let mut limit = limit(None, Some(bucket(10)), now);
        for _ in 0..10 {
            assert_eq!(limit.wait(now), None);
            limit.take(0);
        }
        assert_eq!(limit.wait(now), Some(SECOND / 10));
        assert_eq!(limit.wait(now + SECOND / 20), Some(SECOND / 20));
        assert_eq!(limit.wait(now + SECOND / 10), None);
    }

    #[test]
    fn a_request_larger_than_the_bucket_passes_and_delays_the_next() {
        let now = Instant::now();
        let mut limit = limit(Some(bucket(1000)), None, now);
        assert_eq!(limit.wait(now), None);
        limit.take(3000);
        let wait = limit.wait(now).unwrap();
        assert_eq!(wait, 2 * SECOND + SECOND / 1000);
        assert_eq!(limit.wait(now + wait), None);
    }

    #[test]
    fn a_burst_passes_once() {
        let now = Instant::now();
        let mut limit = limit(Some(BucketSpec { burst: 500, ..bucket(1000) }), None, now);
        limit.take(1500);
        assert!(limit.wait(now).is_some());
        assert_eq!(limit.wait(now + SECOND), None);
        limit.take(1000);
        assert!(limit.wait(now + SECOND).is_some());
    }

    #[test]
    fn absurd_numbers_neither_overflow_nor_wait_for_ever() {
        let now = Instant::now();
        let absurd = BucketSpec { size: u64::MAX, burst: u64::MAX, refill: Duration::from_millis(u64::MAX) };
        let mut limit = limit(Some(absurd), Some(BucketSpec { size: 1, burst: 0, refill: absurd.refill }), now);
        limit.take(u64::MAX);
        limit.take(u64::MAX);
        assert!(limit.wait(now).unwrap() <= Duration::from_hours(48));
    }

    proptest! {
        #[test]
        fn over_a_long_time_no_more_passes_than_the_bucket_and_its_refills(
            size in 1_u64..5000,
            refill_ms in 1_u64..2000,
            requests in prop::collection::vec((0_u64..6000, 0_u64..300), 1..200),
        ) {
            let start = Instant::now();
            let refill = Duration::from_millis(refill_ms);
            let mut limit = limit(Some(BucketSpec { size, burst: 0, refill }), None, start);
            let (mut now, mut passed, mut last) = (start, 0_u128, 0);
            for (bytes, pause) in requests {
                now += Duration::from_millis(pause);
                while let Some(wait) = limit.wait(now) {
                    now += wait;
                }
                limit.take(bytes);
                passed += u128::from(bytes);
                last = bytes;
            }
            let filled = u128::from(size) * (now - start).as_nanos() / refill.as_nanos();
            prop_assert!(passed <= u128::from(size) + filled + u128::from(last) + 200);
        }
    }
}
