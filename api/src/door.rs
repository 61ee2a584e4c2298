//! Decides when new clients are let in: not while a machine takes back the descriptors that it gave up for its reset.

use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::sync::lock;

/// What new clients come through. Copies are the same door.
#[derive(Debug, Clone, Default)]
pub struct Door(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    shut: bool,
    waits: Option<Waker>,
}

/// Keeps the door shut while it lives.
#[derive(Debug)]
pub struct Shut(Door);

impl Door {
    /// Shuts it. When this returns no client is on its way through.
    #[must_use]
    pub fn shut(&self) -> Shut {
        lock(&self.0).shut = true;
        Shut(self.clone())
    }

    /// Takes a `step` that lets a client in, when the door is open. The step must not wait. One task at a time waits here.
    pub(crate) fn pass<T>(&self, context: &mut Context<'_>, step: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        let mut state = lock(&self.0);
        if state.shut {
            state.waits = Some(context.waker().clone());
            return Poll::Pending;
        }
        step(context)
    }
}

impl Drop for Shut {
    fn drop(&mut self) {
        let waits = {
            let mut state = lock(&self.0.0);
            state.shut = false;
            state.waits.take()
        };
        if let Some(waker) = waits {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Woken(AtomicU32);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_comes_while_it_is_shut_is_let_in_when_it_opens() {
        let (door, woken) = (Door::default(), Arc::new(Woken::default()));
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        assert_eq!(door.pass(&mut context, |_| Poll::Ready(1)), Poll::Ready(1));
        let shut = door.shut();
        assert!(door.pass::<()>(&mut context, |_| panic!("it is shut")).is_pending());
        assert_eq!(woken.0.load(Ordering::Relaxed), 0);
        drop(shut);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert_eq!(door.pass(&mut context, |_| Poll::Ready(2)), Poll::Ready(2));
    }
}
