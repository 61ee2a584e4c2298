//! Asks for the host's CPUID on a thread of its own, while others read a command line and make the VM: of all that a start asks of
//! the kernel it takes the longest.

use std::io;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use kvm_bindings::CpuId;

use super::vm::{KvmError, open, supported_cpuid};

/// CPUID to come. Dropping it gives the answer up.
pub struct CpuidAhead(Receiver<Result<CpuId, KvmError>>);

impl CpuidAhead {
    /// Asks.
    pub fn start() -> Result<Self, KvmError> {
        let (tell, answer) = sync_channel(1);
        let ask = move || {
            // Nobody waits for what was given up.
            let _ = tell.send(host_cpuid());
        };
        thread::Builder::new().name("cpuid".to_owned()).spawn(ask).map_err(KvmError::Thread)?;
        Ok(Self(answer))
    }

    /// CPUID leaves that KVM can show a guest on this host.
    pub fn get(self) -> Result<CpuId, KvmError> {
        self.0.recv().unwrap_or_else(|_| Err(KvmError::Thread(io::ErrorKind::BrokenPipe.into())))
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
        let told = CpuidAhead::start().unwrap().get().unwrap();
        assert!(told.as_slice().iter().any(|leaf| leaf.function == 0 && leaf.eax >= 1), "the processor's own leaves");
        let vm = Vm::new().unwrap();
        vm.create_vcpu(0).unwrap().set_cpuid2(&told).unwrap();
    }
}
