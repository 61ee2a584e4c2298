//! Makes a VM on a thread of its own, while others read a command line and plan the machine: the kernel takes about as long for
//! a VM and its CPUID as they do.

use std::io;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use kvm_bindings::CpuId;

use super::vm::{KvmError, Vm, open, supported_cpuid};

/// A VM to come. Dropping it gives the VM up.
pub struct Ahead {
    cpuid: Receiver<Result<CpuId, KvmError>>,
    vm: Receiver<Result<Vm, KvmError>>,
}

impl Ahead {
    /// Begins.
    pub fn start() -> Result<Self, KvmError> {
        let ((tell, cpuid), (give, vm)) = (sync_channel(1), sync_channel(1));
        // Nobody waits for what was given up.
        let make = move || match open() {
            Ok(kvm) => {
                let _ = tell.send(supported_cpuid(&kvm));
                let _ = give.send(Vm::of(kvm));
            }
            Err(error) => {
                let _ = tell.send(Err(error));
            }
        };
        thread::Builder::new().name("kvm".to_owned()).spawn(make).map_err(KvmError::Thread)?;
        Ok(Self { cpuid, vm })
    }

    /// CPUID leaves that KVM can show a guest on this host. They are told once, before the VM is there.
    pub fn cpuid(&self) -> Result<CpuId, KvmError> {
        self.cpuid.recv().unwrap_or_else(|_| Err(ended()))
    }

    /// The VM, with nothing in it.
    pub fn vm(self) -> Result<Vm, KvmError> {
        self.vm.recv().unwrap_or_else(|_| Err(ended()))
    }
}

fn ended() -> KvmError {
    KvmError::Thread(io::ErrorKind::BrokenPipe.into())
}

/// CPUID leaves that KVM can show a guest on this host, for those who need no VM.
pub fn host_cpuid() -> Result<CpuId, KvmError> {
    supported_cpuid(&open()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn what_is_told_ahead_is_what_the_vm_says() {
        let ahead = Ahead::start().unwrap();
        let told = ahead.cpuid().unwrap();
        assert_eq!(told.as_slice().len(), ahead.vm().unwrap().supported_cpuid().unwrap().as_slice().len());
        assert_eq!(told.as_slice().len(), host_cpuid().unwrap().as_slice().len());
    }
}
