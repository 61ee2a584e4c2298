//! What does a lock show whose holder panicked? The data as they are: every holder leaves them whole at each step, and a
//! machine that goes on with them harms nobody but its own guest.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// Locks `mutex`.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `data` together with others that read.
pub fn read<T: ?Sized>(data: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    data.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `data` for itself alone.
pub fn write<T: ?Sized>(data: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    data.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits with the lock released until `changed` is notified, or for nothing (see [`Condvar`]).
pub fn wait<'a, T>(changed: &Condvar, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(held).unwrap_or_else(PoisonError::into_inner)
}

/// The same, for `limit` at most.
pub fn wait_at_most<'a, T>(changed: &Condvar, held: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
    changed.wait_timeout(held, limit).unwrap_or_else(PoisonError::into_inner).0
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn what_a_holder_left_when_it_panicked_is_there_for_the_next() {
        let (mutex, data) = (Mutex::new(0), RwLock::new(0));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let (mut first, mut second) = (lock(&mutex), write(&data));
            (*first, *second) = (1, 2);
            panic!("while both are held");
        }));
        assert!(panicked.is_err() && mutex.is_poisoned() && data.is_poisoned());
        assert_eq!((*lock(&mutex), *read(&data)), (1, 2));
    }
}
