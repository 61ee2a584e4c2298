//! Runs vCPUs on threads named `vcpu<N>` and takes their exits to who answers. A vCPU never waits for the main loop.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use devices::gate::{Gate, Reason};
use kvm_ioctls::{VcpuExit, VcpuFd};
use pci::sync::lock;
use rustix::thread::{CpuSet, sched_setaffinity};
use thiserror::Error;
use vm_device::device_manager::IoManager;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use super::counters::{Count, Counters};
use super::internal::InternalError;
use super::setup::Vcpu;
use super::state::{VcpuState, VcpuStateError};
use crate::address_space::AddressSpace;
use crate::pci_bus::PciBus;
use crate::ports;

/// Why a vCPU stopped by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Triple fault: the guest lost its interrupt table.
    TripleFault,
    /// KVM cannot go on; `what` names the exit and `at` is the instruction pointer.
    Broken {
        /// vCPU.
        id: u8,
        /// Name of the exit.
        what: &'static str,
        /// Detail code of the exit.
        code: u64,
        /// Guest instruction pointer.
        at: u64,
    },
    /// KVM gave up by an error of its own.
    Internal {
        /// vCPU.
        id: u8,
        /// What KVM says of it.
        error: InternalError,
        /// Guest instruction pointer.
        at: u64,
    },
}

/// For logs and clients: what, and what to look at.
impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TripleFault => f.write_str("triple fault: the guest's processor had no way to go on"),
            Self::Broken { id, what, code, at } => write!(f, "vCPU {id} at {at:#x}: {what} {code:#x}"),
            Self::Internal { id, error, at } => write!(f, "vCPU {id} at {at:#x}: {error}"),
        }
    }
}

/// What vCPUs share.
pub struct Runner {
    /// Fixed ports.
    pub ports: IoManager,
    /// Configuration space.
    pub pci: Arc<PciBus>,
    /// BARs.
    pub space: Arc<AddressSpace>,
    /// Set when the machine ends: vCPUs leave at their next exit.
    pub stop: Arc<AtomicBool>,
    /// Closed while the machine is paused.
    pub gate: Arc<Gate>,
    /// Hears why a vCPU stopped by itself. It must not wait.
    pub ended: Box<dyn Fn(Ended) + Send + Sync>,
}

/// The running vCPUs.
pub struct Threads {
    runner: Arc<Runner>,
    running: Vec<Running>,
    /// Of all that run or ran.
    counters: Vec<Arc<Counters>>,
}

struct Running {
    id: u8,
    thread: JoinHandle<Option<Vcpu>>,
    /// Set when this one is to leave.
    leave: Arc<AtomicBool>,
    errand: Arc<Errand>,
}

/// Something that a vCPU's thread does with it while it is held.
#[derive(Default)]
struct Errand {
    waits: AtomicBool,
    act: Mutex<Option<Act>>,
}

type Act = Box<dyn FnOnce(&Vcpu) + Send>;

impl Errand {
    fn give(&self, act: Act) {
        *lock(&self.act) = Some(act);
        self.waits.store(true, Ordering::Release);
    }

    fn waits(&self) -> bool {
        self.waits.load(Ordering::Acquire)
    }

    fn run(&self, vcpu: &Vcpu) {
        self.waits.store(false, Ordering::Release);
        let act = lock(&self.act).take();
        if let Some(act) = act {
            act(vcpu);
        }
    }
}

impl Threads {
    /// Starts one thread for each vCPU, or has the threads `waiting` run them.
    pub fn start(vcpus: Vec<Vcpu>, waiting: Option<WaitingThreads>, runner: &Arc<Runner>) -> Result<Self, ThreadError> {
        register_signal_handler(SIGRTMIN(), ignore).map_err(|error| ThreadError::Signal { source: error.into() })?;
        let waiting = match waiting {
            Some(waiting) => waiting,
            None => WaitingThreads::start(vcpus.iter().map(|vcpu| vcpu.id))?,
        };
        let mut started = Self { runner: Arc::clone(runner), running: Vec::new(), counters: Vec::new() };
        started.hand_out(vcpus, waiting);
        Ok(started)
    }

    /// Starts one more.
    pub fn add(&mut self, vcpu: Vcpu) -> Result<(), ThreadError> {
        let waiting = WaitingThreads::start([vcpu.id])?;
        self.hand_out(vec![vcpu], waiting);
        Ok(())
    }

    /// Gives waiting threads their vCPUs. They have their names then.
    fn hand_out(&mut self, vcpus: Vec<Vcpu>, mut waiting: WaitingThreads) {
        waiting.wait();
        for (vcpu, (thread, start)) in vcpus.into_iter().zip(waiting.threads.drain(..)) {
            let (id, counters, leave) = (vcpu.id, Arc::new(Counters::default()), Arc::new(AtomicBool::new(false)));
            self.counters.push(Arc::clone(&counters));
            // A thread that waits for its vCPU takes it.
            let (errand, runner) = (Arc::<Errand>::default(), Arc::clone(&self.runner));
            let _ = start.send(Work { vcpu, counters, leave: Arc::clone(&leave), errand: Arc::clone(&errand), runner });
            self.running.push(Running { id, thread, leave, errand });
        }
    }

    /// Ends the thread of one that the guest does not use any more, and gives the vCPU back.
    pub fn remove(&mut self, id: u8) -> Option<Vcpu> {
        let index = self.running.iter().position(|running| running.id == id)?;
        let running = self.running.swap_remove(index);
        running.leave.store(true, Ordering::Release);
        self.runner.gate.recall();
        while !running.thread.is_finished() {
            interrupt(std::slice::from_ref(&running));
        }
        running.thread.join().ok()?
    }

    /// Which run, in order.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<u8> {
        self.running.iter().map(|running| running.id).collect()
    }

    /// Sum over all vCPUs.
    #[must_use]
    pub fn total(&self, reason: Count) -> u64 {
        self.counters.iter().map(|counters| counters.get(reason)).sum()
    }

    /// Makes all vCPUs leave the guest and keeps them out. Returns when the last one has left.
    pub fn pause(&self) {
        self.runner.gate.close(Reason::Pause);
        let running = || self.running.iter().filter(|running| !running.thread.is_finished()).count();
        while self.runner.gate.waiting() < running() {
            interrupt(&self.running);
        }
    }

    /// What each vCPU is, by number, while they are held. `msrs` are those that are asked for.
    pub fn states(&self, msrs: &Arc<[u32]>) -> Vec<(u8, Result<VcpuState, VcpuStateError>)> {
        let asked = self.running.iter().map(|running| {
            let (answer, answered) = mpsc::channel();
            let msrs = Arc::clone(msrs);
            running.errand.give(Box::new(move |vcpu| {
                let _ = answer.send(VcpuState::of(&vcpu.fd, &msrs));
            }));
            (running, answered)
        });
        let asked: Vec<_> = asked.collect();
        self.runner.gate.recall();
        let answer = |(running, answered): (&Running, Receiver<_>)| loop {
            match answered.recv_timeout(Duration::from_millis(10)) {
                Ok(state) => return (running.id, state),
                Err(_) if running.thread.is_finished() => return (running.id, Err(VcpuStateError::Gone)),
                Err(_) => {}
            }
        };
        let mut states: Vec<_> = asked.into_iter().map(answer).collect();
        states.sort_by_key(|(id, _)| *id);
        states
    }

    /// Lets the vCPUs go on.
    pub fn resume(&self) {
        self.runner.gate.open(Reason::Pause);
    }

    /// Makes all vCPUs leave the guest and waits for them.
    pub fn stop(&mut self) {
        self.runner.stop.store(true, Ordering::Release);
        self.runner.gate.recall();
        while self.running.iter().any(|running| !running.thread.is_finished()) {
            interrupt(&self.running);
        }
        for running in self.running.drain(..) {
            if running.thread.join().is_err() {
                log::error!("a vCPU thread ended by a panic");
            }
        }
    }
}

/// Calls vCPUs out of the guest. One that is just about to enter misses the call, so callers repeat it.
fn interrupt(vcpus: &[Running]) {
    for running in vcpus.iter().filter(|running| !running.thread.is_finished()) {
        let _ = running.thread.kill(SIGRTMIN());
    }
    thread::sleep(Duration::from_millis(1));
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Threads that take their names and wait for their vCPUs: others look for them before memory is there, and they start while
/// the first machine is built. They end when this is dropped, before it is gone.
pub struct WaitingThreads {
    threads: Vec<(JoinHandle<Option<Vcpu>>, Sender<Work>)>,
    here: Receiver<()>,
}

struct Work {
    vcpu: Vcpu,
    counters: Arc<Counters>,
    leave: Arc<AtomicBool>,
    errand: Arc<Errand>,
    runner: Arc<Runner>,
}

impl WaitingThreads {
    /// Begins a thread for each of these vCPUs.
    pub fn start(ids: impl IntoIterator<Item = u8>) -> Result<Self, ThreadError> {
        Self::start_with(ids, || ())
    }

    /// As [`WaitingThreads::start`]; the first of them does `meanwhile` before it waits.
    pub fn start_with(ids: impl IntoIterator<Item = u8>, meanwhile: impl FnOnce() + Send + 'static) -> Result<Self, ThreadError> {
        let (tell, here) = mpsc::channel::<()>();
        let mut meanwhile = Some(meanwhile);
        let thread = |id| {
            let (start, work) = mpsc::channel::<Work>();
            let (tell, meanwhile) = (tell.clone(), meanwhile.take());
            let run = move || {
                // Nobody may wait.
                let _ = tell.send(());
                drop(tell);
                if let Some(meanwhile) = meanwhile {
                    meanwhile();
                }
                let Work { mut vcpu, counters, leave, errand, runner } = work.recv().ok()?;
                pin(&vcpu);
                runner.run(&mut vcpu, &leave, &errand, &counters);
                Some(vcpu)
            };
            let thread = thread::Builder::new().name(format!("vcpu{id}")).stack_size(STACK).spawn(run);
            Ok((thread.map_err(|source| ThreadError::Start { id, source })?, start))
        };
        let threads = ids.into_iter().map(thread).collect::<Result<_, _>>()?;
        Ok(Self { threads, here })
    }

    /// Waits until they have their names.
    pub fn wait(&self) {
        for _ in &self.threads {
            let _ = self.here.recv();
        }
    }
}

impl Drop for WaitingThreads {
    fn drop(&mut self) {
        for (thread, start) in self.threads.drain(..) {
            drop(start);
            drop(thread.join());
        }
    }
}

/// Dispatching an exit needs little; 255 threads shall not reserve more than they use.
const STACK: usize = 256 << 10;

/// Keeps this thread to the processors of the vCPU's node. Where that is not allowed, the guest is slower, not wrong.
fn pin(vcpu: &Vcpu) {
    let Some(cpus) = &vcpu.pinned else { return };
    let mut set = CpuSet::new();
    for cpu in cpus.iter().filter_map(|cpu| usize::try_from(cpu).ok()).filter(|cpu| *cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    if let Err(error) = sched_setaffinity(None, &set) {
        log::warn!("vCPU {} may run anywhere: this process may not use the host's CPUs {cpus} ({error})", vcpu.id);
    }
}

extern "C" fn ignore(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl Runner {
    fn run(&self, vcpu: &mut Vcpu, leave: &AtomicBool, errand: &Errand, counters: &Counters) {
        let stopped = || self.stop.load(Ordering::Acquire) || leave.load(Ordering::Acquire);
        loop {
            let held = self.gate.is_closed();
            let mut next = if held { self.settle(vcpu, counters) } else { Next::Rest };
            if matches!(next, Next::Rest) {
                self.gate.pass(|| stopped() || errand.waits());
                if stopped() {
                    return;
                }
                if errand.waits() {
                    // The gate may have closed after it was looked at.
                    next = if held { Next::Rest } else { self.settle(vcpu, counters) };
                    if matches!(next, Next::Rest) {
                        errand.run(vcpu);
                    }
                } else {
                    if held {
                        // The guest's own watchdogs do not count the time; guests without KVM's clock have nothing to be told.
                        let _ = vcpu.fd.kvmclock_ctrl();
                    }
                    next = self.step(vcpu, counters);
                }
            }
            let ended = match next {
                Next::Continue | Next::Rest => continue,
                Next::TripleFault => Ended::TripleFault,
                Next::Internal(error) => Ended::Internal { id: vcpu.id, error, at: instruction_pointer(&vcpu.fd) },
                Next::Broken { what, code } => Ended::Broken { id: vcpu.id, what, code, at: instruction_pointer(&vcpu.fd) },
            };
            (self.ended)(ended);
            return;
        }
    }

    /// Lets KVM finish the access that the vCPU left the guest for, without a further instruction: its registers are whole
    /// afterwards (linux: Documentation/virt/kvm/api.rst, `immediate_exit`).
    fn settle(&self, vcpu: &mut Vcpu, counters: &Counters) -> Next {
        vcpu.fd.set_kvm_immediate_exit(1);
        let next = loop {
            match self.step(vcpu, counters) {
                // An access of several parts.
                Next::Continue => {}
                next => break next,
            }
        };
        vcpu.fd.set_kvm_immediate_exit(0);
        next
    }

    /// Runs it to its next exit and answers that.
    fn step(&self, vcpu: &mut Vcpu, counters: &Counters) -> Next {
        match vcpu.fd.run() {
            Ok(VcpuExit::InternalError) => Next::Internal(InternalError::of(&mut vcpu.fd)),
            Ok(exit) => self.dispatch(exit, counters),
            // A signal, or a vCPU that is not started yet.
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => Next::Rest,
            Err(error) => Next::Broken { what: "KVM_RUN failed, errno", code: u64::try_from(error.errno()).unwrap_or(0) },
        }
    }

    fn dispatch(&self, exit: VcpuExit<'_>, counters: &Counters) -> Next {
        match exit {
            VcpuExit::IoIn(port, data) => {
                counters.count(if self.pci.is_config_port(port) { Count::ConfigRead } else { Count::PortRead });
                ports::read(&self.ports, &self.space, port, data);
            }
            VcpuExit::IoOut(port, data) => {
                counters.count(if self.pci.is_config_port(port) { Count::ConfigWrite } else { Count::PortWrite });
                ports::write(&self.ports, &self.space, port, data);
            }
            VcpuExit::MmioRead(at, data) => match self.pci.ecam(at, data.len()) {
                Some((segment, offset)) => {
                    counters.count(Count::ConfigRead);
                    self.pci.read_ecam(segment, offset, data);
                }
                None => {
                    counters.count(Count::MemoryRead);
                    self.space.read(at, data);
                }
            },
            VcpuExit::MmioWrite(at, data) => match self.pci.ecam(at, data.len()) {
                Some((segment, offset)) => {
                    counters.count(Count::ConfigWrite);
                    self.pci.write_ecam(segment, offset, data);
                }
                None => {
                    counters.count(Count::MemoryWrite);
                    self.space.write(at, data);
                }
            },
            VcpuExit::Shutdown => return Next::TripleFault,
            VcpuExit::FailEntry(code, _) => {
                return Next::Broken { what: "the processor refuses to enter the guest, reason", code };
            }
            VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::Hlt => {}
            _ => return Next::Broken { what: "an exit that no device of this machine causes", code: 0 },
        }
        Next::Continue
    }
}

enum Next {
    Continue,
    /// It left the guest for nothing that is to be answered.
    Rest,
    TripleFault,
    Internal(InternalError),
    Broken {
        what: &'static str,
        code: u64,
    },
}

fn instruction_pointer(fd: &VcpuFd) -> u64 {
    fd.get_regs().map_or(0, |regs| regs.rip)
}

/// vCPU threads that cannot be started.
#[derive(Debug, Error)]
pub enum ThreadError {
    /// The signal that interrupts KVM_RUN.
    #[error("cannot handle the signal that stops vCPUs")]
    Signal {
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// A thread.
    #[error("cannot start the thread of vCPU {id}: the limit of processes or memory is reached (ulimit -u)")]
    Start {
        /// vCPU.
        id: u8,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::AtomicU64;

    use arch::memory_map::Range;
    use devices::virtio::Memory;
    use pci::hierarchy::Hierarchy;
    use pci::seams::MsiPort;
    use pci::testing::FakeMsi;
    use pci::topology::Plan;
    use vm_device::DevicePio;
    use vm_device::bus::{PioAddress, PioAddressOffset, PioRange};
    use vm_device::device_manager::PioManager;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::effects::Mapper;
    use crate::kvm::{Slots, Vm};
    use crate::memory::{self, Backing};

    const PORT: u16 = 0x510;
    const CODE: u64 = 0x1000;
    /// Reads the port and counts: `in al, dx`, `inc ebx`, `jmp` back.
    const PROGRAM: [u8; 5] = [0xEC, 0x66, 0x43, 0xEB, 0xFB];

    #[derive(Default)]
    struct Reads(AtomicU64);

    impl DevicePio for Reads {
        fn pio_read(&self, _: PioAddress, _: PioAddressOffset, data: &mut [u8]) {
            self.0.fetch_add(1, Ordering::AcqRel);
            data.fill(0);
        }

        fn pio_write(&self, _: PioAddress, _: PioAddressOffset, _: &[u8]) {}
    }

    /// One vCPU that runs the program, and how often it has read.
    fn machine() -> (Threads, Arc<Reads>) {
        let vm = Vm::new().unwrap();
        let ram = memory::create(&[Range { start: 0, end: 1 << 20 }], Backing::default()).unwrap();
        ram.write_slice(&PROGRAM, GuestAddress(CODE)).unwrap();
        let mut slots = Slots::new(vm.fd(), vm.max_slots());
        for region in memory::regions(&ram) {
            // SAFETY: the address space keeps the memory until the vCPU's thread has ended.
            unsafe { slots.add(region.at, region.len, region.host) }.unwrap();
        }
        vm.create_interrupt_controller().unwrap();
        let fd = vm.create_vcpu(0).unwrap();
        let mut sregs = fd.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        fd.set_sregs(&sregs).unwrap();
        let mut regs = fd.get_regs().unwrap();
        (regs.rip, regs.rbx, regs.rdx) = (CODE, 0, PORT.into());
        fd.set_regs(&regs).unwrap();
        let reads = Arc::new(Reads::default());
        let mut ports = IoManager::new();
        ports.register_pio(PioRange::new(PioAddress(PORT), 1).unwrap(), Arc::clone(&reads) as _).unwrap();
        let msi: Arc<dyn MsiPort> = Arc::new(FakeMsi::default());
        let none = Hierarchy::build(&Plan::default(), &msi, |_| -> Result<_, Infallible> { unreachable!() }).unwrap();
        let space = AddressSpace::new(Memory::new(ram));
        let runner = Arc::new(Runner {
            ports,
            pci: Arc::new(PciBus::new(none, Mapper::new(slots, None, Arc::clone(&space)), Vec::new(), false)),
            space,
            stop: Arc::default(),
            gate: Arc::default(),
            ended: Box::new(|ended| panic!("{ended:?}")),
        });
        (Threads::start(vec![Vcpu { id: 0, fd, pinned: None }], None, &runner).unwrap(), reads)
    }

    #[test]
    #[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
    fn a_vcpu_is_written_down_between_two_instructions() {
        let (threads, reads) = machine();
        for _ in 0..1500 {
            let before = reads.0.load(Ordering::Acquire);
            while reads.0.load(Ordering::Acquire) < before + 3 {
                thread::yield_now();
            }
            threads.pause();
            let (tell, told) = mpsc::channel();
            threads.running[0].errand.give(Box::new(move |vcpu| tell.send(vcpu.fd.get_regs().unwrap()).unwrap()));
            threads.runner.gate.recall();
            let regs = told.recv_timeout(Duration::from_secs(20)).unwrap();
            let counted = regs.rbx + u64::from(regs.rip == CODE + 1);
            assert_eq!(counted & 0xFFFF_FFFF, reads.0.load(Ordering::Acquire), "at {:#x}", regs.rip);
            threads.resume();
        }
    }
}
