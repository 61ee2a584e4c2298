//! Asks for the host's CPUID on other threads, while this one reads a command line and makes the VM: of all that a start asks of
//! the kernel it takes the longest.
//!
//! A thread that is new may find no processor to run on for longer than the question takes: on an idle host that is a guest
//! itself, Linux puts the first one behind the thread that made it and the second elsewhere. So whoever comes first asks: the thread
//! made for it, another one that has nothing to do yet, or who needs the answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use kvm_bindings::CpuId;

use super::vm::{KvmError, open, supported_cpuid};

/// CPUID to come. Dropping it gives the answer up.
#[derive(Clone, Default)]
pub struct CpuidAhead(Arc<Question>);

#[derive(Default)]
struct Question {
    begun: AtomicBool,
    answer: OnceLock<Option<CpuId>>,
}

impl CpuidAhead {
    /// Has a thread ask.
    #[must_use]
    pub fn start() -> Self {
        let ahead = Self::default();
        let asker = ahead.clone();
        // Where no thread can be had, others ask.
        if let Err(error) = thread::Builder::new().name("cpuid".to_owned()).spawn(move || asker.ask()) {
            log::debug!("CPUID has no thread of its own: {error}");
        }
        ahead
    }

    /// Asks, unless somebody has begun to. Does not wait for them.
    pub fn ask(&self) {
        if !self.0.begun.swap(true, Ordering::Relaxed) {
            self.answer();
        }
    }

    /// CPUID leaves that KVM can show a guest on this host.
    pub fn get(&self) -> Result<CpuId, KvmError> {
        self.0.begun.store(true, Ordering::Relaxed);
        // What was refused is asked again, for the reason.
        self.answer().clone().map_or_else(host_cpuid, Ok)
    }

    fn answer(&self) -> &Option<CpuId> {
        self.0.answer.get_or_init(|| host_cpuid().ok())
    }
}

/// CPUID leaves that KVM can show a guest on this host, for those who need no VM.
pub fn host_cpuid() -> Result<CpuId, KvmError> {
    supported_cpuid(&open()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::Vm;

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn what_is_told_ahead_is_what_a_vcpu_takes() {
        let told = CpuidAhead::start().get().unwrap();
        assert!(told.as_slice().iter().any(|leaf| leaf.function == 0 && leaf.eax >= 1), "the processor's own leaves");
        let vm = Vm::new().unwrap();
        vm.create_vcpu(0).unwrap().set_cpuid2(&told).unwrap();
    }

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn who_needs_it_before_anybody_asked_asks_and_what_was_refused_is_asked_again() {
        let told = host_cpuid().unwrap();
        assert_eq!(CpuidAhead::default().get().unwrap().as_slice().len(), told.as_slice().len());
        let refused = Question { begun: true.into(), answer: OnceLock::from(None) };
        assert_eq!(CpuidAhead(Arc::new(refused)).get().unwrap().as_slice().len(), told.as_slice().len());
    }

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn it_is_asked_once_by_whoever_comes_first() {
        let ahead = CpuidAhead::default();
        ahead.ask();
        assert!(ahead.0.answer.get().is_some(), "the first one asks");
        let begun = Question { begun: true.into(), answer: OnceLock::new() };
        let ahead = CpuidAhead(Arc::new(begun));
        ahead.ask();
        assert!(ahead.0.answer.get().is_none(), "the second one neither asks nor waits");
    }
}
