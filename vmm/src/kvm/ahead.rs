//! Asks for the host's CPUID on a thread of its own, while others read a command line and make the VM: of all that a start asks
//! of the kernel it takes the longest.
//!
//! A thread that is new may find no processor to run on for longer than the question takes. Who needs the answer before that
//! thread has begun asks in its place.

use std::sync::{Arc, OnceLock};
use std::thread;

use kvm_bindings::CpuId;

use super::vm::{KvmError, open, supported_cpuid};

/// CPUID to come. Dropping it gives the answer up.
pub struct CpuidAhead(Arc<OnceLock<Option<CpuId>>>);

impl CpuidAhead {
    /// Asks.
    #[must_use]
    pub fn start() -> Self {
        let answer = Arc::<OnceLock<_>>::default();
        let told = Arc::clone(&answer);
        let ask = move || {
            told.get_or_init(|| host_cpuid().ok());
        };
        // Where no thread can be had, nothing is asked ahead.
        if let Err(error) = thread::Builder::new().name("cpuid".to_owned()).spawn(ask) {
            log::debug!("CPUID is not asked for ahead: {error}");
        }
        Self(answer)
    }

    /// CPUID leaves that KVM can show a guest on this host.
    pub fn get(&self) -> Result<CpuId, KvmError> {
        // What was refused is asked again, for the reason.
        self.0.get_or_init(|| host_cpuid().ok()).clone().map_or_else(host_cpuid, Ok)
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
        assert_eq!(CpuidAhead(Arc::default()).get().unwrap().as_slice().len(), told.as_slice().len());
        assert_eq!(CpuidAhead(Arc::new(OnceLock::from(None))).get().unwrap().as_slice().len(), told.as_slice().len());
    }
}
