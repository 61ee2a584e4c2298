"""Runs the host: QEMU in software emulation, with an IOMMU and the scenario's devices, until it powers off or time is up."""

import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

# The most that the host may need to boot and to end, on a machine with other work to do.
HOST_SECONDS = 180

# The host's processor. Where it has fast string instructions Linux copies and clears memory by them, which the emulator carries
# out byte by byte.
PROCESSOR = "EPYC-Milan,-erms,-fsrm"

# A busy machine may not emulate the kernel's timer check in time: it would panic. Tests of ciphers take each boot half a second.
HOST_CMDLINE = "console=ttyS0 loglevel=5 panic=-1 no_timer_check cryptomgr.notests intel_iommu=on iommu=pt"

# What QEMU may need to end once it has closed its output.
ENDING_SECONDS = 10

# Set when all hosts are to end at once.
stopped = threading.Event()

# What a guest may need beyond its own limit, which the host enforces.
GUEST_GRACE_SECONDS = 15


@dataclass(frozen=True)
class Run:
    """What the host said, None or the reason why it was ended early, whether QEMU itself crashed, and the processor time it took."""

    said: str
    ended: str | None
    crashed: bool
    seconds: float


def run(scenario, kernel, initramfs, folder, logs, follow):
    """Boots the host and waits for its end.

    `folder` receives disk images; `logs` receives `host.log` (what was said), `console.log` (the host kernel's messages) and
    `qemu.log`.
    With `follow`, what is said is copied to standard output as it comes.
    """
    limit = HOST_SECONDS + sum(guest.seconds + GUEST_GRACE_SECONDS for guest in scenario.guests)
    command = qemu_command(scenario, kernel, initramfs, _disks(scenario, folder), logs / "console.log")
    with open(logs / "qemu.log", "wb") as errors:
        machine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        try:
            said, fault = _record(machine, time.monotonic() + limit, follow)
            if fault is None:
                _let_end(machine)
        finally:
            # Not `kill`, which would take the exit status of one that has ended, and with it the time that it took.
            os.kill(machine.pid, signal.SIGKILL)
            _, waited, used = os.wait4(machine.pid, 0)
            machine.returncode = status = os.waitstatus_to_exitcode(waited)
    (logs / "host.log").write_bytes(said)
    # Ended by a signal that is not ours: SIGKILL comes from here, when it has said all that it had to say.
    crashed = fault is None and b"@@lab done" not in said and status < 0 and status != -signal.SIGKILL
    if fault is None and b"@@lab done" not in said:
        how = "it was reset" if status == 0 else f"QEMU's exit status {status}"
        fault = f"the host ended before its work was done ({how})"
    elif fault is not None:
        fault = f"{fault} after {limit} s"
    return Run(said.decode(errors="replace").replace("\r", ""), fault, crashed, used.ru_utime + used.ru_stime)


def qemu_command(scenario, kernel, initramfs, disks, console):
    """The whole QEMU command line."""
    words = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", PROCESSOR, "-smp", str(scenario.cpus)]
    words += ["-m", scenario.memory, "-display", "none", "-nodefaults", "-no-user-config", "-no-reboot"]
    # The ELF image is entered at once (PVH), a bzImage unpacks itself first.
    words += ["-kernel", str(kernel.elf), "-initrd", str(initramfs), "-append", HOST_CMDLINE]
    words += ["-chardev", f"file,id=console,path={console}", "-serial", "chardev:console"]
    words += ["-chardev", "stdio,id=lab,signal=off", "-serial", "chardev:lab"]
    words += ["-device", "intel-iommu,intremap=on,caching-mode=on,aw-bits=48"]
    for name, path in disks.items():
        words += ["-drive", f"if=none,id={name},file={path},format=raw"]
    for flag, values in (("-object", scenario.objects), ("-numa", scenario.numa), ("-netdev", scenario.networks), ("-device", scenario.devices)):
        for value in values:
            words += [flag, value]
    return words


def _let_end(machine):
    """Gives a QEMU that says no more some seconds to end by itself, so that its exit status is its own."""
    ended = os.pidfd_open(machine.pid)
    select.select([ended], [], [], ENDING_SECONDS)
    os.close(ended)


def _disks(scenario, folder):
    """Sparse raw images, each with a first line that tells its name: name -> path."""
    paths = {}
    for name, mebibytes in scenario.disks.items():
        paths[name] = folder / f"{name}.img"
        with open(paths[name], "wb") as image:
            image.write(f"this is {name}\n".encode())
            image.truncate(mebibytes << 20)
    return paths


def _record(machine, deadline, follow):
    said = b""
    with selectors.DefaultSelector() as waiting:
        waiting.register(machine.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and not stopped.is_set():
            if not waiting.select(timeout=min(left, 1)):
                continue
            chunk = machine.stdout.read1(65536)
            if not chunk:
                return said, None
            said += chunk
            if follow:
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()
    return said, "the host did not end by itself"
