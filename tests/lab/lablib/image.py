"""What is in the host and in the guests? Builds their initramfs from busybox, the lab's programs, modules and scripts."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from .archive import Archive
from .modules import load_order
from .scenario import KERNELS

LAB = Path(__file__).resolve().parent.parent
ROOT = LAB.parent.parent

HOST_MODULES = ("kvm_amd", "vfio_pci", "vfio_iommu_type1")

# The guest's kernel command line: its messages from warnings upwards, a panic ends the machine, and no tests of ciphers.
GUEST_CMDLINE = "console=ttyS0 loglevel=4 panic=-1 cryptomgr.notests"


class ImageError(Exception):
    """Something that the images need is missing on this machine."""


def build(scenario, kernel, programs, banyan, folder):
    """Writes the host's initramfs, with the guests' inside it, to `folder`/host.cpio and returns its path."""
    guests = _guest_archive(scenario, kernel, programs)
    guests.write(folder / "guest.cpio")
    host = _base(programs)
    host.program(_tool("setpriv"), "bin/setpriv")
    host.file("init", (LAB / "rootfs/host-init").read_bytes(), 0o755)
    _add_modules(host, load_order(kernel, [*HOST_MODULES, *scenario.modules]), "lab/host.modules")
    host.file("lab/guest.cpio", (folder / "guest.cpio").read_bytes())
    host.file("lab/vmlinux", kernel.elf.read_bytes())
    if any(guest.kernel == "bzimage" for guest in scenario.guests):
        host.file("lab/vmlinuz", kernel.bzimage.read_bytes())
    if banyan is not None:
        host.program(banyan, "lab/banyan")
    for name in (*scenario.tools, *scenario.host_tools):
        host.program(_tool(name), f"lab/bin/{name}")
    for name in scenario.files:
        host.file(f"lab/{Path(name).name}", (ROOT / name).read_bytes())
    host.file("lab/plan", plan(scenario, with_guests=banyan is not None))
    for guest in scenario.guests:
        home = f"lab/guests/{guest.name}"
        host.file(f"{home}/before", guest.before)
        host.file(f"{home}/during", guest.during)
        host.file(f"{home}/after", guest.after)
        host.file(f"{home}/command", "exec " + shlex.join(command(guest)) + "\n")
    host.write(folder / "host.cpio")
    return folder / "host.cpio"


def command(guest):
    """Banyan's command line for this guest."""
    cmdline = " ".join(filter(None, [GUEST_CMDLINE, guest.cmdline, f"lab.guest={guest.name}"]))
    words = ["/lab/banyan", "run", "--cpus", f"boot={guest.cpus},max={max(guest.cpus, guest.max_cpus)}", "--memory", guest.memory, "--serial", "stdio"]
    words += ["--kernel", f"/lab/{KERNELS[guest.kernel]}", "--initramfs", "/lab/guest.cpio", "--cmdline", cmdline]
    return [*words, *guest.arguments]


def plan(scenario, with_guests):
    """The host's part of the work, in the words of rootfs/host-init."""
    lines = [f"sriov {device} {count}" for device, count in scenario.sriov.items()]
    lines += [f"bind {device}" for device in scenario.bind]
    lines += [scenario.script]
    if any(guest.same_tree for guest in scenario.guests):
        lines += ["lspci -tvn", "/lab/bin/pcitree " + shlex.join(scenario.bind)]
    if with_guests:
        lines += [f"guest {guest.name} {guest.seconds} {guest.user}" for guest in scenario.guests]
    return "\n".join(lines) + "\n"


def compile_programs(folder):
    """The lab's own C programs, compiled for host and guest: name -> file."""
    programs = {}
    for source in sorted((LAB / "programs").glob("*.c")):
        target = folder / source.stem
        flags = ["-O2", "-static", "-Wall", "-Wextra", "-Werror", "-std=gnu11"]
        done = subprocess.run(["gcc", *flags, "-o", str(target), str(source)], capture_output=True, text=True)
        if done.returncode:
            raise ImageError(f"{source.name} does not compile:\n{done.stderr}")
        programs[source.stem] = target
    return programs


def _guest_archive(scenario, kernel, programs):
    archive = _base(programs)
    archive.file("init", (LAB / "rootfs/guest-init").read_bytes(), 0o755)
    for name in scenario.tools:
        archive.program(_tool(name), f"lab/bin/{name}")
    for guest in scenario.guests:
        home = f"lab/guests/{guest.name}"
        archive.file(f"{home}/script", guest.script)
        _add_modules(archive, load_order(kernel, guest.modules), f"{home}/modules")
        if guest.same_tree:
            archive.file(f"{home}/tree", "")
    return archive


def _base(programs):
    """busybox with a link for each of its commands, lspci, lstopo, and the lab's programs."""
    archive = Archive()
    for folder in ("dev", "proc", "sys", "tmp", "lab"):
        archive.folder(folder)
    busybox = _tool("busybox")
    archive.program(busybox, "bin/busybox")
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    for name in set(listed.stdout.split()) - {"busybox", "lspci", "setpriv"}:
        archive.link(f"bin/{name}", "busybox")
    archive.program(_tool("lspci"), "bin/lspci")
    archive.program(_tool("lstopo-no-graphics"), "bin/lstopo")
    for name, path in programs.items():
        archive.program(path, f"lab/bin/{name}")
    return archive


def _add_modules(archive, modules, list_path):
    for name, data in modules:
        archive.file(f"lab/modules/{name}.ko", data)
    archive.file(list_path, "".join(f"{name}\n" for name, _ in modules))


def _tool(name):
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin:/usr/libexec:/usr/lib/qemu:{Path.home()}/.cargo/bin")
    if found is None and ".so" in name:
        # A library that a tool loads by itself.
        listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
        found = next((line.split()[-1] for line in listed.splitlines() if line.split()[:1] == [name]), None)
    if found is None:
        raise ImageError(f"{name} is missing: run tests/setup --lab")
    return found
