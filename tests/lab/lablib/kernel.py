"""Where does the stock kernel come from? Downloads one Debian kernel package, unpacks it and keeps it in the cache.

The package is never installed. Both levels of the lab boot the same kernel.
"""

import gzip
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SERIES = "6.12"


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel: its release, the compressed image, the ELF image inside it, and the folder of its modules."""

    release: str
    bzimage: Path
    elf: Path
    modules: Path


class KernelError(Exception):
    """The kernel could not be fetched or unpacked."""


def cache_folder():
    """The lab's cache, kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "banyan-lab"


def fetch():
    """The newest cached kernel, or one downloaded by apt where the cache has none."""
    cache = cache_folder()
    cached = sorted(cache.glob("kernel-*/elf"))
    if cached:
        return _kernel_in(cached[-1].parent)
    cache.mkdir(parents=True, exist_ok=True)
    package = _package()
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        scratch = Path(scratch)
        _try_thrice(["apt-get", "download", "-q", package], scratch)
        archive = next(scratch.glob("*.deb"), None)
        if archive is None:
            raise KernelError(f"apt-get download {package} left no package behind")
        tree = scratch / "tree"
        _run(["dpkg-deb", "-x", str(archive), str(tree)], scratch)
        release = package.removeprefix("linux-image-")
        image = tree / "boot" / f"vmlinuz-{release}"
        (tree / "elf").write_bytes(elf_inside(image.read_bytes()))
        target = cache / f"kernel-{release}"
        shutil.rmtree(target, ignore_errors=True)
        tree.rename(target)
    return _kernel_in(target)


def _kernel_in(folder):
    release = folder.name.removeprefix("kernel-")
    modules = next(p for p in (folder / "lib/modules" / release, folder / "usr/lib/modules" / release) if p.is_dir())
    return Kernel(release, folder / "boot" / f"vmlinuz-{release}", folder / "elf", modules / "kernel")


def _package():
    """The name of the kernel package of the wanted series, from apt's lists, which are updated first where needed."""
    for update_first in (False, True):
        if update_first:
            root = [] if os.geteuid() == 0 else ["sudo"]
            _try_thrice([*root, "apt-get", "-q", "update"], Path("/"))
        meta = subprocess.run(["apt-cache", "depends", f"linux-image-{SERIES}-amd64"], capture_output=True, text=True)
        found = re.search(rf"Depends: (linux-image-{re.escape(SERIES)}\S*-amd64)$", meta.stdout, re.MULTILINE)
        if found:
            return found[1]
        names = subprocess.run(["apt-cache", "pkgnames", f"linux-image-{SERIES}"], capture_output=True, text=True)
        plain = re.compile(rf"linux-image-{re.escape(SERIES)}\.(\d+)\+deb\d+-amd64")
        versions = [(int(match[1]), match[0]) for match in map(plain.fullmatch, names.stdout.split()) if match]
        if versions:
            return max(versions)[1]
    raise KernelError(f"apt knows no linux-image-{SERIES}*-amd64: check the package sources (Debian 12 or 13 have it)")


def elf_inside(image):
    """The ELF image that a bzImage carries compressed (linux: Documentation/arch/x86/boot.rst, payload_offset)."""
    if image[0x202:0x206] != b"HdrS":
        raise KernelError("the kernel image has no Linux setup header")
    setup_sectors = image[0x1F1] or 4
    start = (setup_sectors + 1) * 512 + int.from_bytes(image[0x248:0x24C], "little")
    length = int.from_bytes(image[0x24C:0x250], "little")
    # The payload ends with its unpacked size, four bytes that are not part of the compressed stream.
    payload, size = image[start : start + length - 4], int.from_bytes(image[start + length - 4 : start + length], "little")
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        unpacked = subprocess.run(["zstd", "-dcq"], input=payload, capture_output=True, check=True).stdout
    elif payload.startswith(b"\xfd7zXZ"):
        unpacked = lzma.decompress(payload)
    elif payload.startswith(b"\x1f\x8b"):
        unpacked = gzip.decompress(payload)
    else:
        raise KernelError(f"the kernel is compressed in an unknown way: its payload starts with {payload[:4].hex()}")
    if not unpacked.startswith(b"\x7fELF"):
        raise KernelError("the kernel's payload is no ELF image")
    if len(unpacked) != size:
        raise KernelError(f"the kernel's payload unpacks to {len(unpacked)} bytes, not to {size}")
    return unpacked


def _try_thrice(command, folder):
    for attempt in (1, 2, 3):
        try:
            return _run(command, folder)
        except KernelError:
            if attempt == 3:
                raise


def _run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise KernelError(f"{' '.join(command)} failed: {done.stderr.strip()}")
